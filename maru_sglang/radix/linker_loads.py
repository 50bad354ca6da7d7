"""Loads of the direct path: accepted by the scheduler, carried out layer by layer in a thread, proven at the end.

What is accepted was located and is held on the server. A batch's copies are launched for one layer of all requests and all pools after
the other, so that the forward pass can begin on the first layer. After the last copy has ended every request's objects are
validated, each request for itself: a page that was evicted meanwhile costs its own request and no other.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from maru_core.reading import Reading
from maru_sglang.kernels.layout import Pages
from maru_sglang.kernels.mover import PagedMover
from maru_sglang.radix.linker_counter import LayerCounter, LoadBatch
from maru_sglang.radix.linker_pools import DevicePool

log = logging.getLogger("maru.sglang")

#: Longest time that a reset or a close waits for copies that are under way, seconds.
QUIESCE_S: Final = 30.0


class Part(NamedTuple):
    """What one request loads from one pool."""

    pool: DevicePool
    reading: Reading
    indices: torch.Tensor


class Accepted(NamedTuple):
    """A load that SGLang was promised."""

    rid: str
    hold: bytes
    parts: tuple[Part, ...]

    def give_up(self) -> None:
        """Nothing of it is or will be copied."""
        for part in self.parts:
            part.reading.finish(landed=False)


class _Task(NamedTuple):
    batch: LoadBatch
    loads: list[Accepted]
    ready: tuple[Any, ...]


class Loads:
    """The queue and its thread. ``accept``, ``cancel``, ``start``, ``finish`` and ``reset`` are the scheduler's.

    Args:
        counter: what the forward pass waits on.
        on_device: a context in which the thread works: its device and a stream of its own.
        ready: records events after which nobody uses the pages any more that a load may be given.
        unhold: told of each hold that is needed no more; must not block.
        trace: see :class:`maru_sglang.radix.linker_counter.LayerTrace`.
    """

    def __init__(
        self,
        counter: LayerCounter,
        *,
        on_device: Callable[[], contextlib.AbstractContextManager[Any]],
        ready: Callable[[], Sequence[Any]],
        unhold: Callable[[bytes], None],
        trace: Callable[[int, int, str], None] | None = None,
    ) -> None:
        self._counter = counter
        self._on_device = on_device
        self._ready = ready
        self._unhold = unhold
        self._trace = trace
        self._accepted: dict[str, Accepted] = {}
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._busy = 0
        self._idle = threading.Condition()
        #: Of the batch that was finished last: whether each request's pages landed.
        self.verdicts: dict[str, bool] = {}
        self._thread = threading.Thread(target=self._work, name="maru-load", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ the scheduler's thread

    def accepted(self, rid: str) -> bool:
        return rid in self._accepted

    def accept(self, load: Accepted) -> None:
        self._accepted[load.rid] = load

    def cancel(self, rid: str) -> bool:
        """Take back a load that has not started; False if there is none."""
        load = self._accepted.pop(rid, None)
        if load is None:
            return False
        load.give_up()
        self._unhold(load.hold)
        return True

    def start(self) -> int:
        """Begin what was accepted; the batch's index, -1 if there is nothing."""
        if not self._accepted:
            return -1
        loads = list(self._accepted.values())
        self._accepted.clear()
        try:
            ready = tuple(self._ready())
            batch = self._counter.add([load.rid for load in loads], self._trace)
        except BaseException:
            self._end(loads)
            raise
        with self._idle:
            self._busy += 1
        self._tasks.put(_Task(batch, loads, ready))
        return batch.index

    def finish(self, index: int) -> bool:
        """Wait until nothing of the batch is written any more; True if all of it landed."""
        self.verdicts = {}
        batch = self._counter.take(index)
        if batch is None:
            return False  # it could not be started
        self.verdicts = batch.landed()
        return all(self.verdicts.values())

    def settle(self) -> bool:
        """Wait (bounded) until nothing is copied any more; what has not started stays."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._busy, QUIESCE_S)

    def reset(self) -> bool:
        """Forget what has not started, and wait (bounded) for what has. True if nothing is under way any more."""
        for rid in list(self._accepted):
            self.cancel(rid)
        still = self.settle()
        if not still:
            # Its pages are given away now: what has not begun must not. What has, has this long to end.
            self._counter.give_up()
            still = self.settle()
        if not still:
            log.error("a load has not ended after %g s: the device does not answer", QUIESCE_S)
        self._counter.reset()
        self.verdicts = {}
        return still

    def close(self) -> None:
        self.reset()
        self._tasks.put(None)
        self._thread.join(QUIESCE_S)

    # ------------------------------------------------------------ the load thread

    def _work(self) -> None:
        with self._on_device():
            while (task := self._tasks.get()) is not None:
                landed: dict[str, bool] = {}
                try:
                    landed = self._carry_out(task)
                except Exception:
                    log.exception("load %d failed: its %d requests are aborted", task.batch.index, len(task.loads))
                finally:
                    task.batch.finish(landed)
                    self._end(task.loads)
                    with self._idle:
                        self._busy -= 1
                        self._idle.notify_all()

    def _end(self, loads: Sequence[Accepted]) -> None:
        for load in loads:
            load.give_up()  # of those that were finished this changes nothing
            self._unhold(load.hold)

    def _carry_out(self, task: _Task) -> dict[str, bool]:
        for event in task.ready:
            event.synchronize()
        copies = _copies(task.loads)
        try:
            task.batch.begin(copies)
            for layer in range(self._counter.num_layers):
                for copy, layers in copies:
                    if layer in layers:
                        if task.batch.given_up:
                            raise TimeoutError(f"nobody waits for layer {layer} any more")
                        copy.launch(range(layer, layer + 1))
                task.batch.launched(layer)
        finally:
            for copy, _ in copies:
                copy.synchronize()
        landed = {}
        for load in task.loads:
            # All of them, also after one that failed: each reading wants its end, and counts what it missed.
            proven = [part.reading.finish() for part in load.parts]
            landed[load.rid] = all(proven)
            if not landed[load.rid]:
                lost = [part.pool.component for part, good in zip(load.parts, proven, strict=True) if not good]
                log.warning(
                    "load of request %s: pages of %s were gone before they were copied", load.rid, ", ".join(lost)
                )
        return landed


def _copies(loads: Sequence[Accepted]) -> list[tuple[Any, frozenset[int]]]:
    """One copy for each pool and mover, of all requests together, and the layers that it has."""
    groups: dict[tuple[int, int], list[tuple[Part, Pages]]] = {}
    for load in loads:
        for part in load.parts:
            pages = part.pool.pages(part.indices)
            if len(pages) != len(part.reading):
                raise ValueError(
                    f"request {load.rid}: {len(pages)} pages of pool {part.pool.component} for {len(part.reading)} objects"
                )
            groups.setdefault((id(part.pool), id(part.reading.mover)), []).append((part, pages))
    copies = []
    for parts in groups.values():
        pool, mover = parts[0][0].pool, parts[0][0].reading.mover
        offsets = np.concatenate([part.reading.offsets for part, _ in parts])
        rows = np.concatenate([pages.rows for _, pages in parts])
        assert isinstance(mover, PagedMover)  # the one that this store was given
        copies.append((mover.begin_load(offsets, Pages(pool.layout, rows)), frozenset(pool.layout.layers.tolist())))
    return copies
