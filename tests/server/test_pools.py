"""Several pools in one server: where things go, who is told of them, and what holds across all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from maru_harness import chain
from pools_harness import OWN, PoolsServer, pools_of

from maru_core import protocol as p
from maru_server.calls import Deferred
from maru_server.sessions import Peer


def report(client: Any, what: str, namespace: int | None = None, peer_rows: int = 64) -> list[dict[str, Any]]:
    reply = client.send(p.Inspect(1, client.session, what, namespace, peer_rows))
    if isinstance(reply, Deferred):
        reply = reply.work()
    assert isinstance(reply, p.Report), reply
    return reply.rows


def held(client: Any, pages: bytes, request: bytes = b"r", ranks: int = 2) -> Any:
    return client.match(pages, hold=p.Hold(request, ranks, 30.0))


def test_a_welcome_names_all_pools() -> None:
    server = PoolsServer()
    reply = server.send(p.Hello(p.PROTOCOL_VERSION, 1, bytes(16), "x", "host", 1, 2, "ns", "boot"))
    assert isinstance(reply, p.Welcome)
    assert [name.uuid for name in reply.pools] == [shape.pool_uuid for shape in server.shapes]
    assert (reply.pool_uri, reply.pool_uuid) == (reply.pools[0].uri, reply.pools[0].uuid)
    assert reply.incarnation == server.incarnation


# ---------------------------------------------------------------- who reaches what


def test_who_has_not_said_what_it_reaches_has_nothing() -> None:
    server = PoolsServer()
    server.client("writer").store(chain("a", 4))
    mute = server.client("mute", ways=None)
    found = mute.match(chain("a", 4))
    assert (found.pages, found.slots, found.why) == (0, [], p.MissReason.NOT_STORED)
    assert mute.match(chain("a", 4), sparse=True).slots == [p.NO_SLOT] * 4
    grant = mute.reserve(chain("b", 3))
    assert grant.status == [p.ReserveStatus.NO_ROOM] * 3
    assert set(grant.slots.tolist()) == {p.NO_SLOT}
    mute.reach("cc")
    assert mute.match(chain("a", 4)).pages == 4


def test_nothing_is_told_of_a_pool_that_is_not_reached() -> None:
    server = PoolsServer()
    first, second = server.client("first", ways="cn"), server.client("second", ways="nc")
    first.store(chain("a", 4))
    assert second.match(chain("a", 4)).pages == 0
    grant = second.store(chain("a", 4))  # it has a copy of its own
    assert pools_of(grant.slots) == {1}
    both = server.client("both")
    assert pools_of(both.match(chain("a", 4)).slots) == {0}
    assert server.stats["objects"] == 8


def test_a_pool_that_is_mapped_comes_before_one_behind_agents() -> None:
    server = PoolsServer(2, 16)
    client = server.client(ways="rc")
    assert pools_of(client.store(chain("a", 4)).slots) == {1}
    client = server.client("other", ways="cr")
    assert pools_of(client.store(chain("b", 4)).slots) == {0}


def test_of_pools_that_are_reached_alike_the_one_with_most_room_is_taken() -> None:
    server = PoolsServer(4, 8)
    client = server.client()
    taken = [pools_of(client.store(chain(number, 8)).slots) for number in range(8)]
    assert taken[:4] == [{1}] * 4
    assert {0} in taken
    assert {1} in taken[4:]


def test_a_pool_whose_extents_are_too_small_is_not_taken() -> None:
    server = PoolsServer(16, 4, slots=(2, 4))
    client = server.client()
    assert pools_of(client.store(chain("b", 1)).slots) == {0}
    assert pools_of(client.store(chain("a", 1), nbytes=3 * 4096).slots) == {1}
    reply = client.reserve_reply(chain("c", 1), nbytes=5 * 4096)
    assert isinstance(reply, p.Error)
    assert reply.code == p.ErrorCode.TOO_LARGE


# ---------------------------------------------------------------- chains


def test_chains_begin_where_every_component_fits() -> None:
    server = PoolsServer(200, 4, slots=(2, 32))
    client = server.client()
    assert pools_of(client.store(chain("a", 2)).slots) == {0}, "it has more room"
    reply = client.reserve_reply(chain("a", 2), component="mamba", nbytes=20_000)
    assert isinstance(reply, p.Error)
    assert reply.code == p.ErrorCode.TOO_LARGE
    grants = [client.store(chain("b", 2)), client.store(chain("b", 2), component="mamba", nbytes=20_000)]
    assert pools_of(np.concatenate([grant.slots for grant in grants])) == {1}
    assert client.match(chain("b", 2), ["kv", "mamba"]).pages == 2


def test_a_chain_is_never_spread() -> None:
    server = PoolsServer(8, 8)
    client = server.client()
    pages = chain("a", 16)
    places: set[int] = set()
    for at in range(16):
        parent = pages[(at - 1) * 32 : at * 32] if at else p.ROOT
        places |= pools_of(client.store(pages[at * 32 : at * 32 + 32], parent=parent).slots)
        # What others store meanwhile makes the other pool the emptier one.
        client.store(chain(f"other {at}", 3))
    assert len(places) == 1
    assert client.match(pages).pages == 16


def test_ranks_write_where_the_first_did() -> None:
    server = PoolsServer(8, 8)
    ranks = [server.client(f"rank {rank}") for rank in range(2)]
    for number in range(6):
        pages = chain(number, 5)
        grants = []
        for shard, rank in enumerate(ranks):
            grants.append(rank.reserve(pages, component="tp", shard=shard, world=2))
            ranks[0].store(chain(f"fill {number} {shard}", 2))
        assert len(pools_of(np.concatenate([grant.slots for grant in grants]))) == 1
        for rank, grant in zip(ranks, grants, strict=True):
            assert set(rank.commit(grant)) == {0}
        for shard, rank in enumerate(ranks):
            assert rank.match(pages, ["tp"], shard).pages == 5


def test_what_a_reserve_has_put_off_is_known_to_the_next() -> None:
    """Books are kept when the answer is on its way, if it could be sent; ranks must meet in one pool whatever became of it."""
    server = PoolsServer(8, 8, checked=False)
    ranks = [server.client(f"rank {rank}") for rank in range(2)]
    grants = [rank.reserve(chain("a", 4), shard=shard, world=2) for shard, rank in enumerate(ranks)]
    assert pools_of(grants[0].slots) == pools_of(grants[1].slots)


def test_a_full_pool_refuses_its_chains_and_others_go_on() -> None:
    server = PoolsServer(2, 2, hold_share=1.0)
    near = server.client("near", ways="cn")
    pages = chain("a", 15)
    near.store(pages)
    assert held(near, pages).held_s > 0
    both = server.client("both")
    assert set(both.reserve(chain("next", 3), parent=pages[-32:]).status) <= {0, p.ReserveStatus.NO_ROOM}
    assert p.ReserveStatus.NO_ROOM in both.reserve(chain("next", 3), parent=pages[-32:]).status
    assert pools_of(both.store(chain("new", 4)).slots) == {1}


def test_a_match_is_the_longest_of_one_pool() -> None:
    server = PoolsServer(8, 8)
    first, second, both = server.client("1", ways="cn"), server.client("2", ways="nc"), server.client("3", ways="rc")
    first.store(chain("a", 6))
    second.store(chain("a", 4))
    found = both.match(chain("a", 8))
    assert (found.pages, pools_of(found.slots)) == (6, {0})
    found = both.match(chain("a", 4))
    assert (found.pages, pools_of(found.slots)) == (4, {1})  # as long in both: the one that is mapped
    sparse = both.match(chain("a", 6), sparse=True)
    assert pools_of(slot for slot in sparse.slots if slot != p.NO_SLOT) == {0}
    assert sparse.slots.count(p.NO_SLOT) == 0
    stats = server.stats
    assert (stats["matches"], stats["pages_asked"], stats["pages_found"]) == (3, 18, 16)


# ---------------------------------------------------------------- holds


def test_where_all_is_found_no_other_pool_is_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    server = PoolsServer(8, 8)
    for ways in ("cn", "nc"):
        server.client(ways, ways=ways).store(chain("a", 4))
    client = server.client()
    monkeypatch.setattr(server.pools.states[1], "look", lambda *args: pytest.fail("looked into"))
    assert pools_of(client.match(chain("a", 4)).slots) == {0}


def test_the_first_rank_decides_the_pool_for_all() -> None:
    server = PoolsServer(8, 8)
    first, second = server.client("1", ways="cn"), server.client("2", ways="nc")
    ranks = [server.client(f"rank {rank}") for rank in range(2)]
    first.store(chain("a", 4))
    second.store(chain("a", 3))
    one = held(ranks[0], chain("a", 6))
    assert (one.pages, pools_of(one.slots)) == (4, {0})
    assert [len(state.books.holds) for state in server.pools.states] == [1, 0]
    # Meanwhile the other pool has more of it.
    second.store(chain("a", 3, start=3), parent=chain("a", 3)[-32:])
    two = held(ranks[1], chain("a", 6))
    assert (two.pages, two.slots) == (one.pages, one.slots)
    assert ranks[0].unhold(b"r") == 1
    assert server.stats["holds"] == 1
    assert ranks[1].unhold(b"r") == 1
    assert server.stats["holds"] == 0


def test_a_rank_that_does_not_reach_the_pool_is_told_nothing() -> None:
    server = PoolsServer(8, 8)
    near, far = server.client("near", ways="cn"), server.client("far", ways="nc")
    near.store(chain("a", 4))
    far.store(chain("a", 5))
    assert held(near, chain("a", 6)).pages == 4
    assert held(far, chain("a", 6)).pages == 0
    near.unhold(b"r")
    far.unhold(b"r")
    assert server.stats["holds"] == 0


def test_where_the_first_rank_reaches_nothing_no_rank_is_told_of_anything() -> None:
    server = PoolsServer(8, 8)
    server.client("writer").store(chain("a", 4))
    mute, near = server.client("mute", ways=None), server.client("near")
    assert held(mute, chain("a", 4)).pages == 0
    assert held(near, chain("a", 4)).pages == 0
    assert held(near, chain("a", 4), b"another").pages == 4


# ---------------------------------------------------------------- slots


def test_a_mixed_batch_is_split_and_put_together_in_order() -> None:
    server = PoolsServer(8, 8)
    first, second = server.client("1", ways="cn"), server.client("2", ways="nc")
    client = server.client("both", ways="cn")
    one = client.reserve(chain("a", 5))
    client.reach("nc")
    two = client.reserve(chain("b", 5))
    slots = np.stack([one.slots, two.slots], 1).ravel()
    generations = np.stack([one.generations, two.generations], 1).ravel()
    generations[4] += 1
    told = client.send(p.Validate(1, client.session, slots.tobytes(), generations.tobytes()))
    assert isinstance(told, p.Validated)
    assert list(told.valid) == [1, 1, 1, 1, 0, 1, 1, 1, 1, 1]
    sums = np.arange(10, dtype=np.uint64)
    reply = client.send(p.Commit(1, client.session, slots.tobytes(), generations.tobytes(), sums.tobytes()))
    assert isinstance(reply, p.Committed)
    assert list(reply.status) == [0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert first.match(chain("a", 5), sparse=True).checksums == [0, 2, 0, 6, 8]
    assert second.match(chain("b", 5)).checksums == [1, 3, 5, 7, 9]
    generations[4] -= 1
    reply = client.send(p.Release(1, client.session, slots.tobytes(), generations.tobytes()))
    assert reply == p.Done(1, server.incarnation, 1)


@pytest.mark.parametrize("kind", [p.Commit, p.Release, p.Validate])
@pytest.mark.parametrize("slot", [2 << p.POOL_SHIFT, 0xFFFFFFFF, 0xFFFFFFFE, (1 << p.POOL_SHIFT) | 4095, OWN])
def test_slots_of_no_pool_are_refused_and_change_nothing(kind: Any, slot: int) -> None:
    server = PoolsServer()
    client = server.client()
    grant = client.reserve(chain("a", 3))
    slots = np.append(grant.slots, np.uint32(slot))
    generations = np.append(grant.generations, np.uint64(1))
    before = server.stats
    reply = client.send(kind(1, client.session, slots.astype("<u4").tobytes(), generations.tobytes()))
    assert isinstance(reply, p.Error)
    assert reply.code == p.ErrorCode.INVALID
    assert {**server.stats, "memory_bytes": 0} == {**before, "memory_bytes": 0}
    assert set(client.commit(grant)) == {0}


def test_the_same_slot_of_another_pool_is_another_slot() -> None:
    server = PoolsServer()
    client = server.client(ways="cn")
    grant = client.reserve(chain("a", 3))
    wrong = (grant.slots | np.uint32(1 << p.POOL_SHIFT)).astype("<u4").tobytes()
    reply = client.send(p.Commit(1, client.session, wrong, grant.generations.tobytes()))
    assert isinstance(reply, p.Committed)
    assert set(reply.status) == {p.CommitStatus.LOST}
    assert client.match(chain("a", 3)).pages == 0
    assert set(client.commit(grant)) == {0}


# ---------------------------------------------------------------- use, remove, operators


def test_delete_and_clear_are_everywhere() -> None:
    server = PoolsServer()
    first, second = server.client("1", ways="cn"), server.client("2", ways="nc")
    for client in (first, second):
        client.store(chain("a", 4))
        client.store(chain("b", 2))
    assert server.client("x").delete(chain("a", 1, start=2)) == 4
    assert [client.match(chain("a", 4)).pages for client in (first, second)] == [2, 2]
    assert server.client("x").clear() == 8
    assert server.stats["objects"] == 0


def test_pins_are_where_the_page_is() -> None:
    server = PoolsServer()
    first, second = server.client("1", ways="cn"), server.client("2", ways="nc")
    first.store(chain("a", 4))
    page = chain("a", 1, start=1)
    reply = second.send(p.Pin(1, second.session, second.namespace, page))
    assert reply == p.Done(1, server.incarnation, 2 * 4096)
    assert [row["pool"] for row in report(first, "pins")] == [0]
    missing = second.send(p.Pin(1, second.session, second.namespace, chain("z", 1)))
    assert isinstance(missing, p.Error)
    assert second.send(p.Unpin(1, second.session, second.namespace, page)) == p.Done(1, server.incarnation, 0)
    assert report(first, "pins") == []


def test_a_pin_that_one_pool_has_no_room_for_is_in_none() -> None:
    server = PoolsServer(16, 2, pin_share=0.25)
    first, second = server.client("1", ways="cn"), server.client("2", ways="nc")
    first.store(chain("a", 8))
    second.store(chain("a", 8))
    reply = first.send(p.Pin(1, first.session, first.namespace, chain("a", 1, start=7)))
    assert isinstance(reply, p.Error)
    assert reply.code == p.ErrorCode.LIMIT
    assert server.stats["pins"] == 0


def test_evict_goes_from_pool_to_pool() -> None:
    server = PoolsServer()
    first, second = server.client("1", ways="cn"), server.client("2", ways="nc")
    first.store(chain("a", 4))
    second.store(chain("b", 4))
    reply = first.send(p.Evict(1, first.session, 6))
    assert reply == p.Done(1, server.incarnation, 6)
    assert server.stats["objects"] == 2


def test_rows_and_figures_are_of_all_pools() -> None:
    server = PoolsServer(8, 4)
    first, second = server.client("1", ways="cn"), server.client("2", ways="nr")
    first.store(chain("a", 4))
    second.store(chain("b", 3))
    second.reserve(chain("c", 2))
    held(first, chain("a", 4), ranks=1)
    (space,) = report(first, "namespaces")
    assert (space["namespace"], space["pages"], space["bytes"]) == (first.namespace, 7, 7 * 4000)
    assert space["components"]["kv"]["pages"] == 7
    (tenant,) = report(first, "tenants")
    assert (tenant["pages"], tenant["sessions"], tenant["namespaces"]) == (7, 2, 1)
    (hold,) = report(first, "holds")
    assert (hold["session"], hold["pool"], hold["pages"]) == (first.session, 0, 4)
    rows = {row["name"]: row for row in report(first, "sessions")}
    assert rows["2"]["slots_reserved"] == 2
    assert [told["way"] for told in rows["2"]["reaches"]] == ["none", "rdma"]
    pools = report(first, "pools")
    assert [row["uri"] for row in pools] == ["shm://test0", "shm://test1"]
    assert [row["pages"] for row in pools] == [4, 5]
    assert pools[1]["clients"] == {"cxl": 0, "rdma": 1, "none": 1}
    tree = report(first, "tree")
    assert sum(row["subtree_pages"] for row in tree if row["kind"] == "namespace") == 7
    assert {row["namespace"] for row in tree} == {first.namespace}
    stats, figures = server.stats, server.pools.figures()
    assert (stats["sessions"], stats["extents"], stats["objects"], stats["namespaces"]) == (2, 12, 7, 1)
    assert figures.spaces[0].stored() == 7 * 4000
    assert figures.stats == stats


def test_tenants_do_not_meet() -> None:
    server = PoolsServer()
    mine, theirs = Peer("mine", operator=False, name="m"), Peer("theirs", operator=False, name="t")
    client, other = server.client("1", peer=mine), server.client("2", peer=theirs)
    client.store(chain("a", 3))
    assert other.match(chain("a", 3)).pages == 0
    reply = other.send(p.Match(1, other.session, client.namespace, ["kv"], 0, chain("a", 3)))
    assert isinstance(reply, p.Error)
    assert reply.code == p.ErrorCode.UNKNOWN_NAMESPACE
    assert [row["tenant"] for row in report(other, "namespaces")] == ["theirs"]
    stolen = other.send(
        p.Heartbeat(1, client.session),
    )
    assert isinstance(stolen, p.Error)


def test_rates_are_of_all_pools_together() -> None:
    server = PoolsServer(session_rate=20.0)
    client = server.client()
    replies = [client.match_reply(chain("a", 2)) for _ in range(40)]
    refused = [reply for reply in replies if isinstance(reply, p.Error)]
    assert {reply.code for reply in refused} == {p.ErrorCode.RATE}
    assert 15 <= len(refused) <= 25
    assert server.stats["over_rate"] == len(refused)


# ---------------------------------------------------------------- sessions


def test_a_restart_finds_both_pools() -> None:
    server = PoolsServer()
    first, second = server.client("1", ways="cn"), server.client("2", ways="nc")
    first.store(chain("a", 4))
    second.store(chain("b", 4))
    pending = second.reserve(chain("c", 2))
    server.restart()
    before = first.session
    assert isinstance(first.match_reply(chain("a", 4)), p.Error)
    first.connect()
    assert first.session != before
    second.connect()
    assert (first.match(chain("a", 4)).pages, second.match(chain("b", 4)).pages) == (4, 4)
    assert server.stats["slots_quarantined"] == 2
    assert set(second.commit(pending)) == {1}
    assert server.stats["slots_quarantined"] == 0  # its own, from the server before: it gives them back


def test_a_client_that_dies_gives_back_what_it_had_in_every_pool() -> None:
    server = PoolsServer(lease_s=10.0)
    client, other = server.client("1", ways="cn"), server.client("2")
    client.reserve(chain("a", 3))
    client.reach("nc")
    client.reserve(chain("b", 3))
    server.wait(12.0, alive=(other,))
    assert server.stats["slots_quarantined"] == 6
    assert [number for number, _ in server.pools.silent_sessions()] == [client.session]
    member = server.pools.members[1]
    assert sum(len(offsets) for offsets, _ in member.reserved_slots(client.session)) == 3
    server.pools.process_gone(client.session, server.now)
    assert server.stats["slots_quarantined"] == 0
    assert server.stats["sessions"] == 1


def test_what_a_dead_client_wrote_through_agents_may_still_arrive() -> None:
    server = PoolsServer()
    client = server.client("1", ways="cn")
    client.reserve(chain("a", 3))
    client.reach("nr")
    client.reserve(chain("b", 2))
    server.pools.process_gone(client.session, server.now)
    assert server.stats["slots_quarantined"] == 2


def test_a_session_that_one_pool_has_ended_is_over_in_all() -> None:
    server = PoolsServer(lease_s=2.0, quarantine_s=5.0, heartbeat_s=0.5)
    client, other = server.client("1", ways="cn"), server.client("2")
    client.reserve(chain("a", 3))
    server.wait(4.0, alive=(other,))  # what it was writing is quarantined: pool 0 keeps its session for longer
    server.wait(4.5, step=0.5, alive=(other,))
    number = client.session
    assert isinstance(client.heartbeat(), p.Error)
    client.connect()
    assert client.session != number
    assert client.match(chain("a", 1)).pages == 0
    client.store(chain("b", 2))
    server.wait(20.0, alive=(client, other))
    assert server.stats["slots_quarantined"] == 0


def test_what_one_pool_does_not_know_is_known_to_none() -> None:
    server = PoolsServer()
    client = server.client()
    client.store(chain("a", 2))
    part = server.pools.books.part(client.session, 1)
    assert part is not None
    server.pools.states[1].handle(p.Goodbye(part), server.now)
    for message in (
        p.Heartbeat(1, client.session),
        p.Match(1, client.session, client.namespace, ["kv"], 0, chain("a", 2)),
    ):
        reply = client.send(message)
        assert isinstance(reply, p.Error)
        assert reply.code == p.ErrorCode.UNKNOWN_SESSION
    client.connect()
    assert client.match(chain("a", 2)).pages == 2


def test_who_is_turned_away_in_one_pool_is_in_none() -> None:
    server = PoolsServer(max_sessions=2)
    server.client("1")
    server.client("2")
    reply = server.send(p.Hello(p.PROTOCOL_VERSION, 1, bytes(16), "x", "host", 1, 2, "ns", "boot"))
    assert isinstance(reply, p.Error)
    assert reply.code == p.ErrorCode.LIMIT
    assert server.stats["sessions"] == 2


def test_goodbye_ends_it_everywhere() -> None:
    server = PoolsServer()
    client = server.client()
    client.reserve(chain("a", 3))
    client.goodbye()
    stats = server.stats
    assert (stats["sessions"], stats["slots_reserved"], stats["slots_quarantined"]) == (0, 0, 0)
    assert [len(state.books.sessions) for state in server.pools.states] == [0, 0]


def test_revoked_keys_lose_their_sessions() -> None:
    server = PoolsServer()
    peer = Peer("tenant", operator=False, name="a")
    client, other = server.client("1", peer=peer), server.client("2")
    client.reserve(chain("a", 3))
    assert server.pools.keep_peers({other.peer}, server.now) == 1
    assert isinstance(client.heartbeat(), p.Error)
    assert server.stats["slots_quarantined"] == 3


def test_what_is_wrong_in_one_pool_keeps_no_other_from_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    server = PoolsServer(lease_s=2.0)
    client = server.client(ways="nc")
    client.reserve(chain("a", 2))

    def broken(now: float) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(server.pools.states[0], "tick", broken)
    for _ in range(10):
        server.now += 0.5
        with pytest.raises(RuntimeError, match="planted"):
            server.pools.tick(server.now)
    assert server.stats["slots_quarantined"] == 2


# ---------------------------------------------------------------- agents


def test_agents_are_of_one_pool() -> None:
    server = PoolsServer()
    client = server.client()
    shape = server.shapes[1]
    pieces = np.array([shape.off_data, shape.data_bytes, 4096], "<u8").tobytes()
    agent = p.Agent("node", "UCX", b"blob", pieces, 0.5)
    assert client.send(p.Announce(1, client.session, agent, shape.pool_uuid)) == p.Done(1, server.incarnation, 1)
    for number, expected in ((0, []), (1, [agent])):
        reply = client.send(p.Agents(1, client.session, server.shapes[number].pool_uuid))
        assert isinstance(reply, p.AgentsReply)
        assert reply.agents == expected
    for message in (p.Agents(1, client.session), p.Announce(1, client.session, agent)):
        refused = client.send(message)
        assert isinstance(refused, p.Error)
        assert refused.code == p.ErrorCode.INVALID
