"""``MaruConnector``: what vLLM calls. Thin: the work is in :mod:`maru_vllm.scheduler` and :mod:`maru_vllm.worker`.

After the start nothing here raises into vLLM: a fault of Maru costs hits, not requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from maru_core.store import Store
from maru_vllm.config import ExtraConfig, parse_extra_config
from maru_vllm.device import moments_of, mover_of
from maru_vllm.events import SchedulerEvents, StoredPages, WorkerNotes
from maru_vllm.groups import Group, Placement, layer_specs, plan_groups
from maru_vllm.layout import GroupLayout
from maru_vllm.metadata import Handshake, MaruMetadata
from maru_vllm.metrics import MaruPromMetrics, MaruStats, Meter
from maru_vllm.namespace import collect, hash_scheme
from maru_vllm.scheduler import SchedulerSide
from maru_vllm.worker import Done, WorkerSide

log = logging.getLogger("maru.vllm")

T = TypeVar("T")


class MaruConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One of the two sides, as vLLM asks for it."""

    #: The pool is memory of this machine, or memory that it reaches as such.
    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._config: ExtraConfig = parse_extra_config(transfer.kv_connector_extra_config)
        self._block_tokens = int(kv_cache_config.hash_block_size or vllm_config.cache_config.block_size)
        hash_scheme(str(vllm_config.cache_config.prefix_caching_hash_algo))  # refused early if it cannot be shared
        self._groups: tuple[Group, ...] = plan_groups(kv_cache_config, self._block_tokens)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._handshake: Handshake | None = None
        self._done = Done()
        self._meter: Meter | None = None
        events = vllm_config.kv_events_config
        self._tells_events = events is not None and bool(events.enable_kv_cache_events)
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                self._groups,
                block_tokens=self._block_tokens,
                config=self._config,
                loads=transfer.is_kv_consumer,
                stores=transfer.is_kv_producer,
                name=f"vllm scheduler {transfer.engine_id}"[:64],
                states=_state_groups(kv_cache_config),
            )
            self._meter = self._scheduler.meter
            if self._tells_events:
                placement = Placement.of(kv_cache_config, vllm_config.parallel_config)
                self._scheduler.events = SchedulerEvents(
                    self._groups, kv_cache_config.kv_cache_groups, block_tokens=self._block_tokens, placement=placement
                )

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is lost is a page that is computed again, nothing more."""
        return False

    # ------------------------------------------------------------ worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        placement = Placement.of(self._kv_cache_config, self._vllm_config.parallel_config)
        layouts = [GroupLayout(group.layers, kv_caches, self._kv_cache_config.num_blocks) for group in self._groups]
        components = [placement.component(group) for group in self._groups]
        namespace = collect(
            self._vllm_config,
            self._kv_cache_config,
            block_tokens=self._block_tokens,
            layout=";".join(layout.order for layout in layouts),
            config=self._config,
        )
        largest = max(layout.object_bytes for layout in layouts)
        device = layouts[0].device
        store = Store.open(
            self._config.store_config(),
            namespace,
            name=f"vllm pp{placement.stage}/{placement.stages} tp{placement.shard}/{placement.world}",
            object_bytes=largest,
            mover=mover_of(device, self._config.copy_threads),
        )
        self._worker = WorkerSide(store, layouts, components, placement, moments_of(device))
        self._meter = self._worker.meter
        if self._tells_events:
            self._worker.notes = WorkerNotes()
        self._handshake = Handshake(namespace.record(), components, largest)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._handshake

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self._begin(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._begin(self._connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete before vLLM schedules what needs them."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are stored with all their layers, after the step."""

    def wait_for_save(self) -> None:
        metadata = self._connector_metadata
        worker = self._worker
        if worker is not None and isinstance(metadata, MaruMetadata):
            _guarded(lambda: worker.save(metadata), None, "the stores of a step")

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        metadata = self._connector_metadata
        done = self._worker.take_done(idle=isinstance(metadata, MaruMetadata) and metadata.idle)
        self._done = done
        results = KVConnectorTransferResults(finished_recving=done.received)
        if len(self._kv_cache_config.kv_cache_groups) > 1:
            # Blocks are no names there: vLLM wants the requests.
            results.failed_recving = done.failed
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Called after :meth:`get_transfer_results` in the same step."""
        bad, self._done = self._done.bad_blocks, Done()
        return bad if len(self._kv_cache_config.kv_cache_groups) == 1 else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        notes = self._worker.notes if self._worker is not None else None
        return notes.take() if notes is not None else None

    # ------------------------------------------------------------ metrics, of either side

    def get_kv_connector_stats(self) -> MaruStats | None:
        meter = self._meter
        return _guarded(meter.take, None, "the figures of a step") if meter is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MaruStats:
        return MaruStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> MaruPromMetrics:
        return MaruPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    def _begin(self, metadata: KVConnectorMetadata | None) -> None:
        if self._worker is not None and isinstance(metadata, MaruMetadata):
            # Not guarded: it is what keeps wrong bytes from being stored, and it cannot fail for reasons outside this process.
            self._worker.begin(metadata)

    # ------------------------------------------------------------ scheduler

    @property
    def _side(self) -> SchedulerSide:
        assert self._scheduler is not None, "asked the worker's side what only the scheduler's side knows"
        return self._scheduler

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self._side.open(each for each in metadata.values() if isinstance(each, Handshake))

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._side.bind_null_block(int(gpu_block_pool.null_block.block_id))

    def on_new_request(self, request: Any) -> None:
        _guarded(lambda: self._side.arrived(request), None, "a new request")

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        nothing: tuple[int | None, bool] = (0, False)
        return _guarded(lambda: self._side.matched(request, num_computed_tokens), nothing, "a lookup")

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._side.allocated(request, blocks.get_block_ids() if num_external_tokens else (), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._side.step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        output = connector_output
        _guarded(
            lambda: self._side.transferred(
                output.finished_recving or (), output.failed_recving or (), output.invalid_block_ids or ()
            ),
            None,
            "the end of a load",
        )
        events, stored = self._side.events, output.kv_connector_worker_meta
        if events is not None and isinstance(stored, StoredPages):
            _guarded(lambda: events.stored(stored.pages, time.monotonic()), None, "the events of stored blocks")

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        _guarded(lambda: self._side.finished(request, block_ids), None, "the end of a request")
        return False, None

    def reset_cache(self) -> bool | None:
        return self._side.clear()

    def take_events(self) -> Iterable[Any]:
        events = self._side.events
        return _guarded(events.take, [], "the events of a step") if events is not None else ()


def _state_groups(kv_cache_config: Any) -> frozenset[int]:
    """vLLM's ids of the groups that keep states."""
    from vllm.v1.kv_cache_interface import MambaSpec

    return frozenset(
        group_id
        for group_id, group in enumerate(kv_cache_config.kv_cache_groups)
        if any(isinstance(spec, MambaSpec) for spec in layer_specs(group.kv_cache_spec))
    )


def _guarded(run: Callable[[], T], otherwise: T, what: str) -> T:
    """A fault of Maru is logged and costs hits."""
    try:
        return run()
    except Exception:
        log.exception("%s: a fault of Maru", what)
        return otherwise
