"""Keys: who may connect, as whom, and what nobody gets by trying. Real sockets, real key files."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import zmq

from maru_core import protocol as p
from maru_core.errors import ConfigError, ServerError, ServerUnavailableError, SessionLostError
from maru_core.keys import ClientKeys, KeyPair
from maru_core.process import ProcessIdentity
from maru_core.session import Session
from maru_server.endpoint import check_endpoint
from maru_server.keygen import keygen
from maru_server.sessions import Peer
from maru_server.trust import Trust, parse_clients
from tests.server.live import Running, store
from tests.server.maru_harness import Server
from tests.server.test_cli import run
from tests.support import ServerProcess, await_condition, hashes, namespace

#: The list, the names in it, their tenants.
CLIENTS = {"a": "red", "a2": "red", "b": "blue", "op": ""}


@dataclass
class House:
    """A directory of keys, and a server that has them."""

    directory: Path
    bind: str = "tcp://127.0.0.1:*"
    running: Running = field(init=False)

    def __post_init__(self) -> None:
        keygen(self.directory)
        for name, tenant in CLIENTS.items():
            keygen(self.directory, name=name, tenant=tenant, operator=name == "op")
        self.trust = Trust.load(str(self.directory / "server.key"), str(self.clients))
        self.running = Running(self.directory, bind=self.bind, trust=self.trust)

    @property
    def clients(self) -> Path:
        return self.directory / "clients.toml"

    def keys(self, name: str) -> ClientKeys:
        return ClientKeys.load(str(self.directory / f"{name}.key"), str(self.directory / "server.pub"))

    def session(self, name: str, timeout_s: float = 60.0) -> contextlib.closing[Session]:
        return contextlib.closing(self.running.session(timeout_s, self.keys(name)))

    def revoke(self, name: str) -> None:
        """As an operator does: take the entry out of the file."""
        entries = self.clients.read_text().split("\n[[client]]\n")
        self.clients.write_text("\n[[client]]\n".join(e for e in entries if f'name = "{name}"\n' not in e))


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    assert house.running.thread.is_alive(), "the service ended by itself"
    house.running.stop()
    house.running.state.check()


def put_back(house: House, name: str) -> None:
    """Put an entry back that was taken out."""
    public = house.keys(name).pair.public
    entry = f'\n[[client]]\nname = "{name}"\npublic = "{public}"\ntenant = "{CLIENTS[name]}"\n'
    house.clients.write_text(house.clients.read_text() + entry)


def hello(client_id: bytes | None = None) -> p.Hello:
    me = ProcessIdentity.current()
    client_id = client_id or secrets.token_bytes(16)
    return p.Hello(p.PROTOCOL_VERSION, 7, client_id, "raw", me.host, me.pid, me.pid_start, me.pid_ns, me.boot_id)


class Raw:
    """A bare socket with someone's keys: sends what it likes."""

    def __init__(self, endpoint: str, keys: ClientKeys | None, routing_id: bytes | None = None) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        if routing_id is not None:
            self.socket.routing_id = routing_id
        if keys is not None:
            keys.apply(self.socket)
        self.socket.connect(endpoint)

    def ask(self, message: p.Request, timeout_s: float = 60.0) -> p.Reply | None:
        with contextlib.suppress(
            zmq.Again
        ):  # turned away: the library gives the connection up, and queues nothing for it
            self.socket.send(p.encode(message), zmq.DONTWAIT)
        return p.decode_reply(self.socket.recv()) if self.socket.poll(int(timeout_s * 1000)) else None

    def close(self) -> None:
        self.socket.close(0)
        self.context.term()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def refused_with(code: p.ErrorCode, call: Callable[[], object]) -> ServerError:
    with pytest.raises(ServerError) as refused:
        call()
    assert refused.value.code == code
    return refused.value


# ---------------------------------------------------------------- who may connect


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_a_listed_client_stores_and_finds(tmp_path: Path, transport: str) -> None:
    house = House(tmp_path, bind="tcp://127.0.0.1:*" if transport == "tcp" else f"ipc://{tmp_path}/s")
    with house.session("a") as session:
        number = session.open_namespace(namespace().record())
        keys = store(session, number, 20)
        assert session.match(number, ["kv"], 0, keys).pages == 20
    house.running.stop()
    house.running.state.check()


def test_whoever_has_no_key_or_one_that_is_not_listed_never_reaches_the_state(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[object] = []
    handle = house.running.state.handle

    def listening(message: p.Request, now: float, peer: Peer) -> object:
        heard.append(peer)
        return handle(message, now, peer)

    monkeypatch.setattr(house.running.state, "handle", listening)
    server = house.keys("a").server
    stranger = ClientKeys(KeyPair.generate("stranger"), server)
    misled = ClientKeys(house.keys("a").pair, KeyPair.generate("elsewhere").public)
    # Whoever holds a listed public key and not its secret.
    thief = ClientKeys(KeyPair(name="a", public=house.keys("a").pair.public, secret=stranger.pair.secret), server)
    trust = house.trust
    assert trust is not None
    for keys in (None, stranger, misled, thief):
        before = trust.unlisted + trust.failed_handshakes
        with Raw(house.running.endpoint, keys) as raw:
            assert raw.ask(hello(), timeout_s=0.3) is None
            assert raw.ask(p.Stats(1), timeout_s=0.1) is None
            await_condition(lambda b=before: trust.unlisted + trust.failed_handshakes > b, "it is seen and counted")
    assert heard == []
    assert trust.unlisted > 0
    assert trust.failed_handshakes > 0
    await_condition(lambda: house.running.state.stats()["clients_unlisted"], "it is a figure")
    await_condition(lambda: house.running.state.stats()["handshakes_failed"], "it is a figure")
    assert stranger.pair.public in caplog.text
    assert "not in " in caplog.text
    # It is the key, and not what else these clients do: the right one is let in.
    with Raw(house.running.endpoint, house.keys("a")) as raw:
        assert isinstance(raw.ask(hello()), p.Welcome)
    assert heard == [Peer("red", False, "a")]


def test_turned_away_often_is_logged_seldom(house: House, caplog: pytest.LogCaptureFixture) -> None:
    stranger = ClientKeys(KeyPair.generate("stranger"), house.keys("a").server)
    trust = house.trust
    assert trust is not None
    for number in range(5):
        with Raw(house.running.endpoint, stranger):
            await_condition(lambda n=number: trust.unlisted > n, "it is turned away")
    assert caplog.text.count("turned away") <= 2


def test_without_an_answer_to_zap_nobody_is_let_in(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(request: list[bytes]) -> list[bytes]:
        raise ZeroDivisionError("a fault on purpose")

    monkeypatch.setattr(house.trust, "_decide", broken)
    with Raw(house.running.endpoint, house.keys("a")) as raw:
        assert raw.ask(hello(), timeout_s=0.3) is None


def test_where_nobody_answers_zap_at_all_nobody_is_let_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """libzmq would let everybody in who knows the server's public key, if it were not told otherwise."""

    def gone(self: Trust, answers: zmq.Socket[bytes], events: zmq.Socket[bytes]) -> None:
        answers.close(0)
        events.close(0)

    monkeypatch.setattr(Trust, "_answer", gone)
    house = House(tmp_path)
    for name in ("a", "op"):
        with Raw(house.running.endpoint, house.keys(name)) as raw:
            assert raw.ask(hello(), timeout_s=0.3) is None
    house.running.stop()


def test_the_error_of_a_client_says_what_to_check_of_its_keys(house: House) -> None:
    stranger = ClientKeys(KeyPair.generate("stranger"), house.keys("a").server)
    with (
        contextlib.closing(house.running.session(0.3, stranger)) as session,
        pytest.raises(ServerUnavailableError, match=r"uses keys.*does not list 'stranger' in its clients.toml"),
    ):
        session.connect()


def test_the_error_of_a_client_without_keys_says_so_where_others_reach_the_server(tmp_path: Path) -> None:
    for endpoint, said in (("tcp://192.0.2.1:9", True), ("tcp://127.0.0.1:9", False), (f"ipc://{tmp_path}/no", False)):
        with contextlib.closing(Session(endpoint, name="test", timeout_s=0.05)) as session:
            with pytest.raises(ServerUnavailableError) as refused:
                session.connect()
            assert ("MARU_CLIENT_KEY" in str(refused.value)) is said


# ---------------------------------------------------------------- as whom


def test_tenants_share_nothing(house: House) -> None:
    record = namespace().record()
    with house.session("a") as a, house.session("a2") as a2, house.session("b") as b:
        number = a.open_namespace(record)
        keys = store(a, number, 10)
        theirs = b.open_namespace(record)
        assert theirs != number
        assert b.match(theirs, ["kv"], 0, keys).pages == 0
        # The same tenant with another key: one cache.
        assert a2.open_namespace(record) == number
        assert a2.match(number, ["kv"], 0, keys).pages == 10
        # Another tenant's namespace is unknown, whatever is asked of it.
        refused_with(p.ErrorCode.UNKNOWN_NAMESPACE, lambda: b.match(number, ["kv"], 0, keys))
        refused_with(p.ErrorCode.UNKNOWN_NAMESPACE, lambda: b.reserve(number, "kv", 0, 1, p.ROOT, hashes(1, 9), 1000))
        refused_with(p.ErrorCode.UNKNOWN_NAMESPACE, lambda: b.delete(number, keys))
        refused_with(p.ErrorCode.UNKNOWN_NAMESPACE, lambda: b.clear(number))
        # All of one's own is all there is.
        store(b, theirs, 5, seed=3)
        assert b.clear() == 5
        assert a.match(number, ["kv"], 0, keys).pages == 10


def test_a_tenant_sees_only_itself(house: House) -> None:
    with house.session("a") as a, house.session("b") as b, house.session("op") as operator:
        for session, tag in ((a, "of red"), (b, "of blue")):
            store(session, session.open_namespace(namespace(tag=tag).record()), 5)
        for what in ("namespaces", "sessions", "tenants"):
            seen = str(b.inspect(what))
            assert "red" not in seen, what
            assert "blue" in seen, what
            everything = str(operator.inspect(what))
            assert "red" in everything, what
            assert "blue" in everything, what
        # What the trees look like, and by a number that was guessed.
        number = a.open_namespace(namespace(tag="of red").record())
        assert len(operator.inspect("tree")) > len(b.inspect("tree")) > 0
        assert operator.inspect("tree", number)
        for what in ("tree", "namespaces", "pins", "holds"):
            refused_with(p.ErrorCode.UNKNOWN_NAMESPACE, partial(b.inspect, what, number))
        # What the server does for others is not told either.
        assert set(b.stats()) == {"incarnation", "pool_uri", "extents", "extent_bytes"}
        assert operator.stats()["pages"] == 10


def test_only_an_operator_pins_evicts_and_clears_everything(house: House) -> None:
    with house.session("a") as a, house.session("op") as operator:
        number = a.open_namespace(namespace().record())
        keys = store(a, number, 10)
        refused_with(p.ErrorCode.FORBIDDEN, lambda: a.pin(number, keys[:32]))
        refused_with(p.ErrorCode.FORBIDDEN, lambda: a.unpin(number, keys[:32]))
        refused_with(p.ErrorCode.FORBIDDEN, lambda: a.evict(1))
        assert a.match(number, ["kv"], 0, keys).pages == 10
        assert operator.evict(1, number) == 1
        assert operator.clear() == 9
        assert a.match(number, ["kv"], 0, keys).pages == 0


def test_a_guessed_session_number_is_refused(house: House) -> None:
    with house.session("a") as a:
        number = a.open_namespace(namespace().record())
        keys = store(a, number, 10)
        guessed = a.connect().session
        for name in ("b", "a2"):
            with Raw(house.running.endpoint, house.keys(name)) as raw:
                for request in (
                    p.Match(1, guessed, number, ["kv"], 0, keys),
                    p.Clear(1, guessed),
                    p.Heartbeat(1, guessed),
                    p.Delete(1, guessed, number, keys),
                    p.Inspect(1, guessed, "sessions"),
                ):
                    answer = raw.ask(request)
                    assert isinstance(answer, p.Error)
                    assert answer.code == p.ErrorCode.UNKNOWN_SESSION
                # Goodbye has no answer: the session is there all the same.
                raw.socket.send(p.encode(p.Goodbye(guessed)))
                assert isinstance(raw.ask(hello()), p.Welcome)
        assert a.match(number, ["kv"], 0, keys).pages == 10
        assert a.epoch == 1


def test_a_client_id_belongs_to_the_key_that_brought_it(house: House) -> None:
    client_id = secrets.token_bytes(16)
    with Raw(house.running.endpoint, house.keys("a")) as a, Raw(house.running.endpoint, house.keys("b")) as b:
        first = a.ask(hello(client_id))
        assert isinstance(first, p.Welcome)
        stolen = b.ask(hello(client_id))
        assert isinstance(stolen, p.Error)
        assert stolen.code == p.ErrorCode.FORBIDDEN
        again = a.ask(hello(client_id))
        assert isinstance(again, p.Welcome)
        assert again.session == first.session


def test_a_routing_id_that_another_had_makes_nobody_of_its_tenant(house: House) -> None:
    record = namespace().record()
    chosen = b"the id of a"
    with Raw(house.running.endpoint, house.keys("a"), chosen) as a:
        welcome = a.ask(hello())
        assert isinstance(welcome, p.Welcome)
        opened = a.ask(p.OpenNamespace(2, welcome.session, record))
        assert isinstance(opened, p.NamespaceOpened)
        # While its owner is there it is the owner's: whoever claims it too is not heard.
        with Raw(house.running.endpoint, house.keys("b"), chosen) as b:
            assert b.ask(p.Heartbeat(3, welcome.session), timeout_s=0.3) is None
    # Its owner is gone, and another key comes with its routing id and its session's number.
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        with Raw(house.running.endpoint, house.keys("b"), chosen) as b:
            answer = b.ask(p.Heartbeat(4, welcome.session), timeout_s=0.3)
            if answer is None:
                continue  # the old connection has not quite gone
            assert isinstance(answer, p.Error)
            assert answer.code == p.ErrorCode.UNKNOWN_SESSION
            mine = b.ask(hello())
            assert isinstance(mine, p.Welcome)
            theirs = b.ask(p.Match(5, mine.session, opened.namespace, ["kv"], 0, hashes(1)))
            assert isinstance(theirs, p.Error)
            assert theirs.code == p.ErrorCode.UNKNOWN_NAMESPACE
            return
    pytest.fail("the routing id never became free")


# ---------------------------------------------------------------- revoked


def test_a_revoked_key_is_refused_on_the_connections_that_it_has(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with house.session("a") as a, house.session("b") as b, Raw(house.running.endpoint, house.keys("a")) as raw:
        welcome = raw.ask(hello())
        assert isinstance(welcome, p.Welcome)
        number = a.open_namespace(namespace().record())
        reserved = a.reserve(number, "kv", 0, 1, p.ROOT, hashes(4), 1000)
        sessions = len(house.running.state.books.sessions)
        house.revoke("a")
        await_condition(lambda: "1 keys revoked" in caplog.text, "the list is read again")
        answer = raw.ask(p.Heartbeat(9, welcome.session))
        assert isinstance(answer, p.Error)
        assert answer.code == p.ErrorCode.FORBIDDEN
        error = refused_with(p.ErrorCode.FORBIDDEN, lambda: a.commit(reserved.slots, reserved.generations))
        assert "taken off the server's list" in str(error)
        # No new connection either, and its sessions are gone. What it may be writing into is given to nobody.
        with Raw(house.running.endpoint, house.keys("a")) as again:
            assert again.ask(hello(), timeout_s=0.3) is None
        assert len(house.running.state.books.sessions) == sessions - 2
        assert house.running.state.stats()["slots_quarantined"] == 4
        b.open_namespace(namespace().record())
        # Listed again, it is a client like any other, without anybody's doing on its side.
        put_back(house, "a")
        await_condition(lambda: _works(lambda: a.open_namespace(namespace().record())), "the client comes back")


def _works(call: Callable[[], object]) -> bool:
    try:
        call()
    except (ServerError, ServerUnavailableError):
        return False
    return True


def test_a_key_that_changes_its_tenant_begins_anew(house: House) -> None:
    record = namespace().record()
    with house.session("a") as a, house.session("b") as b:
        number = a.open_namespace(record)
        keys = store(a, number, 5)
        theirs = b.open_namespace(record)
        store(b, theirs, 7, seed=4)
        house.clients.write_text(house.clients.read_text().replace('tenant = "red"', 'tenant = "blue"'))
        assert house.trust is not None
        await_condition(lambda: not any(peer.tenant == "red" for peer in house.trust.peers()), "it is read")  # type: ignore[union-attr]

        def moved() -> bool:
            try:
                return a.open_namespace(record) == theirs
            except SessionLostError:
                return False

        await_condition(moved, "it is of the other tenant now")
        assert a.match(theirs, ["kv"], 0, keys).pages == 0
        assert a.match(theirs, ["kv"], 0, hashes(7, seed=4)).pages == 7


def test_a_list_that_cannot_be_read_changes_nothing(house: House, caplog: pytest.LogCaptureFixture) -> None:
    with house.session("a") as a:
        a.connect()
        good = house.clients.read_text()
        house.clients.write_text(good.replace("tenant", "tennant", 1))
        await_condition(lambda: "stays as it was" in caplog.text, "the fault is said")
        assert "clients.toml: client 1 ('a')" in caplog.text
        assert "tennant" in caplog.text
        a.stats()
        with house.session("b") as b:
            b.connect()
        house.clients.unlink()
        await_condition(lambda: "No such file" in caplog.text, "the fault is said")
        a.stats()
        # And it is read again once it can be.
        house.clients.write_text(good)
        house.revoke("b")
        house.clients.chmod(0o644)
        assert house.trust is not None
        await_condition(lambda: len(house.trust.peers()) == len(CLIENTS) - 1, "it is read")  # type: ignore[union-attr]


def test_a_signal_has_the_list_read_in_any_case(tmp_path: Path) -> None:
    keygen(tmp_path)
    keygen(tmp_path, name="a", tenant="red")
    keygen(tmp_path, name="b", tenant="blue")
    clients = tmp_path / "clients.toml"
    trust = Trust.load(str(tmp_path / "server.key"), str(clients))
    assert trust is not None
    status = clients.stat()
    with clients.open("r+") as file:
        text = file.read().replace('tenant = "red"', 'tenant = "RED"')
        file.seek(0)
        file.write(text)
    os.utime(clients, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert not trust.reread(), "a file that looks the same is not read"
    trust.reread_soon()
    assert trust.reread()
    assert Peer("RED", False, "a") in trust.peers()
    assert not trust.reread()
    # A real server lives on, and does the same.
    options = ("--keys", str(tmp_path / "server.key"), "--clients", str(clients))
    server = ServerProcess(tmp_path, *options).start()
    try:
        server.signal(signal.SIGHUP)
        keys = ClientKeys.load(str(tmp_path / "a.key"), str(tmp_path / "server.pub"))
        with contextlib.closing(Session(server.endpoint, name="test", timeout_s=60, keys=keys)) as session:
            session.connect()
        assert server.stop() == 0
    finally:
        server.remove()


# ---------------------------------------------------------------- without keys


def test_without_keys_all_is_as_it_was(tmp_path: Path) -> None:
    running = Running(tmp_path)
    with contextlib.closing(running.session()) as session:
        keys = store(session, session.open_namespace(namespace().record()), 5)
        assert session.clear() == 5
        assert len(keys) == 5 * 32
    running.stop()


def test_an_address_that_others_reach_needs_keys_or_insecure(tmp_path: Path) -> None:
    for bind in ("tcp://0.0.0.0:5757", "tcp://*:5757", "tcp://[::]:5757", "tcp://192.0.2.7:5757", "tcp://host:5757"):
        with pytest.raises(ConfigError) as refused:
            check_endpoint(bind, insecure=False)
        for word in (repr(bind), "keygen --out", "--keys", "--clients", "--insecure"):
            assert word in str(refused.value)
        check_endpoint(bind, insecure=True)
        check_endpoint(bind, insecure=False, keys=True)
    for bind in ("tcp://127.0.0.1:5757", "tcp://localhost:*", "tcp://[::1]:5757", f"ipc://{tmp_path}/s"):
        check_endpoint(bind, insecure=False)
    # Insecure, in earnest.
    running = Running(tmp_path, bind="tcp://0.0.0.0:*", insecure=True)
    running.endpoint = running.endpoint.replace("0.0.0.0", "127.0.0.1")
    with contextlib.closing(running.session()) as session:
        session.stats()
    running.stop()
    # With keys, in earnest: nobody else.
    house = House(tmp_path, bind="tcp://0.0.0.0:*")
    house.running.endpoint = house.running.endpoint.replace("0.0.0.0", "127.0.0.1")
    with house.session("op") as session:
        session.stats()
    with Raw(house.running.endpoint, None) as raw:
        assert raw.ask(hello(), timeout_s=0.3) is None
    house.running.stop()


# ---------------------------------------------------------------- the whole way


def test_a_store_uses_its_keys_with_a_real_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from maru_core.store import Store, StoreConfig
    from tests.support import Pages

    keygen(tmp_path)
    keygen(tmp_path, name="a", tenant="red")
    keygen(tmp_path, name="b", tenant="blue")
    options = ("--keys", str(tmp_path / "server.key"), "--clients", str(tmp_path / "clients.toml"))
    server = ServerProcess(tmp_path, *options).start()
    try:
        keys = hashes(6)
        written, read = Pages(6, (512,), seed=1), Pages(6, (512,))
        config = StoreConfig(
            server=server.endpoint,
            client_key=str(tmp_path / "a.key"),
            server_key=str(tmp_path / "server.pub"),
            timeout_ms=60_000,
        )
        with contextlib.closing(Store.open(config, namespace(), name="a")) as a:
            assert a.put("kv", 0, 1, p.ROOT, keys, written.fragments).all()
        monkeypatch.setenv("MARU_SERVER", server.endpoint)
        monkeypatch.setenv("MARU_CLIENT_KEY", str(tmp_path / "a.key"))
        monkeypatch.setenv("MARU_SERVER_KEY", KeyPair.read(tmp_path / "server.key", "x").public)
        with contextlib.closing(Store.open(StoreConfig(timeout_ms=60_000), namespace(), name="a")) as a:
            assert a.get("kv", 0, keys, read.fragments).all()
            assert read.same(written).all()
        monkeypatch.setenv("MARU_CLIENT_KEY", str(tmp_path / "b.key"))
        with contextlib.closing(Store.open(StoreConfig(timeout_ms=60_000), namespace(), name="b")) as b:
            assert not b.get("kv", 0, keys, read.fragments).any()
        monkeypatch.delenv("MARU_SERVER")
        with pytest.raises(ConfigError, match="the embedded server needs no keys"):
            Store.open(StoreConfig(), namespace(), name="b")
        assert server.stop() == 0
    finally:
        server.remove()


def test_the_document_names_options_and_figures_that_exist() -> None:
    text = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    known = " ".join(run("--help").stdout.split() + run("keygen", "--help").stdout.split())
    named = set(re.findall(r"--[a-z]+(?:-[a-z]+)*", text)) - {"--hicache-storage-backend-extra-config"}
    assert {"--keys", "--clients", "--session-rate", "--force"} <= named
    assert {option for option in named if option not in known} == set()
    for name in ("over_rate", "over_share", "clients_unlisted", "handshakes_failed"):
        assert name in text
        assert name in Server().stats
    listed = re.search(r"```toml\n(.*?)```", text, re.DOTALL)
    assert listed is not None
    assert [client.tenant for client in parse_clients(listed[1].encode(), "docs/security.md")] == ["search"]
