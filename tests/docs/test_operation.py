"""docs/operation.md says what is so: its commands run, its options exist, its figures add up, its links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer

from maru_bench import cli as bench_cli
from maru_core.protocol import REPORTED
from maru_core.session import Session
from maru_server import cli as server_cli
from maru_server.operator import cli as maru_cli
from maru_server.operator import doctor
from support import ServerProcess, hashes, namespace, running_server
from tests.server.live import store

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "operation.md"
TEXT = PAGE.read_text()

#: Options of other programs that the page names.
FOREIGN = {
    "--ipc", "--shm-size", "--user", "--pid", "--device",  # docker
    "--now",  # systemctl
    "--mode",  # daxctl
    "--hicache-storage-prefetch-policy",  # SGLang
}  # fmt: skip


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def console_commands() -> list[list[str]]:
    lines = [line for block in blocks("console") for line in block.splitlines()]
    assert lines
    assert all(line.startswith("$ ") for line in lines), "a console block has commands alone"
    return [shlex.split(line[2:], comments=True) for line in lines]


def options(app: typer.Typer) -> dict[str, set[str]]:
    """Options of the program itself (under "") and of each of its commands."""
    program: Any = typer.main.get_command(app)

    def of(command: Any) -> set[str]:
        return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {
            "--help",
            "-h",
        }

    return {"": of(program)} | {name: of(command) for name, command in program.commands.items()}


MARU = options(maru_cli.app)
MARU_SERVER = options(server_cli.app)
MARU_BENCH = options(bench_cli.app)


# ---------------------------------------------------------------- commands


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("docs")) as running:
        session = Session(running.endpoint, name="engine", timeout_s=60)
        first = session.open_namespace(namespace().record())
        second = session.open_namespace(namespace(page_tokens=64).record())
        assert (first, second) == (0, 1), "as the page says"
        store(session, first, 30)
        store(session, second, 10, seed=2)
        session.match(first, ["kv"], 0, hashes(30, 1))
        yield running
        session.close()


def test_every_command_of_a_console_block_runs(server: ServerProcess) -> None:
    page = hashes(30, 1)[:32].hex()
    for words in console_commands():
        assert words[0] == "maru", words
        out, err = io.StringIO(), io.StringIO()
        environ = {**os.environ, "MARU_SERVER": server.endpoint}
        with (
            mock.patch.dict(os.environ, environ, clear=True),
            mock.patch.object(sys, "argv", [page if word == "HASH" else word for word in words]),
            mock.patch.object(sys, "stdin", io.StringIO()),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            code = 0
            try:
                maru_cli.main()
            except SystemExit as ended:
                code = int(ended.code or 0)
        assert err.getvalue() == "", words
        # The doctor may well find that these two engines differ.
        assert code in ((0, 1) if words[1] == "doctor" else (0,)), (words, out.getvalue())
        assert out.getvalue(), words


def test_every_command_of_maru_is_in_the_table() -> None:
    told = set(re.findall(r"^\| ((?:`[a-z]+[^`]*`(?:, )?)+) \|", TEXT, re.MULTILINE))
    names = {name.split()[0] for cell in told for name in re.findall(r"`([^`]*)`", cell)}
    assert names >= set(MARU) - {""}


def test_server_command_lines_have_options_that_exist() -> None:
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("maru-server")]
    lines += re.findall(r"`(maru-server [^`]*)`", TEXT)
    assert len(lines) >= 3
    for line in lines:
        words = shlex.split(line, comments=True)
        given = [word.split("=")[0] for word in words if word.startswith("--")]
        known = MARU_SERVER[words[1]] if words[1] in MARU_SERVER else MARU_SERVER[""]
        assert set(given) <= known, line


def test_every_option_that_is_named_exists() -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", TEXT))
    known = FOREIGN.union(*MARU.values(), *MARU_SERVER.values(), *MARU_BENCH.values())
    assert named <= known, f"nobody knows {named - known}"
    assert named >= FOREIGN, f"no longer named: {FOREIGN - named}"


def test_every_variable_that_is_named_exists() -> None:
    from maru_core.settings import _KNOWN

    assert set(re.findall(r"\bMARU_[A-Z_]+", TEXT)) <= set(_KNOWN)


# ---------------------------------------------------------------- what is said


def test_the_sizes_of_the_table_are_those_of_the_formula() -> None:
    rows = re.findall(
        r"^\| (.+?) \| (\d+) \| (\d+|-) \| (\d+|-) \| (bf16|fp8) \| (\d+) \| (\d+) \| (\d+) GiB \|$", TEXT, re.MULTILINE
    )
    assert len(rows) >= 7
    for model, layers, heads, width, dtype, per_token, per_gib, million in rows:
        nbytes = {"bf16": 2, "fp8": 1}[dtype]
        latent = re.search(r"MLA (\d+) \+ (\d+)", model)
        if latent:
            expected = int(layers) * (int(latent[1]) + int(latent[2])) * nbytes
        else:
            expected = 2 * int(layers) * int(heads) * int(width) * nbytes
        assert int(per_token) == expected, model
        assert int(per_gib) == (1 << 30) // expected, model
        assert int(million) == round(1_000_000 * expected / (1 << 30)), model


def test_the_doctors_findings_are_all_explained(server: ServerProcess) -> None:
    with mock.patch.dict(os.environ, {**os.environ, "MARU_SERVER": server.endpoint}, clear=True):
        given = {finding.name for finding in doctor.examine(None, None, None, 10, 500)}
    section = TEXT[TEXT.index("## It does not read") :]
    explained = {
        name
        for cell in re.findall(r"^\| ((?:`[a-z-]+`(?:, )?)+) \|", section, re.MULTILINE)
        for name in re.findall(r"`([a-z-]+)`", cell)
    }
    assert given == explained


def test_defaults_are_those_of_the_server() -> None:
    from maru_server.config import StateConfig

    config = StateConfig()
    for option, value in (
        ("--high-watermark", config.high), ("--low-watermark", config.low), ("--pin-share", config.pin_share),
    ):  # fmt: skip
        assert f"`{option}` ({value:g})" in TEXT or f"`{option}` of the pool ({value:g})" in TEXT, option
    assert f"after `--lease` seconds ({config.lease_s:g})" in TEXT
    assert f"after `--quarantine` seconds ({config.quarantine_s:g})" in TEXT
    assert (config.max_hold_s, config.hold_share) == (60, 0.25), "within a minute, a quarter of the pool"
    assert f"| `{config.policy}` (default) |" in TEXT
    from maru_server.eviction import POLICIES

    assert set(re.findall(r"^\| `([a-z-]+)`(?: \(default\))? \| [a-z].* \| [a-z].* \|$", TEXT, re.MULTILINE)) >= set(
        POLICIES
    )


def test_counters_that_are_named_exist() -> None:
    assert set(re.findall(r"`(miss_\w+)`", TEXT)) <= set(REPORTED)


@pytest.mark.parametrize("page", ["docs/operation.md", "docs/sglang.md", "README.md"])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]*)(?:#[^)]*)?\)", text):
        if target and not target.startswith("http"):
            assert (ROOT / page).parent.joinpath(target).exists(), target
    for target, anchor in re.findall(r"\]\(([^)#]*)#([^)]*)\)", text):
        if target.startswith("http"):
            continue
        other = (ROOT / page).parent.joinpath(target) if target else ROOT / page
        headings = re.findall(r"^#+ (.*)$", other.read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in anchors, (target, anchor)
