"""An agent as tests start, signal and end it."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from forked import ForkedProcess, await_taken
from support import ServerProcess, await_condition


class AgentProcess:
    """A real ``python -m maru_agent``.

    Args:
        host: process in whose network it runs.
        environ: variables besides ours.
    """

    def __init__(
        self,
        server: ServerProcess,
        directory: Path,
        *options: str,
        host: int | None = None,
        environ: dict[str, str] | None = None,
    ) -> None:
        self.server = server
        self.options = options
        self.log = directory / f"agent-{id(self):x}.log"
        self.process: ForkedProcess | None = None
        self._host = host
        self._environ = environ or {}

    def start(self) -> AgentProcess:
        line = ("--server", self.server.endpoint, *self.options)
        environ = dict(os.environ) | self._environ
        self.process = ForkedProcess(("-m", "maru_agent"), line, self.log, environ=environ, host=self._host)
        return self

    @property
    def announcements(self) -> int:
        return self.log.read_text(errors="replace").count("announced to the server")

    def wait_announced(self, times: int = 1) -> AgentProcess:
        def announced() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text(errors="replace")
            return self.announcements >= times

        await_condition(announced, "the agent announces itself", 60)
        return self

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        await_taken(self.process.pid, number)

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(60)
