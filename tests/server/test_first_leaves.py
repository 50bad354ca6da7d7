"""Evicting some pages of one namespace looks at few of its leaves one by one, and takes the same as if it looked at all."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from maru_server.eviction import POLICIES, Evictor
from maru_server.tree import ROOT_ROW, PrefixTree


def grow(rng: random.Random, pages: int) -> PrefixTree:
    tree = PrefixTree(0)
    rows: list[int] = []
    for number in range(pages):
        parent = rng.choice([ROOT_ROW, *rows[:20]])
        rows.append(int(tree.add_chain([(number + 1).to_bytes(32, "little")], parent, rng.randrange(10**12))[0]))
    for row in rows:
        tree.objects[row] = rng.random() < 0.9
        tree.pending[row] = rng.random() < 0.1
        tree.uses[row] = rng.choice([0, 0, 1, 2, 3, 40, 255])
        if rng.random() < 0.1:
            tree.guard(row)
    return tree


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(8))
def test_the_first_leaves_are_those_of_all(name: str, seed: int) -> None:
    tree = grow(random.Random(seed), 400)
    trees: Mapping[int, PrefixTree] = {0: tree}
    evictor = Evictor(trees, 0, name)
    now_ns = 2 * 10**12
    everything = [
        (-evictor.score(tree, row, now_ns), row) for row in tree.used_rows().tolist() if tree.is_evictable(row)
    ]
    for most in (0, 1, 5, 50, 10_000):
        first = evictor.leaves_of(tree, now_ns, most)
        assert sorted(score for score, _ in first)[:most] == sorted(score for score, _ in everything)[:most]
        assert len({row for _, row in first}) == len(first) <= most * evictor._policy.queues
        assert {row for _, row in first} <= {row for _, row in everything}
