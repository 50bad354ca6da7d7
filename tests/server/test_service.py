"""The loop around the state: live, in a thread, with real sockets and a real pool."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maru_core import protocol as p
from maru_core.errors import ConfigError, ServerError, VersionMismatchError
from maru_core.pool import PoolMemory
from maru_core.process import ProcessIdentity
from maru_core.session import Session
from maru_server import provisioner as provisioner_module
from maru_server.config import StateConfig
from maru_server.endpoint import check_endpoint
from maru_server.state import ServerState
from tests.server.live import Running, raw, store
from tests.support import await_condition, hashes, namespace

# ---------------------------------------------------------------- the ordinary


def test_pages_are_stored_and_found_over_the_wire(running: Running) -> None:
    session = running.session()
    number = session.open_namespace(namespace().record())
    keys = store(session, number, 20)
    located = session.match(number, ["kv"], 0, keys + hashes(2, seed=9))
    assert located.pages == 20
    offsets = np.frombuffer(located.offsets, "<u8")
    assert len(set(offsets.tolist())) == 20
    assert (np.frombuffer(located.lengths, "<u8") == 1000).all()
    slots = np.frombuffer(located.slots, "<u4")
    assert (running.memory.generations[slots] == np.frombuffer(located.generations, "<u8")).all()
    assert session.delete(number, keys[32 * 10 : 32 * 11]) == 10
    assert session.match(number, ["kv"], 0, keys).pages == 10
    assert session.clear(number) == 10
    session.close()


def test_the_first_extents_have_their_memory_before_anyone_is_served(tmp_path: Path) -> None:
    provisioned: list[int] = []

    def prepare(memory: PoolMemory, state: ServerState) -> None:
        real = memory.provision

        def provision(extent: int) -> bool:
            provisioned.append(extent)
            return real(extent)

        memory.provision = provision

    running = Running(tmp_path, prepare=prepare)
    assert provisioned[:2] == [0, 1]
    session = running.session()
    number = session.open_namespace(namespace().record())
    # Four extents' worth: more must have been provisioned meanwhile, each before its slots are given out.
    whole = running.memory.geometry.extent_bytes
    for seed in range(4):
        await_condition(
            lambda s=seed: (
                set(session.reserve(number, "kv", 0, 1, p.ROOT, hashes(1, seed=s), whole).status)
                <= {p.ReserveStatus.RESERVED, p.ReserveStatus.BUSY}
            ),
            f"extent {seed} comes into use",
        )
    assert provisioned == list(range(len(provisioned)))
    assert len(provisioned) >= 4
    session.close()
    running.stop()


def test_memory_that_cannot_be_had_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(provisioner_module, "RETRY_S", 0.01)
    refusals: list[int] = []
    scarce = True

    def prepare(memory: PoolMemory, state: ServerState) -> None:
        real = memory.provision

        def provision(extent: int) -> bool:
            if extent >= 2 and scarce:
                refusals.append(extent)
                return False
            return real(extent)

        memory.provision = provision

    running = Running(tmp_path, prepare=prepare)
    session = running.session()
    number = session.open_namespace(namespace().record())
    whole = running.memory.geometry.extent_bytes

    def reserve(seed: int) -> int:
        return session.reserve(number, "kv", 0, 1, p.ROOT, hashes(1, seed=seed), whole).status[0]

    assert [reserve(0), reserve(1)] == [p.ReserveStatus.RESERVED] * 2
    assert reserve(2) == p.ReserveStatus.NO_ROOM
    await_condition(lambda: len(refusals) > 2, "it is asked for again")
    assert set(refusals) == {2}
    assert len([record for record in caplog.records if "until there is memory" in record.message]) == 1
    scarce = False
    await_condition(lambda: reserve(2) in (p.ReserveStatus.RESERVED, p.ReserveStatus.BUSY), "it comes into use")
    session.close()
    running.stop()


def test_it_ends_by_itself_a_while_after_the_last_client(tmp_path: Path) -> None:
    running = Running(tmp_path)
    session = running.session()
    session.connect()
    running.service._idle_exit_s = 0.3  # from here on: a slow client of a new server would find it gone
    for _ in range(10):  # several idle times over, with a client there
        session.stats()
        assert not running.thread.join(0.1)
    assert running.thread.is_alive()
    session.close()
    await_condition(lambda: not running.thread.is_alive(), "it ends")
    running.stop()


def test_it_ends_though_clients_fell_silent_where_its_pool_was_removed(tmp_path: Path) -> None:
    """They have found another server; their processes live on, and would keep this one for the whole quarantine."""
    running = Running(tmp_path, config=StateConfig(heartbeat_s=0.1, lease_s=0.4))
    me = ProcessIdentity.current()
    with raw(running.endpoint) as dealer:
        hello = p.Hello(
            p.PROTOCOL_VERSION, 1, bytes(16), "silent", me.host, me.pid, me.pid_start, me.pid_ns, me.boot_id
        )
        dealer.send(p.encode(hello))
        assert isinstance(p.decode_reply(dealer.recv()), p.Welcome)
        running.service._idle_exit_s = 0.2
        running.thread.join(1.5)
        assert running.thread.is_alive(), "a client that is silent may wake up"
        (tmp_path / "pool").unlink()
        running.thread.join(120)
        assert not running.thread.is_alive()
    running.stop()


def test_nothing_is_left_open(tmp_path: Path) -> None:
    def use() -> None:
        running = Running(tmp_path)
        session = running.session()
        session.stats()
        session.close()
        running.stop()

    def descriptors() -> int:
        gc.collect()  # a mapping is let go of with the last array over it
        return len(os.listdir("/proc/self/fd"))

    use()
    before = descriptors()
    for _ in range(5):
        use()
    await_condition(lambda: descriptors() <= before, "descriptors go back")
    assert [path.name for path in tmp_path.iterdir()] == ["pool"], "the socket file goes too"


# ---------------------------------------------------------------- faults and bad messages


def ask(dealer: zmq.Socket[bytes], *frames: bytes) -> p.Reply:
    dealer.send_multipart(frames)
    return p.decode_reply(dealer.recv())


@pytest.mark.parametrize(
    ("data", "rid"),
    [
        (b"", 0),
        (b"\xc1", 0),
        (b"\x91" * 100_000, 0),
        (
            b"\x94" + msgspec.msgpack.encode("Stats") + b"\x01\x00" + b"\x91" * 100_000,
            0,
        ),  # in a field of a later release
        (b"\xdd\xff\xff\xff\xff", 0),
        (msgspec.msgpack.encode({"Match": 1}), 0),
        (msgspec.msgpack.encode(["Match", 12]), 12),
        (msgspec.msgpack.encode(["Match", 12, "one", 1, ["kv"], 0, b""]), 12),
        (msgspec.msgpack.encode(["Match", True, 1]), 0),
        (msgspec.msgpack.encode(["Match", "x", 1]), 0),
        (msgspec.msgpack.encode(["Nonsense", 13, 1]), 13),
        (msgspec.msgpack.encode(["x" * 400_000, 14]), 14),
        (msgspec.msgpack.encode(["Hello", 1, 15]), 15),
        (msgspec.msgpack.encode(["Stats", -5, "x"]), -5),
        (p.encode(p.Done(3, 4, 5)), 3),
    ],
)
def test_what_is_not_a_message_is_refused(data: bytes, rid: int, running: Running) -> None:
    with raw(running.endpoint) as dealer:
        reply = ask(dealer, data)
        assert isinstance(reply, p.Error)
        assert (reply.rid, reply.code) == (rid, p.ErrorCode.INVALID)
        assert len(reply.message) < 1000
        assert isinstance(ask(dealer, p.encode(p.Stats(1))), p.StatsReply)


@pytest.mark.parametrize("frames", [(b"", b"x"), (b"a", b"b", b"c"), (b"",) * 50, (p.encode(p.Stats(1)), b"")])
def test_a_request_of_several_frames_is_refused_as_one(frames: tuple[bytes, ...], running: Running) -> None:
    with raw(running.endpoint) as dealer:
        reply = ask(dealer, *frames)
        assert isinstance(reply, p.Error)
        assert reply.code == p.ErrorCode.INVALID
        assert isinstance(ask(dealer, p.encode(p.Stats(1))), p.StatsReply)


HELLO = p.Hello(p.PROTOCOL_VERSION, 21, b"c" * 16, "test", "host", 1, 1, "", "")


@pytest.mark.parametrize(
    "data",
    [
        p.encode(msgspec.structs.replace(HELLO, protocol=2)),
        msgspec.msgpack.encode(["Hello", 2, 21]),
        msgspec.msgpack.encode(["Hello", 2, 21, {"everything": ["is", "different"]}, 7]),
    ],
)
def test_another_protocol_is_told_both_versions(data: bytes, running: Running) -> None:
    with raw(running.endpoint) as dealer:
        reply = ask(dealer, data)
    assert isinstance(reply, p.Error)
    assert (reply.rid, reply.code) == (21, p.ErrorCode.VERSION)
    assert "server speaks protocol 1 and the client 2: install the same release" in reply.message


def test_the_session_raises_for_another_protocol(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maru_core.conversation.PROTOCOL_VERSION", 2)
    session = running.session()
    with pytest.raises(VersionMismatchError, match="server speaks protocol 1 and the client 2"):
        session.connect()
    session.close()


def test_a_fault_of_the_server_is_logged_answered_and_survived(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    session = running.session()
    session.connect()
    handle = running.state.handle

    def faulty(message: p.Request, now: float, *rest: object) -> p.Reply | None:
        if isinstance(message, p.Clear | p.Touch):
            raise ZeroDivisionError("a fault on purpose")
        return handle(message, now)

    monkeypatch.setattr(running.state, "handle", faulty)
    for _ in range(3):
        with pytest.raises(ServerError, match="its log says how") as caught:
            session.clear()
        assert caught.value.code == p.ErrorCode.INTERNAL
    session.touch(1, b"h" * 32)
    session.stats()
    faults = [record for record in caplog.records if record.exc_info and record.name == "maru.server"]
    assert len(faults) == 1, "a fault that repeats does not fill the log"
    assert "handling Clear failed" in faults[0].message
    session.close()


def test_a_fault_while_ticking_is_logged_and_survived(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ticks: list[float] = []

    def faulty(now: float) -> None:
        ticks.append(now)
        raise ZeroDivisionError("a fault on purpose")

    monkeypatch.setattr(running.state, "tick", faulty)
    await_condition(lambda: len(ticks) > 2, "ticks go on")
    session = running.session()
    session.stats()
    session.close()
    assert "a tick failed" in caplog.text


def test_a_message_over_the_limit_costs_only_its_sender(running: Running) -> None:
    with raw(running.endpoint) as dealer:
        dealer.send(bytes(p.MAX_MESSAGE_BYTES + 1))
        session = running.session()
        session.stats()
        session.close()


def test_a_peer_that_does_not_read_stops_nobody(running: Running) -> None:
    with raw(running.endpoint, rcvhwm=1, sndhwm=100_000) as dealer:
        for number in range(20_000):
            dealer.send(p.encode(p.Stats(number)), zmq.DONTWAIT)
        session = running.session()
        number = session.open_namespace(namespace().record())
        store(session, number, 5)
        session.close()


def test_a_peer_that_speaks_no_zeromq_stops_nobody(running: Running) -> None:
    path = running.endpoint.removeprefix("ipc://")
    with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as two:
        one.connect(path)
        one.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        two.connect(path)  # and says nothing
        session = running.session()
        session.stats()
        session.close()


# ---------------------------------------------------------------- fuzz

VALID: list[p.Request] = [
    HELLO,
    p.OpenNamespace(1, 2, b"{}"),
    p.Match(1, 2, 3, ["kv"], 0, bytes(64), True),
    p.Reserve(1, 2, 3, "kv", 0, 1, p.ROOT, bytes(64), 1000),
    p.Commit(1, 2, bytes(8), bytes(16), bytes(16)),
    p.Release(1, 2, bytes(8), bytes(16)),
    p.Touch(2, 3, bytes(64)),
    p.Delete(1, 2, 3, bytes(64)),
    p.Clear(1, 2),
    p.Heartbeat(1, 2),
    p.Stats(1),
    p.Goodbye(2),
]

scalars = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.binary(max_size=70)
values = st.recursive(
    scalars | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A valid message with bytes changed, cut off, or fields replaced by other values."""
    message = draw(st.sampled_from(VALID))
    if draw(st.booleans()):
        fields = msgspec.msgpack.decode(p.encode(message))
        for index in draw(st.lists(st.integers(0, len(fields) - 1), min_size=1, max_size=3)):
            fields[index] = draw(values)
        return msgspec.msgpack.encode(fields)
    data = bytearray(p.encode(message))
    for _ in range(draw(st.integers(1, 4))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


def is_request(data: bytes) -> bool:
    try:
        p.decode_request(data)
    except Exception:
        return False
    return True


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Session, int, bytes]]:
    # No heartbeats and no leases within the test: what changes was changed by a message.
    running = Running(tmp_path_factory.mktemp("fuzz"), config=StateConfig(heartbeat_s=300, lease_s=1000))
    session = running.session()
    number = session.open_namespace(namespace().record())
    keys = store(session, number, 30)
    yield running, session, number, keys
    session.close()
    assert running.thread.is_alive()
    running.stop()
    running.state.check()


def barrier(dealer: zmq.Socket[bytes], rid: int = 424_242) -> None:
    """Wait until all that was sent on this socket has been handled."""
    dealer.send(p.encode(p.Stats(rid)))
    while True:
        reply = p.decode_reply(dealer.recv())
        if isinstance(reply, p.StatsReply) and reply.rid == rid:
            return


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=st.lists(st.lists(st.binary(max_size=200) | mutated(), min_size=1, max_size=4), min_size=1, max_size=8))
def test_no_bytes_change_the_state_or_end_the_service(
    messages: list[list[bytes]], fuzzed: tuple[Running, Session, int, bytes]
) -> None:
    running, session, number, keys = fuzzed
    bad = [frames for frames in messages if len(frames) > 1 or not is_request(frames[0])]
    with raw(running.endpoint) as dealer:
        barrier(dealer)
        before = running.memory.meta.tobytes(), {k: v for k, v in session.stats().items() if "sessions" in k}
        for frames in bad:
            dealer.send_multipart(frames)
        barrier(dealer)
        after = running.memory.meta.tobytes(), {k: v for k, v in session.stats().items() if "sessions" in k}
        assert before == after
    assert session.match(number, ["kv"], 0, keys).pages == 30


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=st.lists(mutated(), min_size=1, max_size=8))
def test_messages_with_odd_contents_do_no_harm(
    messages: list[bytes], fuzzed: tuple[Running, Session, int, bytes]
) -> None:
    """Well-formed, some of them, but out of range, or of sessions that are not the sender's: no fault, nothing lost."""
    running, session, number, keys = fuzzed
    with raw(running.endpoint) as dealer:
        for data in messages:
            dealer.send(data)
        dealer.send(p.encode(p.Stats(424_242)))
        while True:
            reply = p.decode_reply(dealer.recv())
            assert not (isinstance(reply, p.Error) and reply.code == p.ErrorCode.INTERNAL), reply
            if isinstance(reply, p.StatsReply) and reply.rid == 424_242:
                break
    assert session.match(number, ["kv"], 0, keys).pages == 30
    assert session.epoch == 1


# ---------------------------------------------------------------- where it may be bound


@pytest.mark.parametrize(
    "bind",
    ["tcp://0.0.0.0:7878", "tcp://*:7878", "tcp://[::]:7878", "tcp://10.1.2.3:7878", "tcp://eth0:7878", "tcp://host:*"],
)
def test_an_address_that_others_can_reach_needs_to_be_asked_for(bind: str) -> None:
    with pytest.raises(ConfigError, match=r"other machines can reach.*or give --insecure"):
        check_endpoint(bind, insecure=False)
    check_endpoint(bind, insecure=True)


@pytest.mark.parametrize(
    "bind", ["tcp://127.0.0.1:7878", "tcp://127.1.2.3:*", "tcp://localhost:0", "tcp://[::1]:7878", "ipc:///run/x.sock"]
)
def test_an_address_of_this_machine_does_not(bind: str) -> None:
    check_endpoint(bind, insecure=False)


@pytest.mark.parametrize(
    "bind",
    ["", "7878", "inproc://x", "udp://127.0.0.1:1", "tcp://127.0.0.1", "tcp://127.0.0.1:99999", "tcp://:1",
     "tcp://127.0.0.1:port", "ipc://relative", "ipc://@abstract", "ipc://", "ipc:///" + "x" * 120],
)  # fmt: skip
def test_what_cannot_be_bound_is_refused_with_the_value(bind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_endpoint(bind, insecure=True)
    assert repr(bind) in str(caught.value)


def test_only_the_owner_can_connect_to_the_socket(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        running = Running(tmp_path, bind=f"ipc://{tmp_path}/s.sock")
        assert os.umask(0) == 0, "the process's own umask is left as it was"
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "s.sock").lstat().st_mode) == 0o600
    running.stop()


def test_the_socket_file_of_a_dead_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    running = Running(tmp_path, bind=f"ipc://{path}")
    session = running.session()
    session.stats()
    session.close()
    running.stop()
    assert not path.exists()


def test_the_socket_file_of_a_living_server_is_not(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    running = Running(tmp_path, bind=f"ipc://{tmp_path}/s.sock")
    with pytest.raises(ConfigError, match="another server listens there"):
        Running(tmp_path / "other", bind=f"ipc://{tmp_path}/s.sock")
    session = running.session()
    session.stats()
    session.close()
    running.stop()


@pytest.mark.parametrize("whole", [False, True])
def test_a_socket_file_that_is_removed_comes_back(whole: bool, tmp_path: Path) -> None:
    """Whoever cleans /tmp may take it, or the directory too: a living server nobody finds would keep the pool for ever."""
    directory = tmp_path / "run"
    directory.mkdir()
    running = Running(tmp_path, bind=f"ipc://{directory}/sock")
    try:
        with raw(running.endpoint) as dealer:
            dealer.send(p.encode(p.Stats(1)))
            assert p.decode_reply(dealer.recv()).rid == 1
            shutil.rmtree(directory)
            if whole:
                await_condition(lambda: running.service._lost._at > 0, "it was tried in vain")
            directory.mkdir()
            await_condition((directory / "sock").is_socket, "the socket file is back")
            assert stat.S_IMODE((directory / "sock").stat().st_mode) == 0o600

            def answered() -> bool:
                # What is on its way while the library listens anew may be lost, as a client's call that finds no answer is.
                dealer.send(p.encode(p.Stats(2)))
                return bool(dealer.poll(2000)) and p.decode_reply(dealer.recv()).rid == 2

            await_condition(answered, "who was connected is answered still")
        session = running.session()
        session.connect()
        session.close()
    finally:
        running.stop()
    assert not (directory / "sock").exists()


def test_a_file_that_is_not_a_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(ConfigError, match="not a socket"):
        Running(tmp_path, bind=f"ipc://{path}")
    assert path.read_text() == "data"


def test_a_missing_directory_and_a_taken_port_are_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not there, make it first"):
        Running(tmp_path, bind=f"ipc://{tmp_path}/missing/s.sock")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"cannot be bound .*is another server there"):
            Running(tmp_path, bind=f"tcp://127.0.0.1:{taken.getsockname()[1]}")


def test_a_free_port_is_found_and_told(tmp_path: Path) -> None:
    running = Running(tmp_path, bind="tcp://127.0.0.1:*")
    assert running.endpoint.startswith("tcp://127.0.0.1:")
    assert not running.endpoint.endswith("*")
    session = running.session()
    session.stats()
    session.close()
    running.stop()


def test_log_messages_of_refusals_are_bounded(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), raw(running.endpoint) as dealer:
        for _ in range(200):
            dealer.send(b"\xc1")
            dealer.recv()  # whoever does not read loses replies
    refusals = [record for record in caplog.records if "refused a message" in record.message]
    assert len(refusals) == 1
