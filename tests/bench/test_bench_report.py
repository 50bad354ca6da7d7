"""The verdict of the prefix-sharing experiment: good only if tokens came from the store and everything is equal."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from maru_bench.report import Phase, Report
from maru_bench.servers import Answer

PROMPTS = [1033, 1545]


def answer(prompt: int, *, storage: int = 0, **changes: object) -> Answer:
    good = Answer(
        prompt_tokens=prompt,
        cached_tokens=storage,
        device_tokens=0,
        host_tokens=0,
        storage_tokens=storage,
        output_ids=[prompt, 2],
        logprobs=[-0.5, -1.25],
        ttft_s=0.1 if storage else 0.4,
        total_s=0.5,
    )
    return msgspec.structs.replace(good, **changes)


def phase(key: str, *, from_store: bool) -> Phase:
    answers = [answer(prompt, storage=prompt // 16 * 16 if from_store else 0) for prompt in PROMPTS]
    return Phase(key=key, title=key, server="A", from_store=from_store, answers=answers)


@pytest.fixture
def report() -> Report:
    phases = [
        phase("cold", from_store=False),
        phase("second_server", from_store=True),
        phase("after_flush", from_store=True),
        phase("store_stopped", from_store=False),
    ]
    return Report(
        backend="maru",
        device="cpu",
        model="/m/demo",
        prompt_tokens=PROMPTS,
        new_tokens=2,
        page_tokens=16,
        phases=phases,
    )


def test_a_good_run_is_ok(report: Report) -> None:
    assert report.judge()
    assert report.ok
    assert report.failures == []


@pytest.mark.parametrize("index", [1, 2])
def test_a_phase_with_a_prompt_without_store_tokens_fails(report: Report, index: int) -> None:
    report.phases[index].answers[1] = answer(PROMPTS[1])
    assert not report.judge()
    assert any("prompt 1 got no token from the store" in failure for failure in report.failures)


@pytest.mark.parametrize("index", [0, 3])
def test_tokens_from_a_cache_where_all_had_to_be_computed_fail(report: Report, index: int) -> None:
    report.phases[index].answers[0] = answer(PROMPTS[0], cached_tokens=16, device_tokens=16)
    assert not report.judge()
    assert any("16 tokens from a cache" in failure for failure in report.failures)


@pytest.mark.parametrize("index", [1, 2, 3])
def test_other_outputs_than_the_cold_run_fail(report: Report, index: int) -> None:
    report.phases[index].answers[0] = msgspec.structs.replace(report.phases[index].answers[0], output_ids=[7, 2])
    assert not report.judge()
    assert report.failures == [f"{report.phases[index].title}: outputs differ from the cold run's"]


@pytest.mark.parametrize("index", [1, 2, 3])
def test_a_log_probability_that_differs_in_the_last_bit_fails(report: Report, index: int) -> None:
    changed = msgspec.structs.replace(report.phases[index].answers[0], logprobs=[-0.5, -1.2500000000000002])
    report.phases[index].answers[0] = changed
    assert not report.judge()
    assert report.failures == [f"{report.phases[index].title}: log probabilities differ from the cold run's"]


@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_a_prompt_without_an_answer_fails(report: Report, index: int) -> None:
    del report.phases[index].answers[1]
    report.phases[index].error = "server A did not answer"
    assert not report.judge()
    assert any("server A did not answer" in failure for failure in report.failures)


def test_answers_without_log_probabilities_fail_though_they_are_equal(report: Report) -> None:
    for each in report.phases:
        each.answers = [msgspec.structs.replace(old, logprobs=[]) for old in each.answers]
    assert not report.judge()


def test_a_run_without_phases_fails(report: Report) -> None:
    report.phases = []
    assert not report.judge()


def test_judging_again_does_not_keep_old_failures(report: Report) -> None:
    good = report.phases[1].answers[0]
    report.phases[1].answers[0] = answer(PROMPTS[0])
    assert not report.judge()
    report.phases[1].answers[0] = good
    assert report.judge()


def test_the_table_says_what_each_phase_computed_and_loaded(report: Report) -> None:
    report.judge()
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.table())
    text = console.export_text()
    lines = {line.split("  ")[0].strip(): line.split() for line in text.splitlines()}
    assert "2578" in lines["cold"]
    assert lines["second_server"][2:4] == ["18", "2560"]
    assert "(4.0x)" in lines["second_server"]
    assert "…" not in text


def test_an_unequal_phase_is_marked_in_the_table(report: Report) -> None:
    report.phases[2].answers[0] = msgspec.structs.replace(report.phases[2].answers[0], output_ids=[7, 2])
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.table())
    lines = {line.split("  ")[0].strip(): line.split() for line in console.export_text().splitlines()}
    assert lines["after_flush"][-2:] == ["NO", "yes"]


def test_json_has_the_sums_and_every_answer(report: Report, tmp_path: Path) -> None:
    report.judge()
    report.write_json(tmp_path / "demo.json")
    data = json.loads((tmp_path / "demo.json").read_text())
    assert data["ok"] is True
    assert [each["key"] for each in data["phases"]] == ["cold", "second_server", "after_flush", "store_stopped"]
    second = data["phases"][1]
    assert second["tokens_computed"] == 18
    assert second["tokens_from_store"] == 2560
    assert second["outputs_equal"] is True
    assert second["logprobs_equal"] is True
    assert second["ttft_median_s"] == 0.1
    assert [each["output_ids"] for each in second["answers"]] == [[1033, 2], [1545, 2]]


def test_json_and_plot_of_a_run_that_broke_off(report: Report, tmp_path: Path) -> None:
    report.phases = report.phases[:2]
    report.phases[1].answers = []
    report.phases[1].error = "server B did not answer"
    report.judge()
    report.write_json(tmp_path / "demo.json")
    assert json.loads((tmp_path / "demo.json").read_text())["phases"][1]["ttft_median_s"] is None
    report.write_plot(tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
