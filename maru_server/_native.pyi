import numpy as np
import numpy.typing as npt

def locate(
    rows: dict[bytes, int],
    hashes: bytes,
    sparse: bool,
    word: int,
    words: int,
    slots: npt.NDArray[np.uint32],
    replicas: npt.NDArray[np.uint32],
    have: npt.NDArray[np.uint16],
    world: npt.NDArray[np.uint16],
    lengths: npt.NDArray[np.uint64],
    offsets: npt.NDArray[np.uint64],
    generations: npt.NDArray[np.uint64],
    records: npt.NDArray[np.uint64],
) -> tuple[int, bytes, bytes, bytes, bytes, bytes]: ...
