"""After a restart: a client that comes again has what it was writing, to give back; nobody else has."""

from __future__ import annotations

import numpy as np
import pytest
from maru_harness import Client, Server, chain, geometry

from maru_core.protocol import CommitStatus, Reserve
from maru_server.sessions import LOCAL, Peer

COMMITTED, LOST = CommitStatus.COMMITTED, CommitStatus.LOST


@pytest.fixture
def server() -> Server:
    return Server(geometry(8, 8), quarantine_s=20, restart_quarantine_s=100)


def quarantined(server: Server) -> int:
    return int(server.stats["slots_quarantined"])


def test_a_client_gives_back_what_it_was_writing_before_the_restart(server: Server) -> None:
    client, other = server.client(), server.client("other")
    one, two = client.reserve(chain("a", 6)), other.reserve(chain("b", 5))
    server.restart()
    assert quarantined(server) == 11
    other.connect()
    assert other.release(one) == 0
    client.connect()
    assert client.release(one, slice(0, 2)) == 2
    # It can not be published any more, and who asks for that has ended writing.
    assert client.commit(one, slice(2, 4)) == [LOST] * 2
    assert quarantined(server) == 7
    assert client.release(one) == 2
    assert client.release(one) == 0
    assert quarantined(server) == 5
    assert client.match(chain("a", 6)).pages == 0
    client.store(chain("c", 59))
    assert other.release(two) == 5
    assert quarantined(server) == 0


def test_a_client_that_died_after_it_came_again_leaves_nothing_behind(server: Server) -> None:
    client, other = server.client(), server.client("other")
    client.reserve(chain("a", 6))
    other.reserve(chain("b", 5))
    server.restart()
    client.connect()
    client.reserve(chain("c", 2))
    server.state.process_gone(client.session, server.now)
    server.state.check()
    assert quarantined(server) == 5
    assert server.stats["slots_reserved"] == 0


def test_a_goodbye_is_not_for_what_was_reserved_before_the_restart(server: Server) -> None:
    """The client says it when it writes no more of what this server gave it; it may not even know of the rest."""
    client = server.client()
    grant = client.reserve(chain("a", 6))
    server.restart()
    client.connect()
    client.reserve(chain("b", 3))
    client.goodbye()
    assert quarantined(server) == 6
    # It comes once more, and over another restart.
    client.connect()
    assert client.release(grant, slice(0, 1)) == 1
    server.restart()
    client.connect()
    assert client.release(grant) == 5
    assert quarantined(server) == 0


def test_what_is_not_given_back_comes_back_in_time(server: Server) -> None:
    client = server.client()
    client.reserve(chain("a", 6))
    server.restart()
    client.connect()
    server.wait(90, alive=(client,))
    assert quarantined(server) == 6
    server.wait(11, alive=(client,))
    assert quarantined(server) == 0
    client.store(chain("b", 64))


@pytest.mark.parametrize("peer", [LOCAL, Peer("red", False, "b"), Peer("blue", False, "a")])
def test_another_key_is_another_client(server: Server, peer: Peer) -> None:
    client = server.client(peer=Peer("red", False, "a"))
    grant = client.reserve(chain("a", 6))
    server.restart()
    thief = Client(server, "thief", client_id=client.client_id, peer=peer)
    assert thief.release(grant) == 0
    server.state.process_gone(thief.session, server.now)
    assert quarantined(server) == 6


def test_a_slot_of_which_the_pool_does_not_say_whose_it_is_stays_away_from_all() -> None:
    """Between the answer and the record the record is a former object's."""
    server = Server(geometry(1, 8), checked=False)
    former, client = server.client("former"), server.client("client")
    former.store(chain("a", 8))
    assert former.delete(chain("a", 8)) == 8
    server.state.finish()
    reserve = Reserve(3, client.session, client.namespace, "kv", 0, 1, bytes(32), chain("b", 8), 4000)
    server.state.handle(reserve, server.now)
    meta = server.meta.copy()
    server.state.finish()
    server.restart(meta)
    former.connect()
    slots = np.arange(8, dtype=np.uint32)
    generations = server.directory.generations[slots]
    assert server.state.books.pages.release(
        server.state.books.sessions.get(former.session), slots.tobytes(), generations.tobytes()
    ) == 0  # fmt: skip
    server.state.process_gone(former.session, server.now)
    server.state.check()
    assert quarantined(server) == 8


def test_a_commit_whose_answer_was_lost_with_the_server_is_told_again(server: Server) -> None:
    client = server.client()
    grant = client.store(chain("a", 3))
    server.restart()
    client.connect()
    assert client.commit(grant) == [COMMITTED] * 3
    other = server.client("other")
    assert other.commit(grant) == [LOST] * 3


def test_what_comes_from_before_the_restart_is_not_on_the_account() -> None:
    server = Server(geometry(8, 8), session_share=0.25)
    client = server.client(peer=Peer("red", False, "a"))
    grant = client.reserve(chain("a", 16))
    server.restart()
    client.connect()
    assert client.reserve(chain("b", 20)).status.count(0) == 16
    assert client.release(grant) == 16
    server.state.keep_peers((), server.now)
    server.state.check()
