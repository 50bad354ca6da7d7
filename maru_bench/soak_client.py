"""One client of ``maru-bench soak``: stores, looks up, loads, touches and deletes until it is told to stop, or killed.

What a page holds follows from its hash, so every byte that is loaded can be checked by whoever loads it, whoever stored it.
Counts lie in a file that all clients and the experiment map: what a killed client had counted stays.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from maru_bench.copy import BENCH_NAMESPACE
from maru_core.mover import Fragments
from maru_core.namespace import Namespace
from maru_core.protocol import HASH_BYTES, ROOT
from maru_core.store import Store, StoreConfig

CHAINS: Final = 40
CHAIN_PAGES: Final = 24
#: Pages that each group of chains has in common.
TRUNK_PAGES: Final = 8
GROUP: Final = 4
#: Bytes of a page, by kind: two engines with different models.
PAGE_BYTES: Final = {"small": 20_000, "large": 90_000}

#: Longest pause between a lookup and the load that follows it, seconds.
PAUSE_S: Final = 0.2

COUNTS: Final = (
    "lookups", "stored_pages", "loaded_pages", "loaded_bytes", "missed_pages", "touches", "deletes", "wrong_pages", "false_hits",
)  # fmt: skip


class ClientOptions(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    seed: int
    server: str
    counts: str
    """Path of the file of counts: one row of int64 per client."""


def namespace(kind: str) -> Namespace:
    return msgspec.structs.replace(BENCH_NAMESPACE, tag=f"soak {kind}")


def page_hash(chain: int, index: int) -> bytes:
    name = f"trunk {chain // GROUP}" if index < TRUNK_PAGES else f"chain {chain}"
    return hashlib.sha256(f"{name} page {index}".encode()).digest()


def chain_hashes(chain: int) -> bytes:
    return b"".join(page_hash(chain, index) for index in range(CHAIN_PAGES))


def content(kind: str, page: bytes) -> npt.NDArray[np.uint8]:
    """The bytes of a page."""
    pattern = np.frombuffer(hashlib.sha256(kind.encode() + page).digest(), np.uint8)
    return np.resize(pattern, PAGE_BYTES[kind])


class Counts:
    """A row of the shared file."""

    def __init__(self, path: str, row: int) -> None:
        with Path(path).open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._row = np.frombuffer(self._memory, np.int64).reshape(-1, len(COUNTS))[row]

    def add(self, name: str, count: int = 1) -> None:
        self._row[COUNTS.index(name)] += count


class Engine:
    """A buffer of pages of one kind, and the store that it is loaded from."""

    def __init__(self, kind: str, options: ClientOptions, counts: Counts) -> None:
        self.kind = kind
        self.nbytes = PAGE_BYTES[kind]
        self.counts = counts
        self.buffer = np.zeros((CHAIN_PAGES, self.nbytes), np.uint8)
        base = self.buffer.ctypes.data
        addresses = (base + np.arange(CHAIN_PAGES, dtype=np.uint64) * np.uint64(self.nbytes)).reshape(-1, 1)
        self.fragments = Fragments(addresses.astype(np.uint64), np.array([self.nbytes], np.uint64))
        self.store = Store.open(
            StoreConfig(server=options.server, timeout_ms=500, copy_threads=1),
            namespace(kind),
            name=f"soak {options.number} {kind}",
        )

    def load(self, hashes: bytes, pause_s: float = 0.0) -> int:
        """Look a chain up and load what is there; every byte is checked. Returns how many pages of it there were.

        Args:
            pause_s: between the two, as an engine that is busy: what was found may be gone by then, and its slot another's.
        """
        pages = self.store.prefix(["kv"], 0, hashes)
        self.counts.add("lookups")
        if not pages:
            return 0
        time.sleep(pause_s)
        self.buffer[:pages] = 0xA5  # what was there before must not look like a page
        loaded = self.store.get("kv", 0, hashes[: pages * HASH_BYTES], self.fragments.select(slice(0, pages)))
        for index in np.flatnonzero(loaded).tolist():
            page = hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]
            if not np.array_equal(self.buffer[index], content(self.kind, page)):
                self.counts.add("wrong_pages")
        count = int(loaded.sum())
        self.counts.add("loaded_pages", count)
        self.counts.add("loaded_bytes", count * self.nbytes)
        self.counts.add("missed_pages", pages - count)
        return pages

    def put(self, hashes: bytes, first: int) -> None:
        """Compute the pages from ``first`` on, as an engine would, and store them."""
        count = len(hashes) // HASH_BYTES
        if first >= count:
            return
        for index in range(first, count):
            self.buffer[index] = content(self.kind, hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES])
        parent = hashes[(first - 1) * HASH_BYTES : first * HASH_BYTES] if first else ROOT
        stored = self.store.put(
            "kv", 0, 1, parent, hashes[first * HASH_BYTES :], self.fragments.select(slice(first, count))
        )
        self.counts.add("stored_pages", int(stored.sum()))

    def absent(self, chance: random.Random) -> None:
        """Pages that nobody ever stores are never found."""
        if self.store.prefix(["kv"], 0, chance.randbytes(4 * HASH_BYTES)):
            self.counts.add("false_hits")


def run(options: ClientOptions) -> None:
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    chance = random.Random(f"{options.seed} {options.number} {os.getpid()}")
    counts = Counts(options.counts, options.number)
    engines = [Engine(kind, options, counts) for kind in PAGE_BYTES]
    while not stopping and os.getppid() != 1:
        # Two of three times one of a few hot chains.
        hot = chance.random() < 0.66
        chain = chance.randrange(CHAINS // 5 if hot else CHAINS)
        hashes = chain_hashes(chain)[: chance.randint(1, CHAIN_PAGES) * HASH_BYTES]
        engine = engines[min(chance.randrange(4), 2) // 2]
        found = engine.load(hashes, chance.uniform(0.0, PAUSE_S) if chance.random() < 0.2 else 0.0)
        if chance.random() < 0.8:
            engine.put(hashes, found)
        if chance.random() < 0.1:
            engine.store.touch(hashes)
            counts.add("touches")
        if chance.random() < 0.02:
            engine.store.delete(hashes[-HASH_BYTES:])
            counts.add("deletes")
        if chance.random() < 0.05:
            engine.absent(chance)
    for engine in engines:
        engine.store.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    run(msgspec.json.decode(sys.argv[1].encode(), type=ClientOptions))
