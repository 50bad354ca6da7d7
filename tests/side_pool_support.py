"""Real host pools beside the KV pool, on the CPU, as SGLang's assembler builds them over a device pool's buffers.

The device pools are only where the buffers come from: what is tested is what the host pools do with a page's bytes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from sglang_support import make_mha, make_mla

PAGE = 4


def make_mamba(
    layout: str = "page_first", *, slots: int = 24, slot_states: bool = False, fill: int | None = None
) -> Any:
    """States of three layers; with ``slot_states`` one more tensor that belongs to a slot and not to a layer."""
    import torch
    from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    layers = 3
    info = MambaStateBufferInfo(
        temporal=torch.zeros(layers, slots, 2, 4, 8, dtype=torch.float32),
        conv=(torch.zeros(layers, slots, 6, 3, dtype=torch.bfloat16), torch.zeros(layers, slots, 2, 3, dtype=torch.bfloat16)),
        extra_checkpoint_buffers=(torch.zeros(slots, 5, dtype=torch.float32),) if slot_states else (),
    )  # fmt: skip
    return filled_all(MambaPoolHost(info, 1.0, 0, device_capacity=slots, pin_memory=False, layout=layout), fill)


def make_indexer(layout: str = "page_first", *, anchor: Any = None, fill: int | None = None) -> Any:
    """Index keys of sparse attention (DSA), of two of three layers."""
    import torch
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
    from sglang.srt.mem_cache.pool_host.host_pool_decl import HostPoolDecl, HostPoolStorageInfo

    anchor = anchor or make_mla(layout, page=PAGE)
    per_token = 12
    device = SimpleNamespace(
        store_dtype=torch.uint8, start_layer=0, end_layer=3, layer_num=3, device="cpu", layer_shard_enabled=False,
        index_k_with_scale_buffer=[torch.zeros(16, PAGE * per_token, dtype=torch.uint8) for _ in range(3)],
    )  # fmt: skip
    decl = HostPoolDecl(
        pool_name=PoolName.INDEXER, device_pool=device, indices_from_pool=PoolName.KV, layout_source=PoolName.KV,
        storage_info=HostPoolStorageInfo(bytes_per_token_per_layer=per_token, dtype=torch.uint8), host_pool_builder=None,
        owned_device_layers=(0, 2),
    )  # fmt: skip
    return filled_all(DSAIndexerPoolHost(decl, anchor, pin_memory=False), fill)


def make_k_only(layout: str = "page_first", *, anchor: Any = None, fill: int | None = None) -> Any:
    """Index keys without values (MiniMax sparse attention)."""
    import torch
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKOnlyPoolHost

    anchor = anchor or make_mha(layout, page=PAGE)
    k = [torch.zeros(64, 1, 8, dtype=torch.bfloat16) for _ in range(2)]
    device = SimpleNamespace(
        store_dtype=torch.bfloat16, start_layer=0, end_layer=2, head_num=1, head_dim=8, layer_num=2, k_buffer=k, device="cpu"
    )  # fmt: skip
    return filled_all(MHATokenToKOnlyPoolHost(device, anchor, layout, pin_memory=False), fill)


def make_rows(
    name: str = "deepseek_v4_c4",
    layout: str = "page_first",
    *,
    item: int = 37,
    pages: int = 24,
    fill: int | None = None,
) -> Any:
    """A compressed region of DeepSeek-V4: one row of bytes a page and layer, of a size that its tokens do not divide."""
    import torch
    from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool

    pool = DeepSeekV4PagedHostPool(
        name, [torch.zeros(16, item, dtype=torch.uint8) for _ in range(2)], item, pages, PAGE, layout, pin_memory=False
    )
    return filled_all(pool, fill)


def make_ring(
    name: str = "deepseek_v4_c4_state", layout: str = "page_first", *, pages: int = 24, fill: int | None = None
) -> Any:
    """States of a compressed region of DeepSeek-V4, a ring of slots for each page of its window."""
    import torch
    from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4StateHostPool

    states = [
        SimpleNamespace(ring_size=3, kv_score_buffer=SimpleNamespace(kv_score=torch.zeros(48, 5, dtype=torch.float32)))
        for _ in range(2)
    ]
    return filled_all(DeepSeekV4StateHostPool(name, states, pages, PAGE, layout, pin_memory=False), fill)


def make_qsa(layout: str = "page_first", *, anchor: Any = None, fill: int | None = None) -> Any:
    """Compressed index keys (Qwen sparse attention): two tokens of a page share one."""
    import torch
    from sglang.srt.mem_cache.pool_host.qsa import QSAIndexerPoolHost

    anchor = anchor or make_mha(layout, page=PAGE)
    buffers = [torch.zeros(32, 1, 6, dtype=torch.bfloat16) for _ in range(2)]
    device = SimpleNamespace(qsa_compress_ratio=2, qsa_compressed_k_buffer_pool=buffers)
    return filled_all(QSAIndexerPoolHost(device, anchor), fill)


def make_logical(*, tokens: int = 96) -> Any:
    """The KV pool of DeepSeek-V4: indices without memory."""
    from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

    return LogicalHostPool(tokens, PAGE, "page_first")


def filled_all(pool: Any, seed: int | None) -> Any:
    """The pool, with random bytes in every buffer if ``seed`` is given, else zeros."""
    import torch

    from maru_sglang.storage.regions import Region

    for index, buffer in enumerate(Region(pool).buffers()):
        raw = buffer.view(-1).view(torch.uint8).numpy()
        raw[:] = np.random.default_rng((seed, index)).integers(0, 256, raw.size, np.uint8) if seed is not None else 0
    return pool


def flat_bytes(pool: Any, page: int) -> bytes:
    """The bytes of a page as SGLang itself gathers them (``get_data_page``)."""
    import torch

    return bytes(pool.get_data_page(page * pool.page_size, flat=True).contiguous().view(torch.uint8).numpy().tobytes())


__all__ = [
    "PAGE", "filled_all", "flat_bytes", "make_indexer", "make_k_only", "make_logical", "make_mamba", "make_qsa",
    "make_ring", "make_rows",
]  # fmt: skip
