"""Holds: one answer for all ranks of a request, and its pages kept from eviction, within bounds, by nobody else's leave."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from maru_harness import Client, Server, chain, geometry

from maru_core.protocol import NO_SLOT, ROOT, Error, Hold, MissReason, Rule, Want
from maru_server import holds
from maru_server.sessions import Peer


def hold(request: bytes = b"r", ranks: int = 1, seconds: float = 30.0) -> Hold:
    return Hold(request, ranks, seconds)


def press(client: Client, name: str = "other") -> None:
    """Store twice as much as the pool has room for."""
    slots = client.server.geometry.extent_count * 8
    for batch in range(2 * slots // 8):
        client.commit(client.reserve(chain(f"{name} {batch}", 8)))


def present(client: Client, hashes: bytes, **options: Any) -> int:
    return client.match(hashes, **options).pages


# ---------------------------------------------------------------- what a hold keeps


def test_held_pages_stay_and_others_go(server: Server, client: Client) -> None:
    for name in "ab":
        client.store(chain(name, 8))
    answer = client.match(chain("a", 8), hold=hold())
    assert (answer.pages, answer.held_s, answer.why) == (8, 30.0, MissReason.NONE)
    press(client)
    assert present(client, chain("a", 8)) == 8
    assert present(client, chain("b", 8)) < 8
    assert server.stats["held_bytes"] == 8 * 4096


def test_what_was_released_can_be_evicted(client: Client) -> None:
    client.store(chain("a", 8))
    client.match(chain("a", 8), hold=hold())
    assert client.unhold(b"r") == 1
    press(client)
    assert present(client, chain("a", 8)) == 0
    assert client.server.stats["held_bytes"] == client.server.stats["holds"] == 0


def test_a_hold_keeps_what_was_answered_and_not_what_continues_it(client: Client) -> None:
    client.store(chain("a", 8))
    client.match(chain("a", 5), hold=hold())
    press(client)
    assert present(client, chain("a", 8)) == 5


def test_a_plain_match_holds_and_renews_nothing(server: Server, client: Client) -> None:
    client.store(chain("a", 4))
    client.match(chain("a", 4), hold=hold(seconds=8))
    for _ in range(4):
        server.wait(3, alive=(client,))
        assert client.match(chain("a", 4)).held_s == 0
        client.match(chain("a", 4), hold=hold(seconds=8))  # the same rank once more: its reply was lost
    assert server.stats["holds"] == 0
    press(client)
    assert present(client, chain("a", 4)) == 0


def test_it_ends_by_itself_and_no_later_than_the_server_allows(client: Client) -> None:
    server = Server(max_hold_s=5.0)
    client = server.client()
    client.store(chain("a", 4))
    assert client.match(chain("a", 4), hold=hold(seconds=1e9)).held_s == 5.0
    server.wait(4, alive=(client,))
    assert client.match(chain("a", 4), hold=hold()).held_s == pytest.approx(1.0)
    server.wait(2, alive=(client,))
    assert client.match(chain("a", 4), hold=hold()).held_s == 0
    assert server.stats["holds"] == 0


def test_the_same_page_is_charged_once_and_kept_until_the_last_request_is_done(client: Client) -> None:
    client.store(chain("a", 4))
    for request in (b"1", b"2"):
        assert client.match(chain("a", 4), hold=hold(request)).held_s > 0
    assert client.server.stats["held_bytes"] == 4 * 4096
    client.unhold(b"1")
    press(client)
    assert present(client, chain("a", 4)) == 4
    client.unhold(b"2")
    press(client)
    assert present(client, chain("a", 4)) == 0


def test_a_hold_of_a_suffix_is_charged_for_what_it_keeps(client: Client) -> None:
    client.store(chain("a", 8))
    assert client.match(chain("a", 2, 6), hold=hold()).held_s > 0
    assert client.server.stats["held_bytes"] == 8 * 4096


def test_hashes_that_are_no_path_of_the_tree_are_not_held(client: Client) -> None:
    client.store(chain("a", 3))
    client.store(chain("b", 3))
    answer = client.match(chain("a", 2) + chain("b", 1, 2), hold=hold())
    assert (answer.pages, answer.held_s) == (3, 0)


# ---------------------------------------------------------------- one answer for all ranks


def ranks(server: Server, count: int = 2) -> list[Client]:
    return [server.client(f"rank {rank}") for rank in range(count)]


def test_later_ranks_are_told_what_the_first_was_told(server: Server) -> None:
    first, second = ranks(server)
    first.store(chain("a", 4))
    assert first.match(chain("a", 8), hold=hold(ranks=2)).pages == 4
    first.store(chain("a", 4, 4), parent=chain("a", 1, 3))
    assert present(second, chain("a", 8)) == 8
    answer = second.match(chain("a", 8), hold=hold(ranks=2))
    assert (answer.pages, answer.why) == (4, MissReason.NOT_STORED)
    assert answer.slots == second.match(chain("a", 4)).slots


def test_also_where_there_is_less_by_now(server: Server) -> None:
    first, second = ranks(server)
    first.store(chain("a", 6))
    before = first.match(chain("a", 6), hold=hold(ranks=2))
    first.delete(chain("a", 1, 4))
    answer = second.match(chain("a", 6), hold=hold(ranks=2))
    assert answer.pages == 6
    assert answer.slots == [*before.slots[:4], NO_SLOT, NO_SLOT]
    assert answer.lengths == [4000] * 4 + [0, 0]


def test_each_rank_gets_its_own_shard(server: Server) -> None:
    first, second = ranks(server)
    for shard, client in enumerate((first, second)):
        client.store(chain("a", 3), shard=shard, world=2)
    answers = [c.match(chain("a", 3), shard=shard, hold=hold(ranks=2)) for shard, c in enumerate((first, second))]
    assert [answer.pages for answer in answers] == [3, 3]
    assert not set(answers[0].slots) & set(answers[1].slots)


def test_an_answer_of_nothing_is_an_answer(server: Server) -> None:
    first, second = ranks(server)
    assert first.match(chain("a", 4), hold=hold(ranks=2)).pages == 0
    first.store(chain("a", 4))
    assert second.match(chain("a", 4), hold=hold(ranks=2)).pages == 0


def test_the_places_where_all_may_stop_are_the_same_too(server: Server) -> None:
    first, second = ranks(server)
    first.store(chain("a", 6))
    states = [first.store(chain("a", 1, page), component="mamba", parent=chain("a", 1, page - 1)) for page in (1, 3)]
    assert all(len(grant.slots) == 1 for grant in states)
    asked = {"components": ["kv", "mamba"], "rules": [Want(), Want(Rule.TRAILING_PAGES, 1)], "hold": hold(ranks=2)}
    answer = first.match(chain("a", 6), **asked)
    assert (answer.pages, answer.ends, answer.covered) == (4, [2, 4], [6, 4])
    first.store(chain("a", 1, 5), component="mamba", parent=chain("a", 1, 4))
    later = second.match(chain("a", 6), **asked)
    assert (later.pages, later.ends, later.covered) == (4, [2, 4], [6, 4])
    assert later.slots == answer.slots


def test_the_decision_outlives_the_hold_until_all_ranks_have_released_it(server: Server) -> None:
    first, second = ranks(server)
    first.store(chain("a", 4))
    first.match(chain("a", 8), hold=hold(ranks=2, seconds=2))
    server.wait(5, alive=(first, second))
    assert server.stats["holds"] == 0
    first.store(chain("a", 4, 4), parent=chain("a", 1, 3))
    answer = second.match(chain("a", 8), hold=hold(ranks=2, seconds=2))
    assert (answer.pages, answer.held_s) == (4, 0)
    first.unhold(b"r")
    assert first.match(chain("a", 8), hold=hold(ranks=2)).pages == 4
    second.unhold(b"r")
    answer = first.match(chain("a", 8), hold=hold(ranks=2))
    assert (answer.pages, answer.held_s) == (8, 30.0)


def test_another_chain_under_the_same_request_is_another_question(client: Client) -> None:
    client.store(chain("a", 4))
    client.store(chain("b", 2))
    assert client.match(chain("a", 4), hold=hold()).pages == 4
    assert client.match(chain("b", 4), hold=hold()).pages == 2
    assert client.match(chain("a", 3), hold=hold()).pages == 3
    assert client.server.stats["holds"] == 3
    assert client.unhold(b"r") == 3
    assert client.server.stats["holds"] == 0


def test_other_components_or_rules_are_another_question_too(server: Server) -> None:
    """An answer has something for each component that was asked for: one to another question would be none."""
    first, second, third = ranks(server, 3)
    first.store(chain("a", 4))
    first.store(chain("a", 2), component="draft")
    asked = hold(ranks=3)
    assert first.match(chain("a", 4), hold=asked).covered == [4]
    answer = second.match(chain("a", 4), ["kv", "draft"], hold=asked)
    assert (answer.pages, answer.covered, answer.ends) == (2, [4, 2], [])
    answer = third.match(chain("a", 4), hold=asked, rules=[Want(Rule.TRAILING_PAGES, 1)])
    assert (answer.pages, answer.ends) == (4, [1, 2, 3, 4])


# ---------------------------------------------------------------- who may end it


def test_a_repeated_release_is_one_release(server: Server) -> None:
    first, second = ranks(server)
    first.store(chain("a", 4))
    for client in (first, first, second):
        client.match(chain("a", 4), hold=hold(ranks=2))
    for _ in range(3):
        first.unhold(b"r")
    press(first)
    assert present(first, chain("a", 4)) == 4
    second.unhold(b"r")
    assert server.stats["holds"] == 0


def test_nobody_releases_what_it_did_not_ask_for(server: Server) -> None:
    mine, other, elsewhere = server.client("mine"), server.client("other"), server.client("elsewhere", tag="x")
    mine.store(chain("a", 4))
    mine.match(chain("a", 4), hold=hold(b"r"))
    other.match(chain("a", 4), hold=hold(b"s"))
    elsewhere.match(chain("a", 4), hold=hold(b"r"))
    assert other.unhold(b"r") == elsewhere.unhold(b"s") == 0
    assert elsewhere.unhold(b"r") == other.unhold(b"s") == 1
    press(other)
    assert present(mine, chain("a", 4)) == 4


def test_the_same_request_id_in_another_namespace_is_another_request(server: Server) -> None:
    mine, elsewhere = server.client("mine"), server.client("elsewhere", tag="x")
    mine.store(chain("a", 4))
    elsewhere.store(chain("a", 2))
    assert mine.match(chain("a", 4), hold=hold()).pages == 4
    assert elsewhere.match(chain("a", 4), hold=hold()).pages == 2


def test_a_rank_that_is_gone_has_released(server: Server) -> None:
    first, second, third = ranks(server, 3)
    first.store(chain("a", 4))
    for client in (first, second):
        client.match(chain("a", 4), hold=hold(ranks=2))
    first.goodbye()
    assert server.stats["holds"] == 1
    second.unhold(b"r")
    assert server.stats["holds"] == 0
    second.match(chain("a", 8), hold=hold(ranks=5))
    second.goodbye()
    assert server.stats["holds"] == 0
    third.store(chain("a", 4, 4), parent=chain("a", 1, 3))
    assert third.match(chain("a", 8), hold=hold(ranks=5)).pages == 8, "nobody is left who was told otherwise"


def test_a_rank_that_released_before_the_next_one_asked_does_not_end_it(server: Server) -> None:
    first, second = ranks(server)
    first.store(chain("a", 4))
    first.match(chain("a", 4), hold=hold(ranks=2))
    first.unhold(b"r")
    press(first)
    answer = second.match(chain("a", 4), hold=hold(ranks=2))
    assert answer.pages == 4
    assert NO_SLOT not in answer.slots


# ---------------------------------------------------------------- bounds


def test_beyond_the_budget_nothing_is_held_and_all_are_still_told_the_same(server: Server) -> None:
    first, second = ranks(server)
    first.store(chain("a", 16))  # a quarter of the pool
    first.store(chain("b", 4))
    assert first.match(chain("a", 16), hold=hold(b"a")).held_s > 0
    assert first.match(chain("b", 8), hold=hold(b"b", ranks=2)).held_s == 0
    first.store(chain("b", 4, 4), parent=chain("b", 1, 3))
    answer = second.match(chain("b", 8), hold=hold(b"b", ranks=2))
    assert (answer.pages, answer.held_s) == (4, 0)
    first.unhold(b"a")
    assert first.match(chain("b", 8), hold=hold(b"c")).held_s > 0


def test_where_nothing_may_be_held_all_are_still_told_the_same() -> None:
    server = Server(hold_share=0.0)
    first, second = ranks(server)
    first.store(chain("a", 4))
    assert first.match(chain("a", 8), hold=hold(ranks=2)).held_s == 0
    first.store(chain("a", 4, 4), parent=chain("a", 1, 3))
    answer = second.match(chain("a", 8), hold=hold(ranks=2))
    assert (answer.pages, answer.held_s) == (4, 0)


def test_eviction_goes_on_while_holds_are_at_their_budget(server: Server, client: Client) -> None:
    client.store(chain("a", 16))
    client.match(chain("a", 16), hold=hold())
    press(client)
    grant = client.reserve(chain("new", 40))
    assert set(grant.status) == {0}


def test_no_one_session_has_all_holds(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds, "SESSION_LIVE_MAX", 2)
    monkeypatch.setattr(holds, "LIVE_MAX", 3)
    first, second = ranks(server)
    first.store(chain("a", 4))
    held = [client.match(chain("a", 4), hold=hold(b"%d" % n)).held_s > 0 for n, client in enumerate([first] * 3)]
    assert held == [True, True, False]
    assert [second.match(chain("a", 4), hold=hold(b"s%d" % n)).held_s > 0 for n in range(2)] == [True, False]


def test_what_is_remembered_is_bounded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds, "SESSION_LIVE_MAX", 2)
    monkeypatch.setattr(holds, "LIVE_MAX", 3)
    monkeypatch.setattr(holds, "REMEMBERED_MAX", 8)
    monkeypatch.setattr(holds, "SESSION_REMEMBERED_MAX", 5)
    first, second = ranks(server)
    first.store(chain("a", 4))
    for number in range(12):
        first.match(chain("a", 4), hold=hold(b"%d" % number))
    assert server.state.books.holds.remembered == 5
    for number in range(12):
        second.match(chain("a", 4), hold=hold(b"s%d" % number))
    assert server.state.books.holds.remembered == 8
    assert len(server.state.books.holds) == 3


def test_one_tenant_leaves_room_for_others(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds, "LIVE_MAX", 4)
    monkeypatch.setattr(holds, "REMEMBERED_MAX", 12)
    one, two = (server.client(name, peer=Peer(name, operator=False)) for name in ("one", "two"))
    one.store(chain("a", 9))
    one.store(chain("b", 2))
    two.store(chain("a", 8))
    two.match(chain("x", 1), hold=hold(b"first", ranks=2))
    # Of the 16 pages that may be held each tenant may hold eight, and of four holds two.
    assert one.match(chain("a", 9), hold=hold(b"nine")).held_s == 0
    assert one.match(chain("a", 8), hold=hold(b"eight")).held_s > 0
    assert one.match(chain("b", 2), hold=hold(b"two")).held_s == 0
    assert two.match(chain("a", 8), hold=hold(b"eight")).held_s > 0
    one.unhold(b"eight")
    assert [one.match(chain("b", 1), hold=hold(b"%d" % n)).held_s > 0 for n in range(3)] == [True, True, False]
    # And of what is remembered a half: the other's oldest decision is still there.
    for number in range(20):
        one.match(chain("a", 1), hold=hold(b"many %d" % number))
    two.store(chain("x", 1))
    assert two.match(chain("x", 1), hold=hold(b"first", ranks=2)).pages == 0


def test_old_decisions_are_forgotten(server: Server, client: Client) -> None:
    client.match(chain("a", 4), hold=hold(ranks=2, seconds=1))
    server.wait(holds.REMEMBERED_S + 2, step=5.0, alive=(client,))
    assert server.state.books.holds.remembered == 0


# ---------------------------------------------------------------- pages that are removed on demand


def test_a_hold_of_pages_that_were_removed_ends_and_releases_nobody_elses(server: Server) -> None:
    first, second = ranks(server)
    first.store(chain("a", 4))
    first.match(chain("a", 4), hold=hold(b"old"))
    first.delete(chain("a", 1))
    assert server.stats["holds"] == server.stats["held_bytes"] == 0
    first.store(chain("a", 4))  # the same pages, in the same rows
    second.match(chain("a", 4), hold=hold(b"new"))
    first.unhold(b"old")
    press(first)
    assert present(first, chain("a", 4)) == 4


@pytest.mark.parametrize("everything", [False, True])
def test_a_hold_of_a_cleared_namespace_ends(server: Server, client: Client, everything: bool) -> None:
    other = server.client("other", tag="x")
    for c in (client, other):
        c.store(chain("a", 4))
        c.match(chain("a", 4), hold=hold())
    client.clear(everything)
    assert server.stats["holds"] == (0 if everything else 1)
    client.store(chain("a", 4))
    assert client.unhold(b"r") == 1
    server.wait(40, alive=(client, other))
    assert server.stats["holds"] == 0


def test_what_continues_a_deleted_page_is_no_longer_held(client: Client) -> None:
    client.store(chain("a", 6))
    client.match(chain("a", 2), hold=hold(b"short"))
    client.match(chain("a", 6), hold=hold(b"long"))
    client.delete(chain("a", 1, 3))
    assert client.server.stats["holds"] == 1
    press(client)
    assert present(client, chain("a", 6)) == 2


# ---------------------------------------------------------------- requests that cannot be


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hold": Hold(b"", 1, 1.0)}, "0 bytes: give 1 to 64"),
        ({"hold": Hold(b"x" * 65, 1, 1.0)}, "65 bytes: give 1 to 64"),
        ({"hold": Hold(b"x", 0, 1.0)}, "0 ranks: give 1 to"),
        ({"hold": Hold(b"x", 4097, 1.0)}, "4097 ranks: give 1 to"),
        ({"hold": Hold(b"x", 1, 0.0)}, "0.0 s: give more"),
        ({"hold": Hold(b"x", 1, -1.0)}, "-1.0 s: give more"),
        ({"hold": Hold(b"x", 1, float("nan"))}, "nan s: give more"),
        ({"hold": Hold(b"x", 1, float("inf"))}, "inf s: give more"),
        ({"hold": Hold(b"x", 1, 1.0), "sparse": True}, "sparse with a hold"),
        ({"rules": [Want()], "sparse": True}, "sparse with rules"),
        ({"rules": [Want(), Want()]}, "2 rules for 1 components"),
        ({"rules": [Want(3)]}, "rule 3 of component 'kv' is not known"),
        ({"rules": [Want(-1)]}, "rule -1 of component 'kv' is not known"),
        ({"rules": [Want(Rule.TRAILING_PAGES, 0)]}, "has 0 pages: give 1 to"),
        ({"rules": [Want(Rule.TRAILING_PAGES, 1 << 40)]}, "pages: give 1 to"),
        ({"rules": [Want(Rule.BLOCK_GROUPS, 0, 0)]}, "has 0 pages: give 1 to"),
        ({"rules": [Want(Rule.BLOCK_GROUPS, 4, 0)]}, "have 0 of 4 pages: give 1 to 4"),
        ({"rules": [Want(Rule.BLOCK_GROUPS, 4, 5)]}, "have 5 of 4 pages: give 1 to 4"),
    ],
)
def test_a_hold_or_rule_that_cannot_be_is_refused(client: Client, options: dict[str, Any], says: str) -> None:
    client.store(chain("a", 2))
    reply = client.match_reply(chain("a", 2), **options)
    assert isinstance(reply, Error)
    assert says in reply.message
    assert client.server.stats["holds"] == client.server.state.books.holds.remembered == 0


# ---------------------------------------------------------------- whatever happens


REQUESTS = [b"q", b"r"]
CHAINS = [chain("t", 6), chain("t", 3) + chain("l", 4), chain("s", 8)]


def act() -> st.SearchStrategy[tuple[Any, ...]]:
    rank, which = st.integers(0, 2), st.integers(0, len(CHAINS) - 1)
    request = st.sampled_from(REQUESTS)
    return st.one_of(
        st.tuples(st.just("store"), rank, which, st.integers(1, 8)),
        st.tuples(st.just("match"), rank, which, request, st.sampled_from([1, 2, 3]), st.sampled_from([3.0, 30.0])),
        st.tuples(st.just("match"), rank, which, request, st.sampled_from([1, 2, 3]), st.sampled_from([3.0, 30.0])),
        st.tuples(st.just("unhold"), rank, request),
        st.tuples(st.just("delete"), rank, which, st.integers(0, 7)),
        st.tuples(st.just("clear"), rank),
        st.tuples(st.just("wait"), st.sampled_from([1.0, 5.0])),
        st.tuples(st.just("leave"), rank),
        st.tuples(st.just("press"), rank, st.integers(0, 9)),
    )


@settings(max_examples=60)
@given(st.lists(act(), max_size=30))
def test_ranks_agree_and_what_is_held_stays(steps: list[tuple[Any, ...]]) -> None:
    """Against a plain dictionary: what each request was told, who shares it and who has released it."""
    server = Server(geometry(extents=4))
    clients = [server.client(f"rank {rank}") for rank in range(3)]
    told: dict[tuple[bytes, int], dict[str, Any]] = {}

    def settle(rank: int, key: tuple[bytes, int], gone: bool) -> None:
        entry = told[key]
        entry["done"].add(clients[rank].session)
        if gone:
            entry["sessions"].discard(clients[rank].session)
        if len(entry["done"]) >= entry["ranks"] or not entry["sessions"]:
            del told[key]

    for step in steps:
        kind, rest = step[0], step[1:]
        if kind == "store":
            rank, which, pages = rest
            clients[rank].commit(clients[rank].reserve(CHAINS[which][: pages * 32], parent=ROOT))
        elif kind == "match":
            rank, which, request, count, seconds = rest
            client = clients[rank]
            plain = client.match(CHAINS[which])
            answer = client.match(CHAINS[which], hold=Hold(request, count, seconds))
            entry = told.setdefault(
                (request, which),
                {"pages": plain.pages, "ranks": count, "sessions": set(), "done": set(), "until": server.now + seconds,
                 "intact": True, "held": answer.held_s > 0},
            )  # fmt: skip
            entry["sessions"].add(client.session)
            assert answer.pages == entry["pages"], "ranks were told different things"
            assert answer.held_s == (
                pytest.approx(entry["until"] - server.now)
                if entry["held"] and entry["intact"] and server.now < entry["until"]
                else 0
            )
        elif kind == "unhold":
            rank, request = rest
            clients[rank].unhold(request)
            for key in [key for key in told if key[0] == request and clients[rank].session in told[key]["sessions"]]:
                settle(rank, key, gone=False)
        elif kind == "delete":
            rank, which, page = rest
            clients[rank].delete(CHAINS[which][page * 32 : page * 32 + 32])
            for (_, other), entry in told.items():
                entry["intact"] &= clients[rank].match(CHAINS[other]).pages >= entry["pages"]
        elif kind == "clear":
            clients[rest[0]].clear()
            for entry in told.values():
                entry["intact"] = False
        elif kind == "wait":
            server.wait(rest[0], alive=tuple(clients))
        elif kind == "leave":
            client = clients[rest[0]]
            for key in [key for key in told if client.session in told[key]["sessions"]]:
                settle(rest[0], key, gone=True)
            client.goodbye()
            client.connect()
        elif kind == "press":
            rank, name = rest
            for batch in range(6):
                clients[rank].commit(clients[rank].reserve(chain(f"{name} {batch}", 8)))
        for (_, which), entry in told.items():
            if entry["held"] and entry["intact"] and server.now < entry["until"]:
                assert clients[0].match(CHAINS[which]).pages >= entry["pages"], "a held page went"
