"""What a store's housekeeper is told of, it does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from maru_core.housekeeping import Housekeeping
from support import await_condition


def test_all_extents_that_come_into_use_are_populated() -> None:
    class Memory:
        geometry = SimpleNamespace(pool_uuid=b"pool", slots_per_extent=64)
        asked: ClassVar[list[int]] = []

        def populate(self, extent: int) -> None:
            self.asked.append(extent)

    house = Housekeeping(lambda: None)
    memory: Any = Memory()
    try:
        house.populate(memory, np.arange(4, dtype=np.uint32))
        for _ in range(3):
            # Begins and ends where the last one was.
            house.populate(memory, np.array([60, 61, 64, 65, 130, 131, 62, 63], np.uint32))
        house.populate(memory, np.array([200], np.uint32))
        house.populate(memory, np.empty(0, np.uint32))
        await_condition(lambda: len(memory.asked) >= 4, "extents are populated")
    finally:
        house.stop(5.0)
    assert memory.asked == [0, 1, 2, 3]
