"""How long an experiment has still to go, learnt from what it has done."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import msgspec


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to do: its kind, the mode it is done in, and how much of it there is."""

    kind: str
    mode: str
    amount: float


class Estimate:
    """Steps in order; :meth:`done` after each. A step takes as long for its amount as others of its kind did: of its own mode
    where one was done, else of any."""

    def __init__(self, steps: list[Step], clock: Callable[[], float] = time.monotonic) -> None:
        self._steps = list(steps)
        self._clock = clock
        self._began = clock()
        self._rates: dict[tuple[str, str], list[float]] = {}
        self._at = 0

    @property
    def current(self) -> Step | None:
        return self._steps[self._at] if self._at < len(self._steps) else None

    def done(self) -> None:
        """The current step has ended now."""
        step = self._steps[self._at]
        now = self._clock()
        self._rates.setdefault((step.kind, step.mode), []).append((now - self._began) / max(step.amount, 1e-9))
        self._began = now
        self._at += 1

    def _seconds(self, step: Step) -> float | None:
        rates = self._rates.get((step.kind, step.mode))
        if rates is None:
            rates = [rate for (kind, _), known in self._rates.items() if kind == step.kind for rate in known]
        return statistics.median(rates) * step.amount if rates else None

    def left_s(self) -> float | None:
        """Seconds; None while there is a kind of step of which none was done."""
        total = 0.0
        for index, step in enumerate(self._steps[self._at :]):
            seconds = self._seconds(step)
            if seconds is None:
                return None
            total += max(0.0, seconds - (self._clock() - self._began)) if index == 0 else seconds
        return total

    def share(self) -> float:
        """What part of the steps is done, by time where that is known, else by number."""
        whole = [self._seconds(step) for step in self._steps]
        known = [seconds for seconds in whole if seconds is not None]
        if not known:
            return self._at / max(1, len(self._steps))
        # What is not known takes as long as the rest, as far as anybody can tell.
        each = [statistics.mean(known) if seconds is None else seconds for seconds in whole]
        total = sum(each)
        running = 0.0
        if self._at < len(each):
            running = min(each[self._at], self._clock() - self._began)
        return min(1.0, (sum(each[: self._at]) + running) / total) if total else 0.0
