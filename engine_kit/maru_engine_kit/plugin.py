"""Entry point ``sglang.srt.plugins``: what SGLang's hierarchical cache needs on the CPU.

- the ``transfer_kv_*`` operations, which SGLang imports only for CUDA, HIP and XPU;
- host pools without pinned memory, which needs a CUDA runtime;
- ``torch.cpu.Stream.synchronize``, which torch does not have;
- page hashes in Python where SGLang's extension cannot be compiled.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

from maru_engine_kit.imports import has_accelerator
from maru_engine_kit.prepare import add_environment_to_path, page_hash_module
from maru_engine_kit.transfer import OPERATIONS

logger = logging.getLogger(__name__)

_POOL_MODULES = ("mha", "mla", "dsa", "mamba", "unified")


def register() -> None:
    """Called by SGLang once in each of its processes. Does nothing where there is an accelerator."""
    if has_accelerator():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.mem_cache.pool_host.base.HostKVCache.__init__", _without_pinning, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.mem_cache.cpp_utils.native_hash._load_native_hash_module", page_hash_module, HookType.AROUND
    )
    add_environment_to_path()
    provide_transfers()
    provide_stream_synchronize()


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
