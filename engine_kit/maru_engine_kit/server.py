"""Starts, asks, watches and stops one real SGLang server. Standard library only.

A server is its own process group, so that stopping it stops its scheduler and detokenizer too, and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Seconds; two servers that start together on two cores take 80-90 s.
START_LIMIT_S = 300.0
_POLL_S = 0.2


class ServerDiedError(RuntimeError):
    """The server's process ended, or it did not do in time what was waited for; the message has its log's tail."""


@dataclass(frozen=True)
class Answer:
    """What a server answered to one prompt."""

    output_ids: list[int]
    logprobs: list[float]
    prompt_tokens: int
    cached_tokens: int
    cached_details: Mapping[str, int]
    first_token_s: float | None = None

    @property
    def from_storage(self) -> int:
        """Prompt tokens whose KV came from the storage backend."""
        return int(self.cached_details.get("storage", 0) or 0)


@dataclass(frozen=True)
class ServerOptions:
    """One server's command line. The defaults serve a tiny model on a CPU."""

    model: Path
    port: int
    python: str
    cpu: bool = True
    tp: int = 1
    page_size: int = 16
    max_total_tokens: int = 4096
    layout: str | None = None
    storage_backend: str | None = None
    storage_config: Mapping[str, Any] | None = None
    admin_key: str | None = None
    more: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def arguments(self) -> list[str]:
        """The command line, program first."""
        line = [self.python, "-m", "sglang.launch_server", "--model-path", str(self.model)]
        line += ["--host", "127.0.0.1", "--port", str(self.port), "--page-size", str(self.page_size)]
        line += ["--random-seed", "0", "--enable-cache-report", "--skip-server-warmup"]
        line += ["--enable-hierarchical-cache", "--hicache-ratio", "2"]
        line += ["--hicache-storage-prefetch-policy", "wait_complete", "--tp", str(self.tp)]
        if self.cpu:
            line += ["--device", "cpu", "--attention-backend", "torch_native", "--dtype", "bfloat16"]
            line += ["--max-total-tokens", str(self.max_total_tokens), "--max-running-requests", "8"]
            line += ["--mem-fraction-static", "0.2", "--disable-cuda-graph", "--sleep-on-idle"]
            line += ["--skip-tokenizer-init"]
        if self.layout:
            line += ["--hicache-mem-layout", self.layout]
        if self.storage_backend:
            line += ["--hicache-storage-backend", self.storage_backend]
        if self.storage_config is not None:
            line += ["--hicache-storage-backend-extra-config", json.dumps(dict(self.storage_config))]
        if self.admin_key:
            line += ["--admin-api-key", self.admin_key]
        return [*line, *self.more]

    def variables(self) -> dict[str, str]:
        """The environment: this process's, what a CPU server needs, what the options say."""
        variables = dict(os.environ)
        if self.cpu:
            variables |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            if self.tp > 1:
                variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(core) for core in range(self.tp))
        return variables | dict(self.environment)


class EngineServer:
    """A running server. Use :func:`start_servers`, which starts several at once."""

    def __init__(self, options: ServerOptions, log: Path) -> None:
        self.options = options
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                options.arguments(),
                env=options.variables(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.options.port}"

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log_text().splitlines()[-lines:])

    def wait_for(self, what: str, condition: Callable[[], bool], limit_s: float = 60.0) -> None:
        """Wait until ``condition`` holds.

        Raises:
            ServerDiedError: the server's process ended, or ``limit_s`` passed.
        """
        deadline = time.monotonic() + limit_s
        while not condition():
            code = self.process.poll()
            if code is not None:
                raise ServerDiedError(
                    f"server ended with {code} while waiting for {what}; {self.log}:\n{self.log_tail()}"
                )
            if time.monotonic() > deadline:
                raise ServerDiedError(f"no {what} within {limit_s:.0f} s; {self.log}:\n{self.log_tail()}")
            time.sleep(_POLL_S)

    def wait_ready(self, limit_s: float = START_LIMIT_S) -> None:
        self.wait_for("answer to /health", self._healthy, limit_s)

    def _healthy(self) -> bool:
        try:
            return self.request("GET", "/health", limit_s=5)[0] == 200
        except OSError:
            return False

    def request(self, method: str, path: str, body: Any = None, limit_s: float = 120.0) -> tuple[int, bytes]:
        """One HTTP request: status and body (also for error statuses)."""
        try:
            with self._open(method, path, body, limit_s) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def _open(self, method: str, path: str, body: Any, limit_s: float) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.options.admin_key:
            headers["Authorization"] = f"Bearer {self.options.admin_key}"
        data = None if body is None else json.dumps(body).encode()
        question = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        return urllib.request.urlopen(question, timeout=limit_s)

    def generate(self, input_ids: Sequence[int], *, new_tokens: int = 8, limit_s: float = 120.0) -> Answer:
        """Greedy answer to a prompt of token ids, with the log probability of each new token and the time to the first.

        Raises:
            RuntimeError: the server answered with an error.
        """
        body = {
            "input_ids": list(input_ids),
            "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
            "return_logprob": True,
            "stream": True,
        }
        started = time.monotonic()
        first: float | None = None
        last: dict[str, Any] | None = None
        # Depending on the version a stream repeats all tokens or sends the new ones only; both are put together here.
        output_ids: list[int] = []
        logprobs: list[float] = []
        try:
            with self._open("POST", "/generate", body, limit_s) as reply:
                for line in reply:
                    if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                        continue
                    last = json.loads(line[5:])
                    if "error" in last:
                        raise RuntimeError(f"{self.url} refused the prompt: {last['error']}")
                    first = first if first is not None else time.monotonic() - started
                    total = last["meta_info"]["completion_tokens"]
                    output_ids = _joined(output_ids, last.get("output_ids") or [], total)
                    found = [entry[0] for entry in last["meta_info"].get("output_token_logprobs") or []]
                    logprobs = _joined(logprobs, found, total)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{self.url} answered {error.code}: {error.read()[:500]!r}") from error
        if last is None:
            raise RuntimeError(f"{self.url} answered nothing; {self.log}:\n{self.log_tail()}")
        meta = last["meta_info"]
        return Answer(
            output_ids=output_ids,
            logprobs=logprobs,
            prompt_tokens=meta["prompt_tokens"],
            cached_tokens=meta["cached_tokens"],
            cached_details=meta.get("cached_tokens_details") or {},
            first_token_s=first,
        )

    def flush(self, limit_s: float = 60.0) -> None:
        """Empty the server's own cache. Succeeds only once everything before it is backed up."""
        self.wait_for("flush", lambda: self.request("POST", "/flush_cache")[0] == 200, limit_s)

    def attach(self, backend: str, config: Mapping[str, Any] | None = None) -> tuple[int, str]:
        """Attach a storage backend over HTTP: status and message."""
        body = {
            "hicache_storage_backend": backend,
            "hicache_storage_backend_extra_config_json": None if config is None else json.dumps(dict(config)),
            "hicache_storage_prefetch_policy": "wait_complete",
        }
        status, message = self.request("PUT", "/hicache/storage-backend", body)
        return status, message.decode(errors="replace")

    def detach(self) -> tuple[int, str]:
        status, message = self.request("DELETE", "/hicache/storage-backend")
        return status, message.decode(errors="replace")

    def server_info(self) -> dict[str, Any]:
        status, body = self.request("GET", "/server_info")
        if status != 200:
            raise RuntimeError(f"{self.url}/server_info answered {status}: {body[:300]!r}")
        return dict(json.loads(body))

    def stop(self, limit_s: float = 20.0) -> None:
        """Ask the server to end, then end what is left of its process group."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(limit_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(limit_s)


def _joined(known: list[Any], found: list[Any], total: int) -> list[Any]:
    """``known`` with a chunk of a stream that holds either everything so far or only what is new."""
    if len(found) >= total:
        return found
    return known + found[len(known) + len(found) - total :] if len(known) + len(found) >= total else known + found


def start_servers(many: Iterable[tuple[ServerOptions, Path]], limit_s: float = START_LIMIT_S) -> list[EngineServer]:
    """Start servers together and wait until all answer; if one does not, stop all.

    Raises:
        ServerDiedError: one ended or was not ready in time.
    """
    servers = [EngineServer(options, log) for options, log in many]
    try:
        for server in servers:
            server.wait_ready(limit_s)
    except BaseException:
        for server in servers:
            server.stop()
        raise
    return servers


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
