"""Events of several pools are of one publisher: a page is there for a listener as long as one of them has it."""

from __future__ import annotations

import random

import pytest
from maru_harness import chain
from pools_harness import PoolsClient, PoolsServer
from test_events import Replica, found, split

from maru_core.protocol import ROOT
from maru_server.events import Events, Everything, Note


class PoolsReplica(Replica):
    def apply(self, note: Note) -> None:
        if not (isinstance(note, Everything) and note.more):
            super().apply(note)
            return
        mine = self.pages.setdefault(note.topic.name, set())
        for parent, hashes in note.runs():
            assert parent == ROOT or parent in mine, "a page before its parent"
            mine.update(split(hashes))


def listen(server: PoolsServer, **options: int) -> PoolsReplica:
    events = Events(**options)
    server.pools.tell(events)
    return PoolsReplica(events)


def two(server: PoolsServer) -> tuple[PoolsClient, PoolsClient]:
    return server.client("1", ways="cn"), server.client("2", ways="nc")


def test_a_page_is_there_as_long_as_one_pool_has_it() -> None:
    server = PoolsServer()
    first, second = two(server)
    replica = listen(server)
    first.store(chain("a", 4))
    second.store(chain("a", 6))
    server.pools.finish()
    assert replica.catch_up() == set(split(chain("a", 6)))
    assert replica.kinds["Stored"] == 2
    (state, _) = server.pools.states
    state.books.pages.room.evict_any(2, 10**19)
    server.pools.finish()
    assert replica.catch_up() == set(split(chain("a", 6)))
    first.delete(chain("a", 1, start=3))
    assert replica.catch_up() == set(split(chain("a", 3)))


def test_what_one_pool_has_left_stays_when_another_is_cleared() -> None:
    server = PoolsServer()
    first, second = two(server)
    first.store(chain("a", 4))
    second.store(chain("b", 3))
    replica = listen(server)
    assert replica.catch_up() == set(split(chain("a", 4) + chain("b", 3)))
    state = server.pools.states[0]
    (tree,) = state.books.trees.values()
    state.books.pages.clear(tree, 0.0, 0.0)
    state.finish()
    assert replica.catch_up() == set(split(chain("b", 3)))
    first.clear()
    assert replica.catch_up() == set()


@pytest.mark.parametrize("queue_pages", [1 << 20, 8])
@pytest.mark.parametrize("seed", range(2))
def test_a_listener_knows_what_can_be_found(seed: int, queue_pages: int) -> None:
    chance = random.Random(seed)
    server = PoolsServer(3, 3, slots=4, low=0.5, high=0.8)
    clients = two(server)
    replica = listen(server, queue_pages=queue_pages)
    names = ["a", "b", "c"]
    for step in range(120):
        client, name = chance.choice(clients), chance.choice(names)
        what = chance.random()
        if what < 0.7:
            start = chance.choice([0, 0, 1, 3])
            parent = chain(name, 1, start=start - 1) if start else ROOT
            grant = client.reserve(chain(name, chance.randint(1, 4), start=start), parent=parent)
            client.commit(grant)
        elif what < 0.85:
            client.delete(chain(name, 1, start=chance.randrange(6)))
        elif what < 0.9:
            client.clear()
        else:
            server.wait(1)
        server.pools.finish()
        if step % 7 == 0:
            there = set().union(*(found(one, [chain(name, 8) for name in names]) for one in clients))
            assert replica.catch_up() == there
    if queue_pages == 8:
        assert server.stats["events_overflows"] > 0
