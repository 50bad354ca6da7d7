"""Overview: the server in figures, for people, metrics and tests. Looks, and changes nothing.

Whatever has been put off must be done before (:meth:`maru_server.state.ServerState.finish`), or the figures are of a moment
that never was. Rows about single namespaces, sessions or pages are :mod:`maru_server.inspection`'s.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Final

from maru_core.protocol import REPORTED
from maru_server import footprint
from maru_server.books import Books
from maru_server.engine_messages import MISSES
from maru_server.integrity import check, check_guards
from maru_server.metrics import Figures, SpaceFigures
from maru_server.reaches import pool_row
from maru_server.reports import PREFIX as CLIENT

#: Figures that any client may see: the rest lets one tenant see what the others do.
FOR_EVERYBODY: Final = ("incarnation", "pool_uri", "extents", "extent_bytes")
_COUNTS: Final = (
    "matches",
    "pages_asked",
    "pages_found",
    *MISSES.values(),
    "reserved",
    "no_room",
    "committed",
    "lost",
    "quarantined",
    "deleted",
    "evicted_pages",
    "evicted_objects",
    "discarded",
    "over_rate",
    "over_share",
    "clients_unlisted",
    "handshakes_failed",
    "over_quota",
    "pins_ended",
)


class Overview:
    """Of these books."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def stats(self) -> dict[str, float | int | str]:
        """Figures for people and tests; counts are since the start."""
        books = self._books
        counts, slabs, reservations = books.pages.counts, books.slabs, books.reservations
        slots = slabs.used_slots() - reservations.live_slots - reservations.quarantined_slots
        pages = sum(map(len, books.trees.values())) - reservations.spares().total()
        memory_bytes = self.memory_bytes()
        return {
            "incarnation": books.incarnation,
            "pool_uri": books.pool_uri,
            "sessions": len(books.sessions),
            "sessions_silent": sum(session.silent for session in books.sessions),
            "namespaces": len(books.names.namespaces),
            "pages": pages,
            "memory_bytes": memory_bytes,
            "memory_per_page": memory_bytes / pages if pages else 0.0,
            "objects": slots,
            "slots_reserved": reservations.live_slots,
            "slots_quarantined": reservations.quarantined_slots,
            "bytes_used": slabs.used_bytes(),
            "policy": books.config.policy,
            "pins": len(books.pages.pins),
            "pinned_bytes": books.pages.pins.nbytes,
            "pin_budget_bytes": books.pages.pins.budget,
            "holds": len(books.holds),
            "held_bytes": books.holds.held_bytes,
            "extents": books.geometry.extent_count,
            "extents_ready": slabs.ready,
            "extents_cut": slabs.cut,
            "extent_bytes": books.geometry.extent_bytes,
            "used_share": slabs.used_extents() / books.geometry.extent_count,
            "stalled_s": books.clock.stalled_s,
            **{name: counts[name] for name in _COUNTS},
            **{CLIENT + name: counts[CLIENT + name] for name in REPORTED},
            **({} if books.pages.events is None else {"events_overflows": books.pages.events.overflows}),
        }

    def figures(self, agents: int) -> Figures:
        """A copy of all that there is to show, in a time that does not depend on the number of pages.

        Args:
            agents: how many serve the pool.
        """
        stats = self.stats()
        books, reservations = self._books, self._books.reservations
        quarantined = reservations.quarantined_bytes
        # What was reserved when the server started is the oldest, and the only one with slots of several sizes.
        for oldest in islice(reservations.quarantined.values(), 1):
            if not oldest.slot_bytes:
                slots = oldest.slots[reservations.open(oldest)]
                quarantined += int(books.directory.extents[slots // books.geometry.slots_per_extent].sum())
        spares = reservations.spares()
        return Figures(
            stats=stats,
            counts=dict(books.pages.counts),
            spaces=[
                self._space(number, tenant, record, spares[number])
                for (tenant, record), number in books.names.namespaces.items()
            ],
            sizes=books.slabs.sizes(),
            sessions=dict(Counter(session.peer.tenant for session in books.sessions)),
            quarantined_bytes=quarantined,
            pools=[pool_row(books, agents, operator=True)],
        )

    def _space(self, number: int, tenant: str, record: bytes, spares: int) -> SpaceFigures:
        tree = self._books.trees[number]
        columns = [(table.length[: tree.size], table.have[: tree.size]) for table in tree.tables.values()]
        return SpaceFigures(number, tenant, record, len(tree) - spares, dict(tree.counts), columns)

    def memory_bytes(self) -> int:
        """Memory of the tables kept here, bytes, worked out from their sizes: what rises and falls with the pages."""
        books, reservations = self._books, self._books.reservations
        slots_reserved = reservations.live_slots + reservations.quarantined_slots
        return (
            sum(map(footprint.tree_bytes, books.trees.values()))
            + footprint.queue_bytes(len(books.pages.leaves))
            + books.slabs.memory_bytes()
            + books.pages.ghosts.memory_bytes()
            + footprint.RESERVED_SLOT * slots_reserved
            + footprint.OBJECT * (len(reservations) + len(books.sessions))
            + books.uses.memory_bytes()
        )

    def check(self) -> None:
        """Compare all that is kept with each other and with the pool.

        Raises:
            AssertionError: naming what does not fit.
        """
        books, pages = self._books, self._books.pages
        check(
            books.directory,
            books.slabs,
            books.trees,
            books.reservations,
            books.sessions,
            pages.leaves,
            pages.tenants,
        )
        check_guards(books.trees, books.holds.check(), pages.pins.check())
        books.names.check(books.trees)
