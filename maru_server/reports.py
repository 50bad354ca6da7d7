"""What clients tell of their own reads and writes (:class:`maru_core.protocol.Heartbeat`), added up.

A session says counts since its beginning; what is more than it said before is added. So repeated and reordered messages
add nothing twice, and what a session said stays counted when it ends. Claims are bounded: only known names, only the
sender's namespaces, no number that a counter could not hold.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from maru_core.protocol import REPORTED

#: Names of these counters, beside the server's own.
PREFIX: Final = "client_"
#: Largest value of a counter: what the protocol can carry.
COUNTER_MAX: Final = (1 << 63) - 1
#: Namespaces that one session may speak of; a client has one.
_NAMESPACES_MAX: Final = 8
_NAMES: Final = {name: PREFIX + name for name in REPORTED}


def add_reported(said: dict[int, dict[str, int]], namespace: int, counts: dict[str, int], *into: Counter[str]) -> None:
    """Add what is new in a session's ``counts`` of a namespace to all of ``into``.

    Args:
        said: what this session said before, by namespace; brought up to date.
    """
    before = said.get(namespace)
    if before is None:
        if len(said) >= _NAMESPACES_MAX:
            return
        before = said[namespace] = {}
    for name, counter in _NAMES.items():
        value = counts.get(name, 0)
        more = value - before.get(name, 0)
        if more > 0 and value <= COUNTER_MAX:
            before[name] = value
            for target in into:
                target[counter] = min(target[counter] + more, COUNTER_MAX)
