"""Lookups of the direct path: how far a waiting request's prompt is stored, without a message where nothing changed.

SGLang asks for every waiting request on every scheduling pass, in the scheduler's thread. An answer therefore holds as long as the
number in the pool's memory stands that the server raises whenever anything becomes findable or goes. Where it moves all the time, one
request is asked about again once in :data:`AGAIN_S`, and all that wait together take :data:`SHARE` of the scheduler's time; what is
told in between may be old, and the load that follows asks again anyway.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy

from maru_core.protocol import Rule, Want
from maru_core.store import Store
from maru_sglang.radix.chain import pack_keys

#: Shortest time between two questions about one request, seconds.
AGAIN_S: Final = 0.02
#: Most of the time that goes into asking again what was asked before, and the longest pause that this makes, seconds.
SHARE: Final = 0.05
REST_MAX_S: Final = 1.0
#: Requests whose answers are remembered.
REMEMBERED: Final = 4096
#: Most lengths of an answer, or one more. SGLang takes them one by one, a few microseconds each, and with pages of one token a long
#: prompt has tens of thousands.
LENGTHS: Final = 256


class _Answer(NamedTuple):
    question: tuple[Any, ...]
    changes: tuple[int, ...] | None
    asked: float
    ends: npt.NDArray[np.uint32]

    def told(self) -> list[int]:
        ends: list[int] = self.ends.tolist()
        return ends


class Lookups:
    """
    Args:
        store: whom to ask.
        shard: of this rank.
        clock: seconds.
    """

    def __init__(self, store: Store, shard: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._shard = shard
        self._clock = clock
        self._answers: collections.OrderedDict[str, _Answer] = collections.OrderedDict()
        self._rest = 0.0  # until then nothing is asked again
        self._oldest = math.inf  # when the answer that waits for that the longest was asked for

    def ends(self, rid: str, keys: Sequence[str], wants: Mapping[str, Want]) -> list[int]:
        """The lengths, in pages from ``keys[0]`` on, at which all rules are met; none where there is no answer."""
        # Keys are chained hashes: the last one stands for all of them.
        question = (keys[-1], len(keys), tuple(wants.items()))
        known = self._answers.get(rid)
        now, changes = self._clock(), self._store.changes()
        if known is not None and known.question == question:
            if known.changes is not None and known.changes == changes:
                return known.told()
            if now < known.asked + AGAIN_S or not self._turn(known, now):
                return known.told()
        found = self._store.find(wants, self._shard, pack_keys(keys))
        if known is not None:
            ended = self._clock()
            self._rest, self._oldest = ended + min((ended - now) * (1 / SHARE - 1), REST_MAX_S), math.inf
        answer = _Answer(question, changes if found.why is not None else None, now, _some(found.ends, len(keys)))
        self._answers[rid] = answer
        self._answers.move_to_end(rid)
        while len(self._answers) > REMEMBERED:
            self._answers.popitem(last=False)
        return answer.told()

    def _turn(self, known: _Answer, now: float) -> bool:
        """Whether this one may be asked again. The oldest first; a request that does not wait any more does not hold up the others."""
        if now >= self._rest and (known.asked <= self._oldest or now >= self._rest + AGAIN_S):
            return True
        self._oldest = min(self._oldest, known.asked)
        return False

    def forget(self, rid: str | None = None) -> None:
        """What is known of one request, or of all."""
        if rid is None:
            self._answers.clear()
        else:
            self._answers.pop(rid, None)


def _some(ends: npt.NDArray[np.uint32], asked: int) -> npt.NDArray[np.uint32]:
    """The longest, and of the others those that every rank would choose of the same question: they look for one that all have."""
    if len(ends) <= LENGTHS:
        return ends
    chosen = np.flatnonzero(ends[:-1] % np.uint32(-(-asked // LENGTHS)) == 0)
    return np.append(ends[chosen], ends[-1])


def wants_of(transfers: Sequence[Any]) -> dict[str, Want]:
    """The rule of each physical pool, from SGLang's resolved transfers. The keys of a pool of which only the end is needed are
    that end: their number is the window."""
    return {
        str(transfer.name): (
            Want(Rule.TRAILING_PAGES, len(transfer.keys))
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES
            else Want()
        )
        for transfer in transfers
    }
