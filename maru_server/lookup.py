"""Where pages are: the answer to a match. Reads trees and the pool's directory, changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from maru_core.protocol import HASH_BYTES, NO_SLOT
from maru_server.directory import CHECKSUM_WORD, U64, PoolDirectory
from maru_server.tree import ComponentTable, PrefixTree, Rows, chain_rows

try:
    from maru_server import _native
except ImportError:  # built without a compiler: numpy does the same, more slowly
    _native = None  # type: ignore[assignment]

#: Stands for "not known" among rows; differs from every row.
_ABSENT: Final = -3
_EMPTY: Final = b""
_ONE: Final = np.uint32(1)


class Location(NamedTuple):
    """Arrays over pages, component after component; packed as :class:`maru_core.protocol.Located` has them."""

    pages: int
    slots: bytes
    offsets: bytes
    generations: bytes
    lengths: bytes
    checksums: bytes


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
        self, tree: PrefixTree, components: Sequence[int | None], shard: int, hashes: bytes, sparse: bool = False
    ) -> Location:
        """Where ``shard`` of the pages lies that are whole in all components: of the longest prefix of the packed
        ``hashes``, or with ``sparse`` of each page for itself, one element per hash, NO_SLOT where it is not whole."""
        table = None
        if self._native and len(components) == 1 and components[0] is not None:
            table = tree.tables.get(components[0])
        if table is not None and shard in table.slots and 0 in table.slots:
            directory = self.directory
            return Location(
                *_native.locate(
                    tree.rows,
                    hashes,
                    sparse,
                    CHECKSUM_WORD,
                    directory.words.shape[1],
                    table.slots[shard],
                    table.slots[0],
                    table.have,
                    table.world,
                    table.length,
                    directory.slot_offsets,
                    directory.generations,
                    directory.words,
                )
            )
        return (self._each if sparse else self._prefix)(tree, components, shard, split(hashes))

    def _prefix(self, tree: PrefixTree, components: Sequence[int | None], shard: int, keys: list[bytes]) -> Location:
        rows = chain_rows(tree, keys, _ABSENT)
        if len(rows) and rows.min() < 0:
            rows = rows[: int((rows < 0).argmax())]
        pages = len(rows)
        columns: list[tuple[ComponentTable, npt.NDArray[np.uint32]]] = []
        for component in components:
            table = None if component is None else tree.tables.get(component)
            if table is None:
                return Location(0, _EMPTY, _EMPTY, _EMPTY, _EMPTY, _EMPTY)
            held, whole = self._of_shard(table, shard, rows)
            if not whole.all():
                pages = int(whole.argmin())
                rows = rows[:pages]
            columns.append((table, held))
        if len(columns) == 1:
            table, held = columns[0]
            return self._locate(pages, held[:pages] - _ONE, table.length[rows])
        slots = np.concatenate([held[:pages] for _, held in columns]) - _ONE
        return self._locate(pages, slots, np.concatenate([table.length[rows] for table, _ in columns]))

    def _each(self, tree: PrefixTree, components: Sequence[int | None], shard: int, keys: list[bytes]) -> Location:
        count = len(keys)
        rows = chain_rows(tree, keys, _ABSENT)
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
        total = count * len(tables)

        def spread(packed: bytes, dtype: str, absent: int) -> bytes:
            column = np.full(total, absent, dtype)
            column[everywhere] = np.frombuffer(packed, dtype)
            return column.tobytes()

        return Location(
            located.pages,
            spread(located.slots, "<u4", NO_SLOT),
            *(spread(packed, "<u8", 0) for packed in located[2:]),
        )

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
