"""The direct linker: SGLang's device pages in and out of Maru, with no host tier and no copy in between.

SGLang's scheduler calls it from its one thread, on every rank alike:

=============  =====================================================================================================
``lookup``     how far a waiting prompt is stored: one question for all pools, none where nothing changed
``load``       locate, have it held, and agree with the other ranks; from then on SGLang counts on it
``start``      begin what was accepted, layer by layer, in a thread; the forward pass waits for each layer
``finish``     wait for the end of the copies; the generations have then proven whose pages landed
``offload``    store a node's pages from a thread, after the events of the forward pass that wrote them
=============  =====================================================================================================

What the ranks answer must be the same where SGLang branches on it, or they would enter different collectives and hang. A ``load`` is
reduced over them; an ``offload`` is refused only for reasons that all ranks see alike (the node, its parent, replaced weights), while
whatever happens to one rank alone is a result of its own, which SGLang reduces.

Nothing raises into the scheduler but the constructor: a fault is a miss, or "not stored".
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.utils import get_device_module

from maru_core.namespace import Namespace
from maru_core.pool import PoolMemory
from maru_core.protocol import Hold
from maru_core.store import Store
from maru_sglang.kernels.mover import PagedMover, prepare
from maru_sglang.radix.chain import ChainError, pack_keys
from maru_sglang.radix.linker_counter import LayerCounter, LayerTrace
from maru_sglang.radix.linker_loads import Accepted, Loads, Part
from maru_sglang.radix.linker_lookup import Lookups, wants_of
from maru_sglang.radix.linker_offloads import Offloads, Stretch
from maru_sglang.radix.linker_pools import DevicePool, device_pool_group, group_facts, storage_config
from maru_sglang.radix.namespace import Placement, collect
from maru_sglang.storage.config import LinkerConfig, parse_linker_config

log = logging.getLogger("maru.sglang")

#: How long a load that was accepted is kept from eviction, seconds: it begins in the same scheduling pass.
HOLD_S: Final = 30.0

T = TypeVar("T")


def _guarded(otherwise: Any) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """A fault in a call is logged once for each call, and answered with ``otherwise``."""

    def wrap(call: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(call)
        def guarded(self: MaruLinker, *args: Any, **kwargs: Any) -> T:
            try:
                return call(self, *args, **kwargs)
            except ChainError as error:
                self._log_once(error.kind, logging.WARNING, "%s", error)
            except Exception:
                self._log_once(f"fault in {call.__name__}", logging.ERROR, "fault in %s", call.__name__, exc_info=True)
            answer: T = otherwise() if callable(otherwise) else otherwise
            return answer

        return guarded

    return wrap


class MaruLinker(UnifiedCacheLinker):  # type: ignore[misc]  # SGLang has no types for us
    """See the module.

    Attributes:
        parent: hash of the page before the node that is about to be offloaded, ``None`` where it is not known; set by the plugin
            around SGLang's own call, which does not say it.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: set[Any],
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        """
        Raises:
            ConfigError, ValueError, PoolError, VersionMismatchError, ServerError: what will not get better by waiting.
        """
        self.forward_stream = forward_stream
        self.parent: bytes | None = None
        self._logged: set[str] = set()
        self._dead: str | None = None
        self._params = params
        self._options: LinkerConfig = parse_linker_config(extra_config)
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        self._group = device_pool_group(params, components)
        self.pools = self._group.entry_map
        self._pools = {str(entry.name): DevicePool.of(entry) for entry in self._group.entries}
        self._config = storage_config(params, self._group, dict(extra_config or {}))
        pools = list(self._pools.values())
        self.namespace: Namespace = collect(self._config, group_facts(self._group, pools, kvcache)).namespace(
            self._options.tag
        )
        self._placement = Placement.of(self._config)
        self._device = pools[0].layout.device
        self._modules = get_device_module()
        self._ranks = int(self._config.tp_size)
        self._nonce = self._agreed_nonce()
        self._asked = itertools.count()
        prepare(self._device)
        self._store = Store.open(
            self._options.store_config(),
            self.namespace,
            name=f"sglang direct tp{self._config.tp_rank}/{self._ranks}",
            object_bytes=max(pool.nbytes for pool in pools),
            mover=self._make_mover,
        )
        self.layer_done_counter = LayerCounter(int(self._group.num_layers))
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._lookups = Lookups(self._store, self._placement.shard)
        self._unholds: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._releaser = threading.Thread(target=self._release, name="maru-unhold", daemon=True)
        self._releaser.start()
        self._loads = Loads(
            self.layer_done_counter,
            on_device=self._on_device,
            # A page that a request left may still be written to by the forward pass that was under way then, on a stream that the
            # scheduler's own does not wait for.
            ready=self.record_offload_ready,
            unhold=self._unholds.put,
            trace=LayerTrace() if self._options.log_layers else None,
        )
        self._offloads = Offloads(
            self._store,
            self._placement.shard,
            self._placement.world,
            on_device=self._on_device,
            dead=lambda: self._dead is not None,
        )
        log.info(
            "Maru direct path: %s; %d layers, pages of %d tokens, shard %d of %d%s, device %s, namespace %s %s",
            ", ".join(f"{pool.component} {pool.nbytes} bytes" for pool in pools),
            self._group.num_layers,
            self._group.page_size,
            self._placement.shard,
            self._placement.world,
            "" if self._placement.writer else " (another rank stores)",
            self._device,
            self.namespace.digest().hex()[:16],
            self.namespace.record().decode(),
        )

    # ------------------------------------------------------------ lookups and loads

    @_guarded(list)
    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        expanded = self._group.resolve_transfers(transfers)
        keys = _keys_of(transfers)
        if not expanded or not keys or self._dead is not None:
            return []
        return self._lookups.ends(rid, keys, wants_of(expanded))

    @_guarded(False)
    def load(self, rid: str, transfers: list[Any]) -> bool:
        hold = self._nonce + next(self._asked).to_bytes(8, "big")  # counted on all ranks alike
        parts = self._locate(rid, transfers, hold)
        if self._all_agree(parts is not None):
            assert parts is not None
            self._loads.accept(Accepted(rid, hold, parts))
            return True
        self._lookups.forget(rid)
        if parts is not None:
            Accepted(rid, hold, parts).give_up()
        self._unholds.put(hold)
        return False

    @_guarded(None)
    def _locate(self, rid: str, transfers: list[Any], hold: bytes) -> tuple[Part, ...] | None:
        """Everything that the load needs, held; None where anything is missing."""
        expanded = self._group.resolve_transfers(transfers, allow_partial=True, allow_missing_kv=True)
        keys = _keys_of(transfers)
        if not expanded or not keys or self._dead is not None or self._loads.accepted(rid):
            return None
        found = self._store.find(
            wants_of(expanded), self._placement.shard, pack_keys(keys), hold=Hold(hold, self._ranks, HOLD_S)
        )
        if len(keys) not in found.ends:
            return None
        if not found.held_s:
            # Evicted before it is read, it would cost the request and not only the load.
            self._log_once(
                "held",
                logging.WARNING,
                "the server would not hold %d pages: they are computed; holds may take more of the pool with maru-server --hold-share",
                len(keys),
            )
            return None
        parts: list[Part] = []
        for transfer in expanded:
            pool = self._pools[str(transfer.name)]
            hashes = pack_keys(transfer.keys)
            reading = self._store.read(pool.component, self._placement.shard, hashes, pool.nbytes)
            if reading is None:
                Accepted(rid, hold, tuple(parts)).give_up()
                return None
            parts.append(Part(pool, reading, transfer.host_indices))
        return tuple(parts)

    def _all_agree(self, mine: bool) -> bool:
        """Whether every rank can load: one that cannot keeps all of them from it. Over the groups that SGLang's tree reduces over."""
        verdict = torch.tensor([int(mine)], dtype=torch.int)
        reduced = False
        params = self._params
        for group in (params.attn_cp_cache_group, params.attn_tp_cache_group):
            if group is not None and torch.distributed.get_world_size(group=group) > 1:
                torch.distributed.all_reduce(verdict, op=torch.distributed.ReduceOp.MIN, group=group)
                reduced = True
        group = params.tp_cache_group
        if not reduced and group is not None and torch.distributed.get_world_size(group=group) > 1:
            torch.distributed.all_reduce(verdict, op=torch.distributed.ReduceOp.MIN, group=group)
        return bool(verdict.item())

    @_guarded(-1)
    def start_layer_wise_loading(self) -> int:
        return self._loads.start()

    @_guarded(False)
    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self._loads.finish(counter_index)

    def landed(self, rids: Sequence[str]) -> list[bool]:
        """Of the batch that was finished last: whether the pages of each request landed on this rank."""
        return [self._loads.verdicts.get(rid, False) for rid in rids]

    @_guarded(False)
    def cancel_queued_load(self, rid: str) -> bool:
        return self._loads.cancel(rid)

    # ------------------------------------------------------------ offloads

    @_guarded(False)
    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Store one node. What makes it False is the same on all ranks: see the module."""
        parent, self.parent = self.parent, None
        keys = _keys_of(transfers)
        expanded = self._group.resolve_transfers(transfers, allow_partial=True)
        if not expanded or not keys or self._dead is not None:
            return False
        if parent is None:
            self._log_once("parent", logging.WARNING, "a node whose parent's hash is not known is not stored")
            return False
        chain = parent + pack_keys(keys)
        stretches = tuple(self._stretch(transfer, keys, chain) for transfer in expanded)
        if not self._placement.writer:
            self._offloads.done_elsewhere()
            return True
        self._queue_offload(stretches)
        return True

    def _stretch(self, transfer: Any, keys: list[str], chain: bytes) -> Stretch:
        """A pool's pages of the node: all of them, or the last few."""
        first = len(keys) - len(transfer.keys)
        if first < 0 or list(transfer.keys) != keys[first:] or len(set(keys)) != len(keys):
            raise ChainError(f"pool {transfer.name} has other pages than the end of its node: not stored", "restart")
        size = len(chain) // (len(keys) + 1)
        return Stretch(
            pool=self._pools[str(transfer.name)],
            parent=chain[first * size : (first + 1) * size],
            hashes=chain[(first + 1) * size :],
            indices=transfer.host_indices,
        )

    def _queue_offload(self, stretches: tuple[Stretch, ...]) -> None:
        try:
            events = tuple(self.record_offload_ready())
        except Exception:
            # The other ranks have queued theirs: this one must have its turn too.
            self._log_once("events", logging.ERROR, "no event could be recorded", exc_info=True)
            stretches, events = (), ()
        self._offloads.add(stretches, events)

    @_guarded(0)
    def num_completed_offloads(self) -> int:
        return self._offloads.completed()

    @_guarded(False)
    def pop_completed_offload(self) -> bool:
        return self._offloads.pop()

    # ------------------------------------------------------------ lifecycle

    @_guarded(None)
    def reset(self) -> None:
        self._loads.reset()
        self._offloads.reset()
        self._lookups.forget()

    @_guarded(None)
    def close(self) -> None:
        self._dead = self._dead or "closed"
        self._loads.close()
        self._offloads.close()
        self._unholds.put(None)
        self._releaser.join(2.0)
        self._store.close()

    @_guarded(None)
    def weights_changed(self, reason: str = "weights changed") -> None:
        """What is stored is no longer what this process computes: everything is a miss from now on."""
        self._dead = self._dead or f"the model's weights were replaced ({reason})"
        self._log_once("dead", logging.WARNING, "Maru is off in this process: %s", self._dead)

    @_guarded(None)
    def quiesce(self) -> None:
        """Wait (bounded) until nothing reads or writes device memory. Before it is unmapped."""
        self._loads.settle()
        self._offloads.settle()

    @_guarded(dict)
    def counters(self) -> dict[str, float | int | str]:
        """The store's counters with the reasons for misses, and the server's figures."""
        return self._store.stats()

    # ------------------------------------------------------------ inside

    def _make_mover(self, memory: PoolMemory) -> PagedMover:
        return PagedMover(memory, self._device, threads=self._options.copy_threads)

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """For a thread: this rank's device, and a stream that nobody else uses."""
        if self._device.type == "cpu":
            yield
            return
        self._modules.set_device(self._device)
        with self._modules.stream(self._modules.Stream(self._device)):
            yield

    def _agreed_nonce(self) -> bytes:
        """A name for this server's holds that all its ranks share and no other server has."""
        nonce = [os.urandom(12)]
        group = self._params.attn_tp_cache_group or self._params.tp_cache_group
        if group is not None and torch.distributed.get_world_size(group=group) > 1:
            torch.distributed.broadcast_object_list(nonce, group=group, group_src=0)
        return nonce[0]

    def _release(self) -> None:
        """A thread: the scheduler does not wait for the end of a hold."""
        while (hold := self._unholds.get()) is not None:
            self._store.unhold(hold)

    def _log_once(self, kind: str, level: int, message: str, *args: object, exc_info: bool = False) -> None:
        if kind not in self._logged:
            self._logged.add(kind)
            log.log(level, message + " (said once)", *args, exc_info=exc_info)


def _keys_of(transfers: Sequence[Any]) -> list[str]:
    """The page hashes that the logical KV pool's transfer covers; the other pools' are their end."""
    for transfer in transfers:
        if transfer.name == PoolName.KV:
            return list(transfer.keys or ())
    return []
