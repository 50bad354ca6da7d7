"""Other kinds of models, adapters and ranks in the real vLLM, as far as its CPU engine runs them.

As everywhere, what was stored and loaded is counted, and what is loaded is shown to be computed with.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import vllm_models
from vllm_child import Reply
from vllm_harness import (
    Engine,
    Forks,
    await_stored,
    blocks_of,
    loadable,
    make_prompt,
    overwrite_data,
    same,
    server_figures,
    settings,
)

from maru_bench.servers import MaruServer
from support import await_condition

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

PROMPT = 1100


def test_states_are_loaded_with_the_kv_beside_them(forks: Forks, maru_server: MaruServer) -> None:
    """A model of attention and convolutions: vLLM hands over the state at the ends of steps and of the prompt, and goes on from it."""
    model = vllm_models.make("states")
    prompts = [make_prompt(1, PROMPT), make_prompt(2, 400)]
    options: dict[str, Any] = {"mamba_cache_mode": "align", "max_num_batched_tokens": 200}
    with (
        Engine(forks, model, settings(maru_server), **options) as one,
        Engine(forks, model, settings(maru_server), **options) as two,
    ):
        assert sorted(one.run("groups")) == ["FullAttentionSpec", "MambaSpec"]
        cold = [one.ask(prompt)[0] for prompt in prompts]
        assert [reply.cached for reply in cold] == [0, 0]
        assert len({tuple(reply.ids) for reply in cold}) == 2
        one.run("drain")

        def loaded() -> list[Reply]:
            two.forget()
            return [two.ask(prompt)[0] for prompt in prompts]

        await_condition(
            lambda: [reply.cached for reply in loaded()] == [loadable(PROMPT), loadable(400)], "everything is loaded"
        )
        before = two.external()
        assert same(loaded(), cold)
        assert two.external() - before == loadable(PROMPT) + loadable(400)
        # The negative control, of the states alone and of all.
        assert overwrite_data(maru_server) > 0
        wrong = loaded()
        assert [reply.cached for reply in wrong] == [loadable(PROMPT), loadable(400)]
        assert not any(same([bad], [good]) for bad, good in zip(wrong, cold, strict=True))


def test_adapters_have_pages_of_their_own(forks: Forks, model: Path, maru_server: MaruServer, tmp_path: Path) -> None:
    """By content: the same name, number and path with other weights finds nothing."""
    prompt = make_prompt(3, 400)
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
    first, second = ((name, number, str(tmp_path / name)) for number, name in enumerate("ab", 1))
    vllm_models.make_adapter(tmp_path / "a", 1)
    vllm_models.make_adapter(tmp_path / "b", 2)

    def await_blocks(engine: Engine, adapter: tuple[str, int, str], expected: list[Reply], objects: int) -> None:
        """The first requests of an adapter are served without Maru, until its files are read: ask until all is stored."""

        def stored() -> bool:
            engine.forget()
            assert same(engine.ask(prompt, adapter=adapter), expected)
            return int(server_figures(maru_server.endpoint)["objects"]) >= objects

        await_condition(stored, "the blocks under the adapter are stored")
        await_stored(maru_server, objects)

    with (
        Engine(forks, model, settings(maru_server), **options) as one,
        Engine(forks, model, settings(maru_server), **options) as two,
    ):
        blocks = blocks_of(400)
        adapted = one.ask(prompt, adapter=first)
        await_blocks(one, first, adapted, blocks)
        plain = two.ask(prompt)
        assert (plain[0].cached, same(plain, adapted)) == (0, False)
        await_stored(maru_server, 2 * blocks)

        def loaded() -> bool:
            two.forget()
            reply = two.ask(prompt, adapter=first)
            assert same(reply, adapted)
            return reply[0].cached == loadable(400)

        await_condition(loaded, "the other engine loads the blocks under the adapter")
        assert two.external() == loadable(400)

        await_blocks(one, second, one.ask(prompt, adapter=second), 3 * blocks)
        vllm_models.make_adapter(tmp_path / "b", 3)
        other = two.ask(prompt, adapter=second)
        await_blocks(two, second, other, 4 * blocks)
        one.forget()
        assert not same(one.ask(prompt, adapter=second), other)


def test_two_ranks(forks: Forks, model: Path, maru_server: MaruServer) -> None:
    """Each stores and loads its heads; a page is there when both have stored it."""
    prompts = [make_prompt(4, PROMPT), make_prompt(5, 330)]
    blocks = sum(blocks_of(len(prompt)) for prompt in prompts)

    def engine(_: int) -> Engine:
        # Processes that share two cores with others: a slow answer is no miss.
        return Engine(forks, model, settings(maru_server, timeout_ms=30_000), tensor_parallel_size=2)

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(engine, range(2))
    with one, two:
        cold = one.ask(*prompts)
        assert [reply.cached for reply in cold] == [0, 0]
        await_stored(maru_server, 2 * blocks)
        figures = server_figures(maru_server.endpoint)
        assert (figures["pages"], figures["namespaces"]) == (blocks, 1)
        loaded = two.ask(*prompts)
        assert [reply.cached for reply in loaded] == [loadable(len(prompt)) for prompt in prompts]
        assert same(loaded, cold)
        assert two.external() == sum(loadable(len(prompt)) for prompt in prompts)
        two.run("drain")
    await_stored(maru_server, 2 * blocks)
