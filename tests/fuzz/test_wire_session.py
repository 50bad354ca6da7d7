"""Replies that are nearly right, given to a client: it raises nothing but its own errors, and takes nothing that contradicts
its question.

The replies are a real state's, changed on the way. Each is followed by the true one, so that nothing waits for a time limit
where the changed one was no answer.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from maru_core import protocol as p
from maru_core.errors import MaruError
from maru_core.pool import PoolMemory, parse_pool_uri
from maru_core.protocol import HASH_BYTES, Want
from maru_core.session import Session
from maru_core.store import Store, StoreConfig
from maru_server.calls import Deferred
from maru_server.config import StateConfig
from maru_server.directory import PoolDirectory
from maru_server.state import ServerState
from tests.fuzz.messages import mutate
from tests.fuzz.runs import case, cases
from tests.server.maru_harness import chain
from tests.support import Pages, namespace

SIZE = "8M&extent=256K&align=4K&min_slot=4K"


class Liar:
    """A state behind a socket whose replies are changed with some probability."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/liar.sock"
        self.memory = PoolMemory.create(parse_pool_uri(f"file://{folder}/pool?size={SIZE}"))
        self.chance: random.Random | None = None
        self.keep = 2
        self.faults: list[BaseException] = []
        self.state = ServerState(
            PoolDirectory(self.memory.geometry, self.memory.meta),
            incarnation=7,
            pool_uri=str(self.memory.uri),
            config=StateConfig(heartbeat_s=60, lease_s=600),
            now=1000.0,
            wall_offset=1e9,
        )
        self.state.extents_ready(self.memory.geometry.extent_count, 1000.0)
        self._now = 1000.0
        self._stop = threading.Event()
        self._bound = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._bound.wait(120)

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        router = context.socket(zmq.ROUTER)
        router.linger = 0
        router.bind(self.endpoint)
        self._bound.set()
        while not self._stop.is_set():
            if not router.poll(5):
                continue
            identity, data = router.recv_multipart()
            try:
                self._now += 0.01
                reply = self.state.handle(p.decode_request(data), self._now)
                if isinstance(reply, Deferred):
                    reply = reply.work()
                self.state.finish()
                if reply is None:
                    continue
                chance = self.chance
                if chance is not None and chance.random() < 0.8:
                    router.send_multipart([identity, mutate(reply, chance, keep=self.keep)])
                router.send_multipart([identity, p.encode(reply)])
            except BaseException as fault:
                self.faults.append(fault)
        router.close(0)
        context.term()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(120)
        self.memory.close()
        assert not self.faults, self.faults


@pytest.fixture
def liar(tmp_path: Path) -> Iterator[Liar]:
    made = Liar(tmp_path)
    yield made
    made.close()


def fits_match(reply: p.Located, asked: int, components: int, sparse: bool, rules: list[Want]) -> None:
    """What the protocol promises of an answer to a match."""
    assert 0 <= reply.pages <= asked
    count = (asked if sparse else reply.pages) * components
    assert len(reply.slots) == 4 * count
    for part in (reply.offsets, reply.generations, reply.lengths, reply.checksums):
        assert len(part) == 8 * count
    assert reply.why in set(p.MissReason)
    assert reply.held_s == 0, "nothing was to be held"
    ends = np.frombuffer(reply.ends, "<u4").tolist()
    assert ends == sorted(set(ends))
    assert all(0 < end <= reply.pages for end in ends)
    assert all(0 <= pages <= asked for pages in reply.covered)
    if not sparse:
        assert len(reply.covered) == components


def calls(session: Session, number: int, chance: random.Random) -> int:
    """One of each call; how many went through. Whatever else they raise is a fault."""
    hashes = chain("a", chance.randrange(9))
    n = len(hashes) // HASH_BYTES
    good = 0

    def match(components: list[str], sparse: bool, rules: list[Want]) -> None:
        reply = session.match(number, components, 0, hashes, sparse, rules=rules)
        fits_match(reply, n, len(components), sparse, rules)

    def write() -> None:
        fresh = chance.randbytes(32 * 3)
        reserved = session.reserve(number, "kv", 0, 1, p.ROOT, fresh, 4000)
        assert len(reserved.status) == 3
        assert len(reserved.slots) == 12
        assert len(reserved.offsets) == len(reserved.generations) == 24
        committed = session.commit(reserved.slots, reserved.generations)
        assert len(committed.status) == 3
        session.release(reserved.slots, reserved.generations)

    deeds = [
        lambda: match(["kv"], False, []),
        lambda: match(["kv", "swa"], True, []),
        lambda: match(["kv", "swa"], False, [Want(), Want(p.Rule.TRAILING_PAGES, 2)]),
        write,
        lambda: session.open_namespace(namespace().record()),
        session.stats,
        lambda: session.inspect("tree", number),
        lambda: session.unhold(number, b"x"),
        lambda: session.evict(1, number),
        lambda: session.delete(number, chance.randbytes(32)),
    ]
    for deed in deeds:
        with contextlib.suppress(MaruError):
            deed()
            good += 1
    return good


def test_a_session_raises_only_its_own_errors_and_takes_no_contradiction(liar: Liar) -> None:
    good = total = 0
    for number in cases(200):
        with case(number) as chance:
            liar.chance = None
            session = Session(liar.endpoint, name="fuzz", timeout_s=60)
            try:
                known = session.open_namespace(namespace().record())
                # Keep the tag and the rid, mostly: all else is no answer to anything.
                liar.keep = chance.choice([1, 2, 3, 3, 3])
                liar.chance = random.Random(number + 1)
                good += calls(session, known, chance)
                total += 10
            finally:
                liar.chance = None
                session.close()
    assert 0 < good < total or total < 20, (good, total)


def test_a_welcome_that_is_nearly_right_is_refused_or_harmless(liar: Liar) -> None:
    for number in cases(200):
        with case(number) as chance:
            liar.keep = chance.choice([1, 2, 3])
            liar.chance = random.Random(number + 1)
            session = Session(liar.endpoint, name="fuzz", timeout_s=60)
            try:
                welcome = session.connect()
                assert welcome.protocol == p.PROTOCOL_VERSION
                session.stats()
            except MaruError:
                pass
            finally:
                session.close()
                liar.chance = None


def test_a_store_never_raises_and_never_returns_what_is_not_its_shape(liar: Liar) -> None:
    pages = Pages(6, (3000, 1096), seed=1)
    for number in cases(100):
        with case(number) as chance:
            liar.chance = None
            store = Store.open(StoreConfig(server=liar.endpoint, timeout_ms=20000), namespace(), name="fuzz")
            try:
                liar.keep = chance.choice([2, 3, 3, 3])
                liar.chance = random.Random(number + 1)
                keys = chain(number, 6)
                stored = store.put("kv", 0, 1, p.ROOT, keys, pages.fragments)
                assert stored.shape == (6,)
                assert 0 <= store.prefix(["kv"], 0, keys) <= 6
                target = Pages(6, (3000, 1096))
                assert store.get("kv", 0, keys, target.fragments).shape == (6,)
                assert store.present("kv", 0, keys).shape == (6,)
                store.touch(keys)
                assert store.delete(keys[:32]) >= -(1 << 63)
                assert isinstance(store.stats(), dict)
            finally:
                liar.chance = None
                store.close()
