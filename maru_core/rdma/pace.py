"""How many bytes go into one transfer: found out while transferring, since it differs by network, and more is not always better."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import Final

#: What is tried, bytes.
CANDIDATES: Final = (256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
#: Each is tried so often before any is believed to be the best: one call can be slow for many reasons.
_TRIES: Final = 3
#: From then on every so many calls another size than the best is tried again.
_EXPLORE: Final = 32
#: Of so many last calls of a size the fastest counts: whatever else goes on makes a call slower, and none faster.
_REMEMBERED: Final = 8
#: Of sizes that are about as fast as the fastest the largest is taken: each transfer costs this process some CPU time.
_AS_FAST: Final = 0.95


class BatchBytes:
    """Whole calls are compared, and only with calls that are cut into about as many transfers: several transfers are under way
    at a time, so what one of them takes says little. Used by one lane at a time."""

    def __init__(self) -> None:
        self._kinds: dict[int, _Kind] = {}

    def choose(self, total: int) -> int:
        """Bytes of each transfer of a call that moves ``total``."""
        return self._kind(total).choose()

    def took(self, total: int, seconds: float) -> None:
        """The last call that was chosen for is done, and nothing went wrong in it."""
        if seconds > 0:
            self._kind(total).took(total / seconds)

    def _kind(self, total: int) -> _Kind:
        """Calls for which the same sizes make a difference: those that cut it, and one that does not."""
        most = min(bisect_left(CANDIDATES, total), len(CANDIDATES) - 1)
        return self._kinds.setdefault(most, _Kind(CANDIDATES[: most + 1]))


class _Kind:
    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes
        self._rates: dict[int, deque[float]] = {}  # bytes a second
        self._calls = 0
        self._chosen = sizes[-1]

    def choose(self) -> int:
        sizes, call = self._sizes, self._calls
        self._calls += 1
        if call < _TRIES * len(sizes):
            self._chosen = sizes[call % len(sizes)]
        elif call % _EXPLORE == 0:
            self._chosen = sizes[call // _EXPLORE % len(sizes)]
        else:
            best = {size: max(rates) for size, rates in self._rates.items()}
            enough = _AS_FAST * max(best.values(), default=0.0)
            self._chosen = max((size for size, rate in best.items() if rate >= enough), default=sizes[-1])
        return self._chosen

    def took(self, rate: float) -> None:
        self._rates.setdefault(self._chosen, deque(maxlen=_REMEMBERED)).append(rate)
