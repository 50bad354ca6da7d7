"""An etcd lease decides between hosts: real etcd, real servers, and every way to lose it. Also the parts alone."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest
import zmq

from maru_core import protocol as p
from maru_core.errors import ConfigError, PoolBusyError
from maru_core.pool.format import BLOCK_BYTES
from maru_core.session import Session
from maru_server.election import EtcdLease, LostError, Stop, make_election
from maru_server.etcd import Etcd, EtcdError, EtcdURL
from tests.server.etcd_server import EtcdServer, Wire, find_etcd, free_port
from tests.server.live import raw, store
from tests.server.test_cli import run
from tests.server.test_kills import attach
from tests.server.test_standby import put, says
from tests.server.writers import PAGE_BYTES, keys_of, wrong_pages
from tests.support import ServerProcess, await_condition, hashes, impatient, namespace

T = TypeVar("T")

#: Short, and long enough for a machine that is busy with other tests.
TTL_S = 4
PAGES = 6


@pytest.fixture(scope="session")
def program() -> str:
    return find_etcd()


def folder_in_memory() -> Path:
    """Where there is some: etcd waits for its disk, and that of a busy machine is slow."""
    return Path(tempfile.mkdtemp(prefix="maru-etcd-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))


@pytest.fixture
def new_etcd(program: str) -> Iterator[Callable[..., EtcdServer]]:
    made: list[EtcdServer] = []

    def make(*options: str, **named: str) -> EtcdServer:
        made.append(EtcdServer(program, folder_in_memory(), *options, **named))
        return made[-1]

    yield make
    for etcd in made:
        etcd.remove()


@pytest.fixture
def own_etcd(new_etcd: Callable[..., EtcdServer]) -> EtcdServer:
    """For tests that kill it or change who may use it."""
    return new_etcd().start()


@pytest.fixture(scope="module")
def common(program: str) -> Iterator[EtcdServer]:
    etcd = EtcdServer(program, folder_in_memory()).start()
    yield etcd
    etcd.remove()


@pytest.fixture
def etcd(common: EtcdServer) -> EtcdServer:
    """With a key that no other test has."""
    common.key = f"/maru/{uuid.uuid4().hex}"
    return common


NewServer = Callable[..., ServerProcess]


@pytest.fixture
def new_server(tmp_path: Path) -> Iterator[NewServer]:
    """Servers of one pool under one lock; ``another`` ones are as on another host."""
    made: list[ServerProcess] = []

    def make(lock: str, *options: str, another: bool = False, bind: str | None = None) -> ServerProcess:
        # A short lease of the clients makes the server look around often while it has nothing to do.
        server = ServerProcess(
            tmp_path, "--lock", lock, "--lock-ttl", str(TTL_S), "--lease", "1", *options,
            pool=f"file://{tmp_path}/pool", bind=bind, size="64M",
        )  # fmt: skip
        if another:
            server.program = (str(Path(__file__).with_name("another_host.py")),)
        made.append(server)
        return server

    yield make
    for server in made:
        server.remove()


def patiently(call: Callable[..., T], *arguments: object) -> T:
    """Who is no standby gives up at the first answer that the etcd of a busy machine gives too late: here it is asked again."""
    deadline = time.monotonic() + 180
    while True:
        try:
            return call(*arguments)
        except EtcdError as error:
            if "timed out" not in str(error) or time.monotonic() > deadline:
                raise


def serving(server: ServerProcess) -> ServerProcess:
    """The same of a server."""
    deadline = time.monotonic() + 180
    while True:
        try:
            return server.start()
        except AssertionError:
            if "timed out" not in server.log.read_text() or time.monotonic() > deadline:
                raise


def lease_of(client: Etcd) -> int:
    held = client.get(client.url.key)
    assert held is not None
    return held.lease


def delete_key(client: Etcd) -> None:
    """As an operator could: the lease that it hangs on lives."""
    client._call("kv/deleterange", {"key": base64.b64encode(client.url.key.encode()).decode()})


class Answer(NamedTuple):
    """Given at a time between these."""

    asked: float
    heard: float
    incarnation: int


class Knocking:
    """Asks an endpoint for a sign of life over and over, and notes when it answered, by incarnation."""

    def __init__(self, endpoint: str) -> None:
        self.answers: list[Answer] = []
        self._endpoint = endpoint
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asked: dict[int, float] = {}
        with raw(self._endpoint, rcvtimeo=50) as dealer:
            while not self._stop.wait(0.01):
                number = len(asked)
                asked[number] = time.monotonic()
                try:
                    dealer.send(p.encode(p.Stats(number)), zmq.DONTWAIT)
                    reply = p.decode_reply(dealer.recv())
                except zmq.Again:
                    continue
                self.answers.append(Answer(asked[reply.rid], time.monotonic(), reply.incarnation))

    def close(self) -> list[Answer]:
        self._stop.set()
        self._thread.join(120)
        return self.answers


# ---------------------------------------------------------------- servers


def test_of_two_that_start_at_once_one_serves_and_the_other_follows(etcd: EtcdServer, new_server: NewServer) -> None:
    servers = [new_server(etcd.url(), "--standby", another=another).begin() for another in (False, True)]
    await_condition(lambda: any(server.serves for server in servers), "one serves")
    [active] = [server for server in servers if server.serves]
    [standby] = [server for server in servers if server is not active]
    active.await_ready()
    await_condition(
        says(standby, "standby:", etcd.key, f"pid {active.process.pid}", active.endpoint), "it says who serves"
    )
    session = Session(f"{servers[0].endpoint},{servers[1].endpoint}", name="client", timeout_s=60)
    memory, number = attach(session)
    keys = put(session, memory, number, 1)
    writing = session.reserve(number, "kv", 0, 1, p.ROOT, keys_of(2, 0, PAGES), PAGE_BYTES)
    assert set(writing.status) == {p.ReserveStatus.RESERVED}
    assert not standby.serves

    with impatient(session):
        active.kill()
        standby.await_ready()
        await_condition(lambda: session.connected and session.epoch == 2, "the client finds it")
    number = session.open_namespace(namespace().record())
    assert wrong_pages(session, memory, number, keys) == []
    assert session.stats()["slots_quarantined"] == PAGES
    memory.close()
    session.close()
    assert standby.stop() == 0
    client = etcd.client()
    assert client.get(etcd.key) is None, "who leaves gives the lock back"
    client.close()


def test_a_clean_stop_hands_over(etcd: EtcdServer, new_server: NewServer) -> None:
    active = serving(new_server(etcd.url()))
    standby = new_server(etcd.url(), "--standby", another=True).begin()
    await_condition(says(standby, "standby:"), "it waits")
    assert active.stop() == 0
    standby.await_ready()
    assert standby.stop() == 0


def test_without_standby_a_lock_that_is_held_is_an_error_that_names_the_holder(
    own_etcd: EtcdServer, new_server: NewServer, tmp_path: Path
) -> None:
    etcd = own_etcd
    active = serving(new_server(etcd.url()))
    other = new_server(etcd.url(), another=True)
    words = ["--lock is", f"pid {active.process.pid}", active.endpoint, "--standby"]

    def refused() -> bool:
        other.begin()
        assert other._reap() == 2
        text = other.log.read_text()
        assert "--lock is" in text, text
        return all(word in text for word in words)

    await_condition(refused, "the holder is named, once etcd answers in time")
    etcd.kill()
    other.begin()
    assert other._reap() == 2
    assert says(other, f"127.0.0.1:{etcd.port}", "see that etcd runs there")(), other.log.read_text()


def test_a_stopped_server_that_wakes_after_its_lease_touches_nothing(
    etcd: EtcdServer, new_server: NewServer, tmp_path: Path
) -> None:
    active = serving(new_server(etcd.url()))
    session = Session(active.endpoint, name="client", timeout_s=60)
    number = session.open_namespace(namespace().record())
    keys = store(session, number, 10)
    life = session._life
    assert life is not None
    standby = new_server(etcd.url(), "--standby", another=True).begin()
    await_condition(says(standby, "standby:"), "it waits")

    active.signal(signal.SIGSTOP)
    with raw(active.endpoint) as dealer:
        # What would change the pool waits for it when it wakes.
        dealer.send(p.encode(p.Reserve(1, life.session, number, "kv", 0, 1, p.ROOT, hashes(10, seed=9), 1000)))
        dealer.send(p.encode(p.Clear(2, life.session, None)))
        standby.await_ready()
        other = Session(standby.endpoint, name="other", timeout_s=60)
        assert other.connect().incarnation > life.incarnation
        again = other.open_namespace(namespace().record())
        assert other.match(again, ["kv"], 0, keys).pages == 10
        standby.signal(signal.SIGSTOP)  # whatever changes now is changed by the one that wakes
        before = (tmp_path / "pool").read_bytes()
        active.signal(signal.SIGCONT)
        code = active._reap()
        assert code == 3, active.log.read_text()
        after = (tmp_path / "pool").read_bytes()
        standby.signal(signal.SIGCONT)
        assert hashlib.sha256(after).digest() == hashlib.sha256(before).digest()
        assert after[BLOCK_BYTES : 2 * BLOCK_BYTES] == before[BLOCK_BYTES : 2 * BLOCK_BYTES]
        assert not dealer.poll(0)
    assert says(active, "no longer this server's pool")()
    session.close()
    other.close()


@pytest.mark.parametrize("how", ["etcd is killed", "the wire is cut", "the lease is revoked", "the key is deleted"])
def test_whoever_cannot_prove_the_lock_stops_before_another_serves(
    how: str, new_server: NewServer, request: pytest.FixtureRequest
) -> None:
    etcd = request.getfixturevalue("own_etcd" if how == "etcd is killed" else "etcd")
    wire = Wire(etcd.port)
    lock = f"etcd://127.0.0.1:{wire.port}{etcd.key}"
    active = serving(new_server(lock))
    standby = new_server(etcd.url(), "--standby", another=True).begin()
    await_condition(says(standby, "standby:"), "it waits")
    session = Session(f"{active.endpoint},{standby.endpoint}", name="client", timeout_s=60)
    number = session.open_namespace(namespace().record())
    keys = store(session, number, 10)
    session.timeout_s = 1.0  # from here on it looks for whoever serves
    knocking = Knocking(active.endpoint), Knocking(standby.endpoint)
    await_condition(lambda: knocking[0].answers, "the active one answers")

    client = etcd.client()
    if how == "etcd is killed":
        etcd.kill()
    elif how == "the wire is cut":
        wire.cut.set()
    elif how == "the lease is revoked":
        client.revoke(lease_of(client))
    else:
        delete_key(client)
    code = active._reap()
    assert code == 3, active.log.read_text()
    if how in ("etcd is killed", "the wire is cut"):
        # By itself and in time: not because the other was there already, which the memory would have told it.
        assert "another server has taken" not in active.log.read_text()
    if how == "etcd is killed":
        etcd.start()
    standby.await_ready()
    await_condition(lambda: session.connected and session.epoch == 2, "the client finds it")
    with impatient(session, timeout_s=60):
        number = session.open_namespace(namespace().record())
        assert session.match(number, ["kv"], 0, keys).pages == 10
    await_condition(lambda: knocking[1].answers, "the new one answers")
    old, new = (one.close() for one in knocking)
    assert len({answer.incarnation for answer in old}) == len({answer.incarnation for answer in new}) == 1
    assert max(answer.asked for answer in old) < min(answer.heard for answer in new), "two served at once"
    client.close()
    wire.close()
    if how != "the wire is cut":
        session.close()
        return
    # The one that has lost it comes back as a standby, as systemd would start it, and gets its turn.
    back = new_server(etcd.url(), "--standby", another=True, bind=active.endpoint).begin()
    await_condition(says(back, "standby:", f"pid {standby.process.pid}"), "it waits")
    standby.kill()
    back.await_ready()
    await_condition(lambda: session.connected and session.epoch == 3, "the client finds it")
    with impatient(session, timeout_s=60):
        number = session.open_namespace(namespace().record())
        assert session.match(number, ["kv"], 0, keys).pages == 10
    session.close()


def test_a_short_absence_of_etcd_is_outlived(own_etcd: EtcdServer, new_server: NewServer) -> None:
    etcd = own_etcd
    active = serving(new_server(etcd.url()))
    session = Session(active.endpoint, name="client", timeout_s=60)
    session.connect()
    etcd.kill()
    await_condition(says(active, "cannot renew"), "it was missed")
    etcd.start()
    client = etcd.client()
    lease = lease_of(client)

    def renewed() -> bool:
        left = client._call("lease/timetolive", {"ID": str(lease)})
        return int(left.get("TTL", -1)) > TTL_S - 2 and active.process.poll() is None

    await_condition(renewed, "it goes on renewing")
    session.stats()
    assert session.epoch == 1
    session.close()
    assert active.stop() == 0


def test_a_signal_ends_the_waiting_for_the_lock(etcd: EtcdServer, new_server: NewServer) -> None:
    active = serving(new_server(etcd.url()))
    standby = new_server(etcd.url(), "--standby", another=True).begin()
    await_condition(says(standby, "standby:"), "it waits")
    assert standby.stop() == 0
    # Also where there is no etcd at all.
    lonely = new_server(f"etcd://127.0.0.1:{free_port()}{etcd.key}", "--standby", another=True).begin()
    await_condition(says(lonely, "cannot ask for the lock"), "it waits for etcd")
    assert lonely.stop() == 0
    client = etcd.client()
    assert client.get(etcd.key) is not None, "who only waited has nothing to give back"
    client.close()
    assert active.stop() == 0


# ---------------------------------------------------------------- the lease alone


def lease(url: str, *, standby: bool = True, me: str = "me", ttl_s: int = TTL_S) -> EtcdLease:
    return EtcdLease(EtcdURL.parse(url), ttl_s=ttl_s, me=me, standby=standby)


def test_the_lease_is_one_holder_s_at_a_time(etcd: EtcdServer) -> None:
    one, two = lease(etcd.url(), me="one"), lease(etcd.url(), me="two", standby=False)
    stop = Stop()
    assert not one.holds()
    assert one.acquire(stop)
    assert one.holds()
    assert one.acquire(stop), "asked again, it is still had"
    with pytest.raises(PoolBusyError, match="held by one: stop that server first"):
        patiently(two.acquire, stop)
    assert not two.holds()
    one.close()
    assert not one.holds()
    assert patiently(two.acquire, stop)
    two.close()


def test_several_endpoints_are_tried(etcd: EtcdServer) -> None:
    election = lease(f"etcd://127.0.0.1:{free_port()},127.0.0.1:{etcd.port}{etcd.key}", standby=False, ttl_s=30)
    assert patiently(election.acquire, Stop())
    election.close()
    client = etcd.client()
    assert client.get(etcd.key) is None
    client.close()


def test_an_endpoint_that_swallows_everything_is_passed_over(etcd: EtcdServer) -> None:
    wire = Wire(etcd.port)
    wire.cut.set()
    election = lease(f"etcd://127.0.0.1:{wire.port},127.0.0.1:{etcd.port}{etcd.key}", standby=False, ttl_s=30)
    assert patiently(election.acquire, Stop())
    election.close()
    wire.close()


@pytest.mark.parametrize("how", ["revoked", "deleted", "taken"])
def test_what_was_lost_does_not_come_back(how: str, etcd: EtcdServer) -> None:
    election = lease(etcd.url())
    stop = Stop()
    assert election.acquire(stop)
    client = etcd.client()
    if how == "revoked":
        client.revoke(lease_of(client))
    else:
        delete_key(client)
    if how == "taken":
        assert client.put_if_absent(etcd.key, "somebody else", client.grant(60)[0])
    await_condition(lambda: not election.holds(), "it is seen")
    why = "taken by somebody else" if how == "taken" else "deleted, or its lease revoked"
    assert why in election.why()
    with pytest.raises(LostError, match=why):
        election.acquire(stop)
    election.close()
    client.close()


def test_whoever_comes_next_waits_until_the_last_holder_has_seen_it(etcd: EtcdServer) -> None:
    """Also where the lease did not end by time, so that its holder believes in it still."""
    one, two = lease(etcd.url(), me="one"), lease(etcd.url(), me="two")
    stop = Stop()
    assert one.acquire(stop)
    client = etcd.client()
    client.revoke(lease_of(client))
    assert one.holds(), "it cannot know yet: the test shows nothing otherwise"
    assert two.acquire(stop)
    assert two.holds()
    assert not one.holds()
    one.close()
    assert two.holds(), "what the first gives back is not the second's"
    two.close()
    client.close()


def test_a_put_whose_answer_was_lost_is_recognised(etcd: EtcdServer) -> None:
    client = etcd.client()
    number, ttl_s = client.grant(60)
    assert ttl_s == 60
    assert client.put_if_absent(etcd.key, "me", number)
    assert client.put_if_absent(etcd.key, "me", number), "repeated at the next endpoint"
    assert not client.put_if_absent(etcd.key, "other", client.grant(60)[0])
    assert client.renew(number) == 60
    client.revoke(number)
    assert client.renew(number) == 0
    assert client.get(etcd.key) is None
    client.close()


def test_a_kept_connection_that_was_closed_is_made_anew(own_etcd: EtcdServer) -> None:
    etcd = own_etcd
    client = etcd.client()
    client.get(etcd.key)
    etcd.kill()
    with pytest.raises(EtcdError, match=f"127.0.0.1:{etcd.port}"):
        client.get(etcd.key)
    etcd.start()
    assert client.get(etcd.key) is None
    etcd.kill()
    etcd.start()
    assert client.get(etcd.key) is None
    client.close()


# ---------------------------------------------------------------- etcd that lets in only some


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """An authority, and a key and certificate of its for 127.0.0.1, for server and client alike."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl command to make certificates with")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=tmp_path, check=True, capture_output=True, timeout=180)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority", "-days", "2")
    openssl("req", *new, "-keyout", "key.pem", "-out", "request.pem", "-subj", "/CN=maru")
    (tmp_path / "extensions").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    openssl(
        "x509", "-req", "-in", "request.pem", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2",
        "-extfile", "extensions", "-out", "cert.pem",
    )  # fmt: skip
    return tmp_path


def test_tls_with_certificates_of_both_sides(
    certificates: Path, new_etcd: Callable[..., EtcdServer], program: str
) -> None:
    ca, cert, key = (str(certificates / name) for name in ("ca.pem", "cert.pem", "key.pem"))
    query = f"?ca={ca}&cert={cert}&key={key}"
    etcd = new_etcd(
        "--cert-file", cert, "--key-file", key, "--trusted-ca-file", ca, "--client-cert-auth", scheme="https"
    ).start(query)
    election = lease(etcd.url(query), standby=False, ttl_s=30)
    assert patiently(election.acquire, Stop())
    election.close()
    for wrong in ("", f"?ca={ca}"):  # an authority that this machine does not know; no certificate of ours
        with pytest.raises(EtcdError):
            patiently(lease(etcd.url(wrong), standby=False).acquire, Stop())


def test_a_user_and_password(own_etcd: EtcdServer, tmp_path: Path) -> None:
    etcd = own_etcd
    client = etcd.client()
    client._call("auth/user/add", {"name": "root", "password": "secret"})
    client._call("auth/role/add", {"name": "root"})
    client._call("auth/user/grant", {"user": "root", "role": "root"})
    client._call("auth/enable", {})
    password = tmp_path / "password"
    password.write_text("secret\n")
    query = f"?user=root&password_file={password}"
    election = lease(etcd.url(query), standby=False, ttl_s=30)
    assert patiently(election.acquire, Stop())
    # A token that etcd has forgotten is asked for anew.
    election._etcd._token = "nonsense.1"
    known = etcd.client(query)
    number = lease_of(known)
    before = election._until
    await_condition(lambda: election._until > before, "it goes on renewing")
    assert election.holds()
    assert lease_of(known) == number
    election.close()
    for wrong in ("", f"?user=other&password_file={password}"):
        with pytest.raises(EtcdError, match="refused"):
            patiently(lease(etcd.url(wrong), standby=False).acquire, Stop())
    known.close()
    client.close()


# ---------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://host/x", "give etcd://HOST"),
        ("etcd://host:2379", "names no key"),
        ("etcd://host:2379/", "names no key"),
        ("etcd:///key", "no host and port"),
        ("etcd://host:port/key", "'host:port' is no host and port"),
        ("etcd://a:1,,b:2/key", "'' is no host"),
        ("etcd://a:1/key?colour=red", "'colour' is none of its options"),
        ("etcd://a:1/key?ca=/x", "write etcds://"),
        ("etcd://a:1/key?user=x", "user and password_file, together"),
        ("etcds://a:1/key?cert=/x", "cert and key"),
        ("etcds://a:1/key?ca=/missing", "certificates cannot be used"),
        ("etcd://a:1/key?user=x&password_file=/missing", "/missing cannot be read"),
    ],
)
def test_a_lock_that_cannot_be_is_refused_with_the_value(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        make_election(url, ttl_s=10, me="me", standby=True)
    assert repr(url) in str(caught.value)


def test_hosts_and_ports_are_read() -> None:
    url = EtcdURL.parse("etcd://a,b:99,[::1]:5,[::2],10.0.0.1:1/k/e/y")
    assert url.endpoints == (("a", 2379), ("b", 99), ("::1", 5), ("::2", 2379), ("10.0.0.1", 1))
    assert url.key == "/k/e/y"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lock", "nonsense"], ["--lock is 'nonsense'", "etcd://HOST"]),
        (["--lock", "etcd://h/k", "--lock-ttl", "1"], ["--lock-ttl is 1", "2 to 300"]),
        (["--standby", "--format"], ["--standby and --format"]),
    ],
)
def test_options_that_cannot_be_are_one_line(options: list[str], words: list[str], tmp_path: Path) -> None:
    done = run("--pool", f"file://{tmp_path}/pool", "--size", "64M", "--bind", f"ipc://{tmp_path}/s", *options)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr
    assert not (tmp_path / "pool").exists()
