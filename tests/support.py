"""What tests of several packages share: real server processes, namespaces, buffers. No fakes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from forked import ForkedProcess, await_taken
from maru_core.mover import Fragments
from maru_core.namespace import Namespace
from maru_core.session import Session

NAMESPACE = Namespace(
    engine="test", hash_scheme="random", model="toy", weights="w0", adapter="", kv_dtype="bfloat16", page_tokens=16,
    layers="0:4", heads="kv4x16", layout="page_first", tensor_parallel=1, pipeline_parallel=1, context_parallel=1,
    data_parallel=1, draft="",
)  # fmt: skip


def namespace(**changes: object) -> Namespace:
    return msgspec.structs.replace(NAMESPACE, **changes)


def await_condition(condition: Callable[[], object], what: str, timeout_s: float = 180.0) -> None:
    """Wait until ``condition()`` is true; fail with ``what`` if it does not become so."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain: {what}"
        time.sleep(0.01)


@contextlib.contextmanager
def impatient(*sessions: Session, timeout_s: float = 0.2) -> Iterator[None]:
    """Calls of these sessions end soon, while nobody answers; before and after that a slow machine has its time."""
    before = [session.timeout_s for session in sessions]
    for session in sessions:
        session.timeout_s = timeout_s
    try:
        yield
    finally:
        for session, was in zip(sessions, before, strict=True):
            session.timeout_s = was


def hashes(count: int, seed: int = 0) -> bytes:
    """Packed random page hashes of one chain."""
    return np.random.default_rng(seed).bytes(32 * count)


_in_use: list[np.ndarray] = []


@dataclass
class Pages:
    """``count`` engine pages of ``len(sizes)`` fragments in one buffer, fragment by fragment, like K and V apart."""

    count: int
    sizes: tuple[int, ...]
    seed: int | None = None
    data: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        self.data = [
            np.frombuffer(bytearray(random.bytes(self.count * size)), np.uint8).reshape(self.count, size)
            if self.seed is not None
            else np.zeros((self.count, size), np.uint8)
            for size in self.sizes
        ]

    @property
    def fragments(self) -> Fragments:
        # Fragments are addresses: the buffers must outlive them, also where a test keeps only the fragments.
        _in_use.extend(self.data)
        addresses = np.stack(
            [
                part.ctypes.data + np.arange(self.count, dtype=np.uint64) * size
                for part, size in zip(self.data, self.sizes, strict=True)
            ],
            axis=1,
        )
        return Fragments(np.ascontiguousarray(addresses, np.uint64), np.array(self.sizes, np.uint64))

    def page(self, index: int) -> bytes:
        return b"".join(part[index].tobytes() for part in self.data)

    def same(self, other: Pages) -> np.ndarray:
        """For each page, whether all its bytes equal the other's."""
        return np.array([self.page(i) == other.page(i) for i in range(self.count)])


def damaged(chance: random.Random, data: bytes, head: int | None = None) -> bytes:
    """The bytes with one to three of them changed, left out or put in; with ``head`` mostly among the first so many."""
    found = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        at = chance.randrange(len(found) if head is None or chance.random() > 0.7 else min(head, len(found)))
        what = chance.random()
        if what < 0.65:
            found[at] = chance.choice([chance.randrange(256), 0, 0x7F, 0x80, 0xC4, 0xCC, 0xCF, 0xFF])
        elif what < 0.85:
            del found[at]
        else:
            found.insert(at, chance.randrange(256))
    return bytes(found)


class ServerProcess:
    """A real ``python -m maru_server``. ``stop``, ``kill`` and ``start`` again on the same pool and endpoint.

    Args:
        forked: off a process that has everything imported already (:mod:`forked`), and not by a Python that starts.
        host: process in whose network it runs (:mod:`forked`); None: in ours.
    """

    def __init__(
        self,
        directory: Path,
        *options: str,
        pool: str | None = None,
        bind: str | None = None,
        size: str = "64M",
        forked: bool = True,
        host: int | None = None,
    ) -> None:
        self.pool = pool or f"shm://maru-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.endpoint = bind or f"ipc://{directory}/{uuid.uuid4().hex[:8]}.sock"
        self.size = size
        self.options = options
        self.process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self.log = directory / f"server-{uuid.uuid4().hex[:8]}.log"
        #: What Python is told to run.
        self.program: tuple[str, ...] = ("-m", "maru_server")
        self._forked = forked
        self._host = host
        #: What it said when it was ready.
        self.ready: dict[str, str] = {}
        self._ready = -1

    def start(self, *more: str) -> ServerProcess:
        return self.begin(*more).await_ready()

    def begin(self, *more: str) -> ServerProcess:
        """Start it without waiting until it serves (a standby may not for long)."""
        read_end, write_end = os.pipe()
        size = ("--size", self.size) if self.size else ()
        arguments = ("--pool", self.pool, *size, "--bind", self.endpoint, *self.options, *more)
        if self._forked:
            self.process = ForkedProcess(self.program, arguments, self.log, ready_fd=write_end, host=self._host)
        else:
            with self.log.open("ab") as output:
                self.process = subprocess.Popen(
                    [sys.executable, *self.program, *arguments, "--ready-fd", str(write_end)],
                    stdout=output, stderr=output, pass_fds=[write_end],
                )  # fmt: skip
            os.close(write_end)
        self._forget_ready()
        self._ready = read_end
        return self

    @property
    def serves(self) -> bool:
        """Whether it has said that it does (or has ended), and :meth:`await_ready` has not been called for that yet."""
        return bool(select.select([self._ready], [], [], 0)[0])

    def await_ready(self, timeout_s: float = 180) -> ServerProcess:
        try:
            assert select.select([self._ready], [], [], timeout_s)[0], (
                f"maru-server was not ready in {timeout_s:g} s: {self.log.read_text()}"
            )
            line = os.read(self._ready, 65536)
        finally:
            self._forget_ready()
        assert line, f"maru-server ended at its start: {self.log.read_text()}"
        self.ready = json.loads(line)
        assert self.ready["endpoint"] == self.endpoint
        return self

    def _forget_ready(self) -> None:
        if self._ready >= 0:
            os.close(self._ready)
            self._ready = -1

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        await_taken(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._reap()

    def stop(self) -> int:
        self.signal(signal.SIGTERM)
        return self._reap()

    def _reap(self) -> int:
        assert self.process is not None
        code = self.process.wait(180)
        self.process = None
        return code

    def remove(self) -> None:
        self._forget_ready()
        if self.process is not None:
            self.signal(signal.SIGCONT)
            self.kill()
        if self.pool.startswith("shm://"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"/dev/shm/{self.pool.removeprefix('shm://').split('?')[0]}")


@contextlib.contextmanager
def running_server(directory: Path, *options: str, **named: Any) -> Iterator[ServerProcess]:
    server = ServerProcess(directory, *options, **named)
    try:
        yield server.start()
    finally:
        server.remove()
