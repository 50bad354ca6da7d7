"""Loading in steps by the reader's own copies: what counts is decided after the last of them. And movers of the caller's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maru_core.mover import CxlMover
from maru_core.pool import PoolMemory
from maru_core.protocol import ROOT
from maru_core.store import Store, StoreConfig
from support import Pages, ServerProcess, await_condition, hashes, namespace, running_server

SIZES = (12_000, 8_000)
NBYTES = sum(SIZES)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with running_server(tmp_path, "--quarantine", "1") as process:
        yield process


@pytest.fixture
def open_store(server: ServerProcess) -> Iterator[Any]:
    opened: list[Store] = []

    def make(*, mover: Any = None, **config: Any) -> Store:
        settings = StoreConfig(server=server.endpoint, **{"timeout_ms": 60_000, **config})
        opened.append(Store.open(settings, namespace(), name=f"test {len(opened)}", mover=mover))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


def put(store: Store, chain: bytes, seed: int = 1) -> Pages:
    pages = Pages(len(chain) // 32, SIZES, seed=seed)
    assert store.put("kv", 0, 1, ROOT, chain, pages.fragments).all()
    return pages


def test_what_is_read_in_steps_counts_at_the_end(open_store: Any) -> None:
    a, b = open_store(), open_store()
    chain = hashes(6)
    pages = put(a, chain)
    reading = b.read("kv", 0, chain, NBYTES)
    assert len(reading) == 6
    copy = Pages(6, SIZES)
    for i in range(6):  # in steps, and in another order
        index = np.array([5 - i])
        reading.mover.load(reading.offsets[index], copy.fragments.select(index))
    assert b.metrics.loaded_pages == 0
    assert reading.finish()
    assert copy.same(pages).all()
    assert (b.metrics.loaded_pages, b.metrics.loaded_bytes) == (6, 6 * NBYTES)
    assert not reading.finish(), "it was finished before"


def test_all_or_nothing_is_read(open_store: Any) -> None:
    a, b = open_store(), open_store()
    chain = hashes(4)
    put(a, chain)
    assert b.read("kv", 0, chain + hashes(1, seed=8), NBYTES) is None
    assert b.metrics.miss_not_stored == 1
    assert b.read("kv", 0, chain, NBYTES - 1) is None
    assert b.metrics.miss_length == 4
    assert b.read("swa", 0, chain, NBYTES) is None
    assert b.read("kv", 0, b"", NBYTES) is None


def test_a_slot_given_away_before_the_end_is_no_load(open_store: Any) -> None:
    a, b = open_store(), open_store()
    chain = hashes(4)
    put(a, chain)
    reading = b.read("kv", 0, chain, NBYTES)
    a.clear()
    put(a, hashes(4, seed=2), seed=2)
    reading.mover.load(reading.offsets, Pages(4, SIZES).fragments)
    assert not reading.finish()
    assert b.metrics.miss_evicted == 4
    assert b.metrics.loaded_pages == 0


def test_a_copy_that_failed_is_no_load(open_store: Any) -> None:
    a, b = open_store(), open_store()
    put(a, hashes(4))
    reading = b.read("kv", 0, hashes(4), NBYTES)
    assert not reading.finish(landed=False)
    assert b.metrics.miss_error == 4


def test_locations_that_are_out_of_date_are_asked_again(open_store: Any) -> None:
    a, b = open_store(), open_store()
    chain = hashes(4)
    put(a, chain)
    assert b.prefix(["kv"], 0, chain) == 4
    a.clear()
    put(a, hashes(4, seed=2), seed=2)  # into the same slots
    assert b.read("kv", 0, chain, NBYTES) is None
    pages = put(a, chain, seed=3)
    reading = b.read("kv", 0, chain, NBYTES)
    copy = Pages(4, SIZES)
    reading.mover.load(reading.offsets, copy.fragments)
    assert reading.finish()
    assert copy.same(pages).all()


def test_wrong_bytes_are_no_load_with_checksums(open_store: Any) -> None:
    a, b = open_store(verify="checksum"), open_store(verify="checksum")
    chain = hashes(3)
    put(a, chain)
    good = b.read("kv", 0, chain, NBYTES)
    assert good.finish()
    reading = b.read("kv", 0, chain, NBYTES)
    memory = reading.memory
    memory.data[int(reading.offsets[1]) - memory.geometry.off_data + NBYTES - 1] ^= 1
    assert not reading.finish()
    assert b.metrics.miss_checksum == 1


def test_close_waits_for_a_reading(open_store: Any) -> None:
    a, b = open_store(), open_store()
    put(a, hashes(2))
    reading = b.read("kv", 0, hashes(2), NBYTES)
    closing = threading.Thread(target=b.close, args=(60.0,))
    closing.start()
    await_condition(lambda: b._lives.closed, "the store closes")
    closing.join(0.05)
    assert closing.is_alive()
    assert reading.finish()
    closing.join(60)
    assert not closing.is_alive()
    assert b.read("kv", 0, hashes(2), NBYTES) is None


def test_changes_are_seen_without_a_message(open_store: Any) -> None:
    a, b = open_store(), open_store()
    before = b.changes()
    assert before is not None
    put(a, hashes(3))
    stored = b.changes()
    assert stored != before
    assert b.prefix(["kv"], 0, hashes(3)) == 3
    assert b.read("kv", 0, hashes(3), NBYTES).finish()
    a.touch(hashes(3))
    assert b.changes() == stored, "nothing was stored or removed"
    assert a.delete(hashes(3)[64:]) == 1
    assert b.changes() != stored


def test_changes_are_not_known_without_a_server(open_store: Any, server: ServerProcess) -> None:
    a = open_store()
    before = a.changes()
    a._session.timeout_s = 0.5  # from here on it looks for the server
    server.kill()
    await_condition(lambda: a.prefix(["kv"], 0, hashes(1)) == 0 and a.changes() is None, "the server is missed")
    server.start()
    await_condition(lambda: a.prefix(["kv"], 0, hashes(1)) == 0 and a.changes() is not None, "the server is back")
    assert a.changes() != before


class Counting(CxlMover):
    """A mover of the caller's: the store's own, that remembers what became of it."""

    def __init__(self, memory: PoolMemory) -> None:
        super().__init__(memory)
        self.stored = self.closed = 0

    def store(self, offsets: Any, buffers: Any) -> None:
        assert not self.closed
        super().store(offsets, buffers)
        self.stored += len(buffers)

    def close(self) -> None:
        self.closed += 1


def test_a_mover_of_the_callers_serves_until_the_store_closes(open_store: Any, server: ServerProcess) -> None:
    made: list[Counting] = []

    def make(memory: PoolMemory) -> Counting:
        made.append(Counting(memory))
        return made[-1]

    store = open_store(mover=make)
    put(store, hashes(2))
    server.kill()
    server.start()
    await_condition(lambda: store.put("kv", 0, 1, ROOT, hashes(1, 9), Pages(1, SIZES).fragments).all(), "it is back")
    assert [mover.closed for mover in made] == [0], "the pool is the same: so is its mover"
    assert made[0].stored == 3
    reading = store.read("kv", 0, hashes(2), NBYTES)
    assert reading.mover is made[0]
    store.close(0.0)
    assert made[0].closed == 0, "somebody still reads"
    reading.finish()
    assert made[0].closed == 1
