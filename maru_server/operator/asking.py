"""Which server is meant, and a session with it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from maru_core.embedded import Starter
from maru_core.errors import ConfigError, ServerError, ServerUnavailableError
from maru_core.keys import ClientKeys
from maru_core.protocol import HASH_BYTES, NO_SLOT, ErrorCode
from maru_core.session import Session
from maru_core.settings import Settings
from maru_server.views import LIMIT_MAX

#: Time limit of one call, seconds: a person waits longer than an engine.
DEFAULT_TIMEOUT_S: Final = 5.0
#: Fewest hex digits of a page hash that may stand for it.
PREFIX_MIN: Final = 6


@dataclass(frozen=True, slots=True)
class Target:
    """What all commands are given, after the environment had its say."""

    endpoint: str
    keys: ClientKeys | None
    timeout_s: float
    settings: Settings

    @classmethod
    def find(
        cls, server: str | None, client_key: str | None, server_key: str | None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Target:
        """The server that is named, or that the environment names, or else the embedded one if it is there.

        Raises:
            ConfigError: none is named and there is no embedded one, or a value cannot be used.
        """
        settings = Settings.from_environment()
        keys = ClientKeys.find(settings, client_key, server_key)
        endpoint = server or settings.server
        if endpoint is None:
            starter = Starter(settings=settings)
            if not starter.socket.exists():
                raise ConfigError(
                    f"no server is named, and there is no embedded one ({starter.socket} does not exist): "
                    "give --server ipc:///path or tcp://host:port, or set MARU_SERVER"
                )
            endpoint = starter.endpoint
        return cls(endpoint, keys, timeout_s, settings)

    def session(self, name: str) -> Session:
        """A session that people see as ``maru NAME``; the caller closes it."""
        if self.keys is None:
            return Session(self.endpoint, name=f"maru {name}", timeout_s=self.timeout_s)
        return Session(self.endpoint, name=f"maru {name}", timeout_s=self.timeout_s, keys=self.keys)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What a session would log, a command says itself."""
    log = logging.getLogger("maru")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


@contextlib.contextmanager
def asking(target: Target, name: str) -> Iterator[Session]:
    """A session for one command."""
    session = target.session(name)
    try:
        with quiet():
            yield session
    except ServerError as error:
        if error.code == ErrorCode.FORBIDDEN:
            raise ServerError(
                f"{error}: use the key of an operator (--client-key or MARU_CLIENT_KEY)", error.code
            ) from error
        raise
    finally:
        session.close()


def operator_stats(session: Session) -> dict[str, Any]:
    """The server's figures.

    Raises:
        ConfigError: it does not show them to the key that was given.
    """
    stats: dict[str, Any] = session.stats()
    if "pages" not in stats:
        raise ConfigError(
            f"the server at {session.endpoint} shows its figures to operators only: give an operator's key "
            "(--client-key or MARU_CLIENT_KEY)"
        )
    return stats


def check_namespace(session: Session, number: int | None) -> None:
    """Raises ConfigError where a namespace is named that the server does not know."""
    if number is not None and number not in {
        row["namespace"] for row in session.inspect("namespaces", limit=LIMIT_MAX)
    }:
        raise ConfigError(f"namespace {number} is not known: `maru namespaces` lists those that are")


def find_page(session: Session, text: str, number: int | None) -> tuple[int, bytes]:
    """The namespace and the hash of the page that a person means by ``text``.

    Args:
        text: all 64 hex digits, or so many of the first ones that they name one of those that ``maru tree`` and
            ``maru pins`` show.
    Raises:
        ConfigError: not a hash, or no page, or more than one.
    """
    digits = text.lower()
    if not PREFIX_MIN <= len(digits) <= 2 * HASH_BYTES or set(digits) - set("0123456789abcdef"):
        raise ConfigError(
            f"{text!r} is not a page hash: give 64 hex digits, or {PREFIX_MIN} or more of the first ones, as `maru tree` shows them"
        )
    check_namespace(session, number)
    if len(digits) == 2 * HASH_BYTES:
        found = {(holder, bytes.fromhex(digits)) for holder in _holders(session, bytes.fromhex(digits), number)}
    else:
        found = set(_shown(session, digits, number))
    if not found:
        where = "the server" if number is None else f"namespace {number}"
        raise ConfigError(
            f"{where} has no page {text}: "
            + (
                "it may be gone"
                if len(digits) == 2 * HASH_BYTES
                else "give all 64 digits, or see `maru tree --limit 4096`"
            )
        )
    if len(found) > 1:
        raise ConfigError(
            f"{text} names {len(found)} pages (namespaces {', '.join(sorted({str(n) for n, _ in found}))}): "
            "give more digits, or --namespace"
        )
    return found.pop()


def _holders(session: Session, page: bytes, number: int | None) -> list[int]:
    holders = []
    for row in session.inspect("namespaces", number, LIMIT_MAX):
        for component in row["components"]:
            located = session.match(row["namespace"], [component], 0, page, sparse=True)
            if located.slots != NO_SLOT.to_bytes(4, "little"):
                holders.append(row["namespace"])
                break
    return holders


def _shown(session: Session, digits: str, number: int | None) -> Iterator[tuple[int, bytes]]:
    rows: list[dict[str, Any]] = session.inspect("tree", number, LIMIT_MAX)
    for row in rows:
        for key in ("first", "last"):
            if row[key] and row[key].startswith(digits):
                yield row["namespace"], bytes.fromhex(row[key])
    for row in session.inspect("pins", number, LIMIT_MAX):
        if row["page"].startswith(digits):
            yield row["namespace"], bytes.fromhex(row["page"])


def unavailable_is_unusable(error: ServerUnavailableError) -> str:
    """The one line for a server that does not answer."""
    return f"{error}; `maru doctor` looks further"
