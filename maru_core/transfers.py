"""Finding, reading and writing objects in one life of a store: the session says where, a mover copies.

The two rules of :mod:`maru_core.store` are kept here: *put* is reserve, copy, commit, and *get* is locate, copy, validate. What
goes wrong is raised; that an engine sees a miss and no error, and that no call outlives its store, is the store's part. Why
something was not found, read or written is counted here, where it is known.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from maru_core.errors import MaruError, PoolError, ServerUnavailableError
from maru_core.finding import Finding, Found, part, pieces
from maru_core.lives import StoreLife
from maru_core.locations import Locations, Outline, RecentMatches
from maru_core.mover import Buffers, slot_checksums
from maru_core.protocol import (
    HASH_BYTES,
    MAX_BATCH,
    NO_SLOT,
    CommitStatus,
    Hold,
    Located,
    MissReason,
    Reserved,
    ReserveStatus,
    Stored,
    StoreStatus,
    Want,
)
from maru_core.rdma import TransferError
from maru_core.reach import Reach
from maru_core.session import Session
from maru_core.spares import BYTES_MAX, PAGES_MAX, Kind, Spare, Spares, now, oldest

log = logging.getLogger("maru.store")

BoolArray = npt.NDArray[np.bool_]
U64Array = npt.NDArray[np.uint64]

#: How long a put waits for another session that is writing the same page, or for room that is being made, seconds. Two
#: servers that compute the same prompt at once meet here; what they wait for takes milliseconds.
LATER_S: Final = 0.25


class Transfers:
    """Args:
    session: may begin another life at any time; each request says which it belongs to.
    count: adds to the figures of :class:`maru_core.store_config.StoreMetrics`.
    populate: told which slots are about to be copied to or from.
    checksums: every object carries one, and is believed only if it fits.
    """

    def __init__(
        self,
        session: Session,
        count: Callable[..., None],
        populate: Callable[[Reach, npt.NDArray[np.uint32]], None],
        *,
        checksums: bool,
    ) -> None:
        self._session = session
        self._count = count
        self._populate = populate
        self._checksums = checksums
        #: Where what was found last lies.
        self.recent = RecentMatches()
        self._spares = Spares()

    # ------------------------------------------------------------ find

    def prefix(self, life: StoreLife, component: str, shard: int, hashes: bytes) -> Outline:
        """As :meth:`find` finds it where it is asked for one component, without rules or a hold, and of no more pages than one message has."""
        count = len(hashes) // HASH_BYTES
        outline = self._session.prefix(life.namespace, component, shard, hashes, epoch=life.epoch)
        pages = outline.pages
        if pages:
            self.recent.remember(life.epoch, [component], shard, hashes, pages, outline.data)
        self._count(queried_pages=count, hit_pages=pages)
        if pages < count and outline.why:
            self._count(**{f"lookup_{MissReason(outline.why).name.lower()}": count - pages})
        return outline

    def find(self, life: StoreLife, wants: Mapping[str, Want], shard: int, hashes: bytes, hold: Hold | None) -> Found:
        """How far a chain is there by the rules of each component; see :meth:`maru_core.store.Store.find`."""
        count = len(hashes) // HASH_BYTES
        components = list(wants)
        rules = list(wants.values()) if any(want.rule for want in wants.values()) else []
        if len(components) == 1 and not rules and hold is None and 0 < count <= MAX_BATCH:
            outline = self.prefix(life, components[0], shard, hashes)
            return Found(outline.pages, None, {components[0]: outline.pages}, MissReason(outline.why), 0.0)

        def ask(chunk: bytes) -> Located:
            located = self._session.match(
                life.namespace, components, shard, chunk, rules=rules, hold=hold, epoch=life.epoch
            )
            if located.pages:
                self.recent.remember(life.epoch, components, shard, chunk, located.pages, located)
            return located

        if not rules and count <= MAX_BATCH:
            found = Found.of(components, ask(hashes))
        else:
            finding = Finding(wants)
            for start, stop in pieces(count, wants):
                if not finding.take(start, stop, ask(part(hashes, start, stop))):
                    break
            found = finding.found()
        self._count(queried_pages=count, hit_pages=found.pages)
        if found.pages < count and found.why:
            self._count(**{f"lookup_{found.why.name.lower()}": count - found.pages})
        return found

    def locate(self, life: StoreLife, component: str, shard: int, hashes: bytes) -> Locations:
        """Where each page lies that is there with all its shards."""
        count = len(hashes) // HASH_BYTES
        parts = []
        for start in range(0, count, MAX_BATCH):
            chunk = hashes[start * HASH_BYTES : (start + MAX_BATCH) * HASH_BYTES]
            located = self._session.match(life.namespace, [component], shard, chunk, sparse=True, epoch=life.epoch)
            parts.append(Locations.of(located, len(chunk) // HASH_BYTES))
        return Locations.joined(parts)

    # ------------------------------------------------------------ get

    def get(self, life: StoreLife, component: str, shard: int, hashes: bytes, buffers: Buffers) -> BoolArray:
        """Load one object per hash, from where it was found last if that still holds; True where it is proven."""
        recalled = self.recent.recall(life.epoch, component, shard, hashes)
        where = recalled if recalled is not None else self.locate(life, component, shard, hashes)
        loaded = self._read(life, where, buffers)
        count = loaded.tobytes().count(1)
        if recalled is not None and count < len(loaded):
            # What was remembered has changed since: ask once for those pages.
            again = np.flatnonzero(~loaded)
            wanted = b"".join(hash_at(hashes, int(i)) for i in again)
            where = self.locate(life, component, shard, wanted)
            loaded[again] = self._read(life, where, buffers.select(again))
            missing = self._missing(life, where, buffers.nbytes, loaded[again])
            count = int(np.count_nonzero(loaded))
        elif count < len(loaded):
            missing = self._missing(life, where, buffers.nbytes, loaded)
        else:
            missing = {}
        self._count(loaded_pages=count, loaded_bytes=count * buffers.nbytes, **missing)
        if count == len(loaded):
            self._session.touch(life.namespace, hashes, epoch=life.epoch)
        elif count:
            self._session.touch(
                life.namespace, b"".join(hash_at(hashes, int(i)) for i in np.flatnonzero(loaded)), epoch=life.epoch
            )
        return loaded

    def _read(self, life: StoreLife, where: Locations, buffers: Buffers) -> BoolArray:
        """Copy, then validate. The order is the whole point: a generation that still holds after the copy proves that the
        slot belonged to the object all the while."""
        if where.all_of(buffers.nbytes) and (reach := life.pools.one(where.slots)) is not None:
            return self._read_from(reach, where, buffers)
        wanted: BoolArray = (where.slots != NO_SLOT) & (where.lengths == buffers.nbytes)
        index = np.flatnonzero(wanted)
        if not len(index):
            return wanted
        chosen, target = where[index], buffers.select(index)
        if (reach := life.pools.one(chosen.slots)) is not None:
            wanted[wanted] = self._read_from(reach, chosen, target)
            return wanted
        # Answers to several questions may be of several pools. One that is not reached is a contradiction, and a miss.
        good = np.zeros(len(chosen.slots), bool)
        for reach, some in life.pools.each(chosen.slots):
            if reach is not None:
                good[some] = self._read_from(reach, chosen[some], target.select(some))
        wanted[wanted] = good
        return wanted

    def _read_from(self, reach: Reach, where: Locations, target: Buffers) -> BoolArray:
        """Objects of one pool, all of the length that is wanted."""
        self._populate(reach, where.slots)
        reach.mover.load(where.offsets, target)
        good = reach.view.valid_each(where.slots, where.generations)
        if self._checksums:
            good &= reach.mover.checksums(where.offsets, target) == where.checksums
        return good

    def read(self, life: StoreLife, component: str, shard: int, hashes: bytes, nbytes: int) -> Locations | None:
        """Where all of ``hashes`` lie in one pool, each of ``nbytes`` bytes, or None (and the reasons are counted)."""
        where = self.recent.recall(life.epoch, component, shard, hashes)
        if where is None or not self._complete(where, nbytes) or not self._holds(life, where):
            where = self.locate(life, component, shard, hashes)
        if not self._complete(where, nbytes):
            self._count(**self._missing(life, where, nbytes, (where.slots != NO_SLOT) & (where.lengths == nbytes)))
            return None
        reach = life.pools.one(where.slots)
        if reach is None:
            # The reader has one mover. So it is with long chains only, of which parts are found in other pools.
            self._count(miss_error=len(where.slots))
            return None
        if self._checksums and reach.memory is None:
            # What the reader copies is its own affair, and what is in the slots cannot be looked at from here.
            self._count(miss_checksum=len(where.slots))
            return None
        self._populate(reach, where.slots)
        return where

    @staticmethod
    def _holds(life: StoreLife, where: Locations) -> bool:
        reach = life.pools.one(where.slots)
        return reach is not None and reach.view.valid(where.slots, where.generations)

    @staticmethod
    def _complete(where: Locations, nbytes: int) -> bool:
        return where.all_of(nbytes) or bool(((where.slots != NO_SLOT) & (where.lengths == nbytes)).all())

    def finish(self, life: StoreLife, where: Locations, hashes: bytes, nbytes: int, *, landed: bool) -> bool:
        """What :meth:`read` located was copied (``landed``), or the copy failed: whether every byte of it counts."""
        if not landed:
            self._count(miss_error=len(where.slots))
            return False
        good = np.ones(len(where.slots), bool)
        reach = life.pools.one(where.slots)
        assert reach is not None, "what was located in one pool"
        if self._checksums:
            assert reach.memory is not None, "see read"
            good &= slot_checksums(reach.memory, where.offsets, nbytes) == where.checksums
        good &= reach.view.valid_each(where.slots, where.generations)
        count = int(good.sum())
        self._count(loaded_pages=count, loaded_bytes=count * nbytes, **self._missing(life, where, nbytes, good))
        if count == len(good):
            self._session.touch(life.namespace, hashes, epoch=life.epoch)
        return count == len(good)

    def _missing(self, life: StoreLife, where: Locations, nbytes: int, loaded: BoolArray) -> dict[str, int]:
        """Why pages were not loaded. Counted after the fact, so that the way of a hit stays short."""
        if loaded.all():
            return {}
        lost = ~loaded
        absent = where.slots == NO_SLOT
        length = ~absent & (where.lengths != nbytes)
        rest = lost & ~absent & ~length
        stale = np.zeros(len(lost), bool)
        slots, generations = where.slots[rest], where.generations[rest]
        gone = np.zeros(len(slots), bool)
        for reach, some in life.pools.each(slots):
            gone[some] = reach is None or ~reach.view.valid_each(slots[some], generations[some])
        stale[rest] = gone
        return {
            "miss_not_stored": int(absent.sum()),
            "miss_length": int(length.sum()),
            "miss_evicted": int(stale.sum()),
            "miss_checksum": int((rest & ~stale).sum()),
        }

    # ------------------------------------------------------------ put

    def put(
        self,
        life: StoreLife,
        component: str,
        shard: int,
        world: int,
        parent: bytes,
        hashes: bytes,
        buffers: Buffers,
        stored: BoolArray,
    ) -> BoolArray:
        """Store one object per hash, at most a batch, and set ``stored`` for each as it is acknowledged; returns that. Waits a little for
        pages that another session writes, and for room."""
        count = len(hashes) // HASH_BYTES
        kind: Kind | None = None
        if count <= PAGES_MAX and count * buffers.nbytes <= BYTES_MAX and life.only_mapped:
            kind = Kind(life.epoch, life.namespace, component, shard, world, buffers.nbytes)
            if self._put_ahead(life, kind, parent, hashes, buffers):
                stored.fill(True)
                return stored
        # The tenant's own pages could not make room, and will not soon: not tried again.
        over_quota: BoolArray | None = None
        first, last = 0, count  # the span still to be stored
        deadline = time.monotonic() + LATER_S
        pause = 0.002
        while True:
            before = parent if first == 0 else hash_at(hashes, first - 1)
            chunk = hashes[first * HASH_BYTES : last * HASH_BYTES]
            whole = last - first == count
            part, some = (buffers, stored) if whole else (buffers.select(slice(first, last)), stored[first:last])
            answer = self._put_once(life, component, shard, world, before, chunk, part, some, kind)
            kind = None
            if not any(answer):
                break  # all were given a slot
            status = np.frombuffer(answer, np.uint8)
            if over_quota is None:
                over_quota = np.zeros(count, bool)
            over_quota[first:last] = status == ReserveStatus.QUOTA
            later = np.flatnonzero((status == ReserveStatus.BUSY) | (status == ReserveStatus.NO_ROOM))
            if not len(later):
                break
            if time.monotonic() >= deadline:
                self._count(
                    refused_busy=int((status == ReserveStatus.BUSY).sum()),
                    refused_no_room=int((status == ReserveStatus.NO_ROOM).sum()),
                )
                break
            # Another session is writing these very pages and is about to commit, or to die; or room is being made.
            time.sleep(pause)
            pause = min(pause * 2, 0.05)
            first, last = first + int(later[0]), first + int(later[-1]) + 1
        if over_quota is not None and over_quota.any():
            self._count(refused_quota=int(over_quota.sum()))
        return stored

    def _put_once(
        self,
        life: StoreLife,
        component: str,
        shard: int,
        world: int,
        parent: bytes,
        hashes: bytes,
        buffers: Buffers,
        stored: BoolArray,
        kind: Kind | None,
    ) -> bytes:
        """One reserve, copy, commit. Sets ``stored`` and returns the reserve's status, one byte for each page. With ``kind`` slots are
        asked for ahead.

        Where all pages are new, as most are, nothing here is done for each of them: numpy's first steps after a pause cost as much as
        a message."""
        asked, granted_at = time.monotonic(), now()
        count = len(stored)
        names = b"" if kind is None else self._spares.names(kind, count)
        reserved = self._session.reserve(
            life.namespace, component, shard, world, parent, hashes, buffers.nbytes, spares=names, epoch=life.epoch
        )
        if kind is not None:
            self._keep(kind, granted_at, reserved)
        mine: slice | npt.NDArray[np.intp] = slice(None)
        slots, offsets = np.frombuffer(reserved.slots, "<u4"), np.frombuffer(reserved.offsets, "<u8")
        packed, part = (reserved.slots, reserved.generations), buffers
        if any(reserved.status):
            status = np.frombuffer(reserved.status, np.uint8)
            exists = status == ReserveStatus.EXISTS
            fresh = ~stored & exists
            stored[exists] = True
            self._count(
                existing_pages=int(fresh.sum()),
                refused_conflict=int((status == ReserveStatus.CONFLICT).sum()),
            )
            mine = np.flatnonzero(status == ReserveStatus.RESERVED)
            count = len(mine)
            if not count:
                return reserved.status
            slots, offsets, part = slots[mine], offsets[mine], buffers.select(mine)
            packed = slots.tobytes(), np.frombuffer(reserved.generations, "<u8")[mine].tobytes()
        try:
            if life.epoch != self._session.epoch or time.monotonic() - asked > life.lease_s / 2:
                # The slots may already be someone else's, or be about to: do not write into them.
                raise ServerUnavailableError("the reservation grew old before the copy began")
            reach = life.pools.one(slots)
            if reach is None:
                raise PoolError(
                    "the server gave slots of a pool that this client does not reach: use the same release on both sides"
                )
            self._populate(reach, slots)
            reach.mover.store(offsets, part)
            sums = reach.mover.checksums(offsets, part).tobytes() if self._checksums else b""
        except BaseException as error:
            # Nobody knows what still lands in slots that were being written over a network: they are not given back, and end in quarantine.
            if not (isinstance(error, TransferError) and error.wrote):
                self._release(life, *packed)
            raise
        done = self._commit(life, packed, sums)
        good = done.count(CommitStatus.COMMITTED)
        if good == len(stored):
            stored.fill(True)
        else:
            stored[mine] = True if good == count else np.frombuffer(done, np.uint8) == CommitStatus.COMMITTED
        self._count(stored_pages=good, stored_bytes=good * buffers.nbytes, refused_lost=count - good)
        return reserved.status

    def _put_ahead(self, life: StoreLife, kind: Kind, parent: bytes, hashes: bytes, buffers: Buffers) -> bool:
        """Copy into slots that are there ahead, and store, in one message. False where nothing was stored and a reserve may help."""
        count = len(hashes) // HASH_BYTES
        # What was asked for long ago may already be someone else's, or be about to: it is not written to.
        taken = self._spares.take(kind, count, oldest(life.lease_s))
        if taken is None:
            return False
        spare, more = taken
        slots, offsets = np.frombuffer(spare.slots, "<u4"), np.frombuffer(spare.offsets, "<u8")
        reach, epoch = life.reach, life.epoch
        try:
            self._session.begin_writing(count, epoch=epoch)
            try:
                self._populate(reach, slots)
                reach.mover.store(offsets, buffers)
                sums = reach.mover.checksums(offsets, buffers).tobytes() if self._checksums else b""
            except BaseException:
                self._session.end_writing(count, epoch=epoch)
                raise
            asked = now()
            names = self._spares.names(kind, count) if more else b""
            reply = self._session.store(
                kind.namespace,
                kind.component,
                kind.shard,
                kind.world,
                parent,
                hashes,
                kind.nbytes,
                spare.slots,
                spare.generations,
                sums,
                spares=names,
                epoch=epoch,
            )
        except BaseException:
            # Stored or not: nobody knows, and nobody writes there any more. It goes back in whatever life comes next.
            self._spares.drop(spare)
            raise
        if reply.status == StoreStatus.STORED:
            self._keep(kind, asked, reply)
            self._count(stored_pages=count, stored_bytes=count * buffers.nbytes)
            return True
        if reply.status == StoreStatus.KNOWN:
            self._spares.pause(kind)
            self._spares.add(spare)
        else:
            self._spares.drop(spare)
        return False

    def _keep(self, kind: Kind, asked: float, reply: Reserved | Stored) -> None:
        if reply.spare_slots:
            self._spares.add(Spare(kind, asked, reply.spare_slots, reply.spare_offsets, reply.spare_generations))

    def return_spares(self, life: StoreLife) -> None:
        """Give back what has been waiting for a put for too long, and what was granted in a life that is over: nobody writes to that, and a
        server that was restarted keeps it for this client. To be called now and then."""
        for spare in self._spares.stale(life.epoch, oldest(life.lease_s)):
            self._session.give_back(spare.slots, spare.generations, epoch=life.epoch)

    def _commit(self, life: StoreLife, packed: tuple[bytes, bytes], sums: bytes) -> bytes:
        """A :class:`CommitStatus` for each. An answer that is missing is no answer: the session repeats the commit later, but here it counts
        as not stored."""
        return self._session.commit(*packed, sums, epoch=life.epoch).status

    def _release(self, life: StoreLife, slots: bytes, generations: bytes) -> None:
        try:
            self._session.release(slots, generations, epoch=life.epoch)
        except MaruError as error:
            log.debug("reservations were not given back (%s): they return with the session", error)


def hash_at(hashes: bytes, index: int) -> bytes:
    """One of some packed page hashes."""
    return hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]
