"""What a server knows after a restart: trees, reservations and free slots, read back from the pool's directory.

Only records that may be believed count; whatever contradicts another record is freed, since a miss is better than a
doubt. Slots that were reserved stay away from everybody: their writers may live on. All steps are vectorised, and work
on pieces that stay in the cache: a million records take about a second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from maru_core.pool.format import COMMITTED, FREE, PINNED, RECORD, RESERVED, SLOT_GRAIN
from maru_core.protocol import HASH_BYTES
from maru_server.directory import CHECKSUM_WORD, HASH_WORD, PARENT_WORD, U64, PoolDirectory, Slots
from maru_server.index import PageIndex, page_index
from maru_server.tree import ROOT_ROW, UNKNOWN_ROW, PrefixTree, Rows, depths

#: Records looked at in one step: few enough that they, and the temporary arrays, stay in a core's own cache.
_CHUNK: Final = 1 << 12
#: Slots outside the cut extents up to which their records are looked at, too: a few milliseconds.
_STRAYS_SEARCHED: Final = 1 << 17


@dataclass(slots=True)
class Rebuilt:
    """The findings."""

    trees: dict[int, PrefixTree]  # one per namespace
    reserved: npt.NDArray[np.uint32]  # slots that somebody may be writing into
    occupied: npt.NDArray[np.uint32]  # reserved and committed slots
    discarded: int  # records that were not believed, and were freed
    pinned: dict[int, Rows]  # rows of pages that an operator has pinned, by namespace


def rebuild(directory: PoolDirectory, now_ns: int, before_writing: Callable[[], None] = lambda: None) -> Rebuilt:
    """Read the directory, and free in it what is not believed.

    Args:
        before_writing: called before each change; what it raises ends the rebuild there.
    """
    directory.started(now_ns)
    before_writing()
    slots, strays = _cut_slots(directory)
    states = directory.states[slots]
    reserved = slots[states == RESERVED]
    committed = slots[states == COMMITTED]
    discarded = [strays, slots[(states != FREE) & (states != RESERVED) & (states != COMMITTED)]]
    before_writing()
    directory.mend_generations(slots[states != COMMITTED])
    tenants = {number: tenant for (tenant, _), number in directory.namespaces().items()}
    trees = {number: PrefixTree(number, tenant=tenant) for number, tenant in tenants.items()}
    pinned = {}
    believed, records = _read(directory, committed, set(trees))
    discarded.append(committed[~believed])
    strange = records.flags & ~np.uint16(PINNED) != 0
    for is_pinned in (True, False) if strange.any() else ():
        # The check leaves flags out: bits that mean nothing were never set by a server.
        directory.set_pinned(records.slots[strange & ((records.flags & PINNED > 0) == is_pinned)], is_pinned)
    for number in np.flatnonzero(np.bincount(records.namespaces)).tolist():
        tree, doubtful, rows = _tree(directory, number, tenants[number], records.of(number), now_ns)
        trees[number] = tree
        if len(rows):
            pinned[number] = rows
        discarded.append(doubtful)
    committed = records.slots
    del records
    gone = np.concatenate(discarded)
    before_writing()  # reading takes up to seconds
    if len(gone):
        directory.discard(gone)
    directory.drop_damaged_names()
    occupied = np.concatenate([reserved, committed[directory.states[committed] == COMMITTED]])
    return Rebuilt(trees, reserved, occupied, len(gone), pinned)


def _cut_slots(directory: PoolDirectory) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Slots of all extents that are cut, ascending; and slots in use that belong to no extent as it is cut, which only damage
    leaves behind. For those a large pool is not searched: they are found when their extent is cut (see
    :meth:`PoolDirectory.set_extent`)."""
    geometry = directory.geometry
    per_extent = geometry.slots_per_extent
    cut = np.flatnonzero(directory.extents)
    nothing = np.empty(0, np.uint32)
    parts = [nothing]
    for extent, slot_bytes in zip(cut.tolist(), directory.extents[cut].tolist(), strict=True):
        base = extent * per_extent
        if slot_bytes % SLOT_GRAIN or not geometry.min_slot_bytes <= slot_bytes <= geometry.extent_bytes:
            # Not a size that was ever given: nothing in there can be located.
            damaged = np.arange(base, base + per_extent, dtype=np.uint32)
            directory.discard(damaged[directory.states[damaged] != FREE])
            directory.set_extent(extent, 0)
            continue
        parts.append(np.arange(base, base + geometry.extent_bytes // slot_bytes, dtype=np.uint32))
    slots = np.concatenate(parts)
    if geometry.slot_count - len(slots) > _STRAYS_SEARCHED:
        return slots, nothing
    rest = np.ones(geometry.slot_count, bool)
    rest[slots] = False
    others = np.flatnonzero(rest).astype(np.uint32)
    return slots, others[directory.states[others] != FREE]


class _Records(NamedTuple):
    """Columns of records that are believed each for itself."""

    slots: npt.NDArray[np.uint32]
    namespaces: npt.NDArray[np.uint32]
    places: npt.NDArray[np.uint32]  # component << 16 | shard
    worlds: npt.NDArray[np.uint16]
    flags: npt.NDArray[np.uint16]
    lengths: U64
    last_use: U64
    hashes: U64  # shape (n, 4)
    parents: U64

    def of(self, namespace: int) -> _Records:
        mine = self.namespaces == namespace
        return self if mine.all() else _Records._make(column[mine] for column in self)


def _read(directory: PoolDirectory, slots: Slots, namespaces: set[int]) -> tuple[npt.NDArray[np.bool_], _Records]:
    """Which COMMITTED records are whole and possible, and what these say. Each record is read once."""
    geometry = directory.geometry
    known_namespace = np.zeros(geometry.namespace_capacity, bool)
    known_namespace[list(namespaces)] = True
    known_component = np.zeros(geometry.component_capacity, bool)
    known_component[list(directory.components().values())] = True
    count = len(slots)
    believed = np.zeros(count, bool)
    found = _Records(
        slots=np.empty(count, np.uint32),
        namespaces=np.empty(count, np.uint32),
        places=np.empty(count, np.uint32),
        worlds=np.empty(count, np.uint16),
        flags=np.empty(count, np.uint16),
        lengths=np.empty(count, np.uint64),
        last_use=np.empty(count, np.uint64),
        hashes=np.empty((count, HASH_BYTES // 8), np.uint64),
        parents=np.empty((count, HASH_BYTES // 8), np.uint64),
    )
    end = 0
    for start in range(0, count, _CHUNK):
        some = slots[start : start + _CHUNK]
        words = directory.words[some]
        records = words.view(RECORD).ravel()
        good = directory.believed(some, words)
        good &= (records["namespace"] < geometry.namespace_capacity) & (
            known_namespace[np.minimum(records["namespace"], geometry.namespace_capacity - 1)]
        )
        good &= (records["component"] < geometry.component_capacity) & (
            known_component[np.minimum(records["component"], geometry.component_capacity - 1)]
        )
        good &= records["shard"] < records["world"]
        good &= (records["length"] > 0) & (records["length"] <= directory.extents[some // geometry.slots_per_extent])
        hashes, parents = words[:, HASH_WORD:PARENT_WORD], words[:, PARENT_WORD:CHECKSUM_WORD]
        good &= hashes.any(axis=1) & (hashes != parents).any(axis=1)
        believed[start : start + _CHUNK] = good
        if not good.all():
            some, records, hashes, parents = some[good], records[good], hashes[good], parents[good]
        part = slice(end, end + len(some))
        end = part.stop
        found.slots[part] = some
        found.namespaces[part] = records["namespace"]
        found.places[part] = records["component"].astype(np.uint32) << 16 | records["shard"]
        found.worlds[part] = records["world"]
        found.flags[part] = records["flags"]
        found.lengths[part] = records["length"]
        found.last_use[part] = records["last_use_ns"]
        found.hashes[part] = hashes
        found.parents[part] = parents
    return believed, _Records._make(column[:end] for column in found)


def _tree(
    directory: PoolDirectory, number: int, tenant: str, records: _Records, now_ns: int
) -> tuple[PrefixTree, npt.NDArray[np.uint32], Rows]:
    """The tree of one namespace, the slots whose records contradict others, and the rows of pinned pages."""
    slots = records.slots
    index = page_index(len(slots))
    rows = index.intern(records.hashes.tobytes())
    pages = len(index)
    above = _parents(records, rows, index)
    # The first record of a page says what its parent is; a record that says otherwise is not believed.
    if pages == len(rows):
        parents = np.append(above, np.full(len(index) - pages, UNKNOWN_ROW))
        good = np.ones(pages, bool)
    else:
        first = np.empty(pages, np.int64)
        first[rows[::-1]] = np.arange(len(rows))[::-1]
        parents = np.full(len(index), UNKNOWN_ROW, np.int64)
        parents[:pages] = above[first]
        good = above == parents[rows]
    astray = depths(parents) < 0
    if astray.any():
        good &= ~astray[rows]
        parents[astray] = UNKNOWN_ROW

    last_use = np.zeros(len(index), np.int64)
    used = np.minimum(records.last_use, np.uint64(now_ns)).astype(np.int64)
    tree = PrefixTree(number, tenant=tenant)
    tree.adopt(index, parents, last_use)
    places, worlds, lengths = records.places, records.worlds, records.lengths
    for place in np.unique(places).tolist():
        component, shard = place >> 16, place & 0xFFFF
        mine = np.flatnonzero((places == place) & good)
        good[mine] = False
        mine = _latest(directory, slots, rows, mine)
        table = tree.table(component)
        fits = (table.held[rows[mine]] == 0) | (
            (table.world[rows[mine]] == worlds[mine]) & (table.length[rows[mine]] == lengths[mine])
        )
        mine = mine[fits]
        good[mine] = True
        tree.adopt_objects(component, shard, rows[mine], slots[mine], worlds[mine], lengths[mine])
        tree.last_use[rows[mine]] = np.maximum(tree.last_use[rows[mine]], used[mine])
    tree.prune(np.flatnonzero(tree.objects[: tree.size] == 0).tolist())
    pinned = good & (records.flags & PINNED > 0)
    return tree, slots[~good], np.unique(rows[pinned])


def _latest(directory: PoolDirectory, slots: Slots, rows: Rows, mine: Rows) -> Rows:
    """Of two records of one object, the later one; ``mine`` are records of one component and shard."""
    chosen = np.empty(int(rows[mine].max(initial=0)) + 1, np.int64)
    chosen[rows[mine]] = mine  # where several are assigned to one row, one of them stays
    if (chosen[rows[mine]] == mine).all():
        return mine
    generations = directory.generations[slots[mine]]
    mine = mine[np.argsort(generations, kind="stable")[::-1]]
    return np.sort(mine[np.unique(rows[mine], return_index=True)[1]])


def _parents(records: _Records, rows: Rows, index: PageIndex) -> Rows:
    """The parent's row of each record; parents that have no record become new rows of the index."""
    hashes, parents = records.hashes, records.parents
    above = np.empty(len(rows), np.int64)
    # Chains mostly lie in one piece: the parent is the record before.
    beside = np.zeros(len(rows), bool)
    beside[1:] = parents[1:, 0] == hashes[:-1, 0]
    likely = np.flatnonzero(beside)
    beside[likely] = (parents[likely] == hashes[likely - 1]).all(axis=1)
    above[1:][beside[1:]] = rows[:-1][beside[1:]]
    others = np.flatnonzero(~beside)
    found = np.full(len(others), ROOT_ROW, np.int64)
    named = parents[others].any(axis=1)
    found[named] = index.intern(parents[others[named]].tobytes())
    above[others] = found
    return above
