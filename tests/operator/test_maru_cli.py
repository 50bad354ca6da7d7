"""The command ``maru``, but for ``doctor``: real processes against real servers."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from operating import asked, asked_json, assert_unusable, engine, maru, maru_process

from forked import run_forked
from maru_core.embedded import Starter
from maru_core.keys import ClientKeys
from maru_core.session import Session
from maru_core.settings import Settings
from support import ServerProcess, await_condition, hashes, namespace, running_server
from tests.server.live import store

LOOKING = ("status", "tree", "namespaces", "sessions", "tenants", "pins", "holds", "top")


@pytest.fixture
def filled(server: ServerProcess) -> Iterator[tuple[Session, int, bytes]]:
    """An engine with a namespace of 20 pages in one chain and 5 in another."""
    session = engine(server)
    number = session.open_namespace(namespace(model="org/toy", tag=os.urandom(4).hex()).record())
    keys = store(session, number, 20)
    store(session, number, 5, seed=2)
    yield session, number, keys
    session.clear(number)
    session.close()


# ---------------------------------------------------------------- to look


def test_help_names_every_command_and_each_has_its_own() -> None:
    text = asked("--help")
    for command in (*LOOKING, "pin", "unpin", "evict", "delete", "clear", "doctor"):
        assert f"\n  {command} " in text
    for command in (*LOOKING, "pin", "unpin", "evict", "delete", "clear", "doctor"):
        own = asked(command, "-h")
        for option in ("--server", "--json"):
            assert option in own, command


def test_status_is_one_screen(server: ServerProcess, filled: Any) -> None:
    session, number, keys = filled
    session.match(number, ["kv"], 0, keys + hashes(5, seed=9))
    text = asked("status", server=server)
    assert len(text.splitlines()) <= 24
    for part in (server.endpoint, server.pool, "60.0 MiB in 30 extents", "25 objects", "hits", "stores"):
        assert part in text
    found = asked_json("status", server=server)
    assert set(found) == {"server", "protocol", "pool_uuid", "answer_s", "stats", "derived", "pools", "reaches"}
    assert found["stats"]["pages"] == 25
    assert found["derived"]["capacity_bytes"] == 60 << 20
    assert 0 < found["derived"]["hit_share"] < 1
    assert len(found["pool_uuid"]) == 32


def test_tree_shows_what_the_prefixes_hold(server: ServerProcess, filled: Any) -> None:
    session, number, keys = filled
    session.touch(number, keys)
    first, last = keys[:32].hex(), keys[-32:].hex()
    text = asked("tree", "-n", str(number), server=server)
    assert f"namespace {number}" in text
    assert "org/toy" in text
    assert f"{first[:12]} … {last[:12]}" in text
    assert "pages 0-19" in text

    def first_of_all() -> Any:
        found = asked_json("tree", "--namespace", str(number), "--limit", "1", server=server)["nodes"]
        assert [node["kind"] for node in found] == ["namespace", "run", "other"]
        assert sum(node["pages"] for node in found) == 25
        return found[1]["pages"]

    # A touch is sent when the session comes to it.
    await_condition(lambda: first_of_all() == 20, "the chain whose pages were used last comes first")
    store(session, number, 2, seed=3)
    found = asked_json("tree", "-n", str(number), "--limit", "1", server=server)["nodes"]
    assert found[1]["pages"] == 2
    found = asked_json("tree", "-n", str(number), "--limit", "1", "--sort", "bytes", server=server)["nodes"]
    assert found[1]["pages"] == 20


def test_namespaces_are_listed_shown_and_compared(server: ServerProcess, filled: Any) -> None:
    session, number, _ = filled
    other = session.open_namespace(namespace(model="org/toy", kv_dtype="fp8_e4m3", page_tokens=64).record())
    text = asked("namespaces", server=server)
    assert text.splitlines()[0].split()[:4] == ["N", "model", "dtype", "page"]
    assert [line for line in text.splitlines() if "fp8_e4m3" in line and "never" in line]
    whole = asked("namespaces", str(number), server=server)
    for part in ("hash_scheme", "bfloat16", "25 pages", "digest"):
        assert part in whole
    rows = asked_json("namespaces", server=server)["namespaces"]
    assert {row["namespace"] for row in rows} >= {number, other}
    difference = asked("namespaces", "--diff", str(number), str(other), server=server)
    assert [line.split() for line in difference.splitlines()[1:3]] == [
        ["kv_dtype", "bfloat16", "fp8_e4m3"], ["page_tokens", "16", "64"],
    ]  # fmt: skip
    found = asked_json("namespaces", "--diff", str(number), str(other), server=server)["differences"]
    assert set(found) == {"kv_dtype", "page_tokens", "tag"}
    assert found["page_tokens"] == [16, 64]
    assert "share pages" in asked("namespaces", "--diff", str(number), str(number), server=server)


def test_sessions_and_tenants_are_listed(server: ServerProcess, filled: Any) -> None:
    session, number, _ = filled
    session.reserve(number, "kv", 0, 1, bytes(32), hashes(3, seed=5), 1000)
    rows = asked_json("sessions", server=server)["sessions"]
    mine = next(row for row in rows if row["name"] == "engine tp0/1")
    assert (mine["pid"], mine["slots_reserved"], mine["silent"], mine["you"]) == (os.getpid(), 3, False, False)
    assert [row["name"] for row in rows if row["you"]] == ["maru sessions"]
    text = asked("sessions", server=server)
    assert "engine tp0/1" in text
    assert "this command" in text
    (tenant,) = asked_json("tenants", server=server)["tenants"]
    assert tenant["pages"] >= 25
    assert len(asked("tenants", server=server).splitlines()) == 2


@pytest.mark.parametrize("command", LOOKING)
def test_every_list_is_also_json_and_the_flag_may_stand_anywhere(
    server: ServerProcess, filled: Any, command: str
) -> None:
    arguments = ["--interval", "0.1"] if command == "top" else []
    after = json.loads(asked(command, *arguments, "--json", server=server))
    before = json.loads(asked("--json", "--server", server.endpoint, command, *arguments))
    assert set(after) == set(before)
    named = json.loads(
        asked(command, *arguments, "--server", server.endpoint, "--json", environ={"MARU_SERVER": "ipc:///nowhere"})
    )
    assert set(named) == set(after), "an option comes before the environment"


def test_an_empty_server_has_nothing_to_show(tmp_path: Path) -> None:
    with running_server(tmp_path) as empty:
        for command, part in (
            ("tree", "nothing is stored"), ("namespaces", "no engine has opened"), ("pins", "nothing is pinned"), ("holds", "nothing is held"),
        ):  # fmt: skip
            assert part in asked(command, server=empty)
        assert "-" in asked("status", server=empty)


# ---------------------------------------------------------------- top


def test_top_prints_once_where_there_is_no_terminal(server: ServerProcess, filled: Any) -> None:
    text = asked("top", "--interval", "0.1", server=server)
    assert "\x1b" not in text
    assert text.count("per second") == 1
    assert "org/toy" in text
    found = asked_json("top", "--interval", "0.1", server=server)
    assert found["rates"]["committed"] == 0
    assert found["seconds"] > 0


def as_in_a_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # Tests that run in the background have it ignored.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("key", [b"q", b"\x03"])
def test_top_is_live_in_a_terminal_until_a_key(server: ServerProcess, filled: Any, key: bytes) -> None:
    session, number, keys = filled
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    process = subprocess.Popen(
        [sys.executable, "-m", "maru_server.operator", "--server", server.endpoint, "top", "--interval", "0.1"],
        stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env={**os.environ, "TERM": "xterm", "COLUMNS": "140", "LINES": "40"},
        preexec_fn=as_in_a_terminal,
    )  # fmt: skip
    try:
        seen = b""
        deadline = time.monotonic() + 180
        screens = 0
        while screens < 3 and time.monotonic() < deadline:
            session.match(number, ["kv"], 0, keys)
            if select.select([master], [], [], 0.1)[0]:
                seen += os.read(master, 65536)
                screens = seen.count(b"per second")
        assert screens >= 3, seen[-2000:]
        assert b"q: quit" in seen
        os.write(master, key)
        while process.poll() is None and time.monotonic() < deadline:
            if select.select([master], [], [], 0.1)[0]:
                os.read(master, 65536)
        assert process.wait(120) == 0
        assert termios.tcgetattr(slave) == before, "the terminal is as it was"
    finally:
        process.kill()
        process.wait()
        os.close(master)
        os.close(slave)


# ---------------------------------------------------------------- to change


def test_delete_takes_a_page_and_what_continues_it(server: ServerProcess, filled: Any) -> None:
    session, number, keys = filled
    page = keys[32 * 15 : 32 * 16]
    found = asked_json("delete", page.hex(), server=server)
    assert found == {"namespace": number, "page": page.hex(), "deleted_objects": 5}
    assert session.match(number, ["kv"], 0, keys).pages == 15
    assert_unusable(maru("delete", page.hex(), server=server), page.hex(), "it may be gone")
    # The first digits are enough for what the tree shows.
    text = asked("delete", keys[:32].hex()[:8].upper(), "-n", str(number), server=server)
    assert "deleted 15 objects" in text
    assert session.match(number, ["kv"], 0, keys).pages == 0


def test_a_pin_keeps_a_prefix_until_it_is_taken_back(server: ServerProcess, filled: Any) -> None:
    session, number, keys = filled
    page = keys[32 * 9 : 32 * 10]
    pinned = asked_json("pin", page.hex(), server=server)
    assert (pinned["namespace"], pinned["page"]) == (number, page.hex())
    assert pinned["pinned_bytes"] >= 10 * 1000
    (row,) = asked_json("pins", server=server)["pins"]
    assert (row["page"], row["pages"], row["namespace"]) == (page.hex(), 10, number)
    assert page.hex() in asked("pins", "-n", str(number), server=server)
    assert "pinned or held" in asked("tree", "-n", str(number), server=server)
    # Everything that may go goes: ten pages stay.
    assert asked_json("evict", "1000", "-n", str(number), server=server) == {"evicted_pages": 15}
    assert "no other page may go" in asked("evict", "1000", "-n", str(number), server=server)
    assert session.match(number, ["kv"], 0, keys).pages == 10
    # The first digits of a pinned page are enough.
    assert asked_json("unpin", page.hex()[:10], server=server)["pinned_bytes"] == 0
    assert asked_json("pins", server=server)["pins"] == []
    assert asked_json("evict", "4", server=server) == {"evicted_pages": 4}


def test_a_pin_of_what_is_not_there_is_refused(server: ServerProcess, filled: Any) -> None:
    assert_unusable(maru("pin", "ab" * 32, server=server), "has no page")
    assert_unusable(maru("unpin", "ab" * 32, server=server), "has no page")


def test_a_page_of_two_namespaces_needs_one_named(server: ServerProcess, filled: Any) -> None:
    session, number, keys = filled
    other = session.open_namespace(namespace(tag="twin").record())
    assert store(session, other, 20) == keys
    assert_unusable(maru("delete", keys[:32].hex(), server=server), "names 2 pages", "--namespace")
    assert_unusable(maru("delete", keys[:32].hex()[:10], server=server), "names 2 pages", "--namespace")
    assert asked_json("delete", keys[:32].hex(), "-n", str(other), server=server)["deleted_objects"] == 20
    assert session.match(number, ["kv"], 0, keys).pages == 20


def test_clear_asks_first(server: ServerProcess, filled: Any) -> None:
    session, number, keys = filled
    refused = maru("clear", "-n", str(number), server=server)
    assert_unusable(refused, "would remove 25 pages", "--yes")
    assert session.match(number, ["kv"], 0, keys).pages == 20
    assert asked_json("clear", "-n", str(number), "--yes", server=server) == {
        "namespace": number,
        "deleted_objects": 25,
    }
    assert session.match(number, ["kv"], 0, keys).pages == 0


@pytest.mark.parametrize(("answer", "code", "left"), [(b"n\n", 1, 20), (b"y\n", 0, 0)])
def test_clear_does_what_is_answered(server: ServerProcess, filled: Any, answer: bytes, code: int, left: int) -> None:
    session, number, keys = filled
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "maru_server.operator", "--server", server.endpoint, "clear", "-n", str(number)],
        stdin=slave, stdout=slave, stderr=slave,
    )  # fmt: skip
    os.close(slave)
    try:
        seen = b""
        while b"Remove 25 pages" not in seen or b"[y/N]" not in seen:
            assert select.select([master], [], [], 180)[0], seen
            seen += os.read(master, 65536)
        os.write(master, answer)
        assert process.wait(180) == code
        assert session.match(number, ["kv"], 0, keys).pages == left
    finally:
        process.kill()
        process.wait()
        os.close(master)


# ---------------------------------------------------------------- names that clients chose


def test_what_clients_call_themselves_is_text_and_nothing_else(server: ServerProcess) -> None:
    evil = "\x1b[2J\x07[bold]a[/nothing]:smile: \r\n"
    session = engine(server, evil)
    number = session.open_namespace(namespace(model=evil, tag="\x9b31m").record())
    store(session, number, 3)
    session.reserve(number, "kv", 0, 1, bytes(32), hashes(3, seed=5), 1000)
    for command in (*LOOKING, "doctor"):
        arguments = ["--interval", "0.1"] if command == "top" else []
        done = maru(command, *arguments, server=server)
        assert done.stderr == "", command
        assert not set(done.stdout.replace("\n", "")) & {chr(i) for i in (*range(32), *range(127, 160))}, command
        if command in ("tree", "namespaces", "sessions"):
            assert "[bold]a[/nothing]:smile:" in done.stdout, command
    assert "[bold]a[/nothing]:smile:" in asked("namespaces", str(number), server=server)
    assert "[bold]a[/nothing]:smile:" in asked(
        "namespaces", "--diff", str(number), str(session.open_namespace(namespace().record())), server=server
    )
    assert any(row["name"] == evil for row in asked_json("sessions", server=server)["sessions"]), "JSON has it as it is"
    session.clear(number)
    session.close()


# ---------------------------------------------------------------- a process of its own


def test_as_a_process(server: ServerProcess, filled: Any) -> None:
    done = maru_process("status", "--json", server=server)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["server"] == server.endpoint
    assert_unusable(maru_process("delete", "xyz", server=server), "'xyz'")


def test_a_reader_that_has_enough_is_no_error(server: ServerProcess, filled: Any) -> None:
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m maru_server.operator --server {server.endpoint} tree --json | true"],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.stderr == ""


# ---------------------------------------------------------------- keys


def test_with_keys_operators_do_all_and_others_see_their_own(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    for name, more in (("server", ()), ("op", ("--operator",)), ("eng", ("--tenant", "search"))):
        named = ("--name", name) if name != "server" else ()
        done = run_forked(("-m", "maru_server"), ("keygen", "--out", str(keys), *named, *more))
        assert done.returncode == 0, done.stderr
    options = ("--keys", f"{keys}/server.key", "--clients", f"{keys}/clients.toml", "--quota", "search=0.5")
    with running_server(tmp_path, *options) as server:

        def as_(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
            return maru(
                "--client-key",
                f"{keys}/{name}.key",
                "--server-key",
                f"{keys}/server.pub",
                "--json",
                *arguments,
                server=server,
            )

        mine = {"MARU_CLIENT_KEY": f"{keys}/eng.key", "MARU_SERVER_KEY": f"{keys}/server.pub"}
        own = ClientKeys.find(Settings.from_environment(mine))
        session = Session(server.endpoint, name="engine", timeout_s=60, keys=own)
        number = session.open_namespace(namespace().record())
        pages = store(session, number, 10)
        assert json.loads(as_("op", "status").stdout)["stats"]["pages"] == 10
        assert_unusable(as_("eng", "status"), "operators only", "--client-key")
        (tenant,) = json.loads(as_("eng", "tenants").stdout)["tenants"]
        assert (tenant["tenant"], tenant["quota_bytes"]) == ("search", 30 << 20)
        assert_unusable(as_("eng", "pin", pages[:32].hex()), "operator")
        assert_unusable(as_("eng", "evict", "1"), "operator")
        theirs = Session(
            server.endpoint, name="other", timeout_s=60, keys=ClientKeys.load(f"{keys}/op.key", f"{keys}/server.pub")
        )
        store(theirs, theirs.open_namespace(namespace(tag="other").record()), 5)
        assert json.loads(as_("eng", "clear", "--yes").stdout)["deleted_objects"] == 10, (
            "all means all that is its tenant's"
        )
        assert json.loads(as_("op", "status").stdout)["stats"]["pages"] == 5
        store(session, number, 10)
        theirs.close()
        assert json.loads(as_("op", "pin", pages[:32].hex(), "-n", str(number)).stdout)["pinned_bytes"] > 0
        # Without keys nobody is answered; doctor says what to give.
        assert_unusable(maru("--timeout", "0.5", "status", server=server), "maru doctor")
        done = maru("--timeout", "0.5", "doctor", "--json", server=server)
        assert done.returncode == 1
        assert "MARU_CLIENT_KEY" in next(
            f["cure"] for f in json.loads(done.stdout)["findings"] if f["name"] == "server"
        )
        done = as_("eng", "doctor")
        names = {finding["name"] for finding in json.loads(done.stdout)["findings"]}
        assert "operator" in names
        assert "room" not in names
        session.close()


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["delete", "xyz"], ["'xyz'", "64 hex digits"]),
        (["delete", "abc"], ["'abc'", "64 hex digits"]),
        (["delete", "0" * 65], ["64 hex digits"]),
        (["delete", "ab" * 32], ["has no page", "it may be gone"]),
        (["delete", "abcdef"], ["has no page", "maru tree --limit 4096"]),
        (["tree", "-n", "400"], ["namespace 400", "maru namespaces"]),
        (["delete", "ab" * 32, "-n", "400"], ["namespace 400", "maru namespaces"]),
        (["namespaces", "400"], ["namespace 400", "maru namespaces"]),
        (["namespaces", "--diff", "0", "400"], ["namespace 400", "maru namespaces"]),
        (["clear", "-n", "400", "--yes"], ["namespace 400", "maru namespaces"]),
        (["status", "--server", "http://x"], ["'http://x'", "ipc:///path"]),
    ],
)
def test_what_cannot_be_is_one_line(server: ServerProcess, filled: Any, arguments: list[str], parts: list[str]) -> None:
    assert_unusable(maru(*arguments, server=server), *parts)


def test_usage_errors_are_short_and_have_no_traceback(server: ServerProcess) -> None:
    for arguments, word in (
        (["delete"], "HASH"),
        (["evict", "0"], "PAGES"),
        (["frobnicate"], "frobnicate"),
        (["tree", "--limit", "0"], "--limit"),
    ):
        done = maru(*arguments, server=server)
        assert done.returncode == 2
        assert word in done.stderr
        assert "Traceback" not in done.stderr


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    done = maru("--timeout", "0.3", "status", server=f"ipc://{tmp_path}/nobody.sock")
    assert_unusable(done, "nobody.sock", "maru doctor")
    assert_unusable(maru("status", server="http://x"), "MARU_SERVER is 'http://x'")


def test_with_no_server_named_it_is_the_embedded_one_and_none_is_started(tmp_path: Path) -> None:
    environ = {"MARU_RUNTIME_DIR": str(tmp_path / "run"), "MARU_POOL_SIZE": "64M", "MARU_IDLE_EXIT_S": "5"}
    assert_unusable(maru("status", environ=environ), "no server is named", "--server", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists(), "looking starts nothing and makes nothing"
    starter = Starter(settings=Settings.from_environment(environ))
    starter.ensure()
    assert json.loads(asked("status", "--json", environ=environ))["server"] == starter.endpoint
