"""Real SGLang servers for tests: which model, which device, how they are asked, attached, detached and flushed.

What starts, watches and stops them is :mod:`maru_bench.servers`; this module adds what only tests need.
"""

from __future__ import annotations

import http.client
import json
import mmap
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maru_bench.servers import Answer, MaruServer, SGLangOptions, SGLangServer, wait_all_ready
from maru_core.pool import Geometry
from maru_core.pool.format import BLOCK_BYTES

ADMIN_KEY = "tests"
PROMPT_TOKENS = 400
#: What a second server can load of a prompt: whole pages of 16 tokens, and at least one token is always computed.
STORED_TOKENS = 384
NEW_TOKENS = 8


def has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def make_model(seed: int = 0, shape: str | None = None) -> Path:
    """The engine kit's tiny Llama, or its tiny model of another shape, made once and kept beside the interpreter."""
    target = Path(sys.prefix) / "maru-models" / f"{shape or 'tiny'}-{seed}"
    words = (
        ["make-llama", str(target), "--size", "tiny"]
        if shape is None
        else ["make-shape", str(target), "--shape", shape]
    )
    line = [sys.executable, "-m", "maru_engine_kit.models", *words, "--seed", str(seed)]
    subprocess.run(line, check=True, capture_output=True, text=True)
    return target


class EngineServer(SGLangServer):
    """An SGLang server with an admin key, so that storage backends can be attached and detached over HTTP."""

    def _request(self, method: str, path: str, *, body: object = None, timeout_s: float = 30.0) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"}
            connection.request(method, path, None if body is None else json.dumps(body).encode(), headers)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        except http.client.HTTPException as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def ask(self, prompt: Sequence[int]) -> Answer:
        return self.generate(prompt, NEW_TOKENS)

    def attach(self, backend: str, config: dict[str, object] | str | None = None) -> tuple[int, str]:
        """Attach a storage backend: HTTP status and message."""
        text = config if isinstance(config, str) or config is None else json.dumps(config)
        body = {
            "hicache_storage_backend": backend,
            "hicache_storage_backend_extra_config_json": text,
            "hicache_storage_prefetch_policy": "wait_complete",
        }
        return self.request("PUT", "/hicache/storage-backend", body=body, timeout_s=60)

    def detach(self) -> tuple[int, str]:
        return self.request("DELETE", "/hicache/storage-backend", timeout_s=60)

    def reattach(self, backend: str, config: dict[str, object] | None = None) -> None:
        """Leave the present backend for another one, with an empty cache of its own."""
        self.flush()
        for status, message in (self.detach(), self.attach(backend, config)):
            assert status == 200, f"{self.name}: {message}"

    def backend(self) -> str | None:
        """The storage backend, as the server reports it."""
        status, text = self.request("GET", "/hicache/storage-backend")
        assert status == 200, text
        name = json.loads(text)["hicache_storage_backend"]
        return None if name is None else str(name)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")


def options(model: Path, **changes: Any) -> SGLangOptions:
    """A server of the tiny model on what this machine has, ready for admin calls."""
    fields: dict[str, Any] = {
        "python": sys.executable,
        "model": str(model),
        "device": "cuda" if has_gpu() else "cpu",
        "arguments": ("--admin-api-key", ADMIN_KEY, *changes.pop("arguments", ())),
    }
    return SGLangOptions(**(fields | changes))


def patient(server: MaruServer, **more: object) -> dict[str, object]:
    """The backend's extra config for a server of the test's own; slow answers of a busy machine are no faults."""
    return {"server": server.endpoint, "timeout_ms": 5000} | more


def start_all(servers: Sequence[EngineServer]) -> None:
    """Start servers together and wait for all; stop all if one does not come up."""
    try:
        for server in servers:
            server.start()
        wait_all_ready(servers)
    except BaseException:
        for server in servers:
            server.stop()
        raise


def make_prompt(seed: int, tokens: int = PROMPT_TOKENS) -> list[int]:
    """Token ids that have no prefix in common with those of another seed."""
    choose = random.Random(seed)
    return [10 + seed % 200, *(choose.randrange(10, 250) for _ in range(tokens - 1))]


def same_answer(one: Answer, other: Answer) -> bool:
    """Whether ids and log probabilities are equal, to the last bit."""
    return one.output_ids == other.output_ids and one.logprobs == other.logprobs


def overwrite_data(pool: Path, value: int = 0x3D) -> int:
    """Overwrite every byte of a pool's data area that holds anything, behind the server's back.

    Returns:
        Bytes that were overwritten.
    """
    with pool.open("r+b") as file:
        geometry = Geometry.read(file.read(BLOCK_BYTES))
        written, position, size = 0, geometry.off_data, os.fstat(file.fileno()).st_size
        with mmap.mmap(file.fileno(), size) as memory:
            data = np.frombuffer(memory, np.uint8)
            while position < size:
                try:
                    start = os.lseek(file.fileno(), position, os.SEEK_DATA)
                except OSError:  # no data after this position
                    break
                stop = os.lseek(file.fileno(), start, os.SEEK_HOLE)
                data[start:stop] = value
                written, position = written + stop - start, stop
            del data
    return written
