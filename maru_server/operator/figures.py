"""What the server's counters say, worked out: shares, and rates between two looks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

Stats = Mapping[str, Any]

#: Counters whose change per second ``maru top`` shows: key, what people read.
RATES: Final = (
    ("matches", "matches"),
    ("pages_asked", "pages asked"),
    ("pages_found", "pages found"),
    ("reserved", "pages reserved"),
    ("committed", "pages stored"),
    ("evicted_pages", "pages evicted"),
    ("no_room", "refused: no room"),
    ("over_quota", "refused: quota"),
    ("lost", "commits lost"),
    ("deleted", "objects deleted"),
)


def derived(stats: Stats) -> dict[str, float | None]:
    """Shares of the counters since the server's start; None where nothing was asked or stored."""
    asked = stats["pages_asked"]
    wanted = stats["reserved"] + stats["no_room"]
    capacity = stats["extents"] * stats["extent_bytes"]
    return {
        "hit_share": stats["pages_found"] / asked if asked else None,
        "no_room_share": stats["no_room"] / wanted if wanted else None,
        "used_share": stats["used_share"],
        "capacity_bytes": capacity,
        "ready_share": stats["extents_ready"] / stats["extents"] if stats["extents"] else None,
    }


def rates(before: Stats, after: Stats, seconds: float) -> dict[str, float]:
    """Change per second of each counter that both have; nothing where the server began anew between the two."""
    if seconds <= 0 or before.get("incarnation") != after.get("incarnation"):
        return {}
    return {key: max(0.0, after[key] - before[key]) / seconds for key, _ in RATES if key in after and key in before}
