"""The plots of an experiment: TTFT against context length and concurrency, tiers, hit rate by turn, the timeline.

Needs matplotlib (``pip install 'maru-sglang[bench]'``); nothing else here does.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any, Final

from maru_bench.experiment.summary import Cell, Record, Row

_COLOURS: Final = {
    "none": "#8c8c8c", "hicache": "#ccb974", "file": "#c44e52", "maru": "#4c72b0", "maru-direct": "#55a868",
    "mooncake": "#8172b3", "nixl": "#dd8452",
}  # fmt: skip
_TIERS: Final = {
    "computed": ("computed", "#c44e52"),
    "device": ("device cache", "#8c8c8c"),
    "host": ("host cache", "#ccb974"),
    "storage": ("store", "#4c72b0"),
    "cached": ("a cache", "#937860"),
}
_FORM: Final = {"figsize": (7.2, 4.0), "layout": "constrained"}


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _colour(mode: str) -> str | None:
    return _COLOURS.get(mode)


def _finish(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _against(
    record: Record,
    of: Callable[[Cell], int],
    fixed: Callable[[Cell], int],
    x: str,
) -> Any:
    """Lines, one a mode, at the largest value of what is fixed: the median TTFT of all requests, shaded up to p95, and beside it
    that of those prompts which only another server had seen."""
    at = max(fixed(row.cell) for row in record.rows)
    rows = sorted((row for row in record.rows if fixed(row.cell) == at), key=lambda row: of(row.cell))
    shared = any(row.ttft_elsewhere_s is not None for row in rows)
    figure, found = _pyplot().subplots(
        1, 2 if shared else 1, squeeze=False, **{**_FORM, "figsize": (11 if shared else 7.2, 4.0)}
    )
    axes = found[0]
    for mode in record.modes:
        own = [row for row in rows if row.mode == mode]
        xs = [of(row.cell) for row in own]
        medians = [row.ttft_p50_s * 1e3 for row in own]
        axes[0].plot(xs, medians, marker="o", label=mode, color=_colour(mode))
        axes[0].fill_between(xs, medians, [row.ttft_p95_s * 1e3 for row in own], alpha=0.12, color=_colour(mode))
        told = [(of(row.cell), row.ttft_elsewhere_s * 1e3) for row in own if row.ttft_elsewhere_s is not None]
        if shared and told:
            axes[1].plot(*zip(*told, strict=True), marker="o", label=mode, color=_colour(mode))
    _finish(axes[0], "time to first token, all requests (p50, shaded to p95)", x, "ms")
    axes[0].legend()
    if shared:
        _finish(axes[1], "prompts that only another server had seen (p50)", x, "ms")
        axes[1].legend()
    return figure


def ttft_by_context(record: Record) -> Any:
    """Median over the requests of each context length; with one context, every request by the length of its prompt."""
    if len({row.cell.context for row in record.rows}) > 1:
        return _against(record, lambda cell: cell.context, lambda cell: cell.concurrency, "shared tokens")
    figure, axes = _pyplot().subplots(**_FORM)
    for mode in record.modes:
        samples = [s for run in record.runs if run.mode == mode for s in run.samples if s.error is None]
        axes.plot(
            [s.prompt_tokens for s in samples], [s.ttft_s * 1e3 for s in samples], ".", label=mode, alpha=0.6,
            color=_colour(mode),
        )  # fmt: skip
    axes.legend()
    _finish(axes, "time to first token by prompt length", "prompt tokens", "ms")
    return figure


def ttft_by_concurrency(record: Record) -> Any:
    return _against(record, lambda cell: cell.concurrency, lambda cell: cell.context, "requests at a time")


def tiers(record: Record) -> Any:
    """Where the prompts' tokens came from, in the largest cell."""
    figure, axes = _pyplot().subplots(**_FORM)
    largest = max(row.cell for row in record.rows)
    rows = [row for row in record.rows if row.cell == largest]
    names, bottom = [row.mode for row in rows], [0.0] * len(rows)
    for tier, (label, colour) in _TIERS.items():
        shares = [_share(row, tier) for row in rows]
        if any(shares):
            axes.bar(names, shares, bottom=bottom, label=label, color=colour)
        bottom = [low + high for low, high in zip(bottom, shares, strict=True)]
    axes.plot(
        names,
        [100 * (1 - row.hit_rate_possible) for row in rows],
        "k_",
        markersize=28,
        label="least that must be computed",
    )
    figure.legend(loc="outside lower center", ncols=3)
    _finish(axes, f"where tokens came from ({largest.context} tokens, {largest.concurrency} at a time)", "", "percent")
    return figure


def _share(row: Row, tier: str) -> float:
    total = sum(row.tokens.values())
    return 100 * row.tokens.get(tier, 0.0) / total if total else 0.0


def hit_rate_by_turn(record: Record) -> Any:
    figure, axes = _pyplot().subplots(**_FORM)
    largest = max(row.cell for row in record.rows)
    for row in record.rows:
        if row.cell == largest:
            turns = range(1, len(row.hit_rate_by_turn) + 1)
            axes.plot(
                turns,
                [100 * rate for rate in row.hit_rate_by_turn],
                marker="o",
                label=row.mode,
                color=_colour(row.mode),
            )
    axes.legend()
    _finish(axes, "tokens from a cache, by turn", "turn", "percent")
    axes.set_ylim(top=105)
    return figure


def timeline(record: Record) -> Any:
    """When each request of the last repeat began, and how long its first token took."""
    figure, axes = _pyplot().subplots(**_FORM)
    largest = max(run.cell for run in record.runs)
    last = max(run.repeat for run in record.runs)
    for run in record.runs:
        if run.cell == largest and run.repeat == last:
            samples = [s for s in run.samples if s.error is None]
            axes.plot(
                [s.started_s for s in samples], [s.ttft_s * 1e3 for s in samples], ".-", linewidth=0.6, label=run.mode,
                color=_colour(run.mode),
            )  # fmt: skip
    axes.legend()
    _finish(axes, "time to first token along one run", "seconds after its beginning", "ms")
    return figure


def plots(record: Record) -> Iterator[tuple[str, bytes]]:
    """Name and PNG of each plot that the record has something for.

    Raises:
        ImportError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    wanted: list[tuple[str, Callable[[Record], Any]]] = [("ttft_by_context", ttft_by_context)]
    if len({row.cell.concurrency for row in record.rows}) > 1:
        wanted.append(("ttft_by_concurrency", ttft_by_concurrency))
    wanted += [("tiers", tiers)]
    if any(len(row.hit_rate_by_turn) > 1 for row in record.rows):
        wanted.append(("hit_rate_by_turn", hit_rate_by_turn))
    wanted.append(("timeline", timeline))
    for name, draw in wanted:
        figure = draw(record)
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=110)
        pyplot.close(figure)
        yield name, image.getvalue()
