"""The simulated network: sockets of the kind that the session uses, and what happens to messages between them.

Worse than any real one: a message may be lost, late, doubled, or overtaken by a later one of the same socket, in both
directions; a connection may be reset with all that was under way; a message to a server that is away may wait in the socket
for the next server. How likely that is changes with the weather.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq
from sim_kernel import Kernel, Process, Task


@dataclass
class Weather:
    """Shares of messages that are lost, doubled, late (up to ``late_s`` seconds), and the usual delay (mean, seconds)."""

    lost: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    late_s: float = 1.5
    delay_s: float = 100e-6


class Network:
    """``server`` is the inbox of the server that is up, or None."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.weather = Weather()
        self.server: Inbox | None = None
        self.cut_off: set[str] = set()  # names of processes whose messages go nowhere
        self._waiting: list[tuple[SimSocket, int, bytes]] = []  # for a server that is away
        self._numbers = 0
        self.sockets: list[SimSocket] = []

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def serve(self, inbox: Inbox | None) -> None:
        """Another server is up, or none is."""
        self.server = inbox
        if inbox is not None:
            waiting, self._waiting = self._waiting, []
            for socket, link, data in waiting:
                if not socket.closed:
                    self._travel(lambda s=socket, n=link, d=data: self._arrive(s, n, d), socket)

    def reset(self, socket: SimSocket) -> None:
        """What is under way on this connection is lost."""
        socket.link += 1

    def to_server(self, socket: SimSocket, data: bytes) -> None:
        self._travel(lambda: self._arrive(socket, socket.link, data), socket, socket.link)

    def to_client(self, socket: SimSocket, data: bytes) -> None:
        self._travel(lambda: socket.put(data), socket, socket.link)

    def _travel(self, arrive: Callable[[], None], socket: SimSocket, link: int | None = None) -> None:
        random, weather = self.kernel.random, self.weather
        copies = 1
        if weather.lost and random.random() < weather.lost:
            copies = 0
        elif weather.doubled and random.random() < weather.doubled:
            copies = 2
        for _ in range(copies):
            delay = random.expovariate(1.0) * weather.delay_s
            if weather.late and random.random() < weather.late:
                delay = random.uniform(0, weather.late_s)

            def go() -> None:
                if (link is None or link == socket.link) and socket.process.name not in self.cut_off:
                    arrive()

            self.kernel.after(delay, go)

    def _arrive(self, socket: SimSocket, link: int, data: bytes) -> None:
        if self.server is not None:
            self.server.put(socket, data)
        elif not socket.closed:
            self._waiting.append((socket, link, data))


class Inbox:
    """Messages that have reached a server."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.messages: collections.deque[tuple[SimSocket, bytes]] = collections.deque()
        self._waiter: tuple[Task, int] | None = None

    def put(self, socket: SimSocket, data: bytes) -> None:
        self.messages.append((socket, data))
        if self._waiter is not None:
            task, token = self._waiter
            self._waiter = None
            self.process.kernel.wake(task, token, True)

    def take(self, seconds: float) -> tuple[SimSocket, bytes] | None:
        """The next message, waited for as long as that on the server's clock."""
        kernel = self.process.kernel
        if not self.messages:
            task = kernel.running
            assert task is not None
            self._waiter = (task, task.token)
            kernel.park(max(0.0, seconds))
            self._waiter = None
        return self.messages.popleft() if self.messages else None


class SimSocket:
    """What :mod:`maru_core.sockets` uses of a DEALER socket."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._kernel = network.kernel
        self.process = process
        self.number = network.number()
        self.link = 0
        self.closed = False
        self.inbox: collections.deque[bytes] = collections.deque()
        self.waiter: tuple[Task, int] | None = None
        network.sockets.append(self)

    def __setattr__(self, name: str, value: Any) -> None:
        # Options of the library (linger, maxmsgsize, keys ...) mean nothing here.
        object.__setattr__(self, name, value)

    def setsockopt(self, option: int, value: Any) -> None:
        pass

    def connect(self, endpoint: str) -> None:
        self._kernel.point()

    def put(self, data: bytes) -> None:
        if self.closed:
            return
        self.inbox.append(data)
        if self.waiter is not None:
            task, token = self.waiter
            self.waiter = None
            self._kernel.wake(task, token, True)

    def send(self, data: bytes, flags: int = 0) -> None:
        self._check()
        self._kernel.point()
        self._network.to_server(self, bytes(data))

    def recv(self, flags: int = 0) -> bytes:
        self._check()
        self._kernel.point()
        if not self.inbox:
            raise zmq.Again
        return self.inbox.popleft()

    def close(self, linger: int | None = None) -> None:
        self._kernel.point()
        if not self.closed:
            self.closed = True
            # What has not left yet may leave or not.
            if not linger and self._kernel.random.random() < 0.5:
                self._network.reset(self)

    def _check(self) -> None:
        if self.closed:
            raise zmq.ZMQError(zmq.ENOTSOCK)


def poll(kernel: Kernel, sockets: list[tuple[SimSocket, int]], wait_ms: int) -> list[tuple[SimSocket, int]]:
    """Wait until one of the sockets has a message, or the time is over; those that have one."""
    for socket, _ in sockets:
        socket._check()
    kernel.point()
    if not any(socket.inbox for socket, _ in sockets):
        task = kernel.running
        assert task is not None
        for socket, _ in sockets:
            socket.waiter = (task, task.token)
        kernel.park(None if wait_ms < 0 else wait_ms / 1000)
        for socket, _ in sockets:
            socket.waiter = None
    return [(socket, events) for socket, events in sockets if socket.inbox]


class SimContext:
    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process
        self.closed = False

    def socket(self, kind: int) -> SimSocket:
        if self.closed:
            raise zmq.ZMQError(zmq.ETERM)
        return SimSocket(self._network, self._process)

    def term(self) -> None:
        self.closed = True

    def destroy(self, linger: int | None = None) -> None:
        self.closed = True
