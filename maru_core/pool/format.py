"""The bytes of a pool: superblock, tables, generations, directory, extents.

::

    0                superblock, 4 KiB, never changed after format
    4096             owner block, 4 KiB: incarnation (u64) and who serves the pool, rewritten by each server; its last u64 counts
                     what became findable or was removed
    off_components   component names, 64 B each
    off_namespaces   namespace records, 4 KiB each
    off_extents      u64 per extent: its slot size in bytes, 0 while it is not cut
    off_generations  u64 per slot, one contiguous array
    off_directory    128 B record per slot
    off_data         extents, aligned to ``align``; up to here a client maps read-only

Slot ``s`` belongs to extent ``s // slots_per_extent`` and lies at
``off_data + extent * extent_bytes + (s % slots_per_extent) * slot_bytes[extent]``.

Rules of writing (only the server writes any of this):

- ``record_check`` is :func:`record_checks` of the record plus what the server adds for the slot's byte offset, the namespace's
  record and the component's name: a record is believed only where it was written, in an extent cut as it was then, and under
  the names of then. Tables that were damaged, swapped or restored from an older copy lose records, and never move them.
- A record is published body first, state last; freeing writes the generation first. Taking a slot writes its generation,
  then the state RESERVED, then the body: of a reserved slot nothing is believed but that it is taken. A record is
  believed only if its state is COMMITTED, ``record_check`` fits and its generation equals the one in the generation array.
- Giving a slot to an object writes the new generation before the slot is told to anyone; freeing it bumps the
  generation again. Generations start at ``created_s << 32``, so that they are not reused over a format either.
- Single u64 stores (generation, state, extent size) are atomic; everything longer carries a checksum.
"""

from __future__ import annotations

from typing import Final

import numpy as np

MAGIC: Final = b"MARUPOOL"
FORMAT_VERSION: Final = 1
BLOCK_BYTES: Final = 4096
COMPONENT_BYTES: Final = 64
NAMESPACE_BYTES: Final = 4096
RECORD_BYTES: Final = 128

#: Slots are whole multiples of this (a CPU page, so that a slot can be registered and flushed on its own).
SLOT_GRAIN: Final = 4096

FREE: Final = 0
RESERVED: Final = 1
COMMITTED: Final = 2

#: Bit of a record's ``flags``: an operator has pinned the page. ``flags`` are outside ``record_check``, so that one store changes them.
PINNED: Final = 1

COHERENCE_HARDWARE: Final = 0
COHERENCE_SOFTWARE: Final = 1

SUPERBLOCK = np.dtype(
    {
        "names": [
            "magic", "format", "header_bytes", "pool_uuid", "created_ns", "pool_bytes", "align",
            "extent_bytes", "extent_count", "slots_per_extent", "min_slot_bytes",
            "component_capacity", "namespace_capacity",
            "off_components", "off_namespaces", "off_extents", "off_generations", "off_directory", "off_data",
            "coherence", "checksum",
        ],
        "formats": [
            "S8", "<u4", "<u4", "V16", "<u8", "<u8", "<u8",
            "<u8", "<u4", "<u4", "<u8",
            "<u4", "<u4",
            "<u8", "<u8", "<u8", "<u8", "<u8", "<u8",
            "<u8", "<u8",
        ],
        "offsets": [
            0, 8, 12, 16, 32, 40, 48,
            56, 64, 68, 72,
            80, 84,
            88, 96, 104, 112, 120, 128,
            136, 144,
        ],
        "itemsize": BLOCK_BYTES,
    }
)  # fmt: skip

#: ``checksum`` is xxh3-64 of the superblock's bytes before it.
SUPERBLOCK_CHECKED_BYTES: Final = 144

OWNER = np.dtype(
    {
        "names": ["incarnation", "check", "length", "text", "changes"],
        "formats": ["<u8", "<u8", "<u4", f"V{BLOCK_BYTES - 32}", "<u8"],
        "offsets": [0, 8, 16, 24, BLOCK_BYTES - 8],
        "itemsize": BLOCK_BYTES,
    }
)

#: ``state`` 0 is an unused entry; ``check`` is xxh3-64 of the name or record bytes. Written body first, state last.
COMPONENT = np.dtype(
    {
        "names": ["state", "length", "check", "name"],
        "formats": ["<u4", "<u4", "<u8", "V48"],
        "offsets": [0, 4, 8, 16],
        "itemsize": COMPONENT_BYTES,
    }
)

NAMESPACE = np.dtype(
    {
        "names": ["state", "length", "check", "digest", "record"],
        "formats": ["<u4", "<u4", "<u8", "V32", f"V{NAMESPACE_BYTES - 48}"],
        "offsets": [0, 4, 8, 16, 48],
        "itemsize": NAMESPACE_BYTES,
    }
)
NAMESPACE_RECORD_MAX: Final = NAMESPACE_BYTES - 48

RECORD = np.dtype(
    {
        "names": [
            "state", "component", "shard", "world", "flags", "namespace",
            "length", "generation", "page_hash", "parent_hash", "checksum", "last_use_ns", "owner", "record_check",
        ],
        "formats": [
            "<u4", "<u2", "<u2", "<u2", "<u2", "<u4",
            "<u8", "<u8", "V32", "V32", "<u8", "<u8", "<u8", "<u8",
        ],
        "offsets": [0, 4, 6, 8, 10, 12, 16, 24, 32, 64, 96, 104, 112, 120],
        "itemsize": RECORD_BYTES,
    }
)  # fmt: skip

assert SUPERBLOCK.itemsize == BLOCK_BYTES
assert RECORD.itemsize == RECORD_BYTES

#: Odd constants, one per 64-bit word of a record; the masks leave out the state, flags, last_use_ns and record_check itself.
_KEYS: Final = np.array(
    [
        0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93,
        0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5,
        0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 0x2545F4914F6CDD1D, 0x8CB92BA72F3D8DD7,
        0xA24BAED4963EE407, 0, 0x9FB21C651E98DF25, 0,
    ],
    np.uint64,
)  # fmt: skip
_MASKS: Final = np.array(
    [0xFFFFFFFF00000000, 0xFFFFFFFF0000FFFF] + [0xFFFFFFFFFFFFFFFF] * 11 + [0, 0xFFFFFFFFFFFFFFFF, 0], np.uint64
)
_CHECKSUM_KEY: Final = _KEYS[12]
_MIX: Final = np.uint64(0xD1B54A32D192ED03)
_SHIFT: Final = np.uint64(32)
#: Check of a record of zeros, so that zeroed memory is not a valid record.
_CHECK_BASE: Final = np.uint64(0x6D61727570616765)


def record_checks(records: np.ndarray) -> np.ndarray:
    """The ``record_check`` of many records at once: the sum of each 64-bit word mixed with its own constant.

    Chosen because numpy does a million records in well under a second, and because a sum can be brought up to
    date: the check of a record with a checksum is that of the record without one plus :func:`checksum_shares`. It
    guards against torn and stray writes, not against an adversary.

    Args:
        records: array of :data:`RECORD`, shape ``(n,)``, or of u64, shape ``(n, 16)``; C-contiguous.
    Returns:
        u64 array, shape ``(n,)``.
    """
    words = records.view("<u8").reshape(len(records), RECORD_BYTES // 8)
    mixed = words & _MASKS
    mixed *= _KEYS
    mixed ^= mixed >> _SHIFT
    mixed *= _MIX
    checks: np.ndarray = mixed.sum(axis=1, dtype=np.uint64)
    checks += _CHECK_BASE
    return checks


def checksum_shares(checksums: np.ndarray) -> np.ndarray:
    """What a ``checksum`` (u64, shape ``(n,)``) adds to ``record_check``; 0 for the checksum 0."""
    mixed: np.ndarray = checksums * _CHECKSUM_KEY
    mixed ^= mixed >> _SHIFT
    mixed *= _MIX
    return mixed
