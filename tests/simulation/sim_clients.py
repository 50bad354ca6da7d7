"""What clients do: engines that store, look up and load the pages of conversations which share prefixes.

Each client is a process with a real :class:`maru_core.store.Store` and one or two threads that call it. It knows what it may
believe, and asks the checker whether it was told the truth.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from sim_checker import Checker, Key, content
from sim_kernel import Kernel, Process, Violation

from maru_core.errors import MaruError
from maru_core.mover import Fragments
from maru_core.namespace import Namespace
from maru_core.protocol import HASH_BYTES, ROOT, Hold, Want
from maru_core.store import Store, StoreConfig

T = TypeVar("T")

ENDPOINT = "tcp://sim:1"
TIMEOUT_S = 0.5
#: Longest that a call may take on its caller's clock while its process runs: it connects, opens the namespace, and asks a few
#: times, each within the time limit, and a put waits a quarter of a second for room.
CALL_S = {"put": 3.5, "get": 2.5}
CALL_OTHER_S = 2.0
#: Other bytes than any that are stored: where nothing was copied this stays.
_GARBAGE = 0xEE


@dataclass(frozen=True)
class Component:
    name: str
    world: int
    nbytes: int


#: Slots of two sizes; one component whose page needs both ranks, one that any rank stores.
COMPONENTS = (Component("kv", 2, 2904), Component("mla", 1, 5004))


def namespace(tag: str) -> Namespace:
    return Namespace(
        engine="sim", hash_scheme="sha256", model="m", weights="w", adapter="", kv_dtype="bfloat16", page_tokens=16,
        layers="0:2", heads="kv2x16", layout="page_first", tensor_parallel=2, pipeline_parallel=1, context_parallel=1,
        data_parallel=1, draft="", tag=tag,
    )  # fmt: skip


NAMESPACES = (namespace("a"), namespace("b"), namespace("c"))
#: How often a client has each of them, chosen for a run.
NAMESPACE_WEIGHTS = ((1, 0, 0), (8, 1, 1), (2, 1, 1))


@dataclass(eq=False)
class Request:
    """One request of an engine with two ranks: both ask the same under one id, and must be told the same."""

    number: int
    namespace: Namespace
    pages: bytes
    said: list[tuple[SimClient, int, int]] = field(default_factory=list)  # (rank, its session, pages) as each was told

    @property
    def id(self) -> bytes:
        return b"request %d" % self.number


def chain(path: tuple[int, ...]) -> bytes:
    """Packed hashes of a conversation: equal beginnings give equal pages, in every namespace."""
    above, pages = ROOT, []
    for token in path:
        above = hashlib.sha256(above + bytes([token])).digest()
        pages.append(above)
    return b"".join(pages)


class SimClient:
    """One engine process. ``rank`` is the shard that it stores; every client may read any."""

    def __init__(
        self,
        kernel: Kernel,
        checker: Checker,
        requests: list[Request],
        hot: list[bytes],
        number: int,
        rank: int,
        record: Namespace,
    ) -> None:
        self.kernel, self.checker = kernel, checker
        self.hot = hot  # what all clients are about
        self.requests = requests  # of all clients, whose second rank is still to come
        self.process = Process(kernel, f"client#{number}", rate=kernel.random.uniform(0.9, 1.1))
        self.rank = rank
        self.namespace = record
        self.record = record.record()
        self.store: Store | None = None
        self.leaving = False
        self.slow = False
        self.left = False
        self.busy: dict[str, float] = {}  # calls under way, with their begin on the process's clock less stops
        self.calls = 0
        self.good = {"put": 0, "get": 0}
        self.longest: dict[str, float] = {}
        self.threads = kernel.random.choice((1, 1, 2, 3))
        self._running = 0
        self.process.start("main", self._main)

    # ------------------------------------------------------------ threads

    def _main(self) -> None:
        verify = "checksum" if self.kernel.random.random() < 0.2 else "generation"
        config = StoreConfig(server=ENDPOINT, timeout_ms=int(TIMEOUT_S * 1000), verify=verify)
        self.store = self._timed("open", lambda: Store.open(config, self.namespace, name=self.process.name))
        self._running = self.threads
        for number in range(self.threads):
            self.process.start(f"caller-{number}", self._caller)

    def _caller(self) -> None:
        random = self.kernel.random
        while not self.leaving:
            self._step()
            self.calls += 1
            if self.slow:
                self.kernel.park(random.uniform(0.5, 2))
            elif random.random() < 0.7:
                self.kernel.park(random.expovariate(1.0) * random.choice((0.001, 0.005, 0.05)))
        self._running -= 1
        if not self._running and not self.left:
            self.leave()

    def leave(self, patience_s: float = 2.0) -> None:
        """Close the store; other threads may be in the middle of a call."""
        self.leaving = True
        store = self.store
        if store is None:
            return  # not open yet: the callers will find that they are to leave
        self._timed("close", lambda: store.close(patience_s))
        self.left = True
        self.kernel.log(self.process, "left")

    def _step(self) -> None:
        random = self.kernel.random
        pages = self._pages()
        component = random.choices(COMPONENTS, (3, 1))[0]
        what = random.random()
        if what < 0.46:
            first = 0 if random.random() < 0.6 else random.randrange(len(pages) // HASH_BYTES)
            self.put(component, pages, first)
        elif what < 0.64:
            self.get(component, self._rank(component), pages)
        elif what < 0.84:
            # As SGLang does: how much is there, then load it.
            shard = self._rank(component)
            found = self._timed("prefix", lambda: self._store.prefix([component.name], shard, pages))
            self._in_range("prefix", found, len(pages))
            if found:
                if random.random() < 0.5:
                    self.kernel.park(random.expovariate(1.0) * random.choice((0.02, 0.2, 2)))
                self.get(component, shard, pages[: found * HASH_BYTES])
        elif what < 0.88:
            found = self._timed(
                "prefix", lambda: self._store.prefix([one.name for one in COMPONENTS], self.rank, pages)
            )
            self._in_range("prefix", found, len(pages))
        elif what < 0.91:
            self.held()
        elif what < 0.93:
            self._timed("present", lambda: self._store.present(component.name, self._rank(component), pages))
        elif what < 0.955:
            self._timed("touch", lambda: self._store.touch(pages))
        elif what < (0.975 if self.namespace is NAMESPACES[0] else 0.96):
            self._timed("delete", lambda: self._store.delete(pages[-HASH_BYTES * random.randint(1, 3) :]))
        elif what < (0.98 if self.namespace is NAMESPACES[0] else 0.99):
            self._timed("clear", self._store.clear)
        elif what < 0.993:
            self._timed("stats", self._store.stats)
        else:
            self._operate(pages[-HASH_BYTES:])

    def _operate(self, page: bytes) -> None:
        """As an operator's command does, through the session."""
        random = self.kernel.random
        session, life = self._store._session, self._store._lives.life
        if life is None:
            return

        def command() -> None:
            # Unlike a store, a session says why it could not.
            with contextlib.suppress(MaruError):
                what = random.choice(("pin", "pin", "unpin", "evict"))
                if what == "evict":
                    session.evict(random.randint(1, 8), epoch=life.epoch)
                else:
                    getattr(session, what)(life.namespace, page, epoch=life.epoch)

        self._timed("operate", command)

    # ------------------------------------------------------------ calls

    @property
    def _store(self) -> Store:
        assert self.store is not None
        return self.store

    def _pages(self) -> bytes:
        random = self.kernel.random
        if self.hot and random.random() < 0.6:
            return random.choice(self.hot)
        system, user = random.choices((0, 1), (3, 1))[0], random.randrange(4)
        path = (system, system, *(user * 7 + turn for turn in range(random.randint(0, 6))))
        pages = chain(path[: random.randint(1, 8)])
        self.hot.append(pages)
        del self.hot[:-3]
        return pages

    def _rank(self, component: Component) -> int:
        """Mostly its own; a replica is read by all ranks."""
        return self.rank if component.world == 1 or self.kernel.random.random() < 0.7 else 1 - self.rank

    def put(self, component: Component, pages: bytes, first: int, *, exact: bool = False) -> int:
        """Store the pages from ``first`` on; says how many were."""
        shard = self.rank if component.world > 1 else 0
        nbytes = component.nbytes - (8 if not exact and self.kernel.random.random() < 0.03 else 0)
        parent = pages[(first - 1) * HASH_BYTES : first * HASH_BYTES] if first else ROOT
        hashes = pages[first * HASH_BYTES :]
        keys = self._keys(component, shard, hashes)
        buffer = np.stack([content(self.checker.write(key, nbytes)) for key in keys])
        stored = self._timed(
            "put",
            lambda: self._store.put(component.name, shard, component.world, parent, hashes, self._fragments(buffer)),
            f"{component.name}/{shard} {pages.hex()[:4]}[{first}:{first + len(keys)}]",
        )
        buffer[:] = _GARBAGE  # whatever the store does from here on, it may not read this any more
        for key, done in zip(keys, stored.tolist(), strict=True):
            if done:
                self.checker.acknowledged(key, self.process.name)
        self.good["put"] += int(stored.sum())
        return int(stored.sum())

    def get(self, component: Component, shard: int, hashes: bytes, *, exact: bool = False) -> int:
        """Load pages, and have each of them checked; says how many came."""
        nbytes = component.nbytes - (8 if not exact and self.kernel.random.random() < 0.03 else 0)
        of = 0 if component.world == 1 else shard
        keys = self._keys(component, of, hashes)
        buffer = np.full((len(keys), nbytes), _GARBAGE, np.uint8)
        since = self.kernel.now
        loaded = self._timed(
            "get",
            lambda: self._store.get(component.name, shard, hashes, self._fragments(buffer)),
            f"{component.name}/{shard} {len(keys)} pages",
        )
        for key, done, data in zip(keys, loaded.tolist(), buffer, strict=True):
            if done:
                self.checker.loaded(key, data, since, self.process.name)
        self.good["get"] += int(loaded.sum())
        return int(loaded.sum())

    def held(self) -> None:
        """As one rank of a request: look up with a hold, load what both were told, end the hold."""
        random = self.kernel.random
        mine = [request for request in self.requests if request.namespace is self.namespace]
        if mine and random.random() < 0.8:
            request = mine[0]
            self.requests.remove(request)
        else:
            request = Request(random.getrandbits(32), self.namespace, self._pages())
            self.requests.append(request)
        component = COMPONENTS[0]
        before = self._store._session.welcome
        found = self._timed(
            "find",
            lambda: self._store.find(
                {component.name: Want()}, self.rank, request.pages, hold=Hold(request.id, 2, random.uniform(0.5, 5))
            ),
            f"{request.number}",
        )
        welcome = self._store._session.welcome
        if found.why is not None and before is welcome is not None:
            for rank, session, pages in request.said:
                # Only as long as the other is there: who is gone has nobody to agree with.
                if rank.is_in(session) and welcome.session >> 32 == session >> 32 and pages != found.pages:
                    names = f"{rank.process.name} was told {pages} pages, {self.process.name} {found.pages}"
                    self.kernel.fail(Violation("ranks disagree", f"request {request.number}: {names}"))
            request.said.append((self, welcome.session, found.pages))
        if found.pages:
            self.kernel.park(random.expovariate(1.0) * 0.3)
            self.get(component, self.rank, request.pages[: found.pages * HASH_BYTES])
        self._timed("unhold", lambda: self._store.unhold(request.id))

    def is_in(self, session: int) -> bool:
        """Whether the process runs and has this session with the server."""
        welcome = self.store._session.welcome if self.store is not None else None
        return self.process.alive and not self.leaving and welcome is not None and welcome.session == session

    def _keys(self, component: Component, shard: int, hashes: bytes) -> list[Key]:
        return [
            Key(self.record, hashes[at : at + HASH_BYTES], component.name, shard)
            for at in range(0, len(hashes), HASH_BYTES)
        ]

    def _fragments(self, buffer: np.ndarray) -> Fragments:
        """Two fragments a page, like K and V."""
        count, nbytes = buffer.shape
        half = nbytes // 16 * 8
        starts = np.uint64(buffer.ctypes.data) + np.arange(count, dtype=np.uint64) * np.uint64(nbytes)
        addresses = np.stack([starts, starts + np.uint64(half)], axis=1)
        return Fragments(addresses, np.array([half, nbytes - half], np.uint64))

    def _in_range(self, what: str, found: int, nbytes: int) -> None:
        if not 0 <= found <= nbytes // HASH_BYTES:
            self.kernel.fail(Violation("raised", f"{what} of {nbytes // HASH_BYTES} pages says {found}"))

    def awake(self) -> float:
        """The process's clock, without the time that it was stopped."""
        return self.process.clock() - self.process.stopped_s * self.process.rate

    def _timed(self, what: str, call: Callable[[], T], detail: str = "") -> T:
        """Make a call: it may not raise, and may take only so long."""
        number = f"{what}-{self.calls}-{self.kernel.now}-{len(self.busy)}"
        began = self.busy[number] = self.awake()
        self.kernel.log(self.process, f"{what} {detail}")
        task = self.kernel.running
        assert task is not None
        slow = task.slow_s
        task.may_be_slow = True
        result = call()
        took = self.awake() - began - (task.slow_s - slow)
        del self.busy[number]
        said = result.astype(int).tolist() if isinstance(result, np.ndarray) else type(result).__name__
        self.kernel.log(self.process, f"{what} {detail} = {said}, {took * 1000:.1f} ms")
        self.longest[what] = max(took, self.longest.get(what, 0.0))
        if took > limit_s(what):
            self.kernel.fail(Violation("too long", f"{what} took {took:.3f} s of its caller's time"))
        return result

    def overdue(self) -> str | None:
        """A call that should have ended long ago."""
        for number, began in self.busy.items():
            what = number.partition("-")[0]
            if self.process.alive and not self.process.stopped and self.awake() - began > limit_s(what) + 30:
                return what
        return None


def limit_s(what: str) -> float:
    if what == "close":
        return 6.0
    return CALL_S.get(what, CALL_OTHER_S)
