"""What an experiment's samples come to, its verdict, its table, page and plots; and what it needs: modes, energy, time left."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from maru_bench.experiment.driver import Sample
from maru_bench.experiment.energy import EnergyMeter
from maru_bench.experiment.eta import Estimate, Step
from maru_bench.experiment.modes import MODES, Place, choose_modes
from maru_bench.experiment.page import page
from maru_bench.experiment.plots import plots
from maru_bench.experiment.report import markdown, read_json, table, write_json
from maru_bench.experiment.summary import Cell, Record, Run, judge, percentile, summarise
from maru_bench.stores import FileStore, MaruStore, Moved
from maru_core.errors import ConfigError

CELLS = [Cell(context=context, concurrency=concurrency) for context in (1000, 2000) for concurrency in (1, 4)]


def samples(mode: str, cell: Cell, repeat: int) -> list[Sample]:
    """Four requests: two new prompts, one that only the other server knows, one that its own server knows."""
    made = []
    shared = cell.context * 9 // 10
    for number in range(4):
        known = shared if number > 1 else 0
        here = shared if number == 3 else 0
        from_store = known - here if mode == "maru" else 0
        computed = cell.context - here - from_store
        made.append(
            Sample(
                number=number, session=number % 2, turn=number // 2, server=number % 2, started_s=float(number),
                prompt_tokens=cell.context, cached_tokens=here + from_store, device_tokens=here, storage_tokens=from_store,
                new_tokens=8, ttft_s=computed / 1000 + 0.01 * repeat, total_s=computed / 1000 + 0.1, known_here=here,
                known_anywhere=known, output=f"{cell.context}/{repeat}/{number}",
            )
        )  # fmt: skip
    return made


@pytest.fixture
def record() -> Record:
    made = Record(
        workload="multi-turn", engine="sglang", machine={"cpu": "a <cpu>"}, versions={"python": "3"},
        settings={"device": "cpu", "servers": 2}, seed=4, started_at="2026-01-01T00:00:00+00:00",
        modes={"none": "its own cache", "maru": "Maru"}, skipped={"nixl": "not & there"},
    )  # fmt: skip
    for cell in CELLS:
        for repeat in range(3):
            for mode in made.modes:
                moved = Moved(stored_bytes=10**9 * (repeat + 1), loaded_bytes=5 * 10**8) if mode == "maru" else None
                made.runs.append(
                    Run(
                        mode=mode, cell=cell, repeat=repeat, seconds=4.0, samples=samples(mode, cell, repeat), moved=moved,
                        joules={"cpu:0": 100.0 + repeat},
                    )
                )  # fmt: skip
    made.rows = summarise(made)
    return made


def test_each_figure_is_the_median_of_the_repeats(record: Record) -> None:
    assert [(row.mode, row.cell) for row in record.rows] == [
        (mode, cell) for cell in CELLS for mode in ("none", "maru")
    ]
    none, maru = record.rows[:2]
    assert (none.requests, none.repeats, none.failed) == (4, 3, 0)
    # In the middle repeat: 1000, 1000, 1000 and 100 tokens computed; 10 ms more.
    assert none.ttft_p50_s == pytest.approx(1.01)
    assert (none.ttft_new_s, none.ttft_elsewhere_s, none.ttft_here_s) == pytest.approx((1.01, 1.01, 0.11))
    assert (maru.ttft_new_s, maru.ttft_elsewhere_s, maru.ttft_here_s) == pytest.approx((1.01, 0.11, 0.11))
    assert maru.elsewhere_to_first == pytest.approx(0.11 / 1.01)
    assert none.elsewhere_to_first == 1.0
    assert maru.to_first == pytest.approx(percentile([1.01, 1.01, 0.11, 0.11], 50) / 1.01)
    assert none.tokens == {"computed": 3100, "device": 900, "host": 0, "storage": 0, "cached": 0}
    assert maru.tokens == {"computed": 2200, "device": 900, "host": 0, "storage": 900, "cached": 0}
    assert (none.hit_rate, maru.hit_rate, none.hit_rate_possible) == pytest.approx((0.225, 0.45, 0.45))
    assert none.hit_rate_by_turn == pytest.approx([0.0, 0.45])
    assert (maru.stored_bytes, maru.loaded_bytes, none.stored_bytes) == (2e9, 5e8, None)
    assert (none.prompt_tokens_per_s, none.output_tokens_per_s, none.requests_per_s) == (1000, 8, 1)
    assert none.joules == {"cpu:0": 101.0}
    assert (none.equal_outputs, maru.equal_outputs) == (1.0, 1.0)
    assert judge(record) == []


def test_what_linkers_load_is_the_stores_though_the_engine_calls_it_host(record: Record) -> None:
    for run in record.runs:
        run.samples = [msgspec.structs.replace(s, host_tokens=s.storage_tokens, storage_tokens=0) for s in run.samples]
    assert summarise(record)[1].tokens["host"] == 900
    record.storage_is_host = ["maru"]
    assert summarise(record)[1].tokens["storage"] == 900


def test_the_servers_own_account_counts_where_answers_do_not_tell(record: Record) -> None:
    for run in record.runs:
        run.sources = {"computed": 2400.0, "device": 800.0, "storage": 4800.0}
    tokens = summarise(record)[1].tokens
    assert tokens == {"computed": 1200, "device": 400, "host": 0, "storage": 2400, "cached": 0}


def test_failed_requests_count_in_no_figure_and_are_errors(record: Record) -> None:
    for run in record.runs:
        run.samples[2] = Sample(number=2, session=0, turn=1, server=0, started_s=2.0, error="it broke")
    record.rows = summarise(record)
    assert record.rows[0].failed == 3
    assert record.rows[0].prompt_tokens == 3000
    assert "none at 1000 tokens, 1 at a time: 3 requests failed, the first with: it broke" in judge(record)


def test_a_run_in_which_all_requests_failed_is_summed_up_too(record: Record) -> None:
    for run in record.runs:
        run.samples = [
            Sample(number=s.number, session=0, turn=0, server=0, started_s=0.0, error="x") for s in run.samples
        ]
    record.rows = summarise(record)
    assert record.rows[0].hit_rate == 0
    assert judge(record)
    Console(file=io.StringIO()).print(table(record))


def test_a_store_that_gave_nothing_and_other_answers_are_errors(record: Record) -> None:
    for run in record.runs:
        if run.mode == "maru":
            run.samples = samples("none", run.cell, run.repeat)
            run.samples[0] = msgspec.structs.replace(run.samples[0], output="other")
    record.rows = summarise(record)
    failures = judge(record)
    assert "maru at 2000 tokens, 4 at a time: no token came from the store" in failures
    assert "maru at 1000 tokens, 1 at a time: 75.0% of the answers are those of none" in failures
    assert len(failures) == 4 + 2, "with several requests at a time other batches may round otherwise"
    record.settings["new_rows_only"] = "1"
    assert len(judge(record)) == 4, "and so may new rows alone"


def test_percentiles_lie_between_values() -> None:
    assert percentile([1, 2, 3, 4], 50) == 2.5
    assert percentile([1, 2, 3, 4], 100) == 4
    assert percentile([], 50) != percentile([], 50)


def test_the_record_is_read_as_it_was_written(record: Record, tmp_path: Path) -> None:
    write_json(record, tmp_path / "x.json")
    assert read_json(tmp_path / "x.json") == record
    assert summarise(read_json(tmp_path / "x.json")) == record.rows
    (tmp_path / "x.json").write_text('{"workload": 3}')
    with pytest.raises(ConfigError, match="not an experiment's"):
        read_json(tmp_path / "x.json")


def test_the_table_has_a_line_for_each_mode_and_no_column_that_says_nothing(record: Record) -> None:
    console = Console(file=io.StringIO(), width=200)
    console.print(table(record))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("maru") == text.count("none") == 4
    assert "host" not in text
    assert "1010" in text
    assert "0.11" in text


def test_the_table_for_a_page_has_the_same_in_it(record: Record) -> None:
    lines = markdown(record).splitlines()
    assert len(lines) == 2 + len(record.rows)
    assert len({line.count("|") for line in lines}) == 1
    assert lines[0].startswith("| context | at a time | mode | TTFT p50 ms |")
    assert "computed" in lines[0]
    assert [line.split("|")[3].strip() for line in lines[2:4]] == ["none", "maru"]


def test_the_page_has_everything_in_it(record: Record) -> None:
    record.failures = ["a <failure>"]
    text = page(record, list(plots(record)))
    assert text.count("data:image/png;base64,") == 5
    assert "<script" not in text
    assert 'src="http' not in text
    for word in ("a &lt;cpu&gt;", "a &lt;failure&gt;", "not &amp; there", "seed 4", "its own cache"):
        assert word in text, word


def test_plots_are_those_that_there_are_figures_for(record: Record) -> None:
    assert [name for name, _ in plots(record)] == [
        "ttft_by_context", "ttft_by_concurrency", "tiers", "hit_rate_by_turn", "timeline",
    ]  # fmt: skip
    record.runs = [
        msgspec.structs.replace(run, samples=[msgspec.structs.replace(s, turn=0) for s in run.samples])
        for run in record.runs
        if run.cell == CELLS[0]
    ]
    record.rows = summarise(record)
    images = dict(plots(record))
    assert list(images) == ["ttft_by_context", "tiers", "timeline"]
    assert all(image.startswith(b"\x89PNG") and len(image) > 5000 for image in images.values())


# ---------------------------------------------------------------- what it needs


def test_modes_that_cannot_run_are_left_out_with_the_reason() -> None:
    chosen, skipped = choose_modes(["none", "hicache", "maru", "mooncake", "none"], "sglang", sys.executable)
    assert [mode.name for mode in chosen] == ["none", "hicache", "maru"]
    assert "cannot import mooncake.store" in skipped["mooncake"]
    assert "pip install mooncake" in skipped["mooncake"]
    chosen, skipped = choose_modes(["none", "file"], "vllm", sys.executable)
    assert skipped == {"file": "file is no mode of vllm"}
    with pytest.raises(ConfigError, match=r"no mode can run: .*mooncake"):
        choose_modes(["mooncake"], "sglang", sys.executable)
    with pytest.raises(ConfigError, match="'redis'"):
        choose_modes(["redis"], "sglang", sys.executable)


def test_stores_count_what_they_have_and_forget_it(tmp_path: Path) -> None:
    place = Place(directory=tmp_path, logs=tmp_path, python=sys.executable, pool_size="64M", servers=2)
    file = MODES["file"].make(place)
    assert isinstance(file, FileStore)
    file.start()
    (Path(file.env["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"]) / "a.bin").write_bytes(b"x")
    assert file.objects() == 1
    file.clear()
    assert file.objects() == 0
    file.close()
    maru = MODES["maru"].make(place)
    assert isinstance(maru, MaruStore)
    try:
        maru.start()
        assert (maru.objects(), maru.moved()) == (0, Moved(stored_bytes=0, loaded_bytes=0))
        transfer = MODES["maru"].vllm_transfer(maru)
        assert transfer is not None
        assert transfer["kv_connector_extra_config"] == maru.extra_config == {"server": maru.endpoint}
        assert maru.endpoint in " ".join(MODES["maru-direct"].sglang_arguments(maru))
    finally:
        maru.close()


def test_energy_is_the_sum_of_what_the_counters_went_on(tmp_path: Path) -> None:
    zone = tmp_path / "intel-rapl:0"
    (tmp_path / "intel-rapl:0:0").mkdir()
    zone.mkdir()
    (zone / "max_energy_range_uj").write_text("10000000")
    (zone / "energy_uj").write_text("9000000")
    meter = EnergyMeter(tmp_path)
    (zone / "energy_uj").write_text("9500000")
    assert meter.read()["cpu:0"] == pytest.approx(0.5)
    (zone / "energy_uj").write_text("500000")  # it began anew
    assert meter.read()["cpu:0"] == pytest.approx(1.5)
    assert "cpu" not in meter.why


def test_energy_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    meter = EnergyMeter(tmp_path / "none")
    assert not any(name.startswith("cpu") for name in meter.read())
    assert str(tmp_path / "none") in meter.why["cpu"]


def test_time_left_is_learnt_from_what_was_done() -> None:
    now = 0.0
    steps = [Step(kind="start", mode=mode, amount=1) for mode in ("a", "b")]
    steps += [Step(kind="play", mode=mode, amount=amount) for amount in (100, 200) for mode in ("a", "b")]
    estimate = Estimate(steps, clock=lambda: now)
    assert estimate.left_s() is None
    assert estimate.share() == 0.0
    now = 60.0
    estimate.done()
    assert estimate.left_s() is None, "nobody knows how long playing takes"
    now = 120.0
    estimate.done()
    now = 130.0
    estimate.done()  # a: 0.1 s for each
    assert estimate.left_s() == pytest.approx(10 + 20 + 20)
    now = 135.0
    assert estimate.left_s() == pytest.approx(5 + 20 + 20)
    assert estimate.share() == pytest.approx(135 / 180)
    now = 150.0
    estimate.done()  # b: 0.2 s for each
    assert estimate.left_s() == pytest.approx(20 + 40)
    now = 170.0
    estimate.done()
    now = 300.0
    assert estimate.left_s() == 0.0
    estimate.done()
    assert (estimate.left_s(), estimate.share(), estimate.current) == (0.0, 1.0, None)
