"""What a backend counts: transfers for SGLang's metrics, and pages that a side pool lacked."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from typing import Final

from sglang.srt.observability.metrics_collector import StorageMetrics

_GIB: Final = 1 << 30
#: Transfers kept for the next get_stats call; older ones are dropped if nobody asks.
_KEPT: Final = 1024


class Figures:
    """Counted from several threads."""

    def __init__(self, transfers: bool) -> None:
        """
        Args:
            transfers: whether anybody asks for them (``--enable-metrics``).
        """
        self._transfers = transfers
        self._lock = threading.Lock()
        self._loads: deque[tuple[int, float]] = deque(maxlen=_KEPT)
        self._stores: deque[tuple[int, float]] = deque(maxlen=_KEPT)
        self._short: Counter[str] = Counter()

    def loaded(self, pages: int, began: float) -> None:
        self._note(self._loads, pages, began)

    def stored(self, pages: int, began: float) -> None:
        self._note(self._stores, pages, began)

    def held_back(self, short: Mapping[str, int]) -> None:
        """A hit was shorter than what the KV pool had, by these pages of these pools."""
        with self._lock:
            self._short.update(short)

    def short(self) -> dict[str, float | int | str]:
        with self._lock:
            return {f"short_{name}_pages": pages for name, pages in self._short.items()}

    def metrics(self, page_bytes: int) -> StorageMetrics:
        """Transfers since the last call: pages of each, and GiB/s."""
        with self._lock:
            loads, stores = list(self._loads), list(self._stores)
            self._loads.clear()
            self._stores.clear()
        size = page_bytes / _GIB
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in loads],
            backup_pgs=[pages for pages, _ in stores],
            prefetch_bandwidth=[pages * size / seconds for pages, seconds in loads],
            backup_bandwidth=[pages * size / seconds for pages, seconds in stores],
        )

    def _note(self, transfers: deque[tuple[int, float]], pages: int, began: float) -> None:
        if pages and self._transfers:
            with self._lock:
                transfers.append((pages, max(time.monotonic() - began, 1e-9)))
