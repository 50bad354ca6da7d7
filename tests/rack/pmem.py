"""Files that guests see as persistent memory, formatted as `ndctl create-namespace -M mem` does.

The kernel keeps what a namespace is used for in one block at 4 KiB of it (``struct nd_pfn_sb``, version 1.4, in its
drivers/nvdimm/pfn.h): written here, so that guests find their devices at boot, and two that share a file do not format it at once.
"""

from __future__ import annotations

import struct
import uuid
from pathlib import Path
from typing import Final, Literal

import numpy as np

#: Where the device or disk begins in the file.
DATA_OFFSET: Final = 2 << 20
_BLOCK: Final = 4096
_MODE_RAM: Final = 1
#: signature, uuid, parent's uuid, flags, major, minor, offset of the data, pages, mode, start pad, end, align, page size, struct page
_FIELDS: Final = struct.Struct("<16s16s16sIHHQQIIIIIH")


def format_namespace(file: Path, size: int, mode: Literal["devdax", "fsdax"], align: int = 2 << 20) -> Path:
    """Make ``file`` a namespace of ``size`` bytes, of which the first 2 MiB are not of the device.

    Args:
        align: of a devdax device: 4 KiB, 2 MiB or 1 GiB.
    """
    signature = b"NVDIMM_DAX_INFO" if mode == "devdax" else b"NVDIMM_PFN_INFO"
    pages = (size - DATA_OFFSET) // 4096
    head = _FIELDS.pack(
        signature, uuid.uuid4().bytes, b"", 0, 1, 4, DATA_OFFSET, pages, _MODE_RAM, 0, 0, align, 4096, 64
    )
    block = head.ljust(_BLOCK - 8, b"\0")
    with file.open("wb") as out:
        out.truncate(size)
        out.seek(_BLOCK)
        out.write(block + struct.pack("<Q", _fletcher64(block + bytes(8))))
    return file


def _fletcher64(data: bytes) -> int:
    words = np.frombuffer(data, "<u4").astype(np.uint64)
    low = np.cumsum(words & np.uint64(0xFFFFFFFF), dtype=np.uint64) & np.uint64(0xFFFFFFFF)
    high = int(low.astype(object).sum()) & 0xFFFFFFFFFFFFFFFF
    return (high & 0xFFFFFFFF) << 32 | int(low[-1])
