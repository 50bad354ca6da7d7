"""Holds: what one request was told is kept from eviction for a short time, and all its ranks are told the same.

Two things in one, and the second outlives the first:

- a *decision*: how many pages the first rank that asked was told, and at which lengths it may stop. Every later rank of the
  request is told the same, whatever has happened since, until all ranks have released it, all their sessions have ended,
  or it has grown old. A rank is a session. A request that asks of another chain, or of other components or by other rules,
  asks another question, and its Unhold ends all of them.
- a *guard* on the last page of the answer, which keeps it and all pages before it from eviction. It ends when all ranks
  have released it, when their sessions have ended, when its time is over, or when the page was removed on demand. It is bounded
  in time, number and bytes; a decision beyond the bounds has none, and is otherwise the same.

A hold never makes a read correct, it only makes a late miss rare: readers validate what they copied. Nothing renews one.
No clock and no I/O here: the state says what time it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import numpy as np

from maru_core.errors import ConfigError
from maru_core.pool.format import SLOT_GRAIN
from maru_core.protocol import HASH_BYTES, Hold, Match
from maru_server.tree import PrefixTree, Rows

#: Most guarded decisions at a time, of all sessions and of one.
LIVE_MAX: Final = 4096
SESSION_LIVE_MAX: Final = 1024
#: Most decisions remembered, guarded or not.
REMEMBERED_MAX: Final = 16384
SESSION_REMEMBERED_MAX: Final = 4096
#: One tenant (of clients with keys) has at most this share of the bytes, of the guarded and of the remembered decisions.
TENANT_SHARE: Final = 0.5
#: Longest time of a hold that an operator may allow, seconds.
MAX_HOLD_S: Final = 3600.0
#: How long a decision is remembered after its guard's time is over, if there is room, seconds.
REMEMBERED_S: Final = 300.0
#: Longest way from the first page of a question up to the root that is counted; nothing is held beyond.
_WALK_MAX: Final = 1 << 16
#: Decisions that end in one tick.
_TICK: Final = 256
#: Stands for "not known" among rows; differs from every row.
_ABSENT: Final = -3

#: Namespace and request id; and what is asked: how many pages, the last of them (chained hashes say what lies before), of which
#: components by which rules.
_Request = tuple[int, bytes]
_Question = tuple[int, bytes, tuple[str, ...], tuple[tuple[int, int, int], ...]]


@dataclass(slots=True, eq=False)
class _Guard:
    """One guarded page; ``holds`` decisions share it. It is charged once."""

    tree: PrefixTree
    row: int
    page: bytes
    nbytes: int
    holds: int = 0


@dataclass(slots=True, eq=False)
class Decision:
    """What all ranks of a request are told of one chain."""

    namespace: int
    tenant: str
    request: bytes
    question: _Question
    session: int  # of the rank that was first
    pages: int
    why: int
    covered: tuple[int, ...]
    ranks: int
    since: float
    until: float  # when the guard's time is over
    guard: _Guard | None = None
    sessions: set[int] = field(default_factory=set)  # that asked and have not ended
    done: set[int] = field(default_factory=set)  # that released it, or ended
    _ends: bytes = b""  # one bit for each length from 1 to pages

    @property
    def ends(self) -> bytes:
        """The lengths at which it may stop, packed as :class:`maru_core.protocol.Located` has them."""
        return (np.flatnonzero(np.unpackbits(np.frombuffer(self._ends, np.uint8))) + 1).astype("<u4").tobytes()

    @ends.setter
    def ends(self, ends: bytes) -> None:
        legal = np.zeros(self.pages, np.uint8)
        legal[np.frombuffer(ends, "<u4") - np.uint32(1)] = 1
        self._ends = np.packbits(legal).tobytes() if ends else b""

    @property
    def nbytes(self) -> int:
        """Bytes of the pool that its guard keeps."""
        return self.guard.nbytes if self.guard is not None else 0

    def held_s(self, time: float) -> float:
        """For how long the pages are still held."""
        return max(0.0, self.until - time) if self.guard is not None else 0.0


class Holds:
    """All decisions of one server.

    Args:
        trees: by namespace number; looked at anew each time.
        offer: told of a row that may have become one to evict.
        budget: most bytes of the pool that are held at a time.
        max_s: longest time of one hold, seconds.
        min_slot_bytes: what the smallest object takes of the pool.
    """

    def __init__(
        self,
        trees: Mapping[int, PrefixTree],
        offer: Callable[[PrefixTree, int], None],
        *,
        budget: int,
        max_s: float,
        min_slot_bytes: int,
    ) -> None:
        self._trees = trees
        self._offer = offer
        self._budget = budget
        self._max_s = max_s
        self._min_slot_bytes = min_slot_bytes
        self.held_bytes = 0
        self._requests: dict[_Request, dict[_Question, Decision]] = {}
        self._all: dict[Decision, None] = {}  # oldest first
        self._live: dict[Decision, None] = {}  # with a guard
        self._of_session: dict[int, dict[Decision, None]] = {}  # decisions it made or shares, oldest first
        self._first: dict[int, int] = {}  # held decisions by the session that asked first
        self._of_tenant: dict[str, dict[Decision, None]] = {}  # of its namespaces, oldest first
        self._live_of_tenant: Counter[str] = Counter()
        self._bytes_of_tenant: Counter[str] = Counter()
        self._guards: dict[tuple[int, int], _Guard] = {}  # by namespace and row
        self._due = float("inf")  # no guard's time is over before

    def __len__(self) -> int:
        """Decisions with a guard."""
        return len(self._live)

    def __iter__(self) -> Iterator[Decision]:
        """Decisions with a guard, oldest first."""
        return iter(self._live)

    @property
    def remembered(self) -> int:
        """Decisions, with a guard or without."""
        return len(self._all)

    # ------------------------------------------------------------ asking

    def decided(self, tree: PrefixTree, session: int, match: Match, hold: Hold) -> Decision | None:
        """What an earlier rank of the request was told when it asked the same. The session shares it from now on."""
        questions = self._requests.get((tree.number, hold.request))
        decision = questions.get(_question(match)) if questions is not None else None
        if decision is not None and session not in decision.sessions:
            self._join(decision, session)
        return decision

    def knows(self, tree: PrefixTree, match: Match, hold: Hold) -> bool:
        """Whether an earlier rank of the request has asked the same."""
        return _question(match) in self._requests.get((tree.number, hold.request), {})

    def decide(
        self,
        tree: PrefixTree,
        session: int,
        match: Match,
        hold: Hold,
        *,
        pages: int,
        ends: bytes,
        covered: tuple[int, ...],
        why: int,
        time: float,
    ) -> Decision:
        """The first rank's answer, which :meth:`decided` does not know, becomes that of all; held if the bounds allow."""
        until = time + min(hold.seconds, self._max_s)
        question = _question(match)
        decision = Decision(
            tree.number, tree.tenant, hold.request, question, session, pages, why, covered, hold.ranks, time, until
        )
        decision.ends = ends
        self._make_room(session, tree.tenant)
        self._requests.setdefault((tree.number, hold.request), {})[question] = decision
        self._all[decision] = None
        self._of_tenant.setdefault(tree.tenant, {})[decision] = None
        self._join(decision, session)
        if (
            pages
            and len(self._live) < LIVE_MAX
            and self._first.get(session, 0) < SESSION_LIVE_MAX
            and self._live_of_tenant[tree.tenant] < LIVE_MAX * _share(tree.tenant)
        ):
            self._guard(decision, tree, match.hashes[: pages * HASH_BYTES])
        return decision

    def _join(self, decision: Decision, session: int) -> None:
        shared = self._of_session.setdefault(session, {})
        if len(shared) < SESSION_REMEMBERED_MAX:
            shared[decision] = None
            decision.sessions.add(session)

    def _make_room(self, session: int, tenant: str) -> None:
        """Forget what is oldest and has no guard, where memory would grow beyond its bounds."""
        for decisions, most in (
            (self._of_session.get(session, {}), SESSION_REMEMBERED_MAX),
            (self._of_tenant.get(tenant, {}), REMEMBERED_MAX * _share(tenant)),
            (self._all, REMEMBERED_MAX),
        ):
            if len(decisions) >= most:
                oldest = next((decision for decision in decisions if decision.guard is None), None)
                if oldest is not None:
                    self._forget(oldest)

    def _guard(self, decision: Decision, tree: PrefixTree, hashes: bytes) -> None:
        """Keep these pages, which are all known, if the budget allows it."""
        rows = tree.find(hashes, _ABSENT)
        last = int(rows[-1])
        if (tree.parent[rows[1:]] != rows[:-1]).any() or not tree.objects[last]:
            return  # No path of the tree, or nothing to keep: guarding the last page would not keep the others.
        guard = self._guards.get((tree.number, last))
        if guard is None:
            above: list[int] = []
            row = int(tree.parent[rows[0]])
            while row >= 0:
                above.append(row)
                row = int(tree.parent[row])
                if len(above) > _WALK_MAX:
                    return
            nbytes = self._footprint(tree, np.append(rows, above).astype(np.int64) if above else rows)
            if self.held_bytes + nbytes > self._budget:
                return
            if self._bytes_of_tenant[tree.tenant] + nbytes > self._budget * _share(tree.tenant):
                return
            guard = _Guard(tree, last, hashes[-HASH_BYTES:], nbytes)
            self._guards[tree.number, last] = guard
            self._charge(guard, nbytes)
            tree.guard(last)
        guard.holds += 1
        decision.guard = guard
        self._live[decision] = None
        self._live_of_tenant[tree.tenant] += 1
        self._first[decision.session] = self._first.get(decision.session, 0) + 1
        self._due = min(self._due, decision.until)

    def _charge(self, guard: _Guard, nbytes: int) -> None:
        self.held_bytes += nbytes
        self._bytes_of_tenant[guard.tree.tenant] += nbytes

    def _footprint(self, tree: PrefixTree, rows: Rows) -> int:
        """Bytes of the pool that these pages take, with all their components and shards."""
        grain, least = np.uint64(SLOT_GRAIN), np.uint64(self._min_slot_bytes)
        total = 0
        for table in tree.tables.values():
            slot_bytes = np.maximum((table.length[rows] + (grain - np.uint64(1))) // grain * grain, least)
            total += int((slot_bytes * table.held[rows]).sum())
        return total

    # ------------------------------------------------------------ ending

    def release(self, tree: PrefixTree, session: int, request: bytes) -> int:
        """The session's rank needs the hold no more; how many decisions it shared. Repeating it changes nothing."""
        questions = self._requests.get((tree.number, request), {})
        mine = [decision for decision in questions.values() if session in decision.sessions]
        for decision in mine:
            decision.done.add(session)
            if len(decision.done) >= decision.ranks:
                self._forget(decision)
        return len(mine)

    def session_ended(self, session: int) -> None:
        """A rank that is gone has released what it shared; where no rank is left, there is nobody to tell anything."""
        for decision in list(self._of_session.get(session, ())):
            decision.sessions.discard(session)
            decision.done.add(session)
            if not decision.sessions or len(decision.done) >= decision.ranks:
                self._forget(decision)
        self._of_session.pop(session, None)

    def expire(self, time: float) -> None:
        """End the guards whose time is over, and forget what is old; a bounded number each."""
        if time >= self._due:
            for decision in [decision for decision in self._live if decision.until <= time][:_TICK]:
                self._unguard(decision)
            self._due = min((decision.until for decision in self._live), default=float("inf"))
        for decision in list(islice(self._all, _TICK)):
            if decision.guard is not None or decision.until + REMEMBERED_S > time:
                break
            self._forget(decision)

    def removed(self, tree: PrefixTree) -> None:
        """Pages of this namespace were removed on demand: guards may have gone with them. To be called before any other
        page can take over their rows."""
        current = self._trees.get(tree.number)
        mine = [guard for guard in self._guards.values() if guard.tree.number == tree.number]
        if not mine:
            return
        gone = set(mine)
        if current is not None:
            rows = current.find(b"".join(guard.page for guard in mine), _ABSENT).tolist()
            gone = {g for g, row in zip(mine, rows, strict=True) if g.tree is not current or row != g.row}
        for guard in gone:
            del self._guards[tree.number, guard.row]
            self._charge(guard, -guard.nbytes)
        for decision in [decision for decision in self._live if decision.guard in gone]:
            self._let_go(decision)

    def _unguard(self, decision: Decision) -> None:
        guard = decision.guard
        assert guard is not None
        self._let_go(decision)
        guard.holds -= 1
        if not guard.holds:
            del self._guards[guard.tree.number, guard.row]
            self._charge(guard, -guard.nbytes)
            guard.tree.unguard(guard.row)
            self._offer(guard.tree, guard.row)

    def _let_go(self, decision: Decision) -> None:
        """It has no guard from now on."""
        decision.guard = None
        del self._live[decision]
        self._live_of_tenant[decision.tenant] -= 1
        left = self._first[decision.session] - 1
        if left:
            self._first[decision.session] = left
        else:
            del self._first[decision.session]

    def _forget(self, decision: Decision) -> None:
        if decision.guard is not None:
            self._unguard(decision)
        del self._all[decision]
        theirs = self._of_tenant[decision.tenant]
        del theirs[decision]
        if not theirs:
            del self._of_tenant[decision.tenant]
        key = (decision.namespace, decision.request)
        questions = self._requests[key]
        del questions[decision.question]
        if not questions:
            del self._requests[key]
        for session in decision.sessions:
            shared = self._of_session[session]
            del shared[decision]
            if not shared:
                del self._of_session[session]

    # ------------------------------------------------------------ integrity

    def check(self) -> dict[tuple[int, int], int]:
        """How many guards each (namespace, row) has from here, after comparing everything with everything."""
        remembered = [decision for questions in self._requests.values() for decision in questions.values()]
        assert len(remembered) == len(self._all) <= REMEMBERED_MAX, "decisions"
        assert set(remembered) == set(self._all), "decisions"
        assert set(self._live) == {decision for decision in self._all if decision.guard is not None}, "held decisions"
        assert len(self._live) <= LIVE_MAX
        holds: Counter[_Guard] = Counter(decision.guard for decision in self._live if decision.guard is not None)
        assert set(holds) == set(self._guards.values()), "guards"
        for (number, row), guard in self._guards.items():
            assert holds[guard] == guard.holds > 0, "holds of a guard"
            assert guard.tree is self._trees[number], "a guard in a tree that is gone"
            assert guard.row == row
            assert guard.tree.row(guard.page) == row, "a guard on a page that is gone"
        assert self.held_bytes == sum(guard.nbytes for guard in self._guards.values()) <= self._budget, "held bytes"
        assert self._first == Counter(decision.session for decision in self._live), "held by session"
        shared = {(session, decision) for session, mine in self._of_session.items() for decision in mine}
        assert shared == {(session, d) for d in self._all for session in d.sessions}, "sessions of decisions"
        self._check_tenants()
        assert all(decision.until >= self._due for decision in self._live), "due"
        assert all(len(decision.done) < decision.ranks for decision in self._all), "a decision that nobody needs"
        return dict.fromkeys(self._guards, 1)

    def _check_tenants(self) -> None:
        theirs = [decision for decisions in self._of_tenant.values() for decision in decisions]
        assert len(theirs) == len(self._all), "decisions of tenants"
        live = Counter(decision.tenant for decision in self._live)
        nbytes: Counter[str] = Counter()
        for guard in self._guards.values():
            nbytes[guard.tree.tenant] += guard.nbytes
        assert +self._live_of_tenant == live, "held decisions of tenants"
        assert +self._bytes_of_tenant == nbytes, "held bytes of tenants"
        for tenant, decisions in self._of_tenant.items():
            assert all(self._trees[decision.namespace].tenant == decision.tenant == tenant for decision in decisions)
            assert len(decisions) <= REMEMBERED_MAX * _share(tenant)
            assert live[tenant] <= LIVE_MAX * _share(tenant)
            assert nbytes[tenant] <= self._budget * _share(tenant)


def hold_config(share: float, max_s: float) -> dict[str, Any]:
    """Fields of :class:`maru_server.config.StateConfig`, from the options ``--hold-share`` and ``--max-hold``.

    Raises:
        ConfigError: naming the option, the value and what it may be.
    """
    if not 0 <= share <= 1:
        raise ConfigError(f"--hold-share is {share:g}: give a part of the pool from 0 to 1")
    if not 0 < max_s <= MAX_HOLD_S:
        raise ConfigError(f"--max-hold is {max_s:g}: give seconds above 0 and up to {MAX_HOLD_S:g}")
    return {"hold_share": share, "max_hold_s": max_s}


def _question(match: Match) -> _Question:
    return (
        len(match.hashes) // HASH_BYTES,
        match.hashes[-HASH_BYTES:],
        tuple(match.components),
        tuple([(want.rule, want.pages, want.group) for want in match.rules]),
    )


def _share(tenant: str) -> float:
    """Clients without keys are one tenant, and may be the only one."""
    return TENANT_SHARE if tenant else 1.0
