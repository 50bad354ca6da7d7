"""What engines ask several pools for: open a namespace, find, hold, reserve, commit, release, validate, touch and delete pages.

One method per message. Each decides which states it concerns (:mod:`maru_server.placement`), asks them, and makes one answer of
theirs. What a state checks, it checks itself; checked here is what is needed to choose one, and a message that is refused changed
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from maru_core.protocol import (
    NO_SLOT,
    Commit,
    Committed,
    Delete,
    Done,
    Error,
    Hold,
    Located,
    Match,
    MissReason,
    NamespaceOpened,
    OpenNamespace,
    Release,
    Reply,
    Reserve,
    Reserved,
    ReserveStatus,
    Store,
    Stored,
    StoreStatus,
    Touch,
    Unhold,
    Validate,
    Validated,
)
from maru_server.placement import SLOTS_MAX, find, parts, place, raised
from maru_server.pool_books import JointBooks
from maru_server.reaches import reached
from maru_server.requests import (
    Handler,
    check_chain,
    check_match,
    check_request,
    check_reserve,
    check_store,
    count_hashes,
    split_hashes,
)
from maru_server.sessions import Session


class JointEngineMessages:
    """Their handlers. ``time`` is the layer's own, ``now`` the caller's, both in seconds."""

    def __init__(self, books: JointBooks) -> None:
        # Each at hand in one step: every message goes this way.
        self._incarnation = books.incarnation
        self._states = states = books.states
        self._parts = books.parts
        self._numbers_of = books.numbers_of
        self._numbers = books.numbers
        self._space = books.space
        self._ask = books.ask
        self._everywhere = books.everywhere
        self._slot_counts = [state.books.geometry.slot_count for state in states]
        assert max(self._slot_counts) <= SLOTS_MAX
        self._components = min(state.books.geometry.component_capacity for state in states)
        self._extent_bytes = max(state.books.geometry.extent_bytes for state in states)
        self._largest: dict[int, int] = {}  # bytes of objects that were to be stored in this life, by number
        self.handlers: dict[type, Handler] = {
            OpenNamespace: self._open_namespace,
            Match: self._match,
            Unhold: self._unhold,
            Reserve: self._reserve,
            Store: self._store,
            Commit: self._commit,
            Release: self._release,
            Validate: self._validate,
            Touch: self._touch,
            Delete: self._delete,
        }

    def _open_namespace(self, message: OpenNamespace, session: Session, time: float, now: float) -> Reply:
        refusal: Reply | None = None
        opened = False
        for pool in range(len(self._states)):
            reply = self._ask(pool, message, session, now)
            if isinstance(reply, NamespaceOpened):
                self._numbers_of(session.peer.tenant, message.record)[pool] = reply.namespace
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
        pool = find(message, self._states, space, mine)
        return self._told(self._ask(pool, message, session, now, space[pool]), pool)

    def _decided(self, message: Match, hold: Hold, space: Sequence[int | None]) -> int | None:
        """The pool that an earlier rank of the request was told of."""
        for pool, (state, number) in enumerate(zip(self._states, space, strict=True)):
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
        books, number = self._states[pool].books, space[pool]
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
        if message.spares:
            # Nothing is granted ahead: the next store may belong into another pool.
            message = msgspec.structs.replace(message, spares=b"")
        space = self._space(message.namespace, session)
        check_reserve(message, self._extent_bytes)
        check_chain(message, keys)
        largest = self._largest[message.namespace] = max(message.nbytes, self._largest.get(message.namespace, 0))
        pool = place(message, self._states, space, self._reached(session, space), session.ways, largest)
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

    def _store(self, message: Store, session: Session, time: float, now: float) -> Reply:
        """Nothing was granted ahead."""
        check_store(message)
        self._space(message.namespace, session)
        check_reserve(message, self._extent_bytes)
        return Stored(message.rid, self._incarnation, StoreStatus.GONE)

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
