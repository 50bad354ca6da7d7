"""``tools/performance.sh``: its commands are such that the programs take, what is done is not done again, and the tables are what was measured."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import typer

from maru_bench import cli
from maru_bench.copy import describe_machine, parse_bytes
from maru_bench.experiment.driver import Sample
from maru_bench.experiment.report import write_json
from maru_bench.experiment.summary import Cell, Record, Run, summarise
from maru_bench.experiment.workloads import WorkloadOptions, make_workload
from maru_bench.peers.report import PeersResult, make_row
from maru_bench.peers.run import _MEMORY_LIMIT as MEMORY_LIMIT
from maru_bench.peers.run import PeersOptions
from tests.support import await_condition

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import performance  # noqa: E402
import performance_tables as tables  # noqa: E402
from performance import Command, Section, UnusableError  # noqa: E402

COMMANDS = {command.name: command for section in performance.SECTIONS for command in section.commands}
#: Of the engine kit's demo model.
POSITIONS = 8192
TINY = ("metadata", "--resident", "200", "--repeats", "3", "--pages", "128")


@pytest.mark.parametrize("short", [False, True], ids=["whole", "short"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_one_that_maru_bench_takes(name: str, short: bool, tmp_path: Path) -> None:
    program = typer.main.get_command(cli.app)
    words = performance.words_of(COMMANDS[name], tmp_path, short)
    with program.make_context("maru-bench", list(words)) as context:
        rest = [*getattr(context, "_protected_args", []), *context.args]
        found, command, left = program.resolve_command(context, rest)  # type: ignore[attr-defined]
        with command.make_context(found, left, parent=context) as parsed:
            given = parsed.params
    # Where its results are looked for is where they go.
    assert str(performance.result_of(COMMANDS[name], tmp_path)).startswith(words[-1])
    if COMMANDS[name].kind == "peers":
        options = PeersOptions(
            page_bytes=[parse_bytes(text) for text in given["sizes"].split(",")],
            batches=numbers(given["batches"]), chains=numbers(given["chains"]), clients=numbers(given["clients"]),
        )  # fmt: skip
        assert options.needed_bytes(1 + len(given["names"].split(","))) <= MEMORY_LIMIT, "it would be refused"
    if COMMANDS[name].kind == "experiment":
        sizes = ("groups", "requests", "question", "new_tokens", "documents", "branches")
        for context_tokens in numbers(given["context"]):
            made = WorkloadOptions(context=context_tokens, **{size: given[size] for size in sizes})
            longest = make_workload(given["workload"], made).longest
            assert longest <= POSITIONS, "the demo model takes no longer prompts"
            assert longest > 0.9 * context_tokens


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part != "0"]


def test_no_section_takes_more_than_forty_minutes_and_all_of_them_are_on_the_page() -> None:
    assert max(section.minutes for section in performance.SECTIONS) <= 40
    assert performance.listing() in tables.PAGE.read_text()
    groups = {"store", "peers", "growth", "engines", "long"}
    assert {section.group or section.name for section in performance.SECTIONS} == groups
    assert [section.name for section in performance.chosen(["long"])] == ["longest", "longest-direct"]
    assert performance.chosen([]) == list(performance.SECTIONS)
    with pytest.raises(UnusableError, match="'peer'"):
        performance.chosen(["peer"])


def test_what_is_done_is_not_done_again_and_what_failed_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = Command("metadata_10000", TINY, TINY, 1), Command("bad", ("metadata", "--pages", "none"), TINY, 1)
    sections = [Section("one", "one", (good,)), Section("two", "two", (bad,))]
    assert performance.run(tmp_path, sections, short=False, again=False) == ["bad"]
    told = capsys.readouterr().err
    assert "one: one; about 1 min, 2 min with what comes after it" in told
    assert "FAILED with 2" in told
    assert "--pages" in told, "the command's own last words"
    assert (performance.is_done(good, tmp_path, False), performance.is_done(bad, tmp_path, False)) == (True, False)
    made = performance.result_of(good, tmp_path).stat().st_mtime_ns
    assert performance.run(tmp_path, sections, short=False, again=False) == ["bad"]
    assert "one is done" in capsys.readouterr().err
    assert performance.result_of(good, tmp_path).stat().st_mtime_ns == made
    # Other words are another measurement; so is a file that is gone.
    assert not performance.is_done(dataclasses.replace(good, words=(*TINY, "--check")), tmp_path, False)
    performance.result_of(good, tmp_path).rename(tmp_path / "elsewhere")
    assert not performance.is_done(good, tmp_path, False)
    with pytest.raises(UnusableError, match="whole"):
        performance.run(tmp_path, sections, short=True, again=False)
    # A real result, as the table of it.
    result = msgspec.json.decode((tmp_path / "elsewhere").read_bytes(), type=tables.MetadataResult)
    row = next(row for row in result.rows if row.operation == "match")
    assert f"| 200 | {row.maru_us:.0f} | {row.echoes:.2f} |" in tables.growth_table([result])


_LONG = """
import sys
sys.path.insert(0, {tools!r})
import performance
words = ("metadata", "--clients", "1", "--seconds", "60", "--repeats", "50", "--resident", "100")
performance.SECTIONS = (performance.Section("long", "long", (performance.Command("long", words, words, 1),)),)
sys.exit(performance.main([sys.argv[1]]))
"""


def pools_of(process: int) -> list[Path]:
    """What the commands that it started have in shared memory."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [path for child in children for path in Path("/dev/shm").glob(f"maru-bench-{child}-*")]


def test_who_is_interrupted_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _LONG.format(tools=str(ROOT / "tools")), str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            await_condition(lambda: bool(pools_of(process.pid)), "the command has a pool")
            pools = pools_of(process.pid)
            process.terminate()
            _, told = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == performance.INTERRUPTED
    assert "interrupted; the same command goes on" in told
    assert not any(path.exists() for path in pools)
    assert not (tmp_path / "long.done").exists()


# ---------------------------------------------------------------- the page


def write(directory: Path, name: str, result: msgspec.Struct) -> None:
    command = COMMANDS[name]
    path = performance.result_of(command, directory)
    path.parent.mkdir(exist_ok=True)
    if isinstance(result, Record):
        write_json(result, path)
    else:
        path.write_bytes(msgspec.json.encode(result))
    done = {"words": list(command.words), "seconds": 60.0, "ended_at": 0.0}
    (directory / f"{name}.done").write_text(json.dumps(done))


def record(seconds: dict[str, float], answers: dict[str, str] | None = None, **settings: object) -> Record:
    """Two requests in each mode: a prompt that is new, and the same on the other server, after so many seconds."""
    made = Record(
        workload="shared-prefix", engine="sglang", machine=dict(describe_machine()), versions={"maru commit": "abc"},
        settings=settings, seed=0, started_at="", modes={mode: mode for mode in seconds},
    )  # fmt: skip
    cell = Cell(context=8000, concurrency=1)
    for mode, elsewhere in seconds.items():
        both = [
            Sample(
                number=n, session=n, turn=0, server=n, started_s=float(n), prompt_tokens=8024, cached_tokens=0, device_tokens=0,
                storage_tokens=0, new_tokens=8, ttft_s=elsewhere if n else 10.0, total_s=11.0, known_here=0, known_anywhere=8000 * n, output=(answers or {}).get(mode, ""),
            )
            for n in range(2)
        ]  # fmt: skip
        made.runs.append(Run(mode=mode, cell=cell, repeat=0, seconds=30.0, samples=both))
    made.rows = summarise(made)
    return made


@pytest.fixture
def results(tmp_path: Path) -> Path:
    directory = tmp_path / "results"
    directory.mkdir()
    (directory / performance.FORM).write_text("whole\n")
    rows = [
        make_row(operation, peer, 16 << 10, pages, 1, [median], [100e-6], None)
        for operation, pages in (("exists", 8192), ("load", 1), ("store", 128))
        for peer, median in (("maru", 100e-6), ("file", 7000e-6 if operation == "exists" else 50e-6))
    ]
    peers = PeersResult(
        machine=describe_machine(), versions={}, commit="abc", repeats=5, skipped={"nixl": "not there"}, rows=rows
    )
    for name in ("peers", "peers-chains"):
        write(directory, name, peers)
    write(directory, "longest", record({"none": 10.0, "file": 4.0, "maru": 3.0}))
    write(directory, "longest-direct", record({"none": 10.0, "maru-direct": 3.6}, {"maru-direct": "another"}))
    answers = {"maru": "rounded", "file": "rounded"}
    write(directory, "agents", record({"none": 10.0, "file": 4.0, "maru": 3.0}, answers, new_rows_only="1"))
    return directory


def block(text: str, name: str) -> str:
    return text.partition(f"<!-- results: {name} -->")[2].partition(f"<!-- end of {name} -->")[0]


def test_tables_are_what_was_measured_and_the_rest_stays(results: Path, tmp_path: Path) -> None:
    into = tmp_path / "page.md"
    lines = tables.write_page(results, into)
    text = into.read_text()
    assert "| exists | 16 KiB | 8192 | by turns | 100 (100) | 7000 (7000) 70.00 |" in block(text, "peers")
    assert "| load | 16 KiB | 1 | by turns | 100 (100) | 50 (50) **0.50** |" in block(text, "peers")
    told = "Of 3 comparisons others are ahead in 2, in 1 of them with one page at a time; of the 1 of stores and loads in SGLang's batches of 128 pages, in 1."
    assert told in block(text, "peers")
    assert "Left out: nixl (not there)." in block(text, "peers")
    assert "commit abc." in block(text, "peers")
    assert "load" not in block(text, "peers-chains"), "lookups alone"
    told = block(text, "longest")
    assert "`maru` takes 0.30 of the time of `none` (goal 0.35: met), and 0.75 of that of `file` (goal 1: met)" in told
    assert "8000 | 1 | maru" in told
    assert "`maru-direct` takes 0.36 of the time of `none` (goal 0.35: **not met**)" in block(text, "longest-direct")
    assert "**Failed**: maru-direct at 8000 tokens, 1 at a time: 0.0% of the answers are those of none." in block(
        text, "longest-direct"
    )
    # What may be rounded otherwise is no failure; whether stores agree is told.
    assert "Failed" not in block(text, "agents")
    assert "`maru` takes 0.30 of the time of `none`, and 0.75 of that of `file`." in block(text, "agents"), "no goals"
    assert "One request at a time, 100% of the answers with `maru` are those with `file`." in block(text, "agents")
    assert "are those with `file`" not in told
    # What there is no result of is as it was, and said so; so is all that lies between.
    assert block(text, "growth") == block(tables.PAGE.read_text(), "growth")
    assert {"longest: written", "growth: no results, left as it was", f"written: {into}, and 3 plots beside it"} <= set(
        lines
    )
    for name in ("longest", "longest-direct"):
        assert f"](images/performance-{name}.png)" in block(text, name)
        assert (tmp_path / "images" / f"performance-{name}.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == [
        "performance-agents.png",
        "performance-longest-direct.png",
        "performance-longest.png",
    ]
    assert tables._BLOCK.sub("", text) == tables._BLOCK.sub("", tables.PAGE.read_text())
    # Again, into what was made: the same.
    assert tables.with_tables(text, tables.tables(results))[0] == text


def test_a_short_run_is_not_written_into_the_page(results: Path, tmp_path: Path) -> None:
    (results / performance.FORM).write_text("short\n")
    before = tables.PAGE.read_text()
    command = [sys.executable, str(ROOT / "tools" / "performance.py"), "--docs", str(results)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == performance.UNUSABLE
    assert "--into FILE" in done.stderr
    assert tables.PAGE.read_text() == before
    with pytest.raises(UnusableError, match="has no results"):
        tables.write_page(tmp_path, None)


def test_a_page_without_a_place_is_refused(results: Path) -> None:
    with pytest.raises(UnusableError, match="'growth'"):
        tables.with_tables(tables.PAGE.read_text().replace("results: growth", "results: grown"), tables.tables(results))
