"""What a client tells the server of its own counters, with its heartbeats: how its reads and writes of pages ended.

The server sees what was asked and reserved; only the client knows what was copied whole. A message carries counts since
the present life of the session began, so that lost and repeated ones do no harm: the server adds differences. What
happened between two lives, while no server was there, belongs to the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TypeAlias

from maru_core.errands import Life
from maru_core.protocol import REPORTED

log = logging.getLogger("maru.session")

#: Gives the number of the namespace in the present life (None where there is none yet), and all counters since the start.
Source: TypeAlias = Callable[[], tuple[int | None, Mapping[str, int]]]


class Reports:
    """Used by the session's keeper alone."""

    def __init__(self, source: Source | None) -> None:
        self._source = source
        self._life: Life | None = None
        self._base: dict[str, int] = {}  # told to servers of former lives
        self._said: dict[str, int] = {}
        self._acknowledged: dict[str, int] = {}

    def counts(self, life: Life) -> tuple[int | None, dict[str, int]]:
        """Namespace and counts for a heartbeat of this life; never raises."""
        if self._source is None:
            return None, {}
        try:
            namespace, figures = self._source()
        except Exception:
            log.exception("counters could not be read: the server is told nothing this time")
            return None, {}
        if namespace is None:
            return None, {}
        if self._life is not life:
            self._life, self._base = life, self._acknowledged
        self._said = {name: figures[name] for name in REPORTED if figures.get(name, 0) > 0}
        since = {name: value - self._base.get(name, 0) for name, value in self._said.items()}
        return namespace, {name: value for name, value in since.items() if value > 0}

    def acknowledge(self) -> None:
        """The heartbeat with the last counts was answered."""
        self._acknowledged = self._said or self._acknowledged
