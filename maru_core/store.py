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
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from maru_core import embedded
from maru_core.errors import ConfigError, MaruError, PoolTooSmallError, ServerUnavailableError
from maru_core.finding import Found
from maru_core.housekeeping import Housekeeping
from maru_core.keys import ClientKeys
from maru_core.lives import Lives, StoreLife
from maru_core.locations import Locations
from maru_core.mover import Buffers, CxlMover, Mover
from maru_core.namespace import Namespace
from maru_core.pool import PoolMemory
from maru_core.protocol import HASH_BYTES, MAX_BATCH, NO_SLOT, Hold, Want
from maru_core.reach import Reach, Reaching
from maru_core.reading import Reading
from maru_core.session import Session
from maru_core.settings import Settings
from maru_core.store_config import StoreConfig, StoreMetrics
from maru_core.transfers import Transfers, hash_at

__all__ = ["Store", "StoreConfig", "StoreMetrics"]

log = logging.getLogger("maru.store")

T = TypeVar("T")
BoolArray = npt.NDArray[np.bool_]


class Store:
    """See the module. Make one with :meth:`open`, end it with :meth:`close`.

    ``_metrics_lock`` protects ``metrics``; the present life, and which calls are under way, are in :class:`maru_core.lives.Lives`.
    """

    def __init__(
        self,
        config: StoreConfig,
        namespace: Namespace,
        session: Session,
        ensure: Callable[[], str] | None,
        mover: Callable[[PoolMemory], Mover] | None = None,
    ) -> None:
        self.config = config
        self.namespace = namespace
        self.metrics = StoreMetrics()
        self._session = session
        make = mover or (lambda memory: CxlMover(memory, config.copy_threads))
        self._reaching = Reaching(config, session, make, only_mapped=mover is not None)
        self._lives = Lives(session, namespace.record(), self._reaching, ensure, self._log)
        self._metrics_lock = threading.Lock()
        self._transfers = Transfers(
            session,
            self._count,
            self._populate,
            checksums=config.verify == "checksum",
        )
        self._logged: dict[str, float] = {}
        self._house = Housekeeping(self._look_after)

    @classmethod
    def open(
        cls,
        config: StoreConfig,
        namespace: Namespace,
        *,
        name: str,
        object_bytes: int = 0,
        mover: Callable[[PoolMemory], Mover] | None = None,
    ) -> Store:
        """Find the server (starting the embedded one where none is named), map its pool, open the namespace.

        Args:
            name: what people see in the server's list of sessions.
            object_bytes: size of the largest object this process will store, bytes; checked against the pool.
            mover: makes what copies to and from a pool that this process has mapped; None: a :class:`CxlMover`.
        Raises:
            ConfigError, PoolError, VersionMismatchError, ServerError: for what will not get better by waiting.
            A named server that is merely away does not raise: everything is a miss until it is there.
        """
        settings = Settings.from_environment()
        settings.warn_of_unknown(log)
        ensure = None
        endpoint = config.server or settings.server
        keys = ClientKeys.find(settings, config.client_key, config.server_key)
        if keys is not None and endpoint is None:
            raise ConfigError(
                f"the key of {keys.pair.name!r} is configured (client_key, MARU_CLIENT_KEY) and no server is: the embedded server needs "
                "no keys; name the server that does (server, MARU_SERVER), or leave the keys out"
            )
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
        session = Session(
            endpoint, name=name, timeout_s=config.timeout_ms / 1000, report=lambda: store._report(), keys=keys
        )
        store = cls(config, namespace, session, ensure, mover)
        try:
            life = store._lives.current()
            extent_bytes = max(reach.geometry.extent_bytes for reach in life.pools.present())
            if object_bytes > extent_bytes:
                raise PoolTooSmallError(
                    f"one object of this engine has {object_bytes} bytes and an extent of the server's pool has "
                    f"{extent_bytes}: make the pool larger, or format it with a larger ?extent="
                )
        except ServerUnavailableError as error:
            log.warning("Maru's server at %s does not answer (%s): nothing is cached until it does", endpoint, error)
        except BaseException:
            store.close()
            raise
        return store

    def register(self, address: int, nbytes: int, device: int | None = None) -> None:
        """Tell of engine memory that pages will be moved to and from, before the first of them are. Needed for nothing; what is
        not told is moved through a buffer of the store's own where the pool is on another machine.

        Args:
            device: number of the GPU whose memory it is, which must be told: see :meth:`maru_core.rdma.RdmaMover.register`.
        """
        self._reaching.register(address, nbytes, device)

    @property
    def epoch(self) -> int:
        """Number of the session's present life, 0 before the first. A server that was restarted begins another one."""
        return self._session.epoch

    @property
    def connected(self) -> bool:
        """Whether the server answered when it was last asked."""
        return self._session.connected

    # ------------------------------------------------------------ calls

    def prefix(self, components: Sequence[str], shard: int, hashes: bytes) -> int:
        """Pages of the longest prefix of ``hashes`` of which every shard of all ``components`` is stored; 0 on failure.

        The locations for ``shard`` of each component are remembered, so that the get that follows sends no message.
        """
        count = len(hashes) // HASH_BYTES
        if len(components) != 1 or not 0 < count <= MAX_BATCH:
            return self.find(dict.fromkeys(components, Want()), shard, hashes).pages
        component = components[0]
        return self._guarded(
            lambda life: self._transfers.prefix(life, component, shard, hashes).pages,
            0,
            "unavailable lookup",
            lambda kind: self._count(**{f"lookup_{kind}": count}),
        )

    def find(self, wants: Mapping[str, Want], shard: int, hashes: bytes, *, hold: Hold | None = None) -> Found:
        """How far ``hashes``, a chain from its first page on, is there by the rule of each component.

        Locations are remembered as :meth:`prefix` does, also of pages that no rule needs. With ``hold`` all ranks that ask the
        same under one request id are told the same, and what they are told is kept from eviction until they have said
        :meth:`unhold`, within the server's bounds; what is held may still be gone, and a get decides that.
        """
        if not hashes or not wants:
            return Found.nothing(wants)
        nothing: Found | None = None
        found = self._guarded(
            lambda life: self._transfers.find(life, wants, shard, hashes, hold),
            nothing,
            "unavailable lookup",
            lambda kind: self._count(**{f"lookup_{kind}": len(hashes) // HASH_BYTES}),
        )
        return found if found is not None else Found.nothing(wants)

    def unhold(self, request: bytes) -> bool:
        """This rank needs nothing more of what it found with the hold ``request``; True if the server knows it."""

        def run(life: StoreLife) -> bool:
            self._session.unhold(life.namespace, request, epoch=life.epoch)
            return True

        return self._guarded(run, False, "unhold")

    def present(self, component: str, shard: int, hashes: bytes) -> BoolArray:
        """For each hash, whether the page is there with all shards of ``component``."""
        count = len(hashes) // HASH_BYTES
        nothing = np.zeros(count, bool)
        if not count:
            return nothing
        return self._guarded(
            lambda life: self._transfers.locate(life, component, shard, hashes).slots != NO_SLOT,
            nothing,
            "unavailable lookup",
        )

    def put(self, component: str, shard: int, world: int, parent: bytes, hashes: bytes, buffers: Buffers) -> BoolArray:
        """Store one object per hash, read from ``buffers``.

        Args:
            parent: hash of the page before the first one, or ``protocol.ROOT``.
            hashes: packed page hashes, ``n * 32`` bytes, consecutive pages of one chain.
            buffers: where the ``n`` objects lie in this process.
        Returns:
            bool array of shape ``(n,)``: True only where the object is known to be stored.
        """
        count = len(hashes) // HASH_BYTES
        stored = np.zeros(count, bool)

        def run(life: StoreLife) -> BoolArray:
            if 0 < count <= MAX_BATCH:
                return self._transfers.put(life, component, shard, world, parent, hashes, buffers, stored)
            for start in range(0, count, MAX_BATCH):
                stop = min(start + MAX_BATCH, count)
                before = parent if start == 0 else hash_at(hashes, start - 1)
                part, some = buffers.select(slice(start, stop)), stored[start:stop]
                chunk = hashes[start * HASH_BYTES : stop * HASH_BYTES]
                self._transfers.put(life, component, shard, world, before, chunk, part, some)
            return stored

        if not self._fits(count, hashes, buffers):
            return stored
        # What was stored before a failure stays stored: the array is filled as the answers come.
        return self._guarded(
            run, stored, "put", lambda kind: self._count(**{f"refused_{kind}": count - int(stored.sum())})
        )

    def get(self, component: str, shard: int, hashes: bytes, buffers: Buffers) -> BoolArray:
        """Load one object per hash into ``buffers``.

        Returns:
            bool array of shape ``(n,)``: True only where exactly ``buffers.nbytes`` bytes were copied and proven to be
            the object's. Where it is False the destination may hold anything.
        """
        count = len(hashes) // HASH_BYTES
        if not self._fits(count, hashes, buffers) or not count:
            return np.zeros(count, bool)
        nothing: BoolArray | None = None
        loaded = self._guarded(
            lambda life: self._transfers.get(life, component, shard, hashes, buffers),
            nothing,
            "get",
            lambda kind: self._count(**{f"miss_{kind}": count}),
        )
        return loaded if loaded is not None else np.zeros(count, bool)

    def read(self, component: str, shard: int, hashes: bytes, nbytes: int) -> Reading | None:
        """Locate objects for a reader that copies them itself, in steps; see :class:`maru_core.reading.Reading`.

        None where any of them is not there with exactly ``nbytes`` bytes: then there is nothing to finish.
        """
        count = len(hashes) // HASH_BYTES
        if not count or len(hashes) % HASH_BYTES:
            return None

        def run(life: StoreLife) -> Reading | None:
            where = self._transfers.read(life, component, shard, hashes, nbytes)
            reach = None if where is None else life.pools.one(where.slots)
            if where is None or reach is None:
                return None
            self._lives.stay()
            return Reading(
                hashes,
                nbytes,
                where,
                reach.mover,
                reach.memory,
                lambda landed: self._finish_reading(life, where, hashes, nbytes, landed),
            )

        return self._guarded(run, None, "read", lambda kind: self._count(**{f"miss_{kind}": count}))

    def _finish_reading(self, life: StoreLife, where: Locations, hashes: bytes, nbytes: int, landed: bool) -> bool:
        try:
            return not self._lives.forked and self._transfers.finish(life, where, hashes, nbytes, landed=landed)
        except Exception:
            self._log("finish", "a reading could not be validated: a miss", exc_info=True)
            return False
        finally:
            if not self._lives.forked:
                self._lives.leave()

    def changes(self) -> tuple[int, ...] | None:
        """A value that is another one once anything has become findable in the pools that are reached or was removed from them. Costs
        no message.

        Read it before asking: what the answer says holds at least as long as the value stands. None where it is not known, as where one
        of them is not mapped.
        """
        life = self._lives.life
        if life is None or life.epoch != self._session.epoch or self._lives.closed or not self._session.connected:
            return None
        found: tuple[int, ...] = ()
        try:
            for reach in life.pools.present():
                if reach.memory is None:
                    return None
                found += reach.memory.changes()
        except MaruError:
            return None
        return found

    def touch(self, hashes: bytes) -> None:
        """Note that pages were used: one way, batched, never blocks."""
        life = self._lives.life
        if life is not None and not self._lives.closed:
            self._session.touch(life.namespace, hashes, epoch=life.epoch)

    def delete(self, hashes: bytes) -> int:
        """Remove pages and what continues them; how many objects went, 0 on failure."""
        self._transfers.recent.forget()
        return self._guarded(lambda life: self._session.delete(life.namespace, hashes, epoch=life.epoch), 0, "delete")

    def clear(self) -> bool:
        """Remove every page of this namespace; True if the server did it."""
        self._transfers.recent.forget()

        def run(life: StoreLife) -> bool:
            self._session.clear(life.namespace, epoch=life.epoch)
            return True

        return self._guarded(run, False, "clear")

    def stats(self) -> dict[str, float | int | str]:
        """This store's counters, and the server's (``server_…``) where it answers."""
        if self._lives.forked:
            return {}
        with self._metrics_lock:
            figures: dict[str, float | int | str] = dict(msgspec.structs.asdict(self.metrics))
        nothing: dict[str, float | int | str] = {}
        remote = self._guarded(lambda life: self._session.stats(), nothing, "stats")
        figures.update({f"server_{key}": value for key, value in remote.items()})
        return figures

    def close(self, timeout_s: float = 2.0) -> None:
        """End the session; calls under way finish first, within ``timeout_s`` seconds."""
        if not self._lives.drain(timeout_s):
            return
        self._session.close()  # its last message carries what is counted here
        self._lives.close()
        self._house.stop(timeout_s)

    # ------------------------------------------------------------ inside

    def _guarded(
        self, run: Callable[[StoreLife], T], otherwise: T, what: str, failed: Callable[[str], None] | None = None
    ) -> T:
        """Run one call on the present life; any failure is logged (once in a while) and answered with ``otherwise``.

        ``failed`` is told the kind of failure, ``"unavailable"`` or ``"error"``, to count what it cost.
        """
        if not self._lives.enter():
            return otherwise
        kind = "error"
        try:
            return run(self._lives.current())
        except ServerUnavailableError as error:
            kind = "unavailable"
            self._log(what, "%s: %s", what, error)
        except MaruError as error:
            self._log(what, "%s failed: %s", what, error)
        except Exception:
            self._log(what, "%s failed by a fault of Maru", what, exc_info=True)
        finally:
            self._lives.leave()
        if failed is not None:
            failed(kind)
        return otherwise

    def _log(self, key: str, message: str, *args: object, exc_info: bool = False) -> None:
        """A warning at most every ten seconds for each kind of failure: an engine's log is not ours to fill."""
        now = time.monotonic()
        if now - self._logged.get(key, -1e9) >= 10:
            self._logged[key] = now
            log.warning(message, *args, exc_info=exc_info)

    def _report(self) -> tuple[int | None, dict[str, int]]:
        """For the session's heartbeats: the namespace's number in the present life, and the counters."""
        life = self._lives.life
        if life is None or life.epoch != self._session.epoch:
            return None, {}
        with self._metrics_lock:
            return life.namespace, msgspec.structs.asdict(self.metrics)

    def _count(self, **figures: int) -> None:
        metrics = self.metrics
        with self._metrics_lock:
            for name, value in figures.items():
                if value:
                    setattr(metrics, name, getattr(metrics, name) + value)

    def _fits(self, count: int, hashes: bytes, buffers: Buffers) -> bool:
        if len(hashes) % HASH_BYTES or len(buffers) != count:
            self._log("shape", "%d bytes of hashes do not go with %d objects: refused", len(hashes), len(buffers))
            return False
        return True

    def _populate(self, reach: Reach, slots: npt.NDArray[np.uint32]) -> None:
        if reach.memory is not None:
            self._house.populate(reach.memory, reach.own(slots))

    def _look_after(self) -> None:
        self._lives.look_after()
        if (life := self._lives.life) is not None:
            self._transfers.return_spares(life)
