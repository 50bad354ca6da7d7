"""Experiments on servers that speak like engines: who is asked what, in which order, and what comes to be known of it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from maru_bench.cli import app
from maru_bench.engines import SGLangClient, VLLMClient, parse_url
from maru_bench.experiment.command import parse_urls
from maru_bench.experiment.driver import Known, PlayOptions, Sample, play, route
from maru_bench.experiment.report import read_json
from maru_bench.experiment.workloads import Request, Workload, WorkloadOptions, make_workload
from maru_core.errors import ConfigError
from tests.bench.speaking_engines import PAGE, SpeakingEngine, answer_of

SIZES = WorkloadOptions(context=256, groups=2, requests=3, question=10, new_tokens=4, vocabulary=512)


@pytest.fixture
def engines() -> Iterator[list[SpeakingEngine]]:
    store: set[tuple[int, ...]] = set()
    made = [SpeakingEngine(store), SpeakingEngine(store)]
    yield made
    for engine in made:
        engine.close()


def clients_of(engines: list[SpeakingEngine]) -> list[SGLangClient]:
    return [SGLangClient(f"server {index}", *parse_url(engine.url)) for index, engine in enumerate(engines)]


def test_conversations_go_on_with_what_was_answered(engines: list[SpeakingEngine]) -> None:
    workload = make_workload("multi-turn", SIZES)
    samples = play(workload, clients_of(engines), PlayOptions(routing="sticky"))
    assert [sample.error for sample in samples] == [None] * len(workload.requests)
    for session in (0, 1):
        asked = engines[session].asked
        assert len(asked) == 3
        for before, after in pairwise(asked):
            assert after[: len(before)] == before
            assert after[len(before) : len(before) + 4] == answer_of(before, 4)
    assert [sample.prompt_tokens for sample in samples] == workload.prompt_lengths()


@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_waves_and_what_continues_another_wait(engines: list[SpeakingEngine], concurrency: int) -> None:
    workload = make_workload("agents", SIZES)
    for engine in engines:
        engine.delay_s = 0.01
    order: list[int] = []
    settled: list[int] = []
    play(
        workload,
        clients_of(engines),
        PlayOptions(concurrency=concurrency, routing="random", seed=3),
        answered=lambda sample: order.append(sample.number),
        between_waves=lambda: settled.append(len(order)),
    )
    waves = [workload.requests[number].wave for number in order]
    assert sorted(order) == list(range(len(workload.requests)))
    assert waves == sorted(waves)
    assert settled == [2, 6], "when all of a wave are answered, and never else"
    assert max(engine.most for engine in engines) <= concurrency
    if concurrency == 8:
        assert sum(engine.most for engine in engines) > 2


def test_routes_depend_on_the_request_alone() -> None:
    requests = make_workload("multi-turn", SIZES).requests
    assert [route("round-robin", request, 2, 0) for request in requests] == [0, 1, 0, 1, 0, 1]
    assert {(request.session, route("sticky", request, 2, 0)) for request in requests} == {(0, 0), (1, 1)}
    chosen = [route("random", request, 3, 7) for request in requests * 2]
    assert chosen[:6] == chosen[6:]
    assert [route("random", request, 3, 8) for request in requests] != chosen[:6]
    with pytest.raises(ConfigError, match="'best'"):
        play(make_workload("rag", SIZES), [], PlayOptions(routing="best"))  # type: ignore[arg-type]


def test_samples_say_what_any_server_could_have_known(engines: list[SpeakingEngine]) -> None:
    workload = make_workload("shared-prefix", SIZES)
    samples = play(workload, clients_of(engines), PlayOptions())
    for sample in samples:
        first = sample.number < 2
        assert sample.known_anywhere == (0 if first else 256)
        assert sample.known_here in (0, sample.known_anywhere)
        # These engines forget nothing, so they had all that could be had, whole pages of it.
        assert sample.cached_tokens == sample.known_anywhere // PAGE * PAGE
        assert (sample.storage_tokens > 0) == (sample.known_here < sample.known_anywhere)
    assert any(sample.known_here < sample.known_anywhere for sample in samples)


def test_known_beginnings() -> None:
    known = Known()
    known.add(list(range(100)))
    assert known.prefix(list(range(100))) == 96
    assert known.prefix([*range(50), *range(900, 950)]) == 48
    assert known.prefix([1, *range(100)]) == 0
    assert known.prefix(list(range(8))) == 0, "the last token is always computed"


def test_a_request_that_fails_is_told_and_the_others_go_on(engines: list[SpeakingEngine]) -> None:
    requests = [
        Request(number=0, session=0, turn=0, tokens=[7] * 40, new_tokens=2),
        Request(number=1, session=0, turn=1, tokens=[9] * 40, new_tokens=2, after=0, wave=1),
        Request(number=2, session=1, turn=0, tokens=[8] * 40, new_tokens=2, wave=1),
    ]
    engines[0].refused = 7
    samples = play(Workload(name="x", requests=requests, context=40), clients_of(engines[:1]), PlayOptions())
    assert "HTTP 503: not this one" in str(samples[0].error)
    assert samples[1].error is not None
    assert samples[2].error is None


def test_requests_come_at_their_time_and_say_how_late_they_were(engines: list[SpeakingEngine]) -> None:
    engines[0].delay_s = 0.1
    requests = [
        Request(number=number, session=number, turn=0, tokens=[number + 9] * 40, new_tokens=2, at_s=at)
        for number, at in enumerate((0.0, 0.0, 0.25))
    ]
    one, two, three = play(Workload(name="x", requests=requests, context=40), clients_of(engines[:1]), PlayOptions())
    assert two.late_s >= 0.1, "one client: it had to wait for the first answer"
    assert one.late_s <= two.late_s
    assert three.started_s >= 0.25


def test_vllm_tells_the_tiers_of_all_requests_together() -> None:
    store: set[tuple[int, ...]] = set()
    engines = [SpeakingEngine(store, kind="vllm"), SpeakingEngine(store, kind="vllm")]
    try:
        clients = [VLLMClient("v", *parse_url(engine.url)) for engine in engines]
        first = clients[0].generate([5] * 40, 3)
        second = clients[1].generate([5] * 40, 3)
        assert first.output_ids == second.output_ids == answer_of([5] * 40, 3)
        assert (first.cached_tokens, second.cached_tokens) == (0, 32)
        assert clients[0].sources() == {"computed": 40.0, "device": 0.0, "storage": 0.0}
        assert clients[1].sources() == {"computed": 8.0, "device": 0.0, "storage": 32.0}
        clients[1].flush()
        assert engines[1].flushes == 1
    finally:
        for engine in engines:
            engine.close()


# ---------------------------------------------------------------- the command, on servers that run already


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_the_command_on_given_servers(tmp_path: Path, kind: str) -> None:
    store: set[tuple[int, ...]] = set()
    alone = [SpeakingEngine(kind=kind), SpeakingEngine(kind=kind)]
    shared = [SpeakingEngine(store, kind=kind), SpeakingEngine(store, kind=kind)]
    try:
        words = ["experiment", "shared-prefix", "--context", "128,256", "--concurrency", "1,4", "--groups", "2"]
        words += ["--requests", "3", "--repeats", "2", "--engine", kind, "--out", str(tmp_path / "out"), "--check"]
        words += [word for engine in alone for word in ("--url", f"none={engine.url}")]
        words += [word for engine in shared for word in ("--url", f"maru={engine.url}")]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        record = read_json(tmp_path / "out" / "experiment.json")
    finally:
        for engine in (*alone, *shared):
            engine.close()
    assert list(record.modes) == ["none", "maru"]
    assert [run.mode for run in record.runs[:2]] == ["none", "maru"]
    assert [run.mode for run in record.runs if run.repeat == 1][:2] == ["maru", "none"], "another one begins each time"
    assert len(record.runs) == 2 * 2 * 2 * 2
    assert len(record.rows) == 8
    assert not record.failures
    for none, maru in zip(record.rows[::2], record.rows[1::2], strict=True):
        assert (none.mode, maru.mode) == ("none", "maru")
        assert none.prompt_tokens == maru.prompt_tokens == sum(maru.tokens.values()) == sum(none.tokens.values())
        assert none.tokens["storage"] == 0 < maru.tokens["storage"]
        assert maru.hit_rate > none.hit_rate
        assert none.equal_outputs == maru.equal_outputs == 1.0
    # Every run began with empty caches, and asked other prompts than the repeat before it.
    assert alone[0].flushes == 8
    prompts = [{tuple(prompt) for prompt in engine.asked} for engine in alone]
    assert len(prompts[0] | prompts[1]) == 2 * 2 * 6
    page = (tmp_path / "out" / "report.html").read_text()
    assert "data:image/png;base64," in page
    assert "http://" not in page.replace(alone[0].url[:16], "").replace("http://127.0.0.1", "")
    assert {path.name for path in (tmp_path / "out").glob("*.png")} >= {"tiers.png", "ttft_by_concurrency.png"}


def test_wrong_answers_and_failures_are_errors_with_check(tmp_path: Path) -> None:
    engines = [SpeakingEngine(), SpeakingEngine(wrong=True)]
    try:
        words = ["experiment", "rag", "--context", "128", "--groups", "1", "--repeats", "1", "--out", str(tmp_path)]
        words += ["--url", f"none={engines[0].url}", "--url", f"other={engines[1].url}"]
        done = CliRunner().invoke(app, [*words, "--check"])
        assert done.exit_code == 1
        assert "other at 128 tokens, 1 at a time: 0.0% of the answers are those of none" in done.output
        assert CliRunner().invoke(app, words).exit_code == 0
    finally:
        for engine in engines:
            engine.close()


@pytest.mark.parametrize(
    ("url", "what"), [("none=https://a:1", "https://a:1"), ("b:80", "'b:80'"), ("http://b", "'http://b'")]
)
def test_what_is_no_url_is_named(url: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        parse_urls([url])


def test_urls_have_names() -> None:
    assert parse_urls(["a=http://x:1", "http://y:2", "a=http://z:3"]) == {
        "a": ["http://x:1", "http://z:3"],
        "given": ["http://y:2"],
    }


def test_a_sample_without_an_answer_has_no_figures() -> None:
    sample = Sample(number=0, session=0, turn=0, server=0, started_s=0.0, error="x")
    assert msgspec.structs.asdict(sample)["ttft_s"] == sample.computed_tokens == 0
