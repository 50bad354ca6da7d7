"""KV events over ZeroMQ, in the format in which SGLang and vLLM publish theirs: for routers that want to know what is cached.

A PUB socket sends messages of three frames: topic, sequence number (8 bytes, big endian), msgpack. Each namespace is a
stream of its own: its topic is its label in metrics (``TENANT/LABEL`` for a tenant's), its sequence starts at 0 with the
server's life, its block hashes are those that its engine publishes (:func:`block_hashes`), and its batches are encoded as
its engine's are: SGLang's as an array, vLLM's as a map. Subscribing to all topics is right where the pool serves one model.

- ``BlockStored``: blocks that a lookup finds now, each the parent of the next; ``medium`` is ``EXTERNAL``, ``block_size`` the
  tokens of a page. ``token_ids`` is empty: Maru never sees tokens. So these are for consumers that match by block hash.
- ``BlockRemoved``: blocks that no lookup finds any more.
- ``AllBlocksCleared``: nothing of this topic is left. It also begins each stream, and each repetition of the whole content.

A message that was lost leaves a gap in the sequence. The ROUTER socket then sends what is still in the buffer: a request is
an empty frame and a sequence number, or an empty frame, a topic and a number; the replies are as the engine's. Where the buffer no longer
reaches back far enough, the whole content is published anew first, so that a subscriber that comes late, or lost much, is
right again after one replay from 0.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import msgspec
import numpy as np
import zmq

from maru_core.errors import ClosedError, ConfigError, ServerUnavailableError
from maru_core.protocol import HASH_BYTES, MAX_BATCH, ROOT
from maru_server.endpoint import Bound, bind
from maru_server.events import Cleared, Events, Everything, Note, Removed, Stored, Topic
from maru_server.pools import Pools
from maru_server.state import ServerState

log = logging.getLogger("maru.events")

#: Where the blocks are, in SGLang's word for what is shared between servers.
MEDIUM: Final = "EXTERNAL"
#: Sequence number that ends a replay.
END: Final = (-1).to_bytes(8, "big", signed=True)
#: Most events in one message, and messages that may wait for one subscriber.
BATCH_EVENTS: Final = 256
HIGH_WATER: Final = 100_000
#: Bytes of past messages that are kept for replay, and how many: two replays may wait for one subscriber.
BUFFER_BYTES: Final = 64 << 20
BUFFER_MESSAGES: Final = HIGH_WATER // 2 - 1
#: Longest wait for the loop when the whole content is wanted, seconds.
CALL_S: Final = 5.0


class _Event(msgspec.Struct, tag=True, gc=False):
    pass


class BlockStored(_Event, gc=False):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(_Event, gc=False):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(_Event, gc=False):
    pass


def block_hashes(engine: str, hashes: bytes) -> list[int]:
    """Packed page hashes as the numbers that the engine publishes for the same pages.

    SGLang: the first 64 bits, signed. vLLM: the last 64 bits, unsigned."""
    if engine == "vllm":
        return np.frombuffer(hashes, ">u8")[HASH_BYTES // 8 - 1 :: HASH_BYTES // 8].tolist()  # type: ignore[no-any-return]
    return np.frombuffer(hashes, ">i8")[:: HASH_BYTES // 8].tolist()  # type: ignore[no-any-return]


class _Stream:
    """One topic."""

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.frame = topic.name.encode()
        self.following = 0  # sequence number of the next message
        self.complete_from = 0  # applying all messages from this one on to nothing gives what there is


class Publisher:
    """Publishes what :class:`~maru_server.events.Events` notes, from a thread of its own.

    Args:
        endpoint: of the PUB socket.
        replay: of the ROUTER socket; None: no replay.
        call: runs a function in the server's loop, as :meth:`maru_server.service.Service.call`.
    Raises:
        ConfigError: an endpoint cannot be used.
    """

    def __init__(
        self,
        endpoint: str,
        replay: str | None,
        call: Callable[[Callable[[ServerState | Pools], None], float], None],
        *,
        insecure: bool = False,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        for option, name in (("--events", endpoint), ("--events-replay", replay)):
            if name is not None:
                check_open(option, name, insecure=insecure)
        self._call = call
        self._buffer_bytes = buffer_bytes
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._bell_lock = threading.Lock()
        self._closed = False
        self._streams: dict[str, _Stream] = {}
        self._past: deque[tuple[_Stream, int, bytes]] = deque()
        self._past_bytes = 0
        self._pack = msgspec.msgpack.Encoder().encode
        self.events = Events(self._ring)
        self._bound: list[Bound] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router: zmq.Socket[bytes] | None = None
        self._thread: threading.Thread | None = None
        try:
            self._pub.linger = 0
            self._pub.sndhwm = HIGH_WATER
            self._bound.append(_bind("--events", self._pub, endpoint))
            if replay is not None:
                self._router = self._context.socket(zmq.ROUTER)
                self._router.linger = 0
                self._router.maxmsgsize = 4096
                # A whole replay fits: what is beyond would be dropped, and its end with it.
                self._router.sndhwm = HIGH_WATER
                self._bound.append(_bind("--events-replay", self._router, replay))
        except BaseException:
            self.close()
            raise
        #: Where subscribers reach it, and where replays are to be asked for.
        self.endpoint = self._bound[0].name
        self.replay_endpoint = self._bound[1].name if replay is not None else None
        self._thread = threading.Thread(target=self._run, name="maru-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish what was noted, and end. After the service is closed."""
        with self._bell_lock:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._bell, 1)
        if self._thread is not None:
            self._thread.join()
        with self._bell_lock:
            os.close(self._bell)
            self._bell = -1
        self._pub.close(200)  # milliseconds for what is on its way
        if self._router is not None:
            self._router.close(0)
        self._context.term()
        for bound in self._bound:
            bound.remove()

    def _ring(self) -> None:
        with self._bell_lock:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            closed = self._closed
            if self._bell in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
            try:
                self._publish()
                if self._router in ready:
                    self._replay()
            except Exception:
                log.exception("events could not be published: subscribers see a gap")
            if closed:
                return

    def _publish(self) -> None:
        """Send all that was noted."""
        stream: _Stream | None = None
        batch: list[_Event] = []
        for note in self.events.take():
            theirs = self._streams.get(note.topic.name)
            if theirs is None:
                theirs = self._streams[note.topic.name] = _Stream(note.topic)
                if not isinstance(note, Everything):  # opened after the start: begins with nothing
                    self._send(theirs, [AllBlocksCleared()])
            if theirs is not stream or len(batch) >= BATCH_EVENTS:
                self._send(stream, batch)
                stream, batch = theirs, []
            if isinstance(note, Cleared) or (isinstance(note, Everything) and not note.more):
                self._send(stream, batch)
                batch = []
                stream.complete_from = stream.following
            for event in _events(note):
                batch.append(event)
                if len(batch) >= BATCH_EVENTS:
                    self._send(stream, batch)
                    batch = []
        self._send(stream, batch)

    def _send(self, stream: _Stream | None, batch: list[_Event]) -> None:
        if stream is None or not batch:
            return
        now = time.time()
        payload = self._pack({"ts": now, "events": batch} if stream.topic.engine == "vllm" else (now, batch, None))
        number = stream.following
        stream.following += 1
        self._past.append((stream, number, payload))
        self._past_bytes += len(payload)
        while (self._past_bytes > self._buffer_bytes or len(self._past) > BUFFER_MESSAGES) and len(self._past) > 1:
            self._past_bytes -= len(self._past.popleft()[2])
        self._pub.send_multipart((stream.frame, number.to_bytes(8, "big"), payload), zmq.DONTWAIT)

    # ------------------------------------------------------------ replay

    def _replay(self) -> None:
        assert self._router is not None
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self._router.recv_multipart(zmq.DONTWAIT)
                if len(frames) not in (3, 4) or len(frames[-1]) != 8:
                    log.warning("not a replay request: %d frames, the last of %d bytes", len(frames), len(frames[-1]))
                    continue
                topic = frames[2] if len(frames) == 4 else None
                self._replay_to(frames[0], topic, int.from_bytes(frames[-1], "big"))

    def _replay_to(self, peer: bytes, topic: bytes | None, start: int) -> None:
        assert self._router is not None
        wanted = [stream for stream in self._streams.values() if topic is None or stream.frame == topic]
        if any(self._lacks(stream, start) for stream in wanted):
            try:
                self._call(lambda state: state.tell_everything(), CALL_S)
                self._publish()
            except (ServerUnavailableError, ClosedError) as error:
                log.warning("the whole content could not be published (%s): a replay has a gap", error)
        theirs = all(stream.topic.engine == "vllm" for stream in wanted) and bool(wanted)
        for stream, number, payload in list(self._past):
            if number >= start and (topic is None or stream.frame == topic):
                head = () if theirs else (stream.frame,)
                self._router.send_multipart((peer, b"", *head, number.to_bytes(8, "big"), payload), zmq.DONTWAIT)
        self._router.send_multipart((peer, b"", *(() if theirs else (b"",)), END, b""), zmq.DONTWAIT)

    def _lacks(self, stream: _Stream, start: int) -> bool:
        """Whether a subscriber that has everything before ``start`` would not be right after a replay from there."""
        if start >= stream.following:
            return False
        first = next((number for theirs, number, _ in self._past if theirs is stream), stream.following)
        return first > max(start, stream.complete_from)


def _events(note: Note) -> Iterator[_Event]:
    topic = note.topic
    if isinstance(note, Stored):
        yield from _stored(topic, note.parent, note.hashes)
    elif isinstance(note, Removed):
        for some in _pieces(note.hashes):
            yield BlockRemoved(block_hashes(topic.engine, some), MEDIUM)
    else:
        if not (isinstance(note, Everything) and note.more):
            yield AllBlocksCleared()
        if isinstance(note, Everything):
            for parent, hashes in note.runs():
                yield from _stored(topic, parent, hashes)


def _stored(topic: Topic, parent: bytes, hashes: bytes) -> Iterator[_Event]:
    for some in _pieces(hashes):
        above = None if parent == ROOT else block_hashes(topic.engine, parent)[0]
        yield BlockStored(block_hashes(topic.engine, some), above, [], topic.page_tokens, None, MEDIUM, None)
        parent = some[-HASH_BYTES:]


def _pieces(hashes: bytes) -> Iterator[bytes]:
    step = MAX_BATCH * HASH_BYTES
    for start in range(0, len(hashes), step):
        yield hashes[start : start + step]


def check_open(option: str, endpoint: str, *, insecure: bool) -> None:
    """Events say which prompts are cached, by hash, and know no keys: they stay on this machine unless told otherwise.

    Raises:
        ConfigError: with the value and the cure.
    """
    from maru_server.web import is_loopback

    if endpoint.startswith("ipc:///"):
        return
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or not host or not (port == "*" or port.isdigit()):
        raise ConfigError(f"{option} is {endpoint!r}: give tcp://127.0.0.1:5557 or ipc:///path/to/socket")
    if not insecure and not is_loopback(host.strip("[]")):
        raise ConfigError(
            f"{option} is {endpoint!r}, which other machines can reach, and there are no keys for events: bind to 127.0.0.1, "
            "or give --insecure-events if the network is yours alone"
        )


def _bind(option: str, socket: zmq.Socket[bytes], endpoint: str) -> Bound:
    try:
        return bind(socket, endpoint)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--bind", option)) from error
