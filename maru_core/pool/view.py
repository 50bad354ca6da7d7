"""Validation of what was copied out of a mapped pool: are the generations still those that the server told?"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from maru_core.pool.memory import PoolMemory


class PoolView:
    """Compares generations with the pool's, without a message.

    Must be asked after the copy: :meth:`maru_core.mover.Mover.load` ends with the fence that keeps the reads of the
    copy before the reads here. Slot ids that the pool does not have are invalid, not an error: they come from a message.
    """

    def __init__(self, memory: PoolMemory) -> None:
        self._generations = memory.generations

    def valid(self, slots: npt.NDArray[np.uint32], generations: npt.NDArray[np.uint64]) -> bool:
        """Whether every slot still has its generation. Shapes ``(n,)``, equal."""
        return bool(self.valid_each(slots, generations).all())

    def valid_each(self, slots: npt.NDArray[np.uint32], generations: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Which slots still have their generation, shape ``(n,)``."""
        if slots.shape != generations.shape:
            raise ValueError(f"{slots.shape} slots and {generations.shape} generations: give one generation per slot")
        known = slots < len(self._generations)
        if known.all():
            return np.equal(self._generations[slots], generations)
        valid = np.zeros(slots.shape, np.bool_)
        valid[known] = self._generations[slots[known]] == generations[known]
        return valid
