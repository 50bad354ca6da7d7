"""Maru's figures on their way through vLLM's metrics: counted, sent, added up, logged, served."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maru_core.store_config import StoreMetrics

pytestmark = pytest.mark.vllm

LABELS = ["model_name", "engine"]


@pytest.fixture
def meter() -> tuple[Any, StoreMetrics]:
    from maru_vllm.metrics import Meter

    metrics = StoreMetrics()
    return Meter(lambda: metrics), metrics


def test_only_what_has_grown_is_sent(meter: tuple[Any, StoreMetrics]) -> None:
    counted, metrics = meter
    assert counted.take() is None
    metrics.stored_pages, metrics.stored_bytes = 3, 300
    assert counted.take().data == {"stored_pages": 3, "stored_bytes": 300}
    metrics.stored_pages += 2
    counted.dropped(4)
    counted.loaded(0.5)
    counted.loaded(0.25)
    assert counted.take().data == {"stored_pages": 2, "refused_dropped": 4, "load_seconds": [0.5, 0.25]}
    assert counted.take() is None


def test_nothing_is_counted_before_there_is_a_store() -> None:
    from maru_vllm.metrics import Meter

    stores: list[StoreMetrics] = []
    counted = Meter(lambda: stores[0] if stores else None)
    assert counted.take() is None
    stores.append(StoreMetrics(hit_pages=2))
    assert counted.take().data == {"hit_pages": 2}


def test_load_times_of_many_threads_are_sent_once(meter: tuple[Any, StoreMetrics]) -> None:
    counted, sent = meter[0], []
    threads = [threading.Thread(target=lambda: [counted.loaded(1.0) for _ in range(100)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if (stats := counted.take()) is not None:
            sent += stats.data["load_seconds"]
    if (stats := counted.take()) is not None:
        sent += stats.data["load_seconds"]
    assert sent == [1.0] * 400


figures = st.dictionaries(st.sampled_from(["loaded_pages", "stored_pages", "miss_evicted"]), st.integers(1, 9))


@given(figures, figures, st.lists(st.floats(0, 1), max_size=3), st.lists(st.floats(0, 1), max_size=3))
def test_sums_are_sums_and_their_parts_stay_as_they_were(
    one: Any, other: Any, times: list[float], more: list[float]
) -> None:
    from maru_vllm.metrics import MaruStats

    a, b = MaruStats(data={**one, "load_seconds": times}), MaruStats(data={**other, "load_seconds": more})
    before = msgspec.json.encode(b.data)
    total = a.aggregate(b).data
    assert total == {name: one.get(name, 0) + other.get(name, 0) for name in one | other} | {
        "load_seconds": times + more
    }
    total["load_seconds"].append(9.0)
    assert msgspec.json.encode(b.data) == before


def test_vllms_log_line_has_them() -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

    from maru_vllm.plugin import register

    register()
    lines: list[str] = []
    logging = KVConnectorLogging(KVTransferConfig(kv_connector="MaruConnector", kv_role="kv_both"))
    for pages in (1, 2):
        logging.observe(
            {"loaded_pages": pages, "loaded_bytes": pages * 1_000_000, "lookup_evicted": 4, "load_seconds": [0.002]}
        )
    logging.log(lambda text, *args: lines.append(text % args))
    assert lines == [
        "KV Transfer metrics: Maru: blocks loaded=3, MB loaded=3.0, blocks stored=0, MB stored=0.0, blocks missed=8, avg load ms=2.0, max load ms=2.0"
    ]
    logging.log(lambda text, *args: lines.append(text % args))
    assert len(lines) == 1


def test_metrics_serves_every_figure_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    from prometheus_client import CollectorRegistry, generate_latest
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm

    from maru_vllm.metrics import FIGURES, metric_names, reason_of
    from maru_vllm.plugin import register

    register()
    registry = CollectorRegistry()
    for name in ("_gauge_cls", "_counter_cls", "_histogram_cls"):
        kind = getattr(KVConnectorProm, name)
        monkeypatch.setattr(KVConnectorProm, name, type(kind.__name__, (kind,), {
            "__init__": lambda self, *args, _kind=kind, **kwargs: _kind.__init__(self, *args, **{"registry": registry} | kwargs),
        }))  # fmt: skip
    config = VllmConfig(kv_transfer_config=KVTransferConfig(kv_connector="MaruConnector", kv_role="kv_both"))
    prom = KVConnectorProm(config, LABELS, {0: ["m", "0"], 1: ["m", "1"]})
    told = {figure: index + 1 for index, figure in enumerate(FIGURES)}
    prom.observe(dict(told) | {"load_seconds": [0.003, 0.3], "of a later release": 5}, 1)
    text = generate_latest(registry).decode()
    values = sorted(
        float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if 'engine="1"' in line and "_total{" in line
    )
    assert values == sorted(told.values())  # each counted exactly once
    zeros = [line for line in text.splitlines() if 'engine="0"' in line and "_total{" in line]
    assert len(zeros) == len(told)
    assert all(line.endswith(" 0.0") for line in zeros)
    assert 'vllm:maru_load_seconds_bucket{engine="1",le="0.005",model_name="m"} 1.0' in text
    assert reason_of("lookup_evicted") == ("vllm:maru_missed_blocks", "evicted")
    for name in metric_names():
        assert f"# HELP {name}" in text
