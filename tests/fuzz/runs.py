"""How long fuzzers run, and how a run is repeated.

``MARU_FUZZ`` multiplies the number of cases (default 1: what every test run does), ``MARU_FUZZ_SEED`` moves on to other
cases, and ``MARU_FUZZ_CASE`` runs one case alone. A case that fails says which it was.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Final

TIMES: Final = float(os.environ.get("MARU_FUZZ", "1"))
SEED: Final = int(os.environ.get("MARU_FUZZ_SEED", "0"))
CASE: Final = os.environ.get("MARU_FUZZ_CASE")


def times(count: int) -> int:
    """``count`` cases in an ordinary run."""
    return max(1, int(count * TIMES))


def cases(count: int) -> Iterator[int]:
    """The numbers of the cases to run, ``count`` in an ordinary run."""
    if CASE is not None:
        yield int(CASE)
        return
    first = SEED * 1_000_000
    yield from range(first, first + times(count))


@contextlib.contextmanager
def case(number: int) -> Iterator[random.Random]:
    """The random numbers of one case. Whatever it raises says how to run it again."""
    try:
        yield random.Random(number)
    except BaseException as error:
        error.add_note(f"fuzz case {number}: run it alone with MARU_FUZZ_CASE={number}")
        raise
