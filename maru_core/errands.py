"""What a session's keeper carries to the server besides heartbeats: touches, and the settling of what found no answer.

A call whose time limit has passed leaves something behind on the server: slots that were reserved and nobody knows of, or a
commit of which nobody knows whether it arrived. Slots of a reserve that was answered too late are given back; commits and
releases are repeated, both being idempotent. All of it only within the life it belongs to.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import msgspec
import zmq

from maru_core import protocol
from maru_core.protocol import (
    HASH_BYTES,
    MAX_BATCH,
    Commit,
    Release,
    Request,
    Reserve,
    Reserved,
    ReserveStatus,
    Store,
    Stored,
    Touch,
    Welcome,
)
from maru_core.sockets import NoAnswerError, Socket, SocketPool, exchange, read_reply

#: Calls of touch() that may wait for the keeper; the oldest go first.
TOUCH_BACKLOG: Final = 256
#: Requests without an answer that are settled; more than these are left to the session's end.
UNSETTLED_MAX: Final = 256
#: How long one attempt to settle may take, seconds.
SETTLE_WAIT_S: Final = 1.0


class Life(NamedTuple):
    """One registration with one run of the server. Replaced as a whole."""

    epoch: int
    session: int
    incarnation: int
    welcome: Welcome


class Errands:
    """Queues that any thread fills and the keeper's thread empties."""

    def __init__(self, sockets: SocketPool, rids: Iterator[int]) -> None:
        self._sockets = sockets
        self._rids = rids
        self._touches: collections.deque[tuple[int, int, bytes]] = collections.deque(maxlen=TOUCH_BACKLOG)
        self._late: collections.deque[tuple[Life, Socket]] = collections.deque()
        self._dropped = False
        self._unsettled: collections.deque[tuple[Life, Commit | Release]] = collections.deque(maxlen=UNSETTLED_MAX)

    # ------------------------------------------------------------ any thread

    def touch(self, epoch: int, namespace: int, hashes: bytes) -> bool:
        """Queue a note that pages were used; True if the queue was empty."""
        first = not self._touches
        self._touches.append((epoch, namespace, hashes))
        return first

    def give_back(self, life: Life, slots: bytes, generations: bytes) -> None:
        """Have slots returned that are not written any more."""
        self._unsettled.append((life, Release(0, life.session, slots, generations)))

    def unanswered(self, life: Life, request: Request, socket: Socket) -> None:
        """Take over a request that found no answer, and the socket where one may still come."""
        if isinstance(request, Reserve | Store) and len(self._late) < UNSETTLED_MAX:
            self._late.append((life, socket))
            if self._dropped:
                # Whoever comes after drop() emptied the list empties it again.
                self.drop()
            return
        self._sockets.discard(socket)
        if isinstance(request, Commit | Release):
            self._unsettled.append((life, request))

    # ------------------------------------------------------------ the keeper's thread

    @property
    def touched(self) -> bool:
        return bool(self._touches)

    @property
    def waiting(self) -> bool:
        """Whether there is something to look for that wakes nobody when it comes."""
        return bool(self._late)

    @property
    def settled(self) -> bool:
        return not self._late and not self._unsettled

    def run(self, life: Life, socket: Socket, given_up: Callable[[], bool]) -> bool:
        """Do what can be done now on the keeper's socket. False if the server no longer answers there."""
        self._send_touches(life, socket)
        self._read_late(life)
        return self._settle(life, socket, given_up)

    def drop(self) -> None:
        """The end: close what waits."""
        self._dropped = True
        while True:
            try:
                _, socket = self._late.popleft()
            except IndexError:
                return
            self._sockets.discard(socket)

    def _send_touches(self, life: Life, socket: Socket) -> None:
        gathered: dict[int, list[bytes]] = {}
        while self._touches:
            epoch, namespace, hashes = self._touches.popleft()
            if epoch == life.epoch:
                gathered.setdefault(namespace, []).append(hashes)
        step = MAX_BATCH * HASH_BYTES
        for namespace, parts in gathered.items():
            joined = b"".join(parts)
            for start in range(0, len(joined), step):
                message = Touch(life.session, namespace, joined[start : start + step])
                # A note that cannot be sent at once is not worth waiting for.
                with contextlib.suppress(zmq.ZMQError):
                    socket.send(protocol.encode(message), zmq.DONTWAIT)

    def _read_late(self, life: Life) -> None:
        for _ in range(len(self._late)):
            theirs, socket = self._late.popleft()
            if theirs is life:
                try:
                    reply = read_reply(socket)
                except zmq.Again:
                    self._late.append((theirs, socket))
                    continue
                except zmq.ZMQError:
                    reply = None
                if isinstance(reply, Reserved | Stored) and reply.incarnation == life.incarnation:
                    self._give_back(life, reply)
            self._sockets.discard(socket)

    def _give_back(self, life: Life, reply: Reserved | Stored) -> None:
        if reply.spare_slots:
            self._unsettled.append((life, Release(0, life.session, reply.spare_slots, reply.spare_generations)))
        if isinstance(reply, Stored):
            return
        mine = [i for i, status in enumerate(reply.status) if status == ReserveStatus.RESERVED]
        if mine:
            slots = b"".join(reply.slots[4 * i : 4 * i + 4] for i in mine)
            generations = b"".join(reply.generations[8 * i : 8 * i + 8] for i in mine)
            self._unsettled.append((life, Release(0, life.session, slots, generations)))

    def _settle(self, life: Life, socket: Socket, given_up: Callable[[], bool]) -> bool:
        while self._unsettled and not given_up():
            theirs, request = self._unsettled[0]
            if theirs is life:
                rid = next(self._rids)
                data = protocol.encode(msgspec.structs.replace(request, rid=rid))
                try:
                    exchange(socket, rid, data, time.monotonic() + SETTLE_WAIT_S, given_up)
                except NoAnswerError:
                    return False
            self._unsettled.popleft()
        return True
