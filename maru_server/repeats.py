"""Log lines that a peer could cause as often as it likes: the first of a kind, and then one now and then."""

from __future__ import annotations

import logging
import time
from typing import Final

log = logging.getLogger("maru.server")

#: A fault that repeats is logged with its traceback at most this often, seconds.
FAULT_LOG_S: Final = 10.0


class Repeats:
    """Logs the first of a kind, and then at most one every ``FAULT_LOG_S`` seconds with the number of those left out."""

    def __init__(self) -> None:
        self._at = -FAULT_LOG_S
        self._left_out = 0

    def log(self, text: str) -> None:
        """An error with the traceback of the exception being handled."""
        if self._due():
            log.exception("%s (%d more like it since the last time)", text, self._taken())

    def warn(self, text: str, *args: object) -> None:
        if self._due():
            log.warning(text + " (%d more like it since the last time)", *args, self._taken())

    def _due(self) -> bool:
        now = time.monotonic()
        if now - self._at < FAULT_LOG_S:
            self._left_out += 1
            return False
        self._at = now
        return True

    def _taken(self) -> int:
        left_out, self._left_out = self._left_out, 0
        return left_out
