"""The metadata server without its sockets: one object, one method per message, no clock, thread or randomness.

``handle(message, now)`` checks a message, does it, and answers; a message that is refused changed nothing. ``tick(now)``
does what is due, a bounded amount at a time. ``now`` is any monotonic time in seconds. Whoever calls these in the same
order with the same arguments gets the same answers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np

from maru_core.errors import ConfigError
from maru_core.namespace import Namespace
from maru_core.process import ProcessIdentity
from maru_core.protocol import (
    PROTOCOL_VERSION,
    Clear,
    Commit,
    Committed,
    Delete,
    Done,
    Error,
    ErrorCode,
    Goodbye,
    Heartbeat,
    Hello,
    Located,
    Match,
    NamespaceOpened,
    OpenNamespace,
    Release,
    Reply,
    Request,
    Reserve,
    Reserved,
    Stats,
    StatsReply,
    Touch,
    Welcome,
)
from maru_server.directory import PoolDirectory
from maru_server.integrity import check
from maru_server.lookup import Lookup
from maru_server.pages import Pages
from maru_server.rebuild import rebuild
from maru_server.requests import (
    RefusedError,
    check_component,
    check_hello,
    check_match,
    check_reserve,
    check_slots,
    count_hashes,
    split_hashes,
)
from maru_server.sessions import Clock, Reservations, Session, Sessions
from maru_server.slabs import Slabs
from maru_server.tree import PrefixTree, Rows

#: Bounds of one tick: pages evicted, uses written down, reservations and sessions that ended.
_TICK_PAGES: Final = 1024
_TICK_TOUCHES: Final = 4096
_TICK_RESERVATIONS: Final = 256
#: Most uses waiting to be written down; older ones are forgotten (after a restart those pages look less used).
_TOUCHES_MAX: Final = 1 << 18

#: Memory that should be ready beyond what is in use, bytes: a burst of stores must not wait for the kernel to zero pages.
AHEAD_BYTES: Final = 256 << 20


@dataclass(frozen=True, kw_only=True)
class StateConfig:
    """Times in seconds; watermarks as shares of the pool."""

    heartbeat_s: float = 2.0  # clients are told to speak this often
    lease_s: float = 10.0  # silent for longer: reservations are quarantined
    reservation_s: float = 60.0  # longest time from reserve to commit, also for a client that speaks
    quarantine_s: float = 600.0  # then the slots of a client not known to be dead return
    restart_quarantine_s: float = 600.0  # the same for slots that were reserved when the server started
    incomplete_s: float = 10.0  # pages that lack shards for longer are evicted first
    growth_s: float = 1.0  # waited for memory to be provided before evicting instead
    high: float = 0.95  # background eviction starts above ...
    low: float = 0.90  # ... and ends below
    max_sessions: int = 4096
    max_reservations: int = 65536  # Reserve messages whose slots are not yet all committed


class ServerState:
    """All that the server knows.

    Args:
        directory: the pool; what it holds is found again.
        incarnation: of this server on this pool, told to clients.
        pool_uri: as clients are told.
        now: monotonic time, seconds; ``now + wall_offset`` is the time of day.
    """

    def __init__(
        self,
        directory: PoolDirectory,
        *,
        incarnation: int,
        pool_uri: str,
        config: StateConfig,
        now: float,
        wall_offset: float,
    ) -> None:
        self._directory = directory
        self._geometry = directory.geometry
        self._incarnation = incarnation
        self._pool_uri = pool_uri
        self._config = config
        self._wall_offset = wall_offset
        self._clock = Clock(now, gap_s=config.lease_s / 2)
        time = self._clock.time(now)
        found = rebuild(directory, self._wall_ns(now))
        self._trees = found.trees
        self._slabs = Slabs(directory, found.occupied)
        self._reservations = Reservations(self._geometry.slot_count, config.max_reservations)
        if len(found.reserved):
            generations = directory.generations[found.reserved]
            deadline = time + config.restart_quarantine_s
            self._reservations.add(None, found.reserved, generations, None, time, deadline)
        self._pages = Pages(directory, self._slabs, self._trees, self._reservations, int(config.incomplete_s * 1e9))
        self._lookup = Lookup(directory)
        self._pages.counts["discarded"] = found.discarded
        self._sessions = Sessions(incarnation)
        self._namespaces = directory.namespaces()
        self._components = directory.components()
        self._drop_unused_namespaces()
        self._touched: deque[tuple[PrefixTree, Rows]] = deque()
        self._touched_rows = 0
        self._evicting = False
        self._grew = time  # when extents last became ready, or were not wanted
        self._started = time
        self._handlers: dict[type, Callable[[Any, Session, float, float], Reply | None]] = {
            OpenNamespace: self._open_namespace,
            Match: self._match,
            Reserve: self._reserve,
            Commit: self._commit,
            Release: self._release,
            Touch: self._touch,
            Delete: self._delete,
            Clear: self._clear,
            Heartbeat: self._heartbeat,
            Goodbye: self._goodbye,
        }

    def _drop_unused_namespaces(self) -> None:
        """Make room where the table is nearly full. Only at the start: no client knows a number yet."""
        if len(self._namespaces) * 2 > self._geometry.namespace_capacity:
            for record, number in list(self._namespaces.items()):
                if not len(self._trees[number]):
                    self._directory.drop_namespace(number)
                    del self._namespaces[record], self._trees[number]

    def _wall_ns(self, now: float) -> int:
        return max(0, int((now + self._wall_offset) * 1e9))

    # ------------------------------------------------------------ messages

    def finish(self) -> None:
        """Do what :meth:`handle` left for when the reply is on its way. Every other method does it first."""
        self._pages.finish()

    def handle(self, message: Request, now: float) -> Reply | None:
        """Do what a client asks. Raises for no message that was decoded."""
        self.finish()
        time = self._clock.time(now)
        if isinstance(message, Hello):
            return self._hello(message, time)
        if isinstance(message, Stats):
            return StatsReply(message.rid, self._incarnation, self.stats())
        session = self._sessions.get(message.session)
        try:
            if session is None:
                raise RefusedError(
                    ErrorCode.UNKNOWN_SESSION, f"session {message.session} is not known: say Hello again"
                )
            session.heard = time
            session.silent = False
            return self._handlers[type(message)](message, session, time, now)
        except RefusedError as refusal:
            if isinstance(message, (Touch, Goodbye)):
                return None
            return Error(message.rid, self._incarnation, refusal.code, str(refusal))

    def _hello(self, message: Hello, time: float) -> Reply:
        try:
            check_hello(message)
            session = self._session_of(message, time)
        except RefusedError as refusal:
            return Error(message.rid, self._incarnation, refusal.code, str(refusal))
        session.heard = time
        session.silent = False
        return Welcome(
            PROTOCOL_VERSION,
            message.rid,
            self._incarnation,
            session.number,
            self._pool_uri,
            self._geometry.pool_uuid,
            self._config.heartbeat_s,
            self._config.lease_s,
        )

    def _session_of(self, message: Hello, time: float) -> Session:
        # A repeated Hello (its reply was lost) is the same client, which may be writing into what it has.
        session = self._sessions.of_client(message.client_id)
        if session is None:
            if len(self._sessions) >= self._config.max_sessions and not self._make_session_room():
                raise RefusedError(
                    ErrorCode.LIMIT, f"{len(self._sessions)} clients are connected, as many as allowed: end some"
                )
            identity = ProcessIdentity(message.pid, message.pid_start, message.pid_ns, message.boot_id, message.host)
            session = self._sessions.add(message.client_id, message.name, identity, time)
        return session

    def _make_session_room(self) -> bool:
        """End the session that is silent longest, if any holds nothing."""
        idle = [session for session in self._sessions if session.silent and not session.reservations]
        if idle:
            self._sessions.remove(min(idle, key=lambda session: session.heard))
        return bool(idle)

    def _open_namespace(self, message: OpenNamespace, session: Session, time: float, now: float) -> Reply:
        number = self._namespaces.get(message.record)
        if number is None:
            try:
                canonical = Namespace.parse(message.record).record()
            except ConfigError as error:
                raise RefusedError(ErrorCode.INVALID, str(error)) from error
            if canonical != message.record:
                raise RefusedError(
                    ErrorCode.INVALID, "the namespace record is not canonical: send what Namespace.record() gives"
                )
            number = self._directory.add_namespace(canonical)
            if number is None:
                raise RefusedError(
                    ErrorCode.LIMIT,
                    f"the pool knows {len(self._namespaces)} namespaces, as many as it can: restart the server to "
                    "drop unused ones, or format the pool anew",
                )
            self._namespaces[canonical] = number
            self._trees[number] = PrefixTree(number)
        return NamespaceOpened(message.rid, self._incarnation, number)

    def _match(self, message: Match, session: Session, time: float, now: float) -> Reply:
        count = count_hashes(message.hashes)
        tree = self._tree(message.namespace)
        check_match(message, self._geometry.component_capacity)
        components = [self._components.get(name) for name in message.components]
        located = self._lookup.match(tree, components, message.shard, message.hashes, message.sparse)
        counts = self._pages.counts
        counts["matches"] += 1
        counts["pages_asked"] += count
        counts["pages_found"] += located.pages
        return Located(message.rid, self._incarnation, *located)

    def _reserve(self, message: Reserve, session: Session, time: float, now: float) -> Reply:
        keys = split_hashes(message.hashes)
        tree = self._tree(message.namespace)
        check_reserve(message, keys, self._geometry.extent_bytes)
        component = self._components.get(message.component)
        if component is None:
            component = self._add_component(message.component)
        pages = self._pages
        pages.may_grow = self._may_grow(time)
        grant = pages.reserve(
            session,
            tree,
            component,
            message.shard,
            message.world,
            message.parent,
            message.hashes,
            keys,
            message.nbytes,
            time=time,
            deadline=time + self._config.reservation_s,
            now_ns=self._wall_ns(now),
        )
        return Reserved(message.rid, self._incarnation, *grant)

    def _commit(self, message: Commit, session: Session, time: float, now: float) -> Reply:
        check_slots(message, self._geometry.slot_count)
        status = self._pages.commit(session, message.slots, message.generations, message.checksums, self._wall_ns(now))
        return Committed(message.rid, self._incarnation, status)

    def _release(self, message: Release, session: Session, time: float, now: float) -> Reply:
        check_slots(message, self._geometry.slot_count)
        count = self._pages.release(session, message.slots, message.generations)
        return Done(message.rid, self._incarnation, count)

    def _touch(self, message: Touch, session: Session, time: float, now: float) -> None:
        keys = split_hashes(message.hashes)
        tree = self._tree(message.namespace)
        rows = np.array([row for row in map(tree.rows.get, keys) if row is not None], np.int64)
        if len(rows):
            tree.last_use[rows] = self._wall_ns(now)
            self._touched.append((tree, rows))
            self._touched_rows += len(rows)
            while self._touched_rows > _TOUCHES_MAX:
                self._touched_rows -= len(self._touched.popleft()[1])

    def _delete(self, message: Delete, session: Session, time: float, now: float) -> Reply:
        keys = split_hashes(message.hashes)
        tree = self._tree(message.namespace)
        count = self._pages.delete(tree, keys, time, time + self._config.quarantine_s)
        return Done(message.rid, self._incarnation, count)

    def _clear(self, message: Clear, session: Session, time: float, now: float) -> Reply:
        trees = list(self._trees.values()) if message.namespace is None else [self._tree(message.namespace)]
        count = sum(self._pages.clear(tree, time, time + self._config.quarantine_s) for tree in trees)
        return Done(message.rid, self._incarnation, count)

    def _heartbeat(self, message: Heartbeat, session: Session, time: float, now: float) -> Reply:
        return Done(message.rid, self._incarnation)

    def _goodbye(self, message: Goodbye, session: Session, time: float, now: float) -> None:
        self._end(session)

    # ------------------------------------------------------------ checks

    def _tree(self, namespace: int) -> PrefixTree:
        tree = self._trees.get(namespace)
        if tree is None:
            raise RefusedError(
                ErrorCode.UNKNOWN_NAMESPACE, f"namespace {namespace} is not known: open it again with its record"
            )
        return tree

    def _add_component(self, name: str) -> int:
        check_component(name)
        number = self._directory.add_component(name)
        if number is None:
            raise RefusedError(
                ErrorCode.LIMIT,
                f"component {name!r} is new, and the pool knows {len(self._components)}, as many as it can: "
                "use a known one or format the pool anew",
            )
        self._components[name] = number
        return number

    # ------------------------------------------------------------ what is due

    def tick(self, now: float) -> None:
        """Leases, quarantine, eviction above the watermark, uses written down; a bounded part of each."""
        self.finish()
        time = self._clock.time(now)
        self._expire_sessions(time)
        self._expire_reservations(time)
        self._evict_ahead(self._wall_ns(now), time)
        self._write_uses()

    def _expire_sessions(self, time: float) -> None:
        config = self._config
        for session in list(self._sessions):
            silent_s = time - session.heard
            if silent_s <= config.lease_s:
                continue
            session.silent = True
            live = [reservation for reservation in session.reservations.values() if reservation.page is not None]
            for reservation in live[:_TICK_RESERVATIONS]:
                self._pages.quarantine(reservation, time, time + config.quarantine_s)
            if not session.reservations and silent_s > config.lease_s + config.quarantine_s:
                self._sessions.remove(session)

    def _expire_reservations(self, time: float) -> None:
        for reservation in list(islice(self._reservations.live.values(), _TICK_RESERVATIONS)):
            if reservation.deadline > time:
                break
            # Its holder speaks and does not commit: the answer that told it of these slots was lost, most likely.
            self._pages.quarantine(reservation, time, time + self._config.quarantine_s)
        for reservation in list(islice(self._reservations.quarantined.values(), _TICK_RESERVATIONS)):
            if reservation.deadline <= time:
                self._pages.end(reservation)

    def _evict_ahead(self, now_ns: int, time: float) -> None:
        """Between the watermarks, so that a reserve need not wait for it."""
        extents = self._geometry.extent_count if self._may_grow(time) else max(self._slabs.ready, 1)
        low = self._config.low * extents
        if self._slabs.used_extents() > self._config.high * extents:
            self._evicting = True
        if self._evicting:

            def short() -> int:
                used = self._slabs.used_extents()
                return math.ceil(self._slabs.used_slots() * (used - low) / used) if used > low else 0

            evicted = self._pages.evict(_TICK_PAGES, short, now_ns)
            if evicted < _TICK_PAGES:
                self._evicting = False

    def _write_uses(self) -> None:
        budget = _TICK_TOUCHES
        while self._touched and budget > 0:
            tree, rows = self._touched.popleft()
            self._touched_rows -= len(rows)
            budget -= len(rows)
            if self._trees.get(tree.number) is tree:
                for slots, theirs in tree.one_slot(rows):
                    self._directory.touch(slots, tree.last_use[theirs])

    def _end(self, session: Session) -> None:
        """The client writes no more."""
        for reservation in list(session.reservations.values()):
            self._pages.end(reservation)
        self._sessions.remove(session)

    # ------------------------------------------------------------ what the service tells and asks

    def extents_ready(self, count: int, now: float) -> None:
        """Extents ``[0, count)`` have their memory and may be used."""
        if count > self._slabs.ready:
            self._grew = self._clock.time(now)
        self._slabs.extents_ready(count)

    def wanted_extents(self, now: float) -> int:
        """How many extents should be ready: those in use, and some ahead."""
        self._clock.time(now)
        return self._wanted()

    def _wanted(self) -> int:
        cut = self._slabs.cut
        ahead = max(2, -(-AHEAD_BYTES // self._geometry.extent_bytes), cut // 4)
        return min(self._geometry.extent_count, cut + ahead)

    def _may_grow(self, time: float) -> bool:
        """More of the pool will be ready soon: no page need be evicted now. Not for long: memory may be short."""
        if self._slabs.ready >= self._geometry.extent_count:
            return False
        if self._wanted() <= self._slabs.ready:
            self._grew = time
        return time - self._grew <= self._config.growth_s

    def silent_sessions(self) -> list[tuple[int, ProcessIdentity]]:
        """Sessions that missed a heartbeat: the service may know whether their processes live."""
        time = self._clock.time(self._clock.last)
        overdue = 1.5 * self._config.heartbeat_s
        return [(session.number, session.identity) for session in self._sessions if time - session.heard > overdue]

    def process_gone(self, session: int, now: float) -> None:
        """The client's process is dead for certain."""
        self.finish()
        self._clock.time(now)
        found = self._sessions.get(session)
        if found is not None:
            self._end(found)

    def stats(self) -> dict[str, float | int | str]:
        """Figures for people and tests; counts are since the start."""
        self.finish()
        counts, slabs = self._pages.counts, self._slabs
        slots = slabs.used_slots() - self._reservations.live_slots - self._reservations.quarantined_slots
        return {
            "incarnation": self._incarnation,
            "pool_uri": self._pool_uri,
            "sessions": len(self._sessions),
            "sessions_silent": sum(session.silent for session in self._sessions),
            "namespaces": len(self._namespaces),
            "pages": sum(len(tree) for tree in self._trees.values()),
            "objects": slots,
            "slots_reserved": self._reservations.live_slots,
            "slots_quarantined": self._reservations.quarantined_slots,
            "bytes_used": slabs.used_bytes(),
            "extents": self._geometry.extent_count,
            "extents_ready": slabs.ready,
            "extents_cut": slabs.cut,
            "extent_bytes": self._geometry.extent_bytes,
            "used_share": slabs.used_extents() / self._geometry.extent_count,
            "stalled_s": self._clock.stalled_s,
            **{name: counts[name] for name in _COUNTS},
        }

    def check(self) -> None:
        """Compare trees, slots, reservations, sessions and the pool with each other.

        Raises:
            AssertionError: naming what does not fit.
        """
        self.finish()
        check(self._directory, self._slabs, self._trees, self._reservations, self._sessions, self._pages.leaves)
        assert self._namespaces == self._directory.namespaces()
        assert self._components == self._directory.components()
        assert set(self._trees) == set(self._namespaces.values())


_COUNTS: Final = (
    "matches",
    "pages_asked",
    "pages_found",
    "reserved",
    "no_room",
    "committed",
    "lost",
    "quarantined",
    "deleted",
    "evicted_pages",
    "evicted_objects",
    "discarded",
)
