"""``maru-bench restart``: how long a server with many pages takes to be back, and what it costs in CPU and memory.

A pool is filled through the real :class:`ServerState`, in this process and without copying any bytes; then real
``maru-server`` processes are started on it and killed, one after another. Each is measured from exec until a new session's
first match has found a whole chain. Nothing but the pool survives from one to the next.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from rich import box
from rich.table import Table

from maru_bench.clients import cpu_s
from maru_bench.copy import BENCH_NAMESPACE, describe_machine
from maru_bench.processes import scratch_directory
from maru_bench.servers import MaruServer
from maru_core.errors import ConfigError, MaruError
from maru_core.pool import PoolMemory, parse_pool_uri
from maru_core.protocol import (
    HASH_BYTES,
    PROTOCOL_VERSION,
    ROOT,
    Commit,
    Committed,
    Hello,
    NamespaceOpened,
    OpenNamespace,
    Reserve,
    Reserved,
    Welcome,
)
from maru_core.session import Session
from maru_server.config import StateConfig
from maru_server.directory import PoolDirectory
from maru_server.state import ServerState

#: Targets, for TARGET_PAGES pages.
TARGET_PAGES: Final = 1_000_000
TARGET_READY_S: Final = 2.0
TARGET_BYTES: Final = 250.0

_SLOT_BYTES: Final = 4096
_EXTENT_BYTES: Final = 16 << 20
#: Pages of one conversation; each turn adds some, and many conversations begin alike.
_TURN_PAGES: Final = 64
_SHARED_PAGES: Final = 16
_CHAIN_PAGES: Final = 256
#: How full the pool is: where it were fuller, the server would begin to evict as soon as it is there.
_FULL: Final = 0.85
_READY_S: Final = 300.0
#: Time that passes for the state from one message of the filling to the next: no session may ask without pause.
_MESSAGE_S: Final = 0.001


class RestartOptions(msgspec.Struct, frozen=True, kw_only=True):
    pages: int = TARGET_PAGES
    repeats: int = 5
    seed: int = 1


class RestartRun(msgspec.Struct, frozen=True, kw_only=True):
    """One start. Seconds and bytes."""

    ready_s: float
    """From exec to the server's own "ready" line."""
    match_s: float
    """From exec until the first match of a new session had found its pages."""
    rebuild_s: float
    """What the server says of itself: from opening the pool to serving, imports not included."""
    cpu_s: float
    """CPU time of all its threads until then."""
    memory_bytes: int
    """Memory that is its own (resident, anonymous), the pool not included."""


class RestartResult(msgspec.Struct, frozen=True, kw_only=True):
    machine: dict[str, str | int]
    pages: int
    fill_s: float
    empty: RestartRun
    """A start on an empty pool of the same size."""
    runs: list[RestartRun]

    def median(self, figure: str) -> float:
        return float(statistics.median(getattr(run, figure) for run in self.runs))

    @property
    def bytes_per_page(self) -> float:
        """What the pages add to the memory of a server."""
        return (self.median("memory_bytes") - self.empty.memory_bytes) / self.pages

    @property
    def ready_met(self) -> bool | None:
        """Whether the target is met; None for a number of pages that has none."""
        return self.median("match_s") < TARGET_READY_S if self.pages >= TARGET_PAGES else None

    @property
    def memory_met(self) -> bool | None:
        return self.bytes_per_page < TARGET_BYTES if self.pages >= TARGET_PAGES else None

    @property
    def targets_met(self) -> bool:
        return self.ready_met is not False and self.memory_met is not False

    def table(self) -> Table:
        table = Table(
            title=f"start of a server on {self.pages} pages (medians of {len(self.runs)}, fastest and slowest)",
            box=box.SIMPLE_HEAD,
            collapse_padding=True,
            pad_edge=False,
        )
        table.add_column("")
        for name in ("median", "fastest", "slowest", "empty pool"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("target", no_wrap=True)
        for figure, text in (
            ("match_s", "exec to first match, s"),
            ("ready_s", "exec to ready, s"),
            ("rebuild_s", "opening the pool to serving, s"),
            ("cpu_s", "CPU time, s"),
        ):
            values = [getattr(run, figure) for run in self.runs]
            table.add_row(
                text,
                f"{statistics.median(values):.2f}",
                f"{min(values):.2f}",
                f"{max(values):.2f}",
                f"{getattr(self.empty, figure):.2f}",
                _target(self.ready_met, f"< {TARGET_READY_S:g} s") if figure == "match_s" else "-",
            )
        memory = [run.memory_bytes / (1 << 20) for run in self.runs]
        table.add_row(
            "own memory, MiB",
            f"{statistics.median(memory):.0f}",
            f"{min(memory):.0f}",
            f"{max(memory):.0f}",
            f"{self.empty.memory_bytes / (1 << 20):.0f}",
            "-",
        )
        table.add_row(
            "memory of a page, bytes",
            f"{self.bytes_per_page:.0f}",
            "",
            "",
            "",
            _target(self.memory_met, f"< {TARGET_BYTES:g}"),
        )
        return table

    def write_json(self, path: Path) -> None:
        figures = {
            **msgspec.to_builtins(self),
            "median_match_s": self.median("match_s"),
            "bytes_per_page": self.bytes_per_page,
            "targets_met": self.targets_met,
        }
        path.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1) + b"\n")


def _target(met: bool | None, text: str) -> str:
    if met is None:
        return "-"
    return f"{text}: " + ("[green]met[/green]" if met else "[red]not met[/red]")


def own_memory(pid: int) -> int:
    """Bytes of a process's memory that are its own: resident and anonymous, mapped files and pools not counted."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise MaruError(f"/proc/{pid}/status does not say how much memory the process has: run this on Linux")


def chains(pages: int, seed: int) -> Iterator[tuple[bytes, bytes]]:
    """Chains that together have ``pages`` new pages: (parent, packed hashes) for one reserve each.

    Conversations of several turns, of which every few begin with the same pages.
    """
    random = np.random.default_rng(seed)
    left = pages
    shared = b""
    number = 0
    while left > 0:
        if number % 8 == 0 and left > _SHARED_PAGES:
            shared = random.bytes(HASH_BYTES * _SHARED_PAGES)
            left -= _SHARED_PAGES
            yield ROOT, shared
        number += 1
        parent = shared[-HASH_BYTES:] or ROOT
        for _ in range(0, _CHAIN_PAGES, _TURN_PAGES):
            turn = random.bytes(HASH_BYTES * min(_TURN_PAGES, left))
            if turn:
                yield parent, turn
            left -= len(turn) // HASH_BYTES
            parent = turn[-HASH_BYTES:]
            if left <= 0:
                break


def fill(uri: str, pages: int, seed: int) -> bytes:
    """Make a pool and commit that many pages of it; the hashes of a chain that is in it, from its start.

    Raises:
        MaruError: the server's state refused something, which is a fault of Maru.
    """
    memory = PoolMemory.create(parse_pool_uri(uri))
    with contextlib.closing(memory):
        now = time.monotonic()
        state = ServerState(
            PoolDirectory(memory.geometry, memory.meta, memory.coherence),
            incarnation=memory.bump_incarnation(),
            pool_uri=uri,
            config=StateConfig(low=0.99, high=1.0),
            now=now,
            wall_offset=time.time() - now,
        )
        state.extents_ready(memory.geometry.extent_count, now)
        hello = Hello(PROTOCOL_VERSION, 1, os.urandom(16), "maru-bench restart", "", 0, 0, "", "")
        welcome = state.handle(hello, now)
        assert isinstance(welcome, Welcome)
        session = welcome.session
        opened = state.handle(OpenNamespace(2, session, BENCH_NAMESPACE.record()), now)
        assert isinstance(opened, NamespaceOpened)
        first = b""
        for parent, hashes in chains(pages, seed):
            now += _MESSAGE_S
            request = Reserve(3, session, opened.namespace, "kv", 0, 1, parent, hashes, _SLOT_BYTES)
            reserved = state.handle(request, now)
            if not isinstance(reserved, Reserved) or any(reserved.status):
                raise MaruError(f"a page was not reserved while the pool was filled: {reserved!r:.200}")
            done = state.handle(Commit(4, session, reserved.slots, reserved.generations), now)
            if not isinstance(done, Committed) or any(done.status):
                raise MaruError(f"a page was not committed while the pool was filled: {done!r:.200}")
            if not first or parent == first[-HASH_BYTES:]:
                first += hashes
        state.finish()
    return first[: HASH_BYTES * 128]


def pool_for(pages: int) -> tuple[str, str]:
    """Size of a pool for so many of :func:`fill`'s pages, and the options of its URI.

    Raises:
        ConfigError: /dev/shm has no room for it.
    """
    extents = int(pages * _SLOT_BYTES / _FULL / _EXTENT_BYTES) + 2
    tables = extents * (_EXTENT_BYTES // _SLOT_BYTES) * 136 + (8 << 20)
    room = os.statvfs("/dev/shm")
    needed = extents * _EXTENT_BYTES + 2 * tables
    if room.f_bavail * room.f_frsize < needed:
        raise ConfigError(
            f"/dev/shm has {room.f_bavail * room.f_frsize >> 20} MiB free and a pool of {pages} pages may take "
            f"{needed >> 20}: give fewer pages"
        )
    size = (extents * _EXTENT_BYTES + tables + (4 << 20)) >> 20
    return f"{size}M", f"&min_slot={_SLOT_BYTES}&extent={_EXTENT_BYTES}"


def run(options: RestartOptions, narrate: Callable[[str], None]) -> RestartResult:
    """Measure.

    Raises:
        ConfigError: there is no room for the pool.
        MaruError: a process did not start, or did not find the pages.
    """
    size, words = pool_for(options.pages)
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(scratch_directory())
        servers = []
        for _ in range(2):
            server = MaruServer(scratch, size=size, keep_pool=True)
            server.pool += words
            stack.callback(server.remove_pool)
            stack.callback(server.kill)
            servers.append(server)
        empty_server, server = servers
        narrate("starting a server on an empty pool")
        fill(empty_server.pool, 1, options.seed)
        empty = _start(empty_server, b"")
        narrate(f"committing {options.pages} pages")
        began = time.perf_counter()
        chain = fill(server.pool, options.pages, options.seed)
        fill_s = time.perf_counter() - began
        runs = []
        for number in range(options.repeats):
            narrate(f"starting maru-server ({number + 1} of {options.repeats})")
            runs.append(_start(server, chain))
    return RestartResult(machine=describe_machine(), pages=options.pages, fill_s=fill_s, empty=empty, runs=runs)


def _start(server: MaruServer, chain: bytes) -> RestartRun:
    """Start a server, ask for the chain, kill the server as a crash would."""
    pages = len(chain) // HASH_BYTES
    began = time.perf_counter()
    server.start(timeout_s=_READY_S)
    with contextlib.closing(Session(server.endpoint, name="maru-bench restart", timeout_s=10.0)) as session:
        namespace = session.open_namespace(BENCH_NAMESPACE.record())
        found = session.match(namespace, ["kv"], 0, chain).pages
        match_s = time.perf_counter() - began
        if found != pages:
            raise MaruError(f"the server found {found} of {pages} pages after its start: this is a fault of Maru")
        pid = server.process.pid
        result = RestartRun(
            ready_s=server.started_in_s,
            match_s=match_s,
            rebuild_s=_own_account(server.log),
            cpu_s=cpu_s(pid),
            memory_bytes=own_memory(pid),
        )
    server.kill()
    return result


def _own_account(log: Path) -> float:
    """The seconds that the server's log names."""
    named = re.findall(r"serving .* after ([0-9.]+) s", log.read_text())
    if not named:
        raise MaruError(f"the server's log {log} does not say how long its start took")
    return float(named[-1])
