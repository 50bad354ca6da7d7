"""How far a prefix reaches by each component's own rule: pure arithmetic on columns of booleans.

The rules are :class:`maru_core.protocol.Rule`. Their words and their meaning are SGLang's (``PoolHitPolicy`` in
``sglang/srt/mem_cache/hicache_storage.py``): sliding-window attention and state-space layers need only the end of a
prefix, so a prefix of five pages may be usable where one of four is not. What comes out is therefore the *set* of
usable lengths: every rank and every pipeline stage has its own, and only what they have in common may be loaded. A
longest length from each would not do.

Here a page is known or not, and whole or not; where it lies is the business of :mod:`maru_server.lookup`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from maru_core.protocol import Rule, Want

BoolArray = npt.NDArray[np.bool_]


class Reach(NamedTuple):
    """``pages``: longest prefix at which every gating rule is met. ``ends``: all such lengths from 1 on, ascending (u32).
    ``covered``: the pages that each component reaches by its own rule alone."""

    pages: int
    ends: npt.NDArray[np.uint32]
    covered: list[int]


def reach(whole: Sequence[BoolArray], rules: Sequence[Want]) -> Reach:
    """Apply one rule per component.

    Args:
        whole: for each component, which of the first ``n`` pages of a chain are whole in it; all of the same length ``n``.
        rules: one per component, as :func:`maru_server.requests.check_match` lets them through.
    """
    count = len(whole[0])
    legal = np.ones(count, bool)  # legal[i]: all rules are met by a prefix of i + 1 pages
    covered = []
    for pages, want in zip(whole, rules, strict=True):
        if want.rule == Rule.BLOCK_GROUPS:
            covered.append(_leading_groups(pages, want.pages, want.group))
            continue
        if want.rule == Rule.TRAILING_PAGES:
            mine = _windows(pages, want.pages)
            covered.append(_last(mine))
        else:
            covered.append(_leading(pages))
            mine = np.arange(count) < covered[-1]
        legal &= mine
    ends = (np.flatnonzero(legal) + 1).astype(np.uint32)
    return Reach(int(ends[-1]) if len(ends) else 0, ends, covered)


def _leading(pages: BoolArray) -> int:
    """Length of the leading run of True."""
    return len(pages) if pages.all() else int(pages.argmin())


def _last(pages: BoolArray) -> int:
    """1 + the index of the last True, 0 if there is none."""
    return len(pages) - int(pages[::-1].argmax()) if pages.any() else 0


def _windows(pages: BoolArray, window: int) -> BoolArray:
    """At which pages a complete window of the last ``window`` pages ends, of all pages where there are fewer.

    The run of whole pages that ends at page ``i`` is ``i`` less the last page up to there that is not whole."""
    index = np.arange(len(pages))
    run = index - np.maximum.accumulate(np.where(pages, -1, index))
    complete: BoolArray = run >= np.minimum(window, index + 1)
    return complete


def _leading_groups(pages: BoolArray, block: int, group: int) -> int:
    """Pages of the leading blocks of which the last ``group`` pages are all there; a block that the chain does not fill
    has no complete group."""
    blocks = len(pages) // block
    ends = pages[: blocks * block].reshape(blocks, block)[:, block - group :]
    return block * _leading(np.logical_and.reduce(ends, axis=1))
