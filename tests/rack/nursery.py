"""In a guest: a process that has everything imported, and forks one for each order. Python takes half a minute to start there.

`python nursery.py MODULE...` imports them, tells the host `nursery`, and reads numbers from its standard input. For each it runs
`/run/rack/NUMBER.json` (``[program, argument...]``, where a program is a module) as `guest.sh` runs commands: in a session of its own,
with the same files, pipe and messages.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import runpy
import signal
import sys
import traceback

PORT = 3  # to the host, from guest.sh


def tell(*words: object) -> None:
    os.write(PORT, (" ".join(map(str, words)) + "\n").encode())


def child(number: str) -> int:
    """Its exit status."""
    os.close(PORT)
    output = os.open(f"/run/rack/{number}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    given = os.open(f"/tmp/.in.{number}", os.O_RDWR)
    for file, to in ((given, 0), (output, 1), (output, 2)):
        os.dup2(file, to)
    os.close(given)
    os.close(output)
    for number_of in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number_of, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    with open(f"/run/rack/{number}.json") as file_of:
        sys.argv = json.load(file_of)
    status: object = 0
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if isinstance(status, str):
        print(status, file=sys.stderr, flush=True)
        return 1
    return int(status or 0)  # type: ignore[call-overload, no-any-return]


def tend(number: str) -> None:
    """In a process of its own: the child, and the account of it."""
    pipe = f"/tmp/.in.{number}"
    os.mkfifo(pipe)
    held = os.open(pipe, os.O_RDWR)  # what is said before somebody has it open would be lost
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(held)
        os._exit(child(number))
    with open(f"/tmp/.pid.{number}", "w") as file:
        file.write(f"{pid}\n")
    tell(number, "pid", pid)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    tell(number, "end", code if code >= 0 else 128 - code)


def main() -> None:
    for module in sys.argv[1:]:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # of those that tend
    tell("nursery")
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            tend(line.strip())
            os._exit(0)


if __name__ == "__main__":
    main()
