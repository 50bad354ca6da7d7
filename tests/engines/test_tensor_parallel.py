"""One real SGLang server of two ranks: each stores and reloads its own shard, and a page counts only when both are there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import STORED_TOKENS, EngineServer, has_gpu, make_prompt, options, patient, same_answer, start_all

from maru_bench.servers import MaruServer

pytestmark = [pytest.mark.sglang, pytest.mark.server, pytest.mark.timeout(420)]


def ranks_that_fit() -> int:
    if has_gpu():
        import torch

        return int(torch.cuda.device_count())
    return len(os.sched_getaffinity(0))


@pytest.fixture
def two_ranks(logs: Path, model: Path, maru_server: MaruServer) -> Iterator[EngineServer]:
    if ranks_that_fit() < 2:
        pytest.skip(f"tensor parallel needs two GPUs, or two CPU cores without one; here are {ranks_that_fit()}")
    cores = sorted(os.sched_getaffinity(0))
    chosen = options(
        model,
        tensor_parallel=2,
        extra_config=patient(maru_server),
        env={"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[1]}"},
    )
    server = EngineServer("two ranks", chosen, logs / "two-ranks.log")
    start_all([server])
    yield server
    server.stop()


def test_each_rank_reloads_its_shard(two_ranks: EngineServer, maru_server: MaruServer) -> None:
    prompts = [make_prompt(seed) for seed in (40, 41)]
    cold = [two_ranks.ask(prompt) for prompt in prompts]
    assert [answer.cached_tokens for answer in cold] == [0, 0]
    for _ in range(2):
        two_ranks.flush()
        again = [two_ranks.ask(prompt) for prompt in prompts]
        assert [answer.storage_tokens for answer in again] == [STORED_TOKENS, STORED_TOKENS]
        assert all(same_answer(one, other) for one, other in zip(cold, again, strict=True))

    two_ranks.flush()
    maru_server.kill()
    without = [two_ranks.ask(prompt) for prompt in prompts]
    assert [answer.storage_tokens for answer in without] == [0, 0]
    assert all(same_answer(one, other) for one, other in zip(cold, without, strict=True))
