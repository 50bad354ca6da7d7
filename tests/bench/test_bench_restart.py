"""The benchmark of restarts: its arithmetic, and a real run on a few thousand pages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from maru_bench.restart import TARGET_PAGES, RestartResult, RestartRun, chains
from maru_core.protocol import HASH_BYTES, ROOT


def run_of(match_s: float, memory_bytes: int = 40 << 20) -> RestartRun:
    return RestartRun(ready_s=match_s - 0.01, match_s=match_s, rebuild_s=0.1, cpu_s=0.5, memory_bytes=memory_bytes)


def result(*seconds: float, pages: int = TARGET_PAGES, memory: int = 0) -> RestartResult:
    return RestartResult(
        machine={}, pages=pages, fill_s=1.0, empty=run_of(0.3), runs=[run_of(s, (40 << 20) + memory) for s in seconds]
    )


@pytest.mark.parametrize(("seconds", "met"), [((1.9, 1.8, 5.0), True), ((2.1, 2.0, 1.0), False)])
def test_the_median_decides(seconds: tuple[float, ...], met: bool) -> None:
    assert result(*seconds).ready_met is met
    assert result(*seconds).targets_met is met


def test_memory_is_what_the_pages_add() -> None:
    assert result(1.0, memory=200 * TARGET_PAGES).bytes_per_page == 200
    assert result(1.0, memory=200 * TARGET_PAGES).targets_met
    assert not result(1.0, memory=260 * TARGET_PAGES).targets_met


def test_few_pages_have_no_target() -> None:
    few = result(99.0, pages=1000, memory=1 << 30)
    assert few.ready_met is None
    assert few.memory_met is None
    assert few.targets_met


@pytest.mark.parametrize("pages", [1, 16, 17, 1000, 5000])
def test_chains_have_as_many_pages_as_asked_and_each_continues_what_came_before(pages: int) -> None:
    known = {ROOT}
    count = 0
    for parent, hashes in chains(pages, 3):
        assert parent in known
        each = [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]
        assert not known & set(each)
        known |= set(each)
        count += len(each)
    assert count == pages


def test_a_small_real_run(tmp_path: Path) -> None:
    file = tmp_path / "restart.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "maru_bench", "restart", "--pages", "3000", "--repeats", "2", "--json", str(file)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    shown, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "memory of a page" in shown
    data = json.loads(file.read_text())
    assert data["pages"] == 3000
    assert len(data["runs"]) == 2
    for run in (*data["runs"], data["empty"]):
        assert 0 <= run["rebuild_s"] < run["ready_s"] < run["match_s"]
        assert run["cpu_s"] > 0
        assert run["memory_bytes"] > 1 << 20
    assert not list(Path("/dev/shm").glob(f"maru-bench-{process.pid}-*"))
