"""Two real vLLM servers share prefixes, with nothing configured but the connector's name; Maru's server is killed, and one of them."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_harness import BLOCK, blocks_of, loadable, make_prompt
from vllm_server import VLLMServer

from maru_core.embedded import Starter
from maru_core.session import Session
from maru_core.settings import Settings
from support import await_condition

pytestmark = [pytest.mark.vllm, pytest.mark.server, pytest.mark.timeout(420)]

PROMPT = 1100
#: What a user writes; and slow answers of a busy machine are no faults.
TRANSFER = {
    "kv_connector": "MaruConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"timeout_ms": 2000},
}


@pytest.fixture(scope="module")
def embedded() -> Iterator[dict[str, str]]:
    """The environment in which the embedded server of this test's own runs, and goes away soon after its last client."""
    with tempfile.TemporaryDirectory(prefix="maru-vllm-") as directory:
        env = {"MARU_RUNTIME_DIR": directory, "MARU_POOL_SIZE": "256M", "MARU_IDLE_EXIT_S": "5"}
        yield env
        starter = Starter(settings=Settings.from_environment(env))
        left = [starter.socket, Path("/dev/shm", starter.pool_name)]
        await_condition(lambda: not any(path.exists() for path in left), "the embedded server goes away by itself")


@pytest.fixture(scope="module")
def pair(model: Path, embedded: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VLLMServer]]:
    logs = tmp_path_factory.mktemp("vllm")
    servers = [VLLMServer(name, model, logs / f"{name}.log", TRANSFER, embedded) for name in ("one", "two")]
    started = []
    try:
        for server in servers:
            server.start()
            started.append(server)
        for server in servers:
            server.wait_ready()
        yield servers
    finally:
        for server in started:
            server.stop()


def stored(env: dict[str, str]) -> int:
    session = Session(Starter(settings=Settings.from_environment(env)).endpoint, name="tests", timeout_s=60)
    try:
        return int(session.stats()["objects"])
    finally:
        session.close()


def test_the_second_server_loads_what_the_first_computed(pair: list[VLLMServer], embedded: dict[str, str]) -> None:
    one, two = pair
    prompt = make_prompt(1, PROMPT)
    cold = one.ask(prompt)
    await_condition(lambda: stored(embedded) >= blocks_of(PROMPT), "everything is stored")
    assert one.figures()["prompt_tokens_by_source/local_compute"] == PROMPT
    shared = two.ask(prompt)
    assert (shared.ids, shared.logprobs) == (cold.ids, cold.logprobs)
    figures = two.figures()
    assert figures["external_prefix_cache_queries"] == PROMPT
    assert figures["external_prefix_cache_hits"] == loadable(PROMPT) == 1088
    assert figures["prompt_tokens_by_source/external_kv_transfer"] == 1088
    assert figures["prompt_tokens_by_source/local_compute"] == PROMPT - 1088
    assert figures["prompt_tokens_by_source/local_cache_hit"] == 0
    assert figures["prompt_tokens_cached_by_source/host"] == 1088, "the tier that they came from"
    blocks = loadable(PROMPT) // BLOCK
    assert (figures["maru_loaded_blocks"], figures["maru_load_seconds_count"]) == (blocks, 1)
    assert figures["maru_found_blocks"] >= blocks
    assert figures["maru_failed_load_blocks/evicted"] == figures["maru_stored_blocks"] == 0
    assert stored(embedded) == blocks_of(PROMPT), "what was loaded is not stored again"

    other = make_prompt(2, PROMPT)
    assert two.ask(other).ids != shared.ids
    await_condition(lambda: stored(embedded) >= 2 * blocks_of(PROMPT), "the second server stores too")
    assert one.ask(other) == two.ask(other)
    assert one.figures()["external_prefix_cache_hits"] == 1088


def maru_pids(env: dict[str, str]) -> list[int]:
    """The embedded server, by its command line."""
    endpoint = Starter(settings=Settings.from_environment(env)).endpoint.encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"maru_server" in words and endpoint in words:
                found.append(int(entry.name))
    return found


def test_maru_is_killed_and_comes_back(pair: list[VLLMServer], embedded: dict[str, str]) -> None:
    """vLLM's servers answer all the while, and what was stored is there again."""
    one, two = pair
    prompt, meanwhile, after = (make_prompt(seed, PROMPT) for seed in (5, 6, 7))
    # Each can be asked for once: afterwards vLLM has it in its own cache.
    probes = [make_prompt(10 + number, BLOCK + 1) for number in range(60)]
    before = stored(embedded)
    cold = one.ask(prompt)
    await_condition(lambda: stored(embedded) >= before + blocks_of(PROMPT), "everything is stored")
    for probe in probes:
        one.ask(probe, 1)
    # Not all of them: on a machine that is busy a store may be given up after the time limit that a user has by default.
    await_condition(lambda: stored(embedded) >= before + blocks_of(PROMPT) + len(probes) // 2, "probes are stored")
    there = stored(embedded)
    (old,) = maru_pids(embedded)
    os.kill(old, signal.SIGKILL)
    answer = one.ask(meanwhile)
    await_condition(lambda: maru_pids(embedded) not in ([], [old]), "an engine starts another one")
    assert stored(embedded) >= there, "what was stored is there"

    def loaded_by_two(asked: list[int]) -> float:
        hits = two.figures()["prompt_tokens_by_source/external_kv_transfer"]
        two.ask(asked, 1)
        return two.figures()["prompt_tokens_by_source/external_kv_transfer"] - hits

    await_condition(lambda: loaded_by_two(probes.pop()) == BLOCK, "the other engine has found it")
    hits = two.figures()["prompt_tokens_by_source/external_kv_transfer"]
    shared = two.ask(prompt)
    assert (shared.ids, shared.logprobs) == (cold.ids, cold.logprobs)
    assert two.figures()["prompt_tokens_by_source/external_kv_transfer"] - hits == loadable(PROMPT)
    again = two.ask(meanwhile)
    assert (again.ids, again.logprobs) == (answer.ids, answer.logprobs)
    known = stored(embedded)
    two.ask(after)
    await_condition(lambda: stored(embedded) >= known + blocks_of(PROMPT), "blocks are stored again")


def test_what_a_lost_server_stored_stays(pair: list[VLLMServer], embedded: dict[str, str]) -> None:
    """The one that started Maru's server and stored the prompt is killed; the other one loads, and goes on storing."""
    one, two = pair
    prompt, other = make_prompt(3, PROMPT), make_prompt(4, PROMPT)
    before = stored(embedded)
    cold = one.ask(prompt)
    await_condition(lambda: stored(embedded) >= before + blocks_of(PROMPT), "everything is stored")
    one.process.kill()
    hits = two.figures()["prompt_tokens_by_source/external_kv_transfer"]
    shared = two.ask(prompt)
    assert (shared.ids, shared.logprobs) == (cold.ids, cold.logprobs)
    assert two.figures()["prompt_tokens_by_source/external_kv_transfer"] - hits == loadable(PROMPT)
    two.ask(other)
    await_condition(lambda: stored(embedded) >= before + 2 * blocks_of(PROMPT), "the other one stores")
