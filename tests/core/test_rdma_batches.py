"""What a transfer through an agent is cut into, and how its size is found: no NIC, no NIXL."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maru_core.mover import Fragments
from maru_core.rdma.descriptors import Ranges, batches, described, ranges_of
from maru_core.rdma.pace import CANDIDATES, BatchBytes

U64 = np.uint64
MIB = 1 << 20
OFF = 1 << 12


def covered(starts: np.ndarray, others: np.ndarray, sizes: np.ndarray) -> list[tuple[int, int]]:
    """Every byte here with its byte there."""
    return [
        (a + i, b + i)
        for a, b, n in zip(starts.tolist(), others.tolist(), sizes.tolist(), strict=True)
        for i in range(n)
    ]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 15), st.integers(1, 40)), min_size=1, max_size=20), st.integers(1, 100))
def test_every_byte_is_in_one_transfer_and_none_is_much_too_long(
    pieces: list[tuple[int, int]], batch_bytes: int
) -> None:
    gaps, sizes = (np.array(column, U64) for column in zip(*pieces, strict=True))
    local = np.cumsum(gaps + sizes).astype(U64) - sizes + U64(1000)
    ranges = Ranges(local, local * U64(3), sizes)
    cut, spans = batches(ranges, batch_bytes)
    assert covered(cut.local, cut.offsets, cut.sizes) == covered(ranges.local, ranges.offsets, ranges.sizes)
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == len(cut)
    for span in spans:
        assert span.nbytes == int(cut.sizes[span.start : span.stop].sum())
        assert 0 < span.nbytes <= batch_bytes


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, 11), min_size=1, max_size=12, unique=True),
    st.lists(st.sampled_from([8, 100, 4096]), min_size=1, max_size=3),
    st.booleans(),
)
def test_neighbours_are_joined_within_extents_and_no_byte_is_lost(
    slots: list[int], sizes: list[int], adjacent: bool
) -> None:
    slots.sort()
    nbytes = sum(sizes)
    slot = 1 << (nbytes - 1).bit_length()
    offsets = np.array(slots, U64) * U64(slot) + U64(OFF)
    starts = np.cumsum([0, *sizes[:-1]])
    step = nbytes if adjacent else nbytes + 64
    addresses = (U64(1 << 30) + np.arange(len(slots), dtype=U64)[:, None] * U64(step) + starts.astype(U64)).astype(U64)
    ranges = ranges_of(offsets, Fragments(addresses, np.array(sizes, U64)), 4 * slot, OFF, np.empty(0, U64))
    expected = [
        (int(addresses[row, column]) + i, int(offsets[row]) + int(starts[column]) + i)
        for row in range(len(slots))
        for column in range(len(sizes))
        for i in range(sizes[column])
    ]
    assert covered(ranges.local, ranges.offsets, ranges.sizes) == expected
    first = (ranges.offsets - U64(OFF)) // U64(4 * slot)
    last = (ranges.offsets + ranges.sizes - U64(1 + OFF)) // U64(4 * slot)
    assert (first == last).all()


def test_descriptors_are_address_bytes_and_device() -> None:
    table = described(np.array([5, 6], U64), np.array([7, 8], U64))
    assert table.tolist() == [[5, 7, 0], [6, 8, 0]]


def run_calls(pace: BatchBytes, total: int, calls: int, speed: dict[int, float]) -> list[int]:
    chosen = []
    for _ in range(calls):
        size = pace.choose(total)
        chosen.append(size)
        pace.took(total, total / speed[size])
    return chosen


@pytest.mark.parametrize("best", CANDIDATES)
def test_the_fastest_size_is_found_and_kept(best: int) -> None:
    pace = BatchBytes()
    speed = {size: 2e9 if size == best else 1e9 for size in CANDIDATES}
    chosen = run_calls(pace, 256 * MIB, 215, speed)
    assert set(chosen[:15]) == set(CANDIDATES)
    assert chosen[15:].count(best) >= 190
    assert set(chosen[15:]) == set(CANDIDATES), "others are tried again now and then"
    # The network has changed.
    speed = {size: 2e9 if size == CANDIDATES[0] else 1e8 for size in CANDIDATES}
    assert run_calls(pace, 256 * MIB, 400, speed)[-8:].count(CANDIDATES[0]) >= 7


def test_short_calls_say_nothing_of_long_ones() -> None:
    pace = BatchBytes()
    run_calls(pace, 256 * MIB, 40, {size: 2e9 if size == 4 * MIB else 1e9 for size in CANDIDATES})
    run_calls(pace, 2 * MIB, 40, {size: 9e9 if size == 256 << 10 else 8e9 for size in CANDIDATES})
    run_calls(pace, 64 << 10, 40, dict.fromkeys(CANDIDATES, 1000.0))
    assert pace.choose(256 * MIB) == 4 * MIB
    assert pace.choose(2 * MIB) == 256 << 10
    assert pace.choose(64 << 10) == 256 << 10, "there is one way to move what fits in the smallest"


def test_of_sizes_that_are_about_as_fast_the_largest_is_taken() -> None:
    pace = BatchBytes()
    speed = {256 << 10: 1.0e9, MIB: 2.0e9, 4 * MIB: 1.99e9, 16 * MIB: 1.97e9, 64 * MIB: 1.8e9}
    assert run_calls(pace, 256 * MIB, 40, speed)[-1] == 16 * MIB


def test_calls_that_something_else_made_slow_do_not_count() -> None:
    pace = BatchBytes()
    noise = np.random.default_rng(1)
    speed = {size: 2e9 if size == 4 * MIB else 1.5e9 for size in CANDIDATES}
    chosen = []
    for _ in range(200):
        size = pace.choose(256 * MIB)
        chosen.append(size)
        pace.took(256 * MIB, 256 * MIB / speed[size] * noise.choice([1.0, 1.1, 3.0, 8.0]))
    assert chosen[50:].count(4 * MIB) >= 130
