"""The processes that experiments run against: ``maru-server``, SGLang and vLLM servers, started, watched and stopped.

How engines are asked is in :mod:`maru_bench.engines`. This module decides nothing about an experiment.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Self

import msgspec

from maru_bench.engines import Answer, HttpClient, SGLangClient, VLLMClient
from maru_bench.processes import ManagedProcess, ServerFailedError, python_path

__all__ = [
    "Answer",
    "MaruServer",
    "SGLangOptions",
    "SGLangServer",
    "ServerFailedError",
    "StartedServer",
    "VLLMOptions",
    "VLLMServer",
    "free_port",
    "wait_all_ready",
]

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

    def __init__(
        self,
        directory: Path,
        *,
        size: str,
        extent: str | None = None,
        log: Path | None = None,
        keep_pool: bool = False,
        options: Sequence[str] = (),
    ) -> None:
        """
        Args:
            directory: for its socket; short (a Unix socket's path has at most 107 bytes).
            size: of the pool, "512M".
            extent: of its extents, each of which must hold a page; None: as the size of the pool suggests.
            log: its log file; None: one in ``directory``.
            keep_pool: leave the pool when the server stops (another one is started on it).
            options: more words of its command line.
        """
        self.directory = directory
        self.log = log or directory / "maru-server.log"
        self.pool_name = f"maru-bench-{os.getpid()}-{os.urandom(4).hex()}"
        self.pool = f"shm://{self.pool_name}?size={size}" + (f"&extent={extent}" if extent else "")
        self.endpoint = f"ipc://{directory}/maru.sock"
        self.size = size
        self.keep_pool = keep_pool
        self.options = tuple(options)
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
        argv += ["--ready-fd", str(write_fd), *self.options]
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


class SGLangOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to start an SGLang server. Defaults fit the engine kit's small models on a CPU."""

    python: str
    model: str
    device: str = "cpu"
    backend: str | None = "maru"
    """HiCache storage backend; None: none."""
    hierarchical: bool | None = None
    """``--enable-hierarchical-cache``; None: where there is a backend."""
    host_ratio: float = 2.0
    """``--hicache-ratio``: size of the host tier, in device caches."""
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
        hierarchical = self.backend is not None if self.hierarchical is None else self.hierarchical
        if hierarchical:
            argv += ["--enable-hierarchical-cache", "--hicache-ratio", f"{self.host_ratio:g}"]
        if self.backend is not None:
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


class StartedServer(HttpClient, ABC):
    """A server that is a process of ours. A context manager; leaving it stops the server."""

    def __init__(self, name: str, log: Path) -> None:
        super().__init__(name, "127.0.0.1", free_port())
        self.log = log
        self._process: ManagedProcess | None = None

    @property
    def process(self) -> ManagedProcess:
        if self._process is None:
            raise ServerFailedError(f"{self.name} was not started: call start() first")
        return self._process

    def failure(self, what: str) -> ServerFailedError:
        return self.process.failure(what)

    def start(self) -> None:
        """Start it; do not wait for it (two servers start at once)."""
        self._process = ManagedProcess(self.name, self.command(), self.log, env=self.environment())

    @abstractmethod
    def command(self) -> list[str]:
        """Its command line."""

    @abstractmethod
    def environment(self) -> dict[str, str]:
        """Variables that it gets besides ours."""

    def ready(self) -> bool:
        """Whether it answers requests now.

        Raises:
            ServerFailedError: it ended.
        """
        if not self.process.running:
            raise self.process.failure("ended while it started")
        return super().ready()

    def wait_ready(self, timeout_s: float = 300.0) -> None:
        """Wait until it answers requests.

        Raises:
            ServerFailedError: it ended, or was not ready in ``timeout_s`` seconds.
        """
        wait_all_ready([self], timeout_s=timeout_s)

    def stop(self) -> None:
        """Stop it, and remove the shared memory that SGLang leaves behind: it ends its own processes with SIGKILL."""
        if self._process is not None:
            left = self._process.shared_memory(_SGLANG_MEMORY)
            self._process.stop()
            for path in left:
                path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class SGLangServer(StartedServer, SGLangClient):
    """A real SGLang server."""

    def __init__(self, name: str, options: SGLangOptions, log: Path) -> None:
        super().__init__(name, log)
        self.options = options

    def command(self) -> list[str]:
        return self.options.command(self.port)

    def environment(self) -> dict[str, str]:
        return self.options.environment()


# ------------------------------------------------------------------ vLLM


class VLLMOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to start a vLLM server. Defaults fit small models on a CPU."""

    python: str
    model: str
    device: str = "cpu"
    transfer: dict[str, object] | None = None
    """``--kv-transfer-config``; None leaves connectors off."""
    block_size: int = 16
    max_tokens: int = 4096
    """Longest prompt and answer together; as much is kept in the KV cache for each of the eight sequences, on a CPU."""
    kv_bytes: int | None = None
    """``--kv-cache-memory-bytes``; None leaves vLLM's default."""
    dtype: str = "bfloat16"
    arguments: tuple[str, ...] = ()
    """Passed through, last, so that they win."""
    env: dict[str, str] = {}

    def command(self, port: int) -> list[str]:
        """The command line of a server on ``port`` of the loopback interface."""
        argv = [self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
        argv += [
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--dtype",
            self.dtype,
            "--block-size",
            str(self.block_size),
        ]
        argv += ["--max-model-len", str(self.max_tokens), "--max-num-seqs", "8", "--seed", "0"]
        argv += ["--enable-prompt-tokens-details"]
        if self.device == "cpu":
            argv += ["--enforce-eager"]
        if self.kv_bytes is not None:
            argv += ["--kv-cache-memory-bytes", str(self.kv_bytes)]
        if self.transfer is not None:
            argv += ["--kv-transfer-config", json.dumps(self.transfer)]
        return [*argv, *self.arguments]

    def environment(self) -> dict[str, str]:
        env = {"VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1", **self.env}
        if self.device == "cpu":
            env.setdefault("CUDA_VISIBLE_DEVICES", "")
        return env


class VLLMServer(StartedServer, VLLMClient):
    """A real vLLM server."""

    def __init__(self, name: str, options: VLLMOptions, log: Path) -> None:
        super().__init__(name, log)
        self.options = options

    def command(self) -> list[str]:
        return self.options.command(self.port)

    def environment(self) -> dict[str, str]:
        return self.options.environment()


def wait_all_ready(
    servers: Sequence[StartedServer],
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
