"""What requests do to a real server while its storage is slow, fails, comes and goes: nothing hangs, nothing is wrong, and no host
slot is lost.

``late`` answers its storage calls late; the two servers of the long test also fail some of them (SGLang's own fault injection).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness import (
    NEW_TOKENS,
    PROMPT_TOKENS,
    STORED_TOKENS,
    EngineServer,
    make_prompt,
    options,
    patient,
    same_answer,
    start_all,
)

from maru_bench.servers import Answer, MaruServer
from support import await_condition

pytestmark = [pytest.mark.sglang, pytest.mark.server, pytest.mark.timeout(600)]

DELAY = {"SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.1"}
#: Prompts whose loading is broken off: more tokens than the host pool has room for, and than may be loaded at once.
ABORTED = 30
#: Log probabilities of the first token that differ by rounding alone; wrong KV moves them by whole units.
NEAR = 0.15


@pytest.fixture(scope="module")
def late(logs: Path, model: Path) -> Iterator[EngineServer]:
    server = EngineServer(
        "late",
        options(
            model,
            backend="maru",
            env=DELAY | {"MARU_RUNTIME_DIR": str(logs / "late"), "MARU_POOL_SIZE": "64M", "MARU_IDLE_EXIT_S": "5"},
        ),
        logs / "late.log",
    )
    start_all([server])
    try:
        yield server
    finally:
        server.stop()


def post(server: EngineServer, prompt: list[int], rid: str, tokens: int = NEW_TOKENS) -> dict[str, Any]:
    """A request under an id; the server's own words where it did not answer with tokens."""
    body = {
        "rid": rid, "input_ids": prompt, "return_logprob": True,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True},
    }  # fmt: skip
    status, text = server.request("POST", "/generate", body=body, timeout_s=120)
    return {"status": status, **(json.loads(text) if status == 200 else {"said": text})}


def was_aborted(answer: dict[str, Any]) -> bool:
    reason = answer.get("meta_info", {}).get("finish_reason") or {}
    return reason.get("type") == "abort" or "abort" in answer.get("said", "").lower()


def test_aborted_prefetches_leave_no_host_slot_behind(late: EngineServer, maru_server: MaruServer) -> None:
    """The host pool has some 8192 tokens, of which half may be loaded at a time: thirty prompts that kept theirs would fill it."""
    late.reattach("maru", patient(maru_server))
    prompts = [make_prompt(200 + number) for number in range(ABORTED + 2)]
    right = [late.ask(prompt) for prompt in prompts[-2:]]
    for prompt in prompts[:-2]:
        late.ask(prompt)
    late.flush()
    aborted = 0
    with ThreadPoolExecutor(1) as asking:
        for number, prompt in enumerate(prompts[:-2]):
            waiting = asking.submit(post, late, prompt, f"turn-{number}")
            time.sleep(0.02 * (number % 8))  # whichever moment that is: before, in or after its loading
            status, message = late.request("POST", "/abort_request", body={"rid": f"turn-{number}"})
            assert status == 200, message
            aborted += was_aborted(waiting.result())
    assert aborted > 0, "some requests must have been broken off"
    loaded = [late.ask(prompt) for prompt in prompts[-2:]]
    assert [answer.storage_tokens for answer in loaded] == [STORED_TOKENS] * 2, late.log_text()[-2000:]
    assert all(same_answer(answer, good) for answer, good in zip(loaded, right, strict=True))


def test_detached_and_flushed_while_a_request_runs(late: EngineServer, maru_server: MaruServer) -> None:
    """SGLang does either only when nothing runs, and says so; the request is not touched."""
    late.reattach("maru", patient(maru_server))
    prompt = make_prompt(240)
    right = post(late, prompt, "alone", tokens=64)
    late.flush()
    with ThreadPoolExecutor(1) as asking:
        waiting = asking.submit(post, late, prompt, "running", 64)
        flushed = late.request("POST", "/flush_cache", timeout_s=60)
        detached = late.detach()
        answer = waiting.result()
    assert answer["output_ids"] == right["output_ids"]
    assert answer["meta_info"]["output_token_logprobs"] == right["meta_info"]["output_token_logprobs"]
    assert flushed[0] in (200, 400), flushed
    assert detached[0] in (200, 400), detached
    late.flush()
    if late.backend() is None:
        assert late.attach("maru", patient(maru_server))[0] == 200
    assert late.backend() == "maru"
    assert post(late, prompt, "after", tokens=64)["output_ids"] == right["output_ids"]


def test_attached_in_the_middle_of_a_sequence(late: EngineServer, maru_server: MaruServer) -> None:
    """What came before is on the device and was never stored: what comes after it is no prefix of anything."""
    late.reattach("maru", patient(maru_server))
    first, second = make_prompt(250), make_prompt(250) + make_prompt(251, 200)
    right = late.ask(second)
    late.flush()
    status, message = late.request("POST", "/hicache/storage-backend/clear")
    assert status == 200, message
    assert late.detach()[0] == 200
    late.ask(first)
    assert late.attach("maru", patient(maru_server))[0] == 200
    going_on = late.ask(second)
    assert going_on.device_tokens >= STORED_TOKENS
    assert same_answer(going_on, right)
    late.flush()
    again = late.ask(second)
    assert again.storage_tokens in (0, 592), "nothing, or all of it"
    assert same_answer(again, right)


def test_an_attach_that_fails_at_its_end_leaves_nothing_behind(late: EngineServer, maru_server: MaruServer) -> None:
    """SGLang says which pools there are when its storage threads already run; only then is it known what a page is."""
    late.flush()
    assert late.detach()[0] == 200
    status, message = late.attach("maru", {"server": maru_server.endpoint, "pool": "shm://not-this-one"})
    assert status == 400
    assert "not-this-one" in message
    assert late.backend() is None
    prompt = make_prompt(260)
    right = late.ask(prompt)
    late.flush()
    assert late.attach("maru", patient(maru_server))[0] == 200
    assert same_answer(late.ask(prompt), right)
    late.flush()
    loaded = late.ask(prompt)
    assert loaded.storage_tokens == STORED_TOKENS
    assert same_answer(loaded, right)


@pytest.mark.slow
def test_turns_on_two_servers_under_faults(logs: Path, model: Path, maru_server: MaruServer) -> None:
    """Twenty-five conversations of four turns, each turn asked of both servers at once, of which storage calls are late and one in five fails."""
    faults = DELAY | {"SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.2"}
    chosen = options(model, extra_config={"server": maru_server.endpoint}, env=faults)
    servers = [EngineServer(f"faulty {name}", chosen, logs / f"turns-{name}.log") for name in ("one", "two")]
    plain = EngineServer("plain", options(model, backend=None), logs / "turns-plain.log")
    start_all([*servers, plain])
    try:
        conversations = [make_prompt(300 + number, PROMPT_TOKENS) for number in range(25)]
        turns = [
            conversation + make_prompt(400 + 10 * number + turn, 120 * turn)
            for turn in range(4)
            for number, conversation in enumerate(conversations)
        ]

        def ask_all(server: EngineServer) -> list[Answer]:
            answers = []
            for number, turn in enumerate(turns):
                answers.append(server.ask(turn))
                if number % 20 == 19:
                    server.flush()
            return answers

        with ThreadPoolExecutor(3) as asking:
            right, one, two = asking.map(ask_all, [plain, *servers])
        for good, *others in zip(right, one, two, strict=True):
            for answer in others:
                # Where a prompt is cut into what is cached and what is computed differs from server to server, and so does rounding.
                assert abs(answer.logprobs[0] - good.logprobs[0]) < NEAR, (answer, good)
        assert sum(answer.storage_tokens for answer in (*one, *two)) > 0
        for server in servers:  # no slot is lost: whole prompts still load, once no call of theirs fails
            await_condition(
                lambda server=server: (server.flush(), server.ask(turns[0]).storage_tokens >= STORED_TOKENS)[1],
                "a prompt is loaded whole",
                timeout_s=120,
            )
    finally:
        for server in (*servers, plain):
            server.stop()
