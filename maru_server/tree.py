"""The prefix tree of one namespace: which pages are known, what each hangs under, and in which slots its objects lie.

A page is a row of a few array columns, not an object: a million pages take some 230 bytes each, and whatever is done
to a batch of pages is a handful of numpy operations. A page whose parent was never stored hangs under a *hollow* row
for it, which knows nothing but the hash, and which is linked into the tree when that parent comes. Rows that hold
nothing and carry nothing are removed at once.

It decides nothing about slots: it says what lies where. A slot's state, generation and checksum are only in the pool's
directory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from maru_server.directory import Slots

Rows: TypeAlias = npt.NDArray[np.int64]

#: Parent of a chain's first page.
ROOT_ROW: Final = -1
#: Parent of a hollow row whose own parent nobody has named yet.
UNKNOWN_ROW: Final = -2
_NONE: Final = -1  # end of a list of children
_FIRST_CAPACITY: Final = 64
_ONE: Final = np.uint32(1)
_ONE_SHORT: Final = np.uint16(1)


class ComponentTable:
    """The objects of one component: columns over the rows of its tree.

    ``slots[shard]`` holds slot + 1, so that zeroed memory means "nothing there" and untouched memory costs nothing.
    """

    __slots__ = ("have", "held", "length", "slots", "world")

    def __init__(self, capacity: int) -> None:
        self.world = np.zeros(capacity, np.uint16)  # shards that make the page whole
        self.length = np.zeros(capacity, np.uint64)  # bytes of each object
        self.held = np.zeros(capacity, np.uint16)  # slots reserved or committed
        self.have = np.zeros(capacity, np.uint16)  # slots committed
        self.slots: dict[int, npt.NDArray[np.uint32]] = {}

    def column(self, shard: int) -> npt.NDArray[np.uint32]:
        """Slot + 1 of each row for one shard."""
        column = self.slots.get(shard)
        if column is None:
            column = self.slots[shard] = np.zeros(len(self.world), np.uint32)
        return column

    def whole(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Pages of which every shard is committed."""
        have = self.have[rows]
        whole: npt.NDArray[np.bool_] = have == self.world[rows]
        whole &= have > 0
        return whole

    def grow(self, capacity: int) -> None:
        for name in ("world", "length", "held", "have"):
            setattr(self, name, grown(getattr(self, name), capacity))
        self.slots = {shard: grown(column, capacity) for shard, column in self.slots.items()}


def depths(parents: npt.NDArray[Any]) -> Rows:
    """How far below its top each row is; -1 for rows that lead to no top (on a cycle of parents, or below one).

    Each step doubles how far up every row looks."""
    above = np.append(parents.astype(np.int64), -1)  # index -1 is the sentinel: it leads to itself
    above[above < 0] = -1
    depth = (above >= 0).astype(np.int64)
    for _ in range(len(parents).bit_length() + 1):
        if not (above >= 0).any():
            break
        depth += depth[above]
        above = above[above]
    depth[above >= 0] = -1
    return depth[:-1]


def grown(column: npt.NDArray[Any], capacity: int) -> npt.NDArray[Any]:
    """The column with more rows; the new ones are zero, and cost no memory until they are used."""
    larger = np.zeros(capacity, column.dtype)
    larger[: len(column)] = column
    return larger


class PrefixTree:
    """Pages of the namespace ``number``."""

    __slots__ = (
        "_free", "_next", "_previous", "child", "keys", "last_use", "number", "objects", "parent", "pending", "queued",
        "rows", "size", "tables",
    )  # fmt: skip

    _COLUMNS: Final = ("parent", "child", "_next", "_previous", "last_use", "objects", "pending", "queued")

    def __init__(self, number: int, capacity: int = _FIRST_CAPACITY) -> None:
        self.number = number
        self.rows: dict[bytes, int] = {}
        self.keys: list[bytes | None] = []  # hash of each row, None where the row is not in use
        self.tables: dict[int, ComponentTable] = {}  # by component number
        self.size = 0  # rows ever used; all columns are longer
        self._free: list[int] = []
        self.parent = np.zeros(capacity, np.int32)
        self.child = np.zeros(capacity, np.int32)  # first child
        self._next = np.zeros(capacity, np.int32)  # siblings
        self._previous = np.zeros(capacity, np.int32)
        self.last_use = np.zeros(capacity, np.int64)  # ns, wall clock
        self.objects = np.zeros(capacity, np.uint32)  # committed objects of all components
        self.pending = np.zeros(capacity, np.uint32)  # reservations in flight: the page may not be evicted
        self.queued = np.zeros(capacity, bool)  # the eviction queue has an entry for this row (also for its next page)

    def __len__(self) -> int:
        """Rows in use, hollow ones too."""
        return len(self.rows)

    def table(self, component: int) -> ComponentTable:
        table = self.tables.get(component)
        if table is None:
            table = self.tables[component] = ComponentTable(len(self.parent))
        return table

    # ------------------------------------------------------------ shape of the tree

    def add_chain(self, keys: list[bytes], parent: int, now_ns: int) -> Rows:
        """Add unknown pages: the first under ``parent`` (a row or ROOT_ROW, UNKNOWN_ROW), each other under the one
        before it. Returns their rows."""
        count = len(keys)
        taken: list[int] | range
        if len(self._free) >= count:
            taken = self._free[-count:]
            del self._free[-count:]
            for row, key in zip(taken, keys, strict=True):
                self.keys[row] = key
        else:
            taken = range(self.size, self.size + count)
            self.size += count
            self.keys.extend(keys)
            if self.size > len(self.parent):
                self._grow(self.size)
        self.rows.update(zip(keys, taken, strict=True))
        if isinstance(taken, range):
            rows = np.arange(taken.start, taken.stop)
            where: slice | Rows = slice(taken.start, taken.stop)  # faster than an index array
        else:
            rows = where = np.array(taken, np.int64)
        self._next[where] = _NONE
        self._previous[where] = _NONE
        self.last_use[where] = now_ns
        self.parent[rows[1:]] = rows[:-1]
        self.child[rows[:-1]] = rows[1:]
        self.child[rows[-1]] = _NONE
        self.link(int(rows[0]), parent)
        return rows

    def link(self, row: int, parent: int) -> None:
        """Hang a row that has no parent yet under ``parent``."""
        self.parent[row] = parent
        if parent >= 0:
            first = int(self.child[parent])
            self._next[row] = first
            self._previous[row] = _NONE
            if first >= 0:
                self._previous[first] = row
            self.child[parent] = row

    def root(self, row: int) -> int:
        """The topmost row above ``row``."""
        while True:
            parent = int(self.parent[row])
            if parent < 0:
                return row
            row = parent

    def children(self, row: int) -> Iterator[int]:
        child = int(self.child[row])
        while child >= 0:
            yield child
            child = int(self._next[child])

    def below(self, rows: Iterable[int]) -> list[int]:
        """These rows and all that continue them, every page before its parent."""
        found = set(self._walk(rows))
        order = self._walk([row for row in found if int(self.parent[row]) not in found])
        order.reverse()
        return order

    def _walk(self, rows: Iterable[int]) -> list[int]:
        """The rows and their descendants, each once; parents first, if no row given is below another one given."""
        found: dict[int, None] = {}
        todo = list(rows)
        while todo:
            row = todo.pop()
            if row not in found:
                found[row] = None
                todo.extend(self.children(row))
        return list(found)

    def is_empty(self, row: int) -> bool:
        """Nothing stored, nothing coming, nothing below: the row has no reason to stay."""
        return not (self.child[row] >= 0 or self.objects[row] or self.pending[row])

    def is_evictable(self, row: int) -> bool:
        """A leaf with objects and no writer."""
        return bool(self.child[row] < 0 and self.objects[row] and not self.pending[row])

    def is_partial(self, row: int) -> bool:
        """Some component has some of its shards, not all."""
        return any(0 < table.have[row] < table.world[row] for table in self.tables.values())

    def remove(self, row: int) -> int:
        """Forget a page that has no children and no slots; returns its parent."""
        assert self.child[row] < 0, "a page with children was removed"
        key = self.keys[row]
        assert key is not None
        parent = int(self.parent[row])
        if parent >= 0:
            following, before = int(self._next[row]), int(self._previous[row])
            if before >= 0:
                self._next[before] = following
            else:
                self.child[parent] = following
            if following >= 0:
                self._previous[following] = before
        del self.rows[key]
        self.keys[row] = None
        self.objects[row] = 0
        self._free.append(row)
        return parent

    def prune(self, rows: Iterable[int]) -> list[int]:
        """Remove those of the rows that are empty, and what becomes empty above them.

        Returns rows that lost a child or that stay: each may have become a leaf that can be evicted."""
        exposed = []
        for row in rows:
            while row >= 0 and self.keys[row] is not None and self.is_empty(row):
                row = self.remove(row)
            if row >= 0 and self.keys[row] is not None:
                exposed.append(row)
        return exposed

    def _grow(self, size: int) -> None:
        capacity = len(self.parent)
        while capacity < size:
            # Doubling, but for large trees in smaller steps: the copy is what a request waits for.
            capacity = capacity * 2 if capacity < 1 << 20 else capacity + (capacity >> 1)
        for name in self._COLUMNS:
            setattr(self, name, grown(getattr(self, name), capacity))
        for table in self.tables.values():
            table.grow(capacity)

    # ------------------------------------------------------------ objects

    def hold(self, component: int, shard: int, rows: Rows, slots: Slots, world: int, length: int) -> None:
        """Note reserved slots of distinct rows."""
        table = self.table(component)
        table.column(shard)[rows] = slots + _ONE
        table.held[rows] += _ONE_SHORT
        table.world[rows] = world
        table.length[rows] = length
        self.pending[rows] += _ONE

    def publish(self, component: int, rows: Rows, now_ns: int) -> None:
        """The reserved slots of these distinct rows are committed."""
        self.tables[component].have[rows] += _ONE_SHORT
        self.objects[rows] += _ONE
        self.pending[rows] -= _ONE
        self.last_use[rows] = now_ns

    def let_go(self, component: int, shard: int, rows: Rows) -> None:
        """Forget the reserved slots of these distinct rows. The rows stay (see :meth:`prune`)."""
        table = self.tables[component]
        table.slots[shard][rows] = 0
        table.held[rows] -= _ONE_SHORT
        self.pending[rows] -= _ONE
        unused = rows[table.held[rows] == 0]
        table.world[unused] = 0
        table.length[unused] = 0

    def strip(self, rows: Rows) -> npt.NDArray[np.uint32]:
        """Take all slots off these distinct rows, which have no writer; returns the slots, in the order of the rows
        for each component and shard."""
        taken = []
        for table in self.tables.values():
            for column in table.slots.values():
                slots = column[rows]
                present = np.flatnonzero(slots)
                if len(present):
                    taken.append(slots[present] - _ONE)
                    column[rows[present]] = 0
            for name in ("world", "length", "held", "have"):
                getattr(table, name)[rows] = 0
        self.objects[rows] = 0
        return np.concatenate(taken) if taken else np.empty(0, np.uint32)

    def one_slot(self, rows: Rows) -> Iterator[tuple[npt.NDArray[np.uint32], Rows]]:
        """Some slot of each of the rows that has any: pieces of (slots, their rows)."""
        for table in self.tables.values():
            for column in table.slots.values():
                slots = column[rows]
                present = slots != 0
                if present.any():
                    yield slots[present] - _ONE, rows[present]
                    rows = rows[~present]

    def strip_all(self) -> npt.NDArray[np.uint32]:
        """Take all slots off all pages, children before their parents; no row may have a writer. The tree is of no
        use afterwards."""
        rows = np.fromiter(self.rows.values(), np.int64, len(self.rows))
        return self.strip(rows[np.argsort(-depths(self.parent[: self.size])[rows], kind="stable")])

    # ------------------------------------------------------------ rebuilding

    def adopt(self, rows: dict[bytes, int], parents: Rows, last_use: npt.NDArray[np.int64]) -> None:
        """Fill an empty tree: the ``i``-th key of ``rows`` is row ``i``, under ``parents[i]``; no cycles. Columns only:
        the objects come by :meth:`adopt_objects`."""
        assert not self.size
        count = len(rows)
        self.size = count
        self.keys = list(rows)
        self.rows = rows
        if count > len(self.parent):
            self._grow(count)
        self.parent[:count] = parents
        self.last_use[:count] = last_use
        for column in (self.child, self._next, self._previous):
            column[:count] = _NONE
        # Siblings become neighbours when sorted by parent.
        order = np.argsort(parents, kind="stable")
        order = order[np.searchsorted(parents[order], 0) :]
        above = parents[order]
        siblings = above[1:] == above[:-1]
        self._next[order[:-1][siblings]] = order[1:][siblings]
        self._previous[order[1:][siblings]] = order[:-1][siblings]
        firsts = np.concatenate([[True], ~siblings])[: len(order)]
        self.child[above[firsts]] = order[firsts]

    def adopt_objects(
        self, component: int, shard: int, rows: Rows, slots: Slots, worlds: Slots, lengths: Slots
    ) -> None:
        """Committed objects of distinct rows."""
        table = self.table(component)
        table.column(shard)[rows] = slots + _ONE
        table.held[rows] += _ONE_SHORT
        table.have[rows] += _ONE_SHORT
        table.world[rows] = worlds
        table.length[rows] = lengths
        self.objects[rows] += _ONE

    # ------------------------------------------------------------ integrity

    def check(self) -> dict[int, tuple[int, int, int]]:
        """slot -> (component, shard, row) of every slot held, after checking every column against the others."""
        used = [row for row, key in enumerate(self.keys) if key is not None]
        assert len(self.keys) == self.size
        assert self.rows == {self.keys[row]: row for row in used}, "hash -> row"
        assert sorted(self._free + used) == list(range(self.size)), "a row was lost or used twice"
        listed = set()
        for row in used:
            before = _NONE
            for child in self.children(row):
                assert int(self.parent[child]) == row, "a child of another parent"
                assert int(self._previous[child]) == before, "list of siblings"
                assert child not in listed, "a row in two lists"
                listed.add(child)
                before = child
            assert not self.is_empty(row), "an empty row was left behind"
        assert listed == {row for row in used if self.parent[row] >= 0}, "a row that its parent does not list"
        tops = [row for row in used if self.parent[row] < 0]
        assert len(self._walk(tops)) == len(used), "a cycle of parents"
        slots: dict[int, tuple[int, int, int]] = {}
        held_by_row = dict.fromkeys(used, 0)
        for component, table in self.tables.items():
            held = np.zeros(len(self.parent), np.int64)
            for shard, column in table.slots.items():
                for row in np.flatnonzero(column).tolist():
                    slot = int(column[row]) - 1
                    assert slot not in slots, "one slot in two places"
                    assert self.keys[row] is not None, "a slot on a row that is not in use"
                    assert shard < table.world[row], "a shard outside its world"
                    slots[slot] = (component, shard, row)
                    held[row] += 1
                    held_by_row[row] += 1
            assert (table.held == held).all(), "held"
            assert (table.have <= table.held).all(), "have"
            assert ((table.world > 0) == (held > 0)).all(), "world of nothing"
            assert ((table.length > 0) == (held > 0)).all(), "length of nothing"
        for row in used:
            have = sum(int(table.have[row]) for table in self.tables.values())
            assert int(self.objects[row]) == have, "objects"
            assert int(self.pending[row]) == held_by_row[row] - have, "pending"
        return slots


def chain_rows(tree: PrefixTree, keys: list[bytes], absent: int) -> Rows:
    """The row of each key, ``absent`` where unknown."""
    return np.fromiter(map(tree.rows.get, keys, repeat(absent)), np.int64, len(keys))
