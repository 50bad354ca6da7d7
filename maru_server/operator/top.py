"""``maru top``: rates per second, live in the terminal; one look where stdout is none."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from maru_core.errors import ServerUnavailableError
from maru_core.session import Session
from maru_server.operator import figures
from maru_server.operator.asking import operator_stats
from maru_server.operator.output import age, bar, clean, console, number, print_json, share, size, table

Row = dict[str, Any]

_QUIT = b"qQ\x03\x04"


@dataclass(slots=True)
class _Look:
    at: float
    stats: Row
    namespaces: list[Row]


def top(session: Session, interval_s: float, limit: int, as_json: bool) -> None:
    """Until q or Ctrl-C."""
    before = _look(session, limit)
    if as_json or not sys.stdout.isatty():
        time.sleep(interval_s)
        after = _look(session, limit)
        if as_json:
            print_json(
                {
                    "server": session.endpoint,
                    "seconds": after.at - before.at,
                    "rates": figures.rates(before.stats, after.stats, after.at - before.at),
                    "stats": after.stats,
                    "namespaces": _with_rates(before, after),
                }
            )
        else:
            console().print(_screen(session, before, after, None))
        return
    # Ctrl-C is how a person leaves: at whatever moment it comes, it is no error.
    with contextlib.suppress(KeyboardInterrupt):
        _live(session, interval_s, limit, before)


def _live(session: Session, interval_s: float, limit: int, before: _Look) -> None:
    away: str | None = None
    after = before
    with (
        _keys() as pressed,
        Live(_screen(session, before, before, None), console=console(), screen=True, auto_refresh=False) as live,
    ):
        while not pressed(interval_s):
            try:
                before, after = after, _look(session, limit)
                away = None
            except ServerUnavailableError as error:
                away = str(error)
            live.update(_screen(session, before, after, away), refresh=True)


def _look(session: Session, limit: int) -> _Look:
    at = time.monotonic()
    return _Look(at, operator_stats(session), session.inspect("namespaces", limit=limit))


def _screen(session: Session, before: _Look, after: _Look, away: str | None) -> RenderableType:
    stats, seconds = after.stats, after.at - before.at
    rates = figures.rates(before.stats, stats, seconds)
    head = Text(
        f"{session.endpoint}  incarnation {stats['incarnation']}  {bar(stats['used_share'])} {share(stats['used_share'], 1)} full  "
        f"{size(stats['bytes_used'])}  {number(stats['pages'])} pages  {stats['sessions']} sessions",
        no_wrap=True,
        overflow="ellipsis",
    )
    lines = table("per second", "", "since the start", right=("", "since the start"))
    for key, name in figures.RATES:
        if key in stats:
            lines.add_row(name, number(rates[key]) if key in rates else "-", number(stats[key]))
    lines.add_row(
        "hits",
        share(rates.get("pages_found", 0), rates.get("pages_asked", 0)),
        share(stats["pages_found"], stats["pages_asked"]),
    )
    spaces = table(
        "N",
        "model",
        "tag",
        "pages",
        "bytes",
        "asked/s",
        "found/s",
        "stored/s",
        "used",
        right=("N", "pages", "bytes", "asked/s", "found/s", "stored/s", "used"),
    )
    for row in clean(_with_rates(before, after)):
        rate = row["rates"]
        spaces.add_row(
            str(row["namespace"]),
            str(row["record"].get("model", "?")),
            str(row["record"].get("tag", "")) or "-",
            number(row["pages"]),
            size(row["bytes"]),
            *(number(rate.get(key, 0)) for key in ("pages_asked", "pages_found", "committed")),
            age(row["idle_s"]),
        )
    parts: list[RenderableType] = [head, Text(""), lines, Text(""), spaces]
    if away is not None:
        parts.insert(1, Text(away, style="bold red"))
    if sys.stdout.isatty():
        parts += [Text(""), Text("q: quit", style="dim")]
    return Group(*parts)


def _with_rates(before: _Look, after: _Look) -> list[Row]:
    """The namespaces of the later look, each with the change per second of its counters."""
    seconds = after.at - before.at
    same = before.stats["incarnation"] == after.stats["incarnation"] and seconds > 0
    former = {row["namespace"]: row["counts"] for row in before.namespaces} if same else {}
    return [
        {
            **row,
            "rates": {
                key: max(0, value - former[row["namespace"]].get(key, 0)) / seconds
                for key, value in row["counts"].items()
            }
            if row["namespace"] in former
            else {},
        }
        for row in after.namespaces
    ]


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """A function that waits for so many seconds and says whether the person wants to leave. Keys are read as they are
    pressed where stdin is a terminal; Ctrl-C works everywhere."""
    if not sys.stdin.isatty():

        def wait(seconds: float) -> bool:
            time.sleep(seconds)
            return False

        yield wait
        return
    descriptor = sys.stdin.fileno()
    saved = termios.tcgetattr(descriptor)

    def pressed(seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([descriptor], [], [], left)[0]:
                return False
            keys = os.read(descriptor, 64)
            if not keys or any(key in _QUIT for key in keys):
                return True
        return False

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, saved)
