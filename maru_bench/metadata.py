"""``maru-bench metadata``: what a question to the server costs, beside a bare ZeroMQ echo of the same bytes.

``match`` (with locations), ``reserve`` and ``commit`` go through the real :class:`Session` to a real ``maru-server``
process; after each, the same number of bytes goes to an echo process and back, over the same transport (a Unix
socket), in the same run. A ratio of 1 would be a server that does nothing and a client that looks at nothing. No page is
copied here. Also measured: checking 128 generations on a mapped pool, and how long a server takes to start.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from rich import box
from rich.table import Table

from maru_bench.copy import BENCH_NAMESPACE, describe_machine
from maru_bench.echo import EchoClient, EchoServer
from maru_bench.processes import scratch_directory
from maru_bench.servers import MaruServer
from maru_core import protocol
from maru_core.errors import MaruError
from maru_core.pool import PoolMemory, PoolView, parse_pool_uri
from maru_core.protocol import HASH_BYTES, ROOT, CommitStatus, ReserveStatus
from maru_core.session import Session

#: Targets, for batches of TARGET_PAGES pages.
TARGET_PAGES: Final = 128
TARGET_MATCH: Final = 2.0
TARGET_WRITE: Final = 4.5
TARGET_VALIDATION_US: Final = 15.0

_OBJECT_BYTES: Final = 16 << 10
#: Pages of one chain of the filling: they fit in one extent.
_FILL_PAGES: Final = 64
_FILL_S: Final = 60.0
#: More resident pages than this are not stored message by message.
_FILLED_BY_SERVER: Final = 100_000
_POLL_S: Final = 0.02
#: Chains that are asked for in turn, so that not the same pages are asked for each time.
CHAINS: Final = 16
_VALIDATIONS: Final = 2000
_OPERATIONS: Final = ("match", "reserve", "commit")


class MetadataOptions(msgspec.Struct, frozen=True, kw_only=True):
    pages: list[int]
    repeats: int = 200
    resident: int = 8192
    """Pages that the server holds besides those that are measured."""


class MetadataRow(msgspec.Struct, frozen=True, kw_only=True):
    """One operation with one number of pages: medians in microseconds, and their ratio."""

    operation: str
    pages: int
    request_bytes: int
    reply_bytes: int
    maru_us: float
    echo_us: float
    echoes: float
    """Time of the operation in echoes of its own bytes; of "reserve+commit" the sum of the two."""
    target: float | None = None
    met: bool | None = None


def make_rows(
    pages: int, seconds: dict[str, list[float]], echo: dict[str, list[float]], sizes: dict[str, tuple[int, int]]
) -> list[MetadataRow]:
    """Rows of one number of pages.

    Args:
        seconds: samples of each operation, seconds.
        echo: samples of the echo of each operation's bytes, seconds.
        sizes: bytes of request and reply of each operation.
    """
    rows = []
    for operation in _OPERATIONS:
        maru_us, echo_us = statistics.median(seconds[operation]) * 1e6, statistics.median(echo[operation]) * 1e6
        target = TARGET_MATCH if operation == "match" and pages == TARGET_PAGES else None
        rows.append(
            MetadataRow(
                operation=operation,
                pages=pages,
                request_bytes=sizes[operation][0],
                reply_bytes=sizes[operation][1],
                maru_us=maru_us,
                echo_us=echo_us,
                echoes=maru_us / echo_us,
                target=target,
                met=None if target is None else maru_us / echo_us <= target,
            )
        )
    reserve, commit = rows[1], rows[2]
    echoes = reserve.echoes + commit.echoes
    target = TARGET_WRITE if pages == TARGET_PAGES else None
    rows.append(
        MetadataRow(
            operation="reserve+commit",
            pages=pages,
            request_bytes=reserve.request_bytes + commit.request_bytes,
            reply_bytes=reserve.reply_bytes + commit.reply_bytes,
            maru_us=reserve.maru_us + commit.maru_us,
            echo_us=reserve.echo_us + commit.echo_us,
            echoes=echoes,
            target=target,
            met=None if target is None else echoes <= target,
        )
    )
    return rows


class MetadataResult(msgspec.Struct, frozen=True, kw_only=True):
    machine: dict[str, str | int]
    repeats: int
    resident_pages: int
    rows: list[MetadataRow]
    validation_pages: int
    validation_us: float
    validation_target_us: float
    validation_met: bool
    start_new_s: float | None
    """From starting the process to "ready", with a new pool; None where the pool was filled before."""
    start_rebuild_s: float
    """The same with the pool that holds the resident pages, whose directory is read back."""

    @property
    def targets_met(self) -> bool:
        return self.validation_met and all(row.met is not False for row in self.rows)

    def tables(self) -> list[Table]:
        calls = Table(
            title=f"calls to the server beside a bare ZeroMQ echo (medians of {self.repeats})",
            box=box.SIMPLE_HEAD,
            collapse_padding=True,
            pad_edge=False,
        )
        calls.add_column("", no_wrap=True)
        for name in ("pages", "bytes\nout", "bytes\nback", "Maru\nµs", "echo\nµs", "Maru in\nechoes"):
            calls.add_column(name, justify="right", no_wrap=True)
        calls.add_column("target", no_wrap=True)
        for row in self.rows:
            calls.add_row(
                row.operation,
                str(row.pages),
                str(row.request_bytes),
                str(row.reply_bytes),
                f"{row.maru_us:.0f}",
                f"{row.echo_us:.0f}",
                f"{row.echoes:.2f}",
                "-" if row.target is None else f"<= {row.target:g}: {_met(row.met)}",
            )
        other = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        other.add_column("")
        other.add_column("", justify="right")
        other.add_column("target")
        other.add_row(
            f"validate {self.validation_pages} generations on a mapped pool",
            f"{self.validation_us:.1f} µs",
            f"< {self.validation_target_us:g} µs: {_met(self.validation_met)}",
        )
        if self.start_new_s is not None:
            other.add_row("start a server, new pool", f"{self.start_new_s * 1e3:.0f} ms", "-")
        other.add_row(
            f"start a server on a pool of {self.resident_pages} pages", f"{self.start_rebuild_s * 1e3:.0f} ms", "-"
        )
        return [calls, other]

    def write_json(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def _met(met: bool | None) -> str:
    return "[green]met[/green]" if met else "[red]not met[/red]"


# ------------------------------------------------------------------ the run


class Client:
    """The calls that are measured, on one session and namespace."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.namespace = session.open_namespace(BENCH_NAMESPACE.record())

    def match(self, hashes: bytes) -> protocol.Located:
        return self.session.match(self.namespace, ["kv"], 0, hashes)

    def reserve(self, hashes: bytes) -> protocol.Reserved:
        return self.session.reserve(self.namespace, "kv", 0, 1, ROOT, hashes, _OBJECT_BYTES)

    def fill(self, pages: int) -> list[bytes]:
        """Store ``pages`` new pages, waiting where the server has yet to give the pool memory; returns their chains.

        Raises:
            MaruError: the server had no room for a long time.
        """
        chains = []
        deadline = time.monotonic() + _FILL_S
        for start in range(0, pages, _FILL_PAGES):
            chain = os.urandom(HASH_BYTES * min(_FILL_PAGES, pages - start))
            while True:
                reserved = self.reserve(chain)
                if ReserveStatus.NO_ROOM not in reserved.status or time.monotonic() > deadline:
                    break
                self.session.release(*_kept(reserved))
                time.sleep(_POLL_S)
            _require(reserved.status, ReserveStatus.RESERVED, "reserve")
            self.session.commit(reserved.slots, reserved.generations)
            chains.append(chain)
        return chains

    def remove(self, chains: list[bytes]) -> None:
        """Delete whole chains, and forget them in ``chains``."""
        for chain in chains:
            self.session.delete(self.namespace, chain[:HASH_BYTES])  # with all that continues it
        chains.clear()

    def store(self, hashes: bytes) -> None:
        """Reserve and commit; nothing is copied into the slots."""
        reserved = self.reserve(hashes)
        _require(reserved.status, ReserveStatus.RESERVED, "reserve")
        _require(self.session.commit(reserved.slots, reserved.generations).status, CommitStatus.COMMITTED, "commit")


def _kept(reserved: protocol.Reserved) -> tuple[bytes, bytes]:
    """Slots and generations of what was reserved."""
    mine = np.frombuffer(reserved.status, np.uint8) == ReserveStatus.RESERVED
    slots, generations = np.frombuffer(reserved.slots, "<u4"), np.frombuffer(reserved.generations, "<u8")
    return slots[mine].tobytes(), generations[mine].tobytes()


def _require(status: bytes, wanted: int, what: str) -> None:
    if status.count(wanted) != len(status):
        raise MaruError(f"the server did not {what} every page: {sorted(set(status))}; give a smaller --resident")


def pool_megabytes(slots: int) -> int:
    """Size of a pool in which so many of the pages that are measured can lie at once."""
    return max(64, (slots * _OBJECT_BYTES * 4 // 3 >> 20) + 32)


def run(options: MetadataOptions, narrate: Callable[[str], None]) -> MetadataResult:
    """Measure.

    Raises:
        MaruError: a process did not start or a call failed.
    """
    slots = (2 * CHAINS + 1) * max(options.pages) + TARGET_PAGES
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(scratch_directory())
        server = _server(scratch, options, slots, narrate)
        stack.callback(server.remove_pool)
        stack.callback(server.stop)
        narrate("starting maru-server")
        server.start()
        many = options.resident > _FILLED_BY_SERVER
        start_new_s = None if many else server.started_in_s
        echo = stack.enter_context(EchoClient(stack.enter_context(EchoServer(scratch)).endpoint))
        with contextlib.closing(Session(server.endpoint, name="maru-bench metadata", timeout_s=10.0)) as session:
            client = Client(session)
            if not many:
                narrate(f"filling it with {options.resident} pages")
                client.fill(options.resident)
            # As many again as are ever held at once, so that the pool has memory for them; then away with them.
            spare = client.fill(slots)
            client.remove(spare)
            rows = []
            for pages in options.pages:
                narrate(f"{pages} pages")
                rows += _measure(client, echo, pages, options.repeats)
            narrate("validating")
            validation_us = _measure_validation(client, server.pool)
        narrate("restarting maru-server")
        server.stop()
        server.start()
        start_rebuild_s = server.started_in_s
    return MetadataResult(
        machine=describe_machine(),
        repeats=options.repeats,
        resident_pages=options.resident,
        rows=rows,
        validation_pages=TARGET_PAGES,
        validation_us=validation_us,
        validation_target_us=TARGET_VALIDATION_US,
        validation_met=validation_us < TARGET_VALIDATION_US,
        start_new_s=start_new_s,
        start_rebuild_s=start_rebuild_s,
    )


def _server(scratch: Path, options: MetadataOptions, slots: int, narrate: Callable[[str], None]) -> MaruServer:
    """A server that is not started, with a pool for the resident pages and ``slots`` more.

    Many pages are put into the pool before it starts, through the server's state and without a message.
    """
    if options.resident <= _FILLED_BY_SERVER:
        return MaruServer(scratch, size=f"{pool_megabytes(options.resident + slots)}M", keep_pool=True)
    from maru_bench import restart

    # Slots of the calls that are measured take the room of several of those pages.
    size, words = restart.pool_for(options.resident + slots * _OBJECT_BYTES // 4096)
    server = MaruServer(scratch, size=size, keep_pool=True)
    server.pool += words
    narrate(f"committing {options.resident} pages")
    try:
        restart.fill(server.pool, options.resident, seed=1)
    except BaseException:
        server.remove_pool()
        raise
    return server


def _measure(client: Client, echo: EchoClient, pages: int, repeats: int) -> list[MetadataRow]:
    chains = [os.urandom(HASH_BYTES * pages) for _ in range(CHAINS)]
    for chain in chains:
        client.store(chain)
    sizes = message_sizes(client, chains[0])
    requests = {operation: EchoClient.request(*sizes[operation]) for operation in _OPERATIONS}
    seconds: dict[str, list[float]] = {operation: [] for operation in _OPERATIONS}
    echoes: dict[str, list[float]] = {operation: [] for operation in _OPERATIONS}
    clock = time.perf_counter

    def measured_echo(operation: str) -> None:
        began = clock()
        echo.exchange(requests[operation])
        echoes[operation].append(clock() - began)

    chain_in_turn = itertools.cycle(chains)
    written: list[bytes] = []
    for _ in range(repeats):
        chain = next(chain_in_turn)
        began = clock()
        located = client.match(chain)
        seconds["match"].append(clock() - began)
        if located.pages != pages:
            raise MaruError(f"{located.pages} of {pages} stored pages were found: this is a fault of Maru")
        measured_echo("match")
        fresh = os.urandom(HASH_BYTES * pages)
        began = clock()
        reserved = client.reserve(fresh)
        seconds["reserve"].append(clock() - began)
        measured_echo("reserve")
        began = clock()
        committed = client.session.commit(reserved.slots, reserved.generations)
        seconds["commit"].append(clock() - began)
        _require(reserved.status, ReserveStatus.RESERVED, "reserve")
        _require(committed.status, CommitStatus.COMMITTED, "commit")
        measured_echo("commit")
        written.append(fresh)
        if len(written) == CHAINS:
            # Now and then, and not each time: no engine deletes between its stores.
            client.remove(written)
    client.remove(written)
    client.remove(chains)
    return make_rows(pages, seconds, echoes, sizes)


def message_sizes(client: Client, chain: bytes) -> dict[str, tuple[int, int]]:
    """Bytes of request and reply of each operation with as many pages as ``chain`` has."""
    fresh = os.urandom(len(chain))
    located = client.match(chain)
    reserved = client.reserve(fresh)
    committed = client.session.commit(reserved.slots, reserved.generations)
    client.remove([fresh])
    rid, session = located.rid, client.session.connect().session
    requests: dict[str, protocol.Request] = {
        "match": protocol.Match(rid, session, client.namespace, ["kv"], 0, chain),
        "reserve": protocol.Reserve(rid, session, client.namespace, "kv", 0, 1, ROOT, fresh, _OBJECT_BYTES),
        "commit": protocol.Commit(rid, session, reserved.slots, reserved.generations),
    }
    replies: dict[str, protocol.Reply] = {"match": located, "reserve": reserved, "commit": committed}
    return {name: (len(protocol.encode(requests[name])), len(protocol.encode(replies[name]))) for name in _OPERATIONS}


def _measure_validation(client: Client, pool: str) -> float:
    """Median microseconds to check the generations of TARGET_PAGES pages, as a reader does after its copy."""
    chain = os.urandom(HASH_BYTES * TARGET_PAGES)
    client.store(chain)
    located = client.match(chain)
    slots = np.frombuffer(located.slots, "<u4")
    generations = np.frombuffer(located.generations, "<u8")
    with contextlib.closing(PoolMemory.attach(parse_pool_uri(pool))) as memory:
        view = PoolView(memory)
        samples = []
        for _ in range(_VALIDATIONS):
            began = time.perf_counter()
            valid = view.valid(slots, generations)
            samples.append(time.perf_counter() - began)
            if not valid:
                raise MaruError("the generations of pages that nobody touched changed: this is a fault of Maru")
        del view
    return statistics.median(samples) * 1e6
