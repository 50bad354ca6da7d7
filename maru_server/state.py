"""The metadata server without its sockets: one object, one method per message, no clock, thread or randomness.

``handle(message, now)`` checks a message, does it, and answers; a message that is refused changed nothing. ``tick(now)``
does what is due, a bounded amount at a time. ``now`` is any monotonic time in seconds. Whoever calls these in the same
order with the same arguments gets the same answers.

This module is the front. Behind it:

- :mod:`maru_server.books`: what the server knows, and how that is read back from the pool; :mod:`maru_server.config`.
- :mod:`maru_server.engine_messages`, :mod:`maru_server.operator_messages`: the handlers, one for each message.
- :mod:`maru_server.agents`: who reaches the pool for clients that cannot map it; :mod:`maru_server.reaches`.
- :mod:`maru_server.leases`: sessions come, are heard, fall silent and go.
- :mod:`maru_server.growth`: how many extents there are and should be.
- :mod:`maru_server.upkeep`: what is due.
- :mod:`maru_server.overview`: figures, and whether everything fits together.
"""

from __future__ import annotations

from collections.abc import Callable, Container

import numpy as np
import numpy.typing as npt

from maru_core.process import ProcessIdentity
from maru_core.protocol import Error, ErrorCode, Goodbye, Hello, Match, Reply, Request, Stats, StatsReply, Touch
from maru_server.agents import AgentMessages
from maru_server.books import open_books
from maru_server.calls import Deferred
from maru_server.config import StateConfig
from maru_server.directory import PoolDirectory
from maru_server.engine_messages import EngineMessages
from maru_server.events import Events, Topic
from maru_server.growth import Growth
from maru_server.leases import Leases
from maru_server.metrics import Figures
from maru_server.operator_messages import OperatorMessages
from maru_server.overview import FOR_EVERYBODY, Overview
from maru_server.plain_store import STORE
from maru_server.requests import RefusedError
from maru_server.sessions import LOCAL, Peer
from maru_server.upkeep import Upkeep
from maru_server.views import Snapshot, snapshot


class ServerState:
    """A server without its sockets; see the module.

    Args:
        directory: the pool; what it holds is found again.
        incarnation: of this server on this pool, told to clients.
        pool_uri: as clients are told.
        now: monotonic time, seconds; ``now + wall_offset`` is the time of day.
        before_writing: called before the directory is changed for the first times; raises where it must not be any more.
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
        before_writing: Callable[[], None] = lambda: None,
    ) -> None:
        #: What the server knows. Look, as tests do; only the parts that are named above change anything in it.
        self.books = books = open_books(
            directory,
            incarnation=incarnation,
            pool_uri=pool_uri,
            config=config,
            now=now,
            wall_offset=wall_offset,
            before_writing=before_writing,
        )
        self._incarnation = incarnation
        self._clock = books.clock
        self._sessions = books.sessions
        self._pages = books.pages
        self._limits = books.limits
        self._growth = Growth(
            books.geometry, books.slabs, books.pages, growth_s=config.growth_s, time=books.clock.time(now)
        )
        self._leases = Leases(books)
        self._upkeep = Upkeep(books, self._leases, self._growth)
        self._overview = Overview(books)
        self._agents = agents = AgentMessages(books)
        self._engine = EngineMessages(books, self._growth)
        self._handlers = {
            **self._engine.handlers,
            **OperatorMessages(books, lambda: len(agents.present())).handlers,
            **agents.handlers,
            **self._leases.handlers,
        }

    # ------------------------------------------------------------ messages and time

    def finish(self) -> None:
        """Do what :meth:`handle` left for when the reply is on its way. Every other method does it first."""
        self._pages.finish()

    def answer(self, data: bytes, now: float, peer: Peer = LOCAL) -> bytes | None:
        """The packed reply to a packed request for which there is a shorter way; None for every other, which is :meth:`handle`'s."""
        self._pages.finish()
        if data.startswith(STORE):
            return self._engine.plain_stores.answer(data, self._clock.time(now), now, peer)
        return self._engine.plain_matches.answer(data, self._clock.time(now), peer)

    def handle(self, message: Request, now: float, peer: Peer = LOCAL) -> Reply | Deferred | None:
        """Do what a client asks. Raises for no message that was decoded.

        Args:
            peer: who sent it, as its connection proves.
        """
        self.finish()
        time = self._clock.time(now)
        if isinstance(message, (Hello, Stats)):
            if peer != LOCAL and not self._limits.admits(self._sessions.account(peer), message, time):
                self._pages.counts["over_rate"] += 1
                return Error(message.rid, self._incarnation, ErrorCode.RATE, self._limits.too_fast())
            if isinstance(message, Hello):
                return self._leases.hello(message, time, peer)
            figures = self.stats()
            if not peer.operator:
                figures = {name: figures[name] for name in FOR_EVERYBODY}
            return StatsReply(message.rid, self._incarnation, figures)
        session = self._sessions.get(message.session)
        try:
            # Nearly always the very same object: its comparison is asked only where it is not.
            if session is None or (session.peer is not peer and session.peer != peer):
                raise RefusedError(
                    ErrorCode.UNKNOWN_SESSION, f"session {message.session} is not known: say Hello again"
                )
            session.heard = time
            session.silent = False
            if not self._limits.admits(session.account, message, time):
                self._pages.counts["over_rate"] += 1
                raise RefusedError(ErrorCode.RATE, self._limits.too_fast())
            handler = self._handlers.get(type(message))
            if handler is None:
                raise RefusedError(ErrorCode.INVALID, f"{type(message).__name__} is not served here")
            return handler(message, session, time, now)
        except RefusedError as refusal:
            if isinstance(message, (Touch, Goodbye)):
                return None
            return Error(message.rid, self._incarnation, refusal.code, str(refusal))

    def look(self, message: Match, namespace: int) -> int:
        """How many pages a match, which has been checked, would find in a namespace here; nothing of it is noted."""
        self.finish()
        return self._engine.look(message, namespace)

    def agents(self) -> int:
        """How many serve the pool."""
        return len(self._agents.present())

    def tick(self, now: float) -> None:
        """Do what is due; see :mod:`maru_server.upkeep`."""
        self.finish()
        self._upkeep.tick(now)

    # ------------------------------------------------------------ what the service tells and asks

    def extents_ready(self, count: int, now: float) -> None:
        """Extents ``[0, count)`` have their memory and may be used."""
        self._growth.extents_ready(count, self._clock.time(now))

    def wanted_extents(self, now: float) -> int:
        """How many extents should be ready: those in use, and some ahead."""
        self._clock.time(now)
        return self._growth.wanted()

    def silent_sessions(self) -> list[tuple[int, ProcessIdentity]]:
        """Sessions that missed a heartbeat: the service may know whether their processes live."""
        return self._leases.silent(self._clock.time(self._clock.last))

    def reserved_slots(self, session: int) -> list[tuple[npt.NDArray[np.uint64], int]]:
        """Where a session may be writing, or may have been when it ended: offsets in the pool, and bytes of each slot there."""
        return self._leases.reserved_slots(session)

    def process_gone(self, session: int, now: float) -> None:
        """The client's process is dead for certain."""
        self.finish()
        self._leases.process_gone(session, self._clock.time(now))

    def keep_peers(self, peers: Container[Peer], now: float) -> int:
        """End the sessions of all peers but these; how many there were."""
        self.finish()
        return self._leases.keep_peers(peers, self._clock.time(now))

    def note_turned_away(self, unlisted: int, failed: int) -> None:
        """How many connections never became one, since the start."""
        self._pages.counts["clients_unlisted"] = unlisted
        self._pages.counts["handshakes_failed"] = failed

    # ------------------------------------------------------------ what others see

    def memory_bytes(self) -> int:
        """Memory of the tables kept here, bytes."""
        return self._overview.memory_bytes()

    def stats(self) -> dict[str, float | int | str]:
        """Figures for people and tests; counts are since the start."""
        self.finish()
        return self._overview.stats()

    def figures(self) -> Figures:
        """A copy of all that there is to show, in a time that does not depend on the number of pages."""
        self.finish()
        return self._overview.figures(len(self._agents.present()))

    def snapshot(self) -> Snapshot:
        """The shape of all trees now, to be looked at outside the loop."""
        self.finish()
        books = self.books
        return snapshot(books.trees.values(), books.names.components, books.wall_ns(self._clock.last))

    def tell(self, events: Events) -> None:
        """Have ``events`` note from now on which pages come and go, beginning with those that are there."""
        self.finish()
        books = self.books
        topics = {number: Topic.of(record, tenant) for (tenant, record), number in books.names.namespaces.items()}
        events.begin(books.trees, books.names.components, topics)
        self._pages.events = events

    def tell_everything(self) -> None:
        """Have all that is there told again."""
        self.finish()
        if self._pages.events is not None:
            self._pages.events.everything()

    def check(self) -> None:
        """Compare trees, slots, reservations, sessions and the pool with each other.

        Raises:
            AssertionError: naming what does not fit.
        """
        self.finish()
        self._overview.check()
