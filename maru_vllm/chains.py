"""vLLM's offload keys as pages of Maru's chains.

vLLM's offloading interface speaks of single *keys* (a block hash and a KV cache group) and never of a sequence, but it notes for
every key of a request where in the request its chunk ends. That gives the chain back: page ``i`` is the chunk that ends
at token ``(i + 1) * page_tokens``, its hash is the hash of the chunk's last block, and all groups share one chain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from maru_core.errors import ConfigError
from maru_core.protocol import HASH_BYTES, ROOT
from maru_vllm.groups import Group, plan_groups

#: What vLLM appends to a block hash: the index of the KV cache group.
GROUP_BYTES: Final = 4


@dataclass(slots=True)
class Run:
    """Consecutive pages of one chain in one KV cache group."""

    group: int  # vLLM's group id
    parent: bytes  # hash of the page before the first, or ROOT
    hashes: bytes  # packed, 32 bytes a page

    def __len__(self) -> int:
        """Pages."""
        return len(self.hashes) // HASH_BYTES


@dataclass(slots=True)
class Chain:
    """The pages of one request, as far as vLLM has named them."""

    hashes: bytes = b""
    named: int = 0  # positions that vLLM had noted when this was read
    pages: dict[bytes, int] = field(default_factory=dict)  # hash -> index
    ahead: dict[int, bytes] = field(
        default_factory=dict
    )  # index -> hash, of pages whose predecessors are not named yet

    def part(self, start: int, stop: int) -> bytes:
        return self.hashes[start * HASH_BYTES : stop * HASH_BYTES]

    def parent(self, page: int) -> bytes:
        """Hash of the page before ``page``, or ROOT."""
        return self.part(page - 1, page) if page else ROOT

    def page_of(self, key: bytes) -> int | None:
        """Index of the key's page; None where it is no page of the chain (a block that ends inside a chunk)."""
        return self.pages.get(bytes(key[:-GROUP_BYTES]))

    def runs(self, keys: Iterable[bytes]) -> list[Run]:
        """The keys as runs, in the order given; all must be pages of this chain."""
        runs: list[Run] = []
        last = (-1, -2)  # group and page of the key before
        for key in keys:
            group, page = group_of(key), self.page_of(key)
            if page is None:
                raise ValueError(f"the offload key {key.hex()} is no page of its request's chain")
            if (group, page - 1) == last:
                runs[-1].hashes += self.part(page, page + 1)
            else:
                runs.append(Run(group, self.parent(page), self.part(page, page + 1)))
            last = (group, page)
        return runs


def group_of(key: bytes) -> int:
    """vLLM's id of the KV cache group."""
    return int.from_bytes(key[-GROUP_BYTES:], "big")


def chain_of(request: Any, page_tokens: int) -> Chain:
    """The chain of a request (vLLM's ``ReqContext``); only what was named since the last call is read."""
    chain: Chain | None = request.get_state(Chain)
    if chain is None:
        chain = Chain()
        request.set_state(chain)
    positions: Mapping[bytes, int] = request._offload_key_positions
    if chain.named == len(positions):
        return chain
    # Nothing is ever taken out of the positions, so the new ones are the last.
    for key, end in islice(positions.items(), chain.named, None):
        if end % page_tokens == 0:
            chain.ahead[end // page_tokens - 1] = bytes(key[:-GROUP_BYTES])
    chain.named = len(positions)
    # Should a page be missing, what lies beyond it has no known place in a chain.
    more: list[bytes] = []
    page = len(chain.pages)
    while len(found := chain.ahead.get(page, b"")) == HASH_BYTES:
        chain.pages[found] = page
        more.append(found)
        page += 1
    chain.hashes += b"".join(more)
    chain.ahead = {index: found for index, found in chain.ahead.items() if index >= page}
    return chain


def in_order(chain: Chain, keys: Collection[bytes], values: Collection[int]) -> list[tuple[bytes, int]]:
    """Keys that are pages of the chain with their values, sorted by group and page: vLLM hands over sets."""
    pairs = [(key, int(value)) for key, value in zip(keys, values, strict=True) if chain.page_of(key) is not None]
    return sorted(pairs, key=lambda pair: (group_of(pair[0]), chain.pages[bytes(pair[0][:-GROUP_BYTES])]))


def check_interface() -> None:
    """See that this vLLM notes the positions of keys.

    Raises:
        ConfigError: it does not.
    """
    from vllm.v1.kv_offload.base import ReqContext

    if not isinstance(getattr(ReqContext("probe"), "_offload_key_positions", None), dict):
        raise ConfigError(
            "this vLLM does not tell its offloading parts where a key lies in its request, so that no chain can be made of "
            "them: use vLLM 0.32, or the connector MaruConnector"
        )


def page_tokens_of(config: Any) -> int:
    """Tokens of one page, from vLLM's ``OffloadingConfig``.

    Raises:
        ConfigError: groups whose chunks have different sizes.
    """
    sizes = {group.tokens_per_block * config.cache.blocks_per_chunk for group in config.groups}
    if len(sizes) != 1:
        raise ConfigError(
            f"the KV cache groups of {config.model.name} have offload chunks of {sorted(sizes)} tokens, and Maru's pages are of one "
            "size: use the connector MaruConnector"
        )
    return int(sizes.pop())


def groups_of(config: Any, kv_cache_config: Any) -> dict[int, Group]:
    """Each KV cache group in vLLM's ``OffloadingConfig``, by vLLM's id.

    Raises:
        ConfigError: a group whose bytes Maru cannot share.
    """
    plan = {group.group_id: group for group in plan_groups(kv_cache_config, config.groups[0].tokens_per_block)}
    return {group.group_id: plan[group.group_id] for group in config.groups}
