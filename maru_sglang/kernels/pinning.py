"""Page-locks the pool's mapping for the GPU, chunk by chunk, when it is needed or a little before.

Locking costs about 0.1 s a GB, and one call cannot be made for a whole large pool, so the extents are locked in chunks of a
few hundred MiB: whole extents, in order, from the first on. What the server has cut into slots is locked in the background,
what somebody waits for before that. An object lies in one extent (:mod:`maru_core.pool.format`) and an
extent in one chunk, so no object ever lies across two registrations, where a copy would fail.

One thread makes all calls that lock and unlock. So a chunk is locked once however many ask for it, the caller's wait is
bounded even if the driver hangs, errors of these calls never show up as the last error of a thread of the engine, and
no context is made on GPU 0 by a thread that never chose its GPU. Locking brings a chunk's pages in, also those of extents that
the server has not given out yet: the pool's memory is used up by whole chunks.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from maru_core.errors import ClosedError, ConfigError, MaruError, PoolError
from maru_core.pool.backing import Bytes
from maru_core.pool.memory import PoolMemory
from maru_core.pool.uri import format_size
from maru_sglang.kernels.numa import gpu_node, nodes_of_pages
from maru_sglang.kernels.runtime import UNLOADING, CudaError, Runtime

U64 = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.intp]

log = logging.getLogger(__name__)

#: 25 ms or so a chunk. Larger ones would make the first copy into a chunk wait longer, smaller ones mean more calls.
DEFAULT_CHUNK_BYTES: Final = 256 << 20
#: One call of 512 GiB fails on current drivers; this is far enough from it.
MAX_CHUNK_BYTES: Final = 64 << 30
#: How long :meth:`Pins.ensure` waits by default, and :meth:`Pins.close` for the thread to undo everything, seconds.
ENSURE_S: Final = 1.0
CLOSE_S: Final = 60.0
#: How often the thread looks for extents that the server has cut since, seconds.
LOOK_S: Final = 1.0
#: Pages of a chunk whose NUMA node is asked for.
_SAMPLED_PAGES: Final = 64

#: Mappings that the driver would not let go of: unmapping them under it could crash the process later.
_still_locked: Final[list[Bytes]] = []


class PinError(MaruError):
    """Memory of the pool that the GPU cannot reach by itself (yet). Nothing was copied: copy in another way."""


@dataclass(frozen=True)
class PinReport:
    """What is locked, for logs. Bytes, seconds."""

    chunk_bytes: int
    chunks: int
    """Of the whole pool."""
    pinned: int
    failed: int
    pinned_bytes: int
    seconds: float
    """Spent in the calls that locked."""
    nodes: dict[int, int] = field(default_factory=dict)
    """NUMA node to pages found there, of a sample; empty where the kernel does not say."""
    gpu_node: int | None = None
    failure: str = ""
    """The first one."""

    def __str__(self) -> str:
        text = f"{self.pinned} of {self.chunks} chunks of {format_size(self.chunk_bytes)} pinned"
        if self.pinned:
            text += f" ({format_size(self.pinned_bytes)} in {self.seconds:.2f} s)"
        if self.failed:
            text += f", {self.failed} could not be: {self.failure}"
        if self.nodes:
            total = sum(self.nodes.values())
            shares = ", ".join(f"{100 * count // total} % on node {node}" for node, count in sorted(self.nodes.items()))
            near = "an unknown node" if self.gpu_node is None else f"node {self.gpu_node}"
            text += f"; memory: {shares}; GPU: {near}"
        return text


class Pins:
    """The page-locked part of one pool's mapping, for one GPU. Safe to use from several threads.

    Args:
        memory: the mapping. It is kept until :meth:`close`, also if the pool is closed before.
        runtime: None where there is no GPU: then nothing is locked, and everything is where the CPU has it.
        chunk_bytes: at most so many bytes are locked by one call; at least one extent.
        look_s: how often to look for extents that the server has cut into slots, to lock them before they are asked for, until
            one cannot be locked; None: only what is asked for with :meth:`ensure` or :meth:`ahead`.
    Raises:
        ConfigError: an extent, or ``chunk_bytes``, is larger than 64 GiB; ``chunk_bytes`` is not positive.
    """

    def __init__(
        self,
        memory: PoolMemory,
        runtime: Runtime | None = None,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        look_s: float | None = LOOK_S,
    ) -> None:
        geometry = memory.geometry
        if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
            raise ConfigError(f"chunks of {chunk_bytes} bytes: give 1 to {format_size(MAX_CHUNK_BYTES)}")
        if geometry.extent_bytes > MAX_CHUNK_BYTES:
            raise ConfigError(
                f"{memory.uri}: extents of {format_size(geometry.extent_bytes)} cannot be pinned, "
                f"{format_size(MAX_CHUNK_BYTES)} at most can: make the pool with a smaller extent"
            )
        self.memory = memory
        self.runtime = runtime
        self.chunk_bytes = max(1, chunk_bytes // geometry.extent_bytes) * geometry.extent_bytes
        self.chunk_count = -(-geometry.data_bytes // self.chunk_bytes)
        self._pid = os.getpid()
        self._data: Bytes | None = memory.data  # a range that is locked must stay mapped
        self._address = memory.data_address
        self._unlocked = True  # whether all that was to be unlocked has been; the thread's own

        # `_changed` protects all below. `_ready` and `_pointers` are also read without it: the thread writes a chunk's pointer
        # before its ready flag, and neither changes again until close, after which there must be no copies.
        self._changed = threading.Condition()
        self._ready = np.zeros(self.chunk_count, np.bool_)
        self._pointers = np.zeros(self.chunk_count, np.uint64)
        self._failed: dict[int, str] = {}
        self._urgent: dict[int, None] = {}  # ordered sets: chunks that somebody waits for, and those wanted soon
        self._soon: dict[int, None] = {}
        self._thread: threading.Thread | None = None
        self._closing = False
        self._undone = False
        self._seconds = 0.0
        self._nodes: Counter[int] = Counter()
        self._gpu_node: int | None = None
        self._look_s = look_s
        self._far = False  # whether it was said that the memory is far from the GPU
        if runtime is not None:
            atexit.register(self.close)  # an engine that just ends
            if look_s is not None:
                with self._changed:
                    self._start()

    # ------------------------------------------------------------ asking

    def ensure(self, offsets: U64, nbytes: int, wait_s: float = ENSURE_S) -> None:
        """Return when the GPU can reach these objects.

        Args:
            offsets: of objects in the pool, bytes, u64, shape ``(n,)``.
            nbytes: of one object.
            wait_s: longest time to wait. What is not locked by then goes on being locked in the background.
        Raises:
            PinError: a chunk could not be locked (now or before), the time was not enough, this was closed, or the process
                was forked.
            PoolError: an object does not lie in an extent of the pool.
        """
        chunks = self.chunks(offsets, nbytes)
        if self.runtime is None:
            return
        self._check_process()
        if self._ready[chunks].all() and not self._closing:
            return
        deadline = time.monotonic() + wait_s
        wanted = np.unique(chunks).tolist()
        with self._changed:
            while True:
                if self._closing:
                    raise PinError(f"{self.memory.uri}: its pinned memory was released: attach again")
                missing = [chunk for chunk in wanted if not self._ready[chunk]]
                for chunk in missing:
                    if chunk in self._failed:
                        raise PinError(self._failed[chunk])
                if not missing:
                    return
                self._ask(self._urgent, missing)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PinError(
                        f"{self.memory.uri}: {len(missing)} chunks of {format_size(self.chunk_bytes)} were not pinned "
                        f"within {wait_s:g} s; it goes on in the background: try again later"
                    )
                self._changed.wait(left)

    def ahead(self, offsets: U64 | None = None) -> None:
        """Have chunks locked in the background, after those that somebody waits for. What fails is told by :meth:`ensure`.

        Args:
            offsets: bytes in the pool, u64, shape ``(n,)``; None: every extent that the server has cut into slots so far.
        Raises:
            PoolError: an offset does not lie in an extent.
        """
        if self.runtime is None or os.getpid() != self._pid:
            return
        if offsets is None:
            try:
                cut = np.flatnonzero(self.memory.extents).astype(np.uint64)
            except ClosedError:
                return
            geometry = self.memory.geometry
            offsets = np.uint64(geometry.off_data) + cut * np.uint64(geometry.extent_bytes)
        chunks = np.unique(self.chunks(offsets))
        chunks = chunks[~self._ready[chunks]]
        if len(chunks):
            with self._changed:
                self._ask(self._soon, chunks.tolist())

    def pinned(self, offsets: U64) -> npt.NDArray[np.bool_]:
        """For each offset, whether the GPU can reach it now; shape ``(n,)``. Without a GPU: all; in a forked child: none."""
        chunks = self.chunks(offsets)
        if self.runtime is None:
            return np.ones(len(chunks), np.bool_)
        return self._ready[chunks] & (os.getpid() == self._pid)

    def pointers(self, offsets: U64) -> U64:
        """By which addresses the GPU reaches bytes of the pool, u64, shape ``(n,)``; without a GPU, the CPU's.

        Raises:
            PinError: a chunk is not locked.
            PoolError: an offset does not lie in an extent.
        """
        chunks = self.chunks(offsets)
        relative = offsets - np.uint64(self.memory.geometry.off_data)
        if self.runtime is None:
            return relative + np.uint64(self._address)
        self._check_process()
        if not self._ready[chunks].all():
            chunk = int(chunks[~self._ready[chunks]][0])
            why = (
                self._failed.get(chunk)
                or f"{self.memory.uri}: chunk {chunk} is not pinned: ask for it with ensure first"
            )
            raise PinError(why)
        return self._pointers[chunks] + (relative - chunks.astype(np.uint64) * np.uint64(self.chunk_bytes))

    def chunks(self, offsets: U64, nbytes: int = 1) -> Indices:
        """In which chunk each object lies, shape ``(n,)``. Copies of different chunks must not be joined to one.

        Raises:
            PoolError: an object does not lie in one extent.
        """
        geometry = self.memory.geometry
        relative = offsets - np.uint64(geometry.off_data)  # below the region it wraps to a huge number
        extent = np.uint64(geometry.extent_bytes)
        outside = relative >= np.uint64(geometry.data_bytes)
        if 0 < nbytes <= geometry.extent_bytes:
            outside |= relative % extent > extent - np.uint64(nbytes)
        else:
            outside |= True
        if outside.any():
            index = int(outside.argmax())
            raise PoolError(
                f"{self.memory.uri}: {nbytes} bytes at offset {offsets[index]} do not lie in an extent of the pool: "
                "locations must come from this pool's server"
            )
        return (relative // np.uint64(self.chunk_bytes)).astype(np.intp)

    def report(self) -> PinReport:
        """What is locked now.

        Raises:
            PinError: in a forked child.
        """
        self._check_process()
        with self._changed:
            return PinReport(
                chunk_bytes=self.chunk_bytes,
                chunks=self.chunk_count,
                pinned=int(self._ready.sum()),
                failed=len(self._failed),
                pinned_bytes=sum(self._range(chunk)[1] for chunk in np.flatnonzero(self._ready).tolist()),
                seconds=self._seconds,
                nodes=dict(self._nodes),
                gpu_node=self._gpu_node,
                failure=next(iter(self._failed.values()), ""),
            )

    # ------------------------------------------------------------ leaving

    def close(self) -> None:
        """Unlock everything. Whoever copied must have waited for the copies to end. Safe to repeat.

        In a forked child nothing happens: the registrations are the parent's.
        """
        if self.runtime is None or os.getpid() != self._pid:
            return
        atexit.unregister(self.close)
        with self._changed:
            self._closing = True
            self._urgent.clear()
            self._soon.clear()
            self._changed.notify_all()
            if self._thread is None:
                return
            if not self._changed.wait_for(lambda: self._undone, CLOSE_S):
                log.error(
                    "%s: the driver has not released its pinned memory within %g s: it stays pinned until this process ends",
                    self.memory.uri,
                    CLOSE_S,
                )
                return
        self._thread.join(CLOSE_S)

    # ------------------------------------------------------------ the thread

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise PinError(
                f"{self.memory.uri}: it was pinned before a fork, and CUDA does not survive one: attach in the child"
            )

    def _ask(self, queue: dict[int, None], chunks: list[int]) -> None:
        """With the lock held: queue what is neither locked nor refused, and see that there is a thread."""
        new = [chunk for chunk in chunks if not (self._ready[chunk] or chunk in self._failed or chunk in queue)]
        if self._closing or not new:
            return
        queue.update(dict.fromkeys(new))
        self._start()
        self._changed.notify_all()

    def _start(self) -> None:
        if self._thread is None:
            # A daemon, so that an engine that ends gets as far as our atexit call, which waits for it.
            self._thread = threading.Thread(target=self._run, name="maru-pinning", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        assert self.runtime is not None
        refused = ""
        try:
            self.runtime.use_device()
            self._gpu_node = gpu_node(self.runtime.pci_bus_id())
        except CudaError as error:
            if error.call != "cudaDeviceGetPCIBusId":  # without it the report only does not say where the GPU is
                refused = f"{self.memory.uri}: nothing of it can be pinned: {error}"
                log.warning("%s", refused)
        while True:
            with self._changed:
                if not (self._urgent or self._soon) and self._look_s is not None and not self._failed:
                    self.ahead()
                self._changed.wait_for(lambda: self._closing or self._urgent or self._soon, self._look_s)
                if self._closing:
                    break
                queue = self._urgent or self._soon
                if not queue:
                    continue
                chunk = next(iter(queue))
                # It stays queued until it is ready or refused, so that nobody queues it again.
            if refused:
                self._refuse(chunk, refused)
            else:
                self._pin(chunk)
            with self._changed:
                self._urgent.pop(chunk, None)
                self._soon.pop(chunk, None)
                self._changed.notify_all()
        self._undo()

    def _range(self, chunk: int) -> tuple[int, int]:
        """Address and bytes of a chunk; the last one may be shorter."""
        start = chunk * self.chunk_bytes
        nbytes = min(self.chunk_bytes, self.memory.geometry.data_bytes - start)
        assert start % self.memory.geometry.extent_bytes == nbytes % self.memory.geometry.extent_bytes == 0
        return self._address + start, nbytes

    def _pin(self, chunk: int) -> None:
        """Lock one chunk, or remember why not."""
        assert self.runtime is not None
        address, nbytes = self._range(chunk)
        began = time.monotonic()
        try:
            self.runtime.host_register(address, nbytes)
            try:
                pointer = self.runtime.host_device_pointer(address)
            except CudaError:
                self._unlocked &= self._unpin(chunk)
                raise
        except CudaError as error:
            message = f"{self.memory.uri}: chunk {chunk} of {format_size(nbytes)} cannot be pinned: {error}"
            log.warning("%s; its pages are copied in another way", message)
            self._refuse(chunk, message)
            return
        seconds = time.monotonic() - began
        nodes = nodes_of_pages(address, nbytes, _SAMPLED_PAGES)
        with self._changed:
            self._pointers[chunk] = pointer
            self._seconds += seconds
            self._nodes.update(nodes)
            self._ready[chunk] = True
        if self._gpu_node is not None and 2 * nodes[self._gpu_node] < nodes.total() and not self._far:
            self._far = True
            log.warning(
                "%s: memory is on NUMA nodes %s, the GPU on node %d: copies are slower; start maru-server with numactl --membind=%d",
                self.memory.uri,
                sorted(nodes),
                self._gpu_node,
                self._gpu_node,
            )

    def _refuse(self, chunk: int, message: str) -> None:
        with self._changed:
            self._failed[chunk] = message
            # What one chunk could not have, the next will not get either: only what somebody waits for is still tried.
            self._soon.clear()

    def _unpin(self, chunk: int) -> bool:
        assert self.runtime is not None
        try:
            self.runtime.host_unregister(self._range(chunk)[0])
        except CudaError as error:
            if error.code != UNLOADING:
                log.error("%s: chunk %d stays pinned until this process ends: %s", self.memory.uri, chunk, error)
            return False
        return True

    def _undo(self) -> None:
        """Unlock every chunk that is locked."""
        log.info("%s: released: %s", self.memory.uri, self.report())
        for chunk in np.flatnonzero(self._ready).tolist():
            # No longer handed out, then unlocked.
            self._ready[chunk] = False
            self._unlocked &= self._unpin(chunk)
        if not self._unlocked and self._data is not None:
            _still_locked.append(self._data)
        with self._changed:
            self._data = None
            self._undone = True
            self._changed.notify_all()
