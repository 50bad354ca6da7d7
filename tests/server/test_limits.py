"""What one session may ask for: rate, reservations, share of the pool; and how many sessions a tenant may have."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path
from typing import Any

import pytest

from maru_core import protocol as p
from maru_core.errors import ConfigError, ServerError
from maru_core.protocol import ReserveStatus
from maru_core.session import Session
from maru_core.store import Store, StoreConfig
from maru_server.config import StateConfig
from maru_server.limits import Limits, session_limits
from maru_server.sessions import LOCAL, Peer
from tests.server.live import Running, store
from tests.server.maru_harness import Client, Server, chain, geometry, record
from tests.server.test_cli import assert_one_line, run
from tests.support import Pages, ServerProcess, hashes, namespace

RESERVED, NO_ROOM = ReserveStatus.RESERVED, ReserveStatus.NO_ROOM


def code(reply: p.Reply | None) -> str | None:
    return reply.code if isinstance(reply, p.Error) else None


# ---------------------------------------------------------------- rate


def asked(client: Client, count: int, pages: int = 1) -> list[str | None]:
    return [code(client.match_reply(chain("a", pages))) for _ in range(count)]


def test_a_session_is_refused_above_its_rate_and_served_again_after_a_while() -> None:
    server = Server(session_rate=10)
    client = server.client()  # two messages: Hello is not the session's, opening the namespace is
    assert asked(client, 12) == [None] * 9 + ["rate"] * 3
    assert server.stats["over_rate"] == 3
    server.now += 0.35
    assert asked(client, 5) == [None] * 4 + ["rate"]
    # Refusals cost nothing, and what is saved up is a second's worth, however long it was quiet.
    server.wait(30)
    assert asked(client, 12) == [None] * 10 + ["rate"] * 2


def test_pages_count_as_well_as_messages() -> None:
    server = Server(geometry(8, 64), session_page_rate=100)
    client = server.client()
    assert asked(client, 3, pages=60) == [None, None, "rate"]
    server.now += 0.1  # 20 below nothing, and 10 came
    assert asked(client, 1) == ["rate"]
    server.now += 0.15
    assert asked(client, 1) == [None]
    assert code(client.reserve_reply(chain("b", 60))) is None
    assert code(client.reserve_reply(chain("c", 1))) == "rate"


def test_what_lies_below_a_deleted_page_counts_too() -> None:
    server = Server(geometry(8, 64), session_page_rate=100)
    client = server.client()
    client.store(chain("a", 60))
    server.now += 2
    assert client.delete(chain("a", 1)) == 60
    assert asked(client, 2, pages=50) == [None, "rate"]


def test_what_looks_through_everything_is_dear() -> None:
    server = Server(session_page_rate=1000)
    client = server.client()

    def look() -> str | None:
        return code(server.state.handle(p.Inspect(1, client.session, "sessions"), server.now))

    assert [look() for _ in range(6)] == [None] * 4 + ["rate"] * 2
    server.now += 0.1
    assert [look() for _ in range(2)] == [None, "rate"]
    assert asked(client, 1) == ["rate"]


def test_one_session_at_its_limit_takes_nothing_from_another() -> None:
    server = Server(session_rate=10)
    wild, calm = server.client("wild"), server.client("calm")
    assert "rate" in asked(wild, 30)
    assert asked(calm, 9) == [None] * 9


def test_a_refusal_by_rate_changed_nothing_and_says_what_to_do() -> None:
    server = Server(session_rate=10)
    client = server.client()
    asked(client, 9)
    reply = client.reserve_reply(chain("a", 2))
    assert isinstance(reply, p.Error)
    assert "10 messages" in reply.message
    assert "--session-rate" in reply.message
    assert server.stats["slots_reserved"] == 0


def test_what_gives_back_or_ends_is_served_on_credit_and_signs_of_life_always() -> None:
    server = Server(session_rate=10)
    client = server.client()
    grant = client.reserve(chain("a", 4))
    asked(client, 8)
    assert asked(client, 1) == ["rate"]
    assert client.commit(grant, [0, 1]) == [0, 0]
    assert client.release(grant, [2, 3]) == 2
    # Credit is a second's worth, so that it is no way around the limit.
    answers = [code(server.send(p.Unhold(1, client.session, client.namespace, b"x"))) for _ in range(12)]
    assert answers == [None] * 8 + ["rate"] * 4
    for _ in range(5):
        assert isinstance(client.heartbeat(), p.Done)
        client.touch(chain("a", 2))
    client.goodbye()
    assert server.stats["sessions"] == 0


def test_time_in_which_the_server_was_stopped_does_not_count() -> None:
    server = Server(session_rate=10)
    client = server.client()
    asked(client, 9)
    server.now += 1e6
    assert asked(client, 1) == ["rate"]
    server.now += 0.25
    assert asked(client, 3) == [None] * 3


def test_a_store_at_its_limit_misses_and_stays_connected(tmp_path: Path) -> None:
    """No retries, no breaker, no error into the engine."""
    running = Running(tmp_path, config=StateConfig(session_rate=5))
    config = StoreConfig(server=running.endpoint, timeout_ms=60_000)
    with contextlib.closing(Store.open(config, namespace(), name="test")) as wild:
        pages = Pages(4, (512,), seed=1)
        assert wild.put("kv", 0, 1, p.ROOT, hashes(4), pages.fragments).all()
        answers = [wild.prefix(["kv"], 0, hashes(4, seed)) for seed in range(1, 51)]
        assert answers == [0] * 50
        before = running.state.stats()["over_rate"]
        assert before > 0
        stored = wild.put("kv", 0, 1, p.ROOT, hashes(4, seed=99), pages.fragments)
        assert not stored.any()
        assert wild.metrics.refused_error == 4
        assert wild.metrics.refused_unavailable == 0
        assert running.state.stats()["over_rate"] == before + 1, "the put was tried once"
        assert wild._session.connected
        assert wild._session.epoch == 1
        with contextlib.closing(running.session()) as other:
            store(other, other.open_namespace(namespace().record()), 3, seed=7)
    running.stop()


def test_the_default_rates_are_above_what_a_client_can_ask() -> None:
    """The longest batches, as fast as one core can serve them (about 10 000 matches of 128 pages a second)."""
    limits = Limits()
    assert limits.messages_per_s >= 2 * 10_000
    assert limits.pages_per_s >= 2 * 10_000 * 128


# ---------------------------------------------------------------- reservations


def test_a_session_may_not_have_more_batches_under_way_than_it_may() -> None:
    server = Server(session_reservations=2)
    one, two = server.client("one"), server.client("two")
    grants = [one.reserve(chain(name, 2)) for name in "abc"]
    assert [set(grant.status) for grant in grants] == [{RESERVED}, {RESERVED}, {NO_ROOM}]
    assert server.stats["over_share"] == 2
    assert set(two.reserve(chain("c", 2)).status) == {RESERVED}
    one.commit(grants[0])
    assert set(one.reserve(chain("d", 2)).status) == {RESERVED}


def test_a_session_gets_a_share_of_the_pool_to_write_into_and_no_more() -> None:
    server = Server(geometry(8, 8), session_share=0.25)  # 64 slots of 4096 bytes
    one, two = server.client("one"), server.client("two")
    grant = one.reserve(chain("a", 20))
    assert grant.status == [RESERVED] * 16 + [NO_ROOM] * 4
    assert one.reserve(chain("b", 1)).status == [NO_ROOM]
    assert server.stats["over_share"] == 5
    assert set(two.reserve(chain("b", 16)).status) == {RESERVED}
    # What is committed is the pool's and not the session's any more.
    one.commit(grant, slice(0, 10))
    assert one.reserve(chain("c", 12)).status == [RESERVED] * 10 + [NO_ROOM] * 2


def test_what_a_session_has_in_quarantine_counts() -> None:
    """Or it could take the whole pool, piece by piece, by falling silent."""
    server = Server(geometry(8, 8), session_share=0.25, quarantine_s=20)
    client = server.client()
    client.reserve(chain("a", 16))
    server.wait(12)
    assert server.stats["slots_quarantined"] == 16
    assert client.reserve(chain("b", 1)).status == [NO_ROOM]
    server.wait(25)
    client.connect()
    assert client.reserve(chain("b", 1)).status == [RESERVED]


def test_an_object_that_is_larger_than_the_share_can_be_stored_alone() -> None:
    server = Server(geometry(2, 1), session_share=0.1)
    client = server.client()
    assert client.reserve(chain("a", 2)).status == [RESERVED, NO_ROOM]


def test_a_put_of_more_than_the_share_is_stored_part_by_part(tmp_path: Path) -> None:
    running = Running(tmp_path, config=StateConfig(session_share=0.01))
    config = StoreConfig(server=running.endpoint, timeout_ms=60_000)
    share = 0.01 * running.memory.geometry.extent_count * running.memory.geometry.extent_bytes
    count = int(share // 4096) + 10
    pages = Pages(count, (4096,), seed=1)
    with contextlib.closing(Store.open(config, namespace(), name="test")) as client:
        assert client.put("kv", 0, 1, p.ROOT, hashes(count), pages.fragments).all()
    assert int(running.state.stats()["over_share"]) > 0
    running.stop()


# ---------------------------------------------------------------- sessions


def hello(server: Server, peer: Peer) -> p.Reply | None:
    message = p.Hello(p.PROTOCOL_VERSION, 1, secrets.token_bytes(16), "c", "host", 1, 2, "ns", "boot")
    reply = server.state.handle(message, server.now, peer)
    server.state.check()
    return reply


def test_a_tenant_gets_a_part_of_the_sessions() -> None:
    server = Server(max_sessions=8, max_tenant_sessions=3)
    red, blue = Peer("red", False, "a"), Peer("blue", False, "b")
    assert [code(hello(server, red)) for _ in range(5)] == [None] * 3 + ["limit"] * 2
    # Also with another of its keys; and others have theirs.
    assert code(hello(server, Peer("red", False, "another"))) == "limit"
    assert [code(hello(server, blue)) for _ in range(4)] == [None] * 3 + ["limit"]
    # One that fell silent and holds nothing makes room, for its own tenant.
    server.wait(11)
    assert code(hello(server, red)) is None
    assert server.stats["sessions"] == 6


def test_a_tenant_at_its_limit_pushes_out_nobody_else() -> None:
    server = Server(max_sessions=8, max_tenant_sessions=2)
    red, blue = Peer("red", False, "a"), Peer("blue", False, "b")
    assert code(hello(server, blue)) is None
    server.wait(11)  # blue's client is silent, and red's are not
    assert [code(hello(server, red)) for _ in range(3)] == [None, None, "limit"]
    assert server.stats["sessions"] == 3


def test_half_of_the_sessions_unless_told_otherwise_and_all_where_there_are_no_keys() -> None:
    server = Server(max_sessions=8)
    assert [code(hello(server, Peer("red", False, "a"))) for _ in range(5)] == [None] * 4 + ["limit"]
    server = Server(max_sessions=8)
    assert [code(hello(server, LOCAL)) for _ in range(9)] == [None] * 8 + ["limit"]


def test_a_repeated_hello_is_no_new_session() -> None:
    server = Server(max_sessions=8, max_tenant_sessions=1)
    message = p.Hello(p.PROTOCOL_VERSION, 1, b"x" * 16, "c", "host", 1, 2, "ns", "boot")
    peer = Peer("red", False, "a")
    first, second = (server.state.handle(message, server.now, peer) for _ in range(2))
    assert isinstance(first, p.Welcome)
    assert isinstance(second, p.Welcome)
    assert first.session == second.session


# ---------------------------------------------------------------- tables of the pool


def ask(server: Server, peer: Peer, *messages: Any) -> list[p.Reply | None]:
    """Send messages that are made from a session's number, of a new session of ``peer``."""
    welcome = hello(server, peer)
    assert isinstance(welcome, p.Welcome)
    replies = [server.state.handle(make(welcome.session), server.now, peer) for make in messages]
    server.state.check()
    return replies


def opening(tag: str) -> Any:
    return lambda session: p.OpenNamespace(1, session, record(tag))


def test_no_tenant_fills_the_table_of_namespaces() -> None:
    server = Server(geometry(namespace_capacity=6))
    red, blue = Peer("red", False, "a"), Peer("blue", False, "b")
    answers = ask(server, red, *map(opening, "abcda"))
    assert [code(answer) for answer in answers] == [None, None, None, "limit", None]
    # After a restart too: they are in the pool.
    server.restart()
    assert [code(answer) for answer in ask(server, red, *map(opening, "ad"))] == [None, "limit"]
    assert [code(answer) for answer in ask(server, blue, *map(opening, "ab"))] == [None] * 2
    # Who has no tenant to wrong is not limited: an operator, and everybody where there are no keys.
    for peer in (Peer("", True, "op"), LOCAL):
        server = Server(geometry(namespace_capacity=6))
        assert [code(answer) for answer in ask(server, peer, *map(opening, "abcdef"))] == [None] * 6


def test_no_tenant_fills_the_table_of_components() -> None:
    server = Server(geometry(component_capacity=6))

    def storing(name: str) -> Any:
        return lambda session: p.Reserve(1, session, 0, name, 0, 1, p.ROOT, chain(name, 1), 4000)

    red = Peer("red", False, "a")
    answers = ask(server, red, opening("a"), *map(storing, ["kv", "swa", "mamba", "other", "kv"]))
    assert [code(answer) for answer in answers] == [None] * 4 + ["limit", None]
    assert code(ask(server, Peer("", True, "op"), storing("other"))[0]) is None


# ---------------------------------------------------------------- options


def client(server: ServerProcess) -> contextlib.closing[Session]:
    return contextlib.closing(Session(server.endpoint, name="test", timeout_s=60))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_sessions", 0), ("max_tenant_sessions", 0), ("max_tenant_sessions", 5000), ("session_rate", 0.0),
        ("session_rate", float("nan")), ("session_page_rate", -1.0), ("session_page_rate", float("inf")),
        ("session_reservations", 0), ("session_reservations", 100_000), ("session_share", 0.0), ("session_share", 1.1),
        ("session_share", float("nan")),
    ],
)  # fmt: skip
def test_limits_that_cannot_be_are_named(name: str, value: Any) -> None:
    good: dict[str, Any] = {
        "max_sessions": 4096, "max_tenant_sessions": None, "session_rate": 1.0, "session_page_rate": 1.0,
        "session_reservations": 1, "session_share": 1.0,
    }  # fmt: skip
    assert session_limits(**good) == good
    with pytest.raises(ConfigError, match=rf"--{name.replace('_', '-')} is {value:g}: give"):
        session_limits(**{**good, name: value})


def test_limits_reach_the_server_from_its_command_line(tmp_path: Path) -> None:
    assert_one_line(run("--pool", "shm://x", "--bind", "ipc:///tmp/x", "--session-share", "0"), "--session-share is 0")
    options = ("--max-sessions", "2", "--session-rate", "5", "--session-reservations", "1")
    server = ServerProcess(tmp_path, *options).start()
    try:
        with client(server) as one, client(server) as two:
            number = one.open_namespace(namespace().record())
            assert set(one.reserve(number, "kv", 0, 1, p.ROOT, hashes(2), 1000).status) == {RESERVED}
            assert set(one.reserve(number, "kv", 0, 1, p.ROOT, hashes(2, 5), 1000).status) == {NO_ROOM}
            two.connect()
            with client(server) as three, pytest.raises(ServerError, match="--max-sessions"):
                three.connect()
            with pytest.raises(ServerError, match="5 messages") as refused:
                _ = [one.match(number, ["kv"], 0, hashes(1)) for _ in range(1000)]
            assert refused.value.code == p.ErrorCode.RATE
            assert one.connected
        assert server.stop() == 0
    finally:
        server.remove()
