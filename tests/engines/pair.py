"""The servers of the tests that attach the store that they need over HTTP: started once for all of them.

They start with the embedded ``maru-server``, that is with nothing configured but the backend's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness import EngineServer, options, start_all

from maru_core.embedded import Starter
from maru_core.settings import Settings
from support import await_condition

INJECTED_DELAY_S = 0.1
INJECTED_FAILURES = 0.3


@dataclass
class Engines:
    """``one`` and ``two`` are alike; every storage call of ``faulty`` is late, and three in ten fail."""

    one: EngineServer
    two: EngineServer
    faulty: EngineServer

    @property
    def pair(self) -> tuple[EngineServer, EngineServer]:
        return self.one, self.two


@contextmanager
def running_pair(logs: Path, model: Path) -> Iterator[Engines]:
    env = {"MARU_RUNTIME_DIR": str(logs / "run"), "MARU_POOL_SIZE": "512M", "MARU_IDLE_EXIT_S": "5"}
    faults = {
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": str(INJECTED_DELAY_S),
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": str(INJECTED_FAILURES),
    }
    made = Engines(
        one=EngineServer("one", options(model, env=env), logs / "one.log"),
        two=EngineServer("two", options(model, env=env), logs / "two.log"),
        faulty=EngineServer("faulty", options(model, env=env | faults), logs / "faulty.log"),
    )
    everyone = [made.one, made.two, made.faulty]
    start_all(everyone)
    try:
        yield made
    finally:
        for server in everyone:
            server.stop()
    embedded = Starter(settings=Settings.from_environment(env))
    left_behind = [embedded.socket, Path("/dev/shm", embedded.pool_name)]
    await_condition(
        lambda: not any(path.exists() for path in left_behind), "the embedded server goes away by itself", timeout_s=60
    )
