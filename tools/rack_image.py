"""What a guest of tests/rack starts from: the kernel as an ELF file, and an initramfs of busybox and a few modules.

python tools/rack_image.py UNPACKED BUSYBOX FOLDER, where UNPACKED is a kernel package unpacked by dpkg -x: writes FOLDER/vmlinux and
FOLDER/initramfs. Pure Python: needs neither cpio nor depmod.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

#: What init loads for each word of `rack_modules=` on the kernel's command line; `boot` always.
LISTS: Final = {
    "boot": ("virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay"),
    "dax": ("nfit", "nd_pmem", "dax_pmem", "device_dax"),
    "fsdax": ("ext4", "crc32c_generic"),
    "net": ("virtio_net", "crc32_generic", "rdma_rxe", "rdma_ucm", "ib_uverbs"),
}
#: How compressed kernels begin.
_PACKED: Final[tuple[tuple[bytes, Callable[[bytes], bytes]], ...]] = (
    (b"\xfd7zXZ\0", lambda data: lzma.LZMADecompressor().decompress(data)),
    (b"\x1f\x8b\x08", lambda data: zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(data)),
    (b"BZh", lambda data: bz2.BZ2Decompressor().decompress(data)),
    (b"]\0\0\0", lambda data: lzma.LZMADecompressor(lzma.FORMAT_ALONE).decompress(data)),
)

INIT: Final = r"""#!/bin/busybox sh
B=/bin/busybox
$B mkdir -p /proc /sys /dev /host /over /root
$B mount -t proc proc /proc
$B mount -t sysfs sys /sys
$B mount -t devtmpfs dev /dev
word() { $B sed -n "s/.*\b$1=\([^ ]*\).*/\1/p" /proc/cmdline; }
for list in boot $(word rack_modules | $B tr , ' '); do
  for module in $($B cat /lists/$list); do
    [ -e /loaded.$module ] || $B insmod /modules/$module || echo "rack: $module was not loaded"
    : >/loaded.$module
  done
done
try() { "$@" || { echo "rack: failed: $*"; $B poweroff -f; }; }
try $B mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=262144 host /host
try $B mount -t tmpfs -o mode=755 over /over
$B mkdir /over/up /over/work
try $B mount -t overlay -o lowerdir=/host,upperdir=/over/up,workdir=/over/work over /root
for place in proc sys dev; do $B mount --move /$place /root/$place; done
for place in tmp run; do $B mount -t tmpfs -o mode=1777 $place /root/$place; done
$B mkdir -p /root/dev/shm /root/run/rack
$B mount -t tmpfs -o mode=1777 shm /root/dev/shm
$B cp $B /root/run/busybox
try $B mount -t 9p -o trans=virtio,version=9p2000.L,cache=none,msize=262144 share /root/run/rack
exec $B switch_root /root /run/busybox sh /run/rack/guest.sh
"""


def vmlinux(image: bytes) -> bytes:
    """The ELF file inside of a bzImage: starting that saves the time of unpacking it under emulation.

    Raises:
        ValueError: there is none.
    """
    for magic, unpack in _PACKED:
        for found in re.finditer(re.escape(magic), image):
            try:
                kernel = unpack(image[found.start() :])
            except (lzma.LZMAError, zlib.error, OSError, EOFError):
                continue
            if kernel.startswith(b"\x7fELF"):
                return kernel
    raise ValueError("no packed ELF file in the kernel's image")


class Modules:
    """The modules of a kernel package."""

    def __init__(self, folder: Path) -> None:
        self._paths = {path.name.split(".ko")[0].replace("-", "_"): path for path in folder.rglob("*.ko*")}

    def read(self, name: str) -> bytes:
        path = self._paths[name]
        data = path.read_bytes()
        return {".xz": lzma.decompress, ".gz": gzip.decompress}.get(path.suffix, bytes)(data)

    def order(self, name: str) -> Iterator[str]:
        """What has to be loaded for a module, it last. Nothing for what is built into the kernel."""
        name = name.replace("-", "_")
        if name not in self._paths:
            return
        data = self.read(name)
        for found in re.finditer(rb"(?<=\0)depends=([^\0]*)\0", data):
            for needed in filter(None, found[1].decode().split(",")):
                yield from self.order(needed)
        yield name


class Archive:
    """A cpio archive in the format `newc`, as the kernel unpacks it."""

    def __init__(self) -> None:
        self._out = io.BytesIO()
        self._count = 0

    def add(self, name: str, data: bytes, mode: int = 0o100644) -> None:
        self._count += 1
        path = name.encode() + b"\0"
        fields = (self._count, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(path), 0)
        self._padded(b"070701" + b"".join(b"%08X" % field for field in fields) + path)
        self._padded(data)

    def _padded(self, data: bytes) -> None:
        self._out.write(data + b"\0" * (-len(data) % 4))

    def finish(self) -> bytes:
        self.add("TRAILER!!!", b"", 0)
        return self._out.getvalue()


def initramfs(modules: Modules, busybox: bytes) -> bytes:
    archive = Archive()
    for folder in ("bin", "modules", "lists", "dev"):
        archive.add(folder, b"", 0o040755)
    archive.add("init", INIT.encode(), 0o100755)
    archive.add("bin/busybox", busybox, 0o100755)
    added: set[str] = set()
    for name, wanted in LISTS.items():
        order = list(dict.fromkeys(part for module in wanted for part in modules.order(module)))
        archive.add(f"lists/{name}", "\n".join(order).encode())
        for module in order:
            if module not in added:
                archive.add(f"modules/{module}", modules.read(module))
                added.add(module)
    return archive.finish()


def main(unpacked: Path, busybox: Path, folder: Path) -> None:
    (image,) = (unpacked / "boot").glob("vmlinuz-*")
    (folder / "vmlinux").write_bytes(vmlinux(image.read_bytes()))
    (folder / "initramfs").write_bytes(initramfs(Modules(unpacked / "lib" / "modules"), busybox.read_bytes()))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
