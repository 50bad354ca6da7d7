"""Where in several pools something goes or is looked for, and slot numbers that say which pool is meant.

A chain is never spread: a page goes where it, or the page before it, already lies, as far as its writer reaches that; a chain that
lies nowhere yet goes to the pool that its writer reaches best, and of those to the one with most room. A question is answered from
one pool, the one that has most of what was asked for. Looks at the books of each pool, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from maru_core.protocol import (
    HASH_BYTES,
    NO_SLOT,
    POOL_SHIFT,
    ROOT,
    WAYS,
    Commit,
    ErrorCode,
    Match,
    Release,
    Reserve,
    Validate,
    Way,
)
from maru_server.requests import RefusedError, check_slots
from maru_server.state import ServerState
from maru_server.tree import PrefixTree

_OWN: Final = np.uint32((1 << POOL_SHIFT) - 1)
#: Slots that a pool may have where it is one of several.
SLOTS_MAX: Final = (1 << POOL_SHIFT) - 1
#: No check of slot numbers but of their shape.
_ANY_SLOT: Final = 1 << 32


# ------------------------------------------------------------ slot numbers


def raised(slots: bytes, pool: int) -> bytes:
    """A pool's own slot numbers, packed, as clients are told them; NO_SLOT stays."""
    if not pool or not slots:
        return slots
    numbers = np.frombuffer(slots, "<u4").copy()
    numbers[numbers != NO_SLOT] |= np.uint32(pool << POOL_SHIFT)
    return numbers.tobytes()


def parts(
    message: Commit | Release | Validate, slot_counts: Sequence[int]
) -> Iterator[tuple[int, npt.NDArray[np.intp], bytes, bytes]]:
    """A batch of slots by pool: the pool, which of the batch are in it, and its own packed slots and generations.

    Args:
        slot_counts: of each pool.
    Raises:
        RefusedError: before the first is given: the batch has no such shape, or a slot is in no pool.
    """
    check_slots(message, _ANY_SLOT)
    slots = np.frombuffer(message.slots, "<u4")
    generations = np.frombuffer(message.generations, "<u8")
    pools, own = slots >> np.uint32(POOL_SHIFT), slots & _OWN
    found = np.unique(pools).tolist()
    for pool in found:
        if pool >= len(slot_counts) or int(own[pools == pool].max()) >= slot_counts[pool]:
            raise RefusedError(ErrorCode.INVALID, "a slot is in no pool of this server: send what was reserved")
    return iter(
        [
            (pool, index, own[index].tobytes(), generations[index].tobytes())
            for pool in found
            for index in [np.flatnonzero(pools == pool)]
        ]
    )


# ------------------------------------------------------------ places


def lies(tree: PrefixTree, page: bytes) -> bool:
    """Whether something of the page is stored there, or being written."""
    row = tree.row(page)
    return row is not None and bool(tree.objects[row] or tree.pending[row])


def stores(tree: PrefixTree, page: bytes) -> bool:
    """Whether something of the page is stored there."""
    row = tree.row(page)
    return row is not None and bool(tree.objects[row])


def leading(tree: PrefixTree, hashes: bytes) -> int:
    """How many of these pages, from the first on, are stored there or being written."""
    rows = tree.find(hashes, -1)
    there = rows >= 0
    there[there] = (tree.objects[rows[there]] > 0) | (tree.pending[rows[there]] > 0)
    return len(there) if there.all() else int(there.argmin())


def room(state: ServerState) -> int:
    """Bytes that are free."""
    return state.books.geometry.data_bytes - state.books.slabs.used_bytes()


def place(
    message: Reserve,
    states: Sequence[ServerState],
    spaces: Sequence[int | None],
    reached: Sequence[int],
    ways: Sequence[Way],
    largest: int = 0,
) -> int | None:
    """The pool that these pages go to; None where none is reached.

    Args:
        spaces: the namespace's number in each pool.
        reached: the pools that the writer reaches and that know the namespace, best first.
        ways: how it reaches each pool.
        largest: bytes of the largest object that the namespace has had: pages of which a component fits nowhere beside the rest are of
            no use, so chains begin where all can be.
    """
    if len(reached) < 2:
        return reached[0] if reached else None
    trees = {pool: states[pool].books.trees[number] for pool in reached if (number := spaces[pool]) is not None}

    def class_of(pool: int) -> int:
        return WAYS.index(ways[pool].way)

    if message.hashes:
        has = {pool: leading(tree, message.hashes) for pool, tree in trees.items()}
        if any(has.values()):
            return max(reached, key=lambda pool: has[pool])  # the first of several, which is the best reached
    if message.parent != ROOT:
        above = [pool for pool in reached if lies(trees[pool], message.parent)]
        if above:
            return max(above, key=lambda pool: (-class_of(pool), room(states[pool])))
    nbytes = max(message.nbytes, largest)
    fits = [pool for pool in reached if nbytes <= states[pool].books.geometry.extent_bytes]
    if not fits:
        return max(reached, key=lambda pool: states[pool].books.geometry.extent_bytes)  # which says so
    return max(fits, key=lambda pool: (-class_of(pool), room(states[pool])))


def find(message: Match, states: Sequence[ServerState], spaces: Sequence[int | None], reached: Sequence[int]) -> int:
    """The pool that has most of what is asked for, of those that are reached, best first; there is at least one."""
    if len(reached) == 1 or len(message.hashes) < HASH_BYTES:
        return reached[0]

    best, most = reached[0], -1
    for pool in reached:
        number = spaces[pool]
        assert number is not None
        pages = states[pool].look(message, number)
        if pages > most:  # of several the first, which is the best reached
            best, most = pool, pages
        if pages * HASH_BYTES == len(message.hashes):
            break  # no other has more
    return best
