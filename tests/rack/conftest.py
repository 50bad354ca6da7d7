"""One rack for all of these tests: two hosts that share memory, and one that has none of it. Booted when the first test asks."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rack.rack import ROOT, Rack

NEEDED = "tools/rack_env.sh"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("rack")


def _missing() -> str:
    """Why there can be no rack here; empty if there can."""
    if os.environ.get("MARU_NO_RACK"):
        return "MARU_NO_RACK is set"
    made = subprocess.run([ROOT / NEEDED], capture_output=True, text=True)
    if made.returncode:
        return (made.stderr.strip().splitlines() or [f"{NEEDED} failed"])[-1]
    return ""


@pytest.fixture(scope="session")
def booted() -> Iterator[Rack]:
    reason = _missing()
    if reason:
        # Where it has to be there, nobody would notice that it is skipped.
        (pytest.fail if os.environ.get("MARU_NEED_RACK") else pytest.skip)(reason)
    with contextlib.closing(Rack()) as rack:
        print(f"the rack's logs: {rack.logs}")
        rack.boot()
        yield rack


@pytest.fixture
def rack(booted: Rack) -> Iterator[Rack]:
    """With nothing running in it that was not there before."""
    with booted.scene():
        yield booted
