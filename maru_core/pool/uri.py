"""Pool URIs: ``shm://name?size=8G``, ``file:///mnt/pmem0/pool?size=64G``, ``dax:///dev/dax0.0``.

Only text is looked at here; nothing is opened.

========== ============================ ==========================================================================
key        values                       meaning
========== ============================ ==========================================================================
size       bytes, or 512M, 8G, 1T       size of a new pool; must agree with an existing one. A dax device has its own
coherence  hardware (default), software whether the hosts' caches agree on the memory by themselves; of a new pool, or what an
                                        existing one must have
extent     bytes, or 64M                size of an extent of a new pool
min_slot   bytes, or 16K                smallest slot of a new pool
align      bytes, or 2M, 1G             alignment of a new pool's extents
mode       600 (default), 640, 660      permissions of a new file: owner only, group reads, group takes part
numa       number of a node             NUMA node from which all of the pool's memory comes; shm, and files on a tmpfs
========== ============================ ==========================================================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, cast
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from maru_core.errors import ConfigError
from maru_core.pool.format import SLOT_GRAIN

Scheme = Literal["shm", "file", "dax"]
Coherence = Literal["hardware", "software"]

#: Where POSIX shared memory lives on Linux.
SHM_DIRECTORY: Final = Path("/dev/shm")

_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE: Final = re.compile(r"(\d{1,20})\s*([KMGT]?)(?:i?B)?", re.IGNORECASE | re.ASCII)
_SHM_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}", re.ASCII)
#: As many as Linux can have.
NUMA_NODES: Final = 1024
_NODE: Final = re.compile(r"\d{1,4}", re.ASCII)
_MODES: Final = {"600": 0o600, "640": 0o640, "660": 0o660}
_EXAMPLES: Final = "shm://name?size=8G, file:///mnt/pmem0/pool?size=64G or dax:///dev/dax0.0"


def parse_size(text: str, what: str = "size") -> int:
    """Bytes of ``4096``, ``512M``, ``8G``, ``8GiB`` (units are powers of 1024).

    Args:
        text: what a person wrote.
        what: the setting's name, for the error.
    Raises:
        ConfigError: not a positive size.
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(match[1]) * _UNITS[match[2].upper()] if match else 0
    if not 0 < size < 1 << 63:
        raise ConfigError(f"{what}={text!r} is not a size: write bytes or a number with K, M, G or T, as in 8G")
    return size


def format_size(size: int) -> str:
    """The shortest text that :func:`parse_size` turns back into exactly ``size`` bytes: ``8G``, ``4097``."""
    for unit in ("T", "G", "M", "K"):
        if size and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return str(size)


@dataclass(frozen=True, slots=True)
class PoolURI:
    """A parsed pool URI; ``str()`` gives a URI that parses back to an equal object. Sizes are in bytes."""

    scheme: Scheme
    path: Path
    size: int | None = None
    coherence: Coherence | None = None
    extent: int | None = None
    min_slot: int | None = None
    align: int | None = None
    mode: int = 0o600
    numa: int | None = None

    def __str__(self) -> str:
        place = quote(self.path.name if self.scheme == "shm" else str(self.path))
        query = [
            f"{key}={format_size(value)}"
            for key, value in (
                ("size", self.size),
                ("extent", self.extent),
                ("min_slot", self.min_slot),
                ("align", self.align),
            )
            if value is not None
        ]
        if self.coherence is not None:
            query.append(f"coherence={self.coherence}")
        if self.mode != 0o600:
            query.append(f"mode={self.mode:o}")
        if self.numa is not None:
            query.append(f"numa={self.numa}")
        return f"{self.scheme}://{place}" + ("?" + "&".join(query) if query else "")


def parse_pool_uri(text: str) -> PoolURI:
    """Parse a pool URI.

    Raises:
        ConfigError: unknown scheme or query key, or a value that cannot be used; names key, value and cure.
    """
    # urlsplit silently drops some control characters; a path must never lose a part unnoticed.
    if any(ord(c) < 0x20 or ord(c) == 0x7F for c in text):
        raise ConfigError(f"pool URI {text!r} contains control characters: remove them")
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise ConfigError(f"pool URI {text!r} is not a URI ({error}): write {_EXAMPLES}") from error
    if parts.scheme not in ("shm", "file", "dax"):
        raise ConfigError(f"pool URI {text!r} has scheme {parts.scheme!r}: write {_EXAMPLES}")
    if parts.fragment:
        raise ConfigError(f"pool URI {text!r} contains '#': write it as %23")
    scheme = cast(Scheme, parts.scheme)
    path = _path(text, scheme, unquote(parts.netloc), unquote(parts.path))
    try:
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True) if parts.query else []
    except ValueError as error:
        raise ConfigError(f"pool URI {text!r}: {parts.query!r} is not key=value&key=value") from error
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ConfigError(f"pool URI {text!r} gives a key twice: keep one of each")
    return _with_options(scheme, path, values)


def _path(text: str, scheme: Scheme, authority: str, path: str) -> Path:
    if scheme == "shm":
        if path or not _SHM_NAME.fullmatch(authority):
            raise ConfigError(
                f"pool URI {text!r}: {authority + path!r} is not a shared-memory name: "
                "use letters, digits, '.', '_' and '-', as in shm://maru?size=8G"
            )
        return SHM_DIRECTORY / authority
    if authority or not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise ConfigError(
            f"pool URI {text!r}: {authority + path!r} is not an absolute file path: "
            f"write three slashes, as in {scheme}:///{'dev/dax0.0' if scheme == 'dax' else 'mnt/pmem0/pool'}"
        )
    # Exactly one leading slash: a path of two is another name for the same file, and would not round-trip.
    return Path("/" + path.lstrip("/"))


def _with_options(scheme: Scheme, path: Path, values: dict[str, str]) -> PoolURI:
    sizes: dict[str, int | None] = {}
    for key in ("size", "extent", "min_slot", "align"):
        sizes[key] = parse_size(values.pop(key), key) if key in values else None
    coherence = values.pop("coherence", None)
    if coherence not in (None, "hardware", "software"):
        raise ConfigError(f"coherence={coherence!r} is not known: use hardware or software")
    mode = values.pop("mode", "600")
    if mode not in _MODES:
        raise ConfigError(
            f"mode={mode!r} is not allowed for a pool: use 600, 640 (group reads) or 660 (group takes part)"
        )
    numa = values.pop("numa", None)
    if numa is not None and (not _NODE.fullmatch(numa) or int(numa) >= NUMA_NODES):
        raise ConfigError(f"numa={numa!r} is not a NUMA node: give its number, as in numa=1; see numactl --hardware")
    if numa is not None and scheme == "dax":
        raise ConfigError(f"numa={numa} means nothing for a dax device, whose memory is where it is: leave numa out")
    if values:
        key, value = next(iter(values.items()))
        raise ConfigError(
            f"unknown pool option {key}={value!r}: use size, extent, min_slot, align, coherence, mode or numa"
        )
    align, extent, min_slot = sizes["align"], sizes["extent"], sizes["min_slot"]
    if align is not None and (align % SLOT_GRAIN or align & (align - 1)):
        raise ConfigError(f"align={format_size(align)} is not a power of two of at least 4K: use 4K, 2M or 1G")
    if min_slot is not None and min_slot % SLOT_GRAIN:
        raise ConfigError(f"min_slot={format_size(min_slot)} is not a multiple of 4K: use 4K, 16K or 64K")
    if extent is not None and extent % SLOT_GRAIN:
        raise ConfigError(f"extent={format_size(extent)} is not a multiple of 4K: use 2M or 64M")
    return PoolURI(
        scheme=scheme,
        path=path,
        size=sizes["size"],
        coherence=cast(Coherence | None, coherence),
        extent=extent,
        min_slot=min_slot,
        align=align,
        mode=_MODES[mode],
        numa=None if numa is None else int(numa),
    )
