"""Processes of experiments: started, watched, and stopped with all that they started."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from maru_bench.processes import ManagedProcess
from maru_bench.servers import (
    Answer,
    MaruServer,
    ServerFailedError,
    SGLangOptions,
    SGLangServer,
)
from tests.support import await_condition


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# A process with a child; both ignore SIGTERM.
_STUBBORN = (
    "import signal, subprocess, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import signal, time; "
    'signal.signal(signal.SIGTERM, signal.SIG_IGN); print("deaf", flush=True); time.sleep(600)\'])\n'
    "print('child', child.pid, flush=True)\n"
    "time.sleep(600)\n"
)


@pytest.fixture
def stubborn(tmp_path: Path) -> Iterator[ManagedProcess]:
    process = ManagedProcess("stubborn", [sys.executable, "-c", _STUBBORN], tmp_path / "log")
    yield process
    process.kill()


def _child(process: ManagedProcess) -> int:
    await_condition(lambda: "deaf" in process.tail() and "child" in process.tail(), "the child is up")
    return int(next(line.split()[1] for line in process.tail().splitlines() if line.startswith("child")))


def test_stop_ends_the_children_too_though_they_ignore_sigterm(stubborn: ManagedProcess) -> None:
    child = _child(stubborn)
    assert stubborn.stop(grace_s=0.1) == -signal.SIGKILL
    await_condition(lambda: not _alive(child), "the child is gone")
    assert not stubborn.running
    assert stubborn.stop() == -signal.SIGKILL  # again


def test_children_that_outlive_their_parent_are_ended(tmp_path: Path) -> None:
    source = _STUBBORN.replace("time.sleep(600)\n", "sys.exit(3)\n")
    process = ManagedProcess("short", [sys.executable, "-c", source], tmp_path / "log")
    child = _child(process)
    await_condition(lambda: not process.running, "the parent has ended")
    assert _alive(child)
    assert process.stop() == 3
    await_condition(lambda: not _alive(child), "the child is gone")


def test_a_process_dies_with_the_one_that_started_it(tmp_path: Path) -> None:
    source = (
        "import pathlib, sys, time\n"
        "from maru_bench.processes import ManagedProcess\n"
        f"p = ManagedProcess('sleeper', [sys.executable, '-c', 'import time; time.sleep(600)'], pathlib.Path({str(tmp_path / 'log')!r}))\n"
        "print(p.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert _alive(child)
    parent.kill()
    parent.wait()
    await_condition(lambda: not _alive(child), "the child followed its parent")


def test_a_failure_names_the_process_its_status_and_the_end_of_its_log(tmp_path: Path) -> None:
    source = "import sys; print('\\n'.join(f'line {i}' for i in range(100))); sys.exit(7)"
    process = ManagedProcess("talker", [sys.executable, "-c", source], tmp_path / "log")
    await_condition(lambda: not process.running, "it ended")
    text = str(process.failure("did not start"))
    assert "talker did not start (it ended with status 7)" in text
    assert str(tmp_path / "log") in text
    assert "line 99" in text
    assert "line 10\n" not in text
    process.stop()


def test_an_interrupt_while_it_starts_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there already, and nobody who could stop it knows of it yet. Other threads may be the ones that get the signal."""
    started: list[int] = []
    over = threading.Event()
    others = [threading.Thread(target=over.wait) for _ in range(8)]
    for thread in others:
        thread.start()

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            started.append(self.pid)
            signal.pthread_kill(others[0].ident or 0, signal.SIGINT)
            time.sleep(0.05)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", Interrupted)
            with pytest.raises(KeyboardInterrupt):
                ManagedProcess("sleeper", ["sleep", "600"], tmp_path / "log")
    finally:
        signal.signal(signal.SIGINT, before)
        over.set()
    [pid] = started
    assert not Path(f"/proc/{pid}").exists()
    # What is put off here is not put off there.
    other = ManagedProcess("sleeper", ["sleep", "600"], tmp_path / "log")
    status = Path(f"/proc/{other.pid}/status").read_text()
    assert "SigBlk:\t0000000000000000\n" in status
    assert other.stop() == -signal.SIGTERM


def test_a_program_that_does_not_exist_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ServerFailedError, match="/nowhere/python"):
        ManagedProcess("ghost", ["/nowhere/python"], tmp_path / "log")


def test_maru_server_starts_stops_and_leaves_nothing(tmp_path: Path) -> None:
    with MaruServer(tmp_path, size="64M") as server:
        pool = Path("/dev/shm", server.pool_name)
        assert pool.exists()
        assert server.started_in_s > 0
        assert server.process.running
    assert not pool.exists()
    assert not server.process.running


def test_a_killed_maru_server_leaves_no_pool_behind(tmp_path: Path) -> None:
    server = MaruServer(tmp_path, size="64M")
    server.start()
    server.kill()
    assert not Path("/dev/shm", server.pool_name).exists()
    assert server.process.status == -signal.SIGKILL


def test_a_maru_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    server = MaruServer(tmp_path, size="1")
    with pytest.raises(ServerFailedError, match="maru-server did not start"):
        server.start()
    assert not server.process.running


def test_shared_memory_that_a_killed_engine_leaves_is_removed(tmp_path: Path) -> None:
    names = [f"{prefix}-{os.getpid()}" for prefix in ("sgl_shm_test", "sglang_loads_test", "maru-not-sglang")]
    source = (
        "import mmap, os, sys, time\n"
        "maps = []\n"
        f"for name in {names}:\n"
        "    file = open('/dev/shm/' + name, 'w+b')\n"
        "    file.truncate(4096)\n"
        "    maps.append(mmap.mmap(file.fileno(), 4096))\n"
        "if not os.fork():\n"
        "    print('mapped', flush=True)\n"
        "time.sleep(600)\n"
    )
    server = SGLangServer("server A", SGLangOptions(python=sys.executable, model="m"), tmp_path / "log")
    server._process = ManagedProcess("server A", [sys.executable, "-c", source], tmp_path / "log")
    try:
        await_condition(lambda: "mapped" in server.process.tail(), "the memory is mapped")
        server.stop()
        assert [name for name in names if Path("/dev/shm", name).exists()] == [names[2]]
    finally:
        server.stop()
        for name in names:
            Path("/dev/shm", name).unlink(missing_ok=True)


# ------------------------------------------------------------------ asking an SGLang server

_META = {"prompt_tokens": 400, "cached_tokens": 384, "cached_tokens_details": {"device": 0, "host": 0, "storage": 384}}
_EVENTS = [
    {"output_ids": [], "meta_info": {**_META, "output_token_logprobs": []}},
    {"output_ids": [5], "meta_info": {**_META, "output_token_logprobs": [[-0.5, 5, None]]}},
    {"output_ids": [5, 6], "meta_info": {**_META, "output_token_logprobs": [[-0.5, 5, None], [-0.25, 6, None]]}},
]


class _Handler(http.server.BaseHTTPRequestHandler):
    """Speaks like SGLang's HTTP server where this client listens."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["input_ids"] == [400]:
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b"no such thing")
            return
        self.send_response(200)
        self.end_headers()
        if body["input_ids"] == [500]:
            self.wfile.write(b'data: {"error": {"message": "aborted"}}\n\n')
        for event in _EVENTS[: 1 if body["input_ids"] == [1] else None]:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        if body["input_ids"] != [2]:
            self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def sglang(tmp_path: Path) -> Iterator[SGLangServer]:
    """The client of a server whose process is an idle one and whose port is answered by a thread here."""
    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=listener.serve_forever)
    thread.start()
    server = SGLangServer("server A", SGLangOptions(python=sys.executable, model="m"), tmp_path / "log")
    server.port = listener.server_port
    server._process = ManagedProcess("server A", ["sleep", "600"], tmp_path / "log")
    yield server
    server.stop()
    listener.shutdown()
    listener.server_close()
    thread.join()


def test_an_answer_is_the_last_event_and_the_time_of_the_first_token(sglang: SGLangServer) -> None:
    answer = sglang.generate([3], 2)
    assert 0 < answer.ttft_s <= answer.total_s
    assert answer == Answer(
        prompt_tokens=400,
        cached_tokens=384,
        device_tokens=0,
        host_tokens=0,
        storage_tokens=384,
        output_ids=[5, 6],
        logprobs=[-0.5, -0.25],
        ttft_s=answer.ttft_s,
        total_s=answer.total_s,
    )
    assert answer.computed_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "what"), [(400, "HTTP 400: no such thing"), (500, "aborted"), (1, "answered without a token")]
)
def test_a_request_that_fails_is_an_error_that_says_how(sglang: SGLangServer, prompt: int, what: str) -> None:
    with pytest.raises(ServerFailedError, match=what):
        sglang.generate([prompt], 2)


def test_a_server_that_ended_while_it_starts_is_an_error(sglang: SGLangServer) -> None:
    os.kill(sglang.process.pid, signal.SIGKILL)
    await_condition(lambda: not sglang.process.running, "it ended")
    with pytest.raises(ServerFailedError, match="ended while it started"):
        sglang.wait_ready()


def test_the_command_line_has_the_backend_and_its_extra_config() -> None:
    options = SGLangOptions(
        python="py", model="m", extra_config={"server": "ipc:///s"}, arguments=("--page-size", "64")
    )
    argv = options.command(1234)
    assert argv[argv.index("--hicache-storage-backend") + 1] == "maru"
    assert json.loads(argv[argv.index("--hicache-storage-backend-extra-config") + 1]) == {"server": "ipc:///s"}
    assert argv[-2:] == ["--page-size", "64"]
    assert "--enable-hierarchical-cache" not in SGLangOptions(python="py", model="m", backend=None).command(1)
