"""What a pool lies on: a file (also in /dev/shm) or a device-dax character device. Opening, sizes, mapping.

Knows nothing of the pool's format. Every mapping of a pool is made by :meth:`Backing.map`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import pwd
import stat
import struct
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from maru_core.errors import PoolError
from maru_core.pool.uri import PoolURI, format_size

Bytes = npt.NDArray[np.uint8]

SYSFS: Final = Path("/sys")
PAGE: Final = mmap.PAGESIZE
#: linux/mman.h; since Linux 5.14. Not in Python's mmap module.
_MADV_POPULATE_WRITE: Final = 23

#: struct flock of fcntl(2). These locks know nothing of those of flock(2), which say who serves the pool, and end with
#: the last descriptor, of which each mapping has one.
_FLOCK: Final = struct.Struct("hhqqi4x")

# os.posix_fallocate would do, but where a file system has no fallocate glibc emulates it by rewriting a byte of each
# block, which races with a client that writes there; mmap.madvise keeps the GIL. Both calls below release it.
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Backing(ABC):
    """An open file or device. ``grain`` is what starts and lengths of mappings must be multiples of.

    Args:
        descriptor: owned by this object; opened for reading, and for writing if anything is to be mapped so.
    """

    def __init__(self, uri: PoolURI, descriptor: int, grain: int) -> None:
        self.uri = uri
        self.descriptor = descriptor
        self.grain = grain

    @abstractmethod
    def capacity(self) -> int:
        """Bytes that may be mapped."""

    @abstractmethod
    def read(self, offset: int, length: int) -> bytes:
        """Bytes at ``offset``; shorter at the end."""

    @abstractmethod
    def provision(self, offset: int, length: int) -> bool:
        """Make sure that memory stands behind a range, so that touching it never raises SIGBUS. False: none left."""

    @abstractmethod
    def still_there(self) -> bool:
        """Whether the pool's path still names what was opened."""

    def map(self, offset: int, length: int, *, writable: bool) -> Bytes:
        """Map a range, shared. The mapping goes when the last array over it goes.

        The checks are here because the kernel's are not enough: a mapping past the end of a dax device is granted
        and raises SIGBUS when touched, as it does past the end of a file, and an offset below a device's alignment
        can silently show other memory than was asked for.

        Raises:
            PoolError: misaligned, out of range, or refused by the kernel.
        """
        if offset < 0 or length <= 0 or offset % self.grain or length % self.grain:
            raise PoolError(
                f"{self.uri}: cannot map {length} bytes at {offset}: not multiples of the alignment "
                f"{format_size(self.grain)} of {self.uri.path}"
            )
        if offset + length > self.capacity():
            raise PoolError(
                f"{self.uri}: cannot map {length} bytes at {offset}: {self.uri.path} has {self.capacity()} bytes"
            )
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            # MAP_SHARED is the point of a pool, and the only kind that device-dax has.
            mapping = mmap.mmap(self.descriptor, length, mmap.MAP_SHARED, protection, offset=offset)
        except (OSError, ValueError) as error:
            raise PoolError(
                f"{self.uri}: mapping {length} bytes at {offset} was refused ({error}): "
                "check `ulimit -v` and the permissions of the pool"
            ) from error
        return np.frombuffer(mapping, np.uint8)

    def lock(self) -> bool:
        """Take the exclusive lock that makes its holder the pool's one server. False: another has it.

        The lock is on the file's or device node's inode: it excludes every process of this host that opens the same
        node. (A container that made a device node of its own has another inode; give containers the host's node.)
        """
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        # Mappings hold duplicates of the descriptor, and the lock with them, for as long as an array is alive
        # somewhere: closing is not enough to let the next server in.
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def note_use(self) -> None:
        """Hold a mark on the pool for as long as what is mapped through this descriptor stays mapped: see
        :func:`is_used`. Best effort."""
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.descriptor, fcntl.F_OFD_SETLK, _record_lock(fcntl.F_RDLCK))

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class FileBacking(Backing):
    """A regular file on a file system that maps memory: tmpfs, or ext4/xfs on pmem or disk."""

    def __init__(self, uri: PoolURI, descriptor: int) -> None:
        super().__init__(uri, descriptor, PAGE)

    @classmethod
    def open(cls, uri: PoolURI, *, writable: bool) -> FileBacking:
        """Open an existing file.

        Raises:
            FileNotFoundError: there is none.
            PoolError: not a regular file, or no permission.
        """
        # In /dev/shm anyone can plant a link under our name; a file:// path was resolved by its operator.
        path = uri.path if uri.scheme == "shm" else Path(os.path.realpath(uri.path))
        access = os.O_RDWR if writable else os.O_RDONLY
        try:
            # O_NONBLOCK: never hang in open() if somebody put a FIFO there.
            descriptor = os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise cannot_open(uri, error) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise PoolError(f"{uri}: {path} is not a regular file: choose another path, or dax:// for a dax device")
        return cls(uri, descriptor)

    def capacity(self) -> int:
        return os.fstat(self.descriptor).st_size

    def read(self, offset: int, length: int) -> bytes:
        return os.pread(self.descriptor, length, offset)

    def provision(self, offset: int, length: int) -> bool:
        """tmpfs gives memory at the first touch and raises SIGBUS when it has none: take it beforehand.

        Raises:
            PoolError: the file system cannot reserve space.
        """
        while _libc.fallocate(self.descriptor, 0, offset, length):
            code = ctypes.get_errno()
            if code in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                return False
            if code != errno.EINTR:
                raise PoolError(
                    f"{self.uri}: the file system of {self.uri.path} cannot reserve space ({os.strerror(code)}): "
                    "put the pool on tmpfs, ext4 or xfs"
                )
        return True

    def still_there(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.uri.path), os.fstat(self.descriptor))
        except OSError:
            return False


class DaxBacking(Backing):
    """A device-dax node: memory with no file system. What the kernel demands and does not tell:

    - ``st_size`` is 0, and read(), write(), lseek() and ftruncate() fail: the size is in sysfs alone, and even the
      superblock is read through a mapping;
    - starts and lengths of mappings are multiples of the device's ``align`` (4 KiB, 2 MiB or 1 GiB), also those of
      munmap: so metadata and data are two mappings of their own, and neither is ever unmapped in part;
    - there is always memory behind it: nothing to provision.
    """

    def __init__(self, uri: PoolURI, descriptor: int, align: int, size: int) -> None:
        super().__init__(uri, descriptor, align)
        self._size = size

    @classmethod
    def open(cls, uri: PoolURI, *, writable: bool, sysfs: Path = SYSFS) -> DaxBacking:
        """Open a device.

        Args:
            sysfs: root of sysfs. Only under another root than /sys may a regular file stand for the device.
        Raises:
            PoolError: missing, not a dax device, or no permission.
        """
        path = Path(os.path.realpath(uri.path))
        try:
            descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise PoolError(f"{uri}: there is no {path}: list the dax devices with `daxctl list`") from error
        except OSError as error:
            raise cannot_open(uri, error) from error
        try:
            node = _sysfs_node(uri, path, os.fstat(descriptor), sysfs)
            size = _attribute(uri, node, "size")
            align = _attribute(uri, node, "align", "dax_region/align")
            if align < PAGE or align & (align - 1) or size < align:
                raise PoolError(
                    f"{uri}: {node} gives size {size} and align {align}, which cannot be mapped: "
                    "reconfigure the device with `daxctl reconfigure-device`"
                )
        except BaseException:
            os.close(descriptor)
            raise
        return cls(uri, descriptor, align, size)

    def capacity(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        start = offset // self.grain * self.grain
        end = -(-min(offset + length, self._size) // self.grain) * self.grain
        window = self.map(start, end - start, writable=False)
        return window[offset - start : offset - start + length].tobytes()

    def provision(self, offset: int, length: int) -> bool:
        return True

    def still_there(self) -> bool:
        return True


def is_used(descriptor: int) -> bool:
    """Whether some process, in whatever container, has the pool mapped as a client. The descriptor is open for writing."""
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _record_lock(fcntl.F_WRLCK))
    except OSError:
        return False
    return int(_FLOCK.unpack(answer)[0]) != fcntl.F_UNLCK


def _record_lock(kind: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0)


def populate(address: int, length: int) -> bool:
    """Fill the page tables of this process for a mapped range, without changing its bytes. Best effort."""
    return int(_libc.madvise(address, length, _MADV_POPULATE_WRITE)) == 0


def cannot_open(uri: PoolURI, error: OSError) -> PoolError:
    """The error for a file or device that exists and cannot be opened, with who owns it."""
    path = uri.path
    try:
        status = os.lstat(path)
    except OSError:
        return PoolError(f"{uri}: cannot open {path} ({error.strerror}): check the permissions of its folder")
    who = f"{path} belongs to {user_name(status.st_uid)} with mode {stat.S_IMODE(status.st_mode):o}"
    if error.errno not in (errno.EACCES, errno.EPERM):
        return PoolError(
            f"{uri}: cannot open {path} ({error.strerror}; {who}): name a pool that is a plain file or device"
        )
    if uri.scheme == "dax":
        cure = "give this user read and write access, for example by a udev rule"
    else:
        cure = "run as that user, or let the server make the pool with mode=660 and share its group"
    return PoolError(f"{uri}: {user_name(os.geteuid())} may not open it; {who}: {cure}")


def user_name(uid: int) -> str:
    """``name (uid 1000)`` for messages."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _sysfs_node(uri: PoolURI, path: Path, status: os.stat_result, sysfs: Path) -> Path:
    if stat.S_ISCHR(status.st_mode):
        # By number, not by name: in a container the node can have any name.
        number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
        node = Path(os.path.realpath(sysfs / "dev" / "char" / number))
        if Path(os.path.realpath(node / "subsystem")).name == "dax":
            return node
    elif sysfs != SYSFS:
        node = sysfs / "bus" / "dax" / "devices" / path.name
        if node.is_dir():
            return node
    raise PoolError(
        f"{uri}: {path} is not a device-dax node: list them with `daxctl list` "
        "(a namespace in another mode becomes one by `ndctl create-namespace -m devdax`), or use file:// for a file"
    )


def _attribute(uri: PoolURI, node: Path, *names: str) -> int:
    """A number in sysfs, under the first of ``names`` that is there (older kernels keep some elsewhere)."""
    for name in names:
        try:
            return int((node / name).read_text().strip(), 0)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise PoolError(f"{uri}: cannot read {node / name} ({error}): is /sys mounted?") from error
    raise PoolError(f"{uri}: {node} has no {names[0]}: is /sys mounted, and the device enabled?")
