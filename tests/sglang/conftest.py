"""Published server arguments, a model directory and real servers for the tests of Maru inside SGLang."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from model_files import write_model
from sglang_support import storage_config

from support import ServerProcess


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say why tests of this folder that need SGLang do not run."""
    # This folder is on the path too, and has the name of the package: what counts is a real one.
    spec = importlib.util.find_spec("sglang")
    if spec is not None and spec.origin is not None:
        return
    skip = pytest.mark.skip(reason="SGLang is not installed here: make sglang-env, and run these tests with its Python")
    for item in items:
        if item.get_closest_marker("sglang") is not None and Path(__file__).parent in item.path.parents:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def publish(model_dir: Path) -> Iterator[Callable[..., Any]]:
    """``publish(**arguments)`` makes this process run with those server arguments, as a scheduler does."""
    from sglang.srt import runtime_context

    with contextlib.ExitStack() as stack:

        def run(**arguments: Any) -> Any:
            arguments = {"model_path": str(model_dir), "device": "cpu"} | arguments
            return stack.enter_context(runtime_context.get_context().override_server_args(**arguments))

        yield run


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path, size="64M")
    try:
        yield process.start()
    finally:
        process.remove()


@pytest.fixture
def attach(publish: Callable[..., Any], server: ServerProcess) -> Iterator[Callable[..., Any]]:
    """``attach(pool, sides=…, extra=…, arguments=…, **storage_config)`` makes a backend; all are closed at the end."""
    from maru_sglang.storage.backend import MaruHiCacheStorage

    made: list[Any] = []

    def run(
        pool: Any,
        *,
        sides: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        arguments: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Any:
        publish(**(arguments or {}))
        # A slow machine is not what is tested; where nobody answers on purpose, calls are made to end soon.
        patient = {"server": server.endpoint, "timeout_ms": 60_000}
        config = storage_config(extra_config=patient | (extra or {}), **changes)
        backend = MaruHiCacheStorage(config, pool)
        made.append(backend)
        backend.register_mem_pool_host(pool)
        for name, side in (sides or {}).items():
            backend.register_mem_host_pool_v2(side, name)
        backend.on_host_pools_registered()
        return backend

    yield run
    for backend in made:
        backend.close()


@pytest.fixture(scope="session")
def plugins() -> None:
    """All plugins of this environment, loaded as SGLang does at the start of each process."""
    from sglang.srt.plugins import load_plugins

    load_plugins()


@pytest.fixture
def linked(publish: Callable[..., Any], server: ServerProcess) -> Iterator[Callable[..., Any]]:
    """``linked(kind)``: one engine's memory and tree, with the direct linker; filled with bytes of its own."""
    from linker_support import PAGE, Side

    publish(page_size=PAGE)
    made: list[Any] = []

    def run(kind: str = "full", *, config: dict[str, Any] | None = None, **changes: Any) -> Any:
        # A slow machine is not what is tested; where nobody answers on purpose, calls are made to end soon.
        patient = {"server": server.endpoint, "timeout_ms": 60_000}
        side = Side.make(kind, patient | (config or {}), **changes)
        made.append(side)
        side.fill(len(made))
        return side

    yield run
    for side in made:
        side.linker.close()
