"""What the client modules see instead of threads, clocks, sockets, random numbers and mapped memory while they are simulated.

The code under test is not changed: :func:`installed` replaces the names ``threading``, ``time``, ``zmq`` ... in its modules
for the length of a run. Every call here is a switch point.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import zmq
from sim_kernel import Kernel, Process, Task, Violation
from sim_network import Network, SimContext, SimSocket, poll

import maru_core.conversation
import maru_core.errands
import maru_core.housekeeping
import maru_core.lives
import maru_core.locations
import maru_core.mover
import maru_core.reach
import maru_core.reading
import maru_core.sockets
import maru_core.store
import maru_core.transfers
from maru_core.pool.coherence import HARDWARE
from maru_core.pool.geometry import Geometry
from maru_core.process import ProcessIdentity

Bytes = npt.NDArray[np.uint8]


class SimPool:
    """The memory that all processes share: tables and extents, over any restart."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.meta = np.zeros(geometry.off_data, np.uint8)
        self.data = np.zeros(geometry.data_bytes, np.uint8)
        self.incarnation = 0

    @property
    def base(self) -> int:
        """Address of the first extent."""
        return int(self.data.ctypes.data)


class SimMemory:
    """What a client maps: the tables read-only, the extents writable."""

    def __init__(self, pool: SimPool, uri: object, kernel: Kernel) -> None:
        self.uri = uri
        self.geometry = pool.geometry
        self.coherence = HARDWARE
        self.data = pool.data
        self.data_address = int(pool.data.ctypes.data)
        self._kernel = kernel
        self.meta = pool.meta.view()
        self.meta.flags.writeable = False

    @property
    def generations(self) -> npt.NDArray[np.uint64]:
        geometry = self.geometry
        return self.meta[geometry.off_generations : geometry.off_generations + 8 * geometry.slot_count].view("<u8")

    @property
    def closed(self) -> bool:
        return False

    def populate(self, extent: int) -> bool:
        self._kernel.point()
        return True

    def close(self) -> None:
        pass


class _Lock:
    def __init__(self, kernel: Kernel, *, recursive: bool = False) -> None:
        self._kernel = kernel
        self._recursive = recursive
        self._owner: Task | None = None
        self._count = 0
        self._waiters: list[tuple[Task, int]] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        kernel = self._kernel
        kernel.point()
        task = kernel.running
        deadline = None if timeout < 0 or task is None else task.process.clock() + timeout
        while self._count and not (self._recursive and self._owner is task):
            if not blocking:
                return False
            assert task is not None
            left = None if deadline is None else deadline - task.process.clock()
            if left is not None and left <= 0:
                return False
            me = (task, task.token)
            self._waiters.append(me)
            kernel.park(left)
            if me in self._waiters:
                self._waiters.remove(me)
        self._owner = task
        self._count += 1
        return True

    def release(self) -> None:
        if not self._count:
            if self._kernel.closing:
                return
            raise RuntimeError("release unlocked lock")
        self._count -= 1
        if not self._count:
            self._owner = None
            if self._waiters:
                self._kernel.wake(*self._waiters.pop(0), True)

    def locked(self) -> bool:
        return self._count > 0

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Condition:
    def __init__(self, kernel: Kernel, lock: _Lock | None = None) -> None:
        self._kernel = kernel
        self._lock = lock or _Lock(kernel, recursive=True)
        self._waiters: list[tuple[Task, int]] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        task = self._kernel.running
        assert task is not None
        self._lock.release()
        me = (task, task.token)
        self._waiters.append(me)
        try:
            told = self._kernel.park(timeout) is not None
        finally:
            if me in self._waiters:
                self._waiters.remove(me)
            if not self._kernel.closing:
                self._lock.acquire()
        return told

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiters))):
            self._kernel.wake(*self._waiters.pop(0), True)

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class _Event:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._set = False
        self._waiters: list[tuple[Task, int]] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._kernel.point()
        self._set = True
        waiters, self._waiters = self._waiters, []
        for task, token in waiters:
            self._kernel.wake(task, token, True)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        self._kernel.point()
        if not self._set:
            task = self._kernel.running
            assert task is not None
            self._waiters.append((task, task.token))
            self._kernel.park(timeout)
        return self._set


class _Thread:
    def __init__(
        self,
        kernel: Kernel,
        target: Callable[..., object],
        name: str = "thread",
        daemon: bool | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        self._kernel = kernel
        self.name = name
        self._run = lambda: target(*args, **(kwargs or {}))
        self.task: Task | None = None

    def start(self) -> None:
        running = self._kernel.running
        assert running is not None
        self.task = running.process.start(self.name, self._run)
        self.task.thread = self
        self._kernel.point()

    def is_alive(self) -> bool:
        return self.task is not None and not self.task.done

    def join(self, timeout: float | None = None) -> None:
        running = self._kernel.running
        if self.task is not None and running is not None and not self.task.done:
            self.task.joiners.append((running, running.token))
            self._kernel.park(timeout)


class _SimpleQueue:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._items: list[Any] = []
        self._waiters: list[tuple[Task, int]] = []

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiters:
            self._kernel.wake(*self._waiters.pop(0), True)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self._items and block:
            task = self._kernel.running
            assert task is not None
            me = (task, task.token)
            self._waiters.append(me)
            self._kernel.park(timeout)
            if me in self._waiters:
                self._waiters.remove(me)
        if not self._items:
            raise queue.Empty
        return self._items.pop(0)

    def empty(self) -> bool:
        return not self._items


class _Findings(logging.Handler):
    """What the product logs as a fault of its own is a finding."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(logging.DEBUG)
        self._kernel = kernel

    def emit(self, record: logging.LogRecord) -> None:
        if self._kernel.closing:
            return
        if record.exc_info or record.levelno >= logging.ERROR:
            text = logging.Formatter().format(record)
            self._kernel.fail(Violation("raised", f"a fault inside Maru was logged: {text}"))


class Shims:
    """The replacements, as module-like objects."""

    def __init__(self, kernel: Kernel, network: Network, pool: SimPool) -> None:
        self._kernel = kernel
        self._pool = pool

        def current() -> Process:
            task = kernel.running
            assert task is not None
            return task.process

        def thread(*args: Any, **kwargs: Any) -> _Thread:
            kwargs.setdefault("target", None)
            return _Thread(kernel, *args, **kwargs)

        def this_thread() -> object:
            return kernel.running and kernel.running.thread

        def monotonic() -> float:
            kernel.point()
            return current().clock() if kernel.running is not None else kernel.now

        def sleep(seconds: float) -> None:
            kernel.park(seconds)

        def context() -> SimContext:
            return SimContext(network, current())

        def zmq_poll(sockets: list[tuple[SimSocket, int]], timeout: int = -1) -> list[tuple[SimSocket, int]]:
            return poll(kernel, sockets, timeout)

        self.threading = types.SimpleNamespace(
            Lock=lambda: _Lock(kernel),
            RLock=lambda: _Lock(kernel, recursive=True),
            Condition=lambda lock=None: _Condition(kernel, lock),
            Event=lambda: _Event(kernel),
            Thread=thread,
            current_thread=this_thread,
        )
        self.time = types.SimpleNamespace(monotonic=monotonic, sleep=sleep, time=lambda: 1.8e9 + kernel.now)
        self.queue = types.SimpleNamespace(SimpleQueue=lambda: _SimpleQueue(kernel), Empty=queue.Empty)
        self.secrets = types.SimpleNamespace(token_bytes=lambda n: kernel.random.randbytes(n))
        # Constants and exceptions are the library's own.
        self.zmq = types.SimpleNamespace(**vars(zmq))
        self.zmq.Context, self.zmq.Socket, self.zmq.zmq_poll = context, SimSocket, zmq_poll
        self.identity = types.SimpleNamespace(current=lambda: identity_of(current()))
        self.memory = types.SimpleNamespace(attach=self._attach)
        self.ctypes = types.SimpleNamespace(memmove=self._copy, c_char=ctypes.c_char, string_at=ctypes.string_at)

    def _attach(self, uri: object, expected_uuid: bytes | None = None) -> SimMemory:
        self._kernel.point()
        return SimMemory(self._pool, uri, self._kernel)

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        """In pieces, with others running in between."""
        kernel = self._kernel
        random = kernel.random
        to_pool = self._pool.base <= target < self._pool.base + len(self._pool.data)
        done = 0
        while done < nbytes:
            piece = min(nbytes - done, 8 * random.randint(1, nbytes // 8 + 1))
            kernel.point()
            task = kernel.running
            if to_pool and task is not None and task.process.trap is not None:
                left, spring = task.process.trap
                task.process.trap = (left - 1, spring) if left else None
                if not left:
                    spring()
            if task is not None and task.may_be_slow and random.random() < kernel.slow_share:
                # Memory that is slow for a while.
                kernel.dawdle(random.random() * random.choice((0.05, 1.0)) * kernel.slow_s)
            ctypes.memmove(target + done, source + done, piece)
            done += piece
        kernel.point()


def identity_of(process: Process) -> ProcessIdentity:
    """What a client says of itself: the pid is the number in the process's name."""
    number = int(process.name.rpartition("#")[2])
    return ProcessIdentity(pid=number, pid_start=number, pid_ns="sim", boot_id="sim", host="sim")


@contextlib.contextmanager
def installed(kernel: Kernel, network: Network, pool: SimPool) -> Iterator[Shims]:
    """Simulate the client modules within the block."""
    shims = Shims(kernel, network, pool)
    conversation, sockets, errands = maru_core.conversation, maru_core.sockets, maru_core.errands
    store, lives, transfers = maru_core.store, maru_core.lives, maru_core.transfers
    locations, mover = maru_core.locations, maru_core.mover
    reach, reading, housekeeping = maru_core.reach, maru_core.reading, maru_core.housekeeping
    below = (transfers, locations, mover, reach, reading, housekeeping)
    places: list[tuple[Any, str, Any]] = []
    for module in (conversation, sockets, errands, store, lives, *below):
        for name in ("threading", "time", "zmq", "queue", "secrets"):
            if hasattr(module, name):
                places.append((module, name, getattr(shims, name)))
    places += [
        (conversation, "ProcessIdentity", shims.identity),
        (conversation, "_open_conversations", weakref.WeakSet()),
        (reach, "PoolMemory", shims.memory),
        (mover, "ctypes", shims.ctypes),
        (mover, "native_available", False),
    ]
    logger = logging.getLogger("maru")
    handler = _Findings(kernel)
    before = logger.level, logger.propagate
    with contextlib.ExitStack() as stack:
        for module, name, value in places:
            stack.enter_context(mock.patch.object(module, name, value))
        stack.enter_context(mock.patch.dict("os.environ"))
        for name in [key for key in os.environ if key.startswith("MARU_")]:
            del os.environ[name]
        logger.addHandler(handler)
        logger.setLevel(logging.WARNING)
        logger.propagate = False
        try:
            yield shims
        finally:
            logger.removeHandler(handler)
            logger.level, logger.propagate = before
