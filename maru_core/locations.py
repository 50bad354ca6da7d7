"""Where objects lie, as the server told it, and the short memory of what it told.

An engine asks how much of a prompt is there and then loads it. The answer to the question has the locations, so the load
sends no message. Nothing here decides what is right: a location is a claim, and the generations decide after the copy.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from maru_core.errors import MaruError
from maru_core.protocol import HASH_BYTES, NO_SLOT, POOL_SHIFT, Located, Match, MissReason, Reply, decode_reply

try:
    from maru_core import _reply
except ImportError:  # built without a compiler: every reply is unpacked
    _reply = None  # type: ignore[assignment]

U64Array = npt.NDArray[np.uint64]

#: How long the locations of a match are worth keeping for the get that follows it, seconds.
RECENT_S: Final = 10.0
RECENT_MATCHES: Final = 64


#: NO_SLOT, packed.
_ABSENT: Final = NO_SLOT.to_bytes(4, "little")
_REASONS: Final = frozenset(int(reason) for reason in MissReason)


def in_one_pool(slots: bytes, pools: int) -> bool:
    """Whether all slots of one answer (u32, NO_SLOT where there is none) are of one of the server's pools, as they must be. ``pools`` is
    below 2 where it has one, and then numbers are the pool's own."""
    if pools < 2:
        return True
    numbers = np.frombuffer(slots, "<u4")
    numbers = numbers[numbers != NO_SLOT] >> np.uint32(POOL_SHIFT)
    return not len(numbers) or bool(numbers[0] < pools and (numbers == numbers[0]).all())


def answers(request: Match, reply: Located, pools: int = 0) -> bool:
    """Whether a reply can be the answer to this request: what does not fit is not looked at any further.

    Args:
        pools: how many the server has named, see :func:`in_one_pool`.
    """
    asked, components = len(request.hashes) // HASH_BYTES, len(request.components)
    if not (request.rules or request.sparse or request.hold is not None or pools > 1) and components == 1:
        # What is asked most often, in one look.
        count, covered = reply.pages, reply.covered
        return (
            0 <= count <= asked
            and reply.why in _REASONS
            and not reply.held_s
            and not reply.ends
            and len(covered) == 1
            and 0 <= covered[0] <= asked
            and len(reply.slots) == 4 * count
            and len(reply.offsets) == len(reply.generations) == len(reply.lengths) == len(reply.checksums) == 8 * count
        )
    rules = request.rules and any(want.rule for want in request.rules)
    if not 0 <= reply.pages <= asked or reply.why not in _REASONS or not 0 <= reply.held_s < float("inf"):
        return False
    if reply.held_s and request.hold is None:
        return False
    count = (asked if request.sparse else reply.pages) * components
    if len(reply.slots) != 4 * count or not (
        len(reply.offsets) == len(reply.generations) == len(reply.lengths) == len(reply.checksums) == 8 * count
    ):
        return False
    if not in_one_pool(reply.slots, pools):
        return False
    if request.sparse:
        return not reply.ends and not reply.covered
    covered = reply.covered
    if len(covered) != components or not covered or min(covered) < 0 or max(covered) > asked:
        return False
    if not rules:
        return not reply.ends
    if len(reply.ends) % 4:
        return False
    ends = np.frombuffer(reply.ends, "<u4")
    if not len(ends):
        return reply.pages == 0
    return bool(ends[0] > 0 and ends[-1] == reply.pages and (ends[1:] > ends[:-1]).all())


class Outline(msgspec.Struct, frozen=True, gc=False):
    """What the answer to a match says of how much is there; where that lies is not unpacked yet."""

    rid: int
    incarnation: int
    pages: int
    why: int
    data: bytes


def read_outline(request: Match, data: bytes, pools: int = 0) -> Reply | Outline:
    """The outline of a packed reply if it can be the answer to this request, which is for a prefix in one component and has no rules or
    hold; else the reply itself.

    Raises:
        msgspec.MsgspecError: it is no reply.
    """
    asked = len(request.hashes) // HASH_BYTES
    if _reply is not None and pools < 2 and (seen := _reply.outline(data, asked)) is not None and seen[3] in _REASONS:
        return Outline(*seen, data)
    reply = decode_reply(data)
    if type(reply) is Located and answers(request, reply, pools):
        return Outline(reply.rid, reply.incarnation, reply.pages, reply.why, data)
    return reply


class Locations(msgspec.Struct, frozen=True):
    """Arrays of one element per hash; the slot is ``NO_SLOT`` where a page is not present."""

    slots: npt.NDArray[np.uint32]
    offsets: U64Array
    generations: U64Array
    lengths: U64Array
    checksums: U64Array

    @staticmethod
    def of(located: Located, count: int, column: int = 0, start: int = 0, stop: int | None = None) -> Locations:
        """Elements ``start`` to ``stop`` (None: all) of column ``column`` (component) of a reply with ``count`` elements per component.

        Raises:
            MaruError: the reply has not as many elements as were asked for.
        """
        answered = len(located.slots) // 4
        if (count and answered % count) or answered < (column + 1) * count:
            raise MaruError(f"the server located {answered} objects where {count} a component were asked for")
        first, many = column * count + start, (count if stop is None else stop) - start
        at = 8 * first
        return Locations(
            slots=np.frombuffer(located.slots, "<u4", many, 4 * first),
            offsets=np.frombuffer(located.offsets, "<u8", many, at),
            generations=np.frombuffer(located.generations, "<u8", many, at),
            lengths=np.frombuffer(located.lengths, "<u8", many, at),
            checksums=np.frombuffer(located.checksums, "<u8", many, at),
        )

    def all_of(self, nbytes: int) -> bool:
        """Whether every page is present with exactly so many bytes. Nearly always so, and seen without numpy, which is slow to wake up;
        False is only a doubt: look at each."""
        return (
            self.lengths.tobytes() == nbytes.to_bytes(8, "little") * len(self.lengths)
            and _ABSENT not in self.slots.tobytes()
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


class _Recent(msgspec.Struct):
    at: float
    epoch: int
    components: list[str]
    shard: int
    hashes: bytes
    pages: int
    answer: Located | bytes

    def located(self) -> Located:
        """The answer, unpacked once; twice where two threads want it at the same time, and no harm done."""
        if isinstance(self.answer, bytes):
            located = decode_reply(self.answer)
            assert isinstance(located, Located)
            self.answer = located
        return self.answer


class RecentMatches:
    """The last matches of one store. Safe from several threads: the deque's append and copy are atomic."""

    def __init__(self) -> None:
        self._recent: collections.deque[_Recent] = collections.deque(maxlen=RECENT_MATCHES)

    def remember(
        self, epoch: int, components: list[str], shard: int, hashes: bytes, pages: int, answer: Located | bytes
    ) -> None:
        """``hashes``, of which the answer, packed or not, has the first ``pages``. It is looked at when somebody recalls it: most are asked
        once."""
        self._recent.append(_Recent(time.monotonic(), epoch, components, shard, hashes, pages, answer))

    def recall(self, epoch: int, component: str, shard: int, hashes: bytes) -> Locations | None:
        """Locations of ``hashes``, if one recent match of the same session epoch covers them all."""
        oldest = time.monotonic() - RECENT_S
        for recent in self._latest_first():
            if recent.at < oldest:
                break
            if component not in recent.components or recent.shard != shard or recent.epoch != epoch:
                continue
            pages = recent.pages
            at = recent.hashes.find(hashes, 0, pages * HASH_BYTES)
            if at >= 0 and at % HASH_BYTES == 0:
                first = at // HASH_BYTES
                last = first + len(hashes) // HASH_BYTES
                return Locations.of(recent.located(), pages, recent.components.index(component), first, last)
        return None

    def _latest_first(self) -> Iterator[_Recent]:
        """The last one is nearly always the one that is wanted: the others are copied when it is not."""
        try:
            latest = self._recent[-1]
        except IndexError:
            return
        yield latest
        yield from reversed(tuple(self._recent))

    def forget(self) -> None:
        self._recent.clear()
