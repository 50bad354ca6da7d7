"""Where the bytes of SGLang's host pages lie, as fragments that a mover copies to and from directly.

SGLang tells where a page is by ``HostKVCache.get_page_buffer_meta``, with a Python loop over pages and layers. For every
supported pool the address of each piece of a page is a straight line in the page's first index, so the lines are learnt
once from that call and checked against it on other pages: a pool for which they do not hold is refused at start. After
that a batch of pages costs a few numpy operations.

An object is the page's pieces in the order of ``HostKVCache.get_data_page(flat=True)`` (K of all layers, then V), so the
zero-copy calls and SGLang's flat-tensor calls read and write the same bytes.
"""

from __future__ import annotations

import logging
import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost, MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from maru_core.errors import ConfigError
from maru_core.mover import Fragments

log = logging.getLogger("maru.sglang")

I64Array = npt.NDArray[np.int64]

#: Exactly these classes: what a subclass does to the bytes is not known until someone has read it.
KNOWN_POOLS: Final = (MHATokenToKVPoolHost, AsymmetricMHATokenToKVPoolHost, MLATokenToKVPoolHost)
KNOWN_LAYOUTS: Final = ("layer_first", "page_first", "page_first_direct", "page_head")


class HostPages:
    """The pages of one host pool. Immutable; safe to use from several threads.

    Attributes:
        page_tokens: tokens (host indices) per page.
        object_bytes: bytes of one page's object.
        flat: whether SGLang's flat-tensor calls work with this pool.
    """

    def __init__(self, pool: Any) -> None:
        """Learn the pool's geometry and check it.

        Raises:
            ConfigError: a pool, layout or geometry that this release does not know.
        """
        _refuse_unknown(pool)
        self._pool = pool
        # The tensors are kept, so that the memory stays mapped under a copy that is under way while SGLang shuts down.
        self._kv_buffer = pool.kv_buffer
        self._buffers = _buffers(pool)
        self.page_tokens = int(pool.page_size)
        self._tokens = int(pool.size)
        self._within = np.arange(self.page_tokens, dtype=np.int64)
        self._base, self._stride, sizes = self._learn()
        self.object_bytes = int(sizes.sum())
        self._sizes = sizes.astype(np.uint64)
        self.flat = self._check_flat_order(sizes)

    @property
    def pool(self) -> Any:
        return self._pool

    def fragments(self, host_indices: torch.Tensor, pages: int) -> Fragments | None:
        """Fragments of ``pages`` pages at ``host_indices`` (``pages * page_tokens`` of them).

        None where the indices are not whole pages of this pool: nothing may be copied then.
        """
        if self._pool.kv_buffer is not self._kv_buffer:
            return None  # SGLang gave the buffers up (destroy), or made new ones
        if host_indices.numel() != pages * self.page_tokens:
            return None
        indices = host_indices.detach().cpu().numpy().astype(np.int64, copy=False).reshape(pages, self.page_tokens)
        starts = indices[:, :1]
        if pages and (
            not (indices == starts + self._within).all()
            or (starts % self.page_tokens).any()
            or starts.min() < 0
            or starts.max() > self._tokens - self.page_tokens
        ):
            return None
        return Fragments(addresses=(self._base + starts * self._stride).astype(np.uint64), sizes=self._sizes)

    # ------------------------------------------------------------ start-up checks

    def _meta(self, start: int) -> tuple[I64Array, I64Array]:
        """Addresses and sizes of the pieces of the page that starts at token ``start``, as SGLang tells them."""
        addresses, sizes = self._pool.get_page_buffer_meta(torch.arange(start, start + self.page_tokens))
        return np.array(addresses, np.int64), np.array(sizes, np.int64)

    def _learn(self) -> tuple[I64Array, I64Array, I64Array]:
        tokens, page = self._tokens, self.page_tokens
        if tokens < 2 * page:
            raise ConfigError(
                f"the host pool holds {tokens} tokens, less than two pages of {page}: raise --hicache-ratio or --hicache-size"
            )
        first, sizes = self._meta(0)
        second, _ = self._meta(page)
        # In the order of the flat page, which is that of the addresses: K lies before V, layer before layer.
        order = np.argsort(first, kind="stable") if len(self._buffers) == 1 else np.arange(len(first))
        first, second, sizes = first[order], second[order], sizes[order]
        stride, rest = np.divmod(second - first, page)
        last = (tokens // page - 1) * page
        middle = last // 2 // page * page
        for start in sorted({0, page, middle, last, last - page}):
            told, told_sizes = self._meta(start)
            if rest.any() or not (
                np.array_equal(told[order], first + start * stride) and np.array_equal(told_sizes[order], sizes)
            ):
                raise ConfigError(
                    f"{type(self._pool).__name__} with layout {self._pool.layout} lays out its pages in a way that this release "
                    "of Maru does not know (get_page_buffer_meta is not a straight line): use SGLang 0.5.23, or another "
                    "--hicache-mem-layout"
                )
            self._check_bounds(told, told_sizes)
        if int(sizes.sum()) != int(self._pool.get_size_per_token()) * page:
            raise ConfigError(
                f"a page of {type(self._pool).__name__} has {int(sizes.sum())} bytes by its pieces and "
                f"{int(self._pool.get_size_per_token()) * page} by its size per token: use SGLang 0.5.23"
            )
        return first, stride, sizes

    def _check_bounds(self, addresses: I64Array, sizes: I64Array) -> None:
        spans = [(b.data_ptr(), b.data_ptr() + b.numel() * b.element_size()) for b in self._buffers]
        for start, size in zip(addresses.tolist(), sizes.tolist(), strict=True):
            if not any(low <= start and start + size <= high for low, high in spans):
                raise ConfigError(
                    f"a piece of a page of {type(self._pool).__name__} lies outside its buffer: use SGLang 0.5.23"
                )

    def _check_flat_order(self, sizes: I64Array) -> bool:
        """Whether a flat page is the pieces in this order, for every sample page."""
        if isinstance(self._pool, AsymmetricMHATokenToKVPoolHost):
            return False  # SGLang has no flat page where K and V have different widths
        for start in (0, (self._tokens // self.page_tokens - 1) * self.page_tokens):
            flat = _runs(self._pool.get_data_page(start, flat=False))
            pieces = _joined(self._base + start * self._stride, sizes)
            if flat != pieces:
                raise ConfigError(
                    f"{type(self._pool).__name__} with layout {self._pool.layout}: a flat page is not its pieces in order: use "
                    "SGLang 0.5.23, or another --hicache-mem-layout"
                )
        return True


def _refuse_unknown(pool: Any) -> None:
    kind = type(pool)
    if kind not in KNOWN_POOLS:
        raise ConfigError(
            f"Maru does not know the host pool {kind.__module__}.{kind.__name__}: this release stores "
            f"{', '.join(known.__name__ for known in KNOWN_POOLS)} only. Use a plain MHA or MLA model without "
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
    if isinstance(pool, MLATokenToKVPoolHost):
        if pool.kv_buffer is None or getattr(pool, "_is_dummy", False):
            raise ConfigError(
                "this rank's MLA host pool has no memory (host deduplication): not supported, turn it off"
            )
        if getattr(pool, "_layer_shard_enabled", False):
            raise ConfigError("layer-sharded MLA pools are not supported yet: turn layer sharding off")
        if getattr(pool, "_native_buffers", None) is not None:
            raise ConfigError("MLA pools with split K and V buffers are not supported: use a plain MLA pool")


def _buffers(pool: Any) -> tuple[torch.Tensor, ...]:
    buffer = pool.kv_buffer
    if buffer is None:
        return ()
    return tuple(buffer) if isinstance(buffer, tuple | list) else (buffer,)


def _runs(view: torch.Tensor) -> list[tuple[int, int]]:
    """(address, bytes) of the stretches of memory that ``view`` covers, in the order of its elements."""
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
    return _joined(view.data_ptr() + offsets * item, np.full(len(offsets), run * item, np.int64))


def _joined(addresses: I64Array, sizes: I64Array) -> list[tuple[int, int]]:
    """The same stretches, neighbours joined, so that two ways of cutting the same bytes compare equal."""
    joined: list[tuple[int, int]] = []
    for address, size in zip(addresses.tolist(), sizes.tolist(), strict=True):
        if joined and joined[-1][0] + joined[-1][1] == address:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((address, size))
    return joined
