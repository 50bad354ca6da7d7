"""The store of a chain that nobody has yet: what most stores are, in a few compiled steps.

:mod:`maru_server.pages` does the same, and everything else, with numpy. A client that stores a few pages waits for a server that has
slept: there each numpy call brings its own code and data back from memory, and sixty of them took longer than the messages did. Here
are the same steps in the same order; a reserve that is not of this kind is left to :class:`~maru_server.pages.Pages`, with nothing
changed. Both must leave the same books and the same pool (``tests/server/test_new_chains.py``).

*Spares* are slots that a client is given before it knows for what, so that its next store of a few pages is one message instead of two
(:class:`maru_core.protocol.Store`). They are an ordinary reservation, for pages with names that the client made up and that nobody will
look for: limits, quotas, deadlines, quarantine and the end of the session are those of any reservation, and no page is found before it
is committed. To store is to give the rows their real names, and commit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from maru_core.protocol import HASH_BYTES, ROOT, StoreStatus
from maru_server.directory import Slots
from maru_server.index import TableIndex
from maru_server.sessions import Page, Reservation, Session
from maru_server.tree import ROOT_ROW, PrefixTree, Rows

try:
    from maru_server import _store
except ImportError:  # built without a compiler
    _store = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from maru_server.pages import Pages

#: Spares are granted where this many times as many slots of the size are free: never by eviction, and never the last ones.
SPARE_ROOM: Final = 4
#: Nothing is granted ahead where slots are in quarantine for less than this, seconds: many times :data:`maru_core.spares.AGE_MAX_S`.
SPARE_QUARANTINE_S: Final = 60.0
#: What is booked, as ``_store.book`` has it.
_CHAIN, _APART, _RENAMED = range(3)


class Spare(NamedTuple):
    """Slots that were granted ahead; packed as :class:`maru_core.protocol.Reserved` has them."""

    slots: bytes = b""
    offsets: bytes = b""
    generations: bytes = b""


class Granted(NamedTuple):
    """A slot for every page, and perhaps spares."""

    status: bytes
    slots: bytes
    offsets: bytes
    generations: bytes
    spare: Spare


class Objects(NamedTuple):
    """What objects are to be: whose, where they belong, how long. The component and its shard are known to the tree."""

    session: Session
    tree: PrefixTree
    component: int
    shard: int
    world: int
    nbytes: int
    time: float
    deadline: float  # of what is reserved
    now_ns: int


class NewChains:
    """Stores of these pages that go the short way."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._compiled = pages.directory.compiled
        self._allowed = True

    def allow_spares(self, quarantine_s: float) -> None:
        """Slots are granted ahead only by a server that keeps every slot in quarantine for so long at least: a client writes to a spare
        without asking, for some seconds after it was granted, and must never meet another's page there."""
        self._allowed = quarantine_s >= SPARE_QUARANTINE_S

    # ------------------------------------------------------------ reserve

    def reserve(self, what: Objects, parent: bytes, hashes: bytes, spares: bytes = b"") -> Granted | None:
        """A slot for each page, as :meth:`Pages.reserve` has it, and for each of ``spares``, which are packed page hashes too, if there is
        room for all of them.

        None where :class:`Pages` must be asked: the chain is not all new, comes to nothing known, repeats itself, or there is not room for
        all of it at once."""
        pages, index = self._pages, what.tree.index
        if not self._compiled or not isinstance(index, TableIndex) or pages.reservations.full():
            return None
        count = len(hashes) // HASH_BYTES
        above, known = _store.probe(index.table, index.hashes, index.key, parent, hashes + spares)
        if known or above < ROOT_ROW or not count:
            return None
        slot_bytes = pages.slabs.slot_bytes(what.nbytes)
        ahead = self._spares(what, slot_bytes, count, len(spares) // HASH_BYTES)
        if not ahead and not self._is_room(what, slot_bytes, count):
            return None
        slots = pages.slabs.allocate(slot_bytes, count + ahead)
        offsets, generations = pages.directory.claim_packed(slots)
        packed, at = slots.tobytes(), count

        def keep_books() -> None:
            # Views of one array: nothing is written to it any more.
            self._book(_CHAIN, what, slots[:at], packed[: 4 * at], generations[: 8 * at], parent + hashes, above)
            if ahead:
                self._book(_APART, what, slots[at:], packed[4 * at :], generations[8 * at :], ROOT + spares, ROOT_ROW)

        pages.later(keep_books)
        pages.counts["reserved"] += count
        what.tree.counts["reserved"] += count
        if not ahead:
            return Granted(bytes(count), packed, offsets, generations, Spare())
        spare = Spare(packed[4 * at :], offsets[8 * at :], generations[8 * at :])
        return Granted(bytes(count), packed[: 4 * at], offsets[: 8 * at], generations[: 8 * at], spare)

    def _spares(self, what: Objects, slot_bytes: int, count: int, wanted: int) -> int:
        """How many spares are granted beside ``count`` slots: as many as are wanted, or none."""
        everything = count + wanted
        free = wanted and self._allowed and self._pages.slabs.available(slot_bytes) >= SPARE_ROOM * everything
        # They are one reservation more.
        pages, account = self._pages, what.session.account
        free = free and len(pages.reservations.live) + 2 <= pages.reservations.limit
        free = free and account.reservations + 2 <= pages.limits.reservations
        return wanted if free and self._is_room(what, slot_bytes, everything) else 0

    def _is_room(self, what: Objects, slot_bytes: int, count: int) -> bool:
        """Whether so many slots may be given at once, at nobody's cost."""
        pages = self._pages
        quota = pages.tenants.room(what.tree.tenant, slot_bytes)
        return (
            pages.limits.room(what.session, count, slot_bytes) >= count
            and (quota is None or quota >= count)
            and pages.slabs.available(slot_bytes) >= count
        )

    def _book(
        self, mode: int, what: Objects, slots: Slots, packed: bytes, generations: bytes, chain: bytes, above: int
    ) -> None:
        """Keep the books of claimed slots: rows, records, reservation."""
        pages, tree = self._pages, what.tree
        rows = tree.take_rows(len(slots))
        self._fill_in(mode, what, rows, slots, generations, chain, above)
        slot_bytes = pages.slabs.slot_bytes(what.nbytes)
        pages.tenants.taken(tree.tenant, len(slots), slot_bytes)
        if mode == _CHAIN:
            pages.back_again(tree, rows, chain[HASH_BYTES:])
        reservation = pages.reservations.add(
            what.session,
            slots,
            np.frombuffer(generations, "<u8"),
            Page(tree, what.component, what.shard, rows),
            what.time,
            what.deadline,
            slot_bytes,
        )
        reservation.slots_blob, reservation.generations_blob = packed, generations
        reservation.spare = mode == _APART

    def _fill_in(
        self, mode: int, what: Objects, rows: Rows, slots: Slots, generations: bytes, chain: bytes, above: int
    ) -> None:
        tree, index, directory = what.tree, what.tree.index, self._pages.directory
        assert isinstance(index, TableIndex)
        index.make_room(len(rows))
        table = tree.tables[what.component]
        _store.book(
            mode,
            tree.columns_of_a_chain(),
            (table.slots[what.shard], table.held, table.world, table.length),
            directory.words,
            directory.slot_offsets,
            rows,
            slots,
            generations,
            chain,
            above,
            what.now_ns,
            tree.number,
            what.component,
            what.shard,
            what.world,
            what.nbytes,
            what.session.owner,
            directory.share(tree.number, what.component),
        )
        index.added(len(rows))

    # ------------------------------------------------------------ store

    def store(
        self,
        what: Objects,
        parent: bytes,
        hashes: bytes,
        slots: bytes,
        generations: bytes,
        checksums: bytes,
        spares: bytes,
    ) -> tuple[StoreStatus, Spare]:
        """Publish spares of this session, which have been written, as the pages of a new chain: all of them or none. ``hashes`` are some.

        The spares are a run of what one message was granted; anything else is as if they were gone."""
        pages, tree, index = self._pages, what.tree, what.tree.index
        if not self._compiled or not isinstance(index, TableIndex):
            return StoreStatus.GONE, Spare()
        count = len(hashes) // HASH_BYTES
        reservation, at = self._granted(what, slots, generations)
        if reservation is None:
            return StoreStatus.GONE, Spare()
        above, known = _store.probe(index.table, index.hashes, index.key, parent, hashes + spares)
        if known or above < ROOT_ROW:
            return StoreStatus.KNOWN, Spare()
        page, directory = reservation.page, pages.directory
        assert page is not None
        mine, rows = reservation.slots[at : at + count], page.rows[at : at + count]
        if not _store.describe(
            directory.words,
            directory.slot_offsets,
            directory.generations,
            pages.reservations.holders,
            (tree.parent, tree.child, tree.objects, tree.pending, rows),
            mine,
            reservation.number,
            generations,
            parent + hashes,
            above,
            what.now_ns,
            tree.number,
            what.component,
            what.shard,
            what.world,
            what.nbytes,
            what.session.owner,
            directory.share(tree.number, what.component),
        ):
            return StoreStatus.GONE, Spare()
        directory.commit(mine, np.frombuffer(checksums, "<u8") if checksums else None)
        # Before anything else is tried: what the pool says is what the books must say.
        pages.later(lambda: self.stored(what, reservation, at, count, generations, parent + hashes, above))
        return StoreStatus.STORED, self.grant(what, reservation.slot_bytes, spares)

    def stored(
        self, what: Objects, reservation: Reservation, at: int, count: int, generations: bytes, chain: bytes, above: int
    ) -> None:
        """Keep the books of spares that were published: ``count`` of the reservation's, from ``at`` on, as a chain below row ``above``."""
        pages, tree, page = self._pages, what.tree, reservation.page
        assert page is not None
        rows, slots = page.rows[at : at + count], reservation.slots[at : at + count]
        tree.index.remove(rows)
        self._fill_in(_RENAMED, what, rows, slots, generations, chain, above)
        pages.back_again(tree, rows, chain[HASH_BYTES:])
        self._published(reservation, rows, slots, what.now_ns)
        pages.counts["reserved"] += count
        tree.counts["reserved"] += count

    def grant(self, what: Objects, slot_bytes: int, spares: bytes) -> Spare:
        """Slots ahead for the next store, if there are any."""
        ahead = self._spares(what, slot_bytes, 0, len(spares) // HASH_BYTES)
        if not ahead:
            return Spare()
        slots = self._pages.slabs.allocate(slot_bytes, ahead)
        spare = Spare(slots.tobytes(), *self._pages.directory.claim_packed(slots))
        self._pages.later(
            lambda: self._book(_APART, what, slots, spare.slots, spare.generations, ROOT + spares, ROOT_ROW)
        )
        return spare

    def _granted(self, what: Objects, slots: bytes, generations: bytes) -> tuple[Reservation | None, int]:
        """The live reservation of which these slots are a run, and where it begins; that it still has them is still to be seen."""
        first = int.from_bytes(slots[:4], "little")
        if first >= self._pages.directory.geometry.slot_count:
            return None, 0
        reservation = self._pages.reservations.of_slot(first)
        if reservation is None or not reservation.spare:
            return None, 0
        if reservation.session is not what.session or reservation.page is None:
            return None, 0
        page = reservation.page
        if page.tree is not what.tree or page.component != what.component or page.shard != what.shard:
            return None, 0
        begin = reservation.slots_blob.find(slots)
        while begin > 0 and begin % 4:
            begin = reservation.slots_blob.find(slots, begin + 1)
        at = begin // 4
        if begin < 0 or reservation.generations_blob[8 * at : 8 * at + len(generations)] != generations:
            return None, 0
        table, row = what.tree.tables[what.component], page.rows.item(at)
        # As they were granted: all of a reservation are alike.
        if table.world.item(row) != what.world or table.length.item(row) != what.nbytes:
            return None, 0
        return reservation, at

    # ------------------------------------------------------------ commit

    def published(self, reservation: Reservation, now_ns: int) -> bool:
        """Keep the books of a reservation that was committed as a whole; False where :class:`Pages` must."""
        if not self._compiled or reservation.page is None:
            return False
        self._published(reservation, reservation.page.rows, reservation.slots, now_ns)
        return True

    def _published(self, reservation: Reservation, rows: Rows, slots: Slots, now_ns: int) -> None:
        page = reservation.page
        assert page is not None
        pages, tree = self._pages, page.tree
        leaves = _store.publish(
            tree.child, tree.objects, tree.pending, tree.last_use, tree.tables[page.component].have, rows, now_ns
        )
        pages.reservations.settle(reservation, slots)
        if pages.events is not None:
            pages.events.published(tree, rows)
        pages.counts["committed"] += len(rows)
        tree.counts["committed"] += len(rows)
        pages.offer(tree, leaves)
