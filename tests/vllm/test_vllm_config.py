"""Keys of ``kv_connector_extra_config``: what is taken over, what is refused, and how the message helps. Needs no vLLM."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from maru_core.errors import ConfigError
from maru_core.extra_config import TAG_MAX
from maru_core.store_config import StoreConfig
from maru_vllm.config import _CURES, HOLD_MAX_S, OPTION, ExtraConfig, parse_extra_config

DOCS = Path(__file__).parents[2] / "docs" / "vllm.md"


def test_nothing_given_is_the_default() -> None:
    assert parse_extra_config(None) == parse_extra_config({}) == ExtraConfig()


def test_every_key_of_the_store_is_taken_over() -> None:
    given = {
        "server": "ipc:///run/a.sock,tcp://10.0.0.1:5757", "client_key": "/k", "server_key": "/s", "pool": "dax:///dev/dax1.0",
        "timeout_ms": 100, "verify": "checksum", "copy_threads": 2, "tag": "blue", "store_decode": False, "hold_s": 0,
    }  # fmt: skip
    config = parse_extra_config(json.loads(json.dumps(given)))
    store = {name: value for name, value in given.items() if name in StoreConfig.__struct_fields__}
    assert config.store_config() == StoreConfig(**store)
    assert (config.tag, config.store_decode, config.hold_s) == ("blue", False, 0.0)
    assert parse_extra_config({"pool_size": "8G"}).store_config().pool_size == "8G"


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("sever", "server"),
        ("timeout", "timeout_ms"),
        ("Tag", "tag"),
        ("store_decodes", "store_decode"),
        ("holds", "hold_s"),
    ],
)
def test_an_unknown_key_names_the_nearest(key: str, near: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"{OPTION}: unknown key '{key}' \(value 5\): did you mean '{near}'\? Maru knows server, "
    ):
        parse_extra_config({key: 5})


def test_a_key_like_none_lists_all() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_extra_config({"qqqq": 1})
    assert "did you mean" not in str(caught.value)
    assert all(name in str(caught.value) for name in ExtraConfig.__struct_fields__)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("server", 5), ("pool", 5), ("pool_size", 8), ("timeout_ms", "soon"), ("timeout_ms", 1.5), ("verify", "maybe"), ("copy_threads", "all"),
        ("tag", 7), ("tag", "a\nb"), ("tag", "x" * (TAG_MAX + 1)), ("store_decode", "yes"), ("store_decode", 1), ("hold_s", -1.0),
        ("hold_s", HOLD_MAX_S + 1), ("hold_s", "long"), ("hold_s", float("nan")), ("client_key", []), ("server_key", 1),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_used_names_key_value_and_cure(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_extra_config({key: value})
    assert str(caught.value) == f"{OPTION}: {key} is {value!r}: {_CURES[key]}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"timeout_ms": 0}, "timeout_ms is 0: give milliseconds from 1 to 60000"),
        ({"copy_threads": 65}, "copy_threads is 65: give 1 to 64"),
        ({"server": "http://x"}, "http://x"),
        ({"pool": "nowhere"}, "nowhere"),
        ({"pool_size": "big"}, "big"),
        ({"server": "ipc:///x", "pool_size": "8G"}, "leave pool_size out"),
    ],
)
def test_values_out_of_bounds_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        parse_extra_config(given)
    assert str(caught.value).startswith(f"{OPTION}: ")


def test_every_key_has_a_cure_and_a_line_in_the_docs() -> None:
    assert set(_CURES) == set(ExtraConfig.__struct_fields__)
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    for field in msgspec.structs.fields(ExtraConfig):
        assert any(f"`{field.name}`" in row.split("|")[1] for row in rows), field.name
