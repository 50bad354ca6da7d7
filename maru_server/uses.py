"""Uses of pages on their way into the pool's records: a server that starts anew must know which pages are cold.

Trees know at once what was used; records are written a few at a time, in :meth:`Uses.write`, so that a touch costs a client
nothing. What is lost on the way (with the server, or since there were too many) only makes pages look less used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

from maru_server import footprint
from maru_server.directory import PoolDirectory
from maru_server.tree import PrefixTree, Rows

#: Most uses waiting to be written down; older ones are forgotten (after a restart those pages look less used).
_WAITING_MAX: Final = 1 << 18


class Uses:
    """What waits to be written down.

    Args:
        trees: by namespace number; looked at anew each time.
    """

    def __init__(self, directory: PoolDirectory, trees: Mapping[int, PrefixTree]) -> None:
        self._directory = directory
        self._trees = trees
        self._waiting: deque[tuple[PrefixTree, Rows]] = deque()
        self._waiting_rows = 0

    def note(self, tree: PrefixTree, rows: Rows) -> None:
        """These pages were used; the tree knows already."""
        self._waiting.append((tree, rows))
        self._waiting_rows += len(rows)
        while self._waiting_rows > _WAITING_MAX:
            self._waiting_rows -= len(self._waiting.popleft()[1])

    def write(self, budget: int) -> None:
        """Write down about so many of them, oldest first."""
        while self._waiting and budget > 0:
            tree, rows = self._waiting.popleft()
            self._waiting_rows -= len(rows)
            budget -= len(rows)
            if self._trees.get(tree.number) is tree:
                for slots, theirs in tree.one_slot(rows):
                    self._directory.touch(slots, tree.last_use[theirs])

    def memory_bytes(self) -> int:
        """Memory of what waits, bytes."""
        return footprint.touched_bytes(len(self._waiting), self._waiting_rows)
