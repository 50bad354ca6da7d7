"""Who makes room for whom: eviction by policy and quota, and extents that are emptied for slots of another size.

What may go is only what nobody writes, pins or holds, and no page before what continues it. First goes what is beyond
somebody's quota, then what is worth least, whoever's it is (:mod:`maru_server.eviction`). Where pages of the wanted size
cannot make room, whole extents of other sizes are emptied, so that the pool follows the mix of sizes that is stored.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from maru_core.pool.format import COMMITTED, RESERVED
from maru_core.protocol import MissReason
from maru_server.directory import Slots
from maru_server.tree import PrefixTree, Rows

if TYPE_CHECKING:
    from maru_server.pages import Pages

#: Most pages evicted between two looks at how much room there is.
_STEP: Final = 64
#: Most pages that go to empty one extent of another slot size.
_RECLAIM_PAGES: Final = 4096
#: Most extents of other slot sizes that one request empties, and most that it looks at for that.
_RECLAIM_EXTENTS: Final = 16
_RECLAIM_LOOKS: Final = 64
#: Stands for "not known" among rows; differs from every row.
_ABSENT: Final = -3


class Room:
    """Makes room among these pages."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        #: Extents that could not be emptied for another slot size lately: something in them may not go.
        self._stuck: set[int] = set()

    def evict(self, pages: int, short: Callable[[], int], now_ns: int, tenant: str | None = None) -> int:
        """Evict up to ``pages`` leaves, of one tenant or of all, while ``short()`` slots are wanting; says how many went.

        Of all means: of those that have more than their quota while there are any, then of whoever has what is worth least.
        """
        evicted = 0
        while evicted < pages and (wanting := short()) > 0:
            # A page frees all its objects: taking as many pages as slots are wanting would take too many.
            known = max(1, sum(map(len, self._pages.trees.values())))
            objects = max(1, self._pages.slabs.used_slots() // known)
            most = max(1, min(_STEP, pages - evicted, wanting // objects))
            step = 0
            if tenant is None:
                mean = max(1, sum(self._pages.tenants.used.values()) // known)
                for who, excess in self._pages.tenants.over():
                    step = step or self._evict(max(1, min(most, excess // mean)), now_ns, who)
            step = step or self._evict(most, now_ns, tenant)
            if not step:
                break
            evicted += step
        return evicted

    def _evict(self, pages: int, now_ns: int, tenant: str | None, why: str | None = None) -> int:
        victims: dict[int, list[int]] = {}
        count = 0
        while count < pages:
            victim = self._pages.leaves.next(now_ns, tenant)
            if victim is None:
                break
            tree, row = victim
            if self._pages.events is not None:
                self._pages.events.removing(tree, (row,))
            victims.setdefault(tree.number, []).append(row)
            parent = tree.unlink(row)
            if parent >= 0:
                self._pages.offer(tree, tree.prune((parent,)))
            count += 1
        for number, rows in victims.items():
            why = why or ("capacity" if tenant is None else "quota")
            self._pages.evicted(self._pages.trees[number], rows, why)
        return count

    def evict_any(self, pages: int, now_ns: int) -> int:
        """Evict up to ``pages`` pages of whoever has what is worth least; says how many went."""
        evicted = 0
        while evicted < pages and (step := self._evict(min(_STEP, pages - evicted), now_ns, None, "operator")):
            evicted += step
        return evicted

    def evict_of(self, tree: PrefixTree, pages: int, now_ns: int) -> int:
        """Evict up to ``pages`` pages of one namespace, in the policy's order; says how many went."""
        heap = self._pages.leaves.leaves_of(tree, now_ns, pages)
        rows: list[int] = []
        while heap and len(rows) < pages:
            _, row = heapq.heappop(heap)
            rows.append(row)
            if self._pages.events is not None:
                self._pages.events.removing(tree, (row,))
            parent = tree.unlink(row)
            for exposed in tree.prune([parent] if parent >= 0 else []):
                if tree.is_evictable(exposed):
                    heapq.heappush(heap, (-self._pages.leaves.score(tree, exposed, now_ns), exposed))
        if rows:
            self._pages.evicted(tree, rows, "operator")
        self._pages.offer(tree, [row for _, row in heap])
        return len(rows)

    def evict_over_quota(self, high: float, low: float, pages: int, now_ns: int) -> int:
        """Bring tenants that have more than ``high`` of their quota down to ``low`` of it; at most so many pages of each."""
        evicted = 0
        for tenant, _ in self._pages.tenants.over(high):

            def short(tenant: str = tenant) -> int:
                return -(-dict(self._pages.tenants.over(low)).get(tenant, 0) // self._mean_footprint())

            evicted += self.evict(pages, short, now_ns, tenant)
        return evicted

    def _mean_footprint(self) -> int:
        """Bytes that a used slot takes, on average."""
        tenants = self._pages.tenants
        nbytes = sum(tenants.used.values()) + sum(tenants.quarantined.values())
        return max(1, nbytes // max(1, self._pages.slabs.used_slots()))

    def make_in_quota(self, tenant: str, slot_bytes: int, count: int, now_ns: int) -> int:
        """Try to have a tenant's quota hold ``count`` slots more, at the cost of its own pages; says how many it holds."""

        def short() -> int:
            room = self._pages.tenants.room(tenant, slot_bytes)
            assert room is not None
            missing = (count - room) * self._pages.tenants.footprint(slot_bytes)
            return -(-missing // self._mean_footprint()) if missing > 0 else 0

        self.evict(2 * short() + _STEP, short, now_ns, tenant)
        room = self._pages.tenants.room(tenant, slot_bytes)
        assert room is not None
        return room

    def make(self, slot_bytes: int, count: int, now_ns: int) -> None:
        """Try to have ``count`` free slots, with work in proportion to ``count``."""

        def short() -> int:
            return count - self._pages.slabs.available(slot_bytes)

        if self._pages.slabs.used(slot_bytes):
            self.evict(2 * count + _STEP, short, now_ns)
        # Old pages of other sizes may leave no whole extent free, however many go: empty one extent after another.
        looks = _RECLAIM_LOOKS
        for _ in range(_RECLAIM_EXTENTS):
            if short() <= 0:
                break
            looks = self._reclaim(slot_bytes, looks)
            if not looks:
                break

    def look_again(self) -> None:
        """What could not be emptied before may be by now. To be called now and then."""
        self._stuck.clear()

    def _reclaim(self, slot_bytes: int, looks: int) -> int:
        """Empty an extent of another slot size: one with few objects, of tenants over their quota if there are such. Looks at
        no more than ``looks`` extents; returns how many looks are left, 0 if none could be emptied."""
        over = {tenant for tenant, _ in self._pages.tenants.over()}
        spared: list[dict[int, Rows]] = []
        chosen: dict[int, Rows] | None = None
        while looks and chosen is None:
            found = self._pages.slabs.fewest_used(but=slot_bytes, beside=self._stuck, most=min(8, looks))
            if not found:
                break
            looks -= len(found)
            for slots in found:
                orders = self._occupants(slots)
                if orders is None:
                    self._stuck.add(int(slots[0]) // self._pages.directory.geometry.slots_per_extent)
                elif chosen is None:
                    if not over or over.issuperset(self._pages.trees[number].tenant for number in orders):
                        chosen = orders
                    else:
                        spared.append(orders)
            if spared:
                break
        if chosen is None:
            if not spared:
                return 0
            chosen = spared[0]
        for number, order in chosen.items():
            tree = self._pages.trees[number]
            self._pages.counts["evicted_pages"] += len(order)
            tree.counts["evicted_pages"] += len(order)
            tree.counts["evicted_reclaim"] += len(order)
            self._pages.counts["evicted_objects"] += self._pages.remove(tree, order, MissReason.EVICTED)
        return max(looks, 1)

    def _occupants(self, slots: Slots) -> dict[int, Rows] | None:
        """The rows to remove, by namespace, for all of these slots to be free; None if that may not be, or is too much."""
        states = self._pages.directory.states[slots]
        if (states == RESERVED).any():
            return None
        records = self._pages.directory.records[slots[states == COMMITTED]]
        orders = {}
        for number in np.unique(records["namespace"]).tolist():
            tree = self._pages.trees[number]
            keys = records["page_hash"][records["namespace"] == number].tobytes()
            order = orders[number] = tree.below(tree.find(keys, _ABSENT), _RECLAIM_PAGES)
            if (
                len(order) > _RECLAIM_PAGES
                or tree.pending[order].any()
                or not tree.guards.keys().isdisjoint(order.tolist())
            ):
                return None
        return orders if sum(map(len, orders.values())) <= _RECLAIM_PAGES else None
