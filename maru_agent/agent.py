"""One agent: a mapping of the pool, its registration with a NIC, and the announcement that keeps standing.

The announcement belongs to a session with the server. It is made again whenever that begins another life, and with a fresh account of
how busy this host is every few seconds; when the session is silent, or ends, the server forgets it, and clients go to other agents.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Final

import numpy as np

from maru_agent.registrable import check_registrable, lock_limit
from maru_core.errors import ConfigError, MaruError, PoolError, ServerError
from maru_core.pool import PoolMemory, parse_pool_uri
from maru_core.protocol import Agent, ErrorCode, PoolName, Welcome
from maru_core.rdma import Endpoint, TransferError
from maru_core.session import Session

log = logging.getLogger("maru.agent")

#: Most bytes that are registered at a time. NICs have limits of their own; a piece that is too large is tried again in halves.
PIECE_BYTES: Final = 64 << 30
#: How often the announcement is looked after, seconds.
LOOK_S: Final = 0.5
#: How often the load is told, in looks.
_TELL: Final = 10
#: Answers to an announcement that stay as they are until the operator changes something.
_REFUSED: Final = (ErrorCode.FORBIDDEN, ErrorCode.INVALID, ErrorCode.LIMIT)


class PoolAgent:
    """Args:
    session: with the server of the pool.
    pool: URI under which this host reaches it; None: as the server says, of several pools the only one that can be mapped here.
    backend, devices: of NIXL; see :class:`maru_core.rdma.Endpoint`.
    progress: a thread that polls for peers; needed where one-sided transfers are emulated (TCP), and to connect at all.
    """

    def __init__(
        self,
        session: Session,
        *,
        pool: str | None = None,
        backend: str = "UCX",
        devices: str = "",
        progress: bool = True,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """Map the pool and register it.

        Raises:
            MaruError: the server is away, the pool is not its own, or the memory cannot be registered; the message says why.
        """
        self._session = session
        self._announced = 0  # epoch of the last announcement
        self._served = False  # whether there has been one
        self._stop = threading.Event()
        self.memory = _find(session.connect(), pool)
        uri = self.memory.uri
        if self.memory.coherence.software:
            self.memory.close()
            # A NIC reads and writes through this host's caches, and nobody would write back or drop a line of them for it.
            raise ConfigError(
                f"{uri}: the pool is not coherent between hosts (coherence=software), and a NIC's transfers pass through this host's "
                "caches: run no agents for it, and let every host map the pool"
            )
        self._uuid = self.memory.geometry.pool_uuid
        self._backend = backend
        try:
            check_registrable(uri)
            self._endpoint = Endpoint(f"maru-agent-{os.getpid()}", backend=backend, devices=devices, progress=progress)
        except BaseException:
            self.memory.close()
            raise
        try:
            self._pieces = self._register(piece_bytes)
        except BaseException:
            self.close()
            raise
        log.info("%s: %d bytes registered with %s in %d pieces", uri, self.registered_bytes, backend, len(self._pieces))

    @property
    def registered_bytes(self) -> int:
        return sum(length for _, length, _ in self._pieces)

    def _register(self, piece_bytes: int) -> list[tuple[int, int, int]]:
        """Offset, bytes and address of each piece: whole extents, so that every object lies in one."""
        geometry = self.memory.geometry
        base = self.memory.data_address
        pieces: list[tuple[int, int, int]] = []
        at, most = 0, max(1, piece_bytes // geometry.extent_bytes) * geometry.extent_bytes
        while at < geometry.data_bytes:
            length = min(most, geometry.data_bytes - at)
            try:
                self._endpoint.register(base + at, length)
            except TransferError as error:
                most = length // 2 // geometry.extent_bytes * geometry.extent_bytes
                if most < geometry.extent_bytes:
                    why = "; ".join(filter(None, (str(error), lock_limit(geometry.data_bytes))))
                    raise PoolError(f"the pool {self.memory.uri} cannot be served: {why}") from error
                continue
            pieces.append((geometry.off_data + at, length, base + at))
            at += length
        return pieces

    # ------------------------------------------------------------ standing

    def run(self) -> None:
        """Keep the announcement standing until :meth:`stop`; never raises for a server that is away.

        Raises:
            PoolError: the server serves another pool now.
            ServerError: it does not let this agent announce itself, and never has.
        """
        looks = 0
        while not self._stop.is_set():
            self.look(tell=looks % _TELL == 0)
            looks += 1
            self._stop.wait(LOOK_S)

    def look(self, *, tell: bool) -> None:
        """Announce where the session has begun another life, or in any case with ``tell``."""
        try:
            welcome = self._session.connect()
            epoch = self._session.epoch
            if self._uuid not in [name.uuid for name in names_of(welcome)]:
                raise PoolError(
                    f"the server at {self._session.endpoint} serves other pools than {self.memory.uri} now: start the agent again"
                )
            if not tell and epoch == self._announced:
                return
            named = self._uuid if welcome.pools else b""
            count = self._session.announce(self._account(), named, epoch=epoch)
        except PoolError:
            raise
        except MaruError as error:
            if not self._served and isinstance(error, ServerError) and error.code in _REFUSED:
                raise
            if self._announced:
                log.warning("not announced any more: %s", error)
            self._announced = 0
            return
        if epoch != self._announced:
            log.info("announced to the server at %s: %d agents serve the pool", self._session.endpoint, count)
            self._announced = epoch
            self._served = True

    def _account(self) -> Agent:
        pieces = np.array(self._pieces, "<u8").tobytes()
        return Agent(os.uname().nodename, self._backend, self._endpoint.metadata, pieces, _load())

    def stop(self) -> None:
        """Have :meth:`run` return. May be called from a signal handler."""
        self._stop.set()

    def close(self) -> None:
        """Take the announcement back, and then the registration."""
        self._session.close()
        self._endpoint.close()
        self.memory.close()


def names_of(welcome: Welcome) -> list[PoolName]:
    """The server's pools."""
    return welcome.pools or [PoolName(welcome.pool_uri, welcome.pool_uuid)]


def _find(welcome: Welcome, pool: str | None) -> PoolMemory:
    """Map one of the server's pools.

    Raises:
        PoolError: there is none of them, under the name that was given or under the server's.
        ConfigError: there are several.
    """
    names = names_of(welcome)
    if len(names) == 1:
        return PoolMemory.attach(parse_pool_uri(pool or names[0].uri), expected_uuid=names[0].uuid)
    found: list[PoolMemory] = []
    failed: PoolError | None = None
    for name in names:
        try:
            found.append(PoolMemory.attach(parse_pool_uri(pool or name.uri), expected_uuid=name.uuid))
        except PoolError as error:
            failed = failed or error
    if len(found) == 1:
        return found[0]
    for memory in found:
        memory.close()
    if found:
        uris = ", ".join(str(memory.uri) for memory in found)
        raise ConfigError(
            f"this host can map {len(found)} pools of the server ({uris}): name the one of this agent with --pool"
        )
    assert failed is not None
    raise failed


def _load() -> float:
    """Runnable processes for each CPU, 0 where the host does not say."""
    try:
        # Not getloadavg(3), which asks past what a container is shown.
        return min(64.0, float(Path("/proc/loadavg").read_text().split()[0]) / (os.cpu_count() or 1))
    except (OSError, ValueError):
        return 0.0
