"""Hosts without machines: network namespaces, joined by a switch whose cables can be pulled, throttled and counted.

Each host is a process that holds a network, a name, a view of ``/sys`` (where UCX looks for devices) and, unless it is a memory node,
a ``/dev/shm`` of its own, so that its programs have no way to the pool but the network. All of it is gone with those processes, and they
end with the tests, however these end. Needs root and iproute2.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from support import await_condition

_SETUP: Final = """set -e
hostname "$1"
mount -t sysfs sysfs /sys
[ "$2" = memory ] || mount -t tmpfs -o size=256m tmpfs /dev/shm
ip link set lo up
echo ready
exec sleep infinity
"""
#: The interface of every host.
NIC: Final = "eth0"
_TOOLS: Final = ("ip", "tc", "unshare", "nsenter", "setpriv", "hostname")


class Host:
    """A network of its own, and what runs there: see :class:`forked.ForkedProcess` (``host``) for how."""

    def __init__(self, name: str, *, memory: bool = False) -> None:
        """
        Args:
            memory: it has the pool's memory: the ``/dev/shm`` that the tests have.
        Raises:
            OSError: this machine does not let us.
        """
        self.name = name
        self.address = ""
        line = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--mount", "--uts", "sh", "-c", _SETUP, "sh"]
        self._holder = subprocess.Popen(
            [*line, name, "memory" if memory else "-"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.pid = self._holder.pid
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        if self._holder.stdout.readline() != "ready\n":
            raise OSError(f"no network namespace can be made here: {self._holder.stderr.read().strip()}")

    def run(self, *line: str) -> str:
        """A command of the system in this host's network; what it says."""
        inside = ["nsenter", f"--net=/proc/{self.pid}/ns/net", *line]
        return subprocess.run(inside, check=True, capture_output=True, text=True).stdout

    def say_load(self, load: float, directory: Path) -> None:
        """Have its programs find so many runnable processes, on average, in ``/proc/loadavg``."""
        told = directory / f"{self.name}-loadavg"
        told.write_text(f"{load:.2f} {load:.2f} {load:.2f} 1/100 1000\n")
        inside = ["nsenter", f"--mount=/proc/{self.pid}/ns/mnt", "mount", "--bind", str(told), "/proc/loadavg"]
        subprocess.run(inside, check=True, capture_output=True)

    def close(self) -> None:
        self._holder.kill()
        self._holder.communicate()


class Cable:
    """Between a host and the switch."""

    def __init__(self, switch: Host, host: Host, number: int) -> None:
        self.host = host
        self._switch = switch
        self._port = f"to-{host.name}"
        host.address = f"10.77.0.{number}"
        switch.run("ip", "link", "add", self._port, "type", "veth", "peer", "name", NIC, "netns", str(host.pid))
        switch.run("ip", "link", "set", self._port, "master", "switch", "up")
        host.run("ip", "address", "add", f"{host.address}/24", "dev", NIC)
        host.run("ip", "link", "set", NIC, "up")

    def pull(self) -> None:
        """Nothing passes any more; the host sees a port without carrier."""
        self._switch.run("ip", "link", "set", self._port, "down")

    def plug(self) -> None:
        self._switch.run("ip", "link", "set", self._port, "up")

    def received(self) -> int:
        """Bytes that have come to the host."""
        return self._counted("rx")

    def sent(self) -> int:
        """Bytes that the host has sent."""
        return self._counted("tx")

    def _counted(self, way: str) -> int:
        # As the switch's end counts: what came to the host has left it.
        shown = self.host.run("cat", "/proc/net/dev")
        columns = next(line.split(":")[1].split() for line in shown.splitlines() if line.strip().startswith(f"{NIC}:"))
        return int(columns[0 if way == "rx" else 8])

    def await_received(self, more: int, before: int) -> None:
        """Until so many bytes more have come to the host than ``before``."""
        await_condition(lambda: self.received() >= before + more, f"{self.host.name} receives {more} bytes", 60)

    # ------------------------------------------------------------ a worse network

    def throttle(self, megabytes: int, queue: str = "4mb") -> None:
        """What the host sends, at most so many MB a second; what finds no room in ``queue`` is lost."""
        self._shape("tbf", "rate", f"{8 * megabytes}mbit", "burst", "128kb", "limit", queue)

    def netem(self, *words: str) -> None:
        """Delay and loss of what the host sends, as tc-netem says it.

        Raises:
            subprocess.CalledProcessError: this kernel has no netem.
        """
        self._shape("netem", *words)

    def _shape(self, *words: str) -> None:
        self.host.run("tc", "qdisc", "replace", "dev", NIC, "root", *words)

    def free(self) -> None:
        """Neither of them any more."""
        subprocess.run(
            ["nsenter", f"--net=/proc/{self.host.pid}/ns/net", "tc", "qdisc", "del", "dev", NIC, "root"],
            check=False,
            capture_output=True,
        )

    def lost(self) -> int:
        """Packets that :meth:`throttle` or :meth:`netem` have dropped."""
        shown = self.host.run("tc", "-s", "qdisc", "show", "dev", NIC)
        return sum(int(count) for count in re.findall(r"dropped (\d+)", shown))


class Network:
    """A switch, and hosts plugged into it."""

    def __init__(self) -> None:
        self._hosts: list[Host] = []
        self._switch = self._made("switch")
        self._switch.run("ip", "link", "add", "switch", "type", "bridge", "forward_delay", "0")
        self._switch.run("ip", "link", "set", "switch", "up")

    def _made(self, name: str, *, memory: bool = False) -> Host:
        host = Host(name, memory=memory)
        self._hosts.append(host)
        return host

    def host(self, name: str, *, memory: bool = False) -> Cable:
        """Another host, as :class:`Host`, plugged in."""
        return Cable(self._switch, self._made(name, memory=memory), len(self._hosts))

    def close(self) -> None:
        for host in reversed(self._hosts):
            host.close()


def why_not() -> tuple[str, str]:
    """Why there can be no hosts here, and why no delays and losses between them; empty where there can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)} here (Debian: apt-get install iproute2)", "no hosts"
    if os.geteuid():
        return "network namespaces need root", "no hosts"
    try:
        with network() as made:
            cable = made.host("probe")
            try:
                cable.netem("delay", "1ms")
            except subprocess.CalledProcessError as error:
                return "", f"tc netem: {error.stderr.strip()}"
    except (OSError, subprocess.CalledProcessError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
        return f"this kernel does not let us: {said}".strip(), "no hosts"
    return "", ""


@contextmanager
def network() -> Iterator[Network]:
    made = Network()
    try:
        yield made
    finally:
        made.close()
