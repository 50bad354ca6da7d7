"""The shorter way of a match does and answers what the ordinary one does, to the byte, or leaves the match to it untouched."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from maru_harness import Client, Server, chain, geometry

from maru_core.protocol import (
    MAX_BATCH,
    ROOT,
    Hold,
    Inspect,
    Located,
    Match,
    Rule,
    Stats,
    Want,
    decode_reply,
    decode_request,
    encode,
)
from maru_server import plain_match
from maru_server.requests import MAX_WORLD
from maru_server.sessions import LOCAL, Peer
from tests.support import damaged

pytestmark = pytest.mark.skipif(
    plain_match._native is None, reason="built without a compiler: there is the ordinary way only"
)

PAGES = 10


def noted(server: Server) -> Any:
    """All that a match changes, besides its answer."""
    state = server.state
    state.finish()
    books = state.books
    return copy.deepcopy(
        (
            {name: count for name, count in books.pages.counts.items() if count},
            {
                number: {name: count for name, count in tree.counts.items() if count}
                for number, tree in books.trees.items()
            },
            [
                (s.number, s.heard, s.silent, s.account.messages_left, s.account.pages_left, s.account.refilled)
                for s in books.sessions
            ],
            books.clock.last,
        )
    )


def both(server: Server, data: bytes, peer: Peer = LOCAL) -> tuple[bytes | None, bytes]:
    """What the shorter way answers, and the ordinary one; after each the same is noted."""
    for session in server.state.books.sessions:
        session.heard, session.silent = -math.inf, True
    started = noted(server)
    before = copy.deepcopy([session.account for session in server.state.books.sessions])
    counts = copy.deepcopy([server.state.books.pages.counts, *(t.counts for t in server.state.books.trees.values())])
    shorter = server.state.answer(data, server.now, peer)
    after_shorter = noted(server)
    if shorter is None:
        assert after_shorter[:2] == started[:2]
        assert after_shorter[2] == started[2]
    else:
        # Back to where it began, for the other one.
        for session, account in zip(server.state.books.sessions, before, strict=True):
            session.account.messages_left = account.messages_left
            session.account.pages_left, session.account.refilled = account.pages_left, account.refilled
            session.heard, session.silent = -math.inf, True
        for now, then in zip(
            [server.state.books.pages.counts, *(t.counts for t in server.state.books.trees.values())],
            counts,
            strict=True,
        ):
            now.clear()
            now.update(then)
    reply = server.state.handle(decode_request(data), server.now, peer)
    assert reply is not None
    if shorter is not None:
        mine = decode_request(data).session  # type: ignore[union-attr]

        def of_mine(found: Any) -> Any:
            return found[0], found[1], [row for row in found[2] if row[0] == mine], found[3]

        assert of_mine(noted(server)) == of_mine(after_shorter)
    return shorter, encode(reply)


STORES = st.tuples(
    st.sampled_from("ab"),
    st.just(0) | st.integers(0, PAGES),
    st.integers(1, PAGES),
    st.sampled_from(["kv", "kv", "swa"]),
    st.integers(0, 1),
    st.sampled_from([1, 1, 2]),
    st.integers(0, PAGES) | st.just(PAGES),
    st.sampled_from([4000, 4000, 1]),
    st.booleans(),
)
ASKED = st.tuples(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, PAGES), st.integers(0, PAGES)), min_size=1, max_size=3),
    st.sampled_from(["kv", "kv", "kv", "swa", "never"]),
    st.sampled_from([0, 0, 1, 2, MAX_WORLD - 1, MAX_WORLD]),
    st.sampled_from([1, 127, 128, 255, 256, 65_535, 65_536, 1 << 32, (1 << 63) - 1]),
)


def store(client: Client, step: tuple[Any, ...]) -> None:
    name, start, count, component, shard, world, committed, nbytes, deleted = step
    if shard < world:
        parent = chain(name, 1, start - 1) if start else ROOT
        grant = client.reserve(
            chain(name, count, start), parent=parent, component=component, shard=shard, world=world, nbytes=nbytes
        )
        client.commit(grant, slice(0, committed))
    if deleted:
        client.delete(chain(name, 1, start + count // 2))


@settings(max_examples=200, deadline=None)
@given(stores=st.lists(STORES, max_size=8), asked=st.lists(ASKED, min_size=1, max_size=5))
def test_both_ways_say_and_note_the_same(stores: list[Any], asked: list[Any]) -> None:
    server = Server(geometry(extents=4, slots=16))
    client, other = server.client(), server.client("other", tag="other")
    client.store(chain("a", 3))
    for step in stores:
        store(client, step)
    for parts, component, shard, rid in asked:
        hashes = b"".join(chain(name, count, start) for name, start, count in parts)
        for who in (client, other):
            server.now += 0.001
            data = encode(Match(rid, who.session, who.namespace, [component], shard, hashes))
            shorter, ordinary = both(server, data)
            if shorter is not None:
                assert shorter == ordinary
            elif who is client and component == "kv" and hashes and shard < MAX_WORLD:
                pytest.fail("the shorter way was not taken")


def test_trees_that_grow_are_looked_up_as_they_are() -> None:
    server = Server(geometry(extents=64, slots=64), checked=False)
    client = server.client()
    name, first = "long", 0
    for count in (1, 200, 500, 900, 1500):
        hashes = chain(name, count, first)
        parent = chain(name, 1, first - 1) if first else ROOT
        client.commit(client.reserve(hashes, parent=parent))
        first += count
        data = encode(Match(7, client.session, client.namespace, ["kv"], 0, chain(name, first)))
        shorter, ordinary = both(server, data)
        assert shorter == ordinary
        found = decode_reply(ordinary)
        assert isinstance(found, Located)
        assert found.pages == first


def asking(client: Client, **changed: Any) -> Match:
    match = Match(5, client.session, client.namespace, ["kv"], 0, chain("a", 4))
    return msgspec.structs.replace(match, **changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"sparse": True},
        {"rules": [Want()]},
        {"rules": [Want(Rule.TRAILING_PAGES, 2)]},
        {"hold": Hold(b"r", 1, 5.0)},
        {"components": ["kv", "kv"]},
        {"components": []},
        {"components": ["k\u00e4"]},
        {"components": ["x" * 32]},
        {"hashes": b""},
        {"hashes": b"x" * 33},
        {"hashes": bytes(32 * (MAX_BATCH + 1))},
        {"shard": MAX_WORLD},
        {"shard": -1},
        {"session": 12345},
        {"namespace": 3},
        {"rid": -1},
    ],
    ids=str,
)
def test_what_is_not_plain_is_left_alone(changed: dict[str, Any]) -> None:
    server = Server()
    client = server.client()
    client.store(chain("a", 3))
    data = encode(asking(client, **changed))
    assert server.state.answer(data, server.now) is None
    both(server, data)


def test_other_messages_are_left_alone() -> None:
    server = Server()
    client = server.client()
    client.store(chain("a", 3))
    for message in (Stats(1), Inspect(2, client.session, client.namespace, b"")):
        assert server.state.answer(encode(message), server.now) is None
    for data in (b"", b"\x9a", b"\x9a\xa5Match", b"\xc1", encode(asking(client)) + b"\0"):
        assert server.state.answer(data, server.now) is None


def test_a_match_of_somebody_else_is_left_alone() -> None:
    server = Server()
    mine, theirs = Peer("mine", False, "a"), Peer("theirs", False, "b")
    client = server.client(peer=mine)
    client.store(chain("a", 3))
    stranger = server.client("stranger", peer=theirs)
    # The session of another, and the namespace of another tenant.
    for data, peer in (
        (encode(asking(client)), theirs),
        (encode(asking(client)), LOCAL),
        (encode(asking(stranger, namespace=client.namespace)), theirs),
    ):
        assert server.state.answer(data, server.now, peer) is None
        both(server, data, peer)
    shorter, ordinary = both(server, encode(asking(client)), mine)
    assert shorter == ordinary
    # An equal peer, as it is where the list of keys was read again.
    shorter, ordinary = both(server, encode(asking(client)), Peer("mine", False, "a"))
    assert shorter == ordinary


def test_who_asks_too_fast_is_left_to_be_refused() -> None:
    server = Server(session_rate=10.0, session_page_rate=1000.0)
    client = server.client()
    client.store(chain("a", 3))
    server.now += 2.0
    data = encode(asking(client))
    answered = [server.state.answer(data, server.now) is not None for _ in range(12)]
    assert answered == [True] * 10 + [False] * 2
    refused = server.state.handle(decode_request(data), server.now)
    assert refused is not None
    assert type(refused).__name__ == "Error"
    server.now += 2.0
    wide = encode(asking(client, hashes=bytes(32 * 999)))
    assert server.state.answer(wide, server.now) is not None
    assert server.state.answer(data, server.now) is not None  # one page is left
    assert server.state.answer(data, server.now) is None


def test_damaged_bytes_are_answered_as_the_ordinary_way_answers_them_or_left_to_it() -> None:
    server = Server(checked=False)
    client = server.client()
    client.store(chain("a", 6))
    good = encode(asking(client))
    chance = random.Random(1)
    taken = 0
    for _ in range(20_000):
        data = damaged(chance, good, 40)  # mostly where something other than a hash is
        server.now += 0.01
        shorter = server.state.answer(data, server.now)
        if shorter is None:
            continue
        taken += 1
        reply = server.state.handle(decode_request(data), server.now)
        assert reply is not None
        assert shorter == encode(reply), data
    assert taken > 1000


def test_what_the_directory_could_not_mean_is_an_error_and_no_answer() -> None:
    """A row outside its columns, a slot outside the pool: whoever asks goes the ordinary way, which says so too."""
    server = Server(checked=False)
    client = server.client()
    client.store(chain("a", 3))
    table = next(iter(server.state.books.trees[client.namespace].tables.values()))
    table.slots[0][table.slots[0] > 0] = 1 << 20
    with pytest.raises(ValueError, match="slot 1048575 is outside the pool"):
        server.state.answer(encode(asking(client)), server.now)
    table.slots[0] = table.slots[0][:0]
    with pytest.raises(ValueError, match="outside its columns"):
        server.state.answer(encode(asking(client)), server.now)
