"""Two ranks of one server, as two real processes: whatever one of them sees alone, both decide alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from model_files import write_model

from support import ServerProcess

PROGRAM = Path(__file__).parent.parent / "linker_rank.py"


@pytest.fixture
def ranks(tmp_path: Path, server: ServerProcess) -> list[dict[str, Any]]:
    """What each of the two saw."""
    write_model(tmp_path / "model")
    paths = [str(PROGRAM.parent), str(PROGRAM.parent.parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(tmp_path), server.endpoint],
            stdout=subprocess.PIPE,
            stderr=(tmp_path / f"rank{rank}.log").open("wb"),
            env=env,
            text=True,
        )
        for rank in range(2)
    ]
    seen = []
    try:
        for rank, process in enumerate(running):
            out, _ = process.communicate(timeout=400)
            lines = [line.removeprefix("SEEN ") for line in out.splitlines() if line.startswith("SEEN ")]
            assert lines, (tmp_path / f"rank{rank}.log").read_text(errors="replace")[-3000:]
            seen.append(json.loads(lines[0]))
    finally:
        for process in running:
            process.kill()
            process.wait()
    return seen


@pytest.mark.sglang
@pytest.mark.timeout(480)
def test_ranks_that_see_different_things_decide_alike(ranks: list[dict[str, Any]]) -> None:
    assert [seen["shard"] for seen in ranks] == [0, 1]
    for seen in ranks:
        assert seen["stored"] == [True, True, True]
        assert seen["loaded"] == 20
        assert seen["failed"] == []
        assert seen["equal"], "each its own shard, to the last byte"
        assert seen["accepted"] == [20, 20]
        # One copied all before a page went: still that request, and no other, is aborted on both.
        assert seen["failed apart"] == ["apart-1"]
        assert seen["found"] == 20
        assert seen["refused"] == 0, "one could not load, so both compute"
        assert seen["found alone"] == 0
        assert {"stored": [True], "loaded": 20, "failed": [], "equal": True, "found": 0}.items() <= seen[
            "replicated"
        ].items()
    assert [seen["replicated"]["copied"] for seen in ranks] == [5, 0]
    assert [seen["landed here"] for seen in ranks] == [[True, True], [True, False]]
