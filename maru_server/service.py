"""The ZeroMQ loop around the state: the server's sockets, clock and threads, and none of its decisions.

One thread receives, lets the state handle, and replies; it also ticks the state by time. A second one provisions extents
(which zeroes memory and may take tens of milliseconds each) ahead of the state's need. No bytes that a peer sends can end
the loop: what is not a message is answered with an error, and a fault of the server is logged and answered with one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
import zmq

from maru_core import protocol
from maru_core.errors import ConfigError, PoolError
from maru_core.pool import PoolMemory
from maru_core.protocol import PROTOCOL_VERSION, Error, ErrorCode, Hello, Reply, Request
from maru_server.endpoint import Bound, bind, check_endpoint
from maru_server.state import ServerState

log = logging.getLogger("maru.server")

# Plain numbers: the library's own are enums, whose arithmetic costs as much as a message.
_DONTWAIT: Final = int(zmq.DONTWAIT)
_MORE: Final = int(zmq.SNDMORE) | _DONTWAIT
_RCVMORE: Final = int(zmq.RCVMORE)
_EVENTS: Final = int(zmq.EVENTS)

_ALARM: Final = "inproc://maru-alarm"
#: Taken before the first peer comes: one that claims it too is not heard.
_ALARM_ID: Final = b"maru-alarm"
#: Messages after which the library is made to look for room in its queues of replies (it does so by itself when it waits).
_ROOM_EVERY: Final = 64

#: Extents that are ready before the first client is served.
FIRST_EXTENTS: Final = 2
#: Longest time between two ticks of the state, seconds; also between two looks for messages of an idle server.
TICK_IDLE_S: Final = 0.5
#: The same while messages come: background eviction keeps pace with the stores.
TICK_BUSY_S: Final = 0.05
#: Pause before memory that could not be had is asked for again, seconds.
PROVISION_RETRY_S: Final = 5.0
#: A fault that repeats is logged with its traceback at most this often, seconds.
FAULT_LOG_S: Final = 10.0


class Service:
    """Serves one state on one endpoint. :meth:`run` in a thread of its own or the main one; :meth:`stop` from anywhere."""

    def __init__(
        self,
        state: ServerState,
        memory: PoolMemory,
        endpoint: str,
        *,
        incarnation: int,
        lease_s: float,
        insecure: bool = False,
        idle_exit_s: float | None = None,
    ) -> None:
        """Provision the first extents and bind.

        Args:
            endpoint: ``ipc:///path`` or ``tcp://host:port``.
            incarnation: of this run of the server, for replies that the state has no part in.
            lease_s: the state's lease; ticks and looks at silent sessions come several times within it.
            insecure: bind to an address that other machines can reach.
            idle_exit_s: end by itself when there was no session for this long, seconds.
        Raises:
            ConfigError: the endpoint cannot be used.
        """
        check_endpoint(endpoint, insecure=insecure)
        self._state = state
        self._memory = memory
        self._incarnation = incarnation
        self._idle_exit_s = idle_exit_s
        self._tick_idle_s = min(TICK_IDLE_S, lease_s / 8)
        self._look_s = min(1.0, lease_s / 4)
        self._stopping = False
        self._faults = _Repeats()
        self._invalid = _Repeats()
        self._lost = _Repeats()
        self._provisioner = _Provisioner(memory, self._wake_up)
        self._told_ready = 0
        self._bound: Bound | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        # A message to ourselves ends the loop's wait.
        self._alarm = self._context.socket(zmq.DEALER)
        self._alarm_lock = threading.RLock()  # re-entrant: a signal handler may stop() the thread that is closing
        try:
            self._router.linger = 0
            self._router.maxmsgsize = protocol.MAX_MESSAGE_BYTES
            # A peer that does not read loses its replies; it never stops the loop.
            self._router.router_mandatory = 0
            self._router.sndhwm = 1000
            self._router.rcvhwm = 1000
            self._router.backlog = 1024
            self._router.tcp_keepalive = 1
            self._router.handshake_ivl = 5000
            self._router.bind(_ALARM)
            self._alarm.linger = 0
            self._alarm.routing_id = _ALARM_ID
            self._alarm.connect(_ALARM)
            for extent in range(min(FIRST_EXTENTS, memory.geometry.extent_count)):
                self._provisioner.provision(extent)
            self._tell_ready(time.monotonic())
            self._bound = bind(self._router, endpoint)
            #: Where clients reach this server.
            self.endpoint = self._bound.name
        except BaseException:
            self.close()
            raise

    def run(self) -> None:
        """Serve until :meth:`stop` or, with ``idle_exit_s``, until nobody has been here for that long."""
        router = self._router
        receive = router.recv
        option = router.getsockopt
        serve = self._serve
        clock = time.monotonic
        provisioner = self._provisioner
        provisioner.start()
        now = clock()
        look_at = now + self._look_s
        occupied_at = now
        tick_at = now
        wait_s = 0.0
        served = 0
        while not self._stopping:
            if now >= tick_at:
                self._tick(now)
                if now >= look_at:
                    look_at = now + self._look_s
                    self._look_for_dead(now)
                    self._look_after_endpoint()
                if self._idle_exit_s is not None:
                    if self._sessions():
                        occupied_at = now
                    elif now - occupied_at >= self._idle_exit_s:
                        log.info("no client for %g s: done", self._idle_exit_s)
                        return
                # What a tick could not finish, and what messages have left behind, is done soon.
                interval = min(TICK_BUSY_S, self._tick_idle_s) if served else self._tick_idle_s
                served = 0
                tick_at = now + interval
                if interval != wait_s:
                    wait_s = interval
                    router.rcvtimeo = max(1, int(interval * 1000))
            try:
                # One blocking receive: half the system calls of a poll with a receive after it.
                frames = [receive()]
                while option(_RCVMORE):
                    frames.append(receive())
            except zmq.Again:
                now = clock()
                continue
            now = clock()
            if provisioner.ready != self._told_ready:
                self._tell_ready(now)
            serve(frames, now)
            served += 1
            if served % _ROOM_EVERY == 0:
                option(_EVENTS)

    def stop(self) -> None:
        """Have :meth:`run` return soon. May be called from any thread and from a signal handler."""
        self._stopping = True
        self._wake_up()

    def close(self) -> None:
        """Let go of the endpoint and the threads; after :meth:`run` has returned."""
        self._stopping = True
        self._provisioner.stop()
        self._router.close(0)
        with self._alarm_lock:
            self._alarm.close(0)
        self._context.term()
        if self._bound is not None:
            # Before the pool's lock is let go: whoever gets that binds next.
            self._bound.remove()
            self._bound = None

    # ------------------------------------------------------------ messages

    def _serve(self, frames: list[bytes], now: float) -> None:
        """Handle one message: identity and one frame."""
        try:
            reply: Reply | None
            if frames[0] == _ALARM_ID:
                return
            if len(frames) != 2:
                reply = self._refuse(0, f"{len(frames) - 1} frames where a request is one")
            else:
                try:
                    message: Request = protocol.decode_request(frames[1])
                except Exception as error:
                    # Not only msgspec's own: deep nesting is a RecursionError, and no bytes may end the loop.
                    reply = self._undecodable(frames[1], error)
                else:
                    if type(message) is Hello and message.protocol != PROTOCOL_VERSION:
                        reply = self._wrong_version(message.rid, message.protocol)
                    else:
                        try:
                            reply = self._state.handle(message, now)
                        except Exception:
                            reply = self._fault(message)
            if reply is not None:
                data = protocol.encode(reply)
                self._router.send(frames[0], _MORE)
                self._router.send(data, _DONTWAIT)
                self._state.finish()
        except zmq.ZMQError as error:
            log.debug("a reply was dropped: %s", error)
        except Exception:
            self._faults.log("a reply could not be sent")

    def _undecodable(self, data: bytes, error: Exception) -> Reply:
        name, first, second = _head(data)
        if name == "Hello" and isinstance(first, int) and first != PROTOCOL_VERSION:
            return self._wrong_version(_as_rid(second), first)
        rid = second if name == "Hello" else first
        return self._refuse(_as_rid(rid), f"not a valid message ({str(error)[:200]})")

    def _wrong_version(self, rid: int, theirs: int) -> Reply:
        return Error(
            rid,
            self._incarnation,
            ErrorCode.VERSION,
            f"the server speaks protocol {PROTOCOL_VERSION} and the client {theirs}: install the same release of Maru on both sides",
        )

    def _refuse(self, rid: int, why: str) -> Reply:
        self._invalid.warn("refused a message: %s", why)
        return Error(rid, self._incarnation, ErrorCode.INVALID, f"{why}: is that a Maru client of the same release?")

    def _fault(self, message: Request) -> Reply | None:
        self._faults.log(f"handling {type(message).__name__} failed")
        rid = getattr(message, "rid", None)
        if rid is None:
            return None
        return Error(rid, self._incarnation, ErrorCode.INTERNAL, "the server failed at this request: its log says how")

    # ------------------------------------------------------------ time

    def _tick(self, now: float) -> None:
        try:
            self._state.tick(now)
            self._provisioner.want(self._state.wanted_extents(now))
        except Exception:
            self._faults.log("a tick failed")
        self._tell_ready(now)

    def _tell_ready(self, now: float) -> None:
        ready = self._provisioner.ready
        if ready > self._told_ready:
            self._told_ready = ready
            try:
                self._state.extents_ready(ready, now)
                self._provisioner.want(self._state.wanted_extents(now))
            except Exception:
                self._faults.log("extents could not be added")

    def _look_for_dead(self, now: float) -> None:
        """Tell the state which silent sessions' processes are dead for certain."""
        try:
            for session, identity in self._state.silent_sessions():
                if identity.is_dead_here():
                    log.info("session %d is gone: its process %d has ended", session, identity.pid)
                    self._state.process_gone(session, now)
        except Exception:
            self._faults.log("silent sessions could not be looked at")

    def _look_after_endpoint(self) -> None:
        """Bind again where the socket file was removed. Clients that are connected stay so."""
        try:
            # Where the pool's file is gone too, another server may be on its way to this endpoint: it is the one to find.
            if self._bound is None or not self._bound.is_lost() or not self._memory.still_there():
                return
            with contextlib.suppress(zmq.ZMQError):  # not bound: it could not be bound again the last time
                self._router.unbind(self._bound.name)
            self._bound = bind(self._router, self._bound.name)
            log.warning("the socket file of %s was removed: bound again", self.endpoint)
        except ConfigError as error:
            self._lost.warn(
                "the socket file of %s was removed, and no new client can connect: %s", self.endpoint, error
            )
        except Exception:
            self._faults.log("the endpoint could not be looked after")

    def _sessions(self) -> int:
        """Sessions for whose sake an otherwise idle server stays."""
        stats = self._state.stats()
        # Where the pool's file is gone, who fell silent has gone to another server, most likely, and does not come back.
        gone = 0 if self._memory.still_there() else int(stats["sessions_silent"])
        return int(stats["sessions"]) - gone

    def _wake_up(self) -> None:
        with self._alarm_lock, contextlib.suppress(zmq.ZMQError):
            self._alarm.send(b"", _DONTWAIT)


class _Provisioner:
    """A thread that gives extents their memory, one after another, ahead of need."""

    def __init__(self, memory: PoolMemory, report: Callable[[], None]) -> None:
        self._memory = memory
        self._report = report
        self._condition = threading.Condition()
        self._wanted = 0
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._refused = -1
        #: Extents ``[0, ready)`` have their memory.
        self.ready = 0

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="maru-provision", daemon=True)
        self._thread.start()

    def want(self, count: int) -> None:
        """Extents ``[0, count)`` should be ready."""
        if count > self._wanted:
            with self._condition:
                self._wanted = min(count, self._memory.geometry.extent_count)
                self._condition.notify()

    def provision(self, extent: int) -> bool:
        """Give the next extent its memory; False if there is none to be had."""
        try:
            done = self._memory.provision(extent)
            why = "no memory is left"
        except (PoolError, OSError) as error:
            done = False
            why = str(error)
        if done:
            self.ready = extent + 1
        elif self._refused != extent:
            # Asked for again every few seconds, and said once.
            self._refused = extent
            log.warning(
                "the pool stays at %d of %d extents until there is memory for more: %s; free some, or make the pool smaller",
                extent,
                self._memory.geometry.extent_count,
                why,
            )
        return done

    def stop(self) -> None:
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._stopping and self.ready >= self._wanted:
                    self._condition.wait()
                if self._stopping:
                    return
            if self.provision(self.ready):
                self._report()
                continue
            with self._condition:
                if not self._stopping:
                    self._condition.wait(PROVISION_RETRY_S)


class _Repeats:
    """Logs the first of a kind, and then at most one every ``FAULT_LOG_S`` seconds with the number of those left out."""

    def __init__(self) -> None:
        self._at = -FAULT_LOG_S
        self._left_out = 0

    def log(self, text: str) -> None:
        """An error with the traceback of the exception being handled."""
        if self._due():
            log.exception("%s (%d more like it since the last time)", text, self._taken())

    def warn(self, text: str, *args: object) -> None:
        if self._due():
            log.warning(text + " (%d more like it since the last time)", *args, self._taken())

    def _due(self) -> bool:
        now = time.monotonic()
        if now - self._at < FAULT_LOG_S:
            self._left_out += 1
            return False
        self._at = now
        return True

    def _taken(self) -> int:
        left_out, self._left_out = self._left_out, 0
        return left_out


def _head(data: bytes) -> tuple[Any, Any, Any]:
    """The first three elements of a message that is an array, whatever they are."""
    try:
        message = msgspec.msgpack.decode(data)
    except Exception:
        return None, None, None
    if not isinstance(message, list):
        return None, None, None
    head = (*message[:3], None, None, None)
    return head[0], head[1], head[2]


def _as_rid(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
