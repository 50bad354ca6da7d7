"""SGLang's device pools as the direct path sees them: which there are, where a page's pieces lie, what they depend on.

SGLang describes physical pools by ``DevicePoolGroup``. It makes one itself for some models (``resolve_hybrid_device_pool_group``); for
plain MHA and MLA models, sliding windows beside full attention, and Mamba states beside MHA it makes none in 0.5.23, so that is done
here, in the same terms. An object is a page of one pool: the pieces in SGLang's packed order, component after component and in
each of them layer after layer (K of all layers, then V).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _stage_local_layer_mapping, _swa_layer_mappings
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
    DevicePoolEntry,
    DevicePoolGroup,
    _mamba_device_pool_entry,
    resolve_hybrid_device_pool_group,
)
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_memory, get_model, get_parallel

from maru_core.canonical import dtype_name, json_digest
from maru_core.errors import ConfigError
from maru_sglang.kernels.layout import Layout, Pages
from maru_sglang.radix.pool_facts import PoolFacts, heads_of

_LINKER: Final = "--unified-cache-external-linker-backend maru"
_INSTEAD: Final = "use --enable-hierarchical-cache --hicache-storage-backend maru instead"


@dataclass(frozen=True, eq=False)
class DevicePool:
    """One physical pool.

    Attributes:
        component: what its objects are stored under: SGLang's name of the pool.
        source: the logical pool ("kv", "swa", "mamba") whose keys and indices it takes.
        entry: SGLang's description, a ``DevicePoolEntry``.
        layout: where an object's pieces lie; its layers are SGLang's transfer layers.
    """

    component: str
    source: str
    entry: Any
    layout: Layout

    @classmethod
    def of(cls, entry: Any) -> DevicePool:
        """
        Raises:
            ConfigError: a buffer that no layer loads, or one whose rows are not plain bytes.
        """
        name = str(entry.name)
        if not entry.packed:
            raise ConfigError(
                f"{_LINKER}: pool {name} keeps its pages unpacked, which the direct path does not know: {_INSTEAD}"
            )
        layer_of: dict[int, int] = {}
        for layer, mapped in entry.layer_mapping.items():
            for index in (mapped,) if isinstance(mapped, int) else mapped:
                layer_of[int(index)] = min(int(layer), layer_of.get(int(index), int(layer)))
        buffers, layers = [], []
        for component in entry.components:
            for index, buffer in enumerate(component):
                if index not in layer_of:
                    raise ConfigError(f"{_LINKER}: buffer {index} of pool {name} belongs to no layer: {_INSTEAD}")
                buffers.append(buffer)
                layers.append(layer_of[index])
        size = entry.buffer_meta[0][0][2]
        row_bytes = buffers[0].nbytes // buffers[0].shape[0]
        try:
            layout = Layout.of_buffers(buffers, layers, size // row_bytes)
        except ValueError as error:
            raise ConfigError(f"{_LINKER}: pool {name}: {error}; {_INSTEAD}") from error
        if layout.nbytes != sum(piece[2] for component in entry.buffer_meta for piece in component):
            raise ConfigError(
                f"{_LINKER}: a page of pool {name} is not {layout.nbytes} bytes to SGLang: use SGLang 0.5.23"
            )
        return cls(component=name, source=str(entry.indices_from_pool), entry=entry, layout=layout)

    @property
    def nbytes(self) -> int:
        """Bytes of one object."""
        return self.layout.nbytes

    def pages(self, indices: torch.Tensor, still: Callable[[], bool] | None = None) -> Pages:
        """The objects at ``indices`` of this pool, which are those of whole pages in order.

        Args:
            still: as :class:`~maru_sglang.kernels.layout.Pages` has it.
        Raises:
            ValueError: they are not whole pages of this pool.
        """
        return Pages(self.layout, np.array(self.entry.prepare_locations(indices), np.int64), still)

    def geometry(self) -> dict[str, Any]:
        """Everything of the pool that decides what a byte of an object means, as plain data."""
        entry = self.entry
        return {
            "name": self.component,
            "source": self.source,
            "class": type(entry.device_pool).__name__,
            "page": int(entry.page_size),
            "span": self.layout.row_span,
            "buffers": [
                [(dtype_name(buffer.dtype), tuple(map(int, buffer.shape[1:]))) for buffer in component]
                for component in entry.components
            ],
            "layers": sorted((int(layer), str(mapped)) for layer, mapped in entry.layer_mapping.items()),
        }


def device_pool_group(params: Any, components: set[Any]) -> Any:
    """The physical pools of this process's cache, as SGLang's ``DevicePoolGroup``.

    Args:
        params: SGLang's ``CacheInitParams``.
        components: its ``ComponentType`` values.
    Raises:
        ConfigError, ValueError: pools that the direct path does not know; the message says which.
    """
    if get_memory().enable_unified_memory:
        raise ConfigError(f"{_LINKER} does not know the pools of --enable-unified-memory: leave one of the two out")
    kvcache = params.token_to_kv_pool_allocator.get_kvcache()
    page = int(params.page_size)
    if components == {ComponentType.FULL} and type(kvcache) in (MHATokenToKVPool, MLATokenToKVPool):
        layers = {layer: layer for layer in range(int(kvcache.layer_num))}
        entries = [_entry(PoolName.KV, kvcache, layers, page)]
    elif components == {ComponentType.FULL, ComponentType.SWA} and type(kvcache) is SWAKVPool:
        full, window = _swa_layer_mappings(kvcache)
        entries = [
            _entry(PoolName.KV, kvcache.full_kv_pool, full, page),
            _entry(PoolName.SWA, kvcache.swa_kv_pool, window, page),
        ]
    elif (
        components == {ComponentType.FULL, ComponentType.MAMBA}
        and type(kvcache) is HybridLinearKVPool
        and type(kvcache.full_kv_pool) is MHATokenToKVPool
    ):
        layers = _stage_local_layer_mapping(kvcache.full_attention_layer_id_mapping, kvcache.start_layer)
        entries = [
            _entry(PoolName.KV, kvcache.full_kv_pool, layers, page),
            _mamba_device_pool_entry(params.req_to_token_pool, kvcache.start_layer),
        ]
    else:
        return resolve_hybrid_device_pool_group(kvcache=kvcache, page_size=page, params=params, components=components)
    if params.mtp_draft_device_pools or params.sidecar_draft_device_pools:
        raise ConfigError(f"{_LINKER} does not store the KV of a draft model: {_INSTEAD}, or leave speculation out")
    count = 1 + max(layer for entry in entries for layer in entry.layer_mapping)
    return DevicePoolGroup(entries, count, page, rank_replicated=type(kvcache) is MLATokenToKVPool)


def _entry(name: Any, pool: Any, layers: dict[int, int], page: int) -> Any:
    """A pool with a row for each token: K and V of every layer, or the latent rows of every layer."""
    if int(pool.page_size) != page:
        raise ConfigError(f"{_LINKER}: pool {name} has pages of {pool.page_size} tokens and the cache of {page}")
    if type(pool) is MLATokenToKVPool:
        buffers = list(pool.kv_buffer)
        mapping: dict[int, Any] = dict(layers)
    elif (
        type(pool) is MHATokenToKVPool
        and pool.k_scale_buffer is None
        and pool.native_k_scale_buffer is None
        and pool.kv_cache_layout == "nhd"
    ):
        count = len(pool.k_buffer)
        buffers = [*pool.k_buffer, *pool.v_buffer]
        mapping = {layer: (index, count + index) for layer, index in layers.items()}
    else:
        raise ConfigError(
            f"{_LINKER}: pool {name} is a {type(pool).__name__} (layout {getattr(pool, 'kv_cache_layout', '?')}), and the direct path "
            f"knows rows of plain MHA and MLA tokens: {_INSTEAD}"
        )
    return DevicePoolEntry(
        name=name, indices_from_pool=name, device_pool=pool, components=[buffers], layer_mapping=mapping, page_size=page,
        rows_are_pages=False,
    )  # fmt: skip


def group_facts(group: Any, pools: list[DevicePool], kvcache: Any) -> PoolFacts:
    """What the namespace says of the pools. Nothing of them is left out: all their geometry is in the digest of ``sides``."""
    first = pools[0].entry.device_pool
    known = hasattr(first, "kv_lora_rank") or hasattr(first, "v_head_dim")
    geometry = {"replicated": bool(group.rank_replicated), "pools": [pool.geometry() for pool in pools]}
    start = int(kvcache.start_layer)
    return PoolFacts(
        pool=type(kvcache).__name__,
        stored=pools[0].entry.components[0][0].dtype,
        page_tokens=int(group.page_size),
        layout="direct",
        device_layout="rows",
        heads=heads_of(first) if known else "packed",
        start_layer=start,
        end_layer=start + int(group.num_layers),
        target_layers=int(group.num_layers),
        draft_layers=0,  # where SGLang packs some they are among the buffers
        sides="+".join(f"{pool.component}:{pool.nbytes}" for pool in pools) + f" {json_digest(geometry)}",
    )


def storage_config(params: Any, group: Any, extra: dict[str, Any]) -> Any:
    """Who this rank is, in the record that SGLang has for it.

    Raises:
        ConfigError: ranks are arranged in a way that SGLang's linker does not keep in step.
    """
    if int(params.pp_size) != 1:
        raise ConfigError(
            f"{_LINKER} with --pp-size {params.pp_size}: SGLang does not reconcile what pipeline stages find, so they would go "
            f"different ways: use --pp-size 1, or {_INSTEAD}"
        )
    parallel = get_parallel()
    ranks = params.attn_tp_cache_group or params.tp_cache_group
    rank, size = 0, int(parallel.tp_size)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, size = torch.distributed.get_rank(group=ranks), torch.distributed.get_world_size(group=ranks)
    dcp = int(parallel.attn_dcp_size)
    if dcp != 1:
        raise ConfigError(f"{_LINKER} with --dcp-size {dcp}: ranks would each hold other tokens: use --dcp-size 1")
    return HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=size,
        pp_rank=int(params.pp_rank),
        pp_size=1,
        attn_cp_rank=int(params.attn_cp_rank),
        attn_cp_size=int(params.attn_cp_size),
        is_mla_model=bool(group.rank_replicated),
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name=get_model().model_path,
        extra_config=extra,
    )
