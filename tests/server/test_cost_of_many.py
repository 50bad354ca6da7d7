"""What one message does to many pages takes no step in Python for each: it would hold up everybody else."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType

import numpy as np
import pytest
from maru_harness import Client, Server, chain, geometry

from maru_core.protocol import Done, Evict
from maru_server import tree as tree_module

#: Pages, and most calls of functions for all of them together.
PAGES = 3000
CALLS = 1500


def calls(work: Callable[[], object]) -> int:
    """Calls of functions, those written in C too."""
    count = 0

    def profile(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


@pytest.fixture
def client() -> Client:
    client = Server(geometry(extents=8, slots=512), high=1.0, low=0.9, checked=False, session_share=1.0).client()
    client.store(chain("root", 1))
    return client


@pytest.fixture(autouse=True)
def imported() -> None:
    """numpy brings in some of itself when it is first wanted."""
    np.unique([0])


def under_root(client: Client, each: int) -> bytes:
    """Chains of so many pages each below one page, packed."""
    hashes = os.urandom(32 * PAGES)
    for start in range(0, len(hashes), 32 * each):
        client.store(hashes[start : start + 32 * each], parent=chain("root", 1))
    return hashes


@pytest.mark.skipif(tree_module._subtree is None, reason="built without a compiler: the walk is written in Python")
@pytest.mark.parametrize("each", [1, 30, PAGES])
def test_deleting_what_has_much_below_it(client: Client, each: int) -> None:
    hashes = under_root(client, each)
    gone = 0

    def delete() -> None:
        nonlocal gone
        gone = client.delete(chain("root", 1))

    assert calls(delete) < CALLS
    assert gone == PAGES + 1
    client.server.state.check()
    assert client.match(hashes[:32]).pages == 0


@pytest.mark.parametrize("policy", ["lru", "lfu-age"])
def test_evicting_after_every_leaf_was_used(policy: str) -> None:
    server = Server(geometry(extents=8, slots=512), high=1.0, low=0.9, checked=False, session_share=1.0, policy=policy)
    client = server.client()
    client.store(chain("root", 1))
    hashes = under_root(client, 1)
    server.now += 5
    client.heartbeat()
    client.touch(hashes[32:])
    server.now += 5
    client.heartbeat()
    client.touch(hashes[: -32 * 5])
    replies: list[object] = []
    assert calls(lambda: replies.append(client.send(Evict(9, client.session, 1)))) < CALLS * 2
    assert isinstance(replies[0], Done)
    assert replies[0].count == 1
    server.state.check()
    # The last five pages were used once, and longest ago.
    gone = [at // 32 for at in range(0, len(hashes), 32) if not client.match(hashes[at : at + 32]).pages]
    assert len(gone) == 1
    assert gone[0] >= PAGES - 5


def test_a_tick_puts_a_few_leaves_where_they_belong(client: Client) -> None:
    hashes = under_root(client, 1)
    server = client.server
    leaves = server.state.books.pages.leaves
    server.now += 5
    client.heartbeat()
    client.touch(hashes)
    first = calls(lambda: server.state.tick(server.now))
    assert first < CALLS * 2
    for _ in range(40):
        server.state.tick(server.now)
    assert calls(lambda: leaves.next(int(1e18))) < 100, "all was done"
    assert calls(lambda: server.state.tick(server.now)) < first / 4
