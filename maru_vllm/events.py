"""What this engine has put into Maru, in vLLM's own stream of KV events (``--kv-events-config``).

A router that listens to the engines learns so which prefixes an engine could load. Told is what is known here and nothing more:

- ``BlockStored`` with ``medium="STORAGE"`` and ``ownership="maru"`` for a block once every worker of this engine has its part of it in Maru
  (whoever wrote it);
- ``BlockRemoved`` for blocks that were told and are found missing by a later lookup, or were removed by ``reset_cache``.

An engine is not asked when pages are evicted, so a block that nobody looks up again stays told. The metadata server's stream
(``maru-server --events``) has every page of all engines, evictions included: prefer it where a router can take it.

Only groups of which every page counts are told, as vLLM's own events of other groups cannot be applied block by block.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash, to_event_extra_keys
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from maru_core.finding import Found
from maru_core.protocol import HASH_BYTES, MissReason, Rule
from maru_vllm.groups import Group, Placement
from maru_vllm.metadata import PageRun

OWNERSHIP: Final = "maru"
#: Blocks whose stores have been planned and not confirmed, and blocks that were told; the oldest are forgotten beyond that.
PLANNED_MAX: Final = 1 << 16
TOLD_MAX: Final = 1 << 18
#: Answers of a lookup that say something about the first page that is missing.
_KNOWN: Final = frozenset({MissReason.NOT_STORED, MissReason.EVICTED, MissReason.REMOVED, MissReason.OTHER_NAMESPACE})

#: A page of a group: index into the plan of groups, and the page's key.
Page = tuple[int, bytes]


class StoredPages(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """How many workers have stored their part of each page since the last step."""

    def __init__(self, pages: Iterable[Page]) -> None:
        self.pages: collections.Counter[Page] = collections.Counter(pages)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        if isinstance(other, StoredPages):
            self.pages.update(other.pages)
        return self


class WorkerNotes:
    """A worker's side: pages that are in Maru, until they are taken. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pages: dict[Page, None] = {}  # in order: a router wants a block's parent first

    def stored(self, run: PageRun, good: npt.NDArray[np.bool_]) -> None:
        """What became of the pages of a run."""
        pages = [
            (run.group, run.hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES])
            for index in np.flatnonzero(good).tolist()
        ]
        with self._lock:
            self._pages |= dict.fromkeys(pages)

    def take(self) -> StoredPages | None:
        with self._lock:
            pages, self._pages = self._pages, {}
        return StoredPages(list(pages)) if pages else None


class SchedulerEvents:
    """The scheduler's side: from planned stores, what the workers say of them, and lookups, to events. From one thread.

    Args:
        groups, kv_cache_groups: the plan, and vLLM's groups that it refers to.
        placement: of any worker.
    """

    def __init__(
        self, groups: Sequence[Group], kv_cache_groups: Sequence[Any], *, block_tokens: int, placement: Placement
    ) -> None:
        self._groups = groups
        self._kinds = {
            index: get_kv_cache_spec_kind(kv_cache_groups[group.group_id].kv_cache_spec).value
            for index, group in enumerate(groups)
            if group.want.rule == Rule.ALL_PAGES
        }
        self._components = {index: list(placement.wants([groups[index]])) for index in self._kinds}
        self._block_tokens = block_tokens
        self._workers = placement.stages * placement.world  # that store a part of each page
        self._planned: collections.OrderedDict[Page, tuple[Any, int]] = collections.OrderedDict()
        #: Block hash as it was told, and when.
        self._told: collections.OrderedDict[Page, tuple[Any, float]] = collections.OrderedDict()
        self._ready: list[Any] = []

    def planned(self, request: Any, keys: Sequence[bytes], runs: Iterable[PageRun]) -> None:
        """Pages of ``request`` that the workers will store."""
        for run in runs:
            if run.group not in self._kinds or not run.hashes:
                continue
            first = keys.index(run.hashes[:HASH_BYTES])
            for offset in range(len(run.blocks)):
                page = (run.group, bytes(keys[first + offset]))
                if page in self._told:
                    continue
                self._planned[page] = (self._event(request, first + offset, run.group), 0)
                self._planned.move_to_end(page)
        while len(self._planned) > PLANNED_MAX:
            self._planned.popitem(last=False)

    def stored(self, pages: Mapping[Page, int], now: float) -> None:
        """Pages by how many workers have them."""
        for page, count in pages.items():
            if (entry := self._planned.get(page)) is None:
                continue
            event, before = entry
            if before + count < self._workers:
                self._planned[page] = (event, before + count)
                continue
            del self._planned[page]
            self._told[page] = event.block_hashes[0], now
            self._ready.append(event)
        while len(self._told) > TOLD_MAX:
            self._told.popitem(last=False)

    def looked_up(self, keys: Sequence[bytes], found: Found, asked: float) -> None:
        """The answer to a lookup of ``keys``: what was told before it was asked and is not there is taken back. Nothing follows from
        an answer that did not come."""
        if not self._told or found.why not in _KNOWN:
            return
        for index, components in self._components.items():
            there = min(found.covered.get(component, 0) for component in components)
            pages = [(index, bytes(key)) for key in keys[there:]]
            self._take_back(page for page in pages if page in self._told and self._told[page][1] < asked)

    def cleared(self) -> None:
        """Everything is gone."""
        self._planned.clear()
        self._take_back(list(self._told))

    def take(self) -> list[Any]:
        """The events since the last call, in the order in which things became known."""
        ready, self._ready = self._ready, []
        return ready

    def _take_back(self, pages: Iterable[Page]) -> None:
        gone: dict[int, list[Any]] = {}
        for page in pages:
            if (told := self._told.pop(page, None)) is not None:
                gone.setdefault(page[0], []).append(told[0])
        for index, hashes in gone.items():
            self._ready.append(
                BlockRemoved(
                    block_hashes=hashes,
                    medium=MEDIUM_STORAGE,
                    group_idx=self._groups[index].group_id,
                    ownership=OWNERSHIP,
                )
            )

    def _event(self, request: Any, page: int, index: int) -> Any:
        """As ``BlockPool`` makes it for a block of the GPU."""
        start, stop = page * self._block_tokens, (page + 1) * self._block_tokens
        extra, _ = generate_block_hash_extra_keys(request, start, stop, 0)
        lora = request.lora_request
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(request.block_hashes[page])],
            parent_block_hash=maybe_convert_block_hash(request.block_hashes[page - 1]) if page else None,
            token_ids=list(request.all_token_ids[start:stop]),
            block_size=self._block_tokens,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM_STORAGE,
            lora_name=lora.name if lora else None,
            extra_keys=to_event_extra_keys([extra]),
            group_idx=self._groups[index].group_id,
            kv_cache_spec_kind=self._kinds[index],
            ownership=OWNERSHIP,
            session_id=request.session_id,
        )
