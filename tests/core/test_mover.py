"""Copying batches: exact bytes for any shape, nothing outside the extents, no GIL, with and without the extension."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from maru_core import mover
from maru_core.errors import ClosedError, ConfigError, PoolError
from maru_core.mover import CxlMover, Fragments
from maru_core.pool import PoolMemory

Keep = Callable[[PoolMemory], PoolMemory]


@pytest.fixture(params=[True, False], ids=["native", "python"])
def native(request: pytest.FixtureRequest) -> bool:
    if request.param and not mover.native_available:
        pytest.skip("the extension was not built")
    return bool(request.param)


@pytest.fixture
def memory(shm_name: str, pools: Keep) -> PoolMemory:
    """128 MiB in extents of 4 MiB, mapped as a client; memory comes as it is touched."""
    uri = f"shm://{shm_name}?size=128M&extent=4M&align=4K&min_slot=4K"
    pools(PoolMemory.create(uri))
    return pools(PoolMemory.attach(uri))


class Buffer:
    """Engine memory: ``count`` objects whose fragments lie in random order, with guard bytes around each."""

    GUARD = 0xA5

    def __init__(self, sizes: list[int], count: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.sizes = sizes
        gaps = random.integers(1, 67, count * len(sizes))
        lengths = np.tile(sizes, count)
        order = random.permutation(count * len(sizes))
        starts = np.empty(len(order), np.int64)
        position = 0
        for place in order:
            position += int(gaps[place])
            starts[place] = position
            position += int(lengths[place])
        self.bytes = np.full(position + 64, self.GUARD, np.uint8)
        self.starts = starts.reshape(count, len(sizes))

    @property
    def fragments(self) -> Fragments:
        addresses = self.starts.astype(np.uint64) + np.uint64(self.bytes.ctypes.data)
        return Fragments(addresses, np.array(self.sizes, np.uint64))

    def fill(self, objects: np.ndarray) -> None:
        for row, starts in zip(objects, self.starts, strict=True):
            for part, start in zip(np.split(row, np.cumsum(self.sizes)[:-1]), starts, strict=True):
                self.bytes[start : start + len(part)] = part

    def objects(self) -> np.ndarray:
        return np.array(
            [
                np.concatenate([self.bytes[s : s + n] for s, n in zip(starts, self.sizes, strict=True)])
                for starts in self.starts
            ]
        )

    def guards_hold(self) -> bool:
        mask = np.ones(len(self.bytes), bool)
        for starts in self.starts:
            for start, size in zip(starts, self.sizes, strict=True):
                mask[start : start + size] = False
        return bool((self.bytes[mask] == self.GUARD).all())


def slots(memory: PoolMemory, count: int, nbytes: int, seed: int = 0) -> np.ndarray:
    """Offsets of ``count`` slots in random order."""
    geometry = memory.geometry
    slot_bytes = -(-nbytes // 4096) * 4096
    per = geometry.extent_bytes // slot_bytes
    chosen = np.random.default_rng(seed).permutation(min(per * geometry.extent_count, 4 * count))[:count]
    return (geometry.off_data + chosen // per * geometry.extent_bytes + chosen % per * slot_bytes).astype(np.uint64)


shapes = st.tuples(
    st.lists(st.integers(1, 9000) | st.sampled_from([1, 63, 64, 1023, 1024, 4096, 65536]), min_size=1, max_size=12),
    st.integers(1, 20),
)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=60, deadline=None
)
@given(shape=shapes, seed=st.integers(0, 1 << 20))
@example(shape=([65536] * 16, 20), seed=1)  # 20 MiB: several threads, streamed
@example(shape=([(1 << 20) - 1, 3, 1023], 17), seed=2)  # fragments that end inside a thread's chunk
@example(shape=([1], 1), seed=3)
@example(shape=([(4 << 20) - 4096], 2), seed=4)
def test_any_shape_comes_back_as_it_was(memory: PoolMemory, shape: tuple[list[int], int], seed: int) -> None:
    sizes, count = shape
    nbytes = sum(sizes)
    objects = np.random.default_rng(seed).integers(0, 256, (count, nbytes), np.uint8)
    offsets = slots(memory, count, nbytes, seed)
    for native in (True, False):
        copier = CxlMover(memory, threads=3, native=native)
        source, target = Buffer(sizes, count, seed + 1), Buffer(sizes, count, seed + 2)
        source.fill(objects)
        for offset in offsets.tolist():  # what is beside an object in the pool stays as it is
            start = offset - memory.geometry.off_data
            memory.data[start : start + -(-nbytes // 4096) * 4096] = 0x77
        copier.store(offsets, source.fragments)
        assert np.array_equal(source.objects(), objects)
        for offset, row in zip(offsets.tolist(), objects, strict=True):
            start = offset - memory.geometry.off_data
            assert np.array_equal(memory.data[start : start + nbytes], row)
            assert (memory.data[start + nbytes : start + -(-nbytes // 4096) * 4096] == 0x77).all()
        copier.load(offsets, target.fragments)
        assert np.array_equal(target.objects(), objects)
        assert target.guards_hold()


@pytest.mark.parametrize("which", ["below", "end", "far", "wraps", "across", "negative", "owner block"])
def test_nothing_is_copied_if_any_object_is_outside(memory: PoolMemory, native: bool, which: str) -> None:
    geometry = memory.geometry
    offsets = slots(memory, 4, 8192)
    offsets[2] = {
        "below": geometry.off_data - 4096,
        "end": geometry.off_data + geometry.data_bytes - 4096,
        "far": geometry.off_data + geometry.data_bytes,
        "wraps": (1 << 64) - 4096,
        "across": geometry.off_data + geometry.extent_bytes - 4096,
        "negative": (1 << 64) - 1,
        "owner block": 4096,
    }[which]
    buffer = Buffer([4096, 4096], 4, 1)
    buffer.fill(np.ones((4, 8192), np.uint8))
    copier = CxlMover(memory, native=native)
    with pytest.raises(PoolError, match=rf"object 2: 8192 bytes at offset {int(offsets[2])} do not lie in an extent"):
        copier.store(offsets, buffer.fragments)
    assert not memory.data.reshape(-1, geometry.extent_bytes)[:2].any()
    with pytest.raises(PoolError, match="nothing was copied"):
        copier.load(offsets, buffer.fragments)
    assert buffer.bytes[buffer.starts[0, 0]] == 1


def test_an_object_larger_than_an_extent_is_refused(memory: PoolMemory, native: bool) -> None:
    buffer = Buffer([3 << 20, 2 << 20], 1, 0)
    with pytest.raises(PoolError, match="do not lie in an extent"):
        CxlMover(memory, native=native).store(np.array([memory.geometry.off_data], np.uint64), buffer.fragments)
    assert not memory.data[: 8 << 20].any()


def test_the_last_bytes_of_the_pool_can_be_used(memory: PoolMemory, native: bool) -> None:
    geometry = memory.geometry
    buffer = Buffer([4096], 1, 0)
    buffer.fill(np.full((1, 4096), 9, np.uint8))
    last = np.array([geometry.off_data + geometry.data_bytes - 4096], np.uint64)
    CxlMover(memory, native=native).store(last, buffer.fragments)
    assert (memory.data[-4096:] == 9).all()


def test_address_zero_is_refused_before_it_crashes(memory: PoolMemory, native: bool) -> None:
    buffer = Buffer([64, 64], 3, 0)
    addresses = buffer.fragments.addresses.copy()
    addresses[1, 1] = 0
    with pytest.raises(PoolError, match="object 1 has a fragment at address 0"):
        CxlMover(memory, native=native).store(slots(memory, 3, 128), Fragments(addresses, buffer.fragments.sizes))
    assert not memory.data[: 1 << 20].any()


def test_offsets_must_fit_the_objects(memory: PoolMemory, native: bool) -> None:
    buffer = Buffer([64], 3, 0)
    good = slots(memory, 3, 64)
    for offsets in (good[:2], good.astype(np.int64), good.reshape(3, 1)):
        with pytest.raises(ValueError, match="give one uint64 each"):
            CxlMover(memory, native=native).load(offsets, buffer.fragments)


def test_a_batch_of_none_and_offsets_with_strides(memory: PoolMemory, native: bool) -> None:
    copier = CxlMover(memory, native=native)
    buffer = Buffer([5000], 6, 0)
    copier.store(np.empty(0, np.uint64), buffer.fragments.select(slice(0, 0)))
    objects = np.random.default_rng(0).integers(0, 256, (6, 5000), np.uint8)
    buffer.fill(objects)
    twice = np.repeat(slots(memory, 6, 5000), 2)
    copier.store(twice[::2], buffer.fragments)
    target = Buffer([5000], 6, 5)
    copier.load(twice[::2], target.fragments)
    assert np.array_equal(target.objects(), objects)


def test_closing_ends_copying_with_an_error(memory: PoolMemory, native: bool) -> None:
    copier = CxlMover(memory, native=native)
    memory.close()
    with pytest.raises(ClosedError):
        copier.load(np.array([memory.geometry.off_data], np.uint64), Buffer([64], 1, 0).fragments)


def test_threads_are_checked(memory: PoolMemory) -> None:
    for threads in (0, -1, 65):
        with pytest.raises(ConfigError, match="give 1 to 64"):
            CxlMover(memory, threads)
    assert 1 <= CxlMover(memory).threads <= 4


def test_the_gil_is_not_held_while_bytes_move(memory: PoolMemory) -> None:
    """By counting: with a switch interval of an hour, another thread runs only where this one lets go of the GIL.

    The other thread counts and lets go by sleeping, so it advances during the call exactly if the call lets it."""
    if not mover.native_available:
        pytest.skip("the extension was not built")
    buffer = Buffer([1 << 20], 48, 0)
    offsets = slots(memory, 48, 1 << 20)
    copier = CxlMover(memory, threads=1)
    counted = [0]
    stop = threading.Event()

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1
            time.sleep(0.0002)  # lets go of the GIL, so that this thread never needs the switch

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=count)
    try:
        sys.setswitchinterval(3600)
        thread.start()
        before = counted[0]
        for _ in range(100):  # on a busy machine the other thread may need more than one chance
            copier.store(offsets, buffer.fragments)
            copier.load(offsets, buffer.fragments)
            progress = counted[0] - before
            if progress:
                break
        # The control: work of the same kind that keeps the GIL lets nobody else count.
        before = counted[0]
        sum(range(100_000))
        assert counted[0] == before
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join()
    assert progress > 0


def test_many_threads_may_copy_at_once(memory: PoolMemory, native: bool) -> None:
    copier = CxlMover(memory, threads=2, native=native)
    nbytes, count, workers = 1 << 20, 20, 4
    offsets = slots(memory, count * workers, nbytes).reshape(workers, count)
    wrong: list[int] = []

    def work(worker: int) -> None:
        source, target = Buffer([nbytes // 2] * 2, count, worker), Buffer([nbytes // 2] * 2, count, worker + 9)
        objects = np.random.default_rng(worker).integers(0, 256, (count, nbytes), np.uint8)
        source.fill(objects)
        for _ in range(2):
            copier.store(offsets[worker], source.fragments)
            copier.load(offsets[worker], target.fragments)
        if not np.array_equal(target.objects(), objects):
            wrong.append(worker)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_without_the_extension_everything_still_works(memory: PoolMemory) -> None:
    """A process in which the extension cannot be imported, as after an installation without a compiler."""
    code = """
import sys
sys.modules["maru_core._native"] = None
import numpy as np
from maru_core import mover
from maru_core.mover import CxlMover, Fragments
from maru_core.pool import PoolMemory, PoolView
assert not mover.native_available
memory = PoolMemory.attach(sys.argv[1])
source, target = np.arange(4096, dtype=np.uint8), np.zeros(4096, np.uint8)
at = np.array([memory.geometry.off_data], np.uint64)
one = lambda array: Fragments(np.array([[array.ctypes.data]], np.uint64), np.array([4096], np.uint64))
CxlMover(memory).store(at, one(source))
CxlMover(memory).load(at, one(target))
assert (source == target).all()
assert PoolView(memory).valid(np.zeros(1, np.uint32), memory.generations[:1].copy())
print("same")
"""
    run = subprocess.run(
        [sys.executable, "-c", code, str(memory.uri)], capture_output=True, text=True, timeout=180, check=False
    )
    assert run.stdout == "same\n", run.stderr


# ---------------------------------------------------------------- Fragments


def u64(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


@pytest.mark.parametrize(
    ("addresses", "sizes", "named"),
    [
        (np.ones((2, 3), np.int64), u64(1, 2, 3), "int64"),
        (np.ones((2, 3), np.uint64), np.array([1, 2, 3], np.int32), "int32"),
        (np.ones((2, 3), np.uint64), u64(1, 2), r"\(2, 3\)"),
        (np.ones(3, np.uint64), u64(1, 2, 3), r"\(3,\)"),
        (np.ones((2, 1), np.uint64), u64(1).reshape(1, 1), r"\(1, 1\)"),
        (np.ones((2, 0), np.uint64), u64(), r"\(2, 0\)"),
        (np.ones((2, 2), np.uint64), u64(1, 0), "positive"),
        (np.ones((2, 2), np.uint64), u64(1 << 63, 1 << 63), "2\\*\\*63"),
    ],
)
def test_fragments_that_make_no_sense_are_refused(addresses: np.ndarray, sizes: np.ndarray, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Fragments(addresses, sizes)


def test_fragments_are_selected_by_object() -> None:
    fragments = Fragments(np.arange(1, 13, dtype=np.uint64).reshape(4, 3), u64(10, 20, 30))
    assert (len(fragments), fragments.nbytes) == (4, 60)
    for which in (slice(1, 3), np.array([False, True, True, False]), np.array([1, 2])):
        part = fragments.select(which)
        assert part.addresses.tolist() == [[4, 5, 6], [7, 8, 9]]
        assert part.nbytes == 60
    assert Fragments(np.asfortranarray(fragments.addresses), fragments.sizes).addresses.flags.c_contiguous
    with pytest.raises(FrozenInstanceError):
        fragments.nbytes = 1  # type: ignore[misc]
