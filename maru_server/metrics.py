"""Figures about the server: how long requests took, and a copy of all counters and sizes at one moment.

:class:`Meter` is what the loop writes for each request: a few additions, well below a microsecond. :class:`Figures` is
what others look at: copied in the loop (:meth:`maru_server.state.ServerState.figures`) in a time that does not depend on
how many pages there are; what has to be summed over pages is summed later, by whoever asks (:meth:`SpaceFigures.stored`).
How they are shown is in :mod:`maru_server.exposition` (Prometheus) and :mod:`maru_server.web`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from maru_core.namespace import record_digest
from maru_core.protocol import Error

#: A request that took less than ``2**n`` ns, and not less than half of that, is counted in bucket ``n``.
BUCKETS: Final = 36
#: After the buckets of a request type: nanoseconds of all together, bytes received, bytes sent.
SUM_NS: Final = BUCKETS
RECEIVED: Final = BUCKETS + 1
SENT: Final = BUCKETS + 2
#: What could not be decoded is counted as this type of request.
UNREADABLE: Final = "Unreadable"
#: Hexadecimal digits of a namespace's digest that stand for it in labels.
LABEL_DIGITS: Final = 8


class Meter:
    """Requests by type. Only the loop writes; :meth:`copy` is called in the loop too."""

    def __init__(self) -> None:
        self._rows: dict[type, list[int]] = {}
        self._errors: Counter[tuple[type, str]] = Counter()

    def note(self, kind: type, reply: Any, received: int, sent: int, began: float) -> None:
        """One request of type ``kind`` (NoneType: not to be decoded) was served: from ``began``, monotonic seconds."""
        ns = int((monotonic() - began) * 1e9)
        row = self._rows.get(kind)
        if row is None:
            row = self._rows[kind] = [0] * (BUCKETS + 3)
        row[min(ns.bit_length(), BUCKETS - 1)] += 1
        row[SUM_NS] += ns
        row[RECEIVED] += received
        row[SENT] += sent
        if type(reply) is Error:
            self._errors[kind, reply.code] += 1

    def copy(self) -> tuple[dict[str, list[int]], dict[tuple[str, str], int]]:
        """Rows by request name, and errors by (request name, code)."""
        return (
            {_name(kind): list(row) for kind, row in self._rows.items()},
            {(_name(kind), str(code)): count for (kind, code), count in self._errors.items()},
        )


def _name(kind: type) -> str:
    return UNREADABLE if kind is type(None) else kind.__name__


def quantile(counts: Sequence[int], share: float) -> float:
    """Seconds below which ``share`` of the counted requests were, within the width of a bucket; 0 if there are none.

    Args:
        counts: :data:`BUCKETS` counts, as in a row of the meter or as the difference of two.
    """
    total = sum(counts[:BUCKETS])
    if not total:
        return 0.0
    wanted = share * total
    passed = 0
    for bucket, count in enumerate(counts[:BUCKETS]):
        if count and passed + count >= wanted:
            low = (1 << bucket) >> 1
            return float((low + ((1 << bucket) - low) * (wanted - passed) / count) / 1e9)
        passed += count
    return float((1 << (BUCKETS - 1)) / 1e9)


@dataclass(frozen=True, slots=True)
class SpaceFigures:
    """One namespace."""

    number: int
    tenant: str
    record: bytes
    pages: int
    counts: dict[str, int]
    #: Bytes of each page's objects and how many there are, by component. The server goes on writing these.
    columns: list[tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint16]]]

    @property
    def label(self) -> str:
        """Short, the same on every server and after every restart."""
        return record_digest(self.record).hex()[:LABEL_DIGITS]

    def stored(self) -> int:
        """Bytes of all objects. Not for the loop: a pass over all pages."""
        return sum(int(np.dot(length, have.astype(np.uint64))) for length, have in self.columns)

    def fields(self) -> dict[str, Any]:
        """The record's fields; empty where it cannot be read."""
        try:
            found = msgspec.json.decode(self.record)
        except msgspec.MsgspecError:
            return {}
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class SizeFigures:
    """Slots of one size."""

    slot_bytes: int
    extents: int
    used: int
    free: int


@dataclass(frozen=True, slots=True)
class Figures:
    """The server at one moment. Counters are since its start."""

    stats: Mapping[str, float | int | str]
    counts: Mapping[str, int]
    spaces: list[SpaceFigures]
    sizes: list[SizeFigures]
    sessions: dict[str, int]  # by tenant
    quarantined_bytes: int
    pools: list[dict[str, Any]] = field(default_factory=list)  # rows of maru_server.reaches.pool_row
    requests: dict[str, list[int]] = field(default_factory=dict)
    errors: dict[tuple[str, str], int] = field(default_factory=dict)

    def latencies(self) -> list[int]:
        """Buckets of all requests together."""
        return [sum(row[bucket] for row in self.requests.values()) for bucket in range(BUCKETS)]
