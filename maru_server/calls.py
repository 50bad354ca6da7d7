"""Work that crosses between the service's loop and other threads, in both directions.

- :class:`Calls`: other threads (the web page, metrics) have a function run *in* the loop, between two messages, where the
  state may be looked at. The loop is woken for it; nobody waits for longer than asked.
- :class:`Deferred` and :class:`Worker`: a reply that takes long to work out (from a copy taken in the loop) is worked out
  *outside*, in one worker thread, and sent by the loop when it is there.

Both queues are bounded: what does not fit is refused at once, with an error that says so. Nothing that such a function
raises reaches the loop.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING, Any, Final, TypeVar

from maru_core.errors import ClosedError, ServerUnavailableError
from maru_core.protocol import Error, ErrorCode, Reply

if TYPE_CHECKING:
    from maru_server.pools import Pools
    from maru_server.state import ServerState

log = logging.getLogger("maru.server")

T = TypeVar("T")

#: Calls that may wait for the loop, and replies that may wait for the worker.
CALLS_MAX: Final = 64
DEFERRED_MAX: Final = 32


@dataclass(slots=True, frozen=True)
class Deferred:
    """What a handler of the state returns instead of a reply that would take the loop too long.

    ``work`` must touch nothing that the state goes on to change. Whoever drives a state without a service calls it."""

    rid: int
    work: Callable[[], Reply]


class Calls:
    """Functions on their way into the loop.

    Args:
        wake: makes the loop call :meth:`run` soon; from any thread.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._waiting: deque[tuple[Callable[[ServerState | Pools], Any], Future[Any]]] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self._running: int | None = None  # the thread that runs one at this moment

    def call(self, fn: Callable[[ServerState | Pools], T], timeout_s: float) -> T:
        """What ``fn(state)`` returns or raises, run in the loop.

        Raises:
            ServerUnavailableError: not run within ``timeout_s`` (it will not be run later, unless it runs at this moment),
                or too many wait.
            ClosedError: the service has ended, or ends before it is run.
        """
        if threading.get_ident() == self._running:
            raise RuntimeError("a call into the loop from the loop itself would wait for ever")
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise ClosedError("the service has ended: start it again")
            if len(self._waiting) >= CALLS_MAX:
                raise ServerUnavailableError(
                    f"{CALLS_MAX} calls wait for the server's loop already, as many as may: ask more rarely"
                )
            self._waiting.append((fn, future))
        self._wake()
        try:
            return future.result(timeout_s)
        except FutureTimeoutError:
            if future.done():  # it raised a TimeoutError of its own, or came at the last moment
                return future.result()
            future.cancel()
            raise ServerUnavailableError(
                f"the server's loop did not answer within {timeout_s:g} s: it is busy"
            ) from None
        except CancelledError:
            raise ClosedError("the service has ended: start it again") from None

    def run(self, state: ServerState | Pools) -> None:
        """In the loop: run what waits now."""
        for _ in range(len(self._waiting)):
            fn, future = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            self._running = threading.get_ident()
            try:
                result = fn(state)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            finally:
                self._running = None  # threads that come later may have the same number

    def close(self) -> None:
        """After the loop's end: whoever waits is told."""
        with self._lock:
            self._closed = True
        while self._waiting:
            self._waiting.popleft()[1].cancel()


class Worker:
    """Replies that are worked out outside the loop, one after another.

    Args:
        wake: makes the loop take what is :attr:`done` soon.
    """

    def __init__(self, incarnation: int, wake: Callable[[], None]) -> None:
        self._incarnation = incarnation
        self._wake = wake
        self._todo: Queue[tuple[bytes, Deferred] | None] = Queue(DEFERRED_MAX)
        self._thread: threading.Thread | None = None
        self._stopping = False
        #: (identity, reply) pairs that the loop may send.
        self.done: deque[tuple[bytes, Reply]] = deque()

    def defer(self, identity: bytes, rid: int, work: Callable[[], Reply]) -> Reply | None:
        """In the loop: have a reply worked out; an error reply if there is too much to do already."""
        try:
            self._todo.put_nowait((identity, Deferred(rid, work)))
        except Full:
            return Error(
                rid, self._incarnation, ErrorCode.LIMIT, f"{DEFERRED_MAX} such requests wait already: ask again later"
            )
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="maru-worker", daemon=True)
            self._thread.start()
        return None

    def close(self) -> None:
        """What waits is dropped; what is under way ends first."""
        self._stopping = True
        while True:
            try:
                self._todo.get_nowait()
            except Empty:
                break
        if self._thread is not None:
            self._todo.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while not self._stopping:
            item = self._todo.get()
            if item is None:
                return
            identity, deferred = item
            try:
                reply = deferred.work()
            except Exception:
                log.exception("a reply could not be worked out")
                reply = Error(
                    deferred.rid,
                    self._incarnation,
                    ErrorCode.INTERNAL,
                    "the server failed at this request: its log says how",
                )
            self.done.append((identity, reply))
            self._wake()
