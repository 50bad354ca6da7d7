"""Several pools for people and metrics: the figures and rows of each, put together.

Figures are sums over the pools, but for what is the server's (sessions, namespaces); rows of single pages and holds stand side by
side; rows of one namespace or tenant are one. How full each pool is, and who reaches it how, are rows of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from maru_core.protocol import Error, Inspect, Reply, Report
from maru_server.calls import Deferred
from maru_server.inspection import check_inspect, session_rows
from maru_server.metrics import Figures, SizeFigures, SpaceFigures
from maru_server.pool_books import JointBooks
from maru_server.reaches import count_ways, pool_row
from maru_server.sessions import Session
from maru_server.views import LIMIT_MAX, Row, Snapshot, Sort, tree_view

#: Asks one state, in its own numbers: the pool, the question, the namespace's number there.
Ask = Callable[[int, Inspect, int | None], Reply | Deferred | None]
#: Figures that are no sums: those of the first pool stand for all.
_FIRST: Final = ("incarnation", "policy")


class Shown:
    """Looks at the states, and changes nothing."""

    def __init__(self, books: JointBooks) -> None:
        self._states = books.states
        self._sessions = books.sessions
        self._parts = books.parts
        self._numbers = books.numbers
        self._spaces = books.spaces
        self._incarnation = books.incarnation

    # ------------------------------------------------------------ figures

    def stats(self) -> dict[str, float | int | str]:
        """As :meth:`ServerState.stats`: sums, and what is the server's. ``extent_bytes`` is the mean."""
        each = [state.stats() for state in self._states]
        first = each[0]
        total: dict[str, Any] = {
            name: value if isinstance(value, str) or name in _FIRST else sum(cast(float, one[name]) for one in each)
            for name, value in first.items()
        }
        sizes = [state.books.geometry.data_bytes for state in self._states]
        total |= {
            "pool_uri": ", ".join(str(one["pool_uri"]) for one in each),
            "sessions": len(self._sessions),
            "sessions_silent": sum(session.silent for session in self._sessions),
            "namespaces": len(self._spaces),
            "memory_per_page": total["memory_bytes"] / total["pages"] if total["pages"] else 0.0,
            "extent_bytes": sum(sizes) // total["extents"],
            "used_share": sum(cast(float, one["used_share"]) * size for one, size in zip(each, sizes, strict=True))
            / sum(sizes),
            "stalled_s": max(cast(float, one["stalled_s"]) for one in each),
        }
        return total

    def figures(self) -> Figures:
        """As :meth:`ServerState.figures`, but for ``stats``."""
        each = [state.figures() for state in self._states]
        counts: Counter[str] = Counter()
        for one in each:
            counts.update(one.counts)
        return Figures(
            stats={},
            counts=counts,
            spaces=self._space_figures(each),
            sizes=_sizes(each),
            sessions=dict(Counter(session.peer.tenant for session in self._sessions)),
            quarantined_bytes=sum(one.quarantined_bytes for one in each),
            pools=self.pool_rows(operator=True),
        )

    def _space_figures(self, each: Sequence[Figures]) -> list[SpaceFigures]:
        found: dict[tuple[str, bytes], list[SpaceFigures]] = {}
        for one in each:
            for space in one.spaces:
                found.setdefault((space.tenant, space.record), []).append(space)
        merged = []
        for (tenant, record), spaces in found.items():
            counts: Counter[str] = Counter()
            for space in spaces:
                counts.update(space.counts)
            columns = [column for space in spaces for column in space.columns]
            pages = sum(space.pages for space in spaces)
            merged.append(SpaceFigures(self._numbers[tenant, record], tenant, record, pages, dict(counts), columns))
        return merged

    def pool_rows(self, *, operator: bool) -> list[Row]:
        """One row a pool."""
        rows = []
        for pool, state in enumerate(self._states):
            row = pool_row(state.books, state.agents(), operator=operator) | {"pool": pool}
            if operator:
                row["clients"] = count_ways(self._sessions, pool)
            rows.append(row)
        return rows

    def snapshot(self, spaces: Iterable[int] | None = None) -> Snapshot:
        """As :meth:`ServerState.snapshot`: of all pools, and of these namespaces or all, in the layer's numbers."""
        wanted = None if spaces is None else set(spaces)
        taken: Snapshot | None = None
        for pool, state in enumerate(self._states):
            known = {there[pool]: number for number, (_, there) in enumerate(self._spaces)}
            one = state.snapshot()
            one.trees = [tree for tree in one.trees if wanted is None or known[tree.number] in wanted]
            for tree in one.trees:
                tree.number = known[tree.number]
            if taken is None:
                taken = one
            else:
                taken.trees += one.trees
        assert taken is not None
        return taken

    # ------------------------------------------------------------ rows

    def answer(self, message: Inspect, session: Session, time: float, ask: Ask) -> Reply | Deferred:
        """As :meth:`maru_server.inspection.Inspector.answer`; a namespace that is named is the session's to see."""
        check_inspect(message)
        what, limit, rid = message.what, message.limit, message.rid
        rows: list[Row]
        if what == "tree":
            mine = [
                number
                for number, (tenant, _) in enumerate(self._spaces)
                if message.namespace in (None, number) and (session.peer.operator or tenant == session.peer.tenant)
            ]
            taken = self.snapshot(mine)
            return Deferred(
                rid, lambda: Report(rid, self._incarnation, tree_view(taken, limit, cast(Sort, message.sort)))
            )
        if what == "pools":
            return Report(rid, self._incarnation, self.pool_rows(operator=session.peer.operator)[:limit])
        if what == "sessions":
            rows = session_rows(self._sessions, session, time, self._parts)
            return Report(rid, self._incarnation, rows[:limit])
        asked = msgspec.structs.replace(message, limit=LIMIT_MAX)
        replies: list[tuple[int, Reply | Deferred]] = []
        for pool in range(len(self._states)):
            number = None if message.namespace is None else self._spaces[message.namespace][1][pool]
            if message.namespace is None or number is not None:
                reply = ask(pool, asked, number)
                assert reply is not None
                if isinstance(reply, Error):
                    return reply
                replies.append((pool, reply))
        numbers = [
            {there[pool]: number for number, (_, there) in enumerate(self._spaces)} for pool in range(len(self._states))
        ]
        clients = [
            {found[pool].number: number for number, found in self._parts.items()} for pool in range(len(self._states))
        ]

        def put_together() -> Reply:
            rows: list[Row] = []
            for pool, reply in replies:
                report = reply.work() if isinstance(reply, Deferred) else reply
                if isinstance(report, Error):
                    return report
                assert isinstance(report, Report)
                for row in report.rows:
                    if "namespace" in row:
                        row["namespace"] = numbers[pool].get(row["namespace"], -1)
                    if "session" in row:
                        row["session"] = clients[pool].get(row["session"], 0)
                    rows.append({**row, "pool": pool} if what in ("pins", "holds") else row)
            return Report(rid, self._incarnation, _MERGED[what](rows)[:limit])

        return (
            Deferred(rid, put_together) if any(isinstance(reply, Deferred) for _, reply in replies) else put_together()
        )


def _sizes(each: Sequence[Figures]) -> list[SizeFigures]:
    found: dict[int, list[SizeFigures]] = {}
    for one in each:
        for size in one.sizes:
            found.setdefault(size.slot_bytes, []).append(size)
    return [
        SizeFigures(
            slot_bytes,
            sum(one.extents for one in sizes),
            sum(one.used for one in sizes),
            sum(one.free for one in sizes),
        )
        for slot_bytes, sizes in sorted(found.items())
    ]


def _least(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else min(a, b)


def _namespaces(rows: list[Row]) -> list[Row]:
    found: dict[int, Row] = {}
    for row in rows:
        known = found.setdefault(row["namespace"], row)
        if known is row:
            continue
        known["pages"] += row["pages"]
        known["bytes"] += row["bytes"]
        known["idle_s"] = _least(known["idle_s"], row["idle_s"])
        known["counts"] = dict(Counter(known["counts"]) + Counter(row["counts"]))
        for name, part in row["components"].items():
            mine = known["components"].setdefault(name, part)
            if mine is not part:
                mine["pages"] += part["pages"]
                mine["bytes"] += part["bytes"]
                mine["object_bytes"] = max(mine["object_bytes"], part["object_bytes"])
                mine["world"] = max(mine["world"], part["world"])
    return sorted(found.values(), key=lambda row: (row["idle_s"] is None, row["idle_s"], row["namespace"]))


def _tenants(rows: list[Row]) -> list[Row]:
    found: dict[str, Row] = {}
    for row in rows:
        known = found.setdefault(row["tenant"], row)
        if known is row:
            continue
        for name in ("pages", "bytes", "used_bytes"):
            known[name] += row[name]
        # The same clients and, but for pools that came later, the same namespaces are known in all pools.
        known["namespaces"] = max(known["namespaces"], row["namespaces"])
        known["idle_s"] = _least(known["idle_s"], row["idle_s"])
        if known["quota_bytes"] is not None and row["quota_bytes"] is not None:
            known["quota_bytes"] += row["quota_bytes"]
    return sorted(found.values(), key=lambda row: -row["bytes"])


_MERGED: Final[Mapping[str, Callable[[list[Row]], list[Row]]]] = {
    "namespaces": _namespaces,
    "tenants": _tenants,
    "pins": lambda rows: sorted(rows, key=lambda row: (-row["bytes"], row["namespace"], row["page"])),
    "holds": lambda rows: sorted(rows, key=lambda row: -row["age_s"]),
}
