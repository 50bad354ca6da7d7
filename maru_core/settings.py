"""The one place that reads Maru's environment variables.

===================  ==========================================================================================
variable             meaning
===================  ==========================================================================================
``MARU_SERVER``      metadata server to use: ``ipc:///path`` or ``tcp://host:port``, or several, joined by commas, of
                     which one serves at a time; unset: the embedded server
``MARU_POOL``        URI under which this host reaches the pool, where it is not the one that the server names
``MARU_RUNTIME_DIR`` directory for the embedded server's socket, lock and log; unset: ``/tmp/maru-UID``
``MARU_POOL_SIZE``   size of the embedded server's pool (``8G``); unset: a sensible part of the free memory
``MARU_POOL_NUMA``   NUMA node from which the embedded server's pool has its memory; unset: any
``MARU_IDLE_EXIT_S`` seconds after its last client at which the embedded server ends
``MARU_CLIENT_KEY``  path of this client's key file, for a server that has keys (see :mod:`maru_core.keys`)
``MARU_SERVER_KEY``  public key of that server, or path of the file that has it (``server.pub``)
``MARU_LOG_LEVEL``   level of Maru's own log lines: debug, info, warning or error
===================  ==========================================================================================

An engine's own configuration comes before these; a set variable that cannot be used is an error, never ignored.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from maru_core.endpoints import split_endpoints
from maru_core.errors import ConfigError

LOG_LEVELS: Final = ("debug", "info", "warning", "error")
DEFAULT_IDLE_EXIT_S: Final = 60.0

#: systemd's, not ours.
NOTIFY_SOCKET: Final = "NOTIFY_SOCKET"

_PREFIX: Final = "MARU_"
#: Variables of the scripts that set environments up; not ours to judge.
_TOOLS: Final = (
    "MARU_SGLANG_",
    "MARU_VENV",
    "MARU_ETCD",
    "MARU_NO_ETCD",
    "MARU_RACK",
    "MARU_NO_RACK",
    "MARU_NEED_RACK",
)
_KNOWN: Final = (
    "MARU_SERVER",
    "MARU_POOL",
    "MARU_RUNTIME_DIR",
    "MARU_POOL_SIZE",
    "MARU_POOL_NUMA",
    "MARU_IDLE_EXIT_S",
    "MARU_CLIENT_KEY",
    "MARU_SERVER_KEY",
    "MARU_LOG_LEVEL",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What the environment says. ``unknown`` names ``MARU_`` variables that mean nothing; see :meth:`warn_of_unknown`."""

    server: str | None
    pool: str | None
    runtime_dir: Path
    pool_size: str | None
    idle_exit_s: float
    log_level: str
    unknown: tuple[str, ...] = ()
    client_key: str | None = None
    server_key: str | None = None
    pool_numa: int | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the variables; an empty one counts as unset.

        Raises:
            ConfigError: a variable has a value that cannot be used. The message names variable, value and cure.
        """
        source = os.environ if environ is None else environ
        values = {key: source[key] for key in _KNOWN if source.get(key)}
        return cls(
            server=_endpoint(values.get("MARU_SERVER")),
            pool=values.get("MARU_POOL"),
            runtime_dir=_runtime_dir(values.get("MARU_RUNTIME_DIR")),
            pool_size=values.get("MARU_POOL_SIZE"),
            idle_exit_s=_seconds("MARU_IDLE_EXIT_S", values.get("MARU_IDLE_EXIT_S"), DEFAULT_IDLE_EXIT_S),
            log_level=_log_level(values.get("MARU_LOG_LEVEL")),
            unknown=tuple(sorted(key for key in source if _is_unknown(key))),
            client_key=values.get("MARU_CLIENT_KEY"),
            server_key=values.get("MARU_SERVER_KEY"),
            pool_numa=_node(values.get("MARU_POOL_NUMA")),
        )

    def warn_of_unknown(self, log: logging.Logger) -> None:
        """Whoever starts up says so: a misspelt variable is easily taken for one that works."""
        for name in self.unknown:
            near = difflib.get_close_matches(name, _KNOWN, n=1)
            log.warning("%s means nothing to Maru%s", name, f": did you mean {near[0]}?" if near else "")


def cache_folder() -> Path:
    """Where this user's programs keep what can be found out anew."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "maru"


def notify_socket() -> str:
    """Where whoever started this process (systemd) wants to be told that it is ready; empty if nobody does."""
    return os.environ.get(NOTIFY_SOCKET, "")


def _is_unknown(key: str) -> bool:
    return key.startswith(_PREFIX) and not key.startswith(_TOOLS) and key not in _KNOWN


def _endpoint(text: str | None) -> str | None:
    if text is not None:
        split_endpoints(text, "MARU_SERVER")
    return text


def _runtime_dir(text: str | None) -> Path:
    if text is None:
        # The same for every process of this user, however it was started (a login's XDG_RUNTIME_DIR is not), or
        # they would not find each other.
        return Path(f"/tmp/maru-{os.getuid()}")
    path = Path(text)
    if not path.is_absolute():
        raise ConfigError(f"MARU_RUNTIME_DIR is {text!r}: give an absolute path, so that all processes mean the same")
    return path


def _seconds(name: str, text: str | None, default: float) -> float:
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 86_400:
        raise ConfigError(f"{name} is {text!r}: give seconds above 0 and up to 86400 (default {default:g})")
    return value


def _node(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and int(text) < 1024):
        raise ConfigError(
            f"MARU_POOL_NUMA is {text!r}: give the number of a NUMA node, as numactl --hardware lists them"
        )
    return int(text)


def _log_level(text: str | None) -> str:
    if text is None:
        return "info"
    if text.lower() not in LOG_LEVELS:
        raise ConfigError(f"MARU_LOG_LEVEL is {text!r}: give one of {', '.join(LOG_LEVELS)}")
    return text.lower()
