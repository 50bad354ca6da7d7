"""One process, one thread, one seed: simulated time, processes and threads of the simulation.

A simulated thread is a greenlet. Whatever would block it parks it instead; the kernel takes the next event by simulated time
and wakes whom it concerns. A simulated process is a set of threads with a clock of its own, which can be killed at any
switch point (its threads are never woken again), or stopped and woken later. Nothing here knows Maru.
"""

from __future__ import annotations

import collections
import hashlib
import heapq
import itertools
import random
import traceback
from collections.abc import Callable
from typing import Any, Final

import greenlet

#: Events that a failing run shows.
TAIL: Final = 60
_NEVER: Final = 1 << 62


class Violation(AssertionError):  # noqa: N818
    """What must never happen has happened. ``kind`` says which promise was broken."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"[{kind}] {message}")
        self.kind = kind


class Process:
    """A set of threads that live and die together, and their clock.

    ``rate`` is how fast its clock goes, ``doom`` at how many further switch points it is killed, ``halt`` at how many it is
    stopped, and for how long (seconds of true time).
    """

    def __init__(self, kernel: Kernel, name: str, rate: float = 1.0) -> None:
        self.kernel = kernel
        self.name = name
        self.rate = rate
        self._base = kernel.random.uniform(10, 1e5)
        self.alive = True
        self.stopped = False
        self.doom = _NEVER
        self.halt = _NEVER
        self.halt_s = 0.0
        self.trap: tuple[int, Callable[[], None]] | None = (
            None  # pieces of copies into the pool until this happens in one
        )
        self.stopped_s = 0.0  # all stops together, true time
        self.stops: list[float] = []
        self.at_end: list[Callable[[], None]] = []
        self._deferred: list[tuple[Task, int, Any]] = []

    def clock(self) -> float:
        """Its monotonic time, seconds."""
        return self._base + self.kernel.now * self.rate

    def start(self, name: str, target: Callable[[], object]) -> Task:
        task = Task(self, name, target)
        self.kernel.wake(task, task.token, None)
        return task

    def kill(self) -> None:
        """Its threads run no more. From its own thread: does not return."""
        if not self.alive:
            return
        self.alive = False
        self.kernel.log(self, "killed")
        for action in self.at_end:
            action()
        if self.kernel.running is not None and self.kernel.running.process is self:
            self.kernel.leave()

    def stop(self, seconds: float) -> None:
        """No thread of it runs for so long. From its own thread: returns when it is woken."""
        if not self.alive or self.stopped or seconds <= 0:
            return
        self.stopped = True
        self.kernel.log(self, f"stopped for {seconds:.3f} s")
        self.kernel.after(seconds, lambda: self._go_on(seconds))
        task = self.kernel.running
        if task is not None and task.process is self:
            self._deferred.append((task, task.token, None))
            self.kernel.leave()

    def _go_on(self, seconds: float) -> None:
        self.stopped = False
        self.stopped_s += seconds
        self.stops.append(seconds)
        if not self.alive:
            return
        self.kernel.log(self, "woken")
        deferred, self._deferred = self._deferred, []
        for task, token, value in deferred:
            self.kernel.wake(task, token, value)

    def defer(self, task: Task, token: int, value: Any) -> None:
        self._deferred.append((task, token, value))


class Task:
    """A simulated thread."""

    def __init__(self, process: Process, name: str, target: Callable[[], object]) -> None:
        self.process = process
        self.name = name
        self.token = 0  # a wake-up is for one parking: others find another number
        self.done = False
        self.thread: object = self  # what current_thread() gives
        self.may_be_slow = False  # one piece of the present copy may take long
        self.slow_s = 0.0  # time that its copies took longer than usual, on the process's clock
        self.joiners: list[tuple[Task, int]] = []
        self._target = target
        self.greenlet = greenlet.greenlet(self._run)
        process.kernel.tasks.append(self)

    def _run(self, _: object = None) -> None:
        kernel = self.process.kernel
        try:
            self._target()
        except greenlet.GreenletExit:
            return
        except Violation as violation:
            kernel.fail(violation)
        except Exception:
            where = f"{self.process.name}/{self.name}"
            kernel.fail(Violation("raised", f"{where} raised:\n{traceback.format_exc()}"))
        self.done = True
        for task, token in self.joiners:
            kernel.wake(task, token, True)


class Kernel:
    """See the module."""

    def __init__(self, seed: int, *, trace: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0.0
        self.steps = 0
        self.tasks: list[Task] = []  # kept: a greenlet that is collected would be woken to its end
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL)
        self.closing = False
        self.running: Task | None = None
        self.violation: Violation | None = None
        #: How likely a switch point lets others run, and for how long it pauses then, seconds (mean).
        self.switch_share = 0.25
        self.pause_s = 100e-6
        self.slow_share = 0.001  # pieces of copies that take up to ``slow_s`` seconds, one in a call
        self.slow_s = 1.0
        self._trace = trace
        self._digest = hashlib.blake2b(digest_size=16)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._hub = greenlet.getcurrent()

    # ------------------------------------------------------------ what happened

    @property
    def digest(self) -> str:
        """Stands for everything that was logged: equal for equal runs."""
        return self._digest.hexdigest()

    def log(self, who: Process | None, what: str) -> None:
        line = f"{self.now:12.6f} {who.name if who is not None else '-':10s} {what}"
        self._digest.update(line.encode())
        self.tail.append(line)
        if self._trace is not None:
            self._trace(line)

    def fail(self, violation: Violation) -> None:
        """End the run. From a task: does not return."""
        if self.violation is None and not self.closing:
            self.violation = violation
        if self.running is not None and greenlet.getcurrent() is not self._hub:
            self.leave()

    # ------------------------------------------------------------ time

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + max(0.0, seconds), next(self._order), action))

    def soon(self) -> float:
        """A short random while, seconds."""
        return self.random.expovariate(1.0) * self.pause_s

    def run(self, until: Callable[[], bool]) -> None:
        """Let things happen until ``until()``, or a violation, or the end of all events."""
        while self._events and self.violation is None and not until():
            when, _, action = heapq.heappop(self._events)
            self.now = max(self.now, when)
            action()

    # ------------------------------------------------------------ threads

    def park(self, seconds: float | None = None) -> Any:
        """Wait for :meth:`wake` with the present token, at most ``seconds`` of the process's own time; None is time out."""
        task = self.running
        assert task is not None, "the hub cannot wait"
        if self.closing:
            raise greenlet.GreenletExit
        token = task.token
        if seconds is not None:
            self.after(seconds / task.process.rate, lambda: self._resume(task, token, None))
        return self.leave()

    def leave(self) -> Any:
        if self.closing:
            raise greenlet.GreenletExit
        return self._hub.switch()

    def wake(self, task: Task, token: int, value: Any) -> None:
        """Have a parked task go on soon, if it still waits for just that."""
        self.after(self.soon(), lambda: self._resume(task, token, value))

    def _resume(self, task: Task, token: int, value: Any) -> None:
        process = task.process
        if task.token != token or task.done or not process.alive:
            return
        if process.stopped:
            process.defer(task, token, value)
            return
        task.token += 1
        self.steps += 1
        self.running = task
        try:
            task.greenlet.switch(value)
        finally:
            self.running = None

    def point(self, points: int = 1) -> None:
        """A switch point of the running task: others may run here, and its process may be killed or stopped here.

        Args:
            points: how many this one stands for.
        """
        task = self.running
        if task is None:
            return
        if self.closing:
            raise greenlet.GreenletExit
        process = task.process
        if process.doom != _NEVER:
            process.doom -= points
            if process.doom <= 0:
                process.kill()
        if process.halt != _NEVER:
            process.halt -= points
            if process.halt <= 0:
                process.halt = _NEVER
                process.stop(process.halt_s)
        if self.random.random() < self.switch_share:
            self.park_for(self.soon())

    def park_for(self, seconds: float) -> None:
        """Pause for true seconds."""
        task = self.running
        assert task is not None
        token = task.token
        self.after(seconds, lambda: self._resume(task, token, None))
        self.leave()

    def dawdle(self, seconds: float) -> None:
        """The running task's copy takes so much longer, true time; once in a call."""
        task = self.running
        if task is not None and task.may_be_slow:
            task.may_be_slow = False
            task.slow_s += seconds * task.process.rate
            self.park_for(seconds)

    def end(self) -> None:
        """Let go of all threads, wherever they are; what they do on their way out has no effect."""
        self.closing = True
        for task in self.tasks:
            if not task.greenlet.dead:
                self.running = task
                task.greenlet.throw(greenlet.GreenletExit)
        self.running = None
        self.tasks.clear()
        self._events.clear()
