"""Which page goes next: leaves only, first those that stayed incomplete, then the least recently used.

One small class, so that another policy can take its place. Using a page writes one number into a column of its tree
and tells nobody here: an entry is looked at again only when it comes to the top, and goes back with its true age if
the page was used since. So the queue holds leaves, not pages, and reading costs it nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Final

from maru_server.tree import PrefixTree

_ROW_BITS: Final = 32
_TREE_BITS: Final = 32
#: Ages are compared in units of 2**10 ns, about a microsecond.
_AGE_SHIFT: Final = 10


class LruLeaves:
    """Leaves in the order in which they are to be evicted.

    An entry is one int: age, tree, row. A row has at most one entry (``tree.queued``), also one that was left behind
    by a page that is gone; it then serves the next page of that row, or is dropped when it comes to the top.
    """

    def __init__(self, trees: Mapping[int, PrefixTree], incomplete_grace_ns: int) -> None:
        self._trees = trees
        self._grace_ns = incomplete_grace_ns
        self._whole: list[int] = []
        self._partial: list[int] = []

    def __len__(self) -> int:
        return len(self._whole) + len(self._partial)

    def offer(self, tree: PrefixTree, row: int) -> None:
        """The row may have become a leaf that can be evicted, or may not."""
        if not tree.queued[row] and tree.is_evictable(row):
            tree.queued[row] = True
            heapq.heappush(self._partial if tree.is_partial(row) else self._whole, _entry(tree, row))

    def next(self, now_ns: int) -> tuple[PrefixTree, int] | None:
        """Take the next victim off the queue; None if no page can be evicted."""
        # Any page is incomplete for a while, until its last rank has stored it: only those that stay so go first.
        return self._top(self._partial, now_ns - self._grace_ns) or self._top(self._whole) or self._top(self._partial)

    def _top(self, heap: list[int], used_before_ns: int | None = None) -> tuple[PrefixTree, int] | None:
        while heap:
            entry = heap[0]
            row = entry & ((1 << _ROW_BITS) - 1)
            tree = self._trees[(entry >> _ROW_BITS) & ((1 << _TREE_BITS) - 1)]
            if not tree.is_evictable(row):
                heapq.heappop(heap)
                tree.queued[row] = False
                continue
            if heap is self._partial and not tree.is_partial(row):
                heapq.heappop(heap)
                heapq.heappush(self._whole, _entry(tree, row))
                continue
            current = _entry(tree, row)
            if current > entry:
                heapq.heapreplace(heap, current)
                continue
            if used_before_ns is not None and int(tree.last_use[row]) > used_before_ns:
                return None
            heapq.heappop(heap)
            tree.queued[row] = False
            return tree, row
        return None

    def forget(self, number: int) -> None:
        """Drop all entries of a tree that was cleared."""
        for heap in (self._whole, self._partial):
            heap[:] = [entry for entry in heap if (entry >> _ROW_BITS) & ((1 << _TREE_BITS) - 1) != number]
            heapq.heapify(heap)

    def check(self) -> None:
        """Every leaf that can be evicted has one entry, and no row has two."""
        seen: dict[int, set[int]] = {number: set() for number in self._trees}
        for entry in self._whole + self._partial:
            row, number = entry & ((1 << _ROW_BITS) - 1), (entry >> _ROW_BITS) & ((1 << _TREE_BITS) - 1)
            assert row not in seen[number], "a row is queued twice"
            seen[number].add(row)
        for number, tree in self._trees.items():
            assert seen[number] == set(tree.queued.nonzero()[0].tolist()), "queued"
            missing = [row for row in tree.rows.values() if tree.is_evictable(row) and row not in seen[number]]
            assert not missing, "a leaf that can never be evicted"


def _entry(tree: PrefixTree, row: int) -> int:
    age = int(tree.last_use[row]) >> _AGE_SHIFT
    return (age << _TREE_BITS | tree.number) << _ROW_BITS | row
