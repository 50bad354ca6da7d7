"""Memory that hosts' caches do not agree on, as a model: a recorded trace is replayed on it, and judged by what comes out.

Each host has a cache of its own. It may take a line in, write a dirty one back or let a clean one go at any moment by itself
(:class:`Caches` says how eager it is), and it need not; a flush is done at the next fence and, without one, whenever the cache
likes, or never. What must hold whatever the caches do:

- what a reader counts as loaded is what was stored under that hash, and it looked at the generation after the copy;
- what is there is found: a look that finds a generation in memory finds it in the model;
- what must be read as it is now (superblock, incarnation, the tables at the start of a server) is read so;
- at every moment the memory alone, without any cache, is a pool in which each record that is believed has its bytes, and
  holds all that was acknowledged and nothing that was removed: another host may have to go on from there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from coherence_trace import LINE, Check, Committed, Event, Fence, Flush, Freed, Note, Read, Recorder, Store, lines_of

from maru_core.pool.format import COMMITTED
from maru_server.directory import HASH_WORD, PARENT_WORD, PoolDirectory


class Violation(AssertionError):  # noqa: N818  # what is found, and no accident
    """What the caches could have made of the trace."""


@dataclass(frozen=True)
class Caches:
    """Probabilities, at each event and for each line; ``hoist``: drops are done as early as the fences allow."""

    evict: float = 0.0
    prefetch_tables: float = 0.0
    prefetch_data: float = 0.0
    forget: float = 0.0
    complete: float = 0.0
    hoist: bool = False
    seed: int = 0


#: From caches that do nothing by themselves to such that hold all they may, and some that do as they like.
EVERY_KIND = (
    Caches(),
    Caches(prefetch_tables=1, prefetch_data=1),
    Caches(prefetch_tables=1, complete=1, hoist=True),
    Caches(prefetch_data=1),
    Caches(evict=1),
    *(
        Caches(
            evict=0.1 * seed, prefetch_tables=0.2, prefetch_data=0.2, forget=0.1, complete=0.3, hoist=True, seed=seed
        )
        for seed in range(1, 4)
    ),
)


@dataclass
class _Host:
    image: np.ndarray  # (lines, 64)
    present: np.ndarray
    dirty: np.ndarray
    version: np.ndarray  # of each line: how often it was stored to
    pending: dict[int, list[tuple[np.ndarray, bool, np.ndarray, np.ndarray]]] = field(default_factory=dict)
    copied: dict[int, tuple[int, bytes]] = field(default_factory=dict)  # by offset: when, what
    proven: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # by hash: when looked at, offset


class Machine:
    """Several hosts and one memory."""

    def __init__(self, recorder: Recorder, caches: Caches) -> None:
        self.geometry = recorder.geometry
        self.contents = recorder.contents
        self.caches = caches
        self.events: Sequence[Event] = _hoisted(recorder.events) if caches.hoist else recorder.events
        self.memory = np.zeros((self.geometry.pool_bytes // LINE, LINE), np.uint8)
        self.hosts: dict[str, _Host] = {}
        self.random = np.random.default_rng(caches.seed)
        touched = [lines_of(event.offset, len(event.data)) for event in self.events if isinstance(event, Store)]
        everything = np.unique(np.concatenate(touched))
        tables = self.geometry.off_data // LINE
        self.tables, self.data = everything[everything < tables], everything[everything >= tables]
        self.owners: dict[tuple[int, int], tuple[bytes, int]] = {}  # (slot, generation): hash, offset
        self.promised: set[bytes] = set()
        self.now = 0

    def replay(self) -> None:
        for host in {event.host for event in self.events}:
            lines = len(self.memory)
            self.hosts[host] = _Host(
                np.zeros((lines, LINE), np.uint8),
                np.zeros(lines, bool),
                np.zeros(lines, bool),
                np.zeros(lines, np.int32),
            )
        for now, event in enumerate(self.events):
            self.now = now
            # Lines of one batch of stores are lost or kept one by one in any case: once a batch is enough.
            if not (isinstance(event, Store) and self.now and isinstance(self.events[self.now - 1], Store)):
                for host in self.hosts.values():
                    self._stir(host)
            self._do(event, self.hosts[event.host])

    # ------------------------------------------------------------ caches

    def _some(self, lines: np.ndarray, probability: float) -> np.ndarray:
        if probability >= 1 or not len(lines):
            return lines
        return lines[self.random.random(len(lines)) < probability]

    def _stir(self, host: _Host) -> None:
        """What the caches of one host do by themselves."""
        caches = self.caches
        for lines, prefetch in ((self.tables, caches.prefetch_tables), (self.data, caches.prefetch_data)):
            if caches.evict:
                out = self._some(lines[host.dirty[lines]], caches.evict)
                self.memory[out] = host.image[out]
                host.dirty[out] = False
            if prefetch:
                self._fetch(host, self._some(lines[~host.present[lines]], prefetch))
            if caches.forget:
                host.present[self._some(lines[host.present[lines] & ~host.dirty[lines]], caches.forget)] = False
        if caches.complete:
            for thread, entries in host.pending.items():
                keep = []
                for entry in entries:
                    if self.random.random() < caches.complete:
                        self._complete(host, entry, full=True)
                    else:
                        keep.append(entry)
                host.pending[thread] = keep

    def _fetch(self, host: _Host, lines: np.ndarray) -> None:
        missing = lines[~host.present[lines]]
        host.image[missing] = self.memory[missing]
        host.present[missing] = True

    def _complete(self, host: _Host, entry: tuple[np.ndarray, bool, np.ndarray, np.ndarray], *, full: bool) -> None:
        lines, drops, versions, data = entry
        dirty = host.dirty[lines]
        self.memory[lines[dirty]] = data[dirty]
        same = host.version[lines] == versions
        host.dirty[lines[dirty & same]] = False
        if drops and full:
            host.present[lines[same]] = False

    def _store(self, host: _Host, offset: int, data: bytes) -> None:
        lines = lines_of(offset, len(data))
        self._fetch(host, lines)
        host.image.reshape(-1)[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        host.dirty[lines] = True
        host.version[lines] += 1

    def _read(self, host: _Host, offset: int, nbytes: int) -> bytes:
        self._fetch(host, lines_of(offset, nbytes))
        return host.image.reshape(-1)[offset : offset + nbytes].tobytes()

    # ------------------------------------------------------------ events

    def _do(self, event: Event, host: _Host) -> None:
        match event:
            case Store(offset=offset, data=data):
                self._store(host, offset, data)
                following = self.events[self.now + 1 : self.now + 2]
                if offset < self.geometry.off_data and not (following and isinstance(following[0], Store)):
                    self._judge_memory(f"the server of host {event.host} stands still after a store")
            case Flush(lines=lines, drops=drops, thread=thread):
                entry = lines, drops, host.version[lines].copy(), host.image[lines].copy()
                host.pending.setdefault(thread, []).append(entry)
            case Fence(full=full, thread=thread):
                entries = host.pending.pop(thread, [])
                for entry in entries:
                    self._complete(host, entry, full=full)
                if not full:
                    # Ordered before later stores, but not before later loads: the drop itself is still to come.
                    host.pending[thread] = [entry for entry in entries if entry[1]]
            case Read(offset=offset, data=data, what=what):
                got = self._read(host, offset, len(data))
                if what and got != data:
                    raise Violation(f"host {event.host} read {what} at {offset}, and not as it is in memory")
                if not what:
                    host.copied[offset] = self.now, got
            case Check():
                self._judge_check(event, host)
            case Committed():
                for slot, generation, offset, page in zip(
                    event.slots.tolist(), event.generations.tolist(), event.offsets.tolist(), event.hashes, strict=True
                ):
                    self.owners[slot, generation] = page, offset
            case Freed(hashes=hashes):
                self.promised.difference_update(hashes)
            case Note():
                self._judge_note(event, host)

    def _judge_check(self, event: Check, host: _Host) -> None:
        for slot, generation, good in zip(
            event.slots.tolist(), event.generations.tolist(), event.good.tolist(), strict=True
        ):
            found = self._read(host, self.geometry.off_generations + 8 * slot, 8)
            valid = int.from_bytes(found, "little") == generation
            if good and not valid:
                raise Violation(f"host {event.host} missed what is in slot {slot}: it saw another generation")
            if not valid or (slot, generation) not in self.owners:
                continue
            page, offset = self.owners[slot, generation]
            before = host.proven.get(page, (-1, 0))[0]
            host.proven[page] = self.now, offset
            at, data = host.copied.get(offset, (-1, b""))
            if at > before and data != self.contents[page][: len(data)]:
                raise Violation(f"host {event.host} believed wrong bytes of slot {slot}, whose generation held")

    def _judge_note(self, event: Note, host: _Host) -> None:
        if event.kind == "stored":
            self.promised.update(event.hashes)
        elif event.kind == "removed":
            self.promised.difference_update(event.hashes)
        else:
            for page in event.hashes:
                looked, offset = host.proven.get(page, (-1, 0))
                copied = host.copied.get(offset, (-1, b""))[0]
                if looked < copied or looked < 0:
                    raise Violation(f"host {event.host} counted a page as loaded without a look after the copy")
        missing = self.promised - self._judge_memory("no server knows anything but the memory")
        if missing:
            raise Violation(f"{len(missing)} pages that were acknowledged as stored are not in memory")
        if event.kind == "removed":
            back = self._judge_memory("") & set(event.hashes)
            if back:
                raise Violation(f"{len(back)} pages that were removed are in memory still")

    def _judge_memory(self, when: str) -> set[bytes]:
        """The hashes of the pages that another host would believe now; each has its bytes."""
        flat = self.memory.reshape(-1)
        if not flat[: self.geometry.off_data].any():
            return set()
        directory = PoolDirectory(self.geometry, flat[: self.geometry.off_data])
        slots = np.flatnonzero(directory.states == COMMITTED)
        slots = slots[directory.believed(slots)]
        lengths = directory.records["length"][slots].tolist()
        hashes = [row.tobytes() for row in directory.words[slots][:, HASH_WORD:PARENT_WORD]]
        for page, offset, length in zip(hashes, directory.offsets(slots).tolist(), lengths, strict=True):
            if flat[offset : offset + length].tobytes() != self.contents[page]:
                raise Violation(f"{when}: a record in memory is believed whose bytes are not there")
        return set(hashes)


def _hoisted(events: Sequence[Event]) -> list[Event]:
    """The trace with each drop of lines as early as the CPU may do it: before loads of the same thread that stand above it and
    are not fenced off (a store fence does not keep loads apart)."""
    moved: list[tuple[float, Event]] = []
    for now, event in enumerate(events):
        position = float(now)
        if isinstance(event, Flush) and event.drops:
            mine = [
                (at, earlier)
                for at, earlier in enumerate(events[:now])
                if earlier.thread == event.thread and earlier.host == event.host
            ]
            passed = list(
                itertools.takewhile(
                    lambda pair: not isinstance(pair[1], Store) and not (isinstance(pair[1], Fence) and pair[1].full),
                    reversed(mine),
                )
            )
            if any(isinstance(earlier, Read) for _, earlier in passed):
                fenced = [at for at, _ in mine if at < passed[-1][0]]
                position = (fenced[-1] if fenced else -1) + 0.5
        moved.append((position, event))
    moved.sort(key=lambda pair: pair[0])
    return [event for _, event in moved]


def judge(recorder: Recorder, kinds: Sequence[Caches] = EVERY_KIND) -> str:
    """What is wrong with the trace under any of these caches, and under which; empty if nothing is."""
    for caches in kinds:
        try:
            Machine(recorder, caches).replay()
        except Violation as violation:
            return f"{violation} ({caches})"
    return ""
