"""``maru-bench copy --transport rdma``: GB/s of the mover for pools on other machines, beside NIXL alone.

A real ``maru-server``, a pool in /dev/shm and a real ``maru-agent`` on this machine, between which UCX finds its way (``--ucx-tls tcp`` has it
take no other than a network would have). The same pages go by turns, in the same run, between the same engine buffer and the same
slots, through the same agent:

=============  ===================================================================================================
peer           one batch is
=============  ===================================================================================================
Maru           ``RdmaMover.store`` / ``RdmaMover.load`` of pages in memory that was registered
through a      the same where the engine's memory was not registered: every byte is copied once more
buffer
NIXL           :mod:`maru_bench.bare_nixl`: of prepared lists, made, posted and waited for in the way that is fastest here
=============  ===================================================================================================

Before the first measurement each of NIXL's ways is tried, the two fastest take part in the whole run, and the better one is the limit;
Maru's mover has made enough calls to have found its own. Messages to the server (reserve, commit, match) are not in it: they
are what ``maru-bench copy`` and ``maru-bench metadata`` are about. Bytes are checked after every load, and in the end through a mapping.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from rich import box
from rich.table import Table

from maru_bench.bare_nixl import WAYS, BareNixl, Way
from maru_bench.copy import BENCH_NAMESPACE, describe_machine, human_bytes
from maru_bench.pages import FRAGMENTS, EngineBuffer, addresses
from maru_bench.processes import ManagedProcess, ServerFailedError, python_path, scratch_directory
from maru_bench.servers import MaruServer
from maru_core.errors import ConfigError, MaruError
from maru_core.mover import Fragments
from maru_core.pool import Geometry
from maru_core.protocol import HASH_BYTES, ROOT
from maru_core.rdma import RdmaMover
from maru_core.rdma.endpoint import nixl
from maru_core.session import Session
from maru_core.store import Store, StoreConfig

#: Part of the bare transfer's speed that Maru is to reach, for pages and batches of at least so many bytes.
TARGET: Final = 0.9
TARGET_PAGE_BYTES: Final = 1 << 20
TARGET_BYTES: Final = 16 << 20
#: A sample moves about this much, batch after batch, each at another place; short batches stop at so many calls.
_SAMPLE_BYTES: Final = 64 << 20
_SAMPLE_CALLS: Final = 16
#: Calls before the first measurement: as many as the mover needs to try every size of transfer.
_WARM_CALLS: Final = 16
#: How often each of NIXL's ways is tried, and how many then take part.
_TRIES: Final = 3
_CHOSEN: Final = 2
_MEMORY_LIMIT: Final = 2 << 30
_START_S: Final = 60.0
_POLL_S: Final = 0.02
_OPERATIONS: Final = {"store": "WRITE", "load": "READ"}


class RdmaCopyOptions(msgspec.Struct, frozen=True, kw_only=True):
    page_bytes: list[int]
    batches: list[int]
    repeats: int = 7
    ucx_tls: str | None = None
    """Transports that UCX may use, as its variable UCX_TLS; None: as the environment says, or UCX chooses."""


class RdmaCopyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One operation at one page size and batch. Speeds are medians, in GB/s (10^9 bytes); ratios are of the medians."""

    operation: str
    page_bytes: int
    batch: int
    maru_gbps: float
    staged_gbps: float
    bare_gbps: float
    bare_way: str
    to_bare: float
    staged_to_bare: float
    target: float | None
    """Ratio to the bare transfer to reach; None where pages or batch are too small for one."""
    met: bool | None


def make_row(
    operation: str, page_bytes: int, batch: int, seconds: dict[str | Way, list[float]], moved: int
) -> RdmaCopyRow:
    """The row of one operation.

    Args:
        seconds: samples of ``maru``, of ``staged`` and of each way of the bare transfer; the best way is the limit.
        moved: bytes that each sample moved.
    """
    speed = {peer: moved / statistics.median(samples) / 1e9 for peer, samples in seconds.items()}
    way = max((peer for peer in speed if isinstance(peer, Way)), key=lambda peer: speed[peer])
    big = page_bytes >= TARGET_PAGE_BYTES and page_bytes * batch >= TARGET_BYTES
    ratio = speed["maru"] / speed[way]
    return RdmaCopyRow(
        operation=operation,
        page_bytes=page_bytes,
        batch=batch,
        maru_gbps=speed["maru"],
        staged_gbps=speed["staged"],
        bare_gbps=speed[way],
        bare_way=str(way),
        to_bare=ratio,
        staged_to_bare=speed["staged"] / speed[way],
        target=TARGET if big else None,
        met=ratio >= TARGET if big else None,
    )


class RdmaCopyResult(msgspec.Struct, frozen=True, kw_only=True):
    machine: dict[str, str | int]
    repeats: int
    ucx_tls: str
    """Transports that UCX was allowed; empty: it chose."""
    rows: list[RdmaCopyRow]

    @property
    def targets_met(self) -> bool:
        return all(row.met is not False for row in self.rows)

    def table(self) -> Table:
        table = Table(
            title=f"GB/s through an agent, beside NIXL alone (UCX_TLS {self.ucx_tls or 'left to UCX'}, medians of {self.repeats})",
            box=box.SIMPLE_HEAD,
            collapse_padding=True,
            pad_edge=False,
        )
        table.add_column("", no_wrap=True)
        for name in ("page", "batch", "Maru", "through\na buffer", "NIXL", "Maru /\nNIXL", "buffer /\nNIXL"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column(f"target\n{TARGET}", no_wrap=True)
        for row in self.rows:
            table.add_row(
                row.operation,
                human_bytes(row.page_bytes),
                str(row.batch),
                f"{row.maru_gbps:.2f}",
                f"{row.staged_gbps:.2f}",
                f"{row.bare_gbps:.2f}",
                f"{row.to_bare:.2f}",
                f"{row.staged_to_bare:.2f}",
                {None: "-", True: "[green]met[/green]", False: "[red]not met[/red]"}[row.met],
            )
        return table

    def write_json(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def unavailable() -> str | None:
    """Why this machine cannot run it, if so."""
    try:
        nixl()
    except ConfigError as error:
        return str(error)
    return None


# ------------------------------------------------------------------ the run


def run(options: RdmaCopyOptions, narrate: Callable[[str], None]) -> RdmaCopyResult:
    """Measure every size and batch.

    Raises:
        ConfigError: no NIXL, or sizes that do not fit in the memory this may use.
        MaruError: server or agent did not start, or a batch was not moved.
    """
    nixl()
    shapes = [(size, batch) for size in options.page_bytes for batch in options.batches]
    largest = max(_calls(size, batch) * size * batch for size, batch in shapes)
    if 3 * largest > _MEMORY_LIMIT:
        raise ConfigError(
            f"a batch of {largest >> 20} MiB would need {3 * largest >> 20} MiB in all, the limit is {_MEMORY_LIMIT >> 20} MiB: give "
            "smaller --sizes or --batches"
        )
    if options.ucx_tls is not None:
        os.environ["UCX_TLS"] = options.ucx_tls  # of this process's UCX, which is not there yet, and of the agent's
    rows: list[RdmaCopyRow] = []
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(scratch_directory())
        narrate("starting maru-server and maru-agent")
        server = stack.enter_context(MaruServer(scratch, size=f"{math.ceil(largest * 1.5 / (1 << 20)) + 256}M"))
        _start_agent(stack, server, scratch)
        engine = EngineBuffer(largest)
        session = Session(server.endpoint, name="maru-bench copy", timeout_s=10.0)
        stack.callback(session.close)
        bench = _Bench(stack, session, engine)
        for size, batch in shapes:
            narrate(f"{batch} pages of {human_bytes(size)}")
            near = Store.open(
                StoreConfig(server=server.endpoint, transport="cxl", timeout_ms=10_000),
                BENCH_NAMESPACE,
                name="maru-bench pages",
                object_bytes=size,
            )
            try:
                rows += bench.measure(near, size, batch, options.repeats, narrate)
            finally:
                near.close()
    rows.sort(key=lambda row: (list(_OPERATIONS).index(row.operation), row.page_bytes, row.batch))
    return RdmaCopyResult(
        machine=describe_machine(), repeats=options.repeats, ucx_tls=os.environ.get("UCX_TLS", ""), rows=rows
    )


def _calls(size: int, batch: int) -> int:
    return min(max(1, _SAMPLE_BYTES // (size * batch)), _SAMPLE_CALLS)


def _start_agent(stack: contextlib.ExitStack, server: MaruServer, scratch: Path) -> None:
    """Start an agent and wait until the server knows it."""
    log = scratch / "maru-agent.log"
    line = [sys.executable, "-m", "maru_agent", "--server", server.endpoint]
    agent = ManagedProcess("maru-agent", line, log, env={"PYTHONPATH": python_path()})
    stack.callback(agent.stop)
    deadline = time.monotonic() + _START_S
    while b"announced to the server" not in log.read_bytes():
        if not agent.running:
            raise agent.failure("ended while it started")
        if time.monotonic() > deadline:
            raise agent.failure(f"did not announce itself within {_START_S:g} s")
        time.sleep(_POLL_S)


class _Bench:
    def __init__(self, stack: contextlib.ExitStack, session: Session, engine: EngineBuffer) -> None:
        session.connect()
        reply = session.agents()
        if len(reply.agents) != 1:
            raise ServerFailedError(f"{len(reply.agents)} agents serve the benchmark's own pool: one was started")
        self._engine = engine
        self._pieces = np.frombuffer(reply.agents[0].pieces, "<u8").reshape(-1, 3).astype(np.uint64)
        geometry = Geometry.read(reply.superblock)
        self._movers: dict[str, RdmaMover] = {}
        for name in ("maru", "staged"):
            mover = RdmaMover(geometry, lambda: session.agents().agents, name=f"bench {name}", timeout_s=30.0)
            stack.callback(mover.close)
            self._movers[name] = mover
        address, nbytes = int(engine.data.ctypes.data), engine.data.nbytes
        self._movers["maru"].register(address, nbytes)
        self._bare = BareNixl(reply.agents[0].metadata, address, nbytes)
        stack.callback(self._bare.close)

    def measure(
        self, near: Store, size: int, batch: int, repeats: int, narrate: Callable[[str], None]
    ) -> list[RdmaCopyRow]:
        calls = _calls(size, batch)
        total = calls * batch
        pages = self._engine.pages(0, total, size, total)
        fragments = Fragments(addresses(pages), np.full(FRAGMENTS, size // FRAGMENTS, np.uint64))
        hashes = os.urandom(HASH_BYTES * total)
        offsets = _slots(near, hashes, fragments)
        parts = [slice(index * batch, (index + 1) * batch) for index in range(calls)]
        batches = [(offsets[part], fragments.select(part)) for part in parts]
        starts = np.arange(FRAGMENTS, dtype=np.uint64) * np.uint64(size // FRAGMENTS)
        self._bare.prepare(fragments.addresses, self._at_agent(offsets)[:, None] + starts, size // FRAGMENTS, batch)

        def sample(peer: str | Way, operation: str) -> float:
            """Seconds for all batches; their bytes are checked outside of it."""
            way = _OPERATIONS[operation]
            if isinstance(peer, Way):
                self._bare.forget()
                began = time.perf_counter()
                for index in range(calls):
                    self._bare.make(way, index, peer)
                    self._bare.move(way, index, peer)
            else:
                mover = self._movers[peer]
                move = mover.store if operation == "store" else mover.load
                began = time.perf_counter()
                for at, where in batches:
                    move(at, where)
            return time.perf_counter() - began

        def both(peer: str | Way) -> tuple[float, float]:
            """Seconds of a store of new bytes and of a load of them."""
            marks = self._engine.data[: total * size : 4096]
            marks += 1
            stored = sample(peer, "store")
            expected = marks.copy()
            np.invert(marks, out=marks)
            loaded = sample(peer, "load")
            if not np.array_equal(marks, expected):
                raise MaruError(
                    f"{peer} loaded other bytes than it stored: this is a fault of the benchmark or of Maru"
                )
            return stored, loaded

        narrate(f"{batch} pages of {human_bytes(size)}: looking for NIXL's fastest way")
        tried: dict[Way, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _ in range(_TRIES):
            for way in WAYS:
                tried[way].append(both(way))
        ranked = {
            operation: sorted(WAYS, key=lambda way: statistics.median(times[column] for times in tried[way]))[:_CHOSEN]
            for column, operation in enumerate(_OPERATIONS)
        }
        ways = list(dict.fromkeys(way for chosen in ranked.values() for way in chosen))
        for name in self._movers:
            for _ in range(math.ceil(_WARM_CALLS / calls)):
                both(name)
        peers: list[str | Way] = ["maru", *ways, "staged"]
        seconds: dict[str, dict[str | Way, list[float]]] = {name: defaultdict(list) for name in _OPERATIONS}
        narrate(f"{batch} pages of {human_bytes(size)}")
        for round_ in range(repeats):
            for turn in range(len(peers)):
                peer = peers[(turn + round_) % len(peers)]
                for operation, took in zip(_OPERATIONS, both(peer), strict=True):
                    if not isinstance(peer, Way) or peer in ranked[operation]:
                        seconds[operation][peer].append(took)
        self._compare(near, hashes, fragments, total * size)
        near.delete(hashes[:HASH_BYTES])  # with all that continues it
        return [make_row(operation, size, batch, seconds[operation], total * size) for operation in _OPERATIONS]

    def _at_agent(self, offsets: np.ndarray) -> np.ndarray:
        """Where these bytes of the pool are in the agent's memory."""
        piece = np.searchsorted(self._pieces[:, 0], offsets, side="right") - 1
        at: np.ndarray = offsets - self._pieces[piece, 0] + self._pieces[piece, 2]
        return at

    def _compare(self, near: Store, hashes: bytes, fragments: Fragments, nbytes: int) -> None:
        """All bytes of the slots, through a mapping, with all bytes of the engine's memory."""
        before = self._engine.data[:nbytes].copy()
        self._engine.data[:nbytes] = 0
        if not near.get("kv", 0, hashes, fragments).all() or not np.array_equal(self._engine.data[:nbytes], before):
            raise MaruError("the pool holds other bytes than were stored: this is a fault of the benchmark or of Maru")


def _slots(near: Store, hashes: bytes, fragments: Fragments) -> np.ndarray:
    """Slots of the pool for all pages: their offsets. They are stored once; a server gives a pool memory as it fills."""
    deadline = time.monotonic() + _START_S
    for page in range(len(fragments)):
        mine = slice(page * HASH_BYTES, (page + 1) * HASH_BYTES)
        parent = hashes[mine.start - HASH_BYTES : mine.start] or ROOT
        while not near.put("kv", 0, 1, parent, hashes[mine], fragments.select(slice(page, page + 1))).all():
            if time.monotonic() > deadline:
                raise MaruError(f"the pages could not be stored: {near.stats()}")
            time.sleep(_POLL_S)
    reading = near.read("kv", 0, hashes, fragments.nbytes)
    if reading is None:
        raise MaruError(f"the pages are not where they were stored: {near.stats()}")
    offsets = reading.offsets.astype(np.uint64)
    reading.finish(landed=False)
    return offsets
