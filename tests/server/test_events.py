"""Notes of pages that come and go: applied to a set, they give exactly the pages that a match finds, at every moment."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from maru_harness import Client, Server, chain, geometry

from maru_core.protocol import HASH_BYTES, ROOT
from maru_server.events import Events, Everything, Note, Removed, Stored, Topic
from support import namespace


class Replica:
    """What a subscriber knows, by topic."""

    def __init__(self, events: Events) -> None:
        self.events = events
        self.pages: dict[str, set[bytes]] = {}
        self.kinds: Counter[str] = Counter()

    def catch_up(self) -> set[bytes]:
        """Apply what was noted since; all pages of all topics."""
        for note in self.events.take():
            self.apply(note)
        return set().union(*self.pages.values()) if self.pages else set()

    def apply(self, note: Note) -> None:
        self.kinds[type(note).__name__] += 1
        mine = self.pages.setdefault(note.topic.name, set())
        if isinstance(note, Stored):
            assert note.parent == ROOT or note.parent in mine, "a page whose parent nobody has heard of"
            for page in split(note.hashes):
                assert page not in mine, "a page was stored twice"
                mine.add(page)
        elif isinstance(note, Removed):
            for page in split(note.hashes):
                mine.remove(page)
        else:
            mine.clear()
            if isinstance(note, Everything):
                for parent, hashes in note.runs():
                    assert parent == ROOT or parent in mine, "a page before its parent"
                    mine.update(split(hashes))


def split(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]


def listen(server: Server, **options: int) -> Replica:
    events = Events(**options)
    server.state.tell(events)
    return Replica(events)


def found(client: Client, chains: list[bytes]) -> set[bytes]:
    """Pages that matches of these chains find."""
    pages: set[bytes] = set()
    for hashes in chains:
        pages.update(split(hashes)[: client.match(hashes).pages])
    return pages


def test_pages_are_stored_when_they_are_committed_and_removed_with_all_below(server: Server, client: Client) -> None:
    replica = listen(server)
    grant = client.reserve(chain("a", 4))
    assert replica.catch_up() == set()
    client.commit(grant)
    server.state.finish()
    assert replica.catch_up() == set(split(chain("a", 4)))
    client.delete(chain("a", 1, start=2))
    assert replica.catch_up() == set(split(chain("a", 2)))
    client.clear()
    assert replica.catch_up() == set()
    assert replica.kinds["Cleared"] == 1


def test_a_chain_is_one_note(server: Server, client: Client) -> None:
    replica = listen(server)
    client.store(chain("a", 6))
    server.state.finish()
    replica.catch_up()
    assert replica.kinds == {"Everything": 1, "Stored": 1}


def test_a_page_is_stored_only_with_all_its_shards(server: Server, client: Client) -> None:
    replica = listen(server)
    client.store(chain("a", 3), world=2, shard=0)
    client.store(chain("a", 2), world=2, shard=1)
    server.state.finish()
    assert replica.catch_up() == set(split(chain("a", 2)))


def test_pages_after_a_gap_are_stored_when_it_closes(server: Server, client: Client) -> None:
    replica = listen(server)
    pages = chain("a", 5)
    client.store(pages[3 * 32 :], parent=pages[2 * 32 : 3 * 32])
    client.store(pages[:64])
    server.state.finish()
    assert replica.catch_up() == set(split(pages[:64]))
    client.store(pages[64:96], parent=pages[32:64])
    server.state.finish()
    assert replica.catch_up() == set(split(pages))


def test_a_component_beside_the_kv_changes_nothing(server: Server, client: Client) -> None:
    replica = listen(server)
    client.store(chain("a", 2), component="draft")
    server.state.finish()
    assert replica.catch_up() == set()
    client.store(chain("a", 2))
    server.state.finish()
    assert replica.catch_up() == set(split(chain("a", 2)))


def test_namespaces_are_topics(server: Server, client: Client) -> None:
    other = server.client("other", tag="other")
    replica = listen(server)
    third = server.client("third", tag="third")  # opened later
    for user in (client, other, third):
        user.store(chain("a", 2))
    server.state.finish()
    replica.catch_up()
    assert len(replica.pages) == 3
    client.delete(chain("a", 1))
    replica.catch_up()
    assert sorted(map(len, replica.pages.values())) == [0, 2, 2]


def test_a_restarted_server_begins_with_everything(server: Server, client: Client) -> None:
    client.store(chain("a", 3))
    client.store(chain("b", 2))
    client.store(chain("c", 2), parent=chain("a", 3)[32:64])
    client.store(chain("loose", 2), parent=chain("unknown", 1))
    client.store(chain("half", 2), world=2)
    server.restart()
    client.connect()
    replica = listen(server)
    assert replica.catch_up() == found(client, [chain("a", 3), chain("b", 2), chain("a", 3)[:64] + chain("c", 2)])
    assert len(replica.catch_up()) == 7


def test_a_queue_that_nobody_empties_is_bounded_and_loses_nothing(server: Server, client: Client) -> None:
    replica = listen(server, queue_pages=10)
    for number in range(6):
        client.store(chain(number, 4))
        server.state.finish()
        assert sum(len(note.hashes) // 32 for note in replica.events._notes if isinstance(note, Stored | Removed)) <= 10
    assert replica.events.overflows >= 1
    assert replica.catch_up() == set().union(*(split(chain(number, 4)) for number in range(6)))


def test_without_events_nothing_is_noted(server: Server, client: Client) -> None:
    client.store(chain("a", 3))
    assert server.state.books.pages.events is None


def test_pipeline_stages_make_a_page_together() -> None:
    record = namespace(pipeline_parallel=2).record()
    assert Topic.of(record, "").components == ("kv.0", "kv.1")
    assert Topic.of(record, "t").name == f"t/{Topic.of(record, '').name}"


@pytest.mark.parametrize("record", [b"", b"[]", b'{"pipeline_parallel":"x"}', b"\xff"])
def test_a_namespace_of_another_release_has_a_topic(record: bytes) -> None:
    assert Topic.of(record, "").components == ("kv",)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_a_subscriber_has_what_a_match_finds(seed: int) -> None:
    rng = random.Random(seed)
    server = Server(geometry(extents=6, slots=8, namespace_capacity=4), checked=False, lease_s=5.0, quarantine_s=5.0)
    clients = [server.client(f"c{n}", tag=("", "", "other")[n]) for n in range(3)]
    replica = listen(server, queue_pages=rng.choice([20, 1 << 20]))
    known: dict[str, list[bytes]] = {"": [], "other": []}  # chains from the root
    open_grants: list[tuple[Client, object]] = []
    for step in range(250):
        client = rng.choice(clients)
        chains = known[client.tag]
        action = rng.random()
        if action < 0.55:
            base = rng.choice(chains) if chains and rng.random() < 0.6 else b""
            base = base[: HASH_BYTES * rng.randrange(len(base) // HASH_BYTES + 1)]
            fresh = rng.randbytes(HASH_BYTES * rng.randrange(1, 5))
            chains.append(base + fresh)
            whole = base + fresh
            first = rng.randrange(len(whole) // HASH_BYTES) if rng.random() < 0.3 else 0
            world = 2 if whole[0] % 2 else 1  # of the whole tree below a first page
            parent = whole[(first - 1) * HASH_BYTES : first * HASH_BYTES] if first else ROOT
            for shard in range(world) if rng.random() < 0.7 else [0]:
                grant = client.reserve(whole[first * HASH_BYTES :], parent=parent, world=world, shard=shard)
                if rng.random() < 0.8:
                    client.commit(grant)
                else:
                    open_grants.append((client, grant))
        elif action < 0.65 and open_grants:
            owner, grant = open_grants.pop(rng.randrange(len(open_grants)))
            rng.choice([owner.commit, owner.release])(grant)
        elif action < 0.75 and chains:
            client.delete(rng.choice(split(rng.choice(chains))))
        elif action < 0.78:
            client.clear(everything=rng.random() < 0.5)
        elif action < 0.88:
            server.wait(rng.choice([0.5, 6.0]), alive=tuple(clients))
        elif action < 0.9:
            server.state.tell_everything()
        server.state.finish()
        replica.catch_up()
        for tag, user in (("", clients[0]), ("other", clients[2])):
            topic = server.state.books.pages.events._topics[user.namespace].name
            assert replica.pages.get(topic, set()) == found(user, known[tag]), f"step {step}"
    assert replica.kinds["Removed"]
    assert np.any(server.state.books.pages.counts["evicted_pages"]), "the pool was never full"
