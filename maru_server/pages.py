"""What can be done with pages and their slots: reserve, commit, release, delete, clear, evict.

Keeps the trees, the free slots, the reservations and the pool's directory in step with each other. Requests come here
checked (:mod:`maru_server.state`); what remains are answers, not errors. Order matters throughout: memory is written
so that a kill anywhere leaves nothing that could be believed wrongly, and a slot is free for others only when nobody
may write into it any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from maru_core.pool.format import COMMITTED
from maru_core.protocol import HASH_BYTES, NO_SLOT, ROOT, CommitStatus, MissReason, ReserveStatus
from maru_server.directory import OWNER_WORD, U64, PoolDirectory, Slots
from maru_server.events import Events
from maru_server.eviction import DEFAULT_POLICY, Evictor
from maru_server.ghosts import REASON_BITS, REASON_MASK, Ghosts
from maru_server.limits import Limits
from maru_server.new_chains import NewChains
from maru_server.pins import Pins
from maru_server.room import Room
from maru_server.sessions import Page, Reservation, Reservations, Session
from maru_server.slabs import Slabs
from maru_server.tenants import Tenants
from maru_server.tree import ROOT_ROW, UNKNOWN_ROW, PrefixTree, Rows

#: Stands for "not known" among rows; differs from every row and from ROOT_ROW and UNKNOWN_ROW.
_ABSENT: Final = -3
_ONE: Final = np.uint32(1)
_NO_SLOTS: Final = np.empty(0, np.uint32)


class Grant(NamedTuple):
    """One element per hash; packed as :class:`maru_core.protocol.Reserved` has them."""

    status: bytes
    slots: bytes
    offsets: bytes
    generations: bytes


def words(hashes: bytes) -> U64:
    """Packed hashes as u64, shape ``(n, 4)``."""
    return np.frombuffer(hashes, "<u8").reshape(-1, HASH_BYTES // 8)


class Pages:
    """All pages of a pool."""

    def __init__(
        self,
        directory: PoolDirectory,
        slabs: Slabs,
        trees: dict[int, PrefixTree],
        reservations: Reservations,
        incomplete_grace_ns: int,
        *,
        policy: str = DEFAULT_POLICY,
        quotas: Mapping[str, float] = MappingProxyType({}),
        pin_bytes: int = 0,
    ) -> None:
        self.directory = directory
        self.slabs = slabs
        self.trees = trees
        self.reservations = reservations
        self.leaves = Evictor(trees, incomplete_grace_ns, policy)
        self.tenants = Tenants(directory, quotas)
        self.pins = Pins(directory, trees, self.tenants, self.leaves.offer, pin_bytes)
        self.counts: Counter[str] = Counter()
        #: What became of pages that are gone.
        self.ghosts = Ghosts(directory.geometry.slot_count)
        #: Who is to know which pages come and go.
        self.events: Events | None = None
        #: What is still to be done for requests that were answered; see :meth:`finish`.
        self._later: list[Callable[[], None]] = []
        #: More memory is on its way: a reserve that finds none says "no room" instead of evicting.
        self.may_grow = False
        self.limits = Limits()
        self.room = Room(self)
        self.new_chains = NewChains(self)
        for tree in trees.values():
            rows = tree.used_rows()
            self.tenants.used[tree.tenant] += self.tenants.bytes_of(tree.slots_of(rows))
            self.offer(tree, rows[tree.child[rows] < 0].tolist())

    def finish(self) -> None:
        """Do what was put off. A reserve and a commit are answered when the pool says what it must say; the books are brought
        up to date while the answer travels. To be called before anything else looks at them."""
        while self._later:
            self._later.pop(0)()

    def later(self, work: Callable[[], None]) -> None:
        """Have this done by :meth:`finish`."""
        self._later.append(work)

    # ------------------------------------------------------------ reserve

    def reserve(
        self,
        session: Session,
        tree: PrefixTree,
        component: int,
        shard: int,
        world: int,
        parent: bytes,
        hashes: bytes,
        keys: list[bytes],
        nbytes: int,
        *,
        time: float,
        deadline: float,
        now_ns: int,
    ) -> Grant:
        """A slot for each object that is neither there nor on its way. ``keys`` are distinct, without ``parent``."""
        count = len(keys)
        above = ROOT_ROW if parent == ROOT else int(tree.find(parent, _ABSENT)[0])
        status = np.zeros(count, np.uint8)
        loose: list[int] = []
        rows = tree.find(hashes, _ABSENT)
        known = np.flatnonzero(rows != _ABSENT)
        if not len(known):
            wanted = np.arange(count)
        else:
            loose = self._judge(tree, above, rows, known, status, component, shard, world, nbytes)
            tree.used(rows[status == ReserveStatus.EXISTS], now_ns)
            tree.last_use[rows[known]] = now_ns
            wanted = np.flatnonzero(status == ReserveStatus.RESERVED)

        slot_bytes = self.slabs.slot_bytes(nbytes)
        pinned = None
        most = self.limits.room(session, len(wanted), slot_bytes)
        if most < len(wanted):
            self.counts["over_share"] += len(wanted) - most
        limited = len(wanted) if self.reservations.full() else len(wanted) - most
        quota = self.tenants.room(tree.tenant, slot_bytes)
        over = quota is not None and quota < most
        if self.reservations.full() or not most:
            slots = _NO_SLOTS
        else:
            if over or (self.slabs.available(slot_bytes) < most and not self.may_grow):
                # What this very batch builds on must not be evicted to make room for it.
                pinned = rows[known] if above < 0 else np.append(rows[known], above)
                tree.pending[pinned] += _ONE
                if over:
                    quota = self.room.make_in_quota(tree.tenant, slot_bytes, most, now_ns)
                    most = min(most, quota)
                if most and self.slabs.available(slot_bytes) < most and not self.may_grow:
                    self.room.make(slot_bytes, most, now_ns)
            slots = self.slabs.allocate(slot_bytes, most) if most else _NO_SLOTS
        given = wanted[: len(slots)]
        status[wanted[len(slots) :]] = ReserveStatus.NO_ROOM
        if over and quota is not None:
            status[wanted[max(quota, len(slots)) :]] = ReserveStatus.QUOTA
        packed = self._nothing(count)
        if len(given):
            granted = self.directory.claim(slots)
            offsets = self.directory.offsets(slots)
            if len(given) == count:
                packed = (slots.tobytes(), offsets.tobytes(), granted.tobytes())
            else:
                packed = self._spread(count, given, slots, offsets, granted)

            def keep_books() -> None:
                self._grow(tree, above, parent, rows, given, keys, loose, now_ns)
                everything = words(parent + hashes)
                if len(given) == count:
                    mine, own, parents = rows, everything[1:], everything[:-1]
                else:
                    mine, own, parents = rows[given], everything[given + 1], everything[given]
                self.directory.describe(
                    slots,
                    granted,
                    namespace=tree.number,
                    component=component,
                    shard=shard,
                    world=world,
                    length=nbytes,
                    hashes=own,
                    parents=parents,
                    owner=session.owner,
                    now_ns=now_ns,
                )
                tree.hold(component, shard, mine, slots, world, nbytes)
                self.tenants.taken(tree.tenant, len(slots), slot_bytes)
                self.back_again(tree, mine, own.tobytes())
                reservation = self.reservations.add(
                    session, slots, granted, Page(tree, component, shard, mine), time, deadline, slot_bytes
                )
                reservation.remember_blobs()

            self.later(keep_books)
            if pinned is not None:
                self.finish()
        if pinned is not None:
            tree.pending[pinned] -= _ONE
            self.offer(tree, tree.prune(pinned.tolist()))
        told = status.tobytes()
        self._count_reserve(tree, told, len(wanted), len(given), limited)
        return Grant(told, *packed)

    def _count_reserve(self, tree: PrefixTree, status: bytes, wanted: int, given: int, limited: int) -> None:
        """``wanted`` objects had to have a slot, ``given`` got one; ``limited`` could not, whatever room there was."""
        self.counts["reserved"] += given
        tree.counts["reserved"] += given
        if wanted < len(status):
            tree.counts["refused_busy"] += status.count(ReserveStatus.BUSY)
            tree.counts["refused_conflict"] += status.count(ReserveStatus.CONFLICT)
        if given < wanted:
            over = status.count(ReserveStatus.QUOTA)
            limited = min(limited, wanted - given - over)
            self.counts["no_room"] += wanted - given - over
            tree.counts["refused_no_room"] += wanted - given - over - limited
            tree.counts["refused_limit"] += limited
            if over:
                self.counts["over_quota"] += over
                tree.counts["refused_quota"] += over

    def back_again(self, tree: PrefixTree, rows: Rows, hashes: bytes) -> None:
        """Pages that were gone are stored again: one that was evicted was worth more than it seemed."""
        if not self.ghosts.remembers(tree.number, hashes):
            return
        notes = self.ghosts.notes(tree.number, hashes)
        self.ghosts.forget(tree.number, hashes)
        evicted = notes & REASON_MASK == MissReason.EVICTED
        before = (np.int64(1) << (notes[evicted] >> REASON_BITS).astype(np.int64)) >> 1
        tree.uses[rows[evicted]] = np.minimum(before + 1, 255)

    @staticmethod
    def _nothing(count: int) -> tuple[bytes, bytes, bytes]:
        """Slots, offsets and generations where nothing was given."""
        return b"\xff" * (4 * count), bytes(8 * count), bytes(8 * count)

    @staticmethod
    def _spread(
        count: int, given: npt.NDArray[np.intp], slots: Slots, offsets: U64, generations: U64
    ) -> tuple[bytes, bytes, bytes]:
        all_slots = np.full(count, NO_SLOT, "<u4")
        all_offsets, all_generations = np.zeros(count, "<u8"), np.zeros(count, "<u8")
        all_slots[given], all_offsets[given], all_generations[given] = slots, offsets, generations
        return all_slots.tobytes(), all_offsets.tobytes(), all_generations.tobytes()

    def _judge(
        self,
        tree: PrefixTree,
        above: int,
        rows: Rows,
        known: npt.NDArray[np.intp],
        status: npt.NDArray[np.uint8],
        component: int,
        shard: int,
        world: int,
        nbytes: int,
    ) -> list[int]:
        """Fill in the status of known pages; RESERVED where they still need this object.

        Returns the indices of *loose* pages: hollow rows that had no parent and now get one."""
        expected = np.concatenate([[above], rows[:-1]])[known]
        actual = tree.parent[rows[known]]
        is_loose = actual == UNKNOWN_ROW
        wrong = (actual != expected) & ~is_loose
        loose: list[int] = []
        if is_loose.any():
            # The first page of the batch that hangs in the tree already says where the top is; a loose page that is
            # itself that top would hang below itself.
            top = tree.root(above) if above >= 0 else _ABSENT
            wrong |= is_loose & (rows[known] == top)
            loose = known[is_loose].tolist()
        if wrong.any():
            # A chain that contradicts what is known: what follows rests on the contradiction.
            end = int(known[wrong.argmax()])
            status[end:] = ReserveStatus.CONFLICT
            loose = [index for index in loose if index < end]
            known = known[known < end]
        table = tree.tables.get(component)
        if table is None or not len(known):
            return loose
        at = rows[known]
        differs = (table.held[at] > 0) & ((table.world[at] != world) | (table.length[at] != nbytes))
        status[known[differs]] = ReserveStatus.CONFLICT
        column = table.slots.get(shard)
        if column is not None:
            held = column[at]
            taken = np.flatnonzero((held > 0) & ~differs)
            committed = self.directory.states[held[taken] - _ONE] == COMMITTED
            status[known[taken]] = np.where(committed, ReserveStatus.EXISTS, ReserveStatus.BUSY)
        return loose

    def _grow(
        self,
        tree: PrefixTree,
        above: int,
        parent: bytes,
        rows: Rows,
        given: npt.NDArray[np.intp],
        keys: list[bytes],
        loose: list[int],
        now_ns: int,
    ) -> None:
        """Make rows for the given pages that have none (in place in ``rows``), and link loose ones."""
        new = given[rows[given] == _ABSENT]
        linked = set(loose).intersection(given.tolist()) if loose else ()
        if not len(new) and not linked:
            return
        first = min(int(new[0]) if len(new) else len(rows), min(linked, default=len(rows)))
        if first == 0 and above == _ABSENT:
            above = int(tree.add_chain([parent], UNKNOWN_ROW, now_ns)[0])
        if not linked:
            # Without loose pages, what follows a new page is new too: one run.
            start, end = int(new[0]), int(new[-1]) + 1
            assert end - start == len(new)
            before = int(rows[start - 1]) if start else above
            rows[start:end] = tree.add_chain(keys[start:end], before, now_ns)
            return
        for index in sorted([*new.tolist(), *linked]):
            before = int(rows[index - 1]) if index else above
            if index in linked:
                tree.link(int(rows[index]), before)
            else:
                rows[index] = tree.add_chain([keys[index]], before, now_ns)[0]

    # ------------------------------------------------------------ commit, release

    def commit_whole(
        self, session: Session, slots: bytes, generations: bytes, checksums: bytes, now_ns: int
    ) -> bytes | None:
        """:meth:`commit` of exactly what one Reserve message got, none of it committed yet: what nearly all are, and seen at one glance.
        None where it is anything else; nothing was changed then, and nothing of the arguments need be valid."""
        first = int.from_bytes(slots[:4], "little")
        if len(slots) < 4 or first >= self.directory.geometry.slot_count:
            return None
        reservation = self.reservations.of_slot(first)
        if (
            reservation is None
            or reservation.session is not session
            or reservation.page is None
            or reservation.slots_blob != slots
            or reservation.generations_blob != generations
            or reservation.remaining != len(reservation.slots)
            or len(checksums) not in (0, len(generations))
        ):
            return None
        self.directory.commit(reservation.slots, np.frombuffer(checksums, "<u8") if checksums else None)
        self.later(partial(self._all_published, reservation, now_ns))
        return bytes(reservation.remaining)  # all CommitStatus.COMMITTED

    def commit(
        self, session: Session, slots_blob: bytes, generations_blob: bytes, checksums_blob: bytes, now_ns: int
    ) -> bytes:
        """Publish what this session reserved; says per slot what became of it. Repeating it changes nothing. For what is not seen by
        :meth:`commit_whole`, which is to be asked first."""
        slots = np.frombuffer(slots_blob, "<u4")
        checksums = np.frombuffer(checksums_blob, "<u8") if checksums_blob else None
        if not len(slots):
            return b""
        generations = np.frombuffer(generations_blob, "<u8")
        for reservation, index, at in self._held_by(session, slots, generations):
            mine = reservation.slots[index]
            if reservation.page is None:
                self._take_back(reservation, mine)
            else:
                some = None if checksums is None else checksums[at]
                self._publish(reservation, reservation.page.rows[index], mine, some, now_ns)
        directory = self.directory
        stored = directory.states[slots] == COMMITTED
        stored &= directory.generations[slots] == generations
        stored &= directory.words[slots, OWNER_WORD] == session.owner
        self.counts["lost"] += int(len(slots) - stored.sum())
        return np.where(stored, CommitStatus.COMMITTED, CommitStatus.LOST).astype(np.uint8).tobytes()

    def release(self, session: Session, slots_blob: bytes, generations_blob: bytes) -> int:
        """Take back what this session reserved and will not write any more; says how many slots."""
        count = 0
        slots, generations = np.frombuffer(slots_blob, "<u4"), np.frombuffer(generations_blob, "<u8")
        for reservation, index, _ in self._held_by(session, slots, generations):
            self._take_back(reservation, reservation.slots[index], index)
            count += len(index)
        return count

    def _held_by(
        self, session: Session, slots: Slots, generations: U64
    ) -> list[tuple[Reservation, npt.NDArray[np.intp], npt.NDArray[np.intp]]]:
        """The session's reservations among (slot, generation) pairs: each with the indices into its arrays, in its
        own order and each once, and the indices into ``slots``."""
        numbers = self.reservations.numbers(slots)
        numbers[self.directory.generations[slots] != generations] = 0
        found = []
        for number in np.unique(numbers[numbers > 0]).tolist():
            reservation = self.reservations.get(number)
            if reservation.session is session:
                at = np.flatnonzero(numbers == number)
                index, first = np.unique(self.reservations.index(reservation, slots[at]), return_index=True)
                found.append((reservation, index, at[first]))
        return found

    def _publish(self, reservation: Reservation, rows: Rows, slots: Slots, checksums: U64 | None, now_ns: int) -> None:
        self.directory.commit(slots, checksums)
        self._published(reservation, rows, slots, now_ns)

    def _all_published(self, reservation: Reservation, now_ns: int) -> None:
        assert reservation.page is not None
        if not self.new_chains.published(reservation, now_ns):
            self._published(reservation, reservation.page.rows, reservation.slots, now_ns)

    def _published(self, reservation: Reservation, rows: Rows, slots: Slots, now_ns: int) -> None:
        page = reservation.page
        assert page is not None
        self.reservations.settle(reservation, slots)
        tree = page.tree
        tree.publish(page.component, rows, now_ns)
        if self.events is not None:
            self.events.published(tree, rows)
        self.counts["committed"] += len(rows)
        tree.counts["committed"] += len(rows)
        self.offer(tree, rows[tree.child[rows] < 0].tolist())

    # ------------------------------------------------------------ reservations that end

    def end(self, reservation: Reservation) -> None:
        """Nobody writes into it any more: its slots are free."""
        index = self.reservations.open(reservation)
        self._take_back(reservation, reservation.slots[index], index)

    def quarantine(self, reservation: Reservation, time: float, deadline: float) -> None:
        """It can no longer be committed, but somebody may still write: its slots are nobody's until ``deadline``."""
        assert reservation.page is not None
        page = reservation.page
        index = self.reservations.open(reservation)
        self._detach(reservation, page, index, time, deadline)
        self.offer(page.tree, page.tree.prune(page.rows[index][::-1].tolist()))

    def _detach(
        self, reservation: Reservation, page: Page, index: npt.NDArray[np.intp], time: float, deadline: float
    ) -> None:
        """Take some slots of a live reservation off their pages, whose rows stay."""
        page.tree.let_go(page.component, page.shard, page.rows[index])
        slots, generations = reservation.slots[index], reservation.generations[index]
        tenant, session = page.tree.tenant, reservation.session
        self.tenants.returned(tenant, slots)
        self.tenants.kept_away(tenant, slots)
        self.reservations.settle(reservation, slots)
        self.reservations.add(session, slots, generations, None, time, deadline, reservation.slot_bytes, tenant)
        self.counts["quarantined"] += len(slots)

    def _take_back(self, reservation: Reservation, slots: Slots, index: npt.NDArray[np.intp] | None = None) -> None:
        page = reservation.page
        self.reservations.settle(reservation, slots)
        if page is not None:
            assert index is not None
            page.tree.let_go(page.component, page.shard, page.rows[index])
            self.tenants.returned(page.tree.tenant, slots)
            self.offer(page.tree, page.tree.prune(page.rows[index][::-1].tolist()))
        elif reservation.tenant is not None:
            self.tenants.let_in(reservation.tenant, slots)
        self._free(slots)

    def _free(self, slots: Slots) -> None:
        self.directory.free(slots)
        self.slabs.release(slots)

    def offer(self, tree: PrefixTree, rows: Iterable[int]) -> None:
        for row in rows:
            self.leaves.offer(tree, row)

    # ------------------------------------------------------------ removal

    def delete(self, tree: PrefixTree, keys: list[bytes], time: float, deadline: float) -> int:
        """Remove pages and all that continue them; says how many objects went."""
        rows = tree.find(b"".join(keys), _ABSENT)
        order = tree.below(rows[rows != _ABSENT])
        self._detach_writers(tree, order, time, deadline)
        tree.counts["removed_pages"] += len(order)
        removed = self.remove(tree, order, MissReason.REMOVED)
        self.pins.removed(tree)
        self.counts["deleted"] += removed
        return removed

    def clear(self, tree: PrefixTree, time: float, deadline: float) -> int:
        """Remove every page of a namespace; says how many objects went."""
        for reservation in list(self.reservations.live.values()):
            page = reservation.page
            if page is not None and page.tree is tree:
                self._detach(reservation, page, self.reservations.open(reservation), time, deadline)
        if self.events is not None:
            self.events.clearing(tree)
        rows = tree.used_rows()
        self.ghosts.add(tree.number, tree.index.hashes[rows].tobytes(), MissReason.REMOVED)
        tree.counts["removed_pages"] += len(rows)
        slots = tree.strip_all()
        self.tenants.returned(tree.tenant, slots)
        self._free(slots)
        self.leaves.forget(tree)
        fresh = self.trees[tree.number] = PrefixTree(tree.number, tenant=tree.tenant)
        fresh.counts = tree.counts
        self.pins.removed(tree)
        self.counts["deleted"] += len(slots)
        return len(slots)

    def _detach_writers(self, tree: PrefixTree, rows: Rows, time: float, deadline: float) -> None:
        """What is being written for these rows is lost to its writers."""
        rows = rows[tree.pending[rows] > 0]
        for table in tree.tables.values():
            for column in table.slots.values():
                held = column[rows]
                slots = held[held > 0] - _ONE
                numbers = self.reservations.numbers(slots)
                for number in np.unique(numbers[numbers > 0]).tolist():
                    reservation = self.reservations.get(number)
                    assert reservation.page is not None
                    index = np.sort(self.reservations.index(reservation, slots[numbers == number]))
                    self._detach(reservation, reservation.page, index, time, deadline)

    def remove(self, tree: PrefixTree, order: Rows, why: MissReason) -> int:
        """Remove rows, children before parents and none without those, with all their objects; returns how many objects."""
        if not len(order):
            return 0
        self._remember(tree, tree.index.hashes[order].tobytes(), tree.uses[order], why)
        if self.events is not None:
            self.events.removing(tree, order)
        exposed = tree.remove_all(order)
        slots = tree.strip(order)
        self.tenants.returned(tree.tenant, slots)
        self._free(slots)
        self.offer(tree, tree.prune(exposed))
        return len(slots)

    def _remember(self, tree: PrefixTree, hashes: bytes, uses: npt.NDArray[np.uint8], why: MissReason) -> None:
        """What became of pages that go now."""
        levels = np.frexp(uses.astype(np.float32))[1]  # as bit_length
        self.ghosts.add(tree.number, hashes, (levels << REASON_BITS | int(why)).astype(np.uint8))

    def evicted(self, tree: PrefixTree, rows: list[int], why: str) -> None:
        """These rows were unlinked: forget the pages and take their slots. ``why`` is how it is counted."""
        at = np.array(rows, np.int64)
        self._remember(tree, tree.index.hashes[at].tobytes(), tree.uses[at], MissReason.EVICTED)
        tree.index.remove(at)
        slots = tree.strip(at)
        self.tenants.returned(tree.tenant, slots)
        self._free(slots)
        self.counts["evicted_objects"] += len(slots)
        self.counts["evicted_pages"] += len(rows)
        tree.counts["evicted_pages"] += len(rows)
        tree.counts["evicted_" + why] += len(rows)
