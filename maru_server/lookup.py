"""Where pages are: the answer to a match. Reads trees and the pool's directory, changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from maru_core.protocol import HASH_BYTES, NO_SLOT, MissReason, Want
from maru_server.columns import ComponentTable
from maru_server.directory import CHECKSUM_WORD, U64, PoolDirectory
from maru_server.ghosts import REASON_MASK, Ghosts
from maru_server.index import TableIndex
from maru_server.rules import reach
from maru_server.tree import PrefixTree, Rows

try:
    from maru_server import _native
except ImportError:  # built without a compiler: numpy does the same, more slowly
    _native = None  # type: ignore[assignment]

#: Stands for "not known" among rows; differs from every row.
_ABSENT: Final = -3
_ONE: Final = np.uint32(1)
#: Most other namespaces that are asked for a page that is missing.
_NAMESPACES_ASKED: Final = 16
_EVERY_PAGE: Final = Want()
#: Slots of the shard and of replicas, have, world, length: see :class:`maru_server.tree.ComponentTable`.
_Columns: TypeAlias = tuple[
    npt.NDArray[np.uint32] | None,
    npt.NDArray[np.uint32],
    npt.NDArray[np.uint16],
    npt.NDArray[np.uint16],
    U64,
]
#: Modes of the compiled pass.
_PREFIX, _PAGES, _OBJECTS = range(3)


class Location(NamedTuple):
    """Arrays over pages, component after component; packed as :class:`maru_core.protocol.Located` has them."""

    pages: int
    slots: bytes
    offsets: bytes
    generations: bytes
    lengths: bytes
    checksums: bytes
    ends: bytes = b""
    covered: tuple[int, ...] = ()


def split(hashes: bytes) -> list[bytes]:
    """Packed hashes, one by one."""
    keys: list[bytes] = np.frombuffer(hashes, f"V{HASH_BYTES}").tolist()
    return keys


class Lookup:
    """Finds pages of a pool's trees.

    Args:
        native: False for numpy even where the compiled pass is there.
    """

    def __init__(self, directory: PoolDirectory, *, native: bool = True) -> None:
        self.directory = directory
        self._native = native and _native is not None

    def match(
        self,
        tree: PrefixTree,
        components: Sequence[int | None],
        shard: int,
        hashes: bytes,
        sparse: bool = False,
        rules: Sequence[Want] = (),
    ) -> Location:
        """Where ``shard`` of the pages lies that are whole in all components: of the longest prefix of the packed
        ``hashes``, or with ``sparse`` of each page for itself, one element per hash, NO_SLOT where it is not whole.

        With ``rules``, one per component, of the longest prefix that meets them all; a prefix ends in any case where a
        page is not known at all."""
        index = tree.index
        if self._native and isinstance(index, TableIndex):
            return self._compiled(_PAGES if sparse else _PREFIX, tree, index, components, shard, hashes, rules)
        if sparse:
            return self._each(tree, components, shard, hashes)
        return self._prefix(tree, components, shard, hashes, rules)

    def _compiled(
        self,
        mode: int,
        tree: PrefixTree,
        index: TableIndex,
        components: Sequence[int | None],
        shard: int,
        hashes: bytes,
        rules: Sequence[Want],
    ) -> Location:
        """See ``_native.c``."""
        directory = self.directory
        columns: list[_Columns | None] = []
        for component in components:
            table = None if component is None else tree.tables.get(component)
            if table is None or (replicas := table.slots.get(0)) is None:  # a whole page has shard 0
                columns.append(None)
            else:
                columns.append((table.slots.get(shard), replicas, table.have, table.world, table.length))
        return Location(
            *_native.match(
                index.table,
                index.hashes,
                index.key,
                hashes,
                mode,
                CHECKSUM_WORD,
                directory.words.shape[1],
                directory.slot_offsets,
                directory.generations,
                directory.words,
                tuple(columns),
                tuple([(want.rule, want.pages, want.group) for want in rules]),
            )
        )

    def exactly(self, tree: PrefixTree, components: Sequence[int | None], shard: int, hashes: bytes) -> Location:
        """Where ``shard`` of all these pages lies, whatever became of them: NO_SLOT where a component has nothing."""
        index = tree.index
        if self._native and isinstance(index, TableIndex):
            return self._compiled(_OBJECTS, tree, index, components, shard, hashes, ())
        rows = tree.find(hashes, _ABSENT)
        known = np.flatnonzero(rows >= 0)
        located = []
        for table, held, whole in self._columns(tree, components, shard, rows[known]):
            everywhere, everyone = np.zeros(len(rows), np.uint32), np.zeros(len(rows), bool)
            everywhere[known], everyone[known] = held, whole
            located.append((table, everywhere, everyone))
        return self._gather(len(rows), np.maximum(rows, 0), located)

    def _prefix(
        self,
        tree: PrefixTree,
        components: Sequence[int | None],
        shard: int,
        hashes: bytes,
        rules: Sequence[Want],
    ) -> Location:
        rows = tree.find(hashes, _ABSENT)
        if len(rows) and rows.min() < 0:
            rows = rows[: int((rows < 0).argmax())]
        columns = self._columns(tree, components, shard, rows)
        reached = reach([whole for _, _, whole in columns], rules or [_EVERY_PAGE] * len(columns))
        location = self._gather(reached.pages, rows, columns)
        ends = reached.ends.astype("<u4", copy=False).tobytes() if any(want.rule for want in rules) else b""
        return location._replace(ends=ends, covered=tuple(reached.covered))

    def _columns(
        self, tree: PrefixTree, components: Sequence[int | None], shard: int, rows: Rows
    ) -> list[tuple[ComponentTable | None, npt.NDArray[np.uint32], npt.NDArray[np.bool_]]]:
        """For each component: its table, and of the rows what :meth:`_of_shard` says."""
        columns: list[tuple[ComponentTable | None, npt.NDArray[np.uint32], npt.NDArray[np.bool_]]] = []
        for component in components:
            table = None if component is None else tree.tables.get(component)
            if table is None:
                columns.append((None, np.zeros(len(rows), np.uint32), np.zeros(len(rows), bool)))
            else:
                columns.append((table, *self._of_shard(table, shard, rows)))
        return columns

    def _gather(
        self,
        pages: int,
        rows: Rows,
        columns: Sequence[tuple[ComponentTable | None, npt.NDArray[np.uint32], npt.NDArray[np.bool_]]],
    ) -> Location:
        """The first ``pages`` of the rows, NO_SLOT where a component is not whole."""
        rows = rows[:pages]
        lengths = [np.zeros(pages, np.uint64) if table is None else table.length[rows] for table, _, _ in columns]
        there = np.concatenate([whole[:pages] for _, _, whole in columns])
        slots = np.concatenate([held[:pages] for _, held, _ in columns]) - _ONE
        if there.all():
            return self._locate(pages, slots, np.concatenate(lengths))
        index = np.flatnonzero(there)
        located = self._locate(pages, slots[index], np.concatenate(lengths)[index])
        return _spread(located, index, len(there))

    def _each(self, tree: PrefixTree, components: Sequence[int | None], shard: int, hashes: bytes) -> Location:
        count = len(hashes) // HASH_BYTES
        rows = tree.find(hashes, _ABSENT)
        index = np.flatnonzero(rows >= 0)
        rows = rows[index]
        tables = [None if component is None else tree.tables.get(component) for component in components]
        held_by: list[npt.NDArray[np.uint32]] = []
        for table in tables:
            if table is None:
                index, rows, held_by = index[:0], rows[:0], [held[:0] for held in held_by]
                held_by.append(np.empty(0, np.uint32))
                continue
            held, whole = self._of_shard(table, shard, rows)
            index, rows, held_by = index[whole], rows[whole], [earlier[whole] for earlier in held_by]
            held_by.append(held[whole])
        located = self._locate(
            len(index),
            np.concatenate(held_by) - _ONE,
            np.concatenate([np.empty(0, np.uint64) if table is None else table.length[rows] for table in tables]),
        )
        everywhere = np.concatenate([index + count * number for number in range(len(tables))])
        return _spread(located, everywhere, count * len(tables))

    @staticmethod
    def _of_shard(
        table: ComponentTable, shard: int, rows: Rows
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
        """(slot + 1 of the rows' objects that a reader of ``shard`` wants, which rows are whole and have one).

        Where ranks hold replicas (world 1) all of them want the one object that there is."""
        column = table.slots.get(shard)
        whole = table.whole(rows)
        held = column[rows] if column is not None else np.zeros(len(rows), np.uint32)
        if shard:  # shard 0 of a whole page is always there
            single = (table.world[rows] == 1) & whole
            if single.any():
                held[single] = table.slots[0][rows[single]]
            whole &= held > 0
        return held, whole

    def _locate(self, pages: int, slots: npt.NDArray[np.uint32], lengths: U64) -> Location:
        directory = self.directory
        return Location(
            pages,
            slots.tobytes(),
            directory.offsets(slots).tobytes(),
            directory.generations.take(slots).tobytes(),
            lengths.tobytes(),
            directory.checksums[slots].tobytes(),
        )


def _spread(located: Location, index: npt.NDArray[np.intp], total: int) -> Location:
    """The same with ``total`` elements: those of ``located`` stand at ``index``, the others are not present."""

    def spread(packed: bytes, dtype: str, absent: int) -> bytes:
        column = np.full(total, absent, dtype)
        column[index] = np.frombuffer(packed, dtype)
        return column.tobytes()

    return Location(
        located.pages,
        spread(located.slots, "<u4", NO_SLOT),
        spread(located.offsets, "<u8", 0),
        spread(located.generations, "<u8", 0),
        spread(located.lengths, "<u8", 0),
        spread(located.checksums, "<u8", 0),
    )


def first_absent(located: Location, asked: int) -> int:
    """The first of ``asked`` pages that a sparse answer has not, and there is one."""
    return int((np.frombuffer(located.slots, "<u4") == NO_SLOT).argmax()) % asked


def reason(tree: PrefixTree, page: bytes, ghosts: Ghosts, others: Iterable[PrefixTree]) -> MissReason:
    """Why this page, the first that is not in an answer, is not in it.

    Args:
        others: the tenant's trees; the first few are looked into.
    """
    row = tree.row(page)
    if row is not None and (tree.objects[row] or tree.pending[row]):
        return MissReason.INCOMPLETE
    note = ghosts.note(tree.number, page)
    if note:
        return MissReason(note & REASON_MASK)
    for other in islice(others, _NAMESPACES_ASKED):
        row = other.row(page)
        if row is not None and other is not tree and other.objects[row]:
            return MissReason.OTHER_NAMESPACE
    return MissReason.NOT_STORED
