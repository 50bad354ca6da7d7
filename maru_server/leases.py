"""Leases: sessions come, are heard, fall silent and go, and so does what they had reserved.

A session that says nothing for longer than its lease may still be writing. So its reservations go to quarantine, and their
slots come back when it says so, when its process is known to be dead, or after a long grace: never while somebody may be
writing. Whether a process lives is found out by the service, which calls :meth:`Leases.process_gone`.
"""

from __future__ import annotations

from collections.abc import Container
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt

from maru_core.process import ProcessIdentity
from maru_core.protocol import PROTOCOL_VERSION, Done, Error, ErrorCode, Goodbye, Heartbeat, Hello, Reply, Welcome
from maru_server.books import Books
from maru_server.reaches import RDMA
from maru_server.reports import add_reported
from maru_server.requests import Handler, RefusedError, check_hello
from maru_server.sessions import LOCAL, Peer, Session

#: Most reservations of one session, and of all, that one call of :meth:`Leases.expire` ends.
_RESERVATIONS: Final = 256


class Leases:
    """What a server does about who is connected. Times are its own (see :class:`maru_server.sessions.Clock`)."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._config = books.config
        self._incarnation = books.incarnation
        self._sessions = books.sessions
        self._reservations = books.reservations
        self._pages = books.pages
        self._trees = books.trees
        self._holds = books.holds
        self._diary = books.diary
        self.handlers: dict[type, Handler] = {Heartbeat: self._heartbeat, Goodbye: self._goodbye}

    # ------------------------------------------------------------ they come

    def hello(self, message: Hello, time: float, peer: Peer) -> Reply:
        """The session of a client, a new one where it has none yet."""
        try:
            check_hello(message)
            session = self._session_of(message, time, peer)
        except RefusedError as refusal:
            return Error(message.rid, self._incarnation, refusal.code, str(refusal))
        session.heard = time
        session.silent = False
        return Welcome(
            PROTOCOL_VERSION,
            message.rid,
            self._incarnation,
            session.number,
            self._books.pool_uri,
            self._books.geometry.pool_uuid,
            self._config.heartbeat_s,
            self._config.lease_s,
        )

    def _session_of(self, message: Hello, time: float, peer: Peer) -> Session:
        # A repeated Hello (its reply was lost) is the same client, which may be writing into what it has.
        session = self._sessions.of_client(message.client_id)
        if session is not None and session.peer != peer:
            raise RefusedError(
                ErrorCode.FORBIDDEN, "this client_id belongs to a client with another key: send 16 random bytes"
            )
        if session is None:
            if len(self._sessions) >= self._config.max_sessions and not self._make_session_room():
                raise RefusedError(
                    ErrorCode.LIMIT,
                    f"{len(self._sessions)} clients are connected, as many as allowed: end some, or have the server started with a "
                    "higher --max-sessions",
                )
            if peer != LOCAL:
                self._check_tenant_sessions(peer.tenant)
            identity = ProcessIdentity(message.pid, message.pid_start, message.pid_ns, message.boot_id, message.host)
            session = self._sessions.add(message.client_id, message.name, identity, time, peer)
            self._reservations.adopt(session)
            self._diary.came(session)
        return session

    def _check_tenant_sessions(self, tenant: str) -> None:
        """No tenant takes all sessions there may be."""
        most = self._config.max_tenant_sessions
        if most is None:
            most = max(1, self._config.max_sessions // 2)
        theirs = sum(session.peer.tenant == tenant for session in self._sessions)
        if theirs >= most and not self._make_session_room(tenant):
            raise RefusedError(
                ErrorCode.LIMIT,
                f"{theirs} clients of tenant {tenant!r} are connected, as many as one may have: end some, or have the server started "
                "with a higher --max-tenant-sessions",
            )

    def _make_session_room(self, tenant: str | None = None) -> bool:
        """End the session (of one tenant, or of all) that is silent longest, if any holds nothing."""
        idle = [
            session
            for session in self._sessions
            if session.silent and not session.reservations and tenant in (None, session.peer.tenant)
        ]
        if idle:
            self._remove_session(min(idle, key=lambda session: session.heard))
        return bool(idle)

    # ------------------------------------------------------------ they speak

    def _heartbeat(self, message: Heartbeat, session: Session, time: float, now: float) -> Reply:
        tree = self._trees.get(message.namespace) if message.namespace is not None else None
        if tree is not None and message.counts and (session.peer.operator or tree.tenant == session.peer.tenant):
            add_reported(session.reported, tree.number, message.counts, tree.counts, self._pages.counts)
        return Done(message.rid, self._incarnation)

    def _goodbye(self, message: Goodbye, session: Session, time: float, now: float) -> None:
        self.end(session)

    # ------------------------------------------------------------ they fall silent

    def expire(self, time: float) -> None:
        """Do what has become due; a bounded part of it."""
        self._expire_sessions(time)
        self._expire_reservations(time)

    def _expire_sessions(self, time: float) -> None:
        config = self._config
        for session in list(self._sessions):
            silent_s = time - session.heard
            if silent_s <= config.lease_s:
                continue
            session.silent = True
            live = [reservation for reservation in session.reservations.values() if reservation.page is not None]
            for reservation in live[:_RESERVATIONS]:
                self._pages.quarantine(reservation, time, time + config.quarantine_s)
            if not session.reservations and silent_s > config.lease_s + config.quarantine_s:
                self._remove_session(session)

    def _expire_reservations(self, time: float) -> None:
        for reservation in list(islice(self._reservations.live.values(), _RESERVATIONS)):
            if reservation.deadline > time:
                break
            # Its holder speaks and does not commit: the answer that told it of these slots was lost, most likely.
            self._pages.quarantine(reservation, time, time + self._config.quarantine_s)
        for reservation in list(islice(self._reservations.quarantined.values(), _RESERVATIONS)):
            if reservation.deadline <= time:
                self._pages.end(reservation)

    def silent(self, time: float) -> list[tuple[int, ProcessIdentity]]:
        """Sessions that missed a heartbeat."""
        overdue = 1.5 * self._config.heartbeat_s
        return [(session.number, session.identity) for session in self._sessions if time - session.heard > overdue]

    # ------------------------------------------------------------ they go

    def reserved_slots(self, number: int) -> list[tuple[npt.NDArray[np.uint64], int]]:
        """The slots that a session has reserved, by their size: offsets in the pool, bytes."""
        found = self._sessions.get(number)
        mine = [] if found is None else [reservation.slots for reservation in found.reservations.values()]
        slots = np.concatenate([np.empty(0, np.uint32), *mine])
        directory = self._books.directory
        sizes = directory.extents[slots // np.uint32(directory.geometry.slots_per_extent)]
        return [(directory.offsets(slots[sizes == size]), size) for size in np.unique(sizes).tolist()]

    def process_gone(self, number: int, time: float) -> None:
        """The client's process is dead for certain. What it wrote through agents may still be on its way, in its kernel or its NIC."""
        found = self._sessions.get(number)
        if found is None:
            return
        if any(way.way == RDMA for way in found.ways):
            self._abandon(found, time)
            return
        for reservation in list(found.reservations.values()):
            self._pages.end(reservation)
        self.end(found)

    def keep_peers(self, peers: Container[Peer], time: float) -> int:
        """End the sessions of all peers but these; how many there were.

        Nothing stops those clients from writing on into what they had reserved: it goes to quarantine."""
        ended = [session for session in self._sessions if session.peer not in peers]
        for session in ended:
            self._abandon(session, time)
        self._sessions.keep_accounts(peers)
        return len(ended)

    def _abandon(self, session: Session, time: float) -> None:
        """The session is over, and what it had reserved may be written all the same, for as long as the quarantine lasts."""
        for reservation in list(session.reservations.values()):
            if reservation.page is not None:
                self._pages.quarantine(reservation, time, time + self._config.quarantine_s)
        self._reservations.disown(session)
        self._remove_session(session)

    def end(self, session: Session) -> None:
        """The client writes no more of what this server gave it; it need not know of what a former one did."""
        for reservation in list(session.reservations.values()):
            if not reservation.owner:
                self._pages.end(reservation)
        self._reservations.disown(session)
        self._remove_session(session)

    def _remove_session(self, session: Session) -> None:
        self._sessions.remove(session)
        self._holds.session_ended(session.number)
        self._diary.went(session)
