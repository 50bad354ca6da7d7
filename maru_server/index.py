"""Page hash to row: the one part of the server that is as large as the number of pages and asked at random.

:func:`page_index` gives the compiled table where it was built (some 50 bytes a page, a batch in one call), else one
over a dict (some 180). Both answer alike; a row's hash is in a column, so nothing keeps an object per page.
"""

from __future__ import annotations

import os
from itertools import repeat
from typing import Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from maru_core.protocol import HASH_BYTES

try:
    from maru_server import _index
except ImportError:  # built without a compiler
    _index = None  # type: ignore[assignment]

Rows: TypeAlias = npt.NDArray[np.int64]

_WORDS: Final = HASH_BYTES // 8
_FIRST_ENTRIES: Final = 128
#: Keys the table, so that nobody can choose page hashes that collide. Where an entry lies changes no answer.
_KEY: Final = os.urandom(32)


class PageIndex(Protocol):
    """Which row a page hash has, and which hash a row has. The hash of zeros stands for "row not in use"."""

    hashes: npt.NDArray[np.uint64]  # shape (rows, 4)

    def __len__(self) -> int: ...

    def find(self, hashes: bytes, absent: int) -> Rows:
        """The row of each packed hash, ``absent`` where unknown."""

    def add(self, hashes: bytes, rows: Rows) -> None:
        """Distinct hashes that are not known yet, for rows that have none."""

    def intern(self, hashes: bytes) -> Rows:
        """The row of each packed hash; unknown ones take the rows after the last, as they come. Only while no row was
        ever removed, and none was added otherwise."""

    def remove(self, rows: Rows) -> None:
        """Distinct rows that have a hash."""

    def remove_row(self, row: int) -> None:
        """The same for one row."""

    def grow(self, rows: int) -> None:
        """Room for ``rows`` rows, if there is less."""


class _Column:
    """The part that is the same in both: the column of hashes."""

    def __init__(self, rows: int) -> None:
        self.hashes = np.zeros((rows, _WORDS), np.uint64)

    def grow(self, rows: int) -> None:
        if rows <= len(self.hashes):
            return
        larger = np.zeros((rows, _WORDS), np.uint64)
        larger[: len(self.hashes)] = self.hashes
        self.hashes = larger


class TableIndex(_Column):
    """The compiled one: see ``_index.h``."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.table = np.zeros(_FIRST_ENTRIES, np.uint64)
        self.key = _KEY
        self._count = 0
        self._one = np.zeros(1, np.int64)

    def __len__(self) -> int:
        return self._count

    def find(self, hashes: bytes, absent: int) -> Rows:
        rows = np.empty(len(hashes) // HASH_BYTES, np.int64)
        _index.find(self.table, self.hashes, self.key, hashes, rows, absent)
        return rows

    def add(self, hashes: bytes, rows: Rows) -> None:
        self.make_room(len(rows))
        self.hashes[rows] = np.frombuffer(hashes, "<u8").reshape(-1, _WORDS)
        _index.insert(self.table, self.hashes, self.key, np.ascontiguousarray(rows, np.int64))
        self._count += len(rows)

    def added(self, count: int) -> None:
        """So many rows were added to table and column by ``_store.c``, for which :meth:`make_room` had made room."""
        self._count += count

    def intern(self, hashes: bytes) -> Rows:
        count = len(hashes) // HASH_BYTES
        self.make_room(count)
        self.grow(self._count + count)
        rows = np.empty(count, np.int64)
        self._count = _index.intern(self.table, self.hashes, self.key, hashes, rows, self._count)
        return rows

    def remove_row(self, row: int) -> None:
        self._one[0] = row
        _index.erase(self.table, self.hashes, self.key, self._one)
        self.hashes[row] = 0
        self._count -= 1

    def remove(self, rows: Rows) -> None:
        _index.erase(self.table, self.hashes, self.key, np.ascontiguousarray(rows, np.int64))
        self.hashes[rows] = 0
        self._count -= len(rows)

    def make_room(self, more: int) -> None:
        """Have entries for so many rows more. At most three quarters of the entries are in use: runs of them stay short."""
        entries = len(self.table)
        while (self._count + more) * 4 > entries * 3:
            entries *= 2
        if entries > len(self.table):
            larger = np.zeros(entries, np.uint64)
            _index.move(self.table, larger)
            self.table = larger


class DictIndex(_Column):
    """The one that needs no compiler."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self._rows: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, hashes: bytes, absent: int) -> Rows:
        keys = _split(hashes)
        return np.fromiter(map(self._rows.get, keys, repeat(absent)), np.int64, len(keys))

    def add(self, hashes: bytes, rows: Rows) -> None:
        self.hashes[rows] = np.frombuffer(hashes, "<u8").reshape(-1, _WORDS)
        self._rows.update(zip(_split(hashes), rows.tolist(), strict=True))

    def intern(self, hashes: bytes) -> Rows:
        keys = _split(hashes)
        self.grow(len(self._rows) + len(keys))
        rows = np.empty(len(keys), np.int64)
        for at, key in enumerate(keys):
            rows[at] = self._rows.setdefault(key, len(self._rows))
        self.hashes[rows] = np.frombuffer(hashes, "<u8").reshape(-1, _WORDS)
        return rows

    def remove_row(self, row: int) -> None:
        del self._rows[self.hashes[row].tobytes()]
        self.hashes[row] = 0

    def remove(self, rows: Rows) -> None:
        for key in _split(self.hashes[rows].tobytes()):
            del self._rows[key]
        self.hashes[rows] = 0


def page_index(rows: int) -> PageIndex:
    """The best index that was built, with room for ``rows`` rows."""
    return TableIndex(rows) if _index is not None else DictIndex(rows)


def _split(hashes: bytes) -> list[bytes]:
    keys: list[bytes] = np.frombuffer(hashes, f"V{HASH_BYTES}").tolist()
    return keys
