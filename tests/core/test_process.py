"""Whether a process is dead: only certainty counts."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys

import pytest

from maru_core.process import ProcessIdentity, _status
from tests.support import await_condition

PRINT = "from maru_core.process import ProcessIdentity as P; import dataclasses; print(dataclasses.astuple(P.current()), flush=True)"


def child(code: str = "import sys; sys.stdin.read()") -> tuple[subprocess.Popen[str], ProcessIdentity]:
    process = subprocess.Popen(
        [sys.executable, "-c", f"{PRINT}\n{code}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, ProcessIdentity(*eval(process.stdout.readline()))


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_the_current_process_is_alive_and_known() -> None:
    me = ProcessIdentity.current()
    assert me.pid == os.getpid()
    assert me.pid_start > 0
    assert me.pid_ns.startswith("pid:[")
    assert len(me.boot_id) == 36
    assert me.host
    assert me == ProcessIdentity.current()
    assert not me.is_dead_here()


def test_a_process_is_dead_only_after_its_end() -> None:
    process, identity = child()
    assert identity.pid == process.pid
    assert not identity.is_dead_here()
    end(process)
    assert identity.is_dead_here()


def test_a_zombie_is_dead() -> None:
    process, identity = child()
    os.kill(process.pid, signal.SIGKILL)
    # Nobody has reaped it: its pid is still taken.
    await_condition(lambda: (status := _status(process.pid)) is not None and status.state == "Z", "it is a zombie")
    assert identity.is_dead_here()
    end(process)


def test_a_stopped_process_is_not_dead() -> None:
    process, identity = child()
    os.kill(process.pid, signal.SIGSTOP)
    await_condition(lambda: (status := _status(process.pid)) is not None and status.state == "T", "it is stopped")
    assert not identity.is_dead_here()
    end(process)


THREAD_OUTLIVES_MAIN = """
import ctypes, sys, threading, time
threading.Thread(target=sys.stdin.read, daemon=True).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_whose_main_thread_alone_has_ended_is_not_dead() -> None:
    """The kernel shows it as a zombie, and its other threads still write."""
    process, identity = child(THREAD_OUTLIVES_MAIN)
    await_condition(
        lambda: (status := _status(process.pid)) is not None and status.state == "Z", "the leader has ended"
    )
    assert not identity.is_dead_here()
    end(process)


def test_a_reused_pid_is_another_process() -> None:
    me = ProcessIdentity.current()
    assert dataclasses.replace(me, pid_start=me.pid_start - 1).is_dead_here()


@pytest.mark.parametrize(
    "change",
    [
        {"boot_id": "00000000-0000-0000-0000-000000000000"},
        {"boot_id": ""},
        {"pid_ns": "pid:[1]"},
        {"pid_ns": ""},
        {"pid_start": 0},
        {"pid": 0},
        {"pid": -1},
        {"pid": 1 << 40},
        {"pid": 1 << 70},
    ],
)
def test_what_cannot_be_known_is_not_death(change: dict[str, object]) -> None:
    process, identity = child()
    end(process)
    assert identity.is_dead_here()
    assert not dataclasses.replace(identity, **change).is_dead_here()


def test_a_process_of_another_user_is_not_dead() -> None:
    stat = _status(1)
    assert stat is not None
    assert not dataclasses.replace(ProcessIdentity.current(), pid=1, pid_start=stat.start).is_dead_here()


RENAME = """
import sys
with open("/proc/self/comm", "w") as name:
    name.write("a) Z 0 (b")
print("renamed", flush=True)
sys.stdin.read()
"""


def test_a_command_name_with_spaces_and_parentheses_is_read() -> None:
    process, identity = child(RENAME)
    assert process.stdout is not None
    assert process.stdout.readline() == "renamed\n"
    assert not identity.is_dead_here()
    status = _status(process.pid)
    assert status is not None
    assert status.start == identity.pid_start
    end(process)
