"""The one error hierarchy. Every message names the thing, the value and the cure.

Nothing here is ever raised into an engine's scheduler: the storage backends turn a :class:`MaruError`
into a miss or "not stored". Only start-up (attach, ``maru-server``) lets them through, so that a wrong
configuration is seen at once.
"""

from __future__ import annotations


class MaruError(Exception):
    """Base of all errors that Maru raises on purpose."""


class ConfigError(MaruError):
    """A setting, URI or extra-config key that cannot be used."""


class PoolError(MaruError):
    """A pool that cannot be opened, mapped, formatted or believed."""


class NotAPoolError(PoolError):
    """The memory holds something that is not a Maru pool (no magic); it was not touched."""


class PoolVersionError(PoolError):
    """The memory holds a Maru pool of another format version; it was not touched."""


class PoolDamagedError(PoolError):
    """A Maru pool whose superblock fails its checksum or contradicts itself."""


class PoolBusyError(PoolError):
    """Another server owns the pool's directory."""


class PoolTooSmallError(PoolError):
    """The pool cannot hold its own directory and one extent, or an object is larger than an extent."""


class ServerError(MaruError):
    """The metadata server answered with an error; ``code`` is one of :class:`maru_core.protocol.ErrorCode`."""

    def __init__(self, message: str, code: str = "internal") -> None:
        super().__init__(message)
        self.code = code


class ServerUnavailableError(MaruError):
    """No answer within the time limit, or the server is known to be away. The outcome of the call is unknown."""


class SessionLostError(ServerUnavailableError):
    """The server began another life (or forgot this client): namespaces and slots of the old session are no longer valid.

    The client has said Hello again already; open the namespace anew and ask again."""


class VersionMismatchError(MaruError):
    """Client and server speak different protocol versions."""


class ClosedError(MaruError):
    """The object was closed by its owner."""
