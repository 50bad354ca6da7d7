"""``maru-bench copy --transport rdma``: its arithmetic, a small real run, and what it says where it cannot run."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from maru_bench.bare_nixl import WAYS, Way
from maru_bench.copy_rdma import RdmaCopyOptions, RdmaCopyResult, make_row, run
from maru_core.errors import ConfigError

MIB = 1 << 20
COMMAND = [sys.executable, "-m", "maru_bench", "copy", "--transport", "rdma"]
needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed here")


def samples(median: float) -> list[float]:
    return [median / 2, median, median * 10]


def seconds(maru: float, staged: float, *bare: float) -> dict[str | Way, list[float]]:
    """Three samples of each peer with those medians."""
    ways = dict(zip(WAYS, map(samples, bare), strict=False))
    return {"maru": samples(maru), "staged": samples(staged), **ways}


def test_the_ratio_is_to_the_fastest_way_of_nixl() -> None:
    row = make_row("load", MIB, 64, seconds(0.020, 0.04, 0.030, 0.010, 0.020), 64 * MIB)
    assert row.bare_way == str(WAYS[1])
    assert row.bare_gbps == pytest.approx(64 * MIB / 0.01 / 1e9)
    assert row.to_bare == pytest.approx(0.5)
    assert row.staged_to_bare == pytest.approx(0.25)
    assert row.met is False


@pytest.mark.parametrize(
    ("page_bytes", "batch", "maru", "met"),
    [
        (MIB, 16, 0.0110, True),
        (MIB, 16, 0.0112, False),
        (MIB, 15, 0.0500, None),  # less than 16 MiB
        (MIB // 2, 64, 0.0500, None),  # small pages
    ],
)
def test_only_batches_of_large_pages_have_the_target(
    page_bytes: int, batch: int, maru: float, met: bool | None
) -> None:
    row = make_row("store", page_bytes, batch, seconds(maru, 0.02, 0.01), page_bytes * batch)
    assert row.met is met
    assert (row.target is None) == (met is None)
    assert RdmaCopyResult(machine={}, repeats=3, ucx_tls="", rows=[row]).targets_met == (met is not False)


def test_more_than_the_memory_limit_is_refused_before_anything_starts() -> None:
    pytest.importorskip("nixl")
    with pytest.raises(ConfigError, match="give smaller --sizes or --batches"):
        run(RdmaCopyOptions(page_bytes=[64 * MIB], batches=[64]), lambda text: None)


@pytest.mark.parametrize(
    "options",
    [["--threads", "2"], ["--pool", "64M"], ["--transport", "cxl", "--ucx-tls", "tcp"], ["--transport", "tcp"]],
)
def test_options_of_the_other_transport_are_refused_by_name(options: list[str]) -> None:
    done = subprocess.run([*COMMAND, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert options[-2] in done.stderr
    assert "Traceback" not in done.stderr


@needs_nixl
def test_a_small_real_run_writes_every_row(tmp_path: Path) -> None:
    file = tmp_path / "copy.json"
    command = [*COMMAND, "--ucx-tls", "tcp", "--sizes", "64K,256K", "--batches", "1,5", "--repeats", "2"]
    environment = {**os.environ, "UCX_NET_DEVICES": "lo"}
    done = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    data = json.loads(file.read_text())
    assert data["ucx_tls"] == "tcp"
    assert [(row["operation"], row["page_bytes"], row["batch"]) for row in data["rows"]] == [
        (operation, size, batch) for operation in ("store", "load") for size in (65536, 262144) for batch in (1, 5)
    ]
    for row in data["rows"]:
        assert row["bare_gbps"] > 0
        assert row["to_bare"] == pytest.approx(row["maru_gbps"] / row["bare_gbps"])
        assert row["staged_to_bare"] == pytest.approx(row["staged_gbps"] / row["bare_gbps"])
        assert row["bare_way"] in map(str, WAYS)
        assert row["target"] is None
    assert "NIXL" in done.stdout


_NO_NIXL = """
import sys
sys.modules["nixl"] = None
from maru_bench.cli import main
sys.argv = ["maru-bench", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize(("check", "status"), [([], 0), (["--check"], 1)])
def test_without_nixl_it_says_so(check: list[str], status: int) -> None:
    command = [sys.executable, "-c", _NO_NIXL, "copy", "--transport", "rdma", *check]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert "skipped: RDMA needs NIXL" in done.stdout


_LOSING = """
import sys
import numpy as np
from maru_core.rdma import RdmaMover
RdmaMover.{method} = lambda self, offsets, buffers: None
from maru_bench.cli import main
sys.argv = ["maru-bench", *sys.argv[1:]]
main()
"""


@needs_nixl
@pytest.mark.parametrize("method", ["store", "load"])
def test_a_mover_that_moves_nothing_is_an_error_and_not_a_speed(method: str) -> None:
    command = [sys.executable, "-c", _LOSING.format(method=method), "copy", "--transport", "rdma"]
    done = subprocess.run(
        [*command, "--sizes", "64K", "--batches", "2", "--repeats", "1"], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "loaded other bytes than it stored" in done.stderr
