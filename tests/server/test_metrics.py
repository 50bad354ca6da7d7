"""Figures and their page for Prometheus: what is counted where, that it parses, and that no counter ever falls."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live import Running, raw, store
from maru_harness import Client, Server, chain, geometry
from prometheus_client.parser import text_string_to_metric_families

from maru_core import protocol as p
from maru_server import metrics
from maru_server.events import Events
from maru_server.exposition import Exposition
from maru_server.metrics import BUCKETS, RECEIVED, SENT, SUM_NS, Figures, Meter, SpaceFigures, quantile
from maru_server.sessions import Peer
from support import await_condition, namespace

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: bytes) -> Samples:
    """All samples of a scrape, after checking that it is well formed."""
    found: Samples = {}
    for family in text_string_to_metric_families(text.decode()):
        assert family.documentation, f"{family.name} has no help"
        assert family.name.startswith(("maru", "process_")), family.name
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, f"{key} twice"
            found[key] = sample.value
            if family.type == "counter":
                assert sample.name.endswith("_total"), sample.name
            elif family.type != "histogram":
                assert not sample.name.endswith("_total"), sample.name
    return found


class Scraper:
    """Scrapes a state, and sees that no counter falls or goes."""

    def __init__(self, server: Server, **options: int) -> None:
        self.exposition = Exposition(server.state.figures, **options)
        self.before: Samples = {}

    def scrape(self) -> Samples:
        now = samples(self.exposition.render())
        for key, value in self.before.items():
            if key[0].startswith("maru") and key[0].endswith(("_total", "_count", "_bucket", "_sum")):
                assert key in now, f"{key} is gone"
                assert now[key] >= value, f"{key} fell from {value} to {now[key]}"
        self.before = now
        return now


def value(found: Samples, name: str, **labels: str) -> float:
    """The sum of all samples of that name that have these labels."""
    return sum(v for (n, theirs), v in found.items() if n == name and set(labels.items()) <= theirs)


def test_a_scrape_says_what_happened(server: Server, client: Client) -> None:
    scraper = Scraper(server)
    client.store(chain("a", 3))
    client.match(chain("a", 5))
    client.match(chain("b", 2))
    client.delete(chain("a", 1, start=2))
    client.match(chain("a", 3))
    found = scraper.scrape()
    assert value(found, "maru_matches_total") == 3
    assert value(found, "maru_pages_asked_total") == 10
    assert value(found, "maru_pages_found_total") == 5
    assert value(found, "maru_pages_missed_total", reason="not_stored") == 4
    assert value(found, "maru_pages_missed_total", reason="removed") == 1
    assert value(found, "maru_pages_reserved_total") == value(found, "maru_pages_committed_total") == 3
    assert value(found, "maru_pages_removed_total") == 1
    assert value(found, "maru_pages") == 2
    assert value(found, "maru_stored_bytes") == 2 * 4000
    assert value(found, "maru_used_bytes") == 2 * 4096
    assert value(found, "maru_slots", state="used", slot_bytes="4096") == 2
    assert value(found, "maru_pool_bytes") == server.geometry.extent_count * server.geometry.extent_bytes
    assert value(found, "maru_sessions", state="live") == 1


def test_refusals_and_evictions_have_reasons(server: Server, client: Client) -> None:
    scraper = Scraper(server)
    other = server.client("other")
    grant = client.reserve(chain("busy", 2))
    other.reserve(chain("busy", 2))
    client.commit(grant)
    client.reserve(chain("busy", 2), nbytes=100)
    for number in range(40):
        client.store(chain(number, 2))
    found = scraper.scrape()
    assert value(found, "maru_pages_refused_total", reason="busy") == 2
    assert value(found, "maru_pages_refused_total", reason="conflict") == 2
    assert value(found, "maru_pages_evicted_total", reason="capacity") > 0
    assert value(found, "maru_pages_missed_total", reason="evicted") == 0
    client.match(chain("busy", 2))
    assert value(scraper.scrape(), "maru_pages_missed_total", reason="evicted") == 2


def test_no_room_and_limits_are_told_apart() -> None:
    server = Server(geometry(extents=2, slots=4), session_reservations=2, session_share=1.0)
    client, other = server.client(), server.client("other")
    for number in range(2):
        client.reserve(chain(number, 1))
    client.reserve(chain("more", 3))
    slots = server.geometry.extent_count * 4
    refused = other.reserve(chain("large", slots - 1)).status.count(p.ReserveStatus.NO_ROOM)
    found = Scraper(server).scrape()
    assert value(found, "maru_pages_refused_total", reason="limit") == 3
    assert value(found, "maru_pages_refused_total", reason="no_room") == refused > 0


def test_quotas_are_a_reason() -> None:
    server = Server(geometry(extents=4, slots=4), quotas={"t": 0.25})
    server.send(p.Hello(p.PROTOCOL_VERSION, 1, bytes(16), "t", "host", 1, 2, "ns", "boot"), Peer("t", False))
    session = next(iter(server.state.books.sessions)).number
    number = server.send(p.OpenNamespace(2, session, namespace().record()), Peer("t", False)).namespace
    reply = server.send(p.Reserve(3, session, number, "kv", 0, 1, p.ROOT, chain("a", 8), 4000), Peer("t", False))
    found = Scraper(server).scrape()
    refused = reply.status.count(p.ReserveStatus.QUOTA)
    assert value(found, "maru_pages_refused_total", reason="quota", tenant="t") == refused > 0
    assert value(found, "maru_tenant_sessions", tenant="t") == 1


def test_late_commits_and_quarantine_are_counted(server: Server, client: Client) -> None:
    grant = client.reserve(chain("a", 3))
    server.wait(11)
    scraper = Scraper(server)
    found = scraper.scrape()
    assert value(found, "maru_quarantined_slots") == 3
    assert value(found, "maru_quarantined_bytes") == 3 * 4096
    assert value(found, "maru_sessions", state="silent") == 1
    assert client.commit(grant) == [1, 1, 1]
    found = scraper.scrape()
    assert value(found, "maru_commits_late_total") == 3
    assert value(found, "maru_quarantined_bytes") == 0


def test_quarantine_of_a_former_server_has_its_bytes(server: Server, client: Client) -> None:
    client.reserve(chain("a", 3))
    client.reserve(chain("b", 1), nbytes=8000)
    server.restart()
    assert value(Scraper(server).scrape(), "maru_quarantined_bytes") == 3 * 4096 + 8192


def test_what_clients_report_stays_when_they_leave(server: Server, client: Client) -> None:
    scraper = Scraper(server)
    server.send(
        p.Heartbeat(1, client.session, client.namespace, {"miss_evicted": 5, "refused_lost": 2, "loaded_bytes": 9})
    )
    client.goodbye()
    found = scraper.scrape()
    assert value(found, "maru_client_pages_missed_total", reason="invalidated") == 5
    assert value(found, "maru_client_pages_refused_total", reason="too_late") == 2
    assert value(found, "maru_client_bytes_loaded_total") == 9


def test_counters_never_fall_whatever_is_cleared_evicted_or_ended(server: Server) -> None:
    rng = np.random.default_rng(3)
    scraper = Scraper(server)
    clients = [server.client(f"c{n}", tag=str(n % 3)) for n in range(6)]
    for step in range(60):
        client = clients[int(rng.integers(len(clients)))]
        client.reserve(chain(step, int(rng.integers(1, 6))))
        client.match(chain(int(rng.integers(60)), 4))
        if step % 7 == 0:
            client.clear(everything=step % 2 == 0)
        if step % 11 == 0:
            client.goodbye()
            client.connect()
        if step % 13 == 0:
            server.wait(12)
            for each in clients:
                each.connect()
        scraper.scrape()


def figures_of(*spaces: SpaceFigures) -> Figures:
    stats: dict[str, Any] = {
        "sessions": 0, "sessions_silent": 0, "extents": 1, "extents_ready": 1, "extents_cut": 0, "extent_bytes": 1,
    }  # fmt: skip
    return Figures(stats, {}, list(spaces), [], {}, 0)


def space(name: str, asked: int) -> SpaceFigures:
    return SpaceFigures(0, "", namespace(tag=name).record(), 1, {"pages_asked": asked}, [])


def test_labels_are_bounded_and_what_moves_out_of_other_stays_counted() -> None:
    shown = [space("a", 5), space("b", 9), space("c", 1)]
    exposition = Exposition(lambda: figures_of(*shown), named=2)
    asked = "maru_pages_asked_total"
    found = samples(exposition.render())
    assert {dict(labels)["namespace"] for name, labels in found if name == asked} == {
        shown[0].label,
        shown[1].label,
        "other",
    }
    assert value(found, asked, namespace="other") == 1
    shown[2] = space("c", 50)
    assert value(samples(exposition.render()), asked, namespace="other") == 50
    exposition._labels._most = 3  # room for one more
    shown[2] = space("c", 60)
    found = samples(exposition.render())
    assert value(found, asked, namespace="other") == 60
    assert value(found, asked, namespace=shown[2].label) == 0
    shown[2] = space("c", 61)
    found = samples(exposition.render())
    assert value(found, asked, namespace=shown[2].label) == 1
    assert value(found, asked) == 5 + 9 + 61


def test_the_busiest_get_labels_first() -> None:
    shown = [space(str(n), n) for n in range(10)]
    found = samples(Exposition(lambda: figures_of(*shown), named=3).render())
    labels = {dict(labels)["namespace"] for name, labels in found if name == "maru_pages_asked_total"}
    assert labels == {shown[9].label, shown[8].label, shown[7].label, "other"}


def test_a_label_s_meaning_is_told(server: Server, client: Client) -> None:
    found = Scraper(server).scrape()
    [(_, labels)] = [key for key in found if key[0] == "maru_namespace_info"]
    assert dict(labels)["model"] == "m"
    [asked] = [dict(labels) for name, labels in found if name == "maru_pages_asked_total"]
    assert asked["namespace"] == dict(labels)["namespace"]


@pytest.mark.parametrize("record", [b"", b"[1]", b"\xff", b'{"model":3,"page_tokens":"x"}'])
def test_a_record_that_cannot_be_read_is_shown_all_the_same(record: bytes) -> None:
    odd = SpaceFigures(0, "", record, 1, {}, [])
    assert value(samples(Exposition(lambda: figures_of(odd)).render()), "maru_namespace_info") == 1


def test_every_metric_is_documented(server: Server, client: Client) -> None:
    text = DOCUMENT.read_text()
    meter = Meter()
    meter.note(p.Match, p.Error(1, 1, "invalid", ""), 1, 1, time.monotonic())
    server.state.tell(Events())

    def figures() -> Figures:
        requests, errors = meter.copy()
        return dataclasses.replace(server.state.figures(), requests=requests, errors=errors)

    families = list(text_string_to_metric_families(Exposition(figures).render().decode()))
    names = {
        {"counter": f"{family.name}_total"}.get(family.type, family.name)
        for family in families
        if family.name.startswith("maru")
    }
    assert len(names) > 30
    missing = sorted(name for name in names if f"`{name}`" not in text)
    assert not missing, f"docs/metrics.md does not say what these mean: {missing}"


# ------------------------------------------------------------ requests


def test_requests_are_timed_by_type_and_errors_by_code(tmp_path: Path) -> None:
    running = Running(tmp_path)
    with contextlib.closing(running.session()) as session:
        number = session.open_namespace(namespace().record())
        keys = store(session, number, 4)
        for _ in range(3):
            session.match(number, ["kv"], 0, keys)
        with raw(running.endpoint) as socket:
            socket.send(p.encode(p.Match(1, 99, 1, ["kv"], 0, keys)))
            socket.recv()
            socket.send(b"\xc1 not msgpack")
            socket.recv()
        await_condition(lambda: "Unreadable" in running.service.figures().requests, "the last request is counted")
        figures = running.service.figures()
    running.stop()
    row = figures.requests["Match"]
    assert sum(row[:BUCKETS]) == 4
    assert 0 < row[SUM_NS] < 4e9
    assert row[RECEIVED] > 4 * len(keys)
    assert row[SENT] > 3 * 4 * (4 + 4 * 8)
    assert figures.errors["Match", "unknown-session"] == 1
    assert figures.errors["Unreadable", "invalid"] == 1
    found = samples(Exposition(lambda: figures).render())
    assert value(found, "maru_request_seconds_count", request="Match") == 4
    assert value(found, "maru_request_seconds_bucket", request="Match", le="+Inf") == 4
    assert value(found, "maru_errors_total", request="Match", code="unknown-session") == 1
    steps = sorted(
        (float(dict(labels)["le"]), v)
        for (name, labels), v in found.items()
        if name == "maru_request_seconds_bucket" and ("request", "Match") in labels
    )
    assert [count for _, count in steps] == sorted(count for _, count in steps)


def test_one_way_messages_are_counted_too(tmp_path: Path) -> None:
    running = Running(tmp_path)
    session = running.session()
    number = session.open_namespace(namespace().record())
    session.touch(number, store(session, number, 2))
    await_condition(lambda: "Touch" in running.service.figures().requests, "the touch")
    assert running.service.figures().requests["Touch"][SENT] == 0
    session.close()
    await_condition(lambda: "Goodbye" in running.service.figures().requests, "the goodbye")
    running.stop()


def test_a_request_is_counted_in_the_bucket_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter()
    for ns in (1, 1023, 1024, 10**9, 10**12):
        monkeypatch.setattr(metrics, "monotonic", lambda ns=ns: ns / 1e9)
        meter.note(p.Match, None, 0, 0, 0.0)
    row = meter.copy()[0]["Match"]
    assert {bucket for bucket, count in enumerate(row[:BUCKETS]) if count} == {1, 10, 11, 30, BUCKETS - 1}
    assert row[SUM_NS] == 1 + 1023 + 1024 + 10**9 + 10**12


def test_quantiles_lie_in_their_bucket() -> None:
    counts = [0] * BUCKETS
    assert quantile(counts, 0.5) == 0
    counts[10], counts[20] = 99, 1
    assert 512e-9 <= quantile(counts, 0.5) <= 1024e-9
    assert 512e-9 <= quantile(counts, 0.99) <= 1024e-9
    assert (1 << 19) / 1e9 <= quantile(counts, 0.999) <= (1 << 20) / 1e9
