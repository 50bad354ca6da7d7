"""Ways to pools from one life of the server to the next, and what a transfer that never began says of itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from maru_core.errors import PoolError, SessionLostError
from maru_core.mover import Fragments
from maru_core.pool import PoolMemory, parse_pool_uri
from maru_core.protocol import Agent
from maru_core.rdma import RdmaMover, TransferError
from maru_core.reach import Reached, Reaching
from maru_core.session import Session
from maru_core.store_config import StoreConfig
from support import ServerProcess


def through_agents(session: Session) -> Reached:
    config = StoreConfig(transport="rdma")
    reaching = Reaching(config, session, lambda memory: pytest.fail("mapped"), only_mapped=False)
    return reaching.reach(session.connect(), session.epoch, None)


def test_agents_of_the_pool_that_came_after_are_not_used_for_the_one_before(tmp_path: Path) -> None:
    """A writer that is stopped in a put goes on with the offsets of the pool that it began with."""
    first = ServerProcess(tmp_path, pool=f"file://{tmp_path}/a")
    second = ServerProcess(tmp_path, pool=f"file://{tmp_path}/b", bind=first.endpoint)
    session = Session(first.endpoint, name="test", timeout_s=60)
    try:
        first.start()
        mover = through_agents(session).first.mover
        assert isinstance(mover, RdmaMover)
        assert first.stop() == 0
        second.start()
        with pytest.raises(SessionLostError):
            session.stats()
        with PoolMemory.attach(parse_pool_uri(second.pool)) as memory:
            geometry = memory.geometry
        pieces = np.array([geometry.off_data, geometry.data_bytes, 1 << 40], "<u8").tobytes()
        assert session.announce(Agent("host", "UCX", b"metadata", pieces, 0.0)) == 1
        with pytest.raises(PoolError, match="another pool"):
            mover._stores._routes.next()
    finally:
        session.close()
        first.remove()
        second.remove()


def test_a_transfer_that_had_to_wait_too_long_has_written_nothing(tmp_path: Path) -> None:
    with PoolMemory.create(parse_pool_uri(f"file://{tmp_path}/pool?size=64M"), None, False) as memory:
        mover = RdmaMover(memory.geometry, list, name="test", timeout_s=0.01)
        fragments = Fragments(np.zeros((1, 1), np.uint64), np.array([4096], np.uint64))
        with mover._stores._lock, pytest.raises(TransferError, match="other transfers") as caught:
            mover.store(np.array([memory.geometry.off_data], np.uint64), fragments)
        assert not caught.value.wrote, "its slots can be given back"
