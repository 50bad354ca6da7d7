"""What killed tests left in shared memory goes, and nothing that anybody may use."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

from leftovers import OLD_S, remove_leftovers


def test_only_old_pools_of_dead_tests_go(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    dead = child.pid
    old = time.time() - OLD_S - 60

    def made(name: str, at: float = old) -> Path:
        path = tmp_path / name
        path.write_bytes(b"pool")
        os.utime(path, (at, at))
        return path

    gone = {made(name) for name in (f"maru-test-{dead}-1234abcd", f"maru-test-{dead}", f"maru-kills-{dead}-1234abcd")}
    kept = {
        made(f"maru-test-{dead}-young", time.time()),
        made(f"maru-test-{os.getpid()}-mine"),
        made(f"maru-test-{dead}x-odd"),
        made(f"maru-production-{dead}-1234abcd"),
        made(f"maru-{dead}"),
        locked := made(f"maru-test-{dead}-served"),
    }
    (link := tmp_path / f"maru-test-{dead}-link").symlink_to(made("elsewhere"))
    with locked.open("r+b") as pool:
        fcntl.flock(pool, fcntl.LOCK_EX)
        assert sorted(remove_leftovers(tmp_path)) == sorted(path.name for path in gone)
    assert not any(path.exists() for path in gone)
    assert all(path.exists() for path in (*kept, link))
