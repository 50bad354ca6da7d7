"""The embedded server: one ``maru-server`` for this user and machine, started by whoever comes first.

With no server named, an engine process calls :meth:`Starter.ensure`. Under a start lock it looks whether a server holds
the pool; if not, it sweeps what killed processes left behind and starts one, detached, that ends by itself a while after
its last client and takes its pool and socket with it. If the server is killed, the next call starts another on the same
pool, and nothing that was stored is lost.

Who holds what: ``start.lock`` (a file lock) is held by one starting process at a time, which removes it; the pool file's lock is held by
the server as long as it lives, so whether a server lives is never guessed from a pid. Clients hold a mark of another kind
on the pool that they map (:func:`maru_core.pool.backing.is_used`): nobody sweeps it while they wait for the next server.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import select
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from maru_core.errors import ConfigError, MaruError, ServerUnavailableError
from maru_core.pool import numa, parse_pool_uri
from maru_core.pool.backing import is_used
from maru_core.settings import Settings

log = logging.getLogger("maru.embedded")

POOL_PREFIX = "maru-embedded"
START_TIMEOUT_S = 30.0
MIN_POOL_BYTES = 256 << 20
MAX_POOL_BYTES = 64 << 30
#: Linux's limit for the path of a Unix socket (108 with the closing NUL).
SOCKET_PATH_MAX = 107

#: In /dev/shm anyone may have put anything under a pool's name: never wait in open(), never follow a link.
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

# The server must not be the engine's child: engines kill their whole process tree when they end.
_DETACH = "import subprocess, sys; subprocess.Popen(sys.argv[2:], start_new_session=True, pass_fds=[int(sys.argv[1])])"


class StartFailedError(ServerUnavailableError):
    """The embedded server was started and ended at once, more than once: waiting will not help."""


class Starter:
    """Finds or starts the embedded server. Holds nothing between calls; safe from several threads and processes."""

    def __init__(self, *, pool_size: str | None = None, settings: Settings | None = None) -> None:
        self._settings = settings or Settings.from_environment()
        self._pool_size = pool_size or self._settings.pool_size
        self.directory = self._settings.runtime_dir
        self.socket = self.directory / "server.sock"
        self.endpoint = f"ipc://{self.socket}"
        uid = os.getuid()
        # One pool per runtime directory: tests and containers with their own do not meet. Containers may share /dev/shm
        # and yet have each a /tmp of its own: the same path is another directory there.
        where = hashlib.sha256(b"%d:%s" % (_file_system(self.directory), os.fsencode(self.directory))).hexdigest()[:12]
        self.pool_name = f"{POOL_PREFIX}-{uid}-{where}"
        if len(os.fsencode(self.socket)) > SOCKET_PATH_MAX:
            raise ConfigError(
                f"the socket path {self.socket} is longer than {SOCKET_PATH_MAX} bytes: set MARU_RUNTIME_DIR to a shorter directory"
            )

    def ensure(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """The endpoint of a server that lives, started if there was none.

        Raises:
            ConfigError: the runtime directory or the pool size cannot be used.
            StartFailedError: it ended at its start; the message has its last words.
            ServerUnavailableError: it did not come up within ``timeout_s`` seconds.
        """
        deadline = time.monotonic() + timeout_s
        self._make_directory()
        try:
            with self._start_lock(deadline):
                if not _is_served(self._pool_path):
                    self._sweep()
                    self._start_on_what_is_left(deadline)
        except OSError as error:
            raise ServerUnavailableError(f"the embedded server could not be started: {error}") from error
        return self.endpoint

    # ------------------------------------------------------------ inside

    @property
    def _pool_path(self) -> Path:
        return parse_pool_uri(f"shm://{self.pool_name}").path

    def _make_directory(self) -> None:
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.directory.lstat()
        except OSError as error:
            raise ConfigError(
                f"the runtime directory {self.directory} cannot be made ({error.strerror}): set MARU_RUNTIME_DIR to one that can"
            ) from error
        # In a shared /tmp somebody else may have been there first: whoever owns the socket sees every request.
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise ConfigError(
                f"the runtime directory {self.directory} is not a directory that only uid {os.getuid()} can write: "
                "remove it, or set MARU_RUNTIME_DIR to another"
            )

    @contextlib.contextmanager
    def _start_lock(self, deadline: float) -> Iterator[None]:
        path = self.directory / "start.lock"
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                while not _try_lock(descriptor):
                    if time.monotonic() > deadline:
                        raise ServerUnavailableError(
                            f"another process has been starting the embedded server for long ({path} is held)"
                        )
                    time.sleep(0.02)
                # Whoever held it has removed it, most likely: only the file that the path names is the lock.
                if not _is_at(descriptor, path):
                    continue
                try:
                    yield
                finally:
                    # Nobody else removes it while it is held, so it is still ours; whoever waits for it looks again.
                    with contextlib.suppress(OSError):
                        path.unlink()
                return
            finally:
                _let_go(descriptor)

    def _sweep(self) -> None:
        """Remove what killed servers of this user left: the stale socket, and pools that no server serves.

        Our own pool stays: the new server finds everything in it again. So does another that clients still map: one of
        them starts a server on it soon.
        """
        with contextlib.suppress(FileNotFoundError):
            self.socket.unlink()
        for path in self._pool_path.parent.glob(f"{POOL_PREFIX}-{os.getuid()}-*"):
            if path != self._pool_path and _remove_if_unserved(path, unless_used=True):
                log.info("swept the stale pool %s", path)

    def _start_on_what_is_left(self, deadline: float) -> None:
        """Start a server on the pool that a killed one left, if there is one."""
        try:
            self._start(deadline)
            return
        except StartFailedError as error:
            if _is_served(self._pool_path):
                # It was turned away by one that was on its way when the process that had started it was killed.
                return
            # Perhaps it was killed too, and nothing is wrong with the pool.
            log.warning("%s: trying again", error)
        try:
            self._start(deadline)
            return
        except StartFailedError:
            # A pool that is damaged, or of another version, must not stand in the way for ever: it is only a cache, and
            # this one is nobody else's.
            if not _remove_if_unserved(self._pool_path):
                raise
        log.warning("the pool %s could not be taken up again: starting with a new one", self._pool_path)
        self._start(deadline)

    def _size(self) -> int:
        """Bytes of the pool to serve. What a killed server left is taken up again unless another size is asked for, and
        no client has it mapped."""
        left = self._pool_path.stat().st_size if self._pool_path.exists() else 0
        if self._pool_size is not None:
            size = parse_pool_uri(f"shm://{self.pool_name}?size={self._pool_size}").size
            assert size is not None
            if left in (0, size) or _remove_if_unserved(self._pool_path, unless_used=True):
                return size
            log.warning("the pool %s is in use: it keeps its %d MiB", self._pool_path, left >> 20)
            return left
        if left:
            return left
        shared = os.statvfs(self._pool_path.parent)
        free = min(shared.f_bavail * shared.f_frsize, _available_memory())
        if self._settings.pool_numa is not None:
            free = min(free, numa.node_bytes(self._settings.pool_numa) or free)
        size = min(max(free // 4, MIN_POOL_BYTES), MAX_POOL_BYTES)
        if size > free:
            raise ConfigError(
                f"{self._pool_path.parent} has {free >> 20} MiB to spare and the smallest pool is {size >> 20} MiB: "
                "free some, or set pool_size (or MARU_POOL_SIZE)"
            )
        return size - size % (64 << 20)

    def _start(self, deadline: float) -> None:
        size = self._size()
        node = self._settings.pool_numa
        uri = f"shm://{self.pool_name}" + ("" if node is None else f"?numa={node}")
        read_end, write_end = os.pipe()
        try:
            command = [
                sys.executable, "-m", "maru_server",
                "--pool", uri, "--size", str(size), "--bind", self.endpoint,
                "--idle-exit", str(self._settings.idle_exit_s), "--unlink-on-exit",
                "--unlink-log", str(self.directory / "server.log"), "--ready-fd", str(write_end),
            ]  # fmt: skip
            with open(self.directory / "server.log", "ab", buffering=0) as output:
                if output.tell() > 1 << 20:
                    output.truncate(0)
                starter = subprocess.run(
                    [sys.executable, "-c", _DETACH, str(write_end), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=self.directory,
                    pass_fds=[write_end],
                    timeout=max(1.0, deadline - time.monotonic()),
                    check=False,
                )
            os.close(write_end)
            write_end = -1
            if starter.returncode:
                raise ServerUnavailableError(f"the embedded server could not be started: {self._last_words()}")
            self._await_ready(read_end, deadline)
        except subprocess.TimeoutExpired as error:
            raise ServerUnavailableError(
                "starting the embedded server took too long: the machine is overloaded"
            ) from error
        finally:
            os.close(read_end)
            if write_end >= 0:
                os.close(write_end)

    def _await_ready(self, read_end: int, deadline: float) -> None:
        line = b""
        while b"\n" not in line:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([read_end], [], [], left)[0]:
                raise ServerUnavailableError(f"the embedded server was not ready in time: {self._last_words()}")
            data = os.read(read_end, 4096)
            if not data:
                raise StartFailedError(f"the embedded server ended at its start: {self._last_words()}")
            line += data
        log.info("started the embedded server: %s", json.loads(line))

    def _last_words(self) -> str:
        try:
            lines = (self.directory / "server.log").read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return f"{lines[-1] if lines else 'it said nothing'} (log: {self.directory / 'server.log'})"


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the path names the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat(follow_symlinks=False))
    except OSError:
        return False


def _is_served(path: Path) -> bool:
    """Whether a living server holds the pool's lock."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _OPEN)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise MaruError(
            f"the pool {path} cannot be opened ({error.strerror}): remove it if no server uses it"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        _let_go(descriptor)
    return False


def _remove_if_unserved(path: Path, *, unless_used: bool = False) -> bool:
    """Unlink a pool that no server has locked (and, with ``unless_used``, no client maps); the lock is held while it goes, so that no server can take it up meanwhile."""
    try:
        descriptor = os.open(path, os.O_RDWR | _OPEN)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino == path.stat().st_ino and not (unless_used and is_used(descriptor)):
            path.unlink()
            return True
    except OSError:
        pass
    finally:
        _let_go(descriptor)
    return False


def _let_go(descriptor: int) -> None:
    """Unlock and close. A child that another thread has forked meanwhile holds the descriptor too: closed here alone, it
    would keep the lock for as long as that child lives."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _file_system(directory: Path) -> int:
    """Device number of the file system that the directory is on, or will be made on."""
    for place in (directory, *directory.parents):
        with contextlib.suppress(OSError):
            return place.stat().st_dev
    return 0


def _available_memory() -> int:
    """Bytes that the machine can still give out, as the kernel estimates it."""
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return MIN_POOL_BYTES
