"""How this process reaches the pools of its server: it maps the memory, or agents move objects for it, or not at all.

Mapping is always better, so it is tried first; agents serve hosts that do not have the memory. ``transport`` of
:class:`maru_core.store_config.StoreConfig` forces one of the two. What was decided, and why, is logged and told to the server, which
gives this client nothing of a pool that it does not reach.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from maru_core.errors import MaruError, PoolError
from maru_core.mover import Mover
from maru_core.pool import Geometry, PoolMemory, PoolView, parse_pool_uri
from maru_core.protocol import POOL_SHIFT, WAYS, WHY_MAX, Agent, AgentsReply, PoolName, Way, Welcome
from maru_core.rdma import MessageView, RdmaMover
from maru_core.session import Session
from maru_core.store_config import StoreConfig, split_pools

log = logging.getLogger("maru.store")

CXL, RDMA, NONE = WAYS
_OWN: Final = np.uint32((1 << POOL_SHIFT) - 1)

Slots = npt.NDArray[np.uint32]


class View(Protocol):
    """Whether slots still have the generations that the server told; see :class:`maru_core.pool.PoolView`."""

    def valid(self, slots: Slots, generations: npt.NDArray[np.uint64]) -> bool: ...

    def valid_each(self, slots: Slots, generations: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]: ...


class _Below:
    """A view of one of several pools, asked about slots as the server tells them."""

    def __init__(self, view: PoolView) -> None:
        self._view = view

    def valid(self, slots: Slots, generations: npt.NDArray[np.uint64]) -> bool:
        return self._view.valid(slots & _OWN, generations)

    def valid_each(self, slots: Slots, generations: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        return self._view.valid_each(slots & _OWN, generations)


class Reach(msgspec.Struct, frozen=True):
    """The way to one pool. ``memory`` is None where it is not mapped. ``view`` takes slots as the server tells them."""

    geometry: Geometry
    memory: PoolMemory | None
    view: View
    mover: Mover
    #: Its place among the pools of the server; None where that has one.
    number: int | None = None

    def own(self, slots: Slots) -> Slots:
        """Slots as the server tells them, as the pool itself numbers them."""
        return slots if self.number is None else slots & _OWN


class Reached(msgspec.Struct, frozen=True):
    """The ways to all pools of one life, in the server's order; None where there is none. At least one is there."""

    pools: tuple[Reach | None, ...]
    ways: tuple[Way, ...]

    @property
    def first(self) -> Reach:
        """Of those that are reached."""
        return next(reach for reach in self.pools if reach is not None)

    def present(self) -> list[Reach]:
        """Those that are reached."""
        return [reach for reach in self.pools if reach is not None]

    def one(self, slots: Slots) -> Reach | None:
        """The way to the pool of these slots, as the server tells them; None where they are of several, or of one that is not reached."""
        if len(self.pools) == 1:
            return self.pools[0]
        if not len(slots):
            return self.first
        number = int(slots[0]) >> POOL_SHIFT
        if number >= len(self.pools) or (slots >> np.uint32(POOL_SHIFT) != number).any():
            return None
        return self.pools[number]

    def each(self, slots: Slots) -> list[tuple[Reach | None, npt.NDArray[np.intp]]]:
        """The ways to the pools of these slots, and which of the slots are in each."""
        if len(self.pools) == 1:
            return [(self.pools[0], np.arange(len(slots)))]
        numbers = slots >> np.uint32(POOL_SHIFT)
        return [
            (self.pools[number] if number < len(self.pools) else None, np.flatnonzero(numbers == number))
            for number in np.unique(numbers).tolist()
        ]


class Reaching:
    """Decides, and makes what moves bytes.

    Args:
        mapped: makes the mover of a pool that is mapped.
        only_mapped: the mover is the caller's own, which needs the mapping.
    """

    def __init__(
        self,
        config: StoreConfig,
        session: Session,
        mapped: Callable[[PoolMemory], Mover],
        *,
        only_mapped: bool,
    ) -> None:
        self._config = config
        self._session = session
        self._mapped = mapped
        self._only_mapped = only_mapped
        self._ranges: dict[int, int] = {}  # of the engine's memory: bytes by address; filled while attaching
        self._gpus: dict[int, tuple[int, int]] = {}  # the same of GPUs: bytes and number of the GPU
        self._said: dict[bytes, Way] = {}  # by pool

    @property
    def _insists(self) -> bool:
        return self._config.transport == "rdma" and not self._only_mapped

    def register(self, address: int, nbytes: int, device: int | None = None) -> None:
        """Engine memory that pages will be moved to and from; ``device``: number of the GPU whose memory it is."""
        if device is None:
            self._ranges[address] = nbytes
        else:
            self._gpus[address] = nbytes, device

    def reach(self, welcome: Welcome, epoch: int, old: Reached | None) -> Reached:
        """The ways to the pools of this life; the old ones where they are the same pools.

        Raises:
            MaruError: none can be reached, or the server's only one cannot.
        """
        names = welcome.pools or [PoolName(welcome.pool_uri, welcome.pool_uuid)]
        if len({name.uuid for name in names}) != len(names):
            raise PoolError("the server names two pools by one UUID: use the same release of Maru on both sides")
        before = {} if old is None else {reach.geometry.pool_uuid: reach for reach in old.present()}
        several = len(names) > 1
        pools: list[Reach | None] = []
        ways: list[Way] = []
        failed: MaruError | None = None
        try:
            for number, name in enumerate(names):
                place = number if several else None
                try:
                    reach, way = self._reach(name, place, epoch, before.get(name.uuid))
                except PoolError as error:
                    if not several:
                        self._say(name, Way(NONE, printable(str(error))))
                        raise
                    failed = failed or error
                    reach, way = None, Way(NONE, printable(str(error)))
                pools.append(reach)
                ways.append(way)
            if failed is not None and not any(pools):
                if not self._insists:
                    raise failed
                # As with one pool: agents may come later.
                found = [
                    self._through_agents(*pair, epoch, "transport=rdma") for pair in zip(names, range(16), strict=False)
                ]
                pools, ways = [reach for reach, _ in found], [way for _, way in found]
        except BaseException:
            kept = {id(reach.mover) for reach in before.values()}
            for made in pools:
                if made is not None and id(made.mover) not in kept:
                    made.mover.close()
            raise
        for name, way in zip(names, ways, strict=True):
            self._say(name, way)
        return Reached(tuple(pools), tuple(ways))

    def _reach(self, name: PoolName, number: int | None, epoch: int, old: Reach | None) -> tuple[Reach, Way]:
        """The way to one pool, and how it is told.

        Raises:
            PoolError: there is none.
        """
        if old is not None:
            view = self._asking(epoch) if old.memory is None else _view(old.memory, number)
            way = self._said.get(name.uuid) or Way(RDMA if old.memory is None else CXL, "as before")
            return msgspec.structs.replace(old, view=view, number=number), way
        if self._insists:
            if number is not None and not self._agents(name.uuid):
                raise PoolError(
                    "transport=rdma, and no agent serves this pool: start maru-agent on a host that has its memory"
                )
            return self._through_agents(name, number, epoch, "transport=rdma")
        try:
            memory = self._map(name)
        except PoolError as error:
            if self._config.transport == "cxl" or self._only_mapped or not self._agents(name.uuid):
                raise
            return self._through_agents(name, number, epoch, str(error))
        reach = Reach(memory.geometry, memory, _view(memory, number), self._mapped(memory), number)
        return reach, Way(CXL, printable(f"mapped as {memory.uri}"))

    def _map(self, name: PoolName) -> PoolMemory:
        """As the configuration has it, where that names a pool; otherwise as the server does."""
        return attach_any(split_pools(self._config.pool) if self._config.pool else [name.uri], name.uuid)

    def _through_agents(self, name: PoolName, number: int | None, epoch: int, why: str) -> tuple[Reach, Way]:
        reply = self._session.agents(name.uuid if number is not None else b"", epoch=epoch)
        geometry = _geometry(reply, name.uuid)
        mover = RdmaMover(
            geometry,
            lambda: self._agents(name.uuid),
            name=self._session.name,
            devices=self._config.rdma_devices,
            timeout_s=max(1.0, 2 * self._session.timeout_s),
            memory=self._ranges,
            gpus=self._gpus,
        )
        agents = ", ".join(agent.name for agent in reply.agents) or "none yet"
        way = Way(RDMA, printable(f"through agents ({agents}): {why}"))
        return Reach(geometry, None, self._asking(epoch), mover, number), way

    def _say(self, name: PoolName, way: Way) -> None:
        """One line a pool, when it is new."""
        if self._said.get(name.uuid) == way:
            return
        self._said[name.uuid] = way
        if way.way == NONE:
            log.warning("the pool %s is not reached, and nothing of it is used: %s", name.uri, way.why)
        else:
            log.info("the pool %s is reached by %s: %s", name.uri, way.way, way.why)

    def _agents(self, pool: bytes) -> Sequence[Agent]:
        """Those of a pool now. It may be asked for a pool of an earlier life, whose server is followed by one of another pool: agents of that
        would move the same offsets of other memory.

        Raises:
            MaruError: the server does not say, or its pool is another one.
        """
        welcome = self._session.welcome
        reply = self._session.agents(pool if welcome is not None and welcome.pools else b"")
        _geometry(reply, pool)
        return reply.agents

    def _asking(self, epoch: int) -> MessageView:
        return MessageView(lambda slots, generations: self._session.validate(slots, generations, epoch=epoch))


def attach_any(uris: Sequence[str], uuid: bytes) -> PoolMemory:
    """Map the pool under the first of these names that is its own.

    Raises:
        PoolError: it is under none; why under the first.
    """
    failed: PoolError | None = None
    for uri in uris:
        try:
            return PoolMemory.attach(parse_pool_uri(uri), expected_uuid=uuid)
        except PoolError as error:
            failed = failed or error
    assert failed is not None, "at least one name"
    raise failed


def _geometry(reply: AgentsReply, pool: bytes) -> Geometry:
    """Of the pool whose agents a server names.

    Raises:
        PoolError: it is another pool, or cannot be read.
    """
    try:
        geometry = Geometry.read(reply.superblock)
    except MaruError as error:
        raise PoolError(f"the server's account of its pool cannot be read ({error})") from error
    if geometry.pool_uuid != pool:
        raise PoolError("the server's account of its pool is of another pool: ask again")
    return geometry


def _view(memory: PoolMemory, number: int | None) -> View:
    view = PoolView(memory)
    return view if number is None else _Below(view)


def printable(text: str) -> str:
    """As a reason that the server takes."""
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))[:WHY_MAX]
