"""How SGLang's radix tree maps onto Maru: what makes pages interchangeable, and where a page hangs."""

from maru_sglang.radix.chain import ChainError, pack_keys, parent_of
from maru_sglang.radix.namespace import KV, EngineFacts, Placement, collect

__all__ = ["KV", "ChainError", "EngineFacts", "Placement", "collect", "pack_keys", "parent_of"]
