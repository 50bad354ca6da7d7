"""The sessions of clients with several pools: each is in all states at once, and over when its part in any of them has ended.

When a session falls silent and is to end, and what becomes of what it had reserved, each state decides for itself
(:mod:`maru_server.leases`). Here is only what follows for the whole of it.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from maru_core.process import ProcessIdentity
from maru_core.protocol import PROTOCOL_VERSION, Done, Error, Goodbye, Heartbeat, Hello, Reaches, Reply, Welcome
from maru_server.pool_books import JointBooks
from maru_server.reaches import NONE, check_ways
from maru_server.requests import Handler
from maru_server.sessions import Peer, Session
from maru_server.state import ServerState

#: How often ended sessions are cleared away, in parts of the lease.
_SWEEP: Final = 8


class JointSessions:
    """What the layer does about who is connected. ``time`` is its own, ``now`` the caller's, both in seconds."""

    def __init__(self, books: JointBooks, time: float) -> None:
        self._config = books.config
        self._incarnation = books.incarnation
        self._states = books.states
        self._pool_names = books.pool_names
        self._sessions = books.sessions
        self._parts = books.parts
        self._spaces = books.spaces
        self._ask = books.ask
        self._swept = time
        self.handlers: dict[type, Handler] = {
            Reaches: self._reaches,
            Heartbeat: self._heartbeat,
            Goodbye: self._goodbye,
        }

    # ------------------------------------------------------------ they come

    def hello(self, message: Hello, time: float, now: float, peer: Peer) -> Reply:
        """The session of a client: in all states or, where one turns it away, in none."""
        found: list[Session] = []
        fresh: list[bool] = []
        for state in self._states:
            fresh.append(state.books.sessions.of_client(message.client_id) is None)
            reply = state.handle(message, now, peer)
            part = state.books.sessions.get(reply.session) if isinstance(reply, Welcome) else None
            if part is None:
                for earlier, mine, new in zip(self._states, found, fresh, strict=False):
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
        self.heard(session, time, now)
        return Welcome(
            PROTOCOL_VERSION,
            message.rid,
            self._incarnation,
            session.number,
            self._pool_names[0].uri,
            self._pool_names[0].uuid,
            self._config.heartbeat_s,
            self._config.lease_s,
            self._pool_names,
        )

    # ------------------------------------------------------------ they speak

    def whole(self, session: Session) -> bool:
        """Whether every state still knows it."""
        return all(
            state.books.sessions.get(part.number) is part
            for state, part in zip(self._states, self._parts[session.number], strict=True)
        )

    def heard(self, session: Session, time: float, now: float) -> None:
        session.heard, session.silent = time, False
        for state, part in zip(self._states, self._parts[session.number], strict=True):
            part.heard, part.silent = state.books.clock.time(now), False

    def _reaches(self, message: Reaches, session: Session, time: float, now: float) -> Reply:
        session.ways = check_ways(message, len(self._states))
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

    # ------------------------------------------------------------ they fall silent and go

    def silent_sessions(self) -> list[tuple[int, ProcessIdentity]]:
        """As :meth:`ServerState.silent_sessions`."""
        overdue = [{number for number, _ in state.silent_sessions()} for state in self._states]
        return [
            (session.number, session.identity)
            for session in self._sessions
            if any(part.number in late for part, late in zip(self._parts[session.number], overdue, strict=True))
        ]

    def sweep(self, time: float, now: float) -> None:
        """Sessions that a state has ended are over. What they may still be writing stays until its own time."""
        if time < self._swept + self._config.lease_s / _SWEEP:
            return
        self._swept = time
        for session in list(self._sessions):
            there = self._there(session)
            session.silent = any(part.silent for _, part in there)
            if len(there) == len(self._states):
                continue
            kept = False
            for state, part in there:
                if part.reservations:
                    kept = True
                else:
                    state.handle(Goodbye(part.number), now, part.peer)
            if not kept:
                self._forget(session)

    def _goodbye(self, message: Goodbye, session: Session, time: float, now: float) -> None:
        for pool in range(len(self._states)):
            self._ask(pool, message, session, now)
        self._forget(session)

    def process_gone(self, session: int, now: float) -> None:
        """As :meth:`ServerState.process_gone`."""
        found = self._sessions.get(session)
        if found is not None:
            for state, part in self._there(found):
                state.process_gone(part.number, now)
            self._forget(found)

    def keep_peers(self, peers: Container[Peer], now: float) -> int:
        """As :meth:`ServerState.keep_peers`."""
        for state in self._states:
            state.keep_peers(peers, now)
        ended = [session for session in self._sessions if session.peer not in peers]
        for session in ended:
            self._forget(session)
        self._sessions.keep_accounts(peers)
        return len(ended)

    def _there(self, session: Session) -> list[tuple[ServerState, Session]]:
        """The parts that have not ended."""
        return [
            (state, part)
            for state, part in zip(self._states, self._parts[session.number], strict=True)
            if state.books.sessions.get(part.number) is part
        ]

    def _forget(self, session: Session) -> None:
        self._sessions.remove(session)
        del self._parts[session.number]
