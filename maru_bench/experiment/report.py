"""The table of an experiment for a terminal, and its JSON file."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich import box
from rich.table import Table

from maru_bench.experiment.summary import Record, Row
from maru_core.errors import ConfigError


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None or seconds != seconds else f"{seconds * 1e3:.0f}"


def gigabytes(nbytes: float | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e9:.3g}"


def energy(row: Row) -> str:
    """Joules of all that could be read, for one run."""
    return f"{sum(row.joules.values()):.0f}" if row.joules else "-"


def tier_shares(row: Row) -> dict[str, str]:
    total = sum(row.tokens.values())
    return {tier: f"{count / total:.0%}" if total else "-" for tier, count in row.tokens.items()}


#: Heading, what it is, and the cell's text; the same columns in the terminal and on the page.
COLUMNS = (
    ("context", "tokens of the shared part", lambda row: str(row.cell.context)),
    ("at a\ntime", "requests at a time", lambda row: str(row.cell.concurrency)),
    ("mode", "", lambda row: row.mode),
    ("TTFT\np50 ms", "time to the first token", lambda row: milliseconds(row.ttft_p50_s)),
    ("p95\nms", "", lambda row: milliseconds(row.ttft_p95_s)),
    ("p99\nms", "", lambda row: milliseconds(row.ttft_p99_s)),
    ("other's\nms", "TTFT p50 of prompts that only another server had seen", lambda row: milliseconds(row.ttft_elsewhere_s)),
    ("to\nfirst", "the same, in that of the first mode", lambda row: "-" if row.elsewhere_to_first is None else f"{row.elsewhere_to_first:.2f}"),
    ("com-\nputed", "share of the prompts' tokens", lambda row: tier_shares(row)["computed"]),
    ("device", "", lambda row: tier_shares(row)["device"]),
    ("host", "", lambda row: tier_shares(row)["host"]),
    ("store", "", lambda row: tier_shares(row)["storage"]),
    ("hit / pos-\nsible", "share of tokens from any cache, and what one that forgets nothing would have had",
     lambda row: f"{row.hit_rate:.0%}/{row.hit_rate_possible:.0%}"),
    ("prompt\ntok/s", "throughput", lambda row: f"{row.prompt_tokens_per_s:.0f}"),
    ("GB in", "into the store, by its own account", lambda row: gigabytes(row.stored_bytes)),
    ("GB out", "", lambda row: gigabytes(row.loaded_bytes)),
    ("J", "energy of one run, where it can be read", energy),
    ("equal", "share of answers that are the first mode's", lambda row: f"{row.equal_outputs:.0%}"),
)  # fmt: skip


def _kept(record: Record) -> list[tuple[str, list[str]]]:
    """Headings with their texts, row by row; columns that say nothing anywhere are left out."""
    cells = [(heading, [text(row) for row in record.rows]) for heading, _, text in COLUMNS]
    return [(heading, texts) for heading, texts in cells if any(text not in ("-", "0%") for text in texts)]


def markdown(record: Record) -> str:
    """The table for a page."""
    kept = _kept(record)
    rows = [[heading.replace("-\n", "").replace("\n", " ") for heading, _ in kept], ["---:"] * len(kept)]
    rows += [[texts[index] for _, texts in kept] for index in range(len(record.rows))]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def table(record: Record) -> Table:
    """Rows of the summary; columns that say nothing anywhere are left out."""
    made = Table(
        title=f"{record.workload} on {record.engine}, {record.settings.get('device', '?')}: "
        f"{record.rows[0].requests if record.rows else 0} requests a run, medians of {record.rows[0].repeats if record.rows else 0}",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    kept = _kept(record)
    for heading, _ in kept:
        made.add_column(heading, justify="left" if heading == "mode" else "right", no_wrap=True)
    for index, row in enumerate(record.rows):
        made.add_row(*(texts[index] for _, texts in kept))
        if index + 1 < len(record.rows) and record.rows[index + 1].cell != row.cell:
            made.add_section()
    return made


def write_json(record: Record, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


def read_json(path: Path) -> Record:
    """Raises:
    ConfigError: it cannot be read, or is no experiment's.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): name an experiment's JSON file") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not an experiment's JSON file: {error}") from error
