"""A server, agents and clients that reach the pool only through them: real processes, UCX over TCP on loopback, or between hosts
that are network namespaces (:mod:`hosts`)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_process import AgentProcess

from maru_core.store import Store, StoreConfig
from support import ServerProcess, namespace, running_server

os.environ.setdefault("UCX_TLS", "tcp")
os.environ.setdefault("UCX_NET_DEVICES", "lo")
HAVE_NIXL = importlib.util.find_spec("nixl") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAVE_NIXL:
        return
    skip = pytest.mark.skip(reason="NIXL is not installed here: tools/dev_env.sh installs it")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(skip)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with running_server(tmp_path, "--quarantine", "600") as process:
        yield process


@pytest.fixture
def agents(server: ServerProcess, tmp_path: Path) -> Iterator[Callable[..., AgentProcess]]:
    made: list[AgentProcess] = []

    def start(*options: str) -> AgentProcess:
        made.append(AgentProcess(server, tmp_path, *options).start())
        return made[-1]

    yield start
    for agent in made:
        agent.kill()


@pytest.fixture
def open_store(server: ServerProcess) -> Iterator[Callable[..., Store]]:
    opened: list[Store] = []

    def make(transport: str = "rdma", **config: Any) -> Store:
        settings = StoreConfig(server=server.endpoint, transport=transport, timeout_ms=2500, **config)
        opened.append(Store.open(settings, namespace(), name=f"test {len(opened)}"))
        return opened[-1]

    yield make
    for store in opened:
        store.close()
