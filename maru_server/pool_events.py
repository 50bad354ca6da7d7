"""The events of several pools in one queue and one order: for a listener a page is there as long as any pool has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from maru_core.protocol import HASH_BYTES
from maru_server.events import Cleared, Events, Everything, Note, Removed, Stored
from maru_server.tree import PrefixTree, Rows


class Joint:
    """Args:
    queue: the publisher's, to which all notes go.
    """

    def __init__(self, queue: Events, pools: int) -> None:
        self._queue = queue
        #: What the state of each pool notes to.
        self.members = [PoolEvents(self) for _ in range(pools)]

    def everything(self, who: PoolEvents | None = None, leaving: tuple[PrefixTree, Rows] | None = None) -> None:
        """Say anew all that is there; rows of ``who`` are about to go."""
        by_topic: dict[str, list[Note]] = {}
        for member in self.members:
            for note in member.contents(leaving if member is who else None):
                by_topic.setdefault(note.topic.name, []).append(note)
        self._queue.restart([note for notes in by_topic.values() for note in _one_after_the_other(notes)])

    def put(self, who: PoolEvents, note: Note, pages: int, leaving: tuple[PrefixTree, Rows] | None) -> bool:
        """A note of one pool, as far as it is one of all. Whether the queue was full, so that all was said anew in place of it."""
        others = [member for member in self.members if member is not who]
        notes: Sequence[Note] = [note]
        if isinstance(note, Removed | Stored):
            mine = np.ones(len(note.hashes) // HASH_BYTES, bool)
            for member in others:
                mine &= ~member.tells(note.topic.name, note.hashes)
            if not mine.all():
                notes = _some(note, mine)
        elif isinstance(note, Cleared):
            still = [one for member in others for one in member.told_of(note.topic.name)]
            notes = _one_after_the_other(still) if still else [note]
        if not notes or self._queue.offer(list(notes), pages):
            return False
        who.overflows += 1
        self.everything(who, leaving)
        return True


class PoolEvents(Events):
    """Of one pool; has no queue of its own."""

    def __init__(self, joint: Joint) -> None:
        super().__init__()
        self._joint = joint

    def everything(self, leaving: tuple[PrefixTree, Rows] | None = None) -> None:
        self._joint.everything(self, leaving)

    def _put(self, note: Note, pages: int, leaving: tuple[PrefixTree, Rows] | None = None) -> bool:
        return self._joint.put(self, note, pages, leaving)

    def tells(self, topic: str, hashes: bytes) -> npt.NDArray[np.bool_]:
        """Which of these pages can be found in this pool, as far as others know."""
        found = np.zeros(len(hashes) // HASH_BYTES, bool)
        for tree in self._of_topic(topic):
            rows, told = tree.find(hashes, -1), self._of(tree)
            known = rows >= 0
            found[known] |= told[rows[known]]
        return found

    def told_of(self, topic: str) -> list[Note]:
        """All of a topic that others know, if it is anything."""
        notes: list[Note] = []
        for tree in self._of_topic(topic):
            rows = np.flatnonzero(self._of(tree)[: tree.size])
            if len(rows):
                parents, hashes = tree.parent[: tree.size].astype(np.int64), tree.index.hashes[: tree.size].copy()
                notes.append(Everything(self._topics[tree.number], parents, rows, hashes))
        return notes

    def _of_topic(self, topic: str) -> list[PrefixTree]:
        return [self._trees[number] for number, mine in self._topics.items() if mine.name == topic]


def _some(note: Removed | Stored, which: npt.NDArray[np.bool_]) -> list[Note]:
    """The same of some of its pages."""
    if isinstance(note, Removed):
        hashes = np.frombuffer(note.hashes, f"V{HASH_BYTES}")[which].tobytes()
        return [Removed(note.topic, hashes)] if hashes else []
    ends = np.flatnonzero(np.diff(np.concatenate([[False], which, [False]])))
    found: list[Note] = []
    for start, stop in ends.reshape(-1, 2).tolist():
        before = note.parent if not start else note.hashes[(start - 1) * HASH_BYTES : start * HASH_BYTES]
        found.append(Stored(note.topic, before, note.hashes[start * HASH_BYTES : stop * HASH_BYTES]))
    return found


def _one_after_the_other(notes: Sequence[Note]) -> list[Note]:
    """The first says that nothing else counts, and the others do not."""
    return [
        dataclasses.replace(note, more=True) if at and isinstance(note, Everything) else note
        for at, note in enumerate(notes)
    ]
