"""What people ask several pools for: look at them, clear namespaces, pin, unpin and evict pages; and what concerns one pool by name.

Who may do what, each state says itself. Rows of all pools are put together in :mod:`maru_server.pool_figures`.
"""

from __future__ import annotations

from collections.abc import Sequence

from maru_core.protocol import (
    HASH_BYTES,
    Agents,
    Announce,
    Clear,
    Done,
    Error,
    ErrorCode,
    Evict,
    Inspect,
    Pin,
    Reply,
    Unpin,
)
from maru_server.calls import Deferred
from maru_server.placement import stores
from maru_server.pool_books import JointBooks
from maru_server.pool_figures import Shown
from maru_server.requests import Handler, RefusedError
from maru_server.sessions import Session
from maru_server.tree import PrefixTree


class JointOperatorMessages:
    """Their handlers. ``time`` is the layer's own, ``now`` the caller's, both in seconds."""

    def __init__(self, books: JointBooks, shown: Shown) -> None:
        self._incarnation = books.incarnation
        self._states = books.states
        self._pool_names = books.pool_names
        self._space = books.space
        self._ask = books.ask
        self._everywhere = books.everywhere
        self._shown = shown
        self.handlers: dict[type, Handler] = {
            Inspect: self._inspect,
            Clear: self._clear,
            Pin: self._pin,
            Unpin: self._unpin,
            Evict: self._evict,
            Announce: self._to_named_pool,
            Agents: self._to_named_pool,
        }

    def _inspect(self, message: Inspect, session: Session, time: float, now: float) -> Reply | Deferred:
        if message.namespace is not None:
            self._space(message.namespace, session)
        return self._shown.answer(
            message, session, time, lambda pool, asked, number: self._ask(pool, asked, session, now, number)
        )

    def _clear(self, message: Clear, session: Session, time: float, now: float) -> Reply:
        if message.namespace is not None:
            return self._everywhere(message, session, now)
        count = sum(self._ask(pool, message, session, now).count for pool in range(len(self._states)))
        return Done(message.rid, self._incarnation, count)

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
            before = (self._tree(pool, space).number, message.page) in self._states[pool].books.pages.pins
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

    def _unpin(self, message: Unpin, session: Session, time: float, now: float) -> Reply:
        return self._everywhere(message, session, now)

    def _evict(self, message: Evict, session: Session, time: float, now: float) -> Reply:
        """From the fullest pool on."""
        space = None if message.namespace is None else self._space(message.namespace, session)
        count = 0
        for pool in sorted(range(len(self._states)), key=lambda pool: -self._states[pool].stats()["used_share"]):  # type: ignore[operator]
            if space is not None and space[pool] is None:
                continue
            number = None if space is None else space[pool]
            reply = self._ask(pool, message, session, now, number, pages=message.pages - count)
            if isinstance(reply, Error):
                return reply
            count += reply.count
        return Done(message.rid, self._incarnation, count)

    def _tree(self, pool: int, space: Sequence[int | None]) -> PrefixTree:
        number = space[pool]
        assert number is not None
        return self._states[pool].books.trees[number]

    def _to_named_pool(self, message: Announce | Agents, session: Session, time: float, now: float) -> Reply:
        for pool, name in enumerate(self._pool_names):
            if message.pool == name.uuid:
                reply: Reply = self._ask(pool, message, session, now)
                return reply
        raise RefusedError(
            ErrorCode.INVALID,
            f"this server has {len(self._pool_names)} pools, and {message.pool[:16].hex() or 'none'} is not the UUID of one: name one "
            "of the welcome's (a client of an older release cannot)",
        )
