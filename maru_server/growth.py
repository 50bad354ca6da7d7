"""How much of the pool's memory there is, and how much there should be: extents become ready one after another.

Only says how many. Giving an extent its memory takes tens of milliseconds and is the service's
(:mod:`maru_server.provisioner`); cutting one into slots is :mod:`maru_server.slabs`'.
"""

from __future__ import annotations

from typing import Final

from maru_core.pool.geometry import Geometry
from maru_server.pages import Pages
from maru_server.slabs import Slabs

#: Memory that should be ready beyond what is in use, bytes: a burst of stores must not wait for the kernel to zero pages.
AHEAD_BYTES: Final = 256 << 20


class Growth:
    """Times are the server's own (see :class:`maru_server.sessions.Clock`).

    Args:
        growth_s: waited for memory to be provided before evicting instead, seconds.
    """

    def __init__(self, geometry: Geometry, slabs: Slabs, pages: Pages, *, growth_s: float, time: float) -> None:
        self._geometry = geometry
        self._slabs = slabs
        self._pages = pages
        self._growth_s = growth_s
        self._grew = time  # when extents last became ready, or were not wanted

    def extents_ready(self, count: int, time: float) -> None:
        """Extents ``[0, count)`` have their memory and may be used."""
        # Also where the state knows of more: a server that starts on a pool in use goes through what it has first, and
        # until it has come to new memory nothing need be evicted for want of it.
        self._grew = time
        self._slabs.extents_ready(count)

    def wanted(self) -> int:
        """How many extents should be ready: those in use, and some ahead."""
        cut = self._slabs.cut
        ahead = max(2, -(-AHEAD_BYTES // self._geometry.extent_bytes), cut // 4)
        return min(self._geometry.extent_count, cut + ahead)

    def live_extents(self, time: float) -> int:
        """Extents that there are or will be soon: what shares of the pool are shares of."""
        pages = self._pages
        pages.may_grow = self._may_grow(time)
        pages.tenants.live_extents = self._geometry.extent_count if pages.may_grow else max(self._slabs.ready, 1)
        return pages.tenants.live_extents

    def _may_grow(self, time: float) -> bool:
        """More of the pool will be ready soon: no page need be evicted now. Not for long: memory may be short."""
        if self._slabs.ready >= self._geometry.extent_count:
            return False
        if self.wanted() <= self._slabs.ready:
            self._grew = time
        return time - self._grew <= self._growth_s
