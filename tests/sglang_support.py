"""What the tests of Maru inside SGLang share: real host pools on the CPU, keys, a model directory. No fakes.

Imports neither torch nor SGLang before it is asked for something that needs them.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from model_files import LAYERS


def keys_of(count: int, seed: int = 0) -> list[str]:
    """Page keys of one chain, as SGLang writes them."""
    return [hashlib.sha256(f"{seed}/{index}".encode()).hexdigest() for index in range(count)]


def make_mha(
    layout: str = "page_first",
    *,
    dtype: Any = None,
    layers: int = LAYERS,
    heads: int = 2,
    dim: int = 8,
    v_dim: int | None = None,
    page: int = 4,
    tokens: int = 64,
    start: int = 0,
    fill: int | None = None,
) -> Any:
    """A real MHA host pool, over device buffers on the CPU, filled with random bytes if ``fill`` is a seed."""
    import torch
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
    from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost, MHATokenToKVPoolHost

    dtype = dtype or torch.bfloat16
    v_dim = v_dim or dim
    k = tuple(torch.zeros(tokens, heads, dim, dtype=dtype) for _ in range(layers))
    v = tuple(torch.zeros(tokens, heads, v_dim, dtype=dtype) for _ in range(layers))
    info = MHABufferInfo(
        buffers=KVBuffers(k=k, v=v, k_data_ptrs=_pointers(k), v_data_ptrs=_pointers(v), layout=KVBufferLayout.NHD),
        page_size=page, head_num=heads, head_dim=dim, v_head_dim=v_dim, dtype=dtype, device=torch.device("cpu"),
    )  # fmt: skip
    kind = MHATokenToKVPoolHost if v_dim == dim else AsymmetricMHATokenToKVPoolHost
    pool = kind(
        info, 2.0, 0, page, layout, pin_memory=False, device_capacity_tokens=tokens, start_layer=start, end_layer=start + layers
    )  # fmt: skip
    return filled(pool, fill)


def make_mla(
    layout: str = "page_first", *, dtype: Any = None, layers: int = LAYERS, rank: int = 16, rope: int = 8, page: int = 4,
    tokens: int = 64, fill: int | None = None,
) -> Any:  # fmt: skip
    """A real MLA host pool."""
    import torch
    from sglang.srt.mem_cache.device_pool_info import MLABufferInfo
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    dtype = dtype or torch.bfloat16
    rows = tuple(torch.zeros(tokens, 1, rank + rope, dtype=dtype) for _ in range(layers))
    info = MLABufferInfo(
        buffers=rows, data_ptrs=_pointers(rows), layer_indices=tuple(range(layers)), device_layer_num=layers, page_size=page,
        kv_lora_rank=rank, qk_rope_head_dim=rope, kv_cache_dim=rank + rope, dtype=dtype, device=torch.device("cpu"),
    )  # fmt: skip
    pool = MLATokenToKVPoolHost(
        info, 2.0, 0, page, layout, pin_memory=False, device_capacity_tokens=tokens, start_layer=0, end_layer=layers,
        target_layer_num=layers,
    )  # fmt: skip
    return filled(pool, fill)


def _pointers(tensors: tuple[Any, ...]) -> Any:
    import torch

    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def filled(pool: Any, seed: int | None) -> Any:
    """The pool, with random bytes in it if ``seed`` is given, else zeros."""
    import torch

    buffers = pool.kv_buffer if isinstance(pool.kv_buffer, tuple) else (pool.kv_buffer,)
    for index, buffer in enumerate(buffers):
        raw = buffer.view(-1).view(torch.uint8).numpy()
        raw[:] = np.random.default_rng((seed, index)).integers(0, 256, raw.size, np.uint8) if seed is not None else 0
    return pool


def indices_of(pool: Any, pages: list[int]) -> Any:
    """Host indices of the given pages, in that order."""
    import torch

    size = pool.page_size
    return (
        torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages])
        if pages
        else torch.zeros(0, dtype=torch.int64)
    )


def page_bytes(pool: Any, page: int) -> bytes:
    """The bytes of a page, as SGLang itself reads them."""
    import torch

    start = page * pool.page_size
    if isinstance(pool.kv_buffer, tuple):  # no flat page where K and V have different widths
        at = slice(start, start + pool.page_size) if pool.layout == "page_first" else slice(page, page + 1)
        return b"".join(side[at].contiguous().view(-1).view(torch.uint8).numpy().tobytes() for side in pool.kv_buffer)
    return bytes(pool.get_data_page(start, flat=True).contiguous().view(torch.uint8).numpy().tobytes())


def storage_config(**changes: Any) -> Any:
    """A HiCacheStorageConfig of a single rank, with changes; ``extra_config`` as SGLang hands it on."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    fields = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": False,
        "enable_storage_metrics": False, "is_page_first_layout": False, "model_name": "served", "extra_config": {},
    } | changes  # fmt: skip
    return HiCacheStorageConfig(**fields)


def chain(prefix: list[str] | None) -> Any:
    """The extra info of a call whose pages come after ``prefix``."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

    return HiCacheStorageExtraInfo(prefix_keys=prefix)
