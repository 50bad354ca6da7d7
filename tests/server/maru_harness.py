"""A whole metadata server in one process, over plain memory: what the server tests drive."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from maru_core.namespace import Namespace
from maru_core.pool.geometry import Geometry
from maru_core.protocol import (
    PROTOCOL_VERSION,
    ROOT,
    Clear,
    Commit,
    Committed,
    Delete,
    Done,
    Hello,
    Located,
    Match,
    MissReason,
    NamespaceOpened,
    OpenNamespace,
    Release,
    Reply,
    Request,
    Reserve,
    Reserved,
    Unhold,
    Welcome,
    decode_reply,
    encode,
)
from maru_server.config import StateConfig
from maru_server.directory import PoolDirectory
from maru_server.sessions import LOCAL, Peer
from maru_server.state import ServerState

CREATED_NS = 1_700_000_000 * 10**9
WALL_OFFSET = 1_800_000_000.0
SLOT = 4096


def geometry(extents: int = 8, slots: int = 8, **options: Any) -> Geometry:
    """A pool of ``extents`` extents, each of ``slots`` slots of 4 KiB."""
    extent = slots * SLOT
    options.setdefault("component_capacity", 4)
    options.setdefault("namespace_capacity", 4)
    nbytes = extents * extent
    while True:
        planned = Geometry.plan(
            nbytes + (64 << 10),
            align=SLOT,
            extent_bytes=extent,
            min_slot_bytes=SLOT,
            pool_uuid=b"harness pool....",
            created_ns=CREATED_NS,
            **options,
        )
        if planned.extent_count >= extents:
            break
        nbytes += extent
    assert planned.extent_count >= extents
    return planned


def chain(name: object, count: int, start: int = 0) -> bytes:
    """Packed hashes of the pages ``start .. start + count`` of a sequence."""
    return b"".join(hashlib.sha256(f"{name}/{index}".encode()).digest() for index in range(start, start + count))


def record(tag: str = "") -> bytes:
    """A namespace record."""
    return Namespace(
        engine="test",
        hash_scheme="test-sha256",
        model="m",
        weights="w",
        adapter="",
        kv_dtype="bfloat16",
        page_tokens=16,
        layers="0:2",
        heads="kv2x16",
        layout="page_first",
        tensor_parallel=1,
        pipeline_parallel=1,
        context_parallel=1,
        data_parallel=1,
        draft="",
        tag=tag,
    ).record()


class Server:
    """A server and its pool; ``now`` is the only clock. Every step is followed by the full integrity check.

    With ``shorter=False`` every message is unpacked and handled, also where the service would have a shorter way."""

    def __init__(
        self,
        shape: Geometry | None = None,
        *,
        meta: npt.NDArray[np.uint8] | None = None,
        directory: type[PoolDirectory] = PoolDirectory,
        checked: bool = True,
        shorter: bool = True,
        **config: Any,
    ) -> None:
        self.geometry = shape or geometry()
        self.meta = np.zeros(self.geometry.off_data, np.uint8) if meta is None else meta
        self.config = StateConfig(**config)
        self.checked = checked
        self.shorter = shorter
        self.went_shorter: Counter[type] = Counter()
        self.now = 1000.0
        self.incarnation = 0
        self._directory_type = directory
        self._rid = 0
        self.boot()

    def boot(self) -> None:
        """Start a server over the memory as it is."""
        self.boot_without_memory()
        self.state.extents_ready(self.geometry.extent_count, self.now)
        self._check()

    def boot_without_memory(self) -> None:
        """The same, before extents beyond those in use have their memory."""
        self.incarnation += 1
        self.directory = self._directory_type(self.geometry, self.meta)
        self.state = ServerState(
            self.directory,
            incarnation=self.incarnation,
            pool_uri="shm://test",
            config=self.config,
            now=self.now,
            wall_offset=WALL_OFFSET,
        )

    def restart(self, meta: npt.NDArray[np.uint8] | None = None) -> None:
        """Lose everything but the pool's bytes, or a copy of them."""
        self.meta = (self.meta if meta is None else meta).copy()
        self.boot()

    def _check(self) -> None:
        if self.checked:
            self.state.check()

    def send(self, message: Request, peer: Peer = LOCAL) -> Reply | None:
        # As the service does it.
        packed = self.state.answer(encode(message), self.now, peer) if self.shorter else None
        self.went_shorter[type(message)] += packed is not None
        reply = self.state.handle(message, self.now, peer) if packed is None else decode_reply(packed)
        self._check()
        return reply

    def wait(self, seconds: float, step: float = 1.0, *, alive: tuple[Client, ...] = ()) -> None:
        """Let time pass, in ticks; the clients in ``alive`` keep up their heartbeats."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + step)
            for client in alive:
                client.heartbeat()
            self.state.tick(self.now)
            self._check()

    def client(self, name: str = "client", **options: Any) -> Client:
        return Client(self, name, **options)

    @property
    def stats(self) -> dict[str, Any]:
        return self.state.stats()


class Client:
    """One session, with one namespace open; arrays in, arrays out."""

    def __init__(
        self, server: Server, name: str = "client", *, tag: str = "", client_id: bytes | None = None, peer: Peer = LOCAL
    ) -> None:
        self.server = server
        self.peer = peer
        self.name = name
        self.tag = tag
        self.client_id = client_id or hashlib.sha256(name.encode()).digest()[:16]
        self.connect()

    def send(self, message: Request) -> Reply | None:
        return self.server.send(message, self.peer)

    def connect(self) -> None:
        reply = self.send(Hello(PROTOCOL_VERSION, 1, self.client_id, self.name, "host", 1, 2, "ns", "boot"))
        assert isinstance(reply, Welcome), reply
        self.session = reply.session
        opened = self.send(OpenNamespace(2, self.session, record(self.tag)))
        assert isinstance(opened, NamespaceOpened), opened
        self.namespace = opened.namespace

    def reserve_reply(self, hashes: bytes, **options: Any) -> Reply | None:
        values = {"component": "kv", "shard": 0, "world": 1, "parent": ROOT, "nbytes": 4000, **options}
        return self.send(
            Reserve(
                3,
                self.session,
                self.namespace,
                values["component"],
                values["shard"],
                values["world"],
                values["parent"],
                hashes,
                values["nbytes"],
            )
        )

    def reserve(self, hashes: bytes, **options: Any) -> Grant:
        reply = self.reserve_reply(hashes, **options)
        assert isinstance(reply, Reserved), reply
        return Grant(reply)

    def commit(self, grant: Grant, which: slice | list[int] = slice(None), checksums: bytes = b"") -> list[int]:
        """Commit status of the slots that were reserved."""
        slots, generations = grant.mine(which)
        reply = self.send(Commit(4, self.session, slots.tobytes(), generations.tobytes(), checksums))
        assert isinstance(reply, Committed), reply
        return list(reply.status)

    def store(self, hashes: bytes, **options: Any) -> Grant:
        """Reserve and commit; every object must be new."""
        grant = self.reserve(hashes, **options)
        assert set(grant.status) <= {0}, grant.status
        assert set(self.commit(grant)) <= {0}
        return grant

    def release(self, grant: Grant, which: slice | list[int] = slice(None)) -> int:
        slots, generations = grant.mine(which)
        reply = self.send(Release(5, self.session, slots.tobytes(), generations.tobytes()))
        assert isinstance(reply, Done), reply
        return reply.count

    def match_reply(
        self, hashes: bytes, components: list[str] | None = None, shard: int = 0, sparse: bool = False, **options: Any
    ) -> Reply | None:
        components = components or ["kv"]
        return self.send(Match(6, self.session, self.namespace, components, shard, hashes, sparse, **options))

    def match(
        self, hashes: bytes, components: list[str] | None = None, shard: int = 0, sparse: bool = False, **options: Any
    ) -> Place:
        """``options``: ``rules``, ``hold``."""
        reply = self.match_reply(hashes, components, shard, sparse, **options)
        assert isinstance(reply, Located), reply
        return Place(reply)

    def unhold(self, request: bytes) -> int:
        reply = self.send(Unhold(10, self.session, self.namespace, request))
        assert isinstance(reply, Done), reply
        return reply.count

    def delete(self, hashes: bytes) -> int:
        reply = self.send(Delete(7, self.session, self.namespace, hashes))
        assert isinstance(reply, Done), reply
        return reply.count

    def clear(self, everything: bool = False) -> int:
        reply = self.send(Clear(8, self.session, None if everything else self.namespace))
        assert isinstance(reply, Done), reply
        return reply.count

    def touch(self, hashes: bytes) -> None:
        from maru_core.protocol import Touch

        assert self.send(Touch(self.session, self.namespace, hashes)) is None

    def heartbeat(self) -> Reply | None:
        from maru_core.protocol import Heartbeat

        return self.send(Heartbeat(9, self.session))

    def goodbye(self) -> None:
        from maru_core.protocol import Goodbye

        assert self.send(Goodbye(self.session)) is None


class Grant:
    """An unpacked Reserved."""

    def __init__(self, reply: Reserved) -> None:
        self.status = list(reply.status)
        self.slots = np.frombuffer(reply.slots, "<u4")
        self.offsets = np.frombuffer(reply.offsets, "<u8")
        self.generations = np.frombuffer(reply.generations, "<u8")
        assert len(self.status) == len(self.slots) == len(self.offsets) == len(self.generations)

    def mine(self, which: slice | list[int] = slice(None)) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64]]:
        """(slots, generations) of the objects with a reservation."""
        got = np.array(self.status, np.uint8) == 0
        return self.slots[got][which], self.generations[got][which]


class Place:
    """An unpacked Located."""

    def __init__(self, reply: Located) -> None:
        self.pages = reply.pages
        self.slots = np.frombuffer(reply.slots, "<u4").tolist()
        self.offsets = np.frombuffer(reply.offsets, "<u8").tolist()
        self.generations = np.frombuffer(reply.generations, "<u8").tolist()
        self.lengths = np.frombuffer(reply.lengths, "<u8").tolist()
        self.checksums = np.frombuffer(reply.checksums, "<u8").tolist()
        self.why = MissReason(reply.why)
        self.held_s = reply.held_s
        self.ends = np.frombuffer(reply.ends, "<u4").tolist()
        self.covered = reply.covered
        assert len({*map(len, (self.slots, self.offsets, self.generations, self.lengths, self.checksums))}) == 1
