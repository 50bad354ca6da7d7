"""Pins: whole extents, each once, all undone; and a chunk that could not be locked refuses its own objects alone."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cuda_recorder import DEVICE_DELTA, Recorder
from hypothesis import given, settings
from hypothesis import strategies as st

from maru_core.errors import ConfigError, PoolError
from maru_core.pool.memory import PoolMemory
from maru_sglang.kernels import pinning
from maru_sglang.kernels.pinning import MAX_CHUNK_BYTES, PinError, Pins
from maru_sglang.kernels.runtime import Runtime
from support import await_condition

EXTENT = 64 << 10
#: Enough that a machine that is busy does not run out of it; no test waits so long.
LONG_S = 60.0


@contextlib.contextmanager
def pool(extents: int = 10) -> Iterator[PoolMemory]:
    """A small pool with at least so many extents."""
    uri = f"shm://maru-test-{os.getpid()}-{uuid.uuid4().hex[:8]}?extent=64K&min_slot=4K&align=4K"
    size = (2 + extents) * EXTENT + (3 << 20)  # and its tables
    with PoolMemory.create(uri, size) as memory:
        try:
            assert memory.geometry.extent_count >= extents
            yield memory
        finally:
            memory.unlink()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    return Recorder(tmp_path_factory.mktemp("recorder"))


@pytest.fixture
def recorder(compiled: Recorder) -> Iterator[Recorder]:
    compiled.reset()
    yield compiled
    compiled.reset()


@pytest.fixture(scope="module")
def memory() -> Iterator[PoolMemory]:
    with pool() as made:
        yield made


@pytest.fixture
def pins(memory: PoolMemory, recorder: Recorder) -> Iterator[Pins]:
    """Chunks of two extents."""
    made = Pins(memory, Runtime(recorder.path), 2 * EXTENT)
    yield made
    made.close()
    assert recorder.ranges() == []


def at(memory: PoolMemory, *extents: float) -> np.ndarray:
    """Offsets in extents: 1.5 is the middle of extent 1."""
    return np.array([memory.geometry.off_data + int(extent * EXTENT) for extent in extents], np.uint64)


def check_ranges(memory: PoolMemory, recorder: Recorder, chunk_bytes: int) -> set[int]:
    """Registrations are chunks: on extents' edges, none twice. Returns the extents in them."""
    extents: list[int] = []
    for start, nbytes, _, flags in recorder.ranges():
        relative = start - memory.data_address
        assert relative % chunk_bytes == 0
        assert nbytes % EXTENT == 0
        assert nbytes == min(chunk_bytes, memory.geometry.data_bytes - relative)
        assert flags == 3
        extents += range(relative // EXTENT, (relative + nbytes) // EXTENT)
    assert len(extents) == len(set(extents))
    return set(extents)


def test_what_was_ensured_is_in_whole_chunks_and_reached_by_pointers(
    memory: PoolMemory, recorder: Recorder, pins: Pins
) -> None:
    offsets = at(memory, 3.5, 0, 3, 0.25)
    assert not pins.pinned(offsets).any()
    pins.ensure(offsets, EXTENT // 4, LONG_S)
    assert check_ranges(memory, recorder, pins.chunk_bytes) == {0, 1, 2, 3}
    assert pins.pinned(at(memory, 0, 1, 3, 4)).tolist() == [True, True, True, False]
    expected = offsets - np.uint64(memory.geometry.off_data) + np.uint64(memory.data_address + DEVICE_DELTA)
    assert pins.pointers(offsets).tolist() == expected.tolist()
    pins.ensure(offsets, EXTENT // 4, 0.0)
    assert recorder.registered == 2
    with pytest.raises(PinError, match="ask for it with ensure first"):
        pins.pointers(at(memory, 1, 4))


def test_the_last_chunk_ends_with_the_pool(recorder: Recorder, memory: PoolMemory) -> None:
    count = memory.geometry.extent_count
    per_chunk = next(n for n in range(3, count) if count % n)
    pins = Pins(memory, Runtime(recorder.path), per_chunk * EXTENT)
    pins.ensure(at(memory, count - 1), EXTENT, LONG_S)
    assert check_ranges(memory, recorder, pins.chunk_bytes) == set(range(count - count % per_chunk, count))
    pins.close()


def test_chunks_hold_at_least_one_extent_and_at_most_64_gib(recorder: Recorder, memory: PoolMemory) -> None:
    pins = Pins(memory, Runtime(recorder.path), 1)
    assert pins.chunk_bytes == EXTENT
    pins.close()
    for wrong in (0, -1, MAX_CHUNK_BYTES + 1):
        with pytest.raises(ConfigError, match=r"chunks of -?\d+ bytes"):
            Pins(memory, Runtime(recorder.path), wrong)


@pytest.mark.parametrize(
    ("extent", "nbytes"), [(0.5, EXTENT), (1, EXTENT + 1), (-1, 4096), (1e6, 1), (0, 0), (1.9375, 4097)]
)
def test_what_would_lie_across_extents_is_refused(pins: Pins, memory: PoolMemory, extent: float, nbytes: int) -> None:
    with pytest.raises(PoolError, match="do not lie in an extent"):
        pins.ensure(at(memory, 0, extent), nbytes)


def test_without_a_gpu_nothing_is_locked_and_pointers_are_the_cpus(memory: PoolMemory, recorder: Recorder) -> None:
    pins = Pins(memory, None)
    offsets = at(memory, 0, 2.5)
    pins.ensure(offsets, 4096)
    pins.ahead(offsets)
    assert pins.pinned(offsets).all()
    assert pins.pointers(offsets).tolist() == [memory.address_of(int(offset)) for offset in offsets]
    assert pins.report().pinned == 0
    pins.close()
    assert recorder.calls == []
    assert not any(thread.name == "maru-pinning" for thread in threading.enumerate())


def test_ahead_locks_in_the_background_also_all_that_the_server_has_cut(
    memory: PoolMemory, recorder: Recorder, pins: Pins
) -> None:
    pins.ahead(at(memory, 1, 0, 0))
    await_condition(lambda: pins.pinned(at(memory, 0)).all(), "the chunk was not locked")
    memory.extents[:] = 0
    memory.extents[[4, 7]] = 16384
    try:
        pins.ahead()
        await_condition(lambda: pins.pinned(at(memory, 4, 7)).all(), "the extents in use were not locked")
    finally:
        memory.extents[:] = 0
    assert check_ranges(memory, recorder, pins.chunk_bytes) == {0, 1, 4, 5, 6, 7}


def test_what_the_server_cuts_is_locked_before_anybody_asks(recorder: Recorder) -> None:
    with pool() as memory:
        memory.extents[2] = 4096
        pins = Pins(memory, Runtime(recorder.path), EXTENT, look_s=0.01)
        await_condition(lambda: pins.pinned(at(memory, 2)).all(), "an extent that was cut before was not locked")
        memory.extents[5] = 4096
        await_condition(lambda: pins.pinned(at(memory, 5)).all(), "an extent that was cut since was not locked")
        assert check_ranges(memory, recorder, EXTENT) == {2, 5}
        # After a failure there is no more of it, only what is asked for.
        recorder.fail("cudaHostRegister", 2)
        memory.extents[7] = 4096
        await_condition(lambda: pins.report().failed, "the next one was not tried")
        memory.extents[8] = 4096
        pins.ensure(at(memory, 3), 4096, LONG_S)
        pins.ensure(at(memory, 4), 4096, LONG_S)
        assert check_ranges(memory, recorder, EXTENT) == {2, 3, 4, 5}
        memory.close()
        pins.ahead()
        pins.close()
        assert recorder.ranges() == []


def test_memory_is_locked_while_an_engine_captures_its_graphs(
    memory: PoolMemory, recorder: Recorder, pins: Pins
) -> None:
    recorder.capture(True)
    pins.ensure(at(memory, 0), 4096, LONG_S)


def test_memory_on_another_node_than_the_gpu_is_told_once(
    memory: PoolMemory, recorder: Recorder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = 0
    monkeypatch.setattr(pinning, "nodes_of_pages", lambda address, nbytes, samples: Counter({0: samples}))
    monkeypatch.setattr(pinning, "gpu_node", lambda bus: node)
    caplog.set_level("INFO")
    for node in (0, 1):
        caplog.clear()
        pins = Pins(memory, Runtime(recorder.path), EXTENT)
        pins.ensure(at(memory, 0, 1, 2), 4096, LONG_S)
        assert str(pins.report()).endswith(f"memory: 100 % on node 0; GPU: node {node}")
        pins.close()
        assert caplog.text.count("numactl --membind=1") == node
        assert "released: 3 of" in caplog.text


def test_what_somebody_waits_for_comes_before_what_is_wanted_soon(recorder: Recorder) -> None:
    with pool(40) as memory:
        pins = Pins(memory, Runtime(recorder.path), EXTENT)
        recorder.slow(20_000)
        pins.ahead(at(memory, *range(40)))
        pins.ensure(at(memory, 39), EXTENT, LONG_S)
        # One that was begun already, the one asked for, and perhaps the next one begun.
        assert recorder.registered <= 4
        pins.close()
        assert recorder.ranges() == []
        assert recorder.registered < 40  # closing did not wait for the rest


@pytest.mark.parametrize("call", ["cudaHostRegister", "cudaHostGetDevicePointer"])
@pytest.mark.parametrize("code", [1, 2, 712, 801])
def test_a_chunk_that_failed_is_remembered_and_refused_alone(
    memory: PoolMemory, recorder: Recorder, pins: Pins, call: str, code: int
) -> None:
    recorder.fail(call, code)
    for _ in range(3):
        with pytest.raises(PinError, match=rf"chunk 0 .* cannot be pinned: {call} failed with {code} \(.+\).*: .+"):
            pins.ensure(at(memory, 0, 3), 4096, LONG_S)
    with pytest.raises(PinError, match=f"{call} failed with {code}"):
        pins.pointers(at(memory, 1))
    pins.ensure(at(memory, 3, 5), 4096, LONG_S)
    assert recorder.calls.count("cudaHostRegister") == 3
    # Where the pointer was refused, the registration is taken back.
    assert check_ranges(memory, recorder, pins.chunk_bytes) == {2, 3, 4, 5}
    report = pins.report()
    assert (report.pinned, report.failed, report.pinned_bytes) == (2, 1, 4 * EXTENT)
    assert f"{call} failed with {code}" in str(report)


def test_a_gpu_that_cannot_be_chosen_refuses_every_chunk(memory: PoolMemory, recorder: Recorder) -> None:
    runtime = Runtime(recorder.path, 1)
    recorder.devices(1)
    pins = Pins(memory, runtime, EXTENT)
    with pytest.raises(PinError, match="nothing of it can be pinned: cudaSetDevice failed with 101"):
        pins.ensure(at(memory, 0), 4096, LONG_S)
    assert "cudaHostRegister" not in recorder.calls  # that would have been on GPU 0
    pins.close()


def test_locking_is_on_the_runtimes_gpu_whichever_thread_asks(memory: PoolMemory, recorder: Recorder) -> None:
    pins = Pins(memory, Runtime(recorder.path, 1), EXTENT)
    pins.ensure(at(memory, 0), 4096, LONG_S)
    assert [device for _, _, device, _ in recorder.ranges()] == [1]
    pins.close()
    assert Runtime(recorder.path).device == 0


def test_failures_leave_no_error_in_the_callers_thread(memory: PoolMemory, recorder: Recorder, pins: Pins) -> None:
    recorder.fail("cudaHostRegister", 2)
    with pytest.raises(PinError):
        pins.ensure(at(memory, 0), 4096, LONG_S)
    assert recorder.raw_last_error() == 0


def test_the_wait_is_bounded_and_the_work_goes_on(memory: PoolMemory, recorder: Recorder, pins: Pins) -> None:
    recorder.slow(50_000)
    with pytest.raises(PinError, match=r"were not pinned within 0 s; it goes on in the background"):
        pins.ensure(at(memory, 0, 2, 4), 4096, 0.0)
    await_condition(lambda: pins.pinned(at(memory, 0, 2, 4)).all(), "it did not go on")
    pins.ensure(at(memory, 0, 2, 4), 4096, 0.0)


def test_threads_that_race_lock_each_chunk_once(recorder: Recorder) -> None:
    with pool(24) as memory:
        pins = Pins(memory, Runtime(recorder.path), 2 * EXTENT)
        recorder.slow(500)
        barrier = threading.Barrier(8)
        errors: list[BaseException] = []

        def work(seed: int) -> None:
            random = np.random.default_rng(seed)
            try:
                barrier.wait()
                for _ in range(20):
                    offsets = at(memory, *random.integers(0, 24, 3))
                    if random.random() < 0.3:
                        pins.ahead(offsets)
                    else:
                        pins.ensure(offsets, 4096, LONG_S)
                        assert len(set(pins.pointers(offsets).tolist())) == len(set(offsets.tolist()))
                        assert pins.pinned(offsets).all()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        check_ranges(memory, recorder, pins.chunk_bytes)
        assert recorder.registered == len(recorder.ranges()) <= 12
        pins.close()
        assert recorder.ranges() == []


def test_closing_wakes_those_that_wait_and_nothing_is_locked_afterwards(recorder: Recorder) -> None:
    with pool() as memory:
        pins = Pins(memory, Runtime(recorder.path), EXTENT)
        recorder.slow(100_000)
        refused: list[str] = []

        def work() -> None:
            try:
                pins.ensure(at(memory, *range(8)), 4096, LONG_S)
            except PinError as error:
                refused.append(str(error))

        thread = threading.Thread(target=work)
        thread.start()
        await_condition(lambda: "cudaHostRegister" in recorder.calls, "nothing began")
        pins.close()
        thread.join()
        assert "was released" in refused[0]
        pins.close()
        with pytest.raises(PinError, match="was released"):
            pins.ensure(at(memory, 0), 4096)
        with pytest.raises(PinError):
            pins.pointers(at(memory, 0))
        pins.ahead(at(memory, 0))
        assert recorder.ranges() == []
        assert recorder.registered == recorder.unregistered < 8


def test_the_mapping_stays_while_it_is_locked_though_the_pool_was_closed(recorder: Recorder) -> None:
    with pool() as memory:
        client = PoolMemory.attach(memory.uri)
        pins = Pins(client, Runtime(recorder.path), EXTENT)
        pins.ensure(at(client, 0), 4096, LONG_S)
        start = client.data_address
        client.close()
        pins.ensure(at(memory, 1), 4096, LONG_S)  # the recorder touches every page of it
        pins.ahead()
        assert any(int(line.split("-")[0], 16) == start for line in Path("/proc/self/maps").read_text().splitlines())
        pins.close()
        assert not any(
            int(line.split("-")[0], 16) == start for line in Path("/proc/self/maps").read_text().splitlines()
        )


def test_a_range_that_the_driver_keeps_is_told_stays_mapped_and_the_others_are_undone(
    memory: PoolMemory, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    client = PoolMemory.attach(memory.uri)
    pins = Pins(client, Runtime(recorder.path), EXTENT)
    pins.ensure(at(client, 0, 1, 2), 4096, LONG_S)
    recorder.fail("cudaHostUnregister", 1, after=1)
    start = client.data_address
    pins.close()
    client.close()
    assert len(recorder.ranges()) == 1
    assert "chunk 1 stays pinned until this process ends: cudaHostUnregister failed with 1" in caplog.text
    assert any(int(line.split("-")[0], 16) == start for line in Path("/proc/self/maps").read_text().splitlines())


def test_an_end_of_the_process_that_came_first_is_no_error(
    memory: PoolMemory, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    pins = Pins(memory, Runtime(recorder.path), EXTENT)
    pins.ensure(at(memory, 0), 4096, LONG_S)
    recorder.fail("cudaHostUnregister", 4)
    pins.close()
    assert caplog.text == ""


def test_an_engine_that_ends_without_closing_leaves_nothing_locked(recorder: Recorder) -> None:
    program = (
        "import ctypes, os, sys, numpy as np\n"
        "from maru_core.pool.memory import PoolMemory\n"
        "from maru_sglang.kernels.pinning import Pins\n"
        "from maru_sglang.kernels.runtime import Runtime\n"
        "memory = PoolMemory.attach(sys.argv[2])\n"
        "pins = Pins(memory, Runtime(sys.argv[1]), 65536)\n"
        "offsets = np.arange(4, dtype=np.uint64) * np.uint64(65536) + np.uint64(memory.geometry.off_data)\n"
        "pins.ensure(offsets, 4096, 60.0)\n"
        "library = ctypes.CDLL(sys.argv[1])\n"
        "def told():\n"
        "    print(library.recorder_registered(), library.recorder_unregistered())\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try: pins.ensure(offsets, 4096)\n"
        "    except Exception as error: print(type(error).__name__, error)\n"
        "    print(pins.pinned(offsets).any()); pins.ahead(offsets); pins.close(); told(); sys.exit()\n"
        "os.waitpid(child, 0)\n"
        "class Late:\n"
        "    def __del__(self): os.write(1, b'%d %d\\n' % (library.recorder_registered(), library.recorder_unregistered()))\n"
        "late = Late(); sys.stdout.flush()\n"
    )
    with pool() as memory:
        command = [sys.executable, "-c", program, str(recorder.path), str(memory.uri)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    child, can, before, late = done.stdout.splitlines()
    assert child.startswith("PinError")
    assert "fork" in child
    assert can == "False"
    assert before == "4 0"  # a child neither locks nor unlocks
    assert late == "4 4"


Step = tuple[str, list[int], int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ensure", "ensure", "ahead", "fail register", "fail pointer", "fail device", "report"]),
        st.lists(st.integers(0, 9), max_size=5),
        st.sampled_from([1, 2, 712, 801]),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, per_chunk=st.integers(1, 4))
def test_whatever_happens_registrations_are_chunks_and_all_are_undone(
    compiled: Recorder, memory: PoolMemory, steps: list[Step], per_chunk: int
) -> None:
    compiled.reset()
    pins = Pins(memory, Runtime(compiled.path), per_chunk * EXTENT)
    ensured: set[int] = set()
    refused: list[list[int]] = []
    for action, extents, code in steps:
        offsets = at(memory, *extents)
        if action == "ensure":
            try:
                pins.ensure(offsets, EXTENT, LONG_S)
                ensured |= set(extents)
                assert (pins.pointers(offsets) - np.uint64(DEVICE_DELTA)).tolist() == [
                    memory.address_of(int(offset)) for offset in offsets
                ]
            except PinError:
                assert not pins.pinned(offsets).all()
                refused.append(extents)
        elif action == "ahead":
            pins.ahead(offsets)
        elif action == "report":
            assert str(pins.report()).startswith(f"{pins.report().pinned} of {pins.chunk_count} chunks of ")
        else:
            call = {"register": "cudaHostRegister", "pointer": "cudaHostGetDevicePointer", "device": "cudaSetDevice"}
            compiled.fail(call[action.split()[1]], code)
        assert ensured <= check_ranges(memory, compiled, pins.chunk_bytes)
        for extent in ensured:
            assert pins.pinned(at(memory, extent)).all()
    for extents in refused:
        with pytest.raises(PinError, match="failed with"):
            pins.ensure(at(memory, *extents), EXTENT, LONG_S)
    pins.close()
    assert compiled.ranges() == []
    assert compiled.registered == compiled.unregistered
