"""Virtual machines that share this machine's files, Python and, where wanted, memory: QEMU without KVM.

A guest's root is the host's, read-only, with what it writes in its own memory above; so a command runs in a guest as it would here.
Orders go over a serial port of virtio (`guest.sh`), what they print comes back in a folder that both see. Everything ends with the
process that started it, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.rack.wire import Switch

ROOT: Final = Path(__file__).resolve().parents[2]
HERE: Final = Path(__file__).resolve().parent
#: How long a guest may take to its first command, and a command, seconds: emulated, on machines that are busy.
BOOT_S: Final = 400.0
COMMAND_S: Final = 300.0
_PR_SET_PDEATHSIG: Final = 1
_libc: Final = ctypes.CDLL(None)


class GuestError(AssertionError):
    """A guest, or a command in one, did not do what it should."""


@dataclass(frozen=True)
class Dimm:
    """A file that a guest sees as persistent memory."""

    file: Path
    size: int


class Process:
    """A command that runs in a guest, in a session of its own."""

    def __init__(self, guest: Guest, number: int, command: str) -> None:
        self.guest = guest
        self.number = number
        self.command = command
        self.pid: int | None = None
        self.status: int | None = None

    @property
    def output(self) -> str:
        """What it has printed so far, both streams."""
        try:
            return (self.guest.share / f"{self.number}.out").read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def running(self) -> bool:
        return self.status is None

    def wait(self, timeout_s: float = COMMAND_S) -> int:
        """Its status.

        Raises:
            GuestError: it takes longer; it is killed then.
        """
        if not self.guest.until(lambda: self.status is not None, timeout_s):
            self.kill("KILL")
            raise GuestError(f"{self} has not ended in {timeout_s:g} s:\n{self.output}\n{self.guest.last_words()}")
        assert self.status is not None
        return self.status

    def kill(self, name: str) -> None:
        """Send a signal, by its name without SIG, to all of its session."""
        self._await_begun()
        self.guest.order(f"{self.number} kill {name}")

    def say(self, line: str) -> None:
        """A line for its standard input."""
        self._await_begun()
        self.guest.order(f"{self.number} in {line}")

    def _await_begun(self) -> None:
        if not self.guest.until(lambda: self.pid is not None, COMMAND_S):
            raise GuestError(f"{self} has not begun\n{self.guest.last_words()}")

    def await_output(self, text: str, timeout_s: float = COMMAND_S) -> str:
        """Wait until it has printed ``text``; all of its output.

        Raises:
            GuestError: it has not in time, or it ended without.
        """
        deadline = time.monotonic() + timeout_s
        while text not in (output := self.output):
            if not self.running() and text not in self.output:
                raise GuestError(f"{self} ended with {self.status} and did not say {text!r}:\n{self.output}")
            if time.monotonic() > deadline:
                raise GuestError(
                    f"{self} has not said {text!r} in {timeout_s:g} s:\n{output}\n{self.guest.last_words()}"
                )
            time.sleep(0.05)
        return output

    def __str__(self) -> str:
        return f"{self.guest.name}: {self.command}"


class Guest:
    """One machine.

    Args:
        image: folder of ``vmlinux`` and ``initramfs`` (tools/rack_env.sh).
        logs: folder that is kept: the console, commands, what they printed.
        modules: lists of tools/rack_image.py that are loaded at boot.
        memory: MiB of each NUMA node; all but the first have no CPU.
        options: more of QEMU's command line.
    """

    def __init__(
        self,
        name: str,
        image: Path,
        logs: Path,
        *,
        switch: Switch | None = None,
        address: int = 1,
        modules: tuple[str, ...] = (),
        dimms: tuple[Dimm, ...] = (),
        memory: tuple[int, ...] = (1536,),
        options: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.address = f"10.99.0.{address}"
        self.share = logs / name
        shutil.rmtree(self.share, ignore_errors=True)
        self.share.mkdir(parents=True)
        shutil.copy(HERE / "guest.sh", self.share / "guest.sh")
        self.console = logs / f"{name}.console"
        self.processes: list[Process] = []
        self._sockets = Path(tempfile.mkdtemp(prefix="maru-rack-"))
        self._changed = threading.Condition()
        self._told: set[str] = set()
        self._orders = threading.Lock()
        self._qmp: Any = None
        self._port: socket.socket | None = None
        line, pass_fds = self._command_line(image, switch, address, modules, dimms, memory)
        with (logs / f"{name}.qemu").open("wb") as output:
            self._qemu = subprocess.Popen(
                [*line, *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[end.fileno() for end in pass_fds],
                preexec_fn=functools.partial(_end_with, os.getpid()),
            )
        for end in pass_fds:
            end.close()

    def _command_line(
        self,
        image: Path,
        switch: Switch | None,
        address: int,
        modules: tuple[str, ...],
        dimms: tuple[Dimm, ...],
        memory: tuple[int, ...],
    ) -> tuple[list[str], list[socket.socket]]:
        # nokaslr: there is nothing to hide, and it takes time. The serial port is slow under emulation: only what matters. The checks
        # that are left out take a host that is busy for a machine that is broken.
        words = "console=ttyS0 loglevel=4 nokaslr mitigations=off panic=-1"
        words += " no_timer_check nowatchdog rcupdate.rcu_cpu_stall_suppress=1"
        words += f" rack_name={self.name} rack_modules={','.join(modules)}"
        line = ["qemu-system-x86_64", "-nodefaults", "-no-reboot", "-display", "none", "-accel", "tcg,thread=multi"]
        # maxcpus: with one CPU for ever QEMU does without the host's atomics, and guests that share memory lose updates.
        line += ["-cpu", "max", "-smp", "1,maxcpus=2", "-M", "pc,nvdimm=on", "-m", f"{sum(memory)}M,slots=8,maxmem=16G"]
        for node, size in enumerate(memory if len(memory) > 1 else ()):
            line += ["-object", f"memory-backend-ram,id=node{node},size={size}M"]
            line += ["-numa", f"node,nodeid={node},memdev=node{node}" + (",cpus=0-1" if node == 0 else "")]
        line += ["-kernel", str(image / "vmlinux"), "-initrd", str(image / "initramfs"), "-append", words]
        line += ["-serial", f"file:{self.console}", "-qmp", f"unix:{self._sockets}/qmp,server=on,wait=off"]
        line += [
            "-chardev",
            f"socket,id=port,path={self._sockets}/port,server=on,wait=off",
            "-device",
            "virtio-serial-pci",
        ]
        line += ["-device", "virtserialport,chardev=port,name=rack"]
        for tag, path, more in (("host", "/", ",readonly=on,multidevs=remap"), ("share", self.share, "")):
            line += ["-fsdev", f"local,id={tag},path={path},security_model=none{more}"]
            line += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
        for number, dimm in enumerate(dimms):
            line += [
                "-object",
                f"memory-backend-file,id=mem{number},share=on,mem-path={dimm.file},size={dimm.size},align=2M",
            ]
            line += ["-device", f"nvdimm,id=nv{number},memdev=mem{number}"]
        ends = []
        if switch is not None:
            ends.append(switch.plug(self.name))
            line += ["-netdev", f"socket,id=net,fd={ends[0].fileno()}"]
            line += ["-device", f"virtio-net-pci,netdev=net,host_mtu=9000,romfile=,mac=52:54:00:99:00:{address:02x}"]
        return line, ends

    # ------------------------------------------------------------ coming up

    def await_ready(self, timeout_s: float = BOOT_S) -> Guest:
        """Wait until it takes orders.

        Raises:
            GuestError: it does not, with the end of its console.
        """
        deadline = time.monotonic() + timeout_s
        while self._port is None:
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                port = socket.socket(socket.AF_UNIX)
                port.connect(str(self._sockets / "port"))
                self._port = port
                threading.Thread(target=self._listen, args=(port,), name=f"rack {self.name}", daemon=True).start()
                break
            self._alive(deadline)
            time.sleep(0.05)
        while not self.until(lambda: "ready" in self._told, 1.0):
            self._alive(deadline)
        return self

    def _alive(self, deadline: float) -> None:
        if self._qemu.poll() is not None:
            said = (self.console.parent / f"{self.name}.qemu").read_text(errors="replace")
            raise GuestError(f"{self.name}: QEMU ended with {self._qemu.returncode}: {said}\n{self.last_words()}")
        if time.monotonic() > deadline:
            raise GuestError(f"{self.name} does not come up:\n{self.last_words()}")

    def last_words(self) -> str:
        """The end of its console."""
        try:
            return f"console of {self.name}: ..." + self.console.read_text(errors="replace")[-3000:]
        except FileNotFoundError:
            return f"{self.name} has no console yet"

    def _listen(self, port: socket.socket) -> None:
        with port.makefile("r", encoding="utf-8", errors="replace") as lines, contextlib.suppress(OSError, ValueError):
            for line in lines:
                words = line.split()
                with self._changed:
                    if len(words) == 1:
                        self._told.add(words[0])
                    elif len(words) == 3:
                        process = self.processes[int(words[0])]
                        if words[1] == "pid":
                            process.pid = int(words[2])
                        else:
                            process.status = int(words[2])
                    self._changed.notify_all()

    def until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Whether ``condition`` became true of what the guest has told."""
        with self._changed:
            return self._changed.wait_for(condition, timeout_s)

    # ------------------------------------------------------------ commands

    def order(self, line: str) -> None:
        assert self._port is not None, "await_ready() first"
        with self._orders:
            self._port.sendall(line.encode() + b"\n")

    def start(self, command: str) -> Process:
        """Begin a command of the shell; `exec` makes its process the one that signals go to."""
        process = Process(self, len(self.processes), command)
        (self.share / f"{process.number}.sh").write_text(command + "\n")
        with self._changed:
            self.processes.append(process)
        self.order(f"{process.number} run")
        return process

    def begin_nursery(self, environ: dict[str, str], *modules: str) -> None:
        """Have these modules imported once and for all; see nursery.py. :meth:`await_nursery` waits for it."""
        words = [*(f"{name}={value}" for name, value in environ.items())]
        line = ["exec", "env", *words, sys.executable, str(HERE / "nursery.py"), *modules]
        (self.share / "nursery.sh").write_text(f"cd {shlex.quote(str(ROOT))}\n{shlex.join(line)}\n")
        self.order("0 nursery")

    def await_nursery(self, timeout_s: float = BOOT_S) -> None:
        if not self.until(lambda: "nursery" in self._told, timeout_s):
            said = (self.share / "nursery.out").read_text(errors="replace")
            raise GuestError(f"{self.name}: Python has not started:\n{said}\n{self.last_words()}")

    def fork(self, module: str, *arguments: str) -> Process:
        """`python -m module arguments`, off the nursery."""
        process = Process(self, len(self.processes), f"python -m {module} {' '.join(arguments)}")
        (self.share / f"{process.number}.json").write_text(json.dumps([module, *arguments]))
        with self._changed:
            self.processes.append(process)
        self.order(f"{process.number} fork")
        return process

    def run(self, command: str, timeout_s: float = COMMAND_S, *, status: int | None = 0) -> str:
        """A command to its end; what it printed.

        Args:
            status: that it must end with; None: whatever.
        Raises:
            GuestError: another status, or it takes too long.
        """
        process = self.start(command)
        ended = process.wait(timeout_s)
        if status is not None and ended != status:
            raise GuestError(f"{process} ended with {ended}, not {status}:\n{process.output}")
        return process.output

    # ------------------------------------------------------------ the machine itself

    def monitor(self, command: str, **arguments: Any) -> Any:
        """A command of QEMU's monitor, such as ``stop`` and ``cont``."""
        if self._qmp is None:
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(60)
            connection.connect(str(self._sockets / "qmp"))
            self._qmp = connection.makefile("rw")
            self._qmp.readline()  # its greeting
            self.monitor("qmp_capabilities")
        self._qmp.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
        self._qmp.flush()
        while "return" not in (answer := json.loads(self._qmp.readline())):
            assert "error" not in answer, f"{self.name}: {command}: {answer}"
        return answer["return"]

    def end(self) -> None:
        """Pull its plug."""
        if self._qemu.poll() is None:
            self._qemu.kill()
        self._qemu.wait(60)
        if self._port is not None:
            with contextlib.suppress(OSError):
                self._port.shutdown(socket.SHUT_RDWR)
            self._port.close()
        shutil.rmtree(self._sockets, ignore_errors=True)


def _end_with(parent: int) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
