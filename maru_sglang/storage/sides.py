"""Pools beside the KV pool (sliding window, states, indexers, drafts, compressed regions): one component each.

A page's object in a side pool belongs to the page: the server evicts a page with all its components, and a hit counts only
where SGLang's own rule for each pool is met (``PoolHitPolicy``; :class:`maru_core.protocol.Rule` has the same words).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from maru_core.errors import ConfigError
from maru_core.finding import Found
from maru_core.protocol import Rule, Want
from maru_sglang.radix import KV, Placement
from maru_sglang.storage.pages import HostPages
from maru_sglang.storage.regions import HEAD_POOLS, side_facts

#: Pools of a draft model: without them a hit is right, but speculation has to begin anew.
DRAFTS = (str(PoolName.DRAFT), str(PoolName.DRAFT_INDEXER), str(PoolName.DRAFT_SWA))


@dataclass(frozen=True)
class Side:
    """One pool, as it is stored."""

    name: str
    pages: HostPages
    place: Placement

    @property
    def facts(self) -> str:
        return side_facts(self.name, self.pages.pool, self.pages.object_bytes)


def side_of(config: HiCacheStorageConfig, kv: Placement, name: str, pool: Any) -> Side:
    """How a side pool is stored.

    Raises:
        ConfigError: a pool that nobody has read, or a division between ranks that cannot be stored rightly.
    """
    pages = HostPages(pool, name)
    if config.pp_size > 1:
        raise ConfigError(
            f"the model has a pool {name!r} beside its KV pool, and --pp-size is {config.pp_size}: Maru cannot tell which stages "
            "have such a pool: use --pp-size 1"
        )
    if not config.is_mla_model:
        return Side(name, pages, Placement.side(name, kv.shard, kv.world, True, _parts(pages, name, kv.parts)))
    if name == PoolName.MAMBA:
        # States are divided between ranks even where the KV beside them is the same on all.
        return Side(name, pages, Placement.side(name, config.tp_rank, config.tp_size, True, 1))
    if type(pool) in HEAD_POOLS and config.tp_size > 1:
        raise ConfigError(
            f"the pool {name!r} ({type(pool).__name__}) has other heads on every rank, but SGLang stores it from the first rank "
            f"only where the model's KV is MLA (tensor parallel {config.tp_size}): run without speculative decoding, or with --tp 1"
        )
    return Side(name, pages, Placement.side(name, kv.shard, kv.world, kv.writer, 1))


def _parts(pages: HostPages, name: str, parts: int) -> int:
    pool = pages.pool
    if parts > 1 and (type(pool) is not MHATokenToKVPoolHost or pool.layout != "page_head" or pool.head_num % parts):
        raise ConfigError(
            f"tp_lcm_size is given, and the pool {name!r} ({type(pool).__name__}, layout {pool.layout}) cannot be divided into "
            f"{parts} groups of heads: leave tp_lcm_size out of --hicache-storage-backend-extra-config"
        )
    return parts


def want_of(transfer: PoolTransfer) -> Want:
    """The rule by which SGLang needs this pool's pages."""
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        return Want(Rule.TRAILING_PAGES, max(1, len(transfer.keys or ())))
    if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
        return Want(Rule.BLOCK_GROUPS, int(transfer.block_pages), int(transfer.group_pages))
    return Want()


def result_of(
    found: Found, kv: Sequence[str], sides: Mapping[str, Side], transfers: Sequence[PoolTransfer]
) -> tuple[PoolTransferResult, dict[str, int]]:
    """SGLang's answer, and for each side pool by how many pages it holds the hit back from what the KV pool has.

    Args:
        kv: components of the KV pool; none where it has no memory of its own.
        sides: by SGLang's name, every one that ``transfers`` name.
    """
    gates = [
        sides[str(transfer.name)].place.component
        for transfer in transfers
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES
    ]
    reached = min((found.covered.get(component, 0) for component in (kv or gates)), default=0)
    hits: dict[str, int] = {PoolName.KV: reached} if reached else {}
    short: dict[str, int] = {}
    for transfer in transfers:
        side = sides[str(transfer.name)]
        covered = found.covered.get(side.place.component, 0)
        if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
            hits[transfer.name] = covered
            continue
        if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES and covered > reached:
            covered = found.pages  # of the ends that it has, the last one that the KV pool reaches
        covered = min(covered, reached)
        if covered:
            hits[transfer.name] = covered
        if covered < reached:
            short[side.name] = reached - covered
    return PoolTransferResult(found.pages, hits, [int(end) for end in found.ends]), short


def check_entries(config: HiCacheStorageConfig, entries: Mapping[str, Any]) -> None:
    """Before anything is attached: whether all pools of an engine can be stored.

    Raises:
        ConfigError: one cannot.
    """
    place = Placement.of(config)
    for name, pool in entries.items():
        if name != KV:
            side_of(config, place, name, pool)
