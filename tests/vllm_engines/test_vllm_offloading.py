"""vLLM's own OffloadingConnector on Maru: blocks that one engine stored are another's, with the same answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_harness import Engine, Forks, blocks_of, loadable, make_prompt, right_in_steps, same, server_figures

from maru_bench.servers import MaruServer
from maru_core.pool import PoolMemory, parse_pool_uri

pytestmark = pytest.mark.vllm


@pytest.fixture
def offloading(forks: Forks, model: Path, maru_server: MaruServer) -> Callable[..., Engine]:
    def make(options: dict[str, Any] | None = None, **extra: Any) -> Engine:
        return Engine(
            forks,
            model,
            {"spec_name": "MaruOffloadingSpec", "server": maru_server.endpoint, "timeout_ms": 5000} | extra,
            transfer={"kv_connector": "OffloadingConnector"},
            **(options or {}),
        )

    return make


def damage(server: MaruServer) -> None:
    """Flip the sign of every number in the pool."""
    memory = PoolMemory.attach(parse_pool_uri(server.pool))
    try:
        memory.data.view(np.uint16)[:] ^= np.uint16(0x8000)
    finally:
        memory.close()


def test_one_engine_takes_what_another_stored(
    offloading: Callable[..., Engine], forks: Forks, model: Path, maru_server: MaruServer
) -> None:
    prompts = [make_prompt(1, 1100), make_prompt(2, 300)]
    with Engine(forks, model, plain=True) as plain:
        expected = plain.ask(*prompts, tokens=40)
    with Engine(forks, model, plain=True, max_num_batched_tokens=200) as local:
        cold, warm = right_in_steps(local, *prompts, tokens=40)
    # A budget that is no multiple of a block: prompts are computed, and stored, in pieces.
    with offloading({"max_num_batched_tokens": 200}) as first:
        assert same(first.ask(*prompts, tokens=40), cold)
        first.run("drain")
        assert first.external() == 0
        assert first.figures()["kv_offload_store_bytes"] > 0
    stored = server_figures(maru_server.endpoint)["pages"]
    # The last token of an answer is never computed with.
    assert stored == blocks_of(1100 + 39) + blocks_of(300 + 39)
    with offloading() as second:
        assert same(second.ask(*prompts, tokens=40), warm)
        second.run("drain")
        assert second.external() == loadable(1100) + loadable(300)
        assert second.figures()["prompt_tokens_by_source/local_compute"] == 1100 + 300 - loadable(1100) - loadable(300)
    assert server_figures(maru_server.endpoint)["pages"] == stored
    assert server_figures(maru_server.endpoint)["held_bytes"] == 0
    # Negative control: an engine under another tag finds nothing, and its answers are the same.
    with offloading(tag="other") as other:
        assert same(other.ask(*prompts, tokens=40), expected)
        assert other.external() == 0
    # And what is loaded is what is computed with.
    damage(maru_server)
    with offloading() as third:
        assert not same(third.ask(*prompts, tokens=40), warm)
        assert third.external() == loadable(1100) + loadable(300)


def test_requests_that_do_not_fit_together(
    offloading: Callable[..., Engine], forks: Forks, model: Path, maru_server: MaruServer
) -> None:
    """Blocks are taken away and given to others while they are being stored, loads wait for room, and a prefix is shared."""
    shared = make_prompt(9, 200)
    prompts = [shared + make_prompt(30 + number, 90 + number) for number in range(5)]
    with Engine(forks, model, plain=True) as plain:
        expected = [plain.ask(prompt, tokens=120)[0] for prompt in prompts]
    with offloading({"num_gpu_blocks_override": 40, "max_model_len": 640}) as engine:
        assert same(engine.ask(*prompts, tokens=120), expected)
        assert engine.figures()["num_preemptions"] > 0
        engine.run("drain")
        assert engine.run("free_blocks") == 39, "all blocks are free again, but the null block"
        engine.forget()
        assert same(engine.ask(*prompts, tokens=120), expected)
        assert engine.external() > 0
        engine.run("drain")
    with offloading() as other:
        # What was stored in the turmoil is right.
        assert same(other.ask(*prompts, tokens=120), expected)
        assert other.external() >= 5 * loadable(290) * 3 // 4 - 4 * loadable(200)
        other.run("drain")
    assert server_figures(maru_server.endpoint)["held_bytes"] == 0


def test_a_load_that_fails_stops_the_engine_before_a_token(
    offloading: Callable[..., Engine], maru_server: MaruServer
) -> None:
    """vLLM's connector has no way to report it, and would go on with what lies in the blocks."""
    prompt = make_prompt(3, 200)
    with offloading(verify="checksum") as first:
        first.ask(prompt)
        first.run("drain")
    damage(maru_server)
    with (
        offloading(verify="checksum", hold_s=1.0) as second,
        pytest.raises(AssertionError, match=r"LoadFailedError: 6 KV blocks .*miss_checksum .*MaruConnector"),
    ):
        second.ask(prompt)
