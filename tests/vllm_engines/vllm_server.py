"""A real vLLM server over HTTP, as users run it."""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from vllm_child import Reply
from vllm_harness import BLOCK, ENVIRONMENT

from maru_bench.processes import ManagedProcess
from maru_bench.servers import free_port


@dataclass
class VLLMServer:
    """``python -m vllm.entrypoints.openai.api_server`` of a tiny model. :meth:`start` several, then wait for each."""

    name: str
    model: Path
    log: Path
    transfer: dict[str, Any]
    env: dict[str, str]

    def start(self) -> None:
        self.port = free_port()
        argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        argv += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "bfloat16"]
        argv += ["--enforce-eager", "--block-size", str(BLOCK), "--max-model-len", "2048", "--max-num-seqs", "4"]
        argv += ["--kv-cache-memory-bytes", str(64 << 20), "--seed", "0"]
        argv += ["--kv-transfer-config", json.dumps(self.transfer)]
        self.process = ManagedProcess(self.name, argv, self.log, env=ENVIRONMENT | self.env)

    def wait_ready(self, timeout_s: float = 300.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._ready():
            if not self.process.running:
                raise self.process.failure("ended while it started")
            if time.monotonic() > deadline:
                raise self.process.failure(f"was not ready within {timeout_s:g} s")
            time.sleep(0.2)

    def ask(self, prompt: Sequence[int], tokens: int = 8) -> Reply:
        body = {
            "model": "m", "prompt": list(prompt), "max_tokens": tokens, "temperature": 0.0, "logprobs": 1, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        status, text = self.request("POST", "/v1/completions", body)
        assert status == 200, f"{self.name}: {text}"
        answer = json.loads(text)
        [choice] = answer["choices"]
        details = answer["usage"].get("prompt_tokens_details") or {}
        return Reply(
            choice["token_ids"], choice["logprobs"]["token_logprobs"], details.get("cached_tokens") or 0, choice["finish_reason"]
        )  # fmt: skip

    def figures(self) -> dict[str, float]:
        """Its metrics, with the label ``source`` or ``reason`` where there is one, as :func:`vllm_child.figures` names them."""
        status, text = self.request("GET", "/metrics")
        assert status == 200, text
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.removeprefix("vllm:").removesuffix("_total")
                part = sample.labels.get("source") or sample.labels.get("reason")
                found[f"{name}/{part}" if part else name] = sample.value
        return found

    def stop(self) -> None:
        self.process.stop()

    def _ready(self) -> bool:
        try:
            return self.request("GET", "/health")[0] == 200
        except OSError:
            return False

    def request(self, method: str, path: str, body: object = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        except http.client.HTTPException as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
