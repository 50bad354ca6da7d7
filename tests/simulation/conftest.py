"""Options of the simulation: ``python -m pytest tests/simulation -k replay --sim-seed 17 --sim-steps 4000`` runs one seed again."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sim-seed", type=int, default=None, help="the seed that the replay test runs")
    parser.addoption("--sim-steps", type=int, default=None, help="its steps with faults and load")
