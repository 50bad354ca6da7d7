"""The environment is read in one place, and what is wrong in it is said."""

from __future__ import annotations

import logging
import os
import re
import subprocess
from pathlib import Path

import pytest

import maru_core
from maru_core.errors import ConfigError
from maru_core.settings import Settings, cache_folder


def test_an_empty_environment_gives_the_defaults() -> None:
    settings = Settings.from_environment({"MARU_SERVER": "", "XDG_RUNTIME_DIR": "/run/user/1", "HOME": "/root"})
    assert settings == Settings(
        server=None,
        pool=None,
        runtime_dir=Path(f"/tmp/maru-{os.getuid()}"),
        pool_size=None,
        idle_exit_s=60.0,
        log_level="info",
    )


def test_every_variable_is_read() -> None:
    settings = Settings.from_environment(
        {
            "MARU_SERVER": "ipc:///run/maru.sock",
            "MARU_POOL": "dax:///dev/dax1.0",
            "MARU_RUNTIME_DIR": "/run/maru",
            "MARU_POOL_SIZE": "8G",
            "MARU_POOL_NUMA": "1",
            "MARU_IDLE_EXIT_S": "2.5",
            "MARU_LOG_LEVEL": "DEBUG",
            "MARU_SERVR": "typo",
        }
    )
    assert settings == Settings(
        server="ipc:///run/maru.sock",
        pool="dax:///dev/dax1.0",
        runtime_dir=Path("/run/maru"),
        pool_size="8G",
        idle_exit_s=2.5,
        log_level="debug",
        unknown=("MARU_SERVR",),
        pool_numa=1,
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("MARU_SERVER", "localhost:7878"),
        ("MARU_RUNTIME_DIR", "relative/dir"),
        ("MARU_POOL_NUMA", "near"),
        ("MARU_IDLE_EXIT_S", "soon"),
        ("MARU_IDLE_EXIT_S", "0"),
        ("MARU_IDLE_EXIT_S", "nan"),
        ("MARU_IDLE_EXIT_S", "1e9"),
        ("MARU_LOG_LEVEL", "chatty"),
    ],
)
def test_a_value_that_cannot_be_used_names_key_value_and_cure(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is {re.escape(repr(value))}: give "):
        Settings.from_environment({key: value})


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARU_POOL_SIZE", "3G")
    assert Settings.from_environment().pool_size == "3G"


def test_a_misspelt_variable_is_said_with_the_nearest_known_one(caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings.from_environment({"MARU_SERVR": "x", "MARU_QUUX": "y", "MARU_SGLANG_PYTHON": "z", "OTHER": "w"})
    settings.warn_of_unknown(logging.getLogger("maru.test"))
    assert [record.getMessage() for record in caplog.records] == [
        "MARU_QUUX means nothing to Maru",
        "MARU_SERVR means nothing to Maru: did you mean MARU_SERVER?",
    ]


def test_what_is_cached_lies_where_this_user_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert cache_folder() == Path("/var/cache/me/maru")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == Path("/home/me/.cache/maru")


def test_no_other_module_reads_the_environment() -> None:
    root = Path(maru_core.__file__).parent.parent
    packages = ["maru_core", "maru_server", "maru_sglang"]
    found = subprocess.run(
        ["grep", "-rnE", "--include=*.py", r"os\.environ|getenv|import environ", *packages],
        cwd=root,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    assert [line for line in found if not line.startswith("maru_core/settings.py:")] == []
