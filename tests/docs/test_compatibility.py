"""docs/compatibility.md: every test that it names exists, and every refusal that it quotes is said."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
TEST = re.compile(r"`(tests/[\w/]+\.py)::([\w:]+)`")
QUOTED = re.compile(r'"([^"]{12,})"')
#: Cells that are neither.
PLAIN = re.compile(r"not tested, needs [1-9]\d* GPUs?|does not apply( \(.+\))?")


def cells() -> list[tuple[str, str]]:
    """(row, cell) of all tables, without their first column."""
    found = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("|") and not line.startswith("|---"):
            row, *rest = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
            found += [(row, cell.strip("| ")) for cell in rest]
    return found


def body() -> list[tuple[str, str]]:
    """The cells below the headings."""
    headings = {"shape", "setting", ""}
    return [(row, cell) for row, cell in cells() if row not in headings]


@functools.cache
def names_in(path: str) -> frozenset[str]:
    """Names of a file's tests: ``test_x`` and ``TestY::test_z``."""
    found: set[str] = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return frozenset(found)


@functools.cache
def said() -> str:
    """All text of the code; and of the tests, for what an engine says itself. Parts of one string are one."""
    texts = []
    files = [*ROOT.glob("maru_*/**/*.py"), *ROOT.glob("tests/sglang/*.py"), *ROOT.glob("tests/vllm/*.py")]
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_the_page_has_its_tables() -> None:
    assert len(body()) > 100
    assert len({row for row, _ in body()}) > 35


@pytest.mark.parametrize(("path", "name"), sorted({found for _, cell in body() for found in TEST.findall(cell)}))
def test_a_test_that_is_named_exists(path: str, name: str) -> None:
    assert (ROOT / path).exists(), f"docs/compatibility.md names {path}, which is not there"
    assert name in names_in(path), f"{path} has no {name}: put the right name into docs/compatibility.md"


@pytest.mark.parametrize("text", sorted({found for _, cell in body() for found in QUOTED.findall(cell)}))
def test_a_refusal_that_is_quoted_is_said(text: str) -> None:
    assert text in said(), f"nothing says {text!r}: quote what is said now in docs/compatibility.md"


def test_every_cell_is_one_of_the_three() -> None:
    for row, cell in body():
        assert TEST.fullmatch(cell) or QUOTED.fullmatch(cell) or PLAIN.fullmatch(cell), f"{row}: {cell!r}"
