"""Which page goes next: leaves only, first those that stayed incomplete, then the one whose policy says so.

A :class:`Policy` is a few lines that say how much a page is worth by its age and by how often it was used again; everything
else is the same for all of them and is here. Using a page writes columns of its tree and tells nobody: an entry is looked
at again only when it comes to the top of its queue, and goes where it belongs by then. So the queues hold leaves, not
pages, and reading costs them nothing.

Every tenant has its own :class:`Leaves`; the :class:`Evictor` asks the one that it is told to, or all.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from itertools import chain
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from maru_core.errors import ConfigError
from maru_server.tree import PrefixTree, Rows

_ROW_BITS: Final = 32
_TREE_BITS: Final = 32
_ROW_MASK: Final = (1 << _ROW_BITS) - 1
_TREE_MASK: Final = (1 << _TREE_BITS) - 1
_PLACE_MASK: Final = (1 << _ROW_BITS + _TREE_BITS) - 1
#: From so many entries on that are found in the wrong place at once, and from so large a part of a queue (as a power of two), all
#: are looked at together.
_BULK_MIN: Final = 64
_BULK_SHIFT: Final = 5
#: Ages are compared in units of 2**10 ns, about a microsecond.
_AGE_SHIFT: Final = 10
#: Later than any time of day, ns.
_NEVER: Final = 1 << 63


class Policy(Protocol):
    """The order in which leaves go. An object without state: what it goes by is in the trees' columns.

    A page belongs to one of a few queues by how often it was used again (``tree.uses``, counted as
    :meth:`PrefixTree.used` says). Within a queue the least recently used goes first, and what the framework compares are
    the fronts of the queues. It calls :meth:`queue` and :meth:`score` a few times for each page that is evicted, never
    when pages are read or stored; neither may look at anything but its arguments.

    The framework guarantees that no page goes before what continues it, that pages which stayed incomplete go first, that
    nobody's page goes that is pinned, held or being written, and that ``uses`` of a page that comes back soon after its
    eviction goes on about where it was.
    """

    #: How many queues there are.
    queues: int

    def queue(self, uses: int) -> int:
        """The queue of a page that was used again ``uses`` times (0 to 255): 0 to ``queues - 1``."""

    def score(self, queue: int, age_ns: int) -> float:
        """How readily the front of a queue goes: it was last used ``age_ns`` ago. The highest of all goes. Must not
        fall as the age rises."""


class Lru:
    """Least recently used: nothing counts but the last use."""

    queues = 1

    def queue(self, uses: int) -> int:
        return 0

    def score(self, queue: int, age_ns: int) -> float:
        return age_ns


class LfuAge:
    """Least frequently used, with ageing: each doubling of a page's uses makes it age one and a half times as slowly.

    A page that was used only once (a scan, a prompt that never comes again) goes as under LRU, and one that was used again
    outlives it: 1.5 times as long after one use, 2.25 times after two, 11.4 times from 32 on. So what is used often
    survives a scan of several times the pool, and still goes in the end when nobody wants it any more. The weight is low
    on purpose: where the pool is large enough for nearly everything that comes again, LRU is hard to beat, and protecting
    yesterday's favourites costs more than it gives.
    """

    queues = 7
    _WEIGHTS: Final = tuple(1.5**-queue for queue in range(7))

    def queue(self, uses: int) -> int:
        return min(uses.bit_length(), 6)

    def score(self, queue: int, age_ns: int) -> float:
        return age_ns * self._WEIGHTS[queue]


#: Policies by name.
POLICIES: Final[Mapping[str, type[Policy]]] = {"lru": Lru, "lfu-age": LfuAge}
DEFAULT_POLICY: Final = "lru"


def policy(name: str) -> Policy:
    """Raises:
    ConfigError: no policy of that name; the message lists those that there are.
    """
    found = POLICIES.get(name)
    if found is None:
        raise ConfigError(f"--policy is {name!r}: give one of {', '.join(POLICIES)}")
    return found()


class Leaves:
    """One tenant's leaves, in the order in which they are to be evicted.

    An entry is one int: last use, tree, row. A row has at most one entry (``tree.queued``), also one that was left behind
    by a page that is gone; it then serves the next page of that row, or is dropped when it comes to the top.
    """

    def __init__(self, trees: Mapping[int, PrefixTree], chosen: Policy) -> None:
        self._trees = trees
        self._policy = chosen
        self._whole: list[list[int]] = [[] for _ in range(chosen.queues)]
        self._partial: list[int] = []
        self._queue_of = np.array([chosen.queue(uses) for uses in range(256)])  # by uses
        self._moved = 0  # entries that went from one queue to another

    def __len__(self) -> int:
        return len(self._partial) + sum(map(len, self._whole))

    def offer(self, tree: PrefixTree, row: int) -> None:
        """The row may have become a leaf that can be evicted, or may not."""
        if not tree.queued[row] and tree.is_evictable(row):
            tree.queued[row] = True
            heapq.heappush(self._heap_of(tree, row), _entry(tree, row))

    def _heap_of(self, tree: PrefixTree, row: int) -> list[int]:
        if tree.is_partial(row):
            return self._partial
        whole = self._whole
        return whole[self._policy.queue(int(tree.uses[row]))] if len(whole) > 1 else whole[0]

    def stale(self, used_before_ns: int) -> int | None:
        """When the incomplete page was last used that is longest without a use, if that is long enough ago."""
        entry = self._front(self._partial)
        if entry is None:
            return None
        last_use = (entry >> (_ROW_BITS + _TREE_BITS)) << _AGE_SHIFT
        return last_use if last_use <= used_before_ns else None

    def best(self, now_ns: int) -> tuple[float, int] | None:
        """(score, queue) of the whole page that is to go first, None if no whole page can go."""
        while True:
            best: tuple[float, int] | None = None
            moved = self._moved
            for queue, heap in enumerate(self._whole):
                if heap and (entry := self._front(heap)) is not None:
                    age = now_ns - ((entry >> (_ROW_BITS + _TREE_BITS)) << _AGE_SHIFT)
                    score = self._policy.score(queue, max(0, age))
                    if best is None or score > best[0]:
                        best = score, queue
            if moved == self._moved:  # else a queue that was looked at may have got another front
                return best

    def take(self, queue: int | None) -> tuple[PrefixTree, int]:
        """Take the front of a queue (None: of the incomplete pages) off it, right after :meth:`best` or :meth:`stale` saw it."""
        entry = heapq.heappop(self._partial if queue is None else self._whole[queue])
        tree, row = self._trees[entry >> _ROW_BITS & _TREE_MASK], entry & _ROW_MASK
        tree.queued[row] = False
        return tree, row

    def pop(self, now_ns: int, stale_before_ns: int) -> tuple[PrefixTree, int] | None:
        """Take the page that is to go first off its queue."""
        if self._partial and self.stale(stale_before_ns) is not None:
            return self.take(None)
        if len(self._whole) == 1:
            if self._front(self._whole[0]) is not None:
                return self.take(0)
        elif (best := self.best(now_ns)) is not None:
            return self.take(best[1])
        return self.take(None) if self._partial and self.stale(_NEVER) is not None else None

    def _front(self, heap: list[int], most: int | None = None) -> int | None:
        """The first entry of a queue, when all before it that do not belong there are where they do.

        Args:
            most: put no more than so many entries where they belong, and whatever is first then.
        """
        trees = self._trees
        # One by one it costs some ten times what it costs an entry to do all of them.
        bulk = max(_BULK_MIN, len(heap) >> _BULK_SHIFT)
        steps = 0
        while heap:
            entry = heap[0]
            row = entry & _ROW_MASK
            tree = trees[entry >> _ROW_BITS & _TREE_MASK]
            if steps == most:
                return entry
            steps += 1
            if steps == bulk and most is None:
                self._refresh(heap)
                continue
            if not tree.is_evictable(row):
                heapq.heappop(heap)
                tree.queued[row] = False
                continue
            current, home = _entry(tree, row), self._heap_of(tree, row)
            if home is not heap:
                heapq.heappop(heap)
                heapq.heappush(home, current)
                self._moved += 1
            elif current > entry:
                heapq.heapreplace(heap, current)
            else:
                return entry
        return None

    def settle(self, most: int) -> None:
        """Put up to so many entries at the front of each queue where they belong, so that who needs a victim finds little to do."""
        for heap in (self._partial, *self._whole):
            if heap:
                self._front(heap, most)

    def _refresh(self, heap: list[int]) -> None:
        """Put all entries of a queue where they belong."""
        places = np.array([entry & _PLACE_MASK for entry in heap], np.uint64)
        heap.clear()
        queues = [self._partial, *self._whole]
        come: list[list[int]] = [[] for _ in queues]
        numbers = places >> np.uint64(_ROW_BITS)
        for number in np.unique(numbers).tolist():
            tree = self._trees[number]
            rows = (places[numbers == number] & np.uint64(_ROW_MASK)).astype(np.int64)
            tree.queued[rows] = False
            rows = rows[evictable(tree, rows)]
            tree.queued[rows] = True
            at = np.where(tree.partial(rows), 0, self._queue_of[tree.uses[rows]] + 1)
            for queue in np.unique(at).tolist():
                mine = rows[at == queue]
                ages = (tree.last_use[mine] >> _AGE_SHIFT).tolist()
                low = tree.number << _ROW_BITS
                come[queue] += [
                    age << _ROW_BITS + _TREE_BITS | low | row for age, row in zip(ages, mine.tolist(), strict=True)
                ]
        for queue, entries in zip(queues, come, strict=True):
            if entries:
                queue += entries
                heapq.heapify(queue)
                self._moved += queue is not heap

    def forget(self, number: int) -> None:
        """Drop all entries of a tree that was cleared."""
        for heap in (*self._whole, self._partial):
            heap[:] = [entry for entry in heap if entry >> _ROW_BITS & _TREE_MASK != number]
            heapq.heapify(heap)

    def entries(self) -> list[tuple[int, int]]:
        """(namespace, row) of all entries, for checks."""
        return [(entry >> _ROW_BITS & _TREE_MASK, entry & _ROW_MASK) for entry in chain(self._partial, *self._whole)]


class Evictor:
    """All tenants' leaves.

    Args:
        trees: by namespace number; looked at anew each time.
        incomplete_grace_ns: any page is incomplete for a while, until its last rank has stored it. Those that stay so for
            longer go before all others.
        name: of the policy.
    """

    def __init__(self, trees: Mapping[int, PrefixTree], incomplete_grace_ns: int, name: str = DEFAULT_POLICY) -> None:
        self._trees = trees
        self._grace_ns = incomplete_grace_ns
        self.name = name
        self._policy = policy(name)
        self._of_tenant: dict[str, Leaves] = {}

    def __len__(self) -> int:
        return sum(map(len, self._of_tenant.values()))

    def offer(self, tree: PrefixTree, row: int) -> None:
        """The row may have become a leaf that can be evicted, or may not."""
        leaves = self._of_tenant.get(tree.tenant)
        if leaves is None:
            leaves = self._of_tenant[tree.tenant] = Leaves(self._trees, self._policy)
        leaves.offer(tree, row)

    def next(self, now_ns: int, tenant: str | None = None) -> tuple[PrefixTree, int] | None:
        """Take the next victim off the queues, of one tenant or of all; None if no page can be evicted."""
        if tenant is not None:
            only = self._of_tenant.get(tenant)
            return only.pop(now_ns, now_ns - self._grace_ns) if only is not None else None
        asked = list(self._of_tenant.values())
        if len(asked) == 1:
            return asked[0].pop(now_ns, now_ns - self._grace_ns)
        chosen: tuple[Leaves, int | None] | None = None
        oldest: int | None = None
        for leaves in asked:
            last_use = leaves.stale(now_ns - self._grace_ns)
            if last_use is not None and (oldest is None or last_use < oldest):
                oldest, chosen = last_use, (leaves, None)
        if chosen is None:
            highest = -1.0
            for leaves in asked:
                best = leaves.best(now_ns)
                if best is not None and best[0] > highest:
                    highest, chosen = best[0], (leaves, best[1])
        if chosen is None:
            chosen = next(((leaves, None) for leaves in asked if leaves.stale(_NEVER) is not None), None)
        return chosen[0].take(chosen[1]) if chosen is not None else None

    def settle(self, most: int) -> None:
        """To be called now and then; see :meth:`Leaves.settle`."""
        for leaves in self._of_tenant.values():
            leaves.settle(most)

    def leaves_of(self, tree: PrefixTree, now_ns: int, most: int) -> list[tuple[float, int]]:
        """The leaves of one tree that are to be evicted first, among them the first ``most``, as a heap of (score * -1, row); the
        queues stay as they are."""
        rows = np.flatnonzero(evictable(tree, slice(tree.size)))
        # Within a queue the least recently used goes first: the others need not be looked at one by one.
        queue_of = np.array([self._policy.queue(uses) for uses in range(256)])
        queues = queue_of[tree.uses[rows]]
        first: list[int] = []
        for queue in range(self._policy.queues):
            mine = rows[queues == queue]
            if len(mine) > most:
                mine = mine[np.argpartition(tree.last_use[mine], most)[:most]]
            first += mine.tolist()
        heap = [(-self.score(tree, row, now_ns), row) for row in first]
        heapq.heapify(heap)
        return heap

    def score(self, tree: PrefixTree, row: int, now_ns: int) -> float:
        """How readily one page goes."""
        queue = self._policy.queue(int(tree.uses[row]))
        return self._policy.score(queue, max(0, now_ns - int(tree.last_use[row])))

    def forget(self, tree: PrefixTree) -> None:
        """Drop all entries of a tree that was cleared."""
        leaves = self._of_tenant.get(tree.tenant)
        if leaves is not None and tree.queued.any():
            leaves.forget(tree.number)

    def check(self) -> None:
        """Every leaf that can be evicted has one entry, with its tenant's, and no row has two."""
        seen: dict[int, set[int]] = {number: set() for number in self._trees}
        for tenant, leaves in self._of_tenant.items():
            for number, row in leaves.entries():
                assert self._trees[number].tenant == tenant, "a page is queued with another tenant's"
                assert row not in seen[number], "a row is queued twice"
                seen[number].add(row)
        for number, tree in self._trees.items():
            assert seen[number] == set(tree.queued.nonzero()[0].tolist()), "queued"
            evictable = [row for row in tree.used_rows().tolist() if tree.is_evictable(row)]
            assert seen[number].issuperset(evictable), "a leaf that can never be evicted"


def evictable(tree: PrefixTree, rows: Rows | slice) -> npt.NDArray[np.bool_]:
    """:meth:`PrefixTree.is_evictable` of each of these rows."""
    found: npt.NDArray[np.bool_] = tree.child[rows] < 0
    found &= tree.objects[rows] > 0
    found &= tree.pending[rows] == 0
    if tree.guards:
        free = np.ones(len(tree.parent), bool)
        free[list(tree.guards)] = False
        found &= free[rows]
    return found


def _entry(tree: PrefixTree, row: int) -> int:
    age = int(tree.last_use[row]) >> _AGE_SHIFT
    return (age << _TREE_BITS | tree.number) << _ROW_BITS | row
