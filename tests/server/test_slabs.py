"""Free slots: extents are cut on demand and come back; nothing is given twice."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from maru_harness import geometry

from maru_server.directory import PoolDirectory
from maru_server.slabs import Slabs

NONE = np.empty(0, np.uint32)


def slabs(extents: int = 4, slots: int = 8, ready: int | None = None) -> Slabs:
    shape = geometry(extents, slots)
    directory = PoolDirectory(shape, np.zeros(shape.off_data, np.uint8))
    return Slabs(directory, NONE, shape.extent_count if ready is None else ready)


def test_slot_sizes_are_whole_grains() -> None:
    some = slabs()
    assert [some.slot_bytes(nbytes) for nbytes in (1, 4096, 4097, 32768)] == [4096, 4096, 8192, 32768]
    assert some.slots_per_extent(12288) == 2


def test_a_batch_lies_in_one_piece() -> None:
    some = slabs()
    assert some.allocate(4096, 5).tolist() == [0, 1, 2, 3, 4]
    assert some.allocate(4096, 6).tolist() == [5, 6, 7, 8, 9, 10]
    some.check()


def test_sizes_do_not_share_an_extent_and_an_empty_extent_serves_any_size() -> None:
    some = slabs()
    extents = some._directory.geometry.extent_count
    small, large = some.allocate(4096, 1), some.allocate(8192, 3)
    assert large.tolist() == [8, 9, 10]
    assert some.available(16384) == (extents - 2) * 2
    some.release(small)
    assert some.available(16384) == (extents - 1) * 2
    assert some.allocate(32768, 1).tolist() == [0]
    some.check()


def test_no_more_is_given_than_there_is() -> None:
    some = slabs()
    total = some.available(4096)
    assert len(some.allocate(4096, total + 5)) == total
    assert some.available(4096) == 0
    assert len(some.allocate(4096, 1)) == 0
    assert some.used_extents() == some._directory.geometry.extent_count


def test_only_ready_extents_are_cut() -> None:
    some = slabs(ready=1)
    assert len(some.allocate(4096, 20)) == 8
    some.extents_ready(2)
    some.extents_ready(1)
    assert some.ready == 2
    assert len(some.allocate(4096, 20)) == 8
    some.extents_ready(10**9)
    assert some.ready == some._directory.geometry.extent_count
    some.check()


def test_the_rest_of_an_extent_does_not_count_as_free() -> None:
    some = slabs(slots=7)
    extents = some._directory.geometry.extent_count
    assert len(some.allocate(16384, 100)) == extents
    assert some.used_extents() == extents


def test_a_slot_cannot_come_back_twice() -> None:
    some = slabs()
    some.allocate(4096, 8)
    some.release(np.array([1], np.uint32))
    with pytest.raises(AssertionError):
        some.release(np.array([0, 2, 3, 4, 5, 6, 7, 1], np.uint32))


@given(st.data())
def test_any_order_of_giving_and_taking(data: st.DataObject) -> None:
    some = slabs(3, 8)
    held: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 15))):
        if held and data.draw(st.booleans()):
            gone = data.draw(st.lists(st.sampled_from(sorted(held)), unique=True, min_size=1))
            some.release(np.array(gone, np.uint32))
            for slot in gone:
                del held[slot]
        else:
            size = data.draw(st.sampled_from([4096, 8192, 12288]))
            wanted, possible = data.draw(st.integers(1, 12)), some.available(size)
            got = some.allocate(size, wanted).tolist()
            assert len(got) == min(wanted, possible)
            assert not held.keys() & set(got)
            held.update(dict.fromkeys(got, size))
        free, every = some.check()
        assert sorted([*free.tolist(), *held]) == sorted(every.tolist())
        assert some.used_bytes() == sum(held.values())
        offsets = some._directory.offsets(np.array(sorted(held), np.uint32)).tolist()
        spans = sorted(zip(offsets, (held[slot] for slot in sorted(held)), strict=True))
        assert all(a + size <= b for (a, size), (b, _) in pairwise(spans))
        again = Slabs(some._directory, np.array(sorted(held), np.uint32))
        assert set(again.check()[0].tolist()) == set(free.tolist())
