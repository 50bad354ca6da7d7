"""Agents: who may announce one, what of it is believed, and when it is forgotten."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from maru_harness import Client, Server, chain

from maru_core.pool.geometry import Geometry
from maru_core.protocol import (
    AGENT_METADATA_MAX,
    Agent,
    Agents,
    AgentsReply,
    Announce,
    Done,
    Error,
    ErrorCode,
    Validate,
    Validated,
)
from maru_server.agents import AGENTS_MAX
from maru_server.sessions import Peer


def triples(*pieces: tuple[int, int, int]) -> bytes:
    return np.array(pieces, "<u8").tobytes()


def agent(server: Server, name: str = "node", **changes: Any) -> Agent:
    shape = server.geometry
    whole = triples((shape.off_data, shape.data_bytes, 1 << 30))
    return msgspec.structs.replace(Agent(name, "UCX", b"blob " + name.encode(), whole, 0.25), **changes)


def announce(client: Client, what: Agent) -> Any:
    reply = client.send(Announce(7, client.session, what))
    return reply.count if isinstance(reply, Done) else reply


def names(client: Client) -> list[str]:
    reply = client.send(Agents(8, client.session))
    assert isinstance(reply, AgentsReply)
    return sorted(found.name for found in reply.agents)


def test_what_is_announced_is_told_with_the_pools_geometry() -> None:
    server = Server()
    a, b = Client(server, "a"), Client(server, "b")
    assert names(b) == []
    first = agent(server, "one")
    assert announce(a, first) == 1
    reply = b.send(Agents(1, b.session))
    assert reply.agents == [first]
    assert Geometry.read(reply.superblock) == server.geometry
    assert announce(a, agent(server, "one", load=0.9)) == 1, "said again, it is the same agent"
    assert b.send(Agents(1, b.session)).agents[0].load == 0.9
    assert announce(b, agent(server, "two")) == 2


def test_an_agent_is_forgotten_with_its_session_and_while_it_is_silent() -> None:
    server = Server()
    a, b = Client(server, "a"), Client(server, "b")
    announce(a, agent(server, "one"))
    announce(b, agent(server, "two"))
    a.goodbye()
    assert names(b) == ["two"]
    reader = Client(server, "reader")
    server.wait(server.config.lease_s + 2, alive=(reader,))  # b says nothing
    assert names(reader) == []
    b.heartbeat()
    assert names(reader) == ["two"]


def test_the_extents_are_covered_in_whole_extents() -> None:
    server = Server()
    client, shape = Client(server), server.geometry
    start, extent, count = shape.off_data, shape.extent_bytes, shape.extent_count
    halves = [(start, extent, 1 << 30), (start + extent, (count - 1) * extent, 1 << 40)]
    assert announce(client, agent(server, pieces=triples(*halves))) == 1
    for wrong in (
        halves[:1],
        halves[1:],
        halves[::-1],
        [*halves, halves[1]],
        [(start, shape.data_bytes - 1, 1 << 30)],
        [(start, shape.data_bytes, 0)],
        [(start, shape.data_bytes, (1 << 64) - 4096)],
        [(0, shape.data_bytes, 1 << 30)],
        [(start, 0, 1 << 30), (start, shape.data_bytes, 1 << 30)],
        [],
    ):
        reply = announce(client, agent(server, pieces=triples(*wrong)))
        assert isinstance(reply, Error), wrong
        assert reply.code == ErrorCode.INVALID
        assert "cannot serve this pool" in reply.message


@pytest.mark.parametrize(
    "changes",
    [
        {"name": ""}, {"name": "a" * 300}, {"name": "a\nb"}, {"backend": "UCX;"}, {"backend": ""}, {"metadata": b""},
        {"metadata": bytes(AGENT_METADATA_MAX + 1)}, {"load": float("nan")}, {"load": -1.0}, {"load": float("inf")},
        {"pieces": b"123"},
    ],
)  # fmt: skip
def test_what_is_no_agent_is_refused(changes: dict[str, Any]) -> None:
    server = Server()
    client = Client(server)
    reply = announce(client, agent(server, **changes))
    assert isinstance(reply, Error)
    assert reply.code == ErrorCode.INVALID
    assert names(client) == []


def test_only_operators_announce() -> None:
    server = Server()
    tenant = Client(server, "tenant", peer=Peer("blue", operator=False, name="engine"))
    reply = announce(tenant, agent(server))
    assert isinstance(reply, Error)
    assert reply.code == ErrorCode.FORBIDDEN
    operator = Client(server, "operator", peer=Peer("", operator=True, name="node"))
    assert announce(operator, agent(server)) == 1
    assert names(tenant) == ["node"]


def test_there_is_an_end_to_agents() -> None:
    server = Server()
    for number in range(AGENTS_MAX):
        assert announce(Client(server, f"c{number}"), agent(server, f"n{number}")) == number + 1
    one_more = Client(server, "one more")
    reply = announce(one_more, agent(server, "one more"))
    assert isinstance(reply, Error)
    assert reply.code == ErrorCode.LIMIT


def test_generations_are_told_as_they_are() -> None:
    server = Server()
    client = Client(server)
    keys = chain("a", 4)
    slots, generations = client.store(keys).mine()
    ask = Validate(3, client.session, slots.tobytes(), generations.tobytes())
    reply = client.send(ask)
    assert isinstance(reply, Validated)
    assert list(reply.valid) == [1, 1, 1, 1]
    client.delete(keys[64:])
    assert list(client.send(ask).valid) == [1, 1, 0, 0]
    beyond = np.append(slots, server.geometry.slot_count).astype("<u4").tobytes()
    reply = client.send(Validate(3, client.session, beyond, bytes(40)))
    assert isinstance(reply, Error)
    assert list(client.send(Validate(3, client.session, b"", b"")).valid) == []
