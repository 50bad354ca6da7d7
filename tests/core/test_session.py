"""The session against a peer whose every reply the test decides. The real server is in tests/server."""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from maru_core import protocol as p
from maru_core.conversation import HEARTBEAT_MIN_S
from maru_core.errors import (
    ClosedError,
    ConfigError,
    ServerError,
    ServerUnavailableError,
    SessionLostError,
    VersionMismatchError,
)
from maru_core.session import Session
from tests.support import await_condition, impatient

Answer = Callable[[p.Request], "list[p.Reply | bytes]"]


class Peer:
    """A ROUTER with a thread. ``answer`` decides what a message is answered with; it may be replaced at any time."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.incarnation = 7
        self.session = 1
        self.protocol = p.PROTOCOL_VERSION
        self.heartbeat_s = 0.05
        self.messages: collections.deque[p.Request] = collections.deque()
        self.answer: Answer = self.good
        self.held: list[tuple[bytes, p.Reply]] = []
        self.hold: Callable[[p.Request], bool] = lambda message: False
        self._send_held = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._bound = threading.Event()
        self._thread.start()
        assert self._bound.wait(120)

    def good(self, message: p.Request) -> list[p.Reply | bytes]:
        if isinstance(message, p.Hello):
            return [
                p.Welcome(
                    self.protocol,
                    message.rid,
                    self.incarnation,
                    self.session,
                    "shm://x",
                    b"u" * 16,
                    self.heartbeat_s,
                    10.0,
                )
            ]
        if isinstance(message, p.Touch | p.Goodbye):
            return []
        if message.session != self.session and not isinstance(message, p.Stats):
            return [p.Error(message.rid, self.incarnation, "unknown-session", "say Hello again")]
        if isinstance(message, p.OpenNamespace):
            return [p.NamespaceOpened(message.rid, self.incarnation, int(message.record))]
        if isinstance(message, p.Stats):
            return [p.StatsReply(message.rid, self.incarnation, {"rid": message.rid})]
        if isinstance(message, p.Reserve):
            n = len(message.hashes) // 32
            status = bytes([p.ReserveStatus.EXISTS] + [p.ReserveStatus.RESERVED] * (n - 1))
            slots = np.array([p.NO_SLOT, *range(1, n)], "<u4").tobytes()
            numbers = np.arange(n, dtype="<u8").tobytes()
            return [p.Reserved(message.rid, self.incarnation, status, slots, numbers, numbers)]
        if isinstance(message, p.Commit):
            return [p.Committed(message.rid, self.incarnation, bytes(len(message.slots) // 4))]
        if isinstance(message, p.Match):
            pages, components = len(message.hashes) // 32, len(message.components)
            arrays = [bytes(4 * pages * components), *[bytes(8 * pages * components)] * 4]
            return [p.Located(message.rid, self.incarnation, pages, *arrays, covered=[pages] * components)]
        return [p.Done(message.rid, self.incarnation, 1)]

    def restart(self) -> None:
        """Another life: another incarnation, and the session numbers of the old one mean nothing."""
        self.session += 1
        self.incarnation += 1

    def of(self, kind: type) -> list[p.Request]:
        return [message for message in tuple(self.messages) if isinstance(message, kind)]

    def send_held(self) -> None:
        self.hold = lambda message: False
        self._send_held.set()
        await_condition(lambda: not self.held, "held replies are sent")

    def close(self) -> None:
        self._stop.set()
        self._thread.join(120)

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        router = context.socket(zmq.ROUTER)
        router.linger = 0
        router.bind(self.endpoint)
        # Of a port of its own choice it says which.
        self.endpoint = router.last_endpoint.decode()
        self._bound.set()
        while not self._stop.is_set():
            if self._send_held.is_set():
                self._send_held.clear()
                for identity, reply in self.held:
                    router.send_multipart([identity, p.encode(reply)])
                self.held.clear()
            if not router.poll(5):
                continue
            identity, data = router.recv_multipart()
            message = p.decode_request(data)
            self.messages.append(message)
            replies = self.answer(message)
            if self.hold(message):
                self.held.extend((identity, reply) for reply in replies if not isinstance(reply, bytes))
                continue
            for reply in replies:
                router.send_multipart([identity, reply if isinstance(reply, bytes) else p.encode(reply)])
        router.close(0)
        context.term()


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/peer.sock"


@pytest.fixture
def peer(endpoint: str) -> Iterator[Peer]:
    peer = Peer(endpoint)
    yield peer
    peer.close()


@pytest.fixture
def session(endpoint: str) -> Iterator[Session]:
    session = Session(endpoint, name="test", timeout_s=60)
    yield session
    session.close()


def silent(message: p.Request) -> list[p.Reply | bytes]:
    return []


@pytest.fixture
def no_heartbeats(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """None before a call has found no answer: one that was answered long ago may be looked at after that."""
    monkeypatch.setattr("maru_core.conversation.PROBE_MAX_S", 60.0)
    peer.heartbeat_s = 60.0


# ---------------------------------------------------------------- the ordinary


def test_the_first_call_registers_and_later_ones_use_the_session(peer: Peer, session: Session) -> None:
    assert (session.epoch, session.connected, session.welcome) == (0, False, None)
    assert session.open_namespace(b"42") == 42
    assert session.epoch == 1
    assert session.connected
    assert session.welcome == session.connect()
    assert len(peer.of(p.Hello)) == 1
    hello = peer.of(p.Hello)[0]
    assert isinstance(hello, p.Hello)
    assert (hello.pid, hello.name, len(hello.client_id)) == (os.getpid(), "test", 16)


def test_every_typed_call_reaches_its_message(peer: Peer, session: Session) -> None:
    assert session.match(3, ["kv", "swa"], 1, b"h" * 64).pages == 2
    assert len(session.reserve(3, "kv", 0, 2, p.ROOT, b"h" * 64, 100).status) == 2
    assert session.commit(b"s" * 8, b"g" * 16).status == b"\0\0"
    assert session.release(b"s" * 8, b"g" * 16) == 1
    assert session.delete(3, b"h" * 32) == 1
    assert session.clear(3) == 1
    assert session.clear() == 1
    assert "rid" in session.stats()
    match = peer.of(p.Match)[0]
    assert isinstance(match, p.Match)
    assert (match.namespace, match.components, match.shard, match.sparse) == (3, ["kv", "swa"], 1, False)
    assert [message.namespace for message in peer.of(p.Clear) if isinstance(message, p.Clear)] == [3, None]


def test_tcp_works_too() -> None:
    peer = Peer("tcp://127.0.0.1:*")
    session = Session(peer.endpoint, name="test", timeout_s=60)
    assert session.open_namespace(b"5") == 5
    session.close()
    peer.close()


@pytest.mark.parametrize("endpoint", ["", "/run/x", "http://x", "ipc://", "tcp://nowhere", "ipc:///" + "x" * 200])
def test_an_endpoint_that_can_never_work_is_an_error_at_once(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="ipc:///path"):
        Session(endpoint, name="test")


def test_many_threads_get_their_own_replies(peer: Peer, endpoint: str) -> None:
    session = Session(endpoint, name="test", timeout_s=60)
    wrong: list[tuple[int, int]] = []

    def run(thread: int) -> None:
        for i in range(100):
            number = thread * 1000 + i
            if (got := session.open_namespace(str(number).encode())) != number:
                wrong.append((number, got))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(peer.of(p.Hello)) == 1
    assert len(peer.of(p.OpenNamespace)) == 800
    session.close()


# ---------------------------------------------------------------- away, slow, wrong


def test_a_server_that_is_not_there_is_unavailable_and_found_when_it_comes(endpoint: str, session: Session) -> None:
    with impatient(session):
        with pytest.raises(ServerUnavailableError, match="no answer to Hello"):
            session.stats()
        assert not session.connected
        peer = Peer(endpoint)
        await_condition(lambda: session.connected, "the session finds the server by itself")
    assert session.open_namespace(b"1") == 1
    session.close()
    peer.close()


@pytest.mark.usefixtures("no_heartbeats")
def test_after_a_call_without_an_answer_calls_fail_without_asking(peer: Peer, session: Session) -> None:
    session.connect()
    with impatient(session):
        peer.answer = silent
        with pytest.raises(ServerUnavailableError, match="no answer to Stats"):
            session.stats()
        for _ in range(50):
            with pytest.raises(ServerUnavailableError):
                session.stats()
        # The refusals sent nothing: the keeper alone asks.
        await_condition(lambda: peer.of(p.Stats), "the call that was sent is heard")
        assert len(peer.of(p.Stats)) == 1
        peer.answer = peer.good
        await_condition(lambda: session.connected, "calls go through again")
    assert session.epoch == 1, "a server that was only slow has not forgotten us"
    session.stats()


def test_a_server_that_dies_in_the_middle_of_a_call(endpoint: str, session: Session) -> None:
    peer = Peer(endpoint)
    session.connect()

    def die(message: p.Request) -> list[p.Reply | bytes]:
        if isinstance(message, p.Stats):
            peer._stop.set()
        return []

    with impatient(session):
        peer.answer = die
        with pytest.raises(ServerUnavailableError):
            session.stats()
        await_condition(peer._stop.is_set, "the call has killed it")
        peer.close()
        again = Peer(endpoint)
        again.incarnation, again.session = 8, 9
        await_condition(lambda: session.connected and session.epoch == 2, "the session finds the next server")
    assert session.open_namespace(b"3") == 3
    session.close()
    again.close()


def test_a_late_reply_is_never_taken_for_a_later_call(peer: Peer, session: Session) -> None:
    session.connect()
    peer.hold = lambda message: isinstance(message, p.OpenNamespace)
    with impatient(session):
        for late in (b"111", b"222"):
            await_condition(lambda: session.connected, "calls go through")
            with pytest.raises(ServerUnavailableError):
                session.open_namespace(late)
        await_condition(lambda: session.connected, "calls go through")
    await_condition(lambda: len(peer.held) == 2, "both calls were heard")
    peer.send_held()
    assert [session.open_namespace(str(i).encode()) for i in range(20)] == list(range(20))


def test_repeated_and_foreign_replies_are_dropped(peer: Peer, session: Session) -> None:
    def noisy(message: p.Request) -> list[p.Reply | bytes]:
        replies = peer.good(message)
        if isinstance(message, p.OpenNamespace):
            foreign: list[p.Reply | bytes] = [p.NamespaceOpened(message.rid + d, 7, 666) for d in (-2, -1, 1000)]
            return [*foreign, *replies, *replies, *foreign]
        return replies * 2

    peer.answer = noisy
    assert [session.open_namespace(str(i).encode()) for i in range(20)] == list(range(20))


GARBAGE = [
    b"",
    b"\xc1",
    b"\x91" * 50_000,
    b"\xff" * 1000,
    msgspec.msgpack.encode(["Located", 1]),
    b"\xdd\xff\xff\xff\xff",
]


def test_garbage_is_no_answer_and_an_answer_after_it_is_found(peer: Peer, session: Session) -> None:
    session.connect()
    peer.answer = lambda message: [*GARBAGE, *peer.good(message)]
    assert [session.open_namespace(str(i).encode()) for i in range(5)] == list(range(5))

    def said() -> bool:
        peer.answer = lambda message: [*GARBAGE]
        with pytest.raises(ServerUnavailableError) as caught:
            session.stats()
        peer.answer = peer.good
        await_condition(lambda: session.connected, "calls go through again")
        return "could not be read: is that a Maru server" in str(caught.value)

    with impatient(session):
        await_condition(said, "garbage that came before the call ended is spoken of")
    session.stats()


def test_an_answer_of_another_kind_or_of_wrong_lengths_is_an_error(peer: Peer, session: Session) -> None:
    session.connect()
    peer.answer = lambda message: [p.Done(message.rid, 7, 3)] if not isinstance(message, p.Touch | p.Goodbye) else []
    with pytest.raises(ServerError, match="answered match with what cannot be its answer"):
        session.match(1, ["kv"], 0, b"h" * 32)
    short = {
        p.Match: lambda rid: p.Located(rid, 7, 2, bytes(8), bytes(16), bytes(16), bytes(8), bytes(16)),
        p.Reserve: lambda rid: p.Reserved(rid, 7, bytes(2), bytes(8), bytes(16), bytes(8)),
        p.Commit: lambda rid: p.Committed(rid, 7, bytes(1)),
    }
    peer.answer = lambda message: [short[type(message)](message.rid)] if type(message) in short else peer.good(message)
    for call in (
        lambda: session.match(1, ["kv"], 0, b"h" * 64),
        lambda: session.match(1, ["kv"], 0, b"h" * 32),  # more pages than were asked for
        lambda: session.reserve(1, "kv", 0, 1, p.ROOT, b"h" * 64, 10),
        lambda: session.commit(bytes(8), bytes(16)),
    ):
        with pytest.raises(ServerError, match="cannot be its answer"):
            call()
    assert session.connected


def test_a_refusal_carries_its_code(peer: Peer, session: Session) -> None:
    session.connect()
    for rid in (None, 0):  # a server that cannot read a request cannot repeat its rid
        peer.answer = lambda message, rid=rid: (
            [p.Error(message.rid if rid is None else rid, 7, "too-large", "an extent has 2 MiB")]
            if isinstance(message, p.Reserve)
            else peer.good(message)
        )
        with pytest.raises(ServerError, match="an extent has 2 MiB") as caught:
            session.reserve(1, "kv", 0, 1, p.ROOT, b"h" * 32, 1 << 40)
        assert caught.value.code == p.ErrorCode.TOO_LARGE


def test_signals_do_not_stretch_the_time_limit(peer: Peer, session: Session) -> None:
    """A profiler's timer interrupts system calls faster than the time limit; the call must end all the same."""
    session.connect()
    peer.answer = silent
    before = signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        with impatient(session), pytest.raises(ServerUnavailableError):
            session.stats()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ---------------------------------------------------------------- lives


def test_a_restart_ends_the_epoch_and_what_belongs_to_it(peer: Peer, session: Session) -> None:
    peer.heartbeat_s = 60
    session.connect()
    old = session.epoch
    peer.restart()
    with pytest.raises(SessionLostError, match="open the namespace again"):
        session.commit(bytes(4), bytes(8), epoch=old)
    assert session.epoch == old + 1
    assert session.connected
    asked = len(peer.messages)
    for call in (
        lambda: session.match(1, ["kv"], 0, b"h" * 32, epoch=old),
        lambda: session.reserve(1, "kv", 0, 1, p.ROOT, b"h" * 32, 1, epoch=old),
        lambda: session.release(bytes(4), bytes(8), epoch=old),
        lambda: session.delete(1, b"h" * 32, epoch=old),
        lambda: session.clear(1, epoch=old),
        lambda: session.open_namespace(b"1", epoch=old),
    ):
        with pytest.raises(SessionLostError):
            call()
    assert len(peer.messages) == asked, "nothing of an old life is sent to a new one"
    assert session.open_namespace(b"9", epoch=session.epoch) == 9


def test_a_reply_from_another_incarnation_is_not_believed(peer: Peer, session: Session) -> None:
    """The request of one life, answered by the next: what it says may be about another pool."""
    peer.heartbeat_s = 60
    session.connect()
    peer.incarnation += 1
    with pytest.raises(SessionLostError):
        session.match(1, ["kv"], 0, b"h" * 32)
    assert session.epoch == 2


def test_heartbeats_alone_find_a_restart(peer: Peer, session: Session) -> None:
    session.connect()
    await_condition(lambda: len(peer.of(p.Heartbeat)) >= 3, "heartbeats come")
    peer.restart()
    await_condition(lambda: session.epoch == 2, "the keeper finds the new life")
    assert session.welcome is not None
    assert session.welcome.incarnation == peer.incarnation
    seen = len(peer.of(p.Heartbeat))
    await_condition(lambda: len(peer.of(p.Heartbeat)) >= seen + 3, "heartbeats go on")
    assert all(m.session == peer.session for m in peer.of(p.Heartbeat)[seen + 1 :] if isinstance(m, p.Heartbeat))


@pytest.mark.parametrize("asked", [0.0, -1.0, float("nan"), float("inf")])
def test_a_server_cannot_ask_for_a_flood_of_heartbeats_or_none(asked: float, peer: Peer, session: Session) -> None:
    peer.heartbeat_s = asked
    session.connect()
    await_condition(lambda: len(peer.of(p.Heartbeat)) >= 1, "a heartbeat comes")
    began, seen = time.monotonic(), len(peer.of(p.Heartbeat))
    for _ in range(20):
        session.stats()
        session.touch(1, b"h" * 32)
        time.sleep(0.01)
    came = len(peer.of(p.Heartbeat)) - seen
    assert came <= 2 + (time.monotonic() - began) / HEARTBEAT_MIN_S


def test_threads_that_find_a_restart_together_begin_one_life(peer: Peer, endpoint: str) -> None:
    peer.heartbeat_s = 60
    session = Session(endpoint, name="test", timeout_s=60)
    session.connect()
    peer.restart()
    lost: list[int] = []

    def run() -> None:
        try:
            session.commit(bytes(4), bytes(8))
        except SessionLostError:
            lost.append(1)

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lost
    assert session.epoch == 2
    assert len(peer.of(p.Hello)) == 2
    session.close()


def test_another_protocol_version_is_named_and_an_upgraded_server_is_found(peer: Peer, session: Session) -> None:
    peer.answer = lambda message: [p.Error(message.rid, 7, "version", "the server speaks 2 and the client 1")]
    for _ in range(2):
        with pytest.raises(VersionMismatchError, match="speaks 2 and the client 1"):
            session.stats()
    peer.answer = peer.good
    await_condition(lambda: session.connected, "the upgraded server is found")
    session.stats()


def test_a_welcome_in_another_protocol_is_refused(peer: Peer, session: Session) -> None:
    peer.protocol = 99
    with pytest.raises(VersionMismatchError, match="speaks protocol 99 and this client 1"):
        session.stats()


# ---------------------------------------------------------------- settling


def test_slots_of_a_reserve_that_was_answered_too_late_are_given_back(peer: Peer, session: Session) -> None:
    session.connect()
    peer.hold = lambda message: isinstance(message, p.Reserve)
    with impatient(session):
        with pytest.raises(ServerUnavailableError):
            session.reserve(1, "kv", 0, 1, p.ROOT, b"h" * 96, 10)
        await_condition(lambda: peer.held, "it is heard, too late")
        peer.send_held()
        await_condition(lambda: peer.of(p.Release), "the slots are released")
    release = peer.of(p.Release)[0]
    assert isinstance(release, p.Release)
    # The first one existed: only what was reserved is released.
    assert np.frombuffer(release.slots, "<u4").tolist() == [1, 2]
    assert np.frombuffer(release.generations, "<u8").tolist() == [1, 2]


@pytest.mark.parametrize("kind", [p.Commit, p.Release])
def test_a_commit_or_release_without_an_answer_is_repeated(kind: type, peer: Peer, session: Session) -> None:
    session.connect()
    peer.answer = lambda message: [] if isinstance(message, kind) else peer.good(message)
    sums = () if kind is p.Release else (b"checksum" * 2,)
    call = session.release if kind is p.Release else session.commit
    with impatient(session):
        with pytest.raises(ServerUnavailableError):
            call(b"slot" * 2, b"generati" * 2, *sums)
        await_condition(lambda: peer.of(kind), "it is heard")
        peer.answer = peer.good
        await_condition(lambda: len(peer.of(kind)) >= 2, "it is repeated")
        first, *more = peer.of(kind)
        await_condition(lambda: session._errands.settled, "it is settled")
    for again in more:
        assert msgspec.structs.replace(again, rid=0) == msgspec.structs.replace(first, rid=0)


@pytest.mark.usefixtures("no_heartbeats")
def test_nothing_of_an_old_life_is_settled_in_a_new_one(peer: Peer, session: Session) -> None:
    session.connect()
    peer.answer = lambda message: [] if isinstance(message, p.Commit | p.Heartbeat) else peer.good(message)
    with impatient(session):
        with pytest.raises(ServerUnavailableError):
            session.commit(b"slot", b"generati")
        await_condition(lambda: peer.of(p.Commit), "it is heard")
        peer.restart()
        peer.answer = peer.good
        await_condition(lambda: session.epoch == 2 and session._errands.settled, "the new life has begun")
    assert len(peer.of(p.Commit)) == 1


# ---------------------------------------------------------------- touches


def test_touches_are_gathered_and_have_no_reply(peer: Peer, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maru_core.conversation.TOUCH_GATHER_S", 0.5)  # so that a slow test has its share in it
    session.touch(1, b"x" * 32)  # before there is a life: dropped
    session.connect()
    for i in range(10):
        session.touch(1, bytes([i]) * 32, epoch=1)
    session.touch(2, b"z" * 32)
    session.touch(1, b"y" * 32, epoch=5)  # of another life: dropped

    def touched(namespace: int) -> bytes:
        return b"".join(m.hashes for m in peer.of(p.Touch) if isinstance(m, p.Touch) and m.namespace == namespace)

    await_condition(lambda: touched(2), "touches arrive")
    assert touched(1) == b"".join(bytes([i]) * 32 for i in range(10))
    assert touched(2) == b"z" * 32
    assert len(peer.of(p.Touch)) < 11


def test_more_touches_than_a_message_holds_are_split(peer: Peer, session: Session) -> None:
    session.connect()
    session.touch(1, bytes(32 * p.MAX_BATCH))
    session.touch(1, bytes(32 * 10))
    await_condition(lambda: len(peer.of(p.Touch)) == 2, "two messages arrive")
    assert [len(m.hashes) // 32 for m in peer.of(p.Touch) if isinstance(m, p.Touch)] == [p.MAX_BATCH, 10]


# ---------------------------------------------------------------- the end


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_closing_says_goodbye_and_leaves_nothing(peer: Peer, endpoint: str) -> None:
    def use() -> None:
        session = Session(endpoint, name="test", timeout_s=60)
        threads = [threading.Thread(target=session.stats) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        session.close()
        session.close()
        with pytest.raises(ClosedError, match="open another"):
            session.stats()
        session.touch(1, b"h" * 32)

    use()
    await_condition(lambda: len(peer.of(p.Goodbye)) == 1, "the goodbye arrives")
    before = open_descriptors()
    threads_before = threading.active_count()
    for _ in range(10):
        use()
    await_condition(lambda: len(peer.of(p.Goodbye)) == 11, "every goodbye arrives")
    # The peer's ends of the connections are in this process too, and go when its I/O thread has seen them close.
    await_condition(lambda: open_descriptors() <= before, f"descriptors go back to {before}")
    await_condition(lambda: threading.active_count() <= threads_before, "threads end")


def test_no_goodbye_while_a_thread_may_still_write(peer: Peer, endpoint: str) -> None:
    """A Goodbye gives the slots to others; a thread that copies into them would then write into somebody else's page."""
    ends: list[tuple[bool, Callable[[Session, p.Reserved], object]]] = [
        (False, lambda session, reserved: None),
        (False, lambda session, reserved: session.commit(reserved.slots[4:8], reserved.generations[8:16])),
        (True, lambda session, reserved: session.commit(reserved.slots[4:], reserved.generations[8:])),
        (True, lambda session, reserved: session.release(reserved.slots[4:], reserved.generations[8:])),
    ]

    def leavers() -> set[int]:
        return {message.session for message in peer.of(p.Goodbye) if isinstance(message, p.Goodbye)}

    for number, (_, end) in enumerate(ends):
        peer.session = number + 1
        session = Session(endpoint, name="test", timeout_s=60)
        end(session, session.reserve(1, "kv", 0, 1, p.ROOT, b"h" * 96, 10))  # the first exists, two are reserved
        session.close()
    await_condition(lambda: 4 in leavers(), "the last one's goodbye arrives")
    assert leavers() == {number + 1 for number, (says, _) in enumerate(ends) if says}


def test_a_session_whose_server_is_away_leaves_nothing_either(endpoint: str) -> None:
    def use() -> None:
        session = Session(endpoint, name="test", timeout_s=0.05)
        with pytest.raises(ServerUnavailableError):
            session.stats()
        session.close()

    use()
    before = open_descriptors()
    for _ in range(10):
        use()
    await_condition(lambda: open_descriptors() <= before, f"descriptors go back to {before}")


def test_calls_that_time_out_do_not_leak_sockets(peer: Peer, session: Session) -> None:
    session.connect()

    def call_in_vain() -> None:
        with impatient(session):
            peer.answer = silent
            with pytest.raises(ServerUnavailableError):
                session.stats()
            peer.answer = peer.good
            await_condition(lambda: session.connected, "it is back")
        session.stats()

    call_in_vain()
    before = session._sockets.count
    for _ in range(2):
        call_in_vain()
    assert session._sockets.count <= before


@pytest.mark.parametrize("kind", [p.Stats, p.Reserve])
def test_closing_while_a_call_waits_ends_the_call(kind: type, peer: Peer, endpoint: str) -> None:
    session = Session(endpoint, name="test", timeout_s=60)
    session.connect()
    session.timeout_s = 2.0  # the call ends by its own limit
    peer.answer = silent
    errors: list[BaseException] = []

    def run() -> None:
        try:
            session.stats() if kind is p.Stats else session.reserve(1, "kv", 0, 1, p.ROOT, b"h" * 32, 100)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    await_condition(lambda: peer.of(kind), "the call is under way")
    session.close()
    thread.join(120)
    assert not thread.is_alive()
    assert [type(error) for error in errors] == [ClosedError]
    assert session._sockets.ended


def test_closing_while_the_keeper_asks_is_no_fault(
    peer: Peer, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    session.connect()
    peer.answer = silent
    asked = len(peer.of(p.Heartbeat))
    await_condition(lambda: len(peer.of(p.Heartbeat)) > asked, "the keeper asks for a sign of life")
    session.close()
    assert not [record for record in caplog.records if record.name == "maru.session"]


def test_a_forked_child_is_told_to_open_its_own(peer: Peer, session: Session) -> None:
    session.connect()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            session.touch(1, b"h" * 32)
            session.stats()
        except ClosedError as error:
            os.write(write_end, str(error).encode())
        finally:
            session.close()
            os._exit(0)
    os.close(write_end)
    assert os.waitpid(child, 0)[1] == 0
    assert b"open one in the child" in os.read(read_end, 4096)
    os.close(read_end)
    # The parent's session is none the worse for it.
    assert session.open_namespace(b"4") == 4
    assert not peer.of(p.Goodbye)


EXIT = """
import os, sys, threading
from maru_core.session import Session
from maru_core.errors import MaruError
from maru_core import conversation
conversation.GOODBYE_LINGER_MS = 3000
session = Session(sys.argv[1], name="exit", timeout_s=60 if "there" in sys.argv else 0.2)
def call():
    while True:
        try:
            session.stats()
        except MaruError:
            pass
for _ in range(2):
    threading.Thread(target=call, daemon=True).start()
try:
    session.stats()
    session.touch(1, b"h" * 32)
except MaruError:
    pass
if "fork" in sys.argv:
    if os.fork() == 0:
        sys.exit(0)
    assert os.wait()[1] == 0
if "raise" in sys.argv:
    raise SystemExit(3)
"""


@pytest.mark.parametrize("how", ["plain", "fork", "raise"])
@pytest.mark.parametrize("server", ["there", "away"])
def test_the_interpreter_exits_without_a_close(how: str, server: str, endpoint: str) -> None:
    peer = Peer(endpoint) if server == "there" else None
    done = subprocess.run(
        [sys.executable, "-c", EXIT, endpoint, how, server], timeout=180, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (3 if how == "raise" else 0, "")
    if peer is not None:
        await_condition(lambda: peer.of(p.Goodbye), "it said goodbye all the same")
        peer.close()
