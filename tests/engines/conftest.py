"""Real SGLang servers, started once for all tests that use them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from maru_bench.servers import MaruServer

if TYPE_CHECKING:
    from pair import Engines

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


@pytest.fixture(scope="session")
def engines(logs: Path, model: Path) -> Iterator[Engines]:
    from pair import running_pair

    with running_pair(logs, model) as made:
        yield made


@pytest.fixture
def maru_server(tmp_path: Path) -> Iterator[MaruServer]:
    """A ``maru-server`` process of its own; its pool outlives it until the test ends."""
    server = MaruServer(tmp_path, size="256M", keep_pool=True)
    try:
        server.start(180)
        yield server
    finally:
        server.stop()
        server.remove_pool()
