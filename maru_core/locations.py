"""Where objects lie, as the server told it, and the short memory of what it told.

An engine asks how much of a prompt is there and then loads it. The answer to the question has the locations, so the load
sends no message. Nothing here decides what is right: a location is a claim, and the generations decide after the copy.
"""

from __future__ import annotations

import collections
import time
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from maru_core.errors import MaruError
from maru_core.protocol import HASH_BYTES, Located

U64Array = npt.NDArray[np.uint64]

#: How long the locations of a match are worth keeping for the get that follows it, seconds.
RECENT_S: Final = 10.0
RECENT_MATCHES: Final = 64


class Locations(msgspec.Struct, frozen=True):
    """Arrays of one element per hash; the slot is ``NO_SLOT`` where a page is not present."""

    slots: npt.NDArray[np.uint32]
    offsets: U64Array
    generations: U64Array
    lengths: U64Array
    checksums: U64Array

    @staticmethod
    def of(located: Located, count: int, column: int = 0) -> Locations:
        """Column ``column`` (component) of a reply with ``count`` elements per component.

        Raises:
            MaruError: the reply has not as many elements as were asked for.
        """

        def take(data: bytes, dtype: str) -> npt.NDArray[Any]:
            array = np.frombuffer(data, dtype)
            if (count and len(array) % count) or len(array) < (column + 1) * count:
                raise MaruError(f"the server located {len(array)} objects where {count} a component were asked for")
            return array[column * count : (column + 1) * count]

        return Locations(
            slots=take(located.slots, "<u4"),
            offsets=take(located.offsets, "<u8"),
            generations=take(located.generations, "<u8"),
            lengths=take(located.lengths, "<u8"),
            checksums=take(located.checksums, "<u8"),
        )

    def __getitem__(self, chosen: slice | npt.NDArray[np.intp]) -> Locations:
        return Locations(
            slots=self.slots[chosen],
            offsets=self.offsets[chosen],
            generations=self.generations[chosen],
            lengths=self.lengths[chosen],
            checksums=self.checksums[chosen],
        )

    @staticmethod
    def joined(parts: list[Locations]) -> Locations:
        if len(parts) == 1:
            return parts[0]
        return Locations(
            slots=np.concatenate([part.slots for part in parts]),
            offsets=np.concatenate([part.offsets for part in parts]),
            generations=np.concatenate([part.generations for part in parts]),
            lengths=np.concatenate([part.lengths for part in parts]),
            checksums=np.concatenate([part.checksums for part in parts]),
        )


class _Recent(msgspec.Struct, frozen=True):
    at: float
    epoch: int
    component: str
    shard: int
    hashes: bytes
    locations: Locations


class RecentMatches:
    """The last matches of one store. Safe from several threads: the deque's append and copy are atomic."""

    def __init__(self) -> None:
        self._recent: collections.deque[_Recent] = collections.deque(maxlen=RECENT_MATCHES)

    def remember(self, epoch: int, component: str, shard: int, hashes: bytes, locations: Locations) -> None:
        self._recent.append(_Recent(time.monotonic(), epoch, component, shard, hashes, locations))

    def recall(self, epoch: int, component: str, shard: int, hashes: bytes) -> Locations | None:
        """Locations of ``hashes``, if one recent match of the same session epoch covers them all."""
        oldest = time.monotonic() - RECENT_S
        for recent in reversed(tuple(self._recent)):
            if recent.at < oldest:
                break
            if recent.component != component or recent.shard != shard or recent.epoch != epoch:
                continue
            at = recent.hashes.find(hashes)
            if at >= 0 and at % HASH_BYTES == 0:
                return recent.locations[at // HASH_BYTES : (at + len(hashes)) // HASH_BYTES]
        return None

    def forget(self) -> None:
        self._recent.clear()
