"""``maru doctor``: each thing that can be wrong is made wrong, with real servers, pools and processes, and found."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from operating import engine, maru, variables

from maru_core.pool import PoolMemory, parse_pool_uri
from maru_core.pool.coherence import HARDWARE, SoftwareCoherence
from maru_core.protocol import ROOT, Hello
from maru_core.session import Session
from maru_core.settings import Settings
from maru_server.operator import checks_host, checks_pool, checks_room, checks_server, checks_sglang, checks_sharing
from maru_server.operator.findings import FAIL, OK, WARN, Finding
from support import ServerProcess, await_condition, hashes, namespace, running_server
from tests.server.live import raw, store


def diagnose(
    server: ServerProcess | str | None, *arguments: str, environ: dict[str, str] | None = None
) -> dict[str, list[dict[str, str]]]:
    """Findings by name, of the whole command."""
    done = maru(*arguments, "doctor", "--json", server=server, environ=environ)
    assert done.stderr == ""
    told = json.loads(done.stdout)
    levels = [finding["level"] for finding in told["findings"]]
    assert (told["fail"], told["warn"]) == (levels.count("fail"), levels.count("warn"))
    assert told["ok"] == ("fail" not in levels)
    assert done.returncode == (0 if told["ok"] else 1)
    found: dict[str, list[dict[str, str]]] = {}
    for finding in told["findings"]:
        assert finding["level"] == "ok" or finding["cure"], f"no cure for {finding}"
        found.setdefault(finding["name"], []).append(finding)
    return found


def levels(findings: list[Finding] | list[dict[str, str]]) -> list[str]:
    return [f["level"] if isinstance(f, dict) else f.level for f in findings]


def rows(session: Session, what: str) -> list[dict[str, Any]]:
    return session.inspect(what)


# ---------------------------------------------------------------- all is well


def test_a_server_that_is_used_as_it_should_has_nothing_wrong(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        session = engine(server)
        number = session.open_namespace(namespace().record())
        keys = store(session, number, 100, nbytes=65536)
        session.match(number, ["kv"], 0, keys)
        found = diagnose(server)
        assert {finding["name"] for group in found.values() for finding in group if finding["level"] == "fail"} == set()
        # "pinning" and "huge-pages" are this machine's, "sglang" that of what runs on it.
        doubtful = {name for name, group in found.items() if "warn" in levels(group)}
        assert doubtful <= {"pinning", "sglang", "clock", "answer-time", "pool-memory"}
        assert set(found) >= {
            "settings", "endpoint", "server", "answer-time", "pool", "huge-pages", "coherence", "objects", "pool-memory", "clock",
            "sessions", "namespaces", "hits", "room", "quota", "quarantine", "sglang", "numa", "pinning",
        }  # fmt: skip
        text = maru("doctor", server=server).stdout
        assert text.splitlines()[-1].startswith("0 wrong")
        session.close()


# ---------------------------------------------------------------- the way to the server


def test_no_server_at_all(tmp_path: Path) -> None:
    found = diagnose(None, environ={"MARU_RUNTIME_DIR": str(tmp_path / "run")})
    assert levels(found["endpoint"]) == [FAIL]
    assert "no server is named" in found["endpoint"][0]["text"]
    assert "sglang" in found, "what can be looked at without a server is"


def test_a_socket_that_is_not_there_or_that_nobody_listens_on(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    missing = checks_server.check_endpoint(f"ipc://{path}")
    assert (missing.level, "there is no socket" in missing.text) == (FAIL, True)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    ended = checks_server.check_endpoint(f"ipc://{path}")
    assert (ended.level, "nobody listens" in ended.text) == (FAIL, True)
    path.unlink()
    path.write_text("")
    assert "is not a socket" in checks_server.check_endpoint(f"ipc://{path}").text


def test_a_port_that_nobody_listens_on(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert checks_server.check_endpoint(f"tcp://127.0.0.1:{port}").level == OK
    closed = checks_server.check_endpoint(f"tcp://127.0.0.1:{port}")
    assert (closed.level, "start maru-server" in closed.cure) == (FAIL, True)
    unknown = checks_server.check_endpoint("tcp://nowhere.invalid:7878")
    assert (unknown.level, "no address" in unknown.text) == (FAIL, True)


def test_of_several_servers_one_is_enough(tmp_path: Path) -> None:
    standby = f"ipc://{tmp_path}/standby.sock"
    with running_server(tmp_path) as server:
        found = diagnose(f"{standby},{server.endpoint}")
        assert levels(found["endpoint"]) == [OK, OK]
        assert "standby" in found["endpoint"][0]["cure"]
        assert levels(found["server"]) == [OK]
    found = diagnose(f"{standby},{server.endpoint}")
    assert levels(found["endpoint"]) == [FAIL, FAIL]


def test_something_else_listens_there(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "s.sock"))
        other.listen()
        found = diagnose(f"ipc://{tmp_path}/s.sock", "--timeout", "0.3")
    assert levels(found["endpoint"]) == [OK]
    assert levels(found["server"]) == [FAIL]
    assert "no answer" in found["server"][0]["text"]


def test_a_server_that_stands_still(tmp_path: Path) -> None:
    import signal

    with running_server(tmp_path) as server:
        server.signal(signal.SIGSTOP)
        found = diagnose(server, "--timeout", "0.3")
        assert levels(found["server"]) == [FAIL]
        server.signal(signal.SIGCONT)


def test_a_server_of_another_release(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        session = engine(server)
        # What this client says of its own release is all that a server can go by.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("maru_core.conversation.PROTOCOL_VERSION", 99)
            finding = checks_server.check_hello(session)
        assert (finding.level, "same release" in finding.cure) == (FAIL, True)
        session.close()


def test_answers_against_the_engines_time_limit(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        session = engine(server)
        assert checks_server.check_round_trip(session, 1000.0).level == OK
        late = checks_server.check_round_trip(session, 1e-7)
        assert (late.level, "timeout_ms" in late.cure) == (FAIL, True)
        session.close()


def test_variables_that_mean_nothing(tmp_path: Path) -> None:
    finding = checks_server.check_settings(Settings.from_environment({"MARU_SEVRER": "ipc:///x"}))
    assert (finding.level, "MARU_SEVRER" in finding.text) == (WARN, True)


def test_a_server_that_stood_still_for_a_while(tmp_path: Path) -> None:
    import signal

    with running_server(tmp_path, "--lease", "0.2") as server:
        session = engine(server)
        session.connect()
        server.signal(signal.SIGSTOP)
        stopped = time.monotonic()
        await_condition(lambda: time.monotonic() - stopped > 0.3, "longer than half a lease")
        server.signal(signal.SIGCONT)
        finding = checks_server.check_clock(session.stats(), None, 0)
        assert (finding.level, "stood still" in finding.text) == (WARN, True)
        session.close()


def test_a_clock_that_was_set_back() -> None:
    finding = checks_server.check_clock({"stalled_s": 0.0}, 10_000_000_000, 1_000_000_000)
    assert (finding.level, "9 s in the future" in finding.text) == (WARN, True)


# ---------------------------------------------------------------- the pool


def test_a_pool_that_this_host_does_not_have(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        found = diagnose(server, environ={"MARU_POOL": "shm://maru-nowhere"})
        assert levels(found["pool"]) == [FAIL]
        assert "maru-nowhere" in found["pool"][0]["text"]
        assert "room" in found, "the server is looked at all the same"


def test_another_pool_under_the_same_name(tmp_path: Path) -> None:
    with PoolMemory.create(f"file://{tmp_path}/pool", 8 << 20):
        memory, finding = checks_pool.attach([f"file://{tmp_path}/pool"], b"another pool....")
    assert memory is None
    assert finding.level == FAIL


def test_a_pool_that_this_user_may_not_open(tmp_path: Path) -> None:
    with PoolMemory.create(f"file://{tmp_path}/pool", 8 << 20) as mine:
        os.chmod(tmp_path / "pool", 0)
        # Root may open everything, and may be somebody else for a moment.
        me = os.geteuid()
        if me == 0:
            os.seteuid(65534)
        try:
            memory, finding = checks_pool.attach([f"file://{tmp_path}/pool"], mine.geometry.pool_uuid)
        finally:
            os.seteuid(me)
    assert memory is None
    assert (finding.level, str(tmp_path) in finding.text) == (FAIL, True)
    assert "run as the server's user" in finding.cure


def test_a_pool_that_cannot_get_all_its_memory(tmp_path: Path) -> None:
    uri = parse_pool_uri("shm://x")
    half = {"extents": 100, "extents_ready": 50, "extent_bytes": 1 << 20}
    short = tmp_path / "meminfo"
    short.write_text("MemTotal: 1000 kB\nMemAvailable: 1000 kB\n")
    finding = checks_pool.check_memory(uri, half, meminfo=short, cgroup=tmp_path)
    assert (finding.level, "50.0 MiB" in finding.text, "memory has 1000 KiB" in finding.text) == (WARN, True, True)
    (tmp_path / "memory.max").write_text(f"{20 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{10 << 20}\n")
    finding = checks_pool.check_memory(uri, half, cgroup=tmp_path)
    assert (finding.level, "this container's limit has 10.0 MiB" in finding.text) == (WARN, True)
    huge = {**half, "extents": 1 << 30}
    assert checks_pool.check_memory(parse_pool_uri(f"file://{tmp_path}/pool"), huge).level == WARN
    assert checks_pool.check_memory(uri, {**half, "extents_ready": 100}).level == OK


def test_objects_that_waste_the_pool(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        session = engine(server)
        number = session.open_namespace(namespace().record())
        extent = int(session.stats()["extent_bytes"])
        store(session, number, 2, nbytes=extent // 2)
        finding = checks_pool.check_objects(rows(session, "namespaces"), extent, 16384, {})
        assert finding.level == OK
        # One byte more than half an extent: half of each extent is lost.
        store(session, number, 2, seed=5, nbytes=extent // 2 + 1)
        found = diagnose(server)["objects"]
        assert levels(found) == [WARN]
        assert "?extent=" in found[0]["cure"]
        session.close()


def test_clients_that_say_they_are_on_other_hosts(tmp_path: Path) -> None:
    with running_server(tmp_path) as server, raw(server.endpoint) as dealer:
        from maru_core import protocol as p

        dealer.send(p.encode(Hello(p.PROTOCOL_VERSION, 1, os.urandom(16), "far", "another-host", 1, 2, "ns", "boot")))
        assert isinstance(p.decode_reply(dealer.recv()), p.Welcome)
        found = diagnose(server)["coherence"]
        assert levels(found) == [WARN]
        assert "another-host" in found[0]["text"]


@pytest.mark.skipif(not SoftwareCoherence.possible(), reason="the compiled helper is not built")
def test_a_pool_that_is_not_coherent_between_hosts() -> None:
    uri = parse_pool_uri("file:///mnt/shared/pool")
    software = SoftwareCoherence()
    one = checks_pool.check_coherence(software, {"here"}, uri)
    assert one.level == OK
    assert "coherence=hardware" in one.cure
    two = checks_pool.check_coherence(software, {"here", "there"}, uri)
    assert two.level == OK
    assert "here, there" in two.text
    assert software.clean in two.text
    assert "verify=checksum" in two.cure
    wrong = checks_pool.check_coherence(HARDWARE, {"here", "there"}, uri)
    assert wrong.level == WARN
    assert "coherence=software" in wrong.cure


@pytest.mark.parametrize(
    ("machine", "mount", "part"),
    [
        ("never", "rw,size=1024k", "no huge pages (never)"),
        ("never", "rw,size=1024k,huge=within_size", "has huge pages (within_size)"),
        ("advise", "rw,size=1024k", "no huge pages (never)"),
        ("deny", "rw,huge=always", "no huge pages (deny)"),
        ("force", "rw", "has huge pages (force)"),
    ],
)
def test_how_shared_memory_is_mapped(tmp_path: Path, machine: str, mount: str, part: str) -> None:
    setting, mounts = tmp_path / "shmem_enabled", tmp_path / "mountinfo"
    setting.write_text("always within_size advise never deny force\n".replace(machine, f"[{machine}]"))
    mounts.write_text(
        f"24 1 0:1 / / rw - ext4 /dev/sda rw,huge=x\n25 24 0:23 / /dev/shm rw,relatime - tmpfs tmpfs {mount}\n"
    )
    finding = checks_pool.check_huge_pages(parse_pool_uri("shm://x"), 64 << 30, setting=setting, mountinfo=mounts)
    assert finding.level == OK
    assert part in finding.text


def test_how_this_machine_maps_shared_memory() -> None:
    finding = checks_pool.check_huge_pages(parse_pool_uri("shm://x"), 64 << 30)
    # The kernel's own words for it.
    assert any(f"({word})" in finding.text for word in ("never", "deny", "force", "always", "within_size", "advise"))
    assert ("/dev/shm has huge pages" in finding.text) == (not finding.cure)


# ---------------------------------------------------------------- engines and what they share


def test_no_engine_is_connected(server: ServerProcess) -> None:
    found = diagnose(server)
    assert levels(found["sessions"]) == [FAIL]
    assert "--hicache-storage-backend maru" in found["sessions"][0]["cure"]


def test_an_engine_that_fell_silent_and_its_quarantine(tmp_path: Path) -> None:
    with running_server(tmp_path, "--lease", "2") as server:
        code = (
            "import os, signal, sys; from maru_core.session import Session\n"
            f"s = Session({server.endpoint!r}, name='silent tp0/1', timeout_s=60)\n"
            "from support import namespace, hashes\n"
            "n = s.open_namespace(namespace().record())\n"
            "assert set(s.reserve(n, 'kv', 0, 1, bytes(32), hashes(5), 1000).status) == {0}\n"
            "print('ready', flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
        )
        root = Path(__file__).parents[2]
        stopped = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
            env={**variables(), "PYTHONPATH": f"{root}:{root}/tests"},
        )  # fmt: skip
        try:
            assert stopped.stdout is not None
            assert stopped.stdout.readline() == "ready\n"
            session = engine(server, "maru watching")
            await_condition(
                lambda: session.stats()["slots_quarantined"] == 5, "the stopped engine's slots are in quarantine"
            )
            found = diagnose(server)
            assert levels(found["sessions"]) == [WARN]
            assert f"silent tp0/1 (pid {stopped.pid}" in found["sessions"][0]["text"]
            assert levels(found["quarantine"]) == [WARN]
            assert "5 slots" in found["quarantine"][0]["text"]
            session.close()
        finally:
            stopped.kill()
            stopped.wait()


@contextlib.contextmanager
def namespaces(server: ServerProcess, *changes: dict[str, Any]) -> Iterator[tuple[Session, list[int]]]:
    session = engine(server)
    try:
        yield session, [session.open_namespace(namespace(**change).record()) for change in changes]
    finally:
        session.close()


def test_two_engines_of_one_model_that_differ_are_told_field_by_field(tmp_path: Path) -> None:
    with (
        running_server(tmp_path) as server,
        namespaces(
            server,
            {"model": "org/toy"},
            {"model": "/models/Toy", "kv_dtype": "fp8_e4m3", "page_tokens": 64},
            {"model": "other", "weights": "w1"},
        ),
    ):
        found = diagnose(server)["namespaces"]
        assert levels(found) == [WARN]
        for part in ("0", "1", "kv_dtype: bfloat16 / fp8_e4m3", "page_tokens: 16 / 64"):
            assert part in found[0]["text"]
        assert "other" not in found[0]["text"]


def test_two_revisions_of_one_model_are_told_by_their_weights(tmp_path: Path) -> None:
    with (
        running_server(tmp_path) as server,
        namespaces(server, {"model": "org/toy"}, {"model": "/models/Toy/", "weights": "w1"}) as (session, _),
    ):
        (finding,) = checks_sharing.check_namespaces(rows(session, "namespaces"))
        assert (finding.level, "weights: " in finding.text) == (WARN, True)


def test_what_is_apart_on_purpose_is_no_finding(tmp_path: Path) -> None:
    with (
        running_server(tmp_path) as server,
        namespaces(server, {"tag": "a"}, {"tag": "b", "page_tokens": 64}) as (session, _),
    ):
        (finding,) = checks_sharing.check_namespaces(rows(session, "namespaces"))
        assert (finding.level, "1 pairs are kept apart by tag" in finding.text) == (OK, True)


def test_nobody_has_opened_a_namespace(server: ServerProcess) -> None:
    assert levels(checks_sharing.check_namespaces([])) == [FAIL]


def test_many_differing_pairs_are_bounded(tmp_path: Path) -> None:
    with (
        running_server(tmp_path) as server,
        namespaces(server, *({"page_tokens": n} for n in range(1, 9))) as (session, _),
    ):
        found = checks_sharing.check_namespaces(rows(session, "namespaces"))
        assert len(found) == 9
        assert found[-1].text == f"{8 * 7 // 2 - 8} more pairs differ"


def test_an_engine_that_stores_and_never_asks(tmp_path: Path) -> None:
    with running_server(tmp_path) as server, namespaces(server, {}) as (session, (number,)):
        store(session, number, 10)
        found = diagnose(server)["hits"]
        assert levels(found) == [WARN]
        assert "no engine has ever asked" in found[0]["text"]
        assert "prefetch_threshold" in found[0]["cure"]


def test_an_engine_that_asks_and_never_stores(tmp_path: Path) -> None:
    with running_server(tmp_path) as server, namespaces(server, {}) as (session, (number,)):
        session.match(number, ["kv"], 0, hashes(100))
        found = diagnose(server)["hits"]
        assert levels(found) == [WARN]
        assert "none was ever stored" in found[0]["text"]


def test_pages_that_are_there_under_other_settings(tmp_path: Path) -> None:
    with running_server(tmp_path) as server, namespaces(server, {}, {"kv_dtype": "fp8_e4m3"}) as (session, (a, b)):
        keys = store(session, a, 100)
        session.match(b, ["kv"], 0, keys)
        (finding,) = [f for f in diagnose(server)["hits"] if f["level"] == "fail"]
        assert f"namespace {b}" in finding["text"]
        assert "100 pages" in finding["text"]


def test_an_engine_that_asks_and_never_finds_is_told_why(tmp_path: Path) -> None:
    with running_server(tmp_path) as server, namespaces(server, {}) as (session, (number,)):
        keys = store(session, number, 100)
        session.delete(number, keys[:32])
        session.match(number, ["kv"], 0, keys)
        (finding,) = checks_sharing.check_asks(rows(session, "namespaces"))
        assert (finding.level, "they were deleted or cleared" in finding.text) == (WARN, True)


def test_pages_that_are_found_and_cannot_be_read(tmp_path: Path) -> None:
    with running_server(tmp_path, "--lease", "0.4") as server:
        told: dict[str, int] = {}
        number: list[int] = []
        session = Session(
            server.endpoint, name="engine", timeout_s=60, report=lambda: (number[0] if number else None, told)
        )
        number.append(session.open_namespace(namespace().record()))
        keys = store(session, number[0], 100)
        session.match(number[0], ["kv"], 0, keys)
        told["miss_checksum"] = 60
        await_condition(lambda: session.stats().get("client_miss_checksum") == 60, "the heartbeat tells it")
        found = diagnose(server)["hits"]
        assert levels(found) == [WARN]
        assert "60 pages failed their checksum, against 100 found" in found[0]["text"]
        session.close()


# ---------------------------------------------------------------- room


def test_a_pool_without_room(tmp_path: Path) -> None:
    with running_server(tmp_path) as server, namespaces(server, {}) as (session, (number,)):
        extent = int(session.stats()["extent_bytes"])
        # Reserved and never committed: nothing can be evicted.
        assert set(session.reserve(number, "kv", 0, 1, ROOT, hashes(40), extent).status) == {0, 3}
        found = diagnose(server)["room"]
        assert levels(found) == [WARN]
        assert "--size" in found[0]["cure"]


def test_a_pool_that_is_turned_over(tmp_path: Path) -> None:
    with running_server(tmp_path) as server, namespaces(server, {}) as (session, (number,)):
        extent = int(session.stats()["extent_bytes"])
        await_condition(
            lambda: session.stats()["extents_ready"] == session.stats()["extents"], "the pool has its memory"
        )
        for seed in range(40):
            reserved = session.reserve(number, "kv", 0, 1, ROOT, hashes(2, seed), extent)
            session.commit(reserved.slots, reserved.generations)
        await_condition(
            lambda: session.stats()["evicted_pages"] > session.stats()["pages"], "more were evicted than are there"
        )
        stats = {**session.stats(), "no_room": 0}
        finding = checks_room.check_room(stats)
        assert (finding.level, "turned over" in finding.text) == (WARN, True)


def test_stores_that_a_quota_refuses(tmp_path: Path) -> None:
    with running_server(tmp_path, "--quota", "=0.2") as server, namespaces(server, {}) as (session, (number,)):
        extent = int(session.stats()["extent_bytes"])
        await_condition(lambda: int(session.stats()["extents_ready"]) >= 12, "the pool has memory for all of it")
        # Six of thirty extents are the quota. Reserved and never committed: nothing of its own can be evicted.
        assert list(session.reserve(number, "kv", 0, 1, ROOT, hashes(6), extent).status) == [0] * 6
        found = diagnose(server)["quota"]
        assert levels(found) == [OK]
        assert "clients without a tenant (12.0 MiB of 12.0 MiB)" in found[0]["text"]
        assert set(session.reserve(number, "kv", 0, 1, ROOT, hashes(4, 2), extent).status) == {5}
        found = diagnose(server)["quota"]
        assert levels(found) == [WARN]
        assert "4 slots were refused over a quota" in found[0]["text"]
        assert levels(diagnose(server)["room"]) == [OK], "the pool itself has room"


def test_quarantine_that_leaves_no_room() -> None:
    stats = {"slots_quarantined": 10, "objects": 90, "slots_reserved": 0, "no_room": 5}
    assert checks_room.check_quarantine(stats).level == FAIL
    assert checks_room.check_quarantine({**stats, "no_room": 0}).level == WARN


# ---------------------------------------------------------------- this host


@pytest.fixture
def process() -> Iterator[Any]:
    """Starts a process with a command line like that of an SGLang server."""
    started = []

    def start(*arguments: str, **environ: str) -> checks_sglang.SglangProcess:
        child = subprocess.Popen(
            [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()", "-m", "sglang.launch_server", "--model-path", "toy", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables(more=environ),
        )  # fmt: skip
        started.append(child)
        assert child.stdout is not None
        child.stdout.readline()
        return next(found for found in checks_sglang.sglang_processes() if found.pid == child.pid)

    yield start
    for child in started:
        child.communicate()


_GOOD = ("--enable-hierarchical-cache", "--hicache-storage-backend", "maru")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--enable-hierarchical-cache",), "without a storage backend"),
        (("--enable-hierarchical-cache", "--hicache-storage-backend=file"), "the storage backend 'file'"),
        (("--hicache-storage-backend", "maru"), "no hierarchical cache"),
        ((*_GOOD, "--hicache-storage-prefetch-policy", "best_effort"), "best_effort"),
        ((*_GOOD, "--hicache-write-policy=write_back"), "nothing is stored until it is evicted"),
        ((*_GOOD, "--hicache-write-policy", "write_through_selective"), "until a prefix is seen again"),
        (
            (*_GOOD, "--hicache-storage-backend-extra-config", '{"prefetch_threshold": 10000}'),
            "prefetch_threshold 10000",
        ),
    ],
)
def test_flags_with_which_sglang_does_not_read(process: Any, arguments: tuple[str, ...], part: str) -> None:
    started = process(*arguments)
    (finding,) = checks_sglang.check_sglang([started])
    assert finding.level == WARN
    assert part in finding.text
    assert f"pid {started.pid}" in finding.text


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--hicache-storage-backend-extra-config", '{"prefetch_threshold": 512}'),
        ("--hicache-storage-backend-extra-config", "@file"),
    ],
)
def test_flags_that_are_as_they_should_be(process: Any, more: tuple[str, ...]) -> None:
    (finding,) = checks_sglang.check_sglang([process(*_GOOD, *more)])
    assert finding.level == OK
    assert "256" in finding.cure


def test_an_engine_that_uses_another_server(process: Any) -> None:
    here = "ipc:///run/maru/server.sock"

    def named(started: Any, endpoint: str = here) -> str:
        (finding,) = checks_sglang.check_sglang([started], endpoint)
        return finding.text if finding.level == WARN else ""

    extra = ("--hicache-storage-backend-extra-config", '{"server": "tcp://127.0.0.1:5757"}')
    assert named(process(*_GOOD, *extra, MARU_SERVER=here)).count("tcp://127.0.0.1:5757") == 1
    assert "ipc:///elsewhere" in named(process(*_GOOD, MARU_SERVER="ipc:///elsewhere"))
    assert f"ipc:///tmp/maru-{os.getuid()}/server.sock" in named(process(*_GOOD))
    assert "ipc:///mine/server.sock" in named(process(*_GOOD, MARU_RUNTIME_DIR="/mine"))
    assert not named(process(*_GOOD, MARU_SERVER=here))
    assert not named(process(*_GOOD, MARU_SERVER=f"ipc:///standby,{here}"))
    assert not named(process(*_GOOD, MARU_RUNTIME_DIR="/mine"), "ipc:///mine/server.sock")
    assert not named(process(*_GOOD, "--hicache-storage-backend-extra-config", "@file", MARU_SERVER="ipc:///elsewhere"))


@pytest.mark.skipif(not os.path.isdir("/sys/devices/system/node/node0"), reason="this machine has no NUMA nodes")
def test_a_pool_that_is_bound_to_a_node(tmp_path: Path) -> None:
    name = f"maru-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    with running_server(tmp_path, pool=f"shm://{name}?numa=0") as server:
        session = engine(server)
        (finding,) = diagnose(server)["numa"]
        assert (finding["level"], "comes from NUMA node 0" in finding["text"]) == (OK, True)
        session.close()
    finding = checks_host.check_binding(parse_pool_uri("shm://a?numa=1"), None)
    assert (finding.level, "numa=1" in finding.text, "bound to no node" in finding.text) == (WARN, True, True)


def test_where_the_pools_memory_lies(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        session = engine(server)
        uri = parse_pool_uri(server.pool)
        with PoolMemory.attach(uri, session.connect().pool_uuid) as memory:
            memory.data[: 1 << 20] = 1
            placed = checks_host.memory_of("self", uri.path)
            # The kernel's own word for this very process.
            assert sum(placed.values()) >= 1 << 20
            here = socket.gethostname()
            (row,) = [row for row in rows(session, "sessions") if row["pid"] == os.getpid()]
            near = _machine(tmp_path / "near", {0: "0-1023", 1: "2000"})
            (finding,) = checks_host.check_numa([row], uri.path, here, nodes=near)
            assert (finding.level, "near the CPUs of the 1 engines" in finding.text) == (OK, True)
            far = _machine(tmp_path / "far", {0: "2000", 1: "0-1023"})
            (finding,) = checks_host.check_numa([row], uri.path, here, nodes=far)
            assert (finding.level, f"pid {os.getpid()}" in finding.text, "numactl" in finding.cure) == (
                WARN,
                True,
                True,
            )
            (finding,) = checks_host.check_numa([row], uri.path, "elsewhere", nodes=far)
            assert (finding.level, "no engine" in finding.text) == (OK, True)
            (finding,) = checks_host.check_numa([row], uri.path, here, nodes=_machine(tmp_path / "one", {0: "0-1023"}))
            assert "one NUMA node" in finding.text
        session.close()


def _machine(root: Path, cpus: dict[int, str]) -> Path:
    """What sysfs says of a machine with these CPUs on its nodes."""
    for node, text in cpus.items():
        (root / f"node{node}").mkdir(parents=True)
        (root / f"node{node}" / "cpulist").write_text(text + "\n")
    (root / "online").write_text(",".join(map(str, cpus)) + "\n")
    return root


def test_limits_of_pinning_matter_where_something_pins(tmp_path: Path) -> None:
    import resource

    few = 65536
    assert "no GPU" in checks_host.check_pinning(root=tmp_path, limit=few).text
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    finding = checks_host.check_pinning(root=tmp_path, limit=few)
    assert (finding.level, "64.0 KiB" in finding.text, "LimitMEMLOCK" in finding.cure) == (OK, True, True)
    (tmp_path / "sys" / "class" / "infiniband" / "mlx5_0").mkdir(parents=True)
    finding = checks_host.check_pinning(root=tmp_path, limit=few)
    assert (finding.level, "mlx5_0" in finding.text, "LimitMEMLOCK" in finding.cure) == (WARN, True, True)
    assert checks_host.check_pinning(root=tmp_path, limit=resource.RLIM_INFINITY).level == OK


def test_lists_of_the_kernel() -> None:
    assert checks_host.parse_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert checks_host.parse_list("\n") == set()
