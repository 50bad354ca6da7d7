"""Which agent is used next: those that answered, in turn, the less busy more often; one that failed is left alone for a while.

Each batch costs its agent 1 and the load that it announces (runnable processes for each CPU of its host), at most :data:`LOAD_MOST`; the one
that has cost least is next. So an agent that says it is idle gets at most five times as many batches as any other, and one that says it is
busy still gets some: a figure that is old or a lie neither starves nor swamps anybody.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from maru_core.errors import MaruError
from maru_core.protocol import Agent
from maru_core.rdma.endpoint import TransferError

#: How long an agent that failed is not asked, seconds.
ASIDE_S: Final = 10.0
#: No load counts for more.
LOAD_MOST: Final = 4.0
#: How long what the server said of its agents is worth believing, seconds.
KNOWN_S: Final = 5.0


class Route:
    """One agent as a client uses it."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        pieces = np.frombuffer(agent.pieces, "<u8").reshape(-1, 3)
        self._starts = pieces[:, 0].astype(np.uint64)
        self._shift = pieces[:, 2].astype(np.uint64) - self._starts  # wraps, and back again
        self.used = 0.0

    def addresses(self, offsets: np.ndarray) -> np.ndarray:
        """Where these bytes of the pool are at the agent."""
        piece = np.searchsorted(self._starts, offsets, side="right") - 1
        addresses: np.ndarray = offsets + self._shift[piece]
        return addresses


class Routes:
    """Used by one lane at a time (its lock protects this).

    Args:
        ask: for the agents that there are; may raise.
    """

    def __init__(self, ask: Callable[[], Sequence[Agent]]) -> None:
        self._ask = ask
        self._routes: dict[bytes, Route] = {}  # by metadata
        self._aside: dict[bytes, float] = {}
        self._asked = -float("inf")

    def next(self) -> Route:
        """The agent for the next batch.

        Raises:
            TransferError: there is none that can be asked now.
            MaruError: the server did not say.
        """
        now = time.monotonic()
        usable = self._usable(now)
        if now - self._asked > KNOWN_S or not usable:
            self._refresh(now)
            usable = self._usable(now)
        if not usable:
            raise TransferError(
                f"none of {len(self._routes)} agents can be reached now: start maru-agent on a host that maps the pool, and see its log"
            )
        route = min(usable, key=lambda route: route.used)
        route.used += 1.0 + min(route.agent.load, LOAD_MOST)
        return route

    def failed(self, route: Route) -> None:
        """Leave it alone for a while."""
        self._aside[route.agent.metadata] = time.monotonic() + ASIDE_S

    def _usable(self, now: float) -> list[Route]:
        return [route for key, route in self._routes.items() if self._aside.get(key, 0.0) <= now]

    def _refresh(self, now: float) -> None:
        try:
            agents = self._ask()
        except MaruError:
            if self._usable(now):
                self._asked = now  # a server that is away for a moment does not take away the way to its pool
                return
            raise
        self._asked = now
        level = min((route.used for route in self._routes.values()), default=0.0)
        known, self._routes = self._routes, {}
        for agent in agents:
            route = known.get(agent.metadata) or Route(agent)
            if route.agent.pieces != agent.pieces:
                route = Route(agent)
            route.agent = agent
            route.used = max(route.used, level)
            self._routes[agent.metadata] = route
        self._aside = {key: until for key, until in self._aside.items() if until > now}
