"""What pages come and go, noted in the loop for :mod:`maru_server.publisher`, which tells others.

A page is *stored* from when a match of its namespace finds it until it is removed: every shard of every stage of its KV is
committed, and so are all pages before it. Components beside the KV (draft, states, …) are not looked at: which of them a
reader needs is the reader's rule. So whoever applies all notes to a set has exactly the pages that a match of the KV finds.

Here are only appends to a queue, in the order in which things happened. It is bounded: when nobody empties it in time, what
is in it is dropped, and in its place comes the whole content, once (:class:`Everything`). A server without events has none
of this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from maru_core.errors import ConfigError
from maru_core.namespace import Namespace, record_digest
from maru_core.protocol import ROOT
from maru_server.metrics import LABEL_DIGITS
from maru_server.tree import ROOT_ROW, PrefixTree, Rows, depths

#: Pages in the queue, of all notes, beyond which it is given up for the whole content.
QUEUE_PAGES: Final = 1 << 20
#: The component that holds a page's KV; with several pipeline stages each has one of its own, ``kv.0`` and so on.
KV: Final = "kv"


@dataclass(frozen=True, slots=True)
class Topic:
    """What is the same for all notes of a namespace."""

    name: str  # the namespace's label in metrics; of a tenant's namespace ``TENANT/LABEL``
    engine: str
    page_tokens: int
    components: tuple[str, ...]  # all must be whole for a page to count

    @classmethod
    def of(cls, record: bytes, tenant: str) -> Topic:
        try:
            space = Namespace.parse(record)
            engine, tokens, stages = space.engine, space.page_tokens, space.pipeline_parallel
        except ConfigError:
            # Of another release, whose clients do not come here: its pages are told all the same.
            engine, tokens, stages = "", 0, 1
        label = record_digest(record).hex()[:LABEL_DIGITS]
        return cls(
            name=f"{tenant}/{label}" if tenant else label,
            engine=engine,
            page_tokens=tokens,
            components=(KV,) if stages <= 1 else tuple(f"{KV}.{stage}" for stage in range(stages)),
        )


@dataclass(frozen=True, slots=True)
class Stored:
    """Pages that can be found now, each the parent of the next."""

    topic: Topic
    parent: bytes  # ROOT at the start of a chain
    hashes: bytes  # packed


@dataclass(frozen=True, slots=True)
class Removed:
    topic: Topic
    hashes: bytes


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing of the namespace is left."""

    topic: Topic


@dataclass(frozen=True, slots=True)
class Everything:
    """All that can be found at this moment; what was said before does not count any more."""

    topic: Topic
    parents: npt.NDArray[np.int64]  # row of the page before, of every row; negative at the start of a chain
    rows: Rows  # that are stored
    hashes: npt.NDArray[np.uint64]  # of every row, shape (n, 4)
    more: bool = False  # of another pool: what was said before still counts

    def runs(self) -> list[tuple[bytes, bytes]]:
        """(parent, packed hashes) of chains of pages, parents first. For the publisher: a pass over all pages."""
        rows = self.rows
        if not len(rows):
            return []
        # Chains mostly lie in consecutive rows.
        starts = np.ones(len(rows), bool)
        starts[1:] = (rows[1:] != rows[:-1] + 1) | (self.parents[rows[1:]] != rows[:-1])
        bounds = [*np.flatnonzero(starts).tolist(), len(rows)]
        heads = rows[bounds[:-1]]
        found = []
        for at in np.argsort(depths(self.parents)[heads], kind="stable").tolist():
            above = int(self.parents[heads[at]])
            chain = self.hashes[rows[bounds[at]] : int(rows[bounds[at + 1] - 1]) + 1]
            found.append((ROOT if above < 0 else self.hashes[above].tobytes(), chain.tobytes()))
        return found


Note: TypeAlias = Stored | Removed | Cleared | Everything


class Events:
    """The queue. Every method but :meth:`take` is the loop's.

    Args:
        wake: tells the publisher that there is something.
    """

    def __init__(self, wake: Callable[[], None] = lambda: None, queue_pages: int = QUEUE_PAGES) -> None:
        self._wake = wake
        self._limit = queue_pages
        self._lock = threading.Lock()  # of the queue alone
        self._notes: list[Note] = []
        self._pages = 0  # in the queue
        #: Times that the queue was given up.
        self.overflows = 0
        self._topics: dict[int, Topic] = {}
        self._told: dict[int, npt.NDArray[np.bool_]] = {}  # rows that are stored, as far as others know
        self._components: Mapping[str, int] = {}
        self._trees: Mapping[int, PrefixTree] = {}

    def begin(
        self, trees: Mapping[int, PrefixTree], components: Mapping[str, int], topics: Mapping[int, Topic]
    ) -> None:
        """What there is at the start; ``trees`` and ``components`` are looked at again and again."""
        self._trees, self._components, self._topics = trees, components, dict(topics)
        self.everything()

    def open(self, number: int, topic: Topic) -> None:
        """A namespace is known from now on."""
        self._topics[number] = topic

    # ------------------------------------------------------------ what happens

    def published(self, tree: PrefixTree, rows: Rows) -> None:
        """Objects of these rows, in the order of their chain, were committed."""
        told = self._of(tree)
        fresh = rows[self._whole(tree, rows) & ~told[rows]]
        if not len(fresh):
            return
        above = tree.parent[fresh]
        if (above[1:] == fresh[:-1]).all() and self._is_found(tree, told, int(above[0])):
            if self._tell(tree, told, fresh):
                return  # all that there is was said anew, and these with it
        else:
            for row in fresh.tolist():
                wanted = not told[row] and self._is_found(tree, told, int(tree.parent[row]))
                if wanted and self._tell(tree, told, np.array([row], np.int64)):
                    return
        # What was whole already and hung below a gap is found now.
        waiting = [int(row) for row in fresh[told[fresh] & (tree.child[fresh] >= 0)]]
        while waiting:
            for child in tree.children(waiting.pop()):
                row = np.array([child], np.int64)
                if not told[child] and self._whole(tree, row).all():
                    if self._tell(tree, told, row):
                        return
                    waiting.append(child)

    def removing(self, tree: PrefixTree, rows: Rows | Sequence[int]) -> None:
        """These rows are about to be removed, with all below them."""
        told = self._of(tree)
        some = np.array(rows, np.int64)
        gone = some[told[some]]
        if len(gone):
            told[gone] = False
            note = Removed(self._topics[tree.number], tree.index.hashes[gone].tobytes())
            self._put(note, len(gone), leaving=(tree, some))

    def clearing(self, tree: PrefixTree) -> None:
        """All rows of a namespace are about to go."""
        told = self._told.pop(tree.number, None)
        if told is not None and told.any():
            self._put(Cleared(self._topics[tree.number]), 1, leaving=(tree, tree.used_rows()))
            self._told.pop(tree.number, None)  # an overflow has made it anew, for rows that are gone

    def everything(self, leaving: tuple[PrefixTree, Rows] | None = None) -> None:
        """Say anew all that is there; costs a copy of all hashes.

        Args:
            leaving: rows, with all below them, that are about to be removed and still stand in their tree.
        """
        self.restart(self.contents(leaving))

    def contents(self, leaving: tuple[PrefixTree, Rows] | None = None) -> list[Note]:
        """All that is there, which counts as told from now on."""
        notes: list[Note] = []
        self._told.clear()
        for number, topic in self._topics.items():
            tree = self._trees[number]
            told = self._of(tree)
            rows = self._found_rows(tree)
            if leaving is not None and leaving[0] is tree:
                rows = np.setdiff1d(rows, leaving[1])
            told[rows] = True
            parents = tree.parent[: tree.size].astype(np.int64)
            notes.append(Everything(topic, parents, rows, tree.index.hashes[: tree.size].copy()))
        return notes

    def restart(self, notes: list[Note]) -> None:
        """These, in place of what is in the queue."""
        with self._lock:
            self._notes = notes
            self._pages = 0
        self._wake()

    # ------------------------------------------------------------ the publisher's side

    def take(self) -> list[Note]:
        """All notes so far, oldest first."""
        with self._lock:
            notes, self._notes, self._pages = self._notes, [], 0
        return notes

    # ------------------------------------------------------------ inside

    def _put(self, note: Note, pages: int, leaving: tuple[PrefixTree, Rows] | None = None) -> bool:
        """Whether the queue was full, so that all that there is was said anew in place of this."""
        full = not self.offer([note], pages)
        if full:
            self.overflows += 1
            self.everything(leaving)
        return full

    def offer(self, notes: list[Note], pages: int) -> bool:
        """Whether there was room for them."""
        with self._lock:
            if self._pages + pages > self._limit:
                return False
            self._pages += pages
            self._notes += notes
        self._wake()
        return True

    def _of(self, tree: PrefixTree) -> npt.NDArray[np.bool_]:
        told = self._told.get(tree.number)
        if told is None or len(told) < len(tree.parent):
            larger = np.zeros(len(tree.parent), bool)
            if told is not None:
                larger[: len(told)] = told
            told = self._told[tree.number] = larger
        return told

    def _whole(self, tree: PrefixTree, rows: Rows) -> npt.NDArray[np.bool_]:
        whole = np.ones(len(rows), bool)
        for name in self._topics[tree.number].components:
            table = tree.tables.get(self._components.get(name, -1))
            if table is None:
                return np.zeros(len(rows), bool)
            whole &= table.whole(rows)
        return whole

    def _found_rows(self, tree: PrefixTree) -> Rows:
        """Rows that are whole and below nothing that is not, ascending."""
        rows = tree.used_rows()
        good = np.zeros(tree.size + 1, bool)
        good[rows] = self._whole(tree, rows)
        # Each step doubles how far up every row has looked; the last element stands for what is above the tops.
        good[-1] = True
        above = np.append(tree.parent[: tree.size].astype(np.int64), tree.size)
        good[:-1] &= (above[:-1] >= 0) | (above[:-1] == ROOT_ROW)
        above[above < 0] = tree.size
        while (above != tree.size).any():
            good &= good[above]
            above = above[above]
        return np.flatnonzero(good[:-1])

    @staticmethod
    def _is_found(tree: PrefixTree, told: npt.NDArray[np.bool_], parent: int) -> bool:
        return parent == ROOT_ROW or (parent >= 0 and bool(told[parent]))

    def _tell(self, tree: PrefixTree, told: npt.NDArray[np.bool_], rows: Rows) -> bool:
        told[rows] = True
        hashes = tree.index.hashes
        above = int(tree.parent[rows[0]])
        parent = ROOT if above < 0 else hashes[above].tobytes()
        return self._put(Stored(self._topics[tree.number], parent, hashes[rows].tobytes()), len(rows))
