"""Pools for tests: each test has its own names, and nothing is left in /dev/shm."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from maru_core.pool import PoolMemory

#: Smallest useful pool: 4 KiB alignment keeps its tables and extents small.
SMALL = "size=8M&extent=256K&align=4K&min_slot=4K"


@pytest.fixture
def shm_name() -> Iterator[str]:
    name = f"maru-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    yield name
    Path("/dev/shm", name).unlink(missing_ok=True)


@pytest.fixture
def shm_uri(shm_name: str) -> str:
    return f"shm://{shm_name}?{SMALL}"


@pytest.fixture
def pools() -> Iterator[Callable[..., PoolMemory]]:
    """Remember pools to close them, in whatever state the test leaves them."""
    opened: list[PoolMemory] = []

    def keep(memory: PoolMemory) -> PoolMemory:
        opened.append(memory)
        return memory

    yield keep
    for memory in opened:
        memory.close()


class FakeDax:
    """A sysfs that says what a kernel with one dax device says, and a regular file that stands for its memory.

    The file is larger than the device: only sysfs may be asked for the size.
    """

    def __init__(self, root: Path, size: int, align: int) -> None:
        self.sysfs = root / "sys"
        self.node = self.sysfs / "bus" / "dax" / "devices" / "dax7.0"
        self.node.mkdir(parents=True)
        self.device = root / "dax7.0"
        self.device.write_bytes(b"")
        os.truncate(self.device, 2 * size)
        self.set(size=size, align=align)

    @property
    def uri(self) -> str:
        return f"dax://{self.device}"

    def set(self, **attributes: int) -> None:
        for name, value in attributes.items():
            (self.node / name).write_text(f"{value}\n")


@pytest.fixture
def dax(tmp_path: Path) -> Callable[..., FakeDax]:
    return lambda size=64 << 20, align=2 << 20: FakeDax(tmp_path, size, align)
