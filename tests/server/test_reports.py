"""What clients tell of their reads and writes: added up once, kept when sessions end, bounded whatever they claim."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from live import Running
from maru_harness import Client, Server

from maru_core.protocol import REPORTED, ROOT, Done, Heartbeat
from maru_core.session import Session
from maru_core.store import Store, StoreConfig, StoreMetrics
from maru_server.reports import COUNTER_MAX, PREFIX, add_reported
from maru_server.sessions import Peer
from support import Pages, ServerProcess, await_condition, hashes, namespace, running_server


def said(client: Client, counts: dict[str, int], namespace: int | None = None) -> None:
    where = client.namespace if namespace is None else namespace
    reply = client.send(Heartbeat(1, client.session, where, counts))
    assert isinstance(reply, Done), reply


def of(server: Server, namespace: int, name: str) -> int:
    return server.state.books.trees[namespace].counts[PREFIX + name]


def test_differences_are_added_once(server: Server, client: Client) -> None:
    for counts in (5, 5, 12, 7, 12, 13):  # repeated, and late
        said(client, {"loaded_pages": counts})
    assert of(server, client.namespace, "loaded_pages") == 13


def test_what_a_session_said_stays_when_it_ends(server: Server, client: Client) -> None:
    said(client, {"miss_evicted": 3})
    client.goodbye()
    other = server.client("other")
    said(other, {"miss_evicted": 4})
    assert of(server, client.namespace, "miss_evicted") == 7


def test_what_is_cleared_stays_counted(server: Server, client: Client) -> None:
    said(client, {"miss_evicted": 3})
    client.clear()
    said(client, {"miss_evicted": 4})
    assert of(server, client.namespace, "miss_evicted") == 4


def test_namespaces_are_apart(server: Server, client: Client) -> None:
    other = server.client("other", tag="other")
    said(client, {"stored_pages": 1})
    said(other, {"stored_pages": 10})
    assert (of(server, client.namespace, "stored_pages"), of(server, other.namespace, "stored_pages")) == (1, 10)


def test_nobody_speaks_of_another_tenant_s_namespace(server: Server, client: Client) -> None:
    stranger = server.client("stranger", peer=Peer("them", operator=False))
    said(stranger, {"loaded_pages": 2}, namespace=client.namespace)
    said(stranger, {"loaded_pages": 3})
    assert of(server, client.namespace, "loaded_pages") == 0
    assert of(server, stranger.namespace, "loaded_pages") == 3
    operator = server.client("operator", peer=Peer("", operator=True))
    said(operator, {"loaded_pages": 1}, namespace=stranger.namespace)
    assert of(server, stranger.namespace, "loaded_pages") == 4


@pytest.mark.parametrize("counts", [{"no_such": 4}, {"loaded_pages": -4}, {"loaded_pages": 1 << 63}])
def test_what_cannot_be_counted_is_ignored(server: Server, client: Client, counts: dict[str, int]) -> None:
    said(client, {"loaded_pages": 2})
    said(client, counts)
    assert server.state.books.trees[client.namespace].counts == Counter({PREFIX + "loaded_pages": 2})


def test_a_heartbeat_about_an_unknown_namespace_is_still_one(server: Server, client: Client) -> None:
    said(client, {"loaded_pages": 2}, namespace=3)
    assert not server.state.books.pages.counts[PREFIX + "loaded_pages"]


def test_counters_stay_what_the_protocol_can_carry() -> None:
    total: Counter[str] = Counter()
    for _ in range(3):
        add_reported({}, 1, {"loaded_bytes": COUNTER_MAX}, total)
    assert total[PREFIX + "loaded_bytes"] == COUNTER_MAX


def test_one_session_speaks_of_few_namespaces() -> None:
    total: Counter[str] = Counter()
    memory: dict[int, dict[str, int]] = {}
    for number in range(100):
        add_reported(memory, number, {"loaded_pages": 1}, total)
    assert len(memory) == total[PREFIX + "loaded_pages"] == 8


def test_a_store_has_every_counter_that_is_reported() -> None:
    assert set(REPORTED) <= set(StoreMetrics.__struct_fields__)


# ------------------------------------------------------------ from the client's side


def test_a_session_reports_with_its_heartbeats_and_at_its_end(tmp_path: Path) -> None:
    running = Running(tmp_path)
    figures = {"loaded_pages": 4, "queried_pages": 9}
    number: list[int] = []
    session = Session(
        running.endpoint, name="test", timeout_s=60, report=lambda: (number[0] if number else None, figures)
    )
    number.append(session.open_namespace(namespace().record()))
    session._wake.set()

    def counted() -> int:
        return running.service.call(lambda state: state.books.trees[number[0]].counts[PREFIX + "loaded_pages"])

    await_condition(lambda: counted() == 4, "the first heartbeat")
    figures["loaded_pages"] = 11
    session.close()
    await_condition(lambda: counted() == 11, "the last message of a closed session")
    running.stop()


def test_a_source_that_fails_costs_no_heartbeat(tmp_path: Path) -> None:
    running = Running(tmp_path)

    def fail() -> tuple[int | None, dict[str, int]]:
        raise RuntimeError("no counters")

    session = Session(running.endpoint, name="test", timeout_s=60, report=fail)
    session.connect()
    probed = session._probe(None)
    assert probed is not None
    session._sockets.discard(probed)
    session.close()
    running.stop()


def test_a_new_life_is_told_only_what_no_server_was_told(tmp_path: Path) -> None:
    figures = {"loaded_pages": 4}
    number: list[int] = []
    bind = f"ipc://{tmp_path}/s.sock"
    session = Session(bind, name="test", timeout_s=5, report=lambda: (number[0] if number else None, figures))
    for expected, now in ((4, 4), (3, 7)):
        running = Running(tmp_path, bind=bind)
        number.clear()
        await_condition(lambda: session._probe(None) is not None, "the server")
        number.append(session.open_namespace(namespace().record()))
        figures["loaded_pages"] = now
        session._probe(None)
        counted = running.service.call(lambda state: state.books.trees[number[0]].counts[PREFIX + "loaded_pages"])
        assert counted == expected
        running.stop()
    session.close()


def test_a_store_tells_how_its_reads_ended(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        assert isinstance(server, ServerProcess)
        store = Store.open(StoreConfig(server=server.endpoint, timeout_ms=60_000), namespace(), name="reader")
        chain, pages = hashes(3), Pages(3, (1000,), seed=1)
        assert store.put("kv", 0, 1, ROOT, chain, pages.fragments).all()
        assert store.get("kv", 0, chain, Pages(3, (1000,)).fragments).all()
        assert not store.get("kv", 0, chain, Pages(3, (2000,)).fragments).any()
        store.close()
        with_session = Session(server.endpoint, name="looker", timeout_s=60)
        await_condition(lambda: with_session.stats()["sessions"] == 1, "the store's farewell")
        stats = with_session.stats()
        with_session.close()
    told = {name: stats[PREFIX + name] for name in ("stored_pages", "stored_bytes", "loaded_pages", "miss_length")}
    assert told == {"stored_pages": 3, "stored_bytes": 3000, "loaded_pages": 3, "miss_length": 3}
