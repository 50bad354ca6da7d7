"""Is there room: occupancy, evictions, refusals, quotas, quarantine."""

from __future__ import annotations

from typing import Any, Final

from maru_server.operator.findings import FAIL, OK, WARN, Finding
from maru_server.operator.output import number, share, size

Row = dict[str, Any]

#: Part of the reserves that may find no room before it is worth a word.
_REFUSED: Final = 0.01
#: Part of a quota in use from which it is told.
_NEAR_QUOTA: Final = 0.9
#: Part of all slots in use that are in quarantine, from which it is no longer a detail.
_QUARANTINE: Final = 0.05


def check_room(stats: Row) -> Finding:
    """Whether what engines store stays long enough to be read."""
    wanted = stats["reserved"] + stats["no_room"]
    text = (
        f"{share(stats['used_share'], 1)} full, {number(stats['pages'])} pages; since the server's start "
        f"{number(stats['reserved'])} slots given, {number(stats['no_room'])} refused for want of room, {number(stats['evicted_pages'])} pages evicted"
    )
    if stats["no_room"] > _REFUSED * wanted:
        guarded = stats.get("pinned_bytes", 0) + stats.get("held_bytes", 0)
        kept = f"; {size(guarded)} are pinned or held" if guarded else ""
        return Finding(
            "room",
            WARN,
            text + kept,
            "make the pool larger (--size of a new pool), unpin what is not needed, or see `quarantine` below",
        )
    if stats["evicted_pages"] > max(stats["pages"], 1):
        return Finding(
            "room",
            WARN,
            text + ": the pool was turned over more than once",
            "pages may go before anyone reads them: make the pool larger, or try another --policy (docs/operation.md)",
        )
    return Finding("room", OK, text)


def check_quota(tenants: list[Row], stats: Row) -> Finding:
    """Whether quotas refuse what engines store. To be near its quota is a tenant's usual state, as a full pool is a cache's."""
    limited = [row for row in tenants if row["quota_bytes"]]
    if not limited:
        return Finding("quota", OK, "there are no quotas")
    near = [row for row in limited if row["used_bytes"] >= _NEAR_QUOTA * row["quota_bytes"]]
    told = ", ".join(
        f"{row['tenant'] or 'clients without a tenant'} ({size(row['used_bytes'])} of {size(row['quota_bytes'])})"
        for row in near
    )
    refused = stats["over_quota"]
    if refused > _REFUSED * (stats["reserved"] + stats["no_room"] + refused):
        return Finding(
            "quota",
            WARN,
            f"{number(refused)} slots were refused over a quota" + (f"; near theirs are {told}" if near else ""),
            "raise --quota of that tenant, or see what it pins, holds or writes at a time: its own pages could not make room",
        )
    return Finding(
        "quota", OK, f"{len(limited)} tenants have a quota" + (f", and near theirs are {told}" if near else "")
    )


def check_quarantine(stats: Row) -> Finding:
    """Slots of writers that fell silent."""
    slots = stats["slots_quarantined"]
    if not slots:
        return Finding("quarantine", OK, "no slot is in quarantine")
    used = stats["objects"] + stats["slots_reserved"] + slots
    level = FAIL if slots > _QUARANTINE * used and stats["no_room"] else WARN
    return Finding(
        "quarantine",
        level,
        f"{number(slots)} slots ({share(slots, used)} of those in use) belong to writers that fell silent, and are given to nobody",
        "they return when their process is known to be dead, or after --quarantine seconds; `maru sessions` names the silent ones",
    )
