"""How much of the pool each tenant has, and how much it may have.

What counts is the part of an extent that a slot takes (the rest of an extent that no slot fits into can never be used), as
whole bytes, so that adding and taking away never drifts apart. Slots count while they are on one of the tenant's pages,
committed or reserved, and while they are in quarantine because its clients may still write into them: else it would take the
pool by letting go of what it writes. A quota is a share of the extents that there are, or can be had: it
is a bound and not a promise, and several quotas may add up to more than the pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from maru_core.errors import ConfigError
from maru_server.directory import PoolDirectory, Slots
from maru_server.eviction import policy
from maru_server.tree import PrefixTree


def parse_quotas(texts: list[str]) -> dict[str, float]:
    """Quotas by tenant of options like ``search=0.3``; ``=0.3`` is the quota of clients without a tenant.

    Raises:
        ConfigError: naming what is wrong and how it is written.
    """
    quotas: dict[str, float] = {}
    for text in texts:
        tenant, equals, share = text.rpartition("=")
        try:
            value = float(share)
        except ValueError:
            value = 0.0
        if not equals or not 0 < value <= 1:
            raise ConfigError(
                f"--quota is {text!r}: give TENANT=SHARE with a share of the pool above 0 and up to 1, as in search=0.3"
            )
        if tenant in quotas:
            raise ConfigError(f"--quota is given twice for tenant {tenant!r}: give it once")
        quotas[tenant] = value
    return quotas


def eviction_config(policy_name: str, quotas: list[str], pin_share: float) -> dict[str, Any]:
    """Fields of :class:`maru_server.config.StateConfig`, from the options ``--policy``, ``--quota`` and ``--pin-share``.

    Raises:
        ConfigError: naming the option, the value and what it may be.
    """
    policy(policy_name)
    if not 0 <= pin_share <= 1:
        raise ConfigError(f"--pin-share is {pin_share:g}: give a part of the pool from 0 to 1")
    return {"policy": policy_name, "quotas": parse_quotas(quotas), "pin_share": pin_share}


class Tenants:
    """Args:
    quotas: shares by tenant; whoever has none may fill the pool.
    """

    def __init__(self, directory: PoolDirectory, quotas: Mapping[str, float]) -> None:
        self._directory = directory
        self.quotas = dict(quotas)
        #: Bytes by tenant: on its pages, and in quarantine.
        self.used: Counter[str] = Counter()
        self.quarantined: Counter[str] = Counter()
        #: Extents that there are or can be had.
        self.live_extents = directory.geometry.extent_count

    def footprint(self, slot_bytes: int) -> int:
        """Bytes that one slot of this size takes."""
        extent = self._directory.geometry.extent_bytes
        return extent // (extent // slot_bytes)

    def taken(self, tenant: str, count: int, slot_bytes: int) -> None:
        """So many slots are on its pages now."""
        self.used[tenant] += count * self.footprint(slot_bytes)

    def returned(self, tenant: str, slots: Slots) -> None:
        """These slots, whose extents are still cut, are on its pages no more."""
        self.used[tenant] -= self.bytes_of(slots)

    def kept_away(self, tenant: str, slots: Slots) -> None:
        """These slots, which were on its pages, are in quarantine."""
        self.quarantined[tenant] += self.bytes_of(slots)

    def let_in(self, tenant: str, slots: Slots) -> None:
        """These slots, whose extents are still cut, are in quarantine no more."""
        self.quarantined[tenant] -= self.bytes_of(slots)

    def bytes_of(self, slots: Slots) -> int:
        """Bytes that these slots take together; their extents must be cut."""
        geometry = self._directory.geometry
        sizes = self._directory.extents[slots // geometry.slots_per_extent]
        return int((geometry.extent_bytes // (geometry.extent_bytes // sizes)).sum()) if len(sizes) else 0

    def quota(self, tenant: str) -> int | None:
        """Bytes it may have, None where it may fill the pool."""
        share = self.quotas.get(tenant)
        return None if share is None else int(share * self.live_extents * self._directory.geometry.extent_bytes)

    def room(self, tenant: str, slot_bytes: int) -> int | None:
        """How many more slots of this size it may have, None where nothing bounds them."""
        quota = self.quota(tenant)
        if quota is None:
            return None
        return max(0, quota - self.used[tenant] - self.quarantined[tenant]) // self.footprint(slot_bytes)

    def over(self, part: float = 1.0) -> list[tuple[str, int]]:
        """Tenants that have more than ``part`` of their quota, and by how many bytes; farthest over it first."""
        found = []
        for tenant in self.quotas:
            quota = self.quota(tenant)
            assert quota is not None
            excess = self.used[tenant] - int(part * quota)
            if excess > 0:
                found.append((tenant, excess))
        return sorted(found, key=lambda item: -item[1])

    def check(
        self,
        trees: Mapping[int, PrefixTree],
        slots: Mapping[int, list[int]],
        quarantined: Iterable[tuple[str, list[int]]],
    ) -> None:
        """The counts are what the trees hold. ``slots`` are those on the pages of each tree, ``quarantined`` those of tenants."""
        expected: Counter[str] = Counter()
        for number, tree in trees.items():
            expected[tree.tenant] += self.bytes_of(np.array(slots.get(number, ()), np.uint32))
        assert +expected == +self.used, "bytes of a tenant"
        away: Counter[str] = Counter()
        for tenant, theirs in quarantined:
            away[tenant] += self.bytes_of(np.array(theirs, np.uint32))
        assert +away == +self.quarantined, "bytes of a tenant in quarantine"
        counts = [*self.used.values(), *self.quarantined.values()]
        assert all(count >= 0 for count in counts), "a tenant has less than nothing"
