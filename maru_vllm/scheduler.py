"""The scheduler's side: which pages a request can have from Maru, and which of its blocks are to be stored.

It moves no bytes and waits for nothing: lookups run in threads of their own from the moment a request arrives, and a request whose answer
is not there yet is asked for again in the next step (vLLM goes on with the others). What is decided here for a step is
one :class:`~maru_vllm.metadata.MaruMetadata`, the same for all workers.

Rules:

- The chain is ``request.block_hashes`` (with a LoRA adapter: joined with its content, :mod:`maru_vllm.adapters`). A lookup asks for it from its first block on; what is offered ends at a block boundary
  before the request's last token, since at least one token must be computed for there to be an answer.
- A block is stored once it is full of tokens that are known: never of drafts that may be rejected, never of what an
  asynchronous load has not delivered.
- A request that could not load what was promised is not promised it again: it would fail again where the page is
  damaged, and for ever.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from maru_core.errors import ConfigError, MaruError
from maru_core.finding import Found
from maru_core.namespace import Namespace, differences
from maru_core.protocol import ROOT, Hold, Rule, Want
from maru_core.store import Store
from maru_vllm.adapters import Adapters, Keys
from maru_vllm.config import ExtraConfig
from maru_vllm.events import SchedulerEvents
from maru_vllm.groups import Group
from maru_vllm.metadata import Handshake, MaruMetadata, PageRun, Transfer
from maru_vllm.metrics import Meter

log = logging.getLogger("maru.vllm")

#: How long the scheduler waits for lookups in one step, all requests together, seconds: a server that is there has answered by then, and
#: a scheduler with nothing else to do leaves the processor to who answers.
PATIENCE_S: Final = 0.003
#: An answer that is older is asked for again, seconds: pages have come and gone since.
FRESH_S: Final = 5.0
#: Threads that look up. Each call is bounded; more than one, so that one slow answer does not stop all.
LOOKUP_THREADS: Final = 4


class _Lookup:
    """One question about one request's chain."""

    __slots__ = ("asked", "blocks", "future", "hold")

    def __init__(self, future: concurrent.futures.Future[Found], hold: bytes | None, blocks: int) -> None:
        self.future = future
        self.hold = hold
        self.blocks = blocks
        self.asked = time.monotonic()


class _Tracked:
    """What is remembered of one request."""

    __slots__ = ("keys", "loading", "local_tokens", "lookup", "request", "stored", "targets", "tried")

    def __init__(self, request: Any, groups: int, adapters: Adapters) -> None:
        self.request = request
        self.keys = Keys(adapters)
        self.lookup: _Lookup | None = None
        self.local_tokens = 0  # computed here, when Maru was last asked
        self.loading = False
        self.targets: frozenset[int] = frozenset()  # blocks that are being loaded
        self.tried = -1  # the preemption count at which a load was last begun
        self.stored = [0] * groups  # pages from the start that are there, or need no store


class SchedulerSide:
    """See the module. All methods are called from the scheduler's thread.

    Args:
        loads, stores: what this engine's role allows.
        states: vLLM's ids of the groups that keep a state a block, not the KV of its tokens.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        block_tokens: int,
        config: ExtraConfig,
        loads: bool,
        stores: bool,
        name: str,
        states: Collection[int] = (),
    ) -> None:
        self._groups = groups
        self._block_tokens = block_tokens
        self._config = config
        self._loads = loads
        self._stores = stores
        self._name = name
        self._store: Store | None = None
        self.meter = Meter(lambda: self._store.metrics if self._store is not None else None)
        self._wants: dict[str, Want] = {}
        self._tracked: dict[str, _Tracked] = {}
        self._steps = itertools.count(1)
        self._pending_loads: list[Transfer] = []
        self._last_stores: list[Transfer] = []
        self._pool = concurrent.futures.ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="maru-lookup")
        self._hold_prefix = os.urandom(16)
        self._holds = itertools.count()
        self._null_block = 0
        self._patience = PATIENCE_S  # what is left of it in this step
        #: Groups that keep states, not tokens: index by vLLM's id.
        self._states = {group.group_id: index for index, group in enumerate(groups) if group.group_id in states}
        self._exact_ends = any(group.want.rule != Rule.ALL_PAGES for group in groups)
        self._adapters = Adapters()
        #: What is told of this engine's pages; None where nobody listens.
        self.events: SchedulerEvents | None = None

    # ------------------------------------------------------------ start and end

    def open(self, handshakes: Iterable[Handshake]) -> None:
        """Join Maru with what the workers found.

        Raises:
            ConfigError: the workers do not agree on what their bytes are.
            MaruError: as :meth:`maru_core.store.Store.open`.
        """
        told = list(handshakes)
        first = Namespace.parse(told[0].namespace)
        for other in told[1:]:
            if other.namespace != told[0].namespace:
                raise ConfigError(
                    f"the workers of this engine differ in what makes KV interchangeable: {differences(first, Namespace.parse(other.namespace))}"
                )
        wants = {}
        for handshake in told:
            for component, group in zip(handshake.components, self._groups, strict=True):
                wants[component] = group.want
        self._wants = wants
        self._store = Store.open(
            self._config.store_config(), first, name=self._name, object_bytes=max(each.object_bytes for each in told)
        )

    def bind_null_block(self, block_id: int) -> None:
        """The block that stands where a group needs none."""
        self._null_block = block_id

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._adapters.close()
        if self._store is not None:
            self._store.close()

    # ------------------------------------------------------------ lookups

    def arrived(self, request: Any) -> None:
        """A new request: ask for its chain while it waits."""
        tracked = self._track(request)
        if self._asks(request):
            self._ask(tracked)

    def matched(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens after the first ``computed_tokens`` that can be loaded; None: not known yet."""
        tracked = self._track(request)
        tracked.local_tokens = computed_tokens
        if not self._asks(request) or tracked.tried == request.num_preemptions:
            return 0, False
        lookup = tracked.lookup
        if lookup is None or self._is_stale(lookup, len(tracked.keys.of(request))):
            lookup = self._ask(tracked)
        if not lookup.future.done():
            if self._patience > 0:
                began = time.monotonic()
                concurrent.futures.wait([lookup.future], self._patience)
                self._patience -= time.monotonic() - began
            if not lookup.future.done():
                return None, False  # bounded: a lookup ends within the store's time limit
        found = self._answer(lookup)
        if self.events is not None:
            self.events.looked_up(tracked.keys.of(request)[: lookup.blocks], found, lookup.asked)
        self._note_stored(tracked, found)
        pages = self._usable(found, (request.num_tokens - 1) // self._block_tokens)
        tokens = pages * self._block_tokens - computed_tokens
        if tokens <= 0:
            return 0, False
        return tokens, True

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], external_tokens: int) -> None:
        """Blocks were allocated; ``external_tokens`` of them are to be filled from Maru."""
        tracked = self._track(request)
        if not external_tokens:
            if not tracked.loading:
                self._forget_lookup(tracked)  # vLLM has enough of its own
            return
        # Whatever happens from here on, vLLM waits for the end of this load.
        tracked.loading = True
        tracked.tried = request.num_preemptions
        try:
            runs = self._plan_load(tracked, block_ids, external_tokens)
        except Exception:
            log.exception("the load of request %s was not begun by a fault of Maru", request.request_id)
            first = tracked.local_tokens // self._block_tokens
            targets = [block for ids in block_ids for block in ids[first:] if block != self._null_block]
            failed = PageRun(0, ROOT, b"", targets)
            self._pending_loads.append(Transfer(request.request_id, [failed], failed=True))
            return
        self._pending_loads.append(Transfer(request.request_id, runs))

    def _plan_load(self, tracked: _Tracked, block_ids: Sequence[Sequence[int]], external_tokens: int) -> list[PageRun]:
        request = tracked.request
        first = tracked.local_tokens // self._block_tokens
        end = (tracked.local_tokens + external_tokens) // self._block_tokens
        runs: list[PageRun] = []
        chain = tracked.keys.of(request)
        for index, group in enumerate(self._groups):
            start = max(first, group.first_needed(end))
            ids = block_ids[group.group_id]
            if self._null_block in ids[start:end] or len(ids) < end:
                raise MaruError(f"vLLM has no block for some of pages {start} to {end} of group {group.group_id}")
            runs += self._runs(index, chain, ids, start, end)
            tracked.stored[index] = max(tracked.stored[index], end)
        tracked.targets = frozenset(block for run in runs for block in run.blocks)
        return runs

    # ------------------------------------------------------------ steps

    def step(self, output: Any) -> MaruMetadata:
        """What the workers have to do in the step that ``output`` describes."""
        metadata = MaruMetadata(
            step=next(self._steps),
            loads=self._pending_loads,
            last_stores=self._last_stores,
            idle=not output.total_num_scheduled_tokens,
        )
        self._pending_loads, self._last_stores = [], []
        self._patience = PATIENCE_S
        for load in metadata.loads:
            for run in load.runs:
                metadata.fresh += run.blocks
        try:
            self._plan_step(output, metadata)
        except Exception:
            log.exception("nothing of this step is stored, by a fault of Maru")
            metadata.stores.clear()
        return metadata

    def _plan_step(self, output: Any, metadata: MaruMetadata) -> None:
        fresh = metadata.fresh
        for new in output.scheduled_new_reqs:
            for ids in new.block_ids:
                fresh += ids
        for group_ids in output.scheduled_cached_reqs.new_block_ids:
            for ids in group_ids or ():
                fresh += ids
        for request_id in output.preempted_req_ids or ():
            if (tracked := self._tracked.get(request_id)) is not None:
                self._forget_lookup(tracked)
                tracked.stored = [0] * len(self._groups)
        if self._stores:
            self._plan_states(output.kv_connector_block_state.boundary_state_offloads, metadata.stores)
            for request_id, scheduled in output.num_scheduled_tokens.items():
                tracked = self._tracked.get(request_id)
                if tracked is None:
                    continue
                request = tracked.request
                pages = self._full_pages(tracked, request.num_computed_tokens + scheduled)
                if pages > min(tracked.stored):
                    block_ids = output.kv_connector_block_state.get_block_ids(request_id)
                    if block_ids is not None:
                        self._plan_stores(tracked, block_ids, pages, metadata.stores)

    def transferred(self, received: Iterable[str], failed: Collection[str], bad_blocks: Collection[int]) -> None:
        """What the workers report of loads.

        Args:
            received: requests whose loads all workers have ended, well or not.
            failed: those of them that miss something, where vLLM has several groups.
            bad_blocks: that miss something, where it has one; one worker may report them before the others have ended.
        """
        if bad_blocks:
            for each in self._tracked.values():
                if each.loading and not each.targets.isdisjoint(bad_blocks):
                    self._nothing_stored(each)
        for request_id in received:
            if (tracked := self._tracked.get(request_id)) is not None:
                if request_id in failed:
                    self._nothing_stored(tracked)
                tracked.loading = False
                tracked.targets = frozenset()
                self._forget_lookup(tracked)

    def finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> None:
        """A request has ended; its blocks are free from now on."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return
        self._forget_lookup(tracked)
        # With asynchronous scheduling the last tokens become known after the step that computed their KV.
        if self._stores and not tracked.loading:
            pages = self._full_pages(tracked, request.num_computed_tokens)
            if pages > min(tracked.stored):
                self._plan_stores(tracked, block_ids, pages, self._last_stores)

    def clear(self) -> bool:
        """Remove what this engine's namespace has in Maru; True if it is gone."""
        if self._store is None:
            return False
        for tracked in self._tracked.values():
            self._nothing_stored(tracked)
            if not tracked.loading:
                self._forget_lookup(tracked)
        gone = self._store.clear()
        if gone and self.events is not None:
            self.events.cleared()
        return gone

    # ------------------------------------------------------------ inside

    def _track(self, request: Any) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = self._tracked[request.request_id] = _Tracked(request, len(self._groups), self._adapters)
        tracked.request = request
        return tracked

    def _nothing_stored(self, tracked: _Tracked) -> None:
        """What was thought to be there may not be: it is stored as it is computed (again)."""
        tracked.stored = [0] * len(self._groups)

    def _asks(self, request: Any) -> bool:
        return (
            self._loads
            and self._store is not None
            and not request.skip_reading_prefix_cache
            and (request.num_tokens - 1) // self._block_tokens > 0
        )

    def _ask(self, tracked: _Tracked) -> _Lookup:
        self._forget_lookup(tracked)
        store, request = self._store, tracked.request
        assert store is not None
        keys = tracked.keys.of(request)
        hold = None
        if self._config.hold_s:
            hold = Hold(self._hold_prefix + next(self._holds).to_bytes(8, "big"), 1, self._config.hold_s)
        future = self._pool.submit(store.find, self._wants, 0, b"".join(keys), hold=hold)
        tracked.lookup = _Lookup(future, hold.request if hold else None, len(keys))
        return tracked.lookup

    def _is_stale(self, lookup: _Lookup, blocks: int) -> bool:
        age = time.monotonic() - lookup.asked
        limit = min(FRESH_S, self._config.hold_s / 2) if lookup.hold else FRESH_S
        return lookup.future.done() and (age > limit or lookup.blocks != blocks)

    def _answer(self, lookup: _Lookup) -> Found:
        try:
            return lookup.future.result()
        except Exception:
            log.exception("a lookup failed by a fault of Maru")
            return Found.nothing(self._wants)

    def _usable(self, found: Found, most: int) -> int:
        """Pages that may be offered: no more than ``most``, ending where every group can go on."""
        if not self._exact_ends:
            return min(found.pages, most)
        ends = found.ends[: int(np.searchsorted(found.ends, most, "right"))]
        return int(ends[-1]) if len(ends) else 0

    def _note_stored(self, tracked: _Tracked, found: Found) -> None:
        """What is there need not be stored; what was computed here before and is not there (any more) is."""
        for index, group in enumerate(self._groups):
            if group.want.rule == Rule.ALL_PAGES:
                tracked.stored[index] = max(tracked.stored[index], found.pages)

    def _forget_lookup(self, tracked: _Tracked) -> None:
        lookup, tracked.lookup = tracked.lookup, None
        if lookup is None:
            return
        store = self._store
        if lookup.future.cancel() or lookup.hold is None or store is None:
            return
        hold = lookup.hold

        def let_go(future: concurrent.futures.Future[Found]) -> None:
            if future.cancelled() or future.exception() is not None or not future.result().held_s:
                return
            try:
                self._pool.submit(store.unhold, hold)
            except RuntimeError:  # closed meanwhile; the hold ends with the session
                log.debug("a hold was left to end by itself")

        lookup.future.add_done_callback(let_go)

    def _full_pages(self, tracked: _Tracked, tokens: int) -> int:
        """Blocks that are full after ``tokens`` tokens have been computed, and whose tokens are known."""
        request = tracked.request
        if not self._config.store_decode:
            tokens = min(tokens, request.num_prompt_tokens)
        return min(len(tracked.keys.of(request)), tokens // self._block_tokens)

    def _plan_stores(
        self, tracked: _Tracked, block_ids: Sequence[Sequence[int]], pages: int, plan: list[Transfer]
    ) -> None:
        runs: list[PageRun] = []
        chain = tracked.keys.of(tracked.request)
        for index, group in enumerate(self._groups):
            if group.group_id not in self._states:
                ids = block_ids[group.group_id]
                runs += self._runs(index, chain, ids, tracked.stored[index], min(pages, len(ids)))
            tracked.stored[index] = max(tracked.stored[index], pages)
        if runs:
            plan.append(Transfer(tracked.request.request_id, runs))
            if self.events is not None:
                self.events.planned(tracked.request, chain, runs)

    def _plan_states(self, handed: Mapping[str, Sequence[tuple[int, int, int]]], plan: list[Transfer]) -> None:
        """States at the ends of blocks: their blocks are not in a request's table, vLLM hands each over once (group, block, tokens)."""
        for request_id, entries in handed.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            chain = tracked.keys.of(tracked.request)
            runs = []
            for group_id, block, tokens in entries:
                page, rest = divmod(tokens, self._block_tokens)
                index = self._states.get(group_id)
                if index is None or rest or not 0 < page <= len(chain) or block == self._null_block:
                    continue
                parent = chain[page - 2] if page > 1 else ROOT
                runs.append(PageRun(index, bytes(parent), bytes(chain[page - 1]), [block]))
            if runs:
                plan.append(Transfer(request_id, runs))

    def _runs(self, index: int, hashes: Sequence[bytes], ids: Sequence[int], start: int, end: int) -> list[PageRun]:
        """Pages ``start`` to ``end`` of a chain that have a block, as runs of consecutive ones."""
        runs: list[PageRun] = []
        page = start
        while page < end:
            if ids[page] == self._null_block:
                page += 1
                continue
            stop = page + 1
            while stop < end and ids[stop] != self._null_block:
                stop += 1
            parent = hashes[page - 1] if page else ROOT
            runs.append(PageRun(index, bytes(parent), b"".join(hashes[page:stop]), list(ids[page:stop])))
            page = stop
        return runs
