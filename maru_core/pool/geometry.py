"""How a pool is cut: the superblock as a value, planning a new one, and refusing one that contradicts itself.

Pure arithmetic over :mod:`maru_core.pool.format`; nothing is mapped here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import xxhash

from maru_core.errors import ConfigError, NotAPoolError, PoolDamagedError, PoolTooSmallError, PoolVersionError
from maru_core.pool.format import (
    BLOCK_BYTES,
    COHERENCE_HARDWARE,
    COHERENCE_SOFTWARE,
    COMPONENT_BYTES,
    FORMAT_VERSION,
    MAGIC,
    NAMESPACE_BYTES,
    RECORD_BYTES,
    SLOT_GRAIN,
    SUPERBLOCK,
    SUPERBLOCK_CHECKED_BYTES,
)
from maru_core.pool.uri import format_size

DEFAULT_ALIGN: Final = 2 << 20
DEFAULT_MIN_SLOT: Final = 16 << 10
COMPONENT_CAPACITY: Final = 64
NAMESPACE_CAPACITY: Final = 512
#: Slot ids are u32 and the highest one means "no slot".
MAX_SLOTS: Final = 0xFFFFFFFF
_SMALLEST_EXTENT: Final = 2 << 20
_LARGEST_EXTENT: Final = 64 << 20
_SUPERBLOCK_FIELDS: Final = tuple(
    name for name in SUPERBLOCK.names or () if name not in ("magic", "format", "header_bytes", "checksum")
)


def _round_up(value: int, grain: int) -> int:
    return -(-value // grain) * grain


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """All that the superblock says. Offsets and sizes are in bytes."""

    pool_uuid: bytes
    created_ns: int
    pool_bytes: int
    align: int
    extent_bytes: int
    extent_count: int
    slots_per_extent: int
    min_slot_bytes: int
    component_capacity: int
    namespace_capacity: int
    off_components: int
    off_namespaces: int
    off_extents: int
    off_generations: int
    off_directory: int
    off_data: int
    coherence: int

    @property
    def slot_count(self) -> int:
        return self.extent_count * self.slots_per_extent

    @property
    def data_bytes(self) -> int:
        """Bytes of all extents together."""
        return self.extent_count * self.extent_bytes

    def slot_offset(self, slot: int, slot_bytes: int) -> int:
        """Where a slot lies in the pool, in an extent that is cut to ``slot_bytes``.

        Raises:
            ValueError: no such slot in an extent of such slots.
        """
        extent, index = divmod(slot, self.slots_per_extent)
        if not (
            0 <= slot < self.slot_count
            and slot_bytes >= self.min_slot_bytes
            and slot_bytes % SLOT_GRAIN == 0
            and (index + 1) * slot_bytes <= self.extent_bytes
        ):
            raise ValueError(f"slot {slot} of {slot_bytes} bytes is not in a pool of {self.slot_count} slots")
        return self.off_data + extent * self.extent_bytes + index * slot_bytes

    @classmethod
    def plan(
        cls,
        pool_bytes: int,
        *,
        align: int = DEFAULT_ALIGN,
        extent_bytes: int | None = None,
        min_slot_bytes: int | None = None,
        coherence: int = COHERENCE_HARDWARE,
        pool_uuid: bytes | None = None,
        created_ns: int,
        component_capacity: int = COMPONENT_CAPACITY,
        namespace_capacity: int = NAMESPACE_CAPACITY,
    ) -> Geometry:
        """Cut a new pool of ``pool_bytes``: as many extents as fit beside their own tables.

        The default extent is a power of two near a 64th of the pool, 2 to 64 MiB, and at least ``align``: small
        enough that slots of a few sizes do not strand much of the pool, large enough that an extent holds many pages.

        Args:
            pool_uuid: 16 bytes; 16 zero bytes if not given (for planning only).
        Raises:
            ConfigError: align, extent or slot size that cannot be used.
            PoolTooSmallError: not even one extent fits.
        """
        min_slot = DEFAULT_MIN_SLOT if min_slot_bytes is None else min_slot_bytes
        if align < SLOT_GRAIN or align & (align - 1):
            raise ConfigError(f"align={align} is not a power of two of at least {SLOT_GRAIN}: use 2M or 1G")
        if min_slot < SLOT_GRAIN or min_slot % SLOT_GRAIN:
            raise ConfigError(f"min_slot={min_slot} is not a multiple of {SLOT_GRAIN}: use 4K, 16K or 64K")
        if extent_bytes is None:
            wanted = max(_SMALLEST_EXTENT, min(_LARGEST_EXTENT, pool_bytes // 64))
            extent = max(1 << (wanted.bit_length() - 1), align)
        else:
            extent = extent_bytes
        if extent < align or extent % align:
            raise ConfigError(
                f"extent={format_size(extent)} is not a multiple of align={format_size(align)}: "
                f"use a multiple of {format_size(align)}"
            )
        if min_slot > extent:
            raise ConfigError(
                f"min_slot={format_size(min_slot)} is larger than extent={format_size(extent)}: lower min_slot"
            )
        slots_per_extent = extent // min_slot
        off_components = 2 * BLOCK_BYTES
        off_namespaces = _round_up(off_components + component_capacity * COMPONENT_BYTES, BLOCK_BYTES)
        off_extents = off_namespaces + namespace_capacity * NAMESPACE_BYTES

        def layout(count: int) -> tuple[int, int, int]:
            generations = _round_up(off_extents + 8 * count, BLOCK_BYTES)
            directory = _round_up(generations + 8 * count * slots_per_extent, BLOCK_BYTES)
            return generations, directory, _round_up(directory + RECORD_BYTES * count * slots_per_extent, align)

        # The tables grow with the extents they describe: start from the bound without rounding, step down.
        count = max(0, (pool_bytes - off_extents) // (extent + 8 + slots_per_extent * (8 + RECORD_BYTES)))
        while count > 0 and layout(count)[2] + count * extent > pool_bytes:
            count -= 1
        if count < 1:
            needed = layout(1)[2] + extent
            raise PoolTooSmallError(
                f"a pool of {pool_bytes} bytes cannot hold its tables and one extent of {format_size(extent)}: "
                f"give it at least {needed} bytes"
            )
        if count * slots_per_extent >= MAX_SLOTS:
            raise ConfigError(
                f"a pool of {format_size(pool_bytes)} has too many slots of {format_size(min_slot)}: raise min_slot"
            )
        off_generations, off_directory, off_data = layout(count)
        return cls(
            pool_uuid=bytes(16) if pool_uuid is None else pool_uuid,
            created_ns=created_ns,
            pool_bytes=pool_bytes,
            align=align,
            extent_bytes=extent,
            extent_count=count,
            slots_per_extent=slots_per_extent,
            min_slot_bytes=min_slot,
            component_capacity=component_capacity,
            namespace_capacity=namespace_capacity,
            off_components=off_components,
            off_namespaces=off_namespaces,
            off_extents=off_extents,
            off_generations=off_generations,
            off_directory=off_directory,
            off_data=off_data,
            coherence=coherence,
        )

    def superblock(self) -> bytes:
        """The 4 KiB that :meth:`read` reads back."""
        block = np.zeros(1, SUPERBLOCK)
        for name, value in asdict(self).items():
            block[name] = np.void(value) if name == "pool_uuid" else value
        block["magic"] = MAGIC
        block["format"] = FORMAT_VERSION
        block["header_bytes"] = BLOCK_BYTES
        block["checksum"] = xxhash.xxh3_64_intdigest(block.tobytes()[:SUPERBLOCK_CHECKED_BYTES])
        return block.tobytes()

    @classmethod
    def read(cls, block: bytes) -> Geometry:
        """The geometry in a superblock; every field is checked, since all later arithmetic believes it.

        Args:
            block: the pool's first bytes, at least 4 KiB.
        Raises:
            NotAPoolError: no magic.
            PoolVersionError: another format version.
            PoolDamagedError: checksum wrong, or fields contradict each other.
        """
        if bytes(block[: len(MAGIC)]) != MAGIC or len(block) < BLOCK_BYTES:
            raise NotAPoolError(f"no Maru pool starts here (first bytes {bytes(block[:8])!r}, not {MAGIC!r})")
        fields = np.frombuffer(block, SUPERBLOCK, 1)[0]
        version = int(fields["format"])
        if version != FORMAT_VERSION:
            raise PoolVersionError(
                f"the pool has format version {version}, this Maru reads {FORMAT_VERSION}: "
                f"use a Maru that reads version {version}, or format the pool anew (--format; its contents are lost)"
            )
        checksum = xxhash.xxh3_64_intdigest(bytes(block[:SUPERBLOCK_CHECKED_BYTES]))
        if int(fields["checksum"]) != checksum or int(fields["header_bytes"]) != BLOCK_BYTES:
            raise PoolDamagedError(
                f"the superblock is damaged (checksum {int(fields['checksum']):#x}, computed {checksum:#x}): "
                "format the pool anew (--format; its contents are lost)"
            )
        values: dict[str, Any] = {
            name: fields[name].tobytes() if name == "pool_uuid" else int(fields[name]) for name in _SUPERBLOCK_FIELDS
        }
        geometry = cls(**values)
        problem = geometry._problem()
        if problem:
            raise PoolDamagedError(
                f"the superblock contradicts itself ({problem}): format the pool anew (--format; its contents are lost)"
            )
        return geometry

    def _problem(self) -> str | None:
        """The first rule that the fields break."""
        slots = self.slot_count
        regions = (  # name, start, end, alignment; in the order they must lie
            ("components", self.off_components, self.component_capacity * COMPONENT_BYTES, COMPONENT_BYTES),
            ("namespaces", self.off_namespaces, self.namespace_capacity * NAMESPACE_BYTES, BLOCK_BYTES),
            ("extents", self.off_extents, 8 * self.extent_count, 8),
            ("generations", self.off_generations, 8 * slots, 8),
            ("directory", self.off_directory, RECORD_BYTES * slots, RECORD_BYTES),
            ("data", self.off_data, self.data_bytes, max(self.align, 1)),
        )
        rules = (
            (self.align >= SLOT_GRAIN and not self.align & (self.align - 1), f"align {self.align}"),
            (self.extent_bytes > 0 and self.extent_bytes % max(self.align, 1) == 0, f"extent {self.extent_bytes}"),
            (
                self.min_slot_bytes >= SLOT_GRAIN and self.min_slot_bytes % SLOT_GRAIN == 0,
                f"min_slot {self.min_slot_bytes}",
            ),
            (self.extent_count >= 1, "no extents"),
            (
                self.slots_per_extent >= 1
                and self.slots_per_extent == self.extent_bytes // max(self.min_slot_bytes, 1),
                f"{self.slots_per_extent} slots per extent",
            ),
            (slots < MAX_SLOTS, f"{slots} slots"),
            (self.component_capacity >= 1, "no room for components"),
            (self.namespace_capacity >= 1, "no room for namespaces"),
            (self.coherence in (COHERENCE_HARDWARE, COHERENCE_SOFTWARE), f"coherence {self.coherence}"),
        )
        for holds, what in rules:
            if not holds:
                return what
        end = 2 * BLOCK_BYTES
        for name, start, length, grain in regions:
            if start < end or start % grain:
                return f"{name} at {start}"
            end = start + length
        if end > self.pool_bytes:
            return f"extents end at {end}, the pool at {self.pool_bytes}"
        return None
