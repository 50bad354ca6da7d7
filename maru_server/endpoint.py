"""Where a server listens: what may be bound, and binding it so that only those may reach it who should."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket as stdlib_socket
import stat
import time
from pathlib import Path
from typing import Final

import zmq

from maru_core.errors import ConfigError
from maru_core.keys import is_loopback

#: Linux's limit for the path of a Unix socket (108 with the closing NUL).
SOCKET_PATH_MAX: Final = 107
#: Owner only: who can connect can read and delete whatever is cached.
_SOCKET_UMASK: Final = 0o177

_EXAMPLES: Final = "give ipc:///path/to/socket or tcp://127.0.0.1:5757"


def check_endpoint(bind: str, *, insecure: bool, keys: bool = False) -> None:
    """Refuse what cannot be bound, and what would let other machines in without being asked to.

    Args:
        insecure: the operator wants to be reached by whoever can.
        keys: only clients whose keys are listed can connect.

    Raises:
        ConfigError: with the value and the cure.
    """
    if bind.startswith("ipc://"):
        path = bind.removeprefix("ipc://")
        if not path.startswith("/"):
            # Also abstract sockets (ipc://@name), which have no owner and no permissions.
            raise ConfigError(f"--bind is {bind!r}: give the absolute path of a socket file, ipc:///path/to/socket")
        if len(os.fsencode(path)) > SOCKET_PATH_MAX:
            raise ConfigError(
                f"--bind is {bind!r}: its path is longer than {SOCKET_PATH_MAX} bytes, give a shorter one"
            )
    elif bind.startswith("tcp://"):
        host, _, port = bind.removeprefix("tcp://").rpartition(":")
        if not host or not (port == "*" or (port.isascii() and port.isdigit() and int(port) < 65536)):
            raise ConfigError(f"--bind is {bind!r}: {_EXAMPLES}")
        if not insecure and not keys and not is_loopback(host):
            raise ConfigError(
                f"--bind is {bind!r}, which other machines can reach, and there are no keys: whoever connects can read and "
                "delete what is cached. Make keys (maru-server keygen --out DIR, then the same with --name for each client) and "
                "give --keys DIR/server.key --clients DIR/clients.toml; or bind to tcp://127.0.0.1 or ipc://; or give --insecure "
                "if the network is yours alone"
            )
    else:
        raise ConfigError(f"--bind is {bind!r}: {_EXAMPLES}")


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """What was bound. ``name`` is the endpoint as clients name it (with the port that a wildcard port became)."""

    name: str
    path: Path | None = None
    inode: int = 0

    def is_lost(self) -> bool:
        """Whether the socket file is gone, so that no new client finds the server: those who clean /tmp remove it."""
        return self.path is not None and not os.path.lexists(self.path)

    def remove(self) -> None:
        """Remove the socket file, which the library leaves behind, unless another server has put its own there."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                if self.path.lstat().st_ino == self.inode:
                    self.path.unlink()


class _BusyError(ConfigError):
    """Somebody else is there now."""


def bind(router: zmq.Socket[bytes], endpoint: str, patience_s: float = 0.0) -> Bound:
    """Bind a checked endpoint.

    Args:
        patience_s: for how long it is tried again where another holds it, seconds. A server that is killed lets go of its pool,
            and of its socket a moment later.
    Raises:
        ConfigError: it cannot be bound; the message says why and what to do.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return _bind(router, endpoint)
        except _BusyError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.05)


def _bind(router: zmq.Socket[bytes], endpoint: str) -> Bound:
    try:
        if endpoint.startswith("ipc://"):
            path = Path(endpoint.removeprefix("ipc://"))
            _clear_way(path)
            before = os.umask(_SOCKET_UMASK)
            try:
                router.bind(endpoint)
            finally:
                os.umask(before)
            return Bound(endpoint, path, path.lstat().st_ino)
        router.ipv6 = "[" in endpoint
        router.bind(endpoint)
    except zmq.ZMQError as error:
        raise _BusyError(
            f"--bind is {endpoint!r} and cannot be bound ({error.strerror}): is another server there? Give another endpoint"
        ) from error
    return Bound(router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"))


def _clear_way(path: Path) -> None:
    """Remove the socket file of a dead server; nothing else, since the library unlinks whatever it finds.

    Two servers of one pool never get here: the pool's lock has turned the second away. This is for servers of two pools.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"--bind is ipc://{path}: the directory {path.parent} is not there, make it first")
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f"--bind is ipc://{path}: there is something there that is not a socket, give another path")
    if _answers(path):
        raise _BusyError(f"--bind is ipc://{path}: another server listens there, stop it or give another path")
    path.unlink(missing_ok=True)


def _answers(path: Path) -> bool:
    with stdlib_socket.socket(stdlib_socket.AF_UNIX, stdlib_socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            # Not permitted, or its queue is full: somebody is there.
            return True
        return True
