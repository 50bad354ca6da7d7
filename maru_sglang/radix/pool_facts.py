"""What a pool of KV pages looks like, as far as it decides whether two processes' pages are interchangeable.

:mod:`maru_sglang.radix.namespace` puts it into the namespace. A host pool tells it by :func:`host_pool_facts`; the direct path has
device pools and makes its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import torch


class PoolFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Layers are counted in the model; ``end_layer`` is the first one that this rank does not hold."""

    pool: str  # class of the pool
    stored: torch.dtype  # of its elements, as they lie in memory
    page_tokens: int
    layout: str  # order of the bytes in a page
    device_layout: str  # how SGLang arranges heads within a token: "nhd"
    heads: str  # heads of one shard: "kv8x128", "mla512+64=576"
    start_layer: int
    end_layer: int
    target_layers: int  # layers in this pool that belong to the served model
    draft_layers: int  # and to a draft model, in the same pool
    sides: str = ""  # everything that the pages of further pools depend on, "" where there are none


def host_pool_facts(pool: Any) -> PoolFacts:
    """Of SGLang's ``HostKVCache`` of the KV component."""
    return PoolFacts(
        pool=type(pool).__name__,
        stored=pool.dtype,
        page_tokens=int(pool.page_size),
        layout=str(pool.layout),
        device_layout=_device_layout(pool),
        heads=heads_of(pool),
        start_layer=int(pool.start_layer),
        end_layer=int(pool.end_layer),
        target_layers=(target := int(getattr(pool, "target_layer_num", pool.layer_num))),
        draft_layers=int(pool.layer_num) - target,
    )


def heads_of(pool: Any) -> str:
    """Heads of one shard, of a host or a device pool."""
    if hasattr(pool, "kv_lora_rank"):
        packed = "p" if getattr(pool, "dsa_kv_cache_store_fp8", False) else ""
        return f"mla{pool.kv_lora_rank}+{pool.qk_rope_head_dim}={pool.kv_cache_dim}{packed}"
    if not hasattr(pool, "head_dim"):
        return "none"  # the pool has indices only; all bytes are in pools beside it
    if pool.head_dim != pool.v_head_dim:
        return f"kv{pool.head_num}x{pool.head_dim}/{pool.v_head_dim}"
    return f"kv{pool.head_num}x{pool.head_dim}"


def _device_layout(pool: Any) -> str:
    infos = getattr(pool, "_buffer_infos", None)
    return str(infos[0].buffers.layout.value) if infos else "rows"
