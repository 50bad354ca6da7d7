"""The pool's own tables, and the only place that writes them: names, extents, generations, records.

One method per step of an object's life, each for a whole batch. The order of the stores inside a method is what
makes a kill at any instruction harmless (see :mod:`maru_core.pool.format`), so every store goes through
:meth:`PoolDirectory._store`: a test replaces it and looks at the memory after each single word.

It keeps no copy of anything: what it says is what the memory says. It decides nothing: which slot is given to which
object, and when, is :mod:`maru_server.state`.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from maru_core.namespace import record_digest
from maru_core.pool.format import (
    BLOCK_BYTES,
    COMMITTED,
    COMPONENT,
    COMPONENT_BYTES,
    FREE,
    NAMESPACE,
    NAMESPACE_BYTES,
    NAMESPACE_RECORD_MAX,
    RECORD,
    RECORD_BYTES,
    RESERVED,
    checksum_shares,
    record_checks,
)
from maru_core.pool.geometry import Geometry

Slots: TypeAlias = npt.NDArray[Any]  # any integer type
U64: TypeAlias = npt.NDArray[np.uint64]

COMPONENT_NAME_MAX: Final = 48

# 64-bit words of a record (RECORD says what lies where).
PLACE_WORD: Final = 0  # state, component, shard
SHAPE_WORD: Final = 1  # world, flags, namespace
LENGTH_WORD: Final = 2
GENERATION_WORD: Final = 3
HASH_WORD: Final = 4
PARENT_WORD: Final = 8
CHECKSUM_WORD: Final = 12
LAST_USE_WORD: Final = 13
OWNER_WORD: Final = 14
CHECK_WORD: Final = 15
_ONE: Final = np.uint64(1)


class PoolDirectory:
    """Views of one pool's tables.

    Args:
        geometry: of the pool that ``meta`` belongs to.
        meta: the bytes ``[0, off_data)`` of the pool, writable, uint8; a mapping or, in tests, any array.
    """

    def __init__(self, geometry: Geometry, meta: npt.NDArray[np.uint8]) -> None:
        if meta.dtype != np.uint8 or meta.ndim != 1 or len(meta) < geometry.off_data:
            raise ValueError(f"meta must be {geometry.off_data} bytes of uint8, not {meta.shape} of {meta.dtype}")
        self.geometry = geometry
        self.meta = meta
        slots = geometry.slot_count
        self.generations: U64 = self._view(geometry.off_generations, slots * 8).view("<u8")
        self.words: U64 = self._view(geometry.off_directory, slots * RECORD_BYTES).view("<u8").reshape(slots, -1)
        self.records = self._view(geometry.off_directory, slots * RECORD_BYTES).view(RECORD)
        self.states: npt.NDArray[np.uint32] = self.records["state"]
        self.checksums: U64 = self.words[:, CHECKSUM_WORD]
        self.extents: U64 = self._view(geometry.off_extents, geometry.extent_count * 8).view("<u8")
        self._components = self._view(geometry.off_components, geometry.component_capacity * COMPONENT_BYTES)
        self._namespaces = self._view(geometry.off_namespaces, geometry.namespace_capacity * NAMESPACE_BYTES)
        # Generations are not reused over a format of the same memory, even where the array was left zero.
        self._generation_floor = np.uint64((geometry.created_ns // 1_000_000_000) << 32)
        # Where each slot of a cut extent lies: one load per slot where every match and reserve asks. Rows of extents that
        # are not cut are never touched and take no memory.
        self.slot_offsets: U64 = np.zeros(slots, np.uint64)
        for extent in np.flatnonzero(self.extents).tolist():
            self._note_offsets(extent, int(self.extents[extent]))

    def _view(self, offset: int, nbytes: int) -> npt.NDArray[Any]:
        assert offset >= BLOCK_BYTES
        assert offset + nbytes <= len(self.meta)
        return self.meta[offset : offset + nbytes]

    def _store(self, target: npt.NDArray[Any], index: Any, values: Any) -> None:
        """Every store into the pool: in the order of ``index``, each aligned word whole or not at all."""
        target[index] = values

    # ------------------------------------------------------------ where slots lie

    def offsets(self, slots: npt.NDArray[np.uint32]) -> U64:
        """Byte offset in the pool of each slot; the slots' extents must be cut."""
        offsets: U64 = self.slot_offsets.take(slots)
        return offsets

    def set_extent(self, extent: int, slot_bytes: int) -> None:
        """Cut an extent into slots of ``slot_bytes``, or return it (0). All its slots must be free."""
        self._store(self.extents, extent, slot_bytes)
        if slot_bytes:
            self._note_offsets(extent, slot_bytes)

    def _note_offsets(self, extent: int, slot_bytes: int) -> None:
        geometry = self.geometry
        first = extent * geometry.slots_per_extent
        count = min(geometry.extent_bytes // slot_bytes, geometry.slots_per_extent)
        start = geometry.off_data + extent * geometry.extent_bytes
        self.slot_offsets[first : first + count] = start + np.arange(count, dtype=np.uint64) * np.uint64(slot_bytes)

    # ------------------------------------------------------------ the life of an object

    def claim(self, slots: Slots) -> U64:
        """Take free slots; returns their new generations.

        The generation is stored first, so that nobody is ever told one that the memory does not hold. What the record says
        besides is that of a former object until :meth:`describe`: only of a COMMITTED record is anything else believed.
        """
        assert not self.states[slots].any(), "a slot that is not free was given away"
        generations = np.maximum(self.generations.take(slots), self._generation_floor)
        generations += _ONE
        self._store(self.generations, slots, generations)
        self._store(self.states, slots, RESERVED)
        return generations

    def describe(
        self,
        slots: Slots,
        generations: U64,
        *,
        namespace: int,
        component: int,
        shard: int,
        world: int,
        length: int,
        hashes: U64,
        parents: U64,
        owner: int,
        now_ns: int,
    ) -> None:
        """Say what claimed slots are reserved for. ``hashes`` and ``parents`` have shape ``(n, 4)``."""
        body = np.empty((len(slots), RECORD_BYTES // 8), np.uint64)
        place, shape = RESERVED | component << 32 | shard << 48, world | namespace << 32
        body[:] = np.array([place, shape, length, *[0] * 10, now_ns, owner, 0], np.uint64)
        body[:, GENERATION_WORD] = generations
        body[:, HASH_WORD:PARENT_WORD] = hashes
        body[:, PARENT_WORD:CHECKSUM_WORD] = parents
        body[:, CHECK_WORD] = record_checks(body)
        self._store(self.words, slots, body)

    def commit(self, slots: Slots, checksums: U64 | None) -> None:
        """Publish reserved slots. ``checksums`` has one element per slot, or is None."""
        if checksums is not None:
            # The check of a reserved record is that of a record without a checksum.
            checks = self.words[slots, CHECK_WORD] + checksum_shares(checksums)
            self._store(self.checksums, slots, checksums)
            self._store(self.words[:, CHECK_WORD], slots, checks)
        self._store(self.states, slots, COMMITTED)

    def free(self, slots: Slots) -> None:
        """Take slots back, in this order: a kill in the middle leaves the later ones as they were.

        Generation first, then the state: a slot is never free while the generation that readers hold still stands. Its
        extent may be cut anew for another size, and then others write to these bytes who never touch this slot.
        """
        assert self.states[slots].all(), "a free slot was freed"
        self._store(self.generations, slots, self.generations[slots] + _ONE)
        self._store(self.states, slots, FREE)

    def touch(self, slots: Slots, last_use_ns: npt.NDArray[Any]) -> None:
        """Note the last use, so that a restart does not forget which pages are old."""
        self._store(self.words[:, LAST_USE_WORD], slots, last_use_ns)

    def believed(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which records may be believed: COMMITTED, ``record_check`` fits, generation as in the array."""
        records = self.words[slots]
        believed: npt.NDArray[np.bool_] = records.view(RECORD)["state"].ravel() == COMMITTED
        believed &= records[:, CHECK_WORD] == record_checks(records)
        believed &= records[:, GENERATION_WORD] == self.generations[slots]
        return believed

    # ------------------------------------------------------------ names

    def components(self) -> dict[str, int]:
        """Component names and their numbers."""
        found = {}
        entries = self._components.view(COMPONENT)
        for number in np.flatnonzero(entries["state"]).tolist():
            name = self._entry(entries, number, "name", COMPONENT_NAME_MAX)
            if name is not None:
                found[name.decode("ascii", "replace")] = number
        return found

    def namespaces(self) -> dict[bytes, int]:
        """Namespace records and their numbers."""
        found = {}
        entries = self._namespaces.view(NAMESPACE)
        for number in np.flatnonzero(entries["state"]).tolist():
            record = self._entry(entries, number, "record", NAMESPACE_RECORD_MAX)
            if record is not None:
                found[record] = number
        return found

    def add_component(self, name: str) -> int | None:
        """The number of a new component, or None when the table is full."""
        return self._add(self._components.view(COMPONENT), {"name": name.encode("ascii")})

    def add_namespace(self, record: bytes) -> int | None:
        """The number of a new namespace, or None when the table is full."""
        return self._add(self._namespaces.view(NAMESPACE), {"digest": record_digest(record), "record": record})

    def drop_namespace(self, number: int) -> None:
        """Forget a namespace that no record names."""
        self._store(self._namespaces.view(NAMESPACE)["state"], number, 0)

    def drop_damaged_names(self) -> None:
        """Unused again: entries whose check does not fit (no record that names them is believed)."""
        for entries, known in (
            (self._components.view(COMPONENT), set(self.components().values())),
            (self._namespaces.view(NAMESPACE), set(self.namespaces().values())),
        ):
            for number in np.flatnonzero(entries["state"]).tolist():
                if number not in known:
                    self._store(entries["state"], number, 0)

    @staticmethod
    def _entry(entries: npt.NDArray[Any], number: int, field: str, capacity: int) -> bytes | None:
        length = int(entries["length"][number])
        if not 0 < length <= capacity:
            return None
        content = entries[field][number].tobytes()[:length]
        return content if xxhash.xxh3_64_intdigest(content) == int(entries["check"][number]) else None

    def _add(self, entries: npt.NDArray[Any], fields: dict[str, bytes]) -> int | None:
        unused = np.flatnonzero(entries["state"] == 0)
        if not len(unused):
            return None
        number = int(unused[0])
        for field, content in fields.items():
            padded = content.ljust(entries.dtype[field].itemsize, b"\0")
            self._store(entries[field], number, np.void(padded))
        content = list(fields.values())[-1]
        self._store(entries["length"], number, len(content))
        self._store(entries["check"], number, xxhash.xxh3_64_intdigest(content))
        self._store(entries["state"], number, 1)
        return number
