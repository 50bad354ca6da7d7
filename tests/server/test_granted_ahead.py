"""Slots that are granted ahead, and stores of pages in them: all pages or none, only by whom they were granted to, and never anything
that is not there."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from maru_harness import Client, Grant, Server, chain, geometry

from maru_core.pool.format import COMMITTED
from maru_core.protocol import (
    HASH_BYTES,
    ROOT,
    SPARES_MAX,
    Clear,
    Commit,
    Delete,
    Done,
    Error,
    Evict,
    Goodbye,
    Hold,
    Match,
    Pin,
    Release,
    Reserve,
    Reserved,
    Store,
    Stored,
    StoreStatus,
)
from maru_server import directory as directory_module
from maru_server.new_chains import SPARE_ROOM

pytestmark = pytest.mark.skipif(
    directory_module._store is None, reason="built without a compiler: nothing is granted ahead"
)

STORED, KNOWN, GONE = StoreStatus


class Ahead:
    """Spares as they were granted."""

    def __init__(self, reply: Reserved | Stored) -> None:
        self.slots, self.generations = reply.spare_slots, reply.spare_generations
        self.offsets = np.frombuffer(reply.spare_offsets, "<u8")

    def __len__(self) -> int:
        return len(self.slots) // 4


def names(seed: object, count: int) -> bytes:
    """What a client makes up."""
    return b"".join(hashlib.sha256(f"spare {seed} {i}".encode()).digest() for i in range(count))


def ask(client: Client, hashes: bytes, spares: bytes, **options: Any) -> tuple[Grant, Ahead]:
    """Reserve and commit pages, and have spares."""
    values = {"component": "kv", "shard": 0, "world": 1, "parent": ROOT, "nbytes": 4000, **options}
    reply = client.send(
        Reserve(
            3, client.session, client.namespace, values["component"], values["shard"], values["world"], values["parent"],
            hashes, values["nbytes"], spares,
        )
    )  # fmt: skip
    assert isinstance(reply, Reserved), reply
    grant = Grant(reply)
    assert set(client.commit(grant)) <= {0}
    return grant, Ahead(reply)


def store(client: Client, hashes: bytes, ahead: Ahead, at: int = 0, **options: Any) -> Stored:
    values = {
        "component": "kv", "shard": 0, "world": 1, "parent": ROOT, "nbytes": 4000, "checksums": b"", "spares": b"",
        "namespace": client.namespace, **options,
    }  # fmt: skip
    count = len(hashes) // HASH_BYTES
    reply = client.send(
        Store(
            4,
            client.session,
            values["namespace"],
            values["component"],
            values["shard"],
            values["world"],
            values["parent"],
            hashes,
            values["nbytes"],
            ahead.slots[4 * at : 4 * (at + count)],
            ahead.generations[8 * at : 8 * (at + count)],
            values["checksums"],
            values["spares"],
        )
    )
    assert isinstance(reply, Stored), reply
    return reply


@pytest.fixture
def server() -> Server:
    return Server(geometry(32, 64))


@pytest.fixture
def client(server: Server) -> Client:
    client = server.client()
    client.store(chain("first", 1))  # makes the component known
    return client


def test_pages_are_stored_in_spares_by_one_message(server: Server, client: Client) -> None:
    _, ahead = ask(client, chain("a", 3), names(0, 4))
    assert len(ahead) == 4
    reply = store(client, chain("b", 2), ahead, spares=names(1, 2))
    assert reply.status == STORED
    place = client.match(chain("b", 2))
    assert (place.pages, place.lengths) == (2, [4000, 4000])
    assert place.slots == np.frombuffer(ahead.slots, "<u4")[:2].tolist()
    assert place.generations == np.frombuffer(ahead.generations, "<u8")[:2].tolist()
    assert place.offsets == ahead.offsets[:2].tolist()
    # What is left of the first grant, and what came with the answer, further down the same chain.
    assert store(client, chain("b", 2, 2), ahead, 2, parent=chain("b", 1, 1)).status == STORED
    assert store(client, chain("b", 2, 4), Ahead(reply), parent=chain("b", 1, 3)).status == STORED
    assert client.match(chain("b", 6)).pages == 6
    assert server.stats["slots_reserved"] == 0
    server.restart()
    client.connect()
    assert client.match(chain("b", 6)).pages == 6, "found again from the pool alone"


def test_figures_count_pages_and_not_spares(server: Server, client: Client) -> None:
    _, ahead = ask(client, chain("a", 3), names(0, 4))

    def pages() -> list[int]:
        figures = server.state.figures()
        return [int(figures.stats["pages"]), figures.spaces[0].pages, int(figures.pools[0]["pages"])]

    assert pages() == [4, 4, 4]
    store(client, chain("b", 2), ahead)
    assert pages() == [6, 6, 6]
    client.reserve(chain("c", 1))
    assert pages() == [7, 7, 7], "what is being written is a page"
    client.goodbye()
    assert pages() == [6, 6, 6]


def test_checksums_are_stored_too(client: Client) -> None:
    _, ahead = ask(client, chain("a", 1), names(0, 2))
    sums = np.array([7, 9], "<u8").tobytes()
    assert store(client, chain("b", 2), ahead, checksums=sums).status == STORED
    assert client.match(chain("b", 2)).checksums == [7, 9]


def test_a_spare_is_no_page(server: Server, client: Client) -> None:
    """Nobody finds it, whatever he asks for, before it has been stored; and never by the name that was made up."""
    _, ahead = ask(client, chain("a", 1), names(0, 2))
    for _ in range(2):
        assert client.match(names(0, 1)).pages == 0
        assert client.match(names(0, 2), sparse=True).pages == 0
        store(client, chain("b", 2), ahead)
    server.state.finish()
    (tree,) = server.state.books.trees.values()
    assert not set(tree.rows) & {names(0, 2)[:32], names(0, 2)[32:]}, "the names are gone"


@pytest.mark.parametrize(
    "pages",
    [chain("a", 2), chain("a", 1, 2) + chain("c", 1), chain("c", 1) * 2, ROOT + chain("c", 1)],
    ids=["known", "one of them", "repeated", "the root"],
)
def test_pages_that_are_not_all_new_are_left_to_a_reserve(server: Server, client: Client, pages: bytes) -> None:
    _, ahead = ask(client, chain("a", 3), names(0, 2))
    server.state.finish()
    before = server.meta.tobytes()
    reply = store(client, pages, ahead, spares=names(1, 2))
    assert (reply.status, reply.spare_slots) == (KNOWN, b"")
    assert server.meta.tobytes() == before
    assert store(client, chain("b", 2), ahead).status == STORED, "the spares stand"


def test_a_chain_that_comes_to_nothing_known_is_left_to_a_reserve(client: Client) -> None:
    _, ahead = ask(client, chain("a", 3), names(0, 2))
    assert store(client, chain("b", 2, 1), ahead, parent=chain("b", 1)).status == KNOWN


@pytest.mark.parametrize(
    "other",
    [{"component": "never"}, {"component": "swa"}, {"shard": 1, "world": 2}, {"world": 2}, {"nbytes": 3999}],
    ids=str,
)
def test_spares_are_for_what_they_were_granted(server: Server, client: Client, other: dict[str, Any]) -> None:
    client.store(chain("w", 1), component="swa")
    client.reserve(chain("w2", 1), shard=1, world=2)
    _, ahead = ask(client, chain("a", 1), names(0, 2))
    before = server.meta.tobytes()
    assert store(client, chain("b", 2), ahead, **other).status == GONE
    assert server.meta.tobytes() == before


def test_spares_of_one_shard_are_not_another_shards(server: Server, client: Client) -> None:
    for shard in (0, 1):
        client.store(chain("w", 1), shard=shard, world=2)
    _, ahead = ask(client, chain("a", 1), names(0, 2), world=2)
    assert len(ahead) == 2
    assert store(client, chain("b", 2), ahead, shard=1, world=2).status == GONE
    assert store(client, chain("b", 2), ahead, world=2).status == STORED


def test_a_namespace_whose_rows_look_alike(server: Server, client: Client) -> None:
    """The same rows are pages being written there, of the same component and length."""
    elsewhere = server.client("elsewhere", tag="another namespace")
    elsewhere.store(chain("first", 1))
    _, ahead = ask(client, chain("a", 1), names(0, 2))
    for name in "xyz":
        elsewhere.reserve(chain(name, 1))
    before = server.meta.tobytes()
    assert store(client, chain("b", 2), ahead, namespace=elsewhere.namespace).status == GONE
    assert server.meta.tobytes() == before


def test_spares_are_nobody_elses(server: Server, client: Client) -> None:
    other = server.client("other")
    elsewhere = server.client("elsewhere", tag="another namespace")
    _, ahead = ask(client, chain("a", 1), names(0, 2))
    assert store(other, chain("b", 2), ahead).status == GONE
    assert store(elsewhere, chain("b", 2), ahead).status == GONE
    elsewhere.store(chain("first", 1))
    assert store(client, chain("b", 2), ahead, namespace=elsewhere.namespace).status == GONE
    assert store(client, chain("b", 2), ahead).status == STORED
    assert other.match(chain("b", 2)).pages == 2


@pytest.mark.parametrize("below", [0, 1, 2])
def test_a_chain_never_hangs_below_itself(server: Server, client: Client, below: int) -> None:
    """The client knows the names that it made up, and gives one of them as the page before its chain."""
    _, ahead = ask(client, chain("a", 1), names(0, 3))
    before = server.meta.tobytes()
    parent = names(0, 3)[32 * below : 32 * below + 32]
    assert store(client, chain("b", 3), ahead, parent=parent).status == GONE
    assert server.meta.tobytes() == before
    # Below another of them it may: that one is then no spare any more.
    if below:
        assert store(client, chain("b", 1), ahead, parent=parent).status == STORED
        assert store(client, chain("c", 1), ahead, below).status == GONE
    assert client.reserve(chain("d", 1), parent=chain("b", 1)).status == [0]  # looks for the top of that chain


def test_a_page_that_stands_alone_is_no_spare_either(server: Server, client: Client) -> None:
    slots, generations = client.reserve(chain("b", 1)).mine()
    mine = Ahead(Reserved(0, 0, b"", b"", b"", b"", slots.tobytes(), b"", generations.tobytes()))
    assert store(client, chain("c", 1), mine).status == GONE


@pytest.mark.parametrize("committed", [False, True])
def test_what_was_reserved_as_ever_is_no_spare(server: Server, client: Client, committed: bool) -> None:
    """Its pages have their places in the tree: whatever a client sends, they do not go elsewhere."""
    grant = client.reserve(chain("b", 3))
    if committed:
        client.commit(grant, slice(0, 2))
    slots, generations = grant.mine()
    mine = Ahead(Reserved(0, 0, b"", b"", b"", b"", slots.tobytes(), b"", generations.tobytes()))
    before = server.meta.tobytes()
    for at in range(3):
        assert store(client, chain("c", 1), mine, at).status == GONE
    assert server.meta.tobytes() == before
    assert set(client.commit(grant)) == {0}
    assert client.match(chain("b", 3)).pages == 3


def test_none_are_granted_where_quarantine_is_short() -> None:
    """Their holder writes without asking for some seconds, whatever became of them."""
    for options in ({"quarantine_s": 59.0}, {"restart_quarantine_s": 59.0}, {"quarantine_s": 60.0}):
        server = Server(geometry(32, 64), **options)
        client = server.client()
        client.store(chain("first", 1))
        assert len(ask(client, chain("a", 1), names(0, 2))[1]) == (2 if options == {"quarantine_s": 60.0} else 0)


def test_they_count_as_pages_that_were_asked_for() -> None:
    """Or a client could take slots at many times the rate that it may have pages at."""
    server = Server(geometry(64, 64), session_page_rate=100.0)
    client = server.client()
    client.store(chain("first", 1))
    server.now += 10
    _, ahead = ask(client, chain("a", 1), names(0, 60))
    assert len(ahead) == 60
    assert store(client, chain("b", 1), ahead, spares=names(1, 60)).status == STORED
    reply = client.reserve_reply(chain("c", 1))
    assert isinstance(reply, Error)
    assert reply.code == "rate"


def test_each_is_stored_once(server: Server, client: Client) -> None:
    _, ahead = ask(client, chain("a", 1), names(0, 4))
    assert store(client, chain("b", 2), ahead).status == STORED
    assert store(client, chain("c", 2), ahead).status == GONE
    assert store(client, chain("c", 2), ahead, 1).status == GONE, "one of them is gone"
    assert client.match(chain("c", 2)).pages == 0
    assert store(client, chain("c", 2), ahead, 2).status == STORED


def test_what_was_given_back_is_gone(client: Client) -> None:

    _, ahead = ask(client, chain("a", 1), names(0, 4))
    reply = client.send(Release(5, client.session, ahead.slots[4:8], ahead.generations[8:16]))
    assert isinstance(reply, Done)
    assert reply.count == 1
    assert store(client, chain("b", 4), ahead).status == GONE
    # The slot is another's now, with another generation; the client asks as if it were its own.
    client.store(chain("c", 20))
    assert store(client, chain("b", 4), ahead).status == GONE
    assert store(client, chain("b", 1), ahead).status == STORED
    assert store(client, chain("d", 2), ahead, 2).status == STORED


def test_a_silent_client_has_lost_them(server: Server, client: Client) -> None:
    """Its slots are in quarantine, and are not stored when it wakes up; when it says that it is done with them they are free."""

    _, ahead = ask(client, chain("a", 1), names(0, 2))
    server.wait(server.config.lease_s + 2)
    assert server.stats["slots_quarantined"] == 2
    client.connect()
    assert store(client, chain("b", 2), ahead).status == GONE
    assert client.match(chain("b", 2)).pages == 0
    client.send(Release(5, client.session, ahead.slots, ahead.generations))
    assert (server.stats["slots_quarantined"], server.stats["slots_reserved"]) == (0, 0)


def test_they_return_with_the_session(server: Server, client: Client) -> None:
    _, ahead = ask(client, chain("a", 1), names(0, 2))
    assert server.stats["slots_reserved"] == 2
    client.goodbye()
    assert server.stats["slots_reserved"] == 0
    assert (server.directory.states[np.frombuffer(ahead.slots, "<u4")] == 0).all()


def test_a_page_below_one_keeps_its_name(server: Server, client: Client) -> None:
    """A client that stores a page as the next after a made-up name has only itself to blame, and breaks nothing."""
    _, ahead = ask(client, chain("a", 1), names(0, 2))
    client.store(chain("c", 1), parent=names(0, 1))
    assert store(client, chain("b", 2), ahead).status == GONE
    assert store(client, chain("b", 1), ahead, 1).status == STORED


def test_another_component_of_one_keeps_its_name(server: Server, client: Client) -> None:
    client.store(chain("w", 1), component="swa")
    _, ahead = ask(client, chain("a", 1), names(0, 2))
    client.reserve(names(0, 1), component="swa")
    assert store(client, chain("b", 2), ahead).status == GONE
    client.store(names(0, 2)[32:], component="swa")
    assert store(client, chain("b", 1), ahead, 1).status == GONE


def test_none_are_granted_where_room_is_short() -> None:
    server = Server(geometry(4, 64))
    client = server.client()
    client.store(chain("first", 1))
    free = 64 * server.geometry.extent_count - 1
    most = free // SPARE_ROOM
    _, ahead = ask(client, chain("a", 1), names(0, most))
    assert len(ahead) == 0
    _, ahead = ask(client, chain("b", 1), names(1, most - 2))
    assert len(ahead) == most - 2


def test_none_are_granted_beyond_a_quota_or_a_share() -> None:
    shape = geometry(32, 64)
    slots = 64 * shape.extent_count
    for options in (
        {"quotas": {"": 10.5 / slots}},
        {"session_share": 10.5 / slots},
        {"session_reservations": 1},
        {"max_reservations": 1},
    ):
        server = Server(shape, **options)
        client = server.client()
        client.store(chain("first", 1))
        grant, ahead = ask(client, chain("a", 4), names(0, 9))
        assert (grant.status, len(ahead)) == ([0] * 4, 0), options
        assert len(ask(client, chain("b", 1), names(1, 2))[1]) == (
            0 if {"session_reservations", "max_reservations"} & options.keys() else 2
        )


def test_names_that_are_pages_are_not_granted(server: Server, client: Client) -> None:
    """Made-up names may not be those of pages, of the same message or of others: there is one row for one name."""
    client.store(chain("b", 2))
    for wrong in (chain("b", 1), chain("a", 1), names(0, 1) * 2, ROOT):
        _, ahead = ask(client, chain("a", 1) if wrong != chain("a", 1) else chain("a", 2), wrong)
        assert len(ahead) == 0
        client.delete(chain("a", 1))


def test_names_that_are_pages_are_not_granted_with_a_store_either(server: Server, client: Client) -> None:
    _, ahead = ask(client, chain("a", 1), names(0, 2))
    before = server.meta.tobytes()
    for wrong in (chain("a", 1), chain("b", 1), names(0, 1), ROOT):
        assert store(client, chain("b", 2), ahead, spares=wrong).status == KNOWN
    assert server.meta.tobytes() == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"slots": b"1234"}, "send 4, 8 and 8"),
        ({"generations": b""}, "send 4, 8 and 8"),
        ({"checksums": bytes(8)}, "send 4, 8 and 8"),
        ({"hashes": b""}, "0 pages to be stored"),
        ({"hashes": names(9, SPARES_MAX + 1)}, "65 pages to be stored"),
        ({"spares": b"123"}, "spares has 3 bytes"),
        ({"spares": names(9, SPARES_MAX + 1)}, "spares has 2080 bytes"),
        ({"shard": 5}, "shard is 5"),
        ({"parent": b""}, "parent has 0 bytes"),
        ({"nbytes": 0}, "nbytes is 0"),
        ({"component": ""}, "component name"),
    ],
)
def test_a_store_that_cannot_be_is_refused(server: Server, client: Client, change: dict[str, Any], said: str) -> None:
    import msgspec

    _, ahead = ask(client, chain("a", 1), names(0, 2))
    before = server.meta.tobytes()
    message = Store(
        4, client.session, client.namespace, "kv", 0, 1, ROOT, chain("b", 2), 4000, ahead.slots, ahead.generations
    )
    reply = client.send(msgspec.structs.replace(message, **change))
    assert isinstance(reply, Error)
    assert said in reply.message
    assert server.meta.tobytes() == before


# ---------------------------------------------------------------- at random

#: Which chain (any is one that nobody knows yet), first page, pages.
WHERE = (st.sampled_from(["a", "b", "c", "any", "any"]), st.just(0) | st.integers(0, 5), st.integers(1, 3))
ASKS = st.tuples(st.just("ask"), st.integers(0, 1), *WHERE, st.integers(1, 8))
STORES = st.tuples(st.just("store"), st.integers(0, 1), *WHERE, st.integers(0, 5))
STEPS = st.lists(
    st.one_of(
        ASKS,
        STORES,
        STORES,
        STORES,
        st.tuples(st.just("delete"), st.sampled_from("abc"), st.integers(0, 5)),
        st.tuples(st.just("evict"), st.integers(1, 4)),
        st.tuples(st.just("wait"), st.integers(1, 30)),
        st.tuples(st.just("clear")),
        st.tuples(st.just("restart")),
    ),
    max_size=25,
)


@settings(max_examples=200, deadline=None)
@given(steps=STEPS)
def test_whatever_happens_a_page_has_the_slot_in_which_it_was_written(steps: list[tuple[Any, ...]]) -> None:
    """Two clients; every step is followed by the check of all books. A page that is found is in a slot that its writer wrote for it, under
    the generation that it was granted: whatever was evicted, cleared, lost or stored twice in between."""
    server = Server(geometry(40, 4), reservation_s=20.0)
    clients = [server.client("one"), server.client("two")]
    clients[0].store(chain("first", 1))
    spares: list[list[Ahead]] = [[], []]
    written: dict[bytes, set[tuple[int, int]]] = {}

    def note(hashes: bytes, slots: bytes, generations: bytes) -> None:
        for at, place in enumerate(
            zip(np.frombuffer(slots, "<u4").tolist(), np.frombuffer(generations, "<u8").tolist(), strict=True)
        ):
            written.setdefault(hashes[32 * at : 32 * at + 32], set()).add(place)

    for number, (kind, *rest) in enumerate(steps):
        server.now += 0.5
        if kind in ("ask", "store"):
            who, name, start, count, last = rest
            client = clients[who]
            client.connect()
            if name == "any":
                name, start = f"chain {number}", 0
            if kind == "store" and not spares[who]:
                kind, last = "ask", 4
            hashes, parent = chain(name, count, start), chain(name, 1, start - 1) if start else ROOT
            if kind == "ask":
                grant, ahead = ask(client, hashes, names(number, last), parent=parent)
                slots, generations = grant.mine()
                mine = b"".join(hashes[32 * at : 32 * at + 32] for at, status in enumerate(grant.status) if status == 0)
                note(mine, slots.tobytes(), generations.tobytes())
                if len(ahead):
                    spares[who].append(ahead)
            elif spares[who]:
                ahead = spares[who][-1]
                if last + count > len(ahead):
                    continue
                part = slice(4 * last, 4 * (last + count)), slice(8 * last, 8 * (last + count))
                reply = store(client, hashes, ahead, last, parent=parent, spares=names(number, 2))
                if reply.status == STORED:
                    note(hashes, ahead.slots[part[0]], ahead.generations[part[1]])
                if reply.status == GONE:
                    spares[who].pop()
                if len(Ahead(reply)):
                    spares[who].append(Ahead(reply))
        elif kind == "delete":
            clients[0].connect()
            clients[0].delete(chain(rest[0], 1, rest[1]))
        elif kind == "evict":
            clients[0].connect()
            clients[0].send(Evict(9, clients[0].session, rest[0]))
        elif kind == "clear":
            clients[0].connect()
            clients[0].clear()
        elif kind == "wait":
            server.wait(rest[0], 5.0)
        else:
            server.restart()
        clients[1].connect()
        for name in ["a", "b", "c", *(f"chain {past}" for past in range(number + 1))]:
            place = clients[1].match(chain(name, 9), sparse=True)
            for at, slot in enumerate(place.slots):
                page = chain(name, 1, at)
                if slot != 0xFFFFFFFF:
                    assert (slot, place.generations[at]) in written[page]
                    record = server.directory.records[slot]
                    assert (record["state"], record["page_hash"].tobytes()) == (COMMITTED, page)


@pytest.mark.parametrize("seed", range(12))
def test_nothing_that_clients_send_breaks_the_books(seed: int) -> None:
    """Clients that mean harm: names of pages and made-up ones are the same few, and every name may be a page, its parent or a spare's; slots
    and generations are whatever anybody was told, of spares or not. All books are checked after every step; what is answered does not
    matter."""
    rnd = random.Random(seed)
    few = [hashlib.sha256(f"name {number}".encode()).digest() for number in range(60)]
    server = Server(geometry(40, 4), reservation_s=15.0)
    clients = [server.client("one"), server.client("two"), server.client("three", tag="another namespace")]
    for client in clients[1:]:
        for component in ("kv", "swa"):
            client.store(chain("first", 1), component=component)
    #: Who was told of which slots and generations, for pages of which names and of which kind.
    told: list[tuple[Client, bytes, bytes, bytes, tuple[str, int, int, int]]] = []
    counts: Counter[StoreStatus] = Counter()

    def some(most: int) -> bytes:
        return b"".join(rnd.sample(few, rnd.randint(0, most)))

    for _ in range(500):
        server.now += rnd.choice([0.1, 0.1, 0.1, 3.0])
        client = rnd.choice(clients)
        what = rnd.random()
        kind = (rnd.choice(["kv", "kv", "kv", "swa"]), 0, rnd.choice([1, 1, 1, 2]), rnd.choice([4000, 4000, 4001]))
        pages, spares, parent = some(2), some(4), rnd.choice([ROOT, ROOT, *rnd.sample(few, 2)])
        message: Any
        if what < 0.35:
            client.connect()
            message = Reserve(1, client.session, client.namespace, *kind[:3], parent, pages, kind[3], spares)
        elif what < 0.8 and told:
            holder, slots, generations, names_, granted = told[-rnd.randint(1, min(6, len(told)))]
            client, kind = rnd.choice([holder, holder, holder, client]), rnd.choice([granted, granted, granted, kind])
            client.connect()
            many = len(slots) // 4
            at = rnd.randrange(many)
            pages = b"".join(rnd.sample(few, rnd.randint(1, min(2, many - at))))
            part = slots[4 * at :][: len(pages) // 8], generations[8 * at :][: len(pages) // 4]
            parent = rnd.choice([parent, parent, *(names_[32 * n : 32 * n + 32] for n in range(many))])
            if what < 0.45:
                message = rnd.choice([Commit, Release])(1, client.session, *part)
            else:
                message = Store(
                    1, client.session, client.namespace, *kind[:3], parent, pages, kind[3], *part, b"", spares
                )
        elif what < 0.9:
            client.connect()
            message = rnd.choice(
                [
                    Delete(1, client.session, client.namespace, rnd.choice(few)),
                    Delete(1, client.session, client.namespace, rnd.choice(few)),
                    Evict(1, client.session, rnd.randint(1, 9)),
                    Clear(1, client.session, client.namespace),
                    Match(1, client.session, client.namespace, ["kv"], 0, some(4), False, [], Hold(b"held", 2, 5.0)),
                    Pin(1, client.session, client.namespace, rnd.choice(few)),
                    Goodbye(client.session),
                ]
            )
        else:
            server.wait(rnd.choice([1, 1, 6, 20]), 5.0)
            continue
        reply = client.send(message)
        if isinstance(reply, Stored):
            counts[StoreStatus(reply.status)] += 1
        if isinstance(reply, Reserved) and set(reply.status) == {0}:
            told.append((client, reply.slots, reply.generations, pages, kind))
        if isinstance(reply, Reserved | Stored) and reply.spare_slots:
            told.append((client, reply.spare_slots, reply.spare_generations, spares, kind))
    assert set(counts) == {STORED, KNOWN, GONE}, "not everything was tried"
