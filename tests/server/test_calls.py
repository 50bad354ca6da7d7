"""Work that crosses into the service's loop and out of it: run, refused, failed, timed out, and at the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import Running, raw

from maru_core import protocol as p
from maru_core.errors import ClosedError, ServerUnavailableError
from maru_server import calls
from maru_server.calls import Deferred
from maru_server.state import ServerState
from support import await_condition


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    service = Running(tmp_path)
    yield service
    service.stop()


def test_a_call_runs_in_the_loop_with_the_state(running: Running) -> None:
    thread, sessions = running.service.call(lambda state: (threading.current_thread(), state.stats()["sessions"]))
    assert thread is running.thread
    assert sessions == 0


def test_what_a_call_raises_reaches_its_caller_and_the_loop_goes_on(running: Running) -> None:
    for error in (KeyError("mine"), SystemExit(3), TimeoutError("its own")):

        def raise_it(state: ServerState, error: BaseException = error) -> None:
            raise error

        with pytest.raises(type(error)):
            running.service.call(raise_it)
    assert running.session().connect().session


def test_a_call_from_within_a_call_is_an_error_and_no_standstill(running: Running) -> None:
    with pytest.raises(RuntimeError, match="would wait for ever"):
        running.service.call(lambda state: running.service.call(lambda again: None))
    assert running.service.call(lambda state: 1) == 1


def test_a_call_that_is_too_late_is_not_run(running: Running) -> None:
    inside, go_on = threading.Event(), threading.Event()
    ran: list[int] = []

    def stand(state: ServerState) -> None:
        inside.set()
        go_on.wait(120)

    holder = threading.Thread(target=lambda: running.service.call(stand, 30))
    holder.start()
    assert inside.wait(120)
    with pytest.raises(ServerUnavailableError, match=r"within 0\.05 s"):
        running.service.call(lambda state: ran.append(1), 0.05)
    go_on.set()
    holder.join()
    running.service.call(lambda state: None)
    assert not ran


def test_only_so_many_calls_wait(running: Running) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def stand(state: ServerState) -> None:
        inside.set()
        go_on.wait(120)

    threads = [threading.Thread(target=lambda: running.service.call(stand, 30))]
    threads[0].start()
    assert inside.wait(120)
    done: list[int] = []
    waiting = running.service._calls._waiting
    for number in range(calls.CALLS_MAX):
        threads.append(threading.Thread(target=lambda n=number: done.append(running.service.call(lambda state: n, 30))))
        threads[-1].start()
    deadline = threading.Event()
    while len(waiting) < calls.CALLS_MAX:
        deadline.wait(0.01)
    with pytest.raises(ServerUnavailableError, match="wait for the server's loop already"):
        running.service.call(lambda state: None)
    go_on.set()
    for thread in threads:
        thread.join()
    assert sorted(done) == list(range(calls.CALLS_MAX))


def test_calls_at_and_after_the_end_fail_at_once(tmp_path: Path) -> None:
    running = Running(tmp_path)
    running.service.stop()
    running.thread.join(120)
    outcome: list[Exception] = []

    def late() -> None:
        try:
            running.service.call(lambda state: None, 60)
        except Exception as error:
            outcome.append(error)

    waiter = threading.Thread(target=late)
    waiter.start()
    while not running.service._calls._waiting and not outcome:
        threading.Event().wait(0.01)
    running.stop()
    waiter.join(120)
    assert not waiter.is_alive()
    assert [type(error) for error in outcome] == [ClosedError]
    with pytest.raises(ClosedError):
        running.service.call(lambda state: None)


def test_a_deferred_reply_is_worked_out_elsewhere_and_comes(running: Running) -> None:
    threads: list[threading.Thread] = []

    def handle(message: p.Request, now: float, *rest: object) -> Deferred:
        def work() -> p.Reply:
            threads.append(threading.current_thread())
            return p.Done(message.rid, 1, 77)

        return Deferred(message.rid, work)

    running.state.handle = handle  # type: ignore[method-assign]
    with raw(running.endpoint) as socket:
        for rid in range(1, 5):
            socket.send(p.encode(p.Stats(rid)))
            assert p.decode_reply(socket.recv()) == p.Done(rid, 1, 77)
    assert {thread.name for thread in threads} == {"maru-worker"}


def test_a_deferred_reply_that_fails_is_an_error_and_the_next_comes(running: Running) -> None:
    handle = running.state.handle

    def fail() -> p.Reply:
        raise RuntimeError("no")

    def handler(message: p.Request, now: float, *rest: object) -> p.Reply | Deferred | None:
        return Deferred(message.rid, fail) if getattr(message, "rid", 0) == 5 else handle(message, now)

    running.state.handle = handler  # type: ignore[method-assign]
    with raw(running.endpoint) as socket:
        socket.send(p.encode(p.Stats(5)))
        reply = p.decode_reply(socket.recv())
        assert isinstance(reply, p.Error)
        assert reply.code == p.ErrorCode.INTERNAL
        assert reply.rid == 5
        socket.send(p.encode(p.Stats(6)))
        assert isinstance(p.decode_reply(socket.recv()), p.StatsReply)


def test_only_so_many_replies_are_deferred(running: Running) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def handle(message: p.Request, now: float, *rest: object) -> Deferred:
        def work() -> p.Reply:
            begun.set()
            go_on.wait(120)
            return p.Done(message.rid, 1)

        return Deferred(message.rid, work)

    running.state.handle = handle  # type: ignore[method-assign]
    count = calls.DEFERRED_MAX + 2  # one under way, a full queue, and one too many
    with raw(running.endpoint) as one, raw(running.endpoint) as other:  # one alone could not take all replies at once
        one.send(p.encode(p.Stats(1)))
        assert begun.wait(120)
        for rid in range(2, count):
            (one if rid % 2 else other).send(p.encode(p.Stats(rid)))
        await_condition(lambda: running.service._worker._todo.full(), "the queue of deferred replies is full")
        one.send(p.encode(p.Stats(count)))
        reply = p.decode_reply(one.recv())
        assert isinstance(reply, p.Error)
        assert reply.code == p.ErrorCode.LIMIT
        go_on.set()
        replies = [p.decode_reply((one if rid % 2 else other).recv()) for rid in range(1, count)]
    assert all(isinstance(reply, p.Done) for reply in replies)
