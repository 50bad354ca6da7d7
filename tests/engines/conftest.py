"""Real SGLang servers, started once for all tests that use them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from maru_bench.servers import MaruServer

HAVE_KIT = importlib.util.find_spec("sglang.srt") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say why tests of this folder that need SGLang do not run."""
    if HAVE_KIT:
        return
    skip = pytest.mark.skip(reason="SGLang is not installed here: make sglang-env, and run these tests with its Python")
    for item in items:
        if item.get_closest_marker("sglang") is not None and Path(__file__).parent in item.path.parents:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def model() -> Path:
    from harness import make_model

    return make_model()


@pytest.fixture
def maru_server(tmp_path: Path) -> Iterator[MaruServer]:
    """A ``maru-server`` process of its own; its pool outlives it until the test ends."""
    server = MaruServer(tmp_path, size="256M", keep_pool=True)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        server.remove_pool()
