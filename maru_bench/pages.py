"""Pages as an engine has them: their fragments apart in one buffer, as the K and V of an engine lie. numpy alone."""

from __future__ import annotations

import mmap
from typing import Final

import numpy as np
import numpy.typing as npt

U8Array = npt.NDArray[np.uint8]

#: Of a page: K and V.
FRAGMENTS: Final = 2


class EngineBuffer:
    """Pages in an engine's memory: all first fragments (K), then all second ones (V)."""

    def __init__(self, total_bytes: int) -> None:
        self.data = np.frombuffer(mmap.mmap(-1, total_bytes), np.uint8)
        # Random bytes, so that no memory is shared or compressed away; one block repeated, because they take long to make.
        block = np.frombuffer(np.random.default_rng(0).bytes(1 << 20), np.uint8)
        for start in range(0, total_bytes, len(block)):
            part = self.data[start : start + len(block)]
            part[:] = block[: len(part)]

    def pages(self, first: int, count: int, page_bytes: int, total: int) -> U8Array:
        """Pages ``first`` to ``first + count`` of ``total``: a view of shape ``(fragment, page, byte)``."""
        half = page_bytes // FRAGMENTS
        return self.data[: total * page_bytes].reshape(FRAGMENTS, total, half)[:, first : first + count]


def addresses(pages: U8Array) -> npt.NDArray[np.uint64]:
    """Addresses of the fragments of :meth:`EngineBuffer.pages`, shape ``(page, fragment)``."""
    base = pages.__array_interface__["data"][0]
    fragments, count = pages.shape[:2]
    fragment, page = pages.strides[:2]
    # Within what is measured, for every peer that takes addresses: as few steps as can be.
    firsts = np.arange(base, base + fragments * fragment, fragment, dtype=np.uint64)
    found: npt.NDArray[np.uint64] = np.add.outer(np.arange(0, count * page, page, dtype=np.uint64), firsts)
    return found
