"""Starts each peer's processes and servers, and says why a peer is left out where it cannot run."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from maru_bench.echo import EchoServer
from maru_bench.machine import lacking
from maru_bench.metadata import Client, message_sizes
from maru_bench.peers.adapters import PeerConfig
from maru_bench.peers.orders import Do, Done, Line, Order
from maru_bench.processes import ManagedProcess, ServerFailedError, python_path
from maru_bench.servers import MaruServer
from maru_bench.stores import MooncakeMaster
from maru_core.errors import MaruError
from maru_core.protocol import HASH_BYTES
from maru_core.session import Session

PEERS: Final = ("maru", "mooncake", "file", "nixl", "memcpy", "echo")
#: What must be importable in a peer's interpreter, and how to get it.
_NEEDS: Final = {
    "mooncake": ("mooncake.store", "make peers-env, or pip install mooncake-transfer-engine-non-cuda; apt-get install libibverbs1"),
    "nixl": ("nixl._api", "make peers-env, or pip install --no-deps nixl==1.5.1 nixl-cu13==1.5.1"),
    "file": ("sglang.srt.mem_cache.hicache_storage", "make sglang-env, or name an interpreter with SGLang in --sglang-python"),
}  # fmt: skip
#: Longest that one order may take, and that a process may take to start, seconds.
_ORDER_S: Final = 300.0
_START_S: Final = 300.0
#: Of Maru's pool, unless a page is larger.
_EXTENT_BYTES: Final = 16 << 20


class PeerFailedError(MaruError):
    """A peer did not do what it was told."""


class PeersPlace(msgspec.Struct, frozen=True, kw_only=True):
    """What peers are started with."""

    scratch: Path
    """Short, for sockets; also for logs."""
    shared: Path
    """In shared memory, for files."""
    buffer_bytes: int
    """Of the engine's buffer in the first two processes, and of the memory that memcpy uses."""
    client_bytes: int
    """Of that in all others."""
    page_bytes: int
    pool_bytes: int
    workers: int = 2
    """Processes of each peer; the first one stores."""
    sglang_python: str | None = None
    peers_python: str | None = None
    threads: int | None = None
    chains: tuple[int, ...] = ()
    """Lengths of chains that are asked for, for the echo."""


class Worker:
    """One process of a peer."""

    def __init__(self, name: str, python: str, config: PeerConfig, log: Path) -> None:
        here, there = socket.socketpair()
        with there:
            self._process = ManagedProcess(
                name,
                [python, "-m", "maru_bench.peers.worker", str(there.fileno()), msgspec.json.encode(config).decode()],
                log,
                env={"PYTHONPATH": python_path(), **libraries(python)},
                pass_fds=(there.fileno(),),
            )
        self._line = Line(here)
        self._name = name

    def await_ready(self) -> None:
        """Raises:
        PeerFailedError: it did not start.
        """
        self._receive(_START_S)

    def ask(self, order: Order) -> list[float]:
        """Seconds of each call.

        Raises:
            PeerFailedError: it failed, or did not answer.
        """
        self.begin(order)
        return self.end()

    def begin(self, order: Order) -> None:
        try:
            self._line.send(order)
        except OSError:
            raise self._gone() from None

    def end(self) -> list[float]:
        return self._receive(_ORDER_S).seconds

    def _receive(self, timeout_s: float) -> Done:
        try:
            done = self._line.receive_done(timeout_s)
        except TimeoutError:
            raise PeerFailedError(f"{self._name} does not answer for {timeout_s:g} s") from None
        except OSError:
            done = None
        if done is None:
            raise self._gone()
        if done.error is not None:
            raise PeerFailedError(f"{self._name}: {done.error}")
        return done

    def _gone(self) -> PeerFailedError:
        self._process.await_end(2.0)
        return PeerFailedError(str(self._process.failure("is gone")))

    def stop(self) -> None:
        self._line.close()
        # It ends by itself when the other end is gone.
        self._process.await_end(5.0)
        self._process.stop()


def libraries(python: str) -> dict[str, str]:
    """Where an environment that ``tools/peers_env.sh`` made has system libraries of its own."""
    root = Path(python).absolute().parent.parent / "system"
    found = [str(root / part / "x86_64-linux-gnu") for part in ("usr/lib", "lib")]
    if not root.is_dir():
        return {}
    return {"LD_LIBRARY_PATH": os.pathsep.join([*found, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])}


class Peer:
    """A peer with its servers and processes, started. ``workers[0]`` stores, the others ask and load."""

    def __init__(self, name: str, python: str, workers: list[Worker], pid: int | None) -> None:
        self.name = name
        self.python = python
        self.workers = workers
        self.server_pid = pid

    def remove(self, chain: int, pages: int, page_bytes: int) -> None:
        self.workers[0].ask(Do(operation="remove", chain=chain, first=0, pages=pages, page_bytes=page_bytes))


def python_of(name: str, place: PeersPlace) -> str:
    if name == "file":
        return place.sglang_python or sys.executable
    if name in ("mooncake", "nixl"):
        return place.peers_python or sys.executable
    return sys.executable


def choose_peers(names: Sequence[str], place: PeersPlace) -> tuple[list[str], dict[str, str]]:
    """The peers that can run, and why each other one cannot."""
    chosen, skipped = [], {}
    for name in names:
        if name in _NEEDS:
            module, cure = _NEEDS[name]
            python = python_of(name, place)
            missing = lacking(python, [module], libraries(python))
            if missing:
                skipped[name] = f"{python} cannot import {module} ({missing[module]}): {cure}"
                continue
        chosen.append(name)
    return chosen, skipped


def start_peer(stack: contextlib.ExitStack, name: str, place: PeersPlace) -> Peer:
    """Start a peer; the stack stops it.

    Raises:
        ServerFailedError: its server did not come up.
        PeerFailedError: one of its processes did not.
    """
    python = python_of(name, place)
    directory = place.shared / name
    directory.mkdir()
    pid: int | None = None
    endpoint, segment = "", 0
    if name == "maru":
        extent = max(_EXTENT_BYTES, 1 << (place.page_bytes - 1).bit_length())
        server = MaruServer(
            place.scratch,
            size=f"{place.pool_bytes >> 20}M",
            extent=f"{extent >> 20}M",
            log=place.scratch / "maru-server.log",
        )
        stack.enter_context(server)
        endpoint, pid = server.endpoint, server.process.pid
    elif name == "mooncake":
        master = MooncakeMaster(python, place.scratch / "mooncake_master.log", libraries(python))
        stack.callback(master.stop)
        master.await_ready()
        endpoint, pid, segment = master.address, master.pid, place.pool_bytes
    elif name == "echo":
        (place.scratch / "echo").mkdir()
        echo = stack.enter_context(EchoServer(place.scratch / "echo"))
        endpoint, pid = echo.endpoint, echo.pid
    elif name == "memcpy":
        with (directory / "memory").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, place.buffer_bytes)
    sizes = _echo_bytes(place) if name == "echo" else {}
    workers = []
    # Nobody else than the first two is ever told to copy by memcpy.
    for index in range(2 if name == "memcpy" else place.workers):
        config = PeerConfig(
            peer=name,
            buffer_bytes=place.buffer_bytes if index < 2 else place.client_bytes,
            page_bytes=place.page_bytes,
            endpoint=endpoint,
            directory=str(directory),
            # Where it is stored by one and loaded by another process, it lies with the one that stored it.
            segment_bytes=segment if index == 0 else 0,
            threads=place.threads,
            echo_bytes=sizes,
        )
        worker = Worker(f"{name} {index}", python, config, place.scratch / f"{name}-{index}.log")
        stack.callback(worker.stop)
        workers.append(worker)
    for worker in workers:
        worker.await_ready()
    return Peer(name, python, workers, pid)


def _echo_bytes(place: PeersPlace) -> dict[str, list[int]]:
    """Bytes out and back of Maru's lookup, by length of the chain, from a real server."""
    (place.scratch / "sizes").mkdir(exist_ok=True)
    found = {}
    with (
        MaruServer(place.scratch / "sizes", size="64M") as server,
        contextlib.closing(Session(server.endpoint, name="maru-bench peers", timeout_s=10.0)) as session,
    ):
        client = Client(session)
        one, two = (_lookup_bytes(client, pages) for pages in (16, 32))
        for pages in place.chains:
            # Lookups of long chains are several messages; their bytes grow evenly.
            found[str(pages)] = [low + (high - low) * (pages - 16) // 16 for low, high in zip(one, two, strict=True)]
    return found


def _lookup_bytes(client: Client, pages: int) -> tuple[int, int]:
    chain = os.urandom(HASH_BYTES * pages)
    client.fill(1)
    client.store(chain)
    sizes = message_sizes(client, chain)["match"]
    client.remove([chain])
    return sizes


__all__ = ["PEERS", "Peer", "PeerFailedError", "PeersPlace", "ServerFailedError", "choose_peers", "start_peer"]
