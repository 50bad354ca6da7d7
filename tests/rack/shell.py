"""The rack, and a shell in one of its machines: ``python -m tests.rack.shell GUEST``. All of it ends with the shell."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import socket
import sys
import tempfile
import termios
import time
import tty
from pathlib import Path

from tests.rack.machine import ROOT, Guest
from tests.rack.rack import MACHINES, Rack

LEAVE = b"\x1d"  # Ctrl-]


def talk(line: socket.socket) -> None:
    """Carry keys there and characters back, until the shell says that it has ended, or Ctrl-]."""
    own = sys.stdin.fileno()
    before = termios.tcgetattr(own) if os.isatty(own) else None
    if before is not None:
        tty.setraw(own)
    try:
        sources: list[object] = [own, line]
        while True:
            ready, _, _ = select.select(sources, [], [])
            if line in ready:
                said = line.recv(65536)
                if not said or b"\0" in said:
                    return
                os.write(sys.stdout.fileno(), said)
            if own in ready:
                keys = os.read(own, 4096)
                if LEAVE in keys:
                    return
                line.sendall(keys or b"exit\n")
                if not keys:
                    sources.remove(own)  # the shell ends by itself
    finally:
        if before is not None:
            termios.tcsetattr(own, termios.TCSADRAIN, before)


def begin_shell(guest: Guest, rack: Rack) -> None:
    variables = {**rack.environ, "TERM": os.environ.get("TERM", "linux"), "PS1": rf"{guest.name}:\w# "}
    exports = "; ".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items())
    script = f"{exports}; export PATH={ROOT}/.venv/bin:$PATH; cd {ROOT}; bash --norc -i; printf '\\0'"
    # A command leads its session: the terminal that it opens becomes its own.
    guest.start(f"exec bash -c {shlex.quote(script)} <>/dev/hvc0 >&0 2>&1")


def main(name: str) -> int:
    if name not in MACHINES:
        print(f"there is no machine {name}: name one of {', '.join(MACHINES)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="maru-rack-") as folder, contextlib.closing(Rack()) as rack:
        path = Path(folder) / "shell"
        began = time.monotonic()
        print(f"starting the machines; their logs are in {rack.logs}", file=sys.stderr)
        rack.boot(
            {
                name: (
                    "-chardev",
                    f"socket,id=shell,path={path},server=on,wait=off",
                    "-device",
                    "virtconsole,chardev=shell",
                )
            }
        )
        print(f"ready after {time.monotonic() - began:.0f} s", file=sys.stderr)
        for guest in rack.guests.values():
            memory = f", the shared memory is {rack.shared[guest.name]}" if guest.name in rack.shared else ""
            print(f"  {guest.name}: {guest.address}, rxe0{memory}", file=sys.stderr)
        print(f"a shell in {name}; Ctrl-] or exit ends everything", file=sys.stderr)
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(path))
            begin_shell(rack.guests[name], rack)
            talk(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
