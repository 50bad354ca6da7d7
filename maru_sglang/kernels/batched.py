"""Copies by the GPU's copy engines: every fragment a copy, many of them in one call where the driver has that.

They cost no multiprocessor, and a little time each: for fragments of many KiB they keep up with a kernel, for small ones
nothing does. Which it is here was measured (:mod:`maru_sglang.kernels.choose`).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from maru_sglang.kernels.layout import I64, U64, Layout
from maru_sglang.kernels.runtime import NEWER_DRIVER, CudaError, Runtime

#: One call of the driver holds its lock all the while; others get in between.
BATCH_MAX: Final = 4096


class Copies(NamedTuple):
    """Where each run of bytes is on the device and in the pool: addresses and bytes, u64, shape ``(n,)`` each."""

    buffers: U64
    slots: U64
    sizes: U64

    def joined(self, apart: npt.NDArray[np.bool_]) -> Copies:
        """The same with neighbours made one where they follow each other on both sides.

        Args:
            apart: shape ``(n,)``: copies that must not be joined to the one before.
        """
        buffers, slots, sizes = self
        follows = ~apart[1:]
        for side in (buffers, slots):
            follows &= side[1:] == side[:-1] + sizes[:-1]
        firsts = np.flatnonzero(np.concatenate(([True], ~follows)))[: len(sizes)]
        if len(firsts) == len(sizes):
            return self
        return Copies(buffers[firsts], slots[firsts], np.add.reduceat(sizes, firsts))


def copies(layout: Layout, rows: I64, slots: U64, layers: range | None = None) -> Copies:
    """What a gather or scatter is, fragment by fragment. Only pieces of one page are joined: an object lies in one
    registration, and its neighbour in the pool may lie in the next, across which a copy would fail."""
    pieces = layout.select(layers)
    shape = (len(rows), len(pieces))
    pool = slots[:, None] + layout.offsets[pieces]
    sizes = np.broadcast_to(layout.sizes[pieces], shape).reshape(-1)
    apart = np.zeros(shape, np.bool_)
    apart[:, :1] = True
    return Copies(layout.addresses(rows, pieces).reshape(-1), pool.reshape(-1), sizes).joined(apart.reshape(-1))


def copy(runtime: Runtime, what: Copies, stream: int, *, to_pool: bool, batches: bool = True) -> None:
    """Queue copies on a stream. They may be done in any order.

    Args:
        stream: handle of a CUDA stream.
        batches: False: a call for each, as memory that is not page-locked wants it.
    Raises:
        CudaError: some of them may have been queued.
    """
    targets, sources = (what.slots, what.buffers) if to_pool else (what.buffers, what.slots)
    start = 0
    while batches and runtime.has_batch and stream and start < len(what.sizes):
        part = slice(start, start + BATCH_MAX)
        try:
            runtime.memcpy_batch_async(targets[part], sources[part], what.sizes[part], stream)
        except CudaError as error:
            if error.code != NEWER_DRIVER:
                raise
            break  # nothing of this part was queued: has_batch is False from now on
        start += BATCH_MAX
    rest = (side[start:].tolist() for side in (targets, sources, what.sizes))
    for target, source, size in zip(*rest, strict=True):
        runtime.memcpy_async(target, source, size, stream)
