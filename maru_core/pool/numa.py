"""Pools that lie on one NUMA node (``?numa=1``): CXL memory that the kernel shows as a node without CPUs, or one socket's.

What the kernel does, as seen on Linux 6.18: for shared memory (tmpfs, and so ``/dev/shm``) a policy that is set through a mapping belongs
to the file. It stays when the mapping goes, and whoever brings a page in, by a touch from any process or by fallocate, gets it from
that node. So the server sets it, before the first page, and clients need do nothing. Elsewhere the call succeeds and nothing comes of
it: the page cache (ext4, xfs) looks at no mapping's policy, and on hugetlbfs a policy is one mapping's, of which fallocate knows nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
from collections import Counter
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from maru_core.errors import ConfigError, PoolError
from maru_core.pool.backing import SYSFS, Backing
from maru_core.pool.uri import NUMA_NODES, PoolURI, format_size

#: Numbers of system calls, for which the C library has no functions: linux/arch/x86/entry/syscalls, include/uapi/asm-generic/unistd.h.
_MBIND: Final = {"x86_64": 237, "aarch64": 235}
_GET_MEMPOLICY: Final = {"x86_64": 239, "aarch64": 236}
_MOVE_PAGES: Final = {"x86_64": 279, "aarch64": 239}  # with no target nodes it only says where pages are
#: linux/mempolicy.h: this node and no other, whatever a cpuset is changed to; and fail over pages of the mapping elsewhere.
_MPOL_BIND: Final = 2
_MPOL_F_STATIC_NODES: Final = 1 << 15
_MPOL_MODE_FLAGS: Final = 7 << 13
_MPOL_F_ADDR: Final = 2
_MPOL_MF_STRICT: Final = 1
#: linux/magic.h.
_TMPFS: Final = 0x01021994
#: Pages of an existing pool whose node is asked for.
_SAMPLES: Final = 256
_WORD: Final = 64

U64 = npt.NDArray[np.uint64]
_Mask = ctypes.c_uint64 * (NUMA_NODES // _WORD + 1)

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _StatFs(ctypes.Structure):
    _fields_ = (("f_type", ctypes.c_long), ("rest", ctypes.c_long * 31))


def check_node(uri: PoolURI, sysfs: Path = SYSFS) -> None:
    """Refuse a node on which this machine has no memory. Nothing without ``numa=``.

    Raises:
        ConfigError: names the nodes that there are, and the cure.
    """
    if uri.numa is None:
        return
    nodes = sysfs / "devices" / "system" / "node"
    if platform.machine() not in _MBIND or not nodes.is_dir():
        raise ConfigError(
            f"{uri}: numa={uri.numa} cannot be had: this kernel has no NUMA (there is no {nodes}): leave numa out, or use dax:// for a device"
        )
    online, filled = _listed(nodes / "online"), _listed(nodes / "has_memory")
    if uri.numa not in online:
        raise ConfigError(
            f"{uri}: there is no NUMA node {uri.numa}: this machine has {_said(filled)}. Memory of a CXL device becomes a node with "
            "`daxctl reconfigure-device --mode=system-ram dax0.0`"
        )
    if uri.numa not in filled:
        raise ConfigError(
            f"{uri}: NUMA node {uri.numa} has no memory, {_said(filled)} has: bring the memory of its device online with "
            "`daxctl online-memory dax0.0`"
        )


def bind(uri: PoolURI, backing: Backing, nbytes: int, sysfs: Path = SYSFS) -> None:
    """Have all pages of a file that are not there yet come from the URI's node. Nothing without ``numa=``.

    Args:
        nbytes: of the file, from its start.
    Raises:
        ConfigError: the node is too small, or the file system takes no notice.
        PoolError: the kernel refuses, or pages lie elsewhere already; names the cure.
    """
    node = uri.numa
    if node is None:
        return
    if _file_system(backing) != _TMPFS:
        raise ConfigError(
            f"{uri}: numa={node} needs a file in shared memory, and {uri.path} is on a file system whose pages come from any node: use shm://, or "
            "file:// on a tmpfs, or dax:// for a device's own memory"
        )
    total = node_bytes(node, sysfs)
    if total is not None and nbytes > total:
        raise ConfigError(
            f"{uri}: the pool has {format_size(nbytes)}, NUMA node {node} {format_size(total)}: make the pool smaller, or leave numa out"
        )
    # Of the file's own length: mapping it costs nothing, and touches nothing.
    mapping = backing.map(0, nbytes, writable=False)
    address = int(mapping.ctypes.data)
    mask = _Mask()
    mask[node // _WORD] = 1 << node % _WORD
    failed = _libc.syscall(
        ctypes.c_long(_MBIND[platform.machine()]),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_ulong(_MPOL_BIND | _MPOL_F_STATIC_NODES),
        mask,
        ctypes.c_ulong(NUMA_NODES + 1),
        ctypes.c_ulong(_MPOL_MF_STRICT),
    )
    if failed:
        raise _refused(uri, ctypes.get_errno())
    if bound_node(address) != node:
        raise PoolError(f"{uri}: the kernel did not take numa={node} for {uri.path}: leave numa out")
    elsewhere = _nodes_of_data(backing, mapping)
    there = elsewhere.pop(node, 0)
    if elsewhere:
        away = elsewhere.total()
        raise PoolError(
            f"{uri}: {away} of {away + there} pages of the existing pool that were looked at are on {_said(elsewhere)} and not on "
            f"numa={node}: leave numa out, or format the pool anew (--format; its contents are lost)"
        )


def node_bytes(node: int, sysfs: Path = SYSFS) -> int | None:
    """Bytes of a node's memory, taken or not; None where the kernel does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (sysfs / "devices" / "system" / "node" / f"node{node}" / "meminfo").read_text().splitlines():
            words = line.split()
            if "MemTotal:" in words:
                return int(words[words.index("MemTotal:") + 1]) * 1024
    return None


def bound_node(address: int) -> int | None:
    """The node to which the memory at an address is bound; None if to none, or to several, or where the kernel does not say."""
    number = _GET_MEMPOLICY.get(platform.machine())
    mode, mask = ctypes.c_int(), _Mask()
    if number is None or _libc.syscall(
        ctypes.c_long(number),
        ctypes.byref(mode),
        mask,
        ctypes.c_ulong(NUMA_NODES + 1),
        ctypes.c_void_p(address),
        ctypes.c_ulong(_MPOL_F_ADDR),
    ):
        return None
    nodes = [bit for bit in range(NUMA_NODES) if mask[bit // _WORD] >> bit % _WORD & 1]
    return nodes[0] if mode.value & ~_MPOL_MODE_FLAGS == _MPOL_BIND and len(nodes) == 1 else None


def nodes_of_pages(address: int, nbytes: int, samples: int) -> Counter[int]:
    """How many of up to ``samples`` pages, spread evenly over a range, are on each node. Pages not there are not counted.

    Args:
        address: of a whole CPU page.
    """
    count = min(samples, nbytes // mmap.PAGESIZE)
    if count < 1:
        return Counter()
    step = nbytes // mmap.PAGESIZE // count * mmap.PAGESIZE
    return _nodes_at(np.uint64(address) + np.arange(count, dtype=np.uint64) * np.uint64(step))


def _nodes_at(pages: U64) -> Counter[int]:
    number = _MOVE_PAGES.get(platform.machine())
    if number is None or not len(pages):
        return Counter()
    status = np.full(len(pages), -1, np.int32)
    done = _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_long(0),  # this process
        ctypes.c_ulong(len(pages)),
        ctypes.c_void_p(pages.ctypes.data),
        ctypes.c_void_p(None),
        ctypes.c_void_p(status.ctypes.data),
        ctypes.c_long(0),
    )
    if done < 0:  # a kernel without NUMA, or a sandbox that does not allow it
        return Counter()
    return Counter(node for node in status.tolist() if node >= 0)


def _nodes_of_data(backing: Backing, mapping: npt.NDArray[np.uint8]) -> Counter[int]:
    """Where pages that hold data already are, of a sample; a new file has none."""
    starts: list[int] = []
    at = 0
    with contextlib.suppress(OSError):  # ENXIO: no data after this
        while len(starts) < _SAMPLES and at < len(mapping):
            start = os.lseek(backing.descriptor, at, os.SEEK_DATA)
            end = min(os.lseek(backing.descriptor, start, os.SEEK_HOLE), len(mapping))
            step = max(mmap.PAGESIZE, (end - start) // (_SAMPLES // 4) // mmap.PAGESIZE * mmap.PAGESIZE)
            starts += range(start, end, step)
            at = end
    for start in starts:
        mapping[start].item()  # a page is found only where it is mapped
    return _nodes_at(np.array(starts, np.uint64) + np.uint64(mapping.ctypes.data))


def _file_system(backing: Backing) -> int:
    """Its number as statfs(2) says it, 0 where it does not."""
    status = _StatFs()
    return 0 if _libc.fstatfs(backing.descriptor, ctypes.byref(status)) else int(status.f_type) & 0xFFFFFFFF


def _refused(uri: PoolURI, code: int) -> PoolError:
    cures = {
        errno.EPERM: "in a container allow the system call mbind (it comes with the capability SYS_NICE)",
        errno.ENOSYS: "this kernel has no NUMA: leave numa out",
        errno.EINVAL: f"the cpuset of this process does not have node {uri.numa}: see Mems_allowed_list in /proc/self/status",
        errno.EIO: "pages lie elsewhere already: format the pool anew (--format; its contents are lost)",
    }
    return PoolError(
        f"{uri}: the kernel does not bind {uri.path} to numa={uri.numa} ({os.strerror(code)}): "
        + cures.get(code, "leave numa out")
    )


def parse_list(text: str) -> set[int]:
    """Numbers of the kernel's ``0-3,8``."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found


def _listed(file: Path) -> set[int]:
    """None where the file is not there."""
    try:
        return parse_list(file.read_text())
    except (OSError, ValueError):
        return set()


def _said(nodes: set[int] | Counter[int]) -> str:
    return f"node{'s' * (len(nodes) > 1)} {', '.join(map(str, sorted(nodes)))}" if nodes else "none"
