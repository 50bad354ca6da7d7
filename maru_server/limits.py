"""What one client may ask for, so that one that runs wild, or is meant to, leaves room for the others.

A client is a session where there are no keys. Where there are, it is a key: all sessions that have it, one after the other or
at a time, have one account (:class:`maru_server.sessions.Account`), and what is asked without a session counts, too.

- *Rate*: two token buckets a client, one of messages and one of pages, each filled at its rate and holding what a second
  brings. A message is served while both have something left, and takes its cost even if that is more than there is: the
  next ones then wait. A Delete takes what it removed, also what lay below the pages that it named. What only gives back or
  ends (Commit, Release, Unhold) is also served on credit of one second, so that a client at its limit can publish what it was
  allowed to reserve; and Hello, so that another of its processes can come; signs of life and one-way notes are never refused.
- *Reservations*: see :meth:`Limits.room`. Slots in quarantine count, or a client could take the pool piece by piece by falling
  silent.
- *Sessions*, of one tenant and of all: in :mod:`maru_server.leases`.

What this cannot do: a refusal is work too, and what has not been decoded cannot be refused. ZeroMQ takes messages from all
connections in turn, so that a flood on one delays the others by its share and no more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from maru_core.errors import ConfigError
from maru_core.protocol import (
    HASH_BYTES,
    Commit,
    Delete,
    Goodbye,
    Heartbeat,
    Hello,
    Inspect,
    Match,
    Release,
    Request,
    Reserve,
    Store,
    Touch,
    Unhold,
)
from maru_server.sessions import Account, Session

#: Their cost is also in pages, that of Match for each component.
_PAGED: Final = frozenset((Reserve, Store, Delete, Touch))
#: What looks through everything that a tenant has costs as much as so many pages, and at most a quarter of a second's.
_DEAR: Final = frozenset((Inspect,))
_DEAR_PAGES: Final = 1 << 18
_ON_CREDIT: Final = (Commit, Release, Unhold, Hello)
_ALWAYS: Final = (Heartbeat, Touch, Goodbye)
#: How far below nothing a bucket may be for each kind of message, in seconds of its rate.
_FLOORS: Final = {**dict.fromkeys(_ON_CREDIT, -1.0), **dict.fromkeys(_ALWAYS, -math.inf)}


#: Part of the pool that one client of a ``maru-server`` may have reserved, unless it is told otherwise.
SESSION_SHARE: Final = 0.5


def session_limits(
    *,
    max_sessions: int,
    max_tenant_sessions: int | None,
    session_rate: float,
    session_page_rate: float,
    session_reservations: int,
    session_share: float,
) -> dict[str, Any]:
    """Fields of :class:`maru_server.config.StateConfig`, from the options of the same names.

    Raises:
        ConfigError: naming the option, the value and what it may be.
    """
    if not 1 <= max_sessions <= 1_000_000:
        raise ConfigError(f"--max-sessions is {max_sessions}: give 1 to 1000000")
    if max_tenant_sessions is not None and not 1 <= max_tenant_sessions <= max_sessions:
        raise ConfigError(
            f"--max-tenant-sessions is {max_tenant_sessions}: give 1 to {max_sessions}, which is --max-sessions"
        )
    for option, rate in (("--session-rate", session_rate), ("--session-page-rate", session_page_rate)):
        if not 1 <= rate <= 1e12:
            raise ConfigError(f"{option} is {rate:g}: give how many a second, 1 or more")
    if not 1 <= session_reservations <= 65_536:
        raise ConfigError(f"--session-reservations is {session_reservations}: give 1 to 65536")
    if not 0 < session_share <= 1:
        raise ConfigError(f"--session-share is {session_share:g}: give a part of the pool above 0 and up to 1")
    return {
        "max_sessions": max_sessions,
        "max_tenant_sessions": max_tenant_sessions,
        "session_rate": session_rate,
        "session_page_rate": session_page_rate,
        "session_reservations": session_reservations,
        "session_share": session_share,
    }


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one client. The defaults are above what one core serves: they stop a client, not the work."""

    messages_per_s: float = 20_000.0
    pages_per_s: float = 4_000_000.0
    reservations: int = 4096  # Reserve messages whose slots are not yet all committed
    reserved_bytes: int = 1 << 62

    def admits(self, account: Account, message: Request, time: float) -> bool:
        """Whether the client may send this now; takes its cost."""
        kind = type(message)
        pages = 0.0
        if kind is Match:
            pages = len(message.hashes) // HASH_BYTES * len(message.components)  # type: ignore[union-attr]
        elif kind in _PAGED:
            pages = len(message.hashes) // HASH_BYTES  # type: ignore[union-attr]
            if kind is Reserve or kind is Store:
                pages += len(message.spares) // HASH_BYTES  # type: ignore[union-attr]
        elif kind in _DEAR:
            pages = min(_DEAR_PAGES, self.pages_per_s / 4)
        return self.admits_pages(account, pages, time, _FLOORS.get(kind, 0.0))

    def admits_pages(self, account: Account, cost: float, time: float, floor: float = 0.0) -> bool:
        """The same of a message that costs so many pages, served while no bucket is more than ``-floor`` seconds below nothing."""
        passed = time - account.refilled
        if passed > 0:
            account.refilled = time
            messages = account.messages_left + passed * self.messages_per_s
            pages = account.pages_left + passed * self.pages_per_s
            # Spelt out: this comes before every message, and a call costs as much as all of it.
            account.messages_left = messages if messages < self.messages_per_s else self.messages_per_s
            account.pages_left = pages if pages < self.pages_per_s else self.pages_per_s
        if account.messages_left <= floor * self.messages_per_s or account.pages_left <= floor * self.pages_per_s:
            return False
        account.messages_left -= 1.0
        account.pages_left -= cost
        return True

    def refund(self, account: Account, cost: float) -> None:
        """What :meth:`admits_pages` admitted was left alone, and will be asked again."""
        account.messages_left += 1.0
        account.pages_left += cost

    def room(self, session: Session, wanted: int, slot_bytes: int) -> int:
        """How many of ``wanted`` slots the client may reserve now: none beyond so many Reserve messages, and no more than so many
        bytes, except that one slot is always allowed to whoever has none."""
        account = session.account
        if account.reservations >= self.reservations:
            return 0
        left = max(0, self.reserved_bytes - account.reserved_bytes) // slot_bytes
        return min(wanted, max(left, int(not account.reserved_bytes)))

    def too_fast(self) -> str:
        """For the client that was refused."""
        return (
            f"more than {self.messages_per_s:g} messages or {self.pages_per_s:g} pages a second come from this client: ask less often, "
            "or have the server started with a higher --session-rate or --session-page-rate"
        )
