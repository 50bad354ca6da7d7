"""A worker's side: copies pages between its KV cache and the pool, in threads of its own, and says when it is done.

The rules that keep wrong bytes out:

- A load is reported finished when its bytes are in place and proven, or when it is known which are not; never before.
- On a GPU the worker runs ahead of the device: a store begins when the step that fills its blocks has run there, and a load when what
  was queued before it has (:mod:`maru_vllm.device`).
- A store reads blocks that vLLM may give to another request at any step. Before a step runs, every store that still reads a block
  which the step gives out has ended (:meth:`WorkerSide.begin`): a store that has not begun is dropped after a moment, one that is
  copying is waited for. So nothing has to be held back from vLLM's own allocator, and nothing is stored that was overwritten
  meanwhile.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from maru_core.protocol import HASH_BYTES
from maru_core.store import Store
from maru_vllm.device import Moment, already
from maru_vllm.events import WorkerNotes
from maru_vllm.groups import Placement
from maru_vllm.layout import GroupLayout
from maru_vllm.metadata import MaruMetadata, PageRun, Transfer
from maru_vllm.metrics import Meter

log = logging.getLogger("maru.vllm")

#: How long a step waits for stores that have not begun and whose blocks it needs, seconds; then they are dropped.
FENCE_S: Final = 0.05
#: How long a step in which nothing is computed waits for a load, seconds, instead of being repeated at once.
IDLE_WAIT_S: Final = 0.002
#: How long a load waits for a server that is away, seconds, all its groups together. The scheduler has found its pages, in a process of its own: most likely the
#: server is there again, and this process has not noticed yet. vLLM's default fails a request whose load fails.
SERVER_WAIT_S: Final = 3.0
_LOOK_S: Final = 0.02
#: Requests whose loads are copied at once. (One large batch is copied by several threads already.)
LOAD_THREADS: Final = 2
#: Stores that may wait their turn; more are dropped.
STORES_MAX: Final = 4096
#: How long the end of the engine waits for stores, seconds.
CLOSE_S: Final = 5.0


@dataclass
class Done:
    """What has ended since it was last asked for."""

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)


class Patience:
    """What a load has left of the time that it waits for a server."""

    def __init__(self) -> None:
        self._left_s = SERVER_WAIT_S

    def wait(self) -> bool:
        """Wait a moment; False where none is left."""
        if self._left_s <= 0:
            return False
        began = time.monotonic()
        time.sleep(_LOOK_S)
        self._left_s -= time.monotonic() - began
        return True


class WorkerSide:
    """See the module. Called from the worker's thread, except for what its own threads run.

    ``_lock`` protects ``_done``, ``_loading`` and ``_dropped``.

    Args:
        moments: takes a moment of the device that the layouts are on; as it is for a CPU.
    """

    def __init__(
        self,
        store: Store,
        layouts: Sequence[GroupLayout],
        components: Sequence[str],
        placement: Placement,
        moments: Callable[[], Moment] = already,
    ) -> None:
        self._store = store
        self._layouts = layouts
        self._components = components
        self._placement = placement
        self._moments = moments
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._done = Done()
        self._loading: set[str] = set()
        self._begun = 0
        self._saved = 0
        #: Stores that have not ended, with the blocks that they read.
        self._reading: list[tuple[concurrent.futures.Future[None], frozenset[int]]] = []
        self.dropped_stores = 0
        #: What is in Maru, for whoever tells of it; None where nobody listens.
        self.notes: WorkerNotes | None = None
        self.meter = Meter(lambda: store.metrics)
        self._loaders = concurrent.futures.ThreadPoolExecutor(LOAD_THREADS, thread_name_prefix="maru-load")
        # One: a chain's pages are stored in its order.
        self._storer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="maru-store")

    # ------------------------------------------------------------ steps

    def begin(self, metadata: MaruMetadata) -> None:
        """Before the step runs: nothing of what it will overwrite is read any more; loads begin. Once a step."""
        if metadata.step == self._begun:
            return
        self._begun = metadata.step
        before = self._moments() if metadata.last_stores or metadata.loads else already()
        for transfer in metadata.last_stores:
            self._submit_store(transfer, before)
        self._fence(metadata.fresh)
        for transfer in metadata.loads:
            with self._lock:
                self._loading.add(transfer.request_id)
            try:
                self._loaders.submit(self._load, transfer, before)
            except RuntimeError:  # closed: the engine is ending
                self._report(transfer, _all_blocks(transfer))

    def save(self, metadata: MaruMetadata) -> None:
        """After the step has run: its full blocks are stored, while vLLM goes on. Once a step."""
        if metadata.step == self._saved:
            return
        self._saved = metadata.step
        if metadata.stores:
            step = self._moments()
            for transfer in metadata.stores:
                self._submit_store(transfer, step)

    def take_done(self, *, idle: bool = False) -> Done:
        """What has ended since the last call. With ``idle`` it waits a moment for a load."""
        with self._lock:
            if idle and self._loading and not self._done.received:
                self._ended.wait(IDLE_WAIT_S)
            done, self._done = self._done, Done()
        return done

    def close(self) -> None:
        """End: stores under way and waiting are given a moment."""
        concurrent.futures.wait([future for future, _ in self._reading], CLOSE_S)
        self._storer.shutdown(wait=False, cancel_futures=True)
        self._loaders.shutdown(wait=True, cancel_futures=True)
        self._store.close()

    # ------------------------------------------------------------ stores

    def _submit_store(self, transfer: Transfer, filled: Moment) -> None:
        if not self._placement.writer:
            return
        self._reading = [entry for entry in self._reading if not entry[0].done()]
        blocks = frozenset(block for run in transfer.runs for block in run.blocks)
        if len(self._reading) >= STORES_MAX:
            self._drop(blocks)
            return
        self._reading.append((self._storer.submit(self._put, transfer, filled), blocks))

    def _fence(self, fresh: Sequence[int]) -> None:
        """Return when no store reads any of the blocks."""
        if not self._reading or not fresh:
            return
        given = set(fresh)
        deadline = time.monotonic() + FENCE_S
        for future, blocks in self._reading:
            if future.done() or given.isdisjoint(blocks):
                continue
            concurrent.futures.wait([future], max(0.0, deadline - time.monotonic()))
            if future.done() or future.cancel():
                if future.cancelled():
                    self._drop(blocks)
                continue
            # It is copying. A put is bounded by the store's own time limits.
            concurrent.futures.wait([future])

    def _drop(self, blocks: frozenset[int]) -> None:
        self.dropped_stores += 1
        self.meter.dropped(len(blocks))

    def _put(self, transfer: Transfer, filled: Moment) -> None:
        try:
            filled()
            for run in transfer.runs:
                stored = self._store.put(
                    self._components[run.group],
                    self._placement.shard,
                    self._placement.world,
                    run.parent,
                    run.hashes,
                    self._layouts[run.group].buffers(run.blocks),
                )
                if self.notes is not None:
                    self.notes.stored(run, stored)
        except Exception:
            log.exception("blocks of request %s were not stored by a fault of Maru", transfer.request_id)

    # ------------------------------------------------------------ loads

    def _load(self, transfer: Transfer, free: Moment) -> None:
        bad: set[int] = set()
        began = time.monotonic()
        try:
            if transfer.failed:
                bad = _all_blocks(transfer)
            else:
                free()
                patience = Patience()
                for run in transfer.runs:
                    bad |= self._get(run, patience)
        except Exception:
            log.exception("the pages of request %s were not loaded by a fault of Maru", transfer.request_id)
            bad = _all_blocks(transfer)
        self.meter.loaded(time.monotonic() - began)
        self._report(transfer, bad)

    def _report(self, transfer: Transfer, bad: set[int]) -> None:
        with self._lock:
            self._loading.discard(transfer.request_id)
            self._done.received.add(transfer.request_id)
            if bad:
                self._done.failed.add(transfer.request_id)
                self._done.bad_blocks |= bad
            self._ended.notify_all()

    def _get(self, run: PageRun, patience: Patience) -> set[int]:
        """Load a run; the blocks that do not hold what they should."""
        component, shard = self._components[run.group], self._placement.shard
        buffers = self._layouts[run.group].buffers(run.blocks)
        epoch = self._store.epoch
        loaded = self._store.get(component, shard, run.hashes, buffers)
        if not loaded.all() and self._found_again(epoch, patience):
            loaded = self._store.get(component, shard, run.hashes, buffers)
        if len(loaded) != len(run.blocks):
            return set(run.blocks)
        bad = np.flatnonzero(~loaded)
        if len(bad) and self._store.config.verify == "checksum":
            self._remove_damaged(component, run.hashes, bad)
        return {run.blocks[index] for index in bad}

    def _found_again(self, epoch: int, patience: Patience) -> bool:
        """Whether the server is there, and was away or began another life since ``epoch``: then it is worth asking again."""
        was_away = not self._store.connected
        while not self._store.connected:
            if not patience.wait():
                return False
        return was_away or self._store.epoch != epoch

    def _remove_damaged(self, component: str, hashes: bytes, bad: npt.NDArray[np.intp]) -> None:
        """A page that is there and has wrong bytes would fail every request that has it in its chain."""
        names = b"".join(hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES] for index in bad.tolist())
        there = self._store.present(component, self._placement.shard, names)
        damaged = b"".join(
            names[index * HASH_BYTES : (index + 1) * HASH_BYTES] for index in np.flatnonzero(there).tolist()
        )
        if damaged:
            gone = self._store.delete(damaged)
            log.warning("%d pages had wrong bytes: %d objects were removed", len(damaged) // HASH_BYTES, gone)


def _all_blocks(transfer: Transfer) -> set[int]:
    return {block for run in transfer.runs for block in run.blocks}
