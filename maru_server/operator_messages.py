"""What people ask for: look at the server, clear namespaces, pin, unpin and evict pages.

Pin, Unpin and Evict are for operators alone; Inspect and Clear do for everybody else what concerns their own tenant. The
command ``maru`` (:mod:`maru_server.operator`) is what sends these; it runs elsewhere and knows nothing of this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from maru_core.protocol import HASH_BYTES, Clear, Done, ErrorCode, Evict, Inspect, Pin, Reply, Unpin
from maru_server.books import Books
from maru_server.calls import Deferred
from maru_server.inspection import Inspector
from maru_server.reaches import pool_row
from maru_server.requests import Handler, RefusedError
from maru_server.sessions import Session
from maru_server.tree import PrefixTree

#: Most pages that one Evict message evicts: some ten milliseconds of the loop.
_EVICT_PAGES: Final = 4096


class OperatorMessages:
    """Their handlers. ``time`` is the server's own, ``now`` the caller's, both in seconds."""

    def __init__(self, books: Books, agents: Callable[[], int]) -> None:
        """
        Args:
            agents: how many there are.
        """
        self._incarnation = books.incarnation
        self._config = books.config
        self._trees = books.trees
        self._tree = books.tree
        self._wall_ns = books.wall_ns
        self._pages = books.pages
        self._holds = books.holds
        self._inspector = Inspector(
            books.incarnation,
            books.trees,
            books.names.components,
            books.sessions,
            books.names.records,
            books.holds,
            books.pages.pins,
            books.pages.tenants,
            lambda operator: pool_row(books, agents(), operator=operator),
        )
        self.handlers: dict[type, Handler] = {
            Inspect: self._inspect,
            Clear: self._clear,
            Pin: self._pin,
            Unpin: self._unpin,
            Evict: self._evict,
        }

    def _inspect(self, message: Inspect, session: Session, time: float, now: float) -> Reply | Deferred:
        return self._inspector.answer(message, session, time, self._wall_ns(now))

    def _clear(self, message: Clear, session: Session, time: float, now: float) -> Reply:
        if message.namespace is None:
            peer = session.peer
            trees = [tree for tree in self._trees.values() if peer.operator or tree.tenant == peer.tenant]
        else:
            trees = [self._tree(message.namespace, session)]
        count = sum(self._pages.clear(tree, time, time + self._config.quarantine_s) for tree in trees)
        for tree in trees:
            self._holds.removed(tree)
        return Done(message.rid, self._incarnation, count)

    def _pin(self, message: Pin, session: Session, time: float, now: float) -> Reply:
        tree = self._operated(message, session)
        return Done(message.rid, self._incarnation, self._pages.pins.pin(tree, message.page))

    def _unpin(self, message: Unpin, session: Session, time: float, now: float) -> Reply:
        tree = self._operated(message, session)
        return Done(message.rid, self._incarnation, self._pages.pins.unpin(tree, message.page))

    def _evict(self, message: Evict, session: Session, time: float, now: float) -> Reply:
        self._check_operator(message, session)
        if message.pages < 0:
            raise RefusedError(ErrorCode.INVALID, f"pages is {message.pages}: give how many are to go")
        wanted, now_ns = min(message.pages, _EVICT_PAGES), self._wall_ns(now)
        if message.namespace is None:
            count = self._pages.room.evict_any(wanted, now_ns)
        else:
            count = self._pages.room.evict_of(self._tree(message.namespace, session), wanted, now_ns)
        return Done(message.rid, self._incarnation, count)

    def _operated(self, message: Pin | Unpin, session: Session) -> PrefixTree:
        self._check_operator(message, session)
        if len(message.page) != HASH_BYTES:
            raise RefusedError(ErrorCode.INVALID, f"page has {len(message.page)} bytes: send {HASH_BYTES}")
        return self._tree(message.namespace, session)

    def _check_operator(self, message: Pin | Unpin | Evict, session: Session) -> None:
        if not session.peer.operator:
            raise RefusedError(
                ErrorCode.FORBIDDEN,
                f"{type(message).__name__} is for operators: list this client's key as one, or ask somebody who is",
            )
