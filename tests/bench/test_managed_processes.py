"""Processes of an experiment end with it, whenever it is interrupted."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from support import await_condition

PROGRAM = """
import sys, time
from pathlib import Path
from maru_bench.processes import ManagedProcess
ManagedProcess("one", ["/bin/sh", "-c", f"sleep 600 & echo $! > {sys.argv[1]}; wait"], Path(sys.argv[1] + ".log"))
# Interrupted before it was kept.
while not (Path(sys.argv[1]).exists() and Path(sys.argv[1]).read_text().endswith("\\n")):
    time.sleep(0.01)
raise KeyboardInterrupt
"""


def test_what_was_started_and_not_kept_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    ended = subprocess.run([sys.executable, "-c", PROGRAM, str(pid)], capture_output=True, timeout=180, check=False)
    assert ended.returncode in (130, -signal.SIGINT), ended.stderr
    stat = Path("/proc", pid.read_text().strip(), "stat")

    def gone() -> bool:
        try:
            return stat.read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    await_condition(gone, "it is gone", 60)
