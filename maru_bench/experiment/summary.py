"""What an experiment saw, as it is written down, and what it comes to: medians over repeats, mode by mode."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec
import numpy as np

from maru_bench.experiment.driver import Sample
from maru_bench.stores import Moved

#: Where a prompt's tokens came from. ``cached`` is a cache of which the engine does not say which.
TIERS: Final = ("computed", "device", "host", "storage", "cached")


class Cell(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One workload's sizes."""

    context: int
    concurrency: int


class Run(msgspec.Struct, kw_only=True):
    """One mode's pass over one cell."""

    mode: str
    cell: Cell
    repeat: int
    seconds: float
    samples: list[Sample]
    moved: Moved | None = None
    """Bytes in and out of the store meanwhile, by the store's own account."""
    sources: dict[str, float] | None = None
    """Prompt tokens by tier, by the servers' own account, where answers do not tell."""
    joules: dict[str, float] = {}


class Record(msgspec.Struct, kw_only=True):
    """The whole experiment, as its JSON file has it."""

    workload: str
    engine: str
    machine: dict[str, object]
    versions: dict[str, str]
    settings: dict[str, object]
    seed: int
    started_at: str
    modes: dict[str, str]
    """What was run, in order; the first is what the others are compared with."""
    skipped: dict[str, str] = {}
    storage_is_host: list[str] = []
    """Modes whose engine reports what came from the store as its host tier."""
    energy_missing: dict[str, str] = {}
    runs: list[Run] = []
    rows: list[Row] = []
    failures: list[str] = []


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One mode in one cell. Each figure is the median over the repeats of what one run gave."""

    mode: str
    cell: Cell
    repeats: int
    requests: int
    """Of one run."""
    failed: int
    """Of all runs."""
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    ttft_new_s: float | None
    """Median where less than half of the prompt had been seen by any server."""
    ttft_elsewhere_s: float | None
    """Median where at least half of the prompt had been seen, but less than half of that by the server that was asked."""
    ttft_here_s: float | None
    """Median where at least half of the prompt had been seen, and at least half of that by the server that was asked."""
    prompt_tokens: float
    tokens: dict[str, float]
    """Prompt tokens by tier; the sum is ``prompt_tokens``."""
    hit_rate: float
    """Share of the prompts' tokens that came from any cache."""
    hit_rate_possible: float
    """What a cache that all servers share and that forgets nothing would have had."""
    hit_rate_by_turn: list[float]
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    requests_per_s: float
    stored_bytes: float | None
    loaded_bytes: float | None
    joules: dict[str, float]
    equal_outputs: float
    """Share of the answers that are, token by token, those of the first mode."""
    to_first: float
    """Median TTFT in that of the first mode."""
    elsewhere_to_first: float | None
    """``ttft_elsewhere_s`` in that of the first mode, for the same requests."""


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolated; not a number without values."""
    return float(np.percentile(values, percent)) if values else float("nan")


def _elsewhere(sample: Sample) -> bool:
    return _seen(sample) and sample.known_here < sample.known_anywhere / 2


def _seen(sample: Sample) -> bool:
    return sample.known_anywhere >= sample.prompt_tokens / 2


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _sure(values: Iterable[float]) -> float:
    found = _median(values)
    return float("nan") if found is None else found


def _ttft(run: Run, which: Callable[[Sample], bool]) -> float | None:
    return _median(sample.ttft_s for sample in run.samples if sample.error is None and which(sample))


def tokens_by_tier(run: Run, storage_is_host: bool) -> dict[str, float]:
    """Prompt tokens of a run by tier."""
    answered = [sample for sample in run.samples if sample.error is None]
    prompt = sum(sample.prompt_tokens for sample in answered)
    if run.sources is not None:
        told = {tier: run.sources.get(tier, 0.0) for tier in ("computed", "device", "storage")}
        total = sum(told.values())
        # The servers' counters may have warm-ups in them, never less than what was asked.
        scale = prompt / total if total else 0.0
        return {tier: told.get(tier, 0.0) * scale for tier in TIERS}
    found = dict.fromkeys(TIERS, 0.0)
    for sample in answered:
        found["computed"] += sample.computed_tokens
        found["device"] += sample.device_tokens
        found["storage" if storage_is_host else "host"] += sample.host_tokens
        found["storage"] += sample.storage_tokens
        found["cached"] += sample.cached_tokens - sample.device_tokens - sample.host_tokens - sample.storage_tokens
    return found


def _hit_rate_by_turn(runs: Sequence[Run]) -> list[float]:
    turns = 1 + max((sample.turn for run in runs for sample in run.samples), default=-1)
    rates = []
    for turn in range(turns):
        each = []
        for run in runs:
            of_turn = [sample for sample in run.samples if sample.turn == turn and sample.error is None]
            asked = sum(sample.prompt_tokens for sample in of_turn)
            each.append(sum(sample.cached_tokens for sample in of_turn) / asked if asked else 0.0)
        rates.append(statistics.median(each))
    return rates


def summarise(record: Record) -> list[Row]:
    """The rows of a record's runs: cell by cell, modes in the record's order."""
    rows = []
    for cell in sorted({run.cell for run in record.runs}):
        of_cell = {mode: [run for run in record.runs if run.cell == cell and run.mode == mode] for mode in record.modes}
        present = [mode for mode in record.modes if of_cell[mode]]
        if not present:
            continue
        first = of_cell[present[0]]
        rows += [_row(mode, of_cell[mode], first, mode in record.storage_is_host) for mode in present]
    return rows


def _row(mode: str, runs: Sequence[Run], first: Sequence[Run], storage_is_host: bool) -> Row:
    answered = [[sample for sample in run.samples if sample.error is None] for run in runs]
    times = [[sample.ttft_s for sample in samples] for samples in answered]
    tiers = [tokens_by_tier(run, storage_is_host) for run in runs]
    prompt = [float(sum(sample.prompt_tokens for sample in samples)) for samples in answered]
    ttft_p50_s = _sure(percentile(run, 50) for run in times if run)
    elsewhere = _median(_ttft(run, _elsewhere) for run in runs)
    elsewhere_first = _median(_ttft(run, _elsewhere) for run in first)
    first_p50 = _sure(percentile([s.ttft_s for s in run.samples if s.error is None], 50) for run in first)
    joules = {name: _sure(run.joules[name] for run in runs if name in run.joules) for name in runs[0].joules}
    return Row(
        mode=mode,
        cell=runs[0].cell,
        repeats=len(runs),
        requests=len(runs[0].samples),
        failed=sum(sample.error is not None for run in runs for sample in run.samples),
        ttft_p50_s=ttft_p50_s,
        ttft_p95_s=_sure(percentile(run, 95) for run in times if run),
        ttft_p99_s=_sure(percentile(run, 99) for run in times if run),
        ttft_new_s=_median(_ttft(run, lambda sample: not _seen(sample)) for run in runs),
        ttft_elsewhere_s=elsewhere,
        ttft_here_s=_median(_ttft(run, lambda sample: _seen(sample) and not _elsewhere(sample)) for run in runs),
        prompt_tokens=statistics.median(prompt),
        tokens={tier: statistics.median(run[tier] for run in tiers) for tier in TIERS},
        hit_rate=statistics.median(
            (total - run["computed"]) / total if total else 0.0 for run, total in zip(tiers, prompt, strict=True)
        ),
        hit_rate_possible=statistics.median(
            sum(sample.known_anywhere for sample in samples) / total if total else 0.0
            for samples, total in zip(answered, prompt, strict=True)
        ),
        hit_rate_by_turn=_hit_rate_by_turn(runs),
        prompt_tokens_per_s=statistics.median(total / run.seconds for run, total in zip(runs, prompt, strict=True)),
        output_tokens_per_s=statistics.median(
            sum(sample.new_tokens for sample in samples) / run.seconds
            for run, samples in zip(runs, answered, strict=True)
        ),
        requests_per_s=statistics.median(
            len(samples) / run.seconds for run, samples in zip(runs, answered, strict=True)
        ),
        stored_bytes=_median(run.moved.stored_bytes if run.moved else None for run in runs),
        loaded_bytes=_median(run.moved.loaded_bytes if run.moved else None for run in runs),
        joules=joules,
        equal_outputs=equal_outputs(runs, first),
        to_first=ttft_p50_s / first_p50 if first_p50 else float("nan"),
        elsewhere_to_first=elsewhere / elsewhere_first if elsewhere and elsewhere_first else None,
    )


def equal_outputs(runs: Sequence[Run], first: Sequence[Run]) -> float:
    """Share of the answers of ``runs`` that ``first`` gave too, request by request of the same repeat."""
    right = {(run.repeat, sample.number): sample.output for run in first for sample in run.samples}
    told = [
        sample.output == right.get((run.repeat, sample.number))
        for run in runs
        for sample in run.samples
        if sample.error is None
    ]
    return sum(told) / len(told) if told else 0.0


def judge(record: Record) -> list[str]:
    """What went wrong, for ``--check``: never a time.

    A request failed; a mode with a store of which no token came though another server had the prefix; or, one request
    at a time, an answer differs from the first mode's (unless engines computed new rows only, which may round otherwise than a whole
    prompt does).
    """
    failures = []
    to_the_bit = not record.settings.get("new_rows_only")
    for row in record.rows:
        where = f"{row.mode} at {row.cell.context} tokens, {row.cell.concurrency} at a time"
        if row.failed:
            errors = [s.error for run in record.runs if run.mode == row.mode for s in run.samples if s.error]
            failures.append(f"{where}: {row.failed} requests failed, the first with: {errors[0] if errors else '?'}")
        shared = [run for run in record.runs if run.mode == row.mode and run.cell == row.cell and run.moved]
        if shared and row.ttft_elsewhere_s is not None and not row.tokens["storage"]:
            failures.append(f"{where}: no token came from the store")
        if to_the_bit and row.cell.concurrency == 1 and row.equal_outputs < 1.0 and not row.failed:
            failures.append(f"{where}: {row.equal_outputs:.1%} of the answers are those of {next(iter(record.modes))}")
    return failures
