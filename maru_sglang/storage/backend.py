"""The HiCache storage backend: SGLang's host pages in and out of Maru.

SGLang calls it from its own threads: queries and loads while a prefetch is under way, stores from its backup thread, a
few queries from the scheduler itself. So:

- only the constructor (and the registration of the pool, which is part of attaching) raises; every other call answers
  with as many results as it was asked for, and what went wrong is a miss, or "not stored";
- each call is bounded in time by the store;
- ranks may get different answers at any time, and SGLang takes the least of them.

Each pool of SGLang's is a component of its own: the KV pool, whose pages the keys are of, and those beside it
(:mod:`maru_sglang.storage.sides`). The namespace has the geometry of all of them, so the session begins when SGLang says that
the set is complete, and begins anew if a draft model brings another pool later. A pool that nobody has read is a refusal.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from maru_core.errors import ConfigError
from maru_core.mover import Fragments
from maru_core.namespace import Namespace, differences
from maru_core.protocol import ROOT, Want
from maru_core.store import Store
from maru_sglang.radix import KV, ChainError, EngineFacts, Placement, collect, host_pool_facts, pack_keys, parent_of
from maru_sglang.storage.answers import answers, none, none_by_pool
from maru_sglang.storage.config import parse_extra_config
from maru_sglang.storage.figures import Figures
from maru_sglang.storage.pages import HostPages
from maru_sglang.storage.regions import LOGICAL_POOL
from maru_sglang.storage.sides import DRAFTS, Side, result_of, side_of, want_of

log = logging.getLogger("maru.sglang")


class MaruHiCacheStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang has no types for us
    """See the module. ``_lock`` protects the set of what was logged; everything else is set while attaching, before SGLang's threads run, except ``_dead``, which only ever goes from None to a
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
        self._figures = Figures(storage_config.enable_storage_metrics)
        self._anchor: Any = None
        self._pages: HostPages | None = None  # None too where the KV pool has no memory of its own
        self._sides: dict[str, Side] = {}
        self._facts: EngineFacts | None = None
        self._complete = False
        self._store: Store | None = None
        self._namespace: Namespace | None = None
        if mem_pool_host is not None and not isinstance(mem_pool_host, dict):
            self.register_mem_pool_host(mem_pool_host)

    # ------------------------------------------------------------ attach, detach

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Part of attaching: raises as the constructor does."""
        self.mem_pool_host = mem_pool_host
        if self._anchor is mem_pool_host:
            return
        pages = None if type(mem_pool_host) is LOGICAL_POOL else HostPages(mem_pool_host)
        facts = collect(self._config, host_pool_facts(mem_pool_host))
        if self._facts is not None and facts != self._facts:
            told = differences(self._facts.namespace(""), facts.namespace(""))
            raise ConfigError(f"the host pool changed while attached: {told}: attach again")
        self._anchor, self._pages, self._facts = mem_pool_host, pages, facts

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Part of attaching: raises as the constructor does."""
        name = _pool_name(host_pool_name)
        if name == KV:
            if host_pool is not self._anchor:
                raise ConfigError(
                    f"SGLang registered a {type(host_pool).__name__} as {KV!r}, but attached a {type(self._anchor).__name__}: "
                    "use SGLang 0.5.23"
                )
            return
        known = self._sides.get(name)
        if known is None or known.pages.pool is not host_pool:
            self._sides = {**self._sides, name: side_of(self._config, self._placement, name, host_pool)}
            if self._complete:
                self._open()

    def on_host_pools_registered(self) -> None:
        """The last part of attaching: raises as the constructor does."""
        self._complete = True
        self._open()

    def _open(self) -> None:
        """Begin the session, now that it is known what a page consists of."""
        if self._facts is None:
            raise ConfigError("SGLang registered no KV pool: use SGLang 0.5.23")
        sides = " ".join(self._sides[name].facts for name in sorted(self._sides))
        namespace = msgspec.structs.replace(self._facts, side_pools=sides).namespace(self._options.tag)
        if self._store is not None and namespace == self._namespace:
            return
        config, placement, old = self._config, self._placement, self._store
        largest = [side.pages.object_bytes for side in self._sides.values()]
        if self._pages is not None:
            largest.append(self._pages.object_bytes // placement.parts)
        self._store = Store.open(
            self._options.store_config(),
            namespace,
            name=f"sglang tp{config.tp_rank}/{config.tp_size} pp{config.pp_rank}/{config.pp_size}",
            object_bytes=max(largest, default=0),
        )
        for pages in (self._pages, *(side.pages for side in self._sides.values())):
            for address, nbytes in pages.memory() if pages is not None else ():
                self._store.register(address, nbytes)
        self._namespace = namespace
        if old is not None:
            old.close()
        log.info(
            "Maru: component %s, shard %d of %d, pages of %d tokens and %d bytes%s, namespace %s %s",
            placement.component,
            placement.shard,
            placement.world,
            self._anchor.page_size,
            0 if self._pages is None else self._pages.object_bytes,
            "".join(f", {side.name} {side.pages.object_bytes} bytes" for side in self._sides.values()),
            namespace.digest().hex()[:16],
            namespace.record().decode(),
        )

    @answers(lambda *_, **__: None)
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

    @answers(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Pages from the start of ``keys`` that are stored, whole."""
        store = self._usable()
        if store is None or not keys:
            return 0
        hashes = pack_keys(keys)
        return store.prefix(self._placement.components, self._placement.shard, hashes)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    @answers(lambda *_, **__: PoolTransferResult.empty())
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Up to which lengths everything is there that SGLang's rules for the given pools need."""
        store = self._usable()
        if store is None or not keys:
            return PoolTransferResult(0, {}, [])
        kv = () if self._pages is None else self._placement.components
        wants = dict.fromkeys(kv, Want())
        asked: list[PoolTransfer] = []
        for transfer in pool_transfers or ():
            name = _pool_name(transfer.name)
            if name in self._sides:
                wants[self._sides[name].place.component] = want_of(transfer)
                asked.append(transfer)
            elif name != KV:
                self._unknown_pool(name)
                # BLOCK_GROUPS pools report for themselves and never limit the KV hit (PoolHitPolicy).
                if transfer.hit_policy != PoolHitPolicy.BLOCK_GROUPS:
                    return PoolTransferResult(0, {}, [])
        if all(want.rule for want in wants.values()):
            return PoolTransferResult(0, {}, [])  # no pool has a page for every page: there is no prefix to speak of
        found = store.find(wants, self._placement.shard, pack_keys(keys))
        result, short = result_of(found, kv, self._sides, asked)
        if short:
            self._held_back(short, result.kv_hit_pages)
        return result

    def _held_back(self, short: dict[str, int], usable: int) -> None:
        self._figures.held_back(short)
        for name, pages in short.items():
            what = "draft KV" if name in DRAFTS else "pool"
            self._log_once(
                f"short {name}",
                logging.WARNING,
                "%d pages are stored without their %s %r, of which SGLang needs them too: a hit of %d pages",
                pages,
                what,
                name,
                usable,
            )

    # ------------------------------------------------------------ loads

    @answers(none)
    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Load pages straight into the host pool. Where the answer is False the host page holds garbage."""
        if self._pages is None:
            return self._logical(keys)
        fragments = self._fragments(self._pages, keys, host_indices)
        return none(keys) if fragments is None else self._load(keys, fragments, self._pages, self._placement)

    @answers(none_by_pool)
    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {transfer.name: self._get_side(transfer) for transfer in transfers}

    def _get_side(self, transfer: PoolTransfer) -> list[bool]:
        keys, name = list(transfer.keys or ()), _pool_name(transfer.name)
        if name == KV:
            return self.batch_get_v1(keys, transfer.host_indices)
        side = self._side(name)
        fragments = None if side is None else self._fragments(side.pages, keys, transfer.host_indices)
        if side is None or fragments is None:
            return none(keys)
        return self._load(keys, fragments, side.pages, side.place)

    @answers(lambda *_, **__: None)
    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Load one page into a flat tensor; None where it cannot be had."""
        if target_location is None:
            if self._pages is None:
                return None
            target_location = self._pages.pool.get_dummy_flat_data_page()
        return self.batch_get([key], [target_location])[0]

    @answers(lambda keys, *_, **__: [None] * len(keys))
    def batch_get(
        self, keys: list[str], target_locations: list[torch.Tensor] | None = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Load pages into flat tensors of exactly a page's bytes."""
        targets = list(target_locations or ())
        fragments = self._flat(keys, targets)
        if fragments is None:
            return [None] * len(keys)
        loaded = self._load(keys, fragments, self._pages, self._placement)
        return [target if good else None for target, good in zip(targets, loaded, strict=True)]

    def _load(self, keys: Sequence[str], fragments: Fragments, pages: HostPages | None, place: Placement) -> list[bool]:
        store = self._usable()
        if store is None:
            return none(keys)
        hashes = pack_keys(keys)
        began = time.monotonic()
        loaded = np.ones(len(keys), bool)
        for part, where in _divided(fragments, pages, place):
            loaded &= store.get(place.component, place.shard + part, hashes, where)
            if not loaded.any():
                break
        self._figures.loaded(int(loaded.sum()), began)
        answer: list[bool] = loaded.tolist()
        return answer

    # ------------------------------------------------------------ stores

    @answers(none)
    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages straight from the host pool; True only where they are known to be stored."""
        parent = parent_of(keys, extra_info.prefix_keys if extra_info is not None else None)
        if self._pages is None:
            return self._logical(keys)
        fragments = self._fragments(self._pages, keys, host_indices)
        return none(keys) if fragments is None else self._save(keys, parent, fragments, self._pages, self._placement)

    @answers(none_by_pool)
    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {transfer.name: self._set_side(transfer, extra_info) for transfer in transfers}

    def _set_side(self, transfer: PoolTransfer, extra_info: HiCacheStorageExtraInfo | None) -> list[bool]:
        keys, name = list(transfer.keys or ()), _pool_name(transfer.name)
        if name == KV:
            return self.batch_set_v1(keys, transfer.host_indices, extra_info)
        side = self._side(name)
        fragments = None if side is None else self._fragments(side.pages, keys, transfer.host_indices)
        if side is None or fragments is None:
            return none(keys)
        try:
            parent = parent_of(keys, extra_info.prefix_keys if extra_info is not None else None)
        except ChainError as error:
            self._refused(error)  # of this pool alone
            return none(keys)
        return self._save(keys, parent, fragments, side.pages, side.place)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store one page from a flat tensor."""
        return self.batch_set([key], [value])

    @answers(lambda *_, **__: False)
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
        saved = np.array(self._save(keys, ROOT, fragments, self._pages, self._placement))
        store = self._usable()
        if not saved.all() and store is not None:
            place = self._placement
            saved |= np.logical_and.reduce(
                [store.present(place.component, place.shard + part, hashes) for part in range(place.parts)]
            )
        return bool(saved.all())

    def _save(
        self, keys: Sequence[str], parent: bytes, fragments: Fragments, pages: HostPages | None, place: Placement
    ) -> list[bool]:
        store = self._usable()
        if store is None or not place.writer:
            return none(keys)
        hashes = pack_keys(keys)
        began = time.monotonic()
        stored = np.ones(len(keys), bool)
        for part, where in _divided(fragments, pages, place):
            stored &= store.put(place.component, place.shard + part, place.world, parent, hashes, where)
        self._figures.stored(int(stored.sum()), began)
        answer: list[bool] = stored.tolist()
        return answer

    # ------------------------------------------------------------ the rest of the interface

    @answers(lambda *_, **__: False)
    def clear(self) -> bool:
        """Remove every page of this namespace."""
        store = self._usable()
        return store is not None and store.clear()

    @answers(lambda *_, **__: None)
    def get_stats(self) -> StorageMetrics | None:
        """Transfers since the last call, for ``--enable-metrics``: pages of each, and GiB/s."""
        if not self._config.enable_storage_metrics or self._pages is None:
            return None
        return self._figures.metrics(self._pages.object_bytes)

    @answers(lambda *_, **__: {})
    def counters(self) -> dict[str, float | int | str]:
        """The store's counters with the reasons for misses, and the server's figures. ``short_NAME_pages``: by how many pages the
        pool NAME held hits back, in all."""
        if self._store is None:
            return {}
        return self._store.stats() | self._figures.short()

    @property
    def namespace(self) -> Namespace | None:
        """What this process's pages are stored under; None before the pool is known."""
        return self._namespace

    # ------------------------------------------------------------ inside

    def _usable(self) -> Store | None:
        return self._store if self._dead is None else None

    def _logical(self, keys: Sequence[str]) -> list[bool]:
        """Of a KV pool without memory there is nothing to copy: its pages are there as far as those of the pools beside it are."""
        pack_keys(keys)
        return [self._usable() is not None and bool(self._sides)] * len(keys)

    def _side(self, name: str) -> Side | None:
        side = self._sides.get(name)
        if side is None:
            self._unknown_pool(name)
        return side

    def _fragments(self, pages: HostPages, keys: Sequence[str], host_indices: torch.Tensor | None) -> Fragments | None:
        """Where the pages of ``keys`` lie in a host pool; None if nothing may be copied."""
        if self._usable() is None or not keys or host_indices is None:
            return None
        fragments = pages.fragments(host_indices, len(keys))
        if fragments is None:
            self._log_once(
                "indices",
                logging.ERROR,
                "%d host indices are not %d whole pages of %d tokens of the registered %s: nothing is copied",
                host_indices.numel(),
                len(keys),
                pages.page_tokens,
                type(pages.pool).__name__,
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
        return self._pages.flat_fragments([page.data_ptr() for page in pages], whole=self._placement.parts == 1)

    def _unknown_pool(self, name: Any) -> None:
        pool = _pool_name(name)
        self._log_once(f"pool {pool}", logging.WARNING, "SGLang never registered a pool %r: a miss", pool)

    def _refused(self, error: ChainError) -> None:
        self._log_once(error.kind, logging.WARNING, "%s", error)

    def _log_once(self, kind: str, level: int, message: str, *args: object, exc_info: bool = False) -> None:
        with self._lock:
            if kind in self._logged:
                return
            self._logged.add(kind)
        log.log(level, message + " (said once)", *args, exc_info=exc_info)


def _divided(fragments: Fragments, pages: HostPages | None, place: Placement) -> list[tuple[int, Fragments]]:
    """The shards of this rank, with where each lies."""
    if place.parts == 1 or pages is None:
        return [(0, fragments)]
    return [(part, pages.split(fragments, part, place.parts)) for part in range(place.parts)]


def _pool_name(name: Any) -> str:
    return str(getattr(name, "value", name))
