"""Maru under vLLM's own ``OffloadingConnector``: ``"spec_name": "MaruOffloadingSpec"`` in ``kv_connector_extra_config``.

vLLM's connector decides what is stored and loaded and when; here it is asked of Maru (:class:`MaruOffloadingManager`, in the
scheduler's process) and copied (:class:`MaruOffloadingWorker`, in each worker's) straight between vLLM's KV blocks and the pool.

That connector has no way to report a load that failed: a request whose load is reported done runs on whatever lies in its
blocks, and one whose load is never reported waits for ever. So:

- A page is a hit only while Maru *holds* it (:class:`maru_core.protocol.Hold`), from the lookup until the load is done. What
  the server would not hold, because its budget for holds is used up, is not a hit.
- A worker tries a load again while the hold lasts, so that a server that is restarted meanwhile costs time and nothing else.
- Should a load fail all the same (an operator removed the pages; with ``verify=checksum`` the memory was wrong), the worker
  raises :class:`LoadFailedError` from its next step: vLLM's engine stops with that message, and no token is made of the
  blocks. Where that is too hard, use the connector MaruConnector, which recomputes.

A store that fails costs nothing: what Maru has is asked of Maru each time, and never remembered here.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TransferResult,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from maru_core.errors import ConfigError, MaruError
from maru_core.namespace import Namespace
from maru_core.protocol import Hold, Rule, Want
from maru_core.store import Store
from maru_vllm.chains import Chain, Run, chain_of, check_interface, group_of, groups_of, page_tokens_of
from maru_vllm.config import ExtraConfig, parse_extra_config
from maru_vllm.device import Moment, already, moments_of, mover_of
from maru_vllm.groups import Group, Placement
from maru_vllm.layout import GroupLayout, layouts_of
from maru_vllm.namespace import collect
from maru_vllm.surroundings import find_surroundings

log = logging.getLogger("maru.vllm")

#: Keys of ``kv_connector_extra_config`` that are vLLM's own.
VLLM_KEYS: Final = frozenset({"spec_name", "spec_module_path", "self_describing_kv_events", "offload_prompt_only"})
#: Of windows and states each page for itself: which of them count together is decided by vLLM's connector.
_EACH_PAGE: Final = Want(Rule.TRAILING_PAGES, 1)
#: A hold is renewed when less than this part of it is left: a load must have time to begin and to end.
_RENEW_BELOW: Final = 0.5
#: An answer that left something to be found is asked for again after this many seconds, while the request waits.
_ASK_AGAIN_S: Final = 1.0
#: For how long a load is tried at most, seconds: a server that is restarted is back sooner.
_PATIENCE_S: Final = 10.0
#: Pause between the attempts of a load, seconds.
_RETRY_S: Final = 0.05


class LoadFailedError(MaruError):
    """Pages that vLLM was promised could not be loaded. It stops the engine."""


@dataclass
class MaruTransfer(LoadStoreSpec):  # type: ignore[misc]
    """What a worker is to move: the pages, in the order of the blocks that vLLM gives with them. Pickled between vLLM's processes."""

    runs: list[Run]
    #: For how long the pages of a load are held, seconds.
    held_s: float = 0.0


# ------------------------------------------------------------ scheduler side


@dataclass(slots=True, eq=False)
class _Answer:
    """What the server said of one group's pages, and holds."""

    hold: bytes
    asked: float
    until: float  # when the hold ends, in monotonic seconds; 0: nothing is held
    count: int  # pages asked for
    there: np.ndarray[Any, np.dtype[np.bool_]]
    whole: bool  # everything is there, and held


@dataclass(slots=True, eq=False)
class _Asked:
    """Scratch of one request."""

    answers: dict[int, _Answer] = field(default_factory=dict)  # by group
    loading: list[_Answer] = field(default_factory=list)


class MaruOffloadingManager(OffloadingManager):  # type: ignore[misc]
    """See the module. Called by vLLM's scheduler in its thread.

    Args:
        groups: by vLLM's id.
        hold_s: for how long a hold is asked for, seconds.
        loads, stores: False for an engine that only stores, or only loads.
    """

    def __init__(
        self,
        store: Store,
        groups: Mapping[int, Group],
        page_tokens: int,
        *,
        hold_s: float,
        loads: bool = True,
        stores: bool = True,
    ) -> None:
        self._store = store
        self._wants = {
            number: (group.component, _EACH_PAGE if group.want.rule else group.want) for number, group in groups.items()
        }
        self._page_tokens = page_tokens
        self._hold_s = hold_s
        self._loads = loads
        self._stores = stores
        self._me = secrets.token_bytes(8)
        self._asked = 0
        self._open: dict[str, _Asked] = {}  # requests that have answers, by id
        self._loading: set[_Answer] = set()
        self._clear_at: float | None = None
        self._released: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._releaser = threading.Thread(target=self._release, name="maru-unhold", daemon=True)
        self._releaser.start()

    # ------------------------------------------------------------ loads

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        if not self._loads or not self._ready():
            return LookupResult.MISS
        group = group_of(key)
        chain = chain_of(req_context, self._page_tokens)
        page = chain.page_of(key)
        if page is None or group not in self._wants:
            return LookupResult.MISS
        answer = self._answer(req_context, group, chain)
        return LookupResult.HIT if answer.until and page < answer.count and answer.there[page] else LookupResult.MISS

    def _answer(self, req_context: Any, group: int, chain: Chain) -> _Answer:
        asked = _state(req_context)
        now = time.monotonic()
        answer = asked.answers.get(group)
        if answer is not None:
            lasts = not answer.until or answer.until - now > (answer.until - answer.asked) * _RENEW_BELOW
            whole = answer.whole and answer.count == len(chain.pages)
            if lasts and (whole or now - answer.asked < _ASK_AGAIN_S):
                return answer
        # The new hold before the end of the old one, so that nothing is lost in between.
        fresh = self._ask(group, chain, now)
        if answer is not None:
            self._let_go(answer)
        asked.answers[group] = fresh
        self._open[req_context.req_id] = asked
        return fresh

    def _ask(self, group: int, chain: Chain, now: float) -> _Answer:
        self._asked += 1
        hold = self._me + self._asked.to_bytes(8, "big")
        count = len(chain.pages)
        component, want = self._wants[group]
        found = self._store.find({component: want}, 0, chain.hashes, hold=Hold(hold, 1, self._hold_s))
        there = np.zeros(count, bool)
        there[found.ends.astype(np.int64) - 1] = True
        until = now + found.held_s if found.held_s > 0 else 0.0
        return _Answer(hold, now, until, count, there, bool(until and there.all()))

    def get_load_source(self, key: Any, req_context: Any) -> CacheHitSource:
        return CacheHitSource.HOST

    def prepare_load(self, keys: Collection[Any], req_context: Any) -> MaruTransfer:
        asked = _state(req_context)
        chain = chain_of(req_context, self._page_tokens)
        runs = chain.runs(keys)
        groups = {run.group for run in runs}
        # From here on they are the load's: a later lookup of this request asks anew.
        mine = [asked.answers.pop(group) for group in groups]
        asked.loading += mine
        self._loading.update(mine)
        held_s = min((answer.until for answer in mine), default=0.0) - time.monotonic()
        return MaruTransfer(runs, max(0.0, held_s))

    def complete_load(self, keys: Collection[Any], req_context: Any) -> None:
        asked = _state(req_context)
        for answer in asked.loading:
            self._loading.discard(answer)
            self._let_go(answer)
        asked.loading.clear()

    def touch(self, keys: Collection[Any], req_context: Any) -> None:
        chain = chain_of(req_context, self._page_tokens)
        pages = {page for key in keys if (page := chain.page_of(key)) is not None}
        if pages:
            self._store.touch(b"".join(chain.part(page, page + 1) for page in sorted(pages)))

    # ------------------------------------------------------------ stores

    def prepare_store(self, keys: Collection[Any], req_context: Any) -> PrepareStoreOutput | None:
        chain = chain_of(req_context, self._page_tokens)
        wanted = []
        if self._stores and self._ready():
            wanted = [key for key in keys if group_of(key) in self._wants and chain.page_of(key) is not None]
        return PrepareStoreOutput(wanted, MaruTransfer(chain.runs(wanted)), [])

    # ------------------------------------------------------------ requests and the rest

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_schedule_end(self, context: Any) -> None:
        # They run now: what was found for them is being loaded, or is not needed.
        for request in context.new_req_ids:
            self._close(request)
        self._ready()

    def on_request_finished(self, req_context: Any) -> None:
        # What is being loaded (into blocks of a request that was aborted) is held until that is done.
        self._close(req_context.req_id)

    def _close(self, request: str) -> None:
        asked = self._open.pop(request, None)
        if asked is not None:
            for answer in asked.answers.values():
                self._let_go(answer)
            asked.answers.clear()

    def reset_cache(self) -> None:
        """Remove every page of this namespace, for all engines. vLLM forgets the loads that are under way and never says when
        they are done, and removing what they read would stop the engine: so it is done when none can be under way any more,
        and nothing is found or stored until then."""
        for request in list(self._open):
            self._close(request)
        self._clear_at = max((answer.until for answer in self._loading), default=0.0)
        self._loading.clear()
        self._ready()

    def _ready(self) -> bool:
        """Whether no removal is outstanding."""
        if self._clear_at is None:
            return True
        if time.monotonic() < self._clear_at:
            return False
        if self._store.clear():
            self._clear_at = None
            return True
        self._clear_at = time.monotonic() + _ASK_AGAIN_S
        return False

    def shutdown(self) -> None:
        self._released.put(None)
        self._releaser.join(2.0)
        self._store.close()

    def _let_go(self, answer: _Answer) -> None:
        if answer.until:
            self._released.put(answer.hold)

    def _release(self) -> None:
        """A thread: the scheduler does not wait for the end of a hold."""
        while (hold := self._released.get()) is not None:
            self._store.unhold(hold)


def _state(req_context: Any) -> _Asked:
    asked: _Asked | None = req_context.get_state(_Asked)
    if asked is None:
        asked = _Asked()
        req_context.set_state(asked)
    return asked


# ------------------------------------------------------------ worker side


class MaruOffloadingWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies between vLLM's blocks and the pool, in a thread for loads and one for stores.

    Args:
        layouts: of each KV cache group by vLLM's id, in the order in which vLLM lists the groups' blocks.
        components: Maru's name of each group.
        placement: which part of each page is this worker's.
        moments: takes a moment of the device that the layouts are on; as it is for a CPU.
    """

    def __init__(
        self,
        store: Store,
        layouts: Mapping[int, GroupLayout],
        components: Mapping[int, str],
        placement: Placement,
        moments: Callable[[], Moment] = already,
    ) -> None:
        self._store = store
        self._layouts = dict(layouts)
        self._components = dict(components)
        self._placement = placement
        self._moments = moments
        self._jobs: dict[int, Future[TransferResult]] = {}
        self._loader = ThreadPoolExecutor(1, "maru-load")
        self._storer = ThreadPoolExecutor(1, "maru-store")
        self._closing = threading.Event()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        work = self._work(dst_spec, src_spec)
        self._jobs[job_id] = self._storer.submit(self._store_pages, job_id, work, self._moments())
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        work = self._work(src_spec, dst_spec)
        assert isinstance(src_spec, MaruTransfer)
        until = time.monotonic() + min(src_spec.held_s, _PATIENCE_S)
        self._jobs[job_id] = self._loader.submit(self._load_pages, job_id, work, self._moments(), until)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Raises :class:`LoadFailedError` for a load that failed, and each time again: see the module."""
        done = [job for job, future in self._jobs.items() if future.done()]
        results = [self._jobs[job].result() for job in done]
        for job in done:
            del self._jobs[job]
        return results

    def wait(self, job_ids: set[int]) -> None:
        wait([self._jobs[job] for job in job_ids if job in self._jobs])

    def shutdown(self) -> None:
        self._closing.set()
        for pool in (self._loader, self._storer):
            pool.shutdown(wait=True, cancel_futures=True)
        self._store.close()

    # ------------------------------------------------------------ inside

    def _work(self, pages: LoadStoreSpec, blocks: GPULoadStoreSpec) -> list[tuple[Run, list[int]]]:
        """Each run with its blocks.

        Raises:
            MaruError: they do not go together; nothing was copied.
        """
        assert isinstance(pages, MaruTransfer)
        numbers = blocks.block_ids.tolist()
        sizes = dict.fromkeys(self._layouts, 0)
        work = []
        start = 0
        for run in pages.runs:
            work.append((run, numbers[start : start + len(run)]))
            start += len(run)
            sizes[run.group] += len(run)
        if start != len(numbers) or list(sizes.values()) != list(blocks.group_sizes):
            raise MaruError(
                f"vLLM gives {list(blocks.group_sizes)} blocks of the KV cache groups for {list(sizes.values())} pages: this is not the "
                "vLLM that this release of Maru knows (0.32)"
            )
        return work

    def _store_pages(self, job_id: int, work: Sequence[tuple[Run, list[int]]], filled: Moment) -> TransferResult:
        began = time.monotonic()
        nbytes = 0
        place = self._placement
        try:
            filled()
            for run, blocks in work if place.writer else ():
                layout = self._layouts[run.group]
                buffers = layout.buffers(blocks)
                stored = self._store.put(
                    self._components[run.group], place.shard, place.world, run.parent, run.hashes, buffers
                )
                nbytes += int(stored.sum()) * layout.object_bytes
        except Exception:
            log.exception("a store of vLLM's offloading connector was given up")
        # vLLM stops where a store reports that it failed, and nothing depends on it.
        return TransferResult(job_id, True, nbytes, time.monotonic() - began)

    def _load_pages(
        self, job_id: int, work: Sequence[tuple[Run, list[int]]], free: Moment, until: float
    ) -> TransferResult:
        began = time.monotonic()
        nbytes = 0
        free()
        for run, blocks in work:
            layout = self._layouts[run.group]
            hashes, left = run.hashes, list(blocks)
            while True:
                loaded = self._store.get(
                    self._components[run.group], self._placement.shard, hashes, layout.buffers(left)
                )
                nbytes += int(loaded.sum()) * layout.object_bytes
                if loaded.all():
                    break
                missing = np.flatnonzero(~loaded).tolist()
                hashes = b"".join(hashes[32 * index : 32 * index + 32] for index in missing)
                left = [left[index] for index in missing]
                if time.monotonic() >= until or self._closing.wait(_RETRY_S):
                    raise LoadFailedError(
                        f"{len(left)} KV blocks that vLLM's OffloadingConnector was promised could not be loaded from Maru within "
                        f"{time.monotonic() - began:.1f} s ({self._misses()}). That connector cannot report it, and would go on with wrong KV: the "
                        "engine stops. Were pages removed by an operator, or does memory fail (verify=checksum)? Use the "
                        "connector MaruConnector, which recomputes such blocks"
                    )
        return TransferResult(job_id, True, nbytes, time.monotonic() - began)

    def _misses(self) -> str:
        figures = msgspec.structs.asdict(self._store.metrics)
        found = [f"{name} {value}" for name, value in figures.items() if name.startswith("miss_") and value]
        return ", ".join(found) or "no reason counted"


# ------------------------------------------------------------ the spec


class MaruOffloadingSpec(OffloadingSpec):  # type: ignore[misc]
    """What vLLM makes of ``{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"spec_name": "MaruOffloadingSpec", …}}``.

    Other keys are those of MaruConnector.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        check_interface()
        extra = dict(config.extra_config)
        self._extra: ExtraConfig = parse_extra_config({key: extra[key] for key in extra if key not in VLLM_KEYS})
        if self._extra.hold_s <= 0:
            raise ConfigError(
                f"hold_s is {self._extra.hold_s:g}, and vLLM's OffloadingConnector cannot report a load that failed: give the seconds for "
                "which a page that was found is kept until it is loaded, or use the connector MaruConnector"
            )
        if "offload_prompt_only" not in extra:
            self.offload_prompt_only = not self._extra.store_decode
        vllm_config, kv_cache_config = find_surroundings()
        self._placement = Placement.of(kv_cache_config, vllm_config.parallel_config)
        if self._placement.stages != 1:
            raise ConfigError(
                f"--pipeline-parallel-size is {self._placement.stages}: under vLLM's OffloadingConnector Maru knows one stage; use the "
                "connector MaruConnector"
            )
        role = vllm_config.kv_transfer_config.kv_role
        self._loads, self._stores = role != "kv_producer", role != "kv_consumer"
        self._page_tokens = page_tokens_of(config)
        self._groups = groups_of(config, kv_cache_config)
        self._namespace: Namespace = collect(
            vllm_config,
            kv_cache_config,
            block_tokens=self._page_tokens,
            layout=f"vllm-offloading:{config.kv_cache_layout}:{config.worker_kv_bytes_per_block}:{len(config.groups)}",
            config=self._extra,
        )

    def get_manager(self) -> MaruOffloadingManager:
        store = Store.open(self._extra.store_config(), self._namespace, name="vllm-offloading-scheduler")
        return MaruOffloadingManager(
            store,
            self._groups,
            self._page_tokens,
            hold_s=self._extra.hold_s,
            loads=self._loads,
            stores=self._stores,
        )

    def get_worker(self, kv_caches: CanonicalKVCaches) -> MaruOffloadingWorker:
        layouts = layouts_of(kv_caches, [group.group_id for group in self.config.groups])
        device = next(iter(layouts.values())).device
        store = Store.open(
            self._extra.store_config(),
            self._namespace,
            name=f"vllm-offloading-worker-{self.config.parallel.rank}",
            object_bytes=max(layout.object_bytes for layout in layouts.values()),
            mover=mover_of(device, self._extra.copy_threads),
        )
        components = {number: group.component for number, group in self._groups.items()}
        return MaruOffloadingWorker(store, layouts, components, self._placement, moments_of(device))
