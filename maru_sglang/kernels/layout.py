"""Where the objects of an engine lie in its paged memory: :class:`Layout`, and :class:`Pages`, some objects of one.

An object is the concatenation of pieces; a piece is one run of bytes of a page in one of the engine's buffers. Pools of
separate K and V, of one latent buffer, with scales beside them, and whatever comes next differ only in their tables of
pieces, so movers and kernels know nothing of attention. Nothing is copied here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from maru_core.errors import MaruError
from maru_core.mover import Fragments

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]


class Piece(NamedTuple):
    """One run of bytes of every page.

    Attributes:
        base: address of row 0.
        stride: bytes from one row to the next.
        size: bytes of the run, which begins where the page's first row does.
        layer: the transfer layer that it is loaded with.
    """

    base: int
    stride: int
    size: int
    layer: int


@dataclass(frozen=True, eq=False)
class Part:
    """Runs of an object whose pieces have the same sizes, so that they can be copied as objects of their own.

    Attributes:
        pieces: indices of the layout's pieces, i64, shape ``(runs, f)``; those of a run follow each other in the object.
        offsets: where each run begins in the object, bytes, u64, shape ``(runs,)``.
        sizes: bytes of the pieces of each run, u64, shape ``(f,)``.
    """

    pieces: I64
    offsets: U64
    sizes: U64


@dataclass(frozen=True, eq=False)
class Layout:
    """The pieces of an object, in the order in which they follow each other in a slot of the pool.

    Make one with :meth:`mha`, :meth:`mla`, :meth:`of_buffers` or, from addresses alone, :meth:`of_pieces`.

    Attributes:
        bases: addresses of row 0, u64, shape ``(p,)``.
        strides: bytes from one row to the next, u64, shape ``(p,)``.
        sizes: bytes of each piece, u64, shape ``(p,)``.
        offsets: where each piece begins in the object, bytes, u64, shape ``(p,)``.
        layers: the transfer layer of each piece, i32, shape ``(p,)``.
        nbytes: bytes of an object.
        rows: how many rows every buffer has.
        row_span: rows of a page: its tokens where a row is a token, 1 where a row is a page.
        device: where the buffers are.
        keep: what must stay alive for the addresses to be good.
    """

    bases: U64
    strides: U64
    sizes: U64
    offsets: U64
    layers: I32
    nbytes: int
    rows: int
    row_span: int
    device: torch.device
    keep: tuple[Any, ...] = field(repr=False, default=())
    _parts: dict[tuple[int, int], tuple[Part, ...]] = field(init=False, repr=False, default_factory=dict)

    @classmethod
    def mha(
        cls,
        k_buffers: Sequence[torch.Tensor],
        v_buffers: Sequence[torch.Tensor],
        page_tokens: int,
        scales: Sequence[Sequence[torch.Tensor]] | None = None,
    ) -> Layout:
        """Separate K and V, a buffer for each layer, a row for each token: K of all layers, then V, then the scales.

        Args:
            scales: groups of buffers with one for each layer (those of K, those of V), of the same rows.
        """
        return cls.of_groups([k_buffers, v_buffers, *(scales or ())], page_tokens)

    @classmethod
    def mla(
        cls, buffers: Sequence[torch.Tensor], page_tokens: int, scales: Sequence[Sequence[torch.Tensor]] | None = None
    ) -> Layout:
        """One latent buffer for each layer, a row for each token; scales as in :meth:`mha`."""
        return cls.of_groups([buffers, *(scales or ())], page_tokens)

    @classmethod
    def of_groups(cls, groups: Sequence[Sequence[torch.Tensor]], row_span: int) -> Layout:
        """Group after group; buffer ``i`` of each group belongs to layer ``i``."""
        lengths = [len(group) for group in groups]
        if len(set(lengths)) != 1:
            raise ValueError(f"groups of {lengths} buffers: give each one buffer for every layer")
        return cls.of_buffers(
            [buffer for group in groups for buffer in group],
            [layer for group in groups for layer in range(len(group))],
            row_span,
        )

    @classmethod
    def of_buffers(cls, buffers: Sequence[torch.Tensor], layers: Sequence[int], row_span: int) -> Layout:
        """Buffer after buffer, each with rows in its first dimension.

        Args:
            layers: the transfer layer of each buffer; any order, several may have the same.
            row_span: rows of a page.
        Raises:
            ValueError: a row of a buffer is not one run of bytes, rows overlap, or buffers are on several devices.
        """
        if len(buffers) != len(layers) or not buffers:
            raise ValueError(f"{len(buffers)} buffers and {len(layers)} layers: give one layer for each buffer")
        devices = {buffer.device for buffer in buffers}
        if len(devices) != 1:
            raise ValueError(f"buffers on {sorted(map(str, devices))}: a layout has one device; make one for each")
        pieces = [
            piece
            for buffer, layer in zip(buffers, layers, strict=True)
            for piece in _pieces(buffer, int(layer), row_span)
        ]
        rows = min(int(buffer.shape[0]) for buffer in buffers)
        return cls.of_pieces(pieces, rows=rows, row_span=row_span, device=devices.pop(), keep=tuple(buffers))

    @classmethod
    def of_pieces(
        cls,
        pieces: Iterable[Piece | tuple[int, int, int, int]],
        *,
        rows: int,
        row_span: int,
        device: torch.device | str,
        keep: tuple[Any, ...] = (),
    ) -> Layout:
        """Pieces by their addresses, in the order of the object. That they lie in the engine's memory is the caller's word."""
        table = [Piece(*piece) for piece in pieces]
        if not table:
            raise ValueError("an object without pieces: give at least one")
        if not 1 <= row_span <= rows:
            raise ValueError(
                f"pages of {row_span} rows in buffers of {rows}: a page has at least one and fits into them"
            )
        for index, piece in enumerate(table):
            if piece.base <= 0 or piece.size <= 0 or piece.layer < 0 or piece.stride <= 0:
                raise ValueError(
                    f"piece {index} is {piece}: address, stride and size are positive, and the layer not negative"
                )
            if row_span == 1 and piece.stride < piece.size:
                raise ValueError(f"piece {index} is {piece}: pages of {piece.size} bytes every {piece.stride} overlap")
            if piece.base + piece.stride * rows + piece.size >= 1 << 63:
                raise ValueError(f"piece {index} is {piece} with {rows} rows: that ends beyond 2**63")
        sizes = [piece.size for piece in table]
        offsets = np.concatenate(([0], np.cumsum(sizes[:-1]))).astype(np.uint64)
        return cls(
            bases=np.array([piece.base for piece in table], np.uint64),
            strides=np.array([piece.stride for piece in table], np.uint64),
            sizes=np.array(sizes, np.uint64),
            offsets=offsets,
            layers=np.array([piece.layer for piece in table], np.int32),
            nbytes=sum(sizes),
            rows=int(rows),
            row_span=int(row_span),
            device=torch.device(device),
            keep=keep,
        )

    def __len__(self) -> int:
        """Pieces."""
        return len(self.bases)

    @property
    def layer_count(self) -> int:
        """One more than the highest transfer layer."""
        return int(self.layers.max()) + 1

    def pages(self, rows: npt.ArrayLike) -> Pages:
        """The objects whose pages begin at ``rows``."""
        return Pages(self, np.asarray(rows, np.int64))

    def select(self, layers: range | None = None) -> I64:
        """Indices of the pieces of some layers, in the object's order; None: of all."""
        if layers is None:
            return np.arange(len(self))
        low, high = bounds(layers)
        return np.flatnonzero((self.layers >= low) & (self.layers < high))

    def addresses(self, rows: I64, pieces: I64) -> U64:
        """Of each page's pieces, u64, shape ``(n, len(pieces))``."""
        return self.bases[pieces] + rows.astype(np.uint64)[:, None] * self.strides[pieces]

    def fragments(self, rows: I64, layers: range | None = None) -> Fragments:
        """The pages, or what they have of some layers, as fragments; only for memory that the CPU addresses.

        Raises:
            ValueError: no piece belongs to these layers.
        """
        pieces = self.select(layers)
        return Fragments(self.addresses(rows, pieces), self.sizes[pieces])

    def parts(self, layers: range | None = None) -> tuple[Part, ...]:
        """Some layers' pieces, as runs that lie in one stretch of the object; runs of the same sizes together."""
        key = (0, self.layer_count) if layers is None else bounds(layers)
        found = self._parts.get(key)
        if found is None:
            found = self._parts[key] = self._find_parts(self.select(layers))
        return found

    def _find_parts(self, pieces: I64) -> tuple[Part, ...]:
        if not len(pieces):
            return ()
        alike: dict[tuple[int, ...], list[I64]] = {}
        for run in np.split(pieces, np.flatnonzero(np.diff(pieces) != 1) + 1):
            alike.setdefault(tuple(self.sizes[run].tolist()), []).append(run)
        return tuple(
            Part(np.stack(runs), self.offsets[[run[0] for run in runs]], np.array(sizes, np.uint64))
            for sizes, runs in alike.items()
        )


class Pages:
    """Some objects of a layout: the :class:`maru_core.mover.Buffers` that :class:`~maru_sglang.kernels.mover.PagedMover` moves.

    Args:
        rows: first row of each page, i64, shape ``(n,)``; in any order. A page may be there several times where it is
            stored, not where it is loaded.
        still: whether the pages are what they were, asked when they have been copied out; None: they are the caller's for as long
            as it takes.
    Raises:
        ValueError: a page does not lie in the buffers.
    """

    def __init__(self, layout: Layout, rows: I64, still: Callable[[], bool] | None = None) -> None:
        if rows.dtype != np.int64 or rows.ndim != 1:
            raise ValueError(f"rows are {rows.dtype} of shape {rows.shape}: give int64 of one dimension")
        last = layout.rows - layout.row_span
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) <= last:
            index = int(((rows < 0) | (rows > last)).argmax())
            raise ValueError(
                f"page {index} begins at row {rows[index]}: pages of {layout.row_span} rows begin at 0 to {last} here"
            )
        self.layout = layout
        self.rows = np.ascontiguousarray(rows)
        self._still = still

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, which: slice | npt.NDArray[Any]) -> Self:
        return type(self)(self.layout, self.rows[which], self._still)

    def check(self) -> None:
        """After a copy out of the pages.

        Raises:
            MaruError: they may have been given to others meanwhile, and what was copied is worth nothing.
        """
        if self._still is not None and not self._still():
            raise MaruError(f"{len(self)} pages were given up while they were stored: what was copied is dropped")

    @property
    def fragments(self) -> Fragments:
        """The whole objects; only for memory that the CPU addresses."""
        return self.layout.fragments(self.rows)


def bounds(layers: range) -> tuple[int, int]:
    """First layer and the one after the last."""
    if layers.step != 1 or layers.start < 0:
        raise ValueError(f"layers {layers}: give consecutive ones, from 0 on")
    return layers.start, max(layers.start, layers.stop)


def memory_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """A range of memory as a tensor of bytes; whoever uses it keeps the memory there."""
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
    return torch.as_tensor(_Range(address, nbytes), device=device)


class _Range:
    """Memory of a GPU, in the terms in which torch takes over what others allocated."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3,
        }  # fmt: skip


def _pieces(buffer: torch.Tensor, layer: int, row_span: int) -> list[Piece]:
    """One piece where a page's rows follow each other without a gap, else one for each row."""
    row_bytes = int(buffer[0].numel()) * buffer.element_size() if buffer.shape[0] else 0
    stride = buffer.stride(0) * buffer.element_size()
    what = f"the buffer of layer {layer}, {buffer.dtype} of shape {tuple(buffer.shape)} and strides {buffer.stride()}"
    if not row_bytes:
        raise ValueError(f"{what}: its rows have no bytes; leave it out")
    if not buffer[0].is_contiguous():
        raise ValueError(f"{what}: a row is not one run of bytes; give views whose rows are")
    if buffer.shape[0] > 1 and stride < row_bytes:
        raise ValueError(f"{what}: its rows overlap")
    stride = max(stride, row_bytes)
    if stride == row_bytes:
        return [Piece(buffer.data_ptr(), stride, row_bytes * row_span, layer)]
    return [Piece(buffer.data_ptr() + index * stride, stride, row_bytes, layer) for index in range(row_span)]
