"""The HiCache storage backend: SGLang's host pages in and out of Maru.

SGLang calls it from its own threads: queries and loads while a prefetch is under way, stores from its backup thread, a
few queries from the scheduler itself. So:

- only the constructor (and the registration of the pool, which is part of attaching) raises; every other call answers
  with as many results as it was asked for, and what went wrong is a miss, or "not stored";
- each call is bounded in time by the store;
- ranks may get different answers at any time, and SGLang takes the least of them.

Only SGLang's KV pool is stored. A model with further pools (sliding window, Mamba, a draft model's own pool) would be
restored incompletely, so for it everything is a miss, and the log says so once.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, ParamSpec, TypeVar

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from maru_core.errors import ConfigError
from maru_core.mover import Fragments
from maru_core.namespace import Namespace, differences
from maru_core.protocol import ROOT
from maru_core.store import Store
from maru_sglang.radix import KV, ChainError, Placement, collect, pack_keys, parent_of
from maru_sglang.storage.config import parse_extra_config
from maru_sglang.storage.pages import HostPages

log = logging.getLogger("maru.sglang")

_GIB: Final = 1 << 30
#: Transfers kept for the next get_stats call; older ones are dropped if nobody asks.
_STATS_KEPT: Final = 1024

P = ParamSpec("P")
T = TypeVar("T")


def _answers(fallback: Callable[..., Any]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Turn whatever goes wrong in a call into ``fallback(*arguments)``: nothing may reach SGLang's threads. Keys that are no
    chain are a refusal, everything else a fault."""

    def wrap(call: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(call)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
            backend: Any = args[0]
            try:
                return call(*args, **kwargs)
            except ChainError as error:
                backend._refused(error)
            except Exception:
                backend._log_once(
                    f"fault in {call.__name__}", logging.ERROR, "fault in %s: a miss", call.__name__, exc_info=True
                )
            answer: T = fallback(*args[1:], **kwargs)
            return answer

        return guarded

    return wrap


def _false(keys: Sequence[str], *_: Any, **__: Any) -> list[bool]:
    return [False] * len(keys)


def _false_by_pool(transfers: Sequence[PoolTransfer], *_: Any, **__: Any) -> dict[str, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}


class MaruHiCacheStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang has no types for us
    """See the module. ``_lock`` protects the figures for SGLang's metrics and the set of what was logged; everything
    else is set while attaching, before SGLang's threads run, except ``_dead``, which only ever goes from None to a
    reason."""

    def __init__(self, storage_config: HiCacheStorageConfig, mem_pool_host: Any = None) -> None:
        """Attach to Maru.

        Args:
            mem_pool_host: the host pool of the KV component; SGLang's ``dynamic`` backends get it only with
                :meth:`register_mem_pool_host`.
        Raises:
            ConfigError, PoolError, VersionMismatchError, ServerError: what will not get better by waiting.
        """
        self._lock = threading.Lock()
        self._logged: set[str] = set()
        self._dead: str | None = None
        self._config = storage_config
        self._options = parse_extra_config(storage_config.extra_config)
        self._placement = Placement.of(storage_config)
        self._prefetches: deque[tuple[int, float]] = deque(maxlen=_STATS_KEPT)
        self._backups: deque[tuple[int, float]] = deque(maxlen=_STATS_KEPT)
        self._pages: HostPages | None = None
        self._store: Store | None = None
        self._namespace: Namespace | None = None
        if mem_pool_host is not None and not isinstance(mem_pool_host, dict):
            self._attach(mem_pool_host)

    # ------------------------------------------------------------ attach, detach

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Part of attaching: raises as the constructor does."""
        self.mem_pool_host = mem_pool_host
        if self._pages is None or self._pages.pool is not mem_pool_host:
            self._attach(mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if _pool_name(host_pool_name) == KV or self._dead is not None:
            return
        self._die(
            f"the model has a pool {_pool_name(host_pool_name)!r} ({type(host_pool).__name__}) beside its KV pool, which this "
            "release of Maru does not store"
        )

    def _attach(self, pool: Any) -> None:
        pages = HostPages(pool)
        namespace = collect(self._config, pool).namespace(self._options.tag)
        if self._namespace is not None and namespace != self._namespace:
            raise ConfigError(
                f"the host pool changed while attached: {differences(self._namespace, namespace)}: attach again"
            )
        if self._store is None:
            config, placement = self._config, self._placement
            self._store = Store.open(
                self._options.store_config(),
                namespace,
                name=f"sglang tp{config.tp_rank}/{config.tp_size} pp{config.pp_rank}/{config.pp_size}",
                object_bytes=pages.object_bytes,
            )
            log.info(
                "Maru: component %s, shard %d of %d, pages of %d tokens and %d bytes, namespace %s %s",
                placement.component,
                placement.shard,
                placement.world,
                pages.page_tokens,
                pages.object_bytes,
                namespace.digest().hex()[:16],
                namespace.record().decode(),
            )
        self._pages, self._namespace = pages, namespace

    @_answers(lambda *_, **__: None)
    def close(self) -> None:
        """End the session. Everything is a miss afterwards."""
        self._dead = self._dead or "closed"
        if self._store is not None:
            self._store.close()

    def weights_changed(self, reason: str = "weights changed") -> None:
        """What is stored is no longer what this process computes: everything is a miss from now on."""
        self._die(f"the model's weights were replaced ({reason})")

    def _die(self, reason: str) -> None:
        self._dead = self._dead or reason
        self._log_once("dead", logging.WARNING, "Maru is off in this process: %s", reason)

    # ------------------------------------------------------------ queries

    @_answers(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Pages from the start of ``keys`` that are stored, whole."""
        store = self._usable()
        if store is None or not keys:
            return 0
        hashes = pack_keys(keys)
        return store.prefix(self._placement.components, self._placement.shard, hashes)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    @_answers(lambda *_, **__: PoolTransferResult.empty())
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Like :meth:`batch_exists`; no page counts if SGLang also needs a pool that is not stored."""
        pages = self.batch_exists(keys, extra_info)
        hits: dict[str, int] = {PoolName.KV: pages} if pages else {}
        for transfer in pool_transfers or ():
            # BLOCK_GROUPS pools report for themselves and never limit the KV hit (PoolHitPolicy).
            if _pool_name(transfer.name) != KV and transfer.hit_policy != PoolHitPolicy.BLOCK_GROUPS:
                self._unknown_pool(transfer.name)
                return PoolTransferResult(0, hits, [])
        return PoolTransferResult(pages, hits, list(range(1, pages + 1)))

    # ------------------------------------------------------------ loads

    @_answers(_false)
    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Load pages straight into the host pool. Where the answer is False the host page holds garbage."""
        fragments = self._fragments(keys, host_indices)
        return _false(keys) if fragments is None else self._load(keys, fragments)

    @_answers(_false_by_pool)
    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {transfer.name: self._transfer(transfer, extra_info, self.batch_get_v1) for transfer in transfers}

    @_answers(lambda *_, **__: None)
    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Load one page into a flat tensor; None where it cannot be had."""
        if target_location is None:
            if self._pages is None:
                return None
            target_location = self._pages.pool.get_dummy_flat_data_page()
        return self.batch_get([key], [target_location])[0]

    @_answers(lambda keys, *_, **__: [None] * len(keys))
    def batch_get(
        self, keys: list[str], target_locations: list[torch.Tensor] | None = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Load pages into flat tensors of exactly a page's bytes."""
        targets = list(target_locations or ())
        fragments = self._flat(keys, targets)
        if fragments is None:
            return [None] * len(keys)
        loaded = self._load(keys, fragments)
        return [target if good else None for target, good in zip(targets, loaded, strict=True)]

    def _load(self, keys: Sequence[str], fragments: Fragments) -> list[bool]:
        store = self._usable()
        if store is None:
            return _false(keys)
        hashes = pack_keys(keys)
        began = time.monotonic()
        loaded = store.get(self._placement.component, self._placement.shard, hashes, fragments)
        self._note(self._prefetches, int(loaded.sum()), began)
        answer: list[bool] = loaded.tolist()
        return answer

    # ------------------------------------------------------------ stores

    @_answers(_false)
    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages straight from the host pool; True only where they are known to be stored."""
        fragments = self._fragments(keys, host_indices)
        if fragments is None:
            return _false(keys)
        parent = parent_of(keys, extra_info.prefix_keys if extra_info is not None else None)
        return self._save(keys, parent, fragments)

    @_answers(_false_by_pool)
    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {transfer.name: self._transfer(transfer, extra_info, self.batch_set_v1) for transfer in transfers}

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store one page from a flat tensor."""
        return self.batch_set([key], [value])

    @_answers(lambda *_, **__: False)
    def batch_set(
        self,
        keys: list[str],
        values: list[torch.Tensor] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store pages from flat tensors, a stretch of one chain.

        These calls do not say what comes before ``keys[0]``, so it is kept as the start of a chain. The keys themselves
        still stand for the whole prefix; only eviction may part such a stretch from what comes before it. A page that is
        already there with a parent counts as stored: its hash says that it is the same."""
        pages = [value.detach().contiguous() for value in values or ()]
        fragments = self._flat(keys, pages)
        if fragments is None:
            return False
        if not keys:
            return True
        parent_of(keys, ())  # refuses a page that is there twice
        hashes = pack_keys(keys)
        saved = np.array(self._save(keys, ROOT, fragments))
        store = self._usable()
        if not saved.all() and store is not None:
            saved |= store.present(self._placement.component, self._placement.shard, hashes)
        return bool(saved.all())

    def _save(self, keys: Sequence[str], parent: bytes, fragments: Fragments) -> list[bool]:
        store, place = self._usable(), self._placement
        if store is None or not place.writer:
            return _false(keys)
        hashes = pack_keys(keys)
        began = time.monotonic()
        stored = store.put(place.component, place.shard, place.world, parent, hashes, fragments)
        self._note(self._backups, int(stored.sum()), began)
        answer: list[bool] = stored.tolist()
        return answer

    # ------------------------------------------------------------ the rest of the interface

    @_answers(lambda *_, **__: False)
    def clear(self) -> bool:
        """Remove every page of this namespace."""
        store = self._usable()
        return store is not None and store.clear()

    @_answers(lambda *_, **__: None)
    def get_stats(self) -> StorageMetrics | None:
        """Transfers since the last call, for ``--enable-metrics``: pages of each, and GiB/s."""
        if not self._config.enable_storage_metrics or self._pages is None:
            return None
        with self._lock:
            prefetches, backups = list(self._prefetches), list(self._backups)
            self._prefetches.clear()
            self._backups.clear()
        size = self._pages.object_bytes / _GIB
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in prefetches],
            backup_pgs=[pages for pages, _ in backups],
            prefetch_bandwidth=[pages * size / seconds for pages, seconds in prefetches],
            backup_bandwidth=[pages * size / seconds for pages, seconds in backups],
        )

    @_answers(lambda *_, **__: {})
    def counters(self) -> dict[str, float | int | str]:
        """The store's counters with the reasons for misses, and the server's figures."""
        return {} if self._store is None else self._store.stats()

    @property
    def namespace(self) -> Namespace | None:
        """What this process's pages are stored under; None before the pool is known."""
        return self._namespace

    # ------------------------------------------------------------ inside

    def _usable(self) -> Store | None:
        return self._store if self._dead is None else None

    def _fragments(self, keys: Sequence[str], host_indices: torch.Tensor | None) -> Fragments | None:
        """Where the pages of ``keys`` lie in the host pool; None if nothing may be copied."""
        if self._usable() is None or self._pages is None or not keys or host_indices is None:
            return None
        fragments = self._pages.fragments(host_indices, len(keys))
        if fragments is None:
            self._log_once(
                "indices",
                logging.ERROR,
                "%d host indices are not %d whole pages of %d tokens of the registered pool: nothing is copied",
                host_indices.numel(),
                len(keys),
                self._pages.page_tokens,
            )
        return fragments

    def _flat(self, keys: Sequence[str], pages: Sequence[torch.Tensor]) -> Fragments | None:
        """Where flat pages lie; None unless each is one stretch of exactly an object's bytes in host memory."""
        if self._usable() is None or self._pages is None or not self._pages.flat or len(pages) != len(keys):
            return None
        size = self._pages.object_bytes
        for page in pages:
            if page.device.type != "cpu" or not page.is_contiguous() or page.numel() * page.element_size() != size:
                self._log_once(
                    "flat", logging.ERROR, "a flat page is not %d contiguous bytes of host memory: not copied", size
                )
                return None
        return Fragments(
            addresses=np.array([page.data_ptr() for page in pages], np.uint64).reshape(-1, 1),
            sizes=np.array([size], np.uint64),
        )

    def _transfer(
        self, transfer: PoolTransfer, extra_info: HiCacheStorageExtraInfo | None, call: Callable[..., list[bool]]
    ) -> list[bool]:
        keys = list(transfer.keys or ())
        if _pool_name(transfer.name) != KV:
            self._unknown_pool(transfer.name)
            return _false(keys)
        return call(keys, transfer.host_indices, extra_info)

    def _unknown_pool(self, name: Any) -> None:
        pool = _pool_name(name)
        self._log_once(f"pool {pool}", logging.WARNING, "pool %r is not stored by this release of Maru: a miss", pool)

    def _note(self, figures: deque[tuple[int, float]], pages: int, began: float) -> None:
        if pages and self._config.enable_storage_metrics:
            with self._lock:
                figures.append((pages, max(time.monotonic() - began, 1e-9)))

    def _refused(self, error: ChainError) -> None:
        self._log_once(error.kind, logging.WARNING, "%s", error)

    def _log_once(self, kind: str, level: int, message: str, *args: object, exc_info: bool = False) -> None:
        with self._lock:
            if kind in self._logged:
                return
            self._logged.add(kind)
        log.log(level, message + " (said once)", *args, exc_info=exc_info)


def _pool_name(name: Any) -> str:
    return str(getattr(name, "value", name))
