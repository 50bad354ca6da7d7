"""vLLM's own parser takes every command line of it that the documentation and the examples have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from documented_commands import commands_of
from example_scripts import command_lines

pytestmark = pytest.mark.vllm


def parse(words: list[str]) -> Any:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    validate_parsed_serve_args(arguments)
    return arguments


def transfer(arguments: Any) -> str:
    """The connector that is asked for."""
    return str(arguments.kv_transfer_config.kv_connector)


def test_of_the_documentation() -> None:
    lines = [
        words for page in ("docs/vllm.md", "README.md") for words in commands_of(page) if words[:2] == ["vllm", "serve"]
    ]
    assert len(lines) >= 3
    for words in lines:
        assert transfer(parse(words[2:])) == "MaruConnector"


@pytest.mark.parametrize("script", ["sglang_and_vllm.sh", "prefill_and_decode.sh"])
def test_of_the_examples(script: str, tmp_path: Path) -> None:
    lines = [words for words in command_lines(script, tmp_path) if words[1].startswith("vllm")]
    assert lines
    for words in lines:
        assert transfer(parse(words[2:])) == "MaruConnector"


def test_what_vllm_does_not_know_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--model", "m", "--no-such-option"])
    assert "--no-such-option" in capsys.readouterr().err
