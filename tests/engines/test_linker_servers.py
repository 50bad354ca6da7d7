"""Two real, unmodified SGLang servers share prefixes by the direct path: from device pages to the pool and back, no host tier.

Of SGLang's options they get the linker's backend and its config, and nothing else.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import (
    PROMPT_TOKENS,
    STORED_TOKENS,
    EngineServer,
    make_model,
    make_prompt,
    options,
    overwrite_data,
    same_answer,
    start_all,
)

from forked import silence
from maru_bench.servers import Answer, MaruServer
from support import await_condition

pytestmark = [pytest.mark.sglang, pytest.mark.server, pytest.mark.timeout(420)]

LAYERS = 4


@dataclass
class Engines:
    one: EngineServer
    two: EngineServer
    maru: MaruServer

    def flush(self) -> None:
        for server in (self.one, self.two):
            server.flush()


@pytest.fixture(scope="module")
def engines(logs: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    maru = MaruServer(tmp_path_factory.mktemp("maru"), size="256M", keep_pool=True)
    config = json.dumps({"server": maru.endpoint, "log_layers": True, "timeout_ms": 5000})
    words = ("--unified-cache-external-linker-backend", "maru", "--unified-cache-external-linker-config", config)
    made = Engines(
        one=EngineServer("direct-one", options(model, backend=None, arguments=words), logs / "direct-one.log"),
        two=EngineServer("direct-two", options(model, backend=None, arguments=words), logs / "direct-two.log"),
        maru=maru,
    )
    try:
        maru.start()
        start_all([made.one, made.two])
        yield made
    finally:
        for server in (made.one, made.two):
            server.stop()
        maru.stop()
        maru.remove_pool()


def loaded(answer: Answer) -> int:
    """Tokens that came from Maru: SGLang's report calls what its linker loads "host", and there is no host tier here."""
    assert answer.storage_tokens == 0
    return answer.host_tokens


def check_sharing(engines: Engines, seed: int) -> Answer:
    """Cold on one; from the pool on two; from the pool on one after it has lost its own cache. The cold answer."""
    prompt = make_prompt(seed)
    cold = engines.one.ask(prompt)
    assert (cold.prompt_tokens, cold.cached_tokens) == (PROMPT_TOKENS, 0)
    engines.one.flush()  # returns only when everything is stored
    shared = engines.two.ask(prompt)
    assert loaded(shared) == STORED_TOKENS
    assert same_answer(shared, cold)
    again = engines.one.ask(prompt)
    assert loaded(again) == STORED_TOKENS
    assert same_answer(again, cold)
    return cold


def test_second_server_loads_what_the_first_computed(engines: Engines) -> None:
    check_sharing(engines, seed=101)


def test_an_engine_prefers_its_own_cache(engines: Engines) -> None:
    cold = check_sharing(engines, seed=102)
    mine = engines.two.ask(make_prompt(102))
    assert (mine.device_tokens, loaded(mine)) == (STORED_TOKENS, 0)
    assert same_answer(mine, cold)


def test_a_prompt_that_goes_on_is_loaded_as_far_as_it_is_known(engines: Engines) -> None:
    """A longer prompt, whose tail hangs from pages that the engine loaded itself."""
    start = make_prompt(103)
    longer = start[:STORED_TOKENS] + make_prompt(104)
    engines.one.ask(start)
    cold = engines.two.ask(longer)
    assert loaded(cold) == STORED_TOKENS
    engines.flush()
    shared = engines.one.ask(longer)
    assert loaded(shared) == (len(longer) - 1) // 16 * 16
    assert same_answer(shared, engines.one.ask(longer)), "its own cache says the same"


def test_the_forward_pass_waits_layer_by_layer(engines: Engines) -> None:
    """In the order of the model, each layer only after its own pages are there, and after no later one than it needs."""
    before = len(engines.two.log_text())
    check_sharing(engines, seed=105)
    lines = re.findall(r"load (\d+): layer (\d+) (launched|waited), event (\d+)", engines.two.log_text()[before:])
    loads = {int(load) for load, *_ in lines}
    assert len(loads) == 1
    events = sorted((int(number), what, int(layer)) for _, layer, what, number in lines)
    launched = [(number, layer) for number, what, layer in events if what == "launched"]
    waited = [(number, layer) for number, what, layer in events if what == "waited"]
    assert [layer for _, layer in launched] == list(range(LAYERS))
    assert [layer for _, layer in waited] == sorted(layer for _, layer in waited)
    assert {layer for _, layer in waited} == set(range(LAYERS))
    arrival = {layer: number for number, layer in launched}
    assert all(arrival[layer] < number for number, layer in waited)


def test_overwritten_pages_change_the_answer(engines: Engines) -> None:
    """The negative control: the answers above come from the bytes in the pool."""
    prompt = make_prompt(106)
    cold = engines.one.ask(prompt)
    engines.flush()
    assert overwrite_data(Path("/dev/shm", engines.maru.pool_name)) > 0
    corrupted = engines.two.ask(prompt)
    assert loaded(corrupted) == STORED_TOKENS
    assert corrupted.logprobs != cold.logprobs


def test_a_killed_server_never_fails_a_request(engines: Engines) -> None:
    one, two, maru = engines.one, engines.two, engines.maru
    cold = check_sharing(engines, seed=107)
    prompt = make_prompt(107)
    maru.kill()
    engines.flush()
    computed = two.ask(prompt)
    assert loaded(computed) == 0
    assert same_answer(computed, cold)
    engines.flush()
    maru.start()

    def comes_back() -> bool:
        two.flush()
        answer = two.ask(prompt)
        assert same_answer(answer, cold)
        return loaded(answer) == STORED_TOKENS

    await_condition(comes_back, "what was stored before the crash is loaded again", timeout_s=120)
    silence(maru.process)  # there, but silent
    engines.flush()
    assert same_answer(two.ask(prompt), cold)
    assert same_answer(one.ask(prompt), cold)
    maru.process.signal(signal.SIGCONT)
    await_condition(comes_back, "and after a silence", timeout_s=120)
    fresh = make_prompt(108)
    await_condition(
        lambda: (engines.flush(), one.ask(fresh), engines.flush(), loaded(two.ask(fresh)) == STORED_TOKENS)[-1],
        "one stores again",
        timeout_s=120,
    )


def test_replaced_weights_end_the_sharing(engines: Engines) -> None:
    """Last, since it leaves two with other weights."""
    cold = check_sharing(engines, seed=109)
    status, message = engines.two.request(
        "POST", "/update_weights_from_disk", body={"model_path": str(make_model(1))}, timeout_s=120
    )
    assert status == 200, message
    for seed in (109, 110):
        new = engines.two.ask(make_prompt(seed))
        assert loaded(new) == 0
        assert new.logprobs != cold.logprobs
        engines.two.flush()
    assert loaded(engines.one.ask(make_prompt(110))) == 0, "nothing of the new weights is stored under the old ones"
