"""How the pool is reached: agents, for clients that cannot map it; what those ask because they cannot look into it; and what
each client says of its own way.

An agent is a client like any other; what it announces stands as long as its session does and is heard of. The server believes none
of it beyond its shape: whoever may announce may hand out the pool's bytes, so with keys that is for operators alone.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from maru_core.protocol import (
    AGENT_METADATA_MAX,
    AGENT_PIECES_MAX,
    Agent,
    Agents,
    AgentsReply,
    Announce,
    Done,
    ErrorCode,
    Reaches,
    Reply,
    Validate,
    Validated,
)
from maru_server.books import Books
from maru_server.reaches import NONE, check_ways
from maru_server.requests import Handler, RefusedError, check_slots
from maru_server.sessions import Session

#: Most agents of one pool.
AGENTS_MAX: Final = 64
_NAME_MAX: Final = 256


class AgentMessages:
    """Their handlers, and who is there."""

    def __init__(self, books: Books) -> None:
        self._incarnation = books.incarnation
        self._geometry = books.geometry
        self._generations = books.directory.generations
        self._sessions = books.sessions
        self._announced: dict[int, Agent] = {}  # by session
        self._superblock = books.geometry.superblock()
        self.handlers: dict[type, Handler] = {
            Announce: self._announce,
            Agents: self._agents,
            Validate: self._validate,
            Reaches: self._reaches,
        }

    def present(self) -> dict[int, Agent]:
        """Agents whose sessions are heard of, by session."""
        for number in [number for number in self._announced if self._sessions.get(number) is None]:
            del self._announced[number]
        heard = {number: self._sessions.get(number) for number in self._announced}
        return {number: self._announced[number] for number, session in heard.items() if session and not session.silent}

    def _announce(self, message: Announce, session: Session, time: float, now: float) -> Reply:
        if not session.peer.operator:
            raise RefusedError(
                ErrorCode.FORBIDDEN,
                "only operators may announce an agent: give its key the role in the server's file of clients",
            )
        self._check_pool(message)
        self._check(message.agent)
        present = self.present()
        if session.number not in present and len(present) >= AGENTS_MAX:
            raise RefusedError(ErrorCode.LIMIT, f"{len(present)} agents serve this pool, as many as may: end one")
        self._announced[session.number] = message.agent
        return Done(message.rid, self._incarnation, len(present | {session.number: message.agent}))

    def _check(self, agent: Agent) -> None:
        wrong = None
        if not 0 < len(agent.name) <= _NAME_MAX or not agent.name.isprintable():
            wrong = f"its name {agent.name[:64]!r} is not 1 to {_NAME_MAX} printable characters"
        elif not agent.backend.isalnum() or len(agent.backend) > 32:
            wrong = f"its backend {agent.backend[:64]!r} is not the name of one"
        elif not 0 < len(agent.metadata) <= AGENT_METADATA_MAX:
            wrong = f"its metadata has {len(agent.metadata)} bytes, not 1 to {AGENT_METADATA_MAX}"
        elif not math.isfinite(agent.load) or agent.load < 0:
            wrong = f"its load is {agent.load}, not a number from 0 on"
        elif len(agent.pieces) % 24 or not 0 < len(agent.pieces) <= 24 * AGENT_PIECES_MAX:
            wrong = f"its pieces have {len(agent.pieces)} bytes, not 24 for each of 1 to {AGENT_PIECES_MAX}"
        else:
            wrong = self._wrong_pieces(np.frombuffer(agent.pieces, "<u8").reshape(-1, 3))
        if wrong is not None:
            raise RefusedError(ErrorCode.INVALID, f"the agent cannot serve this pool: {wrong}")

    def _wrong_pieces(self, pieces: np.ndarray) -> str | None:
        """Each extent must lie in one piece, or an object would have to be moved in two."""
        geometry = self._geometry
        starts, lengths, addresses = (column.tolist() for column in pieces.T)
        expected = geometry.off_data
        for start, length, address in zip(starts, lengths, addresses, strict=True):
            if start != expected or not length or length % geometry.extent_bytes or not address:
                return f"a piece of {length} bytes at offset {start} does not follow on {expected} in whole extents"
            if address + length >= 1 << 64:
                return f"a piece of {length} bytes cannot lie at address {address}"
            expected = start + length
        end = geometry.off_data + geometry.data_bytes
        return None if expected == end else f"its pieces end at {expected} and the extents at {end}"

    def _check_pool(self, message: Announce | Agents) -> None:
        if message.pool not in (b"", self._geometry.pool_uuid):
            raise RefusedError(
                ErrorCode.INVALID,
                f"pool {message.pool[:16].hex()} is not served here, but {self._geometry.pool_uuid.hex()}: ask its own server",
            )

    def _agents(self, message: Agents, session: Session, time: float, now: float) -> Reply:
        self._check_pool(message)
        return AgentsReply(message.rid, self._incarnation, self._superblock, list(self.present().values()))

    def _reaches(self, message: Reaches, session: Session, time: float, now: float) -> Reply:
        session.ways = check_ways(message, 1)
        return Done(message.rid, self._incarnation, sum(one.way != NONE for one in session.ways))

    def _validate(self, message: Validate, session: Session, time: float, now: float) -> Reply:
        check_slots(message, self._geometry.slot_count)
        slots = np.frombuffer(message.slots, "<u4")
        valid = self._generations.take(slots) == np.frombuffer(message.generations, "<u8")
        return Validated(message.rid, self._incarnation, valid.astype(np.uint8).tobytes())
