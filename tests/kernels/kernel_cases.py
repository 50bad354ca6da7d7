"""Drawn layouts in guarded memory, and what is checked of a kernel on each. Runs where Triton interprets."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

GUARD = 0xA5
DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "uint8")
LAYERS = (1, 2, 3, 4, 7, 16, 32, 61, 80)
#: Bytes of one object at most.
OBJECT_BYTES = 96 << 10
#: Copying steps of one case at most; the interpreter takes some milliseconds for each.
STEPS = 170


class Guarded:
    """Memory that begins and ends anywhere, full of guard bytes."""

    def __init__(self, nbytes: int, misaligned: int) -> None:
        self.bytes = np.full(nbytes + 256, GUARD, np.uint8)
        start = -self.bytes.ctypes.data % 64 + 64 + misaligned
        self.inside = self.bytes[start : start + nbytes]

    @property
    def address(self) -> int:
        return int(self.inside.ctypes.data)


@dataclass
class Case:
    """One drawn layout, its buffers filled with random bytes, and a page list.

    ``expected`` functions know nothing of :class:`Layout`: they cut the buffers by their shapes.
    """

    layout: Any
    groups: list[list[np.ndarray]]  # of each group, of each layer: rows x bytes, a view of guarded memory
    guarded: list[Guarded]
    page_tokens: int
    rows: np.ndarray
    layers: range | None
    slots: list[Guarded]
    described: str

    @property
    def slot_addresses(self) -> np.ndarray:
        return np.array([slot.address for slot in self.slots], np.uint64)

    def object_of(self, row: int) -> np.ndarray:
        """The bytes of one page, in the order of the object."""
        return np.concatenate(
            [buffer[row : row + self.page_tokens].reshape(-1) for group in self.groups for buffer in group]
        )

    def chosen(self) -> np.ndarray:
        """Of an object, the bytes that belong to the chosen layers, bool."""
        return np.concatenate(
            [
                np.full(self.page_tokens * buffer.shape[1], self.layers is None or layer in self.layers)
                for group in self.groups
                for layer, buffer in enumerate(group)
            ]
        )


def draw(seed: int, *, repeated: bool, **fixed: Any) -> Case:
    """A case: everything about it follows from the seed, and what is ``fixed``. The first that is not too slow."""
    for attempt in range(100):
        case = _draw([seed, attempt], repeated=repeated, **fixed)
        if _steps(case) <= STEPS:
            return case
    raise AssertionError(f"no case of {fixed} is fast enough")


def _steps(case: Case) -> int:
    from maru_sglang.kernels.runs import LANES
    from maru_sglang.kernels.tables import TILE_BYTES, Batch, Tables

    batch = Batch.upload(case.layout.device, case.rows, case.slot_addresses)
    tables = Tables.of(case.layout, batch.row_unit)
    first, count = tables.range_of(case.layers)
    size, aligned = tables.chunks[3:5, first : first + count].numpy()
    widths = tables.widths(batch)
    items = TILE_BYTES // tables.span
    width = np.where(aligned != 0, widths.wide, widths.narrow)
    steps = np.where(width == 16, 1, -(-size // (width * (LANES // items))))
    return int(steps.sum()) * -(-len(case.rows) // items)


def _draw(seed: list[int], *, repeated: bool, **fixed: Any) -> Case:
    import torch

    from maru_sglang.kernels.layout import Layout

    random = np.random.default_rng(seed)

    def pick(name: str, choices: Any) -> Any:
        value = choices[int(random.integers(len(choices)))]
        return fixed.get(name, value)

    shape = pick("shape", ("mha", "mha", "mla"))
    layers = pick("layers", LAYERS)
    page_tokens = pick("page_tokens", (1, 1, 2, 3, 8, 16, 64, 128))
    heads = pick("heads", tuple(range(1, 17)))
    dtype = getattr(torch, pick("dtype", DTYPES))
    head_size = pick("head_size", (1, 3, 8, 13, 16, 64, 65, 80, 128, 128, 576))
    scaled = pick("scaled", (False, False, True))
    gap = pick("gap", (0, 0, 0, 0, 16, 3))  # bytes between two rows of a buffer
    item = torch.empty(0, dtype=dtype).element_size()
    gap -= gap % item
    # Keep to the budget by what does not matter to the point: the width of a row.
    row_items = heads * head_size if shape == "mha" else head_size
    kinds = 2 if shape == "mha" else 1
    while layers * kinds * page_tokens * row_items * item > OBJECT_BYTES and row_items > 1:
        row_items = (row_items + 1) // 2
    pages_there = int(random.integers(2, 6))
    row_count = page_tokens * pages_there + int(random.integers(0, 3))
    misaligned = pick("misaligned", (0, 0, 0, 0, item, 16))
    guarded: list[Guarded] = []
    groups: list[list[np.ndarray]] = []
    tensors: list[list[torch.Tensor]] = []

    def group(row_bytes: int, kind: torch.dtype, gap: int) -> None:
        arrays, views = [], []
        size = torch.empty(0, dtype=kind).element_size()
        for _ in range(layers):
            memory = Guarded(row_count * (row_bytes + gap), misaligned - misaligned % size)
            table = memory.inside.reshape(row_count, row_bytes + gap)[:, :row_bytes]
            table[:] = random.integers(0, 256, table.shape, np.uint8)
            guarded.append(memory)
            arrays.append(table)
            views.append(torch.from_numpy(memory.inside).view(kind).view(row_count, -1)[:, : row_bytes // size])
        groups.append(arrays)
        tensors.append(views)

    for _ in range(kinds):
        group(row_items * item, dtype, gap)
    scales = None
    if scaled:
        for _ in range(kinds):
            group(2 * heads, torch.float16, 0)
        scales = tensors[kinds:]
    if shape == "mha":
        layout = Layout.mha(tensors[0], tensors[1], page_tokens, scales)
    else:
        layout = Layout.mla(tensors[0], page_tokens, scales)

    starts = np.arange(pages_there) * page_tokens
    kind = pick("pages", ("scattered", "scattered", "all", "unaligned", "repeated", "empty"))
    if kind == "empty":
        rows = starts[:0]
    elif kind == "repeated" and repeated:
        rows = random.choice(starts, pages_there + 2)
    elif kind == "unaligned":  # pages need not begin on multiples of their size
        rows = random.choice(starts[:-1] + 1, 1)
    else:
        rows = random.permutation(starts)[: pages_there if kind == "all" else int(random.integers(1, pages_there + 1))]
    rows = rows.astype(np.int64)
    if page_tokens == 1 and kind == "unaligned":
        rows = starts[:1].astype(np.int64)
    first = int(random.integers(0, layers))
    chosen = pick(
        "range", (None, None, range(first, first + 1), range(first, layers), range(layers + 3), range(first, first))
    )
    off = pick("slots", (0, 0, 0, 0, 0, 0, 8, 4, 2, 1))
    slots = [Guarded(layout.nbytes, off) for _ in rows]
    for slot in slots:
        slot.inside[:] = random.integers(0, 256, layout.nbytes, np.uint8)
    described = (
        f"seed {seed}: {shape} {dtype} layers={layers} page={page_tokens} row_items={row_items} gap={gap} scaled={scaled} "
        f"misaligned={misaligned} rows={rows.tolist()} layers={chosen} slots+{off}"
    )
    assert layout.nbytes == sum(b.shape[1] for g in groups for b in g) * page_tokens, described
    return Case(layout, groups, guarded, page_tokens, rows, chosen, slots, described)


def _how(kernel: str) -> tuple[Any, Any]:
    assert os.environ["TRITON_INTERPRET"] == "1"
    if kernel == "gather":
        from maru_sglang.kernels.gather import gather, gather_reference

        return gather, gather_reference
    from maru_sglang.kernels.scatter import scatter, scatter_reference

    return scatter, scatter_reference


def _snapshot(memories: list[Guarded]) -> list[np.ndarray]:
    return [memory.bytes.copy() for memory in memories]


def check(kernel: str, seed: int, fixed: dict[str, Any] | None = None, programs: int | None = None) -> None:
    """A kernel and its reference do what the case says, to the bit, and touch nothing else."""
    import torch

    case = draw(seed, repeated=kernel == "gather", **(fixed or {}))
    run, reference = _how(kernel)
    chosen = case.chosen()
    sources, targets = (case.guarded, case.slots) if kernel == "gather" else (case.slots, case.guarded)
    sources_before, targets_before = _snapshot(sources), _snapshot(targets)

    # What must be there afterwards, from the buffers' shapes alone, written into copies of the targets.
    objects = [case.object_of(row) for row in case.rows.tolist()]
    if kernel == "gather":
        for slot, thing in zip(case.slots, objects, strict=True):
            slot.inside[chosen] = thing[chosen]
    else:
        for row, slot in zip(case.rows.tolist(), case.slots, strict=True):
            start = 0
            for group in case.groups:
                for layer, buffer in enumerate(group):
                    size = case.page_tokens * buffer.shape[1]
                    if case.layers is None or layer in case.layers:
                        piece = slot.inside[start : start + size].reshape(case.page_tokens, -1)
                        buffer[row : row + case.page_tokens] = piece
                    start += size
    expected = _snapshot(targets)

    def again(copy: Any, what: str) -> None:
        for target, before in zip(targets, targets_before, strict=True):
            target.bytes[:] = before
        copy()
        for index, (target, bytes_) in enumerate(zip(targets, expected, strict=True)):
            wrong = np.flatnonzero(target.bytes != bytes_)
            assert not len(wrong), f"{what}, {case.described}: target {index} differs at {wrong[:8]} of {len(bytes_)}"
        for index, (source, bytes_) in enumerate(zip(sources, sources_before, strict=True)):
            assert (source.bytes == bytes_).all(), f"{what}, {case.described}: source {index} was changed"

    slots = [torch.from_numpy(slot.inside) for slot in case.slots]
    again(lambda: reference(case.layout, case.rows, slots, case.layers), "reference")
    again(lambda: run(case.layout, case.rows, case.slot_addresses, case.layers, programs=programs), "kernel")


def check_all(kernel: str, seeds: range, fixed: dict[str, Any] | None = None, programs: int | None = None) -> int:
    for seed in seeds:
        check(kernel, seed, fixed, programs)
    return len(seeds)


def check_far(kernel: str) -> None:
    """Rows and pieces more than 2**32 bytes apart: every offset is computed in 64 bits."""
    import mmap

    import torch

    from maru_sglang.kernels.layout import Layout

    run, reference = _how(kernel)
    width, row_count = 1 << 20, 6 << 10
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    # Only the pages that are touched exist.
    memory = np.frombuffer(mmap.mmap(-1, width * row_count, flags=flags), np.uint8).reshape(row_count, width)
    buffer = torch.from_numpy(memory)[:, :640]
    layout = Layout.of_buffers([buffer, buffer[:, 320:]], [0, 1], 1)
    rows = np.array([row_count - 1, 0, 4099, 2048])
    random = np.random.default_rng(1)
    for row in rows:
        memory[row, :640] = random.integers(0, 256, 640, np.uint8)
    slots = [Guarded(layout.nbytes, 0) for _ in rows]
    views = [torch.from_numpy(slot.inside) for slot in slots]
    expected = [np.concatenate([memory[row, :640], memory[row, 320:640]]) for row in rows]
    if kernel == "gather":
        run(layout, rows, np.array([slot.address for slot in slots], np.uint64))
        assert all((slot.inside == thing).all() for slot, thing in zip(slots, expected, strict=True))
        return
    for slot, thing in zip(slots, expected, strict=True):
        slot.inside[:] = thing
    memory[rows, :640] = 0
    run(layout, rows, np.array([slot.address for slot in slots], np.uint64))
    assert all((memory[row, :640] == thing[:640]).all() for row, thing in zip(rows, expected, strict=True))
    memory[rows, :640] = 0
    reference(layout, rows, views)
    assert all((memory[row, :640] == thing[:640]).all() for row, thing in zip(rows, expected, strict=True))


def widths_of(kernel: str, seed: int, fixed: dict[str, Any]) -> tuple[int, int]:
    """What a case's launch specialises to, after the case was checked."""
    from maru_sglang.kernels.tables import Batch, Tables

    check(kernel, seed, fixed)
    case = draw(seed, repeated=False, **fixed)
    batch = Batch.upload(case.layout.device, case.rows, case.slot_addresses)
    return tuple(Tables.of(case.layout, batch.row_unit).widths(batch))
