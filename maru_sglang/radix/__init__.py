"""How SGLang's radix tree maps onto Maru: what makes pages interchangeable, and where a page hangs."""

from maru_sglang.radix.chain import ChainError, pack_keys, parent_of
from maru_sglang.radix.namespace import KV, EngineFacts, Placement, collect
from maru_sglang.radix.pool_facts import PoolFacts, host_pool_facts

__all__ = [
    "KV",
    "ChainError",
    "EngineFacts",
    "Placement",
    "PoolFacts",
    "collect",
    "host_pool_facts",
    "pack_keys",
    "parent_of",
]
