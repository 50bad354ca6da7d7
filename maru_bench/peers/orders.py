"""What the bench and its peers' processes say to each other: one JSON line each way over a socket."""

from __future__ import annotations

import socket
from typing import Final

import msgspec
import numpy as np

HASH_BYTES: Final = 32


class Do(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One call of a peer, timed."""

    operation: str
    """``store``, ``load``, ``exists`` or ``remove``."""
    chain: int
    """Seed of the chain's keys."""
    first: int
    """First page of the chain that is meant."""
    pages: int
    page_bytes: int
    at: int = 0
    """Page of the engine's buffer where the first one lies."""


class Loop(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The same call again and again for some seconds, over several chains in turn."""

    operation: str
    chains: list[int]
    pages: int
    page_bytes: int
    seconds: float


class Done(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    seconds: list[float]
    """Of each call."""
    error: str | None = None


Order = Do | Loop


def keys_of(chain: int, first: int, pages: int) -> list[str]:
    """Keys of a chain's pages as SGLang has them: 64 hex digits."""
    packed = np.random.default_rng(chain).bytes(HASH_BYTES * (first + pages))
    return [packed[at : at + HASH_BYTES].hex() for at in range(HASH_BYTES * first, len(packed), HASH_BYTES)]


class Line:
    """One end of the conversation."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._file = end.makefile("rb")

    def send(self, message: Order | Done) -> None:
        self._socket.sendall(msgspec.json.encode(message) + b"\n")

    def receive_order(self) -> Order | None:
        """None: the other end is gone."""
        line = self._file.readline()
        return msgspec.json.decode(line, type=Do | Loop) if line else None

    def receive_done(self, timeout_s: float) -> Done | None:
        """None: the other end is gone.

        Raises:
            TimeoutError: nothing came for so long.
        """
        self._socket.settimeout(timeout_s)
        line = self._file.readline()
        return msgspec.json.decode(line, type=Done) if line else None

    def close(self) -> None:
        self._file.close()
        self._socket.close()
