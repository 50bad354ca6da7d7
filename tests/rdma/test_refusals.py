"""What an agent does not serve, and says so in one line: memory that a NIC cannot be given."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from maru_agent.registrable import DAX, IMMUTABLE, attributes, lock_limit
from support import running_server

ROOT_ONLY = pytest.mark.skipif(bool(os.geteuid()), reason="mounts and attributes need root")


@ROOT_ONLY
def test_a_read_only_mapping_is_refused(tmp_path: Path) -> None:
    """A NIC must write into it: the kernel refuses to register what is mapped for reading only."""
    directory = tmp_path / "pools"
    directory.mkdir()
    script = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'
    with running_server(tmp_path, pool=f"file://{directory}/pool") as server:
        agent = [sys.executable, "-m", "maru_agent", "--server", server.endpoint]
        line = ["unshare", "--mount", "sh", "-c", script, "sh", str(directory), *agent]
        ended = subprocess.run(line, capture_output=True, text=True, timeout=180, check=False)
    if "mount:" in ended.stderr:
        pytest.skip(f"nothing can be mounted here: {ended.stderr.strip()}")
    assert ended.returncode == 2
    (said,) = [line for line in ended.stderr.splitlines() if not line[:4].isdigit()]
    assert said.startswith("maru-agent: ")
    assert f"{directory}/pool" in said
    assert "Read-only file system" in said


@ROOT_ONLY
def test_attributes_of_files_are_read_as_the_kernel_has_them(tmp_path: Path) -> None:
    """No DAX file system can be made here: what tells one is read beside an attribute that can be set."""
    path = tmp_path / "file"
    path.touch()
    before = attributes(path)
    assert not before & (IMMUTABLE | DAX)
    changed = subprocess.run(["chattr", "+i", str(path)], capture_output=True, text=True, check=False)
    if changed.returncode:
        pytest.skip(f"no attributes on this file system: {changed.stderr.strip()}")
    try:
        assert attributes(path) == before | IMMUTABLE
    finally:
        subprocess.run(["chattr", "-i", str(path)], check=True)
    assert attributes(tmp_path / "nothing") == 0
    assert not attributes(Path("/dev/shm")) & DAX


def test_a_limit_of_locked_memory_is_named_where_it_holds() -> None:
    """Of a process that may not exceed it."""
    program = (
        "import os, resource; from maru_agent.registrable import lock_limit; "
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536)); os.geteuid() or os.setuid(65534); print(lock_limit(1 << 30))"
    )
    if not os.geteuid():
        assert lock_limit(1 << 50) == "", "it does not hold for root"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180, check=False)
    assert "ulimit -l is 64 KiB here, and 1048576 KiB are to be locked" in said.stdout, said.stderr
