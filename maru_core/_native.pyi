import numpy as np
import numpy.typing as npt

def move_batch(
    pool: int,
    data_offset: int,
    data_bytes: int,
    extent_bytes: int,
    offsets: npt.NDArray[np.uint64],
    addresses: npt.NDArray[np.uint64],
    sizes: npt.NDArray[np.uint64],
    threads: int,
    to_pool: bool,
) -> None: ...
def compare(
    generations: npt.NDArray[np.uint64],
    slots: npt.NDArray[np.uint32],
    expected: npt.NDArray[np.uint64],
    result: npt.NDArray[np.bool_] | None = None,
) -> bool: ...
