"""The prefix tree of one namespace: which pages are known, what each hangs under, and in which slots its objects lie.

A page is a row of a few array columns, not an object: a million pages take some 230 bytes each, and whatever is done
to a batch of pages is a handful of numpy operations. A page whose parent was never stored hangs under a *hollow* row
for it, which knows nothing but the hash, and which is linked into the tree when that parent comes. Rows that hold
nothing and carry nothing are removed at once.

It decides nothing about slots: it says what lies where. A slot's state, generation and checksum are only in the pool's
directory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from maru_server.columns import ComponentTable, grown
from maru_server.directory import Slots
from maru_server.index import PageIndex, TableIndex, page_index
from maru_server.index import Rows as Rows

try:
    from maru_server import _subtree
except ImportError:  # built without a compiler
    _subtree = None  # type: ignore[assignment]

#: Parent of a chain's first page.
ROOT_ROW: Final = -1
#: Parent of a hollow row whose own parent nobody has named yet.
UNKNOWN_ROW: Final = -2
_NONE: Final = -1  # end of a list of children
_UNUSED: Final = -4  # parent of a row that is not in use
_FIRST_CAPACITY: Final = 64
#: Uses of a page that lie closer together than this, ns, are one: several ranks load the pages of one request, and write them.
APART_NS: Final = 10**9
_USES_MAX: Final = np.uint8(255)
_ONE: Final = np.uint32(1)
_ONE_SHORT: Final = np.uint16(1)


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


class PrefixTree:
    """Pages of the namespace ``number``."""

    __slots__ = (
        "_free", "_next", "_previous", "child", "counts", "guards", "index", "last_use", "number", "objects", "parent", "pending",
        "queued", "size", "tables", "tenant", "uses",
    )  # fmt: skip

    _COLUMNS: Final = ("parent", "child", "_next", "_previous", "last_use", "objects", "pending", "queued", "uses")

    def __init__(self, number: int, capacity: int = _FIRST_CAPACITY, *, tenant: str = "") -> None:
        self.number = number
        self.tenant = tenant  # whose namespace it is
        self.index = page_index(capacity)
        self.tables: dict[int, ComponentTable] = {}  # by component number
        self.counts: Counter[str] = Counter()  # of this namespace since the server's start, for people
        self.guards: dict[int, int] = {}  # row -> pins and holds that keep it, and so all above it, from eviction
        self.size = 0  # rows ever used; all columns are longer
        self._free: list[int] = []
        self.parent = np.zeros(capacity, np.int32)
        self.child = np.zeros(capacity, np.int32)  # first child
        self._next = np.zeros(capacity, np.int32)  # siblings
        self._previous = np.zeros(capacity, np.int32)
        self.last_use = np.zeros(capacity, np.int64)  # ns, wall clock
        self.objects = np.zeros(capacity, np.uint32)  # committed objects of all components
        self.pending = np.zeros(capacity, np.uint32)  # reservations in flight: the page may not be evicted
        self.uses = np.zeros(capacity, np.uint8)  # how often it was used again since it was stored, see used()
        self.queued = np.zeros(capacity, bool)  # the eviction queue has an entry for this row (also for its next page)

    def __len__(self) -> int:
        """Rows in use, hollow ones too."""
        return len(self.index)

    # ------------------------------------------------------------ which row is which page

    def find(self, hashes: bytes, absent: int) -> Rows:
        """The row of each of the packed page hashes, ``absent`` where unknown."""
        return self.index.find(hashes, absent)

    def row(self, key: bytes) -> int | None:
        """The row of one page hash."""
        row = int(self.index.find(key, _NONE)[0])
        return row if row >= 0 else None

    def key(self, row: int) -> bytes:
        """The page hash of a row that is in use."""
        key: bytes = self.index.hashes[row].tobytes()
        return key

    def in_use(self, row: int) -> bool:
        return bool(self.parent[row] != _UNUSED)

    def used_rows(self) -> Rows:
        """All rows in use, ascending."""
        return np.flatnonzero(self.parent[: self.size] != _UNUSED)

    @property
    def rows(self) -> dict[bytes, int]:
        """Hash to row, of all pages: a copy, for people and tests."""
        return {self.key(row): row for row in self.used_rows().tolist()}

    def table(self, component: int) -> ComponentTable:
        table = self.tables.get(component)
        if table is None:
            table = self.tables[component] = ComponentTable(len(self.parent))
        return table

    # ------------------------------------------------------------ shape of the tree

    def add_chain(self, keys: list[bytes], parent: int, now_ns: int) -> Rows:
        """Add unknown pages: the first under ``parent`` (a row or ROOT_ROW, UNKNOWN_ROW), each other under the one
        before it. Returns their rows."""
        rows = self.take_rows(len(keys))
        self.index.add(b"".join(keys), rows)
        self._next[rows] = _NONE
        self._previous[rows] = _NONE
        self.last_use[rows] = now_ns
        self.uses[rows] = 0
        self.parent[rows[1:]] = rows[:-1]
        self.child[rows[:-1]] = rows[1:]
        self.child[rows[-1]] = _NONE
        self.link(int(rows[0]), parent)
        return rows

    def take_rows(self, count: int) -> Rows:
        """So many rows that are not in use, for pages that the caller adds now."""
        if len(self._free) >= count:
            taken = self._free[-count:]
            del self._free[-count:]
            return np.array(taken, np.int64)
        self.size += count
        if self.size > len(self.parent):
            self._grow(self.size)
        return np.arange(self.size - count, self.size)

    def columns_of_a_chain(self) -> tuple[Any, ...]:
        """What ``_store.c`` fills in where a chain is added; the index must be the compiled one."""
        index = self.index
        assert isinstance(index, TableIndex)
        return (
            index.table, index.hashes, index.key,
            self.parent, self.child, self._next, self._previous, self.last_use, self.uses, self.pending,
        )  # fmt: skip

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

    def below(self, rows: Rows | Sequence[int], most: int | None = None) -> Rows:
        """These rows and all that continue them, every page before its parent.

        Args:
            most: with more than that, the answer is some of them in no order, but more than ``most``.
        """
        if _subtree is None:
            return self._below(rows, most)
        out = np.empty(len(self.parent) if most is None else min(len(self.parent), most + 1), np.int64)
        tops = np.ascontiguousarray(rows, np.int64)
        listed: Rows = out[: _subtree.below(self.child, self._next, self.parent, tops, out)]
        return listed

    def _below(self, rows: Iterable[int], most: int | None) -> Rows:
        """The same without a compiler, in time that is felt from some thousand pages on."""
        some = self._walk(map(int, rows), most)
        if most is None or len(some) <= most:
            found = set(some)
            some = self._walk([row for row in some if int(self.parent[row]) not in found])
            some.reverse()
        return np.array(some, np.int64)

    def _walk(self, rows: Iterable[int], most: int | None = None) -> list[int]:
        """The rows and their descendants, each once; parents first, if no row given is below another one given. Ends early when
        there are more than ``most``."""
        found: dict[int, None] = {}
        todo = list(rows)
        while todo:
            row = todo.pop()
            if row not in found:
                found[row] = None
                if most is None:
                    todo.extend(self.children(row))
                elif len(found) > most:
                    break
                else:
                    todo.extend(islice(self.children(row), most + 1))
        return list(found)

    def is_empty(self, row: int) -> bool:
        """Nothing stored, nothing coming, nothing below: the row has no reason to stay."""
        return not (self.child[row] >= 0 or self.objects[row] or self.pending[row])

    def is_evictable(self, row: int) -> bool:
        """A leaf with objects, without a writer, that nobody guards."""
        return bool(self.child[row] < 0 and self.objects[row] and not self.pending[row] and row not in self.guards)

    def guard(self, row: int) -> None:
        """Keep a page from eviction, and with it all above it. Each call needs its :meth:`unguard`."""
        self.guards[row] = self.guards.get(row, 0) + 1

    def unguard(self, row: int) -> None:
        """The caller offers the row to the eviction queue afterwards."""
        left = self.guards.pop(row) - 1
        if left:
            self.guards[row] = left

    def is_partial(self, row: int) -> bool:
        """Some component has some of its shards, not all."""
        for table in self.tables.values():  # noqa: SIM110  a plain loop is faster, and it is asked for each page that goes
            if 0 < table.have[row] < table.world[row]:
                return True
        return False

    def partial(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """:meth:`is_partial` of each of these rows."""
        found = np.zeros(len(rows), bool)
        for table in self.tables.values():
            have = table.have[rows]
            found |= (have > 0) & (have < table.world[rows])
        return found

    def remove(self, row: int) -> int:
        """Forget a page that has no children and no slots; returns its parent."""
        parent = self.unlink(row)
        self.index.remove_row(row)
        return parent

    def unlink(self, row: int) -> int:
        """The part of :meth:`remove` that is done row by row; the index still knows the page. Returns its parent."""
        assert self.child[row] < 0, "a page with children was removed"
        parent = int(self.parent[row])
        assert parent != _UNUSED, "a page was removed twice"
        if parent >= 0:
            self._leave(row, parent)
        self.parent[row] = _UNUSED
        self.guards.pop(row, None)  # removed on demand: whoever guarded it finds the page gone
        self.objects[row] = 0
        self._free.append(row)
        return parent

    def remove_all(self, rows: Rows) -> list[int]:
        """Forget these distinct rows, which are all that is below any of them; their slots are still to be taken, by
        :meth:`strip`. Returns the rows that stay and lost a child."""
        self.index.remove(rows)
        parents = self.parent[rows]
        assert (parents != _UNUSED).all(), "a page was removed twice"
        self.parent[rows] = _UNUSED
        stays = (parents >= 0) & (self.parent[parents] != _UNUSED)
        exposed: dict[int, None] = {}
        # Below these tops no list of children stays, and nothing need be taken out of one.
        for row, parent in zip(rows[stays].tolist(), parents[stays].tolist(), strict=True):
            self._leave(row, parent)
            exposed[parent] = None
        for listed in (self.child[rows], self._next[rows[~stays & (parents >= 0)]]):
            assert (self.parent[listed[listed >= 0]] == _UNUSED).all(), "a page with children was removed"
        self.child[rows] = _NONE
        self.objects[rows] = 0
        if self.guards:
            guarded = np.fromiter(self.guards, np.int64, len(self.guards))
            for row in guarded[self.parent[guarded] == _UNUSED].tolist():
                del self.guards[row]  # as in unlink
        self._free += rows.tolist()
        return list(exposed)

    def _leave(self, row: int, parent: int) -> None:
        """Take a row out of its parent's list of children."""
        following, before = int(self._next[row]), int(self._previous[row])
        if before >= 0:
            self._next[before] = following
        else:
            self.child[parent] = following
        if following >= 0:
            self._previous[following] = before

    def prune(self, rows: Iterable[int]) -> list[int]:
        """Remove those of the rows that are empty, and what becomes empty above them.

        Returns rows that lost a child or that stay: each may have become a leaf that can be evicted."""
        exposed = []
        for row in rows:
            while row >= 0 and self.in_use(row) and self.is_empty(row):
                row = self.remove(row)
            if row >= 0 and self.in_use(row):
                exposed.append(row)
        return exposed

    def _grow(self, size: int) -> None:
        capacity = len(self.parent)
        while capacity < size:
            # Doubling, but for large trees in smaller steps: the copy is what a request waits for.
            capacity = capacity * 2 if capacity < 1 << 20 else capacity + (capacity >> 1)
        for name in self._COLUMNS:
            setattr(self, name, grown(getattr(self, name), capacity))
        self.index.grow(capacity)
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

    def used(self, rows: Rows, now_ns: int) -> None:
        """Somebody read these rows' pages, or wanted to store what they have."""
        again = rows[self.last_use[rows] <= now_ns - APART_NS]
        if len(again):
            uses = self.uses[again]
            self.uses[again] = uses + (uses < _USES_MAX)
        self.last_use[rows] = now_ns

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

    def slots_of(self, rows: Rows) -> npt.NDArray[np.uint32]:
        """All slots of these rows, committed and reserved."""
        taken = [np.empty(0, np.uint32)]
        for table in self.tables.values():
            for column in table.slots.values():
                slots = column[rows]
                taken.append(slots[slots > 0] - _ONE)
        return np.concatenate(taken)

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
        rows = self.used_rows()
        return self.strip(rows[np.argsort(-depths(self.parent[: self.size])[rows], kind="stable")])

    # ------------------------------------------------------------ rebuilding

    def adopt(self, index: PageIndex, parents: Rows, last_use: npt.NDArray[np.int64]) -> None:
        """Fill an empty tree with the pages of an index whose rows are ``[0, n)``: row ``i`` under ``parents[i]``; no
        cycles. Columns only: the objects come by :meth:`adopt_objects`."""
        assert not self.size
        count = len(index)
        self.size = count
        self.index = index
        if count > len(self.parent):
            self._grow(count)
        else:
            index.grow(len(self.parent))
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
        used = self.used_rows().tolist()
        assert len(self.index) == len(used), "pages in the index"
        assert (self.find(self.index.hashes[used].tobytes(), _NONE) == used).all(), "hash -> row"
        assert np.flatnonzero(self.index.hashes.any(axis=1)).tolist() == used, "a hash of a row that is not in use"
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
        assert all(self.in_use(row) and count > 0 for row, count in self.guards.items()), "guards"
        assert listed == {row for row in used if self.parent[row] >= 0}, "a row that its parent does not list"
        tops = [row for row in used if self.parent[row] < 0]
        assert len(self.below(tops)) == len(used), "a cycle of parents"
        slots: dict[int, tuple[int, int, int]] = {}
        held_by_row = dict.fromkeys(used, 0)
        for component, table in self.tables.items():
            held = np.zeros(len(self.parent), np.int64)
            for shard, column in table.slots.items():
                for row in np.flatnonzero(column).tolist():
                    slot = int(column[row]) - 1
                    assert slot not in slots, "one slot in two places"
                    assert self.in_use(row), "a slot on a row that is not in use"
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
    return tree.find(b"".join(keys), absent)
