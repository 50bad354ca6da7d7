"""Fixtures of the operator's command."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support import ServerProcess, running_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for the tests of a module that change nothing that others look at."""
    with running_server(tmp_path_factory.mktemp("maru")) as running:
        yield running
