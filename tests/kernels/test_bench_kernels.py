"""``maru-bench kernels``: its ways to move, each moving every byte, and its checks, each noticing one that does not."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from cuda_recorder import Recorder
from rich.console import Console

torch = pytest.importorskip("torch", reason="torch is not installed here: make sglang-env, and use its Python")

from maru_bench import cli  # noqa: E402
from maru_bench.kernels import peers as ways  # noqa: E402
from maru_bench.kernels.cases import Case  # noqa: E402
from maru_bench.kernels.measure import check, measure, sample, take_part  # noqa: E402
from maru_bench.kernels.models import MODELS, Model  # noqa: E402
from maru_bench.kernels.peers import Machine, Peer, ReferencePeer  # noqa: E402
from maru_bench.kernels.result import KernelsResult  # noqa: E402
from maru_core.errors import ConfigError, MaruError  # noqa: E402
from maru_core.pool.memory import PoolMemory  # noqa: E402
from maru_sglang.kernels.pinning import Pins  # noqa: E402
from maru_sglang.kernels.runtime import Runtime  # noqa: E402

CPU = torch.device("cpu")
#: K and V of three layers, a latent of two; rows whose bytes are no power of two.
MHA = Model("mha", 3, 2, 48)
MLA = Model("mla", 2, 1, 1160)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    return Recorder(tmp_path_factory.mktemp("recorder"))


@pytest.fixture(scope="module")
def memory() -> Iterator[PoolMemory]:
    uri = f"shm://maru-test-{os.getpid()}-bench-kernels?extent=256K&min_slot=4K&align=4K"
    with PoolMemory.create(uri, 4 << 20) as made:
        yield made
        made.unlink()


@pytest.fixture
def cpu(memory: PoolMemory) -> Machine:
    return Machine(CPU, memory, None, Pins(memory, None))


@pytest.fixture
def recorded(memory: PoolMemory, compiled: Recorder) -> Iterator[Machine]:
    """CPU memory, and a CUDA runtime that copies it and refuses what crosses two registrations."""
    compiled.reset()
    runtime = Runtime(compiled.path)
    pins = Pins(memory, runtime, 512 << 10)
    geometry = memory.geometry
    pins.ensure(
        np.arange(geometry.extent_count, dtype=np.uint64) * np.uint64(geometry.extent_bytes)
        + np.uint64(geometry.off_data),
        geometry.extent_bytes,
        60.0,
    )
    machine = Machine(CPU, memory, runtime, pins)
    machine.stream_handle = 7
    yield machine
    pins.close()


def case_of(memory: PoolMemory, model: Model = MHA, page_tokens: int = 4, pages: int = 6, seed: int = 3) -> Case:
    return Case(model, page_tokens, pages, memory, CPU, seed)


@pytest.mark.parametrize("model", [MHA, MLA])
@pytest.mark.parametrize("page_tokens", [1, 5])
@pytest.mark.parametrize("kind", [ways.BatchedPeer, ways.MemcpyPeer])
def test_copies_by_dma_move_every_byte(
    memory: PoolMemory, recorded: Machine, model: Model, page_tokens: int, kind: type[Peer]
) -> None:
    peer = kind(case_of(memory, model, page_tokens), recorded)
    assert check(peer) == ""
    assert peer.moved_bytes == 6 * model.token_bytes * page_tokens


@pytest.mark.parametrize("kind", [ways.BatchedPeer, ways.MemcpyPeer])
def test_many_small_fragments_are_cut_to_a_part_of_the_pages(
    memory: PoolMemory, recorded: Machine, kind: type[Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways, "FRAGMENTS_MAX", 14)  # 6 a page
    peer = kind(case_of(memory), recorded)
    assert peer.count == 2
    assert peer.moved_bytes == 2 * peer.case.nbytes
    assert check(peer) == ""


def test_the_link_is_one_copy_each_way_inside_one_registration(
    memory: PoolMemory, recorded: Machine, compiled: Recorder
) -> None:
    peer = ways.LinkPeer(case_of(memory, MLA, 50, 6), recorded)
    before = compiled.calls.count("cudaMemcpyAsync")
    memory.data[: peer.moved_bytes] = 9
    peer.load()
    assert (peer._buffer == 9).all()
    peer._buffer.fill_(4)
    peer.store()
    assert (memory.data[: peer.moved_bytes] == 4).all()
    assert compiled.calls.count("cudaMemcpyAsync") == before + 2
    assert peer.moved_bytes == recorded.pins.chunk_bytes


@pytest.mark.parametrize("kind", [ways.BatchedPeer, ways.MemcpyPeer])
def test_a_copy_that_fails_is_an_error_and_not_a_rate(
    memory: PoolMemory, recorded: Machine, compiled: Recorder, kind: type[Peer]
) -> None:
    peer = kind(case_of(memory), recorded)
    compiled.fail("cudaMemcpyBatchAsync" if kind is ways.BatchedPeer else "cudaMemcpyAsync", 1)
    with pytest.raises(MaruError, match="failed with 1"):
        peer.store()
    assert compiled.raw_last_error() == 0


class _SGLangOnCpu(ways.SGLangPeer):
    """With the plain torch versions of SGLang's kernels that serve engines without a GPU."""

    module = "maru_engine_kit.transfer"


@pytest.mark.parametrize("model", [MHA, MLA])
def test_sglangs_kernels_are_called_as_they_want_it(memory: PoolMemory, cpu: Machine, model: Model) -> None:
    peer = _SGLangOnCpu(case_of(memory, model), cpu)
    assert check(peer) == ""
    peer._hosts[0][2, 1, 5] ^= 1
    assert "host pool 0 is not what the engine has" in peer.stored()


@pytest.mark.parametrize("model", [MHA, MLA])
def test_the_reference_moves_every_byte(memory: PoolMemory, cpu: Machine, model: Model) -> None:
    assert check(ReferencePeer(case_of(memory, model), cpu)) == ""


class _Leaves(ReferencePeer):
    def store(self) -> None:
        for engine, pool in self._pairs[:-1]:
            pool.copy_(engine)


class _Swaps(ReferencePeer):
    def store(self) -> None:
        super().store()
        first, second = self._slots[0].clone(), self._slots[1].clone()
        self._slots[0].copy_(second)
        self._slots[1].copy_(first)


class _WritesBeyond(ReferencePeer):
    def store(self) -> None:
        super().store()
        start = int(self.case.offsets[0]) - self.case.memory.geometry.off_data
        self.case.memory.data[start + self.case.nbytes] ^= 1


class _LoadsNothing(ReferencePeer):
    def load(self) -> None:
        return


class _LoadsOneByteWrong(ReferencePeer):
    def load(self) -> None:
        super().load()
        self._pairs[7][0][3] ^= 1


class _LoadsIntoAnother(ReferencePeer):
    def load(self) -> None:
        super().load()
        other = next(page for page in range(12) if page not in self.case.page_ids)
        self.case.buffers[4][other * self.case.page_tokens, 0] ^= 1


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (_Leaves, r"after the store, \d+ bytes of the pool are wrong"),
        (_Swaps, r"after the store, \d+ bytes of the pool are wrong"),
        (_WritesBeyond, "after the store, 1 bytes of the pool are wrong"),
        (_LoadsNothing, r"after the load, \d+ bytes of the engine's buffer 0 are wrong"),
        (_LoadsOneByteWrong, r"after the load, 1 bytes of the engine's buffer \d are wrong"),
        (_LoadsIntoAnother, "after the load, 1 bytes of the engine's buffer 4 are wrong"),
    ],
)
def test_a_way_that_moves_something_else_is_noticed(
    memory: PoolMemory, cpu: Machine, kind: type[Peer], problem: str
) -> None:
    found = check(kind(case_of(memory), cpu))
    assert re.match(problem, found), found


def test_slots_do_not_overlap_and_are_drawn_from_the_whole_pool(memory: PoolMemory) -> None:
    case = case_of(memory, MLA, 3, 20)
    geometry = memory.geometry
    starts = np.sort(case.offsets)
    assert (np.diff(starts) >= case.nbytes).all()
    relative = starts - np.uint64(geometry.off_data)
    assert (relative % np.uint64(geometry.extent_bytes) + np.uint64(case.nbytes) <= geometry.extent_bytes).all()
    assert len(set((relative // np.uint64(geometry.extent_bytes)).tolist())) > 1
    with pytest.raises(ConfigError, match="give a smaller --bytes"):
        case_of(memory, MHA, 1, 500)


def test_each_peer_takes_its_turn_first_and_the_first_round_does_not_count(memory: PoolMemory, cpu: Machine) -> None:
    turns: list[str] = []

    def kind(of: str) -> type[ReferencePeer]:
        class Named(ReferencePeer):
            name = of

            def store(self) -> None:
                turns.append(of + "+")

            def load(self) -> None:
                turns.append(of + "-")

        return Named

    case = case_of(memory)
    seconds = sample([kind(name)(case, cpu) for name in "abc"], 3)
    assert "".join(turns) == "a+a-b+b-c+c-b+b-c+c-a+a-c+c-a+a-b+b-a+a-b+b-c+c-"
    assert {name: len(taken) for name, taken in seconds["load"].items()} == {"a": 3, "b": 3, "c": 3}


def test_peers_that_cannot_take_part_are_told_with_the_reason(memory: PoolMemory, cpu: Machine) -> None:
    absent: dict[str, str] = {}
    checked: list = []
    there = take_part(case_of(memory), cpu, absent, checked, "mha")
    assert set(absent) == {"kernel", "batched", "memcpy", "sglang"}
    assert all(absent.values())
    assert [peer.name for peer in there] == ["maru", "reference"]
    assert [(entry.peer, entry.problem) for entry in checked] == [("maru", ""), ("reference", "")]


def test_a_rival_that_fails_is_left_out_and_maru_that_fails_fails_the_run(
    memory: PoolMemory, recorded: Machine, compiled: Recorder
) -> None:
    absent: dict[str, str] = {}
    checked: list = []
    compiled.fail("cudaMemcpyBatchAsync", 1)
    there = take_part(case_of(memory), recorded, absent, checked, "mha")
    assert "failed with 1" in absent["batched"]
    assert "memcpy" in [peer.name for peer in there]
    case = case_of(memory)
    case.offsets = case.offsets + np.uint64(memory.geometry.pool_bytes)
    checked.clear()
    take_part(case, Machine(CPU, memory, None, Pins(memory, None)), absent, checked, "mha")
    assert "PoolError" in next(entry.problem for entry in checked if entry.peer == "maru")


def test_a_measurement_has_every_peer_both_ways_and_what_it_did_to_other_work(
    memory: PoolMemory, recorded: Machine
) -> None:
    case = case_of(memory)
    absent: dict[str, str] = {}
    checked: list = []
    there = take_part(case, recorded, absent, checked, "mha")
    asked: list[int] = []

    class Work:
        def beside(self, move: Callable[[], None], nbytes: int) -> tuple[float, float]:
            move()
            asked.append(nbytes)
            return 1.5, 2.25

    rows = measure("mha", case, recorded, there, Work(), 2, lambda text: None)
    assert [row.operation for row in rows] == ["store", "load"]
    for row in rows:
        assert set(row.gbps) == {"maru", "batched", "memcpy", "reference", "link"}
        assert all(rate > 0 for rate in row.gbps.values())
        assert set(row.to_rivals) == {"batched", "memcpy"}
        assert row.to_link == pytest.approx(row.gbps["maru"] / row.gbps["link"])
        assert row.slowdown == {"maru": 1.5, "batched": 1.5}
        assert (row.object_bytes, row.fragment_bytes) == (case.nbytes, 4 * MHA.row_bytes)
    assert asked == [6 * case.nbytes] * 4
    result = KernelsResult(
        machine={"gpu": "none"}, seed=1, repeats=2, sample_bytes=1, chosen="", pinning="", checked=checked,
        absent=absent, rows=rows,
    )  # fmt: skip
    console = Console(width=200, record=True, file=io.StringIO())
    for table in result.tables():
        console.print(table)
    text = console.export_text()
    assert f"{rows[0].gbps['memcpy']:.1f}" in text
    assert text.count("1.50 (2.2)") == 4
    assert check(there[0]) == ""  # the engine and the pool were left usable


def run_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "maru_bench", "kernels", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | environment, timeout=600
    )


def test_the_command_checks_every_model_the_kernels_too_and_says_what_it_compared(tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    before = set(Path("/dev/shm").glob("maru-bench-kernels-*"))
    done = run_command("--check", "--pages", "1,3", "--json", str(file), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(file.read_text())
    assert data["rows"] == []
    assert data["seed"] == 1
    assert data["machine"]["torch"] == torch.__version__
    assert [(row["model"], row["page_tokens"], row["peer"], row["problem"]) for row in data["checked"]] == [
        (model, tokens, peer, "") for model in MODELS for tokens in (1, 3) for peer in ("maru", "kernel", "reference")
    ]
    assert "without memcpy: there is no CUDA runtime" in done.stdout
    assert set(Path("/dev/shm").glob("maru-bench-kernels-*")) <= before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_why_and_gives_no_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    monkeypatch.setattr(sys, "argv", ["maru-bench", "kernels", "--json", str(file)])
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "no GPU to measure with: " in errors.getvalue()
    assert "--check" in errors.getvalue()
    assert not file.exists()
