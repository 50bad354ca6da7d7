"""What can be chosen about a server's state, and what it is where nobody chooses. ``maru-server`` has an option for each.

How a server is reached, and where its pool lies, is not here: that is :mod:`maru_server.cli`'s and the service's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from maru_server.eviction import DEFAULT_POLICY
from maru_server.limits import Limits


@dataclass(frozen=True, kw_only=True)
class StateConfig:
    """Times in seconds; watermarks as shares of the pool."""

    heartbeat_s: float = 2.0  # clients are told to speak this often
    lease_s: float = 10.0  # silent for longer: reservations are quarantined
    reservation_s: float = 60.0  # longest time from reserve to commit, also for a client that speaks
    quarantine_s: float = 600.0  # then the slots of a client not known to be dead return
    restart_quarantine_s: float = 600.0  # the same for slots that were reserved when the server started
    incomplete_s: float = 10.0  # pages that lack shards for longer are evicted first
    growth_s: float = 1.0  # waited for memory to be provided before evicting instead
    high: float = 0.95  # background eviction starts above ...
    low: float = 0.90  # ... and ends below
    policy: str = DEFAULT_POLICY  # of eviction, one of maru_server.eviction.POLICIES
    quotas: dict[str, float] = field(default_factory=dict)  # by tenant: share of the pool that it may have
    pin_share: float = 0.25  # of the pool, that operators may pin
    hold_share: float = 0.25  # of the pool, that holds may keep from eviction at a time
    max_hold_s: float = 60.0  # longest time of one hold
    max_sessions: int = 4096
    max_tenant_sessions: int | None = None  # of one tenant whose clients have keys; None: half of all
    session_rate: float = Limits.messages_per_s  # messages a second
    session_page_rate: float = Limits.pages_per_s  # pages asked about, a second
    session_reservations: int = Limits.reservations  # Reserve messages whose slots are not yet all committed
    session_share: float = 1.0  # of the pool that one session may have reserved or in quarantine
    max_reservations: int = 65536  # Reserve messages whose slots are not yet all committed
