"""What the log says of the state's life: clients that come and go, namespaces, eviction, refusals. Decides nothing.

What could come as often as a client likes is said at most once in :data:`AGAIN_S` seconds, with what it came to since. Each
client that comes or goes has its line, but no more than :data:`LINES_MAX` in that time.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from maru_core.namespace import record_digest
from maru_server.metrics import LABEL_DIGITS
from maru_server.sessions import Session

log = logging.getLogger("maru.server")

#: Pause between two lines of one kind, in the server's own time, seconds.
AGAIN_S: Final = 10.0
#: Most lines in that time on clients that come and go, one each.
LINES_MAX: Final = 64


class Diary:
    """Times are the server's own (see :class:`maru_server.sessions.Clock`)."""

    def __init__(self) -> None:
        self._said_at: dict[str, float] = {}
        self._before: dict[str, int] = {}
        self._lines = 0  # since the last pause, on clients that came and went; also those that were not written
        self._lines_since = 0.0

    def _may_say(self) -> bool:
        self._lines += 1
        return self._lines <= LINES_MAX

    def came(self, session: Session) -> None:
        if not self._may_say():
            return
        log.info(
            "%s connected: session %d, pid %d on %s%s",
            session.name,
            session.number,
            session.identity.pid,
            session.identity.host,
            _of(session.peer.tenant),
            extra=_fields("session-came", session=session.number, name=session.name, **_who(session)),
        )

    def went(self, session: Session) -> None:
        if not self._may_say():
            return
        log.info(
            "%s is gone: session %d%s",
            session.name,
            session.number,
            _of(session.peer.tenant),
            extra=_fields("session-went", session=session.number, name=session.name, **_who(session)),
        )

    def opened(self, number: int, tenant: str, record: bytes) -> None:
        label = record_digest(record).hex()[:LABEL_DIGITS]
        log.info(
            "namespace %s is new%s: %s",
            label,
            _of(tenant),
            record.decode(errors="replace"),
            extra=_fields("namespace-opened", namespace=label, number=number, tenant=tenant),
        )

    def look(self, time: float, counts: Mapping[str, int]) -> None:
        """Now and then: say what has come to pass since the last time."""
        if time - self._lines_since >= AGAIN_S:
            untold, self._lines, self._lines_since = self._lines - LINES_MAX, 0, time
            if untold > 0:
                log.info("clients came and went %d times more", untold, extra=_fields("sessions-untold", count=untold))
        self._say(time, counts, "evicted_pages", "evicted %d pages to make room", "evicted")
        self._say(
            time, counts, "over_quota", "refused %d objects of tenants that have as much as they may", "over-quota"
        )
        self._say(time, counts, "no_room", "refused %d objects: no room, and eviction could not help", "no-room")
        self._say(time, counts, "over_rate", "refused %d requests of sessions that send too many", "over-rate")
        self._say(time, counts, "quarantined", "%d slots went to quarantine", "quarantined")

    def _say(self, time: float, counts: Mapping[str, int], key: str, text: str, event: str) -> None:
        more = counts.get(key, 0) - self._before.get(key, 0)
        if more and time - self._said_at.get(key, time - AGAIN_S) >= AGAIN_S:
            self._before[key] = counts[key]
            self._said_at[key] = time
            log.info(text, more, extra=_fields(event, count=more))


def _of(tenant: str) -> str:
    return f" of tenant {tenant}" if tenant else ""


def _who(session: Session) -> dict[str, Any]:
    return {"tenant": session.peer.tenant, "pid": session.identity.pid, "host": session.identity.host}


def _fields(event: str, **values: Any) -> dict[str, Any]:
    return {"fields": {"event": event, **values}}
