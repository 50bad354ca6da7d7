"""The plugin's part for the direct linker: what it needs of SGLang, and what it does there, only ever for the backend ``maru``.

- ``--unified-cache-external-linker-backend maru`` alone turns the linker on, and its config is checked at the start;
- the linker is built by :class:`maru_sglang.radix.linker.MaruLinker`; SGLang's own function knows its own names only;
- an offload is told the page before its node: Maru keeps a tree of pages, and SGLang's call has the node's own hashes only;
- a batch of loads of which some failed costs only the requests whose pages did not land, not all of the batch.

Like :mod:`maru_sglang.plugin` this imports neither torch nor SGLang before it is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

logger = logging.getLogger(__name__)

BACKEND: Final = "maru"

#: The first step of SGLang's own that looks at caches: what it and all later ones read is decided before it.
FIRST_STEP: Final = "sglang.srt.arg_groups.hicache_hook.handle_hicache_ratio_default"
_CREATE: Final = "sglang.srt.mem_cache.unified_cache.linker_factory.create_unified_cache_linker"
_WRAPPER: Final = "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper"
_OFFLOAD: Final = f"{_WRAPPER}._offload_node"
_FINISH: Final = f"{_WRAPPER}.finish_loads"
_ASSEMBLER: Final = "sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler"
_STACKS: Final = "sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler"

#: What is used of SGLang besides :data:`maru_sglang.plugin.SEAMS`: dotted name, and the parameters that it must have.
SEAMS: Final[dict[str, tuple[str, ...]]] = {
    FIRST_STEP: ("server_args",),
    "sglang.srt.arg_groups.overrides.declare_resolution": ("server_args", "source"),
    _CREATE: ("server_args", "params", "backend", "config", "components", "forward_stream"),
    _OFFLOAD: ("node_id", "transfers"),
    _FINISH: (),
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache._all_reduce_attn_groups": ("tensor", "op"),
    "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface.UnifiedTreeCoreInterface.snapshot_buffer_backup": (
        "node_id",
        "pass_prefix_keys",
    ),
    f"{_ASSEMBLER}.DevicePoolGroup": ("entries", "num_layers", "page_size", "rank_replicated"),
    f"{_ASSEMBLER}.DevicePoolGroup.resolve_transfers": ("transfers", "allow_partial", "allow_missing_kv"),
    f"{_ASSEMBLER}.DevicePoolEntry": (
        "name",
        "indices_from_pool",
        "device_pool",
        "components",
        "layer_mapping",
        "page_size",
        "rows_are_pages",
    ),
    f"{_ASSEMBLER}.DevicePoolEntry.prepare_locations": ("indices",),
    f"{_ASSEMBLER}._mamba_device_pool_entry": ("req_to_token_pool", "start_layer"),
    f"{_ASSEMBLER}.resolve_hybrid_device_pool_group": ("kvcache", "page_size", "params", "components"),
    f"{_STACKS}._swa_layer_mappings": ("kvcache",),
    f"{_STACKS}._stage_local_layer_mapping": ("layer_mapping", "start_layer"),
}

_said = False


def register(register_hook: Callable[..., None], kinds: Any) -> None:
    """Hook into SGLang; all of :data:`SEAMS` is there."""
    register_hook(_CREATE, _create, kinds.AROUND)
    register_hook(_OFFLOAD, _tell_parent, kinds.AROUND)
    register_hook(_FINISH, _only_what_failed, kinds.AROUND)


def check_arguments(view: Any) -> None:
    """Refuse what cannot work.

    Raises:
        ConfigError: an unusable config.
        ValueError: arguments that contradict each other.
    """
    from maru_sglang.storage.config import parse_linker_config

    option = f"--unified-cache-external-linker-backend {BACKEND}"
    if view.enable_lmcache or view.enable_flexkv:
        other = "--enable-lmcache" if view.enable_lmcache else "--enable-flexkv"
        raise ValueError(f"{option} and {other} both want to be the cache beyond the GPU: leave one of them out")
    if view.enable_unified_memory:
        raise ValueError(f"{option} does not know the pools of --enable-unified-memory: leave one of the two out")
    config = view.unified_cache_external_linker_config
    if config is not None and not isinstance(config, dict):
        raise ValueError(
            f"--unified-cache-external-linker-config is a {type(config).__name__}: give an object such as {{}}"
        )
    parse_linker_config(config)


def linker_of(updater: Any) -> Any:
    """This process's linker, found from SGLang's weight updater; None without one of ours."""
    wrapper = getattr(getattr(getattr(updater, "scheduler", None), "tree_cache", None), "linker", None)
    return _ours(wrapper)


def _ours(wrapper: Any) -> Any:
    linker = getattr(wrapper, "cache_linker", None)
    return linker if hasattr(linker, "weights_changed") else None


def _create(
    original: Callable[..., Any],
    server_args: Any,
    params: Any,
    *,
    backend: str,
    config: dict[str, Any] | None,
    **kwargs: Any,
) -> Any:
    if backend != BACKEND:
        return original(server_args, params, backend=backend, config=config, **kwargs)
    from maru_sglang.radix.linker import MaruLinker

    return MaruLinker(server_args, params, extra_config=config, **kwargs)


def _tell_parent(original: Callable[..., Any], self: Any, node_id: Any, transfers: Any) -> Any:
    linker = _ours(self)
    if linker is not None:
        linker.parent = parent_of_node(self.cache.tree_core, node_id)
    return original(self, node_id, transfers)


def parent_of_node(tree_core: Any, node_id: Any) -> bytes | None:
    """Hash of the page before a node's first one; None where it cannot be told, as of a node whose parent was never hashed.

    Both of SGLang's tree cores have this snapshot, and it tells the root from a node without hashes."""
    from maru_core.protocol import ROOT
    from maru_sglang.radix.chain import ChainError, pack_keys

    try:
        told = tree_core.snapshot_buffer_backup(node_id, False)
        if told is None:
            return None
        if told.parent_is_root:
            return ROOT
        return pack_keys([told.parent_last_hash]) if told.parent_last_hash else None
    except ChainError:
        return None
    except Exception:
        global _said
        if not _said:
            _said = True
            logger.exception("the parent of a node could not be told: the node is not stored (said once)")
        return None


def _only_what_failed(original: Callable[..., list[str]], self: Any) -> list[str]:
    """After a batch of which something did not land: which requests, on any rank.

    SGLang's own verdict is one for the batch, and the same on all ranks; so all of them come here, or none."""
    linker = _ours(self)
    rids = list(self.inflight_load_rids)
    failed = original(self)
    if linker is None or not failed:
        return failed
    import torch

    landed = torch.tensor([int(one) for one in linker.landed(rids)], dtype=torch.int)
    self.cache._all_reduce_attn_groups(landed, torch.distributed.ReduceOp.MIN)
    lost = [rid for rid, good in zip(rids, landed.tolist(), strict=True) if not good]
    if lost:
        logger.error("of that batch %d request(s) are aborted: %s", len(lost), lost)
    # Some rank failed, yet every request is said to have landed: that cannot be, so none of them is believed.
    return lost or failed
