"""``maru`` as an operator runs it, against real servers in processes of their own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from typing import Any
from unittest import mock

from maru_core.session import Session
from maru_server.operator.cli import main
from support import ServerProcess

#: What a developer's shell may have set must not reach the tests.
_VARIABLES = ("MARU_SERVER", "MARU_POOL", "MARU_CLIENT_KEY", "MARU_SERVER_KEY", "MARU_RUNTIME_DIR")


def maru(
    *arguments: str, server: ServerProcess | str | None = None, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """``maru ARGUMENTS`` to its end, without a process of its own; its server comes from the environment."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, variables(server, environ), clear=True),
        mock.patch.object(sys, "argv", ["maru", *arguments]),
        mock.patch.object(sys, "stdin", io.StringIO()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return subprocess.CompletedProcess(["maru", *arguments], code, out.getvalue(), err.getvalue())


def variables(server: ServerProcess | str | None = None, more: dict[str, str] | None = None) -> dict[str, str]:
    """The environment of a command."""
    kept = {key: value for key, value in os.environ.items() if key not in _VARIABLES}
    if server is not None:
        kept["MARU_SERVER"] = server if isinstance(server, str) else server.endpoint
    return {**kept, **(more or {})}


def maru_process(*arguments: str, server: ServerProcess | None = None) -> subprocess.CompletedProcess[str]:
    """The same in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "maru_server.operator", *arguments],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180, env=variables(server), check=False,
    )  # fmt: skip


def asked(*arguments: str, server: ServerProcess | str | None = None, **options: Any) -> str:
    """What it prints; it must succeed and complain of nothing."""
    done = maru(*arguments, server=server, **options)
    assert done.returncode == 0, done.stderr or done.stdout
    assert done.stderr == ""
    return done.stdout


def asked_json(*arguments: str, server: ServerProcess | str | None = None, **options: Any) -> Any:
    return json.loads(asked(*arguments, "--json", server=server, **options))


def assert_unusable(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """Exit code 2 and one line on stderr that has all ``parts``."""
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert done.stdout == ""
    assert done.stderr.startswith("maru: error: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    for part in parts:
        assert part in done.stderr


def engine(server: ServerProcess, name: str = "engine tp0/1") -> Session:
    """A session such as an engine has."""
    return Session(server.endpoint, name=name, timeout_s=60)
