"""What the layer over several pools knows: the states, the clients' sessions, and the numbers of their namespaces.

A session and a namespace have a number of the layer's, which clients are told, and one in each state. This module keeps which
belong together, and passes a message to a state in that state's numbers. Which states a message concerns is the business of
:mod:`maru_server.pool_engine_messages`, :mod:`maru_server.pool_operator_messages` and :mod:`maru_server.pool_sessions`; what is
stored where, the states alone know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from maru_core.protocol import Done, Error, ErrorCode, PoolName, Reply
from maru_server.config import StateConfig
from maru_server.requests import RefusedError
from maru_server.sessions import Session, Sessions
from maru_server.state import ServerState


class JointBooks:
    """Args: as of :class:`maru_server.pools.Pools`."""

    def __init__(self, states: Sequence[ServerState], *, incarnation: int, config: StateConfig) -> None:
        self.states = tuple(states)
        self.incarnation = incarnation
        self.config = config
        self.pool_names = [PoolName(state.books.pool_uri, state.books.geometry.pool_uuid) for state in states]
        self.sessions = Sessions(incarnation)
        self.parts: dict[int, tuple[Session, ...]] = {}  # of each session, its sessions in the states
        self.numbers: dict[tuple[str, bytes], int] = {}  # of namespaces, by tenant and record
        self.spaces: list[tuple[str, list[int | None]]] = []  # tenant, and number in each state, by number
        for pool, state in enumerate(states):
            for (tenant, record), number in state.books.names.namespaces.items():
                self.numbers_of(tenant, record)[pool] = number

    def numbers_of(self, tenant: str, record: bytes) -> list[int | None]:
        """The numbers that a namespace has in the states: of a new one, none yet."""
        number = self.numbers.get((tenant, record))
        if number is None:
            number = self.numbers[tenant, record] = len(self.spaces)
            self.spaces.append((tenant, [None] * len(self.states)))
        return self.spaces[number][1]

    def space(self, number: int, session: Session) -> list[int | None]:
        """The numbers that a namespace has in the states, if it is the session's to use."""
        known = 0 <= number < len(self.spaces)
        if not known or not (session.peer.operator or self.spaces[number][0] == session.peer.tenant):
            raise RefusedError(
                ErrorCode.UNKNOWN_NAMESPACE, f"namespace {number} is not known: open it again with its record"
            )
        return self.spaces[number][1]

    def part(self, session: int, pool: int) -> int | None:
        """The number that a session has in the state of one pool."""
        found = self.parts.get(session)
        return None if found is None else found[pool].number

    def ask(
        self, pool: int, message: Any, session: Session, now: float, namespace: int | None = None, **changes: Any
    ) -> Any:
        """The answer of one state to a message, in its own numbers."""
        changes["session"] = self.parts[session.number][pool].number
        if namespace is not None:
            changes["namespace"] = namespace
        return self.states[pool].handle(msgspec.structs.replace(message, **changes), now, session.peer)

    def everywhere(self, message: Any, session: Session, now: float) -> Reply:
        """Of all states that know the namespace, the sum of what they did."""
        count = 0
        for pool, number in enumerate(self.space(message.namespace, session)):
            if number is not None:
                reply = self.ask(pool, message, session, now, number)
                if isinstance(reply, Error):
                    return reply
                count += reply.count
        return Done(message.rid, self.incarnation, count)

    def check(self) -> None:
        """Sessions and namespaces have no part that is another's.

        Raises:
            AssertionError: naming what does not fit.
        """
        self.sessions.check()
        assert set(self.parts) == {session.number for session in self.sessions}, "sessions and their parts"
        for pool in range(len(self.states)):
            mine = [found[pool].number for found in self.parts.values()]
            assert len(mine) == len(set(mine)), "a part of two sessions"
        for (tenant, record), number in self.numbers.items():
            owner, space = self.spaces[number]
            assert owner == tenant, "whose a namespace is"
            for state, there in zip(self.states, space, strict=True):
                assert state.books.names.namespaces.get((tenant, record)) == there, "numbers of a namespace"
