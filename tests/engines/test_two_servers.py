"""Two real, unmodified SGLang servers share prefixes through Maru.

One pair of servers (and one with SGLang's own fault injection) serves all tests here; each test attaches the store
that it needs over HTTP and asks prompts of its own (:mod:`pair`). The servers start with the embedded ``maru-server``, that is with
nothing configured but the backend's name.
"""

from __future__ import annotations

import itertools
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import (
    PROMPT_TOKENS,
    STORED_TOKENS,
    EngineServer,
    make_model,
    make_prompt,
    overwrite_data,
    patient,
    same_answer,
)
from pair import Engines

from forked import silence
from maru_bench.servers import MaruServer
from support import await_condition

pytestmark = [pytest.mark.sglang, pytest.mark.server, pytest.mark.timeout(420)]


def sharing(one: EngineServer, two: EngineServer, seed: int) -> list[int]:
    """Cold on ``one``; from the store on ``two``; from the store on ``one`` after it has lost its own cache. What the latter two loaded, tokens."""
    prompt = make_prompt(seed)
    cold = one.ask(prompt)
    assert (cold.prompt_tokens, cold.cached_tokens) == (PROMPT_TOKENS, 0)
    one.flush()  # returns only when everything is stored
    shared = two.ask(prompt)
    assert same_answer(shared, cold)
    again = one.ask(prompt)
    assert same_answer(again, cold)
    return [shared.storage_tokens, again.storage_tokens]


def check_sharing(one: EngineServer, two: EngineServer, seed: int) -> None:
    assert sharing(one, two, seed) == [STORED_TOKENS, STORED_TOKENS]


def test_file_backend_as_the_yardstick(engines: Engines, tmp_path: Path) -> None:
    """SGLang's own backend passes the same check, so the check asks nothing that only Maru does."""
    for server in engines.pair:
        server.reattach("file", {"file_storage_path": str(tmp_path / "store")})
    check_sharing(*engines.pair, seed=1)
    for server in engines.pair:
        server.reattach("maru")


def test_second_server_loads_what_the_first_computed(engines: Engines) -> None:
    """With nothing configured: the embedded server."""
    assert [server.backend() for server in engines.pair] == ["maru", "maru"]
    # Within the time limit that a user has by default a busy machine may not be done: then with another prompt.
    seeds = itertools.count(1000)
    await_condition(
        lambda: sharing(*engines.pair, seed=next(seeds)) == [STORED_TOKENS, STORED_TOKENS], "a prompt is shared whole"
    )


def test_with_a_server_of_its_own(engines: Engines, maru_server: MaruServer) -> None:
    for server in engines.pair:
        server.reattach("maru", patient(maru_server))
    check_sharing(*engines.pair, seed=3)
    for server in engines.pair:
        server.reattach("maru")


def test_answers_differ_from_prompt_to_prompt(engines: Engines) -> None:
    """Otherwise equal answers would prove nothing."""
    answers = [engines.one.ask(make_prompt(seed)) for seed in (4, 5, 6)]
    assert len({tuple(answer.output_ids) for answer in answers}) == len(answers)
    assert len({tuple(answer.logprobs) for answer in answers}) == len(answers)


def test_corrupted_pages_change_the_answer(engines: Engines, maru_server: MaruServer) -> None:
    """The negative control: the answers above come from the bytes in the pool."""
    one, two = engines.pair
    for server in engines.pair:
        server.reattach("maru", patient(maru_server))
    prompt = make_prompt(7)
    cold = one.ask(prompt)
    one.flush()
    assert overwrite_data(Path("/dev/shm", maru_server.pool_name)) > 0
    corrupted = two.ask(prompt)
    assert corrupted.storage_tokens == STORED_TOKENS
    assert corrupted.logprobs != cold.logprobs
    for server in engines.pair:
        server.reattach("maru")


def test_corrupted_pages_are_a_miss_with_checksums(engines: Engines, maru_server: MaruServer) -> None:
    one, two = engines.pair
    for server in engines.pair:
        server.reattach("maru", patient(maru_server, verify="checksum"))
    check_sharing(one, two, seed=8)
    prompt = make_prompt(9)
    cold = one.ask(prompt)
    one.flush()
    assert overwrite_data(Path("/dev/shm", maru_server.pool_name)) > 0
    computed = two.ask(prompt)
    assert computed.storage_tokens == 0
    assert same_answer(computed, cold)
    for server in engines.pair:
        server.reattach("maru")


def test_attach_and_detach_over_http(engines: Engines, maru_server: MaruServer) -> None:
    one, two = engines.pair
    prompt = make_prompt(10)
    for server in engines.pair:
        server.reattach("maru", patient(maru_server))
    cold = one.ask(prompt)
    two.flush()
    assert two.detach()[0] == 200
    assert two.backend() is None
    without = two.ask(prompt)
    assert without.cached_tokens == 0
    assert same_answer(without, cold)
    two.flush()

    for config, words in (
        ({"sever": "ipc:///x"}, ("'sever'", "server")),
        ({"hicache_storage_pass_prefix_keys": False}, ("hicache_storage_pass_prefix_keys", "leave the key out")),
        ({"timeout_ms": "soon"}, ("timeout_ms", "'soon'")),
        ("[]", ("list", "object")),
    ):
        status, message = two.attach("maru", config)  # type: ignore[arg-type]
        assert status == 400
        assert all(word in message for word in words), message
    assert two.backend() is None

    one.flush()
    assert two.attach("maru", patient(maru_server))[0] == 200
    assert two.backend() == "maru"
    shared = two.ask(prompt)
    assert shared.storage_tokens == STORED_TOKENS
    assert same_answer(shared, cold)
    for server in engines.pair:
        server.reattach("maru")


def test_faults_and_a_killed_server_never_fail_a_request(engines: Engines, maru_server: MaruServer) -> None:
    """SGLang's fault injection over Maru, and the maru-server killed and started again in between."""
    one, faulty = engines.one, engines.faulty
    for server in (one, faulty):
        server.reattach("maru", {"server": maru_server.endpoint})
    prompts = [make_prompt(seed) for seed in range(20, 25)]
    expected = [one.ask(prompt) for prompt in prompts]
    one.flush()

    loaded = 0

    def ask_all() -> int:
        """Ask everything of the faulty server; tokens that came from the store."""
        faulty.flush()
        answers = [faulty.ask(prompt) for prompt in prompts]
        for answer, right in zip(answers, expected, strict=True):
            assert same_answer(answer, right)
        return sum(answer.storage_tokens for answer in answers)

    for _ in range(3):
        loaded += ask_all()
    assert loaded > 0, "with three faults in ten some loads get through"
    with ThreadPoolExecutor(1) as asking:
        for prompt, right in zip(prompts, expected, strict=True):
            faulty.flush()
            answer = asking.submit(faulty.ask, prompt)
            maru_server.kill()  # while the request is on its way
            assert same_answer(answer.result(), right)
            maru_server.start()
    silence(maru_server.process)  # there, but silent
    assert ask_all() == 0
    maru_server.process.signal(signal.SIGCONT)
    maru_server.kill()
    assert ask_all() == 0, "nothing can come from a server that is not there"
    one.flush()
    assert same_answer(one.ask(prompts[0]), expected[0])
    # Detached and attached while it is gone: it is found when it is back.
    one.reattach("maru", {"server": maru_server.endpoint})
    assert same_answer(one.ask(prompts[2]), expected[2])

    maru_server.start()
    await_condition(lambda: ask_all() > 0, "loads come back with the server", timeout_s=120)
    one.flush()
    await_condition(lambda: (one.flush(), one.ask(prompts[1]).storage_tokens == STORED_TOKENS)[1], "one reads again")
    assert same_answer(one.ask(prompts[1]), expected[1])
    for server in (one, faulty):
        server.reattach("maru")


def test_replaced_weights_end_the_sharing(engines: Engines, maru_server: MaruServer) -> None:
    """Last, since it leaves ``two`` with other weights."""
    one, two = engines.pair
    for server in engines.pair:
        server.reattach("maru", patient(maru_server))
    check_sharing(one, two, seed=30)
    prompt = make_prompt(30)
    old = one.ask(prompt)
    status, message = two.request(
        "POST", "/update_weights_from_disk", body={"model_path": str(make_model(1))}, timeout_s=120
    )
    assert status == 200, message
    for seed in (30, 31):
        new = two.ask(make_prompt(seed))
        assert new.storage_tokens == 0
        assert new.logprobs != old.logprobs
        two.flush()
    assert one.ask(make_prompt(31)).storage_tokens == 0, "nothing of the new weights is stored under the old ones"
    assert two.detach()[0] == 200
    status, message = two.attach("maru", {"server": maru_server.endpoint})
    assert status == 400
    assert "replaced at run time" in message
