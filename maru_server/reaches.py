"""How clients reach the pools, as they say themselves: checked here, kept with the session, shown to people.

With one pool nothing hangs on it. With several it decides of which of them a client is told (:mod:`maru_server.pools`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from maru_core.protocol import WAYS, WHY_MAX, ErrorCode, Reaches, Way
from maru_server.books import Books
from maru_server.requests import RefusedError
from maru_server.sessions import Session

#: Through agents, and not at all.
_, RDMA, NONE = WAYS


def check_ways(message: Reaches, pools: int) -> tuple[Way, ...]:
    """What the client says, of each of ``pools`` pools.

    Raises:
        RefusedError: it cannot be.
    """
    wrong = None
    if len(message.ways) != pools:
        wrong = f"ways to {len(message.ways)} pools, and the server has {pools}: say one for each, in the order of the welcome"
    for one in message.ways[:pools]:
        if one.way not in WAYS:
            wrong = f"a pool is reached by {one.way[:64]!r}: say one of {', '.join(WAYS)}"
        elif len(one.why) > WHY_MAX or not one.why.isprintable():
            wrong = f"the reason {one.why[:64]!r} is not printable, or longer than {WHY_MAX} characters: shorten it"
    if wrong is not None:
        raise RefusedError(ErrorCode.INVALID, wrong)
    return tuple(message.ways)


def reached(ways: Sequence[Way]) -> list[int]:
    """The pools that are reached, best first: mapped ones before those behind agents, otherwise in their order."""
    return sorted(
        (pool for pool, one in enumerate(ways) if one.way != NONE), key=lambda pool: (WAYS.index(ways[pool].way), pool)
    )


def way_rows(ways: Sequence[Way]) -> list[dict[str, Any]]:
    """For people: one row a pool."""
    return [{"pool": pool, "way": one.way, "why": one.why} for pool, one in enumerate(ways)]


def count_ways(sessions: Iterable[Session], pool: int = 0) -> dict[str, int]:
    """How many clients reach a pool in each way; those that have not said it are in none."""
    counts = Counter(session.ways[pool].way for session in sessions if len(session.ways) > pool)
    return {way: counts[way] for way in WAYS}


def pool_row(books: Books, agents: int, *, operator: bool) -> dict[str, Any]:
    """One pool for people: what everybody may see of it, and for operators how full it is and who reaches it."""
    geometry, slabs = books.geometry, books.slabs
    row: dict[str, Any] = {
        "pool": 0,
        "uri": books.pool_uri,
        "uuid": geometry.pool_uuid.hex(),
        "extents": geometry.extent_count,
        "extent_bytes": geometry.extent_bytes,
    }
    if operator:
        row |= {
            "extents_ready": slabs.ready,
            "bytes_used": slabs.used_bytes(),
            "used_share": slabs.used_extents() / geometry.extent_count,
            "pages": sum(map(len, books.trees.values())) - books.reservations.spares().total(),
            "agents": agents,
            "clients": count_ways(books.sessions),
        }
    return row
