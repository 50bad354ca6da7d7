"""Lives and places: no answer of another life is ever taken, and a session follows its server over several endpoints."""

from __future__ import annotations

import threading
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from maru_core import protocol as p
from maru_core.endpoints import ENDPOINTS_MAX, split_endpoints
from maru_core.errors import ConfigError, ServerUnavailableError, SessionLostError
from maru_core.session import Session
from maru_core.settings import Settings
from maru_core.store_config import StoreConfig
from tests.core.test_session import Peer, silent
from tests.support import await_condition, impatient

HASH = b"h" * 32


@pytest.fixture
def endpoints(tmp_path: Path) -> tuple[str, str]:
    return f"ipc://{tmp_path}/one.sock", f"ipc://{tmp_path}/two.sock"


@pytest.fixture
def new_peer() -> Iterator[Callable[[str], Peer]]:
    made: list[Peer] = []

    def make(endpoint: str) -> Peer:
        made.append(Peer(endpoint))
        return made[-1]

    yield make
    for peer in made:
        peer.close()


# ---------------------------------------------------------------- lives


def test_every_reply_says_which_life_of_which_request() -> None:
    for reply in typing.get_args(p.Reply):
        assert {"rid", "incarnation"} <= set(reply.__struct_fields__), reply


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.open_namespace(b"1"),
        lambda s: s.match(1, ["kv"], 0, HASH),
        lambda s: s.match(1, ["kv"], 0, HASH, sparse=True),
        lambda s: s.reserve(1, "kv", 0, 1, p.ROOT, HASH * 2, 1),
        lambda s: s.commit(bytes(4), bytes(8)),
        lambda s: s.release(bytes(4), bytes(8)),
        lambda s: s.delete(1, HASH),
        lambda s: s.clear(1),
        lambda s: s.stats(),
    ],
)
def test_no_call_takes_an_answer_of_another_life(
    call: Callable[[Session], object], endpoints: tuple[str, str], new_peer: Callable[[str], Peer]
) -> None:
    """All else about the answer is right: rid, kind, lengths. It is still about slots and numbers of another server."""
    peer = new_peer(endpoints[0])
    peer.heartbeat_s = 60
    session = Session(endpoints[0], name="test", timeout_s=60)
    session.connect()
    peer.incarnation += 1
    with pytest.raises(SessionLostError):
        call(session)
    assert session.epoch == 2
    session.close()


# ---------------------------------------------------------------- places


def test_of_several_endpoints_the_one_that_answers_is_found_at_the_first_call(
    endpoints: tuple[str, str], new_peer: Callable[[str], Peer]
) -> None:
    peer = new_peer(endpoints[1])
    session = Session(",".join(endpoints), name="test", timeout_s=60)
    session.connect()
    assert session.stats()
    assert session.epoch == 1
    assert len(peer.of(p.Hello)) == 1
    session.close()


def test_a_session_goes_where_the_server_went_and_begins_a_new_life_there(
    endpoints: tuple[str, str], new_peer: Callable[[str], Peer]
) -> None:
    first = new_peer(endpoints[0])
    session = Session(",".join(endpoints), name="test", timeout_s=60)
    session.connect()
    assert session.match(1, ["kv"], 0, HASH).incarnation == first.incarnation
    first.close()
    with impatient(session):
        with pytest.raises(ServerUnavailableError, match=f"{endpoints[0]},{endpoints[1]}"):
            session.commit(bytes(4), bytes(8))
        second = new_peer(endpoints[1])
        second.restart()
        await_condition(lambda: session.connected and session.epoch == 2, "it is found")
    assert session.match(1, ["kv"], 0, HASH).incarnation == second.incarnation
    # What found no answer belongs to the old life, and is not told to the new one.
    session.stats()
    assert not second.of(p.Commit)
    # And back again.
    session.timeout_s = 0.2
    second.close()
    third = new_peer(endpoints[0])
    third.restart()
    third.restart()
    await_condition(lambda: session.connected and session.epoch == 3, "it is found")
    session.close()


def test_heartbeats_alone_find_where_the_server_went(
    endpoints: tuple[str, str], new_peer: Callable[[str], Peer]
) -> None:
    first = new_peer(endpoints[0])
    session = Session(",".join(endpoints), name="test", timeout_s=60)
    session.connect()
    session.timeout_s = 0.2
    first.close()
    second = new_peer(endpoints[1])
    second.restart()
    await_condition(lambda: session.connected and session.epoch == 2, "it is found")
    session.close()


def test_one_server_under_two_addresses_is_one_life(
    endpoints: tuple[str, str], new_peer: Callable[[str], Peer]
) -> None:
    first = new_peer(endpoints[0])
    session = Session(",".join(endpoints), name="test", timeout_s=60)
    session.connect()
    session.timeout_s = 0.2
    first.close()
    same = new_peer(endpoints[1])  # of the same session and incarnation
    await_condition(lambda: len(same.of(p.Heartbeat)) > 1, "it is found")
    assert session.epoch == 1
    session.close()


def test_a_call_is_asked_at_one_place_only(endpoints: tuple[str, str], new_peer: Callable[[str], Peer]) -> None:
    first, second = (new_peer(endpoint) for endpoint in endpoints)
    first.heartbeat_s = second.heartbeat_s = 0.05
    session = Session(",".join(endpoints), name="test", timeout_s=60)
    session.connect()
    here, there = (first, second) if first.of(p.Hello) else (second, first)
    there.answer = silent
    for number in range(10):
        session.reserve(1, "kv", 0, 1, p.ROOT, HASH * 2, number + 1)
    assert len(here.of(p.Reserve)) == 10
    # The question who is there may reach any; it changes nothing.
    assert {type(message) for message in there.messages} <= {p.Stats}
    session.close()


def test_what_is_on_its_way_while_the_server_moves_does_not_go_back_to_the_old_place(
    endpoints: tuple[str, str], new_peer: Callable[[str], Peer]
) -> None:
    """A slow call ends well at the old place after the session has moved: its socket is not used again."""
    first = new_peer(endpoints[0])
    first.heartbeat_s = 60
    session = Session(",".join(endpoints), name="test", timeout_s=60)
    session.connect()
    first.hold = lambda message: isinstance(message, p.Match)
    answers: list[p.Located] = []
    slow = threading.Thread(target=lambda: answers.append(session.match(1, ["kv"], 0, HASH)))
    slow.start()
    await_condition(lambda: first.held, "the call is under way")
    second = new_peer(endpoints[1])
    second.heartbeat_s = 60
    first.answer = silent
    # What a call that found no answer does: from now on the server is looked for.
    session._open_breaker(ServerUnavailableError("away"))
    await_condition(lambda: session.connected, "it is found at the other place")
    assert session._sockets.endpoint == endpoints[1]
    first.send_held()
    slow.join(120)
    assert len(answers) == 1
    asked = len(first.messages)
    for _ in range(3):
        session.stats()
    assert len(first.messages) == asked
    assert len(second.of(p.Stats)) >= 3
    session.close()


def test_nobody_anywhere_is_bounded_and_names_all(endpoints: tuple[str, str]) -> None:
    session = Session(",".join(endpoints), name="test", timeout_s=0.1)
    with pytest.raises(ServerUnavailableError, match=f"{endpoints[0]},{endpoints[1]}"):
        session.stats()
    with pytest.raises(ServerUnavailableError):
        session.stats()
    session.close()
    await_condition(lambda: session._sockets.ended, "nothing is left")
    assert session._sockets.count == 0


# ---------------------------------------------------------------- what may be written


@pytest.mark.parametrize(
    "text",
    ["", ",", "ipc:///a,", "ipc:///a,nonsense", "http://x", ",".join(f"tcp://h:{i}" for i in range(ENDPOINTS_MAX + 1))],
)
def test_a_list_that_cannot_be_is_refused_everywhere_with_its_value(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^server is ") as caught:
        Session(text, name="test")
    assert repr(text) in str(caught.value)
    with pytest.raises(ConfigError, match=r"^server is "):
        StoreConfig(server=text)
    if text:
        with pytest.raises(ConfigError, match=r"^MARU_SERVER is "):
            Settings.from_environment({"MARU_SERVER": text})


def test_a_list_is_taken_everywhere() -> None:
    text = "ipc:///a, tcp://b:1,ipc:///a"
    assert split_endpoints(text, "server") == ("ipc:///a", "tcp://b:1")
    assert StoreConfig(server=text).server == text
    assert Settings.from_environment({"MARU_SERVER": text}).server == text
