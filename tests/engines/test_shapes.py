"""Real servers of other shapes than a plain Llama with default settings: what one computed another one loads, and it is right.

Each pair of servers shares one ``maru-server``. What runs with ``make test`` is one case of each kind of pool that SGLang serves on
a CPU; the others are marked ``slow`` (docs/testing.md has the command and the last result).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import (
    NEW_TOKENS,
    PROMPT_TOKENS,
    EngineServer,
    has_gpu,
    make_model,
    make_prompt,
    options,
    overwrite_data,
    patient,
    same_answer,
    start_all,
)

from maru_bench.servers import MaruServer
from support import await_condition

pytestmark = [pytest.mark.sglang, pytest.mark.server, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Case:
    """A shape, and how many of a prompt's tokens a server must load that did not compute them.

    ``asked``: how often the first server is asked before it stores. ``crowd``: prompts after which it has no room left for the
    ones that count, and writes them back. ``prefix``: whether what is loaded is compared with an answer after the same prefix on
    the device, since SGLang computes a prompt with and without a prefix by different formulas. ``alone``: one server, which loads what
    it has lost itself."""

    name: str
    stored: int = 384
    model: str | None = None
    page: int = 16
    layout: str | None = None
    tokens: int = 4096
    asked: int = 1
    crowd: int = 0
    prefix: bool = False
    alone: bool = False
    arguments: tuple[str, ...] = ()


@contextmanager
def pair(case: Case, logs: Path, maru: MaruServer) -> Iterator[tuple[EngineServer, EngineServer]]:
    chosen = options(
        make_model(shape=case.model),
        page_size=case.page,
        layout=case.layout,
        max_total_tokens=case.tokens,
        extra_config=patient(maru),
        arguments=case.arguments,
    )
    one, two = (
        EngineServer(f"{case.name} {name}", chosen, logs / f"{case.name}-{name}.log") for name in ("one", "two")
    )
    if case.alone:
        two = one
    start_all([one] if case.alone else [one, two])
    try:
        yield one, two
    finally:
        one.stop()
        two.stop()


def check(case: Case, logs: Path, maru: MaruServer) -> None:
    """Cold on one server; from the store on another, and on the first after it lost its own; and the negative control."""
    with pair(case, logs, maru) as (one, two):
        prompts = [make_prompt(seed) for seed in (60, 61)]
        right = [one.ask(prompt) for prompt in prompts]
        assert [answer.cached_tokens for answer in right] == [0, 0]
        assert right[0].logprobs != right[1].logprobs
        for number in range(1, max(case.asked, 1 + case.prefix)):
            again = [one.ask(prompt) for prompt in prompts]
            assert [answer.storage_tokens for answer in again] == [0, 0]
            if case.prefix and number == 1:
                right = again
        for seed in range(case.crowd):
            one.ask(make_prompt(70 + seed))
        one.flush()

        def loaded(server: EngineServer) -> bool:
            """Everything that was stored came from the store, and nothing else."""
            server.flush()
            answers = [server.ask(prompt) for prompt in prompts]
            assert all(same_answer(answer, good) for answer, good in zip(answers, right, strict=True))
            return [answer.storage_tokens for answer in answers] == [case.stored] * 2

        for server in (two, one):
            if case.crowd:
                await_condition(lambda server=server: loaded(server), "what was written back is there")
            else:
                assert loaded(server), server.log_text()[-3000:]
        two.flush()
        assert overwrite_data(Path("/dev/shm", maru.pool_name)) > 0
        damaged = [two.ask(prompt) for prompt in prompts]
        assert [answer.storage_tokens for answer in damaged] == [case.stored] * 2
        assert all(answer.logprobs != good.logprobs for answer, good in zip(damaged, right, strict=True))


def test_sliding_windows(logs: Path, maru_server: MaruServer) -> None:
    """Half of the layers see 64 tokens: their KV is a component of its own, of which the last 64 tokens are enough."""
    check(Case("sliding", model="sliding"), logs, maru_server)


def test_states(logs: Path, maru_server: MaruServer) -> None:
    """Half of the layers keep a state. It is there where an answer ended and nowhere else, so the next turn finds it."""
    case = Case("states", model="states", page=1, arguments=("--disable-overlap-schedule",))
    with pair(case, logs, maru_server) as (one, two):
        turns, right = [], []
        known = PROMPT_TOKENS + NEW_TOKENS - 1  # the last token of an answer was never put into the model
        for seed in (60, 61):
            first = one.ask(make_prompt(seed))
            assert first.cached_tokens == 0
            turns.append([*make_prompt(seed), *first.output_ids, *make_prompt(seed + 100, 20)])
        one.flush()
        status, message = one.detach()
        assert status == 200, message
        one.flush()
        for seed, turn in zip((60, 61), turns, strict=True):
            one.ask(make_prompt(seed))
            answer = one.ask(
                turn
            )  # by its own cache: without it the answer's KV would be of a prefill, which rounds otherwise
            assert answer.device_tokens == known
            right.append(answer)
        one.flush()
        status, message = one.attach("maru", patient(maru_server))
        assert status == 200, message
        for server in (two, one):
            loaded = [server.ask(turn) for turn in turns]
            assert [answer.storage_tokens for answer in loaded] == [known] * 2, server.log_text()[-3000:]
            assert all(same_answer(answer, good) for answer, good in zip(loaded, right, strict=True))
            server.flush()
        assert overwrite_data(Path("/dev/shm", maru_server.pool_name)) > 0
        damaged = [two.ask(turn) for turn in turns]
        assert [answer.storage_tokens for answer in damaged] == [known] * 2
        assert all(answer.logprobs != good.logprobs for answer, good in zip(damaged, right, strict=True))


def test_compressed_kv(logs: Path, maru_server: MaruServer) -> None:
    """Multi-head latent attention."""
    check(Case("compressed", model="compressed", prefix=True, alone=True), logs, maru_server)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("page-1", 399, page=1, layout="layer_first"),
        Case("page-64-heads-outermost", page=64, layout="page_head"),
        Case("direct-copies", layout="page_first_direct", arguments=("--hicache-io-backend", "direct")),
        Case("write-back", tokens=1200, crowd=8, arguments=("--hicache-write-policy", "write_back")),
        Case("selective", asked=4, arguments=("--hicache-write-policy", "write_through_selective")),
        Case("buffer-only", arguments=("--hicache-host-memory-mode", "buffer_only")),
        Case("compressed-page-64", model="compressed", page=64, prefix=True, layout="page_first_direct"),
        Case("sliding-page-1", 399, model="sliding", page=1),
    ],
    ids=lambda case: case.name,
)
def test_other_settings(case: Case, logs: Path, maru_server: MaruServer) -> None:
    check(case, logs, maru_server)


@pytest.mark.slow
def test_servers_of_one_and_two_ranks_share(logs: Path, model: Path, maru_server: MaruServer) -> None:
    """Each of two ranks loads its heads out of what one rank stored. Two ranks add up in another order than one, so the first
    log probabilities are near one another, and not equal; with other bytes one of them at least is far off."""
    if has_gpu() or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two ranks on two CPU cores")
    common: dict[str, Any] = {"layout": "page_head", "extra_config": patient(maru_server, tp_lcm_size=2)}
    cores = sorted(os.sched_getaffinity(0))
    bound = {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[1]}"}
    one = EngineServer("one rank", options(model, **common), logs / "one-rank.log")
    two = EngineServer("two ranks", options(model, tensor_parallel=2, env=bound, **common), logs / "of-two-ranks.log")
    start_all([one, two])
    try:
        prompts = [make_prompt(seed) for seed in (65, 66)]
        cold = [one.ask(prompt) for prompt in prompts]
        one.flush()

        def distances() -> list[float]:
            two.flush()
            loaded = [two.ask(prompt) for prompt in prompts]
            assert [answer.storage_tokens for answer in loaded] == [384] * 2
            return [abs(a.logprobs[0] - b.logprobs[0]) for a, b in zip(loaded, cold, strict=True)]

        near = distances()
        assert overwrite_data(Path("/dev/shm", maru_server.pool_name)) > 0
        far = distances()
        assert max(near) < 0.1, (near, far)
        assert max(far) > 5 * max(near), (near, far)
    finally:
        one.stop()
        two.stop()


@pytest.mark.slow
def test_fp8_is_refused_by_sglang_on_a_cpu_without_amx(logs: Path, model: Path, maru_server: MaruServer) -> None:
    """So what FP8 pages do is shown in one process (tests/sglang/test_parallel_shapes.py)."""
    if has_gpu():
        pytest.skip("a machine without a GPU")
    chosen = options(model, extra_config={"server": maru_server.endpoint}, arguments=("--kv-cache-dtype", "fp8_e4m3"))
    server = EngineServer("fp8", chosen, logs / "fp8.log")
    with pytest.raises(Exception, match="fp8"):
        start_all([server])
    assert "CPU FP8 KV cache requires Intel AMX support" in server.log_text()
