"""What the tests of the direct linker share: SGLang's real device pools, allocators and radix cache on the CPU, with the linker in them.

Imports neither torch nor SGLang before it is asked for something that needs them.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from support import await_condition

LAYERS = 4
PAGE = 4
TOKENS = 256
HEADS, DIM = 2, 8
WINDOW = 10  # tokens: three pages


def make_params(kind: str, **changes: Any) -> Any:
    """``CacheInitParams`` with real pools: "full", "mla", "swa" ("swa-otherwise": other layers have the windows) or "mamba"."""
    import torch
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    dtype = torch.bfloat16
    common = {"size": TOKENS, "page_size": PAGE, "dtype": dtype, "device": "cpu"}
    rows = ReqToTokenPool(size=8, max_context_len=TOKENS, device="cpu", enable_memory_saver=False)
    components = [ComponentType.FULL]
    window = None
    if kind == "full":
        pool = MHATokenToKVPool(head_num=HEADS, head_dim=DIM, layer_num=LAYERS, enable_memory_saver=False, **common)
    elif kind == "mla":
        pool = MLATokenToKVPool(
            kv_lora_rank=16, qk_rope_head_dim=8, layer_num=LAYERS, enable_memory_saver=False, **common
        )
    elif kind in ("swa", "swa-otherwise"):
        windows = [0, 2] if kind == "swa" else [0, 1]
        pool = SWAKVPool(
            size_swa=TOKENS, head_num=HEADS, head_dim=DIM, swa_attention_layer_ids=windows, full_attention_layer_ids=[layer for layer in range(LAYERS) if layer not in windows],
            **common,
        )  # fmt: skip
        components.append(ComponentType.SWA)
        window = WINDOW
    elif kind == "mamba":
        rows = _mamba_rows()
        pool = HybridLinearKVPool(
            head_num=HEADS, head_dim=DIM, full_attention_layer_ids=[1, 3], mamba_pool=rows.mamba_pool, **common
        )
        components.append(ComponentType.MAMBA)
    else:
        raise ValueError(kind)
    if window:
        allocator = SWATokenToKVPoolAllocator(TOKENS, TOKENS, PAGE, dtype, "cpu", pool, False, req_to_token_pool=rows)
    else:
        allocator = PagedTokenToKVPoolAllocator(TOKENS, PAGE, dtype, "cpu", pool, False)
    fields = {
        "disable": False, "req_to_token_pool": rows, "token_to_kv_pool_allocator": allocator, "page_size": PAGE,
        "sliding_window_size": window, "tree_components": tuple(components), "enable_mamba_extra_buffer": kind == "mamba",
    } | changes  # fmt: skip
    return CacheInitParams(**fields)


def _mamba_rows() -> Any:
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=32, n_groups=1, num_heads=4, head_dim=8, state_size=8, conv_kernel=4
    )
    return HybridReqToTokenPool(
        size=8, mamba_size=16, mamba_spec_state_size=8, max_context_len=TOKENS, device="cpu", enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=[0, 2]), mamba_layer_ids=[0, 2], enable_mamba_extra_buffer=True,
    )  # fmt: skip


def make_tokens(seed: int, count: int) -> list[int]:
    return [random.Random(seed).randrange(1, 60_000) for _ in range(1)] + [
        random.Random(seed * 1000 + index).randrange(1, 60_000) for index in range(1, count)
    ]


@dataclass
class Side:
    """One engine's memory and tree, with the linker in place."""

    params: Any
    cache: Any
    linker: Any
    _requests: int = field(default=0)
    _state: int = field(default=-1)  # of the node that was inserted last

    @classmethod
    def make(cls, kind: str, config: dict[str, Any], **changes: Any) -> Side:
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        from maru_sglang.radix.linker import MaruLinker

        params = make_params(kind, **changes)
        cache = UnifiedRadixCache(params)
        linker = MaruLinker(None, params, components=set(cache.components), extra_config=config)
        cache.init_cache_linker(linker)
        params.token_to_kv_pool_allocator.get_kvcache().register_layer_transfer_counter(linker.layer_done_counter)
        return cls(params, cache, linker)

    # ------------------------------------------------------------ memory

    def buffers(self, pool: str = "kv") -> list[Any]:
        return list(self.linker.pools[_pool_name(pool)].kv_buffer)

    def fill(self, seed: int) -> None:
        """Random bytes in all pools."""
        import torch

        for index, name in enumerate(self.linker.pools):
            for number, buffer in enumerate(self.buffers(str(name))):
                raw = np.random.default_rng((seed, index, number)).integers(0, 256, buffer.nbytes, np.uint8)
                buffer.view(torch.uint8).copy_(torch.from_numpy(raw).view(buffer.view(torch.uint8).shape))

    def rows_of(self, request: Any, indices: Any) -> dict[str, list[int]]:
        """First row of each page of each pool, for slots of the KV pool (and the state of the request, or of the node)."""
        rows = {}
        for name in map(str, self.linker.pools):
            if name == "kv":
                rows[name] = indices[::PAGE].tolist()
            elif name == "swa":
                mapped = self.params.token_to_kv_pool_allocator.full_to_swa_index_mapping[indices]
                rows[name] = [row for row in mapped[::PAGE].tolist() if row]  # 0: outside the window
            else:
                rows[name] = [int(self._state if request is None else request.kv.mamba_pool_idx)]
        return rows

    def page(self, pool: str, row: int) -> bytes:
        """The bytes of the page that begins at ``row``, buffer after buffer."""
        import torch

        span = self.linker.pools[_pool_name(pool)].page_size
        rows = (buffer[row : row + span].contiguous() for buffer in self.buffers(pool))
        return b"".join(part.view(torch.uint8).numpy().tobytes() for part in rows)

    def snapshot(self) -> dict[str, list[Any]]:
        """A copy of all memory."""
        return {str(name): [buffer.clone() for buffer in self.buffers(str(name))] for name in self.linker.pools}

    def changed(self, before: dict[str, list[Any]], pool: str, pages: list[int]) -> list[int]:
        """Rows of a pool that differ from a snapshot, without those of ``pages``."""
        import torch

        span = self.linker.pools[_pool_name(pool)].page_size
        expected = {row + index for row in pages for index in range(span)}
        found = set()
        for old, new in zip(before[pool], self.buffers(pool), strict=True):
            raw = [buffer.contiguous().view(torch.uint8).reshape(buffer.shape[0], -1) for buffer in (old, new)]
            found |= set((raw[0] != raw[1]).any(dim=1).nonzero().flatten().tolist())
        return sorted(found - expected)

    # ------------------------------------------------------------ what a scheduler does

    def insert(self, tokens: list[int]) -> Any:
        """Compute a prompt: slots for it, and a node in the tree; the slots."""
        import torch
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        key = RadixKey(array("q", tokens))
        known = self.cache.match_prefix(MatchPrefixParams(key=key))
        allocator = self.params.token_to_kv_pool_allocator
        count = len(tokens) - known.device_prefix_len
        if hasattr(allocator, "swa_attn_allocator"):
            new, window = allocator.full_attn_allocator.alloc(count), allocator.swa_attn_allocator.alloc(count)
            allocator.set_full_to_swa_mapping(new, window)
        else:
            new = allocator.alloc(count)
        root = self.cache.root_node_handle(None)
        prefix = self.cache.tree_core.collect_full_device_indices(known.last_device_node, root)
        value = torch.cat([prefix, new]).to(torch.int64)
        extra: dict[str, Any] = {}
        if "mamba" in map(str, self.linker.pools):
            extra["mamba_value"] = self.params.req_to_token_pool.mamba_allocator.alloc(1)
            self._state = int(extra["mamba_value"])
        self.cache.insert(InsertParams(key=key, value=value, prev_prefix_len=known.device_prefix_len, **extra))
        return value

    def request(self, tokens: list[int], rid: str | None = None) -> Any:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        self._requests += 1
        return Req(rid or f"r{self._requests}", "", array("q", tokens), SamplingParams())

    def match(self, request: Any) -> Any:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return self.cache.match_prefix(MatchPrefixParams(key=RadixKey(request.origin_input_ids), req=request))

    def settle(self) -> list[bool]:
        """Wait for all offloads, and take their results as a scheduler pass does."""
        await_condition(self.linker._offloads.settle, "all offloads are done")
        wrapper = self.cache.linker
        results = wrapper.take_completed_offloads(wrapper.num_completed_offloads())
        wrapper.commit_completed_offloads(results)
        return list(results)


#: ``make(kind, config=…, **params)``.
Make = Callable[..., Side]


def begin(side: Side, request: Any) -> int:
    """Match and load; how many tokens come from the store."""
    result = side.match(request)
    request.last_node = result.last_device_node
    return int(side.cache.linker.load_back(request)[0])


def run_loads(side: Side) -> list[str]:
    """Start what was accepted, and wait for it as the forward pass and then the scheduler do; the requests that failed."""
    wrapper, counter = side.cache.linker, side.linker.layer_done_counter
    counter.set_consumer(wrapper.start_layer_wise_loading())
    for layer in range(counter.num_layers):
        counter.wait_until(layer)
    counter.set_consumer(-1)
    return list(wrapper.finish_loads())


def _pool_name(pool: str) -> Any:
    from sglang.srt.mem_cache.hicache_storage import PoolName

    return PoolName(pool)
