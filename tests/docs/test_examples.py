"""The examples run to their end, and start what there is: their command lines are taken by Maru's own programs.

SGLang's and vLLM's parsers judge theirs in tests/sglang and tests/vllm; the first example runs with real servers in tests/engines.
"""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
from example_scripts import command_lines

from maru_agent import cli as agent_cli
from maru_server import cli as server_cli
from maru_server.operator import cli as maru_cli
from tests.bench.speaking_engines import SpeakingEngine, answer_of

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.sh") if path.name != "common.sh")
PROGRAMS: dict[str, Any] = {
    "maru_server": typer.main.get_command(server_cli.app),
    "maru_agent": typer.main.get_command(agent_cli.app),
    "maru_server.operator": typer.main.get_command(maru_cli.app),
}

sys.path.insert(0, str(EXAMPLES))


def check_command_line(words: list[str]) -> None:
    """Parse it as the program would: unknown options, missing or impossible values are errors."""
    program = PROGRAMS[words[1]]
    with program.make_context(words[1], words[2:]) as context:
        rest = [*getattr(context, "_protected_args", []), *context.args]
        if rest:
            name, command, left = program.resolve_command(context, rest)
            command.make_context(name, left, parent=context).close()


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_runs_to_its_end_and_its_command_lines_are_taken(script: str, tmp_path: Path) -> None:
    before = set(Path("/tmp").glob("maru-example-*")) | set(Path("/dev/shm").glob("maru-example-*"))
    lines = command_lines(script, tmp_path)
    modules = [words[1] for words in lines]
    assert sum(module.startswith(("sglang", "vllm")) for module in modules) == 2
    for words in lines:
        if words[1] in PROGRAMS:
            check_command_line(words)
    assert set(Path("/tmp").glob("maru-example-*")) | set(Path("/dev/shm").glob("maru-example-*")) <= before


def test_an_option_that_does_not_exist_is_noticed() -> None:
    with pytest.raises(Exception, match="--bound"):
        check_command_line(["-m", "maru_server", "--pool", "shm://kv", "--bound", "ipc:///x"])


@pytest.mark.parametrize(
    ("script", "module", "name"),
    [("two_sglang_servers.sh", "sglang", "sglang-"), ("rdma_node.sh", "maru_agent", "maru-agent")],
)
def test_what_does_not_start_ends_the_example_with_its_log(script: str, module: str, name: str, tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        f'#!/bin/sh\ncase "$2" in\n{module}*) echo it says why; exit 3;;\nsglang*) exec sleep 100;;\nmaru_engine_kit*) ;;\n'
        f'*) exec {sys.executable} "$@";;\nesac\n'
    )
    python.chmod(0o755)
    done = subprocess.run(
        [str(EXAMPLES / script)], capture_output=True, text=True, check=False, timeout=120,
        env={"PATH": "/usr/bin:/bin", "SGLANG_PYTHON": str(python), "PYTHONPATH": str(EXAMPLES.parent)},
    )  # fmt: skip
    assert done.returncode == 1
    assert "it says why" in done.stdout
    assert re.search(rf"^== {name}.* did not start$", done.stdout, re.MULTILINE), done.stdout


def test_every_example_is_in_the_list() -> None:
    told = set(re.findall(r"\]\(([\w.]+)\)", (EXAMPLES / "README.md").read_text()))
    assert told == {
        path.name for path in EXAMPLES.iterdir() if path.name not in ("README.md", "common.sh", "__pycache__")
    }
    for path in EXAMPLES.glob("*.sh"):
        assert path.stat().st_mode & 0o100, f"{path.name} cannot be run"


# ---------------------------------------------------------------- the proxy


@pytest.fixture
def proxied() -> Iterator[tuple[str, SpeakingEngine, SpeakingEngine]]:
    from pd_proxy import handler

    store: set[tuple[int, ...]] = set()
    prefill, decode = SpeakingEngine(store, kind="vllm"), SpeakingEngine(store, kind="vllm")
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), handler([prefill.url], [decode.url]))
    threading.Thread(target=proxy.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{proxy.server_port}", prefill, decode
    proxy.shutdown()
    proxy.server_close()
    prefill.close()
    decode.close()


def complete(url: str, prompt: list[int], tokens: int) -> tuple[int, bytes]:
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_a_prompt_is_computed_on_one_side_and_answered_on_the_other(
    proxied: tuple[str, SpeakingEngine, SpeakingEngine],
) -> None:
    url, prefill, decode = proxied
    prompt = [5] * 100
    status, text = complete(url, prompt, 4)
    assert status == 200
    assert prefill.asked == decode.asked == [prompt]
    assert (prefill.wanted, decode.wanted) == ([1], [4])
    tokens = [
        choice["token_ids"][0]
        for line in text.splitlines()
        if line.startswith(b"data: {")
        for choice in json.loads(line[6:])["choices"]
    ]
    assert tokens == answer_of(prompt, 4)
    assert decode.sources["external_kv_transfer"] == 96
    assert urllib.request.urlopen(f"{url}/v1/models", timeout=10).status == 200


def test_without_the_first_server_the_second_one_computes(proxied: tuple[str, SpeakingEngine, SpeakingEngine]) -> None:
    url, prefill, decode = proxied
    prefill.refused = 7
    assert complete(url, [7] * 40, 2)[0] == 200
    assert decode.sources == {"local_compute": 40, "local_cache_hit": 0, "external_kv_transfer": 0}
    decode.refused = 8
    assert complete(url, [8] * 40, 2)[0] == 503
