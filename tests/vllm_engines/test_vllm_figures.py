"""What vLLM's own metrics say of Maru, beside what happened."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_harness import BLOCK, Engine, Forks, await_stored, blocks_of, loadable, make_prompt, overwrite_data, settings

from maru_bench.servers import MaruServer
from support import await_condition

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

PROMPT = 500
SHORT = list(range(10, 15))  # less than a block: a step that sends what was counted before it


def maru(engine: Engine) -> dict[str, float]:
    """Maru's figures that are not 0. A store that ends after a step is counted in the next one."""
    engine.ask(SHORT, tokens=2)
    return {name: value for name, value in engine.figures().items() if name.startswith("maru_") and value}


def test_stored_found_and_loaded_blocks_are_counted(forks: Forks, model: Path, maru_server: MaruServer) -> None:
    prompt = make_prompt(1, PROMPT)
    with Engine(forks, model, settings(maru_server)) as one, Engine(forks, model, settings(maru_server)) as two:
        one.ask(prompt, tokens=2)
        await_stored(maru_server, blocks_of(PROMPT))
        await_condition(
            lambda: maru(one).get("maru_stored_blocks") == blocks_of(PROMPT), "the stored blocks are counted"
        )
        stored = maru(one)
        assert stored["maru_missed_blocks/not_stored"] == stored["maru_queried_blocks"] >= blocks_of(PROMPT)
        assert "maru_loaded_blocks" not in stored

        two.ask(prompt, tokens=2)
        loaded = maru(two)
        blocks = loadable(PROMPT) // BLOCK
        assert loaded["maru_loaded_blocks"] == blocks
        assert loaded["maru_found_blocks"] == loaded["maru_queried_blocks"] >= blocks
        assert loaded["maru_loaded_bytes"] / blocks == stored["maru_stored_bytes"] / blocks_of(PROMPT) > 0
        assert two.figures()["prompt_tokens_by_source/external_kv_transfer"] == blocks * BLOCK
        assert two.figures()["prompt_tokens_cached_by_source/host"] == blocks * BLOCK
        assert not any(name.startswith(("maru_stored", "maru_failed", "maru_not_stored")) for name in loaded)
        assert two.run("load_times") == (1, True)


def test_why_blocks_are_missing_is_said(forks: Forks, model: Path, maru_server: MaruServer) -> None:
    prompt = make_prompt(2, PROMPT)
    careful = settings(maru_server, verify="checksum")
    transfer = {"kv_load_failure_policy": "recompute"}
    with Engine(forks, model, careful, transfer=transfer) as engine:
        engine.ask(prompt, tokens=2)
        await_stored(maru_server, blocks_of(PROMPT))
        overwrite_data(maru_server)
        engine.forget()
        engine.ask(prompt, tokens=2)
        assert maru(engine)["maru_failed_load_blocks/checksum"] > 0
        maru_server.kill()
        engine.forget()
        engine.ask(make_prompt(3, PROMPT), tokens=2)
        await_condition(
            lambda: maru(engine).get("maru_missed_blocks/unavailable", 0) >= blocks_of(PROMPT),
            "a server that is away is a reason",
        )


def test_vllms_events_tell_what_is_in_maru(forks: Forks, model: Path, maru_server: MaruServer) -> None:
    """Over vLLM's own publisher: a block of the pool is told with the hash under which vLLM told the block of its own cache."""
    prompt = make_prompt(4, PROMPT)
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"inproc://{maru_server.pool_name}"}
    with Engine(forks, model, settings(maru_server), kv_events_config=events) as engine:
        engine.run("listen", events["endpoint"])
        engine.ask(prompt, tokens=2)
        await_stored(maru_server, blocks_of(PROMPT))
        told: dict[str, list[object]] = {}

        def heard(kind: str, count: int) -> bool:
            engine.ask(SHORT, tokens=2)
            for name, medium, hashes in engine.run("heard"):
                told.setdefault(f"{name} {medium}", []).extend(hashes)
            return len(told.get(kind, ())) >= count

        await_condition(lambda: heard("BlockStored STORAGE", blocks_of(PROMPT)), "all stored blocks are told")
        assert told["BlockStored STORAGE"] == told["BlockStored GPU"]
        assert not any(name.startswith("BlockRemoved") for name in told)
        assert engine.run("reset_connector")
        await_condition(lambda: heard("BlockRemoved STORAGE", blocks_of(PROMPT)), "what was cleared is taken back")
        assert sorted(map(str, told["BlockRemoved STORAGE"])) == sorted(map(str, told["BlockStored STORAGE"]))
