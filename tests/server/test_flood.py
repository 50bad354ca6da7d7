"""What one client can make a server keep for it: a few answers that it does not read, and nothing of what is too large."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from live import Running, raw

from maru_core import protocol as p
from maru_core.errors import ServerError
from maru_core.session import Session
from maru_server.config import StateConfig
from maru_server.service import QUEUE
from support import hashes, namespace


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    made = Running(tmp_path)
    yield made
    made.stop()


@pytest.fixture
def session(running: Running) -> Iterator[Session]:
    made = running.session()
    yield made
    made.close()


def test_answers_that_nobody_reads_are_dropped(running: Running, session: Session) -> None:
    number = session.open_namespace(namespace().record())
    welcome = session.connect()
    question = p.encode(p.Match(1, welcome.session, number, ["kv"], 0, hashes(p.MAX_BATCH), True))
    with raw(running.endpoint, rcvhwm=1, sndhwm=1000) as deaf:
        for _ in range(300):
            deaf.send(question)
        asked = 0
        while asked < 300:  # all of them have been answered when the server says so
            asked = int(session.stats()["matches"])
        got = 0
        while deaf.poll(2000):
            deaf.recv()
            got += 1
    assert QUEUE <= got <= 100, "what waited here, in the server and between them"


def test_what_is_larger_than_any_request_is_not_read(running: Running, session: Session) -> None:
    welcome = session.connect()
    with raw(running.endpoint) as dealer:
        dealer.send(p.encode(p.Match(7, welcome.session, 0, [""] * p.MAX_REQUEST_BYTES, 0, b"")))
        reply = p.decode_reply(dealer.recv())
        assert isinstance(reply, p.Error)
        assert (reply.rid, reply.code) == (0, p.ErrorCode.INVALID)
        assert str(p.MAX_REQUEST_BYTES) in reply.message
        dealer.send(p.encode(p.Stats(8)))
        assert isinstance(p.decode_reply(dealer.recv()), p.StatsReply)


def test_the_largest_requests_are_read(running: Running, session: Session) -> None:
    number = session.open_namespace(namespace().record())
    names = [f"{index:02}".ljust(48, "x") for index in range(24)]
    located = session.match(number, names, 0, hashes(p.MAX_BATCH), sparse=True)
    assert len(located.slots) == 4 * 24 * p.MAX_BATCH
    slots = bytes(4 * p.MAX_BATCH)
    assert len(session.commit(slots, slots * 2, slots * 2).status) == p.MAX_BATCH


def test_a_match_whose_answer_would_be_no_message_is_refused(running: Running, session: Session) -> None:
    number = session.open_namespace(namespace().record())
    with pytest.raises(ServerError, match="ask for at most 100000"):
        session.match(number, ["kv"] * 25, 0, hashes(p.MAX_BATCH), sparse=True)
    assert len(session.match(number, ["kv"] * 25, 0, hashes(4000), sparse=True).slots) == 4 * 25 * 4000


def test_a_match_costs_its_pages_for_each_component(tmp_path: Path) -> None:
    (tmp_path / "limited").mkdir()
    running = Running(tmp_path / "limited", config=StateConfig(session_page_rate=1000.0))
    session = running.session()
    try:
        number = session.open_namespace(namespace().record())
        session.match(number, ["kv"] * 20, 0, hashes(1000), sparse=True)  # on credit, for twenty seconds
        with pytest.raises(ServerError, match="pages a second"):
            session.match(number, ["kv"], 0, hashes(1))
    finally:
        session.close()
        running.stop()
