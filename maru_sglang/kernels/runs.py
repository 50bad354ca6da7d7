"""What the kernels of gather and scatter share: how runs of bytes are copied once it is known where they are.

Needs Triton, as they do. What differs between a gather and a scatter is only which side is which.
"""

# ruff: noqa: N803, N806  # constants of a kernel are written in capitals
from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

#: Warps of a program.
NUM_WARPS: Final = 8
#: Accesses that are under way at once where they are narrower than 16 bytes: 8 of each thread.
LANES: Final = NUM_WARPS * 32 * 8


@triton.jit  # type: ignore[untyped-decorator]
def copy_runs(
    sources: tl.tensor,
    targets: tl.tensor,
    size: tl.tensor,
    here: tl.tensor,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
    ITEMS: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Copy ``size`` bytes (<= SPAN) from each of ``ITEMS`` addresses to another, in accesses of ``WIDTH`` bytes.

    ``here`` says which items there are. Addresses and size are multiples of WIDTH.
    """
    if WIDTH == 16:
        # Two words for each thread, which is one access of 16 bytes because the hints say that all is aligned so. The
        # whole tile is read before any of it is written: as many reads are under way at once as there are accesses.
        word = tl.arange(0, SPAN // 8)
        count = tl.multiple_of(size // 8, 2)
        mask = here[:, None] & (word[None, :] < count)
        source = tl.multiple_of(tl.multiple_of(sources, 16).to(tl.pointer_type(tl.int64)), 16)
        target = tl.multiple_of(tl.multiple_of(targets, 16).to(tl.pointer_type(tl.int64)), 16)
        # Past the first cache: nothing is read twice.
        words = tl.load(source[:, None] + word[None, :], mask=mask, cache_modifier=".cg")
        tl.store(target[:, None] + word[None, :], words, mask=mask)
    else:
        if WIDTH == 8:
            kind: tl.constexpr = tl.int64
        elif WIDTH == 4:
            kind: tl.constexpr = tl.int32  # type: ignore[no-redef]
        elif WIDTH == 2:
            kind: tl.constexpr = tl.int16  # type: ignore[no-redef]
        else:
            kind: tl.constexpr = tl.int8  # type: ignore[no-redef]
        STEP: tl.constexpr = LANES // ITEMS
        source = sources.to(tl.pointer_type(kind))
        target = targets.to(tl.pointer_type(kind))
        count = size // WIDTH
        start = count - count
        while start < count:
            word = start + tl.arange(0, STEP)
            mask = here[:, None] & (word[None, :] < count)
            words = tl.load(source[:, None] + word[None, :], mask=mask, cache_modifier=".cg")
            tl.store(target[:, None] + word[None, :], words, mask=mask)
            start += STEP


@triton.jit  # type: ignore[untyped-decorator]
def copy_chunk(
    sources: tl.tensor,
    targets: tl.tensor,
    size: tl.tensor,
    aligned: tl.tensor,
    here: tl.tensor,
    WIDE: tl.constexpr,
    NARROW: tl.constexpr,
    SPAN: tl.constexpr,
    ITEMS: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """:func:`copy_runs` in the wide accesses where ``aligned`` is not 0, else in the narrow ones."""
    if WIDE == NARROW:
        copy_runs(sources, targets, size, here, WIDE, SPAN, ITEMS, LANES)
    else:
        if aligned != 0:
            copy_runs(sources, targets, size, here, WIDE, SPAN, ITEMS, LANES)
        else:
            copy_runs(sources, targets, size, here, NARROW, SPAN, ITEMS, LANES)
