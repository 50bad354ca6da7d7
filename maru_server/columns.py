"""Columns over the rows of a prefix tree: how they grow, and those that one component has."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from maru_server.index import Rows


class ComponentTable:
    """The objects of one component: columns over the rows of its tree.

    ``slots[shard]`` holds slot + 1, so that zeroed memory means "nothing there" and untouched memory costs nothing.
    """

    __slots__ = ("have", "held", "length", "slots", "world")

    def __init__(self, capacity: int) -> None:
        self.world = np.zeros(capacity, np.uint16)  # shards that make the page whole
        self.length = np.zeros(capacity, np.uint64)  # bytes of each object
        self.held = np.zeros(capacity, np.uint16)  # slots reserved or committed
        self.have = np.zeros(capacity, np.uint16)  # slots committed
        self.slots: dict[int, npt.NDArray[np.uint32]] = {}

    def column(self, shard: int) -> npt.NDArray[np.uint32]:
        """Slot + 1 of each row for one shard."""
        column = self.slots.get(shard)
        if column is None:
            column = self.slots[shard] = np.zeros(len(self.world), np.uint32)
        return column

    def whole(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Pages of which every shard is committed."""
        have = self.have[rows]
        whole: npt.NDArray[np.bool_] = have == self.world[rows]
        whole &= have > 0
        return whole

    def grow(self, capacity: int) -> None:
        for name in ("world", "length", "held", "have"):
            setattr(self, name, grown(getattr(self, name), capacity))
        self.slots = {shard: grown(column, capacity) for shard, column in self.slots.items()}


def grown(column: npt.NDArray[Any], capacity: int) -> npt.NDArray[Any]:
    """The column with more rows; the new ones are zero, and cost no memory until they are used."""
    larger = np.zeros(capacity, column.dtype)
    used = np.count_nonzero(column)
    if used > len(column) >> 6:
        larger[: len(column)] = column
    elif used:
        # Of a shard that few pages have: what was never touched stays so.
        at = np.flatnonzero(column)
        larger[at] = column[at]
    return larger
