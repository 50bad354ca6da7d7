"""``maru-bench replay``: how many blocks of a recorded load a pool of a given size would have had, by policy.

A trace is one JSON object a line, as the Mooncake traces and the Qwen-Bailian traces have them: ``hash_ids`` are the blocks
of a prompt in order, equal where prompts begin alike; ``timestamp`` says when, in milliseconds where it is whole and in
seconds where it is not; other fields do not matter. Every request is what an engine asks a server: match, touch what was
found, reserve and commit the rest. It goes, message by message, to a real :class:`maru_server.state.ServerState` over a
real pool directory; only the bytes of the pages are not there. One block is one page of one slot.

The pool has exactly as many slots as the capacity says, and nothing is evicted but for want of a slot: the watermarks are
at the top, and no tick evicts ahead of need. A server that keeps a twentieth free, as it does by default, is like one here with a
capacity that much smaller.

Beside the policies stand two figures that no server is asked for. *LRU per key* keeps blocks by their own last use and
knows no prefixes: a block whose beginning is gone is of no use, and does not count. *Belady* is the bound: it knows the
future, evicts what is asked for last, and does not even store what is never asked for again.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from rich import box
from rich.table import Table

from maru_bench.copy import BENCH_NAMESPACE
from maru_core.errors import ConfigError, MaruError, PoolTooSmallError
from maru_core.pool.geometry import Geometry
from maru_core.protocol import (
    HASH_BYTES,
    MAX_BATCH,
    NO_SLOT,
    PROTOCOL_VERSION,
    ROOT,
    Commit,
    Committed,
    Hello,
    Located,
    Match,
    NamespaceOpened,
    OpenNamespace,
    Reserve,
    Reserved,
    Touch,
    Welcome,
)
from maru_server.config import StateConfig
from maru_server.directory import PoolDirectory
from maru_server.eviction import POLICIES, policy
from maru_server.state import ServerState

#: How far below LRU another policy may be anywhere.
TOLERANCE: Final = 0.005
LRU_PER_KEY: Final = "LRU per key"
BELADY: Final = "Belady"
_SLOT_BYTES: Final = 4096
_COMPONENT: Final = "kv"
_NO_RATE: Final = 1e15
#: Any time will do; before it there was nothing.
_EPOCH_S: Final = 1_700_000_000.0

Blocks = npt.NDArray[np.int64]
_R = TypeVar("_R")


class TraceLine(msgspec.Struct):
    """One request of a trace; what a trace does not say is None."""

    hash_ids: list[int]
    timestamp: int | float | None = None
    input_length: int | None = None
    output_length: int | None = None
    chat_id: int | str | None = None
    parent_chat_id: int | str | None = None


def numbered_lines(path: Path) -> Iterator[tuple[TraceLine, list[int], float]]:
    """Each request of a trace, its blocks as numbers, and when it came, in seconds.

    Numbers are dense from 0, each standing for a block and all that comes before it.

    Raises:
        ConfigError: naming the file, the line and what is wrong with it.
    """
    decoder = msgspec.json.Decoder(TraceLine)
    #: (number of the block before, id) to number: also ids that say nothing of what comes before are right then.
    numbers: dict[tuple[int, int], int] = {}
    time_s = 0.0
    try:
        with path.open("rb") as file:
            for at, text in enumerate(file, 1):
                if not text.strip():
                    continue
                try:
                    line = decoder.decode(text)
                except msgspec.DecodeError as error:
                    raise ConfigError(
                        f"{path}:{at}: {error}: give one JSON object a line, with hash_ids, a list of whole numbers"
                    ) from error
                before = -1
                blocks = []
                for block in line.hash_ids:
                    before = numbers.setdefault((before, block), len(numbers))
                    blocks.append(before)
                if line.timestamp is not None:
                    time_s = max(time_s, line.timestamp / (1000 if isinstance(line.timestamp, int) else 1))
                else:
                    time_s += 1.0
                yield line, blocks, time_s
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): give a trace file") from error


class Trace(msgspec.Struct, frozen=True):
    """Requests as block numbers, dense from 0, each number standing for a block and all that comes before it."""

    name: str
    requests: list[Blocks]
    times_s: list[float]
    unique: int

    @property
    def asked(self) -> int:
        return sum(map(len, self.requests))

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Raises:
        ConfigError: naming the file, the line and what is wrong with it.
        """
        requests, times = [], []
        unique = 0
        for _, blocks, time_s in numbered_lines(path):
            requests.append(np.array(blocks, np.int64))
            times.append(time_s)
            unique = max(unique, max(blocks, default=-1) + 1)
        if not unique:
            raise ConfigError(f"{path} has no request with hash_ids: give a trace file")
        return cls(path.name, requests, times, unique)


class ReplayOptions(msgspec.Struct, kw_only=True, frozen=True):
    """``capacities`` in percent of the trace's unique blocks."""

    trace: Path
    capacities: list[float]
    policies: list[str]

    @classmethod
    def parse(cls, trace: Path, capacities: str, policies: Sequence[str]) -> ReplayOptions:
        """Raises:
        ConfigError: naming what cannot be.
        """
        parsed = []
        for text in capacities.split(","):
            try:
                value = float(text)
            except ValueError:
                value = 0.0
            if not 0 < value <= 100:
                raise ConfigError(
                    f"--capacity is {capacities!r}: give percents of the trace's blocks above 0 and up to 100, as in 5,10,20"
                )
            parsed.append(value)
        for name in policies:
            policy(name)
        return cls(trace=trace, capacities=parsed, policies=list(policies) or list(POLICIES))


class Capacity(msgspec.Struct, kw_only=True):
    """What one pool size had: share of all blocks asked for, by policy and for the two yardsticks."""

    percent: float
    pages: int
    hit_rates: dict[str, float]


class ReplayResult(msgspec.Struct, kw_only=True):
    trace: str
    requests: int
    blocks: int
    unique_blocks: int
    unbounded: float  # the rate of a pool that never evicts
    capacities: list[Capacity]

    @property
    def targets_met(self) -> bool:
        """No policy is anywhere below LRU by more than the tolerance."""
        return all(
            rate >= row.hit_rates["lru"] - TOLERANCE
            for row in self.capacities
            if "lru" in row.hit_rates
            for name, rate in row.hit_rates.items()
            if name in POLICIES
        )

    def table(self) -> Table:
        table = Table(
            title=f"{self.trace}: {self.requests} requests, {self.blocks} blocks, {self.unique_blocks} of them different",
            caption=f"share of blocks found, of {self.unbounded:.3f} that a pool without end would have had",
            box=box.SIMPLE,
        )
        names = list(self.capacities[0].hit_rates)
        for name in ("capacity", "pages", *names):
            table.add_column(name, justify="right")
        for row in self.capacities:
            table.add_row(f"{row.percent:g} %", str(row.pages), *(f"{row.hit_rates[name]:.4f}" for name in names))
        return table

    def write_json(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")


def run(options: ReplayOptions, progress: Callable[[str], None]) -> ReplayResult:
    progress("reading the trace")
    trace = Trace.read(options.trace)
    asked = trace.asked
    rows = []
    for percent in options.capacities:
        pages = max(1, int(trace.unique * percent / 100))
        found = {}
        for name in options.policies:
            progress(f"{name} at {percent:g} %")
            found[name] = replay(trace, pages, name)
        progress(f"yardsticks at {percent:g} %")
        found[LRU_PER_KEY] = lru_per_key(trace, pages)
        found[BELADY] = belady(trace, pages)
        rows.append(
            Capacity(percent=percent, pages=pages, hit_rates={name: count / asked for name, count in found.items()})
        )
    return ReplayResult(
        trace=trace.name,
        requests=len(trace.requests),
        blocks=asked,
        unique_blocks=trace.unique,
        unbounded=(asked - trace.unique) / asked,
        capacities=rows,
    )


# ---------------------------------------------------------------- the server


def replay(trace: Trace, pages: int, name: str) -> int:
    """How many blocks a server with a pool of so many pages would have had."""
    server = _Server(pages, name)
    names = np.frombuffer(np.random.default_rng(0).bytes(HASH_BYTES * trace.unique), f"V{HASH_BYTES}")
    return sum(
        server.request(names[blocks].tobytes(), time_s)
        for blocks, time_s in zip(trace.requests, trace.times_s, strict=True)
    )


def one_extent(pages: int) -> Geometry:
    """A pool of exactly so many slots."""
    extent = pages * _SLOT_BYTES
    nbytes = extent + pages * 128
    while True:
        try:
            shape = Geometry.plan(
                nbytes,
                align=_SLOT_BYTES,
                extent_bytes=extent,
                min_slot_bytes=_SLOT_BYTES,
                component_capacity=1,
                namespace_capacity=1,
                created_ns=1,
            )
        except PoolTooSmallError:
            nbytes += _SLOT_BYTES
            continue
        assert shape.slot_count == pages
        return shape


class _Server:
    def __init__(self, pages: int, name: str) -> None:
        shape = one_extent(pages)
        self._rid = 0
        self._time_s = 0.0
        self.state = ServerState(
            PoolDirectory(shape, np.zeros(shape.off_data, np.uint8)),
            incarnation=1,
            pool_uri="replay",
            config=StateConfig(
                policy=name,
                low=1.0,
                high=1.0,
                session_rate=_NO_RATE,
                session_page_rate=_NO_RATE,
                reservation_s=_NO_RATE,
            ),
            now=0.0,
            wall_offset=_EPOCH_S,
        )
        self.state.extents_ready(shape.extent_count, 0.0)
        welcome = self._ask(Hello(PROTOCOL_VERSION, 0, bytes(16), "replay", "", 0, 0, "", ""), Welcome)
        self._session = welcome.session
        opened = self._ask(OpenNamespace(0, self._session, BENCH_NAMESPACE.record()), NamespaceOpened)
        self._namespace = opened.namespace

    def request(self, hashes: bytes, time_s: float) -> int:
        """What an engine asks for a prompt of these blocks; how many of them were there."""
        self._time_s = time_s
        found = self._match(hashes)
        if found:
            for start in range(0, found, MAX_BATCH):
                part = hashes[start * HASH_BYTES : min(found, start + MAX_BATCH) * HASH_BYTES]
                self.state.handle(Touch(self._session, self._namespace, part), time_s)
        for start in range(found, len(hashes) // HASH_BYTES, MAX_BATCH):
            if not self._store(hashes, start):
                break
        return found

    def _match(self, hashes: bytes) -> int:
        """The longest prefix that is there; a long one is asked for in several messages."""
        found = 0
        while True:
            part = hashes[found * HASH_BYTES : (found + MAX_BATCH) * HASH_BYTES]
            message = Match(0, self._session, self._namespace, [_COMPONENT], 0, part)
            pages = self._ask(message, Located).pages if part else 0
            found += pages
            if pages < MAX_BATCH:
                return found

    def _store(self, hashes: bytes, start: int) -> bool:
        """Store one batch; False if there was no room for all of it."""
        parent = hashes[(start - 1) * HASH_BYTES : start * HASH_BYTES] if start else ROOT
        part = hashes[start * HASH_BYTES : (start + MAX_BATCH) * HASH_BYTES]
        message = Reserve(0, self._session, self._namespace, _COMPONENT, 0, 1, parent, part, _SLOT_BYTES)
        reserved = self._ask(message, Reserved)
        slots, generations = reserved.slots, reserved.generations
        whole = not any(reserved.status)
        if not whole:
            given = np.frombuffer(slots, "<u4") != NO_SLOT
            slots = np.frombuffer(slots, "<u4")[given].tobytes()
            generations = np.frombuffer(generations, "<u8")[given].tobytes()
        if slots and any(self._ask(Commit(0, self._session, slots, generations), Committed).status):
            raise MaruError("the server did not take a commit")
        return whole

    def _ask(self, message: Any, kind: type[_R]) -> _R:
        reply = self.state.handle(message, self._time_s)
        if not isinstance(reply, kind):
            raise MaruError(f"the server's answer to {type(message).__name__} is {reply!r}")
        return reply


# ---------------------------------------------------------------- yardsticks


def lru_per_key(trace: Trace, pages: int) -> int:
    """How many blocks would have been found, as prefixes, if every block went by its own last use."""
    kept: OrderedDict[int, None] = OrderedDict()
    found = 0
    for blocks in trace.requests:
        prefix = True
        for block in blocks.tolist():
            there = block in kept
            prefix &= there
            found += prefix
            if there:
                kept.move_to_end(block)
                continue
            kept[block] = None
            if len(kept) > pages:
                kept.popitem(last=False)
    return found


def belady(trace: Trace, pages: int) -> int:
    """How many blocks could have been found at most, by whoever knows all requests beforehand."""
    never = len(trace.requests)
    asked_at: dict[int, list[int]] = {}
    for at in range(never - 1, -1, -1):
        for block in trace.requests[at].tolist():
            asked_at.setdefault(block, []).append(at)
    kept: dict[int, int] = {}  # block -> when it is asked for next
    # The last to be asked for comes first, and of those the deepest: never a block before what continues it.
    heap: list[tuple[int, int, int]] = []
    found = 0
    for blocks in trace.requests:
        for depth, block in enumerate(blocks.tolist()):
            found += block in kept
            times = asked_at[block]
            times.pop()
            if not times:
                kept.pop(block, None)
                continue
            kept[block] = times[-1]
            heapq.heappush(heap, (-times[-1], -depth, block))
            while len(kept) > pages:
                at, _, last = heapq.heappop(heap)
                if kept.get(last) == -at:
                    del kept[last]
    return found
