"""The slab allocator against a list of byte ranges, while the mix of object sizes changes."""

from __future__ import annotations

import os

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from maru_harness import geometry

from maru_server.directory import PoolDirectory
from maru_server.slabs import Slabs

GRAIN = 4096
#: Sizes of objects in bytes, a few to a phase: engines come and go, and with them the sizes of their pages.
PHASES = [(3000, 4096), (9000, 12_000), (4097, 8192, 1), (30_000, 32_768), (12_288, 20_000, 4096)]


class SlabsMachine(RuleBasedStateMachine):
    """``held`` is all there is to know: slot -> (bytes of the slot, first byte, end)."""

    @initialize(extents=st.integers(2, 6), ready=st.integers(0, 6))
    def start(self, extents: int, ready: int) -> None:
        self.shape = geometry(extents, 8)
        self.directory = PoolDirectory(self.shape, np.zeros(self.shape.off_data, np.uint8))
        self.slabs = Slabs(self.directory, np.empty(0, np.uint32), ready)
        self.ready = min(ready, self.shape.extent_count)
        self.held: dict[int, tuple[int, int, int]] = {}
        self.phase = PHASES[0]

    # ------------------------------------------------------------ the plain model

    def size_of_extents(self) -> dict[int, int]:
        """What each extent that holds anything is cut to."""
        return {slot // self.shape.slots_per_extent: size for slot, (size, _, _) in self.held.items()}

    def available(self, size: int) -> int:
        cut = self.size_of_extents()
        per_extent = self.shape.extent_bytes // size
        here = [slot for slot, (mine, _, _) in self.held.items() if mine == size]
        return per_extent * (sum(mine == size for mine in cut.values()) + self.ready - len(cut)) - len(here)

    # ------------------------------------------------------------ what happens

    @rule(phase=st.sampled_from(PHASES))
    def the_mix_changes(self, phase: tuple[int, ...]) -> None:
        self.phase = phase

    @rule(which=st.integers(0, 9), count=st.integers(0, 20))
    def take(self, which: int, count: int) -> None:
        nbytes = self.phase[which % len(self.phase)]
        size = self.slabs.slot_bytes(nbytes)
        assert size == -(-nbytes // GRAIN) * GRAIN
        possible = self.available(size)
        assert self.slabs.available(size) == possible
        slots = self.slabs.allocate(size, count)
        assert len(slots) == min(count, possible), "not all that was there, or more"
        offsets = self.directory.offsets(slots).tolist()
        for slot, offset in zip(slots.tolist(), offsets, strict=True):
            assert slot not in self.held, "a slot was given twice"
            extent, index = divmod(slot, self.shape.slots_per_extent)
            assert extent < self.ready, "a slot without memory"
            assert offset == self.shape.off_data + extent * self.shape.extent_bytes + index * size
            assert (index + 1) * size <= self.shape.extent_bytes, "a slot beyond its extent"
            self.held[slot] = (size, offset, offset + size)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), how=st.sampled_from(["some", "some", "one size", "one extent", "half"]))
    def give_back(self, data: st.DataObject, how: str) -> None:
        held = sorted(self.held)
        if how == "some":
            gone = data.draw(st.lists(st.sampled_from(held), unique=True, min_size=1, max_size=12))
        elif how == "one size":
            size = self.held[data.draw(st.sampled_from(held))][0]
            gone = [slot for slot in held if self.held[slot][0] == size]
        elif how == "one extent":
            extent = data.draw(st.sampled_from(held)) // self.shape.slots_per_extent
            gone = [slot for slot in held if slot // self.shape.slots_per_extent == extent]
        else:
            gone = held[data.draw(st.integers(0, 1)) :: 2]
        self.slabs.release(np.array(gone, np.uint32))
        for slot in gone:
            del self.held[slot]

    @rule(count=st.integers(0, 8))
    def memory_comes(self, count: int) -> None:
        self.slabs.extents_ready(count)
        self.ready = max(self.ready, min(count, self.shape.extent_count))

    @rule()
    def restart(self) -> None:
        """Another server takes over what is in use; extents are ready again as far as one is cut."""
        self.directory = PoolDirectory(self.shape, self.directory.meta)
        self.slabs = Slabs(self.directory, np.array(list(self.held), np.uint32), 0)
        self.ready = max(self.size_of_extents(), default=-1) + 1

    # ------------------------------------------------------------ what always holds

    @invariant()
    def no_byte_is_given_twice(self) -> None:
        owner: dict[int, int] = {}
        for slot, (_, first, end) in getattr(self, "held", {}).items():
            for grain in range(first, end, GRAIN):
                assert owner.setdefault(grain, slot) == slot, "two slots share bytes"
            assert self.shape.off_data <= first
            assert end <= self.shape.pool_bytes

    @invariant()
    def an_extent_is_cut_exactly_while_something_is_in_it(self) -> None:
        if hasattr(self, "held"):
            table = {int(e): int(self.directory.extents[e]) for e in np.flatnonzero(self.directory.extents)}
            assert table == self.size_of_extents()

    @invariant()
    def counters_are_exact(self) -> None:
        if not hasattr(self, "held"):
            return
        slabs, cut = self.slabs, self.size_of_extents()
        sizes = [size for size, _, _ in self.held.values()]
        assert slabs.ready == self.ready
        assert slabs.cut == len(cut)
        assert slabs.used_slots() == len(sizes)
        assert slabs.used_bytes() == sum(sizes)
        for size in range(GRAIN, self.shape.extent_bytes + 1, GRAIN):
            assert slabs.used(size) == sizes.count(size)
            assert slabs.available(size) == self.available(size), "slots leaked"
        shares = sum(1 / (self.shape.extent_bytes // size) for size in sizes)
        assert abs(slabs.used_extents() - shares) < 1e-9
        free, every = slabs.check()
        assert len(every) == len(free) + len(sizes)
        assert not set(free.tolist()) & set(self.held)

    @invariant()
    def the_emptiest_extents_of_other_sizes_are_found(self) -> None:
        if not getattr(self, "held", None):
            return
        mine = next(iter(self.held.values()))[0]
        per_extent = self.shape.slots_per_extent
        used = {e: sum(slot // per_extent == e for slot in self.held) for e in self.size_of_extents()}
        others = sorted(count for e, count in used.items() if self.size_of_extents()[e] != mine)
        found = [int(slots[0]) // per_extent for slots in self.slabs.fewest_used(but=mine)]
        assert [used[e] for e in found] == others[: len(found)]
        assert len(found) == min(8, len(others))


SlabsMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("MARU_TEST_EXAMPLES", "60")), stateful_step_count=40, deadline=None
)
test_any_mix_of_sizes = SlabsMachine.TestCase
