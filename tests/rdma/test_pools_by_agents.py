"""One server with two pools of which a client maps one and reaches the other through an agent: real processes, UCX over loopback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import AgentProcess

from maru_core.protocol import HASH_BYTES, NO_SLOT, POOL_SHIFT, ROOT
from maru_core.store import Store
from support import Pages, ServerProcess, await_condition, hashes, running_server

SIZES = (12_000, 8_000)
Open = Callable[..., Store]


@pytest.fixture
def pools(tmp_path: Path) -> list[str]:
    return [f"file://{tmp_path}/a", f"file://{tmp_path}/b"]


@pytest.fixture
def server(tmp_path: Path, pools: list[str]) -> Iterator[ServerProcess]:
    with running_server(tmp_path, "--pool", pools[1], "--quarantine", "600", pool=pools[0]) as process:
        yield process


def put(store: Store, chain: bytes, pages: Pages) -> np.ndarray:
    return store.put("kv", 0, 1, ROOT, chain, pages.fragments)


def check(store: Store, chain: bytes, pages: Pages) -> None:
    copy = Pages(len(chain) // HASH_BYTES, SIZES)
    assert store.get("kv", 0, chain, copy.fragments).all()
    assert copy.same(pages).all()


def pool_of(store: Store, chain: bytes) -> int:
    slots = store._transfers.locate(store._lives.current(), "kv", 0, chain).slots
    (pool,) = {int(slot) >> POOL_SHIFT for slot in slots if slot != NO_SLOT}
    return pool


def test_a_client_maps_one_pool_and_reaches_the_other_through_its_agent(
    server: ServerProcess, agents: Any, open_store: Open, pools: list[str]
) -> None:
    agents("--pool", pools[1]).wait_announced()
    both = open_store("auto", pool=pools[0])
    ways = both._lives.current().pools.ways
    assert [one.way for one in ways] == ["cxl", "rdma"]
    assert "through agents" in ways[1].why
    assert both.changes() is None, "one of them cannot be looked into"
    near = [open_store("cxl", pool=pool) for pool in pools]
    for number, store in enumerate(near):
        chain, pages = hashes(20, number), Pages(20, SIZES, seed=number)
        assert put(store, chain, pages).all()
        assert both.prefix(["kv"], 0, chain) == 20
        assert pool_of(both, chain) == number
        check(both, chain, pages)
    # What begins anew is stored in the pool that is mapped, and what lies in the other goes on there.
    chain, pages = hashes(20, 7), Pages(20, SIZES, seed=7)
    assert put(both, chain, pages).all()
    assert pool_of(both, chain) == 0
    more, pages = hashes(10, 8), Pages(10, SIZES, seed=8)
    assert both.put("kv", 0, 1, hashes(20, 1)[-HASH_BYTES:], more, pages.fragments).all()
    assert pool_of(both, more) == 1
    check(near[1], more, pages)
    row = next(row for row in both._session.inspect("sessions") if row["name"] == both._session.name)
    assert [told["way"] for told in row["reaches"]] == ["cxl", "rdma"]
    assert [row["agents"] for row in both._session.inspect("pools")] == [0, 1]


def test_without_the_agent_only_its_pool_is_missed(
    server: ServerProcess, agents: Any, open_store: Open, pools: list[str]
) -> None:
    agent: AgentProcess = agents("--pool", pools[1]).wait_announced()
    both, near = open_store("auto", pool=pools[0]), open_store("cxl", pool=pools[1])
    chain, pages = hashes(10), Pages(10, SIZES, seed=1)
    assert put(near, chain, pages).all()
    check(both, chain, pages)
    agent.kill()
    copy = Pages(10, SIZES)
    assert not both.get("kv", 0, chain, copy.fragments).any()
    mine, pages = hashes(10, 2), Pages(10, SIZES, seed=2)
    assert put(both, mine, pages).all()
    check(both, mine, pages)


def test_an_agent_of_several_pools_is_told_which(
    server: ServerProcess, agents: Any, open_store: Open, pools: list[str]
) -> None:
    lost: AgentProcess = agents()
    assert lost.process is not None
    assert lost.process.wait(120) == 2
    assert "name the one of this agent with --pool" in lost.log.read_text()
    for pool in pools:
        agents("--pool", pool).wait_announced()
    far = open_store("rdma")
    assert [one.way for one in far._lives.current().pools.ways] == ["rdma", "rdma"]
    used = set()
    for seed in range(6):
        chain, pages = hashes(20, seed), Pages(20, SIZES, seed=seed)
        assert put(far, chain, pages).all()
        used.add(pool_of(far, chain))
        check(far, chain, pages)
    assert used == {0, 1}


def test_agents_are_of_their_pool_after_the_server_was_killed(
    server: ServerProcess, agents: Any, open_store: Open, pools: list[str]
) -> None:
    agent: AgentProcess = agents("--pool", pools[1]).wait_announced()
    both, near = open_store("auto", pool=pools[0]), open_store("cxl", pool=pools[1])
    chain, pages = hashes(10), Pages(10, SIZES, seed=1)
    assert put(near, chain, pages).all()
    check(both, chain, pages)
    server.kill()
    server.start()
    agent.wait_announced(2)
    await_condition(lambda: both.prefix(["kv"], 0, chain) == 10, "the store finds the server again")
    check(both, chain, pages)
