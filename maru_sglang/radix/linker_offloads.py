"""Offloads of the direct path: what the forward pass wrote is stored from a thread, in order, after the right events.

Each node of SGLang's tree is one job: its pages of every pool. The result is True only if all of them are known to be stored, and
results come in the order of the jobs, on every rank alike: SGLang counts them. A job that will not be tried (no server, Maru off, a
fault) therefore has its turn and its result too. While a job waits SGLang keeps its pages from being evicted, so a job that has waited
too long is given up: pages that could not be stored are stored when they are used again.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from maru_core.store import Store
from maru_sglang.radix.linker_loads import QUIESCE_S
from maru_sglang.radix.linker_pools import DevicePool

log = logging.getLogger("maru.sglang")

#: A job that has waited for its turn for so long is given up, seconds.
PATIENCE_S: Final = 30.0


class Stretch(NamedTuple):
    """Consecutive pages of one chain in one pool, and the page before them."""

    pool: DevicePool
    parent: bytes
    hashes: bytes
    indices: torch.Tensor


class _Job(NamedTuple):
    stretches: tuple[Stretch, ...]
    events: tuple[Any, ...]
    since: float
    era: int


class Offloads:
    """The queue and its thread. All methods are the scheduler's.

    Args:
        store: where to.
        shard, world: of this rank.
        on_device: a context in which the thread works: its device and a stream of its own.
        dead: whether Maru is off.
    """

    def __init__(
        self,
        store: Store,
        shard: int,
        world: int,
        *,
        on_device: Callable[[], contextlib.AbstractContextManager[Any]],
        dead: Callable[[], bool],
    ) -> None:
        self._store = store
        self._shard = shard
        self._world = world
        self._on_device = on_device
        self._dead = dead
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._results: collections.deque[bool] = collections.deque()
        self._era = 0
        self._busy = 0
        self._idle = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="maru-offload", daemon=True)
        self._thread.start()

    def add(self, stretches: tuple[Stretch, ...], events: tuple[Any, ...] = ()) -> None:
        """One node; of no stretches if it only has to have its turn, and fail."""
        with self._idle:
            self._busy += 1
        self._jobs.put(_Job(stretches, events, time.monotonic(), self._era))

    def done_elsewhere(self) -> None:
        """A node that another rank stores for this one: done at once. A rank has either all such nodes, or none."""
        self._results.append(True)

    def completed(self) -> int:
        return len(self._results)

    def pop(self) -> bool:
        """The oldest result."""
        return self._results.popleft()

    def settle(self) -> bool:
        """Wait (bounded) until all jobs are done; their results stay."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._busy, QUIESCE_S)

    def reset(self) -> bool:
        """Forget all results, after the jobs were done; what is not done in time is dropped. True if nothing reads device
        memory any more."""
        self.settle()
        with self._idle:
            self._era += 1
            still = self._idle.wait_for(lambda: not self._busy, QUIESCE_S)
        if not still:
            log.error("an offload has not ended after %g s: the device or the pool does not answer", QUIESCE_S)
        self._results.clear()
        return still

    def close(self) -> None:
        self.reset()
        self._jobs.put(None)
        self._thread.join(QUIESCE_S)

    # ------------------------------------------------------------ the thread

    def _work(self) -> None:
        with self._on_device():
            while (job := self._jobs.get()) is not None:
                stored = False
                try:
                    stored = self._carry_out(job)
                except Exception:
                    log.exception("a node's pages were not stored")
                with self._idle:
                    if job.era == self._era:
                        self._results.append(stored)
                    self._busy -= 1
                    self._idle.notify_all()

    def _carry_out(self, job: _Job) -> bool:
        for event in job.events:
            event.synchronize()
        if not job.stretches or job.era != self._era or self._dead() or time.monotonic() - job.since > PATIENCE_S:
            return False
        complete = True
        for stretch in job.stretches:
            # A reset that could wait no longer has given the pages away: what is copied from then on is no longer the node's.
            pages = stretch.pool.pages(stretch.indices, lambda: job.era == self._era)
            stored = self._store.put(
                stretch.pool.component, self._shard, self._world, stretch.parent, stretch.hashes, pages
            )
            complete &= bool(stored.all())
            if not complete:
                break  # the rest would not count either, and takes room
        return complete
