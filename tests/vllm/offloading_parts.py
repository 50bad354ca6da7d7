"""The two halves of Maru under vLLM's own OffloadingConnector, made by that connector, and the keys that vLLM would ask for."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LookupResult, ReqContext, TransferResult, make_offload_key

from maru_vllm.offloading import MaruOffloadingManager, MaruOffloadingWorker

BLOCK = 32
LAYOUT = "LBHNC"


def full() -> Any:
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)


def window(tokens: int = 64) -> Any:
    return SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.bfloat16, sliding_window=tokens
    )


def cache(*specs: Any, layers: int = 2, blocks: int = 16) -> Any:
    groups = [
        KVCacheGroupSpec([f"layer.{group}.{layer}" for layer in range(layers)], spec)
        for group, spec in enumerate(specs)
    ]
    return KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups, kv_cache_layout=LAYOUT, hash_block_size=BLOCK
    )


def configured(engine: Callable[..., Any], extra: dict[str, Any], role: str = "kv_both", **arguments: Any) -> Any:
    """vLLM's configuration with these keys of ``kv_connector_extra_config``."""
    transfer = KVTransferConfig(kv_connector="OffloadingConnector", kv_role=role, kv_connector_extra_config=extra)
    vllm_config = engine(kv_transfer_config=transfer, **arguments)
    vllm_config.cache_config.kv_cache_layout = LAYOUT
    return vllm_config


def page_hash(number: int) -> bytes:
    return np.random.default_rng(number).bytes(32)


def key(number: int, group: int = 0) -> Any:
    return make_offload_key(page_hash(number), group)


def keys(numbers: Sequence[int], group: int = 0) -> list[Any]:
    return [key(number, group) for number in numbers]


def request(pages: int, name: str = "request", groups: int = 1) -> Any:
    """What vLLM's scheduler notes for a request whose chain has the pages 0 to ``pages``."""
    context = ReqContext(name)
    for group in range(groups):
        for page in range(pages):
            context.set_offload_key_position(key(page, group), (page + 1) * BLOCK)
    return context


class Side:
    """One engine: scheduler's and worker's half, each made by vLLM's connector; KV blocks full of random bytes."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, seed: int) -> None:
        vllm_config.kv_transfer_config.engine_id = f"engine-{seed}"
        self.tensors = {
            layer: torch.from_numpy(np.random.default_rng([seed, index]).integers(0, 2**15, (kv_cache_config.num_blocks, 2, BLOCK, 64), np.int16)).view(torch.bfloat16)
            for index, layer in enumerate(name for group in kv_cache_config.kv_cache_groups for name in group.layer_names)
        }  # fmt: skip
        self._groups = [group.layer_names for group in kv_cache_config.kv_cache_groups]
        self._scheduler = OffloadingConnector(vllm_config, KVConnectorRole.SCHEDULER, kv_cache_config)
        self._worker = OffloadingConnector(vllm_config, KVConnectorRole.WORKER, kv_cache_config)
        self._worker.register_kv_caches(self.tensors)
        self.manager: MaruOffloadingManager = self._scheduler.connector_scheduler.manager
        self.worker: MaruOffloadingWorker = self._worker.connector_worker.worker
        self._job = 0

    def close(self) -> None:
        self._scheduler.shutdown()
        self._worker.shutdown()

    def block(self, block: int, group: int = 0) -> bytes:
        """Bytes of one block, of all layers of a group."""
        return b"".join(self.tensors[layer][block].view(torch.int16).numpy().tobytes() for layer in self._groups[group])

    def hits(self, context: Any, numbers: Sequence[int], group: int = 0) -> list[bool]:
        return [self.manager.lookup(wanted, context) is LookupResult.HIT for wanted in keys(numbers, group)]

    def begin_load(self, context: Any, wanted: Sequence[Any], blocks: Sequence[int]) -> int:
        spec = pickle.loads(pickle.dumps(self.manager.prepare_load(wanted, context)))
        self._job += 1
        assert self.worker.submit_load(self._job, spec, self._blocks(wanted, blocks))
        return self._job

    def begin_store(self, context: Any, wanted: Sequence[Any], blocks: Sequence[int]) -> int | None:
        output = self.manager.prepare_store(wanted, context)
        assert output is not None
        taken = list(output.keys_to_store)
        if not taken:
            return None
        chosen = [block for wish, block in zip(wanted, blocks, strict=True) if wish in set(taken)]
        self._job += 1
        spec = pickle.loads(pickle.dumps(output.store_spec))
        assert self.worker.submit_store(self._job, self._blocks(taken, chosen), spec)
        return self._job

    def finish(self, job: int) -> TransferResult:
        self.worker.wait({job, 10_000})
        [result] = self.worker.get_finished()
        assert result.job_id == job
        return result

    def store(self, context: Any, wanted: Sequence[Any], blocks: Sequence[int]) -> int:
        """Bytes stored."""
        job = self.begin_store(context, wanted, blocks)
        if job is None:
            return 0
        result = self.finish(job)
        assert result.success
        self.manager.complete_store(wanted, context)
        return int(result.transfer_size)

    def load(self, context: Any, wanted: Sequence[Any], blocks: Sequence[int]) -> None:
        assert self.finish(self.begin_load(context, wanted, blocks)).success
        self.manager.complete_load(set(wanted), context)

    def _blocks(self, wanted: Sequence[Any], blocks: Sequence[int]) -> GPULoadStoreSpec:
        sizes = [sum(1 for one in wanted if one[-4:] == index.to_bytes(4, "big")) for index in range(len(self._groups))]
        return GPULoadStoreSpec(list(blocks), group_sizes=sizes, block_indices=[0] * len(sizes))
