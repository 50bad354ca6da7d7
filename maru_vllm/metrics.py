"""Maru's figures in vLLM's own metrics: its log line of KV transfers, and ``/metrics``.

Both sides of the connector count, each with its own store: the scheduler's what was asked for and found, the workers' what was moved.
What has grown since the last step travels with the step's output (:class:`Meter` to :class:`MaruStats`) to the process
that logs and serves ``/metrics`` (:class:`MaruPromMetrics`).

Blocks and bytes are those of one rank and one KV cache group, summed over ranks and groups: with four tensor-parallel ranks a stored block
counts four times, with a quarter of its bytes each.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from maru_core.store_config import StoreMetrics

#: Key of the list of load times in the stats, seconds.
LOAD_SECONDS: Final = "load_seconds"
#: Stores that were given up because their blocks were needed before their copy had begun, in blocks.
DROPPED: Final = "refused_dropped"
#: Load times that wait to be sent; older ones are forgotten, and only the histogram misses them.
LOADS_MAX: Final = 1000
LOAD_BUCKETS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

#: Figures of the store that are a metric each.
_PLAIN: Final[Mapping[str, tuple[str, str]]] = {
    "queried_pages": ("vllm:maru_queried_blocks", "Blocks that lookups asked Maru for."),
    "hit_pages": ("vllm:maru_found_blocks", "Blocks that lookups found in Maru."),
    "loaded_pages": ("vllm:maru_loaded_blocks", "Blocks loaded from Maru."),
    "loaded_bytes": ("vllm:maru_loaded_bytes", "Bytes loaded from Maru."),
    "stored_pages": ("vllm:maru_stored_blocks", "Blocks stored in Maru."),
    "stored_bytes": ("vllm:maru_stored_bytes", "Bytes stored in Maru."),
    "existing_pages": ("vllm:maru_existing_blocks", "Blocks that were already there when they were to be stored."),
}
#: Figures that are one metric with a label ``reason``, by the start of their names.
_REASONS: Final[Mapping[str, tuple[str, str]]] = {
    "lookup_": ("vllm:maru_missed_blocks", "Blocks that lookups did not find in Maru, by the reason for the first."),
    "miss_": ("vllm:maru_failed_load_blocks", "Blocks that were found and could not be loaded, by reason."),
    "refused_": ("vllm:maru_not_stored_blocks", "Blocks that could not be stored in Maru, by reason."),
}
FIGURES: Final = (*StoreMetrics.__struct_fields__, DROPPED)


def reason_of(figure: str) -> tuple[str, str] | None:
    """Metric and reason of a figure that has one."""
    for start, (metric, _) in _REASONS.items():
        if figure.startswith(start):
            return metric, figure.removeprefix(start)
    return None


@dataclass
class MaruStats(KVConnectorStats):  # type: ignore[misc]
    """What was counted in one interval: figure to number, and the load times. Plain data, since it travels between processes."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            # Lists are new ones: what is added to must not be shared with who sent it.
            self.data[name] = self.data[name] + value if name in self.data else value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line, in words."""
        figures = collections.Counter({name: value for name, value in self.data.items() if name != LOAD_SECONDS})
        times = self.data.get(LOAD_SECONDS, [])
        words: dict[str, int | float] = {
            "Maru: blocks loaded": figures["loaded_pages"],
            "MB loaded": round(figures["loaded_bytes"] / 1e6, 3),
            "blocks stored": figures["stored_pages"],
            "MB stored": round(figures["stored_bytes"] / 1e6, 3),
        }
        for start, name in (("lookup_", "blocks missed"), ("miss_", "loads failed"), ("refused_", "blocks not stored")):
            if total := sum(value for figure, value in figures.items() if figure.startswith(start)):
                words[name] = total
        if times:
            words["avg load ms"] = round(1e3 * sum(times) / len(times), 3)
            words["max load ms"] = round(1e3 * max(times), 3)
        return words

    def is_empty(self) -> bool:
        return not any(self.data.values())


class Meter:
    """What has grown since it was last asked, of a store's counters and what else its side counts.

    Args:
        metrics: the store's counters as they are, None while there is no store.
    """

    def __init__(self, metrics: Callable[[], StoreMetrics | None]) -> None:
        self._metrics = metrics
        self._before: collections.Counter[str] = collections.Counter()
        self._loads: collections.deque[float] = collections.deque(maxlen=LOADS_MAX)
        self._dropped = 0

    def loaded(self, seconds: float) -> None:
        """One request's load has ended, well or not. Called from any thread."""
        self._loads.append(seconds)

    def dropped(self, blocks: int) -> None:
        """A store of so many blocks was given up. Called from one thread."""
        self._dropped += blocks

    def take(self) -> MaruStats | None:
        """None where nothing was counted."""
        metrics = self._metrics()
        now: collections.Counter[str] = collections.Counter(
            msgspec.structs.asdict(metrics) if metrics is not None else {}
        )
        now[DROPPED] = self._dropped
        grown: dict[str, Any] = {
            name: value - self._before[name] for name, value in now.items() if value > self._before[name]
        }
        self._before = now
        if times := [self._loads.popleft() for _ in range(len(self._loads))]:
            grown[LOAD_SECONDS] = times
        return MaruStats(data=grown) if grown else None


class MaruPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The metrics, and what is added to them."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[tuple[int, str], Any] = {}
        self._times: dict[int, Any] = {}
        histogram = self._histogram_cls(
            name="vllm:maru_load_seconds",
            documentation="Time to load one request's blocks from Maru, seconds.",
            buckets=LOAD_BUCKETS,
            labelnames=labelnames,
        )
        plain = {
            figure: self._counter_cls(name=name, documentation=text, labelnames=labelnames)
            for figure, (name, text) in _PLAIN.items()
        }
        by_reason = {
            name: self._counter_cls(name=name, documentation=text, labelnames=[*labelnames, "reason"])
            for name, text in _REASONS.values()
        }
        for engine, values in per_engine_labelvalues.items():
            self._times[engine] = histogram.labels(*values)
            for figure in FIGURES:
                # All from the start, at 0: a rate needs a first value.
                if figure in plain:
                    self._counters[engine, figure] = plain[figure].labels(*values)
                elif (told := reason_of(figure)) is not None:
                    metric, reason = told
                    self._counters[engine, figure] = by_reason[metric].labels(*values, reason)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for seconds in transfer_stats_data.get(LOAD_SECONDS, ()):
            self._times[engine_idx].observe(seconds)
        for figure, value in transfer_stats_data.items():
            counter = self._counters.get((engine_idx, figure))
            if counter is not None:
                counter.inc(value)


def metric_names() -> Iterable[str]:
    """Of all metrics, for documents and tests."""
    yield from (name for name, _ in (*_PLAIN.values(), *_REASONS.values()))
    yield "vllm:maru_load_seconds"
