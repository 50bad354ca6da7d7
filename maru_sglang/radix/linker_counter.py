"""Which layers of a load have arrived: what the forward pass waits on, and what it learns at the end.

A batch of loads goes through three hands. The load thread launches layer after layer and says so; the forward pass, before it reads
a layer's pages, waits until that layer has been launched and then (on a GPU) has its own stream wait for the copy's event, so
that the CPU runs ahead; the scheduler asks at the end which requests' pages landed. A layer that cannot come stops nobody: the forward
pass goes on with whatever lies in the pages, and the requests are reported as not landed before anything of theirs is used.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

log = logging.getLogger("maru.sglang")

#: Longest time that anyone waits for a layer or for the end of a batch, seconds. Copies take milliseconds: only a device that hangs,
#: or a machine that stands still, ever gets here. Who waited in vain gives the batch up, and all others wait for it no more.
WAIT_S: Final = 60.0


class LoadBatch:
    """The loads that one forward pass waits for.

    Args:
        index: what SGLang calls it by.
        rids: the requests.
        trace: told of what happened to which layer, for logs and tests.
    """

    def __init__(self, index: int, rids: Sequence[str], trace: Callable[[int, int, str], None] | None = None) -> None:
        self.index = index
        self.rids = tuple(rids)
        self._trace = trace
        self._changed = threading.Condition()
        self._launched = 0
        self._over = False
        self._given_up = False
        self._copies: tuple[tuple[Any, frozenset[int]], ...] = ()
        self._landed: dict[str, bool] = {}

    # ------------------------------------------------------------ the load thread

    def begin(self, copies: Sequence[tuple[Any, frozenset[int]]]) -> None:
        """The copies that the layers consist of, each with the layers that it has; before the first is launched."""
        self._copies = tuple(copies)

    def launched(self, layer: int) -> None:
        """``layer`` and all before it are on their way."""
        if self._trace is not None:
            self._trace(self.index, layer, "launched")
        with self._changed:
            self._launched = layer + 1
            self._changed.notify_all()

    @property
    def given_up(self) -> bool:
        """Nothing more of it is to be launched: whoever waited for it has gone on, and its pages may soon be others'."""
        return self._given_up

    def finish(self, landed: dict[str, bool]) -> None:
        """Nothing of it is written to the device any more. Requests that are not in ``landed`` have not landed."""
        with self._changed:
            self._landed = dict(landed)
            self._over = True
            self._changed.notify_all()

    # ------------------------------------------------------------ the forward pass and the scheduler

    def wait(self, layer: int) -> None:
        """Return when ``layer`` may be read: on a GPU, by what the current stream does from here on."""
        if not self._await(lambda: self._over or self._launched > layer or self._given_up, f"layer {layer}"):
            return
        if self._launched > layer:
            for copy, layers in self._copies:
                if layer in layers:
                    copy.wait(layer)
        if self._trace is not None:
            self._trace(self.index, layer, "waited")

    def landed(self) -> dict[str, bool]:
        """Wait for the end; whether each request's pages landed, proven."""
        if not self._await(lambda: self._over, "the end"):
            # No new copy begins from here on. One that is under way has this long to end: a process that stood still itself, and not
            # its device, is as quick as ever.
            self._await(lambda: self._over, "its last copy")
        with self._changed:
            # Whoever gave it up has gone on without waiting: what landed since may have come after it was used.
            return {rid: not self._given_up and self._landed.get(rid, False) for rid in self.rids}

    def give_up(self) -> None:
        """Nobody waits for it from now on, and no copy of it begins."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def _await(self, condition: Callable[[], bool], what: str) -> bool:
        with self._changed:
            if self._changed.wait_for(condition, WAIT_S):
                return True
        log.error("load %d: waited %g s in vain for %s: its requests are aborted", self.index, WAIT_S, what)
        self.give_up()
        return False


class LayerCounter:
    """What SGLang's pools and runners call ``layer_transfer_counter``.

    Attributes:
        num_layers: transfer layers.
        consumer_index: the batch whose layers are waited for now, -1 for none.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.producer_index = -1
        self.consumer_index = -1
        self._batches: dict[int, LoadBatch] = {}

    def add(self, rids: Sequence[str], trace: Callable[[int, int, str], None] | None = None) -> LoadBatch:
        """The next batch."""
        self.producer_index += 1
        batch = self._batches[self.producer_index] = LoadBatch(self.producer_index, rids, trace)
        return batch

    def take(self, index: int) -> LoadBatch | None:
        """The batch, which is forgotten: who waits for it from now on does not wait."""
        return self._batches.pop(index, None)

    def set_consumer(self, index: int) -> None:
        self.consumer_index = index

    def wait_until(self, threshold: int) -> None:
        """Before layer ``threshold`` of the current batch is read. Never raises into the forward pass."""
        batch = self._batches.get(self.consumer_index)
        if batch is None:
            return
        try:
            batch.wait(min(threshold, self.num_layers - 1))
        except Exception:
            log.exception("load %d: layer %d could not be waited for", batch.index, threshold)

    def give_up(self) -> None:
        """All batches."""
        for batch in list(self._batches.values()):
            batch.give_up()

    def reset(self) -> None:
        self.producer_index = -1
        self.consumer_index = -1
        self._batches.clear()


class LayerTrace:
    """Writes to the log what happens to the layers of each load, with a number that says in which order.

    Only for looking at it: every layer of every load is two lines."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0

    def __call__(self, batch: int, layer: int, what: str) -> None:
        with self._lock:
            self._number += 1
            log.info("load %d: layer %d %s, event %d", batch, layer, what, self._number)
