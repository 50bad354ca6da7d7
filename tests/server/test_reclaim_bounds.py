"""Emptying an extent for slots of another size: how far is looked for what would have to go."""

from __future__ import annotations

import random

import pytest
from maru_harness import Server, chain, geometry

from maru_server import room
from maru_server import tree as tree_module
from maru_server.tree import PrefixTree


def test_no_more_pages_are_looked_at_than_may_go(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(geometry(extents=16, slots=16), checked=False)
    client = server.client()
    client.store(chain("a", 16 * 16))  # each extent's pages have all later ones below them
    monkeypatch.setattr(room, "_RECLAIM_PAGES", 20)
    looked = 0
    children = PrefixTree.children

    def count(tree: PrefixTree, row: int) -> object:
        nonlocal looked
        looked += 1
        return children(tree, row)

    monkeypatch.setattr(PrefixTree, "children", count)
    monkeypatch.setattr(tree_module, "_subtree", None)
    assert client.reserve(chain("b", 1), nbytes=2 * 4096).status == [0]
    assert looked <= 16 * 21 + 40, "for each of 16 extents, and twice for the one that is emptied"
    monkeypatch.undo()
    server.state.check()
    assert client.match(chain("a", 256)).pages == 240


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_below_stops_where_it_is_too_much(seed: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(tree_module, "_subtree", None)
    rng = random.Random(seed)
    tree = PrefixTree(0)
    rows: list[int] = []
    for number in range(60):
        parent = rng.choice([-1, *rows])
        rows.append(int(tree.add_chain([(number + 1).to_bytes(32, "little")], parent, 0)[0]))
    for most in (0, 1, 5, 20, 60):
        some = rng.sample(rows, rng.randrange(1, 6))
        everything = tree.below(some).tolist()
        bounded = tree.below(some, most).tolist()
        if len(everything) <= most:
            assert bounded == everything
        else:
            assert most < len(set(bounded)) == len(bounded) <= len(everything)
            assert set(bounded) <= set(everything)
