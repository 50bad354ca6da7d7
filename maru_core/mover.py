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
from typing import Any, Final

import numpy as np
import numpy.typing as npt

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
        # Not uint64's sum, which wraps.
        nbytes = sum(sizes.tolist())
        if not sizes.all() or nbytes >= 1 << 63:
            raise ValueError(f"fragment sizes {sizes.tolist()}: each must be positive, and their sum below 2**63")
        object.__setattr__(self, "addresses", np.ascontiguousarray(addresses))
        object.__setattr__(self, "sizes", np.ascontiguousarray(sizes))
        object.__setattr__(self, "nbytes", nbytes)

    def __len__(self) -> int:
        """Objects."""
        return len(self.addresses)

    def select(self, which: slice | npt.NDArray[Any]) -> Fragments:
        """Some of the objects: a slice, a bool mask of shape ``(n,)``, or indices."""
        return Fragments(self.addresses[which], self.sizes)


class Mover(ABC):
    """Moves whole batches. Safe to use from several threads at once; the GIL is not held while bytes move."""

    @abstractmethod
    def store(self, offsets: U64, fragments: Fragments) -> None:
        """Copy objects from the engine into the pool.

        When it returns, whoever learns of the objects afterwards sees all their bytes.

        Args:
            offsets: of each object's slot in the pool, bytes, u64, shape ``(n,)``.
            fragments: where the ``n`` objects are in this process; must stay so until the call returns.
        Raises:
            PoolError: an object would not lie inside an extent; nothing was copied.
            ValueError: shapes do not agree; nothing was copied.
        """

    @abstractmethod
    def load(self, offsets: U64, fragments: Fragments) -> None:
        """Copy objects from the pool into the engine; arguments and errors as in :meth:`store`.

        When it returns, a look at the generations is a look after the copy. The bytes count only if that look is good.
        """


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

    def store(self, offsets: U64, fragments: Fragments) -> None:
        self._move(offsets, fragments, to_pool=True)

    def load(self, offsets: U64, fragments: Fragments) -> None:
        self._move(offsets, fragments, to_pool=False)

    def _move(self, offsets: U64, fragments: Fragments, *, to_pool: bool) -> None:
        if offsets.dtype != np.uint64 or offsets.shape != (len(fragments),):
            raise ValueError(
                f"offsets are {offsets.dtype} of shape {offsets.shape} for {len(fragments)} objects: give one uint64 each"
            )
        geometry = self.memory.geometry
        # Held for the copy: the memory stays mapped even if another thread closes the pool meanwhile.
        data = self.memory.data
        pool = int(data.ctypes.data)
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
                np.ascontiguousarray(offsets),
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
