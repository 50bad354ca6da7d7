"""From objects to what a NIC is told: ranges here and there, neighbours joined, by kind of memory, cut into batches."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from maru_core.mover import Fragments

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

#: Where memory lies: a GPU by its number, or one of these.
HOST: Final = -1
NOWHERE: Final = -2  # that the NIC reaches


@dataclass(frozen=True, eq=False)
class Ranges:
    """Ranges to be moved: address here, offset in the pool, bytes; u64, shape ``(n,)``. ``devices``: where they lie here, i64."""

    local: U64
    offsets: U64
    sizes: U64
    devices: I64 = field(default_factory=lambda: np.empty(0, np.int64))

    def __post_init__(self) -> None:
        if not len(self.devices):
            object.__setattr__(self, "devices", np.full(len(self.local), HOST, np.int64))

    def __len__(self) -> int:
        return len(self.local)

    @property
    def nbytes(self) -> int:
        return int(np.add.reduce(self.sizes))

    @property
    def kind(self) -> str:
        """As NIXL names the memory here; the same for all, see :func:`by_kind`."""
        return "VRAM" if len(self) and self.devices[0] >= 0 else "DRAM"


def ranges_of(offsets: U64, fragments: Fragments, extent_bytes: int, off_data: int, starts_here: U64) -> Ranges:
    """The ranges of objects at ``offsets`` of the pool. Neighbours that touch on both sides are one, inside of an extent, and inside of
    one registration: those here begin at ``starts_here``, in order."""
    # What is called here runs once for each batch, with cold caches: of numpy's ways to the same these are the short ones.
    starts = np.zeros(len(fragments.sizes), np.uint64)
    fragments.sizes[:-1].cumsum(out=starts[1:])
    table = np.empty(fragments.addresses.shape, np.uint64)
    table[:] = fragments.sizes
    local, remote, sizes = fragments.addresses.reshape(-1), (offsets[:, None] + starts).reshape(-1), table.reshape(-1)
    joins = local[1:] == local[:-1] + sizes[:-1]
    if not np.count_nonzero(joins):
        return Ranges(local, remote, sizes)
    joins &= remote[1:] == remote[:-1] + sizes[:-1]
    extents = (remote - np.uint64(off_data)) // np.uint64(extent_bytes)
    joins &= extents[1:] == extents[:-1]
    if len(starts_here) > 1:
        registered = starts_here.searchsorted(local, side="right")
        joins &= registered[1:] == registered[:-1]
    first = np.flatnonzero(np.concatenate(([True], ~joins)))
    return Ranges(local[first], remote[first], np.add.reduceat(sizes, first))


def by_kind(ranges: Ranges, devices: I64) -> list[Ranges]:
    """The ranges as they lie here, host memory and memory of GPUs apart: one transfer has one kind."""
    if np.count_nonzero(devices == HOST) == len(devices):
        return [ranges]
    ranges = replace(ranges, devices=devices)
    return [
        Ranges(ranges.local[which], ranges.offsets[which], ranges.sizes[which], ranges.devices[which])
        for which in (devices == HOST, devices >= 0)
        if np.count_nonzero(which)
    ]


class Span(NamedTuple):
    """Ranges that are one transfer: from ``start`` to ``stop``, and their bytes."""

    start: int
    stop: int
    nbytes: int


def batches(ranges: Ranges, batch_bytes: int) -> tuple[Ranges, list[Span]]:
    """The ranges, those that are longer cut, and stretches of them of about ``batch_bytes``."""
    total = ranges.nbytes
    if len(ranges) and total <= batch_bytes:
        return ranges, [Span(0, len(ranges), total)]
    ranges = _cut(ranges, batch_bytes)
    ends = np.cumsum(ranges.sizes)
    spans: list[Span] = []
    start, before = 0, 0
    while start < len(ranges):
        stop = max(int(ends.searchsorted(np.uint64(before + batch_bytes), side="right")), start + 1)
        after = int(ends[stop - 1])
        spans.append(Span(start, stop, after - before))
        start, before = stop, after
    return ranges, spans


def _cut(ranges: Ranges, most: int) -> Ranges:
    """No range longer than ``most`` bytes."""
    if not len(ranges) or int(ranges.sizes.max()) <= most:
        return ranges
    counts = ((ranges.sizes + np.uint64(most - 1)) // np.uint64(most)).astype(np.int64)
    which = np.repeat(np.arange(len(ranges)), counts)
    ordinal = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    shift = ordinal.astype(np.uint64) * np.uint64(most)
    sizes = np.minimum(ranges.sizes[which] - shift, np.uint64(most))
    return Ranges(ranges.local[which] + shift, ranges.offsets[which] + shift, sizes, ranges.devices[which])


def described(addresses: U64, sizes: U64, devices: I64 | None = None) -> npt.NDArray[np.uint64]:
    """As NIXL takes them, shape ``(n, 3)``: address, bytes, device; 0 for host memory."""
    table = np.zeros((len(addresses), 3), np.uint64)
    table[:, 0] = addresses
    table[:, 1] = sizes
    if devices is not None:
        table[:, 2] = np.maximum(devices, 0)
    return table
