"""The HTTP side against a real service: what it shows, whom it refuses, and that it can hold up nobody."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live import Running, store
from prometheus_client.parser import text_string_to_metric_families

from maru_core.errors import ConfigError
from maru_core.session import Session
from maru_server import web as web_module
from maru_server.state import ServerState
from maru_server.web import CONCURRENT, Fresh, Web, parse_address
from support import await_condition, hashes, namespace, running_server


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    service = Running(tmp_path)
    yield service
    service.stop()


#: No reply of a slow machine takes as long, seconds.
PATIENCE_S = 120.0


@pytest.fixture
def web(running: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    for limit in ("HEALTH_S", "CALL_S"):
        monkeypatch.setattr(web_module, limit, PATIENCE_S)
    monkeypatch.setattr(web_module, "HISTORY_STEP_S", 0.5)
    made = Web(running.service, ("127.0.0.1", 0), ["kv.example.org"])
    yield made
    made.close()


@contextlib.contextmanager
def due(fresh: Fresh) -> Iterator[None]:
    """From here on it is made anew when it is asked for next, however lately and slowly that was done. Nobody makes it meanwhile."""
    with fresh._lock:
        fresh._made = fresh._pace.free_at = -1e9
        yield


@pytest.fixture(scope="module")
def open_web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    """For all tests that only look, or are refused: with five pages."""
    running = Running(tmp_path_factory.mktemp("web"))
    with pytest.MonkeyPatch.context() as patch, contextlib.closing(running.session()) as session:
        for limit in ("HEALTH_S", "CALL_S"):
            patch.setattr(web_module, limit, PATIENCE_S)
        store(session, session.open_namespace(namespace(model="big model").record()), 5)
        made = Web(running.service, ("127.0.0.1", 0), ["kv.example.org"])
        yield made
        assert session.stats()["pages"] == 5
        made.close()
    running.stop()


class Reply:
    def __init__(self, reply: http.client.HTTPResponse) -> None:
        self.status = reply.status
        self.headers = reply.headers
        self.body = reply.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(web: Web, path: str, method: str = "GET", **headers: str) -> Reply:
    connection = http.client.HTTPConnection("127.0.0.1", int(web.url.rpartition(":")[2]), timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        return Reply(connection.getresponse())


@pytest.fixture
def content(running: Running) -> Iterator[tuple[Session, int, bytes]]:
    session = running.session()
    number = session.open_namespace(namespace(model="big model").record())
    yield session, number, store(session, number, 5)
    session.close()


def stopped(running: Running) -> contextlib.AbstractContextManager[None]:
    """The loop stands still meanwhile."""

    @contextlib.contextmanager
    def stand() -> Iterator[None]:
        inside, go_on = threading.Event(), threading.Event()

        def wait(state: ServerState) -> None:
            inside.set()
            go_on.wait(PATIENCE_S)

        thread = threading.Thread(target=lambda: running.service.call(wait, PATIENCE_S))
        thread.start()
        assert inside.wait(PATIENCE_S)
        try:
            yield
        finally:
            go_on.set()
            thread.join()

    return stand()


# ------------------------------------------------------------ what is shown


def test_health_is_the_loop_s(running: Running, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = ask(web, "/healthz")
    assert reply.status == 200
    assert reply.json["status"] == "ok"
    assert reply.json["incarnation"] == running.state.stats()["incarnation"]
    monkeypatch.setattr(web_module, "HEALTH_S", 0.05)
    with stopped(running):
        reply = ask(web, "/healthz")
        assert reply.status == 503
        assert reply.json["status"] == "unavailable"
    monkeypatch.setattr(web_module, "HEALTH_S", PATIENCE_S)
    assert ask(web, "/healthz").status == 200, "health comes back"


def test_metrics_parse_and_are_of_this_server(web: Web, content: tuple[Session, int, bytes]) -> None:
    await_condition(lambda: b"maru_pages{" in ask(web, "/metrics").body, "figures are younger than the pages")
    reply = ask(web, "/metrics")
    assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(reply.body.decode())}
    assert families["maru_pages"].samples[0].value == 5
    assert families["maru_request_seconds"].samples
    assert families["process_cpu_seconds"].samples[0].value > 0


def test_status_has_figures_namespaces_and_history(web: Web, content: tuple[Session, int, bytes]) -> None:
    session, number, keys = content
    session.match(number, ["kv"], 0, keys + hashes(1, seed=9))
    status: Any = {}

    def complete() -> bool:
        """Figures may be from before the match: what took long to make is shown for longer."""
        status.update(ask(web, "/api/status.json").json)
        return bool(status["history"] and "Match" in status["latency_s"])

    await_condition(complete, "the match, and the first point of the history")
    [space] = status["namespaces"]
    assert (space["model"], space["pages"], space["bytes"]) == ("big model", 5, 5000)
    assert space["counts"]["miss_not_stored"] == 1
    assert status["latency_s"]["Match"]["count"] == 1
    assert 0 < status["latency_s"]["Match"]["p50"] <= status["latency_s"]["Match"]["p99"]
    assert int(status["incarnation"]) == status["stats"]["incarnation"]
    assert {"at", "bytes_used", "asked", "found", "p50_s", "p99_s"} <= status["history"][0].keys()


def test_the_history_says_what_came_between_its_points(
    running: Running, web: Web, content: tuple[Session, int, bytes]
) -> None:
    session, number, keys = content
    await_condition(lambda: web._last is not None, "the first look")
    web._stop.set()
    web._threads[1].join()  # from here on only the test adds points
    web._history.clear()
    for _ in range(4):
        session.match(number, ["kv"], 0, keys)
    web._add_point(running.service.figures())
    [point] = web._history
    assert point["asked"] == 20
    assert point["bytes_used"] == running.state.stats()["bytes_used"]


def test_the_tree_is_that_of_the_state(web: Web, content: tuple[Session, int, bytes]) -> None:
    rows = ask(web, "/api/tree.json").json["rows"]
    assert [row["kind"] for row in rows] == ["namespace", "run"]
    assert rows[1]["first"] == content[2][:32].hex()
    assert rows[1]["subtree_bytes"] == 5000


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=1e9", "limit=99999", "limit=x", "limit=-1", "sort=age", "limit=%00"]
)
def test_a_tree_that_cannot_be_is_refused(open_web: Web, query: str) -> None:
    assert ask(open_web, f"/api/tree.json?{query}").status == 400


def test_figures_are_asked_of_the_loop_once_for_all_who_come(running: Running, web: Web) -> None:
    asked: list[int] = []
    figures = running.state.figures

    def counted() -> Any:
        asked.append(1)
        return figures()

    running.state.figures = counted  # type: ignore[method-assign]
    web._figures._for_s = 600  # the history asks too
    with due(web._figures):
        asked.clear()
    for _ in range(5):
        assert ask(web, "/api/status.json").status == 200
        assert ask(web, "/metrics").status == 200
    assert len(asked) == 1


def test_what_is_dear_is_made_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(web_module.time, "monotonic", lambda: now[0])
    made: list[float] = []

    def make() -> int:
        made.append(now[0])
        now[0] += 0.5
        return len(made)

    fresh = Fresh(make, 1.0)
    for _ in range(1000):
        fresh.get()
        now[0] += 0.1
    assert len(made) * 0.5 <= now[0] * web_module.DUTY + 0.5


# ------------------------------------------------------------ who is refused


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:9750", "127.0.0.1.evil.example", "localhost.evil.example", ""]
)
def test_a_name_that_was_made_to_point_here_is_refused(open_web: Web, host: str) -> None:
    for path in ("/", "/metrics", "/healthz", "/api/status.json", "/api/tree.json"):
        reply = ask(open_web, path, Host=host)
        assert reply.status == 403, path
        assert b"pool" not in reply.body


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:9750", "localhost:1", "[::1]:9750", "10.1.2.3", "KV.example.org", socket.gethostname()],
)
def test_addresses_and_known_names_are_served(open_web: Web, host: str) -> None:
    assert ask(open_web, "/healthz", Host=host).status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "X" * 300])
def test_only_get_is_answered(open_web: Web, method: str) -> None:
    assert ask(open_web, "/", method).status in (405, 501)


@pytest.mark.parametrize("path", ["/api", "/index.html", "/../page.html", "/metrics/", "/%2e%2e/etc/passwd"])
def test_there_is_nothing_else(open_web: Web, path: str) -> None:
    assert ask(open_web, path).status == 404


@pytest.mark.parametrize(
    "path", ["/", "/metrics", "/healthz", "/api/status.json", "/nothing", "/api/tree.json?limit=x"]
)
def test_every_reply_is_guarded(open_web: Web, path: str) -> None:
    headers = ask(open_web, path).headers
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Cache-Control"] == "no-store"
    assert headers["Access-Control-Allow-Origin"] is None
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_the_page_needs_nothing_from_elsewhere(open_web: Web) -> None:
    text = ask(open_web, "/").body.decode()
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    assert "<script src" not in text
    assert "style=" not in text
    assert "innerHTML" not in text


@pytest.mark.parametrize(
    "garbage",
    [b"\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01 tls", b"GET / HTTP/9.9\r\n\r\n", b"GET " + b"a" * 70000, b""],
)
def test_what_is_no_request_harms_nobody(open_web: Web, garbage: bytes) -> None:
    port = int(open_web.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as raw, contextlib.suppress(OSError):
        raw.sendall(garbage)
        raw.shutdown(socket.SHUT_WR)
        raw.recv(65536)
    assert ask(open_web, "/healthz").status == 200


def test_only_so_many_are_served_at_once_and_clients_go_on(
    running: Running, web: Web, content: tuple[Session, int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, number, keys = content
    port = int(web.url.rpartition(":")[2])
    monkeypatch.setattr(web_module._Handler, "timeout", PATIENCE_S)
    monkeypatch.setattr(web_module, "REQUEST_S", PATIENCE_S)
    idle = [socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) for _ in range(CONCURRENT)]
    await_condition(lambda: len(web._server._open) == CONCURRENT, "all connections are taken")
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as one_more:
        assert one_more.recv(65536).startswith(b"HTTP/1.0 503")
    assert session.match(number, ["kv"], 0, keys).pages == 5
    monkeypatch.setattr(web_module, "REQUEST_S", 0.0)  # now they have had their time

    def served() -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):  # refused once more, before it could ask
            return ask(web, "/healthz").status == 200
        return False

    await_condition(served, "others have their turn")
    for connection in idle:
        connection.close()
    await_condition(lambda: not web._server._open, "all connections are let go")


def test_requests_while_the_loop_stands_end_in_time(
    running: Running, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_module, "CALL_S", 0.05)
    monkeypatch.setattr(web_module, "DUTY", 1e9)
    web._figures._for_s = 0
    with due(web._figures):  # what was made before this is not shown again
        pass
    with stopped(running):
        for path in ("/metrics", "/api/status.json", "/api/tree.json"):
            assert ask(web, path).status == 503, path
        assert ask(web, "/").status == 200
    monkeypatch.setattr(web_module, "CALL_S", PATIENCE_S)
    assert ask(web, "/metrics").status == 200, "metrics come back"


def test_nobody_waits_for_all_who_came_before(running: Running, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_module, "CALL_S", 0.05)
    with web._figures._lock:  # somebody else is at it, and stays
        assert ask(web, "/metrics").status == 503
        assert ask(web, "/api/status.json").status == 503


def test_a_fault_is_a_500_and_no_end(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> dict[str, Any]:
        raise RuntimeError("a secret")

    monkeypatch.setattr(web, "status", fail)
    reply = ask(web, "/api/status.json")
    assert reply.status == 500
    assert b"secret" not in reply.body
    assert ask(web, "/healthz").status == 200


# ------------------------------------------------------------ the option


@pytest.mark.parametrize("text", ["9750", "127.0.0.1", "127.0.0.1:x", ":9750", "127.0.0.1:70000", ""])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--http is"):
        parse_address(text, insecure=True)


@pytest.mark.parametrize("text", ["0.0.0.0:9750", "10.0.0.1:80", "[::]:9750", "example.org:80", "*:9750"])
def test_what_others_reach_needs_to_be_asked_for(text: str) -> None:
    with pytest.raises(ConfigError, match="--insecure-http"):
        parse_address(text, insecure=False)
    assert parse_address(text, insecure=True)[1] in (9750, 80)


def test_loopback_is_free() -> None:
    assert parse_address("127.0.0.1:0", insecure=False) == ("127.0.0.1", 0)
    assert parse_address("[::1]:80", insecure=False) == ("::1", 80)
    assert parse_address("localhost:80", insecure=False) == ("localhost", 80)


def test_a_port_in_use_is_an_error_with_a_cure(running: Running, web: Web) -> None:
    with pytest.raises(ConfigError, match="give another port"):
        Web(running.service, ("127.0.0.1", int(web.url.rpartition(":")[2])))


def test_the_server_s_option(tmp_path: Path) -> None:
    with running_server(tmp_path, "--http", "127.0.0.1:0") as server:
        port = int(server.ready["http"].rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        connection.request("GET", "/")
        assert connection.getresponse().status == 200
        connection.close()
        assert server.stop() == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)


def test_without_the_option_there_is_no_http(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        assert server.process is not None
        inodes = {
            fd.readlink().name
            for fd in Path(f"/proc/{server.process.pid}/fd").iterdir()
            if "socket:" in str(fd.readlink())
        }
        listening = {
            line.split()[9]
            for table in ("tcp", "tcp6")
            for line in Path(f"/proc/{server.process.pid}/net/{table}").read_text().splitlines()[1:]
            if line.split()[3] == "0A"
        }
        assert not {inode.removeprefix("socket:[").removesuffix("]") for inode in inodes} & listening
