"""Slots that a store has ahead: with them a put of a few pages is one message instead of two.

They are granted with the answer to a put, for the next few of the same kind. They are as short-lived as any
reservation: what was asked for too long ago is not written to any more, for the server may have given it to others by then, and goes
back. A put that finds none reserves as ever; nothing depends on them.
"""

from __future__ import annotations

import collections
import secrets
import threading
import time
from typing import Final, NamedTuple

import msgspec

from maru_core.protocol import HASH_BYTES

#: Pages of a put that may use them, and most bytes of all of its pages: where pages turn out to be there already, they were copied in vain.
PAGES_MAX: Final = 32
BYTES_MAX: Final = 16 << 20
#: Puts like the one at hand that a grant is for: most puts then ask for nothing.
PUTS_AHEAD: Final = 4
#: Grants that a store keeps at a time, of all kinds: a model may have several components, each with objects of its own size.
GRANTS_MAX: Final = 8
#: They are not written to when they were asked for longer ago than this, seconds, nor than half a lease: far less than a server lets pass
#: between a reserve and its commit before it puts the slots in quarantine, and less than it lets pass before it takes a client for silent.
AGE_MAX_S: Final = 5.0
#: Grants that were used in vain and wait to be given back; more than these are left to the session's end.
DROPPED_MAX: Final = 64
#: Puts of a kind that do without, from one on whose pages were there already: others store the same at this time.
PAUSE_PUTS: Final = 16


def now() -> float:
    """Seconds, also those for which the machine slept: others go on meanwhile."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def oldest(lease_s: float) -> float:
    """When what may be written to now was asked for at the earliest, see :func:`now`."""
    return now() - min(AGE_MAX_S, lease_s / 2)


class Kind(NamedTuple):
    """What slots were granted for: everything that a :class:`maru_core.protocol.Store` must have in common with the message before it."""

    epoch: int
    namespace: int
    component: str
    shard: int
    world: int
    nbytes: int


class Spare(msgspec.Struct, frozen=True, gc=False):
    """Slots of one grant, packed; ``asked`` is when they were asked for, see :func:`now`."""

    kind: Kind
    asked: float
    slots: bytes
    offsets: bytes
    generations: bytes


class _Grant(msgspec.Struct, gc=False):
    """What is left of a spare: its slots from ``at`` on, ``left`` of them."""

    spare: Spare
    left: int
    at: int = 0

    def cut(self, pages: int) -> Spare:
        """The next so many slots, which are no longer here."""
        spare, at, end = self.spare, self.at, self.at + pages
        self.at, self.left = end, self.left - pages
        return Spare(
            spare.kind,
            spare.asked,
            spare.slots[4 * at : 4 * end],
            spare.offsets[8 * at : 8 * end],
            spare.generations[8 * at : 8 * end],
        )


class Spares:
    """What a store has. From several threads at once: ``_lock`` protects everything; who takes a grant has it alone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._grants: list[_Grant] = []
        self._dropped: collections.deque[Spare] = collections.deque(maxlen=DROPPED_MAX)
        self._random = b""  # for names that are made up; drawn in one go, which costs as much as one name
        self._pauses: dict[Kind, int] = {}

    def take(self, kind: Kind, count: int, oldest: float) -> tuple[Spare, bool] | None:
        """``count`` slots of this kind that were asked for at ``oldest`` or later; the rest of their grant stays here. With them, whether
        more should be asked for: see :meth:`names`. None where there are none, or in a pause."""
        with self._lock:
            if self._pauses and self._pauses.get(kind):
                return None
            for at, grant in enumerate(self._grants):
                if grant.left >= count and grant.spare.asked >= oldest and grant.spare.kind == kind:
                    taken = grant.cut(count)
                    if not grant.left:
                        del self._grants[at]
                    return taken, self._wants(kind, count)
        return None

    def _wants(self, kind: Kind, count: int) -> bool:
        """Whether there are too few for the next put, and room for more. With the lock."""
        if len(self._grants) >= GRANTS_MAX:
            return False
        return not any(grant.left >= count and grant.spare.kind == kind for grant in self._grants)

    def add(self, spare: Spare) -> None:
        with self._lock:
            self._grants.append(_Grant(spare, len(spare.slots) // 4))

    def names(self, kind: Kind, count: int) -> bytes:
        """Made-up page hashes for as many slots as should be asked for ahead, where the put at hand has ``count`` pages; none where there are
        enough for the next one."""
        with self._lock:
            pause = self._pauses.get(kind, 0)
            if pause:
                self._pauses[kind] = pause - 1
                return b""
            if not self._wants(kind, count):
                return b""
            nbytes = HASH_BYTES * max(count, min(PUTS_AHEAD * count, PAGES_MAX, BYTES_MAX // kind.nbytes))
            if len(self._random) < nbytes:
                self._random = secrets.token_bytes(HASH_BYTES * PAGES_MAX * 4)
            names, self._random = self._random[:nbytes], self._random[nbytes:]
            return names

    def pause(self, kind: Kind) -> None:
        """Pages of a put were there already: the next ones ask first."""
        with self._lock:
            self._pauses = {kind: PAUSE_PUTS}  # of the last kind alone: kinds are few, and lives many

    def drop(self, spare: Spare) -> None:
        """What was taken is not used any more, and not known to be published: it is to be given back."""
        with self._lock:
            self._dropped.append(spare)

    def stale(self, epoch: int, oldest: float) -> list[Spare]:
        """Take out what is to be given back: what was asked for before ``oldest``, what is of another life than ``epoch``, and what was
        dropped."""
        with self._lock:
            if not self._grants and not self._dropped:
                return []
            found = list(self._dropped)
            self._dropped.clear()
            kept = []
            for grant in self._grants:
                if grant.spare.asked >= oldest and grant.spare.kind.epoch == epoch:
                    kept.append(grant)
                else:
                    found.append(grant.cut(grant.left))
            self._grants = kept
            return found
