"""The answers to Inspect: rows for people about namespaces, sessions, tenants, pins, holds, pools and the prefix tree.

Looks, and changes nothing. Operators see everything, others what belongs to their tenant. What takes a pass over all pages is
a worker's; the loop copies some columns for the tree, and hands out what is there for the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, cast, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from maru_core.namespace import record_digest
from maru_core.protocol import ErrorCode, Inspect, Reply, Report
from maru_server.calls import Deferred
from maru_server.holds import Decision
from maru_server.pins import Pins
from maru_server.reaches import way_rows
from maru_server.requests import RefusedError
from maru_server.sessions import Session, Sessions
from maru_server.tenants import Tenants
from maru_server.tree import PrefixTree
from maru_server.views import LIMIT_MAX, Row, Sort, snapshot, tree_view

#: What can be asked for.
SUBJECTS: Final = ("namespaces", "sessions", "tenants", "pins", "holds", "tree", "pools")


@dataclass(slots=True)
class _Space:
    """One namespace as a worker looks at it. The columns are the tree's own and go on changing: sums over them are of about
    now, and cost the loop nothing."""

    number: int
    tenant: str
    record: bytes
    counts: dict[str, int]
    objects: npt.NDArray[np.uint32]
    last_use: npt.NDArray[np.int64]
    tables: list[tuple[str, npt.NDArray[np.uint64], npt.NDArray[np.uint16], npt.NDArray[np.uint16]]]

    def pages(self, now_ns: int) -> tuple[int, float | None]:
        """How many there are, and seconds since one of them was used."""
        stored = self.objects > 0
        pages = int(np.count_nonzero(stored))
        last = int(self.last_use.max(where=stored, initial=0))
        return pages, round(max(0, now_ns - last) / 1e9, 3) if pages else None

    def components(self) -> dict[str, dict[str, int]]:
        """What is stored of each component: pages with any of it, bytes, largest object, most shards of a page."""
        found = {}
        for name, length, have, world in self.tables:
            pages = int(np.count_nonzero(have))
            if pages:
                found[name] = {
                    "pages": pages,
                    "bytes": int(np.dot(length, have.astype(np.uint64))),
                    "object_bytes": int(length.max()),
                    "world": int(world.max()),
                }
        return found


class Inspector:
    """Args:
    trees: all trees by namespace number; looked at anew at each question, as are all others.
    components: component numbers by name.
    records: namespace records by number.
    holds: what running requests keep from eviction.
    pins: what operators keep from eviction.
    tenants: what each may have of the pool.
    pool: the row of the pool; told whether an operator asks.
    """

    def __init__(
        self,
        incarnation: int,
        trees: Mapping[int, PrefixTree],
        components: Mapping[str, int],
        sessions: Sessions,
        records: Callable[[], dict[int, bytes]],
        holds: Iterable[Decision],
        pins: Pins,
        tenants: Tenants,
        pool: Callable[[bool], Row],
    ) -> None:
        self._incarnation = incarnation
        self._trees = trees
        self._components = components
        self._sessions = sessions
        self._records = records
        self._holds = holds
        self._pins = pins
        self._tenants = tenants
        self._pool = pool

    def answer(self, message: Inspect, session: Session, time: float, now_ns: int) -> Reply | Deferred:
        """The rows, or the work that makes them.

        Args:
            time: as the sessions have it, seconds.
            now_ns: the time of day.
        Raises:
            RefusedError: a question that cannot be, or a namespace that is not the session's to see.
        """
        check_inspect(message)
        what, limit = message.what, message.limit
        trees = self._visible(session, message.namespace)
        if what in ("tree", "namespaces", "tenants"):
            return Deferred(message.rid, self._later(message, session, trees, now_ns))
        if what == "sessions":
            rows = session_rows(self._sessions, session, time)
        elif what == "holds":
            rows = self.hold_rows(trees, time)
        elif what == "pools":
            rows = [self._pool(session.peer.operator)]
        else:
            rows = self._pins.rows({tree.number for tree in trees})
        return Report(message.rid, self._incarnation, rows[:limit])

    def _later(self, message: Inspect, session: Session, trees: list[PrefixTree], now_ns: int) -> Callable[[], Reply]:
        """What takes a pass over all pages: begun here, done by a worker."""
        make: Callable[[], list[Row]]
        if message.what == "tree":
            taken = snapshot(trees, self._components, now_ns)
            make = partial(tree_view, taken, message.limit, cast(Sort, message.sort))
        else:
            spaces = self._spaces(trees)
            if message.what == "namespaces":
                make = partial(self.namespace_rows, spaces, now_ns)
            else:
                make = partial(self.tenant_rows, spaces, self._connected(session), dict(self._tenants.used), now_ns)

        def answer() -> Reply:
            rows = make()
            # A tree that was cut to its limit has a row for what was left out.
            return Report(message.rid, self._incarnation, rows if message.what == "tree" else rows[: message.limit])

        return answer

    def _visible(self, session: Session, number: int | None) -> list[PrefixTree]:
        """The trees that are asked about, of those that the session may see."""
        peer = session.peer
        theirs = [tree for tree in self._trees.values() if peer.operator or tree.tenant == peer.tenant]
        if number is None:
            return theirs
        tree = next((tree for tree in theirs if tree.number == number), None)
        if tree is None:
            raise RefusedError(
                ErrorCode.UNKNOWN_NAMESPACE, f"namespace {number} is not known: `maru namespaces` lists those that are"
            )
        return [tree]

    # ------------------------------------------------------------ rows

    def namespace_rows(self, spaces: Iterable[_Space], now_ns: int) -> list[Row]:
        """One row a namespace, last used first. ``idle_s`` is None where nothing was ever stored; ``counts`` are since the
        server's start; ``record`` has the fields of :class:`maru_core.namespace.Namespace`."""
        rows = []
        for space in spaces:
            pages, idle_s = space.pages(now_ns)
            components = space.components()
            rows.append(
                {
                    "namespace": space.number,
                    "digest": record_digest(space.record).hex(),
                    "tenant": space.tenant,
                    "pages": pages,
                    "bytes": sum(part["bytes"] for part in components.values()),
                    "idle_s": idle_s,
                    "components": components,
                    "counts": space.counts,
                    "record": _fields(space.record),
                }
            )
        rows.sort(key=lambda row: (row["idle_s"] is None, row["idle_s"], row["namespace"]))
        return rows

    def _spaces(self, trees: Iterable[PrefixTree]) -> list[_Space]:
        records = self._records()
        names = {number: name for name, number in self._components.items()}
        return [
            _Space(
                tree.number,
                tree.tenant,
                records.get(tree.number, b""),
                dict(tree.counts),
                tree.objects[: tree.size],
                tree.last_use[: tree.size],
                [
                    (
                        names.get(number, f"#{number}"),
                        table.length[: tree.size],
                        table.have[: tree.size],
                        table.world[: tree.size],
                    )
                    for number, table in sorted(tree.tables.items())
                ],
            )
            for tree in trees
        ]

    def tenant_rows(
        self, spaces: Iterable[_Space], connected: Mapping[str, int], used: Mapping[str, int], now_ns: int
    ) -> list[Row]:
        """One row a tenant, largest first. ``used_bytes`` is what its slots take of the pool, also those being written, and is what
        counts against ``quota_bytes``, which is None where it may fill the pool."""
        rows: dict[str, Row] = {
            tenant: {"namespaces": 0, "pages": 0, "bytes": 0, "idle_s": None} for tenant in connected
        }
        for space in spaces:
            row = rows.setdefault(space.tenant, {"namespaces": 0, "pages": 0, "bytes": 0, "idle_s": None})
            pages, idle_s = space.pages(now_ns)
            row["namespaces"] += 1
            row["pages"] += pages
            row["bytes"] += sum(part["bytes"] for part in space.components().values())
            row["idle_s"] = (
                idle_s if row["idle_s"] is None else row["idle_s"] if idle_s is None else min(row["idle_s"], idle_s)
            )
        return [
            {
                "tenant": tenant,
                "sessions": connected.get(tenant, 0),
                **row,
                "used_bytes": used.get(tenant, 0),
                "quota_bytes": self._tenants.quota(tenant),
            }
            for tenant, row in sorted(rows.items(), key=lambda item: -item[1]["bytes"])
        ]

    def _connected(self, asking: Session) -> dict[str, int]:
        """Clients by tenant, of those tenants that the session may see; also of tenants that only have a quota."""
        connected = Counter(dict.fromkeys(self._tenants.quotas, 0))
        connected.update(session.peer.tenant for session in self._sessions)
        mine = asking.peer.tenant
        return dict(connected) if asking.peer.operator else {mine: connected[mine]}

    def hold_rows(self, trees: Iterable[PrefixTree], time: float) -> list[Row]:
        """One row a hold, oldest first; ``page`` is the last that is kept, ``bytes`` what holds of that page keep together."""
        seen = {tree.number for tree in trees}
        return [
            {
                "namespace": hold.namespace,
                "request": hold.request.hex(),
                "page": hold.guard.page.hex(),
                "pages": hold.pages,
                "bytes": hold.nbytes,
                "ranks": hold.ranks,
                "ranks_left": hold.ranks - len(hold.done),
                "session": hold.session,
                "age_s": round(max(0.0, time - hold.since), 3),
                "left_s": round(hold.held_s(time), 3),
            }
            for hold in self._holds
            if hold.namespace in seen and hold.guard is not None
        ]


def check_inspect(message: Inspect) -> None:
    """Raises RefusedError where the question cannot be."""
    what, limit = message.what, message.limit
    if what not in SUBJECTS:
        raise RefusedError(ErrorCode.INVALID, f"what is {what[:64]!r}: ask for one of {', '.join(SUBJECTS)}")
    if not 1 <= limit <= LIMIT_MAX:
        raise RefusedError(ErrorCode.INVALID, f"limit is {limit}: ask for 1 to {LIMIT_MAX} rows")
    if message.sort not in get_args(Sort):
        raise RefusedError(
            ErrorCode.INVALID, f"sort is {message.sort[:64]!r}: ask for one of {', '.join(get_args(Sort))}"
        )


def written(session: Session) -> tuple[int, int]:
    """Slots that it is writing, and those of it in quarantine."""
    reserved = quarantined = 0
    for reservation in session.reservations.values():
        if reservation.page is None:
            quarantined += reservation.remaining
        else:
            reserved += reservation.remaining
    return reserved, quarantined


def session_rows(
    sessions: Iterable[Session], asking: Session, time: float, parts: Mapping[int, Iterable[Session]] | None = None
) -> list[Row]:
    """One row a session that ``asking`` may see, first who needs attention.

    Args:
        parts: where several pools are served, of each session those in the pools, which have what is written.
    """
    rows: list[Row] = []
    for session in sessions:
        if not (asking.peer.operator or session.peer.tenant == asking.peer.tenant):
            continue
        slots = [written(part) for part in ([session] if parts is None else parts[session.number])]
        rows.append(
            {
                "session": session.number,
                "name": session.name,
                "host": session.identity.host,
                "pid": session.identity.pid,
                "tenant": session.peer.tenant,
                "operator": session.peer.operator,
                "you": session is asking,
                "silent": session.silent,
                "slots_reserved": sum(reserved for reserved, _ in slots),
                "slots_quarantined": sum(quarantined for _, quarantined in slots),
                "heard_s": round(max(0.0, time - session.heard), 3),
                "age_s": round(max(0.0, time - session.since), 3),
                "reaches": way_rows(session.ways),
            }
        )
    rows.sort(key=lambda row: (not row["silent"], -row["slots_quarantined"], -row["slots_reserved"], row["session"]))
    return rows


def _fields(record: bytes) -> dict[str, object]:
    try:
        return msgspec.json.decode(record, type=dict[str, object])
    except msgspec.MsgspecError:
        return {}
