"""Pools of tests that were killed: nobody removed them, and they take memory until the machine is started anew."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
#: As tests name what they make there: with the process that made it.
_NAME = re.compile(r"maru-(?:test|kills)-(\d+)(?:-|$)")
#: No test runs for as long, also none of another container that has the same shared memory and other processes, seconds.
OLD_S = 6 * 3600.0


def remove_leftovers(directory: Path = SHARED_MEMORY) -> list[str]:
    """Remove pools of tests whose process is gone, that are old, and that no server has locked; their names."""
    removed = []
    for path in directory.glob("maru-*"):
        named = _NAME.match(path.name)
        if named is None or Path("/proc", named[1]).exists():
            continue
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if time.time() - os.fstat(file).st_mtime < OLD_S:
                    continue
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(path.name)
            finally:
                os.close(file)
    return removed
