"""Objects that were located and are being loaded in steps by their reader, who moves them itself.

:meth:`maru_core.store.Store.get` copies and validates in one call. Where the copy must be cut up (layer by layer, beside a model that
runs already) the reader takes a :class:`Reading`, copies out of the slots with its mover as it likes, and at last asks :meth:`Reading.finish`
whether what it copied counts. Until then nothing of it does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from maru_core.locations import Locations
from maru_core.mover import Mover
from maru_core.pool import PoolMemory


class Reading:
    """One object per hash, all of one length. Made by :meth:`maru_core.store.Store.read`.

    Attributes:
        hashes: packed page hashes, ``n * 32`` bytes.
        nbytes: bytes of one object.
        slots, offsets, generations: of every object, u32 and u64, shape ``(n,)``.
        mover, memory: of the life of the store in which they were located, valid until :meth:`finish`; memory is None where the
            pool is not mapped.
    """

    def __init__(
        self,
        hashes: bytes,
        nbytes: int,
        where: Locations,
        mover: Mover,
        memory: PoolMemory | None,
        finish: Callable[[bool], bool],
    ) -> None:
        self.hashes = hashes
        self.nbytes = nbytes
        self.slots: npt.NDArray[np.uint32] = where.slots
        self.offsets: npt.NDArray[np.uint64] = where.offsets
        self.generations: npt.NDArray[np.uint64] = where.generations
        self.mover = mover
        self.memory = memory
        self._finish: Callable[[bool], bool] | None = finish
        self._lock = threading.Lock()  # of the line above: finished once, whoever comes first

    def __len__(self) -> int:
        """Objects."""
        return len(self.slots)

    def finish(self, *, landed: bool = True) -> bool:
        """Say that the last copy has ended, and how; True if every object was copied while it was still there.

        Must be called, also for a reading of which nothing was copied (``landed=False``): the store waits for it when it closes.
        Never raises; a second call is False.
        """
        with self._lock:
            finish, self._finish = self._finish, None
        return finish is not None and finish(landed)
