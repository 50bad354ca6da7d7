"""The report of an experiment as one HTML file that needs nothing beside it."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable, Mapping
from typing import Final

from maru_bench.experiment.report import COLUMNS
from maru_bench.experiment.summary import Record

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2em auto; padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25em .6em; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th { font-weight: 600; vertical-align: bottom; white-space: pre-line; } td.text, th.text { text-align: left; white-space: normal; }
tr.first td { border-top: 2px solid #888; }
.scroll { overflow-x: auto; } .bad { color: #b00020; } .dim { color: #777; }
.plots { display: flex; flex-wrap: wrap; gap: 1em; } .plots img { max-width: 100%; border: 1px solid #eee; }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd; } th, td { border-color: #333; } .plots img { background: #fff; } }
"""


def _table(rows: Mapping[str, object]) -> str:
    cells = "".join(
        f'<tr><td class="text">{html.escape(str(name))}</td><td class="text">{html.escape(_plain(value))}</td></tr>'
        for name, value in rows.items()
    )
    return f"<table>{cells}</table>"


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def page(record: Record, images: Iterable[tuple[str, bytes]]) -> str:
    """The page.

    Args:
        images: names and PNGs of the plots.
    """
    escape = html.escape
    heads = "".join(
        f'<th title="{escape(says)}"{" class=text" if heading == "mode" else ""}>{escape(heading)}</th>'
        for heading, says, _ in COLUMNS
    )
    body, before = [], None
    for row in record.rows:
        cells = "".join(
            f"<td{' class=text' if heading == 'mode' else ''}>{escape(text(row))}</td>" for heading, _, text in COLUMNS
        )
        body.append(f"<tr{' class=first' if row.cell != before else ''}>{cells}</tr>")
        before = row.cell
    legend = "".join(
        f"<li><b>{escape(heading.replace(chr(10), ' '))}</b>: {escape(says)}</li>"
        for heading, says, _ in COLUMNS
        if says
    )
    pictures = "".join(
        f'<img alt="{escape(name)}" src="data:image/png;base64,{base64.b64encode(image).decode()}">'
        for name, image in images
    )
    failures = "".join(f"<li>{escape(failure)}</li>" for failure in record.failures)
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>{escape(record.workload)} on {escape(record.engine)}</title><style>{_STYLE}</style>",
        f"<h1>{escape(record.workload)} on {escape(record.engine)}</h1>",
        f"<p class=dim>{escape(record.started_at)}, seed {record.seed}. Each figure is the median over the repeats; "
        "compare modes of one run of this command, and not with figures of another machine.</p>",
        f"<div class=bad><h2>What went wrong</h2><ul>{failures}</ul></div>" if failures else "",
        f"<div class=scroll><table><tr>{heads}</tr>{''.join(body)}</table></div>",
        f"<details><summary>What the columns say</summary><ul>{legend}</ul></details>",
        f"<div class=plots>{pictures}</div>" if pictures else "<p class=dim>No plots: matplotlib is not installed.</p>",
        f"<h2>Modes</h2>{_table(record.modes)}",
        f"<h2>Left out</h2>{_table(record.skipped)}" if record.skipped else "",
        f"<h2>Energy that could not be read</h2>{_table(record.energy_missing)}" if record.energy_missing else "",
        f"<h2>Settings</h2>{_table(record.settings)}",
        f"<h2>Machine</h2>{_table({**record.machine, **record.versions})}",
        "</html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"
