"""The servers of one mode with what they share, or somebody's running ones; brought to the same state before each run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from maru_bench.engines import EngineClient, SGLangClient, VLLMClient, parse_url
from maru_bench.experiment.modes import Engine, Mode, Place
from maru_bench.servers import (
    SGLangOptions,
    SGLangServer,
    StartedServer,
    VLLMOptions,
    VLLMServer,
    wait_all_ready,
)
from maru_bench.stores import EngineStore, Moved, NoStore

_START_S: Final = 900.0
_POLL_S: Final = 0.1
#: vLLM would take 4 GiB for each engine.
_VLLM_CPU_KV_BYTES: Final = 512 << 20
#: Nothing more has been stored for so long: what is behind the answers has been written. At most so long it is waited for.
_QUIET_S: Final = 0.5
_QUIET_LIMIT_S: Final = 20.0


class FleetOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the servers of every mode are started."""

    engine: Engine
    python: str
    model: str
    device: str
    servers: int
    gpus: int
    """GPUs that there are; servers are spread over them."""
    longest: int
    """Tokens of the longest prompt with its answer."""
    concurrency: int
    """Most requests at a time."""
    page_tokens: int = 16
    chunk_tokens: int | None = None
    host_ratio: float = 2.0
    """Size of SGLang's host tier, in device caches."""
    max_total_tokens: int | None = None
    """Tokens of each engine's device cache; None: enough for what runs at a time, twice."""
    dtype: str = "bfloat16"
    pool_size: str = "2G"
    endpoint: str | None = None
    arguments: tuple[str, ...] = ()

    @property
    def cache_tokens(self) -> int:
        wanted = self.max_total_tokens or max(4096, 2 * self.longest * min(self.concurrency, 8))
        return -(-wanted // self.page_tokens) * self.page_tokens


class Fleet:
    """One mode's servers."""

    name: str
    store: EngineStore
    clients: Sequence[EngineClient]

    def __init__(self, name: str, says: str, *, storage_is_host: bool = False) -> None:
        self.name = name
        self.says = says
        self.storage_is_host = storage_is_host
        self.store = NoStore()
        self.clients = []

    def reset(self) -> None:
        """Empty every cache of the mode, so that a run begins as the first one did.

        Raises:
            ServerFailedError: a server would not.
        """
        self.settle()
        for client in self.clients:
            client.flush()
        self.store.clear()

    def settle(self) -> None:
        """Wait until nothing more is stored: engines store behind their answers."""
        deadline = time.monotonic() + _QUIET_LIMIT_S
        seen, since = self.store.objects(), time.monotonic()
        while seen is not None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            now = self.store.objects()
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > _QUIET_S:
                return

    def moved(self) -> Moved | None:
        return self.store.moved()

    def sources(self) -> dict[str, float] | None:
        """The clients' own accounts together; None where answers tell it."""
        told = [client.sources() for client in self.clients]
        if not told or any(one is None for one in told):
            return None
        return {tier: sum(one[tier] for one in told if one) for tier in ("computed", "device", "storage")}

    def stop(self) -> None:
        return


class StartedFleet(Fleet):
    """Servers that this process starts and stops."""

    def __init__(self, mode: Mode, options: FleetOptions, directory: Path, logs: Path) -> None:
        super().__init__(mode.name, mode.says, storage_is_host=mode.storage_is_host)
        self._mode, self._options, self._directory, self._logs = mode, options, directory, logs
        self._stack = contextlib.ExitStack()
        self._servers: list[StartedServer] = []

    def begin(self) -> None:
        """Start the store, and the servers without waiting for them.

        Raises:
            ServerFailedError: the store did not come up. :meth:`stop` is still to be called.
        """
        options = self._options
        self._directory.mkdir()
        place = Place(
            directory=self._directory,
            logs=self._logs,
            python=options.python,
            pool_size=options.pool_size,
            servers=options.servers,
            endpoint=options.endpoint,
        )
        self.store = self._mode.make(place)
        self._stack.callback(self.store.close)
        self.store.start()
        for index in range(options.servers):
            server = self._server(index)
            self._stack.callback(server.stop)
            server.start()
            self._servers.append(server)

    def await_ready(self, narrate: Callable[[str], None]) -> None:
        """Wait until every server answers.

        Raises:
            ServerFailedError: one did not come up.
        """
        servers = self._servers

        def waiting(names: Sequence[str], elapsed: float) -> None:
            narrate(f"{self.name}: {len(servers) - len(names)} of {len(servers)} servers are up ({elapsed:.0f} s)")

        wait_all_ready(servers, timeout_s=_START_S, progress=waiting)
        self.clients = servers  # type: ignore[assignment]  # each is a client too

    def stop(self) -> None:
        self._stack.close()

    def _server(self, index: int) -> StartedServer:
        options, mode = self._options, self._mode
        name = f"{mode.name} server {chr(ord('A') + index)}"
        log = self._logs / f"{mode.name}-{index}.log"
        if options.engine == "vllm":
            return VLLMServer(name, self._vllm_options(), log)
        return SGLangServer(name, self._sglang_options(index), log)

    def _sglang_options(self, index: int) -> SGLangOptions:
        options, mode = self._options, self._mode
        arguments: tuple[str, ...] = mode.sglang_arguments(self.store)
        if options.device == "cuda":
            # Servers that share a GPU share its memory: --mem-fraction-static counts the whole of it.
            sharing = -(-options.servers // max(1, options.gpus))
            arguments += ("--base-gpu-id", str(index % max(1, options.gpus)))
            arguments += ("--mem-fraction-static", f"{0.8 / sharing:.2f}")
        else:
            # Of the memory that is free when it starts, which all the others that start meanwhile take, too; the tokens are the limit.
            arguments += ("--mem-fraction-static", "0.5")
        return SGLangOptions(
            python=options.python,
            model=options.model,
            device=options.device,
            backend=self.store.backend if not mode.linker else None,
            hierarchical=mode.hierarchical,
            host_ratio=options.host_ratio,
            extra_config={} if mode.linker else self.store.extra_config,
            page_size=options.page_tokens,
            max_total_tokens=options.cache_tokens,
            chunk_tokens=options.chunk_tokens,
            dtype=options.dtype,
            arguments=(*arguments, *options.arguments),
            env=self.store.env,
        )

    def _vllm_options(self) -> VLLMOptions:
        options = self._options
        env = dict(self.store.env)
        cpu = options.device == "cpu"
        if cpu:
            # Several engines share the cores here.
            env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        return VLLMOptions(
            python=options.python,
            model=options.model,
            device=options.device,
            transfer=self._mode.vllm_transfer(self.store),
            # vLLM's attention on CPUs takes multiples of 32.
            block_size=-(-options.page_tokens // 32) * 32 if cpu else options.page_tokens,
            max_tokens=options.longest,
            kv_bytes=_VLLM_CPU_KV_BYTES if cpu else None,
            dtype=options.dtype,
            arguments=options.arguments,
            env=env,
        )


class GivenFleet(Fleet):
    """Servers that somebody else runs. They are asked and flushed, never stopped; their store is not emptied."""

    def __init__(self, name: str, engine: Engine, urls: Sequence[str]) -> None:
        super().__init__(name, f"servers that run already: {', '.join(urls)}")
        make = SGLangClient if engine == "sglang" else VLLMClient
        self.clients = [make(f"{name} {url}", *parse_url(url)) for url in urls]
