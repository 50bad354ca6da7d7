"""What a server knows after a restart: trees, reservations and free slots, read back from the pool's directory.

Only records that may be believed count; whatever contradicts another record is freed, since a miss is better than a
doubt. Slots that were reserved stay away from everybody: their writers may live on. All steps are vectorised; a
million records take a few seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from maru_core.pool.format import COMMITTED, FREE, RESERVED, SLOT_GRAIN
from maru_core.protocol import HASH_BYTES
from maru_server.directory import U64, PoolDirectory, Slots
from maru_server.tree import ROOT_ROW, UNKNOWN_ROW, PrefixTree, Rows, depths

#: Records looked at in one step: few enough that the temporary arrays stay small.
_CHUNK: Final = 1 << 16


@dataclass(slots=True)
class Rebuilt:
    """The findings."""

    trees: dict[int, PrefixTree]  # one per namespace
    reserved: npt.NDArray[np.uint32]  # slots that somebody may be writing into
    occupied: npt.NDArray[np.uint32]  # reserved and committed slots
    discarded: int  # records that were not believed, and were freed


def rebuild(directory: PoolDirectory, now_ns: int) -> Rebuilt:
    """Read the directory, and free in it what is not believed."""
    slots = _cut_slots(directory)
    states = directory.states[slots]
    reserved = slots[states == RESERVED]
    committed = slots[states == COMMITTED]
    discarded = [slots[(states != FREE) & (states != RESERVED) & (states != COMMITTED)]]
    trees = {number: PrefixTree(number) for number in directory.namespaces().values()}
    believed = _believed(directory, committed, set(trees))
    discarded.append(committed[~believed])
    committed = committed[believed]
    namespaces = directory.records["namespace"][committed]
    for number in np.flatnonzero(np.bincount(namespaces)).tolist():
        tree, doubtful = _tree(directory, number, committed[namespaces == number], now_ns)
        trees[number] = tree
        discarded.append(doubtful)
    gone = np.concatenate(discarded)
    if len(gone):
        directory.free(gone)
    directory.drop_damaged_names()
    occupied = np.concatenate([reserved, committed[directory.states[committed] == COMMITTED]])
    return Rebuilt(trees, reserved, occupied, len(gone))


def _cut_slots(directory: PoolDirectory) -> npt.NDArray[np.uint32]:
    """Slots of all extents that are cut, ascending. The records of others are not even looked at: reading them would
    fill the holes of a sparse pool."""
    geometry = directory.geometry
    cut = np.flatnonzero(directory.extents)
    parts = [np.empty(0, np.uint32)]
    for extent, slot_bytes in zip(cut.tolist(), directory.extents[cut].tolist(), strict=True):
        if slot_bytes % SLOT_GRAIN or not geometry.min_slot_bytes <= slot_bytes <= geometry.extent_bytes:
            # Not a size that was ever given: nothing in there can be located.
            first, last = extent * geometry.slots_per_extent, (extent + 1) * geometry.slots_per_extent
            damaged = np.arange(first, last, dtype=np.uint32)
            directory.free(damaged[directory.states[damaged] != FREE])
            directory.set_extent(extent, 0)
            continue
        base = extent * geometry.slots_per_extent
        parts.append(np.arange(base, base + geometry.extent_bytes // slot_bytes, dtype=np.uint32))
    return np.concatenate(parts)


def _believed(directory: PoolDirectory, slots: Slots, namespaces: set[int]) -> npt.NDArray[np.bool_]:
    """Which COMMITTED records are whole and possible."""
    geometry = directory.geometry
    known_namespace = np.zeros(geometry.namespace_capacity, bool)
    known_namespace[list(namespaces)] = True
    known_component = np.zeros(geometry.component_capacity, bool)
    known_component[list(directory.components().values())] = True
    believed = np.zeros(len(slots), bool)
    for start in range(0, len(slots), _CHUNK):
        some = slots[start : start + _CHUNK]
        records = directory.records[some]
        good = directory.believed(some)
        good &= (records["namespace"] < geometry.namespace_capacity) & (
            known_namespace[np.minimum(records["namespace"], geometry.namespace_capacity - 1)]
        )
        good &= (records["component"] < geometry.component_capacity) & (
            known_component[np.minimum(records["component"], geometry.component_capacity - 1)]
        )
        good &= records["shard"] < records["world"]
        good &= (records["length"] > 0) & (records["length"] <= directory.extents[some // geometry.slots_per_extent])
        hashes, parents = _hashes(records, "page_hash"), _hashes(records, "parent_hash")
        good &= hashes.any(axis=1) & (hashes != parents).any(axis=1)
        believed[start : start + _CHUNK] = good
    return believed


def _hashes(records: npt.NDArray[Any], field: str) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(records[field]).view("<u8").reshape(len(records), HASH_BYTES // 8)


def _tree(
    directory: PoolDirectory, number: int, slots: Slots, now_ns: int
) -> tuple[PrefixTree, npt.NDArray[np.uint32]]:
    """The tree of one namespace, and the slots whose records contradict others."""
    records = directory.records[slots]
    keys = records["page_hash"].tolist()
    ids: dict[bytes, int] = dict(zip(keys, range(len(keys)), strict=True))
    if len(ids) == len(keys):
        rows = np.arange(len(keys))
    else:
        ids = {}
        add = ids.setdefault
        rows = np.array([add(key, len(ids)) for key in keys], np.int64)
    del keys
    pages = len(ids)
    above = _parents(records, rows, ids)
    # The first record of a page says what its parent is; a record that says otherwise is not believed.
    first = np.empty(pages, np.int64)
    first[rows[::-1]] = np.arange(len(rows))[::-1]
    parents = np.full(len(ids), UNKNOWN_ROW, np.int64)
    parents[:pages] = above[first]
    good = above == parents[rows]
    astray = depths(parents) < 0
    good &= ~astray[rows]
    parents[astray] = UNKNOWN_ROW

    last_use = np.zeros(len(ids), np.int64)
    used = np.minimum(records["last_use_ns"], np.uint64(now_ns)).astype(np.int64)
    tree = PrefixTree(number)
    tree.adopt(ids, parents, last_use)
    places = records["component"].astype(np.int64) << 16 | records["shard"]
    worlds, lengths = records["world"], records["length"]
    for place in sorted(set(places.tolist())):
        component, shard = place >> 16, place & 0xFFFF
        mine = np.flatnonzero((places == place) & good)
        good[mine] = False
        mine = _latest(rows, mine, records["generation"])
        table = tree.table(component)
        fits = (table.held[rows[mine]] == 0) | (
            (table.world[rows[mine]] == worlds[mine]) & (table.length[rows[mine]] == lengths[mine])
        )
        mine = mine[fits]
        good[mine] = True
        tree.adopt_objects(component, shard, rows[mine], slots[mine], worlds[mine], lengths[mine])
        tree.last_use[rows[mine]] = np.maximum(tree.last_use[rows[mine]], used[mine])
    tree.prune(np.flatnonzero(tree.objects[: tree.size] == 0).tolist())
    return tree, slots[~good]


def _latest(rows: Rows, mine: Rows, generations: U64) -> Rows:
    """Of two records of one object, the later one; ``mine`` are records of one component and shard."""
    chosen = np.empty(int(rows[mine].max(initial=0)) + 1, np.int64)
    chosen[rows[mine]] = mine  # where several are assigned to one row, one of them stays
    if (chosen[rows[mine]] == mine).all():
        return mine
    mine = mine[np.argsort(generations[mine], kind="stable")[::-1]]
    return np.sort(mine[np.unique(rows[mine], return_index=True)[1]])


def _parents(records: npt.NDArray[Any], rows: Rows, ids: dict[bytes, int]) -> Rows:
    """The parent's row of each record; parents that have no record become new rows in ``ids``."""
    hashes, parents = _hashes(records, "page_hash"), _hashes(records, "parent_hash")
    above = np.empty(len(records), np.int64)
    # Chains mostly lie in one piece: the parent is the record before.
    beside = np.zeros(len(records), bool)
    beside[1:] = (parents[1:] == hashes[:-1]).all(axis=1)
    above[1:][beside[1:]] = rows[:-1][beside[1:]]
    others = np.flatnonzero(~beside)
    keys = records["parent_hash"][others].tolist()
    found = np.fromiter(map(ids.get, keys, repeat(UNKNOWN_ROW)), np.int64, len(keys))
    found[~parents[others].any(axis=1)] = ROOT_ROW
    for index in np.flatnonzero(found == UNKNOWN_ROW).tolist():
        found[index] = ids.setdefault(keys[index], len(ids))
    above[others] = found
    return above
