"""Server processes that are forked off one that has everything imported: there in a tenth of the time that Python takes to
start. They are processes like any other, and end with this one, however it ends."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

forkserver = multiprocessing.get_context("forkserver")
#: What is imported before the first is forked: the server, what it imports later, and the clients that tests fork and kill.
forkserver.set_forkserver_preload(
    [
        "maru_server.cli",
        "maru_server.exposition",
        "maru_agent.cli",
        "typer._adapters",
        "pydantic.json_schema",
        "runpy",
        "tests.server.writers",
    ]
)

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x0002_0000, 0x0400_0000, 0x4000_0000


class ForkedProcess:
    """What :class:`subprocess.Popen` has, as far as tests use it.

    Args:
        program: what Python would be told to run: ``("-m", module)`` or ``(path,)``.
        arguments: of the program.
        output, errors: files to which it appends what it prints.
        ready_fd: it has this one too, and is told its number as ``--ready-fd``; closed here.
        environ: its variables; None: those that are set here now.
        host: process in whose network, mounts and host name it runs; None: in ours.
    """

    def __init__(
        self,
        program: Sequence[str],
        arguments: Sequence[str],
        output: Path,
        errors: Path | None = None,
        *,
        ready_fd: int | None = None,
        environ: dict[str, str] | None = None,
        host: int | None = None,
    ) -> None:
        for file in (output, errors or output):
            file.touch(0o600)  # there to be read at once
        ready = None if ready_fd is None else Connection(ready_fd, readable=False)
        environ = dict(os.environ if environ is None else environ)
        self._process = forkserver.Process(
            target=_run,
            args=(tuple(program), tuple(arguments), str(output), str(errors or output), ready, environ, host),
            daemon=True,
        )
        self._process.start()
        if ready is not None:
            ready.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired([f"pid {self.pid}"], timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def await_taken(pid: int, number: int) -> None:
    """After SIGSTOP was sent: until no thread of the process runs any more. One whose main thread finds no core goes on for a while
    after it was told to stop. Other signals are not waited for."""
    deadline = time.monotonic() + 60
    while number == signal.SIGSTOP and not _stopped(pid):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


def silence(process: Any) -> None:
    """SIGSTOP to a :class:`maru_bench.processes.ManagedProcess`: when this returns it does nothing any more."""
    process.signal(signal.SIGSTOP)
    await_taken(process.pid, signal.SIGSTOP)


def _stopped(pid: int) -> bool:
    states = set()
    for status in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            states.add(status.read_text().rpartition(")")[2].split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue  # a thread that has ended meanwhile
    return states <= {"T", "t", "Z", "X"}


def run_forked(
    program: Sequence[str], arguments: Sequence[str], environ: dict[str, str] | None = None, timeout_s: float = 180
) -> subprocess.CompletedProcess[str]:
    """A program to its end, as :func:`subprocess.run` with ``capture_output`` and ``text``."""
    with tempfile.TemporaryDirectory() as directory:
        out, err = Path(directory, "out"), Path(directory, "err")
        process = ForkedProcess(program, arguments, out, err, environ=environ)
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        return subprocess.CompletedProcess([*program, *arguments], code, out.read_text(), err.read_text())


def enter(host: int) -> None:
    """Be from now on in the network, mounts and host name of another process. Only while this one has a single thread."""
    directory = os.getcwd()
    process = os.pidfd_open(host)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(process, _CLONE_NEWNET | _CLONE_NEWNS | _CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), f"process {host} cannot be joined")
    os.close(process)
    os.chdir(directory)


def _run(
    program: tuple[str, ...],
    arguments: tuple[str, ...],
    output: str,
    errors: str,
    ready: Connection | None,
    environ: dict[str, str],
    host: int | None,
) -> None:
    # Whoever forked this one ends with the tests, and so does this one.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.clear()
    os.environ.update(environ)
    if host is not None:
        enter(host)
    for path, number in ((output, 1), (errors, 2)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(file, number)
        os.close(file)
    if ready is not None:
        fd = os.dup(ready.fileno())
        ready.close()
        arguments = (*arguments, "--ready-fd", str(fd))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    sys.argv = [program[-1], *arguments]
    if program[0] == "-m":
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program[0], run_name="__main__")
