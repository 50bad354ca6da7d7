"""Are the generations still those that were told? Asked of the server, where the pool's memory cannot be read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from maru_core.protocol import MAX_BATCH


class MessageView:
    """As :class:`maru_core.pool.PoolView`, by one message for each 4,096 slots.

    Args:
        ask: packed slots and generations to one byte for each slot.
    """

    def __init__(self, ask: Callable[[bytes, bytes], bytes]) -> None:
        self._ask = ask

    def valid(self, slots: npt.NDArray[np.uint32], generations: npt.NDArray[np.uint64]) -> bool:
        """Whether every slot still has its generation. Shapes ``(n,)``, equal.

        Raises:
            MaruError: the server did not say.
        """
        return bool(self.valid_each(slots, generations).all())

    def valid_each(self, slots: npt.NDArray[np.uint32], generations: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Which slots still have their generation, shape ``(n,)``; errors as in :meth:`valid`."""
        valid = np.zeros(len(slots), bool)
        for start in range(0, len(slots), MAX_BATCH):
            part = slice(start, start + MAX_BATCH)
            told = self._ask(slots[part].astype("<u4").tobytes(), generations[part].astype("<u8").tobytes())
            valid[part] = np.frombuffer(told, np.uint8) == 1
        return valid
