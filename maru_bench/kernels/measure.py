"""The run of ``maru-bench kernels``: checks every way to move every case, then measures them by turns. Needs torch."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Final, Protocol

import msgspec
import numpy as np
import torch

from maru_bench.copy import describe_machine
from maru_bench.kernels import peers as ways
from maru_bench.kernels.cases import Case, slot_bytes
from maru_bench.kernels.models import MODELS, Model
from maru_bench.kernels.peers import Machine, Peer
from maru_bench.kernels.result import OPERATIONS, Checked, KernelRow, KernelsOptions, KernelsResult, make_row
from maru_core.errors import MaruError
from maru_core.pool.memory import PoolMemory
from maru_sglang.kernels.choose import choices
from maru_sglang.kernels.numa import gpu_node
from maru_sglang.kernels.pinning import Pins
from maru_sglang.kernels.runtime import CudaError, Runtime

Narrate = Callable[[str], None]

#: Order of the turns. The reference takes part in checks only: it is slow, and nobody would use it.
_PEERS: Final[tuple[type[Peer], ...]] = (
    ways.MaruPeer,
    ways.KernelPeer,
    ways.BatchedPeer,
    ways.MemcpyPeer,
    ways.SGLangPeer,
)
#: Maru's own: if one of them fails, so does the benchmark.
_OURS: Final = ("maru", "kernel", "reference", "link")
_CHUNK_BYTES: Final = 1 << 30
_PIN_S: Final = 600.0
_PAGES_MIN: Final = 4
#: Cases of a check: as many layers of the models, so many pages.
_CHECK_LAYERS: Final = 3
_CHECK_PAGES: Final = 5
#: Beside which peers a matrix product is timed; how long it runs, seconds; and how often.
_BESIDE: Final = ("maru", "kernel", "batched", "sglang")
_PRODUCT_S: Final = 0.2
_PRODUCT_SIZE: Final = 8192
_PRODUCT_REPEATS: Final = 3


class NoGpuError(MaruError):
    """There is no GPU to measure with; the message says why."""


def run(options: KernelsOptions, narrate: Narrate) -> KernelsResult:
    """Check every case, and measure it where there is a GPU.

    Raises:
        NoGpuError: a measurement was asked for and there is none.
        MaruError: no memory for the pool, or it cannot be pinned.
    """
    runtime = None if options.check else _gpu(options.device)
    device = torch.device("cpu") if options.check else torch.device("cuda", options.device)
    models = {name: _shortened(MODELS[name]) if options.check else MODELS[name] for name in options.models}

    def pages_of(model: Model, page_tokens: int) -> int:
        nbytes = model.token_bytes * page_tokens
        return _CHECK_PAGES if options.check else max(_PAGES_MIN, options.sample_bytes // nbytes)

    sizes = [
        (slot_bytes(model.token_bytes * tokens), pages_of(model, tokens))
        for model in models.values()
        for tokens in options.page_tokens
    ]
    checked: list[Checked] = []
    rows: list[KernelRow] = []
    absent: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        narrate("making the pool")
        memory = stack.enter_context(_pool(sizes))
        pins = Pins(memory, runtime, _CHUNK_BYTES)
        stack.callback(pins.close)
        narrate("pinning the pool")
        geometry = memory.geometry
        extents = np.arange(geometry.extent_count, dtype=np.uint64) * np.uint64(geometry.extent_bytes)
        pins.ensure(extents + np.uint64(geometry.off_data), geometry.extent_bytes, _PIN_S)
        machine = Machine(device, memory, runtime, pins)
        product = _Product(device) if device.type == "cuda" else None
        for name, model in models.items():
            for page_tokens in options.page_tokens:
                narrate(f"{name}, pages of {page_tokens} tokens")
                case = Case(model, page_tokens, pages_of(model, page_tokens), memory, device, options.seed)
                there = take_part(case, machine, absent, checked, name)
                try:
                    if product is not None and any(peer.name == "maru" for peer in there):
                        rows += measure(name, case, machine, there, product, options.repeats, narrate)
                finally:
                    for peer in there:
                        peer.close()
    return KernelsResult(
        machine=_describe(runtime, options.device),
        seed=options.seed,
        repeats=options.repeats,
        sample_bytes=options.sample_bytes,
        chosen=str(choices(device, runtime)) if runtime is not None else "",
        pinning=str(pins.report()) if runtime is not None else "",
        checked=checked,
        absent=absent,
        rows=rows,
    )


def take_part(case: Case, machine: Machine, absent: dict[str, str], checked: list[Checked], model: str) -> list[Peer]:
    """The peers that move this case as they should; all others are told in ``absent`` or ``checked``."""
    there: list[Peer] = []
    for kind in (*_PEERS, *(() if machine.device.type == "cuda" else (ways.ReferencePeer,))):
        why = ways.absent(kind, machine)
        if why:
            absent[kind.name] = why
            continue
        problem, nbytes = "", 0
        try:
            peer = kind(case, machine)
            nbytes = peer.moved_bytes
            problem = check(peer)
        except Exception as error:  # whatever torch or another's kernels raise is news, and not the end of the run
            problem = f"{type(error).__name__}: {error}"
        if problem and kind.name not in _OURS:
            absent[kind.name] = f"{model}, pages of {case.page_tokens}: {problem}"
            continue
        checked.append(
            Checked(model=model, page_tokens=case.page_tokens, peer=kind.name, nbytes=nbytes, problem=problem)
        )
        if not problem:
            there.append(peer)
    return there


def check(peer: Peer) -> str:
    """Move the case there and back and look at every byte; empty, or what is wrong."""
    case = peer.case
    case.restore_engine()
    case.spoil_pool()
    synchronize(peer.machine.device)
    peer.store()
    problem = peer.stored()
    if problem:
        return f"after the store, {problem}"
    case.spoil_engine()
    synchronize(peer.machine.device)
    peer.load()
    problem = case.engine_holds(peer.count)
    case.restore_engine()
    synchronize(peer.machine.device)
    return f"after the load, {problem}" if problem else ""


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sample(peers: list[Peer], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each operation of each peer, taken by turns; the first round is not counted."""
    seconds: dict[str, dict[str, list[float]]] = {op: {peer.name: [] for peer in peers} for op in OPERATIONS}
    for round_ in range(repeats + 1):
        # Another one begins each time, so that none always finds caches and clocks as the same other one left them.
        turn = [peers[(round_ + i) % len(peers)] for i in range(len(peers))]
        for peer in turn:
            for operation in OPERATIONS:
                move = peer.store if operation == "store" else peer.load
                synchronize(peer.machine.device)
                began = time.perf_counter()
                move()
                took = time.perf_counter() - began
                if round_:
                    seconds[operation][peer.name].append(took)
    return seconds


class Beside(Protocol):
    """Work of the model's kind, beside which pages move."""

    def beside(self, move: Callable[[], None], nbytes: int) -> tuple[float, float]:
        """How many times longer the work takes while ``move`` runs again and again, and GB/s that it moved."""


def measure(
    model: str, case: Case, machine: Machine, there: list[Peer], product: Beside, repeats: int, narrate: Narrate
) -> list[KernelRow]:
    """The rows of one case.

    Args:
        there: what takes part besides the link; Maru is among them.
    """
    peers = [*there, ways.LinkPeer(case, machine)]
    seconds = sample(peers, repeats)
    moved = {peer.name: peer.moved_bytes for peer in peers}
    rows = []
    for operation in OPERATIONS:
        narrate(f"{model}, pages of {case.page_tokens} tokens, beside a matrix product ({operation})")
        slowdown, busy = {}, {}
        for peer in there:
            if peer.name in _BESIDE:
                move = peer.store if operation == "store" else peer.load
                slowdown[peer.name], busy[peer.name] = product.beside(move, peer.moved_bytes)
        rows.append(
            make_row(
                model,
                case.page_tokens,
                operation,
                case.nbytes,
                case.fragment_bytes,
                seconds[operation],
                moved,
                slowdown,
                busy,
            )
        )
    return rows


class _Product:
    """A matrix product that wants all of the GPU's multiprocessors, as a model's does."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        shape = (_PRODUCT_SIZE, _PRODUCT_SIZE)
        self._left, self._right, self._out = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(3))
        torch.cuda.synchronize(device)
        self._count = 8
        self._time(None)
        self._count = max(8, math.ceil(self._count * _PRODUCT_S / self._time(None)[0]))

    def beside(self, move: Callable[[], None], nbytes: int) -> tuple[float, float]:
        alone, together, rates = [], [], []
        for _ in range(_PRODUCT_REPEATS):
            alone.append(self._time(None)[0])
            seconds, moves, moving = self._time(move)
            together.append(seconds)
            rates.append(moves * nbytes / moving / 1e9)
        return statistics.median(together) / statistics.median(alone), statistics.median(rates)

    def _time(self, move: Callable[[], None] | None) -> tuple[float, int, float]:
        """Seconds of the product; how often ``move`` ran, and the seconds of that."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            begin.record()
            for _ in range(self._count):
                torch.mm(self._left, self._right, out=self._out)
            end.record()
        moves, began = 0, time.perf_counter()
        while move is not None and not end.query():
            move()
            moves += 1
        moving = time.perf_counter() - began
        end.synchronize()
        return begin.elapsed_time(end) / 1e3, moves, moving


def _gpu(ordinal: int) -> Runtime:
    """The CUDA runtime, with the GPU chosen for this thread.

    Raises:
        NoGpuError: torch or the runtime finds none, and why.
    """
    cure = "run it on a machine with one, or check the code alone with --check"
    if torch.version.cuda is None:
        raise NoGpuError(f"no GPU to measure with: this torch ({torch.__version__}) is built without CUDA; {cure}")
    if not torch.cuda.is_available():
        raise NoGpuError(f"no GPU to measure with: torch {torch.__version__} finds no usable driver or device; {cure}")
    if not 0 <= ordinal < torch.cuda.device_count():
        raise NoGpuError(f"no GPU {ordinal} to measure with, of {torch.cuda.device_count()}: give another --device")
    torch.cuda.set_device(ordinal)
    torch.zeros(1, device="cuda")  # the context, before anything else asks
    try:
        runtime = Runtime.find(ordinal)
    except CudaError as error:
        raise NoGpuError(f"no GPU to measure with: {error}") from error
    if runtime is None:
        raise NoGpuError("no GPU to measure with: there is no libcudart to be found; install torch with CUDA from PyPI")
    return runtime


def _shortened(model: Model) -> Model:
    """The same rows, fewer layers."""
    return msgspec.structs.replace(model, layers=min(model.layers, _CHECK_LAYERS))


@contextlib.contextmanager
def _pool(sizes: list[tuple[int, int]]) -> Iterator[PoolMemory]:
    """A real pool in shared memory, all of it there, with room for cases of ``(slot bytes, pages)``."""
    largest = max(size for size, _ in sizes)
    extent = max(2 << 20, 1 << (4 * largest - 1).bit_length())
    extent = min(extent, max(64 << 20, 1 << (largest - 1).bit_length()))
    # Twice what moves, so that slots can be far from each other.
    extents = max(-(-2 * pages // (extent // size)) for size, pages in sizes) + 1
    tables = (4 << 20) + extents * (extent // 4096) * 64
    uri = f"shm://maru-bench-kernels-{os.getpid()}-{uuid.uuid4().hex[:8]}?extent={extent >> 20}M"
    with PoolMemory.create(uri, extents * extent + tables) as memory:
        try:
            if not all(memory.provision(index) for index in range(memory.geometry.extent_count)):
                raise MaruError(
                    f"/dev/shm has not the {memory.geometry.data_bytes >> 20} MiB that the pool needs: "
                    "make it larger (mount -o remount,size=...) or give smaller --bytes"
                )
            yield memory
        finally:
            memory.unlink()


def _describe(runtime: Runtime | None, ordinal: int) -> dict[str, str | int]:
    machine = describe_machine() | {
        "torch": str(torch.__version__),
        "triton": _version("triton"),
        "maru": _version("maru-sglang"),
        "sgl_kernel": _version("sgl-kernel"),
    }
    if runtime is None:
        return machine
    bus = runtime.pci_bus_id()
    node = gpu_node(bus)
    driver = ""
    with contextlib.suppress(OSError):
        found = re.search(r"\b(\d+\.\d+(\.\d+)?)\b", Path("/proc/driver/nvidia/version").read_text())
        driver = found[1] if found else ""
    return machine | {
        "gpu": torch.cuda.get_device_name(ordinal),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(ordinal))),
        "pci": bus,
        "gpu_numa_node": -1 if node is None else node,
        "driver": driver,
        "cuda": str(torch.version.cuda),
        "cuda_runtime": runtime.version,
        "architecture": platform.machine(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
