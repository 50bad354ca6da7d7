"""Pins: what an operator keeps from eviction, within a budget of bytes, through restarts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from maru_harness import Client, Server, chain, geometry
from stepping import SteppingDirectory

from maru_core.pool.format import PINNED
from maru_core.protocol import Done, Error, ErrorCode, Evict, Inspect, Pin, Report, Unpin
from maru_server.config import StateConfig
from maru_server.sessions import Peer

SLOT = 4096


def page(name: object, index: int = 0) -> bytes:
    return chain(name, 1, start=index)


def ask(client: Client, kind: type[Pin] | type[Unpin], which: bytes, namespace: int | None = None) -> Any:
    reply = client.send(kind(9, client.session, client.namespace if namespace is None else namespace, which))
    return reply.count if isinstance(reply, Done) else reply


def pin(client: Client, which: bytes) -> Any:
    return ask(client, Pin, which)


def unpin(client: Client, which: bytes) -> Any:
    return ask(client, Unpin, which)


def evict(client: Client, pages: int) -> int:
    reply = client.send(Evict(9, client.session, pages))
    assert isinstance(reply, Done)
    return reply.count


def rows(client: Client) -> list[dict[str, Any]]:
    reply = client.send(Inspect(9, client.session, "pins"))
    assert isinstance(reply, Report)
    return reply.rows


def test_a_pinned_page_and_all_before_it_stay(server: Server, client: Client) -> None:
    client.store(chain("a", 6))
    server.now += 9
    client.store(chain("b", 4))
    assert pin(client, page("a", 3)) == 4 * SLOT
    assert evict(client, 100) == 6
    assert client.match(chain("a", 6)).pages == 4
    assert server.stats["pins"] == 1
    assert server.stats["pinned_bytes"] == 4 * SLOT


def test_pinned_pages_stay_when_room_is_wanted_by_anybody() -> None:
    server = Server(pin_share=0.5, high=1.0)
    client = server.client()
    client.store(chain("a", 30))
    pin(client, page("a", 29))
    for number in range(20):
        server.now += 1
        client.heartbeat()
        client.store(chain(number, 3))
    # Another size: whole extents are wanted, and none with a pinned page is emptied.
    status = [client.reserve(chain(f"big{number}", 1), nbytes=20_000).status for number in range(8)]
    assert [0] in status
    assert client.match(chain("a", 30)).pages == 30
    server.wait(100, step=4, alive=(client,))
    assert client.match(chain("a", 30)).pages == 30


def test_shared_pages_are_counted_once_and_come_free_with_the_last_pin(server: Server, client: Client) -> None:
    client.store(chain("t", 4))
    client.store(chain("l", 2), parent=page("t", 3))
    client.store(chain("r", 3), parent=page("t", 3))
    assert pin(client, page("l", 1)) == 6 * SLOT
    assert pin(client, page("l", 1)) == 6 * SLOT, "again: nothing changes"
    assert pin(client, page("r", 2)) == 9 * SLOT
    assert pin(client, page("t", 1)) == 9 * SLOT
    assert [(row["page"], row["pages"], row["bytes"]) for row in rows(client)] == [
        (page("r", 2).hex(), 7, 7 * SLOT),
        (page("l", 1).hex(), 6, 6 * SLOT),
        (page("t", 1).hex(), 2, 2 * SLOT),
    ]
    assert unpin(client, page("l", 1)) == 7 * SLOT
    assert unpin(client, page("l", 1)) == 7 * SLOT
    assert unpin(client, page("r", 2)) == 2 * SLOT
    assert evict(client, 100) == 7
    assert unpin(client, page("t", 1)) == 0
    assert evict(client, 100) == 2, "an unpinned page can be evicted again"
    assert rows(client) == []


def test_all_objects_of_a_page_count() -> None:
    server = Server(pin_share=1.0)
    client = server.client()
    client.store(chain("a", 2), world=2, shard=0)
    client.store(chain("a", 2), world=2, shard=1)
    client.store(chain("a", 1), component="swa", nbytes=12_000)
    # 12 KiB: two to an extent of 32 KiB, so each takes 16 KiB.
    assert pin(client, page("a", 1)) == 4 * SLOT + 4 * SLOT


def test_the_budget_is_kept_and_the_error_says_the_numbers() -> None:
    server = Server(pin_share=0.125)  # 8 of 64 slots
    client = server.client()
    client.store(chain("a", 6))
    client.store(chain("b", 3))
    assert pin(client, page("a", 5)) == 6 * SLOT
    refused = pin(client, page("b", 2))
    assert isinstance(refused, Error)
    assert refused.code == ErrorCode.LIMIT
    assert str(9 * SLOT) in refused.message
    assert str(8 * SLOT) in refused.message
    assert "--pin-share" in refused.message
    assert len(rows(client)) == 1
    assert pin(client, page("b", 1)) == 8 * SLOT


def test_what_is_not_there_cannot_be_pinned(server: Server, client: Client) -> None:
    client.store(chain("a", 2, start=1), parent=page("a"))  # page 0 is known by its hash only
    for which in (page("b"), page("a")):
        refused = pin(client, which)
        assert isinstance(refused, Error)
        assert refused.code == ErrorCode.INVALID
        assert which.hex() in refused.message
    assert isinstance(pin(client, b"short"), Error)
    assert pin(client, page("a", 2)) == 2 * SLOT


def test_pins_are_for_operators(server: Server) -> None:
    tenant = server.client("t", peer=Peer("red", operator=False))
    tenant.store(chain("a", 2))
    for kind in (Pin, Unpin):
        refused = ask(tenant, kind, page("a"))
        assert isinstance(refused, Error)
        assert refused.code == ErrorCode.FORBIDDEN
    chief = server.client("chief")
    assert ask(chief, Pin, page("a", 1), tenant.namespace) == 2 * SLOT
    assert [row["tenant"] for row in rows(chief)] == ["red"]
    assert rows(tenant) == rows(chief), "its own pins a tenant sees"
    assert rows(server.client("other", peer=Peer("blue", operator=False))) == []


def test_pins_survive_restarts(server: Server, client: Client) -> None:
    client.store(chain("a", 4))
    client.store(chain("b", 4))
    pin(client, page("a", 2))
    pin(client, page("b", 0))
    pin(client, page("b", 3))
    unpin(client, page("b", 3))
    before = rows(client)
    server.restart()
    client.connect()
    assert rows(client) == before
    assert server.stats["pinned_bytes"] == 4 * SLOT
    assert server.stats["discarded"] == 0
    assert evict(client, 100) == 4
    assert (client.match(chain("a", 4)).pages, client.match(chain("b", 4)).pages) == (3, 1)
    assert unpin(client, page("a", 2)) == SLOT
    server.restart()
    client.connect()
    assert evict(client, 100) == 3


def test_a_smaller_budget_ends_the_longest_pins(server: Server, client: Client) -> None:
    client.store(chain("a", 9))
    client.store(chain("b", 3))
    client.store(chain("c", 4))
    for name, index in (("a", 8), ("b", 2), ("c", 3)):
        pin(client, page(name, index))
    server.config = StateConfig(pin_share=0.125)
    server.restart()
    client.connect()
    assert [row["page"] for row in rows(client)] == [page("c", 3).hex(), page("b", 2).hex()]
    assert server.stats["pins_ended"] == 1
    server.restart()
    assert server.stats["pins_ended"] == 0, "its flag is gone too"


def test_deleting_and_clearing_a_page_ends_its_pin(server: Server, client: Client) -> None:
    client.store(chain("a", 4))
    client.store(chain("b", 4))
    pin(client, page("a", 3))
    pin(client, page("b", 3))
    client.delete(page("a", 2))
    assert [row["page"] for row in rows(client)] == [page("b", 3).hex()]
    assert server.stats["pinned_bytes"] == 4 * SLOT
    client.store(chain("x", 2))  # may take over the rows
    assert evict(client, 100) == 4
    client.clear()
    assert rows(client) == []
    assert server.stats["pinned_bytes"] == 0
    client.store(chain("b", 4))
    server.restart()
    client.connect()
    assert rows(client) == []
    assert evict(client, 100) == 4


def test_a_page_stored_again_over_a_pinned_ones_slots_is_not_pinned(server: Server, client: Client) -> None:
    client.store(chain("a", 2))
    pin(client, page("a", 1))
    client.delete(page("a"))
    client.store(chain("b", 64))  # all slots, so also those
    assert not server.directory.flags[:].any()
    server.restart()
    assert server.stats["pins"] == 0


def test_what_is_stored_later_on_a_pinned_page_is_kept_too(server: Server, client: Client) -> None:
    client.store(chain("a", 2), world=2, shard=0)
    pin(client, page("a", 1))
    client.store(chain("a", 2), world=2, shard=1)
    assert server.stats["pinned_bytes"] == 2 * SLOT, "counted when pins come and go"
    client.store(page("b"))
    assert pin(client, page("b")) == 5 * SLOT
    server.restart()
    client.connect()
    assert server.stats["pinned_bytes"] == 5 * SLOT
    assert evict(client, 100) == 0


@pytest.mark.parametrize("kind", [Pin, Unpin])
def test_a_kill_within_leaves_it_pinned_or_not(kind: type[Pin] | type[Unpin]) -> None:
    server = Server(directory=SteppingDirectory)
    client = server.client()
    client.store(chain("a", 2), world=2, shard=0)
    client.store(chain("a", 2), world=2, shard=1)
    if kind is Unpin:
        pin(client, page("a", 1))
    snapshots = [server.meta.copy()]
    directory = server.directory
    assert isinstance(directory, SteppingDirectory)
    directory.after_store = lambda: snapshots.append(server.meta.copy())
    ask(client, kind, page("a", 1))
    directory.after_store = None
    assert len(snapshots) == 3, "one store for each object of the page"
    pins = []
    for meta in snapshots:
        server.restart(meta)
        assert server.stats["discarded"] == 0
        assert server.stats["objects"] == 4
        pins.append(server.stats["pins"])
    assert pins == ([0, 1, 1] if kind is Pin else [1, 1, 0])


def test_the_flag_is_outside_the_check_and_nothing_else_is() -> None:
    server = Server(geometry(2, 4))
    client = server.client()
    client.store(page("a"))
    slot = np.array([0], np.uint32)
    server.directory.set_pinned(slot, True)
    assert server.directory.records["flags"][0] == PINNED
    assert server.directory.believed(slot).all()
    server.directory.records["world"][0] ^= 1
    assert not server.directory.believed(slot).any()
