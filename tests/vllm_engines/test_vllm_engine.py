"""vLLM itself with Maru: what is computed once is loaded afterwards, exactly, and nothing that goes wrong is felt.

Every test asserts how many blocks were stored and how many tokens were loaded, by Maru's count and by vLLM's: equal answers alone
would also come from an engine that computed everything.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm_child import Reply
from vllm_harness import (
    Engine,
    Forks,
    await_stored,
    blocks_of,
    loadable,
    make_prompt,
    overwrite_data,
    right_in_steps,
    same,
    server_figures,
    settings,
)

from forked import silence
from maru_bench.servers import MaruServer
from support import await_condition

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

PROMPT = 1100


@pytest.fixture(scope="module")
def plain(forks: Forks, model: Path) -> Iterator[Engine]:
    """An engine without a connector: what is right. It forgets between questions, so it computes everything."""
    with Engine(forks, model, plain=True) as engine:
        yield engine


@dataclass
class Pair:
    """Two engines with the same settings, and their server: for tests that need no others."""

    one: Engine
    two: Engine
    server: MaruServer

    def stored(self) -> int:
        return int(server_figures(self.server.endpoint)["objects"])


@pytest.fixture(scope="module")
def both(forks: Forks, model: Path) -> Iterator[Pair]:
    with (
        tempfile.TemporaryDirectory(prefix="maru-vllm-") as directory,
        MaruServer(Path(directory), size="256M") as server,
        Engine(forks, model, settings(server)) as one,
        Engine(forks, model, settings(server)) as two,
    ):
        yield Pair(one, two, server)


@pytest.fixture
def pair(both: Pair) -> Pair:
    """With nothing in their own caches."""
    both.one.forget()
    both.two.forget()
    return both


def right(plain: Engine, *prompts: list[int], tokens: int = 8) -> list[Reply]:
    plain.forget()
    return plain.ask(*prompts, tokens=tokens)


def test_answers_depend_on_all_of_the_prompt(plain: Engine) -> None:
    """Otherwise equal answers would prove nothing."""
    prompts = [make_prompt(seed, PROMPT) for seed in range(4)]
    prompts += [[prompt[0] + 1, *prompt[1:]] for prompt in prompts]
    answers = right(plain, *prompts)
    assert len({tuple(answer.ids) for answer in answers[:4]}) == 4
    assert len({tuple(answer.logprobs) for answer in answers}) == len(prompts)


def test_another_engine_loads_what_one_computed(plain: Engine, pair: Pair) -> None:
    prompt = make_prompt(1, PROMPT)
    expected = right(plain, prompt)
    one, two, stored = pair.one, pair.two, pair.stored()
    before, computed = two.external(), two.figures()["prompt_tokens_by_source/local_compute"]
    cold = one.ask(prompt)
    assert cold[0].cached == 0
    await_stored(pair.server, stored + blocks_of(PROMPT))
    shared = two.ask(prompt)
    assert (shared[0].cached, two.external() - before) == (loadable(PROMPT), loadable(PROMPT))
    assert two.figures()["prompt_tokens_by_source/local_compute"] - computed == PROMPT - loadable(PROMPT)
    assert same(cold, expected)
    assert same(shared, expected)
    # What was loaded is a block like any other: found in vLLM's own cache the next time, and not stored again.
    again = two.ask(prompt)
    assert (again[0].cached, two.external() - before) == (loadable(PROMPT), loadable(PROMPT))
    assert same(again, expected)
    two.run("drain")
    await_stored(pair.server, stored + blocks_of(PROMPT))


@pytest.mark.parametrize("budget", [100, 384])
def test_chunked_prefill(forks: Forks, model: Path, maru_server: MaruServer, budget: int) -> None:
    """Steps end in the middle of a block, and every step's blocks are stored."""
    prompt = make_prompt(2, PROMPT)
    longer = prompt + make_prompt(3, 550)
    with Engine(forks, model, plain=True, max_num_batched_tokens=budget) as local:
        cold, warm = right_in_steps(local, prompt)
        (gone_on,) = local.ask(longer)
    with Engine(forks, model, settings(maru_server), max_num_batched_tokens=budget) as engine:
        assert same(engine.ask(prompt), cold)
        await_stored(maru_server, blocks_of(PROMPT))
        engine.forget()
        loaded = engine.ask(prompt)
        assert (loaded[0].cached, engine.external()) == (loadable(PROMPT), loadable(PROMPT))
        assert same(loaded, warm)
        # Two thirds are there, the rest is computed in chunks after it, and stored too.
        engine.forget()
        grown = engine.ask(longer)
        assert grown[0].cached == blocks_of(PROMPT) * 32
        assert same(grown, [gone_on])
        await_stored(maru_server, blocks_of(len(longer)))
        engine.forget()
        assert engine.ask(longer)[0].cached == loadable(len(longer))


def test_a_prompt_that_is_there_to_its_last_token(
    forks: Forks, model: Path, plain: Engine, maru_server: MaruServer
) -> None:
    """Of whole blocks, the last is computed again: vLLM needs a token to go on from."""
    lengths = (1024, 64, 33, 32, 31)
    prompts = [make_prompt(10 + length, length) for length in lengths]
    with Engine(forks, model, settings(maru_server)) as engine:
        for prompt in prompts:
            engine.ask(prompt, tokens=1)
        await_stored(maru_server, sum(map(blocks_of, lengths)))
        engine.forget()
        total = 0
        for prompt in prompts:
            expected = right(plain, prompt)
            loaded = engine.ask(prompt)
            total += loadable(len(prompt))
            assert (len(prompt), loaded[0].cached, engine.external()) == (len(prompt), loadable(len(prompt)), total)
            assert same(loaded, expected)


def test_prompts_with_shared_prefixes_at_once(plain: Engine, pair: Pair) -> None:
    prefix = make_prompt(20, 320)
    prompts = [prefix + make_prompt(21 + number, 150 + 10 * number) for number in range(6)]
    prompts.append(prefix[:200])
    expected = [right(plain, prompt)[0] for prompt in prompts]
    # The last of the eight tokens of an answer has no KV.
    stored = (
        pair.stored()
        + blocks_of(len(prefix))
        + sum(blocks_of(len(prompt) + 7) - blocks_of(len(prefix)) for prompt in prompts[:-1])
    )
    before = pair.two.external()
    assert same(pair.one.ask(*prompts), expected)
    await_stored(pair.server, stored)
    together = pair.two.ask(*prompts)
    assert same(together, expected)
    assert [reply.cached for reply in together] == [loadable(len(prompt)) for prompt in prompts]
    # A shared block is loaded by one request, or by several that waited at the same time; never not at all.
    loaded = pair.two.external() - before
    assert loadable(len(prompts[5])) <= loaded <= sum(loadable(len(prompt)) for prompt in prompts)
    pair.two.run("drain")
    await_stored(pair.server, stored)


def test_preemption(forks: Forks, model: Path, plain: Engine, maru_server: MaruServer) -> None:
    """A KV cache in which not all requests fit: they are thrown out, and come back through Maru or by computing."""
    prompts = [make_prompt(30 + number, 290 + number) for number in range(5)]
    expected = [right(plain, prompt, tokens=120)[0] for prompt in prompts]
    extra = settings(maru_server)
    with Engine(forks, model, extra, num_gpu_blocks_override=48, max_model_len=640) as engine:
        replies = engine.ask(*prompts, tokens=120)
        assert engine.figures()["num_preemptions"] > 0
        assert same(replies, expected)
        engine.run("drain")
        await_condition(lambda: server_figures(maru_server.endpoint)["objects"] >= 30, "most blocks are stored")
        assert engine.run("free_blocks") == 47, "all blocks are free again, but the null block"
        engine.forget()
        loaded = engine.ask(*prompts, tokens=120)
        assert same(loaded, expected)
        assert engine.external() > 0
    with Engine(forks, model, extra) as other:
        # What was stored in the turmoil is right.
        replies = other.ask(*prompts, tokens=120)
        assert same(replies, expected)
        assert other.external() >= 5 * loadable(290) * 3 // 4


def test_blocks_are_not_overwritten_while_they_are_stored(
    forks: Forks, model: Path, plain: Engine, maru_server: MaruServer
) -> None:
    """The server is silent while a prompt's blocks are to be stored, and vLLM needs those very blocks for the next prompt."""
    prompt, other = make_prompt(120, 640), make_prompt(121, 1200)
    expected = {"a": right(plain, prompt, tokens=1)[0], "b": right(plain, other, tokens=1)[0]}
    extra = settings(maru_server, timeout_ms=4000)
    with Engine(forks, model, extra, num_gpu_blocks_override=44, max_model_len=1280, max_num_seqs=1) as engine:
        engine.run("begin", {"a": (prompt, 1), "b": (other, 1)})
        await_condition(lambda: server_figures(maru_server.endpoint)["matches"] >= 2, "both were looked up")
        silence(maru_server.process)
        assert engine.run("finish") == expected
        maru_server.process.signal(signal.SIGCONT)
        engine.run("drain")
        await_condition(
            lambda: not server_figures(maru_server.endpoint)["slots_reserved"], "no store is under way any more"
        )
        for _ in range(2):
            engine.forget()
            assert same(engine.ask(prompt, tokens=1), [expected["a"]])


def test_decoded_blocks_serve_the_second_turn(
    forks: Forks, model: Path, plain: Engine, maru_server: MaruServer
) -> None:
    prompt = make_prompt(40, 100)
    [first] = right(plain, prompt, tokens=100)
    turn = prompt + first.ids + make_prompt(41, 30)
    expected = right(plain, turn)
    stored = 0
    for store_decode, blocks in ((False, 3), (True, 6)):
        with Engine(forks, model, settings(maru_server, store_decode=store_decode, tag=str(store_decode))) as engine:
            assert same(engine.ask(prompt, tokens=100), [first])
            # 199 tokens have KV: the last one was never computed on.
            await_stored(maru_server, stored + blocks)
            engine.forget()
            loaded = engine.ask(turn)
            assert (loaded[0].cached, engine.external()) == (blocks * 32, blocks * 32)
            assert same(loaded, expected)
            engine.run("drain")
            stored += blocks_of(len(turn))
            await_stored(maru_server, stored)


def test_changed_bytes_change_the_answer(forks: Forks, model: Path, plain: Engine, maru_server: MaruServer) -> None:
    """The negative control: the answers come from the bytes in the pool."""
    prompts = [make_prompt(50 + number, 500) for number in range(3)]
    expected = [right(plain, prompt)[0] for prompt in prompts]
    with Engine(forks, model, settings(maru_server)) as engine:
        assert same(engine.ask(*prompts), expected)
        await_stored(maru_server, 3 * blocks_of(500))
        assert overwrite_data(maru_server) > 0
        engine.forget()
        for prompt, good in zip(prompts, expected, strict=True):
            [wrong] = engine.ask(prompt)
            assert wrong.cached == loadable(500)
            assert wrong.logprobs != good.logprobs
            assert wrong.ids != good.ids


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_loads_that_fail(forks: Forks, model: Path, plain: Engine, maru_server: MaruServer, policy: str) -> None:
    """Pages that are there when they are looked up and wrong when they are loaded."""
    prompts = [make_prompt(60 + number, 500) for number in range(2)]
    expected = [right(plain, prompt)[0] for prompt in prompts]
    extra = settings(maru_server, verify="checksum")
    with Engine(forks, model, extra, transfer={"kv_load_failure_policy": policy}) as engine:
        assert same(engine.ask(*prompts), expected)
        await_stored(maru_server, 2 * blocks_of(500))
        engine.forget()
        # The second half of what was stored, so that loads fail in the middle of a chain or at its start.
        assert overwrite_data(maru_server, share=0.5) > 0
        replies = engine.ask(*prompts)
        found = engine.figures()
        assert found["external_prefix_cache_hits"] == 2 * loadable(500), "everything was promised"
        assert found["prompt_tokens_by_source/external_kv_transfer"] < 2 * loadable(500), "and not everything came"
        if policy == "recompute":
            assert same(replies, expected)
        else:
            assert "error" in [reply.ended for reply in replies]
            for reply, good in zip(replies, expected, strict=True):
                assert reply.ended == "error" or same([reply], [good])
        engine.run("drain")
        assert engine.run("free_blocks") == engine.run("all_blocks"), "a failed load gives its blocks back"
        # The damaged pages are gone, so the next one computes and stores them, and the one after that loads.
        engine.forget()
        assert same(engine.ask(*prompts), expected)
        await_stored(maru_server, 2 * blocks_of(500))
        engine.forget()
        before = engine.external(all_used=False)
        assert same(engine.ask(*prompts), expected)
        assert engine.external(all_used=False) - before == 2 * loadable(500)


def test_the_server_goes_and_comes_back(forks: Forks, model: Path, plain: Engine, maru_server: MaruServer) -> None:
    prompts = [make_prompt(70 + number, 400) for number in range(4)]
    expected = [right(plain, prompt)[0] for prompt in prompts]
    extra = settings(maru_server)
    with Engine(forks, model, extra, transfer={"kv_load_failure_policy": "recompute"}) as engine:
        assert same(engine.ask(*prompts[:2]), expected[:2])
        await_stored(maru_server, 2 * blocks_of(400))

        def all_right() -> int:
            """Ask everything; tokens that came from Maru."""
            engine.forget()
            before = engine.external(all_used=False)
            assert same(engine.ask(*prompts), expected)
            return engine.external(all_used=False) - before

        engine.run("limit_calls", 0.2)
        silence(maru_server.process)  # there, but silent
        assert all_right() == 0
        maru_server.process.signal(signal.SIGCONT)
        maru_server.kill()
        assert all_right() == 0, "nothing can come from a server that is not there"
        # Between the lookup and the load.
        maru_server.start()
        engine.run("limit_calls", 5.0)
        await_condition(lambda: all_right() >= 2 * loadable(400), "loads come back with the server")
        engine.forget()
        engine.run("begin", {"late": (prompts[0], 8)})
        await_condition(lambda: server_figures(maru_server.endpoint)["holds"] == 1, "the request was looked up")
        maru_server.kill()
        assert same([engine.run("finish")["late"]], expected[:1])
        maru_server.start()
        await_condition(lambda: all_right() == 4 * loadable(400), "everything is stored and loaded again")


def test_aborted_requests(forks: Forks, model: Path, plain: Engine, maru_server: MaruServer) -> None:
    """While it computes, and while it loads: its blocks come back when nothing is written into them any more."""
    prompt, other = make_prompt(80, 600), make_prompt(81, 600)
    expected = right(plain, prompt)
    # A silent server is waited for until it speaks again, however slowly this test comes to that.
    extra = settings(maru_server, timeout_ms=60_000)
    with Engine(forks, model, extra, max_num_batched_tokens=256) as engine:
        free = engine.run("free_blocks")
        engine.run("begin", {"x": (other, 50)})
        engine.run("compute", "x", 512)  # of 600 tokens
        engine.run("abort", ["x"])
        engine.run("drain")
        assert engine.run("free_blocks") == free
        await_stored(maru_server, blocks_of(512))

        assert same(engine.ask(prompt), expected)
        await_stored(maru_server, blocks_of(512) + blocks_of(600))
        engine.forget()
        engine.run("begin", {"y": (prompt, 8)})
        await_condition(lambda: server_figures(maru_server.endpoint)["holds"] == 1, "the request was looked up")
        silence(maru_server.process)
        await_condition(
            lambda: (engine.run("step"), engine.run("free_blocks") < free)[1], "the load has blocks, and is under way"
        )
        engine.run("abort", ["y"])
        engine.run("step", 1)
        assert engine.run("free_blocks") < free, "the load is under way"
        maru_server.process.signal(signal.SIGCONT)
        engine.run("drain")
        assert engine.run("free_blocks") == free
        engine.forget()
        assert same(engine.ask(prompt), expected)
        assert engine.external(all_used=False) == loadable(600)
        await_condition(lambda: server_figures(maru_server.endpoint)["holds"] == 0, "no hold is left")


def test_reset_cache(forks: Forks, model: Path, plain: Engine, maru_server: MaruServer) -> None:
    prompt = make_prompt(90, 400)
    expected = right(plain, prompt)
    with Engine(forks, model, settings(maru_server)) as engine:
        engine.ask(prompt)
        await_stored(maru_server, blocks_of(400))
        assert engine.run("reset_connector")
        assert server_figures(maru_server.endpoint)["objects"] == 0
        assert same(engine.ask(prompt), expected)
        assert engine.external() == 0
        await_stored(maru_server, blocks_of(400))
        engine.run("limit_calls", 0.5)
        maru_server.kill()
        assert not engine.run("reset_connector"), "what was not done is not reported as done"


def test_cache_salts_keep_apart(plain: Engine, pair: Pair) -> None:
    prompt = make_prompt(100, 400)
    expected = right(plain, prompt)
    stored = pair.stored()
    assert same(pair.one.ask(prompt, salt="a"), expected)
    await_stored(pair.server, stored + blocks_of(400))
    for salt, found in ((None, 0), ("b", 0), ("a", loadable(400))):
        replies = pair.two.ask(prompt, salt=salt)
        assert (salt, replies[0].cached) == (salt, found)
        assert same(replies, expected)
    # The other two are stored too, before another test counts.
    await_stored(pair.server, stored + 3 * blocks_of(400))


def test_one_stores_and_another_loads(forks: Forks, model: Path, plain: Engine, maru_server: MaruServer) -> None:
    """``kv_producer`` and ``kv_consumer``: prefill here, decode there."""
    prompt, other = make_prompt(110, 500), make_prompt(111, 500)
    expected = right(plain, prompt)
    extra = settings(maru_server)
    with (
        Engine(forks, model, extra, transfer={"kv_role": "kv_producer"}) as prefill,
        Engine(forks, model, extra, transfer={"kv_role": "kv_consumer"}) as decode,
    ):
        assert same(prefill.ask(prompt, tokens=1), [Reply(expected[0].ids[:1], expected[0].logprobs[:1], 0, "length")])
        await_stored(maru_server, blocks_of(500))
        prefill.forget()
        assert prefill.ask(prompt)[0].cached == 0, "a producer does not load"
        loaded = decode.ask(prompt, tokens=8)
        assert loaded[0].cached == loadable(500)
        assert same(loaded, expected)
        decode.ask(other)
        decode.run("drain")
    await_stored(maru_server, blocks_of(500))


@pytest.mark.parametrize(
    ("extra", "options", "words"),
    [
        ({"sever": "ipc:///x"}, {}, ("'sever'", "'server'")),
        ({"timeout_ms": "soon"}, {}, ("timeout_ms", "'soon'")),
        ({}, {"prefix_caching_hash_algo": "xxhash"}, ("random", "--prefix-caching-hash-algo sha256")),
    ],
)
def test_what_cannot_work_is_refused_with_the_cure(
    forks: Forks, model: Path, extra: dict[str, Any], options: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(AssertionError) as refused:
        Engine(forks, model, extra, **options).stop()
    assert "ConfigError" in str(refused.value)
    assert all(word in str(refused.value) for word in words)
