"""Which of SGLang's host pools Maru knows, and what each tells of its memory.

A class is in :data:`KV_POOLS` or :data:`SIDE_POOLS` only after someone has read what it does with the bytes of a page; a
subclass is another class. What a pool tells twice (addresses by ``get_page_buffer_meta``, and the tensors of which it makes
a flat page) is compared by :class:`maru_sglang.storage.pages.HostPages`.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool, DeepSeekV4StateHostPool, LogicalHostPool
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import (
    AsymmetricMHATokenToKVPoolHost,
    MHATokenToKOnlyPoolHost,
    MHATokenToKVPoolHost,
)
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.qsa import QSAIndexerPoolHost

from maru_core.errors import ConfigError

I64Array = npt.NDArray[np.int64]

#: Exactly these classes: what a subclass does to the bytes is not known until someone has read it.
KV_POOLS: Final = (MHATokenToKVPoolHost, AsymmetricMHATokenToKVPoolHost, MLATokenToKVPoolHost)
SIDE_POOLS: Final = (
    *KV_POOLS,
    MambaPoolHost,
    DSAIndexerPoolHost,
    MHATokenToKOnlyPoolHost,
    QSAIndexerPoolHost,
    DeepSeekV4PagedHostPool,
    DeepSeekV4StateHostPool,
)
#: Has no memory: only its indices count, and all bytes are in pools beside it.
LOGICAL_POOL: Final = LogicalHostPool
#: Of those, the ones whose elements are of heads that tensor-parallel ranks divide between them.
HEAD_POOLS: Final = (MHATokenToKVPoolHost, AsymmetricMHATokenToKVPoolHost)
KNOWN_LAYOUTS: Final = ("layer_first", "page_first", "page_first_direct", "page_head")

_ROW_POOLS: Final = (QSAIndexerPoolHost, DeepSeekV4PagedHostPool, DeepSeekV4StateHostPool)


class Region:
    """What one host pool tells of its memory."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        kind = type(pool)
        self.flat = kind in KV_POOLS
        #: Whether the order of a flat page is that of the addresses, and not the order in which they are told.
        self.by_address = kind in (MHATokenToKVPoolHost, MLATokenToKVPoolHost)
        self._told_by_views = (
            (kind in (DSAIndexerPoolHost, MHATokenToKOnlyPoolHost) and not str(pool.layout).startswith("page_first"))
            # SGLang's call does not tell where the side states of a slot are.
            or (kind is MambaPoolHost and len(pool.slot_state_buffers) > 0)
        )

    def buffers(self) -> tuple[torch.Tensor, ...]:
        pool = self._pool
        if type(pool) is DSAIndexerPoolHost:
            buffer = pool.index_k_with_scale_buffer
        elif type(pool) is MHATokenToKOnlyPoolHost:
            buffer = pool.k_buffer
        else:
            buffer = pool.kv_buffer
        if buffer is None:
            return ()
        return tuple(buffer) if isinstance(buffer, tuple | list) else (buffer,)

    def holds(self, buffers: tuple[torch.Tensor, ...]) -> bool:
        """Whether the pool still has these tensors, and no others."""
        present = self.buffers()
        return len(present) == len(buffers) and all(a is b for a, b in zip(present, buffers, strict=True))

    def pieces(self, start: int) -> tuple[I64Array, I64Array]:
        """Addresses and sizes of the pieces of the page whose first index is ``start``, as SGLang tells them."""
        if self._told_by_views:
            return self._of_views(start)
        addresses, sizes = self._pool.get_page_buffer_meta(torch.arange(start, start + int(self._pool.page_size)))
        return np.array(addresses, np.int64), np.array(sizes, np.int64)

    def told_otherwise(self, start: int) -> tuple[I64Array, I64Array] | None:
        """The same memory in the order of a flat page; None where SGLang has no flat page (K and V of different widths)."""
        return None if type(self._pool) is AsymmetricMHATokenToKVPoolHost else self._of_views(start)

    def page_bytes(self) -> int:
        """Bytes of a page by the pool's own account."""
        pool = self._pool
        if type(pool) is DeepSeekV4StateHostPool:
            return int(pool.layer_num * pool.state_page_bytes)
        if type(pool) in _ROW_POOLS:
            return int(pool.layer_num * pool.item_bytes)
        return int(pool.get_size_per_token()) * int(pool.page_size)

    def _of_views(self, start: int) -> tuple[I64Array, I64Array]:
        addresses: list[I64Array] = []
        sizes: list[I64Array] = []
        for view in self._views(start):
            if view.numel():
                for found, kept in zip(runs(view), (addresses, sizes), strict=True):
                    kept.append(found)
        return np.concatenate(addresses), np.concatenate(sizes)

    def _views(self, start: int) -> list[torch.Tensor]:
        """The tensors that ``get_data_page`` joins into a flat page, without the copy that it makes for some pools."""
        pool = self._pool
        if type(pool) is MambaPoolHost:
            return list(pool._iter_page_tensors(start))
        if type(pool) in _ROW_POOLS:
            row = start // int(pool.page_size)
            return [layer[row] for layer in pool.kv_buffer] if pool.layout == "layer_first" else [pool.kv_buffer[row]]
        return [pool.get_data_page(start, flat=False)]


def side_facts(name: str, pool: Any, object_bytes: int) -> str:
    """Everything that the pages of a side pool depend on, in words: its part of the namespace."""
    from maru_core.canonical import dtype_name
    from maru_sglang.radix.pool_facts import heads_of

    kind = type(pool)
    words = [kind.__name__, str(pool.layout), dtype_name(pool.dtype), f"p{int(pool.page_size)}", f"{object_bytes}B"]
    if kind is MambaPoolHost:
        shapes = "+".join("x".join(str(side) for side in shape) for shape in pool.conv_state_shapes)
        temporal = "x".join(str(side) for side in pool.temporal_state_shape)
        words += [f"{pool.num_mamba_layers}l", f"conv{shapes}", f"{dtype_name(pool.temporal_dtype)}:{temporal}"]
        words += [
            f"slot{dtype_name(state.dtype)}:{'x'.join(str(side) for side in state.shape[1:])}"
            for state in pool.slot_state_buffers
        ]
    else:
        drafts = int(pool.layer_num) - int(getattr(pool, "target_layer_num", pool.layer_num))
        words.append(f"{int(pool.layer_num) - drafts}l" + (f"+{drafts}" if drafts else ""))
        if kind in KV_POOLS:
            words.append(heads_of(pool))
        elif kind is DeepSeekV4StateHostPool:
            words.append(f"ring{pool.ring_size}x{pool.state_page_bytes}")
        elif kind in _ROW_POOLS:
            words.append(f"row{pool.item_bytes}")
        elif kind is DSAIndexerPoolHost:
            words.append(f"{dtype_name(pool.indexer_dtype)}:{pool.indexer_page_stride_size}")
        else:
            words.append(f"k{pool.head_num}x{pool.head_dim}")
    return f"{name}={'/'.join(words)}"


def refuse_unknown(pool: Any, known: tuple[type, ...], name: str) -> None:
    """
    Raises:
        ConfigError: a class, layout or variant that nobody has read.
    """
    kind = type(pool)
    if kind not in known:
        raise ConfigError(
            f"Maru does not know the host pool {kind.__module__}.{kind.__name__} of {name!r}: this release stores "
            f"{', '.join(one.__name__ for one in known)} only. Use a model without it, and no "
            "--enable-unified-memory, HiSparse, KV sharding or FP4/MXFP8 KV"
        )
    if pool.layout not in KNOWN_LAYOUTS:
        raise ConfigError(
            f"--hicache-mem-layout {pool.layout} is not one that Maru knows: use {', '.join(KNOWN_LAYOUTS)}"
        )
    if pool.storage_format_tag is not None:
        raise ConfigError(f"the host pool has a page format of its own ({pool.storage_format_tag}): not supported")
    if pool.dcp_size != 1:
        raise ConfigError(f"decode context parallelism (--dcp-size {pool.dcp_size}) is not supported yet: use 1")
    if getattr(pool, "_is_dummy", False) or (kind is MLATokenToKVPoolHost and pool.kv_buffer is None):
        raise ConfigError(
            f"this rank's {kind.__name__} of {name!r} has no memory (host deduplication): not supported, turn it off"
        )
    if kind is MLATokenToKVPoolHost:
        if getattr(pool, "_layer_shard_enabled", False):
            raise ConfigError("layer-sharded MLA pools are not supported yet: turn layer sharding off")
        if getattr(pool, "_native_buffers", None) is not None:
            raise ConfigError("MLA pools with split K and V buffers are not supported: use a plain MLA pool")


def runs(view: torch.Tensor) -> tuple[I64Array, I64Array]:
    """Addresses and bytes of the stretches of memory that ``view`` covers, in the order of its elements."""
    item = view.element_size()
    # The stride of a dimension of size 1 says nothing.
    shape = [size for size in view.shape if size != 1]
    strides = [stride for size, stride in zip(view.shape, view.stride(), strict=True) if size != 1]
    run = 1
    while shape and strides[-1] == run:
        run *= shape.pop()
        strides.pop()
    offsets = np.zeros(1, np.int64)
    for size, stride in zip(shape, strides, strict=True):
        offsets = (offsets[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    assert math.prod(shape) * run == view.numel()
    return view.data_ptr() + offsets * item, np.full(len(offsets), run * item, np.int64)
