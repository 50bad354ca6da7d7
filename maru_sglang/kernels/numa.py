"""Which NUMA node memory and GPUs are on, asked of the kernel. Empty or None where it does not say; nothing is moved."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from maru_core.pool.numa import nodes_of_pages

__all__ = ["gpu_node", "nodes_of_pages"]

SYSFS_PCI: Final = Path("/sys/bus/pci/devices")


def gpu_node(pci_bus_id: str, devices: Path = SYSFS_PCI) -> int | None:
    """The node that a PCI device (``0000:3b:00.0``) hangs on; None where the machine has one node or does not say."""
    try:
        node = int((devices / pci_bus_id / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
