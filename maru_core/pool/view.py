"""Validation of what was copied out of a mapped pool: are the generations still those that the server told?"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from maru_core.pool.memory import PoolMemory

try:
    from maru_core import _native
except ImportError:  # installed without a compiler
    _native = None  # type: ignore[assignment]


class PoolView:
    """Compares generations with the pool's, without a message.

    Must be asked after the copy: :meth:`maru_core.mover.Mover.load` ends with the fence that keeps the reads of the
    copy before the reads here, and where caches do not agree between hosts this drops the lines of the generations after that
    fence and before it reads them: what was cached before the copy would prove nothing. Slot ids that the pool does not have are not valid, and not an error: they come from a
    message. The memory stays mapped as long as this object lives.

    Args:
        native: False for numpy even where the compiled loop is there.
    """

    def __init__(self, memory: PoolMemory, *, native: bool = True) -> None:
        self._generations = memory.generations
        self._coherence = memory.coherence
        self._native = native and _native is not None

    def valid(self, slots: npt.NDArray[np.uint32], generations: npt.NDArray[np.uint64]) -> bool:
        """Whether every slot still has its generation. Shapes ``(n,)``, equal.

        Raises:
            ValueError: shapes or dtypes are not these.
        """
        _agree(slots, generations)
        if self._coherence.software:
            self._drop(slots)
        if self._native:
            contiguous = np.ascontiguousarray
            return bool(_native.compare(self._generations, contiguous(slots), contiguous(generations)))
        return bool(self._compare(slots, generations).all())

    def valid_each(self, slots: npt.NDArray[np.uint32], generations: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Which slots still have their generation, shape ``(n,)``; arguments and errors as in :meth:`valid`."""
        _agree(slots, generations)
        if self._coherence.software:
            self._drop(slots)
        if not self._native:
            return self._compare(slots, generations)
        valid = np.empty(slots.shape, np.bool_)
        if not (slots.flags.c_contiguous and generations.flags.c_contiguous):
            slots, generations = np.ascontiguousarray(slots), np.ascontiguousarray(generations)
        _native.compare(self._generations, slots, generations, valid)
        return valid

    def _drop(self, slots: npt.NDArray[np.uint32]) -> None:
        """Have these slots' generations read from memory."""
        slots = slots[slots < len(self._generations)]
        addresses = slots.astype(np.uint64)
        addresses *= np.uint64(8)
        addresses += np.uint64(self._generations.ctypes.data)
        self._coherence.invalidate_many(addresses, 8)

    def _compare(self, slots: npt.NDArray[np.uint32], generations: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        known = slots < len(self._generations)
        if known.all():
            return np.equal(self._generations[slots], generations)
        valid = np.zeros(slots.shape, np.bool_)
        valid[known] = self._generations[slots[known]] == generations[known]
        return valid


def _agree(slots: npt.NDArray[np.uint32], generations: npt.NDArray[np.uint64]) -> None:
    if slots.ndim != 1 or slots.shape != generations.shape:
        raise ValueError(f"{slots.shape} slots and {generations.shape} generations: give one generation per slot")
    if slots.dtype != np.uint32 or generations.dtype != np.uint64:
        raise ValueError(f"slots are {slots.dtype}, generations {generations.dtype}: give uint32 and uint64")
