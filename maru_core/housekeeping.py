"""What a store does in the background: page tables filled before a copy needs them, an embedded server brought back.

One thread for each store. Nothing here is needed for a right answer; a chore that fails is left.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from maru_core.pool import PoolMemory

log = logging.getLogger("maru.store")


class Housekeeping:
    """Args:
    look_after: called about once a second while there is nothing else to do; must not raise.
    """

    def __init__(self, look_after: Callable[[], None]) -> None:
        self._look_after = look_after
        self._chores: queue.SimpleQueue[tuple[PoolMemory, int] | None] = queue.SimpleQueue()
        # Extents asked for, by pool. Added to by any thread: at worst two of them ask for one twice, which is harmless.
        self._populated: dict[bytes, set[int]] = {}
        self._thread = threading.Thread(target=self._run, name="maru-keeper", daemon=True)
        self._thread.start()

    def populate(self, memory: PoolMemory, slots: npt.NDArray[np.uint32]) -> None:
        """Have the page tables of extents that come into use filled in the background, not by the copy's page faults."""
        count, geometry = len(slots), memory.geometry
        each, known = geometry.slots_per_extent, self._populated.setdefault(geometry.pool_uuid, set())
        # Batches lie in few extents, next to each other: some of the slots tell which. What is missed is met again.
        for at in (0, count // 3, 2 * count // 3, count - 1) if count > 1 else range(count):
            extent = slots.item(at) // each
            if extent not in known:
                known.add(extent)
                self._chores.put((memory, extent))

    def stop(self, timeout_s: float) -> None:
        """End the thread, within ``timeout_s`` seconds."""
        self._chores.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            try:
                chore = self._chores.get(timeout=1.0)
            except queue.Empty:
                self._look_after()
                continue
            if chore is None:
                return
            memory, extent = chore
            try:
                memory.populate(extent)
            except Exception:
                log.debug("extent %d was not populated", extent, exc_info=True)
