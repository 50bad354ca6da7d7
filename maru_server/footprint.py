"""How much memory the server's own tables take, worked out from their sizes; and giving back what a rebuild left over.

Cheap enough for every look at the figures: a handful of additions for each namespace, nothing for each page. Columns are
longer than what they hold, and the rest of them was never touched: only what is in use counts.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

from maru_core.protocol import HASH_BYTES
from maru_server.index import TableIndex
from maru_server.tree import PrefixTree

#: What the dict of an index without a compiled table takes for each page: its entry, the key and the number.
_DICT_ENTRY: Final = 190
#: A number of more than 64 bits, and its place in a list.
_QUEUE_ENTRY: Final = 56
#: A slot of a reservation: slot, generation and row, and slot and generation once more as the client was told.
RESERVED_SLOT: Final = 4 + 8 + 8 + 4 + 8
#: A reservation or a session, whatever it has: objects, arrays' heads, places in dictionaries.
OBJECT: Final = 1024


def tree_bytes(tree: PrefixTree) -> int:
    """Memory of one namespace's tree, bytes."""
    size = tree.size
    columns: list[Any] = [getattr(tree, name) for name in tree._COLUMNS]
    for table in tree.tables.values():
        columns += [table.world, table.length, table.held, table.have, *table.slots.values()]
    total: int = size * (HASH_BYTES + sum(column.itemsize for column in columns)) + 8 * len(tree._free)
    index = tree.index
    return total + (index.table.nbytes if isinstance(index, TableIndex) else _DICT_ENTRY * len(index))


def queue_bytes(entries: int) -> int:
    """Memory of the eviction queues."""
    return _QUEUE_ENTRY * entries


def touched_bytes(notes: int, rows: int) -> int:
    """Memory of uses that are yet to be written down."""
    return 200 * notes + 8 * rows


def give_back() -> None:
    """Return freed memory to the system where the C library keeps it: a rebuild works on large arrays and drops them."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
