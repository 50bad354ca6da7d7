"""A pool directory that stores one word at a time, and lets a test look at the memory after each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from maru_server.directory import PoolDirectory

_PIECE = 1024  # bytes of a long text stored at once


class SteppingDirectory(PoolDirectory):
    """What a kill can leave behind: each word whole or not at all, in the order of the stores."""

    #: Called after every single store.
    after_store: Callable[[], None] | None = None

    def _store(self, target: npt.NDArray[Any], index: Any, values: Any) -> None:
        if self.after_store is None:
            super()._store(target, index, values)
            return
        rows = np.atleast_1d(index)
        if target.dtype.kind == "V":
            (row,) = rows.tolist()
            new, old = bytes(values), target[row].tobytes()
            for end in range(_PIECE, len(new) + _PIECE, _PIECE):
                target[row] = np.void(new[:end] + old[len(new[:end]) :])
                self.after_store()
            return
        every = np.broadcast_to(values, (len(rows), *target.shape[1:]))
        for row, value in zip(rows.tolist(), every, strict=True):
            if target.ndim == 1:
                target[row] = value
                self.after_store()
                continue
            for word in range(target.shape[1]):
                target[row, word] = value[word]
                self.after_store()
