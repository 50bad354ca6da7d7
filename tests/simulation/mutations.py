"""Faults to plant in the real code: each breaks one rule that everything else rests on, and the simulation must see it.

A mutation that is not caught says that the simulation is too weak, not that the rule is not needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest import mock

import greenlet
import msgspec
import numpy as np

import maru_core.conversation
import maru_core.errands
import maru_core.mover
import maru_core.sockets
import maru_server.books
import maru_server.lookup
from maru_core.errors import ServerUnavailableError
from maru_core.lives import Lives
from maru_core.pool.format import COMMITTED, FREE, RESERVED
from maru_core.pool.view import PoolView
from maru_core.protocol import CommitStatus
from maru_core.session import Session
from maru_core.transfers import Transfers
from maru_server.directory import GENERATION_WORD, PoolDirectory
from maru_server.holds import Holds
from maru_server.leases import Leases
from maru_server.pages import Pages
from maru_server.room import Room
from maru_server.sessions import Clock, Reservations
from maru_server.state import ServerState
from maru_server.tree import ComponentTable, PrefixTree

Planted = Callable[[], AbstractContextManager[object]]


class Mutation(NamedTuple):
    name: str
    breaks: str
    #: Kinds of violation of which one must be reported.
    caught_as: tuple[str, ...]
    planted: Planted


MUTATIONS: list[Mutation] = []


def mutation(breaks: str, *caught_as: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a function that yields patches."""

    def register(patches: Callable[[], Iterator[Any]]) -> Callable[[], Iterator[Any]]:
        @contextlib.contextmanager
        def planted() -> Iterator[None]:
            with contextlib.ExitStack() as stack:
                for patch in patches():
                    stack.enter_context(patch)
                yield

        MUTATIONS.append(Mutation(patches.__name__, breaks, caught_as, planted))
        return patches

    return register


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Any:
    """A patch: ``make`` gets the original and gives what stands in its place."""
    return mock.patch.object(owner, name, make(getattr(owner, name)))


# ---------------------------------------------------------------- generations


@mutation("A slot's generation changes when it is freed.", "stale", "wrong bytes")
def generation_not_bumped_when_freed() -> Iterator[Any]:
    yield mock.patch.object(PoolDirectory, "free", lambda self, slots: self._store(self.states, slots, FREE))


@mutation("A slot's generation changes with every object that it is given to.", "wrong bytes", "stale", "inconsistent")
def generation_never_bumped() -> Iterator[Any]:
    def claim(self: PoolDirectory, slots: Any) -> Any:
        generations = np.maximum(self.generations.take(slots), self._generation_floor + np.uint64(1))
        self._store(self.generations, slots, generations)
        self._store(self.states, slots, RESERVED)
        return generations

    yield mock.patch.object(PoolDirectory, "free", lambda self, slots: self._store(self.states, slots, FREE))
    yield mock.patch.object(PoolDirectory, "claim", claim)


@mutation("A reader looks at the generations after its copy.", "wrong bytes", "stale")
def reader_does_not_validate() -> Iterator[Any]:
    yield mock.patch.object(PoolView, "valid_each", lambda self, slots, generations: np.ones(len(slots), bool))


@mutation("A reader looks at the generations after its copy, not before.", "wrong bytes", "stale")
def reader_validates_before_the_copy() -> Iterator[Any]:
    valid = PoolView.valid_each
    # The locations that are about to be read are looked at first, and not again.
    checked: dict[Any, Any] = {}

    def early(original: Any) -> Any:
        def run(self: Transfers, life: Any, where: Any, fragments: Any) -> Any:
            checked[greenlet.getcurrent()] = valid(life.reach.view, where.slots, where.generations)
            checked[greenlet.getcurrent(), "slots"] = where
            try:
                return original(self, life, where, fragments)
            finally:
                checked.pop(greenlet.getcurrent(), None)

        return run

    def each(self: PoolView, slots: Any, generations: Any) -> Any:
        before = checked.get(greenlet.getcurrent())
        if before is None:
            return valid(self, slots, generations)
        where = checked[greenlet.getcurrent(), "slots"]
        known = {int(slot): bool(good) for slot, good in zip(where.slots, before, strict=True)}
        return np.array([known[int(slot)] for slot in slots], bool)

    yield replaced(Transfers, "_read", early)
    yield mock.patch.object(PoolView, "valid_each", each)


# ---------------------------------------------------------------- writing


@mutation("The copy is done before the commit is sent.", "damaged")
def commit_before_copy() -> Iterator[Any]:
    put_off: dict[Any, Any] = {}

    def store(original: Any) -> Any:
        def run(self: Any, offsets: Any, fragments: Any) -> None:
            put_off[greenlet.getcurrent()] = lambda: original(self, offsets, fragments)

        return run

    def commit(original: Any) -> Any:
        def run(self: Session, *args: Any, **named: Any) -> Any:
            reply = original(self, *args, **named)
            put_off.pop(greenlet.getcurrent(), lambda: None)()
            return reply

        return run

    yield replaced(maru_core.mover.CxlMover, "store", store)
    yield replaced(Session, "commit", commit)


@mutation("An answer that is missing is not an acknowledgement.", "not committed")
def commit_without_an_answer_counts() -> Iterator[Any]:
    def make(original: Any) -> Any:
        def run(self: Transfers, life: Any, packed: Any, sums: bytes) -> Any:
            try:
                return original(self, life, packed, sums)
            except ServerUnavailableError:
                return bytes([CommitStatus.COMMITTED]) * (len(packed[0]) // 4)

        return run

    yield replaced(Transfers, "_commit", make)


@mutation("What a commit says was lost is not stored.", "not committed")
def lost_commit_counts() -> Iterator[Any]:
    def make(original: Any) -> Any:
        def run(self: Session, *args: Any, **named: Any) -> Any:
            reply = original(self, *args, **named)
            return msgspec.structs.replace(reply, status=bytes(len(reply.status)))

        return run

    yield replaced(Session, "commit", make)


@mutation(
    "A session that leaves says Goodbye only if it has no slots that may still be written.", "damaged", "given twice"
)
def goodbye_while_writing() -> Iterator[Any]:
    yield mock.patch.object(Session, "_hold", return_value=None)


# ---------------------------------------------------------------- the conversation


@mutation(
    "A reply is taken only for the request whose rid it repeats.", "damaged", "wrong bytes", "raised", "not committed"
)
def reply_of_another_request_accepted() -> Iterator[Any]:
    waiting: dict[Any, int] = {}

    def exchange(original: Any) -> Any:
        def run(socket: Any, rid: int, *args: Any, **named: Any) -> Any:
            waiting[greenlet.getcurrent()] = rid
            return original(socket, rid, *args, **named)

        return run

    def read(original: Any) -> Any:
        def run(*args: Any) -> Any:
            reply = original(*args)
            return reply and msgspec.structs.replace(reply, rid=waiting.get(greenlet.getcurrent(), reply.rid))

        return run

    for module in (maru_core.conversation, maru_core.errands):
        yield replaced(module, "exchange", exchange)
    yield replaced(maru_core.sockets, "read_reply", read)


@mutation("A call takes no longer than its time limit.", "too long", "hangs")
def deadline_not_kept() -> Iterator[Any]:
    def make(original: Any) -> Any:
        def run(socket: Any, rid: int, data: bytes, deadline: float, *rest: Any) -> Any:
            return original(socket, rid, data, deadline + 10, *rest)

        return run

    yield replaced(maru_core.conversation, "exchange", make)


@mutation("The numbers of namespaces belong to one life.", "wrong bytes", "damaged", "not committed", "no recovery")
def namespace_number_kept_over_lives() -> Iterator[Any]:
    known: dict[Session, int] = {}

    def make(original: Any) -> Any:
        def run(self: Session, record: bytes, **named: Any) -> int:
            if self not in known:
                known[self] = original(self, record, **named)
            return known[self]

        return run

    yield replaced(Session, "open_namespace", make)


@mutation("A store begins anew when the server does.", "no recovery")
def life_never_renewed() -> Iterator[Any]:
    yield replaced(Lives, "current", lambda original: lambda self: self.life or original(self))


@mutation("All ranks of a request are told the same.", "ranks disagree")
def hold_decided_twice() -> Iterator[Any]:
    def make(original: Any) -> Any:
        def run(self: Holds, *args: Any) -> None:
            decision = original(self, *args)
            if decision is not None:
                self._forget(decision)

        return run

    yield replaced(Holds, "decided", make)


@mutation("What is held is not evicted.", "hold broken", "inconsistent")
def hold_ignored_by_eviction() -> Iterator[Any]:
    def is_evictable(self: PrefixTree, row: int) -> bool:
        return bool(self.child[row] < 0 and self.objects[row] and not self.pending[row])

    yield mock.patch.object(PrefixTree, "is_evictable", is_evictable)


@mutation("An object counts only if it has exactly the reader's length.", "wrong bytes")
def length_not_compared() -> Iterator[Any]:
    def make(original: Any) -> Any:
        def run(self: Transfers, life: Any, where: Any, fragments: Any) -> Any:
            lengths = np.full_like(where.lengths, fragments.nbytes)
            return original(self, life, msgspec.structs.replace(where, packed_lengths=lengths.tobytes()), fragments)

        return run

    yield replaced(Transfers, "_read", make)


# ---------------------------------------------------------------- slots and silence


@mutation("The slots of a silent session go to quarantine.", "damaged", "wrong bytes")
def quarantine_off() -> Iterator[Any]:
    yield mock.patch.object(Pages, "quarantine", lambda self, reservation, time, deadline: self.end(reservation))


@mutation("Slots that were reserved when the server started go to quarantine.", "damaged", "wrong bytes")
def restart_quarantine_off() -> Iterator[Any]:
    def make(original: Any) -> Any:
        def run(
            self: Reservations, session: Any, slots: Any, generations: Any, page: Any, since: float, *rest: Any
        ) -> Any:
            if session is None:
                rest = (since, *rest[1:])
            return original(self, session, slots, generations, page, since, *rest)

        return run

    yield replaced(Reservations, "add", make)


@mutation("A commit of a reservation that is lost says so.", "lost accepted", "not committed")
def lost_reservation_committed() -> Iterator[Any]:
    def make(original: Any) -> Any:
        def run(self: Pages, session: Any, slots: bytes, *args: Any) -> bytes:
            return bytes(len(original(self, session, slots, *args)))

        return run

    yield replaced(Pages, "commit", make)


@mutation("A stall of the server is nobody's silence.", "expired")
def stall_counts_as_silence() -> Iterator[Any]:
    def time(self: Clock, now: float) -> float:
        self.last = max(self.last, now)
        return self.last

    yield mock.patch.object(Clock, "time", time)


@mutation("When a session ends, its slots return.", "leak", "inconsistent")
def slots_leak_at_goodbye() -> Iterator[Any]:
    def end(self: Leases, session: Any) -> None:
        for reservation in list(session.reservations.values()):
            session.reservations.pop(reservation.number)
            reservation.session = None
            reservation.page = None
        self._sessions.remove(session)

    yield mock.patch.object(Leases, "end", end)


# ---------------------------------------------------------------- the tree


@mutation("A page is evicted only when nothing continues it.", "orphan", "inconsistent")
def parent_evicted() -> Iterator[Any]:
    def make(original: Any) -> Any:
        def run(self: Room, *args: Any) -> int:
            for tree in self._pages.trees.values():
                size = tree.size
                inner = np.flatnonzero(
                    (tree.child[:size] >= 0) & (tree.objects[:size] > 0) & (tree.pending[:size] == 0)
                )
                if len(inner):
                    self._pages._free(tree.strip(inner[:1]))
                    break
            return original(self, *args)

        return run

    yield replaced(Room, "_evict", make)


@mutation("A page is found only when all its shards are there.", "incomplete", "raised")
def incomplete_page_counts() -> Iterator[Any]:
    yield mock.patch.object(maru_server.lookup, "_native", None)
    yield mock.patch.object(ComponentTable, "whole", lambda self, rows: self.have[rows] > 0)


@mutation("What was deleted is not found any more.", "not removed")
def delete_leaves_pages() -> Iterator[Any]:
    yield mock.patch.object(Pages, "delete", lambda self, tree, keys, *args: len(keys))


@mutation("What is being written is not evicted.", "inconsistent", "raised", "lost", "damaged", "stored twice")
def page_evicted_while_written() -> Iterator[Any]:
    def is_evictable(self: PrefixTree, row: int) -> bool:
        return bool(self.child[row] < 0 and self.objects[row] and row not in self.guards)

    yield mock.patch.object(PrefixTree, "is_evictable", is_evictable)


@mutation("What is pinned is not evicted, also after a restart.", "pin broken", "inconsistent")
def pin_not_written_down() -> Iterator[Any]:
    yield mock.patch.object(PoolDirectory, "set_pinned", return_value=None)


# ---------------------------------------------------------------- restarts


@mutation("A reserved slot is not believed after a restart.", "believed", "damaged", "forgotten")
def reserved_slot_believed() -> Iterator[Any]:
    def make(original: Any) -> Any:
        def run(directory: PoolDirectory, *args: Any, **named: Any) -> Any:
            directory.states[directory.states == RESERVED] = COMMITTED
            return original(directory, *args, **named)

        return run

    yield replaced(maru_server.books, "rebuild", make)


@mutation("A record is believed only if its check fits.", "believed", "inconsistent", "raised")
def record_check_ignored() -> Iterator[Any]:
    def believed(self: PoolDirectory, slots: Any) -> Any:
        return (self.states[slots] == COMMITTED) & (self.words[slots, GENERATION_WORD] == self.generations[slots])

    yield mock.patch.object(PoolDirectory, "believed", believed)


@mutation("A commit is answered when the pool says COMMITTED, not before.", "lost")
def commit_answered_before_it_is_stored() -> Iterator[Any]:
    put_off: list[Any] = []

    def commit(original: Any) -> Any:
        return lambda self, slots, checksums: put_off.append(lambda: original(self, slots, checksums))

    def finish(original: Any) -> Any:
        def run(self: ServerState) -> None:
            while put_off:
                put_off.pop(0)()
            original(self)

        return run

    def born(original: Any) -> Any:
        def run(self: ServerState, *args: Any, **named: Any) -> None:
            put_off.clear()
            original(self, *args, **named)

        return run

    yield replaced(PoolDirectory, "commit", commit)
    yield replaced(ServerState, "finish", finish)
    yield replaced(ServerState, "__init__", born)


@mutation("A reserve is answered when the pool says RESERVED, not before.", "forgotten", "damaged")
def reserve_answered_before_it_is_stored() -> Iterator[Any]:
    put_off: list[Any] = []

    def claim(original: Any) -> Any:
        def run(self: PoolDirectory, slots: Any) -> Any:
            generations = np.maximum(self.generations.take(slots), self._generation_floor) + np.uint64(1)
            put_off.append(lambda: original(self, slots))
            return generations

        return run

    def finish(original: Any) -> Any:
        def run(self: Pages) -> None:
            while put_off:
                put_off.pop(0)()
            original(self)

        return run

    def born(original: Any) -> Any:
        def run(self: ServerState, *args: Any, **named: Any) -> None:
            put_off.clear()
            original(self, *args, **named)

        return run

    yield replaced(PoolDirectory, "claim", claim)
    yield replaced(Pages, "finish", finish)
    yield replaced(ServerState, "__init__", born)


@mutation("A restart finds every object that was acknowledged.", "lost")
def restart_forgets_the_last_object() -> Iterator[Any]:
    def make(original: Any) -> Any:
        def run(directory: PoolDirectory, *args: Any, **named: Any) -> Any:
            committed = np.flatnonzero(directory.states == COMMITTED)
            if len(committed):
                directory.free(committed[-1:].astype(np.uint32))
            return original(directory, *args, **named)

        return run

    yield replaced(maru_server.books, "rebuild", make)
