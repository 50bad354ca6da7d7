"""Which pages go first, by each policy, and that nobody's page goes that may not."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from maru_harness import Client, Server, chain, geometry

from maru_core.errors import ConfigError
from maru_core.protocol import ROOT, Done, Error, Evict, MissReason, Pin
from maru_server import eviction
from maru_server.eviction import POLICIES, Evictor, LfuAge, Lru, policy
from maru_server.sessions import Peer
from maru_server.tree import APART_NS, ROOT_ROW, PrefixTree

SECOND = 10**9


def one_page(name: object) -> bytes:
    return chain(name, 1)


def pool(pages: int, **config: Any) -> Server:
    """A pool of exactly so many pages of 4000 bytes, evicted only for want of room."""
    return Server(geometry(pages // 100, 100), checked=False, **{"high": 1.0, "low": 0.9, **config})


class Requests:
    """Requests as engines make them: match, touch what was found, store the rest. Each 2 s after the one before."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.client = server.client()
        self.asked = self.found = 0

    def __call__(self, hashes: bytes) -> int:
        self.server.now += 2.0
        self.client.heartbeat()
        found = self.client.match(hashes).pages
        self.asked += len(hashes) // 32
        self.found += found
        if found:
            self.client.touch(hashes[: 32 * found])
        if found * 32 < len(hashes):
            grant = self.client.reserve(
                hashes[32 * found :], parent=hashes[32 * (found - 1) : 32 * found] if found else ROOT
            )
            self.client.commit(grant)
        return found


# ---------------------------------------------------------------- policies alone


def test_an_unknown_policy_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'mru'.*lru, lfu-age"):
        policy("mru")
    with pytest.raises(ConfigError):
        Server(policy="mru")


@pytest.mark.parametrize("name", POLICIES)
def test_scores_do_not_fall_with_age_and_queues_exist(name: str) -> None:
    chosen = policy(name)
    queues = [chosen.queue(uses) for uses in range(256)]
    assert set(queues) == set(range(chosen.queues))
    assert queues == sorted(queues)
    for queue in range(chosen.queues):
        scores = [chosen.score(queue, age) for age in (0, 1, 10, 10**9, 10**15, 10**18)]
        assert scores == sorted(scores)


def test_lru_knows_nothing_but_age() -> None:
    assert {Lru().queue(uses) for uses in range(256)} == {0}


def test_each_doubling_of_uses_makes_a_page_age_more_slowly() -> None:
    chosen = LfuAge()
    assert [chosen.queue(uses) for uses in (0, 1, 2, 3, 4, 7, 8, 16, 32, 255)] == [0, 1, 2, 2, 3, 3, 4, 5, 6, 6]
    for queue in range(1, chosen.queues):
        assert chosen.score(queue, 1500) == pytest.approx(chosen.score(queue - 1, 1000))


def lay(tree: PrefixTree, slot: int, name: str, last_use: int, uses: int = 0) -> int:
    (row,) = tree.add_chain([one_page(name)], ROOT_ROW, last_use).tolist()
    rows = np.array([row])
    tree.hold(0, 0, rows, np.array([slot], np.uint32), 1, 10)
    tree.publish(0, rows, last_use)
    tree.uses[row] = uses
    return int(row)


@settings(max_examples=40)
@given(
    name=st.sampled_from(sorted(POLICIES)),
    pages=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 40), st.sampled_from(["", "a", "b"])), max_size=25),
    later=st.lists(st.tuples(st.integers(0, 24), st.integers(51, 99), st.integers(0, 40)), max_size=8),
    gone=st.lists(st.integers(0, 24), max_size=3),
    guarded=st.lists(st.integers(0, 24), max_size=3),
    bulk=st.sampled_from([1, 2, 5, 64]),
    settled=st.integers(0, 9),
)
def test_the_queues_give_the_highest_score_whatever_was_used_meanwhile(
    name: str,
    pages: list[tuple[int, int, str]],
    later: list[tuple[int, int, int]],
    gone: list[int],
    guarded: list[int],
    bulk: int,
    settled: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eviction, "_BULK_MIN", bulk)
        check_order(name, pages, later, gone, guarded, settled)


def check_order(
    name: str,
    pages: list[tuple[int, int, str]],
    later: list[tuple[int, int, int]],
    gone: list[int],
    guarded: list[int],
    settled: int,
) -> None:
    trees = {number: PrefixTree(number, tenant=tenant) for number, tenant in enumerate(("", "a", "b"))}
    leaves = Evictor(trees, incomplete_grace_ns=0, name=name)
    numbers = {tree.tenant: number for number, tree in trees.items()}
    rows = []
    for index, (second, uses, tenant) in enumerate(pages):
        tree = trees[numbers[tenant]]
        rows.append((tree, lay(tree, index, f"p{index}", second * SECOND, uses)))
        leaves.offer(*rows[-1])
    for index, second, uses in later:
        if index < len(rows):
            tree, row = rows[index]
            tree.last_use[row], tree.uses[row] = second * SECOND, max(uses, int(tree.uses[row]))
    now = 100 * SECOND
    chosen = policy(name)

    def score(tree: PrefixTree, row: int) -> float:
        return chosen.score(chosen.queue(int(tree.uses[row])), now - (int(tree.last_use[row]) >> 10 << 10))

    left = set(range(len(rows)))
    for index in left.intersection(gone):
        rows[index][0].pending[rows[index][1]] += np.uint32(1)
    for index in left.intersection(guarded):
        rows[index][0].guard(rows[index][1])
    left -= {*gone, *guarded}
    leaves.settle(settled)
    while left:
        leaves.check()
        victim = leaves.next(now)
        assert victim is not None
        index = rows.index(victim)
        assert score(*victim) == max(score(*rows[other]) for other in left)
        left.remove(index)
        victim[0].pending[victim[1]] += np.uint32(1)
    assert leaves.next(now) is None


def test_an_entry_that_was_left_behind_in_another_queue_is_found() -> None:
    tree = PrefixTree(0)
    leaves = Evictor({0: tree}, incomplete_grace_ns=0, name="lfu-age")
    row = lay(tree, 0, "p", SECOND, uses=9)
    leaves.offer(tree, row)
    tree.uses[row] = 0  # another page has the row now
    assert leaves.next(9 * SECOND) == (tree, row)


def test_one_tenants_queue_gives_only_its_pages() -> None:
    trees = {1: PrefixTree(1, tenant="a"), 2: PrefixTree(2, tenant="b")}
    leaves = Evictor(trees, incomplete_grace_ns=0)
    old = lay(trees[1], 0, "old", SECOND)
    new = lay(trees[2], 1, "new", 2 * SECOND)
    leaves.offer(trees[1], old)
    leaves.offer(trees[2], new)
    assert leaves.next(9 * SECOND, "b") == (trees[2], new)
    assert leaves.next(9 * SECOND, "b") is None
    assert leaves.next(9 * SECOND, "nobody") is None
    assert leaves.next(9 * SECOND) == (trees[1], old)


def test_uses_that_lie_together_are_one() -> None:
    tree = PrefixTree(0)
    row = np.array([lay(tree, 0, "p", 0)])
    for now in (APART_NS - 1, APART_NS, 2 * APART_NS - 2, 2 * APART_NS - 1):
        tree.used(row, now)
    assert tree.uses[row[0]] == 0, "every use was close to the one before"
    tree.used(row, 3 * APART_NS)
    assert tree.uses[row[0]] == 1
    tree.uses[row[0]] = 255
    tree.used(row, 9 * APART_NS)
    assert tree.uses[row[0]] == 255


# ---------------------------------------------------------------- through the server


def test_readers_and_writers_of_what_is_there_are_uses_and_other_shards_are_not(server: Server) -> None:
    client = server.client()
    page = one_page("p")
    client.store(page, world=2, shard=0)
    tree = server.state.books.trees[client.namespace]
    server.now += 5
    client.store(page, world=2, shard=1)
    row = tree.row(page)
    assert row is not None
    assert tree.uses[row] == 0
    server.now += 5
    client.touch(page)
    assert tree.uses[row] == 1
    server.now += 5
    assert client.reserve(page, world=2, shard=1).status == [1]
    assert tree.uses[row] == 2


def test_a_page_that_comes_back_is_worth_what_it_was(server: Server) -> None:
    client = server.client()
    page = one_page("p")
    client.store(page)
    for _ in range(5):
        server.now += 5
        client.touch(page)
    assert evict(client, 1) == 1
    assert client.match(page).why == MissReason.EVICTED
    client.store(page)
    tree = server.state.books.trees[client.namespace]
    assert tree.uses[tree.row(page)] == 5
    assert server.state.books.pages.ghosts.note(client.namespace, page) == 0
    assert client.delete(page) == 1
    assert client.match(page).why == MissReason.REMOVED
    client.store(page)
    assert tree.uses[tree.row(page)] == 0, "what somebody deleted was not missed"
    client.clear()
    assert client.match(page).why == MissReason.REMOVED


def working_set_and_scans(name: str) -> float:
    """A working set of half the pool, used again and again; then scans of three times the pool between its uses."""
    server = pool(200, policy=name)
    requests = Requests(server)
    favourites = [chain(f"w{number}", 10) for number in range(10)]
    shuffled = random.Random(1)
    for _ in range(20):
        shuffled.shuffle(favourites)
        for hashes in favourites:
            requests(hashes)
    requests.asked = requests.found = 0
    for scan in range(4):
        for number in range(60):
            assert requests(chain(f"s{scan}/{number}", 10)) == 0
        counted = requests.asked
        for hashes in favourites:
            requests(hashes)
        assert requests.asked == counted + 100
    server.state.check()
    return requests.found / 400


def test_lfu_age_keeps_a_working_set_through_scans_and_lru_does_not() -> None:
    assert working_set_and_scans("lru") == 0
    assert working_set_and_scans("lfu-age") > 0.9


def drifting(name: str, pages: int) -> float:
    """Conversations that grow, the latest the likeliest to go on, and that end some day: what LRU is made for."""
    server = pool(pages, policy=name)
    requests = Requests(server)
    rng = random.Random(2)
    lengths: list[tuple[int, int]] = []
    born = 0
    for _ in range(1200):
        if not lengths or rng.random() < 0.2:
            lengths.append((born, 0))
            born += 1
        at = max(0, len(lengths) - 1 - int(rng.expovariate(1 / 20)))
        name_, length = lengths[at]
        length += 4
        requests(chain(f"c{name_}", length))
        lengths[at] = (name_, length)
        if length >= 60:
            lengths.pop(at)
    return requests.found / requests.asked


@pytest.mark.parametrize("pages", [300, 900])
def test_where_lru_is_right_lfu_age_is_nearly(pages: int) -> None:
    lru, other = drifting("lru", pages), drifting("lfu-age", pages)
    assert lru > 0.3
    assert other > lru - 0.05


def test_yesterdays_favourites_go_in_the_end() -> None:
    server = pool(100, policy="lfu-age")
    requests = Requests(server)
    for _ in range(40):
        requests(chain("old", 50))
    for number in range(1, 250):
        requests(chain(f"n{number // 2}", 10))
    assert requests.client.match(chain("old", 50)).pages == 0


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_leaves_first_whatever_the_uses(name: str) -> None:
    server = Server(geometry(1, 8), high=1.0, low=0.9, policy=name)
    client = server.client()
    trunk = chain("t", 8)
    client.store(trunk)
    for _ in range(9):  # the end of the chain is the favourite
        server.now += 3
        client.heartbeat()
        client.touch(trunk[-64:])
    client.store(chain("new", 3))
    assert client.match(trunk).pages == 5


# ---------------------------------------------------------------- on demand


def evict(client: Client, pages: int, namespace: int | None = None) -> int:
    reply = client.send(Evict(9, client.session, pages, namespace))
    assert isinstance(reply, Done), reply
    return reply.count


def test_evict_takes_what_is_worth_least_and_no_more(server: Server) -> None:
    client = server.client()
    for number in range(4):
        server.now += 1
        client.store(chain(number, 3))
    assert evict(client, 0) == 0
    assert evict(client, 4) == 4
    assert [client.match(chain(number, 3)).pages for number in range(4)] == [0, 2, 3, 3]
    assert evict(client, 1000) == 8
    assert evict(client, 1) == 0
    assert server.stats["evicted_pages"] == 12


def test_evict_of_one_namespace_leaves_the_others(server: Server) -> None:
    one, other = server.client("one"), server.client("other", tag="x")
    one.store(chain("a", 4))
    server.now += 1
    other.store(chain("a", 4))
    other.store(chain("b", 2))
    server.now += 5
    other.touch(chain("b", 2))
    assert evict(one, 3, other.namespace) == 3
    assert one.match(chain("a", 4)).pages == 4
    assert other.match(chain("a", 4)).pages == 1
    assert evict(one, 100, other.namespace) == 3
    assert other.match(chain("b", 2)).pages == 0
    other.store(chain("b", 2))
    assert evict(one, 100) == 6


def test_evict_is_bounded_for_operators_only_and_checked(server: Server) -> None:
    client = server.client()
    reply = client.send(Evict(9, client.session, -1))
    assert isinstance(reply, Error)
    assert reply.code == "invalid"
    tenant = server.client("t", peer=Peer("t", operator=False))
    reply = tenant.send(Evict(9, tenant.session, 1, tenant.namespace))
    assert isinstance(reply, Error)
    assert reply.code == "forbidden"
    assert isinstance(client.send(Evict(9, client.session, 1, 77)), Error)


# ---------------------------------------------------------------- other sizes


@pytest.mark.parametrize("sizes", [(4000, 16000), (16000, 4000), (8000, 12000)])
def test_a_pool_of_one_size_becomes_one_of_another(sizes: tuple[int, int]) -> None:
    """The mix of sizes changes for good: what is stored then gets the pool, in the end all of it."""
    before, after = sizes
    server = Server(geometry(16, 16), high=1.0, low=0.9)
    client = server.client()
    for number in range(80):
        server.now += 1
        client.heartbeat()
        client.commit(client.reserve(chain(f"a{number}", 4), nbytes=before))
    slots = server.geometry.extent_bytes // (-(-after // 4096) * 4096) * 16
    for number in range(200):
        server.now += 1
        client.heartbeat()
        grant = client.reserve(chain(f"b{number}", 4), nbytes=after)
        assert grant.status == [0] * 4, "there was no room for the new size"
        client.commit(grant)
        server.state.tick(server.now)
    assert len(set(server.directory.extents.tolist())) == 1
    pages = sum(client.match(chain(f"b{number}", 4)).pages for number in range(200))
    assert pages > slots - 16


def test_extents_that_may_not_be_emptied_hide_no_others() -> None:
    """Pages that somebody guards lie in many extents with little else: the search goes on beyond them."""
    server = Server(geometry(40, 8), high=1.0, low=0.9, checked=False)
    client = server.client()
    hashes = [chain(f"a{number}", 8) for number in range(40)]
    for packed in hashes:
        client.store(packed)
    for packed in hashes[:36]:
        client.delete(packed[64:])  # two pages are left in their extents
        client.send(Pin(9, client.session, client.namespace, packed[32:64]))
    assert server.stats["pins"] == 36
    granted = 0
    for number in range(8):
        server.now += 1
        client.heartbeat()
        server.state.tick(server.now)
        grant = client.reserve(chain(f"b{number}", 1), nbytes=20_000)
        granted += grant.status == [0]
    assert granted == 4
    assert all(client.match(packed).pages == 2 for packed in hashes[:36])
    server.state.check()
