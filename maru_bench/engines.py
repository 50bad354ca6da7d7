"""How an engine's server is asked over HTTP: SGLang and vLLM, started by us or by somebody else.

A client knows a host and a port, and nothing of the process behind them. What a server answered is plain data
(:class:`Answer`).
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import msgspec

from maru_bench.processes import ServerFailedError
from maru_core.errors import ConfigError

_POLL_S: Final = 0.1


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What one request to a server gave."""

    prompt_tokens: int
    cached_tokens: int
    device_tokens: int
    """Taken from the engine's own GPU (or CPU) cache."""
    host_tokens: int
    """Taken from the engine's own host tier; SGLang's direct linkers count here too."""
    storage_tokens: int
    """Loaded from the storage backend. vLLM tells the tiers of all requests together, and not of each: they are 0 there."""
    output_ids: list[int]
    logprobs: list[float]
    ttft_s: float
    total_s: float

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


class EngineClient(Protocol):
    """What an experiment needs of a server."""

    name: str

    def ready(self) -> bool:
        """Whether it answers requests now. Raises ServerFailedError where it never will."""
        ...

    def generate(
        self, input_ids: Sequence[int], max_new_tokens: int, *, timeout_s: float = 120.0, logprobs: bool = True
    ) -> Answer:
        """A greedy continuation of exactly so many tokens. Raises ServerFailedError: the request failed."""
        ...

    def flush(self, timeout_s: float = 60.0) -> None:
        """Empty the server's own caches (not the store), waiting for it to be idle. Raises ServerFailedError."""
        ...

    def sources(self) -> dict[str, float] | None:
        """Prompt tokens since the start by where they came from (``computed``, ``device``, ``storage``); None where the
        answers tell that one by one."""
        ...


class HttpClient:
    """Requests to one host and port. Any failure of the connection is an OSError inside, a ServerFailedError outside."""

    def __init__(self, name: str, host: str, port: int) -> None:
        self.name = name
        self.host = host
        self.port = port

    def failure(self, what: str) -> ServerFailedError:
        return ServerFailedError(f"{self.name} (http://{self.host}:{self.port}) {what}")

    def ready(self) -> bool:
        try:
            # SGLang's health check runs one token through the model and takes a second.
            return self._request("GET", "/health", timeout_s=30.0)[0] == 200
        except OSError:
            return False

    def request(self, method: str, path: str, *, body: object = None, timeout_s: float = 30.0) -> tuple[int, str]:
        """One HTTP request to the server, for admin calls: status and body.

        Raises:
            ServerFailedError: no answer.
        """
        try:
            return self._request(method, path, body=body, timeout_s=timeout_s)
        except OSError as error:
            raise self.failure(f"did not answer {method} {path}: {error}") from error

    def _request(self, method: str, path: str, *, body: object = None, timeout_s: float = 30.0) -> tuple[int, str]:
        """One request; HTTP status and body. Any failure of the connection is an OSError."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        except http.client.HTTPException as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def _events(self, path: str, body: object, timeout_s: float) -> Iterator[dict[str, object]]:
        """The server-sent events of one request."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
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

    def _flush(self, path: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                status, text = self._request("POST", path, timeout_s=timeout_s)
            except OSError as error:
                raise self.failure(f"did not flush its cache: {error}") from error
            if status == 200:
                return
            if time.monotonic() > deadline:
                raise self.failure(f"did not flush its cache: HTTP {status} {text.strip()}")
            time.sleep(_POLL_S)


class SGLangClient(HttpClient):
    """SGLang's native API."""

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
            raise self.failure(f"did not answer: {error}") from error
        if first is None or last is None:
            raise self.failure("answered without a token")
        return _sglang_answer(last, first - began, time.perf_counter() - began)

    def flush(self, timeout_s: float = 60.0) -> None:
        """Empty the server's own caches (not the store), waiting for it to be idle.

        Raises:
            ServerFailedError: it would not within ``timeout_s`` seconds.
        """
        self._flush("/flush_cache?timeout=5", timeout_s)

    def sources(self) -> dict[str, float] | None:
        return None


def _sglang_answer(event: dict[str, object], ttft_s: float, total_s: float) -> Answer:
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


class VLLMClient(HttpClient):
    """vLLM's OpenAI API, with prompts as token ids; the tiers come from its metrics."""

    #: Of ``vllm:prompt_tokens_by_source_total``.
    SOURCES: Final = {"local_compute": "computed", "local_cache_hit": "device", "external_kv_transfer": "storage"}

    def __init__(self, name: str, host: str, port: int, model: str | None = None) -> None:
        super().__init__(name, host, port)
        self._model = model

    def model(self) -> str:
        """The name that requests have to give."""
        if self._model is None:
            status, text = self.request("GET", "/v1/models")
            if status != 200:
                raise self.failure(f"does not say which model it serves: HTTP {status} {text.strip()[:200]}")
            self._model = str(json.loads(text)["data"][0]["id"])
        return self._model

    def generate(
        self, input_ids: Sequence[int], max_new_tokens: int, *, timeout_s: float = 120.0, logprobs: bool = True
    ) -> Answer:
        """As :meth:`SGLangClient.generate`."""
        body = {
            "model": self.model(),
            "prompt": list(input_ids),
            "max_tokens": max_new_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **({"logprobs": 1} if logprobs else {}),
        }
        began = time.perf_counter()
        first: float | None = None
        events = []
        try:
            for event in self._events("/v1/completions", body, timeout_s):
                if "error" in event:
                    raise ServerFailedError(f"{self.name} refused the request: {event['error']}")
                events.append(event)
                if first is None and any(choice.get("token_ids") for choice in _choices(event)):
                    first = time.perf_counter()
        except OSError as error:
            raise self.failure(f"did not answer: {error}") from error
        if first is None:
            raise self.failure("answered without a token")
        return _vllm_answer(events, first - began, time.perf_counter() - began)

    def flush(self, timeout_s: float = 60.0) -> None:
        """Empty the prefix cache; the server must have been started with ``VLLM_SERVER_DEV_MODE=1``.

        Raises:
            ServerFailedError: it would not.
        """
        self._flush("/reset_prefix_cache", timeout_s)

    def sources(self) -> dict[str, float] | None:
        status, text = self.request("GET", "/metrics")
        if status != 200:
            return None
        from prometheus_client.parser import text_string_to_metric_families

        samples = [
            sample
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "vllm:prompt_tokens_by_source_total"
        ]
        if not samples:
            return None
        found = dict.fromkeys(self.SOURCES.values(), 0.0)
        for sample in samples:
            tier = self.SOURCES.get(sample.labels.get("source", ""))
            if tier is not None:
                found[tier] += sample.value
        return found


def _choices(event: dict[str, object]) -> list[dict[str, object]]:
    choices = event.get("choices")
    return choices if isinstance(choices, list) else []


def _vllm_answer(events: Sequence[dict[str, object]], ttft_s: float, total_s: float) -> Answer:
    """All events of a stream together: each has the tokens that are new, and the last one the usage."""
    output_ids: list[int] = []
    logprobs: list[float] = []
    usage: dict[str, object] = {}
    for event in events:
        given = event.get("usage")
        if isinstance(given, dict):
            usage = given
        for choice in _choices(event):
            tokens, chances = choice.get("token_ids"), choice.get("logprobs")
            output_ids += tokens if isinstance(tokens, list) else []
            if isinstance(chances, dict):
                logprobs += chances["token_logprobs"]
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    prompt = usage.get("prompt_tokens", 0)
    assert isinstance(prompt, int)
    return Answer(
        prompt_tokens=prompt,
        cached_tokens=int(cached or 0),
        device_tokens=0,
        host_tokens=0,
        storage_tokens=0,
        output_ids=output_ids,
        logprobs=logprobs,
        ttft_s=ttft_s,
        total_s=total_s,
    )


def parse_url(url: str) -> tuple[str, int]:
    """Host and port of a server's URL.

    Raises:
        ConfigError: it is not ``http://host:port``.
    """
    parsed = urllib.parse.urlsplit(url)
    try:
        port = parsed.port
    except ValueError:
        port = None
    if parsed.scheme != "http" or not parsed.hostname or port is None or parsed.path.strip("/"):
        raise ConfigError(f"--url has {url!r}: give http://host:port of a server")
    return parsed.hostname, port
