"""The real server and the real clients under simulated time, faults and chance: nothing that was promised is broken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulation import DEFAULT_STEPS, simulate

FOLDER = Path(__file__).parent
#: Runs here; more by hand with run.py.
SEEDS = 12
STEPS = 8000


@pytest.mark.parametrize("seed", range(SEEDS))
def test_promises_hold(seed: int) -> None:
    outcome = simulate(seed, STEPS)
    assert outcome.violation is None, outcome.report()
    assert outcome.steps >= STEPS
    assert outcome.checks > 100


def test_what_happens_in_all_of_them() -> None:
    """Seeds that meet no restart, no death and no load would show nothing."""
    outcomes = [simulate(seed, 2000) for seed in range(100, 106)]
    assert all(outcome.violation is None for outcome in outcomes)
    assert sum(outcome.servers for outcome in outcomes) > len(outcomes), "restarts"
    assert sum(outcome.kills for outcome in outcomes) > 0, "killed clients"
    assert all(outcome.puts for outcome in outcomes)
    assert sum(outcome.gets for outcome in outcomes) > 50


def test_same_seed_same_events() -> None:
    first, second = simulate(7, 2000), simulate(7, 2000)
    assert (first.digest, first.steps) == (second.digest, second.steps)
    assert simulate(8, 2000).digest != first.digest


def test_same_seed_same_events_in_another_process() -> None:
    """Nothing of the process enters: no pid, no address, no hash seed, no time."""
    code = "from simulation import simulate; o = simulate(9, 1500); print(o.digest, o.steps)"
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=FOLDER,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(FOLDER)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1]


def test_replay(request: pytest.FixtureRequest) -> None:
    """What ``--sim-seed`` and ``--sim-steps`` say, or the first seed, shortly."""
    seed = request.config.getoption("--sim-seed", default=None)
    steps = request.config.getoption("--sim-steps", default=None)
    outcome = simulate(seed or 0, steps or (DEFAULT_STEPS if seed is not None else 500))
    assert outcome.violation is None, outcome.report()
