"""The few calls of the CUDA runtime that Maru makes itself, through ctypes on the library that torch loaded.

What torch has (tensors, streams, events) is taken from torch; this is for what it has not: page-locking memory that is
mapped already, and copies of many fragments in one call. Every return code is looked at; a call that fails leaves no
error behind for the next library to trip over. Nothing is decided here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from maru_core.errors import MaruError

U64 = npt.NDArray[np.uint64]

#: cudaHostRegister: pinned for all contexts (portable) and mapped into the GPU's addresses.
PORTABLE: Final = 0x01
MAPPED: Final = 0x02
#: cudaMemcpyAsync finds out from the pointers which side is which.
_MEMCPY_DEFAULT: Final = 4
_SOURCE_IN_STREAM_ORDER: Final = 1
_PREFER_OVERLAP_WITH_COMPUTE: Final = 1
#: cudaStreamCaptureModeRelaxed: for threads whose calls have nothing to do with what others capture.
_CAPTURE_RELAXED: Final = 2
#: First runtime with cudaMemcpyBatchAsync, and the first whose call has no index of the copy that failed.
_BATCH_SINCE: Final = 12080
_BATCH_WITHOUT_INDEX_SINCE: Final = 13000

#: The process is ending and the runtime has gone already; the driver is older than the runtime.
UNLOADING: Final = 4
NEWER_DRIVER: Final = 36
#: Codes of cudaGetDeviceCount that mean: there is no GPU to be used here (no driver, no device, none visible).
_NO_GPU: Final = frozenset({3, 34, 35, 100})
_NOT_THE_CONTEXT: Final = _NO_GPU | {UNLOADING}

_CURES: Final = {
    1: "the memory cannot be page-locked as it is: recent kernels refuse it for ordinary files, so use a pool in shm:// or dax://",
    2: "leave more memory free (a container's limit counts, too), allow it to be locked (ulimit -l unlimited), or make the pool smaller",
    4: "the process is ending: nothing to do",
    36: "install a newer driver; until then copies go one by one",
    712: "something else in this process has page-locked a part of the pool: let Maru do it alone",
    713: "something else in this process has released what Maru page-locked: let Maru do it alone",
    801: "this GPU or driver cannot page-lock mapped memory: use the host tier of the engine instead",
}


class CudaError(MaruError):
    """A call of the CUDA runtime that failed.

    Attributes:
        call: name of the function; code: what it returned; reason: the runtime's own words.
        broken: whether the error stays: nothing works on this GPU any more until the process is started again.
    """

    def __init__(self, call: str, code: int, reason: str, what: str, *, broken: bool) -> None:
        cure = _CURES.get(code, "see the driver's log (dmesg | grep -i xid)")
        if broken:
            cure = "an earlier kernel or copy in this process broke the GPU's context: restart the engine"
        super().__init__(f"{call} failed with {code} ({reason}) for {what}: {cure}")
        self.call = call
        self.code = code
        self.reason = reason
        self.broken = broken


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    """cudaMemcpyAttributes, the same in CUDA 12.8 and 13."""

    _fields_ = (("order", ctypes.c_int), ("source", _Location), ("target", _Location), ("flags", ctypes.c_uint))


class Runtime:
    """One GPU, through one copy of the CUDA runtime. Safe to use from several threads; the GIL is not held in a call.

    Args:
        library: path or name of a libcudart.
        device: ordinal of the GPU; None: the calling thread's current one.
    Raises:
        OSError: there is no such library.
        CudaError: there is no such GPU.
    """

    def __init__(self, library: str | os.PathLike[str], device: int | None = None) -> None:
        self.library = str(library)
        self._functions = ctypes.CDLL(self.library)
        self._functions.cudaGetErrorString.restype = ctypes.c_char_p
        self.version = self._get("cudaRuntimeGetVersion", "its version")
        self.devices = self._get("cudaGetDeviceCount", "the number of GPUs")
        self.device = self._get("cudaGetDevice", "the current GPU") if device is None else device
        #: Whether cudaMemcpyBatchAsync is there. Turns False if the driver turns out to be older than the runtime.
        self.has_batch = self.version >= _BATCH_SINCE and hasattr(self._functions, "cudaMemcpyBatchAsync")

    @classmethod
    def find(cls, device: int | None = None) -> Runtime | None:
        """The runtime of this process, or None where there is no GPU to be used. torch is not imported for it.

        A library that is loaded already is taken before any other: a process has one last error for each copy, and the
        one that matters is torch's. To be called in the process that uses the GPU, not before it forks.

        Raises:
            CudaError: there is a GPU and it cannot be used.
        """
        for candidate in _candidates():
            try:
                return cls(candidate, device)
            except OSError:
                continue
            except CudaError as error:
                if error.call == "cudaGetDeviceCount" and error.code in _NO_GPU:
                    return None
                raise
        return None

    # ------------------------------------------------------------ page-locked memory

    def host_register(self, address: int, nbytes: int, flags: int = PORTABLE | MAPPED) -> None:
        """Page-lock a range of this process's memory. Pages that are not there yet are brought in first."""
        self._call(
            "cudaHostRegister",
            f"{nbytes} bytes at {address:#x}",
            ctypes.c_void_p(address),
            ctypes.c_size_t(nbytes),
            ctypes.c_uint(flags),
        )

    def host_unregister(self, address: int) -> None:
        """Undo :meth:`host_register` of the range that begins at ``address``."""
        self._call("cudaHostUnregister", f"the range at {address:#x}", ctypes.c_void_p(address))

    def host_device_pointer(self, address: int) -> int:
        """By which address the GPU reaches a byte of a range that is registered."""
        pointer = ctypes.c_void_p()
        self._call(
            "cudaHostGetDevicePointer",
            f"the byte at {address:#x}",
            ctypes.byref(pointer),
            ctypes.c_void_p(address),
            ctypes.c_uint(0),
        )
        return pointer.value or 0

    # ------------------------------------------------------------ copies

    def memcpy_async(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Queue one copy on a stream; the pointers say in which direction."""
        self._call(
            "cudaMemcpyAsync",
            f"{nbytes} bytes from {source:#x} to {target:#x}",
            ctypes.c_void_p(target),
            ctypes.c_void_p(source),
            ctypes.c_size_t(nbytes),
            ctypes.c_int(_MEMCPY_DEFAULT),
            ctypes.c_void_p(stream),
        )

    def memcpy_batch_async(self, targets: U64, sources: U64, sizes: U64, stream: int) -> None:
        """Queue many copies in one call. They may be done in any order, after what the stream had before.

        Args:
            targets, sources, sizes: of the copies, u64, all of shape ``(n,)``; no two may overlap.
            stream: not the legacy default stream (0), which the call refuses.
        Raises:
            CudaError: with code 36 the driver does not know the call; ``has_batch`` is False from then on.
        """
        count = len(sizes)
        arrays = [np.ascontiguousarray(array, np.uint64) for array in (targets, sources, sizes)]
        if any(array.shape != (count,) for array in arrays):
            raise ValueError(f"{[array.shape for array in arrays]}: give as many targets, sources and sizes")
        if not count:
            return
        attributes = _CopyAttributes(order=_SOURCE_IN_STREAM_ORDER, flags=_PREFER_OVERLAP_WITH_COMPUTE)
        from_the_first = ctypes.c_size_t(0)
        failed = ctypes.c_size_t(0)
        index = () if self.version >= _BATCH_WITHOUT_INDEX_SINCE else (ctypes.byref(failed),)
        try:
            self._call(
                "cudaMemcpyBatchAsync",
                f"{count} copies",
                *(ctypes.c_void_p(array.ctypes.data) for array in arrays),
                ctypes.c_size_t(count),
                ctypes.byref(attributes),
                ctypes.byref(from_the_first),
                ctypes.c_size_t(1),
                *index,
                ctypes.c_void_p(stream),
            )
        except CudaError as error:
            if error.code == NEWER_DRIVER:
                self.has_batch = False
            raise

    # ------------------------------------------------------------ the GPU

    def use_device(self) -> None:
        """Make this GPU the calling thread's, for good, and let the thread work while others capture CUDA graphs.

        A thread that never chose a GPU has GPU 0, whoever started it, and its first call would make a context there; so
        would setting that one again afterwards. And in the mode that threads begin with, a call that allocates or locks
        memory spoils a capture that another thread has under way, as engines have when they start.
        """
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        self._call("cudaThreadExchangeStreamCaptureMode", "this thread", ctypes.byref(mode))
        if self._get("cudaGetDevice", "the current GPU") != self.device:
            self._call("cudaSetDevice", f"GPU {self.device}", ctypes.c_int(self.device))

    def pci_bus_id(self) -> str:
        """As sysfs names it: ``0000:3b:00.0``."""
        text = ctypes.create_string_buffer(32)
        self._call(
            "cudaDeviceGetPCIBusId", f"GPU {self.device}", text, ctypes.c_int(len(text)), ctypes.c_int(self.device)
        )
        return text.value.decode().lower()

    def last_error(self) -> int:
        """The calling thread's last error, which this forgets unless it is one that stays; 0 is none."""
        return int(self._functions.cudaGetLastError())

    # ------------------------------------------------------------ calling

    def _get(self, call: str, what: str) -> int:
        value = ctypes.c_int()
        self._call(call, what, ctypes.byref(value))
        return value.value

    def _call(self, call: str, what: str, *arguments: Any) -> None:
        function: Callable[..., int] = getattr(self._functions, call)
        code = int(function(*arguments))
        if code == 0:
            return
        # The thread remembers the error, and the next library that asks after its own launch would be told of this one.
        self.last_error()
        # What is still there after that is the GPU's context being broken, and stays.
        broken = code not in _NOT_THE_CONTEXT and self.last_error() != 0
        reason = (self._functions.cudaGetErrorString(ctypes.c_int(code)) or b"unknown").decode(errors="replace")
        raise CudaError(call, code, reason, what, broken=broken)


def _candidates() -> Iterator[str]:
    """Where a libcudart may be, the likeliest to be right first."""
    loaded = []
    with contextlib.suppress(OSError):
        # A copy under a mangled name (torchvision's wheel has one) is private to its owner.
        loaded = re.findall(r"(/\S*/libcudart\.so[\d.]*)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    yield from dict.fromkeys(loaded)
    for folder in sys.path:
        # torch's wheels for CUDA 13 and 12 bring the runtime as packages beside it.
        for pattern in ("nvidia/cu13/lib/libcudart.so.13", "nvidia/cuda_runtime/lib/libcudart.so.1[23]"):
            yield from sorted(map(str, Path(folder or ".").glob(pattern)), reverse=True)
    for major in (13, 12):
        yield f"libcudart.so.{major}"
    for major in (13, 12):
        yield f"/usr/local/cuda/lib64/libcudart.so.{major}"
