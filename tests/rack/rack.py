"""The rack of the tests: its machines, and what runs in them.

========= ============================================================================================
alpha     has the shared memory as /dev/dax0.0
beta      has it under another name, and memory of its own: a device of 4 KiB pages, and a disk
gpu       has none of it, and reaches it over the network alone; has a NUMA node without CPUs
========= ============================================================================================
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.rack.machine import COMMAND_S, ROOT, Dimm, Guest, GuestError, Process
from tests.rack.pmem import DATA_OFFSET, format_namespace
from tests.rack.wire import Switch

SHARED_BYTES: Final = 256 << 20
OWN_BYTES: Final = 64 << 20
MACHINES: Final = ("alpha", "beta", "gpu")
#: Those that have the shared memory.
DATA_HOSTS: Final = ("alpha", "beta")
PORT: Final = 5757
_MODULES: Final = (
    "maru_server.cli",
    "maru_server.exposition",
    "typer._adapters",
    "maru_agent.cli",
    "tests.rack.calls",
    "nixl._api",
)


class Client:
    """`calls.py` in a guest."""

    def __init__(self, guest: Guest, process: Process) -> None:
        self.guest = guest
        self.process = process
        self._asked = 0

    def begin(self, what: str, **arguments: Any) -> int:
        """Ask for something; the number of the question."""
        self._asked += 1
        self.process.say(json.dumps({"number": self._asked, "do": what, "with": arguments}))
        return self._asked

    def answer(self, number: int, timeout_s: float = COMMAND_S) -> Any:
        """What came of it.

        Raises:
            GuestError: the call raised, or did not end in time.
        """
        said = self.process.await_output(f"\nanswer {number} ", timeout_s)
        while (found := re.search(rf"^answer {number} (.*)\n", said, re.MULTILINE)) is None:
            said = self.process.output  # the line's end is still on its way
        answer = json.loads(found[1])
        if "error" in answer:
            raise GuestError(f"{self.guest.name}: {answer['error']}")
        return answer["value"]

    def ask(self, what: str, **arguments: Any) -> Any:
        """As :meth:`begin` and :meth:`answer`."""
        return self.answer(self.begin(what, **arguments))


class Rack:
    """Args:
    logs: folder that is kept; None: MARU_RACK_LOGS, or `.rack/logs`.
    """

    def __init__(self, logs: Path | None = None) -> None:
        self.folder = Path(os.environ.get("MARU_RACK") or ROOT / ".rack")
        self.logs = (logs or Path(os.environ.get("MARU_RACK_LOGS") or self.folder / "logs")).absolute()
        self.switch = Switch()
        self.guests: dict[str, Guest] = {}
        #: The shared memory's device, by machine.
        self.shared: dict[str, str] = {}
        self._running: list[Process] = []
        self._keys = False

    def __getattr__(self, name: str) -> Guest:
        guests: dict[str, Guest] = self.__dict__.get("guests", {})
        if name not in guests:
            raise AttributeError(name)
        return guests[name]

    # ------------------------------------------------------------ machines

    def boot(self, options: dict[str, tuple[str, ...]] | None = None) -> None:
        """Start all machines and wait until each takes orders and has Python.

        Args:
            options: more for QEMU, by machine.
        """
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir(parents=True)
        memory = Path(tempfile.mkdtemp(prefix="maru-rack-", dir="/dev/shm"))
        try:
            shared = Dimm(format_namespace(memory / "shared", SHARED_BYTES, "devdax"), SHARED_BYTES)
            fine = Dimm(format_namespace(memory / "fine", OWN_BYTES, "devdax", 4096), OWN_BYTES)
            disk = Dimm(format_namespace(memory / "disk", OWN_BYTES, "fsdax"), OWN_BYTES)
            machines: dict[str, dict[str, Any]] = {
                "alpha": {"modules": ("net", "dax"), "dimms": (shared,)},
                "beta": {"modules": ("net", "dax", "fsdax"), "dimms": (fine, shared, disk)},
                "gpu": {"modules": ("net",), "memory": (1280, 256)},
            }
            for address, (name, machine) in enumerate(machines.items(), 1):
                self.guests[name] = Guest(
                    name, self.folder / "image", self.logs,
                    switch=self.switch, address=address, options=(options or {}).get(name, ()), **machine,
                )  # fmt: skip
            for guest in self.guests.values():
                guest.await_ready()
        finally:
            shutil.rmtree(memory)  # the machines have it open
        for name in DATA_HOSTS:
            self.shared[name] = self.device(self.guests[name], SHARED_BYTES)
        for guest in self.guests.values():
            guest.run(f"sh {ROOT}/tests/rack/network.sh {guest.address}")
            python = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT)}
            guest.begin_nursery({**python, **self.environ}, *_MODULES)
        for guest in self.guests.values():
            guest.await_nursery()

    @property
    def environ(self) -> dict[str, str]:
        """Nothing for UCX: what `--devices` says is enough. NIXL's libibverbs is told where the provider of soft-RoCE is."""
        return {"IBV_DRIVERS": str(self.folder / "verbs" / "librxe")}

    @staticmethod
    def device(guest: Guest, nbytes: int) -> str:
        """The dax device in a file of so many bytes."""
        found = guest.run(f"grep -lx {nbytes - DATA_OFFSET} /sys/bus/dax/devices/*/size").split()
        assert len(found) == 1, f"{guest.name}: {found}"
        return f"/dev/{found[0].split('/')[-2]}"

    def close(self) -> None:
        for guest in self.guests.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                guest.end()
        self.switch.close()

    # ------------------------------------------------------------ what runs in them

    def clear(self) -> None:
        """End all that was started; what is on the devices stays."""
        ending, self._running = self._running, []
        for process in ending:
            if process.running():
                process.kill("CONT")
                process.kill("KILL")
        for process in ending:
            process.wait()

    @contextlib.contextmanager
    def scene(self) -> Iterator[None]:
        """What is started in it ends with it."""
        before, self._running = self._running, []
        try:
            yield
        finally:
            try:
                self.clear()
            finally:
                self._running = before

    def start(self, guest: Guest, module: str, *arguments: str) -> Process:
        """`python -m module arguments`, ended with the test."""
        return self._kept(guest.fork(module, *arguments))

    def _kept(self, process: Process) -> Process:
        self._running.append(process)
        return process

    def keys(self) -> Path:
        """A folder in every guest with the server's keys and those of one operator, made by `maru-server keygen` in one."""
        folder = Path("/root/maru-keys")
        if not self._keys:
            alpha = self.guests["alpha"]
            for name in ((), ("--name", "node", "--operator")):
                assert alpha.fork("maru_server", "keygen", "--out", str(folder), *name).wait() == 0
            alpha.run(f"cp -a {folder} /run/rack/keys")
            for guest in self.guests.values():
                if guest is not alpha:
                    shutil.copytree(alpha.share / "keys", guest.share / "keys")
                    guest.run(f"cp -r /run/rack/keys {folder} && chmod 700 {folder} && chmod 600 {folder}/*")
            self._keys = True
        return folder

    def server(self, guest: Guest, *options: str, pool: str | None = None) -> Process:
        """`maru-server` of the shared memory, with keys, ready."""
        process = self.begin_server(guest, *options, pool=pool)
        process.await_output('"endpoint"')
        return process

    def begin_server(self, guest: Guest, *options: str, pool: str | None = None) -> Process:
        keys = self.keys()
        return self.start(
            guest, "maru_server",
            "--pool", pool or f"dax://{self.shared[guest.name]}", "--bind", self.endpoint(guest),
            "--keys", f"{keys}/server.key", "--clients", f"{keys}/clients.toml",
            "--lease", "30", "--ready-fd", "1", *options,
        )  # fmt: skip

    @staticmethod
    def endpoint(guest: Guest) -> str:
        return f"tcp://{guest.address}:{PORT}"

    def agent(self, guest: Guest, server: str, *options: str, pool: str | None = None) -> Process:
        """`maru-agent`, without waiting."""
        keys = self.keys()
        return self.start(
            guest, "maru_agent",
            "--server", server, "--pool", pool or f"dax://{self.shared[guest.name]}",
            "--client-key", f"{keys}/node.key", "--server-key", f"{keys}/server.pub", "--devices", "rxe0:1", *options,
        )  # fmt: skip

    def client(self, guest: Guest, server: str | None = None, **config: Any) -> Client:
        """A client; with ``server`` its store is open."""
        client = Client(guest, self.start(guest, "tests.rack.calls"))
        if server is not None:
            self.open(client, server, **config)
        return client

    def open(self, client: Client, server: str, **config: Any) -> str:
        """Open a client's store; how it reaches the pool."""
        keys = self.keys()
        if client.guest.name in DATA_HOSTS:
            config.setdefault("pool", f"dax://{self.shared[client.guest.name]}")
        else:
            config.setdefault("rdma_devices", "rxe0:1")
        how: str = client.ask(
            "open_store", server=server, client_key=f"{keys}/node.key", server_key=f"{keys}/server.pub", **config
        )
        return how

    # ------------------------------------------------------------ the network

    def packets(self, guest: Guest) -> dict[str, int]:
        """Counters of a guest's soft-RoCE."""
        said = guest.run(
            "cd /sys/class/infiniband/rxe0/ports/1/hw_counters && for name in *; do echo $name $(cat $name); done"
        )
        return {name: int(value) for name, value in (line.split() for line in said.splitlines())}


def everything(*steps: Any) -> None:
    """Run calls side by side; the first error of any."""
    errors: list[BaseException] = []

    def one(step: Any) -> None:
        try:
            step()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
