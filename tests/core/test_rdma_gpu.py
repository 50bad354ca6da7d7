"""GPU memory through agents: what NIXL is told of it, and what becomes of it where NIXL does not take it.

There is no GPU here. A stand-in for NIXL takes host memory for a GPU's, keeps what it was told, and moves the bytes; the refusal is
the real NIXL's.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from maru_core.errors import MaruError
from maru_core.mover import Fragments
from maru_core.pool.geometry import Geometry
from maru_core.protocol import Agent
from maru_core.rdma import RdmaMover, TransferError, endpoint
from maru_core.rdma.descriptors import HOST, Ranges, batches, by_kind

U64 = np.uint64
PAGE = 8192
PAGES = 6


class StandIn:
    """NIXL's agent as far as an endpoint uses it: peers are in this process."""

    def __init__(self, name: str, config: object) -> None:
        self.registered: list[tuple[int, int, int, str]] = []
        self.posted: list[SimpleNamespace] = []

    def create_backend(self, name: str, options: dict[str, str]) -> None: ...

    def register_memory(self, ranges: list[tuple[int, int, int, str]], kind: str, backends: list[str]) -> object:
        ((address, nbytes, device, _),) = ranges
        self.registered.append((address, nbytes, device, kind))
        return ranges

    def add_remote_agent(self, metadata: bytes) -> str:
        return "peer"

    def get_xfer_descs(self, table: np.ndarray, kind: str) -> tuple[np.ndarray, str]:
        assert table.dtype == U64
        assert table.shape[1] == 3
        return table.copy(), kind

    def initialize_xfer(self, operation: str, local: Any, remote: Any, peer: str) -> SimpleNamespace:
        table, kind = local
        for address, nbytes, device in table.tolist():
            assert any(
                start <= address and address + nbytes <= start + length and (number, what) == (device, kind)
                for start, length, number, what in self.registered
            ), "not what was registered there"
        transfer = SimpleNamespace(operation=operation, local=local, remote=remote, release=lambda: None)
        self.posted.append(transfer)
        return transfer

    def transfer(self, handle: SimpleNamespace) -> str:
        for (here, nbytes, _), (there, same, _) in zip(
            handle.local[0].tolist(), handle.remote[0].tolist(), strict=True
        ):
            assert nbytes == same
            target, source = (there, here) if handle.operation == "WRITE" else (here, there)
            ctypes.memmove(target, source, nbytes)
        return "DONE"

    def deregister_memory(self, handle: object, backends: list[str]) -> None: ...

    def remove_remote_agent(self, peer: str) -> None: ...


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    made: list[StandIn] = []

    def agent(name: str, config: object) -> StandIn:
        made.append(StandIn(name, config))
        return made[-1]

    api = SimpleNamespace(nixl_agent=agent, nixl_agent_config=lambda **options: options)
    monkeypatch.setattr(endpoint, "nixl", lambda: api)
    return made


class Bench:
    """A pool's bytes, and a mover to them through an agent that has them all."""

    def __init__(self) -> None:
        self.geometry = Geometry.plan(
            4 << 20, align=4096, extent_bytes=1 << 18, min_slot_bytes=4096, coherence=0, pool_uuid=bytes(16), created_ns=10**9
        )  # fmt: skip
        self.pool = np.zeros(self.geometry.pool_bytes, np.uint8)
        off = self.geometry.off_data
        pieces = np.array([[off, self.geometry.data_bytes, int(self.pool.ctypes.data) + off]], "<u8").tobytes()
        self.mover = RdmaMover(self.geometry, lambda: [Agent("host", "UCX", b"metadata", pieces, 0.0)], name="test")
        self.offsets = np.arange(PAGES, dtype=U64) * U64(PAGE) + U64(off)

    def stored(self, page: int) -> np.ndarray:
        start = int(self.offsets[page])
        return self.pool[start : start + PAGE]


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.mover.close()


def memory(seed: int = 0) -> np.ndarray:
    return np.frombuffer(bytearray(np.random.default_rng(seed).bytes(PAGES * PAGE)), np.uint8)


def halves(first: np.ndarray, second: np.ndarray) -> Fragments:
    """Pages whose first half is in one memory, and whose second half is in another."""
    rows = np.arange(PAGES, dtype=U64) * U64(PAGE // 2)
    addresses = np.stack([U64(first.ctypes.data) + rows, U64(second.ctypes.data) + rows], 1)
    return Fragments(addresses, np.full(2, PAGE // 2, U64))


def test_memory_of_gpus_is_registered_and_described_as_such(stand_ins: list[StandIn], bench: Bench) -> None:
    first, second = memory(1), memory(2)
    bench.mover.register(first.ctypes.data, first.nbytes, device=0)
    bench.mover.register(second.ctypes.data, second.nbytes, device=3)
    bench.mover.store(bench.offsets, halves(first, second))
    (agent,) = stand_ins
    assert set(agent.registered) == {
        (first.ctypes.data, first.nbytes, 0, "VRAM"), (second.ctypes.data, second.nbytes, 3, "VRAM"),
    }  # fmt: skip
    assert bench.mover.gpu_direct is True
    for transfer in agent.posted:
        assert (transfer.local[1], transfer.remote[1]) == ("VRAM", "DRAM"), "the pool is host memory of its agent"
        assert not transfer.remote[0][:, 2].any()
        for address, _, device in transfer.local[0].tolist():
            inside = first.ctypes.data <= address < first.ctypes.data + first.nbytes
            assert device == (0 if inside else 3)
    for page in range(PAGES):
        half = slice(page * PAGE // 2, (page + 1) * PAGE // 2)
        assert (bench.stored(page) == np.concatenate([first[half], second[half]])).all()
    wanted = first.copy(), second.copy()
    first[:] = second[:] = 0
    bench.mover.load(bench.offsets, halves(first, second))
    for got, expected in zip((first, second), wanted, strict=True):
        used = slice(0, PAGES * PAGE // 2)
        assert (got[used] == expected[used]).all()


def test_no_transfer_mixes_host_and_gpu(stand_ins: list[StandIn], bench: Bench) -> None:
    host, gpu = memory(1), memory(2)
    bench.mover.register(host.ctypes.data, host.nbytes)
    bench.mover.register(gpu.ctypes.data, gpu.nbytes, device=1)
    bench.mover.store(bench.offsets, halves(host, gpu))
    (agent,) = stand_ins
    kinds = [transfer.local[1] for transfer in agent.posted]
    assert set(kinds) == {"DRAM", "VRAM"}
    for transfer in agent.posted:
        devices = set(transfer.local[0][:, 2].tolist())
        assert devices == ({1} if transfer.local[1] == "VRAM" else {0})
    for page in range(PAGES):
        half = slice(page * PAGE // 2, (page + 1) * PAGE // 2)
        assert (bench.stored(page) == np.concatenate([host[half], gpu[half]])).all()


def test_registrations_that_touch_are_two_memories(stand_ins: list[StandIn], bench: Bench) -> None:
    both = memory(1)
    half = both.nbytes // 2
    bench.mover.register(both.ctypes.data, half, device=0)
    bench.mover.register(both.ctypes.data + half, half, device=1)
    rows = np.arange(PAGES, dtype=U64)[:, None] * U64(PAGE) + U64(both.ctypes.data)
    bench.mover.store(bench.offsets, Fragments(rows, np.array([PAGE], U64)))
    (agent,) = stand_ins
    described = np.concatenate([transfer.local[0] for transfer in agent.posted])
    assert described[:, 1:].tolist() == [[half, 0], [half, 1]]
    assert (bench.pool[int(bench.offsets[0]) : int(bench.offsets[0]) + both.nbytes] == both).all()


def test_gpu_memory_is_never_copied_by_the_cpu(stand_ins: list[StandIn], bench: Bench) -> None:
    """Beside memory that is not registered: what the one needs (a buffer) the other must not see."""
    gpu, unknown = memory(1), memory(2)
    bench.mover.register(gpu.ctypes.data, gpu.nbytes, device=0)
    pages = halves(gpu, unknown)
    for move in (bench.mover.store, bench.mover.load):
        with pytest.raises(TransferError, match="pages in GPU memory cannot be moved"):
            move(bench.offsets, pages)
    assert not bench.pool.any()
    assert not any(agent.posted for agent in stand_ins)
    with pytest.raises(MaruError, match="leave verify=checksum out"):
        bench.mover.checksums(bench.offsets, pages)
    bench.mover.store(bench.offsets, halves(unknown, unknown))
    assert (bench.stored(0)[: PAGE // 2] == unknown[: PAGE // 2]).all()


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed here")
def test_where_nixl_does_not_take_it_it_is_said_once_and_host_memory_still_goes(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    gpu, host = memory(1), memory(2)
    bench.mover.register(gpu.ctypes.data, gpu.nbytes, device=0)
    with caplog.at_level(logging.INFO, "maru.rdma"):
        for _ in range(3):
            for move in (bench.mover.store, bench.mover.load):
                with pytest.raises(TransferError, match=r"pages in GPU memory cannot be moved: .* take host memory"):
                    move(bench.offsets, halves(gpu, gpu))
    assert bench.mover.gpu_direct is False
    assert caplog.text.count("does not reach GPU memory") == 1
    assert "of GPU 0 cannot be registered with UCX" in caplog.text
    # Host memory is not held up by it: it gets as far as the agent, which is none.
    with pytest.raises(TransferError) as failed:
        bench.mover.load(bench.offsets, halves(host, host))
    assert "GPU" not in str(failed.value)


def test_kinds_are_kept_when_long_ranges_are_cut() -> None:
    local = np.array([100, 10_000, 20_000], U64)
    ranges = Ranges(local, local, np.array([50, 5000, 7], U64))
    assert by_kind(ranges, np.full(3, HOST)) == [ranges]
    host, gpu = by_kind(ranges, np.array([2, HOST, 5]))[0], by_kind(ranges, np.array([2, HOST, 5]))[1]
    assert (host.kind, host.local.tolist(), gpu.kind, gpu.devices.tolist()) == ("DRAM", [10_000], "VRAM", [2, 5])
    cut, _ = batches(gpu, 20)
    assert cut.devices.tolist() == [2, 2, 2, 5]
