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
        # Extents asked for. Added to by any thread: at worst two of them ask for one twice, which is harmless.
        self._populated: set[tuple[bytes, int]] = set()
        # Of the last batch: memory and extent, written and read as one.
        self._latest: tuple[PoolMemory | None, int] = None, 0
        self._thread = threading.Thread(target=self._run, name="maru-keeper", daemon=True)
        self._thread.start()

    def populate(self, memory: PoolMemory, slots: npt.NDArray[np.uint32]) -> None:
        """Have the page tables of extents that come into use filled in the background, not by the copy's page faults."""
        if not len(slots):
            return
        geometry = memory.geometry
        each, latest = geometry.slots_per_extent, self._latest
        extent = slots.item(0) // each
        if latest[0] is memory and latest[1] == extent == slots.item(-1) // each:
            return  # as the last time
        self._latest = memory, extent
        # Batches lie in few extents, next to each other: some of the slots tell which. What is missed is met again.
        for at in {0, len(slots) // 3, 2 * len(slots) // 3, len(slots) - 1}:
            key = (geometry.pool_uuid, slots.item(at) // each)
            if key not in self._populated:
                self._populated.add(key)
                self._chores.put((memory, key[1]))

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
