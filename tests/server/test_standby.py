"""A standby on the same host: it waits for the pool's file lock, takes everything up, and clients follow. Real processes."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from maru_core import protocol as p
from maru_core.errors import PoolBusyError
from maru_core.pool import PoolMemory, parse_pool_uri
from maru_core.pool.format import BLOCK_BYTES, COMMITTED
from maru_core.session import Session
from maru_core.store import Store, StoreConfig
from maru_server import service
from maru_server.config import StateConfig
from maru_server.directory import PoolDirectory
from maru_server.election import FileLock, LostError, Stop, check_held, take_up
from maru_server.state import ServerState
from tests.server.live import Running, raw, store
from tests.server.test_kills import attach, await_acknowledged
from tests.server.writers import PAGE_BYTES, Load, each, keys_of, write, wrong_pages
from tests.support import Pages, ServerProcess, await_condition, hashes, impatient, namespace

PAGES = 6

NewServer = Callable[..., ServerProcess]


@pytest.fixture
def new_server(tmp_path: Path) -> Iterator[NewServer]:
    """Makes servers of one pool, each with an endpoint of its own unless told otherwise, and leaves none behind."""
    made: list[ServerProcess] = []

    def make(*options: str, bind: str | None = None, size: str = "64M") -> ServerProcess:
        server = ServerProcess(tmp_path, *options, pool=f"file://{tmp_path}/pool", bind=bind, size=size)
        made.append(server)
        return server

    yield make
    for server in made:
        server.remove()


def says(server: ServerProcess, *words: str) -> Callable[[], bool]:
    return lambda: all(word in server.log.read_text() for word in words)


def image(path: Path) -> tuple[str, os.stat_result]:
    """The pool's bytes, and what the file system says of it (a changed mode, size or hole changes the times)."""
    return hashlib.sha256(path.read_bytes()).hexdigest(), path.stat()


def put(session: Session, memory: PoolMemory, number: int, seed: int) -> bytes:
    """Store a batch with its bytes; its keys."""
    keys = keys_of(seed, 0, PAGES)
    reserved = session.reserve(number, "kv", 0, 1, p.ROOT, keys, PAGE_BYTES)
    for offset, key in zip(np.frombuffer(reserved.offsets, "<u8").tolist(), each(keys), strict=True):
        write(memory, offset, key)
    assert set(session.commit(reserved.slots, reserved.generations).status) == {p.CommitStatus.COMMITTED}
    return keys


# ---------------------------------------------------------------- taking over


@pytest.mark.parametrize("same_endpoint", [True, False])
def test_a_standby_serves_all_that_was_acknowledged_and_gives_out_nothing_that_may_be_written(
    same_endpoint: bool, new_server: NewServer
) -> None:
    active = new_server().start()
    standby = new_server(
        "--standby", "--quarantine", "600", bind=active.endpoint if same_endpoint else None, size=""
    ).begin()
    await_condition(says(standby, "standby:", f"pid {active.process.pid}", active.endpoint), "it says who is active")
    session = Session(f"{active.endpoint},{standby.endpoint}", name="client", timeout_s=60)
    memory, number = attach(session)
    keys = put(session, memory, number, 1)
    # A client in the middle of a write when its server dies: it lives, and may write at any time.
    writing = session.reserve(number, "kv", 0, 1, p.ROOT, keys_of(2, 0, PAGES), PAGE_BYTES)
    assert not standby.serves

    with impatient(session):
        active.kill()
        standby.await_ready()
        await_condition(lambda: session.connected and session.epoch == 2, "the client finds it")
    number = session.open_namespace(namespace().record())
    assert wrong_pages(session, memory, number, keys) == []
    assert session.stats()["slots_quarantined"] == PAGES
    taken: set[int] = set()
    for seed in range(1000, 1400):
        reserved = session.reserve(number, "kv", 0, 1, p.ROOT, hashes(64, seed=seed), PAGE_BYTES)
        slots = np.frombuffer(reserved.slots, "<u4")
        taken.update(slots[slots != p.NO_SLOT].tolist())
        if p.ReserveStatus.NO_ROOM in reserved.status:
            break
    else:
        pytest.fail("the pool was never full: the test shows nothing")
    assert not taken & set(np.frombuffer(writing.slots, "<u4").tolist())
    memory.close()
    session.close()
    assert standby.stop() == 0


def test_a_standby_touches_nothing_while_it_waits(new_server: NewServer, tmp_path: Path) -> None:
    active = new_server().start()
    active.signal(signal.SIGSTOP)  # so that whatever changes was changed by the standby
    before = image(tmp_path / "pool")
    standby = new_server("--standby").begin()
    await_condition(says(standby, "standby:"), "it waits")
    looked = threading.Event()
    looked.wait(0.3)  # time for it to look again
    text, status = image(tmp_path / "pool")
    assert text == before[0]
    for what in ("st_mode", "st_size", "st_blocks", "st_mtime_ns", "st_ctime_ns"):
        assert getattr(status, what) == getattr(before[1], what), what
    assert not standby.serves
    active.signal(signal.SIGCONT)
    active.kill()
    standby.await_ready()
    assert standby.stop() == 0


def test_a_standby_that_waits_ends_at_a_signal(new_server: NewServer) -> None:
    active = new_server().start()
    for number in (signal.SIGTERM, signal.SIGINT):
        standby = new_server("--standby").begin()
        await_condition(says(standby, "standby:"), "it waits")
        standby.signal(number)
        assert standby._reap() == 0
        assert says(standby, "stopped before it was this server's turn")()
        assert "Traceback" not in standby.log.read_text()
    assert active.stop() == 0


def test_a_standby_counts_as_started_when_it_waits(
    new_server: NewServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd would otherwise take it for one that does not come up, and end it."""
    active = new_server().start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"{tmp_path}/notify")
        manager.settimeout(180)
        monkeypatch.setenv("NOTIFY_SOCKET", f"{tmp_path}/notify")
        standby = new_server("--standby").begin()
        assert manager.recv(100) == b"READY=1"
        assert not standby.serves
        assert active.process.poll() is None


def test_a_standby_with_nobody_to_wait_for_serves_at_once(new_server: NewServer) -> None:
    assert new_server("--standby").start().stop() == 0


def test_a_clean_stop_hands_over_and_of_several_standbys_one_serves_at_a_time(new_server: NewServer) -> None:
    first = new_server().start()
    waiting = [new_server("--standby", bind=first.endpoint, size="").begin() for _ in range(2)]
    for standby in waiting:
        await_condition(says(standby, "standby:"), "it waits")
    session = Session(first.endpoint, name="client", timeout_s=60)
    keys = store(session, session.open_namespace(namespace().record()), 10)
    session.timeout_s = 1.0  # from here on it looks for whoever serves
    assert first.stop() == 0
    for life in (2, 3):
        await_condition(lambda: any(standby.serves for standby in waiting), "one takes over")
        [serving] = [standby for standby in waiting if standby.serves]
        serving.await_ready()
        waiting.remove(serving)
        await_condition(lambda n=life: session.connected and session.epoch == n, "the client finds it")
        with impatient(session, timeout_s=60):
            number = session.open_namespace(namespace().record())
            assert session.match(number, ["kv"], 0, keys).pages == 10
        if waiting:
            await_condition(says(waiting[0], f"pid {serving.process.pid}"), "the other sees who serves now")
            assert not waiting[0].serves
        serving.kill()
    session.close()


def test_under_load_every_take_over_finds_what_was_acknowledged(new_server: NewServer) -> None:
    chance = random.Random(6)
    active, standby = new_server(size="256M").start(), new_server("--standby", size="256M").begin()
    places = f"{active.endpoint},{standby.endpoint}"
    loads = [Load(places, seed) for seed in (1, 2)]
    checker = Session(places, name="checker", timeout_s=5)
    memory, _ = attach(checker)
    for life in range(3):
        await_condition(says(standby, "standby:"), "it waits")
        before = sum(len(load.acknowledged) for load in loads)
        threads = [load.start(500, PAGES) for load in loads]
        await_acknowledged(loads, threads, before + chance.randrange(1, 100))
        active.kill()
        for load in loads:
            load.killed.set()
        for thread in threads:
            thread.join(120)
        assert [load.faults for load in loads] == [[]] * 2
        standby.await_ready()
        active, standby = standby, active
        standby.options = ("--standby",)
        standby.log.unlink()
        standby.begin()
        sessions = (checker, *(load.session for load in loads))
        await_condition(
            lambda n=life, all_of=sessions: all(s.connected and s.epoch == n + 2 for s in all_of), "clients find it"
        )
        number = checker.open_namespace(namespace().record())
        for load in loads:
            for keys in load.acknowledged:
                assert wrong_pages(checker, memory, number, keys) == [], f"after {life + 1} take-overs"
    assert sum(len(load.acknowledged) for load in loads) > 3
    for load in loads:
        load.close()
    memory.close()
    checker.close()


def test_a_store_goes_on_at_the_standby(new_server: NewServer) -> None:
    active = new_server().start()
    standby = new_server("--standby").begin()
    await_condition(says(standby, "standby:"), "it waits")
    config = StoreConfig(server=f"{active.endpoint},{standby.endpoint}", timeout_ms=60_000)
    client = Store.open(config, namespace(), name="engine")
    pages, other = Pages(8, (1024,), seed=3), Pages(8, (1024,), seed=4)
    keys, more = hashes(8, seed=5), hashes(8, seed=6)
    assert client.put("kv", 0, 1, p.ROOT, keys, pages.fragments).all()
    found = Pages(8, (1024,))
    with impatient(client._session, timeout_s=1):
        active.kill()
        standby.await_ready()
        await_condition(lambda: client.get("kv", 0, keys, found.fragments).all(), "what was stored is loaded")
    assert found.same(pages).all()
    await_condition(lambda: client.put("kv", 0, 1, p.ROOT, more, other.fragments).all(), "more is stored")
    assert client.metrics.miss_error == client.metrics.refused_error == 0
    client.close()
    assert standby.stop() == 0


# ---------------------------------------------------------------- the pool is replaced meanwhile


def test_the_pool_that_has_the_name_in_the_end_is_served(new_server: NewServer, tmp_path: Path) -> None:
    old = new_server().start()
    standby = new_server("--standby").begin()
    await_condition(says(standby, f"pid {old.process.pid}"), "it waits for the first")
    new = new_server()
    new.pool = f"file://{tmp_path}/other"
    new.start()
    os.replace(tmp_path / "other", tmp_path / "pool")  # as --format does
    await_condition(says(standby, f"pid {new.process.pid}"), "it waits for the second")
    old.kill()
    session = Session(new.endpoint, name="client", timeout_s=60)
    uuid = session.connect().pool_uuid
    session.close()
    new.kill()
    standby.await_ready()
    session = Session(standby.endpoint, name="client", timeout_s=60)
    assert session.connect().pool_uuid == uuid
    session.close()


def test_a_pool_that_is_replaced_before_the_turn_comes_is_not_served(tmp_path: Path) -> None:
    """The file lock is had, and the other lock comes late: what is opened then is what has the name then."""
    uri = parse_pool_uri(f"file://{tmp_path}/pool?size=64M")
    PoolMemory.create(uri).close()
    replaced: list[bytes] = []

    def turn() -> None:
        if not replaced:
            os.rename(tmp_path / "pool", tmp_path / "old")
            with PoolMemory.create(uri) as other:
                replaced.append(other.geometry.pool_uuid)

    with PoolMemory.create(uri, turn=turn) as memory:
        assert memory.geometry.pool_uuid == replaced[0]
    # And where there is no file at all, none is made before the turn has come.
    (tmp_path / "pool").unlink()

    def never() -> None:
        assert not (tmp_path / "pool").exists()
        raise PoolBusyError("not now")

    with pytest.raises(PoolBusyError):
        PoolMemory.create(uri, turn=never)
    assert not (tmp_path / "pool").exists()


def test_stop_is_heard_while_waiting_and_before(tmp_path: Path) -> None:
    uri = parse_pool_uri(f"file://{tmp_path}/pool?size=64M")
    stop = Stop()
    with PoolMemory.create(uri):
        found: list[PoolMemory | None] = []
        waiting = threading.Thread(
            target=lambda: found.append(take_up(uri, None, False, election=FileLock(), standby=True, stop=stop))
        )
        waiting.start()
        stop.set()
        waiting.join(120)
        assert found == [None]
    assert take_up(uri, None, False, election=FileLock(), standby=True, stop=stop) is None


# ---------------------------------------------------------------- the fence in the memory


def test_a_server_that_was_overtaken_sees_it_in_the_memory_and_stops(new_server: NewServer, tmp_path: Path) -> None:
    """Whatever went wrong with locks: another server has counted the incarnation up, so this one touches nothing more."""
    server = new_server().start()
    session = Session(server.endpoint, name="client", timeout_s=60)
    number = session.open_namespace(namespace().record())
    store(session, number, 10)
    server.signal(signal.SIGSTOP)
    # A request that would change the pool lies in its socket when it wakes.
    with raw(server.endpoint) as dealer:
        life = session._life
        assert life is not None
        dealer.send(p.encode(p.Reserve(1, life.session, number, "kv", 0, 1, p.ROOT, hashes(10, seed=9), 1000)))
        with (tmp_path / "pool").open("r+b") as pool:
            pool.seek(BLOCK_BYTES)
            word = int.from_bytes(pool.read(8), "little")
            pool.seek(BLOCK_BYTES)
            pool.write((word + 1).to_bytes(8, "little"))
        before = image(tmp_path / "pool")[0]
        server.signal(signal.SIGCONT)
        assert server._reap() == 3
        assert image(tmp_path / "pool")[0] == before
        assert not dealer.poll(0), "it answered in the name of a pool that is not its own"
    assert says(server, "no longer this server's pool", "another server has taken the pool up")()
    session.close()


def test_a_tick_looks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sends anything: what is due by time would change the pool as well."""
    running = Running(tmp_path)
    provisioner = running.service._media[0]._provisioner
    await_condition(lambda: provisioner.ready >= provisioner._wanted > 0, "nothing is on its way that would wake it")
    ticked: list[int] = []
    tick = running.state.tick

    def noting(now: float) -> None:
        ticked.append(running.memory.incarnation)
        tick(now)

    monkeypatch.setattr(running.state, "tick", noting)
    await_condition(lambda: ticked, "it ticks")
    running.memory.bump_incarnation()
    overtaken = running.memory.incarnation
    running.thread.join(120)
    assert overtaken not in ticked
    assert not running.thread.is_alive()
    assert running.service.deposed == "another server has taken the pool up meanwhile"
    running.stop()


class Ending(FileLock):
    """A right that the test takes away."""

    held = True

    def holds(self) -> bool:
        return self.held

    def why(self) -> str:
        return "it was taken away"


def test_a_right_that_has_ended_ends_the_service(tmp_path: Path) -> None:
    election = Ending()
    running = Running(tmp_path, election=election)
    session = running.session()
    session.connect()
    election.held = False
    running.thread.join(120)
    assert not running.thread.is_alive()
    assert running.service.deposed == "it was taken away"
    session.close()
    running.stop()


@pytest.mark.parametrize("at", [1, 2])
def test_a_server_that_was_overtaken_while_it_took_the_pool_up_changes_nothing(at: int, tmp_path: Path) -> None:
    """It may have stood still anywhere in there, and what it was about to free may be in use again."""
    running = Running(tmp_path)
    session = running.session()
    store(session, session.open_namespace(namespace().record()), 10)
    session.close()
    running.stop()
    uri = parse_pool_uri(f"file://{tmp_path}/pool")

    def take_up_again(check: Callable[[PoolMemory, int], None]) -> None:
        with PoolMemory.create(uri) as memory:
            mine = memory.bump_incarnation()
            ServerState(
                PoolDirectory(memory.geometry, memory.meta), incarnation=mine, pool_uri="", config=StateConfig(), now=0.0,
                wall_offset=1e9, before_writing=lambda: check(memory, mine),
            )  # fmt: skip

    with PoolMemory.create(uri) as memory:
        damaged = int(np.flatnonzero(memory.directory["state"] == COMMITTED)[0])
        memory.directory["length"][damaged] ^= 1  # the next rebuild frees it
    looks: list[int] = []
    before: list[bytes] = []

    def overtaken(memory: PoolMemory, mine: int) -> None:
        looks.append(mine)
        if len(looks) == at:
            memory.bump_incarnation()
            before.append((tmp_path / "pool").read_bytes())
        check_held(FileLock(), memory, mine)

    with pytest.raises(LostError, match="another server has taken"):
        take_up_again(overtaken)
    assert len(looks) == at
    assert (tmp_path / "pool").read_bytes() == before[0]
    with PoolMemory.create(uri) as memory:
        assert memory.directory["state"][damaged] == COMMITTED
    take_up_again(lambda memory, mine: check_held(FileLock(), memory, mine))
    with PoolMemory.create(uri) as memory:
        assert memory.directory["state"][damaged] != COMMITTED, "nothing was to be freed: the test shows nothing"


def test_the_next_message_is_not_handled_once_the_right_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    election = Ending()
    running = Running(tmp_path, election=election)
    handled: list[p.Request] = []
    handle = running.state.handle

    def last(message: p.Request, *args: object) -> p.Reply | None:
        handled.append(message)
        election.held = False
        return handle(message, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(running.state, "handle", last)
    with raw(running.endpoint) as dealer:
        for number in range(50):
            dealer.send(p.encode(p.Stats(number)))
        running.thread.join(120)
        assert not running.thread.is_alive()
        assert len(handled) == 1
    running.stop()


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_an_endpoint_that_a_dying_server_still_holds_is_waited_for(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pool's lock goes first, and its socket a moment later."""
    monkeypatch.setattr(service, "BIND_PATIENCE_S", 60.0)  # on a slow machine the moment may be long
    with socket.socket(socket.AF_UNIX if kind == "ipc" else socket.AF_INET) as dying:
        dying.bind(f"{tmp_path}/s" if kind == "ipc" else ("127.0.0.1", 0))
        dying.listen()
        bind = f"ipc://{tmp_path}/s" if kind == "ipc" else f"tcp://127.0.0.1:{dying.getsockname()[1]}"
        gone = threading.Timer(0.2, dying.close)
        gone.start()
        running = Running(tmp_path, bind=bind)
        gone.join()
    session = running.session()
    session.connect()
    session.close()
    running.stop()
