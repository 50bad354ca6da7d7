"""A real pool with content, and damage to it.

The content of every object follows from what it is, so that a reader can say of any bytes whether they are the right ones.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from maru_core.pool import PoolMemory, parse_pool_uri
from maru_core.pool.format import (
    BLOCK_BYTES,
    COMPONENT_BYTES,
    NAMESPACE_BYTES,
    RECORD_BYTES,
)
from maru_core.pool.geometry import Geometry
from maru_core.protocol import (
    NO_SLOT,
    PROTOCOL_VERSION,
    ROOT,
    Commit,
    Committed,
    Delete,
    Hello,
    Located,
    Match,
    NamespaceOpened,
    OpenNamespace,
    Reply,
    Request,
    Reserve,
    Reserved,
    Welcome,
)
from maru_server.config import StateConfig
from maru_server.directory import PoolDirectory
from maru_server.state import ServerState
from tests.support import namespace

CREATED_NS: Final = 1_700_000_000 * 10**9
WALL: Final = 1_750_000_000.0
GRAIN: Final = 4096
#: component -> (shards, bytes of an object)
SHAPES: Final = {"kv": (1, 4000), "swa": (1, 4000), "tp": (2, 4096), "mamba": (1, 9000)}
TAGS: Final = ("red", "blue")
CHAINS: Final = ("trunk", "left", "right", "other", "late")


@functools.cache
def key(chain: str, index: int) -> bytes:
    return hashlib.sha256(f"{chain}/{index}".encode()).digest()


@functools.cache
def pages_of(chain: str) -> list[bytes]:
    """The hashes of a whole chain; two of them share the trunk's first two pages."""
    own = [key(chain, index) for index in range(4)]
    return [*(key("trunk", index) for index in range(2)), *own] if chain in ("left", "right") else own


@functools.cache
def content(tag: str, component: str, shard: int, page: bytes) -> bytes:
    """The bytes of one object."""
    nbytes = SHAPES[component][1]
    seed = hashlib.sha256(f"{tag}/{component}/{shard}/".encode() + page).digest()
    return (seed * (nbytes // len(seed) + 1))[:nbytes]


class Server:
    """A server's state over a pool file, with one client that stores and reads."""

    def __init__(self, path: Path) -> None:
        self.memory = PoolMemory.create(parse_pool_uri(f"file://{path}"))
        try:
            self.memory.set_owner("a test")
            self.incarnation = self.memory.bump_incarnation()
            self.boot()
        except BaseException:
            self.memory.close()
            raise

    def boot(self) -> None:
        """Start a server over the memory as it is."""
        self.now = 1000.0
        self.rid = 0
        self.directory = PoolDirectory(self.memory.geometry, self.memory.meta)
        self.state = ServerState(
            self.directory, incarnation=self.incarnation, pool_uri="file:///pool", config=StateConfig(), now=self.now,
            wall_offset=WALL,
        )  # fmt: skip
        self.state.check()
        self.state.extents_ready(self.memory.geometry.extent_count, self.now)
        welcome = self.ask(Hello(PROTOCOL_VERSION, 1, b"client".ljust(16), "c", "h", 1, 1, "n", "b"), Welcome)
        self.session = welcome.session
        self.numbers: dict[str, int] = {}

    def ask(self, message: Request, kind: type[Any]) -> Any:
        reply: Reply | None = self.state.handle(message, self.now)
        assert isinstance(reply, kind), (message, reply)
        return reply

    def number(self, tag: str) -> int:
        if tag not in self.numbers:
            opened = self.ask(OpenNamespace(2, self.session, namespace(tag=tag).record()), NamespaceOpened)
            self.numbers[tag] = opened.namespace
        return self.numbers[tag]

    def store(self, tag: str, component: str, chain: str, *, commit: bool = True, shards: int | None = None) -> int:
        """Store a chain, as far as there is room; how many objects."""
        world, nbytes = SHAPES[component]
        count = 0
        hashes = pages_of(chain)
        for shard in range(world if shards is None else shards):
            reserved: Reserved = self.ask(
                Reserve(3, self.session, self.number(tag), component, shard, world, ROOT, b"".join(hashes), nbytes),
                Reserved,
            )
            slots, generations, sums = b"", b"", []
            for index, status in enumerate(reserved.status):
                if status == 0:
                    slots += reserved.slots[4 * index : 4 * index + 4]
                    generations += reserved.generations[8 * index : 8 * index + 8]
                    data = content(tag, component, shard, hashes[index])
                    offset = int.from_bytes(reserved.offsets[8 * index : 8 * index + 8], "little")
                    at = offset - self.memory.geometry.off_data
                    assert 0 <= at <= self.memory.geometry.data_bytes - len(data), "a slot outside the pool"
                    self.memory.data[at : at + len(data)] = np.frombuffer(data, np.uint8)
                    sums.append(xxhash.xxh3_64_intdigest(data))
            if commit and slots:
                checksums = np.array(sums, "<u8").tobytes()
                done = self.ask(Commit(4, self.session, slots, generations, checksums), Committed)
                count += done.status.count(0)
        return count

    def delete(self, tag: str, chain: str, index: int) -> None:
        self.state.handle(Delete(5, self.session, self.number(tag), pages_of(chain)[index]), self.now)

    def read_everything(self, *, checksums: bool = False, prefixes: bool = False) -> int:
        """Read every page that can be found, as readers do, and see that each is the right one; how many objects.

        Args:
            prefixes: also as the prefixes of chains.
        """
        self.generations = self.memory.generations
        found = 0
        for tag in TAGS:
            for chain in CHAINS:
                for component, (world, _) in SHAPES.items():
                    for shard in range(world):
                        found += self._read(tag, chain, component, shard, True, checksums)
                        if prefixes:
                            self._read(tag, chain, component, shard, False, checksums)
        return found

    def _read(self, tag: str, chain: str, component: str, shard: int, sparse: bool, checksums: bool) -> int:
        hashes = pages_of(chain)
        located: Located = self.ask(
            Match(6, self.session, self.number(tag), [component], shard, b"".join(hashes), sparse), Located
        )
        slots = np.frombuffer(located.slots, "<u4")
        offsets = np.frombuffer(located.offsets, "<u8").tolist()
        lengths = np.frombuffer(located.lengths, "<u8").tolist()
        generations = np.frombuffer(located.generations, "<u8").tolist()
        sums = np.frombuffer(located.checksums, "<u8").tolist()
        found = 0
        for index, slot in enumerate(slots.tolist()):
            if slot == NO_SLOT:
                continue
            expected = content(tag, component, shard, hashes[index])
            if lengths[index] != len(expected) or int(self.generations[slot]) != generations[index]:
                continue  # a reader's miss
            at = offsets[index] - self.memory.geometry.off_data
            assert 0 <= at <= self.memory.geometry.data_bytes - len(expected), "a slot outside the pool"
            data = self.memory.data[at : at + len(expected)].tobytes()
            if checksums and xxhash.xxh3_64_intdigest(data) != sums[index]:
                continue
            assert data == expected, f"a wrong page: {tag} {chain}/{index} {component} {shard} in slot {slot}"
            found += 1
        return found

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 4
            self.state.tick(self.now)

    def close(self) -> None:
        self.memory.close()


@dataclass
class Scene:
    """The bytes of one pool at several moments, the last of them the present."""

    geometry: Geometry
    moments: list[bytes] = field(default_factory=list)

    @property
    def present(self) -> bytes:
        return self.moments[-1]

    def regions(self) -> dict[str, tuple[int, int, int]]:
        """name -> (first byte, end, bytes of an entry) of everything before the extents."""
        g = self.geometry
        return {
            "superblock": (0, 152, 8),
            "owner": (BLOCK_BYTES, 2 * BLOCK_BYTES, 8),
            "components": (
                g.off_components,
                g.off_components + g.component_capacity * COMPONENT_BYTES,
                COMPONENT_BYTES,
            ),
            "namespaces": (
                g.off_namespaces,
                g.off_namespaces + g.namespace_capacity * NAMESPACE_BYTES,
                NAMESPACE_BYTES,
            ),
            "extents": (g.off_extents, g.off_extents + 8 * g.extent_count, 8),
            "generations": (g.off_generations, g.off_generations + 8 * g.slot_count, 8),
            "directory": (g.off_directory, g.off_directory + RECORD_BYTES * g.slot_count, RECORD_BYTES),
        }


def make_scene(path: Path) -> Scene:
    """Store, delete and store again, so that slots have had several owners and extents several sizes."""
    geometry = Geometry.plan(
        14 * 8 * GRAIN + (96 << 10), align=GRAIN, extent_bytes=8 * GRAIN, min_slot_bytes=GRAIN, pool_uuid=os.urandom(16),
        created_ns=CREATED_NS, component_capacity=6, namespace_capacity=6,
    )  # fmt: skip
    image = np.zeros(geometry.pool_bytes, np.uint8)
    image[:BLOCK_BYTES] = np.frombuffer(geometry.superblock(), np.uint8)
    first, end = geometry.off_generations, geometry.off_generations + 8 * geometry.slot_count
    image[first:end].view("<u8")[:] = CREATED_NS // 10**9 << 32
    image[BLOCK_BYTES : BLOCK_BYTES + 8].view("<u8")[:] = CREATED_NS
    path.write_bytes(image.tobytes())
    scene = Scene(geometry)
    server = Server(path)

    def moment() -> None:
        server.state.finish()
        server.state.check()
        scene.moments.append(path.read_bytes())

    moment()
    server.store("red", "kv", "trunk")
    server.store("red", "mamba", "other")
    server.store("red", "swa", "trunk")
    moment()
    server.store("blue", "kv", "trunk")
    server.store("red", "kv", "left")
    server.store("blue", "tp", "trunk")
    server.store("blue", "mamba", "trunk")
    moment()
    server.delete("red", "other", 0)
    server.delete("blue", "trunk", 2)
    server.store("red", "tp", "trunk")
    server.store("red", "kv", "right")
    server.store("blue", "kv", "other")
    moment()
    server.delete("red", "left", 3)
    server.store("blue", "tp", "late")
    server.store("red", "tp", "other", shards=1)
    server.store("red", "kv", "late", commit=False)
    assert server.read_everything() > 60
    moment()
    server.close()
    return scene


# ------------------------------------------------------------ damage


def extreme(chance: random.Random) -> bytes:
    value = chance.choice(
        [0, 1, 2, 3, 7, 1 << 12, 3 << 12, 1 << 13, 1 << 15, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1]
    )
    return value.to_bytes(8, "little")


def damage(scene: Scene, chance: random.Random, region: str, image: bytearray) -> str:
    """Damage one region in one way; says how."""
    start, end, entry = scene.regions()[region]
    count = (end - start) // entry

    def flip() -> str:
        bits = chance.choice([1, 1, 2, 8])
        for _ in range(bits):
            image[chance.randrange(start, end)] ^= 1 << chance.randrange(8)
        return f"{bits} bits"

    def noise() -> str:
        length = min(chance.choice([1, 4, 8, 64, 512, 4096]), end - start)
        at = chance.randrange(start, end - length + 1)
        image[at : at + length] = chance.randbytes(length)
        return f"{length} random bytes at {at}"

    def fill() -> str:
        length = min(chance.choice([8, 128, 1024, end - start]), end - start)
        at = chance.randrange(start, end - length + 1)
        image[at : at + length] = chance.choice([b"\0", b"\xff"]) * length
        return f"{length} equal bytes at {at}"

    def word() -> str:
        at = start + 8 * chance.randrange((end - start) // 8)
        image[at : at + 8] = extreme(chance)
        return f"a strange number at {at}"

    def entries() -> tuple[slice, slice]:
        one, other = (start + entry * chance.randrange(count) for _ in range(2))
        return slice(one, one + entry), slice(other, other + entry)

    def swap() -> str:
        one, other = entries()
        image[one], image[other] = image[other], image[one]
        return f"entries at {one.start} and {other.start} swapped"

    def copy() -> str:
        one, other = entries()
        image[one] = image[other]
        return f"entry at {other.start} copied to {one.start}"

    def old() -> str:
        moment = chance.randrange(len(scene.moments) - 1)
        first, length = 0, count
        if chance.random() < 0.5:
            first = chance.randrange(count)
            length = chance.randrange(1, count - first + 1)
        part = slice(start + entry * first, start + entry * (first + length))
        image[part] = scene.moments[moment][part]
        return f"entries {first} to {first + length} as they were at moment {moment}"

    ways: list[Callable[[], str]] = [flip, noise, fill, word, swap, copy, old]
    way = chance.choice(ways)
    return f"{region}: {way()}"
