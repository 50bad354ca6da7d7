"""The memory of one pool as the service looks after it: extents get theirs, and a dead writer's lines leave this host's caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from maru_core.pool import PoolMemory
from maru_server.provisioner import Provisioner

#: Extents that are ready before the first client is served.
FIRST_EXTENTS: Final = 2


class Keeper(Protocol):
    """What knows of a pool's extents and slots: a :class:`maru_server.state.ServerState`, or a
    :class:`maru_server.pools.Member`."""

    def extents_ready(self, count: int, now: float) -> None: ...

    def wanted_extents(self, now: float) -> int: ...

    def reserved_slots(self, session: int) -> list[tuple[npt.NDArray[np.uint64], int]]: ...


class Media:
    """Of one pool.

    Args:
        report: called in the provisioner's thread when another extent is ready.
    """

    def __init__(self, keeper: Keeper, memory: PoolMemory, report: Callable[[], None]) -> None:
        self._keeper = keeper
        self.memory = memory
        self._provisioner = Provisioner(memory, report)
        self._told = 0

    def first_extents(self, now: float) -> None:
        """Have those ready that are there from the start."""
        for extent in range(min(FIRST_EXTENTS, self.memory.geometry.extent_count)):
            self._provisioner.provision(extent)
        self.tell_ready(now)

    def start(self) -> None:
        self._provisioner.start()

    def stop(self) -> None:
        self._provisioner.stop()

    def want(self, now: float) -> None:
        """Ask for what should be ready."""
        self._provisioner.want(self._keeper.wanted_extents(now))

    def tell_ready(self, now: float) -> None:
        """Say what is ready, where it is more than before."""
        ready = self._provisioner.ready
        if ready > self._told:
            self._told = ready
            self._keeper.extents_ready(ready, now)
            self.want(now)

    def write_back_for(self, session: int) -> None:
        """Where hosts' caches do not agree: a process of this host that has died may have left lines of slots that it was writing
        in the caches here, to be written back at any time, upon what another host has stored there meanwhile."""
        coherence = self.memory.coherence
        if coherence.software:
            shift = self.memory.data_address - self.memory.geometry.off_data
            for offsets, nbytes in self._keeper.reserved_slots(session):
                coherence.invalidate_many(offsets + np.uint64(shift), nbytes)
