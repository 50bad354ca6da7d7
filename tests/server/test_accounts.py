"""With keys, limits are of the key: neither many sessions nor new ones are a way around them."""

from __future__ import annotations

import secrets

from maru_harness import Server, chain, geometry

from maru_core import protocol as p
from maru_core.protocol import ReserveStatus
from maru_server.sessions import LOCAL, Peer

RESERVED, NO_ROOM = ReserveStatus.RESERVED, ReserveStatus.NO_ROOM
RED, BLUE = Peer("red", False, "a"), Peer("blue", False, "b")


def code(reply: p.Reply | None) -> str | None:
    return reply.code if isinstance(reply, p.Error) else None


def hello(server: Server, peer: Peer) -> p.Reply | None:
    return server.send(p.Hello(1, 1, secrets.token_bytes(16), "c", "host", 1, 2, "ns", "boot"), peer)


def came_and_went(server: Server, peer: Peer, times: int) -> int:
    """How many lookups were answered of a client that says Hello, asks, and says Goodbye, again and again."""
    answered = 0
    for _ in range(times):
        welcome = hello(server, peer)
        if isinstance(welcome, p.Welcome):
            reply = server.send(p.Inspect(1, welcome.session, "holds"), peer)
            answered += isinstance(reply, p.Report)
            server.send(p.Goodbye(welcome.session), peer)
    return answered


def test_coming_again_brings_no_new_rate() -> None:
    server = Server(session_rate=10)
    assert came_and_went(server, RED, 20) <= 10
    assert server.stats["over_rate"] > 0
    assert came_and_went(server, BLUE, 1) == 1, "another key has its own"
    # Where there are no keys nobody can tell who comes again.
    assert came_and_went(server, LOCAL, 20) == 20


def test_sessions_of_one_key_have_one_rate() -> None:
    server = Server(geometry(namespace_capacity=8), session_rate=20)
    one, two = (server.client(name, peer=RED) for name in ("one", "two"))  # four messages
    answers = [code(client.match_reply(chain("a", 1))) for _ in range(20) for client in (one, two)]
    assert answers == [None] * 16 + ["rate"] * 24
    blue = server.client("blue", peer=BLUE)
    assert code(blue.match_reply(chain("a", 1))) is None
    # Another process of that key still comes, on credit.
    assert isinstance(hello(server, RED), p.Welcome)


def test_hello_and_stats_count() -> None:
    server = Server(session_rate=10)
    assert [code(server.send(p.Stats(1), RED)) for _ in range(12)] == [None] * 10 + ["rate"] * 2
    assert [code(hello(server, RED)) for _ in range(12)] == [None] * 10 + ["rate"] * 2
    assert server.stats["sessions"] == 10
    assert server.stats["over_rate"] == 4
    server.now += 1.25
    assert code(server.send(p.Stats(1), RED)) is None
    assert [code(server.send(p.Stats(1), LOCAL)) for _ in range(12)] == [None] * 12


def test_sessions_of_one_key_have_one_share_of_the_pool() -> None:
    server = Server(geometry(8, 8), session_share=0.25)  # 64 slots
    one, two = (server.client(name, peer=RED) for name in ("one", "two"))
    blue = server.client("blue", peer=BLUE)
    grant = one.reserve(chain("a", 10))
    assert two.reserve(chain("b", 10)).status == [RESERVED] * 6 + [NO_ROOM] * 4
    assert one.reserve(chain("c", 1)).status == [NO_ROOM]
    assert set(blue.reserve(chain("b", 16)).status) == {RESERVED}
    one.commit(grant)
    assert two.reserve(chain("c", 12)).status == [RESERVED] * 10 + [NO_ROOM] * 2
    two.goodbye()
    assert one.reserve(chain("d", 20)).status == [RESERVED] * 16 + [NO_ROOM] * 4


def test_sessions_of_one_key_have_so_many_batches_together() -> None:
    server = Server(session_reservations=2)
    one, two = (server.client(name, peer=RED) for name in ("one", "two"))
    grants = [client.reserve(chain(name, 1)) for client, name in ((one, "a"), (two, "b"), (one, "c"), (two, "d"))]
    assert [grant.status for grant in grants] == [[RESERVED]] * 2 + [[NO_ROOM]] * 2
    two.release(grants[1])
    assert one.reserve(chain("c", 1)).status == [RESERVED]


def test_a_key_that_is_taken_off_leaves_nothing_on_its_account() -> None:
    server = Server(geometry(8, 8), session_share=0.25)
    client = server.client(peer=RED)

    def reserve() -> None:
        assert client.reserve(chain("a", 20)).status == [RESERVED] * 16 + [NO_ROOM] * 4

    reserve()
    assert server.state.keep_peers({BLUE}, server.now) == 1
    server.state.check()
    client.connect()
    reserve()
