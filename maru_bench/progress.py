"""What is going on, for whoever waits for a benchmark."""

from __future__ import annotations

import sys
import time

from rich.console import Console


class Progress:
    """One line that says what is going on: redrawn on a terminal, elsewhere printed when it changes."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._status = self._console.status("") if self._console.is_terminal else None
        self._began = time.monotonic()
        self._last = ""
        self._printed_at = 0.0

    def __call__(self, text: str) -> None:
        elapsed = time.monotonic() - self._began
        if self._status is not None:
            self._status.update(f"{text} [dim]{elapsed:.0f} s[/dim]")
        # A log file needs every new step once, and a sign of life of a long one now and then.
        elif text.split("(")[0] != self._last.split("(")[0] or elapsed - self._printed_at > 15:
            self._printed_at = elapsed
            print(f"[{elapsed:5.0f} s] {text}", file=sys.stderr, flush=True)
        self._last = text

    def __enter__(self) -> Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
