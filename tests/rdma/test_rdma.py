"""Pools that are not mapped here: pages go both ways through agents, byte for byte, and no failure makes a wrong one."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maru_core.errors import PoolError
from maru_core.protocol import HASH_BYTES, ROOT
from maru_core.rdma import TransferError
from maru_core.store import Store, StoreConfig
from support import Pages, ServerProcess, await_condition, hashes, namespace

SIZES = (12_000, 8_000)
Agents = Callable[..., Any]
Open = Callable[..., Store]


def put(store: Store, chain: bytes, pages: Pages) -> np.ndarray:
    return store.put("kv", 0, 1, ROOT, chain, pages.fragments)


def get(store: Store, chain: bytes, sizes: tuple[int, ...] = SIZES) -> tuple[np.ndarray, Pages]:
    pages = Pages(len(chain) // HASH_BYTES, sizes)
    return store.get("kv", 0, chain, pages.fragments), pages


def register(store: Store, pages: Pages) -> None:
    for part in pages.data:
        store.register(part.ctypes.data, part.nbytes)


def test_pages_go_both_ways(agents: Agents, open_store: Open) -> None:
    agents().wait_announced()
    far, near = open_store(), open_store("cxl")
    assert far._lives.current().reach.memory is None
    chain, pages = hashes(40), Pages(40, SIZES, seed=1)
    assert put(near, chain, pages).all()
    assert far.prefix(["kv"], 0, chain) == 40
    loaded, copy = get(far, chain)
    assert loaded.all()
    assert copy.same(pages).all()
    chain, pages = hashes(40, seed=2), Pages(40, SIZES, seed=2)
    assert put(far, chain, pages).all()
    loaded, copy = get(near, chain)
    assert loaded.all()
    assert copy.same(pages).all()
    loaded, copy = get(open_store(), chain)
    assert copy.same(pages).all()
    assert loaded.all()


def test_registered_memory_is_moved_without_a_copy(agents: Agents, open_store: Open) -> None:
    agents().wait_announced()
    far = open_store()
    chain, pages, copy = hashes(30), Pages(30, SIZES, seed=1), Pages(30, SIZES)
    mover = far._lives.current().reach.mover
    register(far, pages)
    register(far, copy)
    assert put(far, chain, pages).all()
    assert far.get("kv", 0, chain, copy.fragments).all()
    assert copy.same(pages).all()
    assert mover._loads._staging is None
    assert mover._stores._staging is None


def test_many_bytes_in_batches_of_every_size(agents: Agents, open_store: Open) -> None:
    agents().wait_announced()
    far = open_store()
    sizes = (40_000, 25_000)
    for seed in range(12):
        chain, pages, copy = hashes(60, seed=seed), Pages(60, sizes, seed=seed), Pages(60, sizes)
        assert put(far, chain, pages).all()
        assert far.get("kv", 0, chain, copy.fragments).all()
        assert copy.same(pages).all()


def test_a_pool_that_is_here_is_mapped_and_one_that_is_not_goes_through_agents(
    agents: Agents, open_store: Open, server: ServerProcess
) -> None:
    assert open_store("auto")._lives.current().reach.memory is not None
    elsewhere = {"pool": "shm://maru-test-not-on-this-host"}
    with pytest.raises(PoolError, match="not-on-this-host"):
        open_store("auto", **elsewhere)
    agents().wait_announced()
    far = open_store("auto", **elsewhere)
    assert far._lives.current().reach.memory is None
    assert put(far, hashes(3), Pages(3, SIZES, seed=1)).all()
    with pytest.raises(PoolError, match="not-on-this-host"):
        open_store("cxl", **elsewhere)


def test_a_slot_given_away_during_the_copy_is_a_miss(
    agents: Agents, open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents().wait_announced()
    far, near = open_store(), open_store("cxl")
    chain = hashes(8)
    assert put(near, chain, Pages(8, SIZES, seed=1)).all()
    mover = far._lives.current().reach.mover
    load = mover.load

    def meanwhile(offsets: Any, buffers: Any) -> None:
        load(offsets, buffers)
        near.clear()
        put(near, hashes(8, seed=2), Pages(8, SIZES, seed=2))

    monkeypatch.setattr(mover, "load", meanwhile)
    loaded, _ = get(far, chain)
    assert not loaded.any()
    assert far.metrics.miss_evicted >= 8 or far.metrics.miss_not_stored >= 8


def test_checksums_catch_wrong_bytes(agents: Agents, open_store: Open) -> None:
    agents().wait_announced()
    near, far = open_store("cxl", verify="checksum"), open_store(verify="checksum")
    chain = hashes(4)
    assert put(near, chain, Pages(4, SIZES, seed=1)).all()
    assert get(far, chain)[0].all()
    memory = near._lives.current().reach.memory
    reading = near.read("kv", 0, chain, sum(SIZES))
    memory.data[int(reading.offsets[2]) - memory.geometry.off_data] ^= 1
    reading.finish(landed=False)
    assert get(far, chain)[0].tolist() == [True, True, False, True]


def test_a_reading_in_steps_counts_only_what_is_proven(agents: Agents, open_store: Open) -> None:
    agents().wait_announced()
    near, far = open_store("cxl", verify="checksum"), open_store()
    chain, pages, copy = hashes(4), Pages(4, SIZES, seed=1), Pages(4, SIZES)
    assert put(near, chain, pages).all()
    for still_there in (True, False):
        reading = far.read("kv", 0, chain, sum(SIZES))
        assert reading is not None
        assert reading.memory is None
        reading.mover.load(reading.offsets, copy.fragments)
        if not still_there:
            near.clear()
        assert reading.finish() is still_there
        assert copy.same(pages).all()


def test_a_reading_in_steps_is_a_miss_where_checksums_are_asked_for(agents: Agents, open_store: Open) -> None:
    """Who copies what, and where to, only the reader knows: nothing could be compared."""
    agents().wait_announced()
    near, far = open_store("cxl", verify="checksum"), open_store(verify="checksum")
    chain = hashes(4)
    assert put(near, chain, Pages(4, SIZES, seed=1)).all()
    assert far.read("kv", 0, chain, sum(SIZES)) is None
    assert far.metrics.miss_checksum == 4
    assert get(far, chain)[0].all()


def test_with_two_agents_one_is_enough(agents: Agents, open_store: Open) -> None:
    first, second = agents(), agents()
    first.wait_announced()
    second.wait_announced()
    near, far = open_store("cxl"), open_store()
    chain, pages = hashes(50), Pages(50, (100_000,), seed=1)
    assert put(near, chain, pages).all()
    for victim in (None, first):
        if victim is not None:
            victim.kill()
        for _ in range(3):
            copy = Pages(50, (100_000,))
            assert far.get("kv", 0, chain, copy.fragments).all()
            assert copy.same(pages).all()
        mine = Pages(20, (100_000,), seed=7)
        if victim is not None:
            # The first finds the agent gone, and what it sent there may be on its way: it is not stored another way.
            put(far, hashes(20, seed=8), mine)
        fresh = hashes(20, seed=7 if victim else 6)
        assert put(far, fresh, mine).all()
        loaded, copy = get(near, fresh, (100_000,))
        assert loaded.all()
        assert copy.same(mine).all()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_without_an_agent_everything_is_a_miss_until_one_is_back(
    agents: Agents, open_store: Open, how: signal.Signals
) -> None:
    agent = agents().wait_announced()
    near, far = open_store("cxl"), open_store()
    chain, pages = hashes(10), Pages(10, SIZES, seed=1)
    assert put(near, chain, pages).all()
    assert get(far, chain)[0].all()
    agent.signal(how)
    loaded, _ = get(far, chain)
    assert not loaded.any()
    mine = hashes(5, seed=3)
    assert not put(far, mine, Pages(5, SIZES, seed=3)).any()
    assert near.prefix(["kv"], 0, mine) == 0, "what is not known to be written is not published"
    agents().wait_announced()

    def loads() -> bool:
        loaded, copy = get(far, chain)
        assert copy.same(pages)[loaded].all()
        return bool(loaded.all())

    await_condition(loads, "the new agent serves", 60)


def still_taken(store: Store) -> int:
    stats = store.stats()
    return int(stats["server_slots_reserved"]) + int(stats["server_slots_quarantined"])


def test_slots_of_a_write_that_nobody_knows_of_are_not_given_away(
    agents: Agents, open_store: Open, server: ServerProcess
) -> None:
    agent = agents().wait_announced()
    near, far = open_store("cxl"), open_store()
    assert put(far, hashes(1, seed=9), Pages(1, SIZES, seed=9)).all()
    agent.signal(signal.SIGSTOP)
    assert not put(far, hashes(5), Pages(5, SIZES, seed=1)).any()
    assert still_taken(near) == 5
    far.close()
    assert still_taken(near) == 5, "a late write may still land there"


def test_slots_into_which_nothing_was_written_are_given_back(open_store: Open) -> None:
    near, far = open_store("cxl"), open_store()
    assert not put(far, hashes(5), Pages(5, SIZES, seed=1)).any(), "there is no agent"
    assert still_taken(near) == 0


def test_the_agent_announces_itself_again_after_a_restart_of_the_server(
    agents: Agents, open_store: Open, server: ServerProcess
) -> None:
    agent = agents().wait_announced()
    near, far = open_store("cxl"), open_store()
    chain, pages = hashes(10), Pages(10, SIZES, seed=1)
    assert put(near, chain, pages).all()
    server.kill()
    assert not get(far, chain)[0].any()
    server.start()
    agent.wait_announced(2)

    def loads() -> bool:
        loaded, copy = get(far, chain)
        assert copy.same(pages)[loaded].all()
        return bool(loaded.all())

    await_condition(loads, "the pool is reached again", 60)


def test_a_clean_stop_takes_the_announcement_back(agents: Agents, open_store: Open) -> None:
    agent = agents().wait_announced()
    far = open_store()
    assert len(far._session.agents().agents) == 1
    assert agent.stop() == 0
    await_condition(lambda: not far._session.agents().agents, "the server has forgotten the agent")


def test_what_cannot_be_served_is_refused_with_the_reason(
    agents: Agents, server: ServerProcess, tmp_path: Path
) -> None:
    agent = agents("--pool", f"file://{tmp_path}/other")
    assert agent.process.wait(60) == 2
    assert f"{tmp_path}/other" in agent.log.read_text()
    agent = agents("--backend", "tcp")
    assert agent.process.wait(60) == 2
    assert "give ucx" in agent.log.read_text()


def test_offsets_outside_of_the_pool_move_nothing(agents: Agents, open_store: Open) -> None:
    agents().wait_announced()
    far = open_store()
    reach = far._lives.current().reach
    pages = Pages(1, SIZES, seed=1)
    geometry = reach.geometry
    for offset in (0, geometry.off_data - 1, geometry.off_data + geometry.extent_bytes - 100, geometry.pool_bytes):
        with pytest.raises(PoolError, match="do not lie in an extent"):
            reach.mover.store(np.array([offset], np.uint64), pages.fragments)


def test_a_mover_without_agents_says_what_to_do(open_store: Open) -> None:
    far = open_store()
    reach = far._lives.current().reach
    with pytest.raises(TransferError, match="start maru-agent"):
        reach.mover.load(np.array([reach.geometry.off_data], np.uint64), Pages(1, SIZES).fragments)


def test_no_call_outlasts_its_time_limit_by_much(agents: Agents, server: ServerProcess) -> None:
    """Not how fast, but that it ends: a stopped agent keeps nobody for ever."""
    agent = agents().wait_announced()
    config = StoreConfig(server=server.endpoint, transport="rdma", timeout_ms=500)
    store = Store.open(config, namespace(), name="test")
    try:
        agent.signal(signal.SIGSTOP)
        began = time.monotonic()
        assert not put(store, hashes(2), Pages(2, SIZES, seed=1)).any()
        assert time.monotonic() - began < 60
    finally:
        store.close()
