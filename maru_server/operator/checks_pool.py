"""Can this process map the pool, is there memory behind it, and how is it laid out?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from maru_core.errors import MaruError
from maru_core.pool import PoolMemory
from maru_core.pool.coherence import Coherence
from maru_core.pool.uri import PoolURI
from maru_core.reach import attach_any
from maru_server.operator.findings import FAIL, OK, WARN, Finding
from maru_server.operator.output import share, size

_CGROUP: Final = Path("/sys/fs/cgroup")
_HUGE: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
#: Part of an extent that may be lost to slots that do not fit before it is worth a word.
_WASTE: Final = 0.2


def attach(uris: list[str], uuid: bytes) -> tuple[PoolMemory | None, Finding]:
    """Map the pool as an engine does, under one of these names. The caller closes it."""
    try:
        memory = attach_any(uris, uuid)
    except MaruError as error:
        return None, Finding(
            "pool",
            FAIL,
            str(error),
            "this host must reach the pool itself: mount the same /dev/shm, file system or device, run as the server's user, "
            "or say how with MARU_POOL",
        )
    geometry = memory.geometry
    return memory, Finding(
        "pool",
        OK,
        f"{memory.uri} is mapped: {size(geometry.data_bytes)} in {geometry.extent_count} extents of {size(geometry.extent_bytes)}, "
        f"UUID {geometry.pool_uuid.hex()}",
    )


def check_memory(
    uri: PoolURI, stats: dict[str, Any], *, meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP
) -> Finding:
    """Whether the part of the pool that has no memory yet can get it."""
    missing = (stats["extents"] - stats["extents_ready"]) * stats["extent_bytes"]
    if uri.scheme == "dax":
        return Finding("pool-memory", OK, f"{uri.path} is memory by itself")
    if not missing:
        return Finding("pool-memory", OK, "all of the pool has its memory")
    limits = {}
    found = os.statvfs(uri.path.parent)
    limits[str(uri.path.parent)] = found.f_bavail * found.f_frsize
    if uri.scheme == "shm":
        limits["memory"] = _field(meminfo, "MemAvailable:") * 1024
    limit = _cgroup_room(cgroup)
    if uri.scheme == "shm" and limit is not None:
        limits["this container's limit"] = limit
    name, least = min(limits.items(), key=lambda item: item[1])
    text = f"{size(missing)} of the pool have no memory yet; {name} has {size(least)} left"
    if least < missing:
        return Finding(
            "pool-memory",
            WARN,
            text,
            "make the pool smaller, or give it the room: a pool that cannot grow evicts sooner "
            "(mount -o remount,size=... /dev/shm; a larger --shm-size or emptyDir sizeLimit for containers)",
        )
    return Finding("pool-memory", OK, text)


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    return 0


def _cgroup_room(root: Path) -> int | None:
    """Bytes that this cgroup may still take; None without a limit (as cgroup v2 shows it inside of a container)."""
    try:
        limit, used = (root / "memory.max").read_text().strip(), (root / "memory.current").read_text()
        return None if limit == "max" else max(0, int(limit) - int(used))
    except (OSError, ValueError):
        return None


def check_huge_pages(
    uri: PoolURI, pool_bytes: int, *, setting: Path = _HUGE, mountinfo: Path = Path("/proc/self/mountinfo")
) -> Finding:
    """How the pool's memory is mapped. Never wrong, sometimes slower."""
    small = f"with pages of 4 KiB each process needs up to {size(pool_bytes // 4096 * 8)} of page tables for the pool"
    if uri.scheme == "dax":
        return Finding("huge-pages", OK, "the device maps in its own alignment")
    if uri.scheme == "file":
        return Finding("huge-pages", OK, f"decided by the file system of {uri.path}; {small}")
    # "deny" and "force" are for all of shared memory; else it is for each mount to say, and a mount that says nothing says never.
    chosen = (_read(setting) or "[]").partition("[")[2].partition("]")[0]
    where = uri.path.parent
    if chosen not in ("deny", "force"):
        options = _mount_options(where, mountinfo)
        chosen = next((option.removeprefix("huge=") for option in options if option.startswith("huge=")), "never")
    if chosen in ("never", "deny"):
        return Finding(
            "huge-pages",
            OK,
            f"{where} has no huge pages ({chosen}); {small}",
            f"for large pools: mount -o remount,huge=within_size {where}, before the pool is made",
        )
    return Finding("huge-pages", OK, f"{where} has huge pages ({chosen})")


def _mount_options(path: Path, mountinfo: Path) -> list[str]:
    """Options of what is mounted at ``path``, the last where several are."""
    found: list[str] = []
    for line in (_read(mountinfo) or "").splitlines():
        words = line.split()
        if len(words) > 4 and words[4] == str(path) and "-" in words:
            found = words[-1].split(",")
    return found


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def check_coherence(coherence: Coherence, hosts: set[str], uri: PoolURI) -> Finding:
    """Several hosts may share a pool where their caches agree by themselves, or where every process sees to it."""
    if coherence.software:
        found = f"the pool is not coherent between hosts: {coherence}"
        if len(hosts) <= 1:
            return Finding(
                "coherence",
                OK,
                f"{found}; all clients are on one host",
                "if no other host will ever take part, a pool with coherence=hardware stores and loads faster (--format; its contents are lost)",
            )
        return Finding(
            "coherence",
            OK,
            f"{found}; clients are on {', '.join(sorted(hosts))}",
            "give every engine verify=checksum: lines that a killed writer left in the caches of another host than the server's may fall "
            "upon a page later, and nothing else finds that",
        )
    if len(hosts) <= 1:
        return Finding("coherence", OK, "all clients are on one host, whose caches agree")
    names = ", ".join(sorted(hosts))
    if uri.scheme == "shm":
        return Finding(
            "coherence",
            WARN,
            f"clients say they are on {names}, and the pool is this host's shared memory",
            "containers of one host have names of their own, and that is fine; other hosts cannot map this pool",
        )
    return Finding(
        "coherence",
        WARN,
        f"clients on {names} share {uri}, which is marked coherent between hosts",
        "this holds for CXL 3 with back-invalidation (and for containers of one host) only: elsewhere format the pool with "
        "coherence=software (its contents are lost)",
    )


def check_objects(
    namespaces: list[dict[str, Any]], extent_bytes: int, min_slot_bytes: int, stats: dict[str, Any]
) -> Finding:
    """How well objects fit into slots and slots into extents."""
    if stats.get("refused_too_large", 0):
        return Finding(
            "objects",
            FAIL,
            f"{stats['refused_too_large']} reserves were for objects larger than an extent ({size(extent_bytes)}): none of those pages is stored",
            "format the pool with a larger ?extent=, or give the engine a smaller page size",
        )
    wasteful = []
    for row in namespaces:
        for component, part in row["components"].items():
            nbytes = part["object_bytes"]
            slot = max(-(-nbytes // 4096) * 4096, min_slot_bytes)
            lost = 1 - (extent_bytes // slot) * nbytes / extent_bytes
            if lost > _WASTE:
                wasteful.append(
                    f"{component} of namespace {row['namespace']}: objects of {nbytes:,} bytes leave {share(lost, 1)} unused"
                )
    if wasteful:
        return Finding(
            "objects",
            WARN,
            "; ".join(wasteful),
            "format the pool with an ?extent= that is a multiple of the object (of its size rounded up to 4 KiB), or with a smaller ?min_slot=",
        )
    return Finding("objects", OK, f"objects fit into extents of {size(extent_bytes)} with little loss")
