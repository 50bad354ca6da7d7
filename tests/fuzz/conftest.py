"""Says at the end of a failed run how to go on."""

from __future__ import annotations

from tests.fuzz.runs import SEED, TIMES


def pytest_report_header() -> str:
    return f"fuzzers: MARU_FUZZ={TIMES:g} MARU_FUZZ_SEED={SEED}"
