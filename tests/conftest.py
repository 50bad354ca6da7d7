"""Of all tests."""

from __future__ import annotations

from leftovers import remove_leftovers

from maru_core import conversation


def pytest_sessionstart() -> None:
    remove_leftovers()
    # A farewell that a slow machine does not send in time is lost, and a test that waits for it waits in vain.
    conversation.GOODBYE_LINGER_MS = 3000  # type: ignore[misc]
