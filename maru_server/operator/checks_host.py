"""What can be seen of this host: where the pool's memory lies, and limits of pinning."""

from __future__ import annotations

import resource
from collections import Counter
from pathlib import Path
from typing import Any, Final

from maru_core.pool.numa import parse_list
from maru_core.pool.uri import PoolURI
from maru_server.operator.findings import OK, WARN, Finding
from maru_server.operator.output import share, size

PROC: Final = Path("/proc")
NODES: Final = Path("/sys/devices/system/node")

# ---------------------------------------------------------------- NUMA


def check_binding(uri: PoolURI, bound: int | None) -> Finding:
    """Whether a pool whose URI names a node, or that is bound to one, is so. ``bound``: what the kernel says of this mapping."""
    if uri.numa in (None, bound):
        return Finding(
            "numa", OK, f"all of the pool's memory comes from NUMA node {bound}, as its server was told (numa={bound})"
        )
    return Finding(
        "numa",
        WARN,
        f"the URI says numa={uri.numa}, and here the pool's memory is bound to {'no node' if bound is None else f'node {bound}'}",
        "numbers are those of the server's host: where this is that host, start maru-server with numa= in --pool",
    )


def nodes_of(cpus: set[int], nodes: Path = NODES) -> set[int]:
    """NUMA nodes to which the CPUs belong."""
    return {
        node
        for node in parse_list(_read(nodes / "online") or "0")
        if parse_list(_read(nodes / f"node{node}" / "cpulist") or "") & cpus
    }


def memory_of(pid: int | str, path: Path, proc: Path = PROC) -> Counter[int]:
    """Bytes of the mapped file ``path`` on each NUMA node, as far as the process has touched them."""
    found: Counter[int] = Counter()
    for line in (_read(proc / str(pid) / "numa_maps") or "").splitlines():
        words = line.split()
        if f"file={path}" not in words:
            continue
        grain = next((int(word.split("=")[1]) for word in words if word.startswith("kernelpagesize_kB=")), 4) * 1024
        for word in words:
            if word[:1] == "N" and "=" in word and word[1 : word.index("=")].isdigit():
                node, count = word[1:].split("=")
                found[int(node)] += int(count) * grain
    return found


def check_numa(
    sessions: list[dict[str, Any]], path: Path, host: str, *, proc: Path = PROC, nodes: Path = NODES
) -> list[Finding]:
    """Whether the pool's memory lies on the nodes on whose CPUs the engines of this host run.

    Copies over the link between sockets are slower, by a third or so. Which process is meant is what each said at its Hello, so
    a number is believed only if the process there maps the pool."""
    online = parse_list(_read(nodes / "online") or "0")
    if len(online) <= 1:
        return [Finding("numa", OK, "this host has one NUMA node")]
    findings = []
    seen = 0
    for row in sessions:
        if row["host"] != host:
            continue
        placed = memory_of(row["pid"], path, proc)
        cpus = _allowed_cpus(row["pid"], proc)
        if not placed or not cpus:
            continue
        seen += 1
        near = nodes_of(cpus, nodes)
        away = sum(count for node, count in placed.items() if node not in near)
        if away > sum(placed.values()) / 2:
            where = ", ".join(f"node {node}: {size(count)}" for node, count in sorted(placed.items()))
            findings.append(
                Finding(
                    "numa",
                    WARN,
                    f"{row['name']} (pid {row['pid']}) runs on NUMA nodes {sorted(near)}, and {share(away, sum(placed.values()))} of the pool's memory "
                    f"that it uses is elsewhere ({where})",
                    f"start maru-server with numactl --interleave={','.join(map(str, sorted(online)))}, or with --membind on the engine's node, before the pool is filled",
                )
            )
    if findings:
        return findings
    if not seen:
        return [
            Finding(
                "numa",
                OK,
                f"this host has {len(online)} NUMA nodes, and no engine whose memory can be seen from here",
                "run doctor on the engine's host, as its user",
            )
        ]
    return [Finding("numa", OK, f"the pool's memory is near the CPUs of the {seen} engines that can be seen")]


def _allowed_cpus(pid: int, proc: Path) -> set[int]:
    for line in (_read(proc / str(pid) / "status") or "").splitlines():
        if line.startswith("Cpus_allowed_list:"):
            return parse_list(line.split(":", 1)[1])
    return set()


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


# ---------------------------------------------------------------- pinning


def check_pinning(*, root: Path = Path("/"), limit: int | None = None) -> Finding:
    """Limits of locked memory, where there is something that wants to lock some.

    A NIC's driver counts what it registers (ibv_reg_mr(3)) against RLIMIT_MEMLOCK; CUDA pins without asking for it.

    Args:
        limit: bytes that may be locked; None: as this process has it.
    """
    gpu = any((root / place).exists() for place in ("dev/nvidia0", "dev/nvidiactl", "dev/kfd"))
    nics = sorted(path.name for path in (root / "sys/class/infiniband").glob("*"))
    if not gpu and not nics:
        return Finding("pinning", OK, "there is no GPU and no RDMA NIC here: nothing is pinned")
    if limit is None:
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Finding("pinning", OK, "memory may be locked without limit")
    cure = "set LimitMEMLOCK=infinity (systemd), --ulimit memlock=-1 (docker), or memlock in /etc/security/limits.conf, for the engines"
    text = f"this process may lock {size(limit)}"
    if nics:
        return Finding("pinning", WARN, f"{text}, and what {', '.join(nics)} registers counts against it", cure)
    return Finding("pinning", OK, f"{text}, which CUDA does not count", f"where an RDMA NIC is added: {cure}")
