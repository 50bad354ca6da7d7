"""The processes that experiments run against: ``maru-server`` and SGLang servers, started, watched, asked and stopped.

Every process gets a session of its own and a log file, dies with its parent, and is stopped by its own process
group and no other. What a server answered is plain data (:class:`Answer`). This module decides nothing about an
experiment.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from maru_core.errors import MaruError

_PR_SET_PDEATHSIG: Final = 1
_libc: Final = ctypes.CDLL(None)
_POLL_S: Final = 0.1
#: How long what a stopped process started may take to clean up, seconds.
_CLEAN_UP_S: Final = 2.0


class ServerFailedError(MaruError):
    """A process that an experiment needs did not start, ended early, or gave no usable answer."""


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    # Otherwise a SIGKILL of the experiment leaves servers of gigabytes behind.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _group_lives(group: int) -> bool:
    """Whether a process of the group still runs (one that has ended and was not waited for does not)."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, in_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(in_group) == group and state not in "ZX":
                return True
    return False


class ManagedProcess:
    """One process with a log file, in a session (and so a process group) of its own.

    Start it from the main thread: the kernel's "parent died" signal follows the thread that started it.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start ``argv``.

        Args:
            name: what people call it.
            argv: program and arguments.
            log: file that gets stdout and stderr.
            env: variables added to this process's own.
            pass_fds: file descriptors the process inherits.

        Raises:
            ServerFailedError: the program does not exist or may not be run.
        """
        self.name = name
        self.argv = list(argv)
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("wb") as out:
                self._popen = subprocess.Popen(
                    self.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(env or {})},
                    pass_fds=tuple(pass_fds),
                    start_new_session=True,
                    preexec_fn=_die_with_parent,
                )
        except OSError as error:
            raise ServerFailedError(f"cannot start {name} ({self.argv[0]}): {error.strerror or error}") from error

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def status(self) -> int | None:
        """Exit status (negative: the signal that ended it), None while it runs. Leaves the process unreaped, so that
        its number, and its group's, stay its own until :meth:`stop`."""
        if self._popen.returncode is not None:
            return self._popen.returncode
        ended = os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    @property
    def running(self) -> bool:
        return self.status is None

    def tail(self, lines: int = 15) -> str:
        """The last lines of the log."""
        try:
            text = self.log.read_bytes()[-64 * 1024 :].decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def failure(self, what: str) -> ServerFailedError:
        """An error about this process that carries the end of its log."""
        state = "still runs" if self.status is None else f"ended with status {self.status}"
        return ServerFailedError(
            f"{self.name} {what} (it {state}); its log is {self.log} and ends with:\n{self.tail()}"
        )

    def signal(self, number: int) -> None:
        """Send a signal to the process and all that it started; nothing after :meth:`stop`."""
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, number)

    def await_end(self, timeout_s: float) -> bool:
        """Wait until the process has ended; False if it still runs after ``timeout_s`` seconds."""
        return self._await(lambda: not self.running, timeout_s)

    @staticmethod
    def _await(condition: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def kill(self) -> None:
        """SIGKILL at once, to the process and what it started."""
        self.stop(grace_s=0.0)

    def stop(self, grace_s: float = 10.0) -> int:
        """SIGTERM, and after ``grace_s`` seconds SIGKILL to what is left of its group. Can be repeated.

        Returns:
            The exit status of the process.
        """
        if grace_s > 0 and self.running:
            self.signal(signal.SIGTERM)
            self.await_end(grace_s)
            # What it started cleans up behind it: Python's resource tracker removes semaphores only if it is let live.
            self._await(lambda: not _group_lives(self._popen.pid), _CLEAN_UP_S)
        self.signal(signal.SIGKILL)
        return self._popen.wait()


# ------------------------------------------------------------------ maru-server


class MaruServer:
    """A real ``maru-server`` of this interpreter with a shared-memory pool of its own. A context manager."""

    def __init__(self, directory: Path, *, size: str, log: Path | None = None, keep_pool: bool = False) -> None:
        """
        Args:
            directory: for its socket; short (a Unix socket's path has at most 107 bytes).
            size: of the pool, "512M".
            log: its log file; None: one in ``directory``.
            keep_pool: leave the pool when the server stops (another one is started on it).
        """
        self.directory = directory
        self.log = log or directory / "maru-server.log"
        self.pool_name = f"maru-bench-{os.getpid()}-{os.urandom(4).hex()}"
        self.pool = f"shm://{self.pool_name}?size={size}"
        self.endpoint = f"ipc://{directory}/maru.sock"
        self.size = size
        self.keep_pool = keep_pool
        self.started_in_s = 0.0
        self._process: ManagedProcess | None = None

    @property
    def process(self) -> ManagedProcess:
        if self._process is None:
            raise ServerFailedError("maru-server was not started: call start() first")
        return self._process

    def start(self, timeout_s: float = 30.0) -> None:
        """Start it and wait until it serves. ``started_in_s`` is then the seconds from exec to "ready".

        Raises:
            ServerFailedError: it ended, or was not ready in ``timeout_s`` seconds.
        """
        read_fd, write_fd = os.pipe()
        argv = [sys.executable, "-m", "maru_server", "--pool", self.pool, "--bind", self.endpoint]
        argv += ["--ready-fd", str(write_fd)]
        if not self.keep_pool:
            argv.append("--unlink-on-exit")
        began = time.perf_counter()
        try:
            self._process = ManagedProcess(
                "maru-server",
                argv,
                self.log,
                env={"PYTHONPATH": python_path()},
                pass_fds=(write_fd,),
            )
        finally:
            os.close(write_fd)
        line = b""
        try:
            while not line.endswith(b"\n"):
                left = began + timeout_s - time.perf_counter()
                if left <= 0 or not select.select([read_fd], [], [], left)[0]:
                    raise self.process.failure(f"was not ready within {timeout_s:g} s")
                chunk = os.read(read_fd, 4096)
                if not chunk:
                    self.process.await_end(2.0)
                    raise self.process.failure("did not start")
                line += chunk
        except BaseException:
            self.kill()
            raise
        finally:
            os.close(read_fd)
        self.started_in_s = time.perf_counter() - began

    def kill(self) -> None:
        """SIGKILL, as a crash. The pool goes too unless it is to be kept: no one else would remove it."""
        if self._process is not None:
            self._process.kill()
        self._unlink()

    def stop(self) -> int:
        """Clean stop; returns the exit status."""
        status = self._process.stop() if self._process is not None else 0
        self._unlink()
        return status

    def _unlink(self) -> None:
        if not self.keep_pool:
            self.remove_pool()

    def remove_pool(self) -> None:
        Path("/dev/shm", self.pool_name).unlink(missing_ok=True)

    def __enter__(self) -> MaruServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """A new directory with a short path, for sockets and logs. Removed in the end, unless a process failed: then its
    log can be read."""
    directory = Path(tempfile.mkdtemp(prefix="maru-"))
    try:
        yield directory
    except ServerFailedError:
        raise
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    shutil.rmtree(directory, ignore_errors=True)


def python_path() -> str:
    """``PYTHONPATH`` with which this interpreter's children find the same ``maru_server`` as this process does."""
    here = str(Path(__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    return f"{here}{os.pathsep}{inherited}" if inherited else here


# ------------------------------------------------------------------ SGLang


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What one request to an SGLang server gave."""

    prompt_tokens: int
    cached_tokens: int
    device_tokens: int
    """Taken from the engine's own GPU (or CPU) cache."""
    host_tokens: int
    """Taken from the engine's own host tier."""
    storage_tokens: int
    """Loaded from the storage backend."""
    output_ids: list[int]
    logprobs: list[float]
    ttft_s: float
    total_s: float

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


class SGLangOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to start an SGLang server. Defaults fit the engine kit's small models on a CPU."""

    python: str
    model: str
    device: str = "cpu"
    backend: str | None = "maru"
    """HiCache storage backend; None leaves the hierarchical cache off."""
    extra_config: dict[str, object] = {}
    page_size: int = 16
    max_total_tokens: int = 4096
    chunk_tokens: int | None = None
    """``--chunked-prefill-size``; None leaves SGLang's default."""
    tensor_parallel: int = 1
    layout: str | None = None
    """``--hicache-mem-layout``."""
    dtype: str = "bfloat16"
    arguments: tuple[str, ...] = ()
    """Passed through, last, so that they win."""
    env: dict[str, str] = {}

    def command(self, port: int) -> list[str]:
        """The command line of a server on ``port`` of the loopback interface."""
        argv = [self.python, "-m", "sglang.launch_server", "--model-path", self.model, "--device", self.device]
        argv += ["--host", "127.0.0.1", "--port", str(port), "--dtype", self.dtype, "--page-size", str(self.page_size)]
        argv += ["--max-total-tokens", str(self.max_total_tokens), "--max-running-requests", "8"]
        argv += ["--enable-cache-report", "--skip-server-warmup", "--skip-tokenizer-init", "--random-seed", "0"]
        if self.device == "cpu":
            argv += ["--attention-backend", "torch_native", "--disable-cuda-graph", "--mem-fraction-static", "0.2"]
            # Without it two idle servers keep two cores busy.
            argv += ["--sleep-on-idle"]
        if self.tensor_parallel > 1:
            argv += ["--tp", str(self.tensor_parallel)]
        if self.chunk_tokens is not None:
            argv += ["--chunked-prefill-size", str(self.chunk_tokens)]
        if self.backend is not None:
            argv += ["--enable-hierarchical-cache", "--hicache-ratio", "2"]
            argv += ["--hicache-storage-prefetch-policy", "wait_complete", "--hicache-storage-backend", self.backend]
            if self.layout is not None:
                argv += ["--hicache-mem-layout", self.layout]
            if self.extra_config:
                argv += ["--hicache-storage-backend-extra-config", json.dumps(self.extra_config)]
        return [*argv, *self.arguments]

    def environment(self) -> dict[str, str]:
        env = dict(self.env)
        if self.device == "cpu":
            env.setdefault("SGLANG_USE_CPU_ENGINE", "1")
            env.setdefault("OMP_NUM_THREADS", "1")
            env.setdefault("CUDA_VISIBLE_DEVICES", "")
            if self.tensor_parallel > 1:
                # Without it every rank takes every core.
                ranks = range(self.tensor_parallel)
                env.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(str(rank) for rank in ranks))
        return env


class SGLangServer:
    """A real SGLang server. A context manager; leaving it stops the server."""

    def __init__(self, name: str, options: SGLangOptions, log: Path) -> None:
        self.name = name
        self.options = options
        self.port = free_port()
        self.log = log
        self._process: ManagedProcess | None = None

    @property
    def process(self) -> ManagedProcess:
        if self._process is None:
            raise ServerFailedError(f"{self.name} was not started: call start() first")
        return self._process

    def start(self) -> None:
        """Start it; do not wait for it (two servers start at once)."""
        self._process = ManagedProcess(
            self.name, self.options.command(self.port), self.log, env=self.options.environment()
        )

    def ready(self) -> bool:
        """Whether it answers requests now.

        Raises:
            ServerFailedError: it ended.
        """
        if not self.process.running:
            raise self.process.failure("ended while it started")
        try:
            # The health check runs one token through the model and takes a second.
            return self._request("GET", "/health", timeout_s=30.0)[0] == 200
        except OSError:
            return False

    def wait_ready(self, timeout_s: float = 300.0) -> None:
        """Wait until it answers requests.

        Raises:
            ServerFailedError: it ended, or was not ready in ``timeout_s`` seconds.
        """
        wait_all_ready([self], timeout_s=timeout_s)

    def generate(
        self, input_ids: Sequence[int], max_new_tokens: int, *, timeout_s: float = 120.0, logprobs: bool = True
    ) -> Answer:
        """Ask for a greedy continuation, streamed, so that the time to the first token is the client's own.

        Raises:
            ServerFailedError: the request failed.
        """
        body = {
            "input_ids": list(input_ids),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
            "return_logprob": logprobs,
            "stream": True,
        }
        began = time.perf_counter()
        first: float | None = None
        last: dict[str, object] | None = None
        try:
            for event in self._events("/generate", body, timeout_s):
                if "error" in event:
                    raise ServerFailedError(f"{self.name} refused the request: {event['error']}")
                last = event
                if first is None and event.get("output_ids"):
                    first = time.perf_counter()
        except OSError as error:
            raise self.process.failure(f"did not answer: {error}") from error
        if first is None or last is None:
            raise self.process.failure("answered without a token")
        return _answer(last, first - began, time.perf_counter() - began)

    def flush(self, timeout_s: float = 60.0) -> None:
        """Empty the server's own caches (not the store), waiting for it to be idle.

        Raises:
            ServerFailedError: it would not within ``timeout_s`` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                status, text = self._request("POST", "/flush_cache?timeout=5", timeout_s=timeout_s)
            except OSError as error:
                raise self.process.failure(f"did not flush its cache: {error}") from error
            if status == 200:
                return
            if time.monotonic() > deadline:
                raise self.process.failure(f"did not flush its cache: HTTP {status} {text.strip()}")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()

    def __enter__(self) -> SGLangServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _request(self, method: str, path: str, *, body: object = None, timeout_s: float = 30.0) -> tuple[int, str]:
        """One request; HTTP status and body. Any failure of the connection is an OSError."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        except http.client.HTTPException as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def request(self, method: str, path: str, *, body: object = None, timeout_s: float = 30.0) -> tuple[int, str]:
        """One HTTP request to the server, for admin calls: status and body.

        Raises:
            ServerFailedError: no answer.
        """
        try:
            return self._request(method, path, body=body, timeout_s=timeout_s)
        except OSError as error:
            raise self.process.failure(f"did not answer {method} {path}: {error}") from error

    def _events(self, path: str, body: object, timeout_s: float) -> Iterator[dict[str, object]]:
        """The server-sent events of one request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                text = response.read().decode(errors="replace")
                raise ServerFailedError(f"{self.name} answered HTTP {response.status}: {text[:500]}")
            for line in response:
                data = line.strip().removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if data:
                    yield json.loads(data)
        except (http.client.HTTPException, ValueError) as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()


def wait_all_ready(
    servers: Sequence[SGLangServer],
    *,
    timeout_s: float = 300.0,
    progress: Callable[[Sequence[str], float], None] | None = None,
) -> None:
    """Wait until every one of the started ``servers`` answers requests.

    Args:
        progress: called a few times a second with the names that are not up yet and the seconds so far.

    Raises:
        ServerFailedError: one ended, or was not ready in ``timeout_s`` seconds.
    """
    began = time.monotonic()
    waiting = list(servers)
    while waiting:
        waiting = [server for server in waiting if not server.ready()]
        elapsed = time.monotonic() - began
        if progress is not None:
            progress([server.name for server in waiting], elapsed)
        if waiting and elapsed > timeout_s:
            raise waiting[0].process.failure(f"was not ready within {timeout_s:g} s")
        if waiting:
            time.sleep(0.5)


def _answer(event: dict[str, object], ttft_s: float, total_s: float) -> Answer:
    """The last event of a stream (SGLang repeats everything so far in each) as plain data."""
    meta = event["meta_info"]
    assert isinstance(meta, dict)
    details = meta.get("cached_tokens_details") or {}
    output_ids = event["output_ids"]
    assert isinstance(output_ids, list)
    return Answer(
        prompt_tokens=int(meta["prompt_tokens"]),
        cached_tokens=int(meta.get("cached_tokens", 0)),
        device_tokens=int(details.get("device", 0)),
        host_tokens=int(details.get("host", 0)),
        storage_tokens=int(details.get("storage", 0)),
        output_ids=[int(token) for token in output_ids],
        # (logprob, token id, text) per token
        logprobs=[float(entry[0]) for entry in meta.get("output_token_logprobs") or []],
        ttft_s=ttft_s,
        total_s=total_s,
    )
