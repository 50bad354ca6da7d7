"""Who is connected, and who may be writing into which slots.

A *reservation* is what one Reserve message got: slots on their way to being committed. It is *live* while its session
may still publish it, and *quarantined* once that is lost but somebody may still be writing: the slots are then on no
page, and come back when the holder says so (commit or release: it has stopped writing), when its process is gone, or
after a long grace. What was reserved under a former server is in quarantine, too; the pool's records say whose it is, and a
client that comes again has it back, to return. Times are the server's own (see :class:`Clock`), in seconds.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from maru_core.process import ProcessIdentity
from maru_core.protocol import Way
from maru_server.directory import U64, Slots
from maru_server.tree import PrefixTree, Rows


class Clock:
    """Time as far as the server was awake to see it.

    A server that was stopped, or starved, has heard nobody meanwhile. The gap does not count, or it would take every
    client for dead when it wakes: ``time`` is the caller's time less all gaps longer than ``gap_s``.
    """

    def __init__(self, now: float, gap_s: float) -> None:
        self.last = now
        self._gap_s = gap_s
        self.stalled_s = 0.0  # all gaps together

    def time(self, now: float) -> float:
        gap = now - self.last
        if gap > self._gap_s:
            self.stalled_s += gap
        self.last = max(self.last, now)
        return self.last - self.stalled_s


@dataclass(slots=True, frozen=True)
class Peer:
    """Who sends a message, as the connection proves it and not as the message says."""

    tenant: str = ""
    operator: bool = True
    name: str = ""  # of its key, for people; two keys are two peers


#: A peer that needs no keys: on a Unix socket, on loopback, or where the operator wanted no keys.
LOCAL = Peer()


@dataclass(slots=True, eq=False)
class Page:
    """Where the objects of a reservation belong: one row per slot."""

    tree: PrefixTree
    component: int
    shard: int
    rows: Rows


@dataclass(slots=True, eq=False)
class Reservation:
    """Slots that are RESERVED on the media. ``page`` is None exactly if it is quarantined."""

    number: int
    session: Session | None  # None: of a former server's that has not come again, or one whose key was revoked
    slots: npt.NDArray[np.uint32]
    generations: U64
    since: float
    deadline: float
    page: Page | None
    remaining: int  # slots not yet committed, released or returned
    slot_bytes: int = 0
    tenant: str | None = None  # in quarantine: on whose pages the slots were; None: of a former server's
    owner: int = 0  # of a former server's, whose client is known: as the records say
    slots_blob: bytes = b""  # as told to the client, to recognise a commit of all of it at one glance
    generations_blob: bytes = b""
    spare: bool = False  # granted ahead, for pages with made-up names: see maru_server.new_chains

    def remember_blobs(self) -> None:
        """Keep what the client is told, packed as it will come back."""
        self.slots_blob = self.slots.astype("<u4", copy=False).tobytes()
        self.generations_blob = self.generations.astype("<u8", copy=False).tobytes()


@dataclass(slots=True, eq=False)
class Account:
    """What has been used of what may be, see :mod:`maru_server.limits`: by a session, or by all sessions of a key."""

    reservations: int = 0  # live and quarantined
    reserved_bytes: int = 0  # of the slots of all of these
    # What may still be sent now, and when that was reckoned.
    messages_left: float = 0.0
    pages_left: float = 0.0
    refilled: float = -math.inf


@dataclass(slots=True, eq=False)
class Session:
    """One client."""

    number: int
    client_id: bytes
    name: str
    identity: ProcessIdentity
    heard: float
    since: float
    peer: Peer = LOCAL
    silent: bool = False  # past its lease: what it had reserved is quarantined
    reservations: dict[int, Reservation] = field(default_factory=dict)  # live and quarantined, oldest first
    account: Account = field(default_factory=Account)
    owner: int = 0  # as the pool's records name it: the same client is the same to every server
    reported: dict[int, dict[str, int]] = field(default_factory=dict)  # its own counters as it last said, by namespace
    ways: tuple[Way, ...] = ()  # how it reaches each pool; empty until it has said so


def owner_word(client_id: bytes, peer: Peer) -> int:
    """What stands in records for a client; never 0. Another key is another client, whatever id it gives."""
    who = "\n".join((peer.tenant, peer.name)).encode()  # neither has a line break
    return int.from_bytes(hashlib.blake2b(client_id + who, digest_size=8).digest(), "little") or 1


class Sessions:
    """All sessions, by number. Numbers are never reused, not even by the next incarnation of the server."""

    def __init__(self, incarnation: int) -> None:
        self._by_number: dict[int, Session] = {}
        #: The session of a number, None if there is none. The dictionary's own method: every message asks.
        self.get: Final = self._by_number.get
        self._by_client: dict[bytes, Session] = {}
        self._accounts: dict[Peer, Account] = {}
        self._next = ((incarnation & 0x7FFFFFFF) << 32) + 1

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_number.values())

    def of_client(self, client_id: bytes) -> Session | None:
        return self._by_client.get(client_id)

    def add(self, client_id: bytes, name: str, identity: ProcessIdentity, time: float, peer: Peer = LOCAL) -> Session:
        account = self.account(peer)
        session = Session(self._next, client_id, name, identity, heard=time, since=time, peer=peer, account=account)
        session.owner = owner_word(client_id, peer)
        self._next += 1
        self._by_number[session.number] = session
        self._by_client[client_id] = session
        return session

    def account(self, peer: Peer) -> Account:
        """That of the key, which stays when sessions go: there is nothing to gain from more of them, or from new ones. A new one
        where there are no keys, since then nobody can tell who is who."""
        if peer == LOCAL:
            return Account()
        account = self._accounts.get(peer)
        if account is None:
            account = self._accounts[peer] = Account()
        return account

    def keep_accounts(self, peers: Container[Peer]) -> None:
        """Forget those of all peers but these, which have no session."""
        self._accounts = {peer: account for peer, account in self._accounts.items() if peer in peers}

    def remove(self, session: Session) -> None:
        del self._by_number[session.number]
        del self._by_client[session.client_id]

    def check(self) -> None:
        for number, session in self._by_number.items():
            assert session.number == number
            assert self._by_client[session.client_id] is session
            if session.peer != LOCAL:
                assert session.account is self._accounts[session.peer], "two accounts of one key"
            else:
                self._check_account(session.account, [session])
        assert len(self._by_client) == len(self._by_number)
        for peer, account in self._accounts.items():
            self._check_account(account, [session for session in self._by_number.values() if session.peer == peer])

    @staticmethod
    def _check_account(account: Account, sessions: list[Session]) -> None:
        mine = [reservation for session in sessions for reservation in session.reservations.values()]
        held = sum(reservation.remaining * reservation.slot_bytes for reservation in mine)
        assert (account.reservations, account.reserved_bytes) == (len(mine), held), "what an account says is reserved"


class Reservations:
    """All reservations; ``of_slot`` finds the one that a slot belongs to."""

    def __init__(self, slot_count: int, limit: int) -> None:
        self.limit = limit
        self._by_number: dict[int, Reservation] = {}
        #: The reservation of a number, which must be one.
        self.get: Final = self._by_number.__getitem__
        self._unused: list[int] = []
        self._highest = 0
        self._of_slot = np.zeros(slot_count, np.uint32)  # number, 0 where the slot is not reserved
        self._orphans: dict[int, Reservation] = {}  # of former servers, by owner: nobody's until that client comes
        self.live: dict[int, Reservation] = {}  # oldest first
        self.quarantined: dict[int, Reservation] = {}  # oldest first
        self.quarantined_slots = 0
        self.quarantined_bytes = 0  # of slots whose size was given
        self.live_slots = 0

    def __len__(self) -> int:
        return len(self._by_number)

    @property
    def holders(self) -> npt.NDArray[np.uint32]:
        """Number of each slot's reservation, 0 where it has none; of all slots, to be looked at."""
        return self._of_slot

    def spares(self) -> Counter[int]:
        """How many rows of each tree are not of pages, but of slots granted ahead."""
        found: Counter[int] = Counter()
        for reservation in self.live.values():
            if reservation.spare and reservation.page is not None:
                found[reservation.page.tree.number] += reservation.remaining
        return found

    def full(self) -> bool:
        return len(self.live) >= self.limit

    def of_slot(self, slot: int) -> Reservation | None:
        return self._by_number.get(self._of_slot.item(slot))

    def numbers(self, slots: Slots) -> npt.NDArray[np.uint32]:
        """Number of each slot's reservation, 0 where it has none."""
        numbers: npt.NDArray[np.uint32] = self._of_slot[slots]
        return numbers

    def __iter__(self) -> Iterator[Reservation]:
        return iter(self._by_number.values())

    def add(
        self,
        session: Session | None,
        slots: Slots,
        generations: U64,
        page: Page | None,
        since: float,
        deadline: float,
        slot_bytes: int = 0,
        tenant: str | None = None,
    ) -> Reservation:
        if self._unused:
            number = self._unused.pop()
        else:
            self._highest += 1
            number = self._highest
        reservation = Reservation(
            number, session, slots, generations, since, deadline, page, len(slots), slot_bytes, tenant
        )
        self._by_number[number] = reservation
        self._of_slot[slots] = number
        if session is not None:
            session.reservations[number] = reservation
            session.account.reservations += 1
            session.account.reserved_bytes += len(slots) * slot_bytes
        if page is None:
            self.quarantined[number] = reservation
            self.quarantined_slots += len(slots)
            self.quarantined_bytes += len(slots) * slot_bytes
        else:
            self.live[number] = reservation
            self.live_slots += len(slots)
        return reservation

    def inherit(self, slots: Slots, generations: U64, owners: U64, since: float, deadline: float) -> None:
        """Quarantine what was being written under a former server. ``owners`` are as the records say, 0 where that is not to be
        believed."""
        order = np.argsort(owners, kind="stable")
        for part in np.split(order, np.flatnonzero(np.diff(owners[order])) + 1):
            reservation = self.add(None, slots[part], generations[part], None, since, deadline)
            reservation.owner = int(owners[part[0]])
            if reservation.owner:
                self._orphans[reservation.owner] = reservation

    def adopt(self, session: Session) -> None:
        """A client that was writing under a former server has come, and may give that back."""
        reservation = self._orphans.pop(session.owner, None)
        if reservation is not None:
            reservation.session = session
            session.reservations[reservation.number] = reservation
            session.account.reservations += 1
            session.account.reserved_bytes += reservation.remaining * reservation.slot_bytes

    def disown(self, session: Session) -> None:
        """The session goes, and what it has in quarantine stays there until its time is over."""
        for reservation in session.reservations.values():
            assert reservation.page is None, "a live reservation of nobody"
            reservation.session = None
            if reservation.owner:
                self._orphans[reservation.owner] = reservation
            session.account.reserved_bytes -= reservation.remaining * reservation.slot_bytes
        session.account.reservations -= len(session.reservations)
        session.reservations.clear()

    def open(self, reservation: Reservation) -> npt.NDArray[np.intp]:
        """Indices into the reservation's arrays of the slots that still belong to it."""
        if reservation.remaining == len(reservation.slots):
            return np.arange(reservation.remaining)
        return np.flatnonzero(self._of_slot[reservation.slots] == reservation.number)

    def index(self, reservation: Reservation, slots: Slots) -> npt.NDArray[np.intp]:
        """Where these slots, which all belong to it, stand in the reservation's arrays."""
        order = np.argsort(reservation.slots)
        return order[np.searchsorted(reservation.slots, slots, sorter=order)]

    def settle(self, reservation: Reservation, slots: Slots) -> None:
        """These slots, which belong to it, are committed, returned, or go to another reservation."""
        self._of_slot[slots] = 0
        reservation.remaining -= len(slots)
        if reservation.session is not None:
            reservation.session.account.reserved_bytes -= len(slots) * reservation.slot_bytes
        if reservation.page is None:
            self.quarantined_slots -= len(slots)
            self.quarantined_bytes -= len(slots) * reservation.slot_bytes
        else:
            self.live_slots -= len(slots)
        if not reservation.remaining:
            del self._by_number[reservation.number]
            (self.live if reservation.page is not None else self.quarantined).pop(reservation.number)
            if reservation.session is not None:
                del reservation.session.reservations[reservation.number]
                reservation.session.account.reservations -= 1
            elif reservation.owner:
                del self._orphans[reservation.owner]
            self._unused.append(reservation.number)

    def check(self) -> dict[int, Reservation]:
        """slot -> reservation, after checking the counters and the slot column."""
        slots: dict[int, Reservation] = {}
        live = quarantined = 0
        for number, reservation in self._by_number.items():
            assert reservation.number == number
            still = reservation.slots[self._of_slot[reservation.slots] == number].tolist()
            assert len(still) == reservation.remaining > 0, "remaining"
            assert not slots.keys() & set(still), "a slot in two reservations"
            slots.update(dict.fromkeys(still, reservation))
            if reservation.page is None:
                quarantined += len(still)
            else:
                live += len(still)
                assert reservation.session is not None, "a live reservation of nobody"
            if reservation.session is not None:
                assert reservation.session.reservations[number] is reservation
        nobodys = {r.owner: r for r in self._by_number.values() if r.owner and r.session is None}
        assert nobodys == self._orphans, "whose reservations of former servers are"
        assert (live, quarantined) == (self.live_slots, self.quarantined_slots), "counts"
        assert set(np.flatnonzero(self._of_slot).tolist()) == set(slots), "slot column"
        assert self.live == {n: r for n, r in self._by_number.items() if r.page is not None}
        assert self.quarantined == {n: r for n, r in self._by_number.items() if r.page is None}
        return slots
