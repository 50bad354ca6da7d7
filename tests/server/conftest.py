"""Fixtures of the server's state tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from maru_harness import Client, Server

from tests.server.live import Running

settings.register_profile(
    "maru", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("maru")


@pytest.fixture
def server() -> Server:
    """A server over 8 extents of 8 slots of 4 KiB."""
    return Server()


@pytest.fixture
def client(server: Server) -> Client:
    return server.client()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """A service in a thread, which must still be there at the end, with all books in order."""
    running = Running(tmp_path)
    yield running
    assert running.thread.is_alive(), "the service ended by itself"
    running.stop()
    running.state.check()
