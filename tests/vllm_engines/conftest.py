"""One process that has imported vLLM, for all tests of this folder."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from maru_bench.servers import MaruServer

# The folder tests/vllm is on the path too, and has the name of the package: what counts is a real one.
SPEC = importlib.util.find_spec("vllm")
HAVE_VLLM = SPEC is not None and SPEC.origin is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say why tests of this folder do not run where vLLM is not."""
    if HAVE_VLLM:
        return
    skip = pytest.mark.skip(reason="vLLM is not installed here: make vllm-env, and run these tests with its Python")
    for item in items:
        if item.get_closest_marker("vllm") is not None and Path(__file__).parent in item.path.parents:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def forks() -> Iterator[object]:
    from vllm_harness import Forks

    # A path of pytest's would be too long for a Unix socket.
    with tempfile.TemporaryDirectory(prefix="maru-vllm-") as directory:
        made = Forks(Path(directory))
        try:
            yield made
        finally:
            made.stop()


@pytest.fixture(scope="session")
def model() -> Path:
    from vllm_harness import make_model

    return make_model()


@pytest.fixture
def maru_server() -> Iterator[MaruServer]:
    """A ``maru-server`` process of its own; its pool outlives it until the test ends."""
    with tempfile.TemporaryDirectory(prefix="maru-vllm-") as directory:
        server = MaruServer(Path(directory), size="256M", keep_pool=True)
        try:
            server.start(180)
            yield server
        finally:
            server.stop()
            server.remove_pool()
