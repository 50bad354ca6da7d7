"""Who may be the one writer of a pool, and until when.

Two locks, taken in this order before anything of the pool is written, and both kept to the end:

1. **The file lock** on the pool itself, which :class:`~maru_core.pool.PoolMemory` takes. The kernel keeps it for exactly as long
   as the process lives, so within one host nothing else is needed (:class:`FileLock` adds nothing to it). A process that is
   stopped still lives: nobody takes over from it on the same host until it is killed.
2. **A lease in etcd** (:class:`EtcdLease`), where several hosts map the same memory and file locks do not reach from one to the
   other. A lease ends by time, so its holder must know by itself, without asking anybody, when to stop.

Times of the etcd lease, with ``ttl`` seconds asked for (``--lock-ttl``):

- The holder renews every ``period = min(ttl / 3, 1)`` seconds, and looks each time whether the key is still its own. Its time
  counts from *before* the renewal was sent, on a clock that goes on while the machine sleeps (CLOCK_BOOTTIME), and ends
  ``margin = ttl / 10`` early. etcd cannot have begun to count earlier, so as long as no two clocks' rates differ by 10 %, the
  holder has stopped before etcd lets anyone else in; the margin is also the time that one message has to end in.
- Whoever gets the key next waits ``guard = period + min(margin, 1)`` before it touches the pool: where the lease was not left to end
  but revoked, or the key deleted, its old holder learns it with its next renewal.

So a holder that is cut off from etcd stops within ``ttl``, and another serves about ``ttl + guard`` after the last renewal.

Besides both, each life of a server counts the pool's incarnation up when it takes the pool up, and every server compares that word
of the memory with its own number before each message and tick: one that was overtaken, for whatever reason, sees it in the memory
itself (and before each step of taking the pool up that changes it). What remains: a server that is stopped for longer than its lease
*in the middle of a message* or of such a step ends that when it wakes; only then does it look. On one host the file lock closes this too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import select
import threading
from time import CLOCK_BOOTTIME, clock_gettime
from typing import Final, Protocol

from maru_core.errors import ConfigError, MaruError, PoolBusyError
from maru_core.pool import PoolMemory, PoolURI
from maru_server.etcd import Etcd, EtcdError, EtcdURL

log = logging.getLogger("maru.election")

#: How often a standby looks whether the pool's file lock is free, seconds.
FILE_POLL_S: Final = 0.2
#: How often, at most, a standby looks for the key of the lock, seconds.
KEY_POLL_S: Final = 0.5
#: etcd's own least lease under its default settings is 2 s.
TTL_MIN_S: Final = 2
TTL_MAX_S: Final = 300
#: What is waited for is said again this often, seconds.
SAY_AGAIN_S: Final = 60.0

OVERTAKEN: Final = "another server has taken the pool up meanwhile"


class LostError(MaruError):
    """The pool is, or may be, another server's: nothing of it may be touched any more."""


class Stop:
    """Set from a signal handler, and waited for in the thread that the handler interrupts, where threading.Event can lock up."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._event, select.POLLIN)

    def set(self) -> None:
        os.eventfd_write(self._event, 1)

    def wait(self, timeout_s: float) -> bool:
        """Whether it was set, at the latest after ``timeout_s`` seconds."""
        return bool(self._poll.poll(max(0.0, timeout_s) * 1000))

    def __bool__(self) -> bool:
        return self.wait(0)


class Election(Protocol):
    """A right to serve beyond the file lock."""

    def acquire(self, stop: Stop) -> bool:
        """Wait for this server's turn; False if ``stop`` was set first. Called again while it has it: True at once."""

    def holds(self) -> bool:
        """Whether it still has it, for certain. Called before each message: costs no I/O. Never True again once False."""

    def why(self) -> str:
        """Why it is not held, for people."""

    def close(self) -> None:
        """Give it back: only when nothing of this process writes to the pool any more."""


class FileLock:
    """One host: the pool's own lock, which the kernel keeps, is all."""

    def acquire(self, stop: Stop) -> bool:
        return not stop

    def holds(self) -> bool:
        return True

    def why(self) -> str:
        return ""

    def close(self) -> None:
        pass


def now() -> float:
    """Seconds, also of those that the machine slept."""
    return clock_gettime(CLOCK_BOOTTIME)


class EtcdLease:
    """See the module."""

    def __init__(self, url: EtcdURL, *, ttl_s: int, me: str, standby: bool) -> None:
        """
        Args:
            me: what others are told of the holder.
            standby: wait where another has it, instead of raising.
        Raises:
            ConfigError: what the URL names cannot be used.
        """
        if not TTL_MIN_S <= ttl_s <= TTL_MAX_S:
            raise ConfigError(f"--lock-ttl is {ttl_s}: give {TTL_MIN_S} to {TTL_MAX_S} whole seconds")
        self._url = url
        self._ttl_s = ttl_s
        self._me = me
        self._standby = standby
        self.period_s = min(ttl_s / 3, 1.0)
        self.margin_s = ttl_s / 10
        self.guard_s = self.period_s + min(self.margin_s, 1.0)
        self._etcd = Etcd(url, timeout_s=self.period_s)
        self._lease: int | None = None
        #: On the clock of :func:`now`; 0 before it is held and after it is lost.
        self._until = 0.0
        self._lost: str | None = None
        self._closing = threading.Event()
        self._keeper: threading.Thread | None = None
        self._said: tuple[str, float] = ("", 0.0)

    def acquire(self, stop: Stop) -> bool:
        """As :class:`Election` says.

        Raises:
            PoolBusyError: another has it, and this is no standby.
            EtcdError: no etcd, and this is no standby.
            LostError: it was had, and lost again.
        """
        while self._keeper is None:
            if stop:
                return False
            try:
                holder = self._try()
            except EtcdError as error:
                if not self._standby:
                    raise EtcdError(
                        f"--lock is {self._url.text!r}: {error}: see that etcd runs there, or give --standby to wait for it"
                    ) from error
                self._say("cannot ask for the lock %s: %s", self._url.key, error)
            else:
                if holder is None:
                    break
                if not self._standby:
                    raise PoolBusyError(
                        f"--lock is {self._url.text!r}: it is held by {holder}: stop that server first, or give --standby to wait"
                    )
                self._say("standby: the lock %s is held by %s", self._url.key, holder)
            stop.wait(min(KEY_POLL_S, self._ttl_s / 10))
        if self._keeper is None:
            self._keeper = threading.Thread(target=self._keep, name="maru-lock", daemon=True)
            self._keeper.start()
            log.info("got the lock %s: waiting %.1f s for its last holder to see it", self._url.key, self.guard_s)
            if stop.wait(self.guard_s):
                return False
        if not self.holds():
            raise LostError(self.why())
        return True

    def holds(self) -> bool:
        return clock_gettime(CLOCK_BOOTTIME) < self._until

    def why(self) -> str:
        """Why it is not held."""
        return self._lost or (
            f"the lock {self._url.key} could not be renewed for {self._ttl_s - self.margin_s:g} s (etcd was away, or this process stood still)"
        )

    def close(self) -> None:
        self._closing.set()
        if self._keeper is not None:
            self._keeper.join()
        self._until = 0.0
        self._give_back()
        self._etcd.close()

    # ------------------------------------------------------------ inside

    def _try(self) -> str | None:
        """Ask once: None if it is ours now, otherwise who has it."""
        held = self._etcd.get(self._url.key)
        if held is None:
            before = now()
            self._lease, ttl_s = self._etcd.grant(self._ttl_s)
            try:
                if self._etcd.put_if_absent(self._url.key, self._me, self._lease):
                    self._until = before + min(ttl_s, self._ttl_s) - self.margin_s
                    return None
            except EtcdError:
                # Perhaps it was carried out: it must not stand in our own way.
                self._give_back()
                raise
            self._give_back()
            held = self._etcd.get(self._url.key)
        return held.value if held is not None else "a server that has just left"

    def _give_back(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            # If it cannot be said, the lease ends by itself.
            with contextlib.suppress(EtcdError):
                self._etcd.revoke(lease)

    def _keep(self) -> None:
        assert self._lease is not None
        lease = self._lease
        while not self._closing.wait(self.period_s):
            before = now()
            try:
                held = self._etcd.get(self._url.key)
                if held is None or held.lease != lease:
                    who = f"taken by {held.value}" if held is not None else "deleted, or its lease revoked"
                    return self._lose(f"the lock {self._url.key} was {who}")
                ttl_s = self._etcd.renew(lease)
                if not ttl_s:
                    return self._lose(f"the lease of the lock {self._url.key} was over")
            except EtcdError as error:
                self._say("cannot renew the lock %s: %s", self._url.key, error)
            except Exception:
                log.exception("the lock %s could not be renewed by a fault of Maru", self._url.key)
            else:
                # Time that was over before the answer came does not begin again.
                if self.holds():
                    self._until = before + min(ttl_s, self._ttl_s) - self.margin_s
            if not self.holds():
                return self._lose(self.why())
        return None

    def _lose(self, why: str) -> None:
        self._lost = why
        self._until = 0.0

    def _say(self, text: str, *args: object) -> None:
        """Once for each thing that there is to say, and now and then again."""
        said, at = self._said
        message = text % args
        if message != said or now() - at >= SAY_AGAIN_S:
            self._said = message, now()
            log.warning("%s", message)


def make_election(lock: str | None, *, ttl_s: int, me: str, standby: bool, below: str = "") -> Election:
    """The election that the options name.

    Args:
        below: of one of several pools: what its key is called below the one that is named.

    Raises:
        ConfigError: they cannot be used.
    """
    if lock is None:
        return FileLock()
    url = EtcdURL.parse(lock)
    if below:
        url = dataclasses.replace(url, key=f"{url.key}/{below}")
    return EtcdLease(url, ttl_s=ttl_s, me=me, standby=standby)


def take_up(
    uri: PoolURI, size: int | None, format: bool, *, election: Election, standby: bool, stop: Stop
) -> PoolMemory | None:
    """Open the pool as its one server, when both locks are this process's; until then nothing of it is touched.

    Args:
        standby: wait where another server has it.
    Returns:
        None: ``stop`` was set first.
    Raises:
        PoolBusyError: another has it, and this is no standby.
        What :meth:`PoolMemory.create` and the election raise.
    """
    said = ""
    while not stop:
        try:
            memory = PoolMemory.create(uri, size, format, turn=lambda: _turn(election, stop))
        except _StoppedError:
            return None
        except PoolBusyError as error:
            if not standby:
                raise
            if str(error) != said:
                said = str(error)
                log.info("standby: %s", said.rpartition(": ")[0])  # without the cure, which is for others
            stop.wait(FILE_POLL_S)
        else:
            if not election.holds():  # opening it may have taken long
                memory.close()
                raise LostError(election.why())
            return memory
    return None


def check_held(election: Election, memory: PoolMemory, incarnation: int) -> None:
    """
    Raises:
        LostError: the pool is, or may be, another server's.
    """
    if not election.holds():
        raise LostError(election.why())
    if memory.incarnation != incarnation:
        raise LostError(OVERTAKEN)


class _StoppedError(Exception):
    pass


def _turn(election: Election, stop: Stop) -> None:
    if not election.acquire(stop):
        raise _StoppedError
