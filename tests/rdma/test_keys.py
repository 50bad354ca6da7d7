"""Agents of a server with keys: whose may announce itself, and who may use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from agent_process import AgentProcess

from maru_core.protocol import ROOT
from maru_core.store import Store, StoreConfig
from maru_server.keygen import keygen
from support import Pages, ServerProcess, await_condition, hashes, namespace, running_server

SIZES = (12_000, 8_000)


@dataclass
class House:
    """A server, and keys of an operator and of two tenants."""

    directory: Path
    server: ServerProcess
    agents: list[AgentProcess] = field(default_factory=list)

    def key(self, name: str) -> str:
        return str(self.directory / f"{name}.key")

    @property
    def server_key(self) -> str:
        return str(self.directory / "server.pub")

    def agent(self, name: str | None) -> AgentProcess:
        keys = () if name is None else ("--client-key", self.key(name), "--server-key", self.server_key)
        self.agents.append(AgentProcess(self.server, self.directory, *keys).start())
        return self.agents[-1]

    def revoke(self, name: str) -> None:
        """As an operator does: take the entry out of the file."""
        clients = self.directory / "clients.toml"
        entries = clients.read_text().split("\n[[client]]\n")
        clients.write_text("\n[[client]]\n".join(entry for entry in entries if f'name = "{name}"\n' not in entry))


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    keygen(tmp_path)
    for name in ("op", "op-too"):
        keygen(tmp_path, name=name, operator=True)
    for name in ("red", "blue"):
        keygen(tmp_path, name=name, tenant=name)
    keys = ("--keys", str(tmp_path / "server.key"), "--clients", str(tmp_path / "clients.toml"))
    with running_server(tmp_path, *keys) as server:
        house = House(tmp_path, server)
        yield house
        for agent in house.agents:
            agent.kill()


@pytest.fixture
def open_store(house: House) -> Iterator[Callable[[str], Store]]:
    opened: list[Store] = []

    def make(name: str) -> Store:
        settings = StoreConfig(
            server=house.server.endpoint,
            transport="rdma",
            timeout_ms=20_000,
            client_key=house.key(name),
            server_key=house.server_key,
        )
        opened.append(Store.open(settings, namespace(), name=name))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


def said(agent: AgentProcess, code: int = 2) -> list[str]:
    """What it prints for whoever started it; it has ended with this exit code."""
    assert agent.process is not None
    assert agent.process.wait(60) == code
    return [line for line in agent.log.read_text().splitlines() if line.startswith("maru-agent: ")]


def test_only_an_operators_key_may_announce(house: House) -> None:
    (line,) = said(house.agent("red"))
    assert "only operators may announce an agent" in line
    # To a stranger the server is not there: it may come, and so the agent is started again.
    (line,) = said(house.agent(None), code=1)
    assert "no answer to Hello" in line


def test_tenants_use_the_agent_and_never_each_others_pages(house: House, open_store: Callable[[str], Store]) -> None:
    agent = house.agent("op").wait_announced()
    red, blue = open_store("red"), open_store("blue")
    chain, pages = hashes(10), Pages(10, SIZES, seed=1)
    assert red.put("kv", 0, 1, ROOT, chain, pages.fragments).all()
    copy = Pages(10, SIZES)
    assert red.get("kv", 0, chain, copy.fragments).all()
    assert copy.same(pages).all()
    assert blue.prefix(["kv"], 0, chain) == 0
    assert not blue.get("kv", 0, chain, copy.fragments).any()

    house.revoke("op")
    await_condition(lambda: not red._session.agents().agents, "the announcement goes with the key")

    def loads(store: Store) -> np.ndarray:
        copy = Pages(10, SIZES)
        loaded = store.get("kv", 0, chain, copy.fragments)
        assert copy.same(pages)[loaded].all()
        return loaded

    await_condition(lambda: not loads(red).any(), "nothing goes through it any more")
    await_condition(lambda: "not announced any more" in agent.log.read_text(), "the agent says so")
    assert agent.process is not None
    assert agent.process.poll() is None, "it waits to be let in again"
    house.agent("op-too").wait_announced()
    await_condition(lambda: loads(red).all(), "an agent with another key serves")
