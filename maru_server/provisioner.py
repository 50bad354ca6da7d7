"""Memory for the pool's extents, a thread that asks for it: zeroing one may take tens of milliseconds.

How many should be ready is the state's to say (:mod:`maru_server.growth`). Where there is no memory it is asked for again
after a while; a server serves with what it has.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from maru_core.errors import PoolError
from maru_core.pool import PoolMemory

log = logging.getLogger("maru.server")

#: Pause before memory that could not be had is asked for again, seconds.
RETRY_S: Final = 5.0


class Provisioner:
    """A thread that gives extents their memory, one after another, ahead of need."""

    def __init__(self, memory: PoolMemory, report: Callable[[], None]) -> None:
        """
        Args:
            report: told in this thread when another extent is ready.
        """
        self._memory = memory
        self._report = report
        self._condition = threading.Condition()
        self._wanted = 0
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._refused = -1
        #: Extents ``[0, ready)`` have their memory.
        self.ready = 0

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="maru-provision", daemon=True)
        self._thread.start()

    def want(self, count: int) -> None:
        """Extents ``[0, count)`` should be ready."""
        if count > self._wanted:
            with self._condition:
                self._wanted = min(count, self._memory.geometry.extent_count)
                self._condition.notify()

    def provision(self, extent: int) -> bool:
        """Give the next extent its memory; False if there is none to be had."""
        try:
            done = self._memory.provision(extent)
            why = "no memory is left"
        except (PoolError, OSError) as error:
            done = False
            why = str(error)
        if done:
            self.ready = extent + 1
        elif self._refused != extent:
            # Asked for again every few seconds, and said once.
            self._refused = extent
            log.warning(
                "the pool stays at %d of %d extents until there is memory for more: %s; free some, or make the pool smaller",
                extent,
                self._memory.geometry.extent_count,
                why,
            )
        return done

    def stop(self) -> None:
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._stopping and self.ready >= self._wanted:
                    self._condition.wait()
                if self._stopping:
                    return
            if self.provision(self.ready):
                self._report()
                continue
            with self._condition:
                if not self._stopping:
                    self._condition.wait(RETRY_S)
