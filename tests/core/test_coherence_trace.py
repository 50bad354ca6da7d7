"""Software coherence, judged by a model: the real code passes, and each fault that is planted in it is caught.

Two clients on hosts A and B and a server on host S, later T, share one pool with ``coherence=software``: real state, service,
sessions, stores and movers, over real shared memory. What they do to it is recorded and replayed on memory whose caches do
not agree (:mod:`coherence_model`).
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coherence_faults import FAULTS
from coherence_model import EVERY_KIND, judge
from coherence_trace import Recorder

from maru_core import locations
from maru_core.pool import PoolMemory
from maru_core.pool.coherence import SoftwareCoherence
from maru_core.protocol import ROOT
from maru_core.store import Store, StoreConfig
from maru_server.config import StateConfig
from maru_server.directory import PoolDirectory
from maru_server.service import Service
from maru_server.state import ServerState
from support import Pages, await_condition, hashes, namespace

pytestmark = pytest.mark.skipif(
    not SoftwareCoherence.possible(), reason="the compiled helper is not built, or this CPU cannot flush lines"
)

#: Odd sizes: objects begin on lines and end within one.
SIZES = (600, 401)


#: Longer than a line.
OWNER = "the server on host {} " + "of a name that is long " * 9


class Server:
    """A service in a thread, on a host of its own."""

    def __init__(self, recorder: Recorder, host: str, uri: str, endpoint: str) -> None:
        self.host = host
        self.recorder = recorder
        with recorder.on(host):
            self.memory = PoolMemory.create(uri)
            incarnation = self.memory.bump_incarnation()
            self.memory.set_owner(OWNER.format(host))
            now = time.monotonic()
            config = StateConfig(heartbeat_s=60, lease_s=300, high=0.999, low=0.99)
            self.state = ServerState(
                PoolDirectory(self.memory.geometry, self.memory.meta, self.memory.coherence),
                incarnation=incarnation,
                pool_uri=uri,
                config=config,
                now=now,
                wall_offset=time.time() - now,
            )
            self.service = Service(self.state, self.memory, endpoint, incarnation=incarnation, lease_s=config.lease_s)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        with self.recorder.on(self.host):
            self.service.run()

    def stop(self) -> None:
        self.service.stop()
        self.thread.join(120)
        assert not self.thread.is_alive()
        self.service.close()
        self.memory.close()


class Client:
    """A store, on a host of its own."""

    def __init__(self, recorder: Recorder, host: str, endpoint: str, **config: Any) -> None:
        self.recorder, self.host = recorder, host
        with recorder.on(host):
            self.store = Store.open(StoreConfig(server=endpoint, timeout_ms=60_000, **config), namespace(), name=host)

    def put(self, chain: bytes, pages: Pages) -> np.ndarray:
        count = len(chain) // 32
        for i in range(count):
            self.recorder.contents[chain[32 * i : 32 * i + 32]] = pages.page(i)
        with self.recorder.on(self.host):
            done = self.store.put("kv", 0, 1, ROOT, chain, pages.fragments)
            self.recorder.note("stored", chain, done)
        return done

    def find(self, chain: bytes) -> int:
        with self.recorder.on(self.host):
            return self.store.prefix(["kv"], 0, chain)

    def get(self, chain: bytes) -> np.ndarray:
        copy = Pages(len(chain) // 32, SIZES)
        with self.recorder.on(self.host):
            done = self.store.get("kv", 0, chain, copy.fragments)
            self.recorder.note("loaded", chain, done)
        return done

    def delete(self, chain: bytes) -> int:
        with self.recorder.on(self.host):
            gone = self.store.delete(chain)
            self.recorder.note("removed", chain, np.ones(len(chain) // 32, bool))
        return gone

    def changes(self) -> Any:
        with self.recorder.on(self.host):
            return self.store.changes()


def exercise(recorder: Recorder, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A life of a pool: format, put, find, get, remove, put again in the same slots, overwrite while it is read, restart."""
    # Locations are remembered for as long as the test takes on a slow machine.
    monkeypatch.setattr(locations, "RECENT_S", 1e6)
    name = f"maru-test-{uuid.uuid4().hex[:12]}"
    uri = f"shm://{name}?size=2560K&extent=64K&align=4K&min_slot=4K&coherence=software"
    endpoint = f"ipc://{folder}/{name}.sock"
    opened: list[Client] = []
    server = Server(recorder, "S", uri, endpoint)
    try:
        a, b = Client(recorder, "A", endpoint), Client(recorder, "B", endpoint)
        careful = Client(recorder, "B", endpoint, verify="checksum")
        opened += [a, b, careful]
        with recorder.on("B"):
            assert PoolMemory.attach(uri).owner() == OWNER.format("S")
        first, second = hashes(6, 1), hashes(6, 2)
        before = b.changes()
        assert a.put(first, Pages(6, SIZES, seed=1)).all()
        assert b.changes() != before
        assert b.find(first) == 6
        assert b.get(first).all()
        # B remembers where the first chain was. Its slots go to another one meanwhile.
        assert b.find(first) == 6
        assert a.delete(first[:32]) == 6
        assert a.put(second, Pages(6, SIZES, seed=2)).all()
        assert not b.get(first).any()
        assert b.find(second) == 6
        assert b.get(second).all()
        # The same while B is copying: between what it drops and what it copies the slots go to others.
        third = hashes(6, 3)

        def overwrite(host: str, to_pool: bool) -> None:
            if host == "B" and not to_pool:
                recorder.before_copy = None
                assert a.delete(second[:32]) == 6
                assert a.put(third, Pages(6, SIZES, seed=3)).all()

        assert b.find(second) == 6
        recorder.before_copy = overwrite
        assert not b.get(second).any()
        assert a.find(third) == 6
        assert a.get(third).all()
        # And while A writes into slots that were given to it by one message, which evicted others, from under B most likely.
        a.put(hashes(90, 4), Pages(90, SIZES, seed=4))
        more = hashes(20, 7)
        assert b.find(third) == 6

        def read(host: str, to_pool: bool) -> None:
            if host == "A" and to_pool:
                recorder.before_copy = None
                b.get(third)

        recorder.before_copy = read
        # Room is made beside the calls: a put that came too early is made again.
        await_condition(lambda: a.put(more, Pages(20, SIZES, seed=7)).all(), "there is room for 20 pages more")
        recorder.before_copy = None
        fourth = hashes(3, 5)
        await_condition(lambda: careful.put(fourth, Pages(3, SIZES, seed=5)).all(), "there is room for 3 pages more")
        assert a.find(fourth) == 3
        assert a.get(fourth).all()
        # Another server, on another host. The first sees it in the memory, and touches the pool no more.
        server.memory._backing.unlock()  # as if the lock did not reach to the other host
        with recorder.on("T"):
            other = PoolMemory.create(uri)
            other.bump_incarnation()
            other.close()
        await_condition(lambda: not server.thread.is_alive(), "the first server has stepped down")
        server.stop()
        server = Server(recorder, "T", uri, endpoint)
        await_condition(lambda: a.find(fourth) == 3 and b.find(fourth) == 3, "the clients are back")
        assert b.get(fourth).all()
        await_condition(lambda: a.put(hashes(2, 6), Pages(2, SIZES, seed=6)).all(), "there is room for 2 pages more")
        assert b.find(hashes(2, 6)) == 2
        assert b.get(hashes(2, 6)).all()
    finally:
        recorder.before_copy = None
        for client in opened:
            with recorder.on(client.host):
                client.store.close()
        server.stop()
        Path("/dev/shm", name).unlink(missing_ok=True)


def test_the_real_code_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    with monkeypatch.context() as patch:
        recorder.install(patch)
        exercise(recorder, tmp_path, patch)
    assert judge(recorder, EVERY_KIND) == ""


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    plant, outside = FAULTS[name]
    with monkeypatch.context() as patch:
        if not outside:
            plant(patch)
        recorder.install(patch)
        if outside:
            plant(patch)
        # Faults of the order show on memory that is coherent, too; the model has to say so of itself.
        with contextlib.suppress(AssertionError):
            exercise(recorder, tmp_path, patch)
    assert judge(recorder, EVERY_KIND)
