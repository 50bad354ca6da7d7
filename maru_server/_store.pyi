from typing import Any

import numpy as np
import numpy.typing as npt

_U64 = npt.NDArray[np.uint64]
_Slots = npt.NDArray[np.uint32]
_Rows = npt.NDArray[np.int64]
_Column = npt.NDArray[Any]

def remembered(prints: _U64, notes: npt.NDArray[np.uint8], salt: int, hashes: bytes) -> int: ...
def probe(table: _U64, keys: _U64, key: bytes, parent: bytes, hashes: bytes) -> tuple[int, int]: ...
def claim(generations: _U64, records: _U64, offsets: _U64, slots: _Slots, floor: int) -> tuple[bytes, bytes]: ...
def book(
    mode: int,
    tree: tuple[_U64, _U64, bytes, _Column, _Column, _Column, _Column, _Column, _Column, _Column],
    component: tuple[_Column, _Column, _Column, _Column],
    records: _U64,
    offsets: _U64,
    rows: _Rows,
    slots: _Slots,
    generations: bytes,
    chain: bytes,
    above: int,
    now_ns: int,
    namespace: int,
    component_number: int,
    shard: int,
    world: int,
    nbytes: int,
    owner: int,
    share: int,
    /,
) -> None: ...
def describe(
    records: _U64,
    offsets: _U64,
    generations: _U64,
    holders: npt.NDArray[np.uint32],
    tree: tuple[_Column, _Column, _Column, _Column, _Rows],
    slots: _Slots,
    holder: int,
    granted: bytes,
    chain: bytes,
    above: int,
    now_ns: int,
    namespace: int,
    component: int,
    shard: int,
    world: int,
    nbytes: int,
    owner: int,
    share: int,
    /,
) -> bool: ...
def commit(records: _U64, changes: _U64, slots: _Slots) -> None: ...
def publish(
    child: _Column, objects: _Column, pending: _Column, last_use: _Column, have: _Column, rows: _Rows, now_ns: int
) -> list[int]: ...
