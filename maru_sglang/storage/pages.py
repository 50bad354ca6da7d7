"""Where the bytes of SGLang's host pages lie, as fragments that a mover copies to and from directly.

SGLang tells where a page is by ``HostKVCache.get_page_buffer_meta`` (or, where a pool has no such call for its layout, by
views of its tensors: :mod:`maru_sglang.storage.regions`), with a Python loop over pages and layers. For every supported
pool the address of each piece of a page is a straight line in the page's number, so the lines are learnt once and checked
on other pages: a pool for which they do not hold is refused at start. After that a batch of pages costs a few numpy
operations.

An object is the page's pieces in the order of the pool's flat page (K of all layers, then V), so the zero-copy calls and
SGLang's flat-tensor calls read and write the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from maru_core.errors import ConfigError
from maru_core.mover import Fragments
from maru_sglang.storage.regions import KV_POOLS, SIDE_POOLS, Region, refuse_unknown

I64Array = npt.NDArray[np.int64]


class HostPages:
    """The pages of one host pool. Immutable; safe to use from several threads.

    Attributes:
        page_tokens: host indices per page (a pool of states has one).
        object_bytes: bytes of one page's object.
        flat: whether SGLang's flat-tensor calls work with this pool.
    """

    def __init__(self, pool: Any, name: str = "kv") -> None:
        """Learn the pool's geometry and check it.

        Args:
            name: SGLang's name of the pool; "kv" is the one that the keys are of.
        Raises:
            ConfigError: a pool, layout or geometry that this release does not know.
        """
        refuse_unknown(pool, KV_POOLS if name == "kv" else SIDE_POOLS, name)
        self._pool = pool
        self._region = Region(pool)
        # The tensors are kept, so that the memory stays mapped under a copy that is under way while SGLang shuts down.
        self._buffers = self._region.buffers()
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

    def memory(self) -> list[tuple[int, int]]:
        """Address and bytes of the memory that the pages lie in, without overlap."""
        spans = sorted((b.data_ptr(), b.data_ptr() + b.numel() * b.element_size()) for b in self._buffers)
        found: list[tuple[int, int]] = []
        for low, high in spans:
            if found and low < found[-1][0] + found[-1][1]:
                found[-1] = found[-1][0], max(high, found[-1][0] + found[-1][1]) - found[-1][0]
            else:
                found.append((low, high - low))
        return found

    def fragments(self, host_indices: torch.Tensor, pages: int) -> Fragments | None:
        """Fragments of ``pages`` pages at ``host_indices`` (``pages * page_tokens`` of them).

        None where the indices are not whole pages of this pool: nothing may be copied then.
        """
        if not self._region.holds(self._buffers):
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
        return Fragments(
            addresses=(self._base + starts // self.page_tokens * self._stride).astype(np.uint64), sizes=self._sizes
        )

    def flat_fragments(self, pointers: Sequence[int], *, whole: bool) -> Fragments:
        """Fragments of flat pages, which begin at ``pointers``: one each, or (to be split) the pieces that the pool has."""
        sizes = np.array([self.object_bytes], np.uint64) if whole else self._sizes
        offsets = np.cumsum(sizes) - sizes
        return Fragments(addresses=np.array(pointers, np.uint64).reshape(-1, 1) + offsets, sizes=sizes)

    def split(self, fragments: Fragments, part: int, parts: int) -> Fragments:
        """Of pages with the heads outermost (``page_head``): the ``part``-th of ``parts`` equal groups of heads."""
        sizes = fragments.sizes // np.uint64(parts)
        return Fragments(addresses=fragments.addresses + sizes * np.uint64(part), sizes=sizes)

    # ------------------------------------------------------------ start-up checks

    def _learn(self) -> tuple[I64Array, I64Array, I64Array]:
        tokens, page = self._tokens, self.page_tokens
        kind, layout = type(self._pool).__name__, self._pool.layout
        if tokens < 2 * page:
            raise ConfigError(
                f"the host pool holds {tokens} tokens, less than two pages of {page}: raise --hicache-ratio or --hicache-size"
            )
        first, sizes = self._region.pieces(0)
        second, _ = self._region.pieces(page)
        # In the order of the flat page, which is that of the addresses: K lies before V, layer before layer.
        order = np.argsort(first, kind="stable") if self._region.by_address else np.arange(len(first))
        first, second, sizes = first[order], second[order], sizes[order]
        stride = second - first
        last = tokens // page - 1
        for number in sorted({0, 1, last // 2, last, last - 1}):
            told, told_sizes = self._region.pieces(number * page)
            if len(told) != len(order) or not (
                np.array_equal(told[order], first + number * stride) and np.array_equal(told_sizes[order], sizes)
            ):
                raise ConfigError(
                    f"{kind} with layout {layout} lays out its pages in a way that this release "
                    "of Maru does not know (get_page_buffer_meta is not a straight line): use SGLang 0.5.23, or another "
                    "--hicache-mem-layout"
                )
            self._check_bounds(told, told_sizes)
        if int(sizes.sum()) != self._region.page_bytes():
            raise ConfigError(
                f"a page of {kind} has {int(sizes.sum())} bytes by its pieces and "
                f"{self._region.page_bytes()} by its size per token: use SGLang 0.5.23"
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
        """Whether a flat page is the pieces in this order, for every sample page; True where SGLang has flat pages."""
        last = (self._tokens // self.page_tokens - 1) * self.page_tokens
        for start in (0, last):
            told = self._region.told_otherwise(start)
            if told is None:
                return False
            if joined(*told) != joined(self._base + start // self.page_tokens * self._stride, sizes):
                raise ConfigError(
                    f"{type(self._pool).__name__} with layout {self._pool.layout}: a flat page is not its pieces in order: use "
                    "SGLang 0.5.23, or another --hicache-mem-layout"
                )
        return self._region.flat


def joined(addresses: I64Array, sizes: I64Array) -> list[tuple[int, int]]:
    """The stretches (address, bytes), neighbours joined, so that two ways of cutting the same bytes compare equal."""
    found: list[tuple[int, int]] = []
    for address, size in zip(addresses.tolist(), sizes.tolist(), strict=True):
        if found and found[-1][0] + found[-1][1] == address:
            found[-1] = (found[-1][0], found[-1][1] + size)
        else:
            found.append((address, size))
    return found
