"""Real KV cache groups of vLLM, made by hand: what its planner makes for models that are too large to have here."""

from __future__ import annotations

from typing import Any

BLOCK = 32


def full(**changes: Any) -> Any:
    """Full attention of a small model in bfloat16."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(
        **{"block_size": BLOCK, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16} | changes
    )


def window(tokens: int, **changes: Any) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    fields = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16, "sliding_window": tokens}
    return SlidingWindowSpec(**fields | changes)


def chunked(tokens: int, **changes: Any) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

    fields = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
    return ChunkedLocalAttentionSpec(**fields | {"attention_chunk_size": tokens} | changes)


def mla(**changes: Any) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    fields = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16, "max_tp_shards": 1}
    return MLAAttentionSpec(**fields | changes)


def mamba(**changes: Any) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    fields = {"block_size": BLOCK, "shapes": ((4, 8), (2, 2)), "dtypes": (torch.bfloat16, torch.float32)}
    return MambaSpec(**fields | {"mamba_cache_mode": "align"} | changes)


def group(spec: Any, layers: int = 3, name: str = "model.layers", **changes: Any) -> Any:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

    return KVCacheGroupSpec([f"{name}.{layer}.self_attn.attn" for layer in range(layers)], spec, **changes)


def cache(*groups: Any, **changes: Any) -> Any:
    """A ``KVCacheConfig`` of these groups, or of one with full attention."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    fields = {"num_blocks": 16, "kv_cache_tensors": [], "hash_block_size": BLOCK, "kv_cache_layout": "LBNHC"}
    return KVCacheConfig(**fields | {"kv_cache_groups": list(groups) or [group(full())]} | changes)
