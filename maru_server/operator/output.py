"""How figures are written for people; JSON for everything else."""

from __future__ import annotations

import sys
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
#: Digits of a hash that are shown where a line has no room for all.
SHORT_HASH: Final = 12


def console() -> Console:
    """Plain text where it does not go to a terminal, and then as wide as it needs to be. Text is what it says: no markup."""
    tty = sys.stdout.isatty()
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=not tty, width=None if tty else 200)


def clean(value: Any) -> Any:
    """The same with no control characters: names come from clients, and a terminal does what they say."""
    if isinstance(value, str):
        return (
            value
            if value.isprintable()
            else "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in value)
        )
    if isinstance(value, dict):
        return {clean(key): clean(item) for key, item in value.items()}
    return [clean(item) for item in value] if isinstance(value, list) else value


def print_json(value: Any) -> None:
    """One document, indented, and nothing else on stdout."""
    data = msgspec.json.encode(value, enc_hook=str)
    sys.stdout.write(msgspec.json.format(data, indent=2).decode() + "\n")


def size(count: float) -> str:
    """``12.3 GiB``."""
    at = 0
    while abs(count) >= 1024 and at < len(_UNITS) - 1:
        count /= 1024
        at += 1
    return f"{count:.0f} {_UNITS[at]}" if at == 0 or count >= 100 else f"{count:.1f} {_UNITS[at]}"


def number(count: float) -> str:
    """``1,234,567``."""
    return f"{count:,.0f}" if count == int(count) or abs(count) >= 100 else f"{count:,.1f}"


def share(part: float, whole: float) -> str:
    """``12.3 %``, or a dash where there is no whole."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def age(seconds: float | None) -> str:
    """``5 s``, ``3 min``, ``2 h``, ``4 d``, or ``never``."""
    if seconds is None:
        return "never"
    for unit, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def bar(part: float, width: int = 30) -> str:
    """A bar of ``width`` characters, filled to ``part`` (0 to 1)."""
    filled = round(min(max(part, 0.0), 1.0) * width)
    return "█" * filled + "░" * (width - filled)


def short(digest: str | None) -> str:
    return "-" if digest is None else digest[:SHORT_HASH]


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table; the columns in ``right`` hold figures."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return made
