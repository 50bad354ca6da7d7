"""The store of a chain that nobody has yet: what most stores are, in a few compiled steps.

:mod:`maru_server.pages` does the same, and everything else, with numpy. A client that stores a few pages waits for a server that has
slept: there each numpy call brings its own code and data back from memory, and sixty of them took longer than the messages did. Here
are the same steps in the same order; a reserve that is not of this kind is left to :class:`~maru_server.pages.Pages`, with nothing
changed. Both must leave the same books and the same pool (``tests/server/test_new_chains.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from maru_core.protocol import HASH_BYTES
from maru_server.index import TableIndex
from maru_server.sessions import Page, Reservation, Session
from maru_server.tree import PrefixTree

try:
    from maru_server import _store
except ImportError:  # built without a compiler
    _store = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from maru_server.pages import Grant, Pages


class NewChains:
    """Stores of these pages that go the short way."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._compiled = pages.directory.compiled

    def reserve(
        self,
        session: Session,
        tree: PrefixTree,
        component: int,
        shard: int,
        world: int,
        parent: bytes,
        hashes: bytes,
        nbytes: int,
        *,
        time: float,
        deadline: float,
        now_ns: int,
    ) -> tuple[bytes, bytes, bytes, bytes] | None:
        """A slot for each page, as :meth:`Pages.reserve` has it; None where it must be asked: the chain is not all new, comes to nothing
        known, repeats itself, or there is not room for all of it at once. The component and its shard are known to the tree."""
        pages, index = self._pages, tree.index
        if not self._compiled or not isinstance(index, TableIndex) or pages.reservations.full():
            return None
        count = len(hashes) // HASH_BYTES
        above, known = _store.probe(index.table, index.hashes, index.key, parent, hashes)
        if known or above < -1 or not count:
            return None
        slabs = pages.slabs
        slot_bytes = slabs.slot_bytes(nbytes)
        quota = pages.tenants.room(tree.tenant, slot_bytes)
        if (
            pages.limits.room(session, count, slot_bytes) < count
            or (quota is not None and quota < count)
            or slabs.available(slot_bytes) < count
        ):
            return None
        slots = slabs.allocate(slot_bytes, count)
        offsets, generations = pages.directory.claim_packed(slots)
        packed = slots.tobytes()

        def keep_books() -> None:
            rows = tree.take_rows(count)
            index.make_room(count)
            table, directory = tree.tables[component], pages.directory
            _store.book(
                tree.columns_of_a_chain(),
                (table.slots[shard], table.held, table.world, table.length),
                directory.words,
                directory.slot_offsets,
                rows,
                slots,
                generations,
                parent + hashes,
                above,
                now_ns,
                tree.number,
                component,
                shard,
                world,
                nbytes,
                session.owner,
                directory.share(tree.number, component),
            )
            index.added(count)
            pages.tenants.taken(tree.tenant, count, slot_bytes)
            pages.back_again(tree, rows, hashes)
            reservation = pages.reservations.add(
                session,
                slots,
                np.frombuffer(generations, "<u8"),
                Page(tree, component, shard, rows),
                time,
                deadline,
                slot_bytes,
            )
            reservation.slots_blob, reservation.generations_blob = packed, generations

        pages.later(keep_books)
        pages.counts["reserved"] += count
        tree.counts["reserved"] += count
        return bytes(count), packed, offsets, generations

    def published(self, reservation: Reservation, now_ns: int) -> bool:
        """Keep the books of a reservation that was committed as a whole; False where :class:`Pages` must."""
        page = reservation.page
        if not self._compiled or page is None:
            return False
        tree, rows = page.tree, page.rows
        leaves = _store.publish(
            tree.child, tree.objects, tree.pending, tree.last_use, tree.tables[page.component].have, rows, now_ns
        )
        pages = self._pages
        pages.reservations.settle(reservation, reservation.slots)
        if pages.events is not None:
            pages.events.published(tree, rows)
        pages.counts["committed"] += len(rows)
        tree.counts["committed"] += len(rows)
        pages.offer(tree, leaves)
        return True
