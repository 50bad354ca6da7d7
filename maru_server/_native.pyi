from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")

def match(
    table: npt.NDArray[np.uint64],
    keys: npt.NDArray[np.uint64],
    key: bytes,
    hashes: bytes,
    mode: int,
    word: int,
    words: int,
    offsets: npt.NDArray[np.uint64],
    generations: npt.NDArray[np.uint64],
    records: npt.NDArray[np.uint64],
    components: tuple[
        tuple[
            npt.NDArray[np.uint32] | None,
            npt.NDArray[np.uint32],
            npt.NDArray[np.uint16],
            npt.NDArray[np.uint16],
            npt.NDArray[np.uint64],
        ]
        | None,
        ...,
    ],
    rules: tuple[tuple[int, int, int] | None, ...],
) -> tuple[int, bytes, bytes, bytes, bytes, bytes, bytes, tuple[int, ...]]: ...
def plain(data: bytes) -> tuple[int, int, str, int, int] | None: ...
def pool(
    offsets: npt.NDArray[np.uint64],
    generations: npt.NDArray[np.uint64],
    records: npt.NDArray[np.uint64],
    word: int,
    words: int,
) -> object: ...
def answer(
    data: bytes,
    incarnation: int,
    pool: object,
    table: npt.NDArray[np.uint64],
    keys: npt.NDArray[np.uint64],
    key: bytes,
    component: tuple[
        npt.NDArray[np.uint32] | None,
        npt.NDArray[np.uint32],
        npt.NDArray[np.uint16],
        npt.NDArray[np.uint16],
        npt.NDArray[np.uint64],
    ],
    why: Callable[[T, bytes], int],
    tree: T,
) -> tuple[int, int, bytes]: ...
