"""The processes that experiments run against: ``maru-server`` and SGLang servers, started, watched, asked and stopped.

What a server answered is plain data (:class:`Answer`). This module decides nothing about an experiment.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from maru_bench.processes import ManagedProcess, ServerFailedError, python_path

__all__ = [
    "Answer",
    "MaruServer",
    "SGLangOptions",
    "SGLangServer",
    "ServerFailedError",
    "free_port",
    "wait_all_ready",
]

_POLL_S: Final = 0.1
#: Names of SGLang's own shared memory and of the semaphores of its processes, in /dev/shm.
_SGLANG_MEMORY: Final = ("sgl_shm_", "sglang_loads_", "sem.mp-")


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
        """Stop it, and remove the shared memory that SGLang leaves behind: it ends its own processes with SIGKILL."""
        if self._process is not None:
            left = self._process.shared_memory(_SGLANG_MEMORY)
            self._process.stop()
            for path in left:
                path.unlink(missing_ok=True)

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
