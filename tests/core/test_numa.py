"""Pools bound to a NUMA node: what the kernel says of them, from every process, and what is refused with which cure."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from maru_core.errors import ConfigError, PoolError
from maru_core.pool import PoolMemory, numa, parse_pool_uri
from maru_core.pool.backing import Backing
from maru_core.pool.numa import bound_node

Keep = Callable[[PoolMemory], PoolMemory]
NODES = Path("/sys/devices/system/node")
needs_node = pytest.mark.skipif(
    not NODES.is_dir() or 0 not in numa.parse_list((NODES / "has_memory").read_text()),
    reason="this machine has no NUMA node 0 with memory",
)


def policies(address: int, process: int | str = "self") -> set[str]:
    """The kernel's word for the mapping that begins at an address: ``default``, ``bind=static:0``."""
    lines = Path(f"/proc/{process}/numa_maps").read_text().splitlines()
    return {line.split()[1] for line in lines if int(line.split()[0], 16) == address}


def here(memory: PoolMemory) -> set[str]:
    return policies(int(memory.meta.ctypes.data)) | policies(memory.data_address)


def machine(root: Path, online: str, has_memory: str, **kilobytes: int) -> Path:
    """A sysfs of a machine with these nodes."""
    nodes = root / "sys" / "devices" / "system" / "node"
    nodes.mkdir(parents=True)
    (nodes / "online").write_text(online + "\n")
    (nodes / "has_memory").write_text(has_memory + "\n")
    for name, size in kilobytes.items():
        (nodes / name).mkdir()
        (nodes / name / "meminfo").write_text(
            f"Node {name[4:]} MemTotal: {size:>8} kB\nNode {name[4:]} MemFree: 5 kB\n"
        )
    return root / "sys"


@needs_node
def test_all_memory_of_a_pool_is_bound_for_every_process_and_over_restarts(shm_uri: str, pools: Keep) -> None:
    uri = f"{shm_uri}&numa=0"
    server = pools(PoolMemory.create(uri))
    assert here(server) == {"bind=static:0"}
    assert bound_node(server.data_address) == 0
    server.data[:] = 1
    code = """
        import sys
        from pathlib import Path
        from maru_core.pool import PoolMemory
        with PoolMemory.attach(sys.argv[1]) as memory:
            assert memory.data[5] == 1
            line = [l for l in Path("/proc/self/numa_maps").read_text().splitlines() if int(l.split()[0], 16) == memory.data_address]
            print(line[0].split()[1])
    """
    # Of a client that knows nothing of it, too: the policy is the file's.
    for text in (uri, shm_uri):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), text], capture_output=True, text=True, check=False
        )
        assert done.stdout == "bind=static:0\n", done.stderr
    server.close()
    again = pools(PoolMemory.create(uri))
    assert here(again) == {"bind=static:0"}
    assert again.data[5] == 1


def test_without_numa_the_kernels_default_holds(shm_uri: str, pools: Keep) -> None:
    server = pools(PoolMemory.create(shm_uri))
    server.data[: 1 << 16] = 1
    assert here(server) == {"default"}
    assert bound_node(server.data_address) is None


@needs_node
@pytest.mark.parametrize("how", ["new", "empty", "format"])
def test_a_new_pool_is_bound_before_its_first_page(
    shm_uri: str, pools: Keep, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    path = parse_pool_uri(shm_uri).path
    if how == "empty":
        path.touch()
    if how == "format":
        PoolMemory.create(shm_uri).close()
    blocks: list[int] = []
    bind = numa.bind

    def watched(uri: object, backing: Backing, *rest: object) -> None:
        blocks.append(os.fstat(backing.descriptor).st_blocks)
        bind(uri, backing, *rest)

    monkeypatch.setattr(numa, "bind", watched)
    server = pools(PoolMemory.create(f"{shm_uri}&numa=0", format=how == "format"))
    assert blocks == [0]
    assert here(server) == {"bind=static:0"}


@needs_node
def test_a_pool_that_exists_is_bound_from_then_on(shm_uri: str, pools: Keep) -> None:
    PoolMemory.create(shm_uri).close()
    assert here(pools(PoolMemory.create(f"{shm_uri}&numa=0"))) == {"bind=static:0"}


@needs_node
def test_a_pool_whose_pages_lie_elsewhere_is_refused(shm_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with PoolMemory.create(shm_uri) as server:
        server.data[: 1 << 20] = 1
    looked: list[int] = []

    def answer(pages: np.ndarray) -> Counter[int]:
        """What a kernel with two nodes says."""
        looked.append(len(pages))
        return Counter({0: 3, 1: 2})

    monkeypatch.setattr(numa, "_nodes_at", answer)
    with pytest.raises(PoolError, match=r"2 of 5 pages .* are on node 1 and not on numa=0: .*--format"):
        PoolMemory.create(f"{shm_uri}&numa=0")
    assert looked[0] >= 32


@needs_node
def test_pages_of_a_pool_are_looked_at_where_it_has_data(shm_uri: str) -> None:
    with PoolMemory.create(f"{shm_uri}&numa=0") as server:
        server.data[3 << 20 : 4 << 20] = 1
        backing = server._backing
        assert backing is not None
        before = os.fstat(backing.descriptor).st_blocks
        found = numa._nodes_of_data(backing, backing.map(0, server.geometry.pool_bytes, writable=False))
        assert set(found) == {0}
        assert found[0] >= 32
        assert os.fstat(backing.descriptor).st_blocks == before, "looking brings no page in"


@needs_node
def test_a_file_system_that_takes_no_notice_is_refused(tmp_path: Path) -> None:
    if os.statvfs(tmp_path).f_fsid == 0:
        pytest.skip("temporary files are in memory here")
    uri = f"file://{tmp_path}/pool?size=8M&numa=0"
    with pytest.raises(ConfigError, match="needs a file in shared memory") as refused:
        PoolMemory.create(uri)
    assert "shm://" in str(refused.value)
    assert not list(tmp_path.iterdir())


@needs_node
def test_a_file_on_a_tmpfs_is_bound(shm_name: str, pools: Keep) -> None:
    assert here(pools(PoolMemory.create(f"file:///dev/shm/{shm_name}?size=8M&numa=0"))) == {"bind=static:0"}


def test_a_node_that_is_not_there_is_refused(shm_uri: str) -> None:
    known = numa.parse_list((NODES / "online").read_text()) if NODES.is_dir() else set()
    missing = next(node for node in range(1024) if node not in known)
    with pytest.raises(ConfigError) as refused:
        PoolMemory.create(f"{shm_uri}&numa={missing}")
    if known:
        assert f"there is no NUMA node {missing}: this machine has node" in str(refused.value)
        assert "daxctl reconfigure-device --mode=system-ram" in str(refused.value)
    assert not parse_pool_uri(shm_uri).path.exists()


def test_a_node_without_memory_and_a_kernel_without_nodes_are_refused(shm_uri: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"node 1 has no memory, nodes 0, 2 has: .*daxctl online-memory"):
        PoolMemory.create(f"{shm_uri}&numa=1", sysfs=machine(tmp_path / "a", "0-2", "0,2"))
    with pytest.raises(ConfigError, match="no NUMA node 3: this machine has nodes 0, 2"):
        PoolMemory.create(f"{shm_uri}&numa=3", sysfs=machine(tmp_path / "b", "0-2", "0,2"))
    with pytest.raises(ConfigError, match="this kernel has no NUMA"):
        PoolMemory.create(f"{shm_uri}&numa=0", sysfs=tmp_path / "none")
    assert not parse_pool_uri(shm_uri).path.exists()


@needs_node
def test_a_node_that_is_too_small_is_refused(shm_uri: str, tmp_path: Path) -> None:
    small = machine(tmp_path, "0", "0", node0=4096)
    uri = parse_pool_uri(f"{shm_uri}&numa=0")
    with PoolMemory.create(shm_uri) as server:
        assert server._backing is not None
        with pytest.raises(ConfigError, match="the pool has 8M, NUMA node 0 4M: make the pool smaller"):
            numa.bind(uri, server._backing, server.geometry.pool_bytes, small)
    assert numa.node_bytes(0, small) == 4 << 20
    assert (numa.node_bytes(0) or 0) > 64 << 20


@needs_node
def test_what_the_kernel_refuses_is_said_with_its_cure(shm_uri: str, tmp_path: Path) -> None:
    """A node that sysfs shows and this process may not have: here one that only the test's sysfs shows."""
    known = numa.parse_list((NODES / "online").read_text())
    missing = next(node for node in range(64) if node not in known)
    sysfs = machine(tmp_path, f"0-{missing}", f"0-{missing}")
    with pytest.raises(PoolError, match=rf"does not bind .* to numa={missing} .*Mems_allowed_list"):
        PoolMemory.create(f"{shm_uri}&numa={missing}", sysfs=sysfs)
    assert not parse_pool_uri(shm_uri).path.exists()
