"""A real etcd for one test: on free ports, with a folder of its own; it can be killed, stopped, and started again."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from maru_server.etcd import Etcd, EtcdError, EtcdURL
from tests.support import await_condition

ROOT = Path(__file__).parents[2]


def find_etcd() -> str:
    """The program; skips the test, saying why, where there is none and none can be fetched."""
    if os.environ.get("MARU_NO_ETCD"):
        pytest.skip("MARU_NO_ETCD is set")
    done = subprocess.run([ROOT / "tools" / "etcd.sh"], capture_output=True, text=True, timeout=280, check=False)
    if done.returncode:
        pytest.skip(f"there is no etcd: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else '?'}")
    return done.stdout.strip().splitlines()[-1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class EtcdServer:
    """One member, a cluster of its own."""

    def __init__(self, program: str, folder: Path, *options: str, scheme: str = "http") -> None:
        self.folder = folder
        self.port = free_port()
        #: Of the lock.
        self.key = "/maru/test"
        self.scheme = scheme
        peer = free_port()
        self.log = folder / "log"
        clients = f"{scheme}://127.0.0.1:{self.port}"
        self.command = [
            program, "--name", "one", "--data-dir", str(folder / "data"),
            "--listen-client-urls", clients, "--advertise-client-urls", clients,
            "--listen-peer-urls", f"http://127.0.0.1:{peer}", "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}",
            "--initial-cluster", f"one=http://127.0.0.1:{peer}", *options,
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None

    def url(self, query: str = "") -> str:
        return f"etcd{'s' if self.scheme == 'https' else ''}://127.0.0.1:{self.port}{self.key}{query}"

    def client(self, query: str = "") -> Etcd:
        return Etcd(EtcdURL.parse(self.url(query)), timeout_s=60)

    def start(self, query: str = "") -> EtcdServer:
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(self.command, stdout=output, stderr=output)
        client = self.client(query)

        def answers() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            try:
                client.get("x")
            except EtcdError:
                return False
            return True

        await_condition(answers, "etcd answers")
        client.close()
        return self

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(120)
        self.process = None

    def remove(self) -> None:
        if self.process is not None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class Wire:
    """What lies between a server and etcd: forwards bytes until it is cut, and then swallows them in silence."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.cut = threading.Event()
        self._sockets = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            self._sockets += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                if not self.cut.is_set():
                    sink.sendall(data)
            if not self.cut.is_set():
                sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        for one in self._sockets:
            one.close()
