"""The prefix tree against dictionaries: everything that may be done to it, in any order."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from maru_harness import chain

from maru_server.lookup import split
from maru_server.tree import ROOT_ROW, UNKNOWN_ROW, PrefixTree

#: What a page hangs under, where that is no page.
ROOT, UNKNOWN = b"root", b"unknown"
#: (component, world, bytes of an object)
SHAPES = [(0, 1, 4000), (1, 2, 4096), (2, 3, 70_000)]
PICK = st.integers(0, 1 << 16)


@dataclass
class Page:
    parent: bytes
    #: (component, shard) -> slot
    writing: dict[tuple[int, int], int] = field(default_factory=dict)
    stored: dict[tuple[int, int], int] = field(default_factory=dict)
    guards: int = 0
    used: int = 0


class TreeMachine(RuleBasedStateMachine):
    """``pages`` is the model. Rows are looked up by hash at every step, so that nothing here depends on their numbers."""

    @initialize(capacity=st.sampled_from([1, 2, 64]))
    def start(self, capacity: int) -> None:
        self.tree = PrefixTree(7, capacity)
        self.pages: dict[bytes, Page] = {}
        self.births = self.slots = self.now = 0

    def row(self, key: bytes) -> int:
        return self.tree.rows[key]

    def rows(self, keys: list[bytes]) -> np.ndarray:
        known = self.tree.rows
        return np.array([known[key] for key in keys], np.int64)

    def children(self, key: bytes) -> list[bytes]:
        return [child for child, page in self.pages.items() if page.parent == key]

    def above(self, key: bytes) -> list[bytes]:
        """The page and all before it, as far as is known."""
        line = []
        while key in self.pages:
            line.append(key)
            key = self.pages[key].parent
        return line

    def evictable(self) -> list[bytes]:
        return [
            key
            for key, page in self.pages.items()
            if page.stored and not page.writing and not page.guards and not self.children(key)
        ]

    def pick(self, keys: list[bytes], number: int) -> bytes:
        return keys[number % len(keys)]

    # ------------------------------------------------------------ pages come

    @rule(length=st.integers(1, 5), under=PICK, where=st.sampled_from(["root", "page", "page", "hollow"]), shape=PICK)
    def grow(self, length: int, under: int, where: str, shape: int) -> None:
        """A new chain, reserved for one component, as a reserve makes it: perhaps below a page that nobody stored yet."""
        self.births += 1
        keys = split(chain(self.births, length + (where == "hollow")))
        parent, row = ROOT, ROOT_ROW
        if where == "page" and self.pages:
            parent = self.pick(list(self.pages), under)
            row = self.row(parent)
        elif where == "hollow":
            parent = keys.pop(0)
            (hollow,) = self.tree.add_chain([parent], UNKNOWN_ROW, self.now).tolist()
            self.pages[parent] = Page(UNKNOWN, used=self.now)
            row = hollow
        self.now += 1
        rows = self.tree.add_chain(keys, row, self.now)
        for key in keys:
            self.pages[key] = Page(parent, used=self.now)
            parent = key
        assert rows.tolist() == [self.row(key) for key in keys]
        self.hold(keys, *SHAPES[shape % len(SHAPES)], shard=0)

    def hold(self, keys: list[bytes], component: int, world: int, nbytes: int, shard: int) -> None:
        slots = np.arange(self.slots, self.slots + len(keys), dtype=np.uint32)
        self.slots += len(keys)
        self.tree.hold(component, shard, self.rows(keys), slots, world, nbytes)
        for key, slot in zip(keys, slots.tolist(), strict=True):
            self.pages[key].writing[component, shard] = slot

    @precondition(lambda self: self.pages)
    @rule(picks=st.lists(PICK, min_size=1, max_size=5), shape=st.sampled_from(SHAPES), shard=st.integers(0, 2))
    def another_object(self, picks: list[int], shape: tuple[int, int, int], shard: int) -> None:
        """Reserve another component or shard of pages that are there, hollow ones too."""
        component, world, nbytes = shape
        thing = (component, shard % world)
        keys = list(dict.fromkeys(self.pick(list(self.pages), number) for number in picks))
        keys = [key for key in keys if thing not in self.pages[key].writing and thing not in self.pages[key].stored]
        if keys:
            self.hold(keys, component, world, nbytes, thing[1])

    @precondition(lambda self: any(page.parent == UNKNOWN for page in self.pages.values()))
    @rule(which=PICK, under=PICK)
    def link(self, which: int, under: int) -> None:
        """The parent of a loose page is named: any page that does not itself hang below it."""
        loose = self.pick([key for key, page in self.pages.items() if page.parent == UNKNOWN], which)
        others = [ROOT, *(key for key in self.pages if loose not in self.above(key))]
        parent = self.pick(others, under)
        if parent != ROOT:
            assert self.tree.root(self.row(parent)) != self.row(loose), "who is on top"
        self.tree.link(self.row(loose), ROOT_ROW if parent == ROOT else self.row(parent))
        self.pages[loose].parent = parent

    # ------------------------------------------------------------ objects

    def in_flight(self, number: int) -> tuple[tuple[int, int], list[bytes]]:
        things = sorted({thing for page in self.pages.values() for thing in page.writing})
        thing = things[number % len(things)]
        return thing, [key for key, page in self.pages.items() if thing in page.writing]

    @precondition(lambda self: any(page.writing for page in self.pages.values()))
    @rule(thing=PICK, first=PICK, count=st.integers(1, 6))
    def publish(self, thing: int, first: int, count: int) -> None:
        (component, shard), keys = self.in_flight(thing)
        keys = keys[first % len(keys) :][:count]
        self.now += 1
        self.tree.publish(component, self.rows(keys), self.now)
        for key in keys:
            page = self.pages[key]
            page.stored[component, shard] = page.writing.pop((component, shard))
            page.used = self.now

    @precondition(lambda self: any(page.writing for page in self.pages.values()))
    @rule(thing=PICK, first=PICK, count=st.integers(1, 6))
    def let_go(self, thing: int, first: int, count: int) -> None:
        """Reserved slots come back; pages that hold nothing any more go, and what becomes empty above them."""
        (component, shard), keys = self.in_flight(thing)
        keys = keys[first % len(keys) :][:count]
        rows, before = self.rows(keys), self.evictable()
        self.tree.let_go(component, shard, rows)
        for key in keys:
            del self.pages[key].writing[component, shard]
        exposed = self.tree.prune(rows[::-1].tolist())
        self.forget_empty(keys[::-1])
        self.are_offered(exposed, before)

    def are_offered(self, exposed: list[int], before: list[bytes]) -> None:
        """Whoever became a leaf that can be evicted is told of: nobody else would ever look at it."""
        assert {self.row(key) for key in self.evictable() if key not in before} <= set(exposed)

    def forget_empty(self, keys: list[bytes]) -> None:
        for key in keys:
            while key in self.pages:
                page = self.pages[key]
                if page.writing or page.stored or self.children(key):
                    break
                key = self.pages.pop(key) and page.parent

    # ------------------------------------------------------------ guards

    @precondition(lambda self: self.pages)
    @rule(which=PICK, times=st.integers(1, 2))
    def guard(self, which: int, times: int) -> None:
        key = self.pick(list(self.pages), which)
        for _ in range(times):
            self.tree.guard(self.row(key))
        self.pages[key].guards += times

    @precondition(lambda self: any(page.guards for page in self.pages.values()))
    @rule(which=PICK)
    def unguard(self, which: int) -> None:
        key = self.pick([key for key, page in self.pages.items() if page.guards], which)
        self.tree.unguard(self.row(key))
        self.pages[key].guards -= 1

    # ------------------------------------------------------------ pages go

    @precondition(lambda self: self.evictable())
    @rule(picks=st.lists(PICK, min_size=1, max_size=4))
    def evict(self, picks: list[int]) -> None:
        """Leaves one by one, each when it is one; then the slots of all of them at once."""
        gone: dict[bytes, list[int]] = {}
        rows = []
        for number in picks:
            leaves = self.evictable()
            if not leaves:
                break
            key = self.pick(leaves, number)
            row = self.row(key)
            assert self.tree.is_evictable(row)
            parent = self.tree.remove(row)
            page = self.pages.pop(key)
            gone[key] = list(page.stored.values())
            rows.append(row)
            assert parent == (self.row(page.parent) if page.parent in self.pages else self.tree_parent(page.parent))
            exposed = self.tree.prune([parent] if parent >= 0 else [])
            self.forget_empty([page.parent])
            self.are_offered(exposed, leaves)
        slots = self.tree.strip(np.array(rows, np.int64)).tolist()
        assert sorted(slots) == sorted(slot for mine in gone.values() for slot in mine)

    @staticmethod
    def tree_parent(parent: bytes) -> int:
        return ROOT_ROW if parent == ROOT else UNKNOWN_ROW

    @precondition(lambda self: len(self.pages) > 12)
    @rule()
    def evict_all_that_can_be(self) -> None:
        """What stays is guarded or being written, or has something below it that is: nothing is left without its parent."""
        while leaves := self.evictable():
            row = self.row(leaves[0])
            parent = self.tree.remove(row)
            self.tree.strip(np.array([row], np.int64))
            page = self.pages.pop(leaves[0])
            self.tree.prune([parent] if parent >= 0 else [])
            self.forget_empty([page.parent])
        kept = {key for key, page in self.pages.items() if page.guards or page.writing}
        assert set(self.pages) == {above for key in kept for above in self.above(key)}

    @precondition(lambda self: len(self.pages) > 6)
    @rule(which=PICK)
    def delete(self, which: int) -> None:
        """A page with all that continues it, whatever guards it."""
        top = self.pick(list(self.pages), which)
        below = [key for key in self.pages if top in self.above(key)]
        before, order = self.evictable(), self.tree.below([self.row(top)])
        assert {self.tree.key(row) for row in order.tolist()} == set(below)
        for component, world, _ in SHAPES:
            for shard in range(world):
                keys = [key for key in below if (component, shard) in self.pages[key].writing]
                if keys:
                    self.tree.let_go(component, shard, self.rows(keys))
        exposed = self.tree.remove_all(order)
        slots = self.tree.strip(order).tolist()
        assert sorted(slots) == sorted(slot for key in below for slot in self.pages[key].stored.values())
        parent = self.pages[top].parent
        for key in below:
            del self.pages[key]
        offered = self.tree.prune(exposed)
        self.forget_empty([parent])
        self.are_offered(offered, before)

    @precondition(lambda self: any(map(self.children, self.pages)))
    @rule(which=PICK)
    def a_page_with_children_is_never_removed(self, which: int) -> None:
        parents = [key for key in self.pages if self.children(key)]
        with pytest.raises(AssertionError):
            self.tree.remove(self.row(self.pick(parents, which)))

    # ------------------------------------------------------------ what always holds

    @invariant()
    def the_tree_says_what_the_dictionaries_say(self) -> None:
        if not hasattr(self, "pages"):
            return
        tree, rows = self.tree, self.tree.rows
        assert set(rows) == set(self.pages)
        keys = {row: key for key, row in rows.items()}
        assert len(tree) == len(self.pages)
        held = {
            (slot, *thing, rows[key])
            for key, page in self.pages.items()
            for thing, slot in (page.writing | page.stored).items()
        }
        assert {(slot, *place) for slot, place in tree.check().items()} == held
        for key, page in self.pages.items():
            row = rows[key]
            parent = int(tree.parent[row])
            assert (keys[parent] if parent >= 0 else {ROOT_ROW: ROOT, UNKNOWN_ROW: UNKNOWN}[parent]) == page.parent
            assert sorted(keys[child] for child in tree.children(row)) == sorted(self.children(key))
            assert keys[tree.root(row)] == self.above(key)[-1]
            assert int(tree.last_use[row]) == page.used
            assert tree.guards.get(row, 0) == page.guards
        assert {keys[row] for row in keys if tree.is_evictable(row)} == set(self.evictable())

    @invariant()
    def whole_and_partial_pages_are_known(self) -> None:
        if not getattr(self, "pages", None):
            return
        every = list(self.pages)
        rows = self.rows(every)
        for component, world, nbytes in SHAPES:
            table = self.tree.tables.get(component)
            whole = [all((component, shard) in self.pages[key].stored for shard in range(world)) for key in every]
            if table is None:
                assert not any(whole)
                continue
            assert table.whole(rows).tolist() == whole
            for key, row in zip(every, rows.tolist(), strict=True):
                page = self.pages[key]
                if any(thing[0] == component for thing in page.writing | page.stored):
                    assert (int(table.world[row]), int(table.length[row])) == (world, nbytes)
        for key, row in zip(every, rows.tolist(), strict=True):
            some = {component: 0 for component, _, _ in SHAPES}
            for component, _ in self.pages[key].stored:
                some[component] += 1
            assert self.tree.is_partial(row) == any(0 < some[c] < world for c, world, _ in SHAPES)

    @invariant()
    def one_slot_of_each_page_that_has_any(self) -> None:
        if not getattr(self, "pages", None):
            return
        keys = {row: key for key, row in self.tree.rows.items()}
        found: dict[bytes, int] = {}
        for slots, rows in self.tree.one_slot(np.array(list(keys), np.int64)):
            for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
                assert found.setdefault(keys[row], slot) == slot, "two slots of one page"
        assert set(found) == {key for key, page in self.pages.items() if page.writing or page.stored}
        assert all(
            slot in (*self.pages[k].writing.values(), *self.pages[k].stored.values()) for k, slot in found.items()
        )

    @invariant()
    def every_page_is_listed_before_its_parent(self) -> None:
        if not getattr(self, "pages", None):
            return
        keys = {row: key for key, row in self.tree.rows.items()}
        order = [keys[row] for row in self.tree.below(list(keys)).tolist()]
        assert sorted(order) == sorted(self.pages)
        seen = set()
        for key in order:
            assert all(child in seen for child in self.children(key))
            seen.add(key)

    def teardown(self) -> None:
        """In the end all slots come off, children first."""
        if not hasattr(self, "pages") or any(page.writing for page in self.pages.values()):
            return
        slots = self.tree.strip_all().tolist()
        depth = {slot: len(self.above(key)) for key, page in self.pages.items() for slot in page.stored.values()}
        assert sorted(slots) == sorted(depth)
        kinds = {slot: thing for page in self.pages.values() for thing, slot in page.stored.items()}
        for kind in set(kinds.values()):
            mine = [depth[slot] for slot in slots if kinds[slot] == kind]
            assert mine == sorted(mine, reverse=True), "a parent's slot before its child's"


TreeMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("MARU_TEST_EXAMPLES", "60")), stateful_step_count=40, deadline=None
)
test_any_order_of_steps = TreeMachine.TestCase
