"""Who is connected, and who may be writing into which slots.

A *reservation* is what one Reserve message got: slots on their way to being committed. It is *live* while its session
may still publish it, and *quarantined* once that is lost but somebody may still be writing: the slots are then on no
page, and come back when the holder says so (commit or release: it has stopped writing), when its process is gone, or
after a long grace. Times are the server's own (see :class:`Clock`), in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from maru_core.process import ProcessIdentity
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
    session: Session | None  # None: a writer of a former server, unknown to this one
    slots: npt.NDArray[np.uint32]
    generations: U64
    since: float
    deadline: float
    page: Page | None
    remaining: int  # slots not yet committed, released or returned
    slots_blob: bytes = b""  # as told to the client, to recognise a commit of all of it at one glance
    generations_blob: bytes = b""

    def remember_blobs(self) -> None:
        """Keep what the client is told, packed as it will come back."""
        self.slots_blob = self.slots.astype("<u4", copy=False).tobytes()
        self.generations_blob = self.generations.astype("<u8", copy=False).tobytes()


@dataclass(slots=True, eq=False)
class Session:
    """One client."""

    number: int
    client_id: bytes
    name: str
    identity: ProcessIdentity
    heard: float
    silent: bool = False  # past its lease: what it had reserved is quarantined
    reservations: dict[int, Reservation] = field(default_factory=dict)  # live and quarantined, oldest first


class Sessions:
    """All sessions, by number. Numbers are never reused, not even by the next incarnation of the server."""

    def __init__(self, incarnation: int) -> None:
        self._by_number: dict[int, Session] = {}
        self._by_client: dict[bytes, Session] = {}
        self._next = ((incarnation & 0x7FFFFFFF) << 32) + 1

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_number.values())

    def get(self, number: int) -> Session | None:
        return self._by_number.get(number)

    def of_client(self, client_id: bytes) -> Session | None:
        return self._by_client.get(client_id)

    def add(self, client_id: bytes, name: str, identity: ProcessIdentity, time: float) -> Session:
        session = Session(self._next, client_id, name, identity, heard=time)
        self._next += 1
        self._by_number[session.number] = session
        self._by_client[client_id] = session
        return session

    def remove(self, session: Session) -> None:
        del self._by_number[session.number]
        del self._by_client[session.client_id]

    def check(self) -> None:
        for number, session in self._by_number.items():
            assert session.number == number
            assert self._by_client[session.client_id] is session
        assert len(self._by_client) == len(self._by_number)


class Reservations:
    """All reservations; ``of_slot`` finds the one that a slot belongs to."""

    def __init__(self, slot_count: int, limit: int) -> None:
        self.limit = limit
        self._by_number: dict[int, Reservation] = {}
        self._unused: list[int] = []
        self._highest = 0
        self._of_slot = np.zeros(slot_count, np.uint32)  # number, 0 where the slot is not reserved
        self.live: dict[int, Reservation] = {}  # oldest first
        self.quarantined: dict[int, Reservation] = {}  # oldest first
        self.quarantined_slots = 0
        self.live_slots = 0

    def __len__(self) -> int:
        return len(self._by_number)

    def full(self) -> bool:
        return len(self.live) >= self.limit

    def of_slot(self, slot: int) -> Reservation | None:
        return self._by_number.get(int(self._of_slot[slot]))

    def numbers(self, slots: Slots) -> npt.NDArray[np.uint32]:
        """Number of each slot's reservation, 0 where it has none."""
        numbers: npt.NDArray[np.uint32] = self._of_slot[slots]
        return numbers

    def get(self, number: int) -> Reservation:
        return self._by_number[number]

    def __iter__(self) -> Iterator[Reservation]:
        return iter(self._by_number.values())

    def add(
        self, session: Session | None, slots: Slots, generations: U64, page: Page | None, since: float, deadline: float
    ) -> Reservation:
        if self._unused:
            number = self._unused.pop()
        else:
            self._highest += 1
            number = self._highest
        reservation = Reservation(number, session, slots, generations, since, deadline, page, len(slots))
        self._by_number[number] = reservation
        self._of_slot[slots] = number
        if session is not None:
            session.reservations[number] = reservation
        if page is None:
            self.quarantined[number] = reservation
            self.quarantined_slots += len(slots)
        else:
            self.live[number] = reservation
            self.live_slots += len(slots)
        return reservation

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
        if reservation.page is None:
            self.quarantined_slots -= len(slots)
        else:
            self.live_slots -= len(slots)
        if not reservation.remaining:
            del self._by_number[reservation.number]
            (self.live if reservation.page is not None else self.quarantined).pop(reservation.number)
            if reservation.session is not None:
                del reservation.session.reservations[reservation.number]
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
        assert (live, quarantined) == (self.live_slots, self.quarantined_slots), "counts"
        assert set(np.flatnonzero(self._of_slot).tolist()) == set(slots), "slot column"
        assert self.live == {n: r for n, r in self._by_number.items() if r.page is not None}
        assert self.quarantined == {n: r for n, r in self._by_number.items() if r.page is None}
        return slots
