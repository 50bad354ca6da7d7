"""Where a client finds its server: one endpoint, or several of which one is served at a time (a server and its standbys)."""

from __future__ import annotations

from typing import Final

from maru_core.errors import ConfigError

#: Each is asked for a sign of life while the server is away.
ENDPOINTS_MAX: Final = 16


def split_endpoints(text: str, what: str) -> tuple[str, ...]:
    """``"ipc:///a,tcp://b:1"`` as its parts, each once.

    Args:
        what: the name of the setting, for the error.
    Raises:
        ConfigError: with the setting, its value and the cure.
    """
    endpoints = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if len(endpoints) > ENDPOINTS_MAX:
        raise ConfigError(f"{what} is {text!r}: give at most {ENDPOINTS_MAX} endpoints")
    if not all(part.startswith(("ipc://", "tcp://")) for part in endpoints):
        raise ConfigError(
            f"{what} is {text!r}: give ipc:///path/to/socket or tcp://host:port, or several joined by commas where standbys "
            "may take over"
        )
    return endpoints
