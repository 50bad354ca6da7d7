"""Settings have one form in every process, or none."""

from __future__ import annotations

import dataclasses
import enum
import os
import subprocess
import sys
from fractions import Fraction
from typing import Any

import msgspec
import pytest

from maru_core.canonical import dtype_name, json_digest, meaningful, text_digest
from maru_core.errors import ConfigError


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Part:
    size: int = 1


class Struct(msgspec.Struct):
    size: int = 1


class Config:
    def __init__(self, **values: Any) -> None:
        self.values = values

    def to_dict(self) -> dict[str, Any]:
        return self.values


def test_what_means_the_same_has_the_same_digest() -> None:
    assert json_digest({"a": 1, "b": (1, 2)}) == json_digest({"b": [1, 2], "a": 1})
    assert json_digest({3, 1, 2}) == json_digest({2, 3, 1})
    assert json_digest(Config(a=1, _name_or_path="/x", transformers_version="5")) == json_digest(
        Config(a=1, _commit_hash="y")
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Color.RED, Color.BLUE), (Part(1), Part(2)), (Struct(1), Struct(2)), (Config(a=1), Config(a=2)), (Fraction(1, 2), Fraction(1, 3)),
        (int, float), ({"a"}, {"b"}), (1, True), ("1", 1), (None, ""), ([1, [2]], [[1], 2]),
    ],
)  # fmt: skip
def test_what_differs_has_another(one: Any, other: Any) -> None:
    assert json_digest({"x": one}) != json_digest({"x": other})


@pytest.mark.parametrize("value", [object(), lambda: 0, b"bytes", {("a", "b"): 1}, {"a": {1: 1, "b": 2}}])
def test_what_has_no_form_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="compare"):
        json_digest({"x": value})


def test_where_code_of_a_model_lies_does_not_matter_and_which_it_is_does() -> None:
    def config(reference: str) -> dict[str, Any]:
        return meaningful({"auto_map": {"AutoModel": reference}, "inner": [{"_name_or_path": "/x", "width": 2}]})

    assert (
        config("org/name--modeling.A")
        == config("modeling.A")
        == {"auto_map": {"AutoModel": "modeling.A"}, "inner": [{"width": 2}]}
    )
    assert config("modeling.A") != config("modeling.B")


def test_another_process_says_the_same() -> None:
    code = "from maru_core.canonical import json_digest; print(json_digest({'a': {'x', 'y', 'z'}, 'b': 1.5}))"
    for seed in ("1", "2"):
        told = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert told.stdout.strip() == json_digest({"b": 1.5, "a": {"z", "y", "x"}})
    assert len(text_digest("x")) == 64
    assert dtype_name("torch.bfloat16") == "bfloat16"
