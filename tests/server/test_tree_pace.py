"""Looks at the tree over HTTP: however many ask, and for however many sizes of picture, they take a small part of the time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from maru_core.errors import ServerUnavailableError
from maru_server import web as web_module
from maru_server.web import Fresh, Pace


def test_what_is_asked_for_in_many_ways_is_made_as_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(web_module.time, "monotonic", lambda: now[0])
    made: list[int] = []
    pace = Pace()

    def maker(number: int) -> Callable[[], int]:
        def make() -> int:
            made.append(number)
            now[0] += 0.5
            return number

        return make

    refused = 0
    several = [Fresh(maker(number), 1.0, pace) for number in range(50)]
    for step in range(2000):
        number = step % len(several)
        try:
            assert several[number].get() == number
        except ServerUnavailableError:
            refused += 1
        now[0] += 0.05
    assert len(made) * 0.5 <= now[0] * web_module.DUTY + 0.5
    assert len(set(made)) > 3
    assert refused


def test_what_was_made_before_is_given_again_and_what_stands_alone_waits_for_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(web_module.time, "monotonic", lambda: now[0])

    def make() -> float:
        now[0] += 0.5
        return now[0]

    pace = Pace()
    first, second, alone = Fresh(make, 1.0, pace), Fresh(make, 1.0, pace), Fresh(make, 1.0)
    assert first.get() == 0.5
    assert alone.get() == 1.0
    now[0] = 12.0
    assert second.get() == 12.5
    assert first.get() == 0.5, "old, but there"
    now[0] = 40.0
    assert first.get() == 40.5
