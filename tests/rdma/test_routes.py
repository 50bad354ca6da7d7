"""Whose turn it is, by what agents announce of their hosts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from maru_core.protocol import Agent
from maru_core.rdma.endpoint import TransferError
from maru_core.rdma.routes import Routes


def agent(name: str, load: float) -> Agent:
    pieces = np.array([[4096, 1 << 20, 1 << 32]], "<u8").tobytes()
    return Agent(name, "UCX", name.encode(), pieces, load)


def turns(routes: Routes, count: int) -> Counter[str]:
    return Counter(routes.next().agent.name for _ in range(count))


@pytest.mark.parametrize(
    ("loads", "shares"),
    [
        ((0.0, 0.0), (300, 300)),
        ((2.0, 2.0), (300, 300)),
        ((0.0, 1.0), (400, 200)),
        ((0.0, 4.0), (500, 100)),
        ((0.0, 1e9), (500, 100)),  # not starved by what cannot be
        ((1e9, 1e9), (300, 300)),
    ],
)
def test_the_busier_host_gets_less_and_never_nothing(loads: tuple[float, float], shares: tuple[int, int]) -> None:
    routes = Routes(lambda: [agent("a", loads[0]), agent("b", loads[1])])
    counted = turns(routes, 600)
    assert abs(counted["a"] - shares[0]) <= 1
    assert abs(counted["b"] - shares[1]) <= 1


def test_an_agent_that_comes_later_is_not_swamped() -> None:
    there = [agent("a", 0.0)]
    routes = Routes(lambda: there)
    turns(routes, 1000)
    there.append(agent("b", 0.0))
    routes._asked = -float("inf")  # as after some seconds
    assert abs(turns(routes, 100)["b"] - 50) <= 1


def test_one_that_failed_is_left_alone() -> None:
    routes = Routes(lambda: [agent("a", 0.0), agent("b", 1e9)])
    first = routes.next()
    routes.failed(first)
    other = {"a": "b", "b": "a"}[first.agent.name]
    assert turns(routes, 20) == {other: 20}
    routes.failed(routes.next())
    with pytest.raises(TransferError, match="none of 2 agents"):
        routes.next()
