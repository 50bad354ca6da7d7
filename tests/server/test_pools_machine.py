"""Several pools, clients of different reach, deaths and restarts: the layer against plain dictionaries."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from maru_harness import Grant, chain
from pools_harness import OWN, PoolsClient, PoolsServer

from maru_core import protocol as p
from maru_core.pool.format import COMMITTED

TRUNK = [chain("t", 1, start=index) for index in range(4)]
BRANCH = [chain("b", 1, start=index) for index in range(3)]
CHAINS = [TRUNK, TRUNK[:2] + BRANCH, [chain("s", 1, start=index) for index in range(5)]]
REACHES = ["cc", "cn", "nc", "cr", "rc", "rn", "nn"]
#: Who, which chain, from and how many pages, shard of 2.
STORES = st.tuples(
    st.integers(0, 2), st.sampled_from(CHAINS), st.just(0) | st.integers(0, 3), st.integers(1, 5), st.integers(0, 1)
)

Thing = tuple[int, bytes, int]  # pool, page, shard
Place = tuple[int, int]  # slot as clients know it, generation


class Machine(RuleBasedStateMachine):
    """``stored`` is what clients know to be there, in each pool."""

    @initialize(extents=st.tuples(st.integers(2, 4), st.integers(2, 4)))
    def start(self, extents: tuple[int, int]) -> None:
        self.server = PoolsServer(*extents, slots=4, low=0.6, high=0.9, reservation_s=30.0, hold_share=0.5)
        self.clients: list[PoolsClient] = []
        self.births = 0
        self.grants: list[tuple[PoolsClient, int, Grant, list[Thing]]] = []
        self.stored: dict[Thing, Place] = {}
        self.told: dict[int, int] = {}
        self.decided: dict[bytes, tuple[int, list[int]]] = {}
        self.evicted = 0
        for ways in ("cc", "cn", "nc"):
            self.hello(ways)

    # ------------------------------------------------------------ what clients do

    @precondition(lambda self: len(self.clients) < 3)
    @rule(ways=st.sampled_from(REACHES))
    def hello(self, ways: str) -> None:
        self.births += 1
        self.clients.append(self.server.client(f"client {self.births}", ways=ways))

    @rule(who=st.integers(0, 2), ways=st.sampled_from(REACHES))
    def reach(self, who: int, ways: str) -> None:
        self.someone(who).reach(ways)

    def someone(self, number: int) -> PoolsClient:
        client = self.clients[number % len(self.clients)]
        client.connect()
        return client

    @staticmethod
    def reached(client: PoolsClient) -> list[int]:
        assert client.ways is not None
        return [pool for pool, way in enumerate(client.ways) if way != "n"]

    @rule(stores=st.lists(STORES, min_size=1, max_size=4), commit=st.booleans())
    def store(self, stores: list[Any], commit: bool) -> None:
        for who, which, start, length, shard in stores:
            self.store_one(self.someone(who), which, start, length, shard, commit)

    def store_one(
        self, client: PoolsClient, which: list[bytes], start: int, length: int, shard: int, commit: bool
    ) -> None:
        pages = which[start : start + length]
        parent = which[start - 1] if start else p.ROOT
        reached, first = self.reached(client), pages[0]
        lies = [pool for pool in reached if self.lies(pool, first)]
        above = [pool for pool in reached if parent != p.ROOT and self.lies(pool, parent)]
        grant = client.reserve(b"".join(pages), parent=parent, shard=shard, world=2, component="kv")
        pools = {int(slot) >> p.POOL_SHIFT for slot in grant.slots if slot != p.NO_SLOT}
        assert len(pools) <= 1, "a chain in two pools"
        assert pools <= set(lies or above or reached), "where it is not reached, or away from its beginning"
        if not reached:
            assert set(grant.status) == {p.ReserveStatus.NO_ROOM}
        exist = [page for page, status in zip(pages, grant.status, strict=True) if status == p.ReserveStatus.EXISTS]
        for page in exist:
            assert any((pool, page, shard) in self.stored for pool in reached), "what is there is not reached"
        (pool,) = pools or {0}
        for slot, generation in zip(*(part.tolist() for part in grant.mine()), strict=True):
            assert generation > self.told.get(slot, 0), "a generation was given twice"
            self.told[slot] = generation
        got = [
            (pool, page, shard)
            for page, status in zip(pages, grant.status, strict=True)
            if status == p.ReserveStatus.RESERVED
        ]
        self.settle_evictions()
        if got:
            self.grants.append((client, client.session, grant, got))
            if commit:
                self.publish(client, grant, got, list(range(len(got))))

    def lies(self, pool: int, page: bytes) -> bool:
        """Whether anything of a page is in a pool, or being written."""
        for tree in self.server.pools.states[pool].books.trees.values():
            row = tree.row(page)
            if row is not None and (tree.objects[row] or tree.pending[row]):
                return True
        return False

    def publish(self, client: PoolsClient, grant: Grant, things: list[Thing], which: list[int]) -> None:
        status = client.commit(grant, which)
        slots, generations = (part.tolist() for part in grant.mine())
        for index, state in zip(which, status, strict=True):
            if state == p.CommitStatus.COMMITTED:
                place = (slots[index], generations[index])
                assert self.stored.get(things[index], place) == place, "an object was replaced"
                self.stored[things[index]] = place

    @precondition(lambda self: self.grants)
    @rule(picks=st.lists(st.integers(0, 100), min_size=1, max_size=3), release=st.booleans())
    def end(self, picks: list[int], release: bool) -> None:
        """Commit or release several grants of a client in one message, whatever pools they are of."""
        client, session, *_ = self.grants[picks[0] % len(self.grants)]
        if client not in self.clients:
            return
        client.connect()
        mine = list({pick % len(self.grants): self.grants[pick % len(self.grants)] for pick in picks}.values())
        mine = [grant for grant in mine if grant[0] is client]
        slots = np.concatenate([grant.mine()[0] for _, _, grant, _ in mine])
        generations = np.concatenate([grant.mine()[1] for _, _, grant, _ in mine])
        things = [thing for *_, theirs in mine for thing in theirs]
        order = np.argsort(generations, kind="stable")  # mixed
        packed = slots[order].tobytes(), generations[order].tobytes()
        told = client.send(p.Validate(1, client.session, *packed))
        assert isinstance(told, p.Validated)
        if release:
            assert isinstance(client.send(p.Release(1, client.session, *packed)), p.Done)
            return
        reply = client.send(p.Commit(1, client.session, *packed))
        assert isinstance(reply, p.Committed)
        for at, state in zip(order.tolist(), reply.status, strict=True):
            if state == p.CommitStatus.COMMITTED:
                place = (int(slots[at]), int(generations[at]))
                assert self.stored.get(things[at], place) == place, "an object was replaced"
                assert things[at][0] == place[0] >> p.POOL_SHIFT, "committed in another pool"
                assert client.session == session, "a commit of another session was taken"
                self.stored[things[at]] = place

    def prefix(self, pool: int, which: list[bytes]) -> int:
        whole = [all((pool, page, shard) in self.stored for shard in range(2)) for page in which]
        return whole.index(False) if False in whole else len(whole)

    @rule(who=st.integers(0, 2), which=st.sampled_from(CHAINS), shard=st.integers(0, 1), sparse=st.booleans())
    def match(self, who: int, which: list[bytes], shard: int, sparse: bool) -> None:
        client = self.someone(who)
        reached = self.reached(client)
        found = client.match(b"".join(which), shard=shard, sparse=sparse)
        pools = self.look_at(found, client, which, shard)
        if not sparse:
            assert found.pages == max((self.prefix(pool, which) for pool in reached), default=0)
            best = [pool for pool in reached if self.prefix(pool, which) == found.pages]
            mapped = [pool for pool in best if client.ways is not None and client.ways[pool] == "c"]
            assert pools <= set(mapped or best), "through agents, and a mapped one has as much"

    def look_at(self, found: Any, client: PoolsClient, which: list[bytes], shard: int) -> set[int]:
        """Every slot of an answer is of the right object; the pools that they are in."""
        pools = set()
        for index, slot in enumerate(found.slots):
            if slot != p.NO_SLOT:
                pool = slot >> p.POOL_SHIFT
                pools.add(pool)
                assert self.stored[(pool, which[index], shard)] == (slot, found.generations[index])
        assert len(pools) <= 1, "an answer of two pools"
        assert pools <= set(self.reached(client)), "of a pool that is not reached"
        return pools

    @rule(who=st.integers(0, 2), which=st.integers(0, 2), end=st.booleans())
    def hold(self, who: int, which: int, end: bool) -> None:
        """All who ask under one request are told the same, or nothing where they do not reach it."""
        client, pages, request = self.someone(who), CHAINS[which], b"request %d" % which
        if end:
            client.unhold(request)
            return
        known = [
            state.books.holds.knows(tree, self.question(client, pages, request), p.Hold(request, 3, 20.0))
            for state in self.server.pools.states
            for tree in state.books.trees.values()
        ]
        found = client.match(b"".join(pages), hold=p.Hold(request, 3, 20.0))
        if not any(known):
            self.decided[request] = (found.pages, found.ends)
            self.look_at(found, client, pages, 0)
        elif found.pages or found.ends:
            assert self.decided[request] == (found.pages, found.ends), "ranks were told differently"
        decisions = [state.books.holds.remembered for state in self.server.pools.states]
        assert sum(decisions) <= 3, "a decision in a pool that was not chosen"

    def question(self, client: PoolsClient, pages: list[bytes], request: bytes) -> p.Match:
        return p.Match(6, client.session, 0, ["kv"], 0, b"".join(pages), False, [], p.Hold(request, 3, 20.0))

    # ------------------------------------------------------------ what befalls them

    @rule(
        what=st.sampled_from(["delete", "clear", "leave", "gone", "forgotten", "restart"]),
        who=st.integers(0, 2),
        which=st.sampled_from(CHAINS),
        index=st.integers(0, 4),
    )
    def upheaval(self, what: str, who: int, which: list[bytes], index: int) -> None:
        if what == "delete":
            page = which[index % len(which)]
            assert self.someone(who).delete(page) == self.forget()
        elif what == "clear":
            count = len(self.stored)
            assert self.someone(who).clear() == count == self.forget()
        elif what == "restart":
            self.server.restart()
            self.evicted = self.server.stats["evicted_objects"]
            self.decided.clear()
        elif len(self.clients) > 1:
            client = self.clients.pop(who % len(self.clients))
            if what == "leave":
                client.connect()
                client.goodbye()
            elif what == "gone":
                self.server.pools.process_gone(client.session, self.server.now)

    @rule(seconds=st.sampled_from([1, 12, 40, 700]), alive=st.integers(0, 3))
    def wait(self, seconds: int, alive: int) -> None:
        clients = tuple(self.clients[:alive]) if seconds < 100 else ()
        for client in clients:
            client.connect()
        self.server.wait(seconds, step=2 if seconds < 100 else 35, alive=clients)
        self.settle_evictions()

    def forget(self) -> int:
        """What is gone from the pools; how many objects."""
        found = self.committed()
        gone = [thing for thing in self.stored if thing not in found]
        for thing in gone:
            del self.stored[thing]
        return len(gone)

    def settle_evictions(self) -> None:
        now = self.server.stats["evicted_objects"]
        assert self.forget() == now - self.evicted, "objects went without a reason"
        self.evicted = now

    def committed(self) -> dict[Thing, Place]:
        found: dict[Thing, Place] = {}
        for pool, directory in enumerate(self.server.directories):
            for slot in np.flatnonzero(directory.states == COMMITTED).tolist():
                record = directory.records[slot]
                thing = (pool, record["page_hash"].tobytes(), int(record["shard"]))
                assert thing not in found, "one object in two slots"
                assert slot <= OWN
                found[thing] = (slot | pool << p.POOL_SHIFT, int(record["generation"]))
        return found

    # ------------------------------------------------------------ what always holds

    @invariant()
    def the_pools_hold_what_was_acknowledged(self) -> None:
        if hasattr(self, "evicted"):
            self.server.pools.check()
            assert self.committed() == self.stored
            stats = self.server.stats
            used = sum(state.books.slabs.used_slots() for state in self.server.pools.states)
            assert used == stats["objects"] + stats["slots_reserved"] + stats["slots_quarantined"]

    def teardown(self) -> None:
        """When everybody has gone, nothing is left of them."""
        if not hasattr(self, "evicted"):
            return
        for client in self.clients:
            client.connect()
            client.goodbye()
        self.server.checked = False
        self.server.wait(800, step=4)  # longer steps are no time: the server stood still
        self.server.pools.check()
        stats = self.server.stats
        left = {
            name: stats[name] for name in ("sessions", "slots_reserved", "slots_quarantined", "holds", "held_bytes")
        }
        assert not any(left.values()), left
        assert [len(state.books.sessions) for state in self.server.pools.states] == [0, 0]
        assert [state.books.holds.remembered for state in self.server.pools.states] == [0, 0]


Machine.TestCase.settings = settings(
    max_examples=int(os.environ.get("MARU_TEST_EXAMPLES", "6")), stateful_step_count=30, deadline=None
)
test_any_history = Machine.TestCase
