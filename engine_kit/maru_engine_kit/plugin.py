"""Entry point ``sglang.srt.plugins``: what SGLang's hierarchical cache needs on the CPU.

- the ``transfer_kv_*`` operations, which SGLang imports only for CUDA, HIP and XPU;
- host pools without pinned memory, which needs a CUDA runtime, and on machines with less than some 12 GB free, which SGLang leaves to
  the system;
- ``torch.cpu.Stream.synchronize``, which torch does not have;
- the short convolution of models with states, which SGLang has as GPU kernels;
- sliding windows that ``torch_native`` attention reads where they are: SGLang 0.5.23 writes them by the indices of their own pool
  and reads them by those of the other;
- with ``MARU_KIT_NEW_ROWS=1`` attention of the new rows of a prompt alone (:mod:`maru_engine_kit.attention`);
- latent attention in the one form that ``torch_native`` attention computes rightly (:mod:`maru_engine_kit.latent`);
- page hashes in Python where SGLang's extension cannot be compiled.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

from maru_engine_kit.attention import extend_new_rows
from maru_engine_kit.attention import is_wanted as only_new_rows
from maru_engine_kit.convolution import causal_conv1d_fn, causal_conv1d_update
from maru_engine_kit.imports import has_accelerator
from maru_engine_kit.latent import absorb_on_import
from maru_engine_kit.prepare import add_environment_to_path, page_hash_module
from maru_engine_kit.transfer import OPERATIONS

logger = logging.getLogger(__name__)

_ATTENTION = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
#: The base of all host pools, and those that do not call it.
_POOLS = (
    "pool_host.base.HostKVCache",
    "pool_host.mamba.MambaPoolHost",
    "pool_host.dsa.DSAIndexerPoolHost",
    "pool_host.mha.MHATokenToKOnlyPoolHost",
    "memory_pool_host.DeepSeekV4PagedHostPool",
    "memory_pool_host.DeepSeekV4StateHostPool",
)
#: Bytes of the host's memory that no host pool takes; SGLang's own are 10 GiB. Several servers share a small machine here.
HOST_RESERVE_BYTES = 2 << 30
_POOL_MODULES = ("mha", "mla", "dsa", "mamba", "unified")


def register() -> None:
    """Called by SGLang once in each of its processes. Does nothing where there is an accelerator."""
    if has_accelerator():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for pool in _POOLS:
        HookRegistry.register(f"sglang.srt.mem_cache.{pool}.__init__", _without_pinning, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.mem_cache.cpp_utils.native_hash._load_native_hash_module", page_hash_module, HookType.AROUND
    )
    for step in ("extend", "decode"):
        HookRegistry.register(f"{_ATTENTION}._run_sdpa_forward_{step}", _by_their_own_indices, HookType.AROUND)
    if only_new_rows():
        HookRegistry.register(f"{_ATTENTION}._run_sdpa_forward_extend", extend_new_rows, HookType.AROUND)
    add_environment_to_path()
    leave_less_memory()
    provide_transfers()
    provide_stream_synchronize()
    provide_convolution()
    absorb_on_import()


def provide_convolution() -> None:
    """Put the plain-torch convolution where models with states take it from, before one of them is imported."""
    module = importlib.import_module("sglang.srt.layers.attention.mamba.causal_conv1d")
    for function in (causal_conv1d_fn, causal_conv1d_update):
        setattr(module, function.__name__, function)


def leave_less_memory() -> None:
    """Let host pools take all but :data:`HOST_RESERVE_BYTES`."""
    base: Any = importlib.import_module("sglang.srt.mem_cache.pool_host.base")
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = HOST_RESERVE_BYTES


def provide_transfers() -> None:
    """Give each host-pool module the transfer operations that it lacks."""
    for name in _POOL_MODULES:
        module = importlib.import_module(f"sglang.srt.mem_cache.pool_host.{name}")
        for operation, function in OPERATIONS.items():
            if not hasattr(module, operation):
                setattr(module, operation, function)


def provide_stream_synchronize() -> None:
    """Give ``torch.cpu.Stream`` the method; CPU streams have nothing to wait for."""
    import torch

    if not hasattr(torch.cpu.Stream, "synchronize"):
        torch.cpu.Stream.synchronize = lambda self: None


def _without_pinning(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    kwargs["pin_memory"] = False
    original(self, *args, **kwargs)


def _by_their_own_indices(
    original: Callable[..., Any],
    self: Any,
    query: Any,
    output: Any,
    k: Any,
    v: Any,
    req_to_token: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if self.use_sliding_window_kv_pool and kwargs.get("sliding_window_size") is not None:
        # Outside the window there is no index; what is read there is masked.
        req_to_token = self.token_to_kv_pool.translate_loc_from_full_to_swa(req_to_token).clamp(min=0)
    return original(self, query, output, k, v, req_to_token, *args, **kwargs)
