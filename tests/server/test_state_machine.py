"""Several clients, deaths, late commits, kills in the middle of a store: the server against a plain dictionary."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from maru_harness import Client, Grant, Server, chain, geometry
from stepping import SteppingDirectory

from maru_core.pool.format import COMMITTED
from maru_core.protocol import ROOT, Done, Pin, Unpin
from maru_server.eviction import POLICIES

# A small forest, so that the same pages come again: trunk 0-3, two branches off page 1.
TRUNK = [chain("t", 1, start=index) for index in range(4)]
LEFT, RIGHT = ([chain(side, 1, start=index) for index in range(3)] for side in "lr")
CHAINS = [TRUNK, TRUNK[:2] + LEFT, TRUNK[:2] + RIGHT, [chain("s", 1, start=index) for index in range(5)]]
#: (component, world, bytes of an object)
SHAPES = [("kv", 1, 4000), ("tp", 2, 4096), ("mamba", 1, 7000)]

#: Who, which chain, from and how many pages, shape, shard.
STORES = st.tuples(
    st.integers(0, 2),
    st.sampled_from(CHAINS),
    st.just(0) | st.integers(0, 3),
    st.integers(1, 5),
    st.sampled_from(SHAPES),
    st.integers(0, 1),
)

Thing = tuple[str, bytes, int]  # component, page, shard
Place = tuple[int, int]  # slot, generation


class Machine(RuleBasedStateMachine):
    """``stored`` is what clients know to be there; every step checks that the pool holds that and nothing else."""

    @initialize(
        extents=st.integers(2, 4), policy=st.sampled_from(sorted(POLICIES)), quota=st.sampled_from([{}, {"": 0.7}])
    )
    def start(self, extents: int, policy: str, quota: dict[str, float]) -> None:
        self.server = Server(
            geometry(extents, 4),
            directory=SteppingDirectory,
            low=0.6,
            high=0.9,
            reservation_s=30.0,
            policy=policy,
            quotas=quota,
            pin_share=0.5,
        )
        self.pinned: set[bytes] = set()
        self.clients: list[Client] = []
        self.births = 0
        self.grants: list[tuple[Client, int, Grant, list[Thing]]] = []
        self.stored: dict[Thing, Place] = {}
        self.parents: dict[bytes, bytes] = {
            page: before for c in CHAINS for before, page in zip([ROOT, *c], c, strict=False)
        }
        self.told: dict[int, int] = {}
        self.counts = self.server.stats
        self.hello()
        self.hello()

    # ------------------------------------------------------------ what clients do

    @precondition(lambda self: len(self.clients) < 3)
    @rule()
    def hello(self) -> None:
        self.births += 1
        self.clients.append(self.server.client(f"client {self.births}"))

    def someone(self, number: int) -> Client:
        client = self.clients[number % len(self.clients)]
        client.connect()
        return client

    @rule(stores=st.lists(STORES, min_size=1, max_size=4))
    def fill(self, stores: list[Any]) -> None:
        for one in stores:
            self.store(*one, True)

    @rule(one=STORES)
    def reserve(self, one: Any) -> None:
        self.store(*one, False)

    @rule(stores=st.lists(STORES, min_size=1, max_size=3))
    def reserve_more(self, stores: list[Any]) -> None:
        for one in stores:
            self.store(*one, False)

    def store(
        self,
        who: int,
        which: list[bytes],
        start: int,
        length: int,
        shape: tuple[str, int, int],
        shard: int,
        commit: bool,
    ) -> None:
        component, world, nbytes = shape
        pages = which[start : start + length]
        client = self.someone(who)
        shard %= world
        grant = client.reserve(
            b"".join(pages),
            parent=which[start - 1] if start else ROOT,
            component=component,
            shard=shard,
            world=world,
            nbytes=nbytes,
        )
        things: list[Thing] = [(component, page, shard) for page in pages]
        for thing, status in zip(things, grant.status, strict=True):
            assert status != 4, "honest clients never conflict"
            assert (status == 1) == (thing in self.stored) or status in (0, 3, 5)
            assert status != 5 or self.server.config.quotas, "over a quota that nobody has"
        for slot, generation in zip(*(part.tolist() for part in grant.mine()), strict=True):
            assert generation > self.told.get(slot, 0), "a generation was given twice"
            self.told[slot] = generation
        got = [thing for thing, status in zip(things, grant.status, strict=True) if status == 0]
        if got:
            self.grants.append((client, client.session, grant, got))
        self.settle_evictions()
        if got and commit:
            self.publish(client, grant, got, list(range(len(got))))

    def publish(self, client: Client, grant: Grant, things: list[Thing], which: list[int]) -> None:
        status = client.commit(grant, which)
        slots, generations = (part.tolist() for part in grant.mine())
        for index, state in zip(which, status, strict=True):
            if state == 0:
                place = (slots[index], generations[index])
                assert self.stored.get(things[index], place) == place, "an object was replaced"
                self.stored[things[index]] = place

    @precondition(lambda self: self.grants)
    @rule(picks=st.lists(st.integers(0, 100), min_size=1, max_size=4))
    def commit_whole(self, picks: list[int]) -> None:
        for pick in picks:
            self.commit(pick, list(range(len(self.grants[pick % len(self.grants)][3]))), False)

    @precondition(lambda self: self.grants)
    @rule(pick=st.integers(0, 100), part=st.lists(st.integers(0, 4), max_size=6), forget=st.booleans())
    def commit(self, pick: int, part: list[int], forget: bool) -> None:
        """At any time later, also after the session ended or the server restarted; also again."""
        client, session, grant, things = self.grants[pick % len(self.grants)]
        if forget:
            self.grants.remove((client, session, grant, things))
        if client not in self.clients:
            return
        client.connect()
        before = dict(self.stored)
        self.publish(client, grant, things, [index % len(things) for index in part])
        if client.session != session:
            assert self.stored == before, "a commit of another session was taken"

    @rule(one=STORES, who=st.integers(0, 2), pick=st.integers(0, 1), shift=st.sampled_from([0, 0, -1, 1]))
    def commit_what_is_not_yours(self, one: Any, who: int, pick: int, shift: int) -> None:
        self.store(*one, False)
        if not self.grants:
            return
        _, session, grant, _ = self.grants[-1 - pick % len(self.grants)]
        others = [client for client in self.clients if client.session != session] or self.clients
        client = others[who % len(others)]
        client.connect()
        if client.session == session and not shift:
            return
        wrong = Grant.__new__(Grant)
        wrong.status, wrong.slots = grant.status, grant.slots
        wrong.generations = (grant.generations.astype(np.int64) + shift).astype(np.uint64)
        # Never taken, unless the neighbouring generation is this client's own, in another grant.
        mine = {
            place
            for _, number, other, _ in self.grants
            if number == client.session
            for place in zip(*(part.tolist() for part in other.mine()), strict=True)
        }
        places = list(zip(*(part.tolist() for part in wrong.mine()), strict=True))
        if not mine & set(places):
            assert 0 not in client.commit(wrong)

    @precondition(lambda self: self.grants)
    @rule(pick=st.integers(0, 100), part=st.lists(st.integers(0, 4), max_size=3))
    def release(self, pick: int, part: list[int]) -> None:
        client, _, grant, things = self.grants[-1 - pick % len(self.grants)]
        if client in self.clients:
            client.connect()
            client.release(grant, [index % len(things) for index in part])

    @rule(who=st.integers(0, 2), which=st.sampled_from(CHAINS), sparse=st.booleans(), shape=st.sampled_from(SHAPES))
    def match(self, who: int, which: list[bytes], sparse: bool, shape: tuple[str, int, int]) -> None:
        component, world, nbytes = shape
        client = self.someone(who)
        whole = [all((component, page, shard) in self.stored for shard in range(world)) for page in which]
        for shard in range(world):
            found = client.match(b"".join(which), [component], shard=shard, sparse=sparse)
            if sparse:
                assert [length > 0 for length in found.lengths] == whole
                here = [index for index, is_whole in enumerate(whole) if is_whole]
            else:
                assert found.pages == (whole.index(False) if False in whole else len(whole))
                here = list(range(found.pages))
            for index in here:
                place = (found.slots[index], found.generations[index])
                assert self.stored[(component, which[index], shard)] == place
                assert found.lengths[index] == nbytes

    @rule(who=st.integers(0, 2), which=st.sampled_from(CHAINS))
    def touch(self, who: int, which: list[bytes]) -> None:
        self.someone(who).touch(b"".join(which))

    def delete(self, who: int, which: list[bytes], index: int) -> None:
        page = which[index % len(which)]
        gone = {thing for thing in self.stored if page in self.ancestry(thing[1])}
        self.pinned = {pinned for pinned in self.pinned if page not in self.ancestry(pinned)}
        assert self.someone(who).delete(page) == len(gone)
        for thing in gone:
            del self.stored[thing]

    def clear(self, who: int) -> None:
        assert self.someone(who).clear() == len(self.stored)
        self.stored.clear()
        self.pinned.clear()

    @rule(which=st.sampled_from(CHAINS), index=st.integers(0, 4), end=st.booleans())
    def pin(self, which: list[bytes], index: int, end: bool) -> None:
        page, client = which[index % len(which)], self.someone(0)
        if end:
            client.send(Unpin(1, client.session, client.namespace, page))
            self.pinned.discard(page)
            return
        reply = client.send(Pin(1, client.session, client.namespace, page))
        if isinstance(reply, Done):
            assert any(thing[1] == page for thing in self.stored), "a page without objects was pinned"
            assert reply.count <= self.server.state.books.pages.pins.budget or page in self.pinned
            self.pinned.add(page)

    def pins(self) -> set[bytes]:
        return {pin.page for pin in self.server.state.books.pages.pins}

    def ancestry(self, page: bytes) -> list[bytes]:
        """The page and what lies above it, as far as the server can know: up to the first page it never saw."""
        line = []
        while page != ROOT:
            line.append(page)
            if page not in self.known_rows():
                break
            page = self.parents[page]
        return line

    def known_rows(self) -> set[bytes]:
        tree = next(iter(self.server.state.books.trees.values()), None)
        return set() if tree is None else {key for key, row in tree.rows.items() if tree.parent[row] != -2}

    # ------------------------------------------------------------ what befalls them

    @rule(
        what=st.sampled_from(["delete", "clear", "leave", "leave", "restart"]),
        who=st.integers(0, 2),
        which=st.sampled_from(CHAINS),
        index=st.integers(0, 4),
        how=st.sampled_from(["goodbye", "gone", "forgotten"]),
    )
    def upheaval(self, what: str, who: int, which: list[bytes], index: int, how: str) -> None:
        """One rule for all that undoes much, so that there is something to undo."""
        if what == "delete":
            self.delete(who, which, index)
        elif what == "clear":
            self.clear(who)
        elif what == "restart":
            self.restart()
        elif len(self.clients) > 1:
            self.leave(who, how)

    def leave(self, who: int, how: str) -> None:
        client = self.clients.pop(who % len(self.clients))
        if how == "goodbye":
            client.goodbye()
        elif how == "gone":
            self.server.state.process_gone(client.session, self.server.now)
            self.server.state.check()

    @rule(seconds=st.sampled_from([1, 12, 40, 700]), alive=st.integers(0, 3), step=st.sampled_from([2, 4, 400]))
    def wait(self, seconds: int, alive: int, step: int) -> None:
        clients = tuple(self.clients[:alive])
        for client in clients:
            client.connect()
        self.server.wait(seconds, step=max(step, seconds / 20 if step > 4 else step), alive=clients if step < 5 else ())
        self.settle_evictions()

    def settle_evictions(self) -> None:
        """Objects may go only in ways that are counted, and never before what continues them."""
        found = self.committed()
        gone = self.stored.keys() - found.keys()
        now = self.server.stats
        assert len(gone) == now["evicted_objects"] - self.counts["evicted_objects"], "objects went without a reason"
        pages = {page for _, page, _ in gone}
        assert not pages & {page for _, page, _ in found}, "a page was evicted in part"
        assert not pages & {self.parents[page] for _, page, _ in found}, "a parent went before its child"
        kept = {page for pinned in self.pinned for page in self.ancestry(pinned)}
        assert not pages & kept, "a pinned page was evicted, or one before it"
        for thing in gone:
            del self.stored[thing]
        self.counts = now

    def committed(self) -> dict[Thing, Place]:
        directory = self.server.directory
        names = {number: name for name, number in directory.components().items()}
        found = {}
        for slot in np.flatnonzero(directory.states == COMMITTED).tolist():
            record = directory.records[slot]
            thing = (names[int(record["component"])], record["page_hash"].tobytes(), int(record["shard"]))
            assert thing not in found, "one object in two slots"
            found[thing] = (slot, int(record["generation"]))
        return found

    def restart(self) -> None:
        self.server.restart()
        self.counts = self.server.stats
        assert self.counts["discarded"] == 0
        self.find_pins()

    def find_pins(self) -> None:
        """The pins after a restart; where pinned pages have grown beyond the budget, some end."""
        if not self.counts["pins_ended"]:
            assert self.pins() == self.pinned, "pins after a restart"
        assert self.pins() <= self.pinned
        self.pinned = self.pins()

    @rule(data=st.data(), deed=st.sampled_from(["store", "commit", "delete", "clear", "tick", "leave", "pin"]))
    def kill(self, data: st.DataObject, deed: str) -> None:
        """Kill the server after any single store of what it does, and start another over what it left."""
        # With what clients had been told by then: no reply is sent before the last store of its message.
        snapshots: list[tuple[Any, dict[int, int], int]] = []

        def look() -> None:
            snapshots.append((self.server.meta.copy(), dict(self.told), len(self.grants)))

        look()
        known, pinned = dict(self.stored), set(self.pinned)
        directory = self.server.directory
        assert isinstance(directory, SteppingDirectory)
        directory.after_store = look
        which = data.draw(st.sampled_from(CHAINS))
        if deed == "store":
            self.store(0, which, 0, 5, data.draw(st.sampled_from(SHAPES)), data.draw(st.integers(0, 1)), True)
        elif deed == "commit" and self.grants:
            self.commit(data.draw(st.integers(0, 100)), [0, 1, 2, 3], False)
        elif deed == "delete":
            self.delete(0, which, data.draw(st.integers(0, 4)))
        elif deed == "clear":
            self.clear(0)
        elif deed == "pin":
            self.pin(which, data.draw(st.integers(0, 4)), data.draw(st.booleans()))
        elif deed == "leave" and len(self.clients) > 1:
            self.leave(data.draw(st.integers(0, 2)), "goodbye")
        else:
            self.server.wait(1)
            self.settle_evictions()
        directory.after_store = None
        after = dict(self.stored)
        meta, self.told, grants = snapshots[data.draw(st.integers(0, len(snapshots) - 1))]
        del self.grants[grants:]
        self.server.restart(meta)
        self.counts = self.server.stats
        found = self.committed()
        for thing, place in known.items():
            # What was there before and after the deed was there all the time.
            if after.get(thing) == place:
                assert found.get(thing) == place, "an acknowledged commit was lost"
        for thing, place in found.items():
            assert place in (known.get(thing), after.get(thing)) or self.was_granted(thing, place)
        assert all(generation >= self.told.get(slot, 0) for slot, generation in found.values())
        self.stored = found
        pages = {page for _, page, _ in found}
        assert self.pins() <= pinned | self.pinned, "a pin that nobody asked for"
        if not self.counts["pins_ended"]:
            assert pinned & self.pinned & pages <= self.pins(), "an acknowledged pin was lost"
        self.pinned = self.pins()

    def was_granted(self, thing: Thing, place: Place) -> bool:
        return any(
            thing in things and place == tuple(part.tolist()[things.index(thing)] for part in grant.mine())
            for _, _, grant, things in self.grants
        )

    # ------------------------------------------------------------ what always holds

    @invariant()
    def the_pool_holds_what_was_acknowledged(self) -> None:
        if hasattr(self, "stored"):
            self.server.state.check()
            assert self.committed() == self.stored
            slots = self.server.stats
            free = sum(len(part) for part in (self.server.state.books.slabs.check()[0],))
            cut = len(self.server.state.books.slabs.check()[1])
            used = slots["objects"] + slots["slots_reserved"] + slots["slots_quarantined"]
            assert free + used == cut, "slots = free + reserved + quarantined + committed"
            assert self.pins() == self.pinned
            tenants = self.server.state.books.pages.tenants
            quota = tenants.quota("")
            assert quota is None or tenants.used[""] <= quota, "more than the quota"


Machine.TestCase.settings = settings(
    max_examples=int(os.environ.get("MARU_TEST_EXAMPLES", "40")), stateful_step_count=40, deadline=None
)
test_any_history = Machine.TestCase
