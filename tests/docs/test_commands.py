"""Every command of the README and the quick start is run here, or is one of those below, with the reason why not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from documented_commands import commands_of
from typer.testing import CliRunner

from maru_bench import cli as bench_cli
from maru_bench.engines import parse_url
from maru_core.session import Session
from maru_server import cli as server_cli
from support import ServerProcess, namespace, running_server
from tests.bench.speaking_engines import SpeakingEngine
from tests.server.live import store

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/quickstart.md")
COMMANDS = [words for page in PAGES for words in commands_of(page)]

#: Begin like this, and are not run here.
ELSEWHERE = {
    ("pip", "install", "."): "every environment of `make test` is made by it, in tools/*_env.sh",
    ("make", "test"): "it is what runs this",
    ("make", "demo"): "takes minutes; examples/two_sglang_servers.sh and `maru-bench experiment` start the same servers in tests/engines, "
    "and tests/bench/test_bench_prefix_sharing.py runs the command up to that",
    ("python", "-m", "sglang.launch_server"): "tests/sglang/test_command_lines.py parses it as SGLang does; such servers run in tests/engines",
    ("maru-server", "--pool", "dax:///dev/dax0.0"): "there is no such device here: it is parsed, and devices are tested with stand-ins in tests/core",
}  # fmt: skip


def elsewhere(words: list[str]) -> bool:
    return any(tuple(words[: len(start)]) == start for start in ELSEWHERE)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("commands")) as running:
        session = Session(running.endpoint, name="engine", timeout_s=10)
        store(session, session.open_namespace(namespace().record()), 30)
        yield running
        session.close()


def test_every_command_has_a_place_where_it_runs() -> None:
    for words in COMMANDS:
        if elsewhere(words):
            continue
        assert words[0] in ("maru", "maru-server", "maru-bench"), f"nobody runs {words}: see the top of this file"
    for start in ELSEWHERE:
        assert any(tuple(words[: len(start)]) == start for words in COMMANDS), f"{start} is no longer there"


def test_what_make_does_is_there() -> None:
    for words in COMMANDS:
        if words[0] == "make":
            done = subprocess.run([*words, "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            tool = next(word for word in done.stdout.split() if word.startswith("tools/"))
            assert os.access(ROOT / tool, os.X_OK)


def test_looking_at_a_server(server: ServerProcess) -> None:
    commands = {tuple(words) for words in COMMANDS if words[0] == "maru"}
    assert len(commands) >= 3
    for words in commands:
        done = subprocess.run(
            [sys.executable, "-m", "maru_server.operator", *words[1:]], capture_output=True, text=True, check=False,
            env={**os.environ, "MARU_SERVER": server.endpoint},
        )  # fmt: skip
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        assert done.stdout


def test_servers_of_ones_own(tmp_path: Path) -> None:
    """Started as they are written, but for where pool and socket lie and how much there is."""
    commands = {tuple(words) for words in COMMANDS if words[0] == "maru-server" and not elsewhere(words)}
    assert len(commands) >= 2
    for number, words in enumerate(sorted(commands)):
        options = dict(zip(words[1::2], words[2::2], strict=True))
        assert options.pop("--size").endswith("G")
        bind = options.pop("--bind")
        assert bind.startswith("ipc:///run/maru/")
        pool = options.pop("--pool")
        scheme = pool.split("://")[0]
        where = f"shm://maru-test-{os.getpid()}-{number}" if scheme == "shm" else f"file://{tmp_path}/kv"
        assert not options, f"{options} would be left out"
        server = ServerProcess(tmp_path, pool=where, bind=f"ipc://{tmp_path}/{number}.sock", size="64M")
        try:
            server.start()
            assert server.stop() == 0
        finally:
            server.remove()


def test_a_device_is_taken_as_it_is_written() -> None:
    program: Any = typer.main.get_command(server_cli.app)
    for words in COMMANDS:
        if words[0] == "maru-server" and words[2].startswith("dax:"):
            with program.make_context("maru-server", words[1:]) as context:
                assert context.params["format_" if "format_" in context.params else "format"]


def test_an_experiment(tmp_path: Path) -> None:
    """On servers that speak like engines, one for each mode that it names; two real ones of each run in tests/engines."""
    commands = {tuple(words) for words in COMMANDS if words[0] == "maru-bench"}
    assert commands
    for words in commands:
        modes = words[words.index("--modes") + 1].split(",")
        engines = {mode: SpeakingEngine() for mode in modes}
        try:
            assert all(parse_url(engine.url) for engine in engines.values())
            urls = [word for mode, engine in engines.items() for word in ("--url", f"{mode}={engine.url}")]
            done = CliRunner().invoke(
                bench_cli.app, [*words[1:], *urls, "--repeats", "1", "--out", str(tmp_path / "out"), "--check"]
            )
        finally:
            for engine in engines.values():
                engine.close()
        assert done.exit_code == 0, done.output
        assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.parametrize("page", ["docs/experiments.md", "docs/benchmarks.md"])
def test_benchmarks_are_taken_as_they_are_written(page: str) -> None:
    program: Any = typer.main.get_command(bench_cli.app)
    commands = [words for words in commands_of(page) if words[0] == "maru-bench"]
    assert commands or page == "docs/benchmarks.md"
    for words in commands:
        name, command, left = program.resolve_command(typer.Context(program), words[1:])
        command.make_context(name, list(left)).close()
