"""HTTP servers that speak as SGLang and vLLM do where experiments listen, with a prefix cache and, if asked for, a shared store.

They compute nothing: an answer is a digest of its prompt. The real engines are asked in tests/engines.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

PAGE = 16


def answer_of(prompt: list[int], tokens: int) -> list[int]:
    return [20 + byte % 200 for byte in hashlib.shake_128(repr(prompt).encode()).digest(tokens)]


def pages_of(tokens: list[int]) -> list[tuple[int, ...]]:
    return [tuple(tokens[:end]) for end in range(PAGE, len(tokens) + 1, PAGE)]


@dataclass
class SpeakingEngine:
    """One server. ``store`` is a set that several may share."""

    store: set[tuple[int, ...]] | None = None
    kind: str = "sglang"
    #: Prompts that begin with this token are refused.
    refused: int = -1
    delay_s: float = 0.0
    wrong: bool = False
    port: int = 0
    own: set[tuple[int, ...]] = field(default_factory=set)
    asked: list[list[int]] = field(default_factory=list)
    #: Tokens that each of those wanted.
    wanted: list[int] = field(default_factory=list)
    most: int = 0
    flushes: int = 0
    sources: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("local_compute", "local_cache_hit", "external_kv_transfer"), 0)
    )

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self._running = 0
        engine = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(engine.page(self.path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
                self._send(engine.respond(self.path, body))

            def _send(self, reply: tuple[int, bytes]) -> None:
                self.send_response(reply[0])
                self.end_headers()
                self.wfile.write(reply[1])

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def page(self, path: str) -> tuple[int, bytes]:
        if path == "/v1/models":
            return 200, b'{"data": [{"id": "m"}]}'
        if path == "/metrics":
            lines = ["# TYPE vllm:prompt_tokens_by_source_total counter"]
            lines += [
                f'vllm:prompt_tokens_by_source_total{{source="{source}"}} {count}'
                for source, count in self.sources.items()
            ]
            return 200, "\n".join(lines).encode() + b"\n"
        return 200, b"ok"

    def respond(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if path.startswith(("/flush_cache", "/reset_prefix_cache")):
            with self.lock:
                self.own.clear()
                self.flushes += 1
            return 200, b"ok"
        prompt = body["input_ids"] if self.kind == "sglang" else body["prompt"]
        count = body["sampling_params"]["max_new_tokens"] if self.kind == "sglang" else body["max_tokens"]
        if prompt[0] == self.refused:
            return 503, b"not this one"
        with self.lock:
            self._running += 1
            self.most = max(self.most, self._running)
            self.asked.append(prompt)
            self.wanted.append(count)
        time.sleep(self.delay_s)
        output = answer_of([*prompt, 1] if self.wrong else prompt, count)
        with self.lock:
            device, storage = self._take(prompt)
            self.own.update(pages_of(prompt + output))
            if self.store is not None:
                self.store.update(pages_of(prompt + output))
            self._running -= 1
        return 200, b"".join(b"data: " + event + b"\n\n" for event in self._events(prompt, output, device, storage))

    def _take(self, prompt: list[int]) -> tuple[int, int]:
        """Tokens from its own cache, and from the store behind them; the last one is always computed."""
        device = storage = 0
        for page in pages_of(prompt[:-1]):
            if page in self.own and not storage:
                device += PAGE
            elif self.store is not None and page in self.store:
                storage += PAGE
            else:
                break
        self.sources["local_cache_hit"] += device
        self.sources["external_kv_transfer"] += storage
        self.sources["local_compute"] += len(prompt) - device - storage
        return device, storage

    def _events(self, prompt: list[int], output: list[int], device: int, storage: int) -> list[bytes]:
        if self.kind == "sglang":
            meta = {
                "prompt_tokens": len(prompt),
                "cached_tokens": device + storage,
                "cached_tokens_details": {"device": device, "host": 0, "storage": storage},
            }
            events = [{"output_ids": output[:end], "meta_info": meta} for end in (1, len(output))]
        else:
            usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": device + storage}}
            events = [{"choices": [{"token_ids": [token]}]} for token in output] + [{"choices": [], "usage": usage}]
        return [json.dumps(event).encode() for event in events] + [b"[DONE]"]
