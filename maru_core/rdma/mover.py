"""The mover for pools on other machines: one-sided transfers through agents, straight between the engine's memory and slots.

What it adds to :class:`maru_core.mover.Mover`:

- Engine memory is registered with the NIC (:meth:`RdmaMover.register`); what is not goes through a registered staging buffer. Memory of
  a GPU is moved where NIXL can register it, and nowhere else: the CPU does not copy it.
- An agent that fails is set aside for a while, and what was to be loaded there is loaded from another. A call that finds no agent, or
  whose time is over, raises :class:`~maru_core.rdma.endpoint.TransferError`.
- After an error of a load nothing lands in the engine's memory any more: the endpoint is closed first, and with it all that was under
  way. Of a store nobody knows what may still land in the slots: over TCP a closed connection goes on sending for minutes. So it is not
  tried on another agent, any failure of one that was begun is a TransferError that says so (``wrote``), and the slots' reservation must not
  be given back then: it ends in quarantine.

A lane is an endpoint with its lock: one for loads, one for stores, so that a store never keeps a load waiting.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from maru_core.checksum import object_checksum
from maru_core.errors import MaruError, PoolError
from maru_core.mover import Fragments, Mover
from maru_core.pool.geometry import Geometry
from maru_core.protocol import Agent
from maru_core.rdma.descriptors import NOWHERE, Ranges, Span, batches, by_kind, described, ranges_of
from maru_core.rdma.endpoint import Descriptors, Endpoint, Transfer, TransferError
from maru_core.rdma.pace import BatchBytes
from maru_core.rdma.routes import Route, Routes

try:
    from maru_core import _native
except ImportError:  # installed without a compiler
    _native = None  # type: ignore[assignment]

log = logging.getLogger("maru.rdma")

U64 = npt.NDArray[np.uint64]

#: Batches under way at a time, on all agents together.
DEPTH: Final = 4
#: Pause between two looks at what is under way, seconds: without one the loop takes the core that TCP's progress needs.
PAUSE_S: Final = 0.0001
#: So long after something has finished there is no pause: a small transfer is done before one has ended.
AT_ONCE_S: Final = 0.00005
#: A transfer may take the time limit, and this much longer for each byte, seconds: 20 MB/s is slower than any network it is meant for.
SECONDS_PER_BYTE: Final = 1 / 20e6
STAGING_BYTES: Final = 32 << 20


class RdmaMover(Mover):
    """Args:
    geometry: of the pool.
    agents: those that reach it now; may raise.
    name: for people.
    devices: network devices of UCX; empty: it chooses.
    timeout_s: how long a transfer may take besides what its bytes need, seconds.
    memory: of the engine, bytes by address; others may add to it.
    gpus: the same of GPUs, bytes and number of the GPU by address.
    """

    def __init__(
        self,
        geometry: Geometry,
        agents: Callable[[], Sequence[Agent]],
        *,
        name: str,
        devices: str = "",
        timeout_s: float = 2.0,
        memory: dict[int, int] | None = None,
        gpus: dict[int, tuple[int, int]] | None = None,
    ) -> None:
        self.geometry = geometry
        # Bytes by address of the engine's buffers. Added to by whoever attaches, read by the lanes before each transfer.
        self.memory: dict[int, int] = {} if memory is None else memory
        self.gpus: dict[int, tuple[int, int]] = {} if gpus is None else gpus
        #: Whether the NIC reaches the GPU memory that was registered; None: not tried, as it is with the first transfer after that.
        self.gpu_direct: bool | None = None
        self._loads = _Lane(self, Routes(agents), f"{name} loads", devices, timeout_s)
        self._stores = _Lane(self, Routes(agents), f"{name} stores", devices, timeout_s)

    def register(self, address: int, nbytes: int, device: int | None = None) -> None:
        """Engine memory that objects will be loaded into and stored from; stays registered until :meth:`close`.

        Args:
            device: number of the GPU whose memory it is. Where it cannot be registered (see ``gpu_direct``), every transfer that
                touches it is a TransferError: take host memory then. What a kernel wrote must be finished before it is stored.
        """
        if device is None:
            self.memory[address] = nbytes
        else:
            self.gpus[address] = nbytes, device

    def on_gpu(self, buffers: Fragments) -> bool:
        """Whether any of it is memory that was registered as a GPU's."""
        first, stop = buffers.addresses, buffers.addresses + buffers.sizes
        return any(
            bool(((stop > np.uint64(address)) & (first < np.uint64(address + nbytes))).any())
            for address, (nbytes, _) in list(self.gpus.items())
        )

    def store(self, offsets: U64, buffers: Fragments) -> None:
        self._check(offsets, buffers)
        self._stores.move("WRITE", offsets, buffers)

    def load(self, offsets: U64, buffers: Fragments) -> None:
        self._check(offsets, buffers)
        self._loads.move("READ", offsets, buffers)

    def checksums(self, offsets: U64, buffers: Fragments) -> U64:
        """Of the engine's copies.

        Raises:
            MaruError: they are in a GPU's memory.
        """
        if self.on_gpu(buffers):
            raise MaruError(
                "checksums of pages in GPU memory cannot be taken here: leave verify=checksum out, or take host memory"
            )
        rows = buffers.addresses
        return np.fromiter((object_checksum(row, buffers.sizes) for row in rows), np.uint64, len(rows))

    def close(self) -> None:
        self._loads.close()
        self._stores.close()

    def _check(self, offsets: U64, buffers: Fragments) -> None:
        if offsets.dtype != np.uint64 or offsets.shape != (len(buffers),):
            raise ValueError(
                f"offsets are {offsets.dtype} of shape {offsets.shape} for {len(buffers)} objects: give one uint64 each"
            )
        geometry = self.geometry
        relative = offsets - np.uint64(geometry.off_data)  # below the extents it wraps to a huge number
        outside = relative >= np.uint64(geometry.data_bytes)
        if buffers.nbytes <= geometry.extent_bytes:
            outside |= relative % np.uint64(geometry.extent_bytes) > np.uint64(geometry.extent_bytes - buffers.nbytes)
        else:
            outside[:] = True
        if np.count_nonzero(outside):
            index = int(outside.argmax())
            raise PoolError(
                f"object {index}: {buffers.nbytes} bytes at offset {offsets[index]} do not lie in an extent of the pool: nothing was "
                "moved; locations must come from this pool's server"
            )


class _Lane:
    """``_lock`` protects all of it: one call at a time."""

    def __init__(self, mover: RdmaMover, routes: Routes, name: str, devices: str, timeout_s: float) -> None:
        self._mover = mover
        self._routes = routes
        self._name = name
        self._devices = devices
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._endpoint: Endpoint | None = None
        self._staging: _Staging | None = None
        self._pace = BatchBytes()
        self._closed = False
        self._wrote = False  # whether this call has begun to write into slots
        self._registered = 0  # bytes of the engine's memory, as last said

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._drop()

    def move(self, operation: str, offsets: U64, fragments: Fragments) -> None:
        deadline = time.monotonic() + self._timeout_s + len(fragments) * fragments.nbytes * SECONDS_PER_BYTE
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TransferError(
                f"{self._name}: other transfers took all of the time limit of {self._timeout_s:g} s", wrote=False
            )
        try:
            self._wrote = False
            if self._closed:
                raise TransferError(f"{self._name}: the mover was closed")
            self._move(operation, offsets, fragments, deadline)
        except BaseException as error:
            # Whatever is under way must not land any more when the caller has its memory back.
            self._drop()
            if isinstance(error, TransferError):
                error.wrote = self._wrote
            elif self._wrote:
                raise TransferError(f"{self._name}: {error or type(error).__name__}") from error
            raise
        finally:
            self._lock.release()

    def _move(self, operation: str, offsets: U64, fragments: Fragments, deadline: float) -> None:
        while True:
            try:
                self._attempt(operation, offsets, fragments, deadline)
                return
            except _StalledError as stalled:
                # What has stalled may go on at any moment. Loading the same bytes again does no harm, once it cannot any more. Bytes that
                # were sent may be on their way for long, and must not find their slot another's.
                self._routes.failed(stalled.route)
                self._drop()
                log.warning("%s: agent %s stalled and is set aside", self._name, stalled.route.agent.name)
                if self._wrote or time.monotonic() > deadline:
                    raise TransferError(
                        f"{self._name}: {len(fragments) * fragments.nbytes} bytes were not moved in time: see that the agents run, and the "
                        "network between them"
                    ) from None

    def _attempt(self, operation: str, offsets: U64, fragments: Fragments, deadline: float) -> None:
        endpoint = self._ready()
        geometry = self._mover.geometry
        ranges = ranges_of(offsets, fragments, geometry.extent_bytes, geometry.off_data, endpoint.starts)
        devices = endpoint.devices(ranges.local, ranges.sizes)
        if not np.count_nonzero(devices == NOWHERE):
            for of_a_kind in by_kind(ranges, devices):
                self._transfer(endpoint, operation, of_a_kind, deadline)
            return
        if self._mover.on_gpu(fragments):
            raise TransferError(
                f"{self._name}: pages in GPU memory cannot be moved: not all of their memory could be registered with {endpoint.backend} "
                "(see the log): take host memory, or a NIC and a UCX that reach the GPU"
            )
        staging = self._staged(endpoint, fragments.nbytes)
        for start in range(0, len(fragments), staging.room(fragments.nbytes)):
            part = slice(start, start + staging.room(fragments.nbytes))
            some = fragments.select(part)
            if operation == "WRITE":
                staging.copy(some, into=True)
            ranges = ranges_of(
                offsets[part], staging.fragments(some), geometry.extent_bytes, geometry.off_data, endpoint.starts
            )
            self._transfer(endpoint, operation, ranges, deadline)
            if operation == "READ":
                staging.copy(some, into=False)

    def _transfer(self, endpoint: Endpoint, operation: str, ranges: Ranges, deadline: float) -> None:
        """Move all ranges. A batch of a load that fails is tried on another agent; it raises when none is left or one stalls, and for
        a store that fails."""
        total = ranges.nbytes
        ranges, spans = batches(ranges, self._pace.choose(total))
        here = described(ranges.local, ranges.sizes, ranges.devices)
        there: dict[Route, Descriptors] = {}
        waiting = deque(spans)
        under_way: deque[tuple[Transfer, Route, Span, float]] = deque()
        began = seen = now = time.monotonic()
        failed = False
        while waiting or under_way:
            while waiting and len(under_way) < DEPTH:
                span = waiting.popleft()
                route = self._routes.next()
                if route not in there:
                    there[route] = described(route.addresses(ranges.offsets), ranges.sizes)
                which = slice(span.start, span.stop)
                try:
                    peer = endpoint.connect(route.agent.metadata)
                    self._wrote = operation == "WRITE"
                    transfer = endpoint.post(operation, peer, here[which], there[route][which], ranges.kind)
                except TransferError as error:
                    failed = True
                    self._set_aside(endpoint, route, error)
                    waiting.append(span)
                    continue
                # Some are done when they are posted: memory of the same host.
                if not transfer.finished:
                    under_way.append((transfer, route, span, time.monotonic()))
            now = time.monotonic()
            for _ in range(len(under_way)):
                transfer, route, span, posted = under_way.popleft()
                try:
                    if transfer.done():
                        seen = now
                        continue
                    if now > min(deadline, posted + self._timeout_s / 2 + span.nbytes * SECONDS_PER_BYTE):
                        raise _StalledError(route)
                    under_way.append((transfer, route, span, posted))
                except TransferError as error:
                    failed = True
                    self._set_aside(endpoint, route, error)
                    waiting.append(span)
            if under_way and now > seen + AT_ONCE_S:
                time.sleep(PAUSE_S)
        if not failed:
            self._pace.took(total, time.monotonic() - began)

    def _set_aside(self, endpoint: Endpoint, route: Route, error: TransferError) -> None:
        log.warning("%s: agent %s is set aside: %s", self._name, route.agent.name, error)
        self._routes.failed(route)
        if self._wrote:
            raise error
        endpoint.forget(route.agent.metadata)

    # ------------------------------------------------------------ what it keeps

    def _ready(self) -> Endpoint:
        if self._endpoint is None:
            self._endpoint = Endpoint(self._name.replace(" ", "-"), devices=self._devices)
        for address, nbytes in list(self._mover.memory.items()):
            try:
                self._endpoint.register(address, nbytes)
            except TransferError as error:
                # It goes through the staging buffer then.
                log.warning("%s: %s", self._name, error)
                self._mover.memory.pop(address, None)
        registered = sum(self._mover.memory.values())
        if registered != self._registered:
            log.info("%s: %d bytes of the engine's memory are registered", self._name, registered)
            self._registered = registered
        if self._mover.gpu_direct is not False:
            self._register_gpus(self._endpoint)
        return self._endpoint

    def _register_gpus(self, endpoint: Endpoint) -> None:
        """A backend says that it knows GPUs whether or not it was built for them: what counts is whether it takes their memory."""
        for address, (nbytes, device) in list(self._mover.gpus.items()):
            try:
                endpoint.register(address, nbytes, device)
            except TransferError as error:
                self._mover.gpu_direct = False
                log.warning("%s: the NIC does not reach GPU memory: %s", self._name, error)
                return
            if self._mover.gpu_direct is None:
                self._mover.gpu_direct = True
                log.info("%s: the NIC reaches the memory of GPU %d", self._name, device)

    def _staged(self, endpoint: Endpoint, nbytes: int) -> _Staging:
        if self._staging is None or self._staging.nbytes < nbytes:
            self._staging = _Staging(max(STAGING_BYTES, nbytes))
            log.info(
                "%s: objects are copied through a buffer of %d bytes, since they lie in memory that is not registered",
                self._name,
                self._staging.nbytes,
            )
        endpoint.register(self._staging.address, self._staging.nbytes)
        return self._staging

    def _drop(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()


class _StalledError(Exception):
    """A transfer that neither ends nor fails."""

    def __init__(self, route: Route) -> None:
        super().__init__(route.agent.name)
        self.route = route


class _Staging:
    """A buffer that the NIC reaches, for memory that it does not."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._buffer = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        self.address = int(self._buffer.ctypes.data)

    def room(self, nbytes: int) -> int:
        """Objects of so many bytes that fit."""
        return self.nbytes // nbytes

    def fragments(self, objects: Fragments) -> Fragments:
        """Where they lie here, one after another."""
        rows = np.arange(len(objects), dtype=np.uint64) * np.uint64(objects.nbytes) + np.uint64(self.address)
        return Fragments(rows[:, None], np.array([objects.nbytes], np.uint64))

    def copy(self, objects: Fragments, *, into: bool) -> None:
        offsets = np.arange(len(objects), dtype=np.uint64) * np.uint64(objects.nbytes)
        if _native is not None:
            _native.move_batch(
                self.address, 0, self.nbytes, self.nbytes, offsets, objects.addresses, objects.sizes, 1, into
            )
            return
        sizes = objects.sizes.tolist()
        for at, addresses in zip((offsets + np.uint64(self.address)).tolist(), objects.addresses.tolist(), strict=True):
            for address, size in zip(addresses, sizes, strict=True):
                if into:
                    ctypes.memmove(at, address, size)
                else:
                    ctypes.memmove(address, at, size)
                at += size
