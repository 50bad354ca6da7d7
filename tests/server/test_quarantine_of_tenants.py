"""A quota also bounds what a tenant lets go of while it writes: quarantine is no way to the others' part of the pool."""

from __future__ import annotations

from maru_harness import Client, Server, chain, geometry

from maru_server.sessions import Peer

RED = Peer("red", operator=False)
BLUE = Peer("blue", operator=False)
RESERVED, QUOTA = 0, 5


def pool() -> tuple[Server, Client, Client]:
    """64 slots, of which red may have 16; blue has stored 40 pages."""
    server = Server(geometry(extents=8, slots=8), quotas={"red": 0.25}, lease_s=5.0, quarantine_s=30.0)
    blue = server.client("blue", peer=BLUE)
    blue.store(chain("blue", 40))
    return server, server.client("red", peer=RED), blue


def test_what_is_deleted_while_it_is_written_counts_until_its_quarantine_is_over() -> None:
    server, red, blue = pool()
    for number in range(8):
        grant = red.reserve(chain(number, 4))
        assert grant.status == [RESERVED if number < 4 else QUOTA] * 4
        red.delete(chain(number, 4))
    assert server.stats["slots_quarantined"] == 16
    assert blue.match(chain("blue", 40)).pages == 40
    server.wait(31, alive=(red, blue))
    assert server.stats["slots_quarantined"] == 0
    assert red.reserve(chain("again", 16)).status == [RESERVED] * 16


def test_silence_and_other_sessions_do_not_help() -> None:
    server, red, blue = pool()
    red.reserve(chain("a", 16))
    server.wait(7, alive=(blue,))
    assert server.stats["slots_quarantined"] == 16
    other = server.client("red too", peer=RED)
    assert set(other.reserve(chain("b", 8)).status) == {QUOTA}
    assert blue.match(chain("blue", 40)).pages == 40


def test_who_says_that_it_writes_no_more_has_its_room_again() -> None:
    _, red, _ = pool()
    grant = red.reserve(chain("a", 16))
    red.delete(chain("a", 16))
    assert set(red.reserve(chain("b", 1)).status) == {QUOTA}
    assert red.release(grant, slice(0, 10)) == 10
    assert red.reserve(chain("b", 12)).status == [RESERVED] * 10 + [QUOTA] * 2


def test_own_pages_make_room_for_what_is_in_quarantine() -> None:
    _, red, blue = pool()
    red.store(chain("old", 12))
    red.reserve(chain("a", 4))
    red.delete(chain("a", 4))
    assert red.reserve(chain("b", 8)).status == [RESERVED] * 8
    assert red.match(chain("old", 12)).pages == 4
    assert blue.match(chain("blue", 40)).pages == 40


def test_a_revoked_key_leaves_no_room_to_its_tenant() -> None:
    server, red, _ = pool()
    red.reserve(chain("a", 16))
    server.state.keep_peers({BLUE}, server.now)
    other = server.client("red too", peer=RED)
    assert set(other.reserve(chain("b", 1)).status) == {QUOTA}
    server.wait(31, alive=(other,))
    assert other.reserve(chain("b", 1)).status == [RESERVED]
