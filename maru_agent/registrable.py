"""Can a NIC be given this memory? What the kernel tells before one is asked, and what its refusal may have meant."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path
from typing import Final

from maru_core.errors import PoolError
from maru_core.pool.uri import PoolURI

# linux/stat.h
DAX: Final = 0x0020_0000
IMMUTABLE: Final = 0x10
_AT_FDCWD: Final = -100
_STATX_BYTES: Final = 256
_ATTRIBUTES_AT: Final = 8  # u64
# linux/capability.h
_CAP_IPC_LOCK: Final = 14


def check_registrable(uri: PoolURI) -> None:
    """Before a pool is registered.

    Raises:
        PoolError: its memory cannot be pinned for as long as a NIC needs it.
    """
    if uri.scheme == "file" and attributes(uri.path) & DAX:
        raise PoolError(
            f"{uri}: {uri.path} lies on a DAX file system, whose blocks the kernel does not let a NIC hold: use the device itself "
            "(ndctl create-namespace --mode devdax, then dax:///dev/dax0.0), or shm://"
        )


def attributes(path: Path) -> int:
    """The attributes of a file as statx(2) knows them; 0 where it knows none, or there is no file."""
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "statx") or libc.statx(_AT_FDCWD, os.fsencode(path), 0, 0, buffer):
        return 0
    return int.from_bytes(buffer.raw[_ATTRIBUTES_AT : _ATTRIBUTES_AT + 8], "little")


def lock_limit(nbytes: int) -> str:
    """What is in the way of locking so many bytes, for people; empty if nothing is."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY or limit >= nbytes or _may_lock():
        return ""
    return f"ulimit -l is {limit >> 10} KiB here, and {nbytes >> 10} KiB are to be locked: raise it (systemd: LimitMEMLOCK=infinity)"


def _may_lock() -> bool:
    """Whether limits do not hold for this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False
