"""The shorter way of a store in slots granted ahead: the same pool, books and answers as the ordinary way leaves, or nothing at all."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, ClassVar
from unittest import mock

import msgspec
import numpy as np
import pytest
import test_granted_ahead as granted_ahead
from maru_harness import Client, Server, chain, geometry
from test_granted_ahead import Ahead, ask, names, store
from test_new_chains import columns

from maru_core.protocol import (
    ROOT,
    SPARES_MAX,
    Reply,
    Request,
    Store,
    Stored,
    StoreStatus,
    decode_reply,
    decode_request,
    encode,
)
from maru_server import plain_store
from maru_server.sessions import LOCAL, Peer
from tests.support import damaged

pytestmark = pytest.mark.skipif(
    plain_store._plain_store is None, reason="built without a compiler: there is the ordinary way only"
)


class Twin(Server):
    """Has another server do all the same in the ordinary way, and compares everything after each message."""

    went: ClassVar[Counter[type]] = Counter()

    def __init__(self, *args: Any, **named: Any) -> None:
        self.ordinary = Server(*args, **named, shorter=False)
        super().__init__(*args, **named)

    def send(self, message: Request, peer: Peer = LOCAL) -> Reply | None:
        reply = super().send(message, peer)
        ordinary = self.ordinary
        ordinary.now = self.now
        assert ordinary.send(message, peer) == reply
        assert self.meta.tobytes() == ordinary.meta.tobytes()
        assert self.stats == ordinary.stats
        books, theirs = self.state.books, ordinary.state.books
        for number in books.trees:
            assert columns(books.trees[number]) == columns(theirs.trees[number])
        heard = [[(one.number, one.heard, one.silent) for one in each.sessions] for each in (books, theirs)]
        assert heard[0] == heard[1]
        accounts = [[session.account for session in each.sessions] for each in (books, theirs)]
        for one, other in zip(*accounts, strict=True):
            assert (one.reservations, one.reserved_bytes) == (other.reservations, other.reserved_bytes)
            # What was refunded may be a rounding away.
            assert abs(one.messages_left - other.messages_left) + abs(one.pages_left - other.pages_left) < 1e-6
        Twin.went += self.went_shorter
        self.went_shorter.clear()
        return reply

    def wait(self, seconds: float, step: float = 1.0, *, alive: tuple[Client, ...] = ()) -> None:
        assert not alive
        self.ordinary.now = self.now
        self.ordinary.wait(seconds, step)
        super().wait(seconds, step)

    def restart(self, meta: Any = None) -> None:
        assert meta is None
        self.ordinary.now = self.now
        self.ordinary.restart()
        super().restart()


@pytest.fixture
def twins() -> Any:
    Twin.went = Counter()
    with mock.patch.object(granted_ahead, "Server", Twin):
        yield Twin.went
    assert Twin.went[Store], "no store went the shorter way"


@pytest.mark.parametrize("seed", range(8))
def test_both_ways_leave_the_same_whatever_clients_send(seed: int, twins: Any) -> None:
    granted_ahead.test_nothing_that_clients_send_breaks_the_books(seed)


@pytest.mark.parametrize("seed", range(4))
def test_both_ways_leave_the_same_whatever_happens(seed: int, twins: Any) -> None:
    rnd = random.Random(seed)
    steps: list[tuple[Any, ...]] = []
    for _ in range(80):
        where = rnd.randint(0, 1), rnd.choice(["a", "b", "any", "any"]), rnd.choice([0, 0, 2]), rnd.randint(1, 3)
        what = rnd.random()
        if what < 0.93:
            steps.append(("store", *where, rnd.choice([0, 0, 1])) if what > 0.3 else ("ask", *where, rnd.randint(2, 8)))
        else:
            steps.append(
                rnd.choice([("delete", "a", 1), ("evict", 2), ("wait", 3), ("wait", 30), ("clear",), ("restart",)])
            )
    run: Any = granted_ahead.test_whatever_happens_a_page_has_the_slot_in_which_it_was_written
    run.hypothesis.inner_test(steps)
    assert twins[Store] >= 8


def test_spares_come_with_the_shorter_answer() -> None:
    server = Twin(geometry(32, 64))
    client = server.client()
    client.store(chain("first", 1))
    _, ahead = ask(client, chain("a", 3), names(0, 8))
    for number in range(4):
        server.now += 0.5  # only the store says that the client is there
        reply = store(client, chain(number, 2), ahead, 2 * number, spares=names(number + 1, number))
        assert reply.status == StoreStatus.STORED
        assert len(Ahead(reply)) == number
        if number:
            assert store(client, chain(f"{number}, later", 1), Ahead(reply)).status == StoreStatus.STORED
    assert server.went_shorter[Store] == 0  # all of them were counted
    assert Twin.went[Store] >= 7


def plain(client: Client, ahead: Ahead, **changed: Any) -> Store:
    message = Store(
        4,
        client.session,
        client.namespace,
        "kv",
        0,
        1,
        ROOT,
        chain("b", 2),
        4000,
        ahead.slots[:8],
        ahead.generations[:16],
    )
    return msgspec.structs.replace(message, **changed)


def snapshot(server: Server) -> Any:
    server.state.finish()
    return (
        server.meta.tobytes(),
        server.stats,
        [columns(tree) for tree in server.state.books.trees.values()],
        [
            (s.number, s.heard, s.silent, s.account.messages_left, s.account.pages_left)
            for s in server.state.books.sessions
        ],
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"session": 99},
        {"namespace": 3},
        {"component": "never"},
        {"component": "x" * 32},
        {"component": "k\u00e4"},
        {"shard": 1},
        {"shard": -1},
        {"world": 2},
        {"world": 1 << 40},
        {"nbytes": 3999},
        {"nbytes": 0},
        {"parent": chain("nobody", 1)},
        {"parent": b"x" * 31},
        {"parent": chain("b", 1)},
        {"hashes": chain("b", 3)},
        {"hashes": chain("b", 1) * 2},
        {"hashes": chain("first", 1) + chain("b", 1)},
        {"hashes": ROOT + chain("b", 1)},
        {"hashes": b""},
        {
            "hashes": chain("b", SPARES_MAX + 1),
            "slots": bytes(4 * (SPARES_MAX + 1)),
            "generations": bytes(8 * (SPARES_MAX + 1)),
        },
        {"slots": bytes(8)},
        {"slots": b"\xff" * 8},
        {"slots": b""},
        {"generations": bytes(16)},
        {"generations": b""},
        {"checksums": bytes(16)},
        {"spares": b"x" * 33},
        {"spares": bytes(32 * (SPARES_MAX + 1))},
        {"spares": chain("b", 1)},
        {"spares": chain("first", 1)},
    ],
    ids=str,
)
def test_what_is_not_plain_is_left_alone(changed: dict[str, Any]) -> None:
    server = Server(geometry(32, 64))
    client = server.client()
    client.store(chain("first", 1))
    _, ahead = ask(client, chain("a", 3), names(0, 4))
    before = snapshot(server)
    message = plain(client, ahead, **changed)
    assert server.state.answer(encode(message), server.now) is None
    after = snapshot(server)
    assert after == before
    assert server.state.answer(encode(plain(client, ahead)), server.now) is not None
    server.state.check()


def test_a_store_of_somebody_else_is_left_alone() -> None:
    server = Server(geometry(32, 64))
    mine, theirs = Peer("mine", False, "a"), Peer("theirs", False, "b")
    client, stranger = server.client(peer=mine), server.client("stranger", peer=theirs)
    other = server.client("mine, too", peer=mine)
    client.store(chain("first", 1))
    _, ahead = ask(client, chain("a", 3), names(0, 4))
    for message, peer in (
        (plain(client, ahead), theirs),
        (plain(client, ahead), LOCAL),
        (plain(client, ahead, session=stranger.session), theirs),
        (plain(client, ahead, session=other.session), mine),
    ):
        before = snapshot(server)
        assert server.state.answer(encode(message), server.now, peer) is None
        assert snapshot(server) == before
    assert server.state.answer(encode(plain(client, ahead)), server.now, mine) is not None


def test_slots_of_two_grants_are_left_alone() -> None:
    server = Server(geometry(32, 64))
    client = server.client()
    client.store(chain("first", 1))
    _, one = ask(client, chain("a", 3), names(0, 4))
    _, two = ask(client, chain("c", 3), names(1, 4))
    mixed = plain(
        client, one, slots=one.slots[12:] + two.slots[:4], generations=one.generations[24:] + two.generations[:8]
    )
    before = snapshot(server)
    assert server.state.answer(encode(mixed), server.now) is None
    assert snapshot(server) == before
    # Of one grant, and not one after the other.
    gap = plain(
        client, one, slots=one.slots[:4] + one.slots[8:12], generations=one.generations[:8] + one.generations[16:24]
    )
    assert server.state.answer(encode(gap), server.now) is None
    assert snapshot(server) == before


def test_who_stores_too_fast_is_left_to_be_refused() -> None:
    server = Server(geometry(32, 64), session_rate=1000.0, session_page_rate=20.0)
    client = server.client()
    client.store(chain("first", 1))
    server.now += 2.0
    _, ahead = ask(client, chain("a", 3), names(0, 8))
    server.now += 2.0
    # A message is served while something is left: 20 pages, of which these take 2 + 16.
    first = plain(client, ahead, spares=names(1, 16))
    assert server.state.answer(encode(first), server.now) is not None
    second = plain(client, ahead, hashes=chain("c", 2), slots=ahead.slots[8:16], generations=ahead.generations[16:32])
    assert server.state.answer(encode(second), server.now) is not None
    third = plain(client, ahead, hashes=chain("d", 2), slots=ahead.slots[16:24], generations=ahead.generations[32:48])
    before = snapshot(server)
    assert server.state.answer(encode(third), server.now) is None
    assert snapshot(server) == before
    assert type(server.state.handle(third, server.now)).__name__ == "Error"


def test_damaged_bytes_are_left_alone_or_mean_what_they_mean_unpacked() -> None:
    chance, stored = random.Random(1), 0
    for _ in range(150):
        server = Server(geometry(32, 64), checked=False)
        twin = Server(geometry(32, 64), checked=False, shorter=False)
        client, same = server.client(), twin.client()
        for each in (client, same):
            each.store(chain("first", 1))
        _, ahead = ask(client, chain("a", 3), names(0, 4))
        ask(same, chain("a", 3), names(0, 4))
        good = encode(plain(client, ahead, spares=names(1, 1)))
        for _ in range(60):
            data = damaged(chance, good)
            packed = server.state.answer(data, server.now)
            server.state.finish()
            if packed is None:
                continue
            stored += 1
            reply = twin.state.handle(decode_request(data), twin.now)
            twin.state.finish()
            assert isinstance(reply, Stored)
            assert decode_reply(packed) == reply
            assert packed == encode(reply)
            assert server.meta.tobytes() == twin.meta.tobytes()
            server.state.check()
            break
    assert stored > 100


def test_what_the_books_could_not_mean_is_an_error_and_changes_nothing() -> None:
    server = Server(geometry(32, 64), checked=False)
    client = server.client()
    client.store(chain("first", 1))
    _, ahead = ask(client, chain("a", 3), names(0, 4))
    first = int(np.frombuffer(ahead.slots, "<u4")[0])
    reservation = server.state.books.reservations.of_slot(first)
    assert reservation is not None
    assert reservation.page is not None
    rows = reservation.page.rows
    server.state.finish()
    before = server.meta.tobytes()
    reservation.page.rows = rows[:-1]
    with pytest.raises(ValueError, match="do not go together"):
        server.state.answer(encode(plain(client, ahead)), server.now)
    for wrong in (-5, 1 << 40):
        reservation.page.rows = np.full_like(rows, wrong)
        assert server.state.answer(encode(plain(client, ahead)), server.now) is None
    assert server.meta.tobytes() == before
