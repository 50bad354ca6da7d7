"""The sockets of one session: a free list of them, and one request with its reply on one of them.

A socket carries one request at a time. One whose reply did not come in time is never used again, so that a late reply
has nowhere to arrive. The list may be used by any number of threads; a socket only by the one that took it.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar, overload

import msgspec
import zmq

from maru_core import protocol
from maru_core.errors import ServerUnavailableError
from maru_core.keys import ClientKeys
from maru_core.protocol import Error, Reply, Stats

Socket = zmq.Socket[bytes]


class Answer(Protocol):
    """What is read out of a reply: all of it, or what is wanted."""

    @property
    def rid(self) -> int: ...


A = TypeVar("A", bound=Answer)

# Plain numbers: the library's own are enums, whose arithmetic costs as much as a message.
_DONTWAIT: Final = int(zmq.DONTWAIT)
_POLLIN: Final = int(zmq.POLLIN)

#: Sockets kept for later calls; more than this many calls at once open and close theirs.
IDLE_MAX: Final = 64
#: Pause between two attempts of the library to connect, milliseconds.
RECONNECT_MS: Final = 50
#: How often a waiting exchange looks whether it should give up, milliseconds.
GIVE_UP_LOOK_MS: Final = 100


class NoAnswerError(Exception):
    """The time limit passed. ``garbage`` is the number of replies that could not be read."""

    def __init__(self, garbage: int = 0) -> None:
        super().__init__()
        self.garbage = garbage


class SocketPool:
    """Sockets connected to one endpoint, of several where :meth:`find` says which. After :meth:`shut` none is kept, and the
    last one to be closed ends the context."""

    def __init__(self, endpoints: Sequence[str], keys: ClientKeys | None = None) -> None:
        """
        Args:
            endpoints: at least one; the first is connected to until :meth:`find` finds a server at another.
            keys: for a server that has keys.
        Raises:
            zmq.ZMQError: an endpoint can never be connected to.
        """
        self._endpoints = tuple(endpoints)
        self._at = 0
        self._keys = keys
        self._context: zmq.Context[Socket] = zmq.Context()
        self._lock = threading.Lock()
        self._shut = False
        # Adding to and removing from these is atomic: taking a socket costs no lock.
        self._open: set[Socket] = set()
        self._free: collections.deque[Socket] = collections.deque()
        #: Open sockets that are connected to where the server was before.
        self._stale: set[Socket] = set()
        try:
            for endpoint in self._endpoints[1:]:
                self.discard(self.open(endpoint))
            self._free.append(self.open())
        except zmq.ZMQError:
            self._context.term()
            raise

    @property
    def count(self) -> int:
        """Open sockets, taken and free."""
        return len(self._open)

    @property
    def several(self) -> bool:
        return len(self._endpoints) > 1

    @property
    def endpoint(self) -> str:
        """Where sockets are connected to."""
        return self._endpoints[self._at]

    @property
    def ended(self) -> bool:
        """Whether everything is closed, threads of the library included."""
        return self._context.closed

    def find(self, rid: int, deadline: float, given_up: Callable[[], bool] | None = None) -> None:
        """Of several endpoints, connect to the one whose server is there from now on: all are asked at once, and one is taken
        of those that answer first. The question is harmless wherever it arrives. With one endpoint there is nothing to find.

        Args:
            deadline, given_up: as :func:`exchange` has them.
        Raises:
            NoAnswerError: none answered.
            ServerUnavailableError: as :meth:`open`.
        """
        if not self.several:
            return
        asked: list[Socket] = []
        try:
            for endpoint in self._endpoints:
                asked.append(self.open(endpoint))
                asked[-1].send(protocol.encode(Stats(rid)), _DONTWAIT)
            while (left := deadline - time.monotonic()) > 0 and not (given_up is not None and given_up()):
                wait_ms = min(int(left * 1000) + 1, GIVE_UP_LOOK_MS)
                ready = [socket for socket, _ in zmq.zmq_poll([(socket, _POLLIN) for socket in asked], wait_ms)]
                for at, socket in enumerate(asked):
                    if socket in ready and (reply := read_reply(socket)) is not None and reply.rid == rid:
                        self._go_to(at)
                        return
        except zmq.ZMQError:
            pass
        finally:
            for socket in asked:
                self.discard(socket)
        raise NoAnswerError

    def _go_to(self, at: int) -> None:
        if at != self._at:
            self._at = at
            self._stale = set(self._open)
            self.close_idle()

    def open(self, endpoint: str | None = None) -> Socket:
        """A new socket, connected to where the server was found.

        Raises:
            ServerUnavailableError: the process has no descriptors left, or the pool is shut.
        """
        try:
            socket = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise ServerUnavailableError(
                f"no socket to the Maru server at {self.endpoint} ({error.strerror}): raise the limit of open files (ulimit -n)"
            ) from error
        self._open.add(socket)
        try:
            socket.linger = 0
            socket.reconnect_ivl = RECONNECT_MS
            socket.maxmsgsize = protocol.MAX_MESSAGE_BYTES
            socket.tcp_keepalive = 1
            endpoint = endpoint or self.endpoint
            socket.ipv6 = "[" in endpoint
            if self._keys is not None:
                self._keys.apply(socket)
            socket.connect(endpoint)
        except BaseException:
            self.discard(socket)
            raise
        return socket

    def take(self) -> Socket:
        """A socket for one call: give it back, or discard it."""
        try:
            return self._free.pop()
        except IndexError:
            return self.open()

    def give_back(self, socket: Socket) -> None:
        """Only after the reply to what was sent on it."""
        if len(self._free) >= IDLE_MAX:
            self.discard(socket)
            return
        self._free.append(socket)
        if self._shut or socket in self._stale:
            # Whoever comes after shut() emptied the list empties it again; so does who comes back from another place.
            self.close_idle()

    def discard(self, socket: Socket, linger_ms: int = 0) -> None:
        """Close a socket, and drop what it has not sent yet (after ``linger_ms`` milliseconds)."""
        socket.close(linger_ms)
        self._open.discard(socket)
        self._stale.discard(socket)
        if self._shut and not self._open:
            self._end()

    def close_idle(self) -> None:
        while True:
            try:
                socket = self._free.pop()
            except IndexError:
                return
            self.discard(socket)

    def shut(self, wait_s: float) -> None:
        """Close what is free, and wait ``wait_s`` seconds for what is taken. What is taken for longer ends the rest itself."""
        self._shut = True
        self.close_idle()
        deadline = time.monotonic() + wait_s
        while self._open and time.monotonic() < deadline:
            time.sleep(0.005)
        if not self._open:
            self._end()

    def _end(self) -> None:
        # With a socket still open this would wait for ever.
        with self._lock:
            if not self._context.closed:
                self._context.term()


@overload
def exchange(
    socket: Socket, rid: int, data: bytes, deadline: float, given_up: Callable[[], bool] | None = None
) -> Reply: ...
@overload
def exchange(
    socket: Socket,
    rid: int,
    data: bytes,
    deadline: float,
    given_up: Callable[[], bool] | None,
    read: Callable[[bytes], A],
) -> A: ...
def exchange(
    socket: Socket,
    rid: int,
    data: bytes,
    deadline: float,
    given_up: Callable[[], bool] | None = None,
    read: Callable[[bytes], Any] = protocol.decode_reply,
) -> Any:
    """One request and the reply that repeats its ``rid``; everything else that arrives is dropped.

    Args:
        data: the encoded request.
        deadline: on the monotonic clock, seconds.
        given_up: asked now and then whether to stop waiting.
        read: makes a reply of bytes, or raises as :func:`maru_core.protocol.decode_reply` does.
    Raises:
        NoAnswerError: none came, or the socket failed.
    """
    garbage = 0
    try:
        socket.send(data, _DONTWAIT)
        while (left := deadline - time.monotonic()) > 0:
            wait_ms = int(left * 1000) + 1
            if given_up is not None:
                if given_up():
                    break
                wait_ms = min(wait_ms, GIVE_UP_LOOK_MS)
            # A poll, not RCVTIMEO: a signal restarts a receive with its full time limit, and a poll with the rest.
            if not zmq.zmq_poll([(socket, _POLLIN)], wait_ms):
                continue
            reply = read_reply(socket, read)
            if reply is None:
                garbage += 1
            # A server that cannot read a request at all cannot repeat its rid.
            elif reply.rid == rid or (reply.rid == 0 and type(reply) is Error):
                return reply
    except zmq.ZMQError:
        pass
    raise NoAnswerError(garbage)


def read_reply(socket: Socket, read: Callable[[bytes], Any] = protocol.decode_reply) -> Any:
    """The reply that has arrived; None if it is not one. ``read`` as of :func:`exchange`.

    Raises:
        zmq.ZMQError: nothing has arrived.
    """
    data = socket.recv(_DONTWAIT)
    try:
        return read(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
