"""A hybrid model in the real vLLM: full attention and sliding windows, two KV cache groups with a rule each.

The model is the kit's Llama with every other layer told to look back 64 tokens: vLLM's own hybrid allocator frees the blocks that no
window reaches any more, while the request runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_child import Reply
from vllm_harness import (
    BLOCK,
    Engine,
    Forks,
    blocks_of,
    loadable,
    make_prompt,
    overwrite_data,
    right_in_steps,
    same,
    server_figures,
    settings,
)

from maru_bench.servers import MaruServer
from support import await_condition

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

PROMPT = 1100
WINDOW = 64
HYBRID: dict[str, Any] = {
    "hf_overrides": {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": WINDOW},
}


@pytest.fixture(scope="module")
def plain(forks: Forks, model: Path) -> Iterator[Engine]:
    with Engine(forks, model, plain=True, **HYBRID) as engine:
        yield engine


def right(plain: Engine, prompt: list[int], tokens: int = 8) -> list[Reply]:
    plain.forget()
    return plain.ask(prompt, tokens=tokens)


def await_found(engine: Engine, server: MaruServer, prompt: list[int]) -> Reply:
    """Ask until everything that can be loaded is: stores end when they end."""

    def all_loaded() -> bool:
        engine.forget()
        answers.append(engine.ask(prompt)[0])
        return answers[-1].cached == loadable(len(prompt))

    answers: list[Reply] = []
    await_condition(all_loaded, f"all blocks are loaded, of {server_figures(server.endpoint)['objects']} objects")
    return answers[-1]


def test_another_engine_goes_on_where_both_groups_can(forks: Forks, model: Path, maru_server: MaruServer) -> None:
    """The budget of a step is small, so the window's blocks are freed while the prompt is computed, and all were stored before."""
    prompt = make_prompt(1, PROMPT)
    options = {"max_num_batched_tokens": 200, **HYBRID}
    with Engine(forks, model, plain=True, **options) as local:
        cold, warm = right_in_steps(local, prompt)
    with (
        Engine(forks, model, settings(maru_server), **options) as one,
        Engine(forks, model, settings(maru_server), **options) as two,
    ):
        assert sorted(one.run("groups")) == ["FullAttentionSpec", "SlidingWindowSpec"]
        assert same(one.ask(prompt), cold)
        loaded = await_found(two, maru_server, prompt)
        assert same([loaded], warm)
        assert two.figures()["maru_failed_load_blocks/evicted"] == 0


def test_a_prefix_that_ends_inside_what_is_stored(
    forks: Forks, model: Path, plain: Engine, maru_server: MaruServer
) -> None:
    """Another prompt goes its own way after 500 tokens: there the window's blocks are needed that came before."""
    prompt = make_prompt(2, PROMPT)
    branch = [*prompt[:500], *make_prompt(3, 300)]
    expected = right(plain, branch)
    with Engine(forks, model, settings(maru_server), max_num_batched_tokens=200, **HYBRID) as engine:
        engine.ask(prompt)
        await_found(engine, maru_server, prompt)
        engine.forget()
        before = engine.external()
        answer = engine.ask(branch)
        assert same(answer, expected)
        assert engine.external() - before == blocks_of(500) * BLOCK


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_loads_of_several_groups_that_fail(
    forks: Forks, model: Path, plain: Engine, maru_server: MaruServer, policy: str
) -> None:
    """With several groups vLLM wants the requests that failed, not the blocks."""
    prompts = [make_prompt(5 + number, 500) for number in range(2)]
    expected = [right(plain, prompt)[0] for prompt in prompts]
    careful = settings(maru_server, verify="checksum")
    with Engine(forks, model, careful, transfer={"kv_load_failure_policy": policy}, **HYBRID) as engine:
        for prompt, good in zip(prompts, expected, strict=True):
            assert same([await_found(engine, maru_server, prompt)], [good])
        engine.forget()
        assert overwrite_data(maru_server) > 0
        before = engine.external(all_used=False)
        replies = engine.ask(*prompts)
        assert sum(value for name, value in engine.figures().items() if name.startswith("maru_failed_load")) > 0
        if policy == "recompute":
            assert same(replies, expected)
            assert engine.external(all_used=False) == before, "nothing of it was used"
        else:
            assert [reply.ended for reply in replies] == ["error", "error"]
        engine.run("drain")
        assert engine.run("free_blocks") == engine.run("all_blocks"), "a failed load gives its blocks back"
        # The damaged pages are gone: they are computed, stored and loaded again.
        for prompt, good in zip(prompts, expected, strict=True):
            assert same([await_found(engine, maru_server, prompt)], [good])


def test_an_engine_without_windows_shares_nothing(forks: Forks, model: Path, maru_server: MaruServer) -> None:
    prompt = make_prompt(4, 300)
    with (
        Engine(forks, model, settings(maru_server), **HYBRID) as one,
        Engine(forks, model, settings(maru_server)) as two,
    ):
        one.ask(prompt)
        await_found(one, maru_server, prompt)
        assert two.ask(prompt)[0].cached == 0
