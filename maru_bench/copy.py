"""``maru-bench copy``: GB/s of storing and loading pages through Maru, beside memcpy and beside one file per page.

Three peers move the same pages, of two fragments each (K and V lie apart, as in an engine), between the same
engine buffer and memory of their own of the same kind, by turns in the same run:

============  ====================================================================================================
peer          one batch is
============  ====================================================================================================
Maru          ``Store.put`` / ``Store.get`` with a real ``maru-server`` process: every message, every check, the
              allocation of slots, and the copy into or out of the pool in shared memory
memcpy        one C memcpy per fragment on one thread (numpy), into or out of a mapping of ``/dev/shm``
file          for each page: open, write or read both fragments with one vectored call, close; files in ``/dev/shm``
============  ====================================================================================================

Included is all that the caller waits for. Not included, for all peers alike: the memory itself. The pool, the mapping
and the files were written once before the first measurement, so that no peer waits for the kernel to find and
zero pages; files are overwritten in place, which is kinder to them than a store that creates them. Removing pages
between repeats (so that each ``put`` stores something new) is not included either. Bytes are checked after the loads.
A sample walks through up to 512 MiB of pages, so that those of large batches come from memory and not from the
processor's cache, for all peers alike, as they do in an engine.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from rich import box
from rich.table import Table

from maru_bench.pages import FRAGMENTS, EngineBuffer, U8Array, addresses
from maru_bench.processes import scratch_directory
from maru_bench.servers import MaruServer
from maru_core.errors import ConfigError, MaruError
from maru_core.mover import Fragments
from maru_core.namespace import Namespace
from maru_core.protocol import HASH_BYTES, ROOT
from maru_core.store import Store, StoreConfig

#: Part of memcpy's speed that Maru is to reach, for batches of at least that many bytes.
TARGET: Final = 0.85
TARGET_BYTES: Final = 16 << 20
#: A sample moves this much, batch after batch, each at another place: pages come from memory and not from the processor's
#: cache, as they do in an engine, whose pools are far larger than any cache. Short batches stop at so many calls.
_SAMPLE_BYTES: Final = 512 << 20
_SAMPLE_CALLS: Final = 64
#: Samples of less than this are repeated up to so many times as often as was asked for.
_OFTEN_BYTES: Final = 128 << 20
_OFTEN: Final = 4
#: Longest that the pool is waited for before the first measurement, seconds; and how often it is looked at.
_WARM_S: Final = 60.0
_POLL_S: Final = 0.02
_PEERS: Final = ("maru", "memcpy", "file")
_OPERATIONS: Final = ("store", "load")
#: Three times the largest batch is held: pool, mapping, files; once more for the engine's buffer.
_MEMORY_LIMIT: Final = 3 << 30

BENCH_NAMESPACE: Final = Namespace(
    engine="maru-bench", hash_scheme="random", model="none", weights="", adapter="", kv_dtype="bfloat16",
    page_tokens=16, layers="0:1", heads="none", layout="page_first", tensor_parallel=1, pipeline_parallel=1,
    context_parallel=1, data_parallel=1, draft="",
)  # fmt: skip


class CopyOptions(msgspec.Struct, frozen=True, kw_only=True):
    page_bytes: list[int]
    batches: list[int]
    repeats: int = 7
    pool: str | None = None
    """Size of the pool; None: what the largest batch needs."""
    threads: int | None = None


class CopyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One operation at one page size and batch. Speeds are medians, in GB/s (10^9 bytes); ratios are of the medians."""

    operation: str
    page_bytes: int
    batch: int
    maru_gbps: float
    memcpy_gbps: float
    file_gbps: float
    to_memcpy: float
    to_file: float
    target: float | None
    """Ratio to memcpy to reach; None where the batch is too small for one."""
    met: bool | None

    @property
    def batch_bytes(self) -> int:
        return self.page_bytes * self.batch


def make_row(operation: str, page_bytes: int, batch: int, seconds: dict[str, list[float]], moved: int) -> CopyRow:
    """The row of one operation.

    Args:
        seconds: samples of each peer, in seconds.
        moved: bytes that each sample moved.
    """
    speed = {peer: moved / statistics.median(seconds[peer]) / 1e9 for peer in _PEERS}
    target = TARGET if page_bytes * batch >= TARGET_BYTES else None
    to_memcpy = speed["maru"] / speed["memcpy"]
    return CopyRow(
        operation=operation,
        page_bytes=page_bytes,
        batch=batch,
        maru_gbps=speed["maru"],
        memcpy_gbps=speed["memcpy"],
        file_gbps=speed["file"],
        to_memcpy=to_memcpy,
        to_file=speed["maru"] / speed["file"],
        target=target,
        met=None if target is None else to_memcpy >= target,
    )


class CopyResult(msgspec.Struct, frozen=True, kw_only=True):
    machine: dict[str, str | int]
    repeats: int
    """At least: smaller batches are repeated more often."""
    threads: int | None
    rows: list[CopyRow]

    @property
    def targets_met(self) -> bool:
        return all(row.met is not False for row in self.rows)

    def table(self) -> Table:
        table = Table(
            title=f"GB/s through Maru, beside memcpy and one file per page (medians of {self.repeats} or more)",
            box=box.SIMPLE_HEAD,
            collapse_padding=True,
            pad_edge=False,
        )
        table.add_column("", no_wrap=True)
        for name in ("page", "batch", "bytes", "Maru", "memcpy", "file", "Maru /\nmemcpy", "Maru /\nfile"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column(f"target\n{TARGET}", no_wrap=True)
        for row in self.rows:
            table.add_row(
                row.operation,
                human_bytes(row.page_bytes),
                str(row.batch),
                human_bytes(row.batch_bytes),
                f"{row.maru_gbps:.2f}",
                f"{row.memcpy_gbps:.2f}",
                f"{row.file_gbps:.2f}",
                f"{row.to_memcpy:.2f}",
                f"{row.to_file:.2f}",
                {None: "-", True: "[green]met[/green]", False: "[red]not met[/red]"}[row.met],
            )
        return table

    def write_json(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


# ------------------------------------------------------------------ the peers


class _Peer(Protocol):
    """Moves batch ``index`` of a sample; ``pages`` is where it lies in the engine."""

    def begin(self, batches: int, batch: int, page_bytes: int) -> None: ...
    def store(self, index: int, pages: U8Array) -> None: ...
    def load(self, index: int, pages: U8Array) -> None: ...
    def end(self) -> None: ...


class _MaruPeer:
    def __init__(self, endpoint: str, threads: int | None, page_bytes: int) -> None:
        self._store = Store.open(
            # Far above any normal call: a benchmark on a busy machine should be slow and not wrong.
            StoreConfig(server=endpoint, copy_threads=threads, timeout_ms=10_000),
            BENCH_NAMESPACE,
            name="maru-bench copy",
            object_bytes=page_bytes,
        )

    def warm(self, engine: EngineBuffer, page_bytes: int, total_bytes: int) -> None:
        """Store ``total_bytes`` once, so that the server has given that much of the pool its memory, and remove it.

        A server gives a pool memory as it fills and refuses what comes faster; here it is waited for.

        Raises:
            MaruError: nothing could be stored for a long time.
        """
        self.begin(total_bytes // page_bytes, 1, page_bytes)
        deadline = time.monotonic() + _WARM_S
        for index in range(total_bytes // page_bytes):
            while True:
                try:
                    self.store(index, engine.pages(0, 1, page_bytes, 1))
                    break
                except MaruError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(_POLL_S)
        self.end()

    def begin(self, batches: int, batch: int, page_bytes: int) -> None:
        self._sizes = np.full(FRAGMENTS, page_bytes // FRAGMENTS, np.uint64)
        self._hashes = [os.urandom(HASH_BYTES * batch) for _ in range(batches)]

    def store(self, index: int, pages: U8Array) -> None:
        parent = ROOT if index == 0 else self._hashes[index - 1][-HASH_BYTES:]
        fragments = Fragments(addresses=addresses(pages), sizes=self._sizes)
        if not self._store.put("kv", 0, 1, parent, self._hashes[index], fragments).all():
            raise MaruError(f"Maru did not store a batch: {self._store.stats()}; give a larger --pool")

    def load(self, index: int, pages: U8Array) -> None:
        fragments = Fragments(addresses=addresses(pages), sizes=self._sizes)
        if not self._store.get("kv", 0, self._hashes[index], fragments).all():
            raise MaruError(f"Maru did not load a batch: {self._store.stats()}; give a larger --pool")

    def end(self) -> None:
        self._store.delete(self._hashes[0][:HASH_BYTES])  # with all that continues it

    def close(self) -> None:
        self._store.close()


class _MemcpyPeer:
    def __init__(self, memory: U8Array) -> None:
        self._memory = memory

    def begin(self, batches: int, batch: int, page_bytes: int) -> None:
        half = page_bytes // FRAGMENTS
        # Page after page: fragments that are neighbours in the engine are not here, so numpy copies each by itself.
        shape = (batches, batch, FRAGMENTS, half)
        self._batches = self._memory[: math.prod(shape)].reshape(shape)

    def store(self, index: int, pages: U8Array) -> None:
        np.copyto(self._batches[index], pages.transpose(1, 0, 2))

    def load(self, index: int, pages: U8Array) -> None:
        np.copyto(pages.transpose(1, 0, 2), self._batches[index])

    def end(self) -> None:
        pass


class _FilePeer:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def begin(self, batches: int, batch: int, page_bytes: int) -> None:
        names = [[str(self._directory / f"{index}-{page}.bin") for page in range(batch)] for index in range(batches)]
        if getattr(self, "_names", None) != names:
            self.clear()
        self._names = names

    def store(self, index: int, pages: U8Array) -> None:
        for page, name in enumerate(self._names[index]):
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                written = os.writev(descriptor, [pages[0, page], pages[1, page]])
            finally:
                os.close(descriptor)
            if written != pages.shape[0] * pages.shape[2]:
                raise MaruError(f"{name}: {written} bytes were written: free some memory in /dev/shm")

    def load(self, index: int, pages: U8Array) -> None:
        for page, name in enumerate(self._names[index]):
            descriptor = os.open(name, os.O_RDONLY)
            try:
                os.readv(descriptor, [pages[0, page], pages[1, page]])
            finally:
                os.close(descriptor)

    def end(self) -> None:
        pass

    def clear(self) -> None:
        for path in self._directory.iterdir():
            path.unlink()


# ------------------------------------------------------------------ the run


def run(options: CopyOptions, narrate: Callable[[str], None]) -> CopyResult:
    """Measure every size and batch.

    Raises:
        ConfigError: sizes that do not fit in the memory this may use.
        MaruError: a server did not start, or a batch was not moved.
    """
    largest = max(_sample_calls(size, batch) * size * batch for size in options.page_bytes for batch in options.batches)
    # Room for extents that are cut to other sizes, and below the watermark at which eviction begins.
    pool = options.pool or f"{max(64, math.ceil(largest * 1.2 / (1 << 20)) + 2 * 64)}M"
    if 4 * largest > _MEMORY_LIMIT:
        raise ConfigError(
            f"a batch of {largest >> 20} MiB would need {4 * largest >> 20} MiB in all, the limit is "
            f"{_MEMORY_LIMIT >> 20} MiB: give smaller --sizes or --batches"
        )
    rows: list[CopyRow] = []
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(scratch_directory())
        shared = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="maru-bench-", dir="/dev/shm")))
        narrate("starting maru-server")
        server = stack.enter_context(MaruServer(scratch, size=pool))
        engine = EngineBuffer(largest)
        memcpy = _MemcpyPeer(_mapped(shared / "memcpy", largest))
        (shared / "pages").mkdir()
        file = _FilePeer(shared / "pages")
        maru = _MaruPeer(server.endpoint, options.threads, max(options.page_bytes))
        stack.callback(maru.close)
        narrate("warming the pool")
        maru.warm(engine, max(options.page_bytes), largest)
        peers: dict[str, _Peer] = {"maru": maru, "memcpy": memcpy, "file": file}
        for size in options.page_bytes:
            for batch in options.batches:
                narrate(f"{batch} pages of {human_bytes(size)}")
                rows += _measure(
                    peers, engine, size, batch, _rounds(options.repeats, size * batch * _sample_calls(size, batch))
                )
    rows.sort(key=lambda row: (_OPERATIONS.index(row.operation), row.page_bytes, row.batch))
    return CopyResult(machine=describe_machine(), repeats=options.repeats, threads=options.threads, rows=rows)


def _measure(peers: dict[str, _Peer], engine: EngineBuffer, size: int, batch: int, repeats: int) -> list[CopyRow]:
    calls = _sample_calls(size, batch)
    total = calls * batch
    views = [engine.pages(index * batch, batch, size, total) for index in range(calls)]
    samples: dict[str, dict[str, list[float]]] = {op: {peer: [] for peer in _PEERS} for op in _OPERATIONS}
    # The first round is not counted: it brings every peer's memory in.
    for round_ in range(repeats + 1):
        # Another peer begins each time, so that none always finds the caches as the same other one left them.
        turn = [_PEERS[(round_ + i) % len(_PEERS)] for i in range(len(_PEERS))]
        for peer in turn:
            peers[peer].begin(calls, batch, size)
            for operation in _OPERATIONS:
                move = peers[peer].store if operation == "store" else peers[peer].load
                if operation == "load":
                    marks = _scribble(engine, total * size)
                began = time.perf_counter()
                for index, pages in enumerate(views):
                    move(index, pages)
                seconds = time.perf_counter() - began
                if operation == "load":
                    _check(peer, engine, marks)
                if round_:
                    samples[operation][peer].append(seconds)
            peers[peer].end()
    return [make_row(operation, size, batch, samples[operation], total * size) for operation in _OPERATIONS]


def _scribble(engine: EngineBuffer, nbytes: int) -> tuple[npt.NDArray[np.intp], U8Array]:
    """Spoil a byte of every CPU page of the buffer; returns where, and what was there."""
    where = np.arange(0, nbytes, mmap.PAGESIZE)
    before = engine.data[where]
    engine.data[where] = ~before
    return where, before


def _check(peer: str, engine: EngineBuffer, marks: tuple[npt.NDArray[np.intp], U8Array]) -> None:
    where, before = marks
    if not np.array_equal(engine.data[where], before):
        raise MaruError(f"{peer} loaded other bytes than were stored: this is a fault of the benchmark or of Maru")


def _sample_calls(size: int, batch: int) -> int:
    return min(max(1, _SAMPLE_BYTES // (size * batch)), _SAMPLE_CALLS)


def _rounds(repeats: int, sample_bytes: int) -> int:
    """Repeats of a sample: short ones are disturbed more by what else the machine does, and cost little."""
    return repeats * min(max(1, _OFTEN_BYTES // sample_bytes), _OFTEN)


def _mapped(path: Path, nbytes: int) -> U8Array:
    """A populated mapping of a new file."""
    with path.open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return np.frombuffer(mmap.mmap(file.fileno(), nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE), np.uint8)


# ------------------------------------------------------------------ small things


def parse_bytes(text: str) -> int:
    """Bytes of "64K", "4M" or "65536".

    Raises:
        ConfigError: not a size of at least 4096 bytes in whole fragments.
    """
    found = re.fullmatch(r"(\d+)([KMG]?)", text.strip().upper())
    size = int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2]] if found else 0
    if size < 4096 or size % (FRAGMENTS * 8):
        raise ConfigError(f"--sizes has {text!r}: give bytes of at least 4K, as 64K or 4M")
    return size


def parse_counts(option: str, text: str, most: int = 4096) -> list[int]:
    """Numbers of "1,16,128".

    Raises:
        ConfigError: not whole numbers from 1 to ``most``.
    """
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if not all(1 <= count <= most for count in counts):
        raise ConfigError(f"{option} is {text!r}: give whole numbers from 1 to {most}, comma-separated")
    return counts


def describe_machine() -> dict[str, str | int]:
    """What figures from here should be read beside."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    return {
        "cpu": model,
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def human_bytes(nbytes: int) -> str:
    """ "4 MiB" or "64 KiB"."""
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
