"""The store as an engine sees it: prefix, put, get, in whole batches, on the engine's own buffers.

A :class:`Store` joins the client session (what is where) and a mover (the bytes). It keeps the two rules that
everything else hangs on:

- **put** is reserve, copy, commit; True only for what the server acknowledged as committed.
- **get** is locate, copy, validate; True only where every byte was copied and the slot's generation was still the
  one that was located. Elsewhere the destination is garbage and must be treated so.

No method but :meth:`Store.open` raises, and each is bounded in time: a server that is away, slow, restarted or wrong
is a miss, counted by reason in :class:`StoreMetrics`. All methods may be called from several threads at once.
It does not know any engine, and it never decides placement.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from maru_core import embedded
from maru_core.checksum import object_checksum
from maru_core.errors import (
    ClosedError,
    MaruError,
    PoolTooSmallError,
    ServerUnavailableError,
    SessionLostError,
)
from maru_core.locations import Locations, RecentMatches
from maru_core.mover import CxlMover, Fragments
from maru_core.namespace import Namespace
from maru_core.pool import PoolMemory, PoolView, parse_pool_uri
from maru_core.protocol import (
    HASH_BYTES,
    MAX_BATCH,
    NO_SLOT,
    CommitStatus,
    ReserveStatus,
    Welcome,
)
from maru_core.session import Session
from maru_core.settings import Settings
from maru_core.store_config import StoreConfig, StoreMetrics

__all__ = ["Store", "StoreConfig", "StoreMetrics"]

log = logging.getLogger("maru.store")

T = TypeVar("T")
BoolArray = npt.NDArray[np.bool_]
U64Array = npt.NDArray[np.uint64]

#: How long a put waits for another session that is writing the same page, or for room that is being made, seconds. Two
#: servers that compute the same prompt at once meet here; what they wait for takes milliseconds.
LATER_S = 0.25


class _Life(msgspec.Struct, frozen=True):
    """What holds for one epoch of the session: replaced as a whole when the server restarts, never changed."""

    epoch: int
    namespace: int
    lease_s: float
    memory: PoolMemory
    view: PoolView
    mover: CxlMover


class Store:
    """See the module. Make one with :meth:`open`, end it with :meth:`close`.

    ``_lock`` protects ``_life``, ``_closed`` and ``_in_flight``; ``metrics`` has a lock of its own. A life is immutable, so
    a call that runs on an older one keeps a mapping that stays valid until the call ends: memory is unmapped when the last
    user lets go of it.
    """

    def __init__(
        self, config: StoreConfig, namespace: Namespace, session: Session, ensure: Callable[[], str] | None
    ) -> None:
        self.config = config
        self.namespace = namespace
        self.metrics = StoreMetrics()
        self._record = namespace.record()
        self._session = session
        self._ensure_server = ensure
        self._checksums = config.verify == "checksum"
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._metrics_lock = threading.Lock()
        self._life: _Life | None = None
        self._in_flight = 0
        self._closed = False
        self._recent = RecentMatches()
        self._logged: dict[str, float] = {}
        self._chores: queue.SimpleQueue[tuple[PoolMemory, int] | None] = queue.SimpleQueue()
        self._populated: set[tuple[bytes, int]] = set()
        self._keeper = threading.Thread(target=self._keep, name="maru-keeper", daemon=True)
        self._keeper.start()

    @classmethod
    def open(cls, config: StoreConfig, namespace: Namespace, *, name: str, object_bytes: int = 0) -> Store:
        """Find the server (starting the embedded one where none is named), map its pool, open the namespace.

        Args:
            name: what people see in the server's list of sessions.
            object_bytes: size of the largest object this process will store, bytes; checked against the pool.
        Raises:
            ConfigError, PoolError, VersionMismatchError, ServerError: for what will not get better by waiting.
            A named server that is merely away does not raise: everything is a miss until it is there.
        """
        settings = Settings.from_environment()
        settings.warn_of_unknown(log)
        ensure = None
        endpoint = config.server or settings.server
        if config.pool is None and settings.pool is not None:
            config = msgspec.structs.replace(config, pool=settings.pool)
        if endpoint is None:
            starter = embedded.Starter(pool_size=config.pool_size)
            ensure, endpoint = starter.ensure, starter.endpoint
            try:
                ensure()
            except embedded.StartFailedError:
                raise
            except ServerUnavailableError as error:
                log.warning("Maru's embedded server is not there yet (%s): nothing is cached until it is", error)
        session = Session(endpoint, name=name, timeout_s=config.timeout_ms / 1000)
        store = cls(config, namespace, session, ensure)
        try:
            life = store._current()
            if object_bytes > life.memory.geometry.extent_bytes:
                raise PoolTooSmallError(
                    f"one object of this engine has {object_bytes} bytes and an extent of the pool {life.memory.uri} has "
                    f"{life.memory.geometry.extent_bytes}: make the pool larger, or format it with a larger ?extent="
                )
        except ServerUnavailableError as error:
            log.warning("Maru's server at %s does not answer (%s): nothing is cached until it does", endpoint, error)
        except BaseException:
            store.close()
            raise
        return store

    # ------------------------------------------------------------ calls

    def prefix(self, components: Sequence[str], shard: int, hashes: bytes) -> int:
        """Pages of the longest prefix of ``hashes`` of which every shard of all ``components`` is stored; 0 on failure.

        The locations for ``shard`` of each component are remembered, so that the get that follows sends no message.
        """
        return self._guarded(lambda life: self._prefix(life, list(components), shard, hashes), 0, "unavailable lookup")

    def present(self, component: str, shard: int, hashes: bytes) -> BoolArray:
        """For each hash, whether the page is there with all shards of ``component``."""
        count = len(hashes) // HASH_BYTES
        nothing = np.zeros(count, bool)
        if not count:
            return nothing
        return self._guarded(
            lambda life: self._locate(life, component, shard, hashes).slots != NO_SLOT, nothing, "unavailable lookup"
        )

    def put(
        self, component: str, shard: int, world: int, parent: bytes, hashes: bytes, fragments: Fragments
    ) -> BoolArray:
        """Store one object per hash, read from ``fragments``.

        Args:
            parent: hash of the page before the first one, or ``protocol.ROOT``.
            hashes: packed page hashes, ``n * 32`` bytes, consecutive pages of one chain.
            fragments: where the ``n`` objects lie in this process.
        Returns:
            bool array of shape ``(n,)``: True only where the object is known to be stored.
        """
        count = len(hashes) // HASH_BYTES
        stored = np.zeros(count, bool)

        def run(life: _Life) -> BoolArray:
            for start in range(0, count, MAX_BATCH):
                stop = min(start + MAX_BATCH, count)
                before = parent if start == 0 else _hash_at(hashes, start - 1)
                part = fragments if (start, stop) == (0, count) else fragments.select(slice(start, stop))
                chunk = hashes[start * HASH_BYTES : stop * HASH_BYTES]
                stored[start:stop] = self._put(life, component, shard, world, before, chunk, part)
            return stored

        if not self._fits(count, hashes, fragments):
            return stored
        # What was stored before a failure stays stored: the array is filled as the answers come.
        return self._guarded(
            run, stored, "put", lambda kind: self._count(**{f"refused_{kind}": count - int(stored.sum())})
        )

    def get(self, component: str, shard: int, hashes: bytes, fragments: Fragments) -> BoolArray:
        """Load one object per hash into ``fragments``.

        Returns:
            bool array of shape ``(n,)``: True only where exactly ``fragments.nbytes`` bytes were copied and proven to be
            the object's. Where it is False the destination may hold anything.
        """
        count = len(hashes) // HASH_BYTES
        loaded = np.zeros(count, bool)
        if not self._fits(count, hashes, fragments) or not count:
            return loaded
        return self._guarded(
            lambda life: self._get(life, component, shard, hashes, fragments),
            loaded,
            "get",
            lambda kind: self._count(**{f"miss_{kind}": count}),
        )

    def touch(self, hashes: bytes) -> None:
        """Note that pages were used: one way, batched, never blocks."""
        life = self._life
        if life is not None and not self._closed:
            self._session.touch(life.namespace, hashes, epoch=life.epoch)

    def delete(self, hashes: bytes) -> int:
        """Remove pages and what continues them; how many objects went, 0 on failure."""
        self._recent.forget()
        return self._guarded(lambda life: self._session.delete(life.namespace, hashes, epoch=life.epoch), 0, "delete")

    def clear(self) -> bool:
        """Remove every page of this namespace; True if the server did it."""
        self._recent.forget()

        def run(life: _Life) -> bool:
            self._session.clear(life.namespace, epoch=life.epoch)
            return True

        return self._guarded(run, False, "clear")

    def stats(self) -> dict[str, float | int | str]:
        """This store's counters, and the server's (``server_…``) where it answers."""
        if self._forked:
            return {}
        with self._metrics_lock:
            figures: dict[str, float | int | str] = dict(msgspec.structs.asdict(self.metrics))
        nothing: dict[str, float | int | str] = {}
        remote = self._guarded(lambda life: self._session.stats(), nothing, "stats")
        figures.update({f"server_{key}": value for key, value in remote.items()})
        return figures

    def close(self, timeout_s: float = 2.0) -> None:
        """End the session; calls under way finish first, within ``timeout_s`` seconds."""
        if self._forked:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            deadline = time.monotonic() + timeout_s
            while self._in_flight and (left := deadline - time.monotonic()) > 0:
                self._idle.wait(left)
            self._life = None
        self._chores.put(None)
        self._session.close()
        if self._keeper is not threading.current_thread():
            self._keeper.join(timeout_s)

    # ------------------------------------------------------------ inside

    @property
    def _forked(self) -> bool:
        """In a forked child nothing works, and no lock may be asked for: a thread that is not here may have held it."""
        return os.getpid() != self._pid

    def _guarded(
        self, run: Callable[[_Life], T], otherwise: T, what: str, failed: Callable[[str], None] | None = None
    ) -> T:
        """Run one call on the present life; any failure is logged (once in a while) and answered with ``otherwise``.

        ``failed`` is told the kind of failure, ``"unavailable"`` or ``"error"``, to count what it cost.
        """
        if self._forked:
            return otherwise
        with self._lock:
            if self._closed:
                return otherwise
            self._in_flight += 1
        kind = "error"
        try:
            return run(self._current())
        except ServerUnavailableError as error:
            kind = "unavailable"
            self._log(what, "%s: %s", what, error)
        except MaruError as error:
            self._log(what, "%s failed: %s", what, error)
        except Exception:
            self._log(what, "%s failed by a fault of Maru", what, exc_info=True)
        finally:
            with self._lock:
                self._in_flight -= 1
                if not self._in_flight:
                    self._idle.notify_all()
        if failed is not None:
            failed(kind)
        return otherwise

    def _log(self, key: str, message: str, *args: object, exc_info: bool = False) -> None:
        """A warning at most every ten seconds for each kind of failure: an engine's log is not ours to fill."""
        now = time.monotonic()
        if now - self._logged.get(key, -1e9) >= 10:
            self._logged[key] = now
            log.warning(message, *args, exc_info=exc_info)

    def _count(self, **figures: int) -> None:
        with self._metrics_lock:
            for name, value in figures.items():
                setattr(self.metrics, name, getattr(self.metrics, name) + value)

    def _fits(self, count: int, hashes: bytes, fragments: Fragments) -> bool:
        if len(hashes) % HASH_BYTES or len(fragments.addresses) != count:
            self._log(
                "shape", "%d bytes of hashes do not go with %d objects: refused", len(hashes), len(fragments.addresses)
            )
            return False
        return True

    def _current(self) -> _Life:
        """The life of the session's present epoch, made if need be.

        Raises:
            ServerUnavailableError: the server is away.
            MaruError: it is there and cannot be used.
        """
        life = self._life
        if life is not None and life.epoch == self._session.epoch:
            return life
        welcome = self._session.connect()
        epoch = self._session.epoch
        if self._session.welcome is not welcome:
            # The pool of one life under the epoch of the next: what is acknowledged there would lie here.
            raise SessionLostError("the server began another life at this moment: ask again")
        memory = self._attach(welcome, life)
        made = _Life(
            epoch=epoch,
            namespace=self._session.open_namespace(self._record, epoch=epoch),
            lease_s=welcome.lease_s,
            memory=memory,
            view=PoolView(memory),
            mover=CxlMover(memory, self.config.copy_threads),
        )
        with self._lock:
            if self._closed:
                raise ClosedError("the store was closed")
            self._life = made
        return made

    def _attach(self, welcome: Welcome, old: _Life | None) -> PoolMemory:
        if old is not None and old.memory.geometry.pool_uuid == welcome.pool_uuid:
            return old.memory
        uri = parse_pool_uri(self.config.pool or welcome.pool_uri)
        return PoolMemory.attach(uri, expected_uuid=welcome.pool_uuid)

    def _prefix(self, life: _Life, components: list[str], shard: int, hashes: bytes) -> int:
        count = len(hashes) // HASH_BYTES
        pages = 0
        for start in range(0, count, MAX_BATCH):
            chunk = hashes[start * HASH_BYTES : (start + MAX_BATCH) * HASH_BYTES]
            located = self._session.match(life.namespace, components, shard, chunk, epoch=life.epoch)
            if located.pages:
                known = chunk[: located.pages * HASH_BYTES]
                for column, component in enumerate(components):
                    where = Locations.of(located, located.pages, column)
                    self._recent.remember(life.epoch, component, shard, known, where)
            pages += located.pages
            if located.pages * HASH_BYTES < len(chunk):
                break
        self._count(queried_pages=count, hit_pages=pages)
        return pages

    def _locate(self, life: _Life, component: str, shard: int, hashes: bytes) -> Locations:
        count = len(hashes) // HASH_BYTES
        parts = []
        for start in range(0, count, MAX_BATCH):
            chunk = hashes[start * HASH_BYTES : (start + MAX_BATCH) * HASH_BYTES]
            located = self._session.match(life.namespace, [component], shard, chunk, sparse=True, epoch=life.epoch)
            parts.append(Locations.of(located, len(chunk) // HASH_BYTES))
        return Locations.joined(parts)

    # ------------------------------------------------------------ get

    def _get(self, life: _Life, component: str, shard: int, hashes: bytes, fragments: Fragments) -> BoolArray:
        recalled = self._recent.recall(life.epoch, component, shard, hashes)
        where = recalled if recalled is not None else self._locate(life, component, shard, hashes)
        loaded = self._read(life, where, fragments)
        if recalled is not None and not loaded.all():
            # What was remembered has changed since: ask once for those pages.
            again = np.flatnonzero(~loaded)
            wanted = b"".join(_hash_at(hashes, int(i)) for i in again)
            where = self._locate(life, component, shard, wanted)
            loaded[again] = self._read(life, where, fragments.select(again))
            missing = self._missing(life, where, fragments.nbytes, loaded[again])
        else:
            missing = self._missing(life, where, fragments.nbytes, loaded)
        count = int(loaded.sum())
        self._count(loaded_pages=count, loaded_bytes=count * fragments.nbytes, **missing)
        if count == len(loaded):
            self._session.touch(life.namespace, hashes, epoch=life.epoch)
        elif count:
            self._session.touch(
                life.namespace, b"".join(_hash_at(hashes, int(i)) for i in np.flatnonzero(loaded)), epoch=life.epoch
            )
        return loaded

    def _read(self, life: _Life, where: Locations, fragments: Fragments) -> BoolArray:
        """Copy, then validate. The order is the whole point: a generation that still holds after the copy proves that the
        slot belonged to the object all the while."""
        wanted: BoolArray = (where.slots != NO_SLOT) & (where.lengths == fragments.nbytes)
        if not wanted.any():
            return wanted
        if wanted.all():
            chosen, target = where, fragments
        else:
            index = np.flatnonzero(wanted)
            chosen = where[index]
            target = fragments.select(index)
        self._populate(life, chosen.slots)
        life.mover.load(chosen.offsets, target)
        good = life.view.valid_each(chosen.slots, chosen.generations)
        if self._checksums:
            good &= _checksums(target) == chosen.checksums
        wanted[wanted] = good
        return wanted

    def _missing(self, life: _Life, where: Locations, nbytes: int, loaded: BoolArray) -> dict[str, int]:
        """Why pages were not loaded. Counted after the fact, so that the way of a hit stays short."""
        if loaded.all():
            return {}
        lost = ~loaded
        absent = where.slots == NO_SLOT
        length = ~absent & (where.lengths != nbytes)
        rest = lost & ~absent & ~length
        stale = np.zeros(len(lost), bool)
        stale[rest] = ~life.view.valid_each(where.slots[rest], where.generations[rest])
        return {
            "miss_not_stored": int(absent.sum()),
            "miss_length": int(length.sum()),
            "miss_evicted": int(stale.sum()),
            "miss_checksum": int((rest & ~stale).sum()),
        }

    # ------------------------------------------------------------ put

    def _put(
        self, life: _Life, component: str, shard: int, world: int, parent: bytes, hashes: bytes, fragments: Fragments
    ) -> BoolArray:
        count = len(hashes) // HASH_BYTES
        stored = np.zeros(count, bool)
        first, last = 0, count  # the span still to be stored
        deadline = time.monotonic() + LATER_S
        pause = 0.002
        while True:
            before = parent if first == 0 else _hash_at(hashes, first - 1)
            chunk = hashes[first * HASH_BYTES : last * HASH_BYTES]
            part = fragments if last - first == count else fragments.select(slice(first, last))
            status = self._put_once(life, component, shard, world, before, chunk, part, stored[first:last])
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
        return stored

    def _put_once(
        self,
        life: _Life,
        component: str,
        shard: int,
        world: int,
        parent: bytes,
        hashes: bytes,
        fragments: Fragments,
        stored: BoolArray,
    ) -> npt.NDArray[np.uint8]:
        """One reserve, copy, commit. Sets ``stored`` and returns the reserve's status for each page."""
        asked = time.monotonic()
        reserved = self._session.reserve(
            life.namespace, component, shard, world, parent, hashes, fragments.nbytes, epoch=life.epoch
        )
        status = np.frombuffer(reserved.status, np.uint8)
        if len(status) != len(stored):
            raise MaruError(f"the server answered for {len(status)} of {len(stored)} pages")
        exists = status == ReserveStatus.EXISTS
        fresh = ~stored & exists
        stored[exists] = True
        mine = np.flatnonzero(status == ReserveStatus.RESERVED)
        self._count(
            existing_pages=int(fresh.sum()),
            refused_conflict=int((status == ReserveStatus.CONFLICT).sum()),
        )
        if not len(mine):
            return status
        slots = np.frombuffer(reserved.slots, "<u4")
        offsets = np.frombuffer(reserved.offsets, "<u8")
        generations = np.frombuffer(reserved.generations, "<u8")
        part = fragments
        if len(mine) != len(status):
            slots, offsets, generations = slots[mine], offsets[mine], generations[mine]
            part = fragments.select(mine)
        packed = slots.tobytes(), generations.tobytes()
        try:
            if life.epoch != self._session.epoch or time.monotonic() - asked > life.lease_s / 2:
                # The slots may already be someone else's, or be about to: do not write into them.
                raise ServerUnavailableError("the reservation grew old before the copy began")
            self._populate(life, slots)
            life.mover.store(offsets, part)
            sums = _checksums(part).tobytes() if self._checksums else b""
        except BaseException:
            self._release(life, *packed)
            raise
        done = self._commit(life, packed, sums, len(mine))
        stored[mine[done]] = True
        good = int(done.sum())
        self._count(stored_pages=good, stored_bytes=good * fragments.nbytes, refused_lost=len(mine) - good)
        return status

    def _commit(self, life: _Life, packed: tuple[bytes, bytes], sums: bytes, count: int) -> BoolArray:
        """An answer that is missing is no answer: the session repeats the commit later, but here it counts as not stored."""
        committed = self._session.commit(*packed, sums, epoch=life.epoch)
        status = np.frombuffer(committed.status, np.uint8)
        if len(status) != count:
            raise MaruError(f"the server answered for {len(status)} of {count} commits")
        return np.asarray(status == CommitStatus.COMMITTED)

    def _release(self, life: _Life, slots: bytes, generations: bytes) -> None:
        try:
            self._session.release(slots, generations, epoch=life.epoch)
        except MaruError as error:
            log.debug("reservations were not given back (%s): they return with the session", error)

    # ------------------------------------------------------------ background

    def _populate(self, life: _Life, slots: npt.NDArray[np.uint32]) -> None:
        """Have the page tables of extents that come into use filled in the background, not by the copy's page faults."""
        for extent in set((slots[:: max(1, len(slots) // 16)] // life.memory.geometry.slots_per_extent).tolist()):
            key = (life.memory.geometry.pool_uuid, extent)
            if key not in self._populated:
                self._populated.add(key)
                self._chores.put((life.memory, extent))

    def _keep(self) -> None:
        """The keeper thread: fills page tables, and brings an embedded server back if it is gone."""
        while True:
            try:
                chore = self._chores.get(timeout=1.0)
            except queue.Empty:
                self._revive()
                continue
            if chore is None:
                return
            memory, extent = chore
            try:
                memory.populate(extent)
            except Exception:
                log.debug("extent %d was not populated", extent, exc_info=True)

    def _revive(self) -> None:
        if self._ensure_server is None or self._closed or self._session.connected:
            return
        try:
            self._ensure_server()
            self._current()
        except MaruError as error:
            self._log("revive", "the embedded server is not back yet: %s", error)
        except Exception:
            # Whatever it was, the next attempt must come.
            self._log("revive", "the embedded server could not be looked after", exc_info=True)


def _hash_at(hashes: bytes, index: int) -> bytes:
    return hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]


def _checksums(fragments: Fragments) -> U64Array:
    """The checksum of every object, shape ``(n,)``."""
    rows = fragments.addresses
    return np.fromiter((object_checksum(row, fragments.sizes) for row in rows), np.uint64, len(rows))
