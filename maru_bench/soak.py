"""``maru-bench soak``: a server and several clients at work, killed, stopped and woken at random; then everything is counted.

Real processes: ``maru-server`` on a pool that is too small for what is stored, so that pages are evicted and extents cut
anew all the time, and clients as in :mod:`maru_bench.soak_client`. Now and then one client is killed, or stopped for longer
than its lease and woken; now and then the server is. What must hold afterwards, whatever happened:

- every byte that any client loaded was that of the page it asked for;
- no slot is lost: nothing is reserved or quarantined once the quarantine is over, and trees, slots and pool agree;
- every page that is still in the pool holds its bytes;
- the server's memory does not grow.

All that is random follows from the seed, except how the processes run beside each other.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from rich import box
from rich.table import Table

from maru_bench.copy import describe_machine
from maru_bench.processes import ManagedProcess, python_path, scratch_directory
from maru_bench.restart import own_memory
from maru_bench.servers import MaruServer
from maru_bench.soak_client import CHAINS, COUNTS, PAGE_BYTES, ClientOptions, chain_hashes, content, namespace
from maru_core.errors import MaruError
from maru_core.pool import PoolMemory, parse_pool_uri
from maru_core.protocol import (
    HASH_BYTES,
    NO_SLOT,
    PROTOCOL_VERSION,
    Hello,
    Located,
    Match,
    NamespaceOpened,
    OpenNamespace,
    Welcome,
)
from maru_core.session import Session
from maru_server.config import StateConfig
from maru_server.directory import PoolDirectory
from maru_server.state import ServerState

#: Shorter than in earnest, so that all of it happens often.
LEASE_S: Final = 1.0
QUARANTINE_S: Final = 8.0
#: Longest time for which a process is stopped: beyond its lease, and well within the quarantine, since what wakes up after
#: that may write into what others have been given.
STOP_MAX_S: Final = 3.0
#: Mean time between two events, and between two that befall the server, seconds.
EVENT_S: Final = 1.0
SERVER_EVENT_S: Final = 15.0
#: How much memory may grow from the first quarter to the last: a share, and bytes that do not count.
GROWTH_SHARE: Final = 0.10
GROWTH_BYTES: Final = 8 << 20
_SAMPLE_S: Final = 0.5


class SoakOptions(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float = 600.0
    clients: int = 4
    seed: int = 1
    pool: str = "16M"


class SoakResult(msgspec.Struct, frozen=True, kw_only=True):
    machine: dict[str, str | int]
    options: SoakOptions
    counts: dict[str, int]
    """What the clients counted, together (:data:`COUNTS`)."""
    events: dict[str, int]
    """What befell them."""
    stats: dict[str, float | int | str]
    """The last server's figures, after the quarantine."""
    settled_s: float
    """Until nothing was reserved or quarantined any more, seconds after the clients ended."""
    audited_pages: int
    """Pages that were in the pool in the end; each was read."""
    failures: list[str]
    memory_early: int
    memory_late: int
    """Median of the server's own memory in the first and the last quarter, bytes."""
    memory_slope: float
    """Bytes a minute, over all samples."""

    @property
    def ok(self) -> bool:
        return not self.failures

    def table(self) -> Table:
        table = Table(
            title=f"{self.options.clients} clients for {self.options.seconds:g} s (seed {self.options.seed})",
            box=box.SIMPLE_HEAD,
            collapse_padding=True,
            pad_edge=False,
        )
        table.add_column("")
        table.add_column("", justify="right", no_wrap=True)
        for name in COUNTS:
            table.add_row(name.replace("_", " "), f"{self.counts[name]:,}")
        for name, count in self.events.items():
            table.add_row(name.replace("_", " "), f"{count:,}")
        for name in ("evicted_pages", "slots_reserved", "slots_quarantined"):
            table.add_row(f"{name.replace('_', ' ')} (last server)", f"{self.stats.get(name, 0):,}")
        table.add_row("settled after, s", f"{self.settled_s:.1f}")
        table.add_row("pages read in the end", f"{self.audited_pages:,}")
        table.add_row("server's memory, first quarter, MiB", f"{self.memory_early / (1 << 20):.1f}")
        table.add_row("server's memory, last quarter, MiB", f"{self.memory_late / (1 << 20):.1f}")
        table.add_row("growth, KiB a minute", f"{self.memory_slope / 1024:+.0f}")
        table.add_row("result", "[green]ok[/green]" if self.ok else "[red]FAILED[/red]")
        return table

    def write_json(self, path: Path) -> None:
        figures = {**msgspec.to_builtins(self), "ok": self.ok}
        path.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1) + b"\n")


class _Client:
    """A client process, begun anew whenever it was killed."""

    def __init__(self, number: int, options: SoakOptions, server: MaruServer, scratch: Path) -> None:
        self.number = number
        self.births = 0
        self.wake_at: float | None = None  # when it is stopped
        self._options = options
        self._server = server
        self._scratch = scratch
        self.process = self._start()

    def _start(self) -> ManagedProcess:
        self.births += 1
        options = ClientOptions(
            number=self.number,
            seed=self._options.seed,
            server=self._server.endpoint,
            counts=str(self._scratch / "counts"),
        )
        argv = [sys.executable, "-m", "maru_bench.soak_client", msgspec.json.encode(options).decode()]
        log = self._scratch / f"client-{self.number}-{self.births}.log"
        return ManagedProcess(f"client {self.number}", argv, log, env={"PYTHONPATH": python_path()})

    def kill(self) -> None:
        self.process.kill()
        self.wake_at = None

    def again(self) -> None:
        self.process = self._start()

    def stop_until(self, wake_at: float) -> None:
        self.process.signal(signal.SIGSTOP)
        self.wake_at = wake_at

    def wake(self) -> None:
        if self.wake_at is not None:
            self.process.signal(signal.SIGCONT)
            self.wake_at = None


class Soak:
    """One run."""

    def __init__(self, options: SoakOptions, scratch: Path, narrate: Callable[[str], None]) -> None:
        self.options = options
        self.narrate = narrate
        self.chance = random.Random(options.seed)
        self.events = dict.fromkeys(
            ("clients_killed", "clients_stopped", "clients_that_failed", "servers_killed", "servers_stopped"), 0
        )
        self.failures: list[str] = []
        self.samples: list[tuple[float, int]] = []
        counts = scratch / "counts"
        counts.write_bytes(bytes(8 * len(COUNTS) * options.clients))
        self.counts = np.memmap(counts, np.int64, "r", shape=(options.clients, len(COUNTS)))
        self.server = MaruServer(
            scratch,
            size=options.pool,
            keep_pool=True,
            options=("--lease", str(LEASE_S), "--quarantine", str(QUARANTINE_S)),
        )
        self.server.pool += "&min_slot=4K"
        self.server_wakes_at: float | None = None
        self.clients: list[_Client] = []
        self.scratch = scratch

    # ------------------------------------------------------------ the time of trouble

    def run(self) -> SoakResult:
        self.narrate("starting")
        self.server.start()
        self.clients = [
            _Client(number, self.options, self.server, self.scratch) for number in range(self.options.clients)
        ]
        began = time.monotonic()
        end = began + self.options.seconds
        event_at = began + 1.0
        server_event_at = began + self._server_pause()
        sample_at = began
        while (now := time.monotonic()) < end:
            self._wake(now)
            self._look_after_clients()
            if now >= sample_at:
                sample_at = now + _SAMPLE_S
                self._sample(now - began)
                self.narrate(f"at work ({self._counted()})")
            if now >= event_at:
                event_at = now + self.chance.expovariate(1 / EVENT_S)
                self._befall_a_client(now)
            if now >= server_event_at:
                server_event_at = now + self._server_pause()
                self._befall_the_server(now)
            time.sleep(0.02)
        return self._count_up()

    def _server_pause(self) -> float:
        return self.chance.uniform(0.5, 1.5) * min(SERVER_EVENT_S, max(4.0, self.options.seconds / 4))

    def _befall_a_client(self, now: float) -> None:
        client = self.clients[self.chance.randrange(len(self.clients))]
        stopped_s = self.chance.uniform(0.05, STOP_MAX_S)
        if self.chance.random() < 0.4:
            # Also one that is stopped at the moment: it never wakes up.
            client.kill()
            client.again()
            self.events["clients_killed"] += 1
        elif client.wake_at is None:
            client.stop_until(now + stopped_s)
            self.events["clients_stopped"] += 1

    def _befall_the_server(self, now: float) -> None:
        stopped_s = self.chance.uniform(0.2, 2.5 * LEASE_S)
        if self.chance.random() < 0.5:
            self.server.kill()
            self.server_wakes_at = None
            self.server.start()
            self.events["servers_killed"] += 1
        else:
            self.server.process.signal(signal.SIGSTOP)
            self.server_wakes_at = now + stopped_s
            self.events["servers_stopped"] += 1

    def _wake(self, now: float) -> None:
        for client in self.clients:
            if client.wake_at is not None and now >= client.wake_at:
                client.wake()
        if self.server_wakes_at is not None and now >= self.server_wakes_at:
            self.server.process.signal(signal.SIGCONT)
            self.server_wakes_at = None

    def _look_after_clients(self) -> None:
        for client in self.clients:
            if not client.process.running:
                self.events["clients_that_failed"] += 1
                self.failures.append(str(client.process.failure("ended by itself")))
                client.kill()
                client.again()
        if not self.server.process.running:
            raise self.server.process.failure("ended by itself")

    def _sample(self, at: float) -> None:
        with contextlib.suppress(OSError):
            self.samples.append((at, own_memory(self.server.process.pid)))

    def _counted(self) -> str:
        loaded = int(self.counts[:, COUNTS.index("loaded_pages")].sum())
        return f"{loaded:,} pages loaded, {sum(self.events.values())} events"

    # ------------------------------------------------------------ afterwards

    def _count_up(self) -> SoakResult:
        self.narrate("ending the clients")
        if self.server_wakes_at is not None:
            self.server.process.signal(signal.SIGCONT)
        for client in self.clients:
            client.wake()
        for client in self.clients:
            client.process.signal(signal.SIGTERM)
        for client in self.clients:
            if not client.process.await_end(30.0):
                self.failures.append(str(client.process.failure("did not end when asked to")))
            # One that had not come to its own handler for the signal had not begun.
            if client.process.stop() not in (0, -signal.SIGTERM):
                self.failures.append(str(client.process.failure("failed")))
        self.narrate("waiting for the quarantine to end")
        began = time.monotonic()
        stats = self._settled()
        settled_s = time.monotonic() - began
        self._sample(self.options.seconds)
        self.narrate("reading what is in the pool")
        self.server.process.stop()
        audited = self._audit()
        counts = {name: int(self.counts[:, index].sum()) for index, name in enumerate(COUNTS)}
        early, late, slope = self._memory()
        self._judge(counts, early, late)
        return SoakResult(
            machine=describe_machine(),
            options=self.options,
            counts=counts,
            events=self.events,
            stats=stats,
            settled_s=settled_s,
            audited_pages=audited,
            failures=self.failures,
            memory_early=early,
            memory_late=late,
            memory_slope=slope,
        )

    def _settled(self) -> dict[str, float | int | str]:
        """The server's figures once nothing is reserved or quarantined any more."""
        deadline = time.monotonic() + LEASE_S + 3 * QUARANTINE_S
        with contextlib.closing(Session(self.server.endpoint, name="maru-bench soak", timeout_s=5.0)) as session:
            while True:
                stats = session.stats()
                left = (stats["slots_reserved"], stats["slots_quarantined"])
                if left == (0, 0):
                    return stats
                if time.monotonic() > deadline:
                    self.failures.append(f"{left[0]} slots stayed reserved and {left[1]} in quarantine")
                    return stats
                time.sleep(0.1)

    def _audit(self) -> int:
        """Open the pool as the next server would, check all of it, and read every page that a client could find."""
        memory = PoolMemory.create(parse_pool_uri(self.server.pool))
        audited = 0
        with contextlib.closing(memory):
            now = time.monotonic()
            state = ServerState(
                PoolDirectory(memory.geometry, memory.meta, memory.coherence),
                incarnation=memory.bump_incarnation(),
                pool_uri=self.server.pool,
                config=StateConfig(),
                now=now,
                wall_offset=time.time() - now,
            )
            try:
                state.check()
            except AssertionError as fault:
                self.failures.append(f"the pool contradicts itself: {fault}")
            figures = state.stats()
            for name in ("discarded", "slots_reserved", "slots_quarantined"):
                if figures[name]:
                    self.failures.append(f"{figures[name]} {name} after a clean stop")
            hello = Hello(PROTOCOL_VERSION, 1, os.urandom(16), "maru-bench soak", "", 0, 0, "", "")
            welcome = state.handle(hello, now)
            assert isinstance(welcome, Welcome)
            seen: set[bytes] = set()
            for kind, nbytes in PAGE_BYTES.items():
                opened = state.handle(OpenNamespace(2, welcome.session, namespace(kind).record()), now)
                assert isinstance(opened, NamespaceOpened)
                for chain in range(CHAINS):
                    hashes = chain_hashes(chain)
                    found = state.handle(Match(3, welcome.session, opened.namespace, ["kv"], 0, hashes, True), now)
                    assert isinstance(found, Located)
                    slots, offsets = np.frombuffer(found.slots, "<u4"), np.frombuffer(found.offsets, "<u8")
                    for index in np.flatnonzero(slots != NO_SLOT).tolist():
                        page = hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]
                        at = int(offsets[index]) - memory.geometry.off_data
                        if not np.array_equal(memory.data[at : at + nbytes], content(kind, page)):
                            self.failures.append(f"page {index} of chain {chain} ({kind}) has wrong bytes in the end")
                        if kind.encode() + page not in seen:
                            seen.add(kind.encode() + page)
                            audited += 1
            # A writer that was killed leaves a gap where another one has stored what continues its page: a page that has nothing
            # but what continues it, until it is stored or evicted.
            gaps = 0
            for tree in state.books.trees.values():
                rows = tree.used_rows()
                empty = rows[tree.objects[rows] == 0]
                gaps += len(empty)
                if (tree.child[empty] < 0).any():
                    self.failures.append("a page has no object, and nothing continues it")
            if audited != int(figures["pages"]) - gaps:
                self.failures.append(
                    f"the tree has {figures['pages']} pages, {gaps} of them gaps, and {audited} could be found"
                )
        return audited

    def _memory(self) -> tuple[int, int, float]:
        at = np.array([time_s for time_s, _ in self.samples])
        size = np.array([nbytes for _, nbytes in self.samples], float)
        quarter = max(1, len(size) // 4)
        # The very first moments are the server's own start.
        skip = min(len(size) - 1, quarter // 2)
        slope = float(np.polyfit(at[skip:], size[skip:], 1)[0]) * 60 if len(size) - skip > 2 else 0.0
        early = int(statistics.median(size[skip : skip + quarter].tolist()))
        return early, int(statistics.median(size[-quarter:].tolist())), slope

    def _judge(self, counts: dict[str, int], early: int, late: int) -> None:
        if counts["wrong_pages"]:
            self.failures.append(f"{counts['wrong_pages']} pages were loaded with wrong bytes")
        if counts["false_hits"]:
            self.failures.append(f"{counts['false_hits']} pages were found that nobody had stored")
        if not counts["loaded_pages"]:
            self.failures.append("nothing was ever loaded: the run says nothing")
        if late > early * (1 + GROWTH_SHARE) + GROWTH_BYTES:
            self.failures.append(f"the server's memory grew from {early >> 20} to {late >> 20} MiB")

    def close(self) -> None:
        """End everything that is left; also after a failure."""
        for client in self.clients:
            client.kill()
        self.server.kill()
        self.server.remove_pool()


def run(options: SoakOptions, narrate: Callable[[str], None]) -> SoakResult:
    """Run it.

    Raises:
        MaruError: a process did not start, or the server ended by itself.
    """
    if options.clients < 1 or options.seconds <= 0:
        raise MaruError(f"{options.clients} clients for {options.seconds} s: give at least one, and some time")
    with scratch_directory() as scratch:
        soak = Soak(options, scratch, narrate)
        try:
            result = soak.run()
        finally:
            soak.close()
    return result
