"""A second process whose Triton interprets kernels, and why these tests are skipped where there is none."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

_missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]

#: Modules that cannot even be imported without them; SGLang's environment runs them.
collect_ignore = (
    [
        "test_batched.py",
        "test_bench_kernels.py",
        "test_choose.py",
        "test_kernels_compile.py",
        "test_layout.py",
        "test_paged_mover.py",
    ]
    if _missing
    else []
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of this folder needs torch and Triton, which come with SGLang's environment."""
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.sglang)
        if _missing:
            item.add_marker(
                pytest.mark.skip(
                    reason=f"{' and '.join(_missing)} not installed here: make sglang-env, and use its Python"
                )
            )


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[..., Any]]:
    """``interpreted(function, *arguments)`` runs a function of ``kernel_cases`` where ``TRITON_INTERPRET=1``.

    It must be set before Triton is imported, and must not be in this process, whose engines would inherit it.
    """
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        pool.submit(os.getpid).result()  # it has been started, with the environment of this moment
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    with pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()
