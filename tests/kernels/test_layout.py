"""Layouts: what an engine's buffers become, and what is refused."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from maru_sglang.kernels.layout import Layout, Pages, Piece
from maru_sglang.kernels.tables import TILE_BYTES, Batch, Tables


def buffers(count: int, rows: int = 8, width: int = 6, dtype: Any = torch.float16) -> list[Any]:
    return [torch.zeros(rows, 2, width // 2, dtype=dtype) for _ in range(count)]


def test_k_of_all_layers_then_v_then_scales() -> None:
    k, v, scales = buffers(3), buffers(3), buffers(3, width=2, dtype=torch.uint8)
    layout = Layout.mha(k, v, 4, [scales])
    assert layout.bases.tolist() == [b.data_ptr() for b in [*k, *v, *scales]]
    assert layout.sizes.tolist() == [48] * 6 + [8] * 3
    assert layout.strides.tolist() == [12] * 6 + [2] * 3
    assert layout.offsets.tolist() == [0, 48, 96, 144, 192, 240, 288, 296, 304]
    assert layout.layers.tolist() == [0, 1, 2] * 3
    assert (layout.nbytes, layout.rows, layout.row_span, layout.layer_count) == (312, 8, 4, 3)


def test_a_page_whose_rows_have_gaps_is_a_piece_for_each_row() -> None:
    wide = torch.zeros(8, 10, dtype=torch.uint8)
    layout = Layout.of_buffers([wide[:, 2:5]], [0], 4)
    start = wide.data_ptr() + 2
    assert [tuple(map(int, piece)) for piece in zip(layout.bases, layout.strides, layout.sizes, strict=True)] == [
        (start + 10 * row, 10, 3) for row in range(4)
    ]
    # Where a row is a page nothing has to be cut.
    assert len(Layout.of_buffers([wide[:, 2:5]], [0], 1)) == 1


def test_parts_are_runs_of_the_object() -> None:
    layout = Layout.mha(buffers(3), buffers(3), 4, [buffers(3, width=2)])
    (whole,) = layout.parts()
    assert whole.pieces.tolist() == [list(range(9))]
    first, second = layout.parts(range(1, 3))
    assert first.pieces.tolist() == [[1, 2], [4, 5]]
    assert first.offsets.tolist() == [48, 192]
    assert second.pieces.tolist() == [[7, 8]]
    assert layout.parts(range(5, 9)) == layout.parts(range(1, 1)) == ()
    assert layout.fragments(np.array([4]), range(1, 2)).sizes.tolist() == [48, 48, 16]


def test_tables_are_made_once_and_go_with_their_layout() -> None:
    layout = Layout.mla([torch.zeros(8, TILE_BYTES // 4, dtype=torch.uint8)], 8)
    tables = Tables.of(layout)
    assert Tables.of(layout) is tables
    assert Tables.of(layout, 1) is not tables
    assert tables.range_of(None) == tables.range_of(range(1)) == (0, 2)
    assert tables.range_of(range(1, 5))[1] == 0
    gone = weakref.ref(layout)
    del layout
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout.mha(buffers(3), buffers(2), 4), "one buffer for every layer"),
        (lambda: Layout.mla([], 4), "one layer for each buffer"),
        (lambda: Layout.of_buffers(buffers(2), [0], 4), "one layer for each buffer"),
        (lambda: Layout.mla([torch.zeros(8, 4, 4).transpose(1, 2)], 4), "not one run of bytes"),
        (lambda: Layout.mla([torch.zeros(1, 4).expand(8, 4)], 4), "overlap"),
        (lambda: Layout.mla([torch.zeros(8, 0)], 4), "no bytes"),
        (lambda: Layout.mla([torch.zeros(0, 4)], 4), "no bytes"),
        (lambda: Layout.mla(buffers(1, rows=3), 4), "pages of 4 rows in buffers of 3"),
        (lambda: Layout.of_pieces([], rows=1, row_span=1, device="cpu"), "at least one"),
        (lambda: Layout.of_pieces([(0, 8, 8, 0)], rows=1, row_span=1, device="cpu"), "positive"),
        (lambda: Layout.of_pieces([(64, 8, 8, -1)], rows=1, row_span=1, device="cpu"), "not negative"),
        (lambda: Layout.of_pieces([(64, 8, 9, 0)], rows=2, row_span=1, device="cpu"), "overlap"),
        (lambda: Layout.of_pieces([(64, 1 << 40, 8, 0)], rows=1 << 30, row_span=1, device="cpu"), "beyond"),
        (lambda: Layout.of_pieces([Piece(64, 8, 8, 0)], rows=1, row_span=0, device="cpu"), "pages of 0 rows"),
        (lambda: Layout.mla([torch.zeros(8, 4), torch.zeros(8, 4, device="meta")], 4), "one device"),
        (lambda: Layout.mla(buffers(3), 4).parts(range(0, 3, 2)), "consecutive"),
    ],
)
def test_what_is_no_layout_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("rows", [[-1], [5], [0, 1, 8], [1 << 40]])
def test_pages_outside_the_buffers_are_refused(rows: list[int]) -> None:
    layout = Layout.mla(buffers(2), 4)
    with pytest.raises(ValueError, match=f"begins at row {rows[-1]}: .* begin at 0 to 4"):
        Pages(layout, np.array(rows, np.int64))


def test_pages_are_buffers() -> None:
    layout = Layout.mla(buffers(2), 4)
    pages = layout.pages([4, 0, 2])
    assert (len(pages), pages.nbytes) == (3, layout.nbytes)
    assert pages.select(slice(1, 3)).rows.tolist() == [0, 2]
    assert pages.select(np.array([True, False, True])).rows.tolist() == [4, 2]
    assert pages.select(np.array([2, 0])).rows.tolist() == [2, 4]
    assert pages.fragments.addresses.tolist() == [[int(base) + row * 12 for base in layout.bases] for row in (4, 0, 2)]
    with pytest.raises(ValueError, match="give int64"):
        Pages(layout, np.array([0], np.int32))
    with pytest.raises(ValueError, match="one slot for each page"):
        Batch.upload(layout.device, pages.rows, np.zeros(2, np.uint64))
