"""Taking up the pools that a server is to serve, one or several, and the state over them.

Of several pools each has its own lock, and no life of any is begun before all of them are this server's. They are asked for in one order
whatever the command line has, so that no two standbys wait for each other. Several are never formatted: one would be lost already where
another turns out to be served.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

from maru_core.errors import ConfigError
from maru_core.pool import PoolMemory, PoolURI, parse_pool_uri
from maru_core.pool.coherence import Word
from maru_core.pool.uri import parse_size
from maru_core.protocol import POOLS_MAX
from maru_server.config import StateConfig
from maru_server.directory import PoolDirectory
from maru_server.election import OVERTAKEN, Election, LostError, Stop, check_held, make_election, take_up
from maru_server.placement import SLOTS_MAX
from maru_server.pools import Pools, config_of_member
from maru_server.state import ServerState


@dataclasses.dataclass(slots=True)
class Wanted:
    """One pool that is to be served."""

    uri: PoolURI
    size: int | None  # bytes; None: as it is, or as the URI says

    @property
    def name(self) -> str:
        """The same for all servers that name the pool alike."""
        return f"{self.uri.scheme}{self.uri.path}"


def wanted_pools(pools: Sequence[str], sizes: Sequence[str], *, format: bool = False) -> list[Wanted]:
    """What ``--pool``, ``--size`` and ``--format`` say.

    Raises:
        ConfigError: they do not go together.
    """
    if len(pools) > POOLS_MAX:
        raise ConfigError(f"--pool is given {len(pools)} times: one server has at most {POOLS_MAX} pools")
    if format and len(pools) > 1:
        raise ConfigError(
            f"--format is for one pool at a time, and --pool is given {len(pools)} times: format each by a server of its own, and then "
            "serve them together without it"
        )
    if len(sizes) not in (0, 1, len(pools)):
        raise ConfigError(
            f"--size is given {len(sizes)} times for {len(pools)} pools: give one for all, one for each, or ?size= in the URIs"
        )
    nbytes = [parse_size(size, "--size") for size in sizes]
    of_each: Sequence[int | None] = nbytes * len(pools) if len(nbytes) == 1 else nbytes or [None] * len(pools)
    wanted = [Wanted(parse_pool_uri(pool), size) for pool, size in zip(pools, of_each, strict=True)]
    names = [one.name for one in wanted]
    for one in wanted:
        if names.count(one.name) > 1:
            raise ConfigError(f"--pool {one.uri} is given twice: give each pool once")
    return wanted


def check_fits(one: Wanted, slots: int) -> None:
    """
    Raises:
        ConfigError: slot numbers of one of several pools do not reach as far.
    """
    if slots > SLOTS_MAX:
        raise ConfigError(
            f"{one.uri} has {slots} slots, and one of several pools may have {SLOTS_MAX}: serve it alone, or format it with a "
            "larger ?min_slot="
        )


def check_apart(memories: Sequence[PoolMemory]) -> None:
    """
    Raises:
        ConfigError: two pools have one UUID. Clients and agents know pools by it, and would take one for the other.
    """
    known: dict[bytes, PoolMemory] = {}
    for memory in memories:
        other = known.setdefault(memory.geometry.pool_uuid, memory)
        if other is not memory:
            raise ConfigError(
                f"{memory.uri} and {other.uri} have the same UUID: one is a copy of the other, or its other name; serve one of them, or make "
                "the copy a pool of its own with --format (its contents are lost)"
            )


def make_elections(lock: str | None, wanted: Sequence[Wanted], *, ttl_s: int, me: str, standby: bool) -> list[Election]:
    """The right to serve, of each pool: the first to be asked for has the key that ``--lock`` names, and each other one of its own below.
    So servers with one key exclude each other, however many pools each has and whatever its host calls them."""
    first = min(one.name for one in wanted)
    return [
        make_election(lock, ttl_s=ttl_s, me=me, standby=standby, below="" if one.name == first else one.name)
        for one in wanted
    ]


def take_up_all(
    wanted: Sequence[Wanted], elections: Sequence[Election], *, format: bool, standby: bool, stop: Stop
) -> list[PoolMemory] | None:
    """As :func:`maru_server.election.take_up`, of all pools, all of which are this server's when it returns; None: ``stop`` was set first."""
    found: dict[int, PoolMemory] = {}
    try:
        for at in sorted(range(len(wanted)), key=lambda at: wanted[at].name):
            one = wanted[at]
            memory = take_up(one.uri, one.size, format, election=elections[at], standby=standby, stop=stop)
            if memory is None:
                break
            found[at] = memory
            if len(wanted) > 1:
                check_fits(one, memory.geometry.slot_count)
        if len(found) == len(wanted):
            memories = [found[at] for at in range(len(wanted))]
            check_apart(memories)
            for one, election in zip(wanted, elections, strict=True):
                if not election.holds():  # waiting for the others may have taken long
                    raise LostError(f"{one.uri}: {election.why()}")
            return memories
    except BaseException:
        for memory in found.values():
            memory.close()
        raise
    for memory in found.values():
        memory.close()
    return None


class AllHeld:
    """The right to serve several pools: that of each of them, and that no other server has begun a life of any.

    Args:
        words: the incarnation as it stands in each memory, and the one that is this server's.
    """

    def __init__(
        self, wanted: Sequence[Wanted], elections: Sequence[Election], words: Sequence[tuple[Word, int]]
    ) -> None:
        self._wanted = wanted
        self._elections = elections
        self._words = words

    def acquire(self, stop: Stop) -> bool:
        return all(election.acquire(stop) for election in self._elections)

    def holds(self) -> bool:
        for election in self._elections:
            if not election.holds():
                return False
        for word, mine in self._words:  # noqa: SIM110
            if word[0] != mine:
                return False
        return True

    def why(self) -> str:
        for one, election, (word, mine) in zip(self._wanted, self._elections, self._words, strict=True):
            if not election.holds():
                return f"{one.uri}: {election.why()}"
            if word[0] != mine:
                return f"{one.uri}: {OVERTAKEN}"
        return ""

    def close(self) -> None:
        """Each is closed by itself."""


def all_held(
    wanted: Sequence[Wanted], elections: Sequence[Election], memories: Sequence[PoolMemory], lives: Sequence[int]
) -> Election:
    """The right to serve all of them, as the service asks for it."""
    if len(elections) == 1:
        return elections[0]
    words = [(memory.incarnation_word(), life) for memory, life in zip(memories, lives, strict=True)]
    return AllHeld(wanted, elections, words)


def make_state(
    wanted: Sequence[Wanted],
    elections: Sequence[Election],
    memories: Sequence[PoolMemory],
    lives: Sequence[int],
    config: StateConfig,
    *,
    now: float,
    wall_offset: float,
) -> ServerState | Pools:
    """The state over one pool, or over several the layer and a state for each. Their one incarnation is that of the first pool.

    Raises:
        LostError: a pool is, or may be, another server's meanwhile.
    """
    several = len(wanted) > 1
    states = [
        ServerState(
            PoolDirectory(memory.geometry, memory.meta, memory.coherence),
            incarnation=lives[0],
            pool_uri=str(one.uri),
            config=config_of_member(config) if several else config,
            now=now,
            wall_offset=wall_offset,
            before_writing=partial(check_held, election, memory, life),
        )
        for one, election, memory, life in zip(wanted, elections, memories, lives, strict=True)
    ]
    return Pools(states, incarnation=lives[0], config=config, now=now) if several else states[0]
