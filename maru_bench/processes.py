"""Processes that an experiment starts: each with a log file, in a session of its own, dying with its parent.

A process is stopped by its own process group and no other.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from maru_core.errors import MaruError

_PR_SET_PDEATHSIG: Final = 1
_libc: Final = ctypes.CDLL(None)
#: How long what a stopped process started may take to clean up, seconds.
_CLEAN_UP_S: Final = 2.0


class ServerFailedError(MaruError):
    """A process that an experiment needs did not start, ended early, or gave no usable answer."""


#: What ends an experiment is put off while a process starts: it would be there, and nobody would know of it.
_INTERRUPTS: Final = (signal.SIGINT, signal.SIGTERM)


#: Those that nobody has stopped yet. An interrupt may come before whoever started one has kept it.
_started: Final[set[ManagedProcess]] = set()


@atexit.register
def _stop_the_rest() -> None:
    for process in list(_started):
        process.stop()


def _as_child() -> None:
    # Otherwise a SIGKILL of the experiment leaves servers of gigabytes behind.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


@contextlib.contextmanager
def _interrupts_put_off() -> Iterator[None]:
    """What would interrupt the block comes at its end. By handlers and not by a mask: a signal goes to any thread that lets it, and its
    handler to the main thread, which is the one here."""
    came: list[int] = []
    handlers = {
        number: handler
        for number in _INTERRUPTS
        if (handler := signal.getsignal(number)) not in (None, signal.SIG_IGN) and _in_main_thread()
    }
    for number in handlers:
        signal.signal(number, lambda which, _: came.append(which))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for which in came:
            signal.raise_signal(which)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _of_group(group: int) -> list[Path]:
    """``/proc`` directories of the group's processes that run (one that has ended and was not waited for does not)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, in_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(in_group) == group and state not in "ZX":
                found.append(path.parent)
    return found


class ManagedProcess:
    """One process with a log file, in a session (and so a process group) of its own.

    Start it from the main thread: the kernel's "parent died" signal follows the thread that started it.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start ``argv``.

        Args:
            name: what people call it.
            argv: program and arguments.
            log: file that gets stdout and stderr.
            env: variables added to this process's own.
            pass_fds: file descriptors the process inherits.

        Raises:
            ServerFailedError: the program does not exist or may not be run.
        """
        self.name = name
        self.argv = list(argv)
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with _interrupts_put_off():
                try:
                    with log.open("wb") as out:
                        self._popen = subprocess.Popen(
                            self.argv,
                            stdin=subprocess.DEVNULL,
                            stdout=out,
                            stderr=subprocess.STDOUT,
                            env={**os.environ, **(env or {})},
                            pass_fds=tuple(pass_fds),
                            start_new_session=True,
                            preexec_fn=_as_child,
                        )
                except OSError as error:
                    raise ServerFailedError(
                        f"cannot start {name} ({self.argv[0]}): {error.strerror or error}"
                    ) from error
                _started.add(self)
        except BaseException:
            if self in _started:  # interrupted, and nobody knows of it yet
                self.kill()
            raise

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def status(self) -> int | None:
        """Exit status (negative: the signal that ended it), None while it runs. Leaves the process unreaped, so that
        its number, and its group's, stay its own until :meth:`stop`."""
        if self._popen.returncode is not None:
            return self._popen.returncode
        ended = os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    @property
    def running(self) -> bool:
        return self.status is None

    def shared_memory(self, prefixes: tuple[str, ...]) -> set[Path]:
        """Files of ``/dev/shm`` that the process or what it started has mapped, whose names begin with one of ``prefixes``."""
        mapped = set()
        for process in _of_group(self._popen.pid):
            with contextlib.suppress(OSError):
                for line in (process / "maps").read_text().splitlines():
                    path = Path(line.partition("/")[1] + line.partition("/")[2])
                    if path.parent == Path("/dev/shm") and path.name.startswith(prefixes):
                        mapped.add(path)
        return mapped

    def tail(self, lines: int = 15) -> str:
        """The last lines of the log."""
        try:
            text = self.log.read_bytes()[-64 * 1024 :].decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def failure(self, what: str) -> ServerFailedError:
        """An error about this process that carries the end of its log."""
        state = "still runs" if self.status is None else f"ended with status {self.status}"
        return ServerFailedError(
            f"{self.name} {what} (it {state}); its log is {self.log} and ends with:\n{self.tail()}"
        )

    def signal(self, number: int) -> None:
        """Send a signal to the process and all that it started; nothing after :meth:`stop`."""
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, number)

    def await_end(self, timeout_s: float) -> bool:
        """Wait until the process has ended; False if it still runs after ``timeout_s`` seconds."""
        return self._await(lambda: not self.running, timeout_s)

    @staticmethod
    def _await(condition: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def kill(self) -> None:
        """SIGKILL at once, to the process and what it started."""
        self.stop(grace_s=0.0)

    def stop(self, grace_s: float = 10.0) -> int:
        """SIGTERM, and after ``grace_s`` seconds SIGKILL to what is left of its group. Can be repeated.

        Returns:
            The exit status of the process.
        """
        if grace_s > 0 and self.running:
            self.signal(signal.SIGTERM)
            self.await_end(grace_s)
            # What it started cleans up behind it: Python's resource tracker removes semaphores only if it is let live.
            self._await(lambda: not _of_group(self._popen.pid), _CLEAN_UP_S)
        self.signal(signal.SIGKILL)
        _started.discard(self)
        return self._popen.wait()


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """A new directory with a short path, for sockets and logs. Removed in the end, unless a process failed: then its
    log can be read."""
    directory = Path(tempfile.mkdtemp(prefix="maru-"))
    try:
        yield directory
    except ServerFailedError:
        raise
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    shutil.rmtree(directory, ignore_errors=True)


def python_path() -> str:
    """``PYTHONPATH`` with which this interpreter's children find the same ``maru_server`` as this process does."""
    here = str(Path(__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    return f"{here}{os.pathsep}{inherited}" if inherited else here
