"""Each planted fault is caught by the simulation, and as what it is."""

from __future__ import annotations

import pytest
from mutations import MUTATIONS, Mutation
from simulation import simulate

#: Seeds that are tried for one fault, one after another. Without faults test_simulation has the first of them pass.
SEEDS = range(20)
STEPS = 8000


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_fault_is_caught(mutation: Mutation) -> None:
    seen = []
    with mutation.planted():
        for seed in SEEDS:
            violation = simulate(seed, STEPS).violation
            seen.append(violation.kind if violation is not None else None)
            if seen[-1] in mutation.caught_as:
                return
    pytest.fail(f"{mutation.name} ({mutation.breaks}) was not caught as {mutation.caught_as}: {seen}")
