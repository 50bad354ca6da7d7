from typing import Any

import numpy as np
import numpy.typing as npt

_Column = npt.NDArray[Any]

def pool(
    records: npt.NDArray[np.uint64],
    changes: npt.NDArray[np.uint64],
    offsets: npt.NDArray[np.uint64],
    generations: npt.NDArray[np.uint64],
    holders: npt.NDArray[np.uint32],
    namespace_shares: npt.NDArray[np.uint64],
    component_shares: npt.NDArray[np.uint64],
) -> object: ...
def plain(data: bytes, pool: object, most: int) -> tuple[int, int, str, int, int, int, int, int, int] | None: ...
def store(
    data: bytes,
    incarnation: int,
    pool: object,
    index: tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], bytes],
    tree: tuple[_Column, _Column, _Column, _Column],
    rows: npt.NDArray[np.int64],
    slots: npt.NDArray[np.uint32],
    generations: bytes,
    holder: int,
    world: npt.NDArray[np.uint16],
    length: npt.NDArray[np.uint64],
    component: int,
    now_ns: int,
    owner: int,
) -> tuple[int, int, bytes, bytes, bytes] | None: ...
