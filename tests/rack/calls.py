"""In a guest: a client of Maru that does what the test asks, one JSON object a line: ``{"number": 1, "do": NAME, "with": {...}}``.

Answers are lines `answer NUMBER {...}`. What a page holds follows from its seed, so both ends can say what its hash must be.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import mmap
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from maru_core.mover import Fragments
from maru_core.namespace import Namespace
from maru_core.pool import PoolMemory, parse_pool_uri
from maru_core.pool.backing import DaxBacking
from maru_core.protocol import ROOT
from maru_core.rdma import Endpoint, TransferError
from maru_core.store import Store, StoreConfig

PAGE_BYTES = 20_000
NAMESPACE = Namespace(
    engine="test", hash_scheme="random", model="toy", weights="w0", adapter="", kv_dtype="bfloat16", page_tokens=16,
    layers="0:4", heads="kv4x16", layout="page_first", tensor_parallel=1, pipeline_parallel=1, context_parallel=1,
    data_parallel=1, draft="",
)  # fmt: skip

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

stores: dict[str, Store] = {}
movers: dict[str, Any] = {}
_answering = threading.Lock()


def chain(seed: int, count: int) -> bytes:
    """The hashes of a chain of pages."""
    return np.random.default_rng([seed, 0]).bytes(32 * count)


def contents(seed: int, count: int) -> np.ndarray:
    """Its pages, shape ``(count, PAGE_BYTES)``."""
    return np.frombuffer(np.random.default_rng([seed, 1]).bytes(count * PAGE_BYTES), np.uint8).reshape(
        count, PAGE_BYTES
    )


def digests(pages: np.ndarray) -> list[str]:
    return [hashlib.sha256(page.tobytes()).hexdigest()[:24] for page in pages]


def _fragments(pages: np.ndarray) -> Fragments:
    starts = pages.ctypes.data + np.arange(len(pages), dtype=np.uint64) * np.uint64(PAGE_BYTES)
    return Fragments(starts[:, None], np.array([PAGE_BYTES], np.uint64))


# ---------------------------------------------------------------- of a store


def open_store(name: str = "store", **config: Any) -> str:
    """How it reaches the pool."""
    config = {"timeout_ms": 60_000, **config}
    stores[name] = Store.open(StoreConfig(**config), NAMESPACE, name=name)
    reach = stores[name]._lives.current().reach
    movers[name] = reach.mover
    return "rdma" if reach.memory is None else "cxl"


def set_environ(**variables: str | None) -> None:
    """For what is read when a store is opened, such as UCX's."""
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def limit(seconds: float, name: str = "store") -> None:
    """Change the time limits of a store that moves pages through agents, also of the call that is under way."""
    stores[name]._session.timeout_s = seconds
    mover = movers[name]
    mover._loads._timeout_s = mover._stores._timeout_s = 2 * seconds


def put(seed: int, count: int, name: str = "store") -> int:
    """Pages stored."""
    pages = contents(seed, count).copy()
    return int(stores[name].put("kv", 0, 1, ROOT, chain(seed, count), _fragments(pages)).sum())


def get(seed: int, count: int, name: str = "store") -> list[str | None]:
    """The hash of each page that was loaded, None of a miss."""
    pages = np.zeros((count, PAGE_BYTES), np.uint8)
    loaded = stores[name].get("kv", 0, chain(seed, count), _fragments(pages))
    return [digest if good else None for digest, good in zip(digests(pages), loaded, strict=True)]


def prefix(seed: int, count: int, name: str = "store") -> int:
    return stores[name].prefix(["kv"], 0, chain(seed, count))


def stats(name: str = "store") -> dict[str, Any]:
    return {key: value for key, value in stores[name].stats().items() if isinstance(value, int | float | str)}


def close_store(name: str = "store") -> None:
    stores.pop(name).close()


# ---------------------------------------------------------------- of a device


def create(pool: str, **options: Any) -> str:
    """Open a pool as its server does, and let it go; its UUID."""
    with PoolMemory.create(pool, **options) as memory:
        return memory.geometry.pool_uuid.hex()


def attach(pool: str, uid: int = 0) -> dict[str, Any]:
    """Map a pool as a client does, perhaps as another user: what it is."""
    os.seteuid(uid)
    try:
        with PoolMemory.attach(pool) as memory:
            geometry = memory.geometry
            return {"uuid": geometry.pool_uuid.hex(), "bytes": geometry.pool_bytes, "off_data": geometry.off_data}
    finally:
        os.seteuid(0)


def mapped(path: str, offset: int, length: int) -> int:
    """Map a part of a device as Maru does; bytes."""
    backing = DaxBacking.open(parse_pool_uri(f"dax://{path}"), writable=True)
    try:
        return len(backing.map(offset, length, writable=True))
    finally:
        backing.close()


def read(path: str, offset: int, length: int) -> str:
    """Bytes of a device as Maru reads a superblock, in hexadecimal."""
    backing = DaxBacking.open(parse_pool_uri(f"dax://{path}"), writable=False)
    try:
        return backing.read(offset, length).hex()
    finally:
        backing.close()


def poke(path: str, offset: int, data: str) -> None:
    """Store bytes, given in hexadecimal, into the device's first 2 MiB."""
    raw = bytes.fromhex(data)
    descriptor = os.open(path, os.O_RDWR)
    address = _libc.mmap(None, 2 << 20, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    os.close(descriptor)
    ctypes.memmove(address + offset, raw, len(raw))
    _libc.munmap(address, 2 << 20)


def kernel_maps(path: str, length: int, offset: int = 0, *, private: bool = False) -> str:
    """What the bare kernel says to a mapping: its error, or empty. Not by Python's mmap, which looks at the size first."""
    descriptor = os.open(path, os.O_RDWR)
    flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    address = _libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, offset)
    os.close(descriptor)
    if address == ctypes.c_void_p(-1).value:
        return os.strerror(ctypes.get_errno())
    _libc.munmap(address, length)
    return ""


def touch_past_the_end(path: str, size: int, align: int) -> int:
    """The signal that ends a process that touches what lies past a device's end, in a mapping that the kernel granted."""
    pid = os.fork()
    if pid == 0:
        descriptor = os.open(path, os.O_RDWR)
        address = _libc.mmap(None, 2 * align, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, size - align)
        if address != ctypes.c_void_p(-1).value:
            ctypes.string_at(address, 1)
            ctypes.string_at(address + align, 1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def file_calls(path: str) -> dict[str, str]:
    """What a device says to the calls that files know: the error, or the result."""
    said = {}
    descriptor = os.open(path, os.O_RDWR)
    calls: dict[str, Callable[[], object]] = {
        "read": lambda: os.read(descriptor, 16),
        "write": lambda: os.write(descriptor, b"x"),
        "fsync": lambda: os.fsync(descriptor),
        "ftruncate": lambda: os.ftruncate(descriptor, 4096),
        "st_size": lambda: os.fstat(descriptor).st_size,
    }
    for name, call in calls.items():
        try:
            said[name] = str(call())
        except OSError as error:
            said[name] = error.strerror or ""
    os.close(descriptor)
    return said


def register(path: str, *, writable: bool) -> str:
    """Register the beginning of a device with the NIC; empty, or why it cannot be."""
    descriptor = os.open(path, os.O_RDWR)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = _libc.mmap(None, 2 << 20, protection, mmap.MAP_SHARED, descriptor, 0)
    os.close(descriptor)
    endpoint = Endpoint("test", devices="rxe0:1")
    try:
        endpoint.register(address, 2 << 20)
        return ""
    except TransferError as error:
        return str(error)
    finally:
        endpoint.close()


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("ready", flush=True)
    for line in sys.stdin:
        # Each in a thread: what is asked while another call goes on is answered.
        threading.Thread(target=answer, args=(json.loads(line),)).start()


def answer(asked: dict[str, Any]) -> None:
    try:
        said = {"value": globals()[asked["do"]](**asked["with"])}
    except Exception as error:
        traceback.print_exc()
        said = {"error": f"{type(error).__name__}: {error}"}
    with _answering:
        _libc.fflush(None)  # what UCX has printed
        sys.stderr.flush()
        print(f"\nanswer {asked['number']} {json.dumps(said)}", flush=True)


if __name__ == "__main__":
    main()
