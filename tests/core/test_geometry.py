"""Planning a pool, and refusing superblocks that are foreign, of another version, damaged or contradictory."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from maru_core.errors import (
    ConfigError,
    NotAPoolError,
    PoolDamagedError,
    PoolTooSmallError,
    PoolVersionError,
)
from maru_core.pool.format import (
    BLOCK_BYTES,
    COMPONENT_BYTES,
    NAMESPACE_BYTES,
    RECORD_BYTES,
    SUPERBLOCK,
    SUPERBLOCK_CHECKED_BYTES,
)
from maru_core.pool.geometry import Geometry

UUID = bytes(range(16))


def plan(pool_bytes: int, **options: int) -> Geometry:
    return Geometry.plan(pool_bytes, pool_uuid=UUID, created_ns=1_700_000_000_000_000_000, **options)


def forged(geometry: Geometry, **fields: int) -> bytes:
    """A superblock with other fields and a checksum that fits."""
    block = np.frombuffer(bytearray(geometry.superblock()), SUPERBLOCK)
    for name, value in fields.items():
        block[name] = value
    block["checksum"] = xxhash.xxh3_64_intdigest(block.tobytes()[:SUPERBLOCK_CHECKED_BYTES])
    return block.tobytes()


@pytest.mark.parametrize(
    ("pool", "options", "extent"),
    [
        (64 << 20, {}, 2 << 20),
        (200 << 20, {}, 2 << 20),
        (8 << 30, {}, 64 << 20),
        (1 << 30, {}, 16 << 20),
        (1 << 40, {}, 64 << 20),
        (8 << 30, {"align": 1 << 30}, 1 << 30),
        (64 << 20, {"extent_bytes": 6 << 20}, 6 << 20),
    ],
)
def test_default_extents(pool: int, options: dict[str, int], extent: int) -> None:
    geometry = plan(pool, **options)
    assert geometry.extent_bytes == extent
    assert geometry.slots_per_extent == extent // (16 << 10)
    assert geometry.namespace_capacity == 512
    assert geometry.component_capacity == 64


@given(
    pool=st.integers(1, 1 << 42),
    align=st.integers(12, 30).map(lambda n: 1 << n),
    extent=st.none() | st.integers(1, 64),
    min_slot=st.none() | st.integers(1, 64).map(lambda n: n * 4096),
)
def test_every_plan_is_sound(pool: int, align: int, extent: int | None, min_slot: int | None) -> None:
    extent_bytes = None if extent is None else extent * align
    try:
        geometry = plan(pool, align=align, extent_bytes=extent_bytes, min_slot_bytes=min_slot)
    except PoolTooSmallError as error:
        needed = int(str(error).split()[-2])
        assert needed > pool
        options = {"align": align, "extent_bytes": extent_bytes, "min_slot_bytes": min_slot}
        assert plan(needed, **options).extent_count == 1
        with pytest.raises(PoolTooSmallError):
            plan(needed - 1, **options)
        return
    except ConfigError:
        return
    ends = [
        (0, 2 * BLOCK_BYTES),
        (geometry.off_components, 64 * COMPONENT_BYTES),
        (geometry.off_namespaces, 512 * NAMESPACE_BYTES),
        (geometry.off_extents, 8 * geometry.extent_count),
        (geometry.off_generations, 8 * geometry.slot_count),
        (geometry.off_directory, RECORD_BYTES * geometry.slot_count),
        (geometry.off_data, geometry.extent_count * geometry.extent_bytes),
        (pool, 0),
    ]
    for (start, length), (following, _) in itertools.pairwise(ends):
        assert start + length <= following
    assert geometry.off_data % align == 0
    assert geometry.extent_bytes % align == 0
    # No room is given away: another extent would not fit.
    assert (
        geometry.off_data
        + geometry.data_bytes
        + geometry.extent_bytes
        + align
        + ((RECORD_BYTES + 8) * geometry.slots_per_extent + 8 + 3 * BLOCK_BYTES)
        > pool
    )
    assert Geometry.read(geometry.superblock()) == geometry


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"align": 3 << 20}, "align"),
        ({"align": 2048}, "align"),
        ({"extent_bytes": 3 << 20}, "extent=3M"),
        ({"extent_bytes": 0}, "extent"),
        ({"min_slot_bytes": 5000}, "min_slot=5000"),
        ({"min_slot_bytes": 4 << 20, "extent_bytes": 2 << 20}, "min_slot=4M"),
        ({"min_slot_bytes": 0}, "min_slot"),
    ],
)
def test_refuses_options(options: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        plan(1 << 30, **options)


def test_slot_ids_fit_in_32_bits() -> None:
    with pytest.raises(ConfigError, match="min_slot"):
        plan(1 << 45, min_slot_bytes=4096)
    assert plan(1 << 44, min_slot_bytes=64 << 10).slot_count < 0xFFFFFFFF


def test_slots_of_an_extent_do_not_overlap() -> None:
    geometry = plan(64 << 20)
    per = geometry.slots_per_extent
    for slot_bytes in (16 << 10, 20 << 10, 1 << 20, 2 << 20):
        count = geometry.extent_bytes // slot_bytes
        offsets = [geometry.slot_offset(per + i, slot_bytes) for i in range(count)]
        assert offsets[0] == geometry.off_data + geometry.extent_bytes
        assert set(np.diff(offsets)) <= {slot_bytes}
        assert offsets[-1] + slot_bytes <= geometry.off_data + 2 * geometry.extent_bytes
        if count < per:
            with pytest.raises(ValueError, match="slot"):
                geometry.slot_offset(per + count, slot_bytes)
    for slot, slot_bytes in (
        (-1, 16 << 10),
        (geometry.slot_count, 16 << 10),
        (0, 8 << 10),
        (0, 17 << 10),
        (0, 4 << 20),
    ):
        with pytest.raises(ValueError, match="slot"):
            geometry.slot_offset(slot, slot_bytes)


def test_foreign_bytes_are_no_pool() -> None:
    for block in (b"", b"MARUPOOL", bytes(BLOCK_BYTES), b"\x7fELF" * 1024, b"MARUPOOK" + bytes(BLOCK_BYTES)):
        with pytest.raises(NotAPoolError):
            Geometry.read(block)


def test_another_version_is_named_whatever_else_it_holds() -> None:
    block = bytearray(plan(64 << 20).superblock())
    block[8:12] = (2).to_bytes(4, "little")
    block[100:140] = b"x" * 40
    with pytest.raises(PoolVersionError, match=r"version 2.*reads 1.*--format"):
        Geometry.read(bytes(block))


def test_every_flipped_bit_is_seen() -> None:
    good = plan(64 << 20).superblock()
    for byte in range(SUPERBLOCK_CHECKED_BYTES + 8):
        block = bytearray(good)
        block[byte] ^= 0x10
        with pytest.raises((NotAPoolError, PoolVersionError, PoolDamagedError)):
            Geometry.read(bytes(block))


@pytest.mark.parametrize(
    "fields",
    [
        {"pool_bytes": 1 << 20},
        {"align": 0},
        {"align": 3 << 20},
        {"align": 1 << 30},
        {"extent_bytes": 0},
        {"extent_bytes": 1 << 62},
        {"extent_bytes": 4096},
        {"extent_count": 0},
        {"extent_count": 1000},
        {"slots_per_extent": 0},
        {"slots_per_extent": 129},
        {"min_slot_bytes": 0},
        {"min_slot_bytes": 1000},
        {"component_capacity": 0},
        {"component_capacity": 1 << 30},
        {"namespace_capacity": 0},
        {"namespace_capacity": 1 << 30},
        {"off_components": 4096},
        {"off_components": 8200},
        {"off_namespaces": 8192},
        {"off_extents": 8192},
        {"off_generations": 1},
        {"off_generations": 1 << 62},
        {"off_directory": 4096},
        {"off_data": 0},
        {"off_data": (4 << 20) + 4096},
        {"off_data": 6 << 20},
        {"off_data": (4 << 20) + 4096, "pool_bytes": 1 << 30},
        {"off_directory": 2146304 + 64},
        {"off_generations": 2113536 + 4},
        {"coherence": 2},
        {"header_bytes": 8192},
        {"extent_count": 0xFFFFFFFF, "pool_bytes": (1 << 63)},
    ],
    ids=str,
)
def test_contradictions_are_damage(fields: dict[str, int]) -> None:
    geometry = plan(64 << 20)
    assert Geometry.read(forged(geometry)) == geometry
    with pytest.raises(PoolDamagedError, match="--format"):
        Geometry.read(forged(geometry, **fields))


def test_geometry_is_a_value() -> None:
    geometry = plan(64 << 20)
    with pytest.raises(dataclasses.FrozenInstanceError):
        geometry.align = 1  # type: ignore[misc]
