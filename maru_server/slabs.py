"""Which slots are free: extents are cut to one slot size on demand and come back when all their slots are free.

Slots of one size share extents only with each other, so an object never fragments another size's space. Each cut
extent keeps a stack of its free slots; a batch takes slices of these stacks and never looks at single slots.
Whom a slot belongs to is none of this module's business.
"""

from __future__ import annotations

import heapq
from collections.abc import Container
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from maru_core.pool.format import SLOT_GRAIN
from maru_server.directory import PoolDirectory, Slots
from maru_server.metrics import SizeFigures


@dataclass(slots=True)
class _Extent:
    """A cut extent: the free slots are ``stack[:free]``; the next to give is the last."""

    slot_bytes: int
    slots: int
    stack: npt.NDArray[np.uint32]
    free: int


@dataclass(slots=True)
class _Size:
    """All extents of one slot size."""

    slots_per_extent: int
    free: int = 0  # slots
    used: int = 0  # slots
    partial: dict[int, None] = field(default_factory=dict)  # extents with a free slot, in the order they got one


class Slabs:
    """Free slots of one pool.

    Args:
        occupied: the slots that are not free at the start; each must lie in a cut extent, within its slots.
        ready: extents ``[0, ready)`` may be cut (their memory is provisioned).
    """

    def __init__(self, directory: PoolDirectory, occupied: Slots, ready: int = 0) -> None:
        self._directory = directory
        geometry = directory.geometry
        self._extent_bytes = geometry.extent_bytes
        self._min_slot_bytes = geometry.min_slot_bytes
        self._per_extent = geometry.slots_per_extent
        self._count = geometry.extent_count
        self._sizes: dict[int, _Size] = {}
        self._extents: dict[int, _Extent] = {}
        self._uncut: list[int] = []
        self._adopt(np.sort(np.asarray(occupied, np.uint32)))
        cut = max(self._extents, default=-1) + 1
        self.ready = max(cut, min(ready, self._count))
        self._uncut = [extent for extent in range(self.ready) if extent not in self._extents]

    def _adopt(self, occupied: Slots) -> None:
        """Take over the extents that a former server cut."""
        cut = np.flatnonzero(self._directory.extents)
        first = np.searchsorted(occupied, cut * self._per_extent)
        last = np.searchsorted(occupied, (cut + 1) * self._per_extent)
        for extent, start, end in zip(cut.tolist(), first.tolist(), last.tolist(), strict=True):
            if start == end:
                self._directory.set_extent(extent, 0)
                continue
            slot_bytes = int(self._directory.extents[extent])
            cut_extent = self._cut(extent, slot_bytes)
            base = extent * self._per_extent
            free = np.ones(cut_extent.slots, bool)
            free[occupied[start:end] - np.uint32(base)] = False
            stack = np.flatnonzero(free)[::-1].astype(np.uint32) + np.uint32(base)
            cut_extent.stack[: len(stack)] = stack
            cut_extent.free = len(stack)
            size = self._sizes[slot_bytes]
            size.free -= end - start
            size.used += end - start
            if not len(stack):
                del size.partial[extent]

    # ------------------------------------------------------------ sizes

    def slot_bytes(self, nbytes: int) -> int:
        """Size of the slots that hold objects of ``nbytes``; the object fits if that is at most an extent."""
        return max(-(-nbytes // SLOT_GRAIN) * SLOT_GRAIN, self._min_slot_bytes)

    def slots_per_extent(self, slot_bytes: int) -> int:
        """Slots of this size in one extent."""
        return self._extent_bytes // slot_bytes

    def available(self, slot_bytes: int) -> int:
        """How many slots of this size :meth:`allocate` could give now."""
        size = self._sizes.get(slot_bytes)
        return (size.free if size else 0) + len(self._uncut) * self.slots_per_extent(slot_bytes)

    def used(self, slot_bytes: int) -> int:
        """Slots of this size that are not free."""
        size = self._sizes.get(slot_bytes)
        return size.used if size else 0

    # ------------------------------------------------------------ giving and taking

    def allocate(self, slot_bytes: int, count: int) -> npt.NDArray[np.uint32]:
        """Up to ``count`` free slots, ascending within an extent. They stay FREE on the media until reserved."""
        size = self._sizes.get(slot_bytes)
        if size is not None and size.partial and count > 0:
            number = next(iter(size.partial))
            cut = self._extents[number]
            if cut.free > count:  # one slice of one stack, as nearly always
                cut.free -= count
                size.free -= count
                size.used += count
                return cut.stack[cut.free : cut.free + count][::-1].copy()
        parts = []
        while count > 0:
            size = self._sizes.get(slot_bytes)
            if size is None or not size.partial:
                if not self._uncut:
                    break
                extent = heapq.heappop(self._uncut)
                self._directory.set_extent(extent, slot_bytes)
                self._cut(extent, slot_bytes)
                size = self._sizes[slot_bytes]
            number = next(iter(size.partial))
            cut = self._extents[number]
            taken = min(count, cut.free)
            parts.append(cut.stack[cut.free - taken : cut.free][::-1].copy())
            cut.free -= taken
            size.free -= taken
            size.used += taken
            count -= taken
            if not cut.free:
                del size.partial[number]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, np.uint32)

    def release(self, slots: Slots) -> None:
        """Take back slots that are FREE on the media."""
        if not len(slots):
            return
        extents = slots // self._per_extent
        first = int(extents[0])
        if first == int(extents.max()) == int(extents.min()):
            self._release(first, slots)
            return
        order = np.argsort(extents, kind="stable")
        extents = extents[order]
        bounds = [0, *(np.flatnonzero(np.diff(extents)) + 1).tolist(), len(slots)]
        for start, end in pairwise(bounds):
            self._release(int(extents[start]), slots[order[start:end]])

    def _release(self, number: int, slots: Slots) -> None:
        cut = self._extents[number]
        size = self._sizes[cut.slot_bytes]
        count = len(slots)
        assert cut.free + count <= cut.slots, "a slot came back twice"
        cut.stack[cut.free : cut.free + count] = slots
        cut.free += count
        size.free += count
        size.used -= count
        if cut.free < cut.slots:
            size.partial[number] = None
            return
        size.partial.pop(number, None)
        size.free -= cut.slots
        if not size.free and not size.used:
            del self._sizes[cut.slot_bytes]
        del self._extents[number]
        self._directory.set_extent(number, 0)
        heapq.heappush(self._uncut, number)

    def _cut(self, extent: int, slot_bytes: int) -> _Extent:
        slots = self.slots_per_extent(slot_bytes)
        base = extent * self._per_extent
        # Reversed, so that slots are given in ascending order and a batch lies in one piece.
        stack = np.arange(base, base + slots, dtype=np.uint32)[::-1].copy()
        cut = _Extent(slot_bytes, slots, stack, slots)
        self._extents[extent] = cut
        size = self._sizes.setdefault(slot_bytes, _Size(slots))
        size.free += slots
        size.partial[extent] = None
        return cut

    # ------------------------------------------------------------ extents

    def extents_ready(self, count: int) -> None:
        """Extents ``[0, count)`` may be cut; a smaller count than before changes nothing."""
        for extent in range(self.ready, min(count, self._count)):
            heapq.heappush(self._uncut, extent)
        self.ready = max(self.ready, min(count, self._count))

    @property
    def cut(self) -> int:
        """Extents in use."""
        return len(self._extents)

    def used_extents(self) -> float:
        """How full the pool is, in extents: each used slot counts as its share of an extent.

        Shares and not bytes, because the rest of an extent that no slot fits into can never be used.
        """
        return sum(size.used / size.slots_per_extent for size in self._sizes.values())

    def used_slots(self) -> int:
        return sum(size.used for size in self._sizes.values())

    def used_bytes(self) -> int:
        """Bytes of all slots that are not free."""
        return sum(slot_bytes * size.used for slot_bytes, size in self._sizes.items())

    def sizes(self) -> list[SizeFigures]:
        """Slots by size."""
        return [
            SizeFigures(slot_bytes, (size.used + size.free) // size.slots_per_extent, size.used, size.free)
            for slot_bytes, size in sorted(self._sizes.items())
        ]

    def memory_bytes(self) -> int:
        """Memory that the cut extents take here and in columns over their slots: free slots, offsets, reservations."""
        return 16 * sum(cut.slots for cut in self._extents.values())

    def fewest_used(self, but: int, beside: Container[int] = (), most: int = 8) -> list[npt.NDArray[np.uint32]]:
        """The slots of extents of other sizes than ``but``: of the ``most`` with the fewest used slots, those first; the
        extents in ``beside`` are left out."""
        others = [
            (cut.slots - cut.free, number)
            for number, cut in self._extents.items()
            if cut.slot_bytes != but and number not in beside
        ]
        return [self._slots_of(number) for _, number in heapq.nsmallest(most, others)]

    def _slots_of(self, number: int) -> npt.NDArray[np.uint32]:
        base = number * self._per_extent
        return np.arange(base, base + self._extents[number].slots, dtype=np.uint32)

    # ------------------------------------------------------------ integrity

    def check(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        """(free slots, all slots) of the cut extents, after checking every counter against them."""
        media = self._directory.extents
        assert {int(e): int(media[e]) for e in np.flatnonzero(media)} == {
            number: cut.slot_bytes for number, cut in self._extents.items()
        }, "cut extents differ from the pool's table"
        assert sorted(self._uncut) == [e for e in range(self.ready) if e not in self._extents], "uncut extents"
        free = [cut.stack[: cut.free] for cut in self._extents.values()]
        every = [self._slots_of(number) for number in self._extents]
        for slot_bytes, size in self._sizes.items():
            mine = {n: cut for n, cut in self._extents.items() if cut.slot_bytes == slot_bytes}
            assert size.free == sum(cut.free for cut in mine.values()), "free slots of a size"
            assert size.free + size.used == sum(cut.slots for cut in mine.values()), "slots of a size"
            assert set(size.partial) == {n for n, cut in mine.items() if cut.free}, "extents with free slots"
            assert all(cut.free < cut.slots for cut in mine.values()), "an empty extent was not returned"
        empty = np.empty(0, np.uint32)
        return np.concatenate([empty, *free]), np.concatenate([empty, *every])
