"""Real servers of other models than a plain Llama share by the direct path: sliding windows, states, latent attention, two ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import (
    NEW_TOKENS,
    PROMPT_TOKENS,
    EngineServer,
    make_model,
    make_prompt,
    options,
    overwrite_data,
    same_answer,
    start_all,
)

from maru_bench.servers import Answer, MaruServer

pytestmark = [pytest.mark.sglang, pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]


@contextmanager
def pair(name: str, logs: Path, maru: MaruServer, arguments: tuple[str, ...] = (), **changes: Any) -> Iterator[Any]:
    """Two servers of the engine kit's model ``name``."""
    config = json.dumps({"server": maru.endpoint})
    words = (
        "--unified-cache-external-linker-backend",
        "maru",
        "--unified-cache-external-linker-config",
        config,
        *arguments,
    )
    shape = None if name == "ranks" else name
    chosen = options(make_model(shape=shape), backend=None, arguments=words, **changes)
    servers = [
        EngineServer(f"direct {name} {one}", chosen, logs / f"direct-{name}-{one}.log") for one in ("one", "two")
    ]
    if name == "ranks":
        servers = servers[:1]
    start_all(servers)
    try:
        yield servers
    finally:
        for server in servers:
            server.stop()


def loaded(answers: list[Answer]) -> list[int]:
    assert all(answer.storage_tokens == 0 for answer in answers)
    return [answer.host_tokens for answer in answers]


@pytest.mark.parametrize("model", ["sliding", "compressed"])
def test_prompts(model: str, logs: Path, maru_server: MaruServer) -> None:
    prompts = [make_prompt(seed) for seed in (60, 61)]
    with pair(model, logs, maru_server) as (one, two):
        right = [one.ask(prompt) for prompt in prompts]
        assert [answer.cached_tokens for answer in right] == [0, 0]
        if model == "compressed":  # SGLang computes a prompt with and without a prefix by different formulas
            right = [one.ask(prompt) for prompt in prompts]
        one.flush()
        for server in (two, one):
            answers = [server.ask(prompt) for prompt in prompts]
            assert loaded(answers) == [384, 384], server.log_text()[-3000:]
            for answer, good in zip(answers, right, strict=True):
                # Two processes may round latent attention differently, whoever computed the prefix.
                exactly = server is one or model != "compressed"
                assert same_answer(answer, good) if exactly else answer.output_ids == good.output_ids
            server.flush()
        assert overwrite_data(Path("/dev/shm", maru_server.pool_name)) > 0
        damaged = [two.ask(prompt) for prompt in prompts]
        assert loaded(damaged) == [384, 384]
        assert all(answer.logprobs != good.logprobs for answer, good in zip(damaged, right, strict=True))


def test_states(logs: Path, maru_server: MaruServer) -> None:
    """A state is there where an answer ended and nowhere else, so the next turn finds it."""
    with pair("states", logs, maru_server, ("--disable-overlap-schedule",), page_size=1) as (one, two):
        turns = []
        for seed in (60, 61):
            first = one.ask(make_prompt(seed))
            assert first.cached_tokens == 0
            turns.append([*make_prompt(seed), *first.output_ids, *make_prompt(seed + 100, 20)])
        known = PROMPT_TOKENS + NEW_TOKENS - 1  # the last token of an answer was never put into the model
        right = [one.ask(turn) for turn in turns]
        assert [answer.device_tokens for answer in right] == [known, known]
        one.flush()
        for server in (two, one):
            answers = [server.ask(turn) for turn in turns]
            assert all(count >= known for count in loaded(answers)), server.log_text()[-3000:]
            assert [answer.output_ids for answer in answers] == [good.output_ids for good in right]
            server.flush()


def test_two_ranks(logs: Path, maru_server: MaruServer) -> None:
    """Tensor parallel: each rank its own shard, both decide alike."""
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with pair("ranks", logs, maru_server, tensor_parallel=2, env=env) as (server,):
        prompts = [make_prompt(seed) for seed in (62, 63)]
        right = [server.ask(prompt) for prompt in prompts]
        server.flush()
        answers = [server.ask(prompt) for prompt in prompts]
        assert loaded(answers) == [384, 384]
        assert all(same_answer(answer, good) for answer, good in zip(answers, right, strict=True))
        server.flush()
        maru_server.kill()
        computed = [server.ask(prompt) for prompt in prompts]
        assert loaded(computed) == [0, 0]
        assert all(same_answer(answer, good) for answer, good in zip(computed, right, strict=True))
