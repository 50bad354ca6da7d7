"""How each peer stores, finds, loads and removes pages: the calls that SGLang makes of it, and no more.

Every adapter gets keys as SGLang has them (64 hex digits) and pages whose K and V lie apart. Importing this module needs
numpy alone; what a peer needs is imported when it is opened.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from maru_bench.pages import FRAGMENTS, U8Array, addresses


class PeerError(Exception):
    """A peer did not do what it was told."""


class PeerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer's process is told at its start."""

    peer: str
    buffer_bytes: int
    """Of the engine's buffer."""
    page_bytes: int
    """Of the largest page."""
    endpoint: str = ""
    """Of a server: Maru's, Mooncake's master, the echo."""
    directory: str = ""
    """For files."""
    segment_bytes: int = 0
    """Mooncake: memory that this process gives to the store."""
    threads: int | None = None
    """Maru's copy threads."""
    echo_bytes: dict[str, list[int]] = {}
    """Echo: bytes out and back for a number of pages."""


class Adapter(Protocol):
    """Every method raises PeerError where the peer did not do all of it."""

    def store(self, keys: Sequence[str], before: str | None, pages: U8Array) -> None:
        """Store pages, of shape ``(fragment, page, byte)``; ``before`` is the key before the first, None at a chain's start."""
        ...

    def load(self, keys: Sequence[str], pages: U8Array) -> None: ...
    def exists(self, keys: Sequence[str], page_bytes: int) -> None:
        """Ask whether all are there; they are."""
        ...

    def remove(self, keys: Sequence[str]) -> None: ...
    def close(self) -> None: ...


def _require(ok: bool, what: str) -> None:
    if not ok:
        raise PeerError(what)


class MaruAdapter:
    """``Store.put``, ``prefix`` and ``get``, as Maru's HiCache backend calls them."""

    def __init__(self, config: PeerConfig, buffer: U8Array) -> None:
        from maru_bench.copy import BENCH_NAMESPACE
        from maru_core.mover import Fragments
        from maru_core.store import Store, StoreConfig

        self._fragments_of = Fragments
        self._sizes: dict[int, Any] = {}
        self._store = Store.open(
            # Far above any normal call: a benchmark on a busy machine should be slow and not wrong.
            StoreConfig(server=config.endpoint, copy_threads=config.threads, timeout_ms=10_000),
            BENCH_NAMESPACE,
            name="maru-bench peers",
            object_bytes=config.page_bytes,
        )

    @staticmethod
    def _packed(keys: Sequence[str]) -> bytes:
        return bytes.fromhex("".join(keys))

    def _fragments(self, pages: U8Array) -> Any:
        half = pages.shape[2]
        sizes = self._sizes.get(half)
        if sizes is None:  # an engine's pages have one
            sizes = self._sizes[half] = np.full(FRAGMENTS, half, np.uint64)
        return self._fragments_of(addresses=addresses(pages), sizes=sizes)

    def store(self, keys: Sequence[str], before: str | None, pages: U8Array) -> None:
        parent = bytes.fromhex(before) if before else bytes(32)
        stored = self._store.put("kv", 0, 1, parent, self._packed(keys), self._fragments(pages))
        if not stored.all():
            raise PeerError(f"Maru stored {int(stored.sum())} of {len(keys)} pages: {self._store.stats()}")

    def load(self, keys: Sequence[str], pages: U8Array) -> None:
        loaded = self._store.get("kv", 0, self._packed(keys), self._fragments(pages))
        if not loaded.all():
            raise PeerError(f"Maru loaded {int(loaded.sum())} of {len(keys)} pages: {self._store.stats()}")

    def exists(self, keys: Sequence[str], page_bytes: int) -> None:
        found = self._store.prefix(["kv"], 0, self._packed(keys))
        _require(found == len(keys), f"Maru found {found} of {len(keys)} pages")

    def remove(self, keys: Sequence[str]) -> None:
        self._store.delete(bytes.fromhex(keys[0]))  # with all that continues it

    def close(self) -> None:
        self._store.close()


class MooncakeAdapter:
    """Zero-copy batches on a registered buffer, as SGLang's ``mooncake`` backend calls them."""

    def __init__(self, config: PeerConfig, buffer: U8Array) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store: Any = MooncakeDistributedStore()
        failed = self._store.setup(
            "127.0.0.1", "P2PHANDSHAKE", config.segment_bytes, 64 << 20, "tcp", "", config.endpoint
        )
        _require(failed == 0, f"Mooncake did not start: {failed}")
        base = buffer.__array_interface__["data"][0]
        failed = self._store.register_buffer(base, buffer.nbytes)
        _require(failed == 0, f"Mooncake did not take the buffer: {failed}")

    @staticmethod
    def _places(pages: U8Array) -> tuple[list[list[int]], list[list[int]]]:
        return addresses(pages).tolist(), [[pages.shape[2]] * FRAGMENTS] * pages.shape[1]

    def store(self, keys: Sequence[str], before: str | None, pages: U8Array) -> None:
        results = self._store.batch_put_from_multi_buffers(list(keys), *self._places(pages))
        _require(not any(results), f"Mooncake did not store: {sorted(set(results))}")

    def load(self, keys: Sequence[str], pages: U8Array) -> None:
        results = self._store.batch_get_into_multi_buffers(list(keys), *self._places(pages))
        size = FRAGMENTS * pages.shape[2]
        _require(all(result == size for result in results), f"Mooncake did not load: {sorted(set(results))}")

    def exists(self, keys: Sequence[str], page_bytes: int) -> None:
        results = self._store.batch_is_exist(list(keys))
        _require(all(result == 1 for result in results), f"Mooncake did not find: {sorted(set(results))}")

    def remove(self, keys: Sequence[str]) -> None:
        # What was just read is leased; --force.
        self._store.batch_remove(list(keys), True)

    def close(self) -> None:
        self._store.close()


class FileAdapter:
    """SGLang's own ``HiCacheFile``: a page is joined, then written to a file; read, then taken apart."""

    def __init__(self, config: PeerConfig, buffer: U8Array) -> None:
        import torch
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

        os.environ.pop("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", None)
        self._torch = torch
        self._directory = Path(config.directory)
        self._store: Any = HiCacheFile(
            HiCacheStorageConfig(
                tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
                enable_storage_metrics=False, is_page_first_layout=False, model_name="bench",
            ),
            file_path=config.directory,
        )  # fmt: skip

    def store(self, keys: Sequence[str], before: str | None, pages: U8Array) -> None:
        joined = [self._torch.from_numpy(np.ascontiguousarray(pages[:, page])) for page in range(len(keys))]
        _require(bool(self._store.batch_set(list(keys), joined)), "the file backend did not store")

    def load(self, keys: Sequence[str], pages: U8Array) -> None:
        targets = [self._torch.empty(pages[:, 0].size, dtype=self._torch.uint8) for _ in keys]
        loaded = self._store.batch_get(list(keys), targets)
        for page, tensor in enumerate(loaded):
            _require(tensor is not None, f"the file backend has no {keys[page]}")
            pages[:, page] = tensor.numpy().reshape(FRAGMENTS, -1)

    def exists(self, keys: Sequence[str], page_bytes: int) -> None:
        found = self._store.batch_exists(list(keys))
        _require(found == len(keys), f"the file backend found {found} of {len(keys)} pages")

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            Path(self._directory, f"{self._store._get_suffixed_key(key)}.bin").unlink(missing_ok=True)

    def close(self) -> None:
        return


class NixlAdapter:
    """NIXL's POSIX plugin on one file for each page, registered and let go with each transfer as SGLang's ``nixl`` backend does."""

    #: Device ids of files name them within the agent: never the same one twice.
    _FIRST: Final = 1

    def __init__(self, config: PeerConfig, buffer: U8Array) -> None:
        import logging

        logging.disable(logging.INFO)
        from nixl._api import nixl_agent, nixl_agent_config

        self._agent: Any = nixl_agent(f"maru-bench-{os.getpid()}", nixl_agent_config(backends=[]))
        self._agent.create_backend("POSIX", {})
        self._agent.register_memory([(buffer.__array_interface__["data"][0], buffer.nbytes, 0, "")], "DRAM")
        self._directory = config.directory
        self._next = self._FIRST

    def _path(self, key: str) -> str:
        return f"{self._directory}/{key}"

    def _move(self, way: str, mode: str, keys: Sequence[str], pages: U8Array) -> None:
        agent, half, first = self._agent, pages.shape[2], self._next
        self._next += len(keys)
        files = agent.register_memory(
            [(0, FRAGMENTS * half, first + index, f"{mode}:{self._path(key)}") for index, key in enumerate(keys)],
            "FILE",
        )
        places = addresses(pages).tolist()
        near = [(address, half, 0) for page in places for address in page]
        far = [(part * half, half, first + index) for index in range(len(keys)) for part in range(FRAGMENTS)]
        handle = agent.initialize_xfer(
            way, agent.get_xfer_descs(near, "DRAM"), agent.get_xfer_descs(far, "FILE"), agent.name
        )
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        agent.deregister_memory(files)
        _require(state == "DONE", f"NIXL did not {way}: {state}")

    def store(self, keys: Sequence[str], before: str | None, pages: U8Array) -> None:
        self._move("WRITE", "rw,create", keys, pages)

    def load(self, keys: Sequence[str], pages: U8Array) -> None:
        self._move("READ", "ro", keys, pages)

    def exists(self, keys: Sequence[str], page_bytes: int) -> None:
        found = self._agent.query_memory([(0, 0, 0, self._path(key)) for key in keys], "POSIX", mem_type="FILE")
        _require(all(one is not None for one in found), "NIXL did not find every page")

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            Path(self._path(key)).unlink(missing_ok=True)

    def close(self) -> None:
        return


class MemcpyAdapter:
    """The limit of moving: one memcpy for each fragment, one thread, into memory that both processes have mapped."""

    def __init__(self, config: PeerConfig, buffer: U8Array) -> None:
        import mmap

        path = Path(config.directory) / "memory"
        with path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), path.stat().st_size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._memory = np.frombuffer(mapped, np.uint8)

    def _slots(self, pages: U8Array) -> U8Array:
        shape = (pages.shape[1], FRAGMENTS, pages.shape[2])
        return self._memory[: pages.size].reshape(shape)

    def store(self, keys: Sequence[str], before: str | None, pages: U8Array) -> None:
        # Page after page: fragments that are neighbours in the engine are not here, so numpy copies each by itself.
        np.copyto(self._slots(pages), pages.transpose(1, 0, 2))

    def load(self, keys: Sequence[str], pages: U8Array) -> None:
        np.copyto(pages.transpose(1, 0, 2), self._slots(pages))

    def exists(self, keys: Sequence[str], page_bytes: int) -> None:
        raise PeerError("memory knows no keys")

    def remove(self, keys: Sequence[str]) -> None:
        return

    def close(self) -> None:
        return


class EchoAdapter:
    """The limit of asking: a ZeroMQ echo of as many bytes, out and back, as Maru's lookup of so many pages."""

    def __init__(self, config: PeerConfig, buffer: U8Array) -> None:
        from maru_bench.echo import EchoClient

        self._client = EchoClient(config.endpoint)
        self._requests = {int(pages): EchoClient.request(out, back) for pages, (out, back) in config.echo_bytes.items()}

    def store(self, keys: Sequence[str], before: str | None, pages: U8Array) -> None:
        raise PeerError("an echo stores nothing")

    def load(self, keys: Sequence[str], pages: U8Array) -> None:
        raise PeerError("an echo has nothing")

    def exists(self, keys: Sequence[str], page_bytes: int) -> None:
        self._client.exchange(self._requests[len(keys)])

    def remove(self, keys: Sequence[str]) -> None:
        return

    def close(self) -> None:
        self._client.close()


ADAPTERS: Final[dict[str, Any]] = {
    "maru": MaruAdapter,
    "mooncake": MooncakeAdapter,
    "file": FileAdapter,
    "nixl": NixlAdapter,
    "memcpy": MemcpyAdapter,
    "echo": EchoAdapter,
}
