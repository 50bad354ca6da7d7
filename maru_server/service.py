"""The ZeroMQ loop around the state: the server's sockets, clock and threads, and none of its decisions.

One thread receives, lets the state handle, and replies; it also ticks the state by time. A second one
(:mod:`maru_server.provisioner`) gives extents their memory ahead of the state's need. No bytes that a peer sends can end
the loop: what is not a message is answered with an error, and a fault of the server is logged and answered with one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import msgspec
import zmq

from maru_core import protocol
from maru_core.errors import ConfigError
from maru_core.pool import PoolMemory
from maru_core.protocol import PROTOCOL_VERSION, Error, ErrorCode, Hello, Match, Reply, Request, Store
from maru_server.calls import Calls, Deferred, Worker
from maru_server.election import OVERTAKEN, Election, FileLock
from maru_server.endpoint import Bound, bind, check_endpoint
from maru_server.media import Keeper, Media
from maru_server.metrics import Figures, Meter
from maru_server.pools import Pools
from maru_server.repeats import Repeats
from maru_server.sessions import LOCAL, Peer
from maru_server.state import ServerState
from maru_server.trust import Trust

log = logging.getLogger("maru.server")

T = TypeVar("T")

# Plain numbers: the library's own are enums, whose arithmetic costs as much as a message.
_DONTWAIT: Final = int(zmq.DONTWAIT)
_MORE: Final = int(zmq.SNDMORE) | _DONTWAIT
_RCVMORE: Final = int(zmq.RCVMORE)
_EVENTS: Final = int(zmq.EVENTS)

#: Which message it is that had a shorter way, by the first letter of its name: where packing has that is fixed.
_SHORT: Final[dict[bytes, type]] = {b"M": Match, b"S": Store}

_ALARM: Final = "inproc://maru-alarm"
#: Taken before the first peer comes: one that claims it too is not heard.
_ALARM_ID: Final = b"maru-alarm"
#: Messages after which the library is made to look for room in its queues of replies (it does so by itself when it waits).
_ROOM_EVERY: Final = 64

#: Longest time between two ticks of the state, seconds; also between two looks for messages of an idle server.
TICK_IDLE_S: Final = 0.5
#: The same while messages come: background eviction keeps pace with the stores.
TICK_BUSY_S: Final = 0.05
#: Messages that may wait on one connection, in each direction.
QUEUE: Final = 32
#: How long an endpoint is waited for that a server on its way out still holds, seconds.
BIND_PATIENCE_S: Final = 1.0


class Service:
    """Serves one state, or the layer over several, on one endpoint. :meth:`run` in a thread of its own or the main one; :meth:`stop` from anywhere."""

    def __init__(
        self,
        state: ServerState | Pools,
        memory: PoolMemory | Sequence[PoolMemory],
        endpoint: str,
        *,
        incarnation: int,
        lease_s: float,
        insecure: bool = False,
        idle_exit_s: float | None = None,
        election: Election | None = None,
        trust: Trust | None = None,
    ) -> None:
        """Provision the first extents and bind.

        Args:
            memory: of the pool, or of each where there are several.
            endpoint: ``ipc:///path`` or ``tcp://host:port``.
            incarnation: of this run of the server, for replies that the state has no part in, and the number of its life in the first
                pool. In the others it is looked at by ``election``.
            lease_s: the state's lease; ticks and looks at silent sessions come several times within it.
            insecure: bind to an address that other machines can reach.
            idle_exit_s: end by itself when there was no session for this long, seconds.
            election: asked before every message and tick whether this server may still write to the pool; None: the pool's
                own lock is enough.
            trust: the server's keys; only clients that it lists may connect. None: there are no keys.
        Raises:
            ConfigError: the endpoint cannot be used.
        """
        check_endpoint(endpoint, insecure=insecure, keys=trust is not None)
        self._state = state
        memories = [memory] if isinstance(memory, PoolMemory) else list(memory)
        keepers: Sequence[Keeper] = (state,) if isinstance(state, ServerState) else state.members
        self._media = [Media(*pair, self._grow) for pair in zip(keepers, memories, strict=True)]
        self._grown = False
        self._incarnation = incarnation
        self._trust = trust
        self._idle_exit_s = idle_exit_s
        self._election = election or FileLock()
        #: Why :meth:`run` has returned where it had to: another server has the pool, or may have it.
        self.deposed: str | None = None
        self._tick_idle_s = min(TICK_IDLE_S, lease_s / 8)
        self._look_s = min(1.0, lease_s / 4)
        self._stopping = False
        self._meter = Meter()
        self._faults = Repeats()
        self._invalid = Repeats()
        self._lost = Repeats()
        self._calls = Calls(self._wake_up)
        self._worker = Worker(incarnation, self._wake_up)
        self._bound: Bound | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        # The library's own wrapper of it looks for options that are not used here.
        self._send: Callable[[bytes, int], object] = super(zmq.Socket, self._router).send
        # A message to ourselves ends the loop's wait.
        self._alarm = self._context.socket(zmq.DEALER)
        self._alarm_lock = threading.RLock()  # re-entrant: a signal handler may stop() the thread that is closing
        try:
            self._router.linger = 0
            self._router.maxmsgsize = protocol.MAX_MESSAGE_BYTES
            # A peer that does not read loses its replies; it never stops the loop.
            self._router.router_mandatory = 0
            # A client waits for one answer on a socket: what waits beyond a few is memory for whoever does not read.
            self._router.sndhwm = QUEUE
            self._router.rcvhwm = QUEUE
            self._router.backlog = 1024
            self._router.tcp_keepalive = 1
            self._router.handshake_ivl = 5000
            if trust is not None:
                trust.guard(self._context, self._router)
            # Connections within the process know no keys: this one is as it is without.
            self._router.bind(_ALARM)
            self._alarm.linger = 0
            self._alarm.routing_id = _ALARM_ID
            self._alarm.connect(_ALARM)
            for media in self._media:
                media.first_extents(time.monotonic())
            self._bound = bind(self._router, endpoint, BIND_PATIENCE_S)
            #: Where clients reach this server.
            self.endpoint = self._bound.name
        except BaseException:
            self.close()
            raise

    def run(self) -> None:
        """Serve until :meth:`stop` or, with ``idle_exit_s``, until nobody has been here for that long.

        Returns at once, and touches the pool no more, when that is no longer this server's: :attr:`deposed` says why."""
        router = self._router
        receive = router.recv
        option = router.getsockopt
        serve = self._serve
        clock = time.monotonic
        trust = self._trust
        peer: Peer | None = LOCAL
        life = self._media[0].memory.incarnation_word()
        mine = self._incarnation
        holds = self._election.holds
        for media in self._media:
            media.start()
        now = clock()
        look_at = now + self._look_s
        occupied_at = now
        tick_at = now
        wait_s = 0.0
        served = 0
        while not self._stopping:
            if now >= tick_at:
                if life[0] != mine or not holds():
                    self._step_down()
                    return
                self._tick(now)
                if now >= look_at:
                    look_at = now + self._look_s
                    self._look_for_dead(now)
                    self._look_after_endpoint()
                    self._look_after_keys(now)
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
                if trust is None:
                    # Who sent it comes first, and never alone.
                    frames = [receive(), receive()]
                    while option(_RCVMORE):
                        frames.append(receive())
                else:
                    frames, peer = self._receive_proven(trust)
            except zmq.Again:
                now = clock()
                continue
            now = clock()
            # Whatever changes the pool comes after this look: this thread may have stood still for long.
            if life[0] != mine or not holds():
                self._step_down()
                return
            if self._grown:
                self._tell_ready(now)
            serve(frames, now, peer)
            served += 1
            if served % _ROOM_EVERY == 0:
                option(_EVENTS)

    def _step_down(self) -> None:
        self.deposed = OVERTAKEN if self._election.holds() else self._election.why()

    def stop(self) -> None:
        """Have :meth:`run` return soon. May be called from any thread and from a signal handler."""
        self._stopping = True
        self._wake_up()

    def close(self) -> None:
        """Let go of the endpoint and the threads; after :meth:`run` has returned."""
        self._stopping = True
        self._calls.close()
        self._worker.close()
        for media in self._media:
            media.stop()
        self._router.close(0)
        with self._alarm_lock:
            self._alarm.close(0)
        self._context.term()
        if self._bound is not None:
            # Before the pool's lock is let go: whoever gets that binds next.
            self._bound.remove()
            self._bound = None

    # ------------------------------------------------------------ other threads

    def call(self, fn: Callable[[ServerState | Pools], T], timeout_s: float = 5.0) -> T:
        """What ``fn(state)`` returns or raises, run in the loop between two messages. From any other thread.

        ``fn`` holds up every client: it copies what is wanted and leaves.

        Raises:
            ServerUnavailableError: not within ``timeout_s``, or too many wait already.
            ClosedError: the service has ended.
        """
        return self._calls.call(fn, timeout_s)

    def figures(self, timeout_s: float = 5.0) -> Figures:
        """All that there is to show, at one moment. From any other thread; raises as :meth:`call` does."""

        def take(state: ServerState | Pools) -> Figures:
            requests, errors = self._meter.copy()
            return dataclasses.replace(state.figures(), requests=requests, errors=errors)

        return self.call(take, timeout_s)

    def defer(self, identity: bytes, rid: int, work: Callable[[], Reply]) -> Reply | None:
        """In the loop: have the reply to request ``rid`` of the peer worked out by a thread, and send it when it is there.

        Returns an error to send instead, where too many wait already. A handler of the state asks for this by returning
        a :class:`~maru_server.calls.Deferred`."""
        return self._worker.defer(identity, rid, work)

    def _woken(self) -> None:
        """What other threads have for the loop."""
        self._calls.run(self._state)
        while self._worker.done:
            identity, reply = self._worker.done.popleft()
            self._router.send(identity, _MORE)
            self._router.send(protocol.encode(reply), _DONTWAIT)

    # ------------------------------------------------------------ messages

    def _receive_proven(self, trust: Trust) -> tuple[list[bytes], Peer | None]:
        """One message, and who its connection has proved to be, as of now; None if nobody who may speak."""
        frames = [self._router.recv(copy=False)]
        while frames[-1].more:
            frames.append(self._router.recv(copy=False))
        try:
            key: str | None = frames[-1].get("User-Id")  # type: ignore[assignment]
        except zmq.ZMQError:
            key = None  # the alarm's
        return [frame.bytes for frame in frames], trust.peer(key)

    def _serve(self, frames: list[bytes], now: float, peer: Peer | None = LOCAL) -> None:
        """Handle one message: identity and one frame. ``peer`` is who sent it, None if it may not."""
        try:
            reply: Reply | None
            kind: type = type(None)
            data = b""
            if frames[0] == _ALARM_ID:
                self._woken()
                return
            if len(frames) != 2:
                reply = self._refuse(0, f"{len(frames) - 1} frames where a request is one")
            elif len(frames[1]) > protocol.MAX_REQUEST_BYTES:
                # Unread: it may unfold into a hundred times as many objects.
                reply = self._refuse(0, f"{len(frames[1])} bytes where {protocol.MAX_REQUEST_BYTES} are the most")
            else:
                try:
                    packed = None if peer is None else self._state.answer(frames[1], now, peer)
                except Exception:
                    kind, reply = self._broken_off(frames[1])
                else:
                    if packed is None:
                        kind, reply = self._handle(frames, now, peer)
                    else:
                        kind, reply, data = _SHORT[frames[1][2:3]], None, packed
            if reply is not None:
                data = protocol.encode(reply)
            if data:
                self._send(frames[0], _MORE)
                self._send(data, _DONTWAIT)
                self._state.finish()
            self._meter.note(kind, reply, len(frames[-1]), len(data), now)
        except zmq.ZMQError as error:
            log.debug("a reply was dropped: %s", error)
        except Exception:
            self._faults.log("a reply could not be sent")

    def _handle(self, frames: list[bytes], now: float, peer: Peer | None) -> tuple[type, Reply | None]:
        """The ordinary way of a request: which it is, and the reply, if one is sent now."""
        try:
            message: Request = protocol.decode_request(frames[1])
        except Exception as error:
            # Not only msgspec's own: deep nesting is a RecursionError, and no bytes may end the loop.
            return type(None), self._undecodable(frames[1], error)
        kind = type(message)
        if type(message) is Hello and message.protocol != PROTOCOL_VERSION:
            return kind, self._wrong_version(message.rid, message.protocol)
        if peer is None:
            return kind, self._revoked(message)
        try:
            answer = self._state.handle(message, now, peer)
            return kind, self.defer(frames[0], answer.rid, answer.work) if isinstance(answer, Deferred) else answer
        except Exception:
            return kind, self._fault(message)

    def _broken_off(self, data: bytes) -> tuple[type, Reply | None]:
        """The shorter way failed, and nobody knows how far it came: it is not tried again by the ordinary one."""
        try:
            message: Request = protocol.decode_request(data)
        except Exception as error:
            return type(None), self._undecodable(data, error)
        return type(message), self._fault(message)

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

    def _revoked(self, message: Request) -> Reply | None:
        """No word of it reaches the state."""
        rid = getattr(message, "rid", None)
        if rid is None:
            return None
        return Error(
            rid,
            self._incarnation,
            ErrorCode.FORBIDDEN,
            "this client's key was taken off the server's list of clients: put it back there, or use another key",
        )

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
            for media in self._media:
                media.want(now)
            self._woken()  # an alarm is lost where too many come at once
        except Exception:
            self._faults.log("a tick failed")
        self._tell_ready(now)

    def _tell_ready(self, now: float) -> None:
        self._grown = False
        for media in self._media:
            try:
                media.tell_ready(now)
            except Exception:
                self._faults.log("extents could not be added")

    def _look_for_dead(self, now: float) -> None:
        """Tell the state which silent sessions' processes are dead for certain."""
        try:
            for session, identity in self._state.silent_sessions():
                if identity.is_dead_here():
                    log.info("session %d is gone: its process %d has ended", session, identity.pid)
                    for media in self._media:
                        media.write_back_for(session)
                    self._state.process_gone(session, now)
        except Exception:
            self._faults.log("silent sessions could not be looked at")

    def _still_there(self) -> bool:
        """Whether the pools' files are where they were."""
        return all(media.memory.still_there() for media in self._media)

    def _look_after_endpoint(self) -> None:
        """Bind again where the socket file was removed. Clients that are connected stay so."""
        try:
            # Where the pool's file is gone too, another server may be on its way to this endpoint: it is the one to find.
            if self._bound is None or not self._bound.is_lost() or not self._still_there():
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

    def _look_after_keys(self, now: float) -> None:
        """Whoever was taken off the list, or has become somebody else, has no session any more."""
        try:
            if self._trust is None:
                return
            self._state.note_turned_away(self._trust.unlisted, self._trust.failed_handshakes)
            if self._trust.reread():
                ended = self._state.keep_peers(self._trust.peers(), now)
                if ended:
                    log.info("%d sessions have ended with their keys", ended)
        except Exception:
            self._faults.log("the list of clients could not be looked at")

    def _sessions(self) -> int:
        """Sessions for whose sake an otherwise idle server stays."""
        stats = self._state.stats()
        # Where the pool's file is gone, who fell silent has gone to another server, most likely, and does not come back.
        gone = 0 if self._still_there() else int(stats["sessions_silent"])
        return int(stats["sessions"]) - gone

    def _grow(self) -> None:
        self._grown = True
        self._wake_up()

    def _wake_up(self) -> None:
        with self._alarm_lock, contextlib.suppress(zmq.ZMQError):
            self._alarm.send(b"", _DONTWAIT)


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
