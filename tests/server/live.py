"""A live service in a thread, and clients for it."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import zmq

from maru_core import protocol as p
from maru_core.keys import ClientKeys
from maru_core.pool import PoolMemory, parse_pool_uri
from maru_core.session import Session
from maru_server.config import StateConfig
from maru_server.directory import PoolDirectory
from maru_server.election import Election
from maru_server.service import Service
from maru_server.state import ServerState
from maru_server.trust import Trust
from tests.support import hashes


class Running:
    """A service in a thread. ``stop`` ends it; the pool stays."""

    def __init__(
        self,
        directory: Path,
        *,
        bind: str | None = None,
        config: StateConfig | None = None,
        idle_exit_s: float | None = None,
        election: Election | None = None,
        insecure: bool = False,
        trust: Trust | None = None,
        prepare: Callable[[PoolMemory, ServerState], None] = lambda memory, state: None,
    ) -> None:
        config = config or StateConfig()
        self.memory = PoolMemory.create(parse_pool_uri(f"file://{directory}/pool"), 64 << 20)
        incarnation = self.memory.bump_incarnation()
        now = time.monotonic()
        self.state = ServerState(
            PoolDirectory(self.memory.geometry, self.memory.meta),
            incarnation=incarnation,
            pool_uri=str(self.memory.uri),
            config=config,
            now=now,
            wall_offset=time.time() - now,
        )
        prepare(self.memory, self.state)
        try:
            self.service = Service(
                self.state,
                self.memory,
                bind or f"ipc://{directory}/{uuid.uuid4().hex[:8]}.sock",
                incarnation=incarnation,
                lease_s=config.lease_s,
                idle_exit_s=idle_exit_s,
                insecure=insecure,
                trust=trust,
                election=election,
            )
        except BaseException:
            self.memory.close()
            raise
        self.endpoint = self.service.endpoint
        self.thread = threading.Thread(target=self.service.run, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.service.stop()
        self.thread.join(180)
        assert not self.thread.is_alive()
        self.service.close()
        self.memory.close()

    def session(self, timeout_s: float = 60.0, keys: ClientKeys | None = None) -> Session:
        return Session(self.endpoint, name="test", timeout_s=timeout_s, keys=keys)


@contextlib.contextmanager
def raw(endpoint: str, **options: int) -> Iterator[zmq.Socket[bytes]]:
    """A bare client socket."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.rcvtimeo = 60_000
        for name, value in options.items():
            setattr(dealer, name, value)
        dealer.connect(endpoint)
        yield dealer
    context.term()


def store(session: Session, number: int, count: int, seed: int = 1, nbytes: int = 1000) -> bytes:
    """Reserve and commit ``count`` pages (their bytes do not matter here); their hashes."""
    keys = hashes(count, seed)
    reserved = session.reserve(number, "kv", 0, 1, p.ROOT, keys, nbytes)
    assert set(reserved.status) == {p.ReserveStatus.RESERVED}
    assert set(session.commit(reserved.slots, reserved.generations).status) == {p.CommitStatus.COMMITTED}
    return keys
