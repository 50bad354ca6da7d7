"""``maru-bench copy``: its arithmetic, and a small real run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from maru_bench.copy import (
    CopyOptions,
    CopyResult,
    _check,
    _scribble,
    make_row,
    parse_bytes,
    parse_counts,
    run,
)
from maru_bench.pages import EngineBuffer
from maru_bench.pages import addresses as addresses_of
from maru_core.errors import ConfigError, MaruError

MIB = 1 << 20


def samples(maru: float, memcpy: float, file: float) -> dict[str, list[float]]:
    """Three samples of each peer with those medians."""
    return {
        name: [median / 2, median, median * 10]
        for name, median in {"maru": maru, "memcpy": memcpy, "file": file}.items()
    }


def test_speeds_are_of_the_medians_and_ratios_are_of_the_speeds() -> None:
    row = make_row("store", 4 * MIB, 16, samples(0.02, 0.01, 0.08), 64 * MIB)
    assert row.maru_gbps == pytest.approx(64 * MIB / 0.02 / 1e9)
    assert row.memcpy_gbps == pytest.approx(64 * MIB / 0.01 / 1e9)
    assert row.file_gbps == pytest.approx(64 * MIB / 0.08 / 1e9)
    assert row.to_memcpy == pytest.approx(0.5)
    assert row.to_file == pytest.approx(4.0)
    assert row.met is False


@pytest.mark.parametrize(
    ("page_bytes", "batch", "maru", "met"),
    [
        (MIB, 16, 0.0100, True),
        (MIB, 16, 0.0117, True),
        (MIB, 16, 0.0118, False),
        (MIB, 15, 0.0500, None),  # less than 16 MiB: no target
        (16 * MIB, 1, 0.0500, False),
    ],
)
def test_only_batches_of_16_mib_have_the_target(page_bytes: int, batch: int, maru: float, met: bool | None) -> None:
    row = make_row("load", page_bytes, batch, samples(maru, 0.01, 0.01), page_bytes * batch)
    assert row.met is met
    assert (row.target is None) == (met is None)
    assert CopyResult(machine={}, repeats=3, threads=None, rows=[row]).targets_met == (met is not False)


def test_addresses_are_those_of_each_pages_two_halves() -> None:
    engine = EngineBuffer(MIB)
    pages = engine.pages(2, 3, 8192, 16)
    addresses = addresses_of(pages)
    assert addresses.shape == (3, 2)
    for page in range(3):
        for fragment in range(2):
            assert addresses[page, fragment] == pages[fragment, page].__array_interface__["data"][0]
    assert np.shares_memory(pages, engine.data)


@pytest.mark.parametrize(("text", "size"), [("64K", 65536), ("4M", 4 * MIB), ("8192", 8192), (" 1m ", MIB)])
def test_sizes_that_are_understood(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "4", "64KB", "-1M", "4097", "1.5M"])
def test_sizes_that_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--sizes has"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["", "0", "1,,2", "x", "5000"])
def test_counts_that_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--batches is"):
        parse_counts("--batches", text)


def test_bytes_that_were_not_loaded_are_noticed() -> None:
    engine = EngineBuffer(MIB)
    marks = _scribble(engine, MIB)
    with pytest.raises(MaruError, match="peer loaded other bytes"):
        _check("peer", engine, marks)
    where, before = marks
    engine.data[where] = before
    _check("peer", engine, marks)
    engine.data[where[-1]] ^= 1
    with pytest.raises(MaruError, match="peer loaded other bytes"):
        _check("peer", engine, marks)


def test_more_than_the_memory_limit_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="give smaller --sizes or --batches"):
        run(CopyOptions(page_bytes=[64 * MIB], batches=[128]), lambda text: None)


def test_a_small_real_run_writes_every_row(tmp_path: Path) -> None:
    file = tmp_path / "copy.json"
    command = [sys.executable, "-m", "maru_bench", "copy", "--sizes", "64K,256K", "--batches", "1,5", "--repeats", "2"]
    done = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    data = json.loads(file.read_text())
    assert data["repeats"] == 2
    assert data["machine"]["cpus"] >= 1
    assert [(row["operation"], row["page_bytes"], row["batch"]) for row in data["rows"]] == [
        (operation, size, batch) for operation in ("store", "load") for size in (65536, 262144) for batch in (1, 5)
    ]
    for row in data["rows"]:
        assert row["maru_gbps"] > 0
        assert row["to_memcpy"] == pytest.approx(row["maru_gbps"] / row["memcpy_gbps"])
        assert row["to_file"] == pytest.approx(row["maru_gbps"] / row["file_gbps"])
        assert row["target"] is None
        assert row["met"] is None
    assert "memcpy" in done.stdout


def test_a_pool_that_is_too_small_is_an_error_and_not_a_speed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "maru_bench", "copy", "--sizes", "1M", "--batches", "64", "--repeats", "1"]
    done = subprocess.run([*command, "--pool", "16M"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "maru-bench:" in done.stderr
    assert "--pool" in done.stderr
    assert "Traceback" not in done.stderr
