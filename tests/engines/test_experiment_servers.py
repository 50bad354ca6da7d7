"""``maru-bench experiment`` in short, on real SGLang servers that it starts itself: tokens are loaded, answers are equal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from harness import has_gpu

from maru_bench.experiment.report import read_json
from maru_bench.machine import lacking

pytestmark = [pytest.mark.sglang, pytest.mark.server, pytest.mark.timeout(420)]


def test_two_modes_on_two_servers_each(tmp_path: Path, model: Path) -> None:
    words = [sys.executable, "-m", "maru_bench", "experiment", "shared-prefix", "--modes", "none,maru,mooncake"]
    words += ["--python", sys.executable, "--model", str(model), "--device", "cuda" if has_gpu() else "cpu"]
    words += ["--context", "512", "--groups", "2", "--requests", "3", "--new-tokens", "4", "--repeats", "1"]
    words += ["--start", "once", "--pool-size", "128M", "--out", str(tmp_path / "out"), "--check"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    record = read_json(tmp_path / "out" / "experiment.json")
    # What is not installed is left out, and said so.
    assert set(record.modes) | set(record.skipped) == {"none", "maru", "mooncake"}
    assert set(record.modes) >= {"none", "maru"}
    none, maru = record.rows[:2]
    assert (none.mode, maru.mode) == ("none", "maru")
    assert (none.requests, none.failed, maru.failed) == (6, 0, 0)
    assert none.equal_outputs == maru.equal_outputs == 1.0
    assert none.tokens["storage"] == 0
    # Each prefix was computed by one server, and what the other one was asked of it came from Maru, whole pages.
    first_on_another = [
        s for run in record.runs if run.mode == "maru" for s in run.samples if s.known_here < s.known_anywhere
    ]
    assert first_on_another, "the workload sends a prefix to both servers"
    assert {sample.storage_tokens for sample in first_on_another[:1]} == {512}
    assert maru.tokens["storage"] >= 512
    assert maru.hit_rate > none.hit_rate
    moved = next(run.moved for run in record.runs if run.mode == "maru")
    assert moved is not None
    assert moved.loaded_bytes > 0 < moved.stored_bytes
    assert (tmp_path / "out" / "report.html").stat().st_size > 3000
    assert {"sglang", "torch", "maru-sglang"} <= set(record.versions)
    assert record.settings["device_cache_tokens"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("mode", "module"), [("nixl", "nixl._api"), ("mooncake", "mooncake.store")])
def test_another_store_under_the_hierarchical_cache(mode: str, module: str, tmp_path: Path, model: Path) -> None:
    missing = lacking(sys.executable, [module])
    if missing:
        pytest.skip(f"no {mode} in this environment ({missing[module]}): docs/experiments.md says how to get it")
    words = [sys.executable, "-m", "maru_bench", "experiment", "shared-prefix", "--modes", f"none,{mode}"]
    words += ["--python", sys.executable, "--model", str(model), "--device", "cuda" if has_gpu() else "cpu"]
    words += ["--context", "512", "--groups", "2", "--requests", "3", "--new-tokens", "4", "--repeats", "1"]
    words += ["--start", "once", "--pool-size", "256M", "--out", str(tmp_path / "out"), "--check"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    none, other = read_json(tmp_path / "out" / "experiment.json").rows
    assert (none.mode, other.mode, none.failed, other.failed) == ("none", mode, 0, 0)
    assert other.equal_outputs == 1.0
    # Two prefixes, each asked for on the server that has not computed it.
    assert other.tokens["storage"] >= 2 * 512 > none.tokens["storage"] == 0
