"""Two real SGLang servers share prefixes: one maps the pool, the other reaches it only through an agent.

The agent's transfers go over TCP on loopback, and straight between the pool and SGLang's own host memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness import STORED_TOKENS, EngineServer, make_prompt, same_answer
from pair import Engines

from forked import ForkedProcess
from maru_bench.servers import MaruServer
from support import await_condition

pytestmark = [pytest.mark.sglang, pytest.mark.server, pytest.mark.timeout(420)]


@contextmanager
def running_agent(server: MaruServer, log: Path) -> Iterator[ForkedProcess]:
    environ = dict(os.environ) | {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    agent = ForkedProcess(("-m", "maru_agent"), ("--server", server.endpoint), log, environ=environ)
    try:
        await_condition(lambda: "announced to the server" in log.read_text(), "the agent announces itself", 180)
        yield agent
    finally:
        agent.kill()
        agent.wait(60)


def test_one_maps_the_pool_and_one_reaches_it_through_an_agent(
    engines: Engines,
    maru_server: MaruServer,
    tmp_path: Path,
) -> None:
    mapped, far = engines.pair
    marks = len(far.log_text())
    with running_agent(maru_server, tmp_path / "agent.log") as agent:
        for server, transport in ((mapped, "cxl"), (far, "rdma")):
            server.reattach("maru", {"server": maru_server.endpoint, "transport": transport, "timeout_ms": 5000})
        for one, other, seed in ((mapped, far, 40), (far, mapped, 41)):
            share(one, other, seed)
        check_no_buffer(far.log_text()[marks:])
        # The negative control: it all came through the agent.
        prompt = make_prompt(42)
        cold = mapped.ask(prompt)
        mapped.flush()
        agent.kill()
        agent.wait(60)
        computed = far.ask(prompt)
        assert computed.storage_tokens == 0
        assert same_answer(computed, cold)
    for server in engines.pair:
        server.reattach("maru")


def share(one: EngineServer, other: EngineServer, seed: int) -> None:
    """Computed by one, stored, loaded by the other, with equal answers."""
    prompt = make_prompt(seed)
    cold = one.ask(prompt)
    assert cold.cached_tokens == 0
    one.flush()  # returns only when everything is stored
    shared = other.ask(prompt)
    assert shared.storage_tokens == STORED_TOKENS
    assert same_answer(shared, cold)


def check_no_buffer(log: str) -> None:
    """SGLang's host memory is registered with the NIC, for loads and for stores, and nothing was copied on the way."""
    for lane in ("loads", "stores"):
        registered = re.search(rf"{lane}: (\d+) bytes of the engine's memory are registered", log)
        assert registered, f"no {lane} in the log"
        assert int(registered[1]) > 1 << 20
    assert "through a buffer" not in log
