"""What each message does, and what is refused."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from maru_harness import Client, Server, chain, geometry, record

from maru_core import protocol
from maru_core.protocol import (
    HASH_BYTES,
    MAX_BATCH,
    NO_SLOT,
    PROTOCOL_VERSION,
    ROOT,
    Clear,
    Commit,
    Delete,
    Error,
    Goodbye,
    Heartbeat,
    Hello,
    Match,
    OpenNamespace,
    Release,
    Request,
    Reserve,
    Stats,
    StatsReply,
    Touch,
    Welcome,
)

RESERVED, EXISTS, BUSY, NO_ROOM, CONFLICT = range(5)
COMMITTED, LOST = range(2)


# ---------------------------------------------------------------- store and find


def test_stored_pages_are_found_where_they_were_stored(client: Client) -> None:
    pages = chain("a", 5)
    grant = client.reserve(pages, nbytes=3000)
    assert grant.status == [RESERVED] * 5
    assert client.match(pages).pages == 0
    assert client.commit(grant, checksums=np.arange(1, 6, dtype="<u8").tobytes()) == [COMMITTED] * 5
    found = client.match(pages + chain("b", 2))
    assert found.pages == 5
    assert found.slots == grant.slots.tolist()
    assert found.offsets == grant.offsets.tolist()
    assert found.generations == grant.generations.tolist()
    assert found.lengths == [3000] * 5
    assert found.checksums == [1, 2, 3, 4, 5]


def test_a_prefix_ends_at_the_first_gap_and_sparse_goes_on(client: Client) -> None:
    pages = chain("a", 4)
    grant = client.reserve(pages)
    client.commit(grant, [0, 1, 3])
    assert client.match(pages).pages == 2
    found = client.match(pages, sparse=True)
    assert found.pages == 3
    assert found.slots == [grant.slots[0], grant.slots[1], NO_SLOT, grant.slots[3]]
    assert found.lengths == [4000, 4000, 0, 4000]


def test_a_match_of_nothing_finds_nothing(client: Client) -> None:
    assert client.match(b"").pages == 0
    assert client.match(chain("a", 3)).slots == []
    assert client.match(chain("a", 3), ["never"], sparse=True).slots == [NO_SLOT] * 3
    assert client.reserve(b"").status == []


def test_what_is_there_is_not_given_again(server: Server, client: Client) -> None:
    pages = chain("a", 3)
    client.store(pages)
    grant = server.client("other").reserve(pages + chain("a", 2, start=3))
    assert grant.status == [EXISTS] * 3 + [RESERVED] * 2
    assert grant.slots[:3].tolist() == [NO_SLOT] * 3
    assert client.reserve(chain("a", 5)).status == [EXISTS] * 3 + [BUSY] * 2


def test_a_page_is_found_only_when_every_shard_is_there(client: Client) -> None:
    pages = chain("a", 3)
    first = client.store(pages, shard=0, world=2)
    assert client.match(pages).pages == 0
    assert client.match(pages, sparse=True).pages == 0
    second = client.reserve(pages, shard=1, world=2)
    client.commit(second, [0, 2])
    assert client.match(pages, shard=0).slots == first.slots[:1].tolist()
    assert client.match(pages, shard=1).slots == second.slots[:1].tolist()
    assert client.match(pages, shard=1, sparse=True).slots == [second.slots[0], NO_SLOT, second.slots[2]]
    assert client.match(pages, shard=2).pages == 0


def test_a_page_is_found_only_when_every_component_is_there(client: Client) -> None:
    pages = chain("a", 3)
    kv = client.store(pages)
    draft = client.store(pages[: 2 * HASH_BYTES], component="draft", nbytes=100)
    both = client.match(pages, ["kv", "draft"])
    assert both.pages == 2
    assert both.slots == [*kv.slots[:2].tolist(), *draft.slots.tolist()]
    assert both.lengths == [4000, 4000, 100, 100]
    sparse = client.match(pages, ["draft", "kv"], sparse=True)
    assert sparse.slots == [*draft.slots.tolist(), NO_SLOT, *kv.slots[:2].tolist(), NO_SLOT]
    assert client.match(pages).pages == 3
    assert client.match(pages, ["kv", "mamba"]).pages == 0


def test_readers_of_any_shard_share_a_replica(client: Client) -> None:
    pages = chain("a", 2)
    for shard in range(2):
        client.store(pages, shard=shard, world=2)
    replica = client.store(pages, component="draft", world=1)
    found = client.match(pages, ["kv", "draft"], shard=1)
    assert found.pages == 2
    assert found.slots[2:] == replica.slots.tolist()


def test_namespaces_are_apart(server: Server, client: Client) -> None:
    pages = chain("a", 2)
    client.store(pages)
    other = server.client("other", tag="b")
    assert other.namespace != client.namespace
    assert other.match(pages).pages == 0
    other.store(pages, nbytes=50)
    assert client.match(pages).lengths == [4000, 4000]
    assert server.client("third").namespace == client.namespace


# ---------------------------------------------------------------- chains and conflicts


def test_a_known_page_with_another_parent_is_refused_with_all_that_follows(client: Client) -> None:
    a, b = chain("a", 3), chain("b", 1)
    client.store(a)
    assert client.reserve(a[HASH_BYTES:]).status == [CONFLICT] * 2
    assert client.reserve(a[HASH_BYTES:] + chain("new", 1), parent=b).status == [CONFLICT] * 3
    assert client.reserve(b + a[2 * HASH_BYTES :]).status == [RESERVED, CONFLICT]
    assert client.match(a).pages == 3


def test_a_known_page_of_another_length_or_world_is_refused_alone(client: Client) -> None:
    pages = chain("a", 2)
    client.store(pages)
    assert client.reserve(pages + chain("b", 1), nbytes=4001).status == [CONFLICT, CONFLICT, RESERVED]
    assert client.reserve(pages, world=2, shard=1).status == [CONFLICT] * 2
    assert client.reserve(pages, component="draft", nbytes=7).status == [RESERVED] * 2


def test_a_released_reservation_leaves_no_trace_of_its_shape(client: Client) -> None:
    pages = chain("a", 2)
    client.release(client.reserve(pages, world=4, shard=3, nbytes=9))
    assert client.store(pages, nbytes=10).status == [RESERVED] * 2


def test_a_page_may_come_before_its_parent(client: Client, server: Server) -> None:
    pages = chain("a", 6)
    h = [pages[i : i + HASH_BYTES] for i in range(0, len(pages), HASH_BYTES)]
    client.store(h[4] + h[5], parent=h[3])
    client.store(h[2] + h[3], parent=h[1])
    assert client.match(pages).pages == 0
    client.store(h[0] + h[1])
    assert client.match(pages).pages == 6
    assert client.delete(h[0]) == 6


def test_no_page_is_its_own_ancestor(client: Client) -> None:
    a, b, c = (chain(name, 1) for name in "abc")
    client.store(b + c, parent=a)
    assert client.reserve(a, parent=c).status == [CONFLICT]
    assert client.reserve(chain("d", 1) + a, parent=c).status == [RESERVED, CONFLICT]
    assert client.reserve(b, parent=c).status == [CONFLICT]
    assert client.reserve(a, parent=chain("e", 1)).status == [RESERVED]


def test_hollow_parents_vanish_with_their_children(server: Server, client: Client) -> None:
    client.store(chain("b", 1), parent=chain("a", 1))
    assert server.stats["pages"] == 2
    client.delete(chain("b", 1))
    assert server.stats["pages"] == 0


# ---------------------------------------------------------------- commit and release


def test_commit_is_idempotent(client: Client) -> None:
    grant = client.reserve(chain("a", 3))
    assert client.commit(grant) == [COMMITTED] * 3
    assert client.commit(grant) == [COMMITTED] * 3
    assert client.commit(grant, [2, 2, 0]) == [COMMITTED] * 3
    assert client.match(chain("a", 3)).pages == 3


def test_a_commit_may_name_parts_in_any_order_and_repeat_itself(client: Client) -> None:
    grant = client.reserve(chain("a", 4))
    assert client.commit(grant, [2, 0, 2], np.array([7, 8, 9], "<u8").tobytes()) == [COMMITTED] * 3
    found = client.match(chain("a", 4), sparse=True)
    assert found.checksums == [8, 0, 7, 0]
    assert found.slots == [grant.slots[0], NO_SLOT, grant.slots[2], NO_SLOT]
    assert client.release(grant) == 2


def test_a_commit_may_span_reservations(client: Client) -> None:
    one, two = client.reserve(chain("a", 2)), client.reserve(chain("b", 2), component="draft", nbytes=10)
    slots, generations = np.append(one.slots, two.slots), np.append(one.generations, two.generations)
    reply = client.server.send(Commit(1, client.session, slots.tobytes(), generations.tobytes()))
    assert reply == protocol.Committed(1, 1, bytes(4))
    assert client.match(chain("a", 2)).pages == 2
    assert client.match(chain("b", 2), ["draft"]).pages == 2


def test_only_the_session_that_reserved_can_commit(server: Server, client: Client) -> None:
    grant = client.reserve(chain("a", 2))
    other = server.client("other")
    assert other.commit(grant) == [LOST] * 2
    assert other.release(grant) == 0
    assert client.match(chain("a", 2)).pages == 0
    assert client.commit(grant) == [COMMITTED] * 2
    assert other.commit(grant) == [LOST] * 2


def test_only_the_right_generation_can_be_committed(client: Client) -> None:
    grant = client.reserve(chain("a", 2))
    grant.generations = grant.generations + np.array([0, 1], np.uint64)
    assert client.commit(grant) == [COMMITTED, LOST]
    assert client.match(chain("a", 2)).pages == 1


def test_a_slot_that_was_given_to_another_cannot_be_committed(client: Client) -> None:
    late = client.reserve(chain("a", 1))
    assert client.release(late) == 1
    now = client.reserve(chain("b", 1))
    assert now.slots.tolist() == late.slots.tolist()
    assert now.generations[0] > late.generations[0]
    assert client.commit(late) == [LOST]
    assert client.release(late) == 0
    assert client.match(chain("b", 1)).pages == 0
    assert client.commit(now) == [COMMITTED]


def test_never_reserved_slots_are_lost(client: Client) -> None:
    reply = client.server.send(Commit(1, client.session, bytes(8), bytes(16)))
    assert reply == protocol.Committed(1, 1, b"\1\1")
    assert client.server.send(Commit(1, client.session, b"", b"")) == protocol.Committed(1, 1, b"")


# ---------------------------------------------------------------- delete and clear


def test_delete_takes_descendants_and_nothing_else(client: Client) -> None:
    trunk, left, right = chain("t", 2), chain("l", 2), chain("r", 1)
    client.store(trunk + left)
    client.store(right, parent=trunk[-HASH_BYTES:])
    client.store(trunk + left, component="draft", nbytes=1)
    assert client.delete(left[:HASH_BYTES]) == 4
    assert client.match(trunk + left).pages == 2
    assert client.match(trunk + right).pages == 3
    assert client.delete(chain("unknown", 1)) == 0
    assert client.delete(left + trunk[HASH_BYTES:] + trunk) == 5
    assert client.match(trunk).pages == 0


def test_freed_slots_change_their_generation(client: Client) -> None:
    grant = client.store(chain("a", 3))
    before = client.server.directory.generations[grant.slots].copy()
    client.delete(chain("a", 1))
    assert (client.server.directory.generations[grant.slots] > before).all()


@pytest.mark.parametrize("everything", [False, True])
def test_clear_leaves_nothing_readable(server: Server, client: Client, everything: bool) -> None:
    other = server.client("other", tag="b")
    grants = [client.store(chain(name, 3)) for name in "abc"] + [client.reserve(chain("d", 2))]
    kept = other.store(chain("a", 2))
    assert client.clear(everything) == 9 + 2 * everything
    for name in "abcd":
        assert client.match(chain(name, 3)).pages == 0
    for grant in grants[:3]:
        assert (server.directory.generations[grant.slots] > grant.generations).all()
    assert other.match(chain("a", 2)).pages == 2 * (not everything)
    assert everything == (server.directory.generations[kept.slots] > kept.generations).all()
    assert client.commit(grants[3]) == [LOST] * 2
    client.store(chain("a", 3))
    server.restart()
    client.connect()
    assert [client.match(chain(name, 3)).pages for name in "abcd"] == [3, 0, 0, 0]


def test_what_was_being_written_when_its_page_was_deleted_is_lost(server: Server, client: Client) -> None:
    client.store(chain("a", 2))
    grant = client.reserve(chain("a", 2, start=2), parent=chain("a", 1, start=1))
    rest = client.reserve(chain("z", 1))
    assert client.delete(chain("a", 1)) == 2
    # Its slots are nobody's as long as the writer may be writing.
    assert server.stats["slots_quarantined"] == 2
    assert client.commit(grant) == [LOST] * 2
    assert server.stats["slots_quarantined"] == 0
    assert client.commit(rest) == [COMMITTED]
    assert client.match(chain("a", 4)).pages == 0


# ---------------------------------------------------------------- sessions


def test_hello_says_what_a_client_must_know(server: Server) -> None:
    reply = server.send(Hello(PROTOCOL_VERSION, 5, b"x" * 16, "me", "host", 1, 2, "ns", "boot"))
    assert isinstance(reply, Welcome)
    assert (reply.rid, reply.incarnation, reply.pool_uri) == (5, 1, "shm://test")
    assert (reply.pool_uuid, reply.heartbeat_s, reply.lease_s) == (server.geometry.pool_uuid, 2.0, 10.0)


def test_a_repeated_hello_is_the_same_session(server: Server, client: Client) -> None:
    grant = client.reserve(chain("a", 2))
    before = client.session
    client.connect()
    assert client.session == before
    assert client.commit(grant) == [COMMITTED] * 2


def test_a_session_that_ends_gives_its_slots_back(server: Server, client: Client) -> None:
    grant = client.reserve(chain("a", 3))
    client.commit(grant, [0])
    client.goodbye()
    assert server.stats["slots_reserved"] == server.stats["slots_quarantined"] == 0
    assert (server.directory.generations[grant.slots[1:]] > grant.generations[1:]).all()
    other = server.client("other")
    assert other.match(chain("a", 3)).pages == 1
    assert other.reserve(chain("a", 3)).status == [EXISTS, RESERVED, RESERVED]


def test_a_dead_process_gives_its_slots_back(server: Server, client: Client) -> None:
    client.reserve(chain("a", 3))
    server.wait(11)
    assert server.stats["slots_quarantined"] == 3
    other = server.client("other")
    other.reserve(chain("b", 1))
    server.wait(4, alive=(other,))
    assert [number for number, _ in server.state.silent_sessions()] == [client.session]
    identity = server.state.silent_sessions()[0][1]
    assert (identity.pid, identity.pid_start, identity.pid_ns, identity.boot_id) == (1, 2, "ns", "boot")
    server.state.process_gone(client.session, server.now)
    server.state.process_gone(client.session, server.now)
    server.state.check()
    assert server.stats["slots_quarantined"] == 0
    assert server.stats["slots_reserved"] == 1


@pytest.mark.parametrize("silent", [False, True])
def test_what_a_dead_process_wrote_through_agents_may_still_arrive(
    server: Server, client: Client, silent: bool
) -> None:
    assert isinstance(
        client.send(protocol.Reaches(1, client.session, [protocol.Way("rdma", "through agents")])), protocol.Done
    )
    grant = client.reserve(chain("a", 3))
    other = server.client("other")
    if silent:
        server.wait(11, alive=(other,))
    server.state.process_gone(client.session, server.now)
    assert server.stats["slots_quarantined"] == 3
    again = other.reserve(chain("a", 3))
    assert again.status == [RESERVED] * 3
    assert not set(again.slots) & set(grant.slots)
    other.commit(again)
    server.wait(server.config.quarantine_s + 1, alive=(other,))
    assert server.stats["slots_quarantined"] == 0
    server.state.check()


def test_a_silent_sessions_slots_are_nobodys(server: Server, client: Client) -> None:
    other = server.client("other")
    grant = client.reserve(chain("a", 3))
    server.wait(11, alive=(other,))
    assert server.stats["slots_quarantined"] == 3
    again = other.reserve(chain("a", 3))
    assert again.status == [RESERVED] * 3
    assert not set(again.slots) & set(grant.slots)
    # It wakes up, and what it says of its slots is that it has stopped writing.
    assert client.commit(grant) == [LOST] * 3
    assert server.stats["slots_quarantined"] == 0
    assert other.commit(again) == [COMMITTED] * 3
    assert client.match(chain("a", 3)).slots == again.slots.tolist()
    client.store(chain("b", 1))


def test_a_heartbeat_keeps_a_session(server: Server, client: Client) -> None:
    grant = client.reserve(chain("a", 1))
    server.wait(30, alive=(client,))
    assert client.commit(grant) == [COMMITTED]


def test_quarantine_ends_after_a_long_grace(server: Server, client: Client) -> None:
    grant = client.reserve(chain("a", 3))
    server.wait(600, step=4)
    assert server.stats["slots_quarantined"] == 3
    server.wait(20, step=4)
    assert server.stats["slots_quarantined"] == 0
    assert (server.directory.generations[grant.slots] > grant.generations).all()
    assert isinstance(client.heartbeat(), Error)


def test_a_reservation_nobody_commits_does_not_stay_for_ever(server: Server, client: Client) -> None:
    client.reserve(chain("a", 2))  # the reply is lost
    server.wait(61, alive=(client,))
    assert server.stats["slots_quarantined"] == 2
    assert client.store(chain("a", 2)).status == [RESERVED] * 2
    server.wait(601, step=4, alive=(client,))
    assert server.stats["slots_quarantined"] == 0


def test_a_server_that_was_stopped_takes_nobody_for_dead(server: Server, client: Client) -> None:
    grant = client.reserve(chain("a", 1))
    server.wait(3)
    server.wait(1000, step=1000)
    assert server.stats["slots_quarantined"] == 0
    assert server.stats["stalled_s"] == 1000
    server.wait(6)
    assert client.commit(grant) == [COMMITTED]
    server.wait(11)
    assert server.stats["sessions_silent"] == 1


def test_a_stall_seen_by_a_message_first_counts_the_same(server: Server, client: Client) -> None:
    other = server.client("other")
    grant = other.reserve(chain("a", 1))
    server.now += 1000
    client.heartbeat()
    server.wait(9)
    assert other.commit(grant) == [COMMITTED]


def test_forgotten_sessions_make_room_for_new_ones() -> None:
    server = Server(max_sessions=2)
    one, two = server.client("1"), server.client("2")
    one.reserve(chain("a", 1))
    hello = Hello(PROTOCOL_VERSION, 5, b"x" * 16, "me", "host", 1, 2, "ns", "boot")
    refused = server.send(hello)
    assert isinstance(refused, Error)
    assert refused.code == "limit"
    server.wait(11)
    assert isinstance(server.send(hello), Welcome)
    assert isinstance(two.heartbeat(), Error)
    assert not isinstance(one.heartbeat(), Error)


def test_too_many_reservations_find_no_room() -> None:
    client = Server(max_reservations=2).client()
    grants = [client.reserve(chain(name, 1)) for name in "abc"]
    assert [grant.status for grant in grants] == [[RESERVED], [RESERVED], [NO_ROOM]]
    client.commit(grants[0])
    assert client.reserve(chain("c", 1)).status == [RESERVED]


# ---------------------------------------------------------------- eviction


def full(**config: Any) -> tuple[Server, Client, int]:
    server = Server(geometry(2, 8), low=0.5, high=1.0, **config)
    return server, server.client(), server.geometry.slot_count


def test_the_least_recently_used_leaves_go_first() -> None:
    server, client, total = full()
    names = [f"s{number}" for number in range(total // 4)]
    for name in names:
        client.store(chain(name, 4))
        server.now += 1
    client.touch(chain(names[0], 4))
    client.store(chain("new", 6))
    left = {name: client.match(chain(name, 4)).pages for name in names}
    assert left == {**dict.fromkeys(names, 4), names[1]: 0, names[2]: 2}


def test_no_page_outlives_its_parent() -> None:
    server, client, total = full()
    client.store(chain("a", total - 1))
    server.now += 1
    # The leaf is the most recently used, and goes first all the same.
    client.touch(chain("a", 1, start=total - 2))
    client.store(chain("b", 3))
    assert client.match(chain("a", total), sparse=True).slots.count(NO_SLOT) == 3
    assert client.match(chain("a", total)).pages == total - 3


def test_all_shards_and_components_of_a_page_go_together() -> None:
    server, client, total = full(incomplete_s=0)
    pages = chain("a", 2)
    for shard in range(2):
        client.store(pages, shard=shard, world=2)
        client.store(pages, shard=shard, world=2, component="draft")
    server.now += 1
    client.store(chain("b", total - 8))
    server.now += 1
    client.store(chain("c", 1))
    assert server.stats["objects"] == total - 3
    assert client.match(pages, ["kv", "draft"]).pages == 1


def test_pages_that_stay_incomplete_go_first() -> None:
    server, client, total = full()
    client.store(chain("old", 2))
    server.now += 1
    client.store(chain("partial", 2), world=2)
    server.now += 1
    client.store(chain("new", total - 4))
    server.now += 20
    young = client.store(chain("young", 1), world=2)
    assert young.status == [RESERVED]
    assert server.directory.states[young.slots].tolist() == [2]
    assert client.match(chain("old", 2)).pages == 2
    client.store(chain("more", 1))
    assert client.match(chain("old", 2)).pages == 2
    # What is incomplete for a moment only is like any other page.
    client.store(chain("last", 1))
    assert client.match(chain("old", 2)).pages == 1
    client.store(chain("young", 1), world=2, shard=1)
    assert client.match(chain("young", 1)).pages == 1


def test_what_is_being_written_is_not_evicted_and_not_its_prefix() -> None:
    _, client, total = full()
    client.store(chain("a", 3))
    writing = client.reserve(chain("a", total - 3, start=3), parent=chain("a", 1, start=2))
    assert client.reserve(chain("b", 1)).status == [NO_ROOM]
    assert client.commit(writing) == [COMMITTED] * (total - 3)
    assert client.match(chain("a", total)).pages == total


def test_a_batch_does_not_evict_what_it_builds_on() -> None:
    server, client, total = full()
    client.store(chain("a", total - 2))
    server.now += 1
    client.store(chain("b", 2))
    grant = client.reserve(chain("a", total + 5))
    assert grant.status == [EXISTS] * (total - 2) + [RESERVED] * 2 + [NO_ROOM] * 5
    assert client.commit(grant) == [COMMITTED] * 2
    assert client.match(chain("a", total + 5)).pages == total
    assert client.reserve(chain("c", 1), parent=chain("a", 1, start=total - 1)).status == [NO_ROOM]
    assert client.reserve(chain("d", 2)).status == [RESERVED] * 2


def test_eviction_between_the_watermarks_makes_room_ahead() -> None:
    server = Server(geometry(2, 8), low=0.5, high=0.75)
    client, total = server.client(), server.geometry.slot_count
    client.store(chain("a", total * 3 // 4))
    server.wait(1)
    assert server.stats["evicted_pages"] == 0
    client.store(chain("b", 1))
    server.wait(1)
    assert server.stats["objects"] == total // 2
    assert server.stats["used_share"] == 0.5
    server.wait(1)
    assert server.stats["objects"] == total // 2


def test_other_sizes_give_up_whole_extents() -> None:
    server, client, total = full()
    for number in range(total // 8):
        client.store(chain(number, 4))
        client.store(chain(("x", number), 4))
    extent = server.geometry.extent_bytes
    assert client.store(chain("large", 1), component="mamba", nbytes=extent).status == [RESERVED]
    assert client.match(chain("large", 1), ["mamba"]).pages == 1
    assert server.stats["objects"] >= total - 8
    assert client.store(chain("small", 5), nbytes=100).status == [RESERVED] * 5


def test_an_extent_that_is_being_written_is_not_given_up() -> None:
    server, client, total = full()
    client.store(chain("a", total - 8))
    writing = client.reserve(chain("w", 8))
    assert client.reserve(chain("large", 2), component="mamba", nbytes=server.geometry.extent_bytes).status.count(
        0
    ) == (total // 8 - 1)
    assert client.commit(writing) == [COMMITTED] * 8


def test_an_extent_that_cannot_be_emptied_is_not_robbed() -> None:
    server, client, total = full()
    # The extent with the fewest objects has a slot of a client that may still be writing.
    client.store(chain("a", 1))
    client.reserve(chain("w", 7))
    server.client("deleter").delete(chain("w", 1))
    client.store(chain("b", total - 8))
    assert server.stats["slots_quarantined"] == 7
    assert client.store(chain("large", 1), component="mamba", nbytes=server.geometry.extent_bytes).status == [RESERVED]
    assert client.match(chain("a", 1)).pages == 1


def test_uses_are_remembered_over_a_restart() -> None:
    server, client, total = full()
    for name in ("a", "b"):
        client.store(chain(name, total // 2))
        server.now += 1
    client.touch(chain("a", total // 2))
    server.wait(1)
    server.restart()
    client.connect()
    client.store(chain("c", 2))
    assert client.match(chain("a", total // 2)).pages == total // 2
    assert client.match(chain("b", total // 2)).pages == total // 2 - 2


def test_a_reserve_waits_for_memory_to_come_before_it_evicts() -> None:
    server = Server(growth_s=1.0)
    server.state.books.slabs.ready = 1  # as on a pool whose memory is provided little by little
    server.state.books.slabs._uncut = [0]
    client = server.client()
    client.store(chain("a", 8))
    assert server.state.wanted_extents(server.now) > 1
    assert client.reserve(chain("b", 1)).status == [NO_ROOM]
    assert client.match(chain("a", 8)).pages == 8
    server.state.extents_ready(2, server.now)
    client.store(chain("b", 8))
    server.wait(3)
    assert client.reserve(chain("c", 1)).status == [RESERVED]
    assert server.stats["evicted_pages"] > 0


# ---------------------------------------------------------------- what is refused


def refused(server: Server, message: Request) -> Error:
    before, stats = server.meta.copy(), server.stats
    reply = server.send(message)
    assert isinstance(reply, Error)
    assert reply.message
    assert (server.meta == before).all(), "a refused message changed the pool"
    changed = {key: value for key, value in server.stats.items() if stats[key] != value}
    assert not changed, "a refused message changed the state"
    return reply


BAD_HASHES = [
    (b"x" * 31, "invalid"),
    (bytes(range(32)) * 2, "invalid"),
    (os.urandom(HASH_BYTES * (MAX_BATCH + 1)), "invalid"),
    (ROOT, "invalid"),
]


@pytest.mark.parametrize(("hashes", "code"), BAD_HASHES)
def test_bad_hashes_are_refused(server: Server, client: Client, hashes: bytes, code: str) -> None:
    message = Reserve(1, client.session, client.namespace, "kv", 0, 1, chain("p", 1), hashes, 10)
    assert refused(server, message).code == code


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"world": 0}, "invalid"),
        ({"world": 4097}, "invalid"),
        ({"world": 2, "shard": 2}, "invalid"),
        ({"shard": -1}, "invalid"),
        ({"nbytes": 0}, "invalid"),
        ({"nbytes": -5}, "invalid"),
        ({"nbytes": 32769}, "too-large"),
        ({"parent": b"short"}, "invalid"),
        ({"parent": chain("a", 1)}, "invalid"),
        ({"component": ""}, "invalid"),
        ({"component": "x" * 49}, "invalid"),
        ({"component": "a\nb"}, "invalid"),
        ({"component": "é"}, "invalid"),
        ({"namespace": 9}, "unknown-namespace"),
        ({"namespace": -1}, "unknown-namespace"),
        ({"session": 12345}, "unknown-session"),
    ],
)
def test_a_bad_reserve_is_refused(server: Server, client: Client, changes: dict[str, Any], code: str) -> None:
    values = {
        "rid": 1,
        "session": client.session,
        "namespace": client.namespace,
        "component": "kv",
        "shard": 0,
        "world": 1,
        "parent": ROOT,
        "hashes": chain("a", 2),
        "nbytes": 10,
        **changes,
    }
    assert refused(server, Reserve(**values)).code == code
    assert client.reserve(chain("a", 2)).status == [RESERVED] * 2


@pytest.mark.parametrize(
    ("slots", "generations", "checksums"),
    [
        (b"123", b"", b""),
        (bytes(4), bytes(7), b""),
        (bytes(4), bytes(16), b""),
        (bytes(4), bytes(8), bytes(7)),
        (b"\xff\xff\xff\xff", bytes(8), b""),
        (np.array([10_000], "<u4").tobytes(), bytes(8), b""),
        (bytes(4 * (MAX_BATCH + 1)), bytes(8 * (MAX_BATCH + 1)), b""),
    ],
)
def test_a_bad_commit_or_release_is_refused(
    server: Server, client: Client, slots: bytes, generations: bytes, checksums: bytes
) -> None:
    client.reserve(chain("a", 1))
    assert refused(server, Commit(1, client.session, slots, generations, checksums)).code == "invalid"
    if not checksums:
        assert refused(server, Release(1, client.session, slots, generations)).code == "invalid"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"hashes": b"x"}, "invalid"),
        ({"hashes": bytes(HASH_BYTES * (MAX_BATCH + 1))}, "invalid"),
        ({"components": []}, "invalid"),
        ({"components": ["kv"] * 5}, "invalid"),
        ({"components": ["\x00"]}, "invalid"),
        ({"shard": -1}, "invalid"),
        ({"shard": 4096}, "invalid"),
        ({"namespace": 7}, "unknown-namespace"),
        ({"session": 0}, "unknown-session"),
    ],
)
def test_a_bad_match_is_refused(server: Server, client: Client, changes: dict[str, Any], code: str) -> None:
    values = {
        "rid": 1,
        "session": client.session,
        "namespace": client.namespace,
        "components": ["kv"],
        "shard": 0,
        "hashes": chain("a", 1),
        **changes,
    }
    assert refused(server, Match(**values)).code == code


def test_other_bad_messages_are_refused(server: Server, client: Client) -> None:
    session, namespace = client.session, client.namespace
    assert refused(server, Delete(1, session, namespace, b"x")).code == "invalid"
    assert refused(server, Delete(1, session, 5, b"")).code == "unknown-namespace"
    assert refused(server, Clear(1, session, 5)).code == "unknown-namespace"
    assert refused(server, Clear(1, 99)).code == "unknown-session"
    assert refused(server, Heartbeat(1, 99)).code == "unknown-session"
    assert refused(server, Hello(PROTOCOL_VERSION + 1, 1, bytes(16), "", "", 0, 0, "", "")).code == "version"
    assert refused(server, Hello(PROTOCOL_VERSION, 1, bytes(15), "", "", 0, 0, "", "")).code == "invalid"
    assert refused(server, Hello(PROTOCOL_VERSION, 1, bytes(16), "n" * 257, "", 0, 0, "", "")).code == "invalid"
    for one_way in (Touch(session, namespace, b"x"), Touch(session, 9, b""), Touch(99, 0, b""), Goodbye(99)):
        assert server.send(one_way) is None
    assert isinstance(server.send(Stats(1)), StatsReply)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"\xff", b"[1]", record()[:-1], record() + b" ", record().replace(b'{"', b'{ "', 1), b"x" * 5000],
)
def test_a_record_that_is_not_canonical_is_refused(server: Server, client: Client, content: bytes) -> None:
    assert refused(server, OpenNamespace(1, client.session, content)).code == "invalid"


def test_full_tables_say_so(server: Server, client: Client) -> None:
    for number in range(3):
        assert not isinstance(server.send(OpenNamespace(1, client.session, record(str(number)))), Error)
    assert refused(server, OpenNamespace(1, client.session, record("one more"))).code == "limit"
    assert not isinstance(server.send(OpenNamespace(1, client.session, record("0"))), Error)
    for number in range(4):
        client.store(chain(number, 1), component=f"c{number}")
    message = Reserve(1, client.session, client.namespace, "c4", 0, 1, ROOT, chain("x", 1), 10)
    assert refused(server, message).code == "limit"
    # Unused namespaces make room at the next start; those with pages keep their numbers.
    server.restart()
    client.connect()
    assert client.match(chain(0, 1), ["c0"]).pages == 1
    assert not isinstance(server.send(OpenNamespace(1, client.session, record("one more"))), Error)


ints = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 5)
blobs = st.binary(max_size=100) | st.integers(0, 4).map(lambda count: chain("f", count))
texts = st.text(max_size=5) | st.sampled_from(["kv", "draft"])


@given(st.data())
def test_no_message_makes_the_state_raise_or_break(data: st.DataObject) -> None:
    server = Server()
    client = server.client()
    grant = client.reserve(chain("f", 3))
    client.commit(grant, [0, 1])
    sessions = ints | st.just(client.session)
    slots = st.binary(max_size=20) | st.just(grant.slots.tobytes())
    generations = st.binary(max_size=40) | st.just(grant.generations.tobytes())
    messages = st.one_of(
        st.builds(Hello, st.sampled_from([1, 2]), ints, st.binary(max_size=17), texts, texts, ints, ints, texts, texts),
        st.builds(OpenNamespace, ints, sessions, st.binary(max_size=20) | st.just(record("f"))),
        st.builds(Match, ints, sessions, ints, st.lists(texts, max_size=3), ints, blobs, st.booleans()),
        st.builds(Reserve, ints, sessions, ints, texts, ints, ints, blobs | st.just(ROOT), blobs, ints),
        st.builds(Commit, ints, sessions, slots, generations, st.just(b"") | st.binary(max_size=24)),
        st.builds(Release, ints, sessions, slots, generations),
        st.builds(Touch, sessions, ints, blobs),
        st.builds(Delete, ints, sessions, ints, blobs),
        st.builds(Clear, ints, sessions, st.none() | ints),
        st.builds(Heartbeat, ints, sessions),
        st.builds(Stats, ints, ints),
        st.builds(Goodbye, sessions),
    )
    for message in data.draw(st.lists(messages, min_size=1, max_size=4)):
        reply = server.send(message)
        assert (reply is None) == isinstance(message, (Touch, Goodbye))
        if reply is not None:
            assert reply.rid == message.rid
            assert protocol.decode_reply(protocol.encode(reply)) == reply
