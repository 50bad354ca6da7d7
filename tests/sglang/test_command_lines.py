"""SGLang's own parser takes every command line of it that the documentation and the examples have."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from documented_commands import commands_of
from example_scripts import command_lines

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("plugins")]

PAGES = ("README.md", "docs/quickstart.md", "docs/sglang.md", "docs/rdma.md", "docs/operation.md")


def parse(words: list[str], model: Path) -> Any:
    """As ``python -m sglang.launch_server`` does, up to where it would look at the machine."""
    from sglang.srt.server_args import prepare_server_args

    return prepare_server_args([str(model) if word in ("MODEL",) else word for word in words])


def test_of_the_documentation(model_dir: Path) -> None:
    lines = [words for page in PAGES for words in commands_of(page) if "sglang.launch_server" in words]
    assert len(lines) >= 2
    for words in lines:
        arguments = parse([*words[words.index("sglang.launch_server") + 1 :], "--device", "cpu"], model_dir)
        assert "maru" in (arguments.hicache_storage_backend, arguments.unified_cache_external_linker_backend)


@pytest.mark.parametrize("script", ["two_sglang_servers.sh", "sglang_and_vllm.sh", "rdma_node.sh"])
def test_of_the_examples(script: str, tmp_path: Path, model_dir: Path) -> None:
    lines = [words for words in command_lines(script, tmp_path) if words[1] == "sglang.launch_server"]
    assert lines
    for words in lines:
        words[words.index("--model-path") + 1] = "MODEL"
        assert parse(words[2:], model_dir).hicache_storage_backend == "maru"


def test_what_sglang_does_not_know_is_noticed(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--model-path", "MODEL", "--hicache-storage-backend", "maru", "--no-such-option"], model_dir)
    assert "--no-such-option" in capsys.readouterr().err
    assert sys.modules["maru_sglang.plugin"]
