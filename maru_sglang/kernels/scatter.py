"""Scatter: slots of the pool into pages of an engine's buffers.

Kernel, launcher, wrapper, and the plain reference that says what they must do; all as in
:mod:`maru_sglang.kernels.gather`, the other way. Layer by layer is a launch for each range of layers, on one stream.
Whether what was in the slots was still the object is for whoever looks at their generations afterwards. Needs Triton.
"""

# ruff: noqa: N803  # constants of a kernel are written in capitals
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from maru_sglang.kernels.layout import I64, U64, Layout, memory_at
from maru_sglang.kernels.runs import LANES, NUM_WARPS, copy_chunk
from maru_sglang.kernels.tables import TILE_BYTES, Batch, Tables, default_programs, on_device


@triton.jit(do_not_specialize=["pages", "pitch", "first", "chunks"])  # type: ignore[untyped-decorator]
def scatter_kernel(
    batch: tl.tensor,
    table: tl.tensor,
    pages: tl.int64,
    pitch: tl.int64,
    first: tl.int64,
    chunks: tl.int64,
    WIDE: tl.constexpr,
    NARROW: tl.constexpr,
    SPAN: tl.constexpr,
    ITEMS: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Chunk after chunk, so that layers come in order; of each, tiles of ``ITEMS`` pages. All counts are 64 bits wide."""
    tiles_of_chunk = (pages + ITEMS - 1) // ITEMS
    tile = tl.program_id(0).to(tl.int64)
    # Not a range, whose bounds Triton's interpreter cannot take from tensors under NumPy 2.4.
    while tile < tiles_of_chunk * chunks:
        chunk = table + first + tile // tiles_of_chunk
        page = (tile % tiles_of_chunk) * ITEMS + tl.arange(0, ITEMS)
        here = page < pages
        rows = tl.load(batch + page, mask=here, other=0)
        slots = tl.load(batch + pages + page, mask=here, other=0)
        buffers = tl.load(chunk) + rows * tl.load(chunk + pitch)
        objects = slots + tl.load(chunk + 2 * pitch)
        size = tl.load(chunk + 3 * pitch)
        aligned = tl.load(chunk + 4 * pitch)
        copy_chunk(objects, buffers, size, aligned, here, WIDE, NARROW, SPAN, ITEMS, LANES)
        tile += tl.num_programs(0)


def launch_scatter(tables: Tables, batch: Batch, layers: range | None = None, *, programs: int | None = None) -> None:
    """Queue one launch on the current stream that copies the batch's pieces of some layers; None: of all."""
    first, chunks = tables.range_of(layers)
    if not chunks or not len(batch):
        return
    device = tables.chunks.device
    widths = tables.widths(batch)
    with on_device(device):
        scatter_kernel[(programs or default_programs(device),)](
            batch.table,
            tables.chunks,
            len(batch),
            tables.chunks.shape[1],
            first,
            chunks,
            WIDE=widths.wide,
            NARROW=widths.narrow,
            SPAN=tables.span,
            ITEMS=TILE_BYTES // tables.span,
            LANES=LANES,
            num_warps=NUM_WARPS,
            num_stages=1,
        )


def scatter(layout: Layout, rows: I64, slots: U64, layers: range | None = None, *, programs: int | None = None) -> None:
    """Copy slots into pages; queued on the current stream.

    Args:
        rows: first row of each page, i64, shape ``(n,)``; in the layout's bounds (:class:`~maru_sglang.kernels.layout.Pages`
            checks that), none twice.
        slots: address on the device of each page's slot, u64, shape ``(n,)``; ``layout.nbytes`` are there.
        layers: of which transfer layers; the other bytes of the pages are left as they are.
        programs: at most; None: :func:`~maru_sglang.kernels.tables.default_programs`.
    """
    batch = Batch.upload(layout.device, rows, slots)
    launch_scatter(Tables.of(layout, batch.row_unit), batch, layers, programs=programs)


def scatter_reference(layout: Layout, rows: I64, slots: Sequence[torch.Tensor], layers: range | None = None) -> None:
    """The same in plain torch, a copy for each piece: ``slots`` are tensors of bytes."""
    for row, slot in zip(rows.tolist(), slots, strict=True):
        for index in layout.select(layers).tolist():
            base, stride, size, offset = (
                int(column[index]) for column in (layout.bases, layout.strides, layout.sizes, layout.offsets)
            )
            memory_at(base + row * stride, size, layout.device).copy_(slot[offset : offset + size])
