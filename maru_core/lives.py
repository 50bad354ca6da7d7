"""The lives of a store: one for each epoch of its session, made when a call first needs it, left when the server begins another.

What an engine calls is in :mod:`maru_core.store`. Each call enters here, runs to its end on the life that it was given, and leaves; the
movers of pools that were left meanwhile are closed when nobody can be using them. In the background pools that are not reached are
tried again, and an embedded server is brought back.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from maru_core.errors import ClosedError, MaruError, ServerError, SessionLostError
from maru_core.mover import Mover
from maru_core.protocol import ErrorCode, Welcome
from maru_core.reach import Reach, Reached, Reaching
from maru_core.session import Session

log = logging.getLogger("maru.store")

#: How often a pool of several that is not reached is tried again, seconds: its agent, or its device, may come later.
REACH_AGAIN_S: Final = 10.0


class StoreLife(msgspec.Struct, frozen=True):
    """What holds for one epoch of the session: replaced as a whole when the server restarts, never changed."""

    epoch: int
    namespace: int
    lease_s: float
    pools: Reached

    @property
    def reach(self) -> Reach:
        """The first pool's that is reached: all that there is where the server has one."""
        return self.pools.first

    @property
    def only_mapped(self) -> bool:
        """The server has one pool, and this process maps it."""
        return len(self.pools.pools) == 1 and self.pools.first.memory is not None


class Lives:
    """The present life, and who is on it.

    ``_lock`` protects ``life``, ``closed``, ``_retired`` and ``_in_flight`` (calls, and readings that are not finished). The first two are
    written here alone, and may be read without it. A life is immutable, so a call that runs on an older one keeps a mapping that stays
    valid until the call ends: memory is unmapped when the last user lets go of it.

    Args:
        session: may begin another life at any time.
        record: the namespace's, by which it is opened in each life.
        ensure: starts the embedded server where it is gone; None where the server is not ours to start.
        warn: logs a failure by its kind, once in a while.
    """

    def __init__(
        self,
        session: Session,
        record: bytes,
        reaching: Reaching,
        ensure: Callable[[], str] | None,
        warn: Callable[..., None],
    ) -> None:
        self._session = session
        self._record = record
        self._reaching = reaching
        self._ensure_server = ensure
        self._warn = warn
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        #: The one made last, whose epoch may be over; None before the first, and after :meth:`close`.
        self.life: StoreLife | None = None
        #: No call begins any more.
        self.closed = False
        self._retired: list[Mover] = []
        self._in_flight = 0
        self._reach_at = 0.0  # the housekeeper's alone

    # ------------------------------------------------------------ in flight

    @property
    def forked(self) -> bool:
        """In a forked child nothing works, and no lock may be asked for: a thread that is not here may have held it."""
        return os.getpid() != self._pid

    def enter(self) -> bool:
        """A call begins, and says :meth:`leave` at its end. False if it may not: the store is closed, or this is a forked child."""
        if os.getpid() != self._pid:  # forked
            return False
        with self._lock:
            if self.closed:
                return False
            self._in_flight += 1
        return True

    def stay(self) -> None:
        """A reading begins within a call, goes on after it, and says :meth:`leave` for itself."""
        with self._lock:
            self._in_flight += 1

    def leave(self) -> None:
        """A call or a reading ends. Movers of pools that were left are closed when nobody can be using them."""
        retired: list[Mover] = []
        with self._lock:
            self._in_flight -= 1
            if not self._in_flight:
                retired, self._retired = self._retired, []
                self._idle.notify_all()
        self._close_movers(retired)

    def drain(self, timeout_s: float) -> bool:
        """Let no call begin any more, and those under way finish, within ``timeout_s`` seconds. False if there is nothing to close: that
        was done before, or this is a forked child."""
        if self.forked:
            return False
        with self._lock:
            if self.closed:
                return False
            self.closed = True
            deadline = time.monotonic() + timeout_s
            while self._in_flight and (left := deadline - time.monotonic()) > 0:
                self._idle.wait(left)
        return True

    def close(self) -> None:
        """Leave the last life, after :meth:`drain`. What calls may still be using is closed when they end."""
        with self._lock:
            life, self.life = self.life, None
            if life is not None:
                self._retired += [reach.mover for reach in life.pools.present()]
            retired: list[Mover] = []
            if not self._in_flight:
                retired, self._retired = self._retired, []
        self._close_movers(retired)

    def _close_movers(self, movers: Sequence[Mover]) -> None:
        for mover in movers:
            try:
                mover.close()
            except Exception:
                self._warn("mover", "a mover could not be closed", exc_info=True)

    # ------------------------------------------------------------ the present life

    def current(self) -> StoreLife:
        """The life of the session's present epoch, made if need be.

        Raises:
            ServerUnavailableError: the server is away.
            MaruError: it is there and cannot be used.
        """
        life = self.life
        if life is not None and life.epoch == self._session.epoch:
            return life
        welcome = self._session.connect()
        epoch = self._session.epoch
        if self._session.welcome is not welcome:
            # The pool of one life under the epoch of the next: what is acknowledged there would lie here.
            raise SessionLostError("the server began another life at this moment: ask again")
        reached = self._reaching.reach(welcome, epoch, life.pools if life is not None else None)
        self._tell(welcome, epoch, reached)
        made = StoreLife(
            epoch=epoch,
            namespace=self._session.open_namespace(self._record, epoch=epoch),
            lease_s=welcome.lease_s,
            pools=reached,
        )
        with self._lock:
            present = self.life
            # Another thread may have made the same life meanwhile; this one is counted in flight, so neither mover is closed yet.
            if self.closed:
                self._retired += _without(reached, present)
                raise ClosedError("the store was closed")
            if present is not None:
                self._retired += _without(present.pools, made)
            self.life = made
        return made

    def _tell(self, welcome: Welcome, epoch: int, reached: Reached) -> None:
        """Say how the pools are reached. A server that does not know the message has one pool, and needs not be told."""
        try:
            self._session.reaches(reached.ways, epoch=epoch)
        except ServerError as error:
            if welcome.pools or error.code != ErrorCode.INVALID:
                raise
            log.debug("the server was not told how its pool is reached: %s", error)

    # ------------------------------------------------------------ background

    def look_after(self) -> None:
        """Bring back what is gone and can be had again; see :class:`maru_core.housekeeping.Housekeeping`."""
        self._revive()
        try:
            self._reach_again()
        except MaruError as error:
            self._warn("reach", "pools that are not reached could not be tried again: %s", error)
        except Exception:
            self._warn("reach", "pools that are not reached could not be tried again", exc_info=True)

    def _reach_again(self) -> None:
        """Use pools that could not be reached when the life began and can be now. The life goes on: what it reached it reaches as before,
        by the same movers, so that calls under way need not know.

        Raises:
            MaruError: the server does not answer, or began another life.
        """
        life, welcome, now = self.life, self._session.welcome, time.monotonic()
        if life is None or welcome is None or all(life.pools.pools) or now < self._reach_at:
            return
        if self.closed or not self._session.connected or life.epoch != self._session.epoch:
            return
        self._reach_at = now + REACH_AGAIN_S
        reached = self._reaching.reach(welcome, life.epoch, life.pools)
        if len(reached.present()) == len(life.pools.present()):
            return
        more = msgspec.structs.replace(life, pools=reached)
        if not self._exchange(life, more):
            self._close_movers(_without(reached, life))
            return
        try:
            # Only now: from here on the server answers with slots of these pools.
            self._tell(welcome, life.epoch, reached)
        except BaseException:
            if self._exchange(more, life):
                with self._lock:
                    self._retired += _without(reached, life)
            raise

    def _exchange(self, old: StoreLife, new: StoreLife) -> bool:
        """Go on with another account of the same life, unless there is another one by now."""
        with self._lock:
            if self.life is not old or self.closed:
                return False
            self.life = new
            return True

    def _revive(self) -> None:
        """Bring an embedded server back if it is gone."""
        if self._ensure_server is None or self.closed or self._session.connected:
            return
        try:
            self._ensure_server()
            self.current()
        except MaruError as error:
            self._warn("revive", "the embedded server is not back yet: %s", error)
        except Exception:
            # Whatever it was, the next attempt must come.
            self._warn("revive", "the embedded server could not be looked after", exc_info=True)


def _without(pools: Reached, life: StoreLife | None) -> list[Mover]:
    """The movers of these that the life does not use."""
    used = [] if life is None else [reach.mover for reach in life.pools.present()]
    return [reach.mover for reach in pools.present() if not any(reach.mover is mover for mover in used)]
