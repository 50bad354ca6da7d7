"""What lies under every call of a session: registration with the server, heartbeats, and one request's one reply.

A :class:`Conversation` says Hello when the first call needs it, begins another life when the server does, and has a thread
of its own (the keeper) for heartbeats, for asking after a server that is away, and for what calls have left behind. What it
promises to callers is said in :mod:`maru_core.session`, which adds the requests themselves: here only those occur that keep
the conversation going (Hello, Heartbeat, Goodbye).
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeVar

import zmq

from maru_core import protocol
from maru_core.endpoints import split_endpoints
from maru_core.errands import Errands, Life
from maru_core.errors import (
    ClosedError,
    ConfigError,
    MaruError,
    ServerError,
    ServerUnavailableError,
    SessionLostError,
    VersionMismatchError,
)
from maru_core.keys import ClientKeys, hint
from maru_core.process import ProcessIdentity
from maru_core.protocol import (
    PROTOCOL_VERSION,
    Done,
    Error,
    ErrorCode,
    Goodbye,
    Heartbeat,
    Hello,
    Reply,
    Request,
    Welcome,
)
from maru_core.reports import Reports, Source
from maru_core.sockets import NoAnswerError, Socket, SocketPool, exchange

log = logging.getLogger("maru.session")

R = TypeVar("R")

#: Pause between two attempts to find a server that is away, seconds: doubles from the first to the second.
PROBE_MIN_S: Final = 0.05
PROBE_MAX_S: Final = 1.0
#: Bounds of the pause between heartbeats, which the server chooses, seconds.
HEARTBEAT_MIN_S: Final = 0.05
HEARTBEAT_MAX_S: Final = 60.0
#: How long the keeper waits for one answer. Longer than a call may: it delays nobody, and a request that waits in the socket
#: reaches a server the moment it is back.
PROBE_WAIT_S: Final = 1.0
#: How long touches gather before they are sent in one message, seconds.
TOUCH_GATHER_S: Final = 0.05
#: How often the keeper looks for replies that come late, seconds.
LATE_LOOK_S: Final = 0.1
#: How long the farewell may stay in the socket of a closed session, milliseconds.
GOODBYE_LINGER_MS: Final = 200


class Conversation:
    """See the module. Begins at the first call; :meth:`close` ends it (also done at interpreter exit)."""

    def __init__(
        self,
        endpoint: str,
        *,
        name: str,
        timeout_s: float = 0.5,
        report: Source | None = None,
        keys: ClientKeys | None = None,
    ) -> None:
        """
        Args:
            endpoint: ``ipc:///path`` or ``tcp://host:port``; several, joined by commas, where standbys may take over: the session
                talks to one at a time, and looks for the one that serves while it has none.
            name: what people see in the server's list of sessions.
            timeout_s: time limit of one call, seconds.
            report: gives the counters that heartbeats carry; called in the session's own thread.
            keys: for a server that has keys.
        Raises:
            ConfigError: the endpoint or the time limit cannot be used.
        """
        endpoints = split_endpoints(endpoint, "server")
        if not 0.001 <= timeout_s <= 60:
            raise ConfigError(f"the time limit of a call is {timeout_s} s: give 0.001 to 60 seconds")
        self.endpoint = endpoint
        self.name = name
        self.timeout_s = timeout_s
        self._keys = keys
        self._pid = os.getpid()
        self._client_id = secrets.token_bytes(16)
        self._rids = itertools.count(1)
        self._closed = False
        self._life: Life | None = None
        self._away: MaruError | None = None  # why calls fail at once
        self._hello_lock = threading.Lock()
        self._keeper_lock = threading.Lock()
        self._hold_lock = threading.Lock()
        self._holding = 0  # slots that the present life has reserved, and neither committed nor released
        self._wake = threading.Event()
        self._keeper: threading.Thread | None = None
        try:
            # An endpoint that can never work is seen here, and not as a server that is away.
            self._sockets = SocketPool(endpoints, keys)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"server is {endpoint!r} ({error.strerror}): give ipc:///path/to/socket or tcp://host:port"
            ) from error
        self._errands = Errands(self._sockets, self._rids)
        self._reports = Reports(report)
        _open_conversations.add(self)

    # ------------------------------------------------------------ state

    @property
    def welcome(self) -> Welcome | None:
        """What the server said of itself in the present life; None before the first."""
        life = self._life
        return life.welcome if life is not None else None

    @property
    def epoch(self) -> int:
        """Number of the present life, 0 before the first."""
        life = self._life
        return life.epoch if life is not None else 0

    @property
    def connected(self) -> bool:
        """Whether the server answered when it was last asked."""
        return self._life is not None and self._away is None and not self._closed

    # ------------------------------------------------------------ beginning and end

    def connect(self) -> Welcome:
        """Say Hello if that has not been done, and return the server's welcome."""
        return self._current(None).welcome

    def close(self) -> None:
        """End the session. Bounded; calls under way end within their own time limit.

        Says Goodbye, which returns reservations at once, unless slots are neither committed nor released: another thread may
        still be writing into them, so they return only when the server finds the process dead or the quarantine is over.
        """
        _open_conversations.discard(self)
        if self._pid != os.getpid() or self._closed:
            # Sockets, context and thread are the parent's: a forked child must not touch them.
            self._closed = True
            return
        self._closed = True
        self._wake.set()
        keeper = self._keeper
        if keeper is not None and keeper is not threading.current_thread():
            keeper.join(self.timeout_s + PROBE_WAIT_S)
        self._sockets.shut(self.timeout_s)

    # ------------------------------------------------------------ one request, one reply

    def _current(self, epoch: int | None) -> Life:
        """The present life, begun if there is none; fails at once where it is known that it would fail later."""
        if self._closed or self._pid != os.getpid():
            raise self._closed_error()
        if self._away is not None:
            raise self._away_error(self._away)
        life = self._life
        if life is None:
            life = self._renew(None)
        if epoch is not None and epoch != life.epoch:
            raise self._lost_error(life)
        return life

    def _ask(
        self,
        life: Life,
        rid: int,
        request: Request,
        expected: type[R],
        read: Callable[[bytes], Any] = protocol.decode_reply,
    ) -> R:
        """Send a request of this life and return its reply, of the expected kind, as ``read`` makes it of bytes."""
        deadline = time.monotonic() + self.timeout_s
        socket = self._sockets.take()
        try:
            reply = exchange(socket, rid, protocol.encode(request), deadline, None, read)
        except NoAnswerError as failure:
            self._errands.unanswered(life, request, socket)
            # One call that found no answer is enough: others need not wait to learn the same.
            self._open_breaker(ServerUnavailableError(f"the Maru server at {self.endpoint} is away"))
            raise self._unavailable(request, failure) from None
        except BaseException:
            self._sockets.discard(socket)
            raise
        self._sockets.give_back(socket)
        if type(reply) is expected and reply.incarnation == life.incarnation:  # type: ignore[attr-defined]
            return reply
        raise self._refusal(life, request, reply, deadline)

    def _refusal(
        self, life: Life, request: Request, reply: Reply, deadline: float, *, keeper: bool = False
    ) -> MaruError:
        """The error for a reply that is not what was asked for. Begins a new life where the old one is over."""
        unknown = isinstance(reply, Error) and reply.code == ErrorCode.UNKNOWN_SESSION
        if unknown or reply.incarnation != life.incarnation:
            return self._lost_error(self._renew(life, deadline, keeper=keeper))
        if isinstance(reply, Error):
            return self._said(reply)
        return self._contradiction(type(request).__name__.lower())

    def _open_breaker(self, why: MaruError) -> None:
        self._away = why.with_traceback(None)  # kept for long: not with all that its frames refer to
        self._sockets.close_idle()
        self._start_keeper()
        self._wake.set()

    # ------------------------------------------------------------ lives

    def _hold(self, life: Life, change: int) -> None:
        with self._hold_lock:
            if life is self._life:
                self._holding = max(0, self._holding + change)

    def _renew(self, stale: Life | None, deadline: float | None = None, *, keeper: bool = False) -> Life:
        """Begin the life after ``stale`` with a Hello, unless another thread has done so."""
        if deadline is None:
            deadline = time.monotonic() + self.timeout_s
        if not self._hello_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise self._unavailable(None, NoAnswerError())
        try:
            life = self._life
            if life is not None and life is not stale:
                return life
            self._start_keeper()
            try:
                welcome = self._hello(deadline, keeper=keeper)
            except (ServerError, VersionMismatchError) as error:
                self._open_breaker(error)
                raise
            life = Life(self.epoch + 1, welcome.session, welcome.incarnation, welcome)
            with self._hold_lock:
                self._life = life
                self._holding = 0
            self._sockets.close_idle()  # what was connected to the old life may still be on its way back
            return life
        finally:
            self._hello_lock.release()

    def _hello(self, deadline: float, *, keeper: bool) -> Welcome:
        rid = next(self._rids)
        me = ProcessIdentity.current()
        hello = Hello(
            PROTOCOL_VERSION,
            rid,
            self._client_id,
            self.name,
            me.host,
            me.pid,
            me.pid_start,
            me.pid_ns,
            me.boot_id,
        )
        given_up = self._is_closed if keeper else None
        socket: Socket | None = None
        try:
            self._sockets.find(next(self._rids), deadline, given_up)
            socket = self._sockets.open()
            reply = exchange(socket, rid, protocol.encode(hello), deadline, given_up)
        except NoAnswerError as failure:
            error = self._unavailable(hello, failure)
            if not keeper:
                self._open_breaker(error)
            raise error from None
        finally:
            if socket is not None:
                self._sockets.discard(socket)
        if isinstance(reply, Error):
            raise self._said(reply)
        if not isinstance(reply, Welcome):
            raise self._contradiction("hello")
        if reply.protocol != PROTOCOL_VERSION:
            raise VersionMismatchError(
                f"the Maru server at {self.endpoint} speaks protocol {reply.protocol} and this client {PROTOCOL_VERSION}: "
                "install the same release of Maru on both sides"
            )
        return reply

    # ------------------------------------------------------------ the keeper

    def _start_keeper(self) -> None:
        if self._keeper is not None:
            return
        with self._keeper_lock:
            if self._keeper is None and not self._closed:
                self._keeper = threading.Thread(target=self._keep, name="maru-session", daemon=True)
                self._keeper.start()

    def _keep(self) -> None:
        """Heartbeats, probes while the server is away, touches, settling. Ends with the Goodbye."""
        socket: Socket | None = None
        due = time.monotonic() + PROBE_MAX_S  # of the next heartbeat or probe
        pause = PROBE_MIN_S
        looked = False  # whether the present absence has been probed
        while not self._closed:
            wait = due - time.monotonic()
            self._wake.wait(max(0.0, min(wait, LATE_LOOK_S) if self._errands.waiting else wait))
            self._wake.clear()
            if self._errands.touched and not self._closed:
                self._wake.wait(TOUCH_GATHER_S)
            if self._closed:
                break
            if time.monotonic() >= due or (self._away is not None and not looked):
                socket = self._probe(socket)
                if socket is not None:
                    looked, pause = False, PROBE_MIN_S
                    life = self._life
                    # Whatever a server says, it is neither flooded nor left without a sign of life for long.
                    asked = life.welcome.heartbeat_s if life is not None else PROBE_MAX_S
                    due = time.monotonic() + min(max(HEARTBEAT_MIN_S, asked), HEARTBEAT_MAX_S)
                else:
                    looked, due = True, time.monotonic() + pause
                    pause = min(pause * 2, PROBE_MAX_S)
            try:
                life = self._life
                if life is not None and self._away is None:
                    if socket is None:
                        socket = self._sockets.open()
                    if not self._errands.run(life, socket, self._is_closed):
                        self._sockets.discard(socket)
                        socket = None
                        due = time.monotonic()
            except Exception:
                # Whatever it was, heartbeats must go on.
                log.exception("%s: a note to the server at %s was lost", self.name, self.endpoint)
        self._farewell(socket)

    def _probe(self, socket: Socket | None) -> Socket | None:
        """Ask the server for a sign of life, and begin a new life where it does not know this one.

        Returns the socket to go on with, or None if no good answer came: then calls fail at once, for the reason given.
        """
        patience_s = max(PROBE_WAIT_S, self.timeout_s)
        if self._sockets.several and self._away is None:
            patience_s = PROBE_WAIT_S  # then the others are asked, and this one again
        deadline = time.monotonic() + patience_s
        life = self._life
        try:
            if self._away is not None and life is not None:
                # It may serve elsewhere now, and what is connected to where it was is of no use.
                if socket is not None and self._sockets.several:
                    self._sockets.discard(socket)
                    socket = None
                self._sockets.find(next(self._rids), deadline, self._is_closed)
            if socket is None:
                socket = self._sockets.open()
            if life is None:
                self._renew(None, deadline, keeper=True)
            else:
                rid = next(self._rids)
                heartbeat = Heartbeat(rid, life.session, *self._reports.counts(life))
                reply = exchange(socket, rid, protocol.encode(heartbeat), deadline, self._is_closed)
                if type(reply) is Done and reply.incarnation == life.incarnation:
                    self._reports.acknowledge()
                else:
                    error = self._refusal(life, heartbeat, reply, deadline, keeper=True)
                    if not isinstance(error, SessionLostError):
                        raise error
                    log.info("%s: the server at %s began a new life", self.name, self.endpoint)
            self._away = None
            return socket
        except NoAnswerError as failure:
            error = self._unavailable(None, failure)
        except MaruError as failure:
            error = failure
        except Exception as failure:
            log.exception("%s: the server at %s could not be asked", self.name, self.endpoint)
            error = ServerUnavailableError(f"the Maru server at {self.endpoint} could not be asked: {failure}")
        if self._away is None and not self._closed:  # who closes it knows
            log.warning("%s: %s", self.name, error)
        self._away = error.with_traceback(None)
        self._sockets.close_idle()
        if socket is not None:
            self._sockets.discard(socket)
        return None

    def _farewell(self, socket: Socket | None) -> None:
        life = self._life
        if life is not None and self._away is None and not self._holding:
            with contextlib.suppress(zmq.ZMQError, ServerUnavailableError):
                if socket is None:
                    socket = self._sockets.open()
                namespace, counts = self._reports.counts(life)
                if counts:
                    socket.send(
                        protocol.encode(Heartbeat(next(self._rids), life.session, namespace, counts)), zmq.DONTWAIT
                    )
                socket.send(protocol.encode(Goodbye(life.session)), zmq.DONTWAIT)
        if socket is not None:
            self._sockets.discard(socket, GOODBYE_LINGER_MS)
        self._errands.drop()

    def _is_closed(self) -> bool:
        return self._closed

    # ------------------------------------------------------------ errors

    def _closed_error(self) -> ClosedError:
        if self._pid != os.getpid():
            return ClosedError(
                f"the session {self.name!r} belongs to process {self._pid} and not to its forked child {os.getpid()}: "
                "open one in the child"
            )
        return ClosedError(f"the session {self.name!r} was closed: open another")

    def _away_error(self, why: MaruError) -> MaruError:
        if isinstance(why, ServerError):
            return ServerError(str(why), why.code)
        return type(why)(str(why))

    def _unavailable(self, request: Request | None, failure: NoAnswerError) -> MaruError:
        if self._closed:
            return self._closed_error()
        what = f" to {type(request).__name__}" if request is not None else ""
        garbage = f" ({failure.garbage} replies could not be read: is that a Maru server?)" if failure.garbage else ""
        return ServerUnavailableError(
            f"no answer{what} from the Maru server at {self.endpoint} within {self.timeout_s:g} s{garbage}: "
            f"see that maru-server runs and is reached there{hint(self.endpoint, self._keys)}"
        )

    def _lost_error(self, life: Life) -> SessionLostError:
        return SessionLostError(
            f"the Maru server at {self.endpoint} began a new life with this client (epoch {life.epoch}): "
            "open the namespace again; slots of the old life are lost"
        )

    def _said(self, reply: Error) -> MaruError:
        if reply.code == ErrorCode.VERSION:
            return VersionMismatchError(f"the Maru server at {self.endpoint}: {reply.message}")
        return ServerError(f"the Maru server at {self.endpoint}: {reply.message}", reply.code)

    def _contradiction(self, what: str) -> ServerError:
        return ServerError(
            f"the Maru server at {self.endpoint} answered {what} with what cannot be its answer: "
            "use the same release of Maru on both sides",
            ErrorCode.INTERNAL,
        )


_open_conversations: weakref.WeakSet[Conversation] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Say Goodbye for sessions that nobody closed, while threads and sockets still work."""
    for session in list(_open_conversations):
        session.close()
