"""Maru as a tier under vLLM's own CPU tier: ``{"type": "maru", …}`` among ``secondary_tiers`` of ``TieringOffloadingSpec``.

vLLM copies blocks from the GPU into *chunks* of its host memory, and from there into every secondary tier; what a tier has is copied
back into chunks before the GPU gets it. Here an object is one chunk: the row of host memory in which all workers of the engine have
their part, padding included. So there is one shard, and the scheduler's process, where vLLM runs the tiers, copies it.

Unlike vLLM's ``OffloadingConnector`` itself, this interface takes a failed load for an answer: the chunks that were loaded
stay, the others are computed. So nothing is held here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from maru_core.mover import Fragments
from maru_core.protocol import HASH_BYTES
from maru_core.store import Store
from maru_vllm.chains import (
    GROUP_BYTES,
    Run,
    chain_of,
    check_interface,
    group_of,
    groups_of,
    in_order,
    page_tokens_of,
)
from maru_vllm.config import parse_extra_config
from maru_vllm.namespace import collect
from maru_vllm.surroundings import find_surroundings

log = logging.getLogger("maru.vllm")


class Rows:
    """The CPU tier's chunks: rows of one length at one distance. Keeps no reference to the view, which vLLM releases."""

    def __init__(self, view: memoryview) -> None:
        rows = np.asarray(view)
        self.count = len(rows)
        self.stride = int(rows.strides[0])
        self.nbytes = int(rows[0].nbytes)
        self._base = int(rows.ctypes.data)

    def fragments(self, chunks: Iterable[int]) -> Fragments:
        """One object a chunk.

        Raises:
            ValueError: a number that is no chunk.
        """
        numbers = np.array(list(chunks), np.int64)
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < self.count):
            raise ValueError(f"chunks {numbers.min()} to {numbers.max()} of a CPU tier of {self.count}")
        addresses = (self._base + numbers * self.stride).astype(np.uint64)[:, None]
        return Fragments(addresses, np.array([self.nbytes], np.uint64))


class _Lookups(AsyncLookupManager):  # type: ignore[misc]
    """Asks in a thread of vLLM's, once a step, for all keys that were looked up in it."""

    def __init__(self, store: Store, components: Mapping[int, str]) -> None:
        self._store = store
        self._components = components
        super().__init__(tier_type="maru")

    def batch_lookup(self, keys: list[Any], req_context: Any) -> list[bool]:
        there = np.zeros(len(keys), bool)
        groups = np.array([group_of(key) for key in keys])
        for group in np.unique(groups).tolist():
            mine = np.flatnonzero(groups == group)
            hashes = [bytes(keys[index][:-GROUP_BYTES]) for index in mine.tolist()]
            if group in self._components and {len(page) for page in hashes} == {HASH_BYTES}:
                there[mine] = self._store.present(self._components[group], 0, b"".join(hashes))
        found: list[bool] = there.tolist()
        return found


class MaruTierManager(SecondaryTierManager):  # type: ignore[misc]
    """See the module. All methods are called by vLLM's scheduler in its thread, and none waits for Maru but :meth:`drain_jobs`
    and :meth:`shutdown`."""

    #: The pool is memory.
    medium: ClassVar[Medium] = Medium.CPU

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            locality: ``LOCAL`` or ``REMOTE``: what vLLM tells others of this tier.
            options: the keys of MaruConnector's ``kv_connector_extra_config``.
        Raises:
            ConfigError, PoolError, ServerError: see :meth:`maru_core.store.Store.open`.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        check_interface()
        self.locality = Locality(locality) if locality is not None else None
        config = offloading_spec.config
        extra = parse_extra_config(options)
        vllm_config, kv_cache_config = find_surroundings()
        rows = Rows(primary_kv_view)
        store = Store.open(
            extra.store_config(),
            collect(
                vllm_config,
                kv_cache_config,
                block_tokens=page_tokens_of(config),
                layout=(
                    f"vllm-cpu-tier:{config.kv_cache_layout}:{config.worker_kv_bytes_per_block}x{config.cache.blocks_per_chunk}:"
                    f"{rows.nbytes}:{'canonical' if config.canonical_layout else 'direct'}:{len(config.groups)}"
                    f"{':replicated' if offloading_spec.replicated_layout else ''}"
                ),
                config=extra,
            ),
            name="vllm-tier",
            object_bytes=rows.nbytes,
        )
        self._begin(
            store,
            rows,
            {number: group.component for number, group in groups_of(config, kv_cache_config).items()},
            page_tokens_of(config),
        )

    def _begin(self, store: Store, rows: Rows, components: Mapping[int, str], page_tokens: int) -> None:
        self._store = store
        self._rows = rows
        self._components = dict(components)
        self._page_tokens = page_tokens
        self._lookups = _Lookups(store, self._components)
        self._loader = ThreadPoolExecutor(1, "maru-tier-load")
        self._storer = ThreadPoolExecutor(1, "maru-tier-store")
        self._jobs: dict[Future[JobResult], TransferJob] = {}

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        job = job_metadata
        chain = chain_of(job.req_context, self._page_tokens)
        pairs = [
            pair for pair in in_order(chain, job.keys, job.chunk_ids.tolist()) if group_of(pair[0]) in self._components
        ]
        runs = chain.runs(key for key, _ in pairs)
        self._jobs[self._storer.submit(self._store_chunks, job, runs, [chunk for _, chunk in pairs])] = job

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._jobs[self._loader.submit(self._load_chunks, job_metadata)] = job_metadata

    def get_finished_jobs(self) -> list[JobResult]:
        results = []
        for future in [future for future in self._jobs if future.done()]:
            job = self._jobs.pop(future)
            result = future.result()
            if job.is_promotion and not result.success:
                # Or vLLM would ask for them again, step after step.
                good = set(result.successful_keys or ())
                self._lookups.mark_miss([key for key in job.keys if key not in good])
            results.append(result)
        return results

    def has_pending_work(self) -> bool:
        return bool(self._jobs)

    def touch(self, keys: Iterable[Any], req_context: Any) -> None:
        hashes = {bytes(key[:-GROUP_BYTES]) for key in keys}
        self._store.touch(b"".join(page for page in hashes if len(page) == HASH_BYTES))

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()

    def drain_jobs(self) -> None:
        wait(self._jobs)

    def shutdown(self) -> None:
        # The rows are vLLM's, and gone after this: a copy that has begun ends first.
        self._lookups.shutdown()
        self._loader.shutdown(wait=True, cancel_futures=True)
        self._storer.shutdown(wait=True, cancel_futures=True)
        self._store.close()

    # ------------------------------------------------------------ in threads

    def _store_chunks(self, job: TransferJob, runs: list[Run], chunks: list[int]) -> JobResult:
        began = time.monotonic()
        stored = start = 0
        try:
            for run in runs:
                stop = start + len(run)
                fragments = self._rows.fragments(chunks[start:stop])
                component = self._components[run.group]
                stored += int(self._store.put(component, 0, 1, run.parent, run.hashes, fragments).sum())
                start = stop
        except Exception:
            log.exception("a store of vLLM's CPU tier into Maru was given up")
        return self._result(job, stored == len(job.keys), stored, began)

    def _load_chunks(self, job: TransferJob) -> JobResult:
        began = time.monotonic()
        keys = list(job.keys)
        good = np.zeros(len(keys), bool)
        try:
            groups = np.array([group_of(key) for key in keys])
            for group in np.unique(groups).tolist():
                mine: npt.NDArray[np.intp] = np.flatnonzero(groups == group)
                hashes = b"".join(bytes(keys[index][:-GROUP_BYTES]) for index in mine.tolist())
                fragments = self._rows.fragments(job.chunk_ids[mine].tolist())
                good[mine] = self._store.get(self._components[group], 0, hashes, fragments)
        except Exception:
            log.exception("a load of vLLM's CPU tier from Maru was given up")
        loaded = tuple(keys[index] for index in np.flatnonzero(good).tolist())
        result = self._result(job, bool(good.all()), len(loaded), began)
        if not result.success:
            result.successful_keys = loaded or None
        return result

    def _result(self, job: TransferJob, success: bool, chunks: int, began: float) -> JobResult:
        return JobResult(
            job_id=job.job_id,
            success=success,
            transfer_time=time.monotonic() - began,
            transfer_bytes=chunks * self._rows.nbytes,
        )
