"""What clients say of their way to the pool: checked, kept with their session, shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from maru_harness import Client, Server

from maru_core import protocol as p
from maru_core.session import Session
from maru_core.store import Store, StoreConfig
from support import namespace, running_server


def rows(client: Client, what: str) -> list[dict[str, Any]]:
    reply = client.send(p.Inspect(1, client.session, what))
    assert isinstance(reply, p.Report), reply
    return reply.rows


def test_a_way_is_kept_with_its_session() -> None:
    server = Server()
    near, far, mute = server.client("near"), server.client("far"), server.client("mute")
    assert near.send(p.Reaches(1, near.session, [p.Way("cxl", "mapped")])) == p.Done(1, 1, 1)
    assert far.send(p.Reaches(1, far.session, [p.Way("rdma", "through agents")])) == p.Done(1, 1, 1)
    told = {row["name"]: row["reaches"] for row in rows(mute, "sessions")}
    assert told == {
        "near": [{"pool": 0, "way": "cxl", "why": "mapped"}],
        "far": [{"pool": 0, "way": "rdma", "why": "through agents"}],
        "mute": [],
    }
    (pool,) = rows(mute, "pools")
    assert pool["clients"] == {"cxl": 1, "rdma": 1, "none": 0}
    assert (pool["uri"], pool["uuid"], pool["agents"]) == ("shm://test", server.geometry.pool_uuid.hex(), 0)
    assert near.send(p.Reaches(1, near.session, [p.Way("none", "gone")])) == p.Done(1, 1, 0)
    assert rows(mute, "pools")[0]["clients"] == {"cxl": 0, "rdma": 1, "none": 1}
    near.send(p.Goodbye(near.session))
    assert rows(mute, "pools")[0]["clients"] == {"cxl": 0, "rdma": 1, "none": 0}


@pytest.mark.parametrize(
    "ways",
    [
        [],
        [p.Way("cxl", ""), p.Way("cxl", "")],
        [p.Way("nvlink", "")],
        [p.Way("cxl", "a\nb")],
        [p.Way("cxl", "\u202e")],
        [p.Way("cxl", "x" * 201)],
    ],
)
def test_a_way_that_cannot_be_is_refused(ways: list[p.Way]) -> None:
    client = Server().client()
    client.send(p.Reaches(1, client.session, [p.Way("cxl", "mapped")]))
    reply = client.send(p.Reaches(2, client.session, ways))
    assert isinstance(reply, p.Error)
    assert reply.code == p.ErrorCode.INVALID
    assert rows(client, "sessions")[0]["reaches"] == [{"pool": 0, "way": "cxl", "why": "mapped"}]


def test_others_see_of_a_pool_what_everybody_may() -> None:
    from maru_server.sessions import Peer

    client = Client(Server(), peer=Peer("tenant", operator=False))
    assert set(rows(client, "pools")[0]) == {"pool", "uri", "uuid", "extents", "extent_bytes"}


def test_an_agent_of_another_pool_is_not_taken() -> None:
    client = Server().client()
    reply = client.send(p.Agents(1, client.session, b"another pool...."))
    assert isinstance(reply, p.Error)
    assert reply.code == p.ErrorCode.INVALID
    assert isinstance(client.send(p.Agents(1, client.session, client.server.geometry.pool_uuid)), p.AgentsReply)


def test_a_store_says_how_it_reaches_the_pool_and_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "maru.store")
    with running_server(tmp_path) as server:
        config = StoreConfig(server=server.endpoint, timeout_ms=10_000)
        with_pool = Store.open(config, namespace(), name="near")
        session = Session(server.endpoint, name="looks", timeout_s=10)
        try:
            (told,) = [row["reaches"] for row in session.inspect("sessions") if row["name"] == "near"]
            assert [(one["way"], one["why"]) for one in told] == [("cxl", f"mapped as {server.pool}")]
            (line,) = [record.getMessage() for record in caplog.records if "reached by" in record.getMessage()]
            assert line.endswith(f"is reached by cxl: mapped as {server.pool}")
        finally:
            session.close()
            with_pool.close()
