"""Options and figures of ``maru-bench kernels``: plain data, the verdict, the tables and the JSON file."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Final

import msgspec
from rich import box
from rich.table import Table

#: Part of the link's rate to reach, both ways.
TARGET: Final = 0.95
OPERATIONS: Final = ("store", "load")
#: What Maru is to be ahead of, in the order of the table.
RIVALS: Final = ("batched", "memcpy", "sglang")
PAGE_TOKENS: Final = (1, 16, 32, 64, 128)


class KernelsOptions(msgspec.Struct, frozen=True, kw_only=True):
    models: list[str]
    page_tokens: list[int]
    sample_bytes: int
    repeats: int
    device: int
    """Ordinal of the GPU."""
    seed: int
    check: bool = False
    """Only move small cases on the CPU and compare every byte."""


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """One way to move one case, there and back, compared byte by byte."""

    model: str
    page_tokens: int
    peer: str
    nbytes: int
    problem: str


class KernelRow(msgspec.Struct, frozen=True, kw_only=True):
    """One operation on one case. Rates are of medians, in GB/s (10^9 bytes); what is absent could not take part."""

    model: str
    page_tokens: int
    operation: str
    object_bytes: int
    fragment_bytes: int
    gbps: dict[str, float]
    to_link: float
    """Maru's rate over the link's."""
    to_rivals: dict[str, float]
    """Maru's rate over that of each rival."""
    slowdown: dict[str, float]
    """Of a matrix product beside which each peer moves pages all the time: its time over its time alone."""
    busy_gbps: dict[str, float]
    """What each peer moved meanwhile."""

    @property
    def met(self) -> bool:
        return self.to_link >= TARGET and all(ratio >= 1 for ratio in self.to_rivals.values())


def make_row(
    model: str,
    page_tokens: int,
    operation: str,
    object_bytes: int,
    fragment_bytes: int,
    seconds: dict[str, list[float]],
    moved: dict[str, int],
    slowdown: dict[str, float],
    busy_gbps: dict[str, float],
) -> KernelRow:
    """The row of one operation.

    Args:
        seconds: samples of each peer.
        moved: bytes that a sample of each peer moved.
    """
    gbps = {peer: moved[peer] / statistics.median(samples) / 1e9 for peer, samples in seconds.items() if samples}
    return KernelRow(
        model=model,
        page_tokens=page_tokens,
        operation=operation,
        object_bytes=object_bytes,
        fragment_bytes=fragment_bytes,
        gbps=gbps,
        to_link=gbps["maru"] / gbps["link"],
        to_rivals={rival: gbps["maru"] / gbps[rival] for rival in RIVALS if rival in gbps},
        slowdown=slowdown,
        busy_gbps=busy_gbps,
    )


class KernelsResult(msgspec.Struct, frozen=True, kw_only=True):
    machine: dict[str, str | int]
    seed: int
    repeats: int
    sample_bytes: int
    chosen: str
    """How Maru's mover copies on this GPU, by its own measurement."""
    pinning: str
    """What was page-locked, and where it lies."""
    checked: list[Checked]
    absent: dict[str, str]
    """Peers that could not take part, and why."""
    rows: list[KernelRow]

    @property
    def ok(self) -> bool:
        """Whether every byte was where it belongs."""
        return bool(self.checked) and not any(checked.problem for checked in self.checked)

    @property
    def targets_met(self) -> bool:
        return all(row.met for row in self.rows)

    def tables(self) -> list[Table]:
        return [self._rates(), self._slowdowns()] if self.rows else [self._checks()]

    def write_json(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    def _rates(self) -> Table:
        table = _table(
            f"GB/s between {self.machine.get('gpu', 'the GPU')} and pinned pool memory (medians of {self.repeats})"
        )
        names = ("link", "maru", "kernel", *RIVALS)
        for name in ("model", "page", "fragment", ""):
            table.add_column(name, no_wrap=True)
        for name in names:
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("maru /\nlink", justify="right", no_wrap=True)
        table.add_column("maru /\nbest other", justify="right", no_wrap=True)
        table.add_column(f"target\n{TARGET}, 1", no_wrap=True)
        for row in self.rows:
            table.add_row(
                row.model,
                str(row.page_tokens),
                human(row.fragment_bytes),
                row.operation,
                *(f"{row.gbps[name]:.1f}" if name in row.gbps else "-" for name in names),
                f"{row.to_link:.2f}",
                f"{min(row.to_rivals.values()):.2f}" if row.to_rivals else "-",
                "[green]met[/green]" if row.met else "[red]not met[/red]",
            )
        return table

    def _slowdowns(self) -> Table:
        names = sorted({name for row in self.rows for name in row.slowdown})
        table = _table("A matrix product's time while pages move, over its time alone (and GB/s moved meanwhile)")
        for name in ("model", "page", ""):
            table.add_column(name, no_wrap=True)
        for name in names:
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(
                row.model,
                str(row.page_tokens),
                row.operation,
                *(
                    f"{row.slowdown[name]:.2f} ({row.busy_gbps[name]:.1f})" if name in row.slowdown else "-"
                    for name in names
                ),
            )
        return table

    def _checks(self) -> Table:
        table = _table("Moved to the pool and back, every byte compared")
        for name in ("model", "page", "by"):
            table.add_column(name, no_wrap=True)
        table.add_column("bytes", justify="right", no_wrap=True)
        table.add_column("")
        for checked in self.checked:
            table.add_row(
                checked.model,
                str(checked.page_tokens),
                checked.peer,
                human(checked.nbytes),
                f"[red]{checked.problem}[/red]" if checked.problem else "[green]equal[/green]",
            )
        return table


def human(nbytes: int) -> str:
    """``2 KiB``, ``1.5 MiB``."""
    for shift, unit in ((20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.4g} {unit}"
    return f"{nbytes} B"


def _table(title: str) -> Table:
    return Table(title=title, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
