"""Several pools in one server: a layer between the service and one state for each pool, with what the service uses of a state.

Each pool has its own state, with directory, eviction, holds, pins and rebuild: none knows of the others. This layer has the
clients' sessions and the numbers of their namespaces, and says each message to the states that it concerns, in their numbers:

- **Sessions** are in all states at once. One whose part has ended in any of them is over; the client says Hello again, and has back
  what the others still know.
- **Placement** (:mod:`maru_server.placement`) is by what the session says that it reaches. It gets nothing of other pools, and nothing
  at all before it has said it.
- **Slot numbers** carry the pool in their top bits, so that commits, releases and validations find their way, whatever is reached.
- **Holds**: the first rank's pool is that of all ranks of a request. Only the state of that pool keeps a decision.
- **Limits**: rates are kept here, for all pools together; reservations, quotas, pins and holds are bounded in each pool by itself, and
  shares are of that pool.

What is shown of all pools together is put together in :mod:`maru_server.pool_figures`. A server with one pool has none of this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from maru_core.process import ProcessIdentity
from maru_core.protocol import (
    HASH_BYTES,
    NO_SLOT,
    PROTOCOL_VERSION,
    Agents,
    Announce,
    Clear,
    Commit,
    Committed,
    Delete,
    Done,
    Error,
    ErrorCode,
    Evict,
    Goodbye,
    Heartbeat,
    Hello,
    Hold,
    Inspect,
    Located,
    Match,
    MissReason,
    NamespaceOpened,
    OpenNamespace,
    Pin,
    PoolName,
    Reaches,
    Release,
    Reply,
    Request,
    Reserve,
    Reserved,
    ReserveStatus,
    Stats,
    StatsReply,
    Touch,
    Unhold,
    Unpin,
    Validate,
    Validated,
    Welcome,
)
from maru_server.calls import Deferred
from maru_server.config import StateConfig
from maru_server.events import Events
from maru_server.limits import Limits
from maru_server.metrics import Figures
from maru_server.overview import FOR_EVERYBODY
from maru_server.placement import SLOTS_MAX, find, parts, place, raised, stores
from maru_server.pool_events import Joint
from maru_server.pool_figures import Shown
from maru_server.reaches import NONE, check_ways, reached
from maru_server.requests import (
    RefusedError,
    check_match,
    check_request,
    check_reserve,
    count_hashes,
    split_hashes,
)
from maru_server.sessions import LOCAL, Clock, Peer, Session, Sessions
from maru_server.state import ServerState
from maru_server.views import Snapshot

Handler = Callable[[Any, Session, float, float], Reply | Deferred | None]
#: A rate that is none: the rates of clients are kept by the layer.
_NO_RATE: Final = 1e18
#: How often ended sessions are cleared away, in parts of the lease.
_SWEEP: Final = 8


def config_of_member(config: StateConfig) -> StateConfig:
    """What the state of one of several pools is made with."""
    return dataclasses.replace(config, session_rate=_NO_RATE, session_page_rate=_NO_RATE)


class Member:
    """One pool as its own memory's keeper sees it; sessions are the layer's."""

    def __init__(self, pools: Pools, number: int) -> None:
        self._pools = pools
        self._number = number
        self.state = pools.states[number]

    def extents_ready(self, count: int, now: float) -> None:
        self.state.extents_ready(count, now)

    def wanted_extents(self, now: float) -> int:
        return self.state.wanted_extents(now)

    def reserved_slots(self, session: int) -> list[tuple[npt.NDArray[np.uint64], int]]:
        """As :meth:`ServerState.reserved_slots`, of the part of this pool."""
        part = self._pools.part(session, self._number)
        return [] if part is None else self.state.reserved_slots(part)


class Pools:
    """See the module.

    Args:
        states: one for each pool, in the order of their numbers; all made with ``incarnation`` and :func:`config_of_member`.
        incarnation: of this server, for all replies.
        config: what was asked for.
        now: monotonic time, seconds.
    """

    def __init__(self, states: Sequence[ServerState], *, incarnation: int, config: StateConfig, now: float) -> None:
        self.states = tuple(states)
        self.members = tuple(Member(self, number) for number in range(len(states)))
        self._incarnation = incarnation
        self._config = config
        self._clock = Clock(now, gap_s=config.lease_s / 2)
        self._limits = Limits(messages_per_s=config.session_rate, pages_per_s=config.session_page_rate)
        self._names = [PoolName(state.books.pool_uri, state.books.geometry.pool_uuid) for state in states]
        self._slot_counts = [state.books.geometry.slot_count for state in states]
        assert max(self._slot_counts) <= SLOTS_MAX
        self._components = min(state.books.geometry.component_capacity for state in states)
        self._extent_bytes = max(state.books.geometry.extent_bytes for state in states)
        self._sessions = Sessions(incarnation)
        self._parts: dict[int, tuple[Session, ...]] = {}  # of each session, its sessions in the states
        self._numbers: dict[tuple[str, bytes], int] = {}  # of namespaces, by tenant and record
        self._spaces: list[tuple[str, list[int | None]]] = []  # tenant, and number in each state, by number
        self._largest: dict[int, int] = {}  # bytes of objects that were to be stored in this life, by number
        self._swept = self._clock.time(now)
        self._over_rate = 0
        self._joint: Joint | None = None
        for pool, state in enumerate(states):
            for (tenant, record), number in state.books.names.namespaces.items():
                self._number(tenant, record)[pool] = number
        self._shown = Shown(self.states, self._sessions, self._parts, self._numbers, self._spaces)
        self._handlers: dict[type, Handler] = {
            OpenNamespace: self._open_namespace,
            Match: self._match,
            Unhold: self._unhold,
            Reserve: self._reserve,
            Commit: self._commit,
            Release: self._release,
            Validate: self._validate,
            Touch: self._touch,
            Delete: self._delete,
            Clear: self._clear,
            Heartbeat: self._heartbeat,
            Reaches: self._reaches,
            Announce: self._to_named_pool,
            Agents: self._to_named_pool,
            Pin: self._pin,
            Unpin: self._unpin,
            Evict: self._evict,
            Inspect: self._inspect,
            Goodbye: self._goodbye,
        }

    def _number(self, tenant: str, record: bytes) -> list[int | None]:
        """The numbers that a namespace has in the states."""
        number = self._numbers.get((tenant, record))
        if number is None:
            number = self._numbers[tenant, record] = len(self._spaces)
            self._spaces.append((tenant, [None] * len(self.states)))
        return self._spaces[number][1]

    # ------------------------------------------------------------ messages and time

    def finish(self) -> None:
        """As :meth:`ServerState.finish`."""
        for state in self.states:
            state.finish()

    def handle(self, message: Request, now: float, peer: Peer = LOCAL) -> Reply | Deferred | None:
        """As :meth:`ServerState.handle`."""
        self.finish()  # of all: where something goes is decided by the books of each
        time = self._clock.time(now)
        if isinstance(message, (Hello, Stats)):
            if peer != LOCAL and not self._limits.admits(self._sessions.account(peer), message, time):
                self._over_rate += 1
                return Error(message.rid, self._incarnation, ErrorCode.RATE, self._limits.too_fast())
            if isinstance(message, Hello):
                return self._hello(message, time, now, peer)
            figures = self.stats()
            if not peer.operator:
                figures = {name: figures[name] for name in FOR_EVERYBODY}
            return StatsReply(message.rid, self._incarnation, figures)
        session = self._sessions.get(message.session)
        try:
            if session is None or session.peer != peer or not self._whole(session):
                raise RefusedError(
                    ErrorCode.UNKNOWN_SESSION, f"session {message.session} is not known: say Hello again"
                )
            self._heard(session, time, now)
            if not self._limits.admits(session.account, message, time):
                self._over_rate += 1
                raise RefusedError(ErrorCode.RATE, self._limits.too_fast())
            handler = self._handlers.get(type(message))
            if handler is None:
                raise RefusedError(ErrorCode.INVALID, f"{type(message).__name__} is not served here")
            return handler(message, session, time, now)
        except RefusedError as refusal:
            if isinstance(message, (Touch, Goodbye)):
                return None
            return Error(message.rid, self._incarnation, refusal.code, str(refusal))

    def tick(self, now: float) -> None:
        """As :meth:`ServerState.tick`."""
        time = self._clock.time(now)
        failed: Exception | None = None
        for state in self.states:
            try:
                state.tick(now)
            except Exception as error:
                # What is wrong in one pool keeps no other from its time.
                failed = failed or error
        if time >= self._swept + self._config.lease_s / _SWEEP:
            self._swept = time
            self._sweep(now)
        if failed is not None:
            raise failed

    # ------------------------------------------------------------ sessions

    def _hello(self, message: Hello, time: float, now: float, peer: Peer) -> Reply:
        found: list[Session] = []
        fresh: list[bool] = []
        for state in self.states:
            fresh.append(state.books.sessions.of_client(message.client_id) is None)
            reply = state.handle(message, now, peer)
            part = state.books.sessions.get(reply.session) if isinstance(reply, Welcome) else None
            if part is None:
                for earlier, mine, new in zip(self.states, found, fresh, strict=False):
                    if new:
                        earlier.handle(Goodbye(mine.number), now, peer)
                assert isinstance(reply, Error)
                return reply
            found.append(part)
        session = self._sessions.of_client(message.client_id)
        if session is not None and self._parts[session.number] != tuple(found):
            self._forget(session)
            session = None
        if session is None:
            identity = ProcessIdentity(message.pid, message.pid_start, message.pid_ns, message.boot_id, message.host)
            session = self._sessions.add(message.client_id, message.name, identity, time, peer)
            self._parts[session.number] = tuple(found)
        self._heard(session, time, now)
        return Welcome(
            PROTOCOL_VERSION,
            message.rid,
            self._incarnation,
            session.number,
            self._names[0].uri,
            self._names[0].uuid,
            self._config.heartbeat_s,
            self._config.lease_s,
            self._names,
        )

    def _whole(self, session: Session) -> bool:
        """Whether every state still knows it."""
        return all(
            state.books.sessions.get(part.number) is part
            for state, part in zip(self.states, self._parts[session.number], strict=True)
        )

    def _heard(self, session: Session, time: float, now: float) -> None:
        session.heard, session.silent = time, False
        for state, part in zip(self.states, self._parts[session.number], strict=True):
            part.heard, part.silent = state.books.clock.time(now), False

    def _there(self, session: Session) -> list[tuple[ServerState, Session]]:
        """The parts that have not ended."""
        return [
            (state, part)
            for state, part in zip(self.states, self._parts[session.number], strict=True)
            if state.books.sessions.get(part.number) is part
        ]

    def _forget(self, session: Session) -> None:
        self._sessions.remove(session)
        del self._parts[session.number]

    def _sweep(self, now: float) -> None:
        """Sessions that a state has ended are over. What they may still be writing stays until its own time."""
        for session in list(self._sessions):
            there = self._there(session)
            session.silent = any(part.silent for _, part in there)
            if len(there) == len(self.states):
                continue
            kept = False
            for state, part in there:
                if part.reservations:
                    kept = True
                else:
                    state.handle(Goodbye(part.number), now, part.peer)
            if not kept:
                self._forget(session)

    def part(self, session: int, pool: int) -> int | None:
        """The number that a session has in the state of one pool."""
        found = self._parts.get(session)
        return None if found is None else found[pool].number

    def silent_sessions(self) -> list[tuple[int, ProcessIdentity]]:
        """As :meth:`ServerState.silent_sessions`."""
        overdue = [{number for number, _ in state.silent_sessions()} for state in self.states]
        return [
            (session.number, session.identity)
            for session in self._sessions
            if any(part.number in late for part, late in zip(self._parts[session.number], overdue, strict=True))
        ]

    def process_gone(self, session: int, now: float) -> None:
        """As :meth:`ServerState.process_gone`."""
        found = self._sessions.get(session)
        if found is not None:
            for state, part in self._there(found):
                state.process_gone(part.number, now)
            self._forget(found)

    def keep_peers(self, peers: Container[Peer], now: float) -> int:
        """As :meth:`ServerState.keep_peers`."""
        for state in self.states:
            state.keep_peers(peers, now)
        ended = [session for session in self._sessions if session.peer not in peers]
        for session in ended:
            self._forget(session)
        self._sessions.keep_accounts(peers)
        return len(ended)

    def note_turned_away(self, unlisted: int, failed: int) -> None:
        """As :meth:`ServerState.note_turned_away`; they concern no pool."""
        self.states[0].note_turned_away(unlisted, failed)

    def _reaches(self, message: Reaches, session: Session, time: float, now: float) -> Reply:
        session.ways = check_ways(message, len(self.states))
        for part, way in zip(self._parts[session.number], session.ways, strict=True):
            part.ways = (way,)
        return Done(message.rid, self._incarnation, sum(one.way != NONE for one in session.ways))

    def _heartbeat(self, message: Heartbeat, session: Session, time: float, now: float) -> Reply:
        number = message.namespace
        if number is not None and message.counts and 0 <= number < len(self._spaces):
            # A client's own counters are of no pool: the first that knows the namespace has them.
            pool = next((pool for pool, there in enumerate(self._spaces[number][1]) if there is not None), None)
            if pool is not None:
                self._ask(pool, message, session, now, self._spaces[number][1][pool])
        return Done(message.rid, self._incarnation)

    def _goodbye(self, message: Goodbye, session: Session, time: float, now: float) -> None:
        for pool in range(len(self.states)):
            self._ask(pool, message, session, now)
        self._forget(session)

    # ------------------------------------------------------------ asking the states

    def _ask(
        self, pool: int, message: Any, session: Session, now: float, namespace: int | None = None, **changes: Any
    ) -> Any:
        """The answer of one state to a message, in its own numbers."""
        changes["session"] = self._parts[session.number][pool].number
        if namespace is not None:
            changes["namespace"] = namespace
        return self.states[pool].handle(msgspec.structs.replace(message, **changes), now, session.peer)

    def _space(self, number: int, session: Session) -> list[int | None]:
        """The numbers that a namespace has in the states, if it is the session's to use."""
        known = 0 <= number < len(self._spaces)
        if not known or not (session.peer.operator or self._spaces[number][0] == session.peer.tenant):
            raise RefusedError(
                ErrorCode.UNKNOWN_NAMESPACE, f"namespace {number} is not known: open it again with its record"
            )
        return self._spaces[number][1]

    def _everywhere(self, message: Any, session: Session, now: float) -> Reply:
        """Of all states that know the namespace, the sum of what they did."""
        count = 0
        for pool, number in enumerate(self._space(message.namespace, session)):
            if number is not None:
                reply = self._ask(pool, message, session, now, number)
                if isinstance(reply, Error):
                    return reply
                count += reply.count
        return Done(message.rid, self._incarnation, count)

    def _open_namespace(self, message: OpenNamespace, session: Session, time: float, now: float) -> Reply:
        refusal: Reply | None = None
        opened = False
        for pool in range(len(self.states)):
            reply = self._ask(pool, message, session, now)
            if isinstance(reply, NamespaceOpened):
                self._number(session.peer.tenant, message.record)[pool] = reply.namespace
                opened = True
            else:
                # One pool's table may be full, and others have room.
                refusal = refusal or reply
        if not opened:
            assert refusal is not None
            return refusal
        return NamespaceOpened(message.rid, self._incarnation, self._numbers[session.peer.tenant, message.record])

    # ------------------------------------------------------------ find

    def _reached(self, session: Session, space: Sequence[int | None]) -> list[int]:
        """The pools that the session reaches and that know the namespace, best first."""
        return [pool for pool in reached(session.ways) if space[pool] is not None]

    def _match(self, message: Match, session: Session, time: float, now: float) -> Reply:
        count = count_hashes(message.hashes)
        space = self._space(message.namespace, session)
        check_match(message, self._components)
        mine = self._reached(session, space)
        if message.hold is not None and count:
            pool = self._decided(message, message.hold, space)
            if pool is not None:
                reply = self._ask(pool, message, session, now, space[pool])  # has a share in it from now on
                if isinstance(reply, Located) and pool not in mine:
                    return self._nothing(message, count)
                return self._told(reply, pool)
            if not mine:
                self._decide_nothing(message, message.hold, session, space, now)
        if not mine:
            return self._nothing(message, count)
        pool = find(message, self.states, space, mine)
        return self._told(self._ask(pool, message, session, now, space[pool]), pool)

    def _decided(self, message: Match, hold: Hold, space: Sequence[int | None]) -> int | None:
        """The pool that an earlier rank of the request was told of."""
        for pool, (state, number) in enumerate(zip(self.states, space, strict=True)):
            if number is not None and state.books.holds.knows(state.books.trees[number], message, hold):
                return pool
        return None

    def _decide_nothing(
        self, message: Match, hold: Hold, session: Session, space: Sequence[int | None], now: float
    ) -> None:
        """The first rank reaches nothing: the others are told as much."""
        pool = next((pool for pool, number in enumerate(space) if number is not None), None)
        if pool is None:
            return
        books, number = self.states[pool].books, space[pool]
        assert number is not None
        part = self._parts[session.number][pool].number
        books.holds.decide(
            books.trees[number],
            part,
            message,
            hold,
            pages=0,
            ends=b"",
            covered=(0,) * len(message.components),
            why=MissReason.NOT_STORED,
            time=books.clock.time(now),
        )

    def _nothing(self, message: Match, count: int) -> Reply:
        """What is said of pools that are not reached."""
        absent = count * len(message.components) if message.sparse else 0
        zeros = bytes(8 * absent)
        return Located(
            message.rid,
            self._incarnation,
            0,
            np.full(absent, NO_SLOT, "<u4").tobytes(),
            zeros,
            zeros,
            zeros,
            zeros,
            MissReason.NOT_STORED if count else MissReason.NONE,
            covered=[] if message.sparse else [0] * len(message.components),
        )

    def _told(self, reply: Reply, pool: int) -> Reply:
        """An answer of one state, with slots as clients have them."""
        if pool and isinstance(reply, Located | Reserved):
            return msgspec.structs.replace(reply, slots=raised(reply.slots, pool))
        return reply

    def _unhold(self, message: Unhold, session: Session, time: float, now: float) -> Reply:
        check_request(message.request)
        return self._everywhere(message, session, now)

    # ------------------------------------------------------------ store

    def _reserve(self, message: Reserve, session: Session, time: float, now: float) -> Reply:
        keys = split_hashes(message.hashes)
        space = self._space(message.namespace, session)
        check_reserve(message, keys, self._extent_bytes)
        largest = self._largest[message.namespace] = max(message.nbytes, self._largest.get(message.namespace, 0))
        pool = place(message, self.states, space, self._reached(session, space), session.ways, largest)
        if pool is None:
            count = len(keys)
            nowhere = bytes(8 * count)
            return Reserved(
                message.rid,
                self._incarnation,
                bytes([ReserveStatus.NO_ROOM]) * count,
                np.full(count, NO_SLOT, "<u4").tobytes(),
                nowhere,
                nowhere,
            )
        return self._told(self._ask(pool, message, session, now, space[pool]), pool)

    def _commit(self, message: Commit, session: Session, time: float, now: float) -> Reply:
        status = np.zeros(len(message.slots) // 4, np.uint8)
        sums = np.frombuffer(message.checksums, "<u8") if len(message.checksums) % 8 == 0 else None
        for pool, index, slots, generations in parts(message, self._slot_counts):
            theirs = b"" if sums is None or not len(sums) else sums[index].tobytes()
            reply = self._ask(pool, message, session, now, slots=slots, generations=generations, checksums=theirs)
            if isinstance(reply, Error):
                return reply
            status[index] = np.frombuffer(reply.status, np.uint8)
        return Committed(message.rid, self._incarnation, status.tobytes())

    def _release(self, message: Release, session: Session, time: float, now: float) -> Reply:
        count = 0
        for pool, _, slots, generations in parts(message, self._slot_counts):
            reply = self._ask(pool, message, session, now, slots=slots, generations=generations)
            if isinstance(reply, Error):
                return reply
            count += reply.count
        return Done(message.rid, self._incarnation, count)

    def _validate(self, message: Validate, session: Session, time: float, now: float) -> Reply:
        valid = np.zeros(len(message.slots) // 4, np.uint8)
        for pool, index, slots, generations in parts(message, self._slot_counts):
            reply = self._ask(pool, message, session, now, slots=slots, generations=generations)
            if isinstance(reply, Error):
                return reply
            valid[index] = np.frombuffer(reply.valid, np.uint8)
        return Validated(message.rid, self._incarnation, valid.tobytes())

    # ------------------------------------------------------------ use and remove

    def _touch(self, message: Touch, session: Session, time: float, now: float) -> None:
        count_hashes(message.hashes)
        space = self._space(message.namespace, session)
        for pool in self._reached(session, space):
            self._ask(pool, message, session, now, space[pool])

    def _delete(self, message: Delete, session: Session, time: float, now: float) -> Reply:
        named = count_hashes(message.hashes)
        reply = self._everywhere(message, session, now)
        if isinstance(reply, Done):
            session.account.pages_left -= max(0, reply.count - named)
        return reply

    def _clear(self, message: Clear, session: Session, time: float, now: float) -> Reply:
        if message.namespace is not None:
            return self._everywhere(message, session, now)
        count = sum(self._ask(pool, message, session, now).count for pool in range(len(self.states)))
        return Done(message.rid, self._incarnation, count)

    # ------------------------------------------------------------ operators

    def _to_named_pool(self, message: Announce | Agents, session: Session, time: float, now: float) -> Reply:
        for pool, name in enumerate(self._names):
            if message.pool == name.uuid:
                reply: Reply = self._ask(pool, message, session, now)
                return reply
        raise RefusedError(
            ErrorCode.INVALID,
            f"this server has {len(self._names)} pools, and {message.pool[:16].hex() or 'none'} is not the UUID of one: name one "
            "of the welcome's (a client of an older release cannot)",
        )

    def _pin(self, message: Pin, session: Session, time: float, now: float) -> Reply:
        """In each pool where the page is stored, or in none."""
        space = self._space(message.namespace, session)
        known = [pool for pool, number in enumerate(space) if number is not None]
        stored = [
            pool for pool in known if len(message.page) == HASH_BYTES and stores(self._tree(pool, space), message.page)
        ]
        added: list[int] = []
        count = 0
        for pool in stored or known[:1]:  # which says that it is not stored
            before = (self._tree(pool, space).number, message.page) in self.states[pool].books.pages.pins
            reply = self._ask(pool, message, session, now, space[pool])
            if isinstance(reply, Error):
                for earlier in added:
                    undo = Unpin(message.rid, message.session, message.namespace, message.page)
                    self._ask(earlier, undo, session, now, space[earlier])
                return reply
            count += reply.count
            if not before:
                added.append(pool)
        return Done(message.rid, self._incarnation, count)

    def _tree(self, pool: int, space: Sequence[int | None]) -> Any:
        number = space[pool]
        assert number is not None
        return self.states[pool].books.trees[number]

    def _unpin(self, message: Unpin, session: Session, time: float, now: float) -> Reply:
        return self._everywhere(message, session, now)

    def _evict(self, message: Evict, session: Session, time: float, now: float) -> Reply:
        """From the fullest pool on."""
        space = None if message.namespace is None else self._space(message.namespace, session)
        count = 0
        for pool in sorted(range(len(self.states)), key=lambda pool: -self.states[pool].stats()["used_share"]):  # type: ignore[operator]
            if space is not None and space[pool] is None:
                continue
            number = None if space is None else space[pool]
            reply = self._ask(pool, message, session, now, number, pages=message.pages - count)
            if isinstance(reply, Error):
                return reply
            count += reply.count
        return Done(message.rid, self._incarnation, count)

    def _inspect(self, message: Inspect, session: Session, time: float, now: float) -> Reply | Deferred:
        if message.namespace is not None:
            self._space(message.namespace, session)
        return self._shown.answer(
            message, session, time, lambda pool, asked, number: self._ask(pool, asked, session, now, number)
        )

    # ------------------------------------------------------------ what others see

    def stats(self) -> dict[str, float | int | str]:
        """As :meth:`ServerState.stats`, of all pools together."""
        figures = self._shown.stats()
        figures["over_rate"] = int(figures["over_rate"]) + self._over_rate
        return figures

    def figures(self) -> Figures:
        """As :meth:`ServerState.figures`, of all pools together."""
        return dataclasses.replace(self._shown.figures(), stats=self.stats())

    def snapshot(self) -> Snapshot:
        """As :meth:`ServerState.snapshot`: the trees of all pools, one after the other."""
        return self._shown.snapshot()

    def tell(self, events: Events) -> None:
        """As :meth:`ServerState.tell`: pages that can be found in any of the pools."""
        self._joint = Joint(events, len(self.states))
        for state, member in zip(self.states, self._joint.members, strict=True):
            state.tell(member)

    def tell_everything(self) -> None:
        """As :meth:`ServerState.tell_everything`."""
        self.finish()
        if self._joint is not None:
            self._joint.everything()

    def memory_bytes(self) -> int:
        """As :meth:`ServerState.memory_bytes`."""
        return sum(state.memory_bytes() for state in self.states)

    def check(self) -> None:
        """As :meth:`ServerState.check`; also that sessions and namespaces have no part that is another's."""
        for state in self.states:
            state.check()
        self._sessions.check()
        assert set(self._parts) == {session.number for session in self._sessions}, "sessions and their parts"
        for pool in range(len(self.states)):
            mine = [found[pool].number for found in self._parts.values()]
            assert len(mine) == len(set(mine)), "a part of two sessions"
        for (tenant, record), number in self._numbers.items():
            owner, space = self._spaces[number]
            assert owner == tenant, "whose a namespace is"
            for state, there in zip(self.states, space, strict=True):
                assert state.books.names.namespaces.get((tenant, record)) == there, "numbers of a namespace"
