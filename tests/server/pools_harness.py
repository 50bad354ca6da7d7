"""A whole metadata server with several pools in one process, over plain memory."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np

from maru_core.pool.geometry import Geometry
from maru_core.protocol import POOL_SHIFT, Done, Reaches, Way
from maru_server.directory import PoolDirectory
from maru_server.pools import Pools, config_of_member
from maru_server.state import ServerState
from tests.server.maru_harness import WALL_OFFSET, Client, Server, geometry

OWN = (1 << POOL_SHIFT) - 1


def shapes(*extents: int, slots: int | tuple[int, ...] = 8) -> list[Geometry]:
    """Pools of so many extents of ``slots`` slots of 4 KiB, each with a UUID of its own."""
    of_each = slots if isinstance(slots, tuple) else (slots,) * len(extents)
    return [
        dataclasses.replace(geometry(count, many), pool_uuid=hashlib.sha256(bytes([at])).digest()[:16])
        for at, (count, many) in enumerate(zip(extents, of_each, strict=True))
    ]


class PoolsServer(Server):
    """As :class:`Server`; ``metas`` are the pools' tables."""

    def __init__(self, *extents: int, slots: int | tuple[int, ...] = 8, checked: bool = True, **config: Any) -> None:
        self.shapes = shapes(*(extents or (8, 8)), slots=slots)
        self.metas = [np.zeros(shape.off_data, np.uint8) for shape in self.shapes]
        self.lives = [1000 * at for at in range(len(self.shapes))]
        super().__init__(self.shapes[0], meta=self.metas[0], checked=checked, **config)

    def boot_without_memory(self) -> None:
        self.lives = [life + 1 for life in self.lives]
        self.incarnation = self.lives[0]
        self.directories = [
            self._directory_type(shape, meta) for shape, meta in zip(self.shapes, self.metas, strict=True)
        ]
        self.directory = self.directories[0]
        states = [
            ServerState(
                directory,
                incarnation=self.incarnation,
                pool_uri=f"shm://test{at}",
                config=config_of_member(self.config),
                now=self.now,
                wall_offset=WALL_OFFSET,
            )
            for at, directory in enumerate(self.directories)
        ]
        self.pools = Pools(states, incarnation=self.incarnation, config=self.config, now=self.now)
        self.state: Any = self.pools

    def boot(self) -> None:
        self.boot_without_memory()
        for member, shape in zip(self.pools.members, self.shapes, strict=True):
            member.extents_ready(shape.extent_count, self.now)
        self._check()

    def restart(self, meta: Any = None) -> None:
        assert meta is None
        self.metas = [meta.copy() for meta in self.metas]
        self.boot()

    def client(self, name: str = "client", *, ways: str | None = "", **options: Any) -> PoolsClient:
        """``ways``: one letter a pool, c, r or n; all mapped where empty; None: says nothing."""
        return PoolsClient(self, name, ways="c" * len(self.shapes) if ways == "" else ways, **options)


class PoolsClient(Client):
    def __init__(self, server: PoolsServer, name: str, *, ways: str | None, **options: Any) -> None:
        self.ways = ways
        super().__init__(server, name, **options)

    def connect(self) -> None:
        super().connect()
        if self.ways is not None:
            self.reach(self.ways)

    def reach(self, ways: str) -> None:
        self.ways = ways
        words = {"c": "cxl", "r": "rdma", "n": "none"}
        reply = self.send(Reaches(1, self.session, [Way(words[way], "test") for way in ways]))
        assert isinstance(reply, Done), reply
        assert reply.count == len(ways) - ways.count("n")


def pools_of(slots: Any) -> set[int]:
    """The pools that these slot numbers are in."""
    return {int(slot) >> POOL_SHIFT for slot in slots}


__all__ = ["OWN", "PoolDirectory", "PoolsClient", "PoolsServer", "pools_of", "shapes"]
