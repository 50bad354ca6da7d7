"""What engines of an experiment keep their KV in: Maru, or what is compared with it; started, counted, emptied, stopped.

Each says which settings of SGLang lead to it. Nothing here knows what an experiment does with it.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from maru_bench.processes import ManagedProcess
from maru_bench.servers import MaruServer, free_port
from maru_core.session import Session

_POLL_S: Final = 0.1
_MASTER_START_S: Final = 60.0
_MASTER_TRIES: Final = 4


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that engines wrote to a store and read from it since it was started."""

    stored_bytes: int
    loaded_bytes: int


class EngineStore(ABC):
    """One store, of which several engines are told."""

    #: ``--hicache-storage-backend``; None: SGLang's hierarchical cache has no storage.
    backend: str | None = None
    #: Whether :meth:`stop` does anything.
    can_stop = True

    def __init__(self) -> None:
        self.extra_config: dict[str, object] = {}
        self.env: dict[str, str] = {}

    def start(self) -> None:
        """Make it ready for engines.

        Raises:
            ServerFailedError: a process of it did not start.
        """
        return

    @abstractmethod
    def objects(self) -> int | None:
        """How many objects are stored now; None where it does not tell."""

    def moved(self) -> Moved | None:
        """By its own account; None where it has none."""
        return None

    @abstractmethod
    def clear(self) -> None:
        """Forget everything."""

    @abstractmethod
    def stop(self) -> None:
        """As a crash would."""

    @abstractmethod
    def close(self) -> None:
        """Stop it and leave nothing behind."""


class NoStore(EngineStore):
    """Engines with their own caches alone."""

    can_stop = False

    def objects(self) -> int | None:
        return None

    def clear(self) -> None:
        return None

    def stop(self) -> None:
        return None

    def close(self) -> None:
        return None


class MaruStore(EngineStore):
    """The Maru server of an experiment: one of its own, or one that runs already, which is neither stopped nor emptied."""

    backend = "maru"

    def __init__(self, directory: Path, *, size: str, log: Path, endpoint: str | None = None) -> None:
        """
        Args:
            directory: for its socket; short.
            size: of its pool.
            endpoint: of the server that runs already.
        """
        super().__init__()
        self._own = None if endpoint else MaruServer(directory, size=size, log=log)
        self.endpoint = endpoint or (self._own.endpoint if self._own else "")
        self.can_stop = self._own is not None
        self.extra_config = {"server": self.endpoint}
        self._session: Session | None = None

    @property
    def session(self) -> Session:
        assert self._session is not None, "start() comes first"
        return self._session

    def start(self) -> None:
        if self._own is not None:
            self._own.start()
        self._session = Session(self.endpoint, name="maru-bench", timeout_s=5.0)
        self._session.connect()

    def objects(self) -> int:
        return int(self.session.stats()["objects"])

    def moved(self) -> Moved:
        # Clients report with their heartbeats, some seconds late.
        stats = self.session.stats()
        return Moved(
            stored_bytes=int(stats["client_stored_bytes"]),
            loaded_bytes=int(stats["client_loaded_bytes"]),
        )

    def clear(self) -> None:
        if self._own is not None:
            self.session.clear()

    def stop(self) -> None:
        # First its own session: it would report what is done here on purpose.
        if self._session is not None:
            self._session.close()
        if self._own is not None:
            self._own.kill()

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        if self._own is not None:
            self._own.stop()


class FileStore(EngineStore):
    """SGLang's own ``file`` backend: one file per page in a directory."""

    backend = "file"

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory / "pages"
        self.env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(self._directory)}

    def start(self) -> None:
        self._directory.mkdir()

    def objects(self) -> int:
        return sum(1 for path in self._directory.rglob("*") if path.is_file())

    def clear(self) -> None:
        for path in self._directory.rglob("*"):
            if path.is_file():
                path.unlink(missing_ok=True)

    def stop(self) -> None:
        self.clear()

    def close(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


class NixlStore(FileStore):
    """SGLang's ``nixl`` backend with NIXL's POSIX plugin, on files in a directory."""

    backend = "nixl"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.env = {"SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR": str(self._directory)}
        # Direct I/O does not go to memory file systems, and what is deleted is our business.
        self.extra_config = {
            "plugin": {"posix": {"active": True}},
            "use_direct_io": False,
            "l3_cleaner_enabled": False,
        }


class MooncakeMaster:
    """Mooncake's ``mooncake_master`` without a metadata server of its own (``P2PHANDSHAKE``)."""

    def __init__(self, python: str, log: Path, env: Mapping[str, str] | None = None) -> None:
        """
        Args:
            python: interpreter of the environment that has Mooncake installed.
            env: variables that it needs besides.
        """
        program = Path(python).absolute().parent / "mooncake_master"
        self._program = str(program) if program.exists() else "mooncake_master"
        self._log, self._env = log, env
        self._start()

    def _start(self) -> None:
        self.port, self._metrics = free_port(), free_port()
        self._process = ManagedProcess(
            "mooncake_master",
            [self._program, f"--rpc_port={self.port}", f"--metrics_port={self._metrics}"],
            self._log,
            env=self._env,
        )
        self.address = f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def await_ready(self) -> None:
        """Raises:
        ServerFailedError: it ended, or does not answer.
        """
        from maru_bench.engines import HttpClient

        deadline = time.monotonic() + _MASTER_START_S
        tries = _MASTER_TRIES
        while True:
            if not self._process.running:
                tries -= 1
                if not tries:
                    raise self._process.failure("did not start")
                # Most likely somebody else was faster to take one of the ports; of the first it says nothing.
                self._process.stop()
                self._start()
            client = HttpClient("mooncake_master", "127.0.0.1", self._metrics)
            try:
                if client._request("GET", "/metrics", timeout_s=2.0)[0] == 200:
                    return
            except OSError:
                pass
            if time.monotonic() > deadline:
                raise self._process.failure(f"does not answer after {_MASTER_START_S:g} s")
            time.sleep(_POLL_S)

    def figures(self) -> dict[str, float]:
        """Its metrics without labels."""
        from maru_bench.engines import HttpClient

        _, text = HttpClient("mooncake_master", "127.0.0.1", self._metrics).request("GET", "/metrics")
        found: dict[str, float] = {}
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            if name and not name.startswith("#") and "{" not in name:
                try:
                    found[name] = float(value)
                except ValueError:
                    continue
        return found

    def stop(self) -> None:
        self._process.stop()


class MooncakeStore(EngineStore):
    """SGLang's ``mooncake`` backend over TCP, with a master of its own; each engine gives it ``segment`` of its memory."""

    backend = "mooncake"

    def __init__(self, python: str, *, segment_bytes: int, log: Path) -> None:
        super().__init__()
        self._python, self._log = python, log
        self._segment_bytes = segment_bytes
        self._master: MooncakeMaster | None = None

    @property
    def master(self) -> MooncakeMaster:
        assert self._master is not None, "start() comes first"
        return self._master

    def start(self) -> None:
        self._master = MooncakeMaster(self._python, self._log)
        self._master.await_ready()
        self.extra_config = {
            "master_server_address": self._master.address,
            "metadata_server": "P2PHANDSHAKE",
            "protocol": "tcp",
            "device_name": "",
            "local_hostname": "127.0.0.1",
            "global_segment_size": self._segment_bytes,
        }

    def objects(self) -> int | None:
        count = self.master.figures().get("master_key_count")
        return None if count is None else int(count)

    def clear(self) -> None:
        # The engines' own calls: what Mooncake holds lies in their memory.
        script = (
            "import sys; from mooncake.store import MooncakeDistributedStore as Store; store = Store(); "
            "assert store.setup('127.0.0.1', 'P2PHANDSHAKE', 0, 16 << 20, 'tcp', '', sys.argv[1]) == 0; "
            "store.remove_all(True); store.close()"
        )
        subprocess.run([self._python, "-c", script, self.master.address], capture_output=True, check=True, timeout=60)

    def stop(self) -> None:
        self.close()

    def close(self) -> None:
        if self._master is not None:
            self._master.stop()
