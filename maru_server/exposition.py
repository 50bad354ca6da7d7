"""Prometheus metrics: what each is called, what it means, and the page that a scrape gets.

Made anew at each scrape from :class:`maru_server.metrics.Figures`; nothing here is asked while requests are served. The
number of series is bounded: at most :data:`NAMED` namespaces have labels of their own, the busiest when there was room,
and all others are one, ``other``. A namespace that gets its labels later starts at zero there, and what it had counted before
stays with ``other``: no counter ever falls.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from maru_core import __version__
from maru_server.metrics import BUCKETS, RECEIVED, SENT, SUM_NS, Figures, SpaceFigures
from maru_server.reports import PREFIX as CLIENT

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
#: Namespaces with labels of their own.
NAMED: Final = 32
OTHER: Final = "other"
#: Smallest and largest latency bucket that is shown: about 1 us and 8.6 s.
_FIRST_BUCKET, _LAST_BUCKET = 10, 33
_SPACE: Final = ("tenant", "namespace")

#: Counters of a namespace: metric, what it counts, key in ``counts``.
_COUNTERS: Final = (
    ("maru_matches", "Match requests that were answered.", "matches"),
    ("maru_pages_asked", "Pages that matches asked for.", "pages_asked"),
    ("maru_pages_found", "Pages that matches found: the hit rate is this by maru_pages_asked_total.", "pages_found"),
    ("maru_pages_reserved", "Objects for which a slot was given out.", "reserved"),
    ("maru_pages_committed", "Objects that were stored.", "committed"),
    ("maru_pages_removed", "Pages that were deleted or cleared.", "removed_pages"),
    ("maru_client_pages_loaded", "Pages that clients say they have read.", CLIENT + "loaded_pages"),
    ("maru_client_bytes_loaded", "Bytes that clients say they have read.", CLIENT + "loaded_bytes"),
    ("maru_client_pages_stored", "Pages that clients say they have stored.", CLIENT + "stored_pages"),
    ("maru_client_bytes_stored", "Bytes that clients say they have stored.", CLIENT + "stored_bytes"),
    (
        "maru_client_pages_existing",
        "Pages that clients had to store and found there already.",
        CLIENT + "existing_pages",
    ),
)
#: The same with a reason: metric, what it counts, the label's name, keys by reason.
_REASONED: Final = (
    (
        "maru_pages_missed",
        "Pages that matches asked for and did not find, by what is known of the first of them.",
        {
            "not_stored": "miss_not_stored",
            "evicted": "miss_evicted",
            "removed": "miss_removed",
            "incomplete": "miss_incomplete",
            "other_namespace": "miss_other_namespace",
        },
    ),
    (
        "maru_pages_refused",
        "Objects for which no slot was given out, by reason.",
        {reason: f"refused_{reason}" for reason in ("no_room", "quota", "busy", "conflict", "limit")},
    ),
    (
        "maru_pages_evicted",
        "Pages that made room for others, by what they had to go for.",
        {
            "capacity": "evicted_capacity",
            "quota": "evicted_quota",
            "reclaim": "evicted_reclaim",
            "operator": "evicted_operator",
        },
    ),
    (
        "maru_client_pages_missed",
        "Pages that clients wanted to read and could not, by reason.",
        {
            reason: f"{CLIENT}miss_{name}"
            for reason, name in {
                "not_stored": "not_stored",
                "length": "length",
                "invalidated": "evicted",
                "checksum": "checksum",
                "too_late": "unavailable",
                "error": "error",
            }.items()
        },
    ),
    (
        "maru_client_pages_refused",
        "Pages that clients wanted to store and could not, by reason.",
        {
            reason: f"{CLIENT}refused_{name}"
            for reason, name in {
                "no_room": "no_room",
                "quota": "quota",
                "busy": "busy",
                "conflict": "conflict",
                "too_late": "lost",
                "unavailable": "unavailable",
                "error": "error",
            }.items()
        },
    ),
)
#: Gauges and counters of the whole server: metric, what it says, key in ``stats``. Left out where there is no such key.
_GAUGES: Final = (
    ("maru_used_bytes", "Bytes of all slots that are not free.", "bytes_used"),
    ("maru_used_ratio", "Part of the pool in use, as the watermarks of eviction have it.", "used_share"),
    ("maru_objects", "Objects stored.", "objects"),
    ("maru_namespaces", "Namespaces that are known.", "namespaces"),
    ("maru_reserved_slots", "Slots given out and not yet committed.", "slots_reserved"),
    (
        "maru_quarantined_slots",
        "Slots kept from use because a silent client may still write into them.",
        "slots_quarantined",
    ),
    ("maru_holds", "Requests whose pages are held.", "holds"),
    ("maru_held_bytes", "Bytes kept from eviction by holds.", "held_bytes"),
    ("maru_pinned_bytes", "Bytes kept from eviction by pins.", "pinned_bytes"),
    ("maru_index_memory_bytes", "Memory of the server's own tables.", "memory_bytes"),
)
_TOTALS: Final = (
    ("maru_commits_late", "Objects whose commit came when the reservation was lost already.", "lost"),
    ("maru_slots_quarantined", "Slots that went to quarantine.", "quarantined"),
    ("maru_objects_evicted", "Objects that were evicted.", "evicted_objects"),
    ("maru_records_discarded", "Records of the pool that were not believed when the server started.", "discarded"),
    ("maru_stalled_seconds", "Time in which the server did not run, and counted no client as silent.", "stalled_s"),
    (
        "maru_events_overflows",
        "Times that the queue of events was given up, and all was published anew.",
        "events_overflows",
    ),
    ("maru_requests_over_rate", "Requests refused because a session sent too many.", "over_rate"),
    ("maru_pages_over_share", "Pages refused because a session was writing as many as it may.", "over_share"),
    ("maru_clients_unlisted", "Connections turned away because the client's key is not listed.", "clients_unlisted"),
    (
        "maru_handshakes_failed",
        "Connections turned away for another reason: no keys, or another server's.",
        "handshakes_failed",
    ),
)


@dataclass(slots=True)
class _Space:
    """One pair of labels and what stands behind it."""

    labels: tuple[str, str]
    counts: Mapping[str, int]
    pages: int
    stored: int


class _Labels:
    """Which namespaces have labels of their own."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._named: dict[tuple[str, str], dict[str, int]] = {}  # to what it had counted as a part of `other`
        self._in_other: set[tuple[str, str]] = set()

    def split(self, spaces: Iterable[SpaceFigures]) -> tuple[list[_Space], list[SpaceFigures]]:
        """All pairs of labels, and the namespaces that have their own."""
        by_labels = {(space.tenant, space.label): space for space in spaces}
        waiting = sorted(
            (labels for labels in by_labels if labels not in self._named),
            key=lambda labels: (-by_labels[labels].counts.get("pages_asked", 0), labels),
        )
        for labels in waiting[: max(0, self._most - len(self._named))]:
            self._named[labels] = dict(by_labels[labels].counts) if labels in self._in_other else {}
        others: Counter[str] = Counter()
        pages = stored = 0
        shown, own = [], []
        for labels, space in by_labels.items():
            before = self._named.get(labels)
            if before is None:
                self._in_other.add(labels)
                others.update(space.counts)
                pages += space.pages
                stored += space.stored()
                continue
            others.update(before)
            counts = {name: count - before.get(name, 0) for name, count in space.counts.items()}
            shown.append(_Space(labels, counts, space.pages, space.stored()))
            own.append(space)
        if self._in_other:
            shown.append(_Space((OTHER, OTHER), others, pages, stored))
        return shown, own


class Exposition(Collector):
    """Args:
    figures: gives them at a scrape; whatever it raises, the scrape raises.
    """

    def __init__(self, figures: Callable[[], Figures], named: int = NAMED) -> None:
        self._figures = figures
        self._labels = _Labels(named)
        self._lock = threading.Lock()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """The page, in Prometheus's text format."""
        with self._lock:
            return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Nothing ahead of the first scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        figures = self._figures()
        stats = figures.stats
        yield InfoMetricFamily(
            "maru", "The server.", value={"version": __version__, **_texts(stats, "pool_uri", "policy")}
        )
        yield from self._requests(figures)
        yield from self._spaces(figures)
        yield _gauge("maru_pool_bytes", "Bytes of the pool that can hold objects.", _pool_bytes(stats))
        for name, text, key in _GAUGES:
            if key in stats:
                yield _gauge(name, text, float(stats[key]))
        for name, text, key in _TOTALS:
            value = stats[key] if key in stats else figures.counts.get(key)
            if value is not None:
                total = CounterMetricFamily(name, text)
                total.add_metric((), float(value))
                yield total
        yield _gauge("maru_quarantined_bytes", "Bytes of the slots in quarantine.", figures.quarantined_bytes)
        yield from self._sizes(figures)
        silent = int(stats["sessions_silent"])
        sessions = GaugeMetricFamily(
            "maru_sessions", "Clients that are connected, by whether they speak.", labels=("state",)
        )
        sessions.add_metric(("live",), int(stats["sessions"]) - silent)
        sessions.add_metric(("silent",), silent)
        yield sessions
        yield from self._pools(figures)

    @staticmethod
    def _requests(figures: Figures) -> Iterator[Metric]:
        seconds = HistogramMetricFamily(
            "maru_request_seconds",
            "Time that the server was busy with one request: from its receipt until the reply was sent and the books were kept.",
            labels=("request",),
        )
        received = CounterMetricFamily("maru_received_bytes", "Bytes of requests.", labels=("request",))
        sent = CounterMetricFamily("maru_sent_bytes", "Bytes of replies.", labels=("request",))
        for request, row in sorted(figures.requests.items()):
            buckets = [
                (repr((1 << bucket) / 1e9), sum(row[: bucket + 1])) for bucket in range(_FIRST_BUCKET, _LAST_BUCKET + 1)
            ]
            buckets.append(("+Inf", sum(row[:BUCKETS])))
            seconds.add_metric((request,), buckets, row[SUM_NS] / 1e9)
            received.add_metric((request,), row[RECEIVED])
            sent.add_metric((request,), row[SENT])
        errors = CounterMetricFamily(
            "maru_errors", "Requests that were answered with an error, by its code.", labels=("request", "code")
        )
        for (request, code), count in sorted(figures.errors.items()):
            errors.add_metric((request, code), count)
        yield from (seconds, received, sent, errors)

    def _spaces(self, figures: Figures) -> Iterator[Metric]:
        shown, own = self._labels.split(figures.spaces)
        for name, text, key in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=_SPACE)
            for space in shown:
                counter.add_metric(space.labels, space.counts.get(key, 0))
            yield counter
        for name, text, reasons in _REASONED:
            counter = CounterMetricFamily(name, text, labels=(*_SPACE, "reason"))
            for space in shown:
                for reason, key in reasons.items():
                    counter.add_metric((*space.labels, reason), space.counts.get(key, 0))
            yield counter
        pages = GaugeMetricFamily("maru_pages", "Pages that are known.", labels=_SPACE)
        stored = GaugeMetricFamily("maru_stored_bytes", "Bytes of the objects that are stored.", labels=_SPACE)
        for space in shown:
            pages.add_metric(space.labels, space.pages)
            stored.add_metric(space.labels, space.stored)
        yield from (pages, stored)
        info = InfoMetricFamily("maru_namespace", "What a namespace's label stands for.", labels=_SPACE)
        for figure in own:
            fields = figure.fields()
            info.add_metric(
                (figure.tenant, figure.label),
                {name: str(fields.get(name, "")) for name in ("engine", "model", "kv_dtype", "page_tokens", "tag")},
            )
        yield info
        tenants = GaugeMetricFamily(
            "maru_tenant_sessions", "Clients that are connected, by tenant.", labels=("tenant",)
        )
        busiest = sorted(figures.sessions.items(), key=lambda item: (-item[1], item[0]))
        for tenant, count in busiest[:NAMED]:
            tenants.add_metric((tenant,), count)
        if len(busiest) > NAMED:
            tenants.add_metric((OTHER,), sum(count for _, count in busiest[NAMED:]))
        yield tenants

    @staticmethod
    def _pools(figures: Figures) -> Iterator[Metric]:
        clients = GaugeMetricFamily(
            "maru_pool_clients", "Clients by how they say that they reach a pool.", labels=("pool", "way")
        )
        for row in figures.pools:
            for way, count in row["clients"].items():
                clients.add_metric((str(row["pool"]), way), count)
        yield clients
        if len(figures.pools) < 2:
            return
        size = GaugeMetricFamily("maru_pool_part_bytes", "Bytes of one of several pools.", labels=("pool",))
        used = GaugeMetricFamily("maru_pool_part_used_bytes", "Bytes in use of one of several pools.", labels=("pool",))
        for row in figures.pools:
            size.add_metric((str(row["pool"]),), row["extents"] * row["extent_bytes"])
            used.add_metric((str(row["pool"]),), row["bytes_used"])
        yield from (size, used)

    @staticmethod
    def _sizes(figures: Figures) -> Iterator[Metric]:
        stats = figures.stats
        extents = GaugeMetricFamily(
            "maru_extents", "Extents of the pool: all, with memory, and in use.", labels=("state",)
        )
        for state, key in (("all", "extents"), ("ready", "extents_ready"), ("cut", "extents_cut")):
            extents.add_metric((state,), float(stats[key]))
        slots = GaugeMetricFamily("maru_slots", "Slots of the extents in use, by size.", labels=("slot_bytes", "state"))
        for size in figures.sizes:
            slots.add_metric((str(size.slot_bytes), "used"), size.used)
            slots.add_metric((str(size.slot_bytes), "free"), size.free)
        yield from (extents, slots)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _texts(stats: Mapping[str, float | int | str], *keys: str) -> dict[str, str]:
    return {key: str(stats[key]) for key in keys if key in stats}


def _pool_bytes(stats: Mapping[str, float | int | str]) -> int:
    return int(stats["extents"]) * int(stats["extent_bytes"])
