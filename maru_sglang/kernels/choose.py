"""Chooses how pages are copied on a device: by kernels, by its copy engines, or by the CPU.

What is best depends on the GPU, its link, the driver and the size of the fragments, so it is measured: once, for some
fragment sizes and both directions, in about a second, in page-locked memory of its own. The result is kept on disk for the
next process with the same GPU and software, and said in the log. Where kernels are not much faster, the copy engines
are taken, which leave all multiprocessors to the model; of kernels, the one with the fewest programs that is as fast.

On a CPU nothing is measured: :class:`maru_core.mover.CxlMover` copies. No figure here was measured on a GPU yet: the
shares below are a judgement.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch

from maru_core.settings import cache_folder
from maru_sglang.kernels import batched
from maru_sglang.kernels.layout import Layout, Piece
from maru_sglang.kernels.runtime import Runtime

log = logging.getLogger(__name__)

Direction = Literal["gather", "scatter"]
How = Literal["kernel", "dma", "cpu"]
#: GB/s of a direction, by bytes of a fragment, by the name of what was tried: ``dma``, or ``kernel/PROGRAMS``.
Rates = Mapping[str, Mapping[int, Mapping[str, float]]]

DIRECTIONS: Final[tuple[Direction, ...]] = ("gather", "scatter")
FRAGMENTS: Final = (1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10)
PROGRAMS: Final = (4, 8, 16, 32)
#: Copy engines are taken from this share of the best kernel's rate on, fewer programs from this share of the most.
NEAR: Final = 0.95
#: Bytes that are copied to measure, each way: well beyond a GPU's cache.
SCRATCH_BYTES: Final = 128 << 20
#: Changes with what the file means.
VERSION: Final = 1
#: How long a process waits for another one that measures on the same machine, seconds.
WAIT_S: Final = 20.0


@dataclass(frozen=True)
class Choice:
    """How one batch is copied; ``programs`` of a kernel, None: as many as is usual."""

    how: How
    programs: int | None = None

    def __str__(self) -> str:
        return self.how if self.programs is None else f"{self.how} of {self.programs} programs"


@dataclass(frozen=True)
class Choices:
    """For each direction, the choice for fragments of some sizes."""

    table: Mapping[str, Mapping[int, Choice]]

    @classmethod
    def always(cls, choice: Choice) -> Choices:
        return cls({direction: {1: choice} for direction in DIRECTIONS})

    @classmethod
    def of_rates(cls, rates: Rates) -> Choices:
        return cls(
            {direction: {size: decide(found) for size, found in rates[direction].items()} for direction in DIRECTIONS}
        )

    def pick(self, direction: Direction, fragment_bytes: int) -> Choice:
        """The choice for the size that is nearest, by ratio."""
        table = self.table[direction]
        nearest = min(table, key=lambda size: abs(np.log(size) - np.log(max(1, fragment_bytes))))
        return table[nearest]

    def __str__(self) -> str:
        return "; ".join(
            f"{direction} " + ", ".join(f"{size} B {choice}" for size, choice in sorted(self.table[direction].items()))
            for direction in DIRECTIONS
        )


def decide(rates: Mapping[str, float]) -> Choice:
    """The choice by what was measured for one direction and size."""
    kernels = {int(name.removeprefix("kernel/")): rate for name, rate in rates.items() if name.startswith("kernel/")}
    best = max(kernels.values(), default=0.0)
    if rates.get("dma", 0.0) >= best * NEAR:
        return Choice("dma")
    return Choice("kernel", min(programs for programs, rate in kernels.items() if rate >= best * NEAR))


def choices(
    device: torch.device,
    runtime: Runtime | None,
    *,
    folder: Path | None = None,
    measure: Callable[[torch.device, Runtime], Rates] | None = None,
) -> Choices:
    """The choices for a device; the first call of a process reads or measures them, and says them.

    Args:
        folder: where results are kept; None: ``maru`` in the user's cache.
        measure: None: :func:`measure_rates`.
    """
    if device.type == "cpu" or runtime is None:
        return Choices.always(Choice("cpu"))
    with _lock:
        found = _chosen.get(str(device))
        if found is None:
            found = _chosen[str(device)] = _find(device, runtime, folder, measure or measure_rates)
        return found


def _find(device: torch.device, runtime: Runtime, folder: Path | None, measure: Callable[..., Rates]) -> Choices:
    what = str(device)
    try:
        what = _identity(device, runtime)
        folder = folder or cache_folder()
        path = folder / f"kernels-{VERSION}.json"
        with _alone(folder):
            kept = _read(path)
            rates = kept.get(what)
            origin = f"measured before, {path}"
            if rates is None:
                rates, origin = measure(device, runtime), "measured now"
                _write(path, kept | {what: rates})
            found = Choices.of_rates(rates)
    except Exception as error:  # nothing of this is worth an engine that does not start
        found = Choices.always(Choice("kernel"))
        log.warning("how to copy on %s could not be measured (%s): by kernels, whatever the size", what, error)
    else:
        log.info("copies on %s (%s): %s", what, origin, found)
    return found


def _identity(device: torch.device, runtime: Runtime) -> str:
    """What a measurement is good for."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name}, CUDA runtime {runtime.version}, torch {torch.__version__}"


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Ranks that measured at the same time would measure each other. One that hangs keeps the others for a while only."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "kernels.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        log.warning("%s cannot be written (%s): how to copy is measured at each start", folder, error.strerror)
        yield
        return
    deadline = time.monotonic() + WAIT_S
    try:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def _read(path: Path) -> dict[str, Rates]:
    """What is kept; what cannot be read counts as nothing."""
    kept: dict[str, Rates] = {}
    try:
        for what, directions in json.loads(path.read_text()).items():
            rates: dict[str, dict[int, dict[str, float]]] = {
                direction: {
                    int(size): {str(name): float(rate) for name, rate in found.items()}
                    for size, found in directions[direction].items()
                }
                for direction in DIRECTIONS
            }
            Choices.of_rates(rates)
            kept[what] = rates
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        log.warning("%s is of no use (%s): measured again", path, error)
    return kept


def _write(path: Path, kept: Mapping[str, Rates]) -> None:
    spare = path.with_suffix(f".{os.getpid()}")
    try:
        spare.write_text(json.dumps(kept))
        os.replace(spare, path)
    except OSError as error:
        log.warning("%s cannot be written (%s): how to copy is measured at each start", path, error.strerror)


# ------------------------------------------------------------ measuring


def measure_rates(device: torch.device, runtime: Runtime) -> dict[str, dict[int, dict[str, float]]]:
    """GB/s on a GPU, by direction, bytes of a fragment and way."""
    engine = torch.zeros(SCRATCH_BYTES, dtype=torch.uint8, device=device)
    pool = torch.zeros(SCRATCH_BYTES, dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.Stream(device)
    rates: dict[str, dict[int, dict[str, float]]] = {}
    with torch.cuda.device(device), torch.cuda.stream(stream):
        for direction in DIRECTIONS:
            rates[direction] = {}
            for size in FRAGMENTS:
                ways = _ways(direction, size, engine, pool, runtime, int(stream.cuda_stream))
                rates[direction][size] = {name: _rate(way, stream) for name, way in ways.items()}
    return rates


def _ways(
    direction: Direction, size: int, engine: torch.Tensor, pool: torch.Tensor, runtime: Runtime, stream: int
) -> dict[str, Callable[[], Any]]:
    """Each way to move the scratch buffers as objects of 16 fragments, in an order that is none."""
    from maru_sglang.kernels import gather, scatter

    pieces, random = 16, np.random.default_rng(0)
    count = SCRATCH_BYTES // (pieces * size)
    layout = Layout.of_pieces(
        [Piece(engine.data_ptr() + index * count * size, size, size, index) for index in range(pieces)],
        rows=count, row_span=1, device=engine.device, keep=(engine,),
    )  # fmt: skip
    rows = random.permutation(count)
    slots = random.permutation(count).astype(np.uint64) * np.uint64(layout.nbytes) + np.uint64(pool.data_ptr())
    move = gather.gather if direction == "gather" else scatter.scatter

    def kernel(programs: int) -> Callable[[], None]:
        return lambda: move(layout, rows, slots, programs=programs)

    ways: dict[str, Callable[[], Any]] = {f"kernel/{programs}": kernel(programs) for programs in PROGRAMS}
    # With the work that goes into it each time, as in use.
    ways["dma"] = lambda: batched.copy(
        runtime, batched.copies(layout, rows, slots), stream, to_pool=direction == "gather"
    )
    return ways


def _rate(way: Callable[[], Any], stream: Any) -> float:
    """GB/s by the clock, of the better of two, after one that compiles."""
    way()
    stream.synchronize()
    best = float("inf")
    for _ in range(2):
        start = time.perf_counter()
        way()
        stream.synchronize()
        best = min(best, time.perf_counter() - start)
    return SCRATCH_BYTES / best / 1e9


_lock: Final = threading.Lock()
_chosen: Final[dict[str, Choices]] = {}
