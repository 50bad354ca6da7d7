"""Where objects lie, as the server told it, and the short memory of what it told.

An engine asks how much of a prompt is there and then loads it. The answer to the question has the locations, so the load
sends no message. Nothing here decides what is right: a location is a claim, and the generations decide after the copy.
"""

from __future__ import annotations

import collections
import time
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


_U32: Final = np.dtype("<u4")
_U64: Final = np.dtype("<u8")
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


class Locations(msgspec.Struct, frozen=True, gc=False):
    """Arrays of one element per hash; the slot is ``NO_SLOT`` where a page is not present. What is seldom looked at one by one stays
    packed."""

    slots: npt.NDArray[np.uint32]
    offsets: U64Array
    generations: U64Array
    packed_lengths: bytes
    packed_checksums: bytes

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
        at, end = 8 * first, 8 * (first + many)
        return Locations(
            np.frombuffer(located.slots, _U32, many, 4 * first),
            np.frombuffer(located.offsets, _U64, many, at),
            np.frombuffer(located.generations, _U64, many, at),
            located.lengths[at:end],
            located.checksums[at:end],
        )

    @staticmethod
    def packed(data: bytes, columns: tuple[int, int, int, int, int], first: int, many: int) -> Locations:
        """``many`` elements from ``first`` on of a packed reply, in which ``columns`` begin there."""
        slots, offsets, generations, lengths, checksums = columns
        at, end = 8 * first, 8 * (first + many)
        # Cut out, and so aligned.
        return Locations(
            np.frombuffer(data[slots + 4 * first : slots + 4 * (first + many)], _U32),
            np.frombuffer(data[offsets + at : offsets + end], _U64),
            np.frombuffer(data[generations + at : generations + end], _U64),
            data[lengths + at : lengths + end],
            data[checksums + at : checksums + end],
        )

    @property
    def lengths(self) -> U64Array:
        """Bytes of each object."""
        return np.frombuffer(self.packed_lengths, "<u8")

    @property
    def checksums(self) -> U64Array:
        return np.frombuffer(self.packed_checksums, "<u8")

    def all_of(self, nbytes: int) -> bool:
        """Whether every page is present with exactly so many bytes. Nearly always so, and seen without numpy, which is slow to wake up;
        False is only a doubt: look at each."""
        return (
            self.packed_lengths == nbytes.to_bytes(8, "little") * len(self.slots)
            and _ABSENT not in self.slots.tobytes()
        )

    def __getitem__(self, chosen: slice | npt.NDArray[np.intp]) -> Locations:
        return Locations(
            self.slots[chosen],
            self.offsets[chosen],
            self.generations[chosen],
            self.lengths[chosen].tobytes(),
            self.checksums[chosen].tobytes(),
        )

    @staticmethod
    def joined(parts: list[Locations]) -> Locations:
        if len(parts) == 1:
            return parts[0]
        return Locations(
            np.concatenate([part.slots for part in parts]),
            np.concatenate([part.offsets for part in parts]),
            np.concatenate([part.generations for part in parts]),
            b"".join(part.packed_lengths for part in parts),
            b"".join(part.packed_checksums for part in parts),
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
        answer = self.answer  # once: another thread may unpack it meanwhile
        if isinstance(answer, Located):
            return answer
        located = decode_reply(answer)
        assert isinstance(located, Located)
        self.answer = located
        return located

    def recall(self, epoch: int, component: str, shard: int, hashes: bytes) -> Locations | None:
        """Where ``hashes`` lie, if it says so of all of them."""
        if component not in self.components or self.shard != shard or self.epoch != epoch:
            return None
        at = self.hashes.find(hashes, 0, self.pages * HASH_BYTES)
        if at < 0 or at % HASH_BYTES:
            return None
        first, many, answer = at // HASH_BYTES, len(hashes) // HASH_BYTES, self.answer
        if _reply is not None and isinstance(answer, bytes) and (columns := _reply.columns(answer)) is not None:
            return Locations.packed(answer, columns, first, many)
        return Locations.of(self.located(), self.pages, self.components.index(component), first, first + many)


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
        try:
            latest = self._recent[-1]  # nearly always the one that is wanted
        except IndexError:
            return None
        if latest.at >= oldest and (where := latest.recall(epoch, component, shard, hashes)) is not None:
            return where
        for recent in reversed(tuple(self._recent)):
            if recent.at < oldest:
                break
            if (where := recent.recall(epoch, component, shard, hashes)) is not None:
                return where
        return None

    def forget(self) -> None:
        self._recent.clear()
