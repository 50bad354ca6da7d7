"""The prefix tree against a plain one of dictionaries."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from maru_harness import chain

from maru_server import tree as tree_module
from maru_server.eviction import Evictor
from maru_server.index import page_index
from maru_server.lookup import split
from maru_server.tree import ROOT_ROW, UNKNOWN_ROW, PrefixTree, depths


def keys(name: object, count: int, start: int = 0) -> list[bytes]:
    return split(chain(name, count, start))


def hold(tree: PrefixTree, rows: np.ndarray, first_slot: int, shard: int = 0, world: int = 1) -> None:
    slots = np.arange(first_slot, first_slot + len(rows), dtype=np.uint32)
    tree.hold(0, shard, rows, slots, world, 100)


def store(tree: PrefixTree, rows: np.ndarray, first_slot: int, shard: int = 0, world: int = 1, now_ns: int = 1) -> None:
    hold(tree, rows, first_slot, shard, world)
    tree.publish(0, rows, now_ns)


def test_a_chain_hangs_under_its_parent_and_grows_the_columns() -> None:
    tree = PrefixTree(0)
    rows = tree.add_chain(keys("a", 100), ROOT_ROW, 5)
    store(tree, rows, 0)
    more = tree.add_chain(keys("b", 100), int(rows[49]), 5)
    store(tree, more, 100)
    assert tree.check().keys() == set(range(200))
    assert set(tree.children(int(rows[49]))) == {int(rows[50]), int(more[0])}
    assert tree.root(int(more[-1])) == rows[0]
    assert len(tree) == 200


@pytest.fixture(params=[True, False], ids=["compiled", "plain"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk as it was built, and as it is without a compiler."""
    if not request.param:
        monkeypatch.setattr(tree_module, "_subtree", None)


@pytest.mark.usefixtures("compiled")
def test_below_lists_every_page_before_its_parent_whatever_was_asked() -> None:
    tree = PrefixTree(0)
    trunk = tree.add_chain(keys("t", 5), ROOT_ROW, 1)
    branch = tree.add_chain(keys("b", 3), int(trunk[2]), 1)
    for asked in ([2], [4, 2], [2, 4], [4, 3, 2], [2, int(branch[0]), 4]):
        order = tree.below(asked).tolist()
        assert sorted(order) == sorted([*trunk[2:].tolist(), *branch.tolist()])
        for row in order:
            assert int(tree.parent[row]) not in order[: order.index(row)]


def test_a_row_is_used_again_and_remembers_nothing() -> None:
    tree = PrefixTree(0)
    rows = tree.add_chain(keys("a", 3), ROOT_ROW, 1)
    store(tree, rows, 0, world=2)
    for row in rows[::-1].tolist():
        tree.remove(row)
    assert tree.strip(rows).tolist() == [0, 1, 2]
    again = tree.add_chain(keys("b", 3), ROOT_ROW, 1)
    assert set(again.tolist()) == set(rows.tolist())
    assert not tree.objects[again].any()
    store(tree, again, 7)
    tree.check()


def test_a_page_with_children_is_not_removed() -> None:
    tree = PrefixTree(0)
    rows = tree.add_chain(keys("a", 2), ROOT_ROW, 1)
    with pytest.raises(AssertionError):
        tree.remove(int(rows[0]))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("seed", range(20))
def test_subtrees_go_as_if_page_by_page(seed: int) -> None:
    rng = random.Random(seed)
    trees = [PrefixTree(0), PrefixTree(0)]
    rows: list[int] = []
    for number in range(60):
        parent = rng.choice([ROOT_ROW, UNKNOWN_ROW, *rows, *rows[-3:]])
        for tree in trees:
            added = tree.add_chain(keys(number, 1), parent, 1)
            store(tree, added, number)
        rows.append(int(added[0]))
    for row in rng.sample(rows, 20):
        for tree in trees:
            tree.guard(row)
    at_once, by_page = trees
    while len(at_once):
        asked = rng.sample(at_once.used_rows().tolist(), min(len(at_once), rng.randrange(1, 4)))
        order = at_once.below(asked)
        exposed = at_once.remove_all(order)
        above = {by_page.remove(row) for row in order.tolist()}
        assert sorted(exposed) == sorted(row for row in above if row >= 0 and by_page.in_use(row))
        assert at_once.strip(order).tolist() == by_page.strip(order).tolist()
        assert at_once.check() == by_page.check()
        assert at_once.guards == by_page.guards
        for row in at_once.used_rows().tolist():
            assert list(at_once.children(row)) == list(by_page.children(row))
    again = at_once.add_chain(keys("again", 60), ROOT_ROW, 1)
    store(at_once, again, 0)
    at_once.check()


def test_a_subtree_goes_as_a_whole_or_not_at_all() -> None:
    tree = PrefixTree(0)
    trunk = tree.add_chain(keys("t", 3), ROOT_ROW, 1)
    tree.add_chain(keys("b", 1), int(trunk[1]), 1)
    with pytest.raises(AssertionError):
        tree.remove_all(trunk[::-1].copy())


def test_a_walk_over_damaged_columns_ends() -> None:
    tree = PrefixTree(0)
    rows = tree.add_chain(keys("t", 5), ROOT_ROW, 1)
    with pytest.raises(ValueError, match="a row outside"):
        tree.below([len(tree.parent)])
    tree.child[rows[4]] = rows[0]  # below itself
    with pytest.raises(ValueError, match="contradict"):
        tree.below([2])
    tree.child[rows[4]] = len(tree.parent)
    with pytest.raises(ValueError, match="contradict"):
        tree.below([2])


def test_prune_takes_empty_rows_and_what_becomes_empty_above() -> None:
    tree = PrefixTree(0)
    hollow = tree.add_chain(keys("h", 1), UNKNOWN_ROW, 1)
    rows = tree.add_chain(keys("a", 3), int(hollow[0]), 1)
    hold(tree, rows, 0)
    tree.let_go(0, 0, rows)
    assert tree.prune(rows[::-1].tolist()) == []
    assert len(tree) == 0
    rows = tree.add_chain(keys("a", 3), ROOT_ROW, 1)
    store(tree, rows[:1], 0)
    assert set(tree.prune(rows[::-1].tolist())) == {int(rows[0])}
    tree.check()


def test_siblings_are_unlinked_anywhere() -> None:
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2], [1, 2, 0]):
        tree = PrefixTree(0)
        (top,) = tree.add_chain(keys("t", 1), ROOT_ROW, 1)
        store(tree, np.array([top]), 0)
        children = [tree.add_chain(keys(name, 1), int(top), 1) for name in range(3)]
        for index, child in enumerate(children):
            store(tree, child, 1 + index)
        for index in order:
            assert tree.remove(int(children[index][0])) == top
            tree.strip(children[index])
            tree.check()
        assert tree.is_evictable(int(top))


def test_adopting_builds_the_same_tree() -> None:
    tree = PrefixTree(0)
    names = keys("x", 500)
    random = np.random.default_rng(0)
    parents = np.array([ROOT_ROW, *(int(random.integers(-1, row)) for row in range(1, 500))], np.int64)
    parents[7] = UNKNOWN_ROW
    index = page_index(1)
    index.intern(b"".join(names))
    tree.adopt(index, parents, np.arange(500, dtype=np.int64))
    rows = np.arange(500)
    tree.adopt_objects(0, 0, rows, rows.astype(np.uint32), np.full(500, 1), np.full(500, 9))
    tree.check()
    for row in (0, 7, 100):
        assert set(tree.children(row)) == set(np.flatnonzero(parents == row).tolist())


def test_depths_and_cycles() -> None:
    parents = np.array([ROOT_ROW, 0, 1, 2, 1, 6, 5, 6, UNKNOWN_ROW, 8])
    assert depths(parents).tolist() == [0, 1, 2, 3, 2, -1, -1, -1, 0, 1]
    assert depths(np.arange(-1, 999)).tolist() == list(range(1000))
    assert depths(parents[:0]).tolist() == []


def test_all_slots_come_off_children_first() -> None:
    tree = PrefixTree(0)
    store(tree, tree.add_chain(keys("a", 3), ROOT_ROW, 1), 0)
    store(tree, tree.add_chain(keys("b", 2), 1, 1), 3)
    store(tree, tree.add_chain(keys("c", 1), ROOT_ROW, 1), 5)
    slots = tree.strip_all().tolist()
    assert sorted(slots) == list(range(6))
    assert slots[0] == 4
    assert set(slots[1:3]) == {2, 3}
    assert slots[3] == 1


def test_the_queue_gives_leaves_by_true_age() -> None:
    tree = PrefixTree(3)
    leaves = Evictor({3: tree}, incomplete_grace_ns=0)
    second = 10**9
    for number in range(4):
        rows = tree.add_chain(keys(number, 2), ROOT_ROW, 0)
        store(tree, rows, 2 * number, now_ns=(number + 1) * second)
        leaves.offer(tree, int(rows[0]))
        leaves.offer(tree, int(rows[1]))
        leaves.offer(tree, int(rows[1]))
    assert len(leaves) == 4
    leaves.check()
    tree.last_use[1] = 9 * second
    tree.pending[3] += np.uint32(1)
    assert [leaves.next(10 * second) for _ in range(4)] == [(tree, 5), (tree, 7), (tree, 1), None]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.booleans()), max_size=60))
def test_any_growth_and_removal(steps: list[tuple[int, int, bool]]) -> None:
    tree = PrefixTree(0, capacity=2)
    model: dict[bytes, bytes | None] = {}  # page -> parent
    slot = 0
    for name, under, remove in steps:
        (key,), (parent,) = keys(name, 1), keys(under, 1)
        if remove:
            if key in model and key not in model.values():
                row = tree.rows[key]
                tree.remove(row)
                tree.strip(np.array([row]))
                del model[key]
        elif key not in model:
            above = tree.rows[parent] if parent in model else ROOT_ROW
            rows = tree.add_chain([key], above, 1)
            store(tree, rows, slot)
            slot += 1
            model[key] = parent if parent in model else None
        tree.check()
        known = {
            key: None if tree.parent[row] < 0 else tree.key(int(tree.parent[row])) for key, row in tree.rows.items()
        }
        assert known == model
