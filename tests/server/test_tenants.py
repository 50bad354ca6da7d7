"""Whose pages are whose: namespaces, quotas, and who makes room for whom."""

from __future__ import annotations

from typing import Any

import pytest
from maru_harness import Client, Server, chain, record

from maru_core.errors import ConfigError
from maru_core.namespace import NAMESPACE_RECORD_MAX
from maru_core.protocol import (
    ROOT,
    Clear,
    Delete,
    Error,
    ErrorCode,
    Evict,
    Match,
    MissReason,
    OpenNamespace,
    Request,
    Reserve,
    Touch,
    Unhold,
)
from maru_server.config import StateConfig
from maru_server.sessions import Peer
from maru_server.tenants import eviction_config, parse_quotas

RED = Peer("red", operator=False)
BLUE = Peer("blue", operator=False)
CHIEF = Peer("red", operator=True)
RESERVED, NO_ROOM, QUOTA = 0, 3, 5


def two(server: Server, **options: Any) -> tuple[Client, Client]:
    return server.client("red", peer=RED, **options), server.client("blue", peer=BLUE, **options)


def used(server: Server) -> dict[str, int]:
    """Slots of 4 KiB by tenant."""
    return {tenant: nbytes // 4096 for tenant, nbytes in server.state.books.pages.tenants.used.items() if nbytes}


def store(client: Client, name: object, pages: int, **options: Any) -> list[int]:
    grant = client.reserve(chain(name, pages), **options)
    client.commit(grant)
    return grant.status


# ---------------------------------------------------------------- namespaces


def test_the_same_record_of_two_tenants_is_two_namespaces(server: Server) -> None:
    red, blue = two(server)
    nobody = server.client("nobody")
    assert len({red.namespace, blue.namespace, nobody.namespace}) == 3
    red.store(chain("a", 3))
    assert blue.match(chain("a", 3)).pages == 0
    assert blue.match(chain("a", 3)).why == MissReason.NOT_STORED, "another tenant's pages are no reason"
    assert server.client("red 2", peer=RED).match(chain("a", 3)).pages == 3


def test_tenants_come_back_after_a_restart(server: Server) -> None:
    red, blue = two(server)
    red.store(chain("a", 3))
    blue.store(chain("a", 2))
    numbers = red.namespace, blue.namespace
    server.restart()
    assert used(server) == {"red": 3, "blue": 2}
    red, blue = two(server)
    assert (red.namespace, blue.namespace) == numbers
    assert (red.match(chain("a", 3)).pages, blue.match(chain("a", 3)).pages) == (3, 2)


def messages(client: Client) -> list[Request]:
    session, number, page = client.session, client.namespace, chain("a", 1)
    return [
        Match(1, session, number, ["kv"], 0, page),
        Unhold(1, session, number, b"r"),
        Reserve(1, session, number, "kv", 0, 1, ROOT, page, 100),
        Touch(session, number, page),
        Delete(1, session, number, page),
        Clear(1, session, number),
    ]


def test_a_namespace_number_is_of_no_use_to_another_tenant(server: Server) -> None:
    red, blue = two(server)
    red.store(chain("a", 3))
    last_use = server.state.books.trees[red.namespace].last_use[:3].tolist()
    server.now += 3
    mine = blue.namespace
    blue.namespace = red.namespace
    for message in messages(blue):
        reply = blue.send(message)
        if isinstance(message, Touch):
            assert reply is None
        else:
            assert isinstance(reply, Error), message
            assert reply.code == ErrorCode.UNKNOWN_NAMESPACE
    blue.namespace = mine
    assert server.state.books.trees[red.namespace].last_use[:3].tolist() == last_use
    assert red.match(chain("a", 3)).pages == 3


def test_an_operator_may_use_any(server: Server) -> None:
    _, blue = two(server)
    blue.store(chain("a", 3))
    chief = server.client("chief", peer=CHIEF)
    chief.namespace = blue.namespace
    assert chief.match(chain("a", 3)).pages == 3
    assert chief.delete(chain("a", 3)[64:]) == 1
    assert chief.clear() == 2


def test_a_tenant_clears_its_own_and_an_operator_all(server: Server) -> None:
    red, blue = two(server)
    other = server.client("red x", peer=RED, tag="x")
    red.store(chain("a", 3))
    other.store(chain("b", 2))
    blue.store(chain("a", 4))
    assert red.clear(everything=True) == 5
    assert blue.match(chain("a", 4)).pages == 4
    red.store(chain("a", 3))
    assert used(server) == {"red": 3, "blue": 4}
    assert server.client("chief", peer=CHIEF).clear(everything=True) == 7
    assert used(server) == {}


def test_a_record_that_does_not_fit_beside_its_tenant_is_refused(server: Server) -> None:
    room = NAMESPACE_RECORD_MAX - len(record())
    client = server.client("long", peer=Peer("t" * 64, operator=False))
    reply = client.send(OpenNamespace(1, client.session, record("x" * room)))
    assert isinstance(reply, Error)
    assert reply.code == ErrorCode.INVALID
    assert "shorten the tag" in reply.message


# ---------------------------------------------------------------- quotas


def test_quotas_are_written_tenant_equals_share() -> None:
    assert parse_quotas([]) == {}
    assert parse_quotas(["red=0.25", "a=b=1", "=0.5"]) == {"red": 0.25, "a=b": 1.0, "": 0.5}
    for wrong in ("red", "red=", "red=0", "red=1.1", "red=-1", "red=nan", "red=x", ""):
        with pytest.raises(ConfigError, match="--quota"):
            parse_quotas([wrong])
    with pytest.raises(ConfigError, match="twice"):
        parse_quotas(["red=0.1", "red=0.2"])
    assert eviction_config("lfu-age", ["red=0.5"], 0.1) == {
        "policy": "lfu-age",
        "quotas": {"red": 0.5},
        "pin_share": 0.1,
    }
    with pytest.raises(ConfigError, match="--pin-share"):
        eviction_config("lru", [], 1.5)
    with pytest.raises(ConfigError, match="--policy"):
        eviction_config("fifo", [], 0.5)


def test_a_tenant_at_its_quota_makes_room_from_its_own_pages() -> None:
    server = Server(quotas={"red": 0.25})  # of 64 slots
    red, blue = two(server)
    for number in range(8):
        server.now += 1
        assert store(blue, number, 2) == [RESERVED] * 2
    for number in range(12):
        server.now += 1
        assert store(red, number, 3) == [RESERVED] * 3
        assert used(server)["red"] <= 16
    assert used(server) == {"red": 16, "blue": 16}
    assert all(blue.match(chain(number, 2)).pages == 2 for number in range(8)), "it was at nobody else's cost"
    assert red.match(chain(11, 3)).pages == 3
    assert server.stats["no_room"] == 0


def test_what_a_quota_cannot_hold_is_refused_as_that() -> None:
    server = Server(quotas={"red": 0.25})
    red, _ = two(server)
    status = store(red, "a", 20)
    assert status == [RESERVED] * 16 + [QUOTA] * 4
    assert server.stats["over_quota"] == 4
    assert server.stats["no_room"] == 0
    assert server.state.books.trees[red.namespace].counts["refused_quota"] == 4
    # The pages that a batch builds on are not evicted for it, and there are no others.
    assert red.reserve(chain("a", 4, start=16), parent=chain("a", 1, start=15)).status == [QUOTA] * 4
    assert red.match(chain("a", 16)).pages == 16


def test_what_is_being_written_counts() -> None:
    server = Server(quotas={"red": 0.25})
    red, _ = two(server)
    grant = red.reserve(chain("a", 16))
    assert used(server) == {"red": 16}
    assert red.reserve(chain("b", 1)).status == [QUOTA]
    red.release(grant, slice(0, 3))
    assert used(server) == {"red": 13}
    assert red.reserve(chain("b", 4)).status == [RESERVED] * 3 + [QUOTA]


def test_no_room_and_over_quota_are_told_apart() -> None:
    server = Server(quotas={"red": 0.5}, high=1.0)
    red, blue = two(server)
    writing = blue.reserve(chain("b", 60))
    assert writing.status == [RESERVED] * 60
    assert store(red, "a", 40) == [RESERVED] * 4 + [NO_ROOM] * 28 + [QUOTA] * 8
    assert server.stats["no_room"] == 28
    assert server.stats["over_quota"] == 8


def test_a_smaller_quota_after_a_restart_is_reached_in_the_background() -> None:
    server = Server(quotas={"red": 0.75})
    red, blue = two(server)
    for number in range(15):
        server.now += 1
        store(red, number, 3)
    store(blue, "b", 16)
    server.config = StateConfig(quotas={"red": 0.25}, low=0.75, high=0.9)
    server.restart()
    assert used(server) == {"red": 45, "blue": 16}
    server.wait(1)
    assert used(server) == {"red": 12, "blue": 16}


def test_who_is_over_its_quota_makes_room_first_even_if_others_are_older() -> None:
    server = Server(quotas={"red": 0.9}, high=1.0)
    red, blue = two(server)
    store(blue, "b", 16)
    for number in range(16):
        server.now += 1
        store(red, number, 3)
    server.config = StateConfig(quotas={"red": 0.5}, high=1.0)
    server.restart()
    red, blue = two(server)
    # Red has 48 slots and may have 32: the next 14 of blue's are at red's cost, although blue's are older.
    assert store(blue, "c", 14) == [RESERVED] * 14
    assert blue.match(chain("b", 16)).pages == 16
    assert used(server) == {"red": 34, "blue": 30}
    # Down to its quota, and no farther: from there on the oldest go.
    server.now += 1
    assert store(blue, "d", 6) == [RESERVED] * 6
    assert used(server) == {"red": 32, "blue": 32}
    assert blue.match(chain("b", 16)).pages == 12


def test_a_quota_is_of_what_there_is() -> None:
    """Where memory cannot be had, shares are shares of less."""
    server = Server(quotas={"red": 0.5}, growth_s=0.0, checked=False)
    server.boot_without_memory()
    server.state.extents_ready(2, server.now)
    server.wait(5)
    red, _ = two(server)
    assert store(red, "a", 12) == [RESERVED] * 8 + [QUOTA] * 4


def test_slots_of_awkward_sizes_count_with_what_they_strand() -> None:
    server = Server(quotas={"red": 0.5})  # 4 of 8 extents of 8 slots of 4 KiB
    red, _ = two(server)
    # Two slots of 12 KiB fit into an extent of 32 KiB.
    assert store(red, "a", 9, nbytes=12_000) == [RESERVED] * 8 + [QUOTA]


def test_extents_of_who_is_over_its_quota_are_emptied_first() -> None:
    server = Server(quotas={"red": 1.0}, high=1.0)
    red, blue = two(server)
    for number in range(4):  # an extent each; with few slots, so that these would be the first to be emptied
        store(blue, number, 2, nbytes=16_000)
    for number in range(4):
        server.now += 1
        store(red, number, 8)
    server.config = StateConfig(quotas={"red": 0.25}, high=1.0)
    server.restart()
    red, blue = two(server)
    assert store(blue, "big", 1, nbytes=20_000) == [RESERVED]
    assert [blue.match(chain(number, 2)).pages for number in range(4)] == [2] * 4
    assert sum(red.match(chain(number, 8)).pages for number in range(4)) == 24


def test_the_counts_survive_everything() -> None:
    """The check after each message compares them with the trees; here they see all ways by which slots come and go."""
    server = Server(quotas={"red": 0.5}, reservation_s=20.0)
    red, blue = two(server)
    red.store(chain("a", 4))
    red.store(chain("a", 4), component="swa", nbytes=9000)
    grant = red.reserve(chain("b", 6))
    red.commit(grant, slice(0, 2))
    red.delete(chain("b", 1, start=1))
    server.wait(30, alive=(red, blue))  # the rest goes to quarantine
    blue.reserve(chain("c", 3))
    blue.goodbye()
    red.clear()
    assert used(server) == {}
    assert red.send(Evict(1, red.session, 1)) is not None
