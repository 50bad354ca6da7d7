"""The rounds of ``maru-bench peers``: every peer does the same thing in turn, again and again.

Store, lookup and load belong together: in each round one process stores new pages, another one asks for them and loads them, and they
are removed, as when one engine computes a prompt that another one is asked for next. What is asked for twice, or lies in a file
that is written over, never counts.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from maru_bench.copy import describe_machine
from maru_bench.machine import commit, find_python, versions_of
from maru_bench.peers.orders import Do, Loop
from maru_bench.peers.report import PeerRow, PeersResult, make_row
from maru_bench.peers.start import PEERS, Peer, PeerFailedError, PeersPlace, choose_peers, start_peer
from maru_bench.processes import ServerFailedError, scratch_directory
from maru_core.errors import ConfigError

#: Pages of one call where a long chain is stored: as SGLang does.
_BATCH = 128
#: What one kind of sample moves at most, all repeats together, for each peer.
_SAMPLE_BYTES = 4 << 30
#: Chains that several clients ask for in turn.
_CHAINS = 8
_CLIENT_PAGES = 128
_CLIENT_LOAD_PAGES = 16
_MEMORY_LIMIT = 12 << 30


class PeersOptions(msgspec.Struct, frozen=True, kw_only=True):
    page_bytes: list[int]
    batches: list[int]
    """Pages of one store and one load."""
    chains: list[int]
    """Pages of one lookup, of the smallest page size."""
    clients: list[int]
    """Processes that ask and load at once; none: not measured."""
    repeats: int = 30
    seconds: float = 2.0
    """Of one phase of several clients."""
    peers: tuple[str, ...] = PEERS
    sglang_python: str | None = None
    peers_python: str | None = None
    threads: int | None = None

    @property
    def largest_bytes(self) -> int:
        """Of one batch."""
        return max(size * batch for size in self.page_bytes for batch in self.batches)

    @property
    def buffer_bytes(self) -> int:
        """Of the two processes that move batches."""
        return max(self.largest_bytes, self.client_bytes)

    @property
    def client_bytes(self) -> int:
        """Of a process that only asks and loads with others."""
        return min(self.page_bytes) * _BATCH

    def needed_bytes(self, peers: int) -> int:
        """Memory of all."""
        more = max([1, *self.clients]) - 1
        return peers * (self.resident_bytes + 2 * self.buffer_bytes + more * self.client_bytes)

    @property
    def resident_bytes(self) -> int:
        """Of all that a peer holds at once: the longest chains, what clients ask for, and one batch."""
        smallest = min(self.page_bytes)
        return self.largest_bytes + smallest * (sum(self.chains) + (_CHAINS * _CLIENT_PAGES if self.clients else 0))


class _Bench:
    def __init__(self, options: PeersOptions, narrate: Callable[[str], None]) -> None:
        self._options, self._narrate = options, narrate
        self._seeds = itertools.count(1)
        self.peers: list[Peer] = []
        self.failed: dict[str, str] = {}
        self.rows: list[PeerRow] = []

    def each(self, turn: int, without: Sequence[str]) -> list[Peer]:
        """Peers that take part, another one first each time."""
        taking = [peer for peer in self.peers if peer.name not in without and peer.name not in self.failed]
        return [taking[(index + turn) % len(taking)] for index in range(len(taking))]

    @contextlib.contextmanager
    def failing(self, peer: Peer) -> Iterator[None]:
        """A peer that fails is out from then on, and what it said is told."""
        try:
            yield
        except PeerFailedError as error:
            self.failed[peer.name] = str(error)
            if peer.name == "maru":
                raise

    def _samples(self) -> dict[str, list[float]]:
        return {peer.name: [] for peer in self.peers}

    def store(self, peer: Peer, chain: int, pages: int, page_bytes: int) -> None:
        """A chain that stays, in batches."""
        for first in range(0, pages, _BATCH):
            peer.workers[0].ask(
                Do(operation="store", chain=chain, first=first, pages=min(_BATCH, pages - first), page_bytes=page_bytes)
            )

    def batches(self, page_bytes: int, batch: int) -> None:
        """Store by one process and load by another one, of ``batch`` new pages each time."""
        repeats = min(self._options.repeats, max(5, _SAMPLE_BYTES // (page_bytes * batch)))
        stores, loads = self._samples(), self._samples()
        resident = next(self._seeds)
        # The first rounds are not counted: they bring every peer's memory in.
        for turn in range(-2, repeats):
            if turn == -1:
                # A store that is in use has pages of the size already; one that is empty would make room for the first each time.
                for peer in self.each(0, without=("memcpy", "echo")):
                    with self.failing(peer):
                        self.store(peer, resident, 1, page_bytes)
            for peer in self.each(turn, without=("echo",)):
                chain = next(self._seeds)

                def call(operation: str, chain: int = chain) -> Do:
                    return Do(operation=operation, chain=chain, first=0, pages=batch, page_bytes=page_bytes)

                with self.failing(peer):
                    stored = peer.workers[0].ask(call("store"))
                    if peer.name != "memcpy":
                        peer.workers[1].ask(call("exists"))
                    loaded = peer.workers[1].ask(call("load"))
                    peer.workers[0].ask(call("remove"))
                    if turn >= 0:
                        stores[peer.name] += stored
                        loads[peer.name] += loaded
        for peer in self.each(0, without=("memcpy", "echo")):
            with self.failing(peer):
                peer.remove(resident, 1, page_bytes)
        self._add("store", stores, page_bytes, batch, 1)
        self._add("load", loads, page_bytes, batch, 1)

    def lookups(self, page_bytes: int, pages: int) -> None:
        """One lookup of a chain that is there, by the process that did not store it."""
        times, chain = self._samples(), next(self._seeds)
        for peer in self.each(0, without=("memcpy", "echo")):
            with self.failing(peer):
                self.store(peer, chain, pages, page_bytes)
        for turn in range(-2, 4 * self._options.repeats):
            for peer in self.each(turn, without=("memcpy",)):
                with self.failing(peer):
                    taken = peer.workers[1].ask(
                        Do(operation="exists", chain=chain, first=0, pages=pages, page_bytes=page_bytes)
                    )
                    if turn >= 0:
                        times[peer.name] += taken
        for peer in self.each(0, without=("memcpy", "echo")):
            with self.failing(peer):
                peer.remove(chain, pages, page_bytes)
        self._add("exists", times, page_bytes, pages, 1)

    def several(self, page_bytes: int, clients: int) -> None:
        """So many processes ask, and then load, as fast as they can, each peer in turn."""
        chains = [next(self._seeds) for _ in range(_CHAINS)]
        for peer in self.each(0, without=("memcpy", "echo")):
            with self.failing(peer):
                for chain in chains:
                    self.store(peer, chain, _CLIENT_PAGES, page_bytes)
        for operation, pages in (("exists", _CLIENT_PAGES), ("load", _CLIENT_LOAD_PAGES)):
            times = self._samples()
            for turn in range(3):
                for peer in self.each(turn, without=("memcpy",) if operation == "exists" else ("memcpy", "echo")):
                    order = Loop(
                        operation=operation,
                        chains=chains,
                        pages=pages,
                        page_bytes=page_bytes,
                        seconds=self._options.seconds / 3,
                    )
                    with self.failing(peer):
                        crew = peer.workers[1 : 1 + clients]
                        for worker in crew:
                            worker.begin(order)
                        for worker in crew:
                            times[peer.name] += worker.end()
            self._add(operation, times, page_bytes, pages, clients, seconds=self._options.seconds)
        for peer in self.each(0, without=("memcpy", "echo")):
            with self.failing(peer):
                for chain in chains:
                    peer.remove(chain, _CLIENT_PAGES, page_bytes)

    def _add(
        self,
        operation: str,
        times: dict[str, list[float]],
        page_bytes: int,
        pages: int,
        clients: int,
        seconds: float | None = None,
    ) -> None:
        for name, samples in times.items():
            if samples and name not in self.failed:
                self.rows.append(make_row(operation, name, page_bytes, pages, clients, samples, times["maru"], seconds))


def run(options: PeersOptions, narrate: Callable[[str], None]) -> PeersResult:
    """Measure.

    Raises:
        ConfigError: sizes that do not fit in the memory this may use.
        MaruError: Maru's own process failed. Another peer that fails is left out from then on, with what it said.
    """
    unknown = [name for name in options.peers if name not in PEERS]
    if unknown:
        raise ConfigError(f"--peers has {unknown[0]!r}: give some of {', '.join(PEERS)}, comma-separated")
    names = ["maru", *(name for name in dict.fromkeys(options.peers) if name != "maru")]
    workers = 1 + max([1, *options.clients])
    needed = options.needed_bytes(len(names))
    if needed > _MEMORY_LIMIT:
        raise ConfigError(
            f"{len(names)} peers with {workers} processes each would need {needed >> 20} MiB, the limit is "
            f"{_MEMORY_LIMIT >> 20} MiB: give smaller --sizes, --batches or --chains, or fewer --clients"
        )
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(scratch_directory())
        shared = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="maru-bench-", dir="/dev/shm")))
        place = PeersPlace(
            scratch=scratch,
            shared=shared,
            buffer_bytes=options.buffer_bytes,
            client_bytes=options.client_bytes,
            page_bytes=max(options.page_bytes),
            # Room as in a pool in use: for extents that are cut to other sizes, below the watermark at which eviction begins, and for slots
            # that are granted ahead.
            pool_bytes=math.ceil(options.resident_bytes * 1.3) + (512 << 20),
            workers=workers,
            sglang_python=options.sglang_python or _found("sglang"),
            peers_python=options.peers_python or _found("peers"),
            threads=options.threads,
            chains=tuple(sorted({*options.chains, *options.batches, _CLIENT_PAGES})),
        )
        narrate("looking which peers are there")
        chosen, skipped = choose_peers(names, place)
        bench = _Bench(options, narrate)
        for name in chosen:
            narrate(f"starting {name}")
            try:
                bench.peers.append(start_peer(stack, name, place))
            except (PeerFailedError, ServerFailedError) as error:
                if name == "maru":
                    raise
                skipped[name] = str(error)
        smallest = min(options.page_bytes)
        for pages in options.chains:
            narrate(f"lookups of {pages} pages")
            bench.lookups(smallest, pages)
        for size in options.page_bytes:
            for batch in options.batches:
                narrate(f"batches of {batch} pages of {size >> 10} KiB")
                bench.batches(size, batch)
        for clients in options.clients:
            narrate(f"{clients} clients")
            bench.several(smallest, clients)
        versions = {peer.python: versions_of(peer.python) for peer in bench.peers}
    return PeersResult(
        machine=describe_machine(),
        versions=versions,
        commit=commit(),
        repeats=options.repeats,
        skipped=skipped | bench.failed,
        rows=bench.rows,
    )


def _found(engine: str) -> str | None:
    try:
        return find_python(None, engine)
    except ConfigError:
        return None
