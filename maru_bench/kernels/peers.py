"""The ways to move a case that are measured beside each other. Each moves whole batches and returns when the bytes are there.

============  ========================================================================================================
peer          store and load are
============  ========================================================================================================
maru          ``PagedMover``, as an engine uses it: whatever its measurement at start chose for this fragment size
kernel        Maru's Triton kernels alone, tables of the batch uploaded each time
batched       one ``cudaMemcpyBatchAsync`` over all fragments
memcpy        one ``cudaMemcpyAsync`` for each fragment, called from a tight loop in Python (some 1 µs a call above C)
sglang        SGLang's ``transfer_kv_*`` kernels to and from a pinned host pool of its own in the ``page_first`` layout
link          one copy of all the bytes in one piece, in pinned memory of the pool: what the link can do
reference     one torch copy for each fragment; for checks only
============  ========================================================================================================
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from abc import ABC, abstractmethod
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from maru_bench.kernels.cases import Case
from maru_core.errors import MaruError
from maru_core.pool.memory import PoolMemory
from maru_sglang.kernels.layout import memory_at
from maru_sglang.kernels.pinning import Pins
from maru_sglang.kernels.runtime import Runtime

U64 = npt.NDArray[np.uint64]

#: Peers that take one call or one descriptor for each fragment move at most so many of them in a sample: the rates
#: are the same, and a sample of small pages does not take seconds.
FRAGMENTS_MAX: Final = 1 << 16


class Machine:
    """Where a run takes place: a GPU with its stream and runtime, or the CPU alone (for checks)."""

    def __init__(self, device: torch.device, memory: PoolMemory, runtime: Runtime | None, pins: Pins) -> None:
        self.device = device
        self.memory = memory
        self.runtime = runtime
        self.pins = pins
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        #: For the calls of the CUDA runtime.
        self.stream_handle = 0 if self.stream is None else int(self.stream.cuda_stream)

    def finish(self) -> None:
        """Wait for what was queued on the stream."""
        if self.stream is not None:
            self.stream.synchronize()


class Peer(ABC):
    """Moves the first :attr:`count` pages of a case. Made once for each case; what it needs is made before it is timed."""

    name: str

    def __init__(self, case: Case, machine: Machine) -> None:
        self.case = case
        self.machine = machine
        self.count = len(case.page_ids)

    @property
    def moved_bytes(self) -> int:
        """By one store or load."""
        return self.count * self.case.nbytes

    @abstractmethod
    def store(self) -> None:
        """From the engine to the pool."""

    @abstractmethod
    def load(self) -> None:
        """From the pool to the engine."""

    def stored(self) -> str:
        """Empty, or what is wrong after a store into a spoiled pool."""
        return self.case.pool_holds(self.count)

    def close(self) -> None:
        """Nothing of the case is used any more."""
        return


class MaruPeer(Peer):
    """The mover that Maru's linker and vLLM adapter use."""

    name = "maru"

    def __init__(self, case: Case, machine: Machine) -> None:
        super().__init__(case, machine)
        from maru_sglang.kernels.mover import PagedMover

        self._mover = PagedMover(machine.memory, machine.device, pins=machine.pins)
        self._pages = case.pages()
        self._offsets = case.offsets

    def store(self) -> None:
        self._mover.store(self._offsets, self._pages)

    def load(self) -> None:
        self._mover.load(self._offsets, self._pages)

    def close(self) -> None:
        self._mover.close()


class KernelPeer(Peer):
    """The Triton kernels without the choice."""

    name = "kernel"

    def __init__(self, case: Case, machine: Machine) -> None:
        super().__init__(case, machine)
        from maru_sglang.kernels import gather, scatter

        self._gather, self._scatter = gather.gather, scatter.scatter
        self._rows = case.pages().rows
        self._slots = machine.pins.pointers(case.offsets)

    def store(self) -> None:
        with torch.cuda.stream(self.machine.stream):
            self._gather(self.case.layout, self._rows, self._slots)
        self.machine.finish()

    def load(self) -> None:
        with torch.cuda.stream(self.machine.stream):
            self._scatter(self.case.layout, self._rows, self._slots)
        self.machine.finish()


class _DmaPeer(Peer):
    """By copies that the GPU's copy engines make, one for each fragment."""

    def __init__(self, case: Case, machine: Machine) -> None:
        super().__init__(case, machine)
        if machine.runtime is None:
            raise MaruError("copies by the CUDA runtime need one")
        self._runtime = machine.runtime
        self.count = max(1, min(self.count, FRAGMENTS_MAX // len(case.layout)))
        layout = case.layout
        rows = case.pages(self.count).rows.astype(np.uint64)
        engine = layout.bases + rows[:, None] * layout.strides
        pool = machine.pins.pointers(case.offsets[: self.count])[:, None] + layout.offsets
        self._engine, self._pool = np.ascontiguousarray(engine).reshape(-1), np.ascontiguousarray(pool).reshape(-1)
        self._sizes = np.ascontiguousarray(np.broadcast_to(layout.sizes, engine.shape)).reshape(-1)


class BatchedPeer(_DmaPeer):
    name = "batched"

    def store(self) -> None:
        self._move(self._pool, self._engine)

    def load(self) -> None:
        self._move(self._engine, self._pool)

    def _move(self, targets: U64, sources: U64) -> None:
        self._runtime.memcpy_batch_async(targets, sources, self._sizes, self.machine.stream_handle)
        self.machine.finish()


class MemcpyPeer(_DmaPeer):
    name = "memcpy"

    def __init__(self, case: Case, machine: Machine) -> None:
        super().__init__(case, machine)
        # Everything that a call needs is made before; Runtime.memcpy_async would make it each time.
        stream = ctypes.c_void_p(machine.stream_handle)
        self._calls = {
            to_pool: [
                (ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(size), 4, stream)
                for target, source, size in zip(
                    (self._pool if to_pool else self._engine).tolist(),
                    (self._engine if to_pool else self._pool).tolist(),
                    self._sizes.tolist(),
                    strict=True,
                )
            ]
            for to_pool in (True, False)
        }
        self._copy = ctypes.CDLL(self._runtime.library).cudaMemcpyAsync

    def store(self) -> None:
        self._move(True)

    def load(self) -> None:
        self._move(False)

    def _move(self, to_pool: bool) -> None:
        copy = self._copy
        for arguments in self._calls[to_pool]:
            code = copy(*arguments)
            if code:
                self._runtime.last_error()
                raise MaruError(f"cudaMemcpyAsync of {arguments[2].value} bytes failed with {code}: see dmesg")
        self.machine.finish()


class LinkPeer(Peer):
    """One copy each way between a device buffer and one registration of the pool."""

    name = "link"

    def __init__(self, case: Case, machine: Machine) -> None:
        super().__init__(case, machine)
        if machine.runtime is None:
            raise MaruError("copies by the CUDA runtime need one")
        self._runtime = machine.runtime
        nbytes = min(self.count * case.nbytes, machine.pins.chunk_bytes, case.memory.geometry.data_bytes)
        self._nbytes = nbytes
        self._buffer = torch.zeros(nbytes, dtype=torch.uint8, device=machine.device)
        first = np.array([case.memory.geometry.off_data], np.uint64)
        self._pool = int(machine.pins.pointers(first)[0])

    @property
    def moved_bytes(self) -> int:
        return self._nbytes

    def store(self) -> None:
        self._runtime.memcpy_async(self._pool, self._buffer.data_ptr(), self._nbytes, self.machine.stream_handle)
        self.machine.finish()

    def load(self) -> None:
        self._runtime.memcpy_async(self._buffer.data_ptr(), self._pool, self._nbytes, self.machine.stream_handle)
        self.machine.finish()

    def stored(self) -> str:
        raise AssertionError("it moves no pages")


class ReferencePeer(Peer):
    """The plain torch copies that the kernels are held against."""

    name = "reference"

    def __init__(self, case: Case, machine: Machine) -> None:
        super().__init__(case, machine)
        data = torch.from_numpy(case.memory.data)
        starts = (case.offsets - np.uint64(case.memory.geometry.off_data)).tolist()
        self._slots = [data[start : start + case.nbytes] for start in starts]
        layout, rows = case.layout, case.pages().rows
        self._pairs = [
            (
                memory_at(int(base + np.uint64(row) * stride), int(size), layout.device),
                slot[int(offset) : int(offset + size)],
            )
            for slot, row in zip(self._slots, rows.tolist(), strict=True)
            for base, stride, size, offset in zip(
                layout.bases, layout.strides, layout.sizes, layout.offsets, strict=True
            )
        ]

    def store(self) -> None:
        for engine, pool in self._pairs:
            pool.copy_(engine)

    def load(self) -> None:
        for engine, pool in self._pairs:
            engine.copy_(pool)


class SGLangPeer(Peer):
    """``sgl_kernel``'s kernels, called as ``pool_host/mha.py`` of SGLang 0.5.23 calls them with ``page_first``."""

    name = "sglang"
    module = "sgl_kernel.kvcacheio"

    def __init__(self, case: Case, machine: Machine) -> None:
        super().__init__(case, machine)
        self._kernels: Any = importlib.import_module(self.module)
        model = case.model
        tokens = self.count * case.page_tokens
        self._item = model.row_bytes
        self._row = model.row_bytes * model.layers
        self._hosts = [
            torch.zeros(
                (tokens, model.layers, model.row_bytes), dtype=torch.uint8, pin_memory=machine.device.type == "cuda"
            )
            for _ in range(model.buffers)
        ]
        self._groups = [case.buffers[i * model.layers : (i + 1) * model.layers] for i in range(model.buffers)]
        self._tables = [
            torch.tensor([buffer.data_ptr() for buffer in group], dtype=torch.uint64, device=machine.device)
            for group in self._groups
        ]
        within = np.arange(case.page_tokens)
        device_rows = (case.pages().rows[:, None] + within).reshape(-1)
        pages = np.random.default_rng(len(device_rows)).permutation(self.count)  # scattered in the host pool, too
        host_rows = (pages[:, None] * case.page_tokens + within).reshape(-1)
        self._device_rows = torch.from_numpy(device_rows).to(machine.device)
        self._host_rows = torch.from_numpy(host_rows).to(machine.device)
        self._host_rows_here = torch.from_numpy(host_rows)

    def store(self) -> None:
        layers = self.case.model.layers
        with torch.cuda.stream(self.machine.stream):
            if len(self._hosts) == 2:
                self._kernels.transfer_kv_all_layer_lf_pf(
                    src_k_layers=self._tables[0],
                    dst_k=self._hosts[0],
                    src_v_layers=self._tables[1],
                    dst_v=self._hosts[1],
                    src_indices=self._device_rows,
                    dst_indices=self._host_rows,
                    item_size=self._item,
                    dst_layout_dim=self._row,
                    num_layers=layers,
                )
            else:
                self._kernels.transfer_kv_all_layer_mla_lf_pf(
                    src_layers=self._tables[0],
                    dst=self._hosts[0],
                    src_indices=self._device_rows,
                    dst_indices=self._host_rows,
                    item_size=self._item,
                    dst_layout_dim=self._row,
                    num_layers=layers,
                )
        self.machine.finish()

    def load(self) -> None:
        shared = {
            "src_indices": self._host_rows,
            "dst_indices": self._device_rows,
            "item_size": self._item,
            "src_layout_dim": self._row,
        }
        with torch.cuda.stream(self.machine.stream):
            for layer in range(self.case.model.layers):
                if len(self._hosts) == 2:
                    self._kernels.transfer_kv_per_layer_pf_lf(
                        src_k=self._hosts[0],
                        dst_k=self._groups[0][layer],
                        src_v=self._hosts[1],
                        dst_v=self._groups[1][layer],
                        layer_id=layer,
                        **shared,
                    )
                else:
                    self._kernels.transfer_kv_per_layer_mla_pf_lf(
                        src=self._hosts[0], dst=self._groups[0][layer], layer_id=layer, **shared
                    )
        self.machine.finish()

    def stored(self) -> str:
        rows = self._device_rows.cpu()
        for index, host in enumerate(self._hosts):
            for layer in range(self.case.model.layers):
                original = self.case.original[index * self.case.model.layers + layer].cpu()
                if not torch.equal(host[self._host_rows_here, layer], original[rows]):
                    return f"layer {layer} of host pool {index} is not what the engine has"
        return ""


def interpreting() -> bool:
    """Whether Triton's kernels run on the CPU in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def absent(peer: type[Peer], machine: Machine) -> str:
    """Why a peer cannot take part; empty if it can."""
    if peer is SGLangPeer:
        if machine.device.type != "cuda":
            return "sgl_kernel's kernels need a GPU"
        if importlib.util.find_spec("sgl_kernel") is None:
            return "sgl_kernel is not installed"
    if peer is KernelPeer and machine.device.type != "cuda" and not interpreting():
        return "Triton's kernels need a GPU (or TRITON_INTERPRET=1)"
    if peer in (BatchedPeer, MemcpyPeer, LinkPeer) and machine.runtime is None:
        return "there is no CUDA runtime"
    if peer is BatchedPeer and machine.runtime is not None and not machine.runtime.has_batch:
        return "this CUDA runtime or driver has no cudaMemcpyBatchAsync (12.8)"
    return ""
