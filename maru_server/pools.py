"""Several pools in one server: a layer between the service and one state for each pool, with what the service uses of a state.

Each pool has its own state, with directory, eviction, holds, pins and rebuild: none knows of the others. This layer has the
clients' sessions and the numbers of their namespaces, and says each message to the states that it concerns, in their numbers:

- **Sessions** are in all states at once. One whose part has ended in any of them is over; the client says Hello again, and has back
  what the others still know.
- **Placement** is by what the session says that it reaches. It gets nothing of other pools, and nothing at all before it has said it.
- **Slot numbers** carry the pool in their top bits, so that commits, releases and validations find their way, whatever is reached.
- **Holds**: the first rank's pool is that of all ranks of a request. Only the state of that pool keeps a decision.
- **Limits**: rates are kept here, for all pools together; reservations, quotas, pins and holds are bounded in each pool by itself, and
  shares are of that pool.

A server with one pool has none of this. This module is the front. Behind it:

- :mod:`maru_server.pool_books`: what the layer knows, and how a state is asked.
- :mod:`maru_server.pool_engine_messages`, :mod:`maru_server.pool_operator_messages`: the handlers, one for each message.
- :mod:`maru_server.placement`: which pool is meant; :mod:`maru_server.reaches`.
- :mod:`maru_server.pool_sessions`: sessions come, are heard, fall silent and go.
- :mod:`maru_server.pool_figures`: what is shown of all pools together; :mod:`maru_server.pool_events`: what is told of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from maru_core.process import ProcessIdentity
from maru_core.protocol import Error, ErrorCode, Goodbye, Hello, Reply, Request, Stats, StatsReply, Touch
from maru_server.calls import Deferred
from maru_server.config import StateConfig
from maru_server.events import Events
from maru_server.limits import Limits
from maru_server.metrics import Figures
from maru_server.overview import FOR_EVERYBODY
from maru_server.pool_books import JointBooks
from maru_server.pool_engine_messages import JointEngineMessages
from maru_server.pool_events import Joint
from maru_server.pool_figures import Shown
from maru_server.pool_operator_messages import JointOperatorMessages
from maru_server.pool_sessions import JointSessions
from maru_server.requests import Handler, RefusedError
from maru_server.sessions import LOCAL, Clock, Peer
from maru_server.state import ServerState
from maru_server.views import Snapshot

#: A rate that is none: the rates of clients are kept by the layer.
_NO_RATE: Final = 1e18


def config_of_member(config: StateConfig) -> StateConfig:
    """What the state of one of several pools is made with."""
    return dataclasses.replace(config, session_rate=_NO_RATE, session_page_rate=_NO_RATE)


class Member:
    """One pool as its own memory's keeper sees it; sessions are the layer's."""

    def __init__(self, books: JointBooks, number: int) -> None:
        self._books = books
        self._number = number
        self.state = books.states[number]

    def extents_ready(self, count: int, now: float) -> None:
        self.state.extents_ready(count, now)

    def wanted_extents(self, now: float) -> int:
        return self.state.wanted_extents(now)

    def reserved_slots(self, session: int) -> list[tuple[npt.NDArray[np.uint64], int]]:
        """As :meth:`ServerState.reserved_slots`, of the part of this pool."""
        part = self._books.part(session, self._number)
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
        #: What the layer knows. Look, as tests do; only the parts that are named above change anything in it.
        self.books = books = JointBooks(states, incarnation=incarnation, config=config)
        self.states = books.states
        self.members = tuple(Member(books, number) for number in range(len(states)))
        self._incarnation = incarnation
        self._clock = Clock(now, gap_s=config.lease_s / 2)
        self._limits = Limits(messages_per_s=config.session_rate, pages_per_s=config.session_page_rate)
        self._sessions = books.sessions
        self._over_rate = 0
        self._joint: Joint | None = None
        self._clients = clients = JointSessions(books, self._clock.time(now))
        self._whole, self._heard = clients.whole, clients.heard
        self._shown = Shown(books)
        self._handlers: dict[type, Handler] = {
            **JointEngineMessages(books).handlers,
            **JointOperatorMessages(books, self._shown).handlers,
            **clients.handlers,
        }

    # ------------------------------------------------------------ messages and time

    def finish(self) -> None:
        """As :meth:`ServerState.finish`."""
        for state in self.states:
            state.finish()

    def answer(self, data: bytes, now: float, peer: Peer = LOCAL) -> bytes | None:
        """As :meth:`ServerState.answer`: there is no shorter way where there are several pools."""
        return None

    def handle(self, message: Request, now: float, peer: Peer = LOCAL) -> Reply | Deferred | None:
        """As :meth:`ServerState.handle`."""
        self.finish()  # of all: where something goes is decided by the books of each
        time = self._clock.time(now)
        if isinstance(message, (Hello, Stats)):
            if peer != LOCAL and not self._limits.admits(self._sessions.account(peer), message, time):
                self._over_rate += 1
                return Error(message.rid, self._incarnation, ErrorCode.RATE, self._limits.too_fast())
            if isinstance(message, Hello):
                return self._clients.hello(message, time, now, peer)
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
        self._clients.sweep(time, now)
        if failed is not None:
            raise failed

    # ------------------------------------------------------------ what the service tells and asks

    def silent_sessions(self) -> list[tuple[int, ProcessIdentity]]:
        """As :meth:`ServerState.silent_sessions`."""
        return self._clients.silent_sessions()

    def process_gone(self, session: int, now: float) -> None:
        """As :meth:`ServerState.process_gone`."""
        self._clients.process_gone(session, now)

    def keep_peers(self, peers: Container[Peer], now: float) -> int:
        """As :meth:`ServerState.keep_peers`."""
        return self._clients.keep_peers(peers, now)

    def note_turned_away(self, unlisted: int, failed: int) -> None:
        """As :meth:`ServerState.note_turned_away`; they concern no pool."""
        self.states[0].note_turned_away(unlisted, failed)

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
        self.books.check()
