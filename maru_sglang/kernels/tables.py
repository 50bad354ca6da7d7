"""What a kernel is told, as tables in its device's memory: a layout's pieces cut into chunks, and a batch's addresses.

A layout's tables are made once; a batch is one small upload. So a launch has a handful of numbers for arguments, whatever
the number of layers and pages, and one launch moves them all. Torch only: these tables know no kernel.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from maru_sglang.kernels.layout import I64, U64, Layout, bounds

#: Bytes that a program has under way at once: with 256 threads, 8 accesses of 16 bytes each. Not measured.
TILE_BYTES: Final = 32 << 10
#: Chunks are not cut smaller, nor rows of a tile made shorter.
SPAN_MIN: Final = 512
#: The widest access, bytes.
WIDEST: Final = 16
#: Columns of the table of chunks.
COLUMNS: Final = ("base", "stride", "offset", "size", "aligned")


class Widths(NamedTuple):
    """In accesses of how many bytes a launch copies: ``wide`` the chunks that are marked aligned, ``narrow`` the others."""

    wide: int
    narrow: int


@dataclass(frozen=True, eq=False)
class Tables:
    """A layout's pieces, cut into chunks of at most ``span`` bytes, sorted by layer.

    Attributes:
        chunks: i64 on the device, shape ``(5, c)``: see :data:`COLUMNS`. A chunk of the page at row ``r`` is the ``size``
            bytes at ``base + r * stride`` and, in the object, at ``offset``; ``aligned`` is 1 where all of these are
            multiples of 16, for every row that the tables are for.
        layers: of each chunk, in ascending order; i32, shape ``(c,)``.
        span: bytes, a power of two.
        narrow: the widest access that fits every chunk that is not aligned; 16 where all are.
        some_aligned: whether any chunk is.
    """

    chunks: torch.Tensor
    layers: npt.NDArray[np.int32]
    span: int
    narrow: int
    some_aligned: bool

    @classmethod
    def of(cls, layout: Layout, row_unit: int = WIDEST) -> Tables:
        """The tables of a layout for batches of this ``row_unit``: made once for pages where they belong, once for others."""
        unit = int(alignment(np.uint64(layout.row_span)))
        unit = unit if row_unit >= unit else 1
        with _lock:
            known = _known.setdefault(layout, {})
            tables = known.get(unit)
        if tables is None:
            tables = cls._make(layout, unit)
            with _lock:
                known[unit] = tables
        return tables

    @classmethod
    def _make(cls, layout: Layout, unit: int) -> Tables:
        """For rows that are multiples of ``unit``."""
        largest = int(layout.sizes.max())
        span = min(TILE_BYTES, max(SPAN_MIN, 1 << (largest - 1).bit_length()))
        order = np.argsort(layout.layers, kind="stable")
        counts = -(-layout.sizes[order].astype(np.int64) // span)
        piece = np.repeat(order, counts)
        firsts = np.repeat(np.cumsum(counts) - counts, counts)
        start = ((np.arange(len(piece)) - firsts) * span).astype(np.uint64)
        size = np.minimum(layout.sizes[piece] - start, np.uint64(span))
        columns = np.stack([layout.bases[piece] + start, layout.strides[piece], layout.offsets[piece] + start, size])
        steps = np.array([[1], [unit], [1], [1]], np.uint64)
        widths = alignment(np.bitwise_or.reduce(columns * steps, axis=0))
        aligned = widths == WIDEST
        narrow = widths[~aligned]
        table = np.concatenate([columns, aligned.astype(np.uint64)[None]]).astype(np.int64)
        return cls(
            # Waited for: whichever stream uses it first may not be this one.
            chunks=torch.from_numpy(table).to(layout.device),
            layers=layout.layers[piece],
            span=span,
            narrow=int(narrow.min()) if len(narrow) else WIDEST,
            some_aligned=bool(aligned.any()),
        )

    def range_of(self, layers: range | None) -> tuple[int, int]:
        """First chunk of some layers, and how many they have; None: of all."""
        if layers is None:
            return 0, len(self.layers)
        first, last = np.searchsorted(self.layers, bounds(layers)).tolist()
        return first, last - first

    def widths(self, batch: Batch) -> Widths:
        """What this batch allows."""
        if batch.width < WIDEST:
            width = min(batch.width, self.narrow)
            return Widths(width, width)
        return Widths(WIDEST if self.some_aligned else self.narrow, self.narrow)


@dataclass(frozen=True, eq=False)
class Batch:
    """Pages and their slots, on the device: i64, shape ``(2, n)``: first rows, and addresses of slots.

    ``width`` is the widest access that every slot allows, bytes; ``row_unit`` the largest power of two, up to 16, of which
    every row is a multiple.
    """

    table: torch.Tensor
    width: int
    row_unit: int

    @classmethod
    def upload(cls, device: torch.device, rows: I64, slots: U64) -> Batch:
        """Queued on the current stream, as the launches that use it must be."""
        if rows.shape != slots.shape or rows.ndim != 1:
            raise ValueError(
                f"rows of shape {rows.shape} and slots of shape {slots.shape}: give one slot for each page"
            )
        width = int(alignment(np.bitwise_or.reduce(slots, initial=np.uint64(0))))
        unit = int(alignment(np.bitwise_or.reduce(rows.astype(np.uint64), initial=np.uint64(0))))
        return cls(upload(np.stack([rows, slots.astype(np.int64)]), device), width, unit)

    def __len__(self) -> int:
        """Pages."""
        return int(self.table.shape[1])


def alignment(values: npt.NDArray[np.uint64] | np.uint64) -> npt.NDArray[np.uint64]:
    """The largest power of two, up to 16, that divides each."""
    values = values | np.uint64(WIDEST)
    return np.asarray(values & (~values + np.uint64(1)))


def upload(table: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """A small table for a device, copied on its current stream without waiting for it."""
    host = torch.from_numpy(np.ascontiguousarray(table))
    if device.type == "cpu":
        return host
    # torch keeps pinned memory from other use until the copies that were queued from it are done.
    return host.pin_memory().to(device, non_blocking=True)


def default_programs(device: torch.device) -> int:
    """A twelfth of the multiprocessors, so that the model keeps the others; not measured."""
    if device.type == "cpu":
        return 2  # of an interpreter, which runs them one after another
    return max(4, int(torch.cuda.get_device_properties(device).multi_processor_count) // 12)


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Launches and allocations inside go to this device."""
    return contextlib.nullcontext() if device.type == "cpu" else torch.cuda.device(device)


_lock: Final = threading.Lock()
_known: Final[weakref.WeakKeyDictionary[Layout, dict[int, Tables]]] = weakref.WeakKeyDictionary()
