"""Records what real processes' worth of code does to the memory of a pool: every store, flush, fence, read and check.

The recorder stands at seams that the code has anyway (the compiled helper, the one place where the directory stores, the
copy of the mover, the compare of the view), and knows by its address which host's mapping is meant: each host of a test
maps the pool for itself. Nothing of what is recorded is replaced: the real instructions run.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from maru_core.mover import CxlMover
from maru_core.pool import coherence, view
from maru_core.pool.backing import Backing, FileBacking
from maru_core.pool.format import BLOCK_BYTES
from maru_core.pool.memory import PoolMemory
from maru_core.pool.view import PoolView
from maru_server.directory import HASH_WORD, PARENT_WORD, PoolDirectory

LINE = 64


@dataclass(frozen=True)
class Event:
    host: str
    thread: int


@dataclass(frozen=True)
class Store(Event):
    offset: int
    data: bytes


@dataclass(frozen=True)
class Read(Event):
    """``data`` is what the real memory held. ``what`` is set where no other than that is right."""

    offset: int
    data: bytes
    what: str


@dataclass(frozen=True)
class Flush(Event):
    """Lines written back, and dropped if the instruction does that."""

    lines: np.ndarray
    drops: bool


@dataclass(frozen=True)
class Fence(Event):
    full: bool


@dataclass(frozen=True)
class Check(Event):
    """A look at generations, and what it found in the real memory."""

    slots: np.ndarray
    generations: np.ndarray
    good: np.ndarray


@dataclass(frozen=True)
class Committed(Event):
    """The server is about to publish these."""

    slots: np.ndarray
    generations: np.ndarray
    offsets: np.ndarray
    hashes: list[bytes]


@dataclass(frozen=True)
class Freed(Event):
    """The server is about to take these back."""

    hashes: list[bytes]


@dataclass(frozen=True)
class Note(Event):
    """What a client's call told the test: ``stored``, ``loaded`` or ``removed`` pages, by their hashes."""

    kind: str
    hashes: list[bytes]


def lines_of(offset: int, nbytes: int) -> np.ndarray:
    return np.arange(offset // LINE, (offset + nbytes - 1) // LINE + 1)


class Recorder:
    """Use :meth:`install` first, then map pools and work within :meth:`on`."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        #: What belongs into the slots of a page, by its hash.
        self.contents: dict[bytes, bytes] = {}
        #: Called in the middle of a copy to or from the pool: ``(host, to_pool)``, before its first byte.
        self.before_copy: Any = None
        self.geometry: Any = None
        self._ranges: list[tuple[int, int, int, str, Any]] = []
        self._masters: dict[str, PoolMemory] = {}
        self._shadow = np.empty(0, np.uint8)
        self._lock = threading.RLock()
        self._here = threading.local()

    # ------------------------------------------------------------ who

    @contextlib.contextmanager
    def on(self, host: str) -> Iterator[None]:
        """What this thread does it does on ``host``."""
        before = getattr(self._here, "host", None)
        self._here.host = host
        try:
            yield
        finally:
            self._here.host = before

    @property
    def host(self) -> str:
        host: str | None = getattr(self._here, "host", None)
        assert host is not None, "a thread touches the pool and no test has said on which host"
        return host

    def place(self, address: int) -> tuple[str, int] | None:
        """The host whose mapping this is, and the offset in the pool."""
        for start, end, offset, host, _ in self._ranges:
            if start <= address < end:
                return host, address - start + offset
        return None

    def add(self, kind: type[Event], host: str, *rest: Any) -> None:
        self.events.append(kind(host, threading.get_ident(), *rest))

    def note(self, kind: str, hashes: bytes, which: np.ndarray) -> None:
        packed = [hashes[32 * i : 32 * i + 32] for i in np.flatnonzero(which)]
        with self._lock:
            self.add(Note, self.host, kind, packed)

    # ------------------------------------------------------------ what

    def look(self, host: str) -> None:
        """Find what a server has stored into the tables since the last look."""
        memory = self._masters.get(host)
        if memory is None or memory.closed:
            return
        now = memory.meta
        differs = (now.view(np.uint64) != self._shadow.view(np.uint64)).reshape(-1, LINE // 8).any(axis=1)
        changed = np.flatnonzero(differs)
        for run in np.split(changed, np.flatnonzero(np.diff(changed) > 1) + 1) if len(changed) else ():
            part = slice(int(run[0]) * LINE, int(run[-1] + 1) * LINE)
            self.add(Store, host, part.start, now[part].tobytes())
            self._shadow[part] = now[part]

    def flush(self, instruction: str, addresses: Any, nbytes: int) -> None:
        with self._lock:
            found = [place for place in (self.place(int(address)) for address in addresses) if place is not None]
            if found and nbytes:
                host = found[0][0]
                self.look(host)
                lines = np.unique(np.concatenate([lines_of(offset, nbytes) for _, offset in found]))
                self.add(Flush, host, lines, instruction != "clwb")

    def fence(self, full: bool) -> None:
        with self._lock:
            self.look(self.host)
            self.add(Fence, self.host, full)

    # ------------------------------------------------------------ seams

    def install(self, patch: pytest.MonkeyPatch) -> None:
        recorder = self
        real_map, real_read = Backing.map, FileBacking.read

        def map_(backing: Backing, offset: int, length: int, *, writable: bool) -> Any:
            array = real_map(backing, offset, length, writable=writable)
            start = int(array.ctypes.data)
            # Kept, so that no other mapping gets this address while the trace grows.
            recorder._ranges.insert(0, (start, start + length, offset, recorder.host, array))
            return array

        def read(backing: FileBacking, offset: int, length: int) -> bytes:
            data = real_read(backing, offset, length)
            with recorder._lock:
                if data:
                    recorder.add(Read, recorder.host, offset, data, "the superblock or owner block")
            return data

        patch.setattr(Backing, "map", map_)
        patch.setattr(FileBacking, "read", read)
        patch.setattr(coherence, "_coherence", _Cpu(self, coherence._coherence))
        self._install_memory(patch)
        self._install_directory(patch)
        self._install_copies(patch)

    def _install_memory(self, patch: pytest.MonkeyPatch) -> None:
        recorder = self
        real_init = PoolMemory.__init__

        def init(memory: PoolMemory, uri: Any, geometry: Any, meta: Any, data: Any, backing: Any) -> None:
            real_init(memory, uri, geometry, meta, data, backing)
            recorder.geometry = geometry
            if backing is not None:
                if not len(recorder._shadow):
                    recorder._shadow = np.zeros(geometry.off_data, np.uint8)
                recorder._masters[recorder.host] = memory

        patch.setattr(PoolMemory, "__init__", init)
        for name in ("bump_incarnation", "set_owner", "_written"):
            patch.setattr(PoolMemory, name, _looking(self, getattr(PoolMemory, name)))
        words = ((BLOCK_BYTES, 8),)
        real_incarnation = PoolMemory.incarnation.fget
        patch.setattr(PoolMemory, "incarnation", property(_reading(self, real_incarnation, "the incarnation", words)))
        patch.setattr(
            PoolMemory,
            "changes",
            _reading(self, PoolMemory.changes, "the count of changes", (*words, (2 * BLOCK_BYTES - 8, 8))),
        )
        patch.setattr(
            PoolMemory, "owner", _reading(self, PoolMemory.owner, "the owner", ((BLOCK_BYTES, BLOCK_BYTES - 8),))
        )
        real_getitem = coherence._FreshWord.__getitem__

        def getitem(word: Any, index: int) -> int:
            with recorder._lock:
                value = real_getitem(word, index)
                host, offset = recorder.place(word._address)
                recorder.add(Read, host, offset, value.to_bytes(8, "little"), "the incarnation at each message")
            return value

        patch.setattr(coherence._FreshWord, "__getitem__", getitem)

    def _install_directory(self, patch: pytest.MonkeyPatch) -> None:
        recorder = self
        real_init, real_store = PoolDirectory.__init__, PoolDirectory._store
        real_commit, real_free = PoolDirectory.commit, PoolDirectory.free

        def init(directory: PoolDirectory, geometry: Any, meta: Any, *rest: Any) -> None:
            with recorder._lock:
                place = recorder.place(int(meta.ctypes.data))
                if place is not None:
                    recorder.add(Read, place[0], 0, meta[: geometry.off_data].tobytes(), "the tables, at start")
            real_init(directory, geometry, meta, *rest)

        def store(directory: PoolDirectory, target: Any, index: Any, values: Any) -> None:
            with recorder._lock:
                host, _ = recorder.place(int(directory.meta.ctypes.data))
                real_store(directory, target, index, values)
                recorder.look(host)

        def commit(directory: PoolDirectory, slots: Any, checksums: Any) -> None:
            with recorder._lock:
                host, _ = recorder.place(int(directory.meta.ctypes.data))
                slots = np.array(slots)
                hashes = directory.words[slots][:, HASH_WORD:PARENT_WORD]
                recorder.add(
                    Committed,
                    host,
                    slots,
                    directory.generations[slots].copy(),
                    directory.offsets(slots).copy(),
                    [row.tobytes() for row in hashes],
                )
            real_commit(directory, slots, checksums)

        def free(directory: PoolDirectory, slots: Any) -> None:
            with recorder._lock:
                host, _ = recorder.place(int(directory.meta.ctypes.data))
                hashes = directory.words[np.array(slots, int)][:, HASH_WORD:PARENT_WORD]
                recorder.add(Freed, host, [row.tobytes() for row in hashes])
            real_free(directory, slots)

        patch.setattr(PoolDirectory, "free", free)
        patch.setattr(PoolDirectory, "__init__", init)
        patch.setattr(PoolDirectory, "_store", store)
        patch.setattr(PoolDirectory, "commit", commit)

    def _install_copies(self, patch: pytest.MonkeyPatch) -> None:
        recorder = self
        real_copy, real_compare = CxlMover._copy, PoolView._compare

        def copy(mover: CxlMover, pool: int, offsets: Any, fragments: Any, to_pool: bool) -> None:
            host, start = recorder.place(pool)
            if recorder.before_copy is not None:
                recorder.before_copy(host, to_pool)
            with recorder._lock:
                real_copy(mover, pool, offsets, fragments, to_pool)
                for offset in offsets.tolist():
                    data = mover.memory.data[offset - start : offset - start + fragments.nbytes].tobytes()
                    if to_pool:
                        recorder.add(Store, host, offset, data)
                    else:
                        recorder.add(Read, host, offset, data, "")

        def note(generations: Any, slots: Any, expected: Any, good: Any) -> None:
            host, _ = recorder.place(int(generations.ctypes.data))
            recorder.add(Check, host, np.array(slots), np.array(expected), np.array(good))

        def compare(looking: PoolView, slots: Any, generations: Any) -> Any:
            with recorder._lock:
                good = real_compare(looking, slots, generations)
                note(looking._generations, slots, generations, good)
            return good

        class Native:
            def compare(self, generations: Any, slots: Any, expected: Any, out: Any = None) -> bool:
                with recorder._lock:
                    good = np.empty(len(slots), bool)
                    answer: bool = real_native.compare(generations, slots, expected, good)
                    note(generations, slots, expected, good)
                    if out is not None:
                        out[:] = good
                return answer

        real_native = view._native
        patch.setattr(CxlMover, "_copy", copy)
        patch.setattr(PoolView, "_compare", compare)
        if real_native is not None:
            patch.setattr(view, "_native", Native())


def _looking(recorder: Recorder, real: Any) -> Any:
    """A method of the server's that stores into the pool: what it stored is seen before it flushes, and at its end."""

    def method(memory: PoolMemory, *args: Any) -> Any:
        with recorder._lock:
            recorder.look(recorder.host)
            result = real(memory, *args)
            recorder.look(recorder.host)
        return result

    return method


def _reading(recorder: Recorder, real: Any, what: str, ranges: tuple[tuple[int, int], ...]) -> Any:
    def method(memory: PoolMemory) -> Any:
        with recorder._lock:
            result = real(memory)
            host, _ = recorder.place(int(memory.meta.ctypes.data))
            for offset, nbytes in ranges:
                recorder.add(Read, host, offset, memory.meta[offset : offset + nbytes].tobytes(), what)
        return result

    return method


class _Cpu:
    """Stands before the compiled helper: notes what is asked for and has it done."""

    def __init__(self, recorder: Recorder, real: Any) -> None:
        self._recorder = recorder
        self._real = real
        self.LINE_BYTES, self.CLEANING, self.DROPPING = real.LINE_BYTES, real.CLEANING, real.DROPPING

    def lines(self, instruction: str, address: int, nbytes: int) -> None:
        self._recorder.flush(instruction, [address], nbytes)
        self._real.lines(instruction, address, nbytes)

    def lines_many(self, instruction: str, addresses: Any, nbytes: int) -> None:
        self._recorder.flush(instruction, addresses.tolist(), nbytes)
        self._real.lines_many(instruction, addresses, nbytes)

    def store_fence(self) -> None:
        self._recorder.fence(False)
        self._real.store_fence()

    def full_fence(self) -> None:
        self._recorder.fence(True)
        self._real.full_fence()
