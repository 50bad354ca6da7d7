"""What ``maru-bench peers`` found: one row for each peer and kind of call, the table, the JSON file, the targets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from rich import box
from rich.table import Table

#: Limits and no peers: nobody is asked to be ahead of them.
LIMITS: Final = ("memcpy", "echo")
#: The lookup that is to be no slower than Mooncake's.
TARGET_CHAIN: Final = 128


class PeerRow(msgspec.Struct, frozen=True, kw_only=True):
    operation: str
    peer: str
    page_bytes: int
    pages: int
    clients: int
    calls: int
    p50_us: float
    p99_us: float
    gbps: float | None
    """Of the median call, 10^9 bytes; None for lookups."""
    calls_per_s: float | None
    """Of all clients together, where they ask all the time; None where each call is a turn of its own."""
    to_maru: float
    """The median in that of Maru's: above 1 the peer is slower."""

    @property
    def in_a_loop(self) -> bool:
        """Of clients that ask again and again, all at once, and not of one in its turn."""
        return self.calls_per_s is not None


def make_row(
    operation: str,
    peer: str,
    page_bytes: int,
    pages: int,
    clients: int,
    samples: Sequence[float],
    maru: Sequence[float],
    seconds: float | None,
) -> PeerRow:
    """
    Args:
        samples: seconds of each call.
        maru: those of Maru's, for the same.
        seconds: how long several clients were at it.
    """
    median = float(np.median(samples))
    return PeerRow(
        operation=operation,
        peer=peer,
        page_bytes=page_bytes,
        pages=pages,
        clients=clients,
        calls=len(samples),
        p50_us=median * 1e6,
        p99_us=float(np.percentile(samples, 99)) * 1e6,
        gbps=None if operation == "exists" else page_bytes * pages / median / 1e9,
        calls_per_s=None if seconds is None else len(samples) / seconds,
        to_maru=median / float(np.median(maru)) if len(maru) else float("nan"),
    )


class PeersResult(msgspec.Struct, frozen=True, kw_only=True):
    machine: dict[str, str | int]
    versions: dict[str, dict[str, str]]
    """By interpreter."""
    commit: str | None
    repeats: int
    skipped: dict[str, str]
    rows: list[PeerRow]

    def behind(self) -> list[str]:
        """Where Maru is not ahead of a peer as it is meant to be: lookups of 128 pages no slower than Mooncake's; store and
        load ahead of every peer at every size, one client."""
        found = []
        for row in self.rows:
            if row.peer in ("maru", *LIMITS) or row.to_maru >= 1.0 or row.in_a_loop:
                continue
            lookup = row.peer == "mooncake" and row.pages == TARGET_CHAIN
            if lookup or row.operation != "exists":
                found.append(
                    f"{row.operation} of {row.pages} pages of {row.page_bytes >> 10} KiB: {row.peer} takes {row.p50_us:.0f} µs, "
                    f"{row.to_maru:.2f} of Maru's"
                )
        return found

    @property
    def targets_met(self) -> bool:
        return not self.behind()

    def _lines(self) -> tuple[list[str], list[tuple[list[str], list[PeerRow | None]]]]:
        """Peers, and for each kind of call what it is and their rows."""
        peers = list(dict.fromkeys(row.peer for row in self.rows))
        lines: dict[tuple[str, int, int, int, bool], dict[str, PeerRow]] = {}
        for row in self.rows:
            key = (row.operation, row.page_bytes, row.pages, row.clients, row.in_a_loop)
            lines.setdefault(key, {})[row.peer] = row
        found = []
        for (operation, page_bytes, pages, clients, in_a_loop), line in lines.items():
            size = f"{page_bytes >> 10} KiB" if page_bytes < 1 << 20 else f"{page_bytes >> 20} MiB"
            words = [operation, size, str(pages), f"{clients} at once" if in_a_loop else "by turns"]
            found.append((words, [line.get(peer) for peer in peers]))
        return peers, found

    def markdown(self) -> str:
        """The same as :meth:`table`, for a page: Maru's medians and 99th percentiles, and how many of its medians a peer's is."""
        peers, lines = self._lines()
        rows = [["call", "page", "pages", "", *(f"{peer} µs" for peer in peers)]]
        rows.append(["---"] * 4 + ["---:"] * len(peers))
        for words, cells in lines:
            shown = []
            for row in cells:
                if row is None:
                    shown.append("-")
                    continue
                text = f"{row.p50_us:.0f} ({row.p99_us:.0f})"
                ratio = f"{row.to_maru:.2f}" if row.to_maru >= 1 or row.peer in LIMITS else f"**{row.to_maru:.2f}**"
                shown.append(text if row.peer == "maru" else f"{text} {ratio}")
            rows.append([*words, *shown])
        return "".join("| " + " | ".join(row) + " |\n" for row in rows)

    def table(self) -> Table:
        """A line for each kind of call: medians, and in brackets Maru's share of them, above 1 where Maru is ahead."""
        peers, lines = self._lines()
        table = Table(
            title="medians in µs (p99), and how many of Maru's medians a peer's is",
            box=box.SIMPLE_HEAD,
            collapse_padding=True,
            pad_edge=False,
        )
        table.add_column("", no_wrap=True)
        for name in ("page", "pages", "clients", *peers):
            table.add_column(name, justify="right", no_wrap=True)
        for words, cells in lines:
            table.add_row(*words, *(_cell(row) for row in cells))
        return table

    def write_json(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def _cell(row: PeerRow | None) -> str:
    if row is None:
        return "-"
    times = f"{row.p50_us:.0f} ({row.p99_us:.0f})"
    if row.peer == "maru":
        return times
    colour = "green" if row.to_maru >= 1 or row.peer in LIMITS else "red"
    return f"{times} [{colour}]{row.to_maru:.2f}[/{colour}]"
