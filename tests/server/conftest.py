"""Fixtures of the server's state tests."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from maru_harness import Client, Server

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
