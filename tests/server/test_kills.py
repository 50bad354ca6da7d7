"""Killed at any moment, on either side: every acknowledged page is found with its bytes, and no slot is lost.

Real processes, real signals. Where a random moment matters, the seed is in the parameters.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maru_core import protocol as p
from maru_core.errors import ServerUnavailableError
from maru_core.pool import PoolMemory, parse_pool_uri
from maru_core.pool.format import COMMITTED, RESERVED
from maru_core.session import Session
from maru_server.config import StateConfig
from maru_server.directory import PoolDirectory
from maru_server.state import ServerState
from tests.forked import await_taken, forkserver
from tests.server.writers import PAGE_BYTES, STEPS, Load, each, keys_of, write, write_batches, wrong_pages
from tests.support import ServerProcess, await_condition, hashes, impatient, namespace

PAGES = 6
#: Short, so that the test whose writer outlives it need not wait long.
LEASE_S = 0.6
#: Longer than any client of a slow machine is silent, and short enough for the dead to be found soon.
LONG_LEASE_S = 8.0
QUARANTINE_S = 1.0


@contextlib.contextmanager
def server_with(directory: Path, *options: str, size: str = "128M") -> Iterator[ServerProcess]:
    pool = f"shm://maru-kills-{os.getpid()}-{uuid.uuid4().hex[:8]}?min_slot=4K"
    server = ServerProcess(directory, *options, pool=pool, size=size)
    try:
        yield server.start()
    finally:
        server.remove()


class Writer:
    """A child that stores batches and says where it is."""

    def __init__(self, server: ServerProcess, seed: int, *, wait: bool, batches: int = 3) -> None:
        self.seed = seed
        self.pipe, theirs = forkserver.Pipe()
        self.pipe: Connection[Any, Any]
        self.committed: list[int] = []
        self.slots: list[int] = []
        self.statuses: list[int] = []
        self.process: ForkServerProcess = forkserver.Process(
            target=write_batches, args=(theirs, server.endpoint, seed, batches, PAGES, wait), daemon=True
        )
        self.process.start()
        theirs.close()

    def next(self) -> tuple[str, int]:
        """Where it has come to."""
        assert self.pipe.poll(120), "the writer says nothing"
        step, batch, detail = self.pipe.recv()
        if step == "reserved":
            self.slots = detail
        if step == "committed":
            self.statuses = detail
            if set(detail) == {p.CommitStatus.COMMITTED}:
                self.committed.append(batch)
        return step, batch

    def go_on(self) -> None:
        self.pipe.send(None)

    def until(self, step: str, batch: int) -> None:
        while self.next() != (step, batch):
            self.go_on()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        await_taken(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join(120)
        # What it had said before it died counts.
        with contextlib.suppress(EOFError, ConnectionResetError):
            while self.pipe.poll():
                self.next()
        self.pipe.close()


NewWriter = Callable[..., Writer]


@pytest.fixture
def new_writer() -> Iterator[NewWriter]:
    """Makes writers, and leaves none behind: a stopped one would keep this process from ending."""
    made: list[Writer] = []

    def make(server: ServerProcess, seed: int, *, wait: bool, batches: int = 3) -> Writer:
        made.append(Writer(server, seed, wait=wait, batches=batches))
        return made[-1]

    yield make
    for writer in made:
        if writer.process.is_alive():
            writer.process.kill()
            writer.process.join(120)


def settled(stats: dict[str, float | int | str]) -> bool:
    return stats["slots_reserved"] == stats["slots_quarantined"] == 0


def assert_nothing_is_lost(server: ServerProcess, session: Session) -> None:
    """Server, media and a rebuild agree; and when all is cleared, every slot of every extent is free again."""
    with PoolMemory.attach(parse_pool_uri(server.pool)) as memory:
        states = memory.directory["state"]
        assert np.count_nonzero(states == RESERVED) == 0

        def agree() -> bool:
            """Between two looks the server may have evicted some in the background."""
            stats = session.stats()
            return np.count_nonzero(states == COMMITTED) == stats["objects"] == stats["pages"]

        await_condition(agree, "the server counts what the media has", 60.0)
    session.clear()
    cleared = session.stats()
    assert (cleared["objects"], cleared["bytes_used"], cleared["extents_cut"]) == (0, 0, 0)
    session.close()
    assert server.stop() == 0
    with PoolMemory.create(parse_pool_uri(server.pool)) as memory:
        state = ServerState(
            PoolDirectory(memory.geometry, memory.meta),
            incarnation=memory.bump_incarnation(), pool_uri="", config=StateConfig(), now=0.0, wall_offset=1e9,
        )  # fmt: skip
        state.check()
        assert state.stats()["bytes_used"] == 0


def attach(session: Session) -> tuple[PoolMemory, int]:
    welcome = session.connect()
    memory = PoolMemory.attach(parse_pool_uri(welcome.pool_uri), expected_uuid=welcome.pool_uuid)
    return memory, session.open_namespace(namespace().record())


def await_acknowledged(loads: list[Load], threads: list[threading.Thread], goal: int) -> None:
    """Wait for this many batches, or for the end of all that store any."""
    await_condition(
        lambda: sum(len(load.acknowledged) for load in loads) >= goal or not any(t.is_alive() for t in threads),
        f"{goal} batches are acknowledged",
    )


# ---------------------------------------------------------------- writers


def test_a_writer_killed_anywhere_loses_nothing_that_it_committed_and_no_slot(
    tmp_path: Path, new_writer: NewWriter
) -> None:
    with server_with(tmp_path, "--lease", str(LONG_LEASE_S), "--quarantine", "600") as server:
        session = Session(server.endpoint, name="watcher", timeout_s=60)
        memory, number = attach(session)
        # At every step of the first, a middle and the last batch; all at once, so that they also meet each other.
        points = [(step, batch) for batch in (0, 1, 2) for step in STEPS]
        writers = []
        for seed, (step, batch) in enumerate(points):
            writer = new_writer(server, seed, wait=True)
            writer.until(step, batch)
            writers.append(writer)
        for writer in writers:
            writer.kill()
        # And at moments that nobody chose.
        chance = random.Random(20)
        for seed in range(100, 112):
            writer = new_writer(server, seed, wait=False, batches=200)
            for _ in range(chance.randrange(1, 60)):
                writer.next()
            writer.kill()
            writers.append(writer)
        # The quarantine is long: the slots return because the processes are known to be dead.
        await_condition(lambda: settled(session.stats()), "the slots of the dead return")
        await_condition(lambda: session.stats()["sessions"] == 1, "their sessions end")
        for writer, (step, batch) in zip(writers, points, strict=False):
            assert len(writer.committed) == batch + (step == "committed")
        known = 0
        for writer in writers:
            for batch in writer.committed:
                assert wrong_pages(session, memory, number, keys_of(writer.seed, batch, PAGES)) == []
                known += PAGES
        # A commit may have been done without its answer having come, by each writer once; no more can be there.
        assert known <= int(session.stats()["objects"]) <= known + PAGES * len(writers)
        assert sum(len(writer.committed) for writer in writers) > 15 + 12
        memory.close()
        assert_nothing_is_lost(server, session)


def test_a_stopped_writer_that_wakes_up_late_harms_nobody(tmp_path: Path, new_writer: NewWriter) -> None:
    """Past its lease its slots are nobody's: not its own any more, and not yet another's, since it may yet write."""
    with server_with(tmp_path, "--lease", str(LEASE_S), "--quarantine", "600", size="12M") as server:
        session = Session(server.endpoint, name="watcher", timeout_s=60)
        memory, number = attach(session)
        writer = new_writer(server, 1, wait=True, batches=1)
        writer.until("half", 0)
        writer.signal(signal.SIGSTOP)
        await_condition(lambda: session.stats()["slots_quarantined"] == PAGES, "its slots go to quarantine")
        # Others take everything that there is to take, several times over.
        stored: list[bytes] = []
        taken: set[int] = set()
        for seed in range(2000, 2090):
            keys = hashes(64, seed=seed)
            reserved = session.reserve(number, "kv", 0, 1, p.ROOT, keys, PAGE_BYTES)
            mine = [i for i, status in enumerate(reserved.status) if status == p.ReserveStatus.RESERVED]
            slots = np.frombuffer(reserved.slots, "<u4")[mine]
            offsets = np.frombuffer(reserved.offsets, "<u8")[mine]
            generations = np.frombuffer(reserved.generations, "<u8")[mine]
            for i, offset in zip(mine, offsets.tolist(), strict=True):
                write(memory, offset, each(keys)[i])
            session.commit(slots.tobytes(), generations.tobytes())
            taken.update(slots.tolist())
            stored.append(b"".join(each(keys)[i] for i in mine))
        assert int(session.stats()["evicted_pages"]) > 0, "the pool was never full: the test shows nothing"
        assert not taken & set(writer.slots)
        writer.signal(signal.SIGCONT)
        writer.go_on()
        writer.until("committed", 0)
        assert set(writer.statuses) == {p.CommitStatus.LOST}
        assert session.match(number, ["kv"], 0, keys_of(1, 0, PAGES)).pages == 0
        # It has said that it has stopped writing: its slots are free again, and nobody's bytes have changed.
        await_condition(lambda: settled(session.stats()), "its slots return")
        checked = 0
        for keys in stored:
            wrong = wrong_pages(session, memory, number, keys)
            # Eviction goes on in the background: what is gone is a miss, and no more than that.
            assert [what for what in wrong if "wrong bytes" in what] == []
            checked += len(keys) // 32 - len(wrong)
        assert checked > 500
        writer.go_on()
        assert writer.next() == ("done", 1)
        writer.process.join(120)
        memory.close()
        assert_nothing_is_lost(server, session)


# ---------------------------------------------------------------- the server


@pytest.mark.parametrize("seed", [1, 2])
def test_a_server_killed_anywhere_finds_every_acknowledged_page_again(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    with server_with(tmp_path, "--lease", str(LONG_LEASE_S), "--quarantine", str(QUARANTINE_S), size="512M") as server:
        loads = [Load(server.endpoint, seed * 10 + i) for i in range(3)]
        checker = Session(server.endpoint, name="checker", timeout_s=5)
        memory, number = attach(checker)
        for life in range(5):
            before = sum(len(load.acknowledged) for load in loads)
            threads = [load.start(500, PAGES) for load in loads]
            goal = before + chance.randrange(1, 200)
            await_acknowledged(loads, threads, goal)
            server.kill()
            for load in loads:
                load.killed.set()
            # Nobody calls for the checker meanwhile: it would find out at its next heartbeat.
            checker._open_breaker(ServerUnavailableError("it was killed"))
            for thread in threads:
                thread.join(120)
            assert [load.faults for load in loads] == [[]] * 3
            assert sum(len(load.acknowledged) for load in loads) >= goal
            if life % 2:
                # Killed while it starts, too: somewhere between the lock, the rebuild and the first reply.
                early = ServerProcess(tmp_path, *server.options, pool=server.pool, bind=server.endpoint, size="")
                starting = threading.Thread(target=lambda e=early: _start_and_be_killed(e))
                starting.start()
                await_condition(lambda e=early: e.process is not None, "it starts")
                time.sleep(chance.random() * 0.25)
                early.signal(signal.SIGKILL)
                starting.join(120)
                assert early.process is not None
                early.process.wait(120)
            server.start()
            await_condition(
                lambda: all(
                    # Of this very one: the one that was killed while it started may have been found, too.
                    s.connected and s.welcome is not None and s.welcome.incarnation == memory.incarnation
                    for s in (checker, *(load.session for load in loads))
                ),
                "all clients have found the next server",
            )
            number = checker.open_namespace(namespace().record())
            for load in loads:
                for keys in load.acknowledged:
                    assert wrong_pages(checker, memory, number, keys) == [], f"after {life + 1} kills"
        stats = checker.stats()
        assert stats["evicted_pages"] == 0
        await_condition(lambda: settled(checker.stats()), "the quarantine ends")
        for load in loads:
            load.close()
        memory.close()
        assert_nothing_is_lost(server, checker)


def _start_and_be_killed(server: ServerProcess) -> None:
    # Whether it came to be ready before it was killed makes no difference here.
    with contextlib.suppress(AssertionError):
        server.start()


def test_a_stopped_server_that_wakes_up_late_keeps_its_clients(tmp_path: Path) -> None:
    """A server that was itself stopped has heard nobody for long, and must take nobody for dead."""
    lease_s = 4.0  # clients of a slow machine must not be silent for as long once it has woken
    with server_with(tmp_path, "--lease", str(lease_s), "--quarantine", "600") as server:
        sessions = [Session(server.endpoint, name=f"client {i}", timeout_s=60) for i in range(3)]
        held = []
        for i, session in enumerate(sessions):
            number = session.open_namespace(namespace().record())
            held.append(session.reserve(number, "kv", 0, 1, p.ROOT, keys_of(i, 0, PAGES), PAGE_BYTES))
        stats = sessions[0].stats()
        server.signal(signal.SIGSTOP)
        stopped = time.monotonic()
        with impatient(*sessions):
            for session in sessions:
                with pytest.raises(ServerUnavailableError):
                    session.stats()
            await_condition(lambda: time.monotonic() - stopped > 1.25 * lease_s, "their leases pass")
            server.signal(signal.SIGCONT)
            for session in sessions:
                await_condition(lambda s=session: s.connected, "calls go through again")
        for session, reserved in zip(sessions, held, strict=True):
            committed = session.commit(reserved.slots, reserved.generations)
            assert set(committed.status) == {p.CommitStatus.COMMITTED}
            assert session.epoch == 1
        after = sessions[0].stats()
        assert (after["sessions"], after["slots_quarantined"]) == (stats["sessions"], 0)
        assert after["quarantined"] == stats["quarantined"]
        for session in sessions[1:]:
            session.close()
        assert_nothing_is_lost(server, sessions[0])


def test_slots_of_calls_that_a_stopped_server_answered_too_late_come_back(tmp_path: Path) -> None:
    """The reserve is carried out after its caller has given up: nobody would ever commit or release those slots."""
    with server_with(tmp_path, "--quarantine", "600") as server:
        session = Session(server.endpoint, name="impatient", timeout_s=60)
        number = session.open_namespace(namespace().record())
        with impatient(session):
            server.signal(signal.SIGSTOP)
            with pytest.raises(ServerUnavailableError):
                session.reserve(number, "kv", 0, 1, p.ROOT, keys_of(1, 0, PAGES), PAGE_BYTES)
            server.signal(signal.SIGCONT)
            await_condition(lambda: session.connected, "calls go through again")
        await_condition(
            lambda: session.stats()["reserved"] == PAGES and settled(session.stats()),
            "it was carried out and given back",
        )
        assert session.epoch == 1
        assert_nothing_is_lost(server, session)


def test_a_commit_that_a_stopped_server_answered_too_late_is_found(tmp_path: Path) -> None:
    with server_with(tmp_path) as server:
        session = Session(server.endpoint, name="impatient", timeout_s=60)
        memory, number = attach(session)
        keys = keys_of(1, 0, PAGES)
        reserved = session.reserve(number, "kv", 0, 1, p.ROOT, keys, PAGE_BYTES)
        for offset, key in zip(np.frombuffer(reserved.offsets, "<u8").tolist(), each(keys), strict=True):
            write(memory, offset, key)
        with impatient(session):
            server.signal(signal.SIGSTOP)
            with pytest.raises(ServerUnavailableError):
                session.commit(reserved.slots, reserved.generations)
            server.signal(signal.SIGCONT)
            await_condition(lambda: session.connected, "calls go through again")
        await_condition(lambda: settled(session.stats()), "it is carried out")
        assert wrong_pages(session, memory, number, keys) == []
        assert set(session.commit(reserved.slots, reserved.generations).status) == {p.CommitStatus.COMMITTED}
        memory.close()
        assert_nothing_is_lost(server, session)
