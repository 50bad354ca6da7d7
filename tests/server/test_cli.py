"""``maru-server`` as an operator runs it: real processes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from maru_core.session import Session
from tests.forked import run_forked
from tests.server.live import store
from tests.support import ServerProcess, await_condition, impatient, namespace, running_server


def run(*options: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """``python -m maru_server`` to its end."""
    return run_forked(("-m", "maru_server"), options, {**os.environ, **(environ or {})})


def assert_one_line(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("maru-server: error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    for part in parts:
        assert part in done.stderr


def test_help_tells_an_operator_what_to_give() -> None:
    done = run("--help")
    assert done.returncode == 0
    for option in ("--pool", "--bind", "--size", "--format", "--insecure", "--high-watermark", "--low-watermark", "--lease",
                   "--quarantine", "--standby", "--lock", "--lock-ttl", "--idle-exit", "--unlink-on-exit", "--ready-fd", "--log-level", "--version"):  # fmt: skip
        assert option in done.stdout
    for word in ("shm://", "dax:///", "ipc:///", "8G", "IS LOST", "SIGTERM", "Example:"):
        assert word in " ".join(done.stdout.split())


def test_version() -> None:
    command = [sys.executable, "-m", "maru_server", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert (done.returncode, done.stdout) == (0, "maru-server 0.1.0\n")
    assert run("--version").stdout == done.stdout


def test_the_installed_command_is_the_same() -> None:
    command = Path(sys.executable).parent / "maru-server"
    if not command.exists():
        pytest.skip("the project is not installed here (pip install -e .)")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=180, check=False)
    assert done.stdout.startswith("maru-server ")


def test_neither_torch_nor_an_engine_is_imported() -> None:
    code = (
        "import sys, maru_server.cli; "
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'sglang', 'vllm', 'maru_sglang', 'maru_bench')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--pool", "shm://x", "--bind", "tcp://0.0.0.0:1"], ["--bind is 'tcp://0.0.0.0:1'", "--insecure"]),
        (["--pool", "shm://x", "--bind", "nonsense"], ["--bind is 'nonsense'", "give ipc:///"]),
        (["--pool", "nonsense://x", "--bind", "ipc:///tmp/x"], ["nonsense"]),
        (["--pool", "shm://x?colour=red", "--bind", "ipc:///tmp/x"], ["colour"]),
        (["--pool", "file:///proc/nothing/pool", "--size", "64M", "--bind", "ipc:///tmp/x"], ["/proc/nothing"]),
        (["--pool", "dax:///dev/null", "--bind", "ipc:///tmp/x"], ["/dev/null"]),
        (["--pool", "shm://x", "--size", "big", "--bind", "ipc:///tmp/x"], ["--size", "big", "8G"]),
        (["--pool", "shm://maru-cli-none", "--bind", "ipc:///tmp/x"], ["size"]),
        (["--pool", "shm://maru-cli-small", "--size", "64K", "--bind", "ipc:///tmp/x"], ["65536 bytes", "at least"]),
        (["--pool", "shm://x", "--bind", "ipc:///tmp/x", "--log-level", "loud"], ["--log-level is 'loud'", "debug"]),
        (["--pool", "shm://x", "--bind", "ipc:///tmp/x", "--policy", "mru"], ["--policy is 'mru'", "lru, lfu-age"]),
        (["--pool", "shm://x", "--bind", "ipc:///tmp/x", "--quota", "red=2"], ["--quota is 'red=2'", "search=0.3"]),
        (["--pool", "shm://x", "--bind", "ipc:///tmp/x", "--pin-share", "1.5"], ["--pin-share is 1.5", "0 to 1"]),
        (["--pool", "shm://x", "--bind", "ipc:///tmp/x", "--low-watermark", "0.99"], ["--low-watermark is 0.99"]),
        (["--pool", "shm://x", "--bind", "ipc:///tmp/x", "--high-watermark", "1.5"], ["--high-watermark 1.5"]),
        (["--pool", "shm://x", "--bind", "ipc:///tmp/x", "--lease", "0"], ["--lease is 0"]),
        (["--pool", "shm://x", "--bind", "ipc:///tmp/x", "--lease", "nan"], ["--lease is nan"]),
        (["--pool", "shm://x", "--bind", "ipc:///tmp/x", "--quarantine", "0"], ["--quarantine is 0"]),
        (["--pool", "shm://x", "--bind", "ipc:///tmp/x", "--hold-share", "1.5"], ["--hold-share is 1.5", "0 to 1"]),
        (["--pool", "shm://x", "--bind", "ipc:///tmp/x", "--max-hold", "0"], ["--max-hold is 0", "above 0"]),
        (["--pool", "shm://x", "--bind", "ipc:///tmp/x", "--idle-exit", "0"], ["--idle-exit is 0"]),
        (["--pool", "shm://x", "--bind", "ipc:///tmp/x", "--ready-fd", "777"], ["--ready-fd is 777"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(options: list[str], parts: list[str]) -> None:
    assert_one_line(run(*options), *parts)
    assert not Path("/dev/shm/x").exists(), "a pool was made for a server that never ran"


def test_a_wrong_variable_is_one_line_too() -> None:
    done = run("--pool", "shm://x", "--bind", "ipc:///tmp/x", environ={"MARU_LOG_LEVEL": "loud"})
    assert_one_line(done, "MARU_LOG_LEVEL is 'loud'")


def test_what_is_missing_or_unknown_is_said() -> None:
    for options, word in ((["--bind", "ipc:///tmp/x"], "--pool"), (["--pool", "shm://x", "--bimd", "y"], "--bimd")):
        done = run(*options)
        assert done.returncode == 2
        assert word in done.stderr
        assert "Traceback" not in done.stderr


def test_a_file_that_holds_something_else_is_refused_and_untouched(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    data = os.urandom(4 << 20)
    path.write_bytes(data)
    assert_one_line(run("--pool", f"file://{path}", "--bind", f"ipc://{tmp_path}/s"), str(path), "--format")
    assert path.read_bytes() == data


def test_the_second_server_of_a_pool_names_the_first(tmp_path: Path) -> None:
    with running_server(tmp_path) as first:
        assert first.process is not None
        done = run("--pool", first.pool, "--bind", f"ipc://{tmp_path}/second.sock")
        assert_one_line(done, f"pid {first.process.pid}", first.endpoint)
        # Also on the same endpoint: the first one's socket is not taken away from it.
        done = run("--pool", first.pool, "--bind", first.endpoint)
        assert_one_line(done, f"pid {first.process.pid}", first.endpoint)
        session = Session(first.endpoint, name="test", timeout_s=60)
        session.stats()
        session.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly_and_the_pool_stays(number: signal.Signals, tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, pool=f"file://{tmp_path}/pool", forked=False).start()
    session = Session(server.endpoint, name="test", timeout_s=60)
    keys = store(session, session.open_namespace(namespace().record()), 10)
    with impatient(session):
        server.signal(number)
        assert server._reap() == 0
        assert "Traceback" not in server.log.read_text()
        assert not Path(server.endpoint.removeprefix("ipc://")).exists()
        server.size = ""  # a pool that is there needs none
        server.start()
        await_condition(lambda: session.connected and session.epoch == 2, "the client finds the next server")
    again = session.open_namespace(namespace().record())
    assert session.match(again, ["kv"], 0, keys).pages == 10
    session.close()
    assert server.stop() == 0


def test_a_server_without_clients_ends_and_takes_its_pool_along(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, "--idle-exit", "0.3", "--unlink-on-exit").start()
    path = Path("/dev/shm") / server.pool.removeprefix("shm://")
    assert f"serving {server.pool}" in server.log.read_text()
    assert server.process is not None
    assert server.process.wait(120) == 0
    assert not path.exists()
    assert not Path(server.endpoint.removeprefix("ipc://")).exists()
    server.process = None


def test_it_says_when_it_is_ready_on_a_port_of_its_choice(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "maru_server", "--pool", f"file://{tmp_path}/pool?size=64M", "--bind", "tcp://127.0.0.1:*",
         "--ready-fd", str(write_end), "--log-level", "warning"],
        pass_fds=[write_end], stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(write_end)
    assert select.select([read_end], [], [], 180)[0]
    with os.fdopen(read_end) as pipe:
        line = json.loads(pipe.readline())
        assert pipe.read() == "", "the descriptor is closed after the line"
    assert line["pool"].startswith(f"file://{tmp_path}/pool")
    session = Session(line["endpoint"], name="test", timeout_s=60)
    session.stats()
    session.close()
    process.terminate()
    assert process.communicate(timeout=180)[1] == ""
    assert process.returncode == 0


def test_options_reach_the_state(tmp_path: Path) -> None:
    with running_server(tmp_path, "--lease", "4", "--quarantine", "7") as server:
        session = Session(server.endpoint, name="test", timeout_s=60)
        welcome = session.connect()
        assert (welcome.lease_s, welcome.heartbeat_s) == (4.0, 1.0)
        assert welcome.pool_uri.startswith(server.pool)
        session.close()
