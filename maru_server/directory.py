"""The pool's own tables, and the only place that writes them: names, extents, generations, records.

One method per step of an object's life, each for a whole batch. The order of the stores inside a method is what
makes a kill at any instruction harmless (see :mod:`maru_core.pool.format`), so every store goes through
:meth:`PoolDirectory._store`: a test replaces it and looks at the memory after each single word.

It keeps no copy of anything: what it says is what the memory says. It decides nothing: which slot is given to which
object, and when, is :mod:`maru_server.pages`.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from maru_core.namespace import record_digest
from maru_core.pool.coherence import HARDWARE, Coherence
from maru_core.pool.format import (
    BLOCK_BYTES,
    COMMITTED,
    COMPONENT,
    COMPONENT_BYTES,
    FREE,
    NAMESPACE,
    NAMESPACE_BYTES,
    NAMESPACE_RECORD_MAX,
    PINNED,
    RECORD,
    RECORD_BYTES,
    RESERVED,
    checksum_shares,
    record_checks,
)
from maru_core.pool.geometry import Geometry

try:
    from maru_server import _store
except ImportError:  # built without a compiler: numpy does the same, more slowly
    _store = None  # type: ignore[assignment]

Slots: TypeAlias = npt.NDArray[Any]  # any integer type
U64: TypeAlias = npt.NDArray[np.uint64]

COMPONENT_NAME_MAX: Final = 48
#: Between a namespace's record and its tenant; canonical JSON has none.
_TENANT_MARK: Final = b"\n"
#: Odd, so that no two places in a pool add the same to the check of a record.
_PLACE_KEY: Final = np.uint64(0x8EBC6AF09C88C6E3)
#: No generation is ever this high: one that is was damaged.
_GENERATION_MAX: Final = np.uint64(0xFFFFFFFF << 32)

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
        coherence: the mapping's; its caches hold nothing older than the memory.
    """

    def __init__(self, geometry: Geometry, meta: npt.NDArray[np.uint8], coherence: Coherence = HARDWARE) -> None:
        if meta.dtype != np.uint8 or meta.ndim != 1 or len(meta) < geometry.off_data:
            raise ValueError(f"meta must be {geometry.off_data} bytes of uint8, not {meta.shape} of {meta.dtype}")
        self.geometry = geometry
        self.meta = meta
        self._coherence = coherence
        slots = geometry.slot_count
        self.generations: U64 = self._view(geometry.off_generations, slots * 8).view("<u8")
        self.words: U64 = self._view(geometry.off_directory, slots * RECORD_BYTES).view("<u8").reshape(slots, -1)
        self.records = self._view(geometry.off_directory, slots * RECORD_BYTES).view(RECORD)
        self.states: npt.NDArray[np.uint32] = self.records["state"]
        self.flags: npt.NDArray[np.uint16] = self.records["flags"]
        self.checksums: U64 = self.words[:, CHECKSUM_WORD]
        #: One word: another one after each publication and removal.
        self.changes: U64 = self._view(2 * BLOCK_BYTES - 8, 8).view("<u8")  # the last word of the owner block
        self.extents: U64 = self._view(geometry.off_extents, geometry.extent_count * 8).view("<u8")
        self._components = self._view(geometry.off_components, geometry.component_capacity * COMPONENT_BYTES)
        self._namespaces = self._view(geometry.off_namespaces, geometry.namespace_capacity * NAMESPACE_BYTES)
        # Generations are not reused over a format of the same memory, even where the array was left zero.
        self._generation_floor = np.uint64((geometry.created_ns // 1_000_000_000) << 32)
        self._floor = int(self._generation_floor)
        self._fresh = self._generation_floor
        # Where each slot of a cut extent lies: one load per slot where every match and reserve asks. Rows of extents that
        # are not cut are never touched and take no memory.
        self.slot_offsets: U64 = np.zeros(slots, np.uint64)
        for extent in np.flatnonzero(self.extents).tolist():
            self._note_offsets(extent, int(self.extents[extent]))
        # By number: what the component's name and the namespace's record add to the checks of records.
        self._component_shares = self._shares(self._components.view(COMPONENT), "name")
        self._namespace_shares = self._shares(self._namespaces.view(NAMESPACE), "record")
        #: Whether stores may go through ``_store.c``: not where each word must be written back, nor where a test counts the stores.
        self.compiled = _store is not None and not coherence.software and type(self)._store is PoolDirectory._store

    def _view(self, offset: int, nbytes: int) -> npt.NDArray[Any]:
        assert offset >= BLOCK_BYTES
        assert offset + nbytes <= len(self.meta)
        return self.meta[offset : offset + nbytes]

    def _store(self, target: npt.NDArray[Any], index: Any, values: Any) -> None:
        """Every store into the pool: in the order of ``index``, each aligned word whole or not at all.

        Where hosts' caches do not agree, in memory before the next store begins: that one may rest on it, and so may the reply
        that is sent next. The lines of one call reach memory in any order. Nothing rests on that: what one call stores are words
        of different slots, or of a record that is not believed before another call has said so."""
        target[index] = values
        if self._coherence.software:
            self._write_back(target, index)

    def _write_back(self, target: npt.NDArray[Any], index: Any) -> None:
        addresses = np.atleast_1d(np.asarray(index)).astype(np.uint64)
        addresses *= np.uint64(target.strides[0])
        addresses += np.uint64(target.__array_interface__["data"][0])
        self._coherence.write_back_many(addresses, target[:1].nbytes)

    # ------------------------------------------------------------ where slots lie

    def offsets(self, slots: npt.NDArray[np.uint32]) -> U64:
        """Byte offset in the pool of each slot; the slots' extents must be cut."""
        offsets: U64 = self.slot_offsets.take(slots)
        return offsets

    def set_extent(self, extent: int, slot_bytes: int) -> None:
        """Cut an extent into slots of ``slot_bytes``, or return it (0). All its slots must be free."""
        if slot_bytes:
            # Of an extent that is not cut nobody has looked at the records: they are free, or damaged.
            first = extent * self.geometry.slots_per_extent
            slots = np.arange(first, first + self.geometry.slots_per_extent, dtype=np.uint32)
            taken = self.states[first : first + self.geometry.slots_per_extent] != FREE
            if taken.any():
                self.discard(slots[taken])
            self.mend_generations(slots)
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

    def claim_packed(self, slots: npt.NDArray[np.uint32]) -> tuple[bytes, bytes]:
        """:meth:`claim`, compiled: where the slots lie and their new generations, packed."""
        return _store.claim(self.generations, self.words, self.slot_offsets, slots, self._floor)

    def share(self, namespace: int, component: int) -> int:
        """What the names of both add to the check of a record."""
        return (int(self._namespace_shares[namespace]) + int(self._component_shares[component])) & 0xFFFFFFFFFFFFFFFF

    @property
    def shares(self) -> tuple[U64, U64]:
        """By number: what each namespace's record and each component's name adds to the check of a record. They stay the same arrays."""
        return self._namespace_shares, self._component_shares

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
        body[:, CHECK_WORD] = self._checks(slots, body, namespace, component)
        self._store(self.words, slots, body)

    def commit(self, slots: Slots, checksums: U64 | None) -> None:
        """Publish reserved slots. ``checksums`` has one element per slot, or is None."""
        if self.compiled and checksums is None and slots.dtype == np.uint32:
            _store.commit(self.words, self.changes, np.ascontiguousarray(slots))
            return
        if checksums is not None:
            # The check of a reserved record is that of a record without a checksum.
            checks = self.words[slots, CHECK_WORD] + checksum_shares(checksums)
            self._store(self.checksums, slots, checksums)
            self._store(self.words[:, CHECK_WORD], slots, checks)
        self._store(self.states, slots, COMMITTED)
        self._changed()

    def free(self, slots: Slots) -> None:
        """Take slots back, in this order: a kill in the middle leaves the later ones as they were.

        Generation first, then the state: a slot is never free while the generation that readers hold still stands. Its
        extent may be cut anew for another size, and then others write to these bytes who never touch this slot.
        """
        assert self.states[slots].all(), "a free slot was freed"
        self._store(self.generations, slots, self.generations[slots] + _ONE)
        self._store(self.states, slots, FREE)
        self._changed()

    def discard(self, slots: Slots) -> None:
        """Free slots of which the pool says what cannot be; order as in :meth:`free`.

        Their generations may be damaged too, and must not repeat one that somebody was told: they go on from the second in
        which this server started, which lies above all that were ever given, unless they can rise from where they are.
        """
        generations = self.generations[slots] + _ONE
        generations[generations >= _GENERATION_MAX] = 0
        self._store(self.generations, slots, np.maximum(generations, self._fresh))
        self._store(self.states, slots, FREE)
        self._changed()

    def _changed(self) -> None:
        """Tell readers, without a message, that answers of before may be wrong by now. A kill before it costs nothing: the next
        server is another incarnation."""
        self._store(self.changes, 0, (self.changes + _ONE)[0])  # wraps

    def mend_generations(self, slots: Slots) -> None:
        """Give slots that hold nothing to be believed a generation that can rise, where theirs cannot."""
        damaged = slots[self.generations[slots] >= _GENERATION_MAX]
        if len(damaged):
            self._store(self.generations, damaged, self._fresh)

    def started(self, now_ns: int) -> None:
        """The time of day at which a server begins to use the pool."""
        self._fresh = max(self._fresh, np.uint64((now_ns // 1_000_000_000 % 0xFFFFFFFF) << 32))

    def touch(self, slots: Slots, last_use_ns: npt.NDArray[Any]) -> None:
        """Note the last use, so that a restart does not forget which pages are old."""
        self._store(self.words[:, LAST_USE_WORD], slots, last_use_ns)

    def set_pinned(self, slots: Slots, pinned: bool) -> None:
        """Note that an operator has pinned the page of these slots, or no more."""
        self._store(self.flags, slots, PINNED if pinned else 0)

    def believed(self, slots: Slots, records: U64 | None = None) -> npt.NDArray[np.bool_]:
        """Which records may be believed: COMMITTED, ``record_check`` fits, generation as in the array.

        Args:
            records: ``words[slots]``, where the caller has it already.
        """
        if records is None:
            records = self.words[slots]
        believed: npt.NDArray[np.bool_] = records.view(RECORD)["state"].ravel() == COMMITTED
        believed &= self._described(slots, records)
        return believed

    def _described(self, slots: Slots, records: U64) -> npt.NDArray[np.bool_]:
        described: npt.NDArray[np.bool_] = records[:, CHECK_WORD] == self._expected(slots, records)
        described &= records[:, GENERATION_WORD] == self.generations[slots]
        return described

    def owners(self, slots: Slots) -> U64:
        """Who is writing into these reserved slots; 0 where the record is not, or not wholly, of this reservation."""
        records = self.words[slots]
        return np.where(self._described(slots, records), records[:, OWNER_WORD], np.uint64(0))

    def checks(self, slots: Slots) -> U64:
        """What the ``record_check`` of each slot must be by all else that its record says, by where the slot lies, and by
        what its namespace and component are called."""
        return self._expected(slots, self.words[slots])

    def _expected(self, slots: Slots, records: U64) -> U64:
        fields = records.view(RECORD).ravel()
        namespaces = np.minimum(fields["namespace"], len(self._namespace_shares) - 1)
        components = np.minimum(fields["component"], len(self._component_shares) - 1)
        return self._checks(slots, records, namespaces, components)

    def _checks(self, slots: Slots, records: U64, namespaces: Any, components: Any) -> U64:
        checks: U64 = record_checks(records)
        checks += self.slot_offsets.take(slots) * _PLACE_KEY
        checks += self._namespace_shares[namespaces]
        checks += self._component_shares[components]
        return checks

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

    def namespaces(self) -> dict[tuple[str, bytes], int]:
        """Tenants and namespace records, and their numbers."""
        found = {}
        entries = self._namespaces.view(NAMESPACE)
        for number in np.flatnonzero(entries["state"]).tolist():
            content = self._entry(entries, number, "record", NAMESPACE_RECORD_MAX)
            if content is not None:
                record, _, tenant = content.partition(_TENANT_MARK)
                found[tenant.decode("utf-8", "replace"), record] = number
        return found

    def add_component(self, name: str) -> int | None:
        """The number of a new component, or None when the table is full."""
        return self._add(self._components.view(COMPONENT), {"name": name.encode("ascii")}, self._component_shares)

    def add_namespace(self, record: bytes, tenant: str = "") -> int | None:
        """The number of a new namespace of a tenant, or None when the table is full. Both together fit as
        :func:`namespace_fits` says."""
        content = _namespace_content(record, tenant)
        fields = {"digest": record_digest(record), "record": content}
        return self._add(self._namespaces.view(NAMESPACE), fields, self._namespace_shares)

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

    def _shares(self, entries: npt.NDArray[Any], field: str) -> U64:
        shares = np.zeros(len(entries), np.uint64)
        for number in np.flatnonzero(entries["state"]).tolist():
            content = self._entry(entries, number, field, entries.dtype[field].itemsize)
            if content is not None:
                shares[number] = _share(content)
        return shares

    @staticmethod
    def _entry(entries: npt.NDArray[Any], number: int, field: str, capacity: int) -> bytes | None:
        length = int(entries["length"][number])
        if not 0 < length <= capacity:
            return None
        content = entries[field][number].tobytes()[:length]
        return content if xxhash.xxh3_64_intdigest(content) == int(entries["check"][number]) else None

    def _add(self, entries: npt.NDArray[Any], fields: dict[str, bytes], shares: U64) -> int | None:
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
        shares[number] = _share(content)
        self._store(entries["state"], number, 1)
        return number


def namespace_fits(record: bytes, tenant: str) -> bool:
    """Whether a namespace's entry in the pool holds this record and tenant."""
    return len(_namespace_content(record, tenant)) <= NAMESPACE_RECORD_MAX


def _namespace_content(record: bytes, tenant: str) -> bytes:
    return record + _TENANT_MARK + tenant.encode() if tenant else record


def _share(content: bytes) -> int:
    return int(xxhash.xxh3_64_intdigest(content, seed=len(content)))
