"""The books: all that the server knows, in one place, and read back from the pool when a server starts.

Each part is a class of its own and keeps its own rules; this module only says which there are, builds them in order, and
answers the two questions that every request begins with. Who may change what, and when, is the business of the messages
(:mod:`maru_server.engine_messages`, :mod:`maru_server.operator_messages`), of :mod:`maru_server.leases` and of
:mod:`maru_server.upkeep`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from maru_core.pool.geometry import Geometry
from maru_core.protocol import ErrorCode
from maru_server.config import StateConfig
from maru_server.diary import Diary
from maru_server.directory import PoolDirectory
from maru_server.holds import Holds
from maru_server.limits import Limits
from maru_server.names import Names
from maru_server.pages import Pages
from maru_server.rebuild import rebuild
from maru_server.requests import RefusedError
from maru_server.sessions import Clock, Reservations, Session, Sessions
from maru_server.slabs import Slabs
from maru_server.tree import PrefixTree
from maru_server.uses import Uses


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Books:
    """What is kept. The parts change all the time; which they are does not."""

    config: StateConfig
    incarnation: int  # of this server on this pool
    pool_uri: str  # as clients are told
    wall_offset: float  # monotonic time and this are the time of day, seconds
    clock: Clock
    directory: PoolDirectory  # on the media: which slot has what
    slabs: Slabs  # free slots
    names: Names  # namespaces and components
    trees: dict[int, PrefixTree]  # pages of each namespace, by its number
    reservations: Reservations  # slots that somebody may be writing into
    pages: Pages  # what joins those: reserve, commit, evict; pins, tenants and counters, too
    holds: Holds  # what running requests keep from eviction
    uses: Uses  # of pages, yet to be written down
    sessions: Sessions
    limits: Limits  # of one session
    diary: Diary

    @property
    def geometry(self) -> Geometry:
        return self.directory.geometry

    def wall_ns(self, now: float) -> int:
        """The time of day, ns since 1970."""
        return max(0, int((now + self.wall_offset) * 1e9))

    def tree(self, namespace: int, session: Session) -> PrefixTree:
        """The tree of a namespace, if it is the session's to use."""
        tree = self.trees.get(namespace)
        if tree is None or not (session.peer.operator or tree.tenant == session.peer.tenant):
            raise RefusedError(
                ErrorCode.UNKNOWN_NAMESPACE, f"namespace {namespace} is not known: open it again with its record"
            )
        return tree


def open_books(
    directory: PoolDirectory,
    *,
    incarnation: int,
    pool_uri: str,
    config: StateConfig,
    now: float,
    wall_offset: float,
    before_writing: Callable[[], None] = lambda: None,
) -> Books:
    """Find again what the pool holds.

    Args: as of :class:`maru_server.state.ServerState`.
    """
    geometry = directory.geometry
    pool_bytes = geometry.extent_count * geometry.extent_bytes
    clock = Clock(now, gap_s=config.lease_s / 2)
    time = clock.time(now)
    found = rebuild(directory, max(0, int((now + wall_offset) * 1e9)), before_writing)
    before_writing()
    slabs = Slabs(directory, found.occupied)
    reservations = Reservations(geometry.slot_count, config.max_reservations)
    if len(found.reserved):
        generations = directory.generations[found.reserved]
        deadline = time + config.restart_quarantine_s
        reservations.inherit(found.reserved, generations, directory.owners(found.reserved), time, deadline)
    pages = Pages(
        directory,
        slabs,
        found.trees,
        reservations,
        int(config.incomplete_s * 1e9),
        policy=config.policy,
        quotas=config.quotas,
        pin_bytes=int(config.pin_share * geometry.data_bytes),
    )
    before_writing()  # looking at all pages takes up to seconds, too
    pages.counts["pins_ended"] = pages.pins.adopt(found.pinned)
    pages.counts["discarded"] = found.discarded
    pages.limits = Limits(
        messages_per_s=config.session_rate,
        pages_per_s=config.session_page_rate,
        reservations=config.session_reservations,
        reserved_bytes=int(config.session_share * pool_bytes),
    )
    pages.new_chains.allow_spares(min(config.quarantine_s, config.restart_quarantine_s))
    names = Names(directory)
    before_writing()
    names.drop_unused(found.trees)
    return Books(
        config=config,
        incarnation=incarnation,
        pool_uri=pool_uri,
        wall_offset=wall_offset,
        clock=clock,
        directory=directory,
        slabs=slabs,
        names=names,
        trees=found.trees,
        reservations=reservations,
        pages=pages,
        holds=Holds(
            found.trees,
            pages.leaves.offer,
            budget=int(config.hold_share * pool_bytes),
            max_s=config.max_hold_s,
            min_slot_bytes=geometry.min_slot_bytes,
        ),
        uses=Uses(directory, found.trees),
        sessions=Sessions(incarnation),
        limits=pages.limits,
        diary=Diary(),
    )
