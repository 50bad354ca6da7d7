"""What the server shows to people: rows of plain values, for the command ``maru``, the web page and tests.

Each row is a dict of text, numbers, booleans and None, with keys that stay. Nothing here changes anything, and nothing is
more than a few passes over columns: the loop that serves clients makes the rows of everything but the tree. Of the tree
it only makes a :func:`snapshot`; choosing and summing (:func:`tree_view`) is a worker's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from maru_core.protocol import ROOT
from maru_server.tree import PrefixTree, depths

Row: TypeAlias = dict[str, Any]
Sort: TypeAlias = Literal["heat", "bytes"]

#: Most rows of one answer.
LIMIT_MAX: Final = 4096

_I64: TypeAlias = npt.NDArray[np.int64]
_NOWHERE: Final = -1

# ------------------------------------------------------------ the tree


@dataclass(slots=True)
class _Columns:
    """One tree's columns, of the rows ``[0, size)``: a copy of its shape, and the tree's own columns of figures."""

    tree: PrefixTree  # only to ask for the hashes of a few rows
    parent: npt.NDArray[np.int32]
    inner: npt.NDArray[np.bool_]  # has children
    last_use: _I64
    tables: list[tuple[str, npt.NDArray[np.uint64], npt.NDArray[np.uint16]]]  # component, length, have
    guarded: _I64  # rows
    number: int  # of the namespace, as clients know it


@dataclass(slots=True)
class Snapshot:
    """The shape of some trees at one moment. Made in the loop; everything else may be done anywhere.

    Only the shape is copied, which is what must hold together. Figures (bytes, last use, hashes) are read when they are added
    up: they are of that time, and where a page went meanwhile and another took its row, of the other."""

    now_ns: int  # time of day
    trees: list[_Columns] = field(default_factory=list)


def snapshot(trees: Iterable[PrefixTree], components: Mapping[str, int], now_ns: int) -> Snapshot:
    """Copy what :func:`tree_view` needs: 5 bytes a page. To be called where nothing changes the trees meanwhile (in the loop).

    Args:
        components: numbers of the components by name.
        now_ns: the time of day, as ``last_use`` has it.
    """
    taken = Snapshot(now_ns)
    names = {number: name for name, number in components.items()}
    for tree in trees:
        size = tree.size
        taken.trees.append(
            _Columns(
                tree,
                tree.parent[:size].copy(),
                tree.child[:size] >= 0,
                tree.last_use[:size],
                [
                    (names.get(number, f"#{number}"), table.length[:size], table.have[:size])
                    for number, table in tree.tables.items()
                ],
                np.fromiter(tree.guards, np.int64, len(tree.guards)),
                tree.number,
            )
        )
    return taken


def tree_view(snapshot: Snapshot, limit: int = 64, sort: Sort = "heat") -> list[Row]:
    """The ``limit`` hottest (or largest) nodes of the trees, and the rest summed up, so that a picture of it is whole.

    A node is a run of pages without a branch. Nodes are chosen from the top: with each node come all above it. With
    ``sort="heat"`` those are chosen whose subtree was used last, with ``"bytes"`` those whose subtree is largest.

    Rows come parents first; each is one of three kinds:

    ``namespace``
        The top of one namespace that has pages; not counted in ``limit``.
    ``run``
        A node.
    ``other``
        All that hangs under a node (or namespace) and was not chosen, in one row; only where there is something.

    ==================== ===========================================================================================
    key                  value
    ==================== ===========================================================================================
    ``kind``             as above
    ``parent``           index, in this list, of the row it hangs under; -1 for a namespace
    ``namespace``        its number
    ``depth``            pages before the first page of the run (0 for a namespace; for ``other`` the least of them)
    ``pages``            pages stored in the run itself (0 for a namespace; for ``other`` of all of it)
    ``bytes``            bytes of their objects, all components and shards
    ``subtree_pages``    pages of the run and of everything below it
    ``subtree_bytes``    so that ``subtree_bytes`` = ``bytes`` + the sum of ``subtree_bytes`` of its rows
    ``idle_s``           seconds since a page of it was used last (of ``other``: of any; of a namespace: of any)
    ``subtree_idle_s``   the same of the run and everything below it
    ``first``, ``last``  hashes of the run's first and last page, 64 hex digits (None for the other kinds, and where the page
                         is gone since the snapshot)
    ``nodes``            runs in it (1 for a run; of a namespace: all)
    ``components``       names of the components of which it has pages
    ``guarded``          pages in the run itself that a pin or a hold keeps (all above them are kept too)
    ``kept``             whether eviction must leave the run: something in its subtree is guarded
    ==================== ===========================================================================================

    Takes some tenths of a second for a million pages, most of it without the interpreter's lock.
    """
    forest = _Forest(snapshot)
    hottest = forest.subtree_use if sort == "heat" else forest.subtree_bytes
    # No node is hotter or larger than what it hangs under, so the first ones are closed upwards; on a tie the upper one leads.
    candidates = np.flatnonzero(forest.subtree_pages[: forest.runs] > 0)
    order = np.lexsort((forest.depth[candidates], -hottest[candidates]))
    tops = np.arange(forest.runs, forest.nodes)
    shown = np.concatenate([tops[forest.subtree_pages[tops] > 0], candidates[order[: max(0, limit)]]])
    index = np.full(forest.nodes, _NOWHERE)
    index[shown] = np.arange(len(shown))
    return [*forest.rows(shown, index), *forest.others(index)]


class _Forest:
    """Runs of pages as nodes ``[0, runs)``, and a top for each tree as ``[runs, nodes)``; one array element a node."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._now_ns = snapshot.now_ns
        self._trees = snapshot.trees
        sizes = [len(columns.parent) for columns in snapshot.trees]
        self._offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._of_tree = np.repeat(np.arange(len(sizes)), sizes)
        parent = np.concatenate([np.empty(0, np.int64), *(c.parent for c in snapshot.trees)]).astype(np.int64)
        parent = np.where(parent >= 0, parent + self._offsets[self._of_tree], _NOWHERE)
        nbytes = np.zeros(len(parent), np.int64)
        stored = np.zeros(len(parent), bool)
        guards = np.zeros(len(parent), np.int64)
        #: Rows that have pages of a component, by its name.
        self._having: dict[str, list[_I64]] = {}
        for columns, offset in zip(snapshot.trees, self._offsets.tolist(), strict=False):
            end = offset + len(columns.parent)
            for name, length, have in columns.tables:
                nbytes[offset:end] += (length * have).astype(np.int64)
                there = have > 0
                stored[offset:end] |= there
                self._having.setdefault(name, []).append(np.flatnonzero(there) + offset)
            guards[columns.guarded[columns.guarded < len(columns.parent)] + offset] = 1
        inner = np.concatenate([np.empty(0, bool), *(c.inner for c in snapshot.trees)])
        used = np.concatenate([np.empty(0, np.int64), *(c.last_use for c in snapshot.trees)])
        alive = inner | stored  # other rows are not in use, or nothing is stored in them yet
        self._find_runs(parent, alive)
        rows = np.flatnonzero(alive)
        node = self._node[rows]

        def per_run(values: npt.NDArray[Any]) -> _I64:
            return np.bincount(node, values[rows], self.nodes).astype(np.int64)

        self.pages = per_run(stored)
        self.bytes = per_run(nbytes)
        self.guards = per_run(guards)
        self.used = np.zeros(self.nodes, np.int64)
        np.maximum.at(self.used, node, np.where(stored[rows], used[rows], 0))
        self.depth = np.zeros(self.nodes, np.int64)
        self.depth[: self.runs] = depths(parent)[self._heads]
        self._sum_up()

    def _find_runs(self, parent: _I64, alive: npt.NDArray[np.bool_]) -> None:
        count = len(parent)
        child = np.flatnonzero(alive & (parent >= 0))
        children = np.bincount(parent[child], minlength=count)
        head = np.arange(count)
        only = child[children[parent[child]] == 1]
        head[only] = parent[only]
        while True:  # each step doubles how far up every row looks
            further = head[head]
            if np.array_equal(further, head):
                break
            head = further
        self._heads = np.flatnonzero(alive & (head == np.arange(count)))
        self.runs = len(self._heads)
        self.nodes = self.runs + len(self._trees)
        number = np.full(count, _NOWHERE)
        number[self._heads] = np.arange(self.runs)
        self._node = number[head]  # of each row that is alive
        ends = np.flatnonzero(alive & (children != 1))
        self._tails = np.empty(self.runs, np.int64)
        self._tails[self._node[ends]] = ends
        above = parent[self._heads]
        self.parent = np.full(self.nodes, _NOWHERE)
        self.parent[: self.runs] = np.where(above >= 0, self._node[above], self.runs + self._of_tree[self._heads])

    def _sum_up(self) -> None:
        """What each node has, together with all below it.

        Step ``k`` adds to each node what those 2**k below it know of their next 2**k levels: a few passes, whatever the
        shape of the tree."""
        self.subtree_pages = self.pages.copy()
        self.subtree_bytes = self.bytes.copy()
        self.subtree_guards = self.guards.copy()
        self.subtree_use = self.used.copy()
        self.subtree_nodes = np.ones(self.nodes, np.int64)
        self.subtree_nodes[self.runs :] = 0
        above = self.parent
        while len(below := np.flatnonzero(above >= 0)):
            at = above[below]
            for column in (self.subtree_pages, self.subtree_bytes, self.subtree_guards, self.subtree_nodes):
                column += np.bincount(at, column[below], self.nodes).astype(np.int64)
            highest = self.subtree_use.copy()
            np.maximum.at(highest, at, self.subtree_use[below])
            self.subtree_use = highest
            further = np.full(self.nodes, _NOWHERE)
            further[below] = above[at]
            above = further

    # ------------------------------------------------------------ rows

    def rows(self, shown: _I64, index: _I64) -> list[Row]:
        """The rows of these nodes; ``index`` says where each node stands in the answer, -1 for those not in it."""
        components = self._components(shown, index)
        return [
            self._row(node, int(index[self.parent[node]]), components[at]) for at, node in enumerate(shown.tolist())
        ]

    def _row(self, node: int, parent: int, components: list[str]) -> Row:
        top = node >= self.runs
        tree = node - self.runs if top else int(self._of_tree[self._heads[node]])
        return {
            "kind": "namespace" if top else "run",
            "parent": _NOWHERE if top else parent,
            "namespace": self._trees[tree].number,
            "depth": int(self.depth[node]),
            "pages": int(self.pages[node]),
            "bytes": int(self.bytes[node]),
            "subtree_pages": int(self.subtree_pages[node]),
            "subtree_bytes": int(self.subtree_bytes[node]),
            "idle_s": self._idle(self.subtree_use[node] if top else self.used[node]),
            "subtree_idle_s": self._idle(self.subtree_use[node]),
            "first": None if top else self._hash(tree, int(self._heads[node])),
            "last": None if top else self._hash(tree, int(self._tails[node])),
            "nodes": int(self.subtree_nodes[node]) if top else 1,
            "components": components,
            "guarded": int(self.guards[node]),
            "kept": bool(self.subtree_guards[node]),
        }

    def others(self, index: _I64) -> list[Row]:
        """One row for each shown node below which something is not shown."""
        hidden = np.flatnonzero((index < 0) & (self.parent >= 0) & (self.subtree_pages > 0))
        hidden = hidden[index[self.parent[hidden]] >= 0]
        above = self.parent[hidden]

        def sums(column: _I64) -> _I64:
            return np.bincount(above, column[hidden], self.nodes).astype(np.int64)

        pages, nbytes, nodes, guards = map(
            sums, (self.subtree_pages, self.subtree_bytes, self.subtree_nodes, self.subtree_guards)
        )
        used = np.zeros(self.nodes, np.int64)
        np.maximum.at(used, above, self.subtree_use[hidden])
        least = np.full(self.nodes, np.iinfo(np.int64).max)
        np.minimum.at(least, above, self.depth[hidden])
        parents = np.unique(above)
        return [
            {
                "kind": "other",
                "parent": int(index[node]),
                "namespace": self._trees[
                    node - self.runs if node >= self.runs else int(self._of_tree[self._heads[node]])
                ].number,
                "depth": int(least[node]),
                "pages": int(pages[node]),
                "bytes": int(nbytes[node]),
                "subtree_pages": int(pages[node]),
                "subtree_bytes": int(nbytes[node]),
                "idle_s": self._idle(used[node]),
                "subtree_idle_s": self._idle(used[node]),
                "first": None,
                "last": None,
                "nodes": int(nodes[node]),
                "components": [],
                "guarded": int(guards[node]),
                "kept": bool(guards[node]),
            }
            for node in parents[np.argsort(index[parents])].tolist()
        ]

    def _components(self, shown: _I64, index: _I64) -> list[list[str]]:
        found: list[list[str]] = [[] for _ in range(len(shown))]
        for name, parts in sorted(self._having.items()):
            at = index[self._node[np.concatenate(parts)]]
            for place in np.unique(at[at >= 0]).tolist():
                found[place].append(name)
        return found

    def _idle(self, used_ns: Any) -> float:
        return round(max(0, self._now_ns - int(used_ns)) / 1e9, 3)

    def _hash(self, tree: int, row: int) -> str | None:
        # The live column: a page that is gone meanwhile has no hash any more, or its row is another page's.
        key = self._trees[tree].tree.key(row - int(self._offsets[tree]))
        return key.hex() if key != ROOT else None
