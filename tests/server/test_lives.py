"""Every answer of the server says which life of it speaks, whatever was asked and however it is answered."""

from __future__ import annotations

import typing
from collections.abc import Iterator

import msgspec
import pytest

from maru_core import protocol as p
from tests.server.live import Running, raw
from tests.support import hashes, namespace

ONE_WAY = (p.Touch, p.Goodbye)
KEYS = hashes(2, seed=7)


def requests(session: int, number: int, rid: int) -> list[p.Request]:
    """One of each kind, such as a client of this life sends."""
    slots, generations = bytes(8), bytes(16)
    return [
        p.Hello(p.PROTOCOL_VERSION, rid, b"c" * 16, "test", "host", 1, 1, "", ""),
        p.OpenNamespace(rid, session, namespace().record()),
        p.Match(rid, session, number, ["kv"], 0, KEYS),
        p.Unhold(rid, session, number, b"request"),
        p.Reserve(rid, session, number, "kv", 0, 1, p.ROOT, KEYS, 1000),
        p.Store(
            rid, session, number, "kv", 0, 1, p.ROOT, KEYS, 1000, *(bytes(len(KEYS) // 32 * size) for size in (4, 8))
        ),
        p.Commit(rid, session, slots, generations),
        p.Release(rid, session, slots, generations),
        p.Touch(session, number, KEYS),
        p.Delete(rid, session, number, KEYS),
        p.Clear(rid, session, number),
        p.Heartbeat(rid, session),
        p.Stats(rid, session),
        p.Pin(rid, session, number, KEYS[:32]),
        p.Unpin(rid, session, number, KEYS[:32]),
        p.Evict(rid, session, 1),
        p.Inspect(rid, session, "sessions"),
        p.Announce(rid, session, p.Agent("host", "UCX", b"metadata", bytes(24))),
        p.Agents(rid, session),
        p.Validate(rid, session, slots, generations),
        p.Reaches(rid, session, [p.Way("cxl", "mapped")]),
        p.Goodbye(session),
    ]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("lives"))
    yield running
    running.stop()


def test_each_kind_of_request_is_here() -> None:
    assert {type(message) for message in requests(1, 1, 1)} == set(typing.get_args(p.Request))


@pytest.mark.parametrize("kind", [kind for kind in typing.get_args(p.Request) if kind not in ONE_WAY])
@pytest.mark.parametrize("known", [True, False])
def test_an_answer_has_its_life_and_its_request(kind: type, known: bool, running: Running) -> None:
    """Also a refusal: a client that was forgotten must see by it whether the server is another."""
    session = running.session()
    number = session.open_namespace(namespace().record())
    life = session._life
    assert life is not None
    [message] = [m for m in requests(life.session if known else 1 << 60, number, 77) if type(m) is kind]
    with raw(running.endpoint) as dealer:
        dealer.send(p.encode(message))
        reply = p.decode_reply(dealer.recv())
    assert (reply.rid, reply.incarnation) == (77, life.incarnation)
    if not known and kind not in (p.Hello, p.Stats):
        assert isinstance(reply, p.Error)
        assert reply.code == p.ErrorCode.UNKNOWN_SESSION
    session.close()


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode(["Nonsense", 13])])
def test_a_refusal_of_what_is_no_request_has_it_too(data: bytes, running: Running) -> None:
    session = running.session()
    incarnation = session.connect().incarnation
    with raw(running.endpoint) as dealer:
        dealer.send(data)
        assert p.decode_reply(dealer.recv()).incarnation == incarnation
    session.close()
