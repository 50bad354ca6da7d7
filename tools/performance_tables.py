"""The tables of docs/performance.md, made of a directory of results: nothing of them is written by hand.

A table lies between ``<!-- results: NAME -->`` and ``<!-- end of NAME -->``. What the directory has no results for stays as it is.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import performance
from performance import ROOT, Command, UnusableError

from maru_bench.experiment.plots import plots
from maru_bench.experiment.report import markdown as experiment_table
from maru_bench.experiment.report import read_json
from maru_bench.experiment.summary import Record, Row, equal_outputs, judge
from maru_bench.metadata import TARGET_PAGES, MetadataResult
from maru_bench.peers.report import LIMITS, PeerRow, PeersResult
from maru_core.errors import ConfigError

PAGE = ROOT / "docs" / "performance.md"
#: The first token on a second server, at most so much of what it takes to compute, and of what it takes with files.
GOAL_OF_COMPUTING, GOAL_OF_FILES = 0.35, 1.0
#: Pages that SGLang stores and loads at a time.
WHOLE_BATCH = 128
#: Experiments, and which of their plots stands below the table: what it says.
EXPERIMENTS = {
    "shared-prefix": ("ttft_by_context", "time to first token against the length of the shared prefix"),
    "multi-turn": ("hit_rate_by_turn", "tokens from a cache, by turn"),
    "rag": ("tiers", "where the tokens of the prompts came from"),
    "agents": ("tiers", "where the tokens of the prompts came from"),
    "direct": ("ttft_by_context", "time to first token against the length of the shared prefix"),
    "concurrency": ("ttft_by_concurrency", "time to first token against requests at a time"),
    "longest": ("timeline", "time to first token along one run"),
    "longest-direct": ("timeline", "time to first token along one run"),
}
_BLOCK = re.compile(r"(<!-- results: ([\w-]+) -->\n)(.*?)(<!-- end of \2 -->)", re.DOTALL)


# ---------------------------------------------------------------- single tables


def peers_table(result: PeersResult, kept: Callable[[PeerRow], bool]) -> str:
    """Those rows, and who was left out."""
    rows = [row for row in result.rows if kept(row)]
    text = msgspec.structs.replace(result, rows=rows).markdown()
    for name, why in result.skipped.items():
        text += f"\nLeft out: {name} ({why.splitlines()[0].rstrip(':')}).\n"
    return text


def behind(result: PeersResult) -> str:
    """Where others are ahead, in numbers."""
    compared = [row for row in result.rows if row.peer not in ("maru", *LIMITS) and not row.in_a_loop]
    faster = [row for row in compared if row.to_maru < 1.0]
    few = sum(row.pages == 1 for row in faster)
    whole = [row for row in compared if row.operation != "exists" and row.pages >= WHOLE_BATCH]
    return (
        f"Of {len(compared)} comparisons others are ahead in {len(faster)}, in {few} of them with one page at a time; of the {len(whole)} of stores "
        f"and loads in SGLang's batches of {WHOLE_BATCH} pages, in {sum(row.to_maru < 1.0 for row in whole)}.\n"
    )


def growth_table(results: Iterable[MetadataResult]) -> str:
    """Calls of 128 pages, and a start, by the pages that the server holds."""
    rows = [
        "| pages in the pool | match µs | in echoes | reserve + commit µs | in echoes | start ms |",
        "|---:" * 6 + "|",
    ]
    for result in results:
        row = {row.operation: row for row in result.rows if row.pages == TARGET_PAGES}
        match, write = row["match"], row["reserve+commit"]
        rows.append(
            f"| {result.resident_pages:,} | {match.maru_us:.0f} | {match.echoes:.2f} | {write.maru_us:.0f} | {write.echoes:.2f} "
            f"| {result.start_rebuild_s * 1e3:.0f} |"
        )
    return "\n".join(rows) + "\n"


def verdict(record: Record, *, goals: bool) -> str:
    """How the first token on a second server compares, at the longest prompts, one at a time; with or without the goals, which are about prompts
    that another server has computed whole."""

    def goal(share: float, most: float) -> str:
        return f" (goal {most:g}: {'met' if share <= most else '**not met**'})" if goals else ""

    longest = max(row.cell.context for row in record.rows)
    rows = {row.mode: row for row in record.rows if row.cell.context == longest and row.cell.concurrency == 1}
    told = []
    for name, row in rows.items():
        if not name.startswith("maru") or row.elsewhere_to_first is None:
            continue
        words = [f"{row.elsewhere_to_first:.2f} of the time of `{next(iter(rows))}`{goal(row.elsewhere_to_first, GOAL_OF_COMPUTING)}"]  # fmt: skip
        files = rows.get("file")
        if files is not None and files.ttft_elsewhere_s and row.ttft_elsewhere_s:
            share = row.ttft_elsewhere_s / files.ttft_elsewhere_s
            words.append(f"{share:.2f} of that of `file`{goal(share, GOAL_OF_FILES)}")
        told.append(f"`{name}` takes {', and '.join(words)}")
    if not told:
        return ""
    return f"First token on a second server, {longest:,} tokens shared: {'; '.join(told)}.\n\n"


def agreement(record: Record) -> str:
    """Where answers differ from those without a cache: whether two stores agree, one request at a time."""
    alone = [run for run in record.runs if run.cell.concurrency == 1]
    files = [run for run in alone if run.mode == "file"]
    shares = [
        equal_outputs([run], [other for other in files if other.cell == run.cell])
        for run in alone
        if run.mode == "maru"
    ]
    if not files or not shares or all(row.equal_outputs == 1.0 for row in record.rows if row.cell.concurrency == 1):
        return ""
    return (
        f"\nOne request at a time, {sum(shares) / len(shares):.0%} of the answers with `maru` are those with `file`.\n"
    )


def image_of(name: str) -> str:
    return f"performance-{name}.png"


def experiment_text(record: Record, *, goals: bool) -> str:
    row: Row = record.rows[0]
    text = (
        f"`{record.workload}`: {row.requests} requests a run, medians of {row.repeats}.\n\n{experiment_table(record)}"
    )
    for name, why in record.skipped.items():
        text += f"\nLeft out: {name} ({why}).\n"
    for failure in judge(record):
        text += f"\n**Failed**: {failure}.\n"
    text += agreement(record)
    told = verdict(record, goals=goals).rstrip("\n")
    return text + (f"\n{told}\n" if told else "")


# ---------------------------------------------------------------- the page


class _Results:
    """What a directory has. Each method gives a table, or None where there are no results for it."""

    def __init__(self, directory: Path, short: bool) -> None:
        self._directory, self._short = directory, short
        self._commands = {c.name: c for section in performance.SECTIONS for c in section.commands}

    def _path(self, name: str) -> Path | None:
        command: Command = self._commands[name]
        done = performance.is_done(command, self._directory, self._short)
        return performance.result_of(command, self._directory) if done else None

    def peers(self, name: str, kept: Callable[[PeerRow], bool], *, count: bool = False) -> str | None:
        path = self._path(name)
        if path is None:
            return None
        result = msgspec.json.decode(path.read_bytes(), type=PeersResult)
        return (
            peers_table(result, kept)
            + ("\n" + behind(result) if count else "")
            + self._where(path, result.machine, result.commit)
        )

    def growth(self) -> str | None:
        paths = [self._path(name) for name in self._commands if name.startswith("metadata_")]
        there = [path for path in paths if path is not None]
        if not there:
            return None
        results = [msgspec.json.decode(path.read_bytes(), type=MetadataResult) for path in there]
        return growth_table(results) + self._where(there[-1], results[-1].machine, None)

    def experiment(self, name: str) -> str | None:
        path = self._path(name)
        if path is None:
            return None
        record = read_json(path)
        return (
            experiment_text(record, goals=name.startswith("longest"))
            + f"\n![{EXPERIMENTS[name][1]}](images/{image_of(name)})\n"
            + self._where(path, record.machine, record.versions.get("maru commit"))
        )

    def images(self) -> dict[str, bytes]:
        """The plots of the experiments that there are, by file name: PNG."""
        found = {}
        for name, (plot, _) in EXPERIMENTS.items():
            path = self._path(name)
            if path is not None:
                found[image_of(name)] = dict(plots(read_json(path)))[plot]
        return found

    def _where(self, path: Path, machine: dict[str, object] | dict[str, str | int], commit: str | None) -> str:
        day = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC).date().isoformat()
        words = [
            f"{machine.get('cpus', '?')} cores ({machine.get('cpu', '?')})",
            day,
            *([f"commit {commit}"] if commit else []),
        ]
        gpus = machine.get("gpus")
        words += [", ".join(map(str, gpus))] if isinstance(gpus, list) and gpus else []
        mark = "**A short run: that it runs is what it shows, not how fast.** " if self._short else ""
        return f"\n{mark}{', '.join(words)}.\n"


def tables(directory: Path) -> dict[str, str | None]:
    """Every table by name; None where the directory has no results for it.

    Raises:
        UnusableError: no directory of results, or of results that cannot be read.
    """
    results = _results(directory)
    try:
        made: dict[str, str | None] = {
            "sections": performance.listing(),
            "peers": results.peers("peers", lambda row: True, count=True),
            "peers-chains": results.peers("peers-chains", lambda row: row.operation == "exists"),
            "peers-clients": results.peers("peers-clients", lambda row: row.in_a_loop),
            "peers-clients-file": results.peers("peers-clients-file", lambda row: row.in_a_loop),
            "page-size": results.peers("page-size", lambda row: row.operation != "exists"),
            "growth": results.growth(),
        }
        made |= {name: results.experiment(name) for name in EXPERIMENTS}
    except (OSError, msgspec.MsgspecError, ConfigError, KeyError, json.JSONDecodeError) as error:
        raise UnusableError(
            f"{directory} has results that cannot be read: {error}: run that section with --again"
        ) from error
    return made


def _results(directory: Path) -> _Results:
    mark = directory / performance.FORM
    if not mark.exists():
        raise UnusableError(f"{directory} has no results: tools/performance.sh {directory} makes them")
    return _Results(directory, mark.read_text().strip() == "short")


def with_tables(text: str, made: dict[str, str | None]) -> tuple[str, list[str]]:
    """The page with what was made in its places, and a line for each place.

    Raises:
        UnusableError: a table has no place, or a place no table.
    """
    places = [found[1] for found in _BLOCK.findall(text)]
    odd = sorted(set(places) ^ set(made))
    if odd:
        raise UnusableError(f"the page and the tables do not agree about {odd[0]!r}: one of them lacks it")
    lines = [f"{name}: {'written' if made[name] else 'no results, left as it was'}" for name in places]

    def put(found: re.Match[str]) -> str:
        table = made[found[2]]
        return found[1] + (f"\n{table.strip()}\n\n" if table else found[3]) + found[4]

    return _BLOCK.sub(put, text), lines


def write_page(directory: Path, into: Path | None) -> list[str]:
    """Write the directory's results into the page, or a copy of it into ``into``; returns what was done.

    Raises:
        UnusableError: nothing to write, or a short run's results for the page itself.
    """
    made = tables(directory)
    if into is None and (directory / performance.FORM).read_text().strip() == "short":
        raise UnusableError(f"{directory} has a short run's results, which say nothing: name a copy with --into FILE")
    text, lines = with_tables(PAGE.read_text(), made)
    target = into or PAGE
    images = _results(directory).images()
    (target.parent / "images").mkdir(exist_ok=True)
    for name, image in images.items():
        (target.parent / "images" / name).write_bytes(image)
    target.write_text(text)
    return [*lines, f"written: {target}, and {len(images)} plots beside it"]
