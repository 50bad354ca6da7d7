"""Plays a workload on servers and writes down what each request got.

A fixed number of clients (the *concurrency*) takes requests in the workload's order: one as soon as what it continues has been
answered, its wave has begun and its time has come. Which server gets it depends on the request alone, never on
the clock, so that every mode sends every request to the same place.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Literal, get_args

import msgspec

from maru_bench.engines import Answer, EngineClient
from maru_bench.experiment.workloads import Request, Workload
from maru_bench.processes import ServerFailedError
from maru_core.errors import ConfigError

Routing = Literal["random", "round-robin", "sticky"]
ROUTINGS: Final[tuple[Routing, ...]] = get_args(Routing)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What one request got. ``error`` says why it got nothing; all figures are 0 then."""

    number: int
    session: int
    turn: int
    server: int
    started_s: float
    """From the beginning of the run."""
    late_s: float = 0.0
    """How long it had to wait for a free client after it had arrived."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    storage_tokens: int = 0
    new_tokens: int = 0
    ttft_s: float = 0.0
    total_s: float = 0.0
    known_here: int = 0
    """Tokens of the prompt's longest beginning that its server had been asked, or had answered, before."""
    known_anywhere: int = 0
    """The same over all servers: the most that any cache could have had."""
    output: str = ""
    """A digest of the answer's tokens."""
    error: str | None = None

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


class PlayOptions(msgspec.Struct, frozen=True, kw_only=True):
    concurrency: int = 1
    routing: Routing = "round-robin"
    seed: int = 0
    timeout_s: float = 600.0


def route(routing: Routing, request: Request, servers: int, seed: int) -> int:
    """Which of ``servers`` gets the request."""
    if routing == "round-robin":
        return request.number % servers
    if routing == "sticky":
        return request.session % servers
    if routing == "random":
        return random.Random(seed << 32 | request.number).randrange(servers)
    raise ConfigError(f"--routing is {routing!r}: give one of {', '.join(ROUTINGS)}")


class Known:
    """Which beginnings of prompts have been seen, block by block: what a cache that forgets nothing could have."""

    #: Tokens of a block: finer than any page, so that no cache can find more.
    BLOCK: Final = 8

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def add(self, tokens: Sequence[int]) -> None:
        self._seen.update(self._blocks(tokens))

    def prefix(self, tokens: Sequence[int]) -> int:
        """Tokens of the longest beginning that was added; at least the last token is always computed."""
        count = 0
        for block in self._blocks(tokens[:-1]):
            if block not in self._seen:
                break
            count += self.BLOCK
        return count

    def _blocks(self, tokens: Sequence[int]) -> list[bytes]:
        chain, blocks = hashlib.blake2b(digest_size=16), []
        for start in range(0, len(tokens) - self.BLOCK + 1, self.BLOCK):
            chain.update(b"".join(token.to_bytes(4, "little") for token in tokens[start : start + self.BLOCK]))
            blocks.append(chain.digest())
        return blocks


class _Play:
    """One run: what is under way, under one lock."""

    def __init__(
        self,
        workload: Workload,
        clients: Sequence[EngineClient],
        options: PlayOptions,
        answered: Callable[[Sample], None],
        between_waves: Callable[[], None],
    ) -> None:
        self._workload, self._clients, self._options = workload, clients, options
        self._answered, self._between_waves = answered, between_waves
        self._waiting = list(workload.requests)
        self._wave = min(request.wave for request in workload.requests)
        self._running = 0
        self._full: dict[int, list[int]] = {}  # number -> prompt and answer, of what something continues
        self._continued = {request.after for request in workload.requests if request.after is not None}
        self._known = [Known() for _ in clients]
        self._everywhere = Known()
        self._changed = threading.Condition()
        self._began = time.monotonic()
        self._failed: BaseException | None = None
        self.samples: list[Sample] = []

    def run(self) -> list[Sample]:
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(self._options.concurrency)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                # In short pieces, so that Ctrl-C gets through.
                while thread.is_alive():
                    thread.join(0.2)
        except BaseException:
            with self._changed:
                self._waiting.clear()
                self._changed.notify_all()
            raise
        if self._failed is not None:
            raise self._failed
        return sorted(self.samples, key=lambda sample: sample.number)

    def _work(self) -> None:
        try:
            while (request := self._take()) is not None:
                sample, full = self._ask(request)
                with self._changed:
                    self._running -= 1
                    self.samples.append(sample)
                    if request.number in self._continued:
                        self._full[request.number] = full
                    self._known[sample.server].add(full)
                    self._everywhere.add(full)
                    self._changed.notify_all()
                self._answered(sample)
        except BaseException as error:  # told to whoever waits in run()
            with self._changed:
                self._failed = self._failed or error
                self._waiting.clear()
                self._changed.notify_all()

    def _take(self) -> Request | None:
        """The next request that may begin now, waited for; None when there are no more."""
        with self._changed:
            while self._waiting:
                now = time.monotonic() - self._began
                in_wave = [request for request in self._waiting if request.wave == self._wave]
                if not in_wave:
                    if self._running:
                        self._changed.wait()
                        continue
                    self._wave = min(request.wave for request in self._waiting)
                    self._between_waves()
                    self._changed.notify_all()
                    continue
                ready = [
                    request
                    for request in in_wave
                    if (request.after is None or request.after in self._full) and (request.at_s or 0.0) <= now
                ]
                if ready:
                    self._waiting.remove(ready[0])
                    self._running += 1
                    return ready[0]
                soon = [request.at_s - now for request in in_wave if request.at_s is not None and request.at_s > now]
                self._changed.wait(min(soon) if soon else None)
        return None

    def _ask(self, request: Request) -> tuple[Sample, list[int]]:
        options = self._options
        index = route(options.routing, request, len(self._clients), options.seed)
        with self._changed:
            before = self._full[request.after] if request.after is not None else []
            prompt = before + request.tokens
            known_here, known_anywhere = self._known[index].prefix(prompt), self._everywhere.prefix(prompt)
        started = time.monotonic() - self._began
        sample = Sample(
            number=request.number,
            session=request.session,
            turn=request.turn,
            server=index,
            started_s=started,
            late_s=max(0.0, started - request.at_s) if request.at_s is not None else 0.0,
        )
        try:
            answer: Answer = self._clients[index].generate(
                prompt, request.new_tokens, timeout_s=options.timeout_s, logprobs=False
            )
        except ServerFailedError as error:
            # What continues it goes on without its answer: one failure is one failure.
            return msgspec.structs.replace(sample, error=str(error)), prompt
        sample = msgspec.structs.replace(
            sample,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            device_tokens=answer.device_tokens,
            host_tokens=answer.host_tokens,
            storage_tokens=answer.storage_tokens,
            new_tokens=len(answer.output_ids),
            ttft_s=answer.ttft_s,
            total_s=answer.total_s,
            known_here=known_here,
            known_anywhere=known_anywhere,
            output=hashlib.blake2b(repr(answer.output_ids).encode(), digest_size=8).hexdigest(),
        )
        return sample, prompt + answer.output_ids


def play(
    workload: Workload,
    clients: Sequence[EngineClient],
    options: PlayOptions,
    *,
    answered: Callable[[Sample], None] = lambda sample: None,
    between_waves: Callable[[], None] = lambda: None,
) -> list[Sample]:
    """Play it to the end; samples in the workload's order.

    Args:
        answered: told of each sample, from the thread of its client.
        between_waves: called when all of a wave are answered and the next is about to begin.

    Raises:
        ConfigError: no such routing. A request that fails is in its sample.
    """
    if options.routing not in ROUTINGS:
        raise ConfigError(f"--routing is {options.routing!r}: give one of {', '.join(ROUTINGS)}")
    return _Play(workload, clients, options, answered, between_waves).run()
