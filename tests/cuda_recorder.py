"""``cuda_recorder.c``, compiled and loaded: what stands in for a GPU's driver under the ctypes layer, which is tested whole."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np

#: What the recorder's device addresses are ahead of the host's.
DEVICE_DELTA = 0x100000000000

_SOURCE = Path(__file__).with_name("cuda_recorder.c")


class Recorder:
    """The controls of one compiled recorder. ``path`` is the library that a Runtime is to load."""

    def __init__(self, directory: Path) -> None:
        compiler = shutil.which("gcc") or shutil.which("cc")
        assert compiler, "a C compiler is needed: install gcc"
        self.path = directory / "librecorder.so"
        subprocess.run(
            [compiler, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread", "-o", self.path, _SOURCE], check=True
        )
        self._library = ctypes.CDLL(str(self.path))
        self._library.recorder_calls.restype = ctypes.c_char_p

    def reset(self) -> None:
        self._library.recorder_reset()

    def fail(self, call: str, code: int, after: int = 0) -> None:
        """Call number ``after`` of this function from now on fails, once."""
        self._library.recorder_fail(call.encode(), code, after)

    def break_context(self, code: int) -> None:
        """Every call fails from now on, as after a kernel that wrote where it must not."""
        self._library.recorder_break(code)

    def slow(self, microseconds: int) -> None:
        self._library.recorder_slow(microseconds)

    def version(self, version: int) -> None:
        self._library.recorder_version(version)

    def devices(self, count: int) -> None:
        self._library.recorder_devices(count)

    def capture(self, whether: bool) -> None:
        """Whether a graph is being captured in some thread."""
        self._library.recorder_capture(int(whether))

    @property
    def registered(self) -> int:
        return int(self._library.recorder_registered())

    @property
    def unregistered(self) -> int:
        return int(self._library.recorder_unregistered())

    @property
    def calls(self) -> list[str]:
        return self._library.recorder_calls().decode().split()

    def ranges(self) -> list[tuple[int, int, int, int]]:
        """Start, bytes, device and flags of what is registered now, by address."""
        out = np.zeros(4 * 65536, np.uint64)
        count = self._library.recorder_ranges(ctypes.c_void_p(out.ctypes.data))
        return sorted(tuple(map(int, row)) for row in out[: 4 * count].reshape(-1, 4))

    def raw_last_error(self) -> int:
        return int(self._library.cudaGetLastError())
