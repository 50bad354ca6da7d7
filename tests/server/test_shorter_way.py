"""What the service does around the shorter way of a request, over real sockets."""

from __future__ import annotations

import pytest

from maru_core import protocol as p
from maru_core.errors import ServerError
from tests.server.live import Running, raw, store
from tests.support import namespace


def test_a_fault_on_the_shorter_way_is_not_tried_again(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody knows how far it came: the ordinary way could say that nothing was stored of what anyone can find."""
    session = running.session()
    number = session.open_namespace(namespace().record())
    keys = store(session, number, 5)
    assert session.prefix(number, "kv", 0, keys, epoch=session.epoch).pages == 5
    handled: list[type] = []
    handle = running.state.handle

    def noted(message: p.Request, now: float, *rest: object) -> p.Reply | None:
        handled.append(type(message))
        return handle(message, now)

    def faulty(data: bytes, *rest: object) -> bytes | None:
        if data.startswith(b"\x9a\xa5Match"):
            raise ZeroDivisionError("a fault on purpose")
        return None

    with monkeypatch.context() as patch:
        patch.setattr(running.state, "handle", noted)
        patch.setattr(running.state, "answer", faulty)
        with pytest.raises(ServerError, match="its log says how") as caught:
            session.prefix(number, "kv", 0, keys, epoch=session.epoch)
        assert caught.value.code == p.ErrorCode.INTERNAL
        session.stats()
        with raw(running.endpoint) as dealer:
            dealer.send(b"\x9a\xa5Match")
            reply = p.decode_reply(dealer.recv())
        assert isinstance(reply, p.Error)
        assert reply.code == p.ErrorCode.INVALID
    assert p.Match not in handled
    assert p.Stats in handled
    assert "handling Match failed" in caplog.text
    assert session.prefix(number, "kv", 0, keys, epoch=session.epoch).pages == 5
    session.close()


def test_requests_that_go_the_shorter_way_are_counted_as_others(running: Running) -> None:
    session = running.session()
    number = session.open_namespace(namespace().record())
    keys = store(session, number, 5)
    for _ in range(3):
        session.prefix(number, "kv", 0, keys, epoch=session.epoch)
    rows = running.service.figures().requests
    assert sum(rows["Match"][:36]) == 3
    session.close()
