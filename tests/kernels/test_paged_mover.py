"""PagedMover: whole batches and layer by layer, by the CPU, by kernels in the interpreter, by a stand-in for the CUDA runtime."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mover_cases
import pytest

Run = Callable[..., Any]


@pytest.fixture(params=["cpu", "kernel"])
def run(request: pytest.FixtureRequest) -> Run:
    """``run(case, *arguments)`` with the way of copying that the test is for."""
    if request.param == "cpu":
        return lambda case, *arguments: case(None, *arguments)
    interpreted = request.getfixturevalue("interpreted")
    return lambda case, *arguments: interpreted(functools.partial(case, "kernel"), *arguments)


@pytest.mark.parametrize("shape", ["mha", "mla"])
def test_moves_both_ways(run: Run, shape: str) -> None:
    run(mover_cases.moves_both_ways, shape)


@pytest.mark.parametrize("shape", ["mha", "mla"])
def test_loads_layer_by_layer(run: Run, shape: str) -> None:
    run(mover_cases.loads_layer_by_layer, shape)


def test_refuses_what_is_outside(run: Run) -> None:
    run(mover_cases.refuses_what_is_outside)


def test_takes_fragments_and_nothing(run: Run) -> None:
    run(mover_cases.takes_fragments_and_nothing)


@pytest.mark.parametrize("verify", ["generation", "checksum"])
def test_goes_through_a_store(run: Run, verify: str) -> None:
    run(mover_cases.goes_through_a_store, verify)
