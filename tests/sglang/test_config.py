"""The extra config: what is accepted, and that every refusal names the key, the value and the cure."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maru_core.errors import ConfigError
from maru_sglang.storage.config import _CURES, OPTION, SGLANG_KEYS, ExtraConfig, LinkerConfig, parse_extra_config


def test_nothing_to_configure() -> None:
    for nothing in (None, {}):
        config = parse_extra_config(nothing)
        assert config == ExtraConfig()
        assert config.store_config().server is None


def test_every_key() -> None:
    given_ = {
        "server": "ipc:///run/maru.sock", "pool": "shm://maru", "timeout_ms": 250, "verify": "checksum", "copy_threads": 2,
        "client_key": "/etc/maru/node-a.key", "server_key": "/etc/maru/server.pub", "tag": "blue",
    }  # fmt: skip
    config = parse_extra_config(given_)
    store = config.store_config()
    assert {key: getattr(store, key) for key in given_ if key != "tag"} == {
        k: v for k, v in given_.items() if k != "tag"
    }
    assert config.tag == "blue"
    assert parse_extra_config({"pool_size": "2G"}).store_config().pool_size == "2G"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("timeout_ms", "fast"), ("timeout_ms", "500"), ("timeout_ms", 0), ("timeout_ms", 1e9), ("timeout_ms", True),
        ("verify", "always"), ("verify", True), ("verify", None), ("copy_threads", 0), ("copy_threads", "two"),
        ("copy_threads", 2.5), ("server", "localhost:5555"), ("server", 5555), ("pool", "/dev/shm/x"), ("pool", 1),
        ("pool_size", 8), ("pool_size", "lots"), ("client_key", 1), ("server_key", False), ("tag", 3), ("tag", "x" * 201), ("tag", "a\nb"), ("tag", None),
    ],
)  # fmt: skip
def test_a_bad_value_is_named_with_its_key_and_a_cure(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_extra_config({key: value})
    message = str(refused.value)
    assert OPTION in message
    assert key in message
    assert str(value) in message or repr(value) in message
    assert "give" in message or "write" in message


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("timeout", "timeout_ms"), ("servr", "server"), ("poolsize", "pool_size"), ("Verify", "verify"),
        ("prefetch_treshold", "prefetch_threshold"), ("hicache_storage_pass_prefix_key", "hicache_storage_pass_prefix_keys"),
        ("copy_thread", "copy_threads"), ("client_keys", "client_key"), ("serverkey", "server_key"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_refused_and_the_nearest_suggested(key: str, meant: str) -> None:
    with pytest.raises(ConfigError, match="unknown key") as refused:
        parse_extra_config({key: 1})
    assert repr(key) in str(refused.value)
    assert f"did you mean {meant!r}" in str(refused.value)


def test_each_key_of_the_store_has_a_cure_for_a_wrong_value() -> None:
    assert set(_CURES) == set(LinkerConfig.__struct_fields__)


def test_an_unknown_key_that_is_like_none_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_extra_config({"zzzzzz": 1})
    assert "did you mean" not in str(refused.value)
    assert all(name in str(refused.value) for name in (*ExtraConfig.__struct_fields__, *SGLANG_KEYS))


def test_a_size_for_a_pool_that_a_named_server_owns_is_refused() -> None:
    with pytest.raises(ConfigError, match="pool_size is '8G' and server is"):
        parse_extra_config({"server": "ipc:///x", "pool_size": "8G"})


def test_sglang_keys_are_tolerated_exactly_where_sglang_leaves_them() -> None:
    dynamic = {"backend_name": "maru", "module_path": "maru_sglang.storage.backend", "class_name": "MaruHiCacheStorage"}
    assert parse_extra_config({**dynamic, "interface_v1": 1, "tag": "a"}).tag == "a"
    assert parse_extra_config({"file_storage_path": "sglang_storage"}) == ExtraConfig()
    for key in ("interface_v1", "backend_name", "module_path", "class_name"):
        with pytest.raises(ConfigError, match="unknown key"):
            parse_extra_config({key: "x"})
    for key in SGLANG_KEYS:  # SGLang has taken them out: whoever leaves one in did not go through SGLang
        with pytest.raises(ConfigError, match="unknown key"):
            parse_extra_config({key: 1})


def test_the_given_mapping_is_left_alone() -> None:
    given_ = {"file_storage_path": "x", "tag": "a"}
    parse_extra_config(given_)
    assert given_ == {"file_storage_path": "x", "tag": "a"}


@given(
    st.dictionaries(
        st.text(max_size=12), st.none() | st.booleans() | st.integers() | st.floats() | st.text(), max_size=4
    )
)
def test_anything_is_a_config_or_a_config_error(extra: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(parse_extra_config(extra), ExtraConfig)


@pytest.mark.sglang
def test_sglang_takes_out_its_own_keys_and_leaves_the_rest() -> None:
    """SGLANG_KEYS is what SGLang pops (tp_lcm_size later, in _generate_storage_config)."""
    import json

    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    given_ = {
        "prefetch_threshold": 1, "prefetch_timeout_base": 1, "prefetch_timeout_per_ki_token": 1,
        "hicache_storage_pass_prefix_keys": True, "tag": "x",
    }  # fmt: skip
    assert set(given_) - {"tag"} == set(SGLANG_KEYS) - {"tp_lcm_size"}
    left = HybridCacheController.parse_storage_backend_extra_config(json.dumps(given_))[0]
    assert left == {"tag": "x"}
