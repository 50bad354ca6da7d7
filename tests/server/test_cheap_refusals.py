"""What a question that finds nothing may cost, and what one page may take: bounded, whatever tenants have made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from maru_harness import Client, Server, chain, geometry

from maru_core.protocol import Error, Inspect, MissReason, Pin, Report
from maru_server import pins
from maru_server.ghosts import Ghosts
from maru_server.lookup import reason
from maru_server.sessions import Peer
from maru_server.tree import PrefixTree


def test_a_miss_looks_into_few_other_namespaces() -> None:
    asked: list[int] = []

    def others() -> Iterator[PrefixTree]:
        for number in range(1, 1000):
            asked.append(number)
            yield PrefixTree(number)

    assert reason(PrefixTree(0), chain("a", 1), Ghosts(1), others()) is MissReason.NOT_STORED
    assert 4 <= len(asked) <= 16


def test_a_miss_looks_into_the_latest_namespaces_of_its_tenant_and_passes_no_others() -> None:
    server = Server(geometry(namespace_capacity=64))
    for number in range(20):
        server.client(f"c{number}", tag=f"t{number}")
    server.client("red", tag="red", peer=Peer("red", True, "key")).store(chain("r", 2))
    last = server.client("last", tag="last")
    last.store(chain("a", 2))
    first = server.client("first", tag="t0")
    for _ in range(2):
        assert first.match(chain("a", 2)).why is MissReason.OTHER_NAMESPACE
        assert first.match(chain("r", 2)).why is MissReason.NOT_STORED
        server.restart()
        first.connect()
    assert first.match(chain("a", 2)).why is MissReason.OTHER_NAMESPACE
    last.connect()
    last.clear()
    last.store(chain("b", 2))
    assert first.match(chain("b", 2)).why is MissReason.OTHER_NAMESPACE


# ---------------------------------------------------------------- pins


class Walks:
    """How many pinned paths were walked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        walk = pins._Paths.add

        def add(paths: Any, pin: pins.Pin) -> int:
            self.count += 1
            return walk(paths, pin)

        monkeypatch.setattr(pins._Paths, "add", add)


def pinned(client: Client, name: str, count: int) -> None:
    client.store(chain(name, count))
    for index in range(count):
        client.send(Pin(9, client.session, client.namespace, chain(name, 1, start=index)))


def test_a_tenant_s_look_at_pins_walks_no_paths_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    blue = server.client("blue", peer=Peer("blue", True, "op"))
    red = server.client("red", peer=Peer("red", False, "key"))
    pinned(blue, "a", 5)
    walks = Walks(monkeypatch)
    reply = red.send(Inspect(1, red.session, "pins"))
    assert isinstance(reply, Report)
    assert (reply.rows, walks.count) == ([], 0)
    reply = blue.send(Inspect(1, blue.session, "pins"))
    assert isinstance(reply, Report)
    assert (len(reply.rows), walks.count) == (5, 5)


def test_a_delete_measures_pins_only_where_some_have_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    client = server.client()
    pinned(client, "a", 4)
    client.store(chain("b", 2))
    before = server.stats["pinned_bytes"]
    walks = Walks(monkeypatch)
    assert client.delete(chain("b", 2)) == 2
    assert client.delete(chain("b", 2)) == 0
    assert walks.count == 0
    assert client.delete(chain("a", 1, start=3)) == 1
    assert walks.count == 3
    assert server.stats["pinned_bytes"] == before // 4 * 3


# ---------------------------------------------------------------- columns of shards


def test_a_namespace_has_so_many_columns_of_shards_and_no_more() -> None:
    server = Server(geometry(64, 64, component_capacity=4), checked=False)
    client, other = server.client(), server.client("other", tag="other")
    for component, shards in (("kv", 1000), ("swa", 24)):
        for shard in range(shards):
            client.store(chain("a", 1), component=component, shard=shard, world=4096)
    before = server.stats
    for component, shard in (("kv", 1000), ("new", 0)):
        refused = client.reserve_reply(chain("b", 1), component=component, shard=shard, world=4096)
        assert isinstance(refused, Error)
        assert refused.code == "limit"
        for part in ("1024", f"shard {shard}", component):
            assert part in refused.message
    assert server.stats == before
    # What it has goes on, and so do others.
    client.store(chain("b", 1), component="kv", shard=999, world=4096)
    other.store(chain("b", 1), component="kv", shard=1000, world=4096)
    server.state.check()
    # Emptied, it may have others.
    client.clear()
    client.store(chain("b", 1), component="kv", shard=1000, world=4096)
    server.state.check()
