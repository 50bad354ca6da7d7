import numpy as np
import numpy.typing as npt

_Column = npt.NDArray[np.int32]
_Rows = npt.NDArray[np.int64]

def below(child: _Column, next: _Column, parent: _Column, rows: _Rows, out: _Rows) -> int: ...
