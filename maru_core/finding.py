"""What a lookup found, put together from the answers to its messages.

A chain that is longer than one message may be is asked for in pieces. They overlap by the longest window that a rule
asks for, and begin where the blocks of all rules begin, so that every rule means in a piece what it means in the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from maru_core.protocol import HASH_BYTES, MAX_BATCH, Located, MissReason, Rule, Want

_REASONS: Final = {int(reason): reason for reason in MissReason}
#: Of this the ends of one message's pages are the head: a lookup has no time for numpy to wake up.
_EVERY_END: Final = np.arange(1, MAX_BATCH + 1, dtype=np.uint32)
_EVERY_END.flags.writeable = False


class Found(msgspec.Struct, frozen=True):
    """What is there of a chain.

    ``pages`` is the longest prefix at which the rules of all components are met; :attr:`ends` are all such lengths. Ranks and pipeline stages differ: what may be loaded together is a length that all of them have.
    ``covered`` has the pages that each component reaches by its own rule alone. ``why`` is the reason for the first page that
    is missing, None where the server did not answer. ``held_s`` is for how long all of it is held, 0 if it is not."""

    pages: int
    some_ends: npt.NDArray[np.uint32] | None  # None: every length up to ``pages``
    covered: dict[str, int]
    why: MissReason | None
    held_s: float

    @property
    def ends(self) -> npt.NDArray[np.uint32]:
        """All lengths, from 1 on, at which the rules of all components are met: ascending, u32."""
        return _EVERY_END[: self.pages] if self.some_ends is None else self.some_ends

    @staticmethod
    def of(components: Sequence[str], located: Located) -> Found:
        """The answer to one message that asked for a whole chain, and for every page of each component."""
        covered = dict(zip(components, located.covered, strict=True))
        return Found(located.pages, None, covered, _REASONS[located.why], located.held_s)

    @staticmethod
    def nothing(wants: Mapping[str, Want]) -> Found:
        """What is known without an answer."""
        return Found(0, None, dict.fromkeys(wants, 0), None, 0.0)


def pieces(count: int, wants: Mapping[str, Want]) -> Iterator[tuple[int, int]]:
    """Spans of at most ``MAX_BATCH`` pages that together ask for all ``count``.

    Where windows or blocks are too long for that there is only the first: what lies beyond is not found."""
    window = max((want.pages for want in wants.values() if want.rule == Rule.TRAILING_PAGES), default=0)
    block = math.lcm(*(want.pages for want in wants.values() if want.rule == Rule.BLOCK_GROUPS))
    start = 0
    while True:
        stop = min(start + MAX_BATCH, count)
        yield start, stop
        if stop == count or window > MAX_BATCH // 2 or block > MAX_BATCH // 2:
            return
        start = (stop - window) // block * block


@dataclass
class Finding:
    """Takes in the answers for the pieces of one chain, in order."""

    wants: Mapping[str, Want]
    pages: int = 0
    why: MissReason = MissReason.NONE
    held_s: float = math.inf
    seen: int = 0  # pages from the start that were asked for
    covered: dict[str, int] = field(default_factory=dict)
    _ends: list[npt.NDArray[np.uint32]] = field(default_factory=list)

    def take(self, start: int, stop: int, located: Located) -> bool:
        """The answer for pages ``start`` to ``stop``. True if the next piece can have more."""
        if any(want.rule for want in self.wants.values()):
            ends = np.frombuffer(located.ends, "<u4").astype(np.uint32)
        else:
            ends = np.arange(1, located.pages + 1, dtype=np.uint32)
        ends = ends + np.uint32(start)
        # What the piece before has seen it has seen with its windows whole.
        ends = ends[ends > self.seen]
        if len(ends):
            self._ends.append(ends)
            self.pages = int(ends[-1])
        more, anchored = True, located.pages == stop - start
        for (component, want), reached in zip(self.wants.items(), located.covered, strict=True):
            before = self.covered.get(component, 0)
            after = start + reached
            if (after > self.seen) if want.rule == Rule.TRAILING_PAGES else (before >= start):
                self.covered[component] = max(before, after)
            if want.rule == Rule.ALL_PAGES:
                anchored = True
                more &= after == stop
        self.why = _REASONS[located.why]
        self.held_s = min(self.held_s, located.held_s)
        self.seen = stop
        return more and anchored

    def found(self) -> Found:
        ends = np.concatenate(self._ends) if self._ends else np.empty(0, np.uint32)
        covered = {component: self.covered.get(component, 0) for component in self.wants}
        return Found(self.pages, ends, covered, self.why, self.held_s if self.seen else 0.0)


def part(hashes: bytes, start: int, stop: int) -> bytes:
    """Pages ``start`` to ``stop`` of packed hashes."""
    return hashes[start * HASH_BYTES : stop * HASH_BYTES]
