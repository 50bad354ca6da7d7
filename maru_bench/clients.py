"""``maru-bench metadata --clients N``: several client processes ask one server at once, as fast as they can.

What is measured is the server: the CPU time that its whole process spends on one match (from the kernel's own accounting,
so that it does not matter who else runs), and how long the clients wait (p50 and p99), alone and with a writer at work. The same
clients put the same number of bytes through a bare echo, in turn with the matches.

``python -m maru_bench.clients ENDPOINT ECHO CONTROL SEED PAGES`` is one such client process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import zmq
from rich import box
from rich.table import Table

from maru_bench.copy import describe_machine
from maru_bench.echo import EchoClient, EchoServer
from maru_bench.metadata import CHAINS, TARGET_PAGES, Client, message_sizes, pool_megabytes
from maru_bench.processes import ManagedProcess, python_path, scratch_directory
from maru_bench.servers import MaruServer
from maru_core.errors import MaruError
from maru_core.protocol import HASH_BYTES
from maru_core.session import Session

#: CPU time of the server's process for one match of TARGET_PAGES pages, microseconds.
TARGET_CPU_US: Final = 100.0
#: Latencies that one client tells of one phase, at most.
_SAMPLES: Final = 20_000
_START_MS: Final = 30_000
#: Chains that a writer leaves before it deletes them.
_WRITTEN: Final = 16

PHASES: Final = ("echo", "match", "match+writer")


class ClientsOptions(msgspec.Struct, frozen=True, kw_only=True):
    clients: int
    pages: int = TARGET_PAGES
    repeats: int = 5
    seconds: float = 2.0
    """Of one phase."""
    resident: int = 8192


class _Order(msgspec.Struct, array_like=True):
    what: str  # echo, match, write
    seconds: float


class _Result(msgspec.Struct, array_like=True):
    calls: int
    latencies_us: list[float]


class PhaseRow(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of load: medians over the repeats."""

    phase: str
    calls_per_s: float
    p50_us: float
    p99_us: float
    cpu_us: float
    """CPU time of the server's (or the echo's) process per call of a reader, microseconds; the writer's share included."""
    writes_per_s: float = 0.0
    """Batches reserved and committed meanwhile."""


class ClientsResult(msgspec.Struct, frozen=True, kw_only=True):
    machine: dict[str, str | int]
    clients: int
    pages: int
    repeats: int
    seconds: float
    rows: list[PhaseRow]
    target_cpu_us: float = TARGET_CPU_US

    @property
    def match(self) -> PhaseRow:
        return next(row for row in self.rows if row.phase == "match")

    @property
    def targets_met(self) -> bool:
        return self.pages != TARGET_PAGES or self.match.cpu_us <= self.target_cpu_us

    def tables(self) -> list[Table]:
        table = Table(
            title=f"{self.clients} clients, {self.pages} pages a call (medians of {self.repeats} times {self.seconds:g} s)",
            box=box.SIMPLE_HEAD,
            collapse_padding=True,
            pad_edge=False,
        )
        table.add_column("", no_wrap=True)
        for name in ("calls/s", "p50 µs", "p99 µs", "CPU µs", "writes/s"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("target", no_wrap=True)
        for row in self.rows:
            target = "-"
            if row.phase == "match" and self.pages == TARGET_PAGES:
                target = f"CPU <= {self.target_cpu_us:g}: " + (
                    "[green]met[/green]" if self.targets_met else "[red]not met[/red]"
                )
            table.add_row(
                row.phase,
                f"{row.calls_per_s:.0f}",
                f"{row.p50_us:.0f}",
                f"{row.p99_us:.0f}",
                f"{row.cpu_us:.1f}",
                f"{row.writes_per_s:.0f}" if row.writes_per_s else "-",
                target,
            )
        return [table]

    def write_json(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def cpu_s(pid: int) -> float:
    """CPU time of all threads of a process so far, seconds, as the kernel accounts for it (nanoseconds, not ticks)."""
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            total += int(path.read_text().split()[0])
    return total / 1e9


def chains_of(seed: int, pages: int) -> list[bytes]:
    """The chains that readers ask for; the same in every process."""
    random = np.random.default_rng(seed)
    return [random.bytes(HASH_BYTES * pages) for _ in range(CHAINS)]


def run(options: ClientsOptions, narrate: Callable[[str], None]) -> ClientsResult:
    """Measure.

    Raises:
        MaruError: a process did not start or a call failed.
    """
    seed = int.from_bytes(os.urandom(4), "little")
    slots = options.resident + (CHAINS + _WRITTEN + 4) * options.pages
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(scratch_directory())
        server = stack.enter_context(MaruServer(scratch, size=f"{pool_megabytes(slots)}M"))
        echo = stack.enter_context(EchoServer(scratch))
        session = stack.enter_context(
            contextlib.closing(Session(server.endpoint, name="maru-bench metadata", timeout_s=10.0))
        )
        client = Client(session)
        narrate(f"filling it with {options.resident} pages")
        client.fill(options.resident)
        spare = client.fill(slots - options.resident)
        client.remove(spare)
        for chain in chains_of(seed, options.pages):
            client.store(chain)
        narrate(f"starting {options.clients} clients and a writer")
        crew = stack.enter_context(_Crew(scratch, server.endpoint, echo.endpoint, seed, options))
        samples: dict[str, list[PhaseRow]] = {phase: [] for phase in PHASES}
        for repeat in range(options.repeats):
            for phase in PHASES:
                narrate(f"{phase} ({repeat + 1} of {options.repeats})")
                pid = echo.pid if phase == "echo" else server.process.pid
                samples[phase].append(_phase(phase, crew, pid, options.seconds))
    return ClientsResult(
        machine=describe_machine(),
        clients=options.clients,
        pages=options.pages,
        repeats=options.repeats,
        seconds=options.seconds,
        rows=[median_row(samples[phase]) for phase in PHASES],
    )


def _phase(phase: str, crew: _Crew, pid: int, seconds: float) -> PhaseRow:
    before = cpu_s(pid)
    results, written = crew.work("echo" if phase == "echo" else "match", seconds, write=phase == "match+writer")
    spent = cpu_s(pid) - before
    calls = sum(result.calls for result in results)
    latencies = np.concatenate([result.latencies_us for result in results])
    if not calls:
        raise MaruError(f"no {phase} was answered in {seconds:g} s: is the machine overloaded?")
    return PhaseRow(
        phase=phase,
        calls_per_s=calls / seconds,
        p50_us=float(np.percentile(latencies, 50)),
        p99_us=float(np.percentile(latencies, 99)),
        cpu_us=spent / calls * 1e6,
        writes_per_s=written / seconds,
    )


def median_row(rows: list[PhaseRow]) -> PhaseRow:
    """The median of each figure."""
    figures = {
        name: statistics.median(getattr(row, name) for row in rows)
        for name in ("calls_per_s", "p50_us", "p99_us", "cpu_us", "writes_per_s")
    }
    return PhaseRow(phase=rows[0].phase, **figures)


class _Crew:
    """The client processes, the last of them the writer. A context manager."""

    def __init__(self, directory: Path, endpoint: str, echo: str, seed: int, options: ClientsOptions) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control = self._context.socket(zmq.ROUTER)
        self._control.linger = 0
        self._control.router_mandatory = 1
        control = f"ipc://{directory}/control.sock"
        self._control.bind(control)
        arguments = [endpoint, echo, control, str(seed), str(options.pages)]
        self._processes = [
            ManagedProcess(
                f"client {number}",
                [sys.executable, "-m", "maru_bench.clients", *arguments, str(number)],
                directory / f"client-{number}.log",
                env={"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
            )
            for number in range(options.clients + 1)
        ]

    def work(self, what: str, seconds: float, *, write: bool) -> tuple[list[_Result], int]:
        """Have all readers do one thing; the batches that the writer wrote meanwhile, if it was to."""
        orders = [what] * (len(self._processes) - 1) + (["write"] if write else [])
        for number, order in enumerate(orders):
            self._control.send_multipart([b"%d" % number, msgspec.msgpack.encode(_Order(order, seconds))])
        results = dict(self._answers(len(orders), int(seconds * 1000) + _START_MS))
        written = results.pop(len(orders) - 1).calls if write else 0
        return list(results.values()), written

    def _answers(self, count: int, wait_ms: int) -> Iterator[tuple[int, _Result]]:
        for _ in range(count):
            if not self._control.poll(wait_ms):
                raise next((p for p in self._processes if not p.running), self._processes[0]).failure("did not answer")
            number, data = self._control.recv_multipart()
            yield int(number), msgspec.msgpack.decode(data, type=_Result)

    def __enter__(self) -> _Crew:
        try:
            for _ in self._answers(len(self._processes), _START_MS):
                pass
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        self._control.close()
        self._context.term()


def _serve_orders(endpoint: str, echo: str, control: str, seed: int, pages: int, number: int) -> None:
    """One client process: does what it is told until it is killed."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    orders = context.socket(zmq.DEALER)
    orders.routing_id = b"%d" % number
    orders.connect(control)
    client = Client(Session(endpoint, name=f"maru-bench client {number}", timeout_s=10.0))
    chains = chains_of(seed, pages)
    # Not all clients ask for the same chain at the same moment.
    in_turn = itertools.cycle(chains[number % CHAINS :] + chains[: number % CHAINS])
    echo_client = EchoClient(echo)
    request = EchoClient.request(*message_sizes(client, chains[0])["match"])
    written: list[bytes] = []

    def match() -> None:
        if client.match(next(in_turn)).pages != pages:
            raise MaruError(f"stored pages were not found by client {number}: this is a fault of Maru")

    def write() -> None:
        chain = os.urandom(HASH_BYTES * pages)
        client.store(chain)
        written.append(chain)
        if len(written) == _WRITTEN:
            client.remove(written)

    work: dict[str, Callable[[], object]] = {
        "match": match,
        "write": write,
        "echo": lambda: echo_client.exchange(request),
    }
    orders.send(msgspec.msgpack.encode(_Result(0, [])))
    clock = time.perf_counter
    while True:
        order = msgspec.msgpack.decode(orders.recv(), type=_Order)
        call = work[order.what]
        latencies: list[float] = []
        end = clock() + order.seconds
        while (began := clock()) < end:
            call()
            latencies.append((clock() - began) * 1e6)
        step = -(-len(latencies) // _SAMPLES) or 1
        orders.send(msgspec.msgpack.encode(_Result(len(latencies), latencies[::step])))


if __name__ == "__main__":
    _serve_orders(sys.argv[1], sys.argv[2], sys.argv[3], *(int(text) for text in sys.argv[4:7]))
