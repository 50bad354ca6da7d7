"""Copies by copy engines, over a stand-in for the CUDA runtime that refuses what the real one refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mover_cases
import numpy as np
import pytest
import torch
from cuda_recorder import Recorder

from maru_core.errors import ClosedError, ConfigError
from maru_core.pool import PoolMemory
from maru_core.pool.coherence import SoftwareCoherence
from maru_sglang.kernels import batched, mover
from maru_sglang.kernels.layout import Layout, Pages, Piece
from maru_sglang.kernels.mover import PagedMover
from maru_sglang.kernels.pinning import Pins
from maru_sglang.kernels.runtime import CudaError, Runtime


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    return Recorder(tmp_path_factory.mktemp("recorder"))


@pytest.fixture
def recorder(compiled: Recorder) -> Iterator[Recorder]:
    compiled.reset()
    yield compiled
    compiled.reset()


@pytest.fixture
def dma(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``dma(case, *arguments)``: a case of :mod:`mover_cases` whose pages go by the runtime."""

    def make(memory: PoolMemory, how: str | None) -> PagedMover:
        pins = Pins(memory, Runtime(recorder.path, 0), chunk_bytes=64 << 10)
        paged = PagedMover(memory, "cpu", how="dma", pins=pins)
        close = paged.close

        def close_both() -> None:
            close()
            pins.close()

        monkeypatch.setattr(paged, "close", close_both)
        return paged

    monkeypatch.setattr(mover_cases, "make", make)
    return lambda case, *arguments: case("dma", *arguments)


@pytest.fixture
def a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of a CPU have no stream, and without one there are no batches. The recorder takes any number for one."""
    monkeypatch.setattr(mover._Queue, "handle", 7)


@pytest.mark.parametrize("shape", ["mha", "mla"])
def test_moves_both_ways(dma: Callable[..., None], recorder: Recorder, shape: str) -> None:
    dma(mover_cases.moves_both_ways, shape)
    assert recorder.registered == recorder.unregistered > 0
    assert "cudaMemcpyAsync" in recorder.calls


@pytest.mark.usefixtures("a_stream")
def test_moves_both_ways_in_batches(dma: Callable[..., None], recorder: Recorder) -> None:
    dma(mover_cases.moves_both_ways, "mha")
    dma(mover_cases.loads_layer_by_layer, "mha")
    assert "cudaMemcpyBatchAsync" in recorder.calls
    assert "cudaMemcpyAsync" not in recorder.calls


def test_loads_layer_by_layer(dma: Callable[..., None]) -> None:
    dma(mover_cases.loads_layer_by_layer, "mha")


def test_refuses_what_is_outside(dma: Callable[..., None], recorder: Recorder) -> None:
    dma(mover_cases.refuses_what_is_outside)
    assert "cudaMemcpyAsync" not in recorder.calls


def test_goes_through_a_store(dma: Callable[..., None]) -> None:
    dma(mover_cases.goes_through_a_store, "generation")


def test_memory_that_cannot_be_locked_is_copied_all_the_same(dma: Callable[..., None], recorder: Recorder) -> None:
    recorder.fail("cudaHostRegister", 2, after=1)
    dma(mover_cases.moves_both_ways, "mha")
    assert recorder.calls.count("cudaHostRegister") > 1


@pytest.mark.usefixtures("a_stream")
def test_the_slow_way_is_taken_one_by_one_and_told_once(recorder: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    with mover_cases.pool() as memory:
        pins = Pins(memory, Runtime(recorder.path, 0))
        paged = PagedMover(memory, "cpu", how="dma", pins=pins)
        recorder.fail("cudaHostRegister", 2)
        one, other = mover_cases.engine("mla", seed=1), mover_cases.engine("mla")
        rows = np.array([0, 8])
        offsets = mover_cases.offsets_in(memory, 2, one.nbytes)
        for _ in range(2):
            paged.store(offsets, Pages(one, rows))
        paged.load(offsets, Pages(other, rows))
        assert (mover_cases.bytes_of(other)[8:12] == mover_cases.bytes_of(one)[8:12]).all()
        assert "cudaMemcpyBatchAsync" not in recorder.calls
        assert len([record for record in caplog.records if "slowly" in record.message]) == 1
        paged.close()
        pins.close()


def test_a_failed_copy_raises_and_a_closed_mover_copies_no_more(recorder: Recorder) -> None:
    with mover_cases.pool() as memory:
        pins = Pins(memory, Runtime(recorder.path, 0))
        paged = PagedMover(memory, "cpu", how="dma", pins=pins)
        layout = mover_cases.engine("mla", seed=1)
        pages = Pages(layout, np.array([0]))
        offsets = mover_cases.offsets_in(memory, 1, layout.nbytes)
        recorder.fail("cudaMemcpyAsync", 1, after=2)
        with pytest.raises(CudaError, match="cudaMemcpyAsync"):
            paged.store(offsets, pages)
        paged.store(offsets, pages)
        load = paged.begin_load(offsets, pages)
        load.launch(range(1))
        recorder.fail("cudaMemcpyAsync", 1)
        with pytest.raises(CudaError):
            load.launch(range(1, 2))
        load.wait(0)
        with pytest.raises(ValueError, match="layer 1 was not launched"):
            load.wait(1)
        load.synchronize()
        paged.close()
        with pytest.raises(ClosedError):
            load.launch(range(2, 3))
        pins.close()


@pytest.mark.skipif(not SoftwareCoherence.possible(), reason="this CPU or installation has no instructions for it")
def test_lines_are_dropped_before_a_load_and_written_back_after_a_store(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen at the helper that makes the instructions: what is where at that moment."""
    with mover_cases.pool("&coherence=software") as memory:
        pins = Pins(memory, Runtime(recorder.path, 0))
        paged = PagedMover(memory, "cpu", how="dma", pins=pins)
        one, other = mover_cases.engine("mla", seed=1), mover_cases.engine("mla")
        offsets = mover_cases.offsets_in(memory, 3, one.nbytes)
        rows = np.array([0, 12, 4])
        starts = (offsets - np.uint64(memory.geometry.off_data)).tolist()
        coherence = memory.coherence
        real = coherence._cpu
        seen: list[str] = []

        class Between:
            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

            def lines_many(self, instruction: Any, addresses: np.ndarray, nbytes: int) -> None:
                assert sorted((addresses - np.uint64(memory.data_address)).tolist()) == sorted(starts)
                assert nbytes == one.nbytes
                copied = all(
                    (memory.data[start : start + 8] == mover_cases.bytes_of(one)[row, :8]).all()
                    for start, row in zip(starts, rows, strict=True)
                )
                loaded = (mover_cases.bytes_of(other) != mover_cases.GUARD).any()
                seen.append(f"copied={copied} loaded={loaded}")
                assert instruction == (coherence.clean if len(seen) != 2 else coherence.drop)
                real.lines_many(instruction, addresses, nbytes)

        monkeypatch.setattr(coherence, "_cpu", Between())
        paged.store(offsets, Pages(one, rows))
        assert seen == ["copied=True loaded=False"]
        load = paged.begin_load(offsets, Pages(other, rows))
        assert len(seen) == 2
        assert seen[1] == "copied=True loaded=False"
        load.launch(range(mover_cases.LAYERS))
        load.synchronize()
        assert len(seen) == 2, "once for all layers"
        assert (mover_cases.bytes_of(other) != mover_cases.GUARD).any()

        # Also after a copy that failed: what this host has written must not fall upon the next object there.
        recorder.fail("cudaMemcpyAsync", 1, after=4)
        with pytest.raises(CudaError):
            paged.store(offsets, Pages(one, rows))
        assert len(seen) == 3
        paged.close()
        pins.close()


def test_copies_of_one_page_are_joined_where_both_sides_go_on() -> None:
    size = 64
    buffer = torch.zeros(8 * 4 * size, dtype=torch.uint8)
    base = buffer.data_ptr()
    # Of a page: two pieces that follow each other, one apart, one that follows that.
    starts = (0, size, 3 * size, 4 * size)
    layout = Layout.of_pieces(
        [Piece(base + start, 5 * size, size, index) for index, start in enumerate(starts)],
        rows=4,
        row_span=1,
        device="cpu",
    )
    slots = np.array([1 << 20, (1 << 20) + layout.nbytes], np.uint64)  # neighbours in the pool
    rows = np.array([0, 1])
    found = batched.copies(layout, rows, slots)
    assert found.sizes.tolist() == [2 * size] * 4
    assert (found.buffers - np.uint64(base)).tolist() == [0, 3 * size, 5 * size, 8 * size]
    assert (found.slots - slots[0]).tolist() == [0, 2 * size, 4 * size, 6 * size]
    assert batched.copies(layout, rows, slots, range(1, 2)).sizes.tolist() == [size] * 2
    assert len(batched.copies(layout, rows[:0], slots[:0]).sizes) == 0
    assert len(batched.copies(layout, rows, slots, range(9, 12)).sizes) == 0


@contextmanager
def two_buffers(count: int, size: int) -> Iterator[tuple[np.ndarray, np.ndarray, batched.Copies]]:
    one = np.random.default_rng(0).integers(0, 256, count * size, np.uint8)
    other = np.zeros_like(one)
    starts = np.arange(count, dtype=np.uint64) * np.uint64(size)
    yield (
        one,
        other,
        batched.Copies(
            starts + np.uint64(one.ctypes.data),
            starts[::-1] + np.uint64(other.ctypes.data),
            np.full(count, size, np.uint64),
        ),
    )


@pytest.mark.parametrize("version", [12040, 12080, 13000])
def test_many_copies_in_few_calls(recorder: Recorder, version: int) -> None:
    recorder.version(version)
    count, size = batched.BATCH_MAX * 2 + 5, 8
    with two_buffers(count, size) as (one, other, what):
        batched.copy(Runtime(recorder.path, 0), what, 7, to_pool=True)
        assert (other.reshape(count, size) == one.reshape(count, size)[::-1]).all()
        kept = one.copy()
        one[:] = 0
        batched.copy(Runtime(recorder.path, 0), what, 7, to_pool=False)
        assert (one == kept).all()
    batches, singles = recorder.calls.count("cudaMemcpyBatchAsync"), recorder.calls.count("cudaMemcpyAsync")
    assert (batches > 0, singles > 0) == (version >= 12080, version < 12080)
    if version >= 12080:
        assert batches == 6


def test_a_driver_that_is_too_old_gets_them_one_by_one(recorder: Recorder) -> None:
    recorder.fail("cudaMemcpyBatchAsync", 36)
    runtime = Runtime(recorder.path, 0)
    with two_buffers(9, 16) as (one, other, what):
        batched.copy(runtime, what, 7, to_pool=True)
        assert (other.reshape(9, 16) == one.reshape(9, 16)[::-1]).all()
    assert recorder.calls.count("cudaMemcpyAsync") == 9
    assert not runtime.has_batch


def test_another_error_of_a_batch_is_told(recorder: Recorder) -> None:
    recorder.fail("cudaMemcpyBatchAsync", 1)
    with two_buffers(9, 16) as (_, _, what), pytest.raises(CudaError, match="cudaMemcpyBatchAsync"):
        batched.copy(Runtime(recorder.path, 0), what, 7, to_pool=True)
    assert "cudaMemcpyAsync" not in recorder.calls


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"how": "kernel"}, "TRITON_INTERPRET"),
        ({"how": "dma"}, "need a GPU"),
        ({"how": "teleport"}, "give one of kernel, dma, cpu"),
        ({"programs": 0}, "0 programs"),
        ({"threads": 0}, "0 copy threads"),
    ],
)
def test_what_cannot_be_had_is_refused(arguments: dict[str, Any], message: str) -> None:
    with mover_cases.pool() as memory, pytest.raises(ConfigError, match=message):
        PagedMover(memory, "cpu", **arguments)
