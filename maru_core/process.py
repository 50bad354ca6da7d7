"""Who a process is, so that a server on the same machine can tell a dead client from a silent one.

A pid alone says little: it is reused, and it means nothing in another pid namespace. Pid, start time, pid namespace
and boot id together name one process for ever. What cannot be established is never taken for death.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from pathlib import Path
from typing import Final

_PID_MAX: Final = 1 << 22  # Linux's largest pid; what is beyond it was never one


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process on one boot of one machine. The fields are those of :class:`maru_core.protocol.Hello`."""

    pid: int
    pid_start: int
    pid_ns: str
    boot_id: str
    host: str

    @classmethod
    def current(cls) -> ProcessIdentity:
        """The calling process. Fields that this machine does not show are 0 or ``""``, and never match anything."""
        status = _status(os.getpid())
        return cls(
            pid=os.getpid(),
            pid_start=status.start if status else 0,
            pid_ns=_pid_namespace(),
            boot_id=_boot_id(),
            host=socket.gethostname(),
        )

    def is_dead_here(self) -> bool:
        """True only if it is certain that this process runs no more and writes no more.

        That takes the same boot and the same pid namespace as the caller's, and either no process of that pid, or
        one that started at another time, or one that has ended and waits to be reaped.
        """
        if not self.boot_id or not self.pid_ns or self.boot_id != _boot_id() or self.pid_ns != _pid_namespace():
            return False
        if not 0 < self.pid <= _PID_MAX or not self.pid_start:
            return False
        try:
            # /proc may hide other users' processes (hidepid); the signal tells what /proc does not.
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        status = _status(self.pid)
        if status is None:
            return False
        # A zombie whose other threads still run can still write: only the last thread's end is the process's.
        return status.start != self.pid_start or (status.state in "ZX" and status.threads <= 1)


@dataclasses.dataclass(frozen=True, slots=True)
class _Status:
    state: str
    threads: int
    start: int  # clock ticks after boot


def _status(pid: int) -> _Status | None:
    """State, number of threads and start time from ``/proc/PID/stat``; None where it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
        # The second field is the command's name in parentheses, and may itself hold spaces and parentheses.
        fields = text[text.rindex(b")") + 2 :].split()
        return _Status(state=fields[0].decode(), threads=int(fields[17]), start=int(fields[19]))
    except (OSError, ValueError, IndexError):
        return None


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
