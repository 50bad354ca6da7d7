"""One life of the metadata server: the real state over the shared memory, and a loop like the service's.

It can be stopped or killed between any two messages, between handling and answering, and between any two words that it
stores into the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from sim_checker import Checker, Key, Server
from sim_kernel import Kernel, Process
from sim_network import Inbox, Network
from sim_shims import SimPool

from maru_core import protocol
from maru_core.pool.format import COMMITTED
from maru_core.protocol import Committed, Goodbye, Reserved, Stats, Welcome
from maru_server.config import StateConfig
from maru_server.directory import PoolDirectory
from maru_server.state import ServerState

#: The time of day at the begin of a run, seconds.
WALL_S = 1_800_000_000.0
_PIECE = 64  # bytes of a long text that are stored at once

CONFIG = StateConfig(
    heartbeat_s=0.4,
    lease_s=1.5,
    reservation_s=4.0,
    quarantine_s=6.0,
    restart_quarantine_s=6.0,
    incomplete_s=2.0,
    growth_s=0.2,
)


class SimDirectory(PoolDirectory):
    """Stores word by word where the kernel wants to cut in, and tells the checker what is freed."""

    kernel: Kernel
    checker: Checker | None = None
    clock: Callable[[], float]

    def _store(self, target: npt.NDArray[Any], index: Any, values: Any) -> None:
        kernel = self.kernel
        task = kernel.running
        rows = np.atleast_1d(index)
        if target.dtype.kind == "V":
            words = -(-target.dtype.itemsize // _PIECE)
        else:
            words = len(rows) * (target.shape[1] if target.ndim == 2 else 1)
        process = None if task is None else task.process
        if process is None or words == 0:
            super()._store(target, index, values)
            return
        # Where to cut: at the word where the server dies or stops, or now and then anywhere.
        if min(process.doom, process.halt) <= words:
            cut = min(process.doom, process.halt) - 1
        elif kernel.random.random() < 0.1:
            cut = kernel.random.randrange(words)
        else:
            process.doom -= words
            process.halt -= words
            super()._store(target, index, values)
            return
        words_of(target, rows, values, 0, cut, super()._store)
        kernel.point(max(1, cut + 1))
        words_of(target, rows, values, cut, words, super()._store)
        if words > cut + 1:
            kernel.point(words - cut - 1)

    def free(self, slots: Any) -> None:
        if self.checker is None:
            super().free(slots)
            return
        numbers = np.asarray(slots).tolist()
        self.checker.freed(numbers, self.clock())
        super().free(slots)
        self.checker.free(numbers)


def words_of(
    target: npt.NDArray[Any], rows: npt.NDArray[Any], values: Any, first: int, last: int, store: Callable[..., None]
) -> None:
    """Store the words ``[first, last)`` of a store, in order."""
    if first >= last:
        return
    if target.dtype.kind == "V":
        (row,) = rows.tolist()
        new, old = bytes(values), target[row].tobytes()
        end = min(last * _PIECE, len(new))
        store(target, row, np.void(new[:end] + old[end:]))
        return
    every = np.broadcast_to(values, (len(rows), *target.shape[1:]))
    if target.ndim == 1:
        store(target, rows[first:last], every[first:last])
        return
    width = target.shape[1]
    for word in range(first, last):
        target[rows[word // width], word % width] = every[word // width, word % width]


class SimServer(Server):
    """One life. ``gone`` tells whether the process of that pid has ended, as far as a server can know."""

    def __init__(
        self,
        kernel: Kernel,
        network: Network,
        pool: SimPool,
        checker: Checker,
        gone: Callable[[int], bool],
        config: StateConfig = CONFIG,
    ) -> None:
        pool.incarnation += 1
        self.incarnation = pool.incarnation
        self.kernel, self.network, self.pool, self.checker = kernel, network, pool, checker
        self.data = pool.data
        self.config = config
        self.process = Process(kernel, f"server#{self.incarnation}", rate=kernel.random.uniform(0.98, 1.02))
        self.inbox = Inbox(self.process)
        self.up = False
        self.dies_after = 0  # reserves and commits that are answered, whose books are not kept any more
        self.was_up = False  # the rebuild has come to its end
        self.handled = 0
        self.heard: dict[int, tuple[float, float]] = {}  # session -> (time, stopped time) of its last message
        self._gone = gone
        self.process.at_end.append(self._down)
        self.process.start("loop", self._run)

    def _down(self) -> None:
        self.up = False
        self.network.serve(None)

    def holds(self, key: Key, slot: int) -> bool:
        number = next((n for n, record in self.checker.namespaces.items() if record == key.namespace), None)
        tree = self.state.books.trees.get(number) if number is not None else None
        if tree is None:
            return False
        row = tree.row(key.page)
        table = tree.tables.get(self.directory.components().get(key.component, -1))
        if row is None or table is None or key.shard not in table.slots:
            return False
        return int(table.slots[key.shard][row]) == slot + 1 and int(self.directory.states[slot]) == COMMITTED

    # ------------------------------------------------------------ the loop

    def _boot(self) -> None:
        directory = SimDirectory(self.pool.geometry, self.pool.meta)
        directory.kernel, directory.clock = self.kernel, self.process.clock
        self.directory = directory
        now = self.process.clock()
        self.state = ServerState(
            directory,
            incarnation=self.incarnation,
            pool_uri="shm://sim",
            config=self.config,
            now=now,
            wall_offset=WALL_S + self.kernel.now - now,
        )
        self._ready = 2
        self.state.extents_ready(self._ready, now)
        self.kernel.log(self.process, f"up, {self.state.stats()['objects']} objects")
        self.checker.restarted(self)
        directory.checker = self.checker
        self.up = self.was_up = True
        self.network.serve(self.inbox)

    def _run(self) -> None:
        self._boot()
        clock, random = self.process.clock, self.kernel.random
        tick_at = clock()
        while True:
            if clock() >= tick_at:
                self._tick()
                tick_at = clock() + random.uniform(0.02, 0.4)
            item = self.inbox.take(tick_at - clock())
            if item is not None:
                self._serve(*item)

    def _tick(self) -> None:
        state, clock = self.state, self.process.clock
        self.checker.doing = "tick"
        state.tick(clock())
        self.checker.orphans()
        self._check_silent()
        self.kernel.point()
        wanted = state.wanted_extents(clock())
        if wanted > self._ready and self.kernel.random.random() < 0.5:
            self._ready += 1
            state.extents_ready(self._ready, clock())
        for number, identity in state.silent_sessions():
            if self._gone(identity.pid):
                self.kernel.log(self.process, f"found client {identity.pid} dead")
                self.checker.session_over(number)
                state.process_gone(number, clock())
        self.kernel.point()

    def _serve(self, socket: Any, data: bytes) -> None:
        message = protocol.decode_request(data)
        self.checker.about_to(message)
        heard = self.kernel.now, self._stalled_s()
        packed = self.state.answer(data, self.process.clock())
        reply = self.state.handle(message, self.process.clock()) if packed is None else protocol.decode_reply(packed)
        session = reply.session if isinstance(reply, Welcome) else getattr(message, "session", 0)
        self.handled += 1
        if self.state.books.sessions.get(session) is not None and not isinstance(message, Stats):
            self.heard[session] = heard
        name, rid = type(message).__name__, getattr(message, "rid", 0)
        said = reply.code if isinstance(reply, protocol.Error) else type(reply).__name__
        self.kernel.log(self.process, f"{socket.process.name} {name} {rid} -> {said}")
        self.checker.answered(message, reply, self, self.process.clock())
        self.kernel.point()
        if reply is not None:
            self.checker.sent(reply)
            self.network.to_client(socket, protocol.encode(reply))
            if self.dies_after and isinstance(reply, Reserved | Committed):
                self.dies_after -= 1
                if not self.dies_after:
                    self.process.kill()
        self.kernel.point()
        self.state.finish()
        self.checker.orphans()
        if isinstance(message, Goodbye) or self.handled % 16 == 0:
            self.checker.audit(self)

    def _stalled_s(self) -> float:
        """How long it was stopped in all; stops of less than half a lease count as being awake."""
        return sum(stop for stop in self.process.stops if stop * self.process.rate > self.config.lease_s / 2)

    def _check_silent(self) -> None:
        """Nobody is taken for silent by a server that was itself not awake to hear him."""
        for session in self.state.books.sessions:
            at, stopped = self.heard.get(session.number, (None, 0.0))
            if session.silent and at is not None:
                awake = (self.kernel.now - at - (self._stalled_s() - stopped)) * self.process.rate
                if awake < self.config.lease_s * 0.95:
                    self.checker.fail(
                        "expired",
                        f"session {session.number} was heard {awake:.2f} s ago as far as the server was awake, "
                        f"and is taken for silent (lease {self.config.lease_s} s)",
                    )
