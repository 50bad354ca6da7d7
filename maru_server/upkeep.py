"""Upkeep: what is due without anybody asking, a bounded amount at a time.

Leases and holds that end, eviction ahead of need, uses that are written down, and what the log has to say. When it is
called is the service's to know; what is done does not depend on that.
"""

from __future__ import annotations

import math
from typing import Final

from maru_server.books import Books
from maru_server.growth import Growth
from maru_server.leases import Leases

#: Bounds of one tick: pages evicted, uses written down, leaves that were used put where they belong (of each queue).
_PAGES: Final = 1024
_USES: Final = 4096
_LEAVES: Final = 128


class Upkeep:
    """Does it, to these books."""

    def __init__(self, books: Books, leases: Leases, growth: Growth) -> None:
        self._books = books
        self._config = books.config
        self._slabs = books.slabs
        self._pages = books.pages
        self._leases = leases
        self._growth = growth
        self._evicting = False

    def tick(self, now: float) -> None:
        """Leases, quarantine, holds, eviction above the watermark, uses written down; a bounded part of each."""
        books = self._books
        time = books.clock.time(now)
        self._leases.expire(time)
        books.holds.expire(time)
        self._evict_ahead(books.wall_ns(now), time)
        books.pages.leaves.settle(_LEAVES)
        books.uses.write(_USES)
        books.diary.look(time, books.pages.counts)

    def _evict_ahead(self, now_ns: int, time: float) -> None:
        """Between the watermarks, of the pool and of each quota, so that a reserve need not wait for it."""
        extents = self._growth.live_extents(time)
        low = self._config.low * extents
        self._pages.room.look_again()
        self._pages.room.evict_over_quota(self._config.high, self._config.low, _PAGES, now_ns)
        if self._slabs.used_extents() > self._config.high * extents:
            self._evicting = True
        if self._evicting:

            def short() -> int:
                used = self._slabs.used_extents()
                return math.ceil(self._slabs.used_slots() * (used - low) / used) if used > low else 0

            evicted = self._pages.room.evict(_PAGES, short, now_ns)
            if evicted < _PAGES:
                self._evicting = False
