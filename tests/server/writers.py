"""A writer process for the kill tests: reserves, copies, commits, and says at every step where it is.

What a page holds follows from its hash, so that anyone can say whether its bytes are right.
"""

from __future__ import annotations

import ctypes
import threading
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt

from maru_core import protocol as p
from maru_core.errors import MaruError, ServerUnavailableError
from maru_core.pool import PoolMemory, PoolView, parse_pool_uri
from maru_core.session import Session
from tests.support import await_condition, hashes, namespace

PAGE_BYTES = 3000
STEPS = ("start", "reserved", "half", "copied", "committed")


def content(key: bytes) -> bytes:
    """The bytes that the page of this hash must hold."""
    return (key * (PAGE_BYTES // len(key) + 1))[:PAGE_BYTES]


def write(memory: PoolMemory, offset: int, key: bytes) -> None:
    ctypes.memmove(memory.address_of(offset), content(key), PAGE_BYTES)


def keys_of(seed: int, batch: int, pages: int) -> bytes:
    return hashes(pages, seed=seed * 10_000 + batch)


def each(keys: bytes) -> list[bytes]:
    return [keys[i : i + 32] for i in range(0, len(keys), 32)]


def wrong_pages(session: Session, memory: PoolMemory, number: int, keys: bytes) -> list[str]:
    """What is not right with pages that must be there: missing, other bytes, or changed while they were read."""
    located = session.match(number, ["kv"], 0, keys, sparse=True)
    slots = np.frombuffer(located.slots, "<u4")
    offsets = np.frombuffer(located.offsets, "<u8")
    lengths = np.frombuffer(located.lengths, "<u8")
    valid: npt.NDArray[np.bool_]
    wrong = []
    read = [
        ctypes.string_at(memory.address_of(int(offset)), PAGE_BYTES) if slot != p.NO_SLOT else b""
        for slot, offset in zip(slots, offsets, strict=True)
    ]
    present = slots != p.NO_SLOT
    valid = np.zeros(len(slots), bool)
    generations = np.frombuffer(located.generations, "<u8")
    valid[present] = PoolView(memory).valid_each(slots[present], generations[present])
    for index, key in enumerate(each(keys)):
        if not present[index]:
            wrong.append(f"page {index} is gone")
        elif not valid[index]:
            wrong.append(f"page {index} changed while it was read")
        elif lengths[index] != PAGE_BYTES or read[index] != content(key):
            wrong.append(f"page {index} has wrong bytes")
    return wrong


def write_batches(pipe: Connection, endpoint: str, seed: int, batches: int, pages: int, wait: bool) -> None:
    """Store ``batches`` batches, each continuing the one before; the process's target.

    Sends ``(step, batch, detail)`` at every step; with ``wait`` goes on only when it is told to.
    """
    session = Session(endpoint, name=f"writer {seed}", timeout_s=60)
    welcome = session.connect()
    memory = PoolMemory.attach(parse_pool_uri(welcome.pool_uri), expected_uuid=welcome.pool_uuid)
    number = session.open_namespace(namespace().record())
    parent = p.ROOT

    def say(step: str, batch: int, detail: object = None) -> None:
        pipe.send((step, batch, detail))
        if wait:
            pipe.recv()

    for batch in range(batches):
        keys = keys_of(seed, batch, pages)
        say("start", batch)
        reserved = session.reserve(number, "kv", 0, 1, parent, keys, PAGE_BYTES)
        assert set(reserved.status) == {p.ReserveStatus.RESERVED}, list(reserved.status)
        say("reserved", batch, np.frombuffer(reserved.slots, "<u4").tolist())
        offsets = np.frombuffer(reserved.offsets, "<u8").tolist()
        for index, (offset, key) in enumerate(zip(offsets, each(keys), strict=True)):
            if index == pages // 2:
                say("half", batch)
            write(memory, offset, key)
        say("copied", batch)
        # A server that was away for a moment says nothing of the outcome; commit may be repeated.
        await_condition(lambda: session.connected, "the server is there")
        committed = session.commit(reserved.slots, reserved.generations)
        say("committed", batch, list(committed.status))
        parent = keys[-32:]
    session.close()
    pipe.send(("done", batches, None))


class Load:
    """A thread that stores batches through a server that may be killed at any moment, and notes what was acknowledged."""

    def __init__(self, endpoint: str, seed: int) -> None:
        self.seed = seed
        #: Told by who kills the server: until then a call that finds no answer only means that the machine is slow.
        self.killed = threading.Event()
        self.session = Session(endpoint, name=f"load {seed}", timeout_s=1)
        self.memory: PoolMemory | None = None
        self.acknowledged: list[bytes] = []
        self.batch = 0
        self.faults: list[BaseException] = []

    def start(self, batches: int, pages: int) -> threading.Thread:
        """Store up to ``batches`` batches in a thread, until the server is killed."""
        self.killed.clear()
        thread = threading.Thread(target=self._run, args=(batches, pages))
        thread.start()
        return thread

    def _run(self, batches: int, pages: int) -> None:
        end = self.batch + batches
        try:
            while self.batch < end:
                try:
                    self._store(end, pages)
                except ServerUnavailableError:
                    await_condition(lambda: self.session.connected or self.killed.is_set(), "the server answers")
                    if self.killed.is_set():
                        return
        except (MaruError, AssertionError) as fault:
            self.faults.append(fault)

    def _store(self, end: int, pages: int) -> None:
        welcome = self.session.connect()
        epoch = self.session.epoch
        if self.memory is None:
            self.memory = PoolMemory.attach(parse_pool_uri(welcome.pool_uri), expected_uuid=welcome.pool_uuid)
        number = self.session.open_namespace(namespace().record(), epoch=epoch)
        while self.batch < end:
            keys = keys_of(self.seed, self.batch, pages)
            self.batch += 1
            reserved = self.session.reserve(number, "kv", 0, 1, p.ROOT, keys, PAGE_BYTES, epoch=epoch)
            assert set(reserved.status) == {p.ReserveStatus.RESERVED}, list(reserved.status)
            for offset, key in zip(np.frombuffer(reserved.offsets, "<u8").tolist(), each(keys), strict=True):
                write(self.memory, offset, key)
            committed = self.session.commit(reserved.slots, reserved.generations, epoch=epoch)
            assert set(committed.status) == {p.CommitStatus.COMMITTED}, list(committed.status)
            self.acknowledged.append(keys)

    def close(self) -> None:
        self.session.close()
        if self.memory is not None:
            self.memory.close()
