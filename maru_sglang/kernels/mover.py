"""Moves objects between an engine's paged memory and a pool: :class:`PagedMover`, and layer by layer :class:`LayerLoad`.

Pages on a GPU go in one hop, by kernels or by the GPU's copy engines, on streams of the mover's own, through the pool's
mapping that was page-locked. Pages in the CPU's memory go through :class:`maru_core.mover.CxlMover`. Placement,
publishing and validation are the caller's, as with every mover; so is waiting for what else writes to or reads from the
pages: an engine's events are waited for before a call, and a load's layers with :meth:`LayerLoad.wait`.

Not measured on a GPU yet, and not run on one: what is tested are the kernels in Triton's interpreter, the copies through a
stand-in for the CUDA runtime, and all of it on a CPU.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch

from maru_core.errors import ClosedError, ConfigError, MaruError, PoolError
from maru_core.mover import CxlMover, Fragments, Mover, slot_checksums
from maru_core.pool.memory import PoolMemory
from maru_sglang.kernels import batched
from maru_sglang.kernels.choose import Choice, Choices, Direction, How, choices
from maru_sglang.kernels.layout import U64, Pages, bounds
from maru_sglang.kernels.pinning import PinError, Pins
from maru_sglang.kernels.runtime import Runtime
from maru_sglang.kernels.tables import Batch, Tables

log = logging.getLogger(__name__)

HOWS: Final[tuple[How, ...]] = ("kernel", "dma", "cpu")


class PagedMover(Mover):
    """See the module. Takes :class:`~maru_sglang.kernels.layout.Pages`, and :class:`~maru_core.mover.Fragments` of CPU memory.

    Args:
        device: where the pages are.
        threads: of the CPU that copy one large batch together; see :class:`~maru_core.mover.CxlMover`.
        pins: the pool's page-locked memory, which stays the caller's; None: the mover's own, closed with it.
        programs: of a kernel at most; None: as was measured.
        how: how all pages are copied; None: as was measured, on a CPU by the CPU.
    Raises:
        ConfigError: ``how`` cannot be had on this device; ``programs`` or ``threads`` out of range.
        MaruError: a GPU is named and its runtime cannot be used.
    """

    def __init__(
        self,
        memory: PoolMemory,
        device: torch.device | str,
        *,
        threads: int | None = None,
        pins: Pins | None = None,
        programs: int | None = None,
        how: How | None = None,
    ) -> None:
        self.memory = memory
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._cpu = CxlMover(memory, threads)
        self._programs = programs
        self._closed = False
        self._lock = threading.Lock()  # of `_closed` and of what must not be queued any more once it is set
        self._told = False
        if how is not None and how not in HOWS:
            raise ConfigError(f"copies by {how!r}: give one of {', '.join(HOWS)}, or leave it out")
        if programs is not None and not 1 <= programs <= 1 << 16:
            raise ConfigError(f"{programs} programs: give 1 to 65536, or leave it out")
        self._pins, self._own_pins = pins, None
        if self.device.type == "cpu":
            how = how or "cpu"
            if how == "kernel":
                _need_interpreter()
            if self._pins is None and how != "cpu":
                self._pins = Pins(memory)
        elif how == "cpu":
            raise ConfigError(f"pages on {self.device} cannot be copied by the CPU: leave `how` out")
        elif pins is None:
            runtime = Runtime.find(self.device.index)
            if runtime is None:
                raise MaruError(f"pages are on {self.device} and no CUDA runtime was found: is libcudart installed?")
            self._pins = self._own_pins = Pins(memory, runtime)
        runtime = self._pins.runtime if self._pins is not None else None
        if how == "dma" and runtime is None:
            raise ConfigError("copies by a GPU's copy engines need a GPU: leave `how` out")
        self._choices = Choices.always(Choice(how)) if how else choices(self.device, runtime)
        self._loads, self._stores = _Queue(self.device), _Queue(self.device)

    # ------------------------------------------------------------ whole batches

    def store(self, offsets: U64, buffers: Pages | Fragments) -> None:
        """As :meth:`maru_core.mover.Mover.store`; also when it returns the bytes are in memory.

        Raises:
            CudaError: the GPU failed; the slots may hold anything.
            MaruError: the pages were given up meanwhile; the slots may hold anything.
        """
        if isinstance(buffers, Fragments):
            self._cpu.store(offsets, buffers)
            return
        choice = self._choice("gather", buffers)
        if choice.how == "cpu":
            self._cpu.store(offsets, buffers.fragments)
            buffers.check()
            return
        coherence = self.memory.coherence
        keep = self.memory.data  # stays mapped until the copy is done
        slots = self._slots(offsets, buffers)
        try:
            with self._stores.current():
                try:
                    self._queue(_Job(self, choice, offsets, buffers, self._stores), None, to_pool=True)
                finally:
                    self._stores.finish()
        finally:
            if coherence.software:
                # Of what a GPU writes, lines may stay in this host's last cache; as in CxlMover, also after a failure.
                coherence.write_back_many(slots, buffers.nbytes)
        del keep
        buffers.check()

    def load(self, offsets: U64, buffers: Pages | Fragments) -> None:
        """As :meth:`maru_core.mover.Mover.load`.

        Raises:
            CudaError: the GPU failed; the pages may hold anything.
        """
        if isinstance(buffers, Fragments):
            self._cpu.load(offsets, buffers)
            return
        load = self.begin_load(offsets, buffers)
        try:
            load.launch(range(buffers.layout.layer_count))
        finally:
            load.synchronize()

    def begin_load(self, offsets: U64, pages: Pages) -> LayerLoad:
        """A load whose layers are launched one range after the other.

        Args:
            offsets: of each page's slot in the pool, bytes, u64, shape ``(n,)``.
            pages: none twice; nobody else writes to them until the load is over.
        Raises:
            PoolError, ValueError: as with :meth:`load`.
        """
        choice = self._choice("scatter", pages)
        slots = self._slots(offsets, pages)
        if choice.how == "cpu":
            return LayerLoad(self, None, offsets, pages)
        if self.memory.coherence.software:
            # What this host's caches hold of the slots may be of objects that were there before.
            self.memory.coherence.invalidate_many(slots, pages.nbytes)
        with self._loads.current():
            return LayerLoad(self, _Job(self, choice, offsets, pages, self._loads), offsets, pages)

    def checksums(self, offsets: U64, buffers: Pages | Fragments) -> U64:
        """Of the engine's copies where the CPU reaches them, else of what is in the slots."""
        if isinstance(buffers, Fragments):
            return self._cpu.checksums(offsets, buffers)
        if self.device.type == "cpu":
            return self._cpu.checksums(offsets, buffers.fragments)
        return slot_checksums(self.memory, offsets, buffers.nbytes)

    def close(self) -> None:
        """Wait for what was queued, and release what this mover page-locked. Safe to repeat."""
        with self._lock:
            self._closed = True
        for queue in (self._loads, self._stores):
            with contextlib.suppress(RuntimeError):  # a broken GPU was reported to whoever copied
                queue.finish()
        if self._own_pins is not None:
            self._own_pins.close()

    # ------------------------------------------------------------ inside

    def _choice(self, direction: Direction, pages: Pages) -> Choice:
        if pages.layout.device != self.device:
            raise ValueError(
                f"pages are on {pages.layout.device}, and this mover is for {self.device}: make one for each"
            )
        return self._choices.pick(direction, pages.nbytes // len(pages.layout))

    def _slots(self, offsets: U64, pages: Pages) -> U64:
        """The CPU's addresses of the slots; whatever is wrong with them is found here, before anything moves."""
        if offsets.dtype != np.uint64 or offsets.shape != (len(pages),):
            raise ValueError(
                f"offsets are {offsets.dtype} of shape {offsets.shape} for {len(pages)} pages: give one uint64 each"
            )
        geometry = self.memory.geometry
        relative = offsets - np.uint64(geometry.off_data)  # below the region it wraps to a huge number
        extent = np.uint64(geometry.extent_bytes)
        outside = relative >= np.uint64(geometry.data_bytes)
        if pages.nbytes <= geometry.extent_bytes:
            outside |= relative % extent > extent - np.uint64(pages.nbytes)
        else:
            outside |= True
        if outside.any():
            index = int(outside.argmax())
            raise PoolError(
                f"{self.memory.uri}: page {index}: {pages.nbytes} bytes at offset {offsets[index]} do not lie in an extent: "
                "nothing was copied; locations must come from this pool's server"
            )
        return relative + np.uint64(self.memory.data_address)

    def _queue(self, job: _Job, layers: range | None, *, to_pool: bool) -> None:
        with self._lock:
            # Not a word to the GPU of memory that is no longer locked.
            if self._closed:
                raise ClosedError(f"the mover of {self.memory.uri} was closed: attach again")
            job.queue_copies(layers, to_pool=to_pool)

    def _tell(self, error: PinError) -> None:
        if not self._told:
            self._told = True
            log.warning("%s; until it is pinned, copies go through the driver's own buffers, slowly", error)


def prepare(device: torch.device | str) -> None:
    """Find out now how pages are copied on a device. Otherwise the first mover does, and where the pool's server was away when the
    engine started that is made in whichever thread finds it back: a measurement of seconds, in one that must not wait.

    Raises:
        MaruError: a GPU is named and its runtime cannot be used.
    """
    device = torch.device(device)
    if device.type != "cpu":
        index = torch.cuda.current_device() if device.index is None else device.index
        choices(torch.device(device.type, index), Runtime.find(index))


class LayerLoad:
    """One load, layer by layer. Made by :meth:`PagedMover.begin_load`; one thread launches, another may wait."""

    def __init__(self, mover: PagedMover, job: _Job | None, offsets: U64, pages: Pages) -> None:
        self._mover = mover
        self._job = job
        self._offsets = offsets
        self._pages = pages
        self._data = mover.memory.data  # stays mapped until this is gone
        self._launched: list[tuple[int, int, Any]] = []
        self._failed = False

    def launch(self, layers: range) -> None:
        """Queue the copies of some layers, after those launched before; on a CPU they are done on return.

        Raises:
            CudaError: the GPU refused; nothing of these layers can be counted on.
            ClosedError: the mover was closed.
        """
        first, last = bounds(layers)
        if self._job is None:
            self._launch_on_cpu(layers)
            event = None
        else:
            queue = self._job.queue
            self._failed = True  # until it is known that nothing was queued whose end has no event
            with queue.current():
                self._mover._queue(self._job, layers, to_pool=False)
                event = queue.record()
            self._failed = False
        self._launched.append((first, last, event))

    def wait(self, layer: int) -> None:
        """The current stream waits for a layer that was launched; on a CPU it is there.

        Raises:
            ValueError: the layer was not launched.
        """
        for first, last, event in self._launched:
            if first <= layer < last:
                if event is not None:
                    torch.cuda.current_stream(self._mover.device).wait_event(event)
                return
        raise ValueError(f"layer {layer} was not launched: launch it before somebody waits for it")

    def synchronize(self) -> None:
        """Return when all that was launched has landed. Then is the time to look at the generations."""
        if self._job is None:
            return
        if self._failed or not self._launched:
            self._job.queue.finish()
        elif (event := self._launched[-1][2]) is not None:
            event.synchronize()

    def _launch_on_cpu(self, layers: range) -> None:
        layout, rows, mover = self._pages.layout, self._pages.rows, self._mover
        for part in layout.parts(layers):
            # Runs of the same shape are objects of their own, as far as copying goes.
            addresses = layout.addresses(rows, part.pieces.reshape(-1)).reshape(-1, part.pieces.shape[1])
            offsets = (self._offsets[:, None] + part.offsets).reshape(-1)
            mover._cpu.load(offsets, Fragments(addresses, part.sizes))


class _Queue:
    """A stream of the mover's own; on a CPU there is none, and copies are done when their call returns."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = None if device.type == "cpu" else torch.cuda.Stream(device)

    @property
    def handle(self) -> int:
        return 0 if self.stream is None else int(self.stream.cuda_stream)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """What is launched and allocated inside is the stream's."""
        if self.stream is None:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self.stream):
            yield

    def record(self) -> Any:
        """An event after all that was queued so far, which can be waited for without a busy core; None on a CPU."""
        return None if self.stream is None else self.stream.record_event(torch.cuda.Event(blocking=True))

    def finish(self) -> None:
        """Wait until all that was queued so far is done."""
        event = self.record()
        if event is not None:
            event.synchronize()


class _Job:
    """One batch on its way: everything that does not change from one range of layers to the next."""

    def __init__(self, mover: PagedMover, choice: Choice, offsets: U64, pages: Pages, queue: _Queue) -> None:
        pins = mover._pins
        assert pins is not None  # only a mover that copies by the CPU has none
        self.queue = queue
        self._runtime = pins.runtime
        self._pages = pages
        self._programs = mover._programs or choice.programs
        self._how: How = choice.how
        self._locked = True
        try:
            pins.ensure(offsets, pages.nbytes)
            self._slots = pins.pointers(offsets)
        except PinError as error:
            # The driver copies from memory that is not locked through buffers of its own, if it is asked one by one.
            mover._tell(error)
            self._how, self._locked = "dma", False
            self._slots = mover._slots(offsets, pages)
        if self._how == "kernel":
            self._batch = Batch.upload(pages.layout.device, pages.rows, self._slots)
            self._tables = Tables.of(pages.layout, self._batch.row_unit)

    def queue_copies(self, layers: range | None, *, to_pool: bool) -> None:
        """On the queue's stream, which is the current one."""
        if self._how == "kernel":
            if to_pool:
                from maru_sglang.kernels.gather import launch_gather as launch
            else:
                from maru_sglang.kernels.scatter import launch_scatter as launch
            launch(self._tables, self._batch, layers, programs=self._programs)
            return
        assert self._runtime is not None
        what = batched.copies(self._pages.layout, self._pages.rows, self._slots, layers)
        batched.copy(self._runtime, what, self.queue.handle, to_pool=to_pool, batches=self._locked)


def _need_interpreter() -> None:
    import triton

    if not triton.knobs.runtime.interpret:
        raise ConfigError(
            "kernels run on a CPU in Triton's interpreter only: set TRITON_INTERPRET=1 before Triton is imported, or leave `how` out"
        )
