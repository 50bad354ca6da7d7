"""Movers copy whole batches of objects between an engine's buffers and a pool.

:class:`Mover` is the interface, :class:`CxlMover` the one for pools that this process maps. A mover decides nothing:
it is told where, checks that it is inside the pool, and copies. Reservations, publishing and validation are the
caller's (:mod:`maru_core.store`).
"""

from __future__ import annotations

import ctypes
import os
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, Self

import numpy as np
import numpy.typing as npt

from maru_core.checksum import object_checksum
from maru_core.errors import ConfigError, PoolError
from maru_core.pool.memory import PoolMemory

try:
    from maru_core import _native
except ImportError:  # installed without a compiler
    _native = None  # type: ignore[assignment]

U64 = npt.NDArray[np.uint64]

#: Whether the compiled copy loop is there; without it the results are the same, with a call per fragment.
native_available: Final = _native is not None

#: Batches of fewer bytes are copied by the calling thread alone: a second thread starts too late to help. Measured on 2
#: cores, 64 KiB fragments, buffers not in cache, GB/s of store and load, one thread against two: 4 MiB 9.0 6.8 against
#: 8.3 6.8; 8 MiB 9.1 7.2 against 8.6 8.1; 16 MiB 9.3 8.0 against 11.0 11.5; 64 MiB 9.5 9.1 against 16.7 11.5.
THREADED_BATCH_BYTES: Final = 16 << 20
#: A few cores fill the memory channels; the rest belong to the engine.
DEFAULT_THREADS_MAX: Final = 4


class Buffers(Protocol):
    """Where ``n`` objects of one size lie in an engine's memory, in terms that a mover understands."""

    @property
    def nbytes(self) -> int:
        """Bytes of one object."""

    def __len__(self) -> int:
        """Objects."""

    def select(self, which: slice | npt.NDArray[Any]) -> Self:
        """Some of the objects: a slice, a bool mask of shape ``(n,)``, or indices."""


@dataclass(frozen=True, eq=False)
class Fragments:
    """Where ``n`` objects lie in an engine's memory: each is the concatenation of its ``f`` fragments, in order.

    Attributes:
        addresses: u64, shape ``(n, f)``.
        sizes: bytes of each fragment, u64, shape ``(f,)``; the same for every object.
        nbytes: bytes of one object.
    """

    addresses: U64
    sizes: U64
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        addresses, sizes = self.addresses, self.sizes
        if addresses.dtype != np.uint64 or sizes.dtype != np.uint64:
            raise ValueError(f"addresses are {addresses.dtype} and sizes {sizes.dtype}: make both uint64")
        if addresses.ndim != 2 or sizes.ndim != 1 or addresses.shape[1] != len(sizes) or not len(sizes):
            raise ValueError(
                f"addresses of shape {addresses.shape} and sizes of shape {sizes.shape}: give (objects, fragments) and (fragments,)"
            )
        # Not uint64's sum, which wraps; and made for every batch: without numpy, which is slow to wake up.
        each = sizes.tolist()
        nbytes = sum(each)
        if 0 in each or nbytes >= 1 << 63:
            raise ValueError(f"fragment sizes {each}: each must be positive, and their sum below 2**63")
        if not addresses.flags.c_contiguous:
            object.__setattr__(self, "addresses", np.ascontiguousarray(addresses))
        if not sizes.flags.c_contiguous:
            object.__setattr__(self, "sizes", np.ascontiguousarray(sizes))
        object.__setattr__(self, "nbytes", nbytes)

    def __len__(self) -> int:
        """Objects."""
        return len(self.addresses)

    def select(self, which: slice | npt.NDArray[Any]) -> Fragments:
        """Some of the objects: a slice, a bool mask of shape ``(n,)``, or indices."""
        return Fragments(self.addresses[which], self.sizes)


class Mover(ABC):
    """Moves whole batches. Safe to use from several threads at once; the GIL is not held while bytes move.

    Every mover takes :class:`Fragments`; one that reaches other memory than the CPU's has :class:`Buffers` of its own."""

    @abstractmethod
    def store(self, offsets: U64, buffers: Any) -> None:
        """Copy objects from the engine into the pool.

        When it returns, whoever learns of the objects afterwards sees all their bytes.

        Args:
            offsets: of each object's slot in the pool, bytes, u64, shape ``(n,)``.
            buffers: where the ``n`` objects are in this process; must stay so until the call returns.
        Raises:
            PoolError: an object would not lie inside an extent; nothing was copied.
            ValueError: shapes do not agree; nothing was copied.
        """

    @abstractmethod
    def load(self, offsets: U64, buffers: Any) -> None:
        """Copy objects from the pool into the engine; arguments and errors as in :meth:`store`.

        When it returns, a look at the generations is a look after the copy. The bytes count only if that look is good.
        """

    @abstractmethod
    def checksums(self, offsets: U64, buffers: Any) -> U64:
        """The checksum of every object that was just stored or loaded, u64, shape ``(n,)``."""

    def close(self) -> None:  # noqa: B027  # most hold nothing
        """Give back what the mover holds besides memory of its own; nobody uses it any more."""


def slot_checksums(memory: PoolMemory, offsets: U64, nbytes: int) -> U64:
    """The checksum of the ``nbytes`` at each offset of a mapped pool, u64, shape ``(n,)``.

    Raises:
        PoolError: an offset is not in an extent.
    """
    sizes = np.array([nbytes], np.uint64)
    rows = (np.array([memory.address_of(offset)], np.uint64) for offset in offsets.tolist())
    return np.fromiter((object_checksum(row, sizes) for row in rows), np.uint64, len(offsets))


class CxlMover(Mover):
    """Copies by the CPU through this process's mapping of the pool.

    Args:
        threads: that copy one large batch together, 1 to 64; None: one per CPU this process may use, at most 4.
        native: False for the pure Python loop even where the compiled one is there.
    Raises:
        ConfigError: threads out of range.
    """

    def __init__(self, memory: PoolMemory, threads: int | None = None, *, native: bool = native_available) -> None:
        if threads is not None and not 1 <= threads <= 64:
            raise ConfigError(f"{threads} copy threads: give 1 to 64, or leave it out")
        self.memory = memory
        self.threads = threads or min(DEFAULT_THREADS_MAX, len(os.sched_getaffinity(0)))
        self._native = native and native_available
        self._fence = threading.Lock()

    def store(self, offsets: U64, buffers: Fragments) -> None:
        self._move(offsets, buffers, to_pool=True)

    def load(self, offsets: U64, buffers: Fragments) -> None:
        self._move(offsets, buffers, to_pool=False)

    def checksums(self, offsets: U64, buffers: Fragments) -> U64:
        """Of the engine's copies."""
        rows = buffers.addresses
        return np.fromiter((object_checksum(row, buffers.sizes) for row in rows), np.uint64, len(rows))

    def _move(self, offsets: U64, fragments: Fragments, *, to_pool: bool) -> None:
        if offsets.dtype != np.uint64 or offsets.shape != (len(fragments),):
            raise ValueError(
                f"offsets are {offsets.dtype} of shape {offsets.shape} for {len(fragments)} objects: give one uint64 each"
            )
        # Held for the copy: the memory stays mapped even if another thread closes the pool meanwhile.
        data = self.memory.data  # noqa: F841
        pool = self.memory.data_address
        coherence = self.memory.coherence
        if not coherence.software:
            self._copy(pool, offsets, fragments, to_pool)
            return
        self._check(offsets, fragments)
        slots = offsets + np.uint64(pool - self.memory.geometry.off_data)
        if not to_pool:
            # What this host's caches hold of the slots may be of objects that were there before.
            coherence.invalidate_many(slots, fragments.nbytes)
            self._copy(pool, offsets, fragments, to_pool)
            return
        try:
            self._copy(pool, offsets, fragments, to_pool)
        finally:
            # After all bytes of all threads, and before anyone is told. Also of a copy that failed: its slots go back, and a
            # line that this host writes back at a time of its own would fall upon the next object in them. Slots begin and
            # end on lines: nobody else writes to these. On lines that were written around the cache it costs 2 ns each.
            coherence.write_back_many(slots, fragments.nbytes)

    def _copy(self, pool: int, offsets: U64, fragments: Fragments, to_pool: bool) -> None:
        """The copy alone. When it returns, all bytes were loaded and stored, also those that were written around the cache."""
        geometry = self.memory.geometry
        if not self._native:
            self._check(offsets, fragments)
            self._move_in_python(pool, offsets, fragments, to_pool)
            return
        threads = self.threads if len(fragments) * fragments.nbytes >= THREADED_BATCH_BYTES else 1
        try:
            _native.move_batch(
                pool,
                geometry.off_data,
                geometry.data_bytes,
                geometry.extent_bytes,
                offsets if offsets.flags.c_contiguous else np.ascontiguousarray(offsets),
                fragments.addresses,
                fragments.sizes,
                threads,
                to_pool,
            )
        except ValueError as error:
            raise self._outside(str(error)) from None

    def _check(self, offsets: U64, fragments: Fragments) -> None:
        """The same checks as in ``_native.c``, before any byte moves."""
        geometry = self.memory.geometry
        nbytes, extent_bytes = fragments.nbytes, geometry.extent_bytes
        relative = offsets - np.uint64(geometry.off_data)  # below the region it wraps to a huge number
        outside = relative >= np.uint64(geometry.data_bytes)
        if nbytes <= extent_bytes:
            outside |= relative % np.uint64(extent_bytes) > np.uint64(extent_bytes - nbytes)
        else:
            outside[:] = True
        if outside.any():
            index = int(outside.argmax())
            raise self._outside(f"object {index}: {nbytes} bytes at offset {offsets[index]} do not lie in an extent")
        if not fragments.addresses.all():
            index = int((fragments.addresses == 0).any(axis=1).argmax())
            raise self._outside(f"object {index} has a fragment at address 0")

    def _outside(self, what: str) -> PoolError:
        geometry = self.memory.geometry
        return PoolError(
            f"{self.memory.uri}: {what} ({geometry.extent_count} extents of {geometry.extent_bytes} bytes from "
            f"{geometry.off_data} on): nothing was copied; locations must come from this pool's server"
        )

    def _move_in_python(self, pool: int, offsets: U64, fragments: Fragments, to_pool: bool) -> None:
        sizes: list[int] = fragments.sizes.tolist()
        base = pool - self.memory.geometry.off_data
        for offset, addresses in zip(offsets.tolist(), fragments.addresses.tolist(), strict=True):
            slot = base + offset
            for address, size in zip(addresses, sizes, strict=True):
                if to_pool:
                    ctypes.memmove(slot, address, size)
                else:
                    ctypes.memmove(address, slot, size)
                slot += size
        # A fence in both directions without C: the release of a lock keeps what came before it before it, its
        # acquisition what comes after after it, and the two are not reordered with each other.
        with self._fence:
            pass
        with self._fence:
            pass
