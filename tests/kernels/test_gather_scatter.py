"""Each kernel equals its reference bit for bit, in Triton's interpreter, over drawn shapes, and touches nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernel_cases
import pytest

Interpreted = Callable[..., Any]

#: Nothing that would make an access narrower.
EVEN = {"gap": 0, "misaligned": 0, "slots": 0, "scaled": False, "range": None, "pages": "scattered"}

pytestmark = pytest.mark.parametrize("kernel", ["gather", "scatter"])


@pytest.mark.parametrize("block", range(4))
def test_drawn_shapes(interpreted: Interpreted, kernel: str, block: int) -> None:
    interpreted(kernel_cases.check_all, kernel, range(block * 10, (block + 1) * 10))


@pytest.mark.parametrize("dtype", kernel_cases.DTYPES)
def test_each_dtype(interpreted: Interpreted, kernel: str, dtype: str) -> None:
    interpreted(kernel_cases.check, kernel, 1, EVEN | {"dtype": dtype, "layers": 3, "heads": 5, "head_size": 13})


@pytest.mark.parametrize("layers", [1, 80])
@pytest.mark.parametrize("page_tokens", [1, 128])
@pytest.mark.parametrize("shape", ["mha", "mla"])
def test_the_ends_of_what_is_asked(
    interpreted: Interpreted, kernel: str, shape: str, page_tokens: int, layers: int
) -> None:
    fixed = EVEN | {"shape": shape, "page_tokens": page_tokens, "layers": layers, "head_size": 64, "heads": 16}
    interpreted(kernel_cases.check, kernel, 2, fixed)


@pytest.mark.parametrize("pages", ["empty", "repeated", "unaligned", "all"])
def test_page_lists(interpreted: Interpreted, kernel: str, pages: str) -> None:
    interpreted(kernel_cases.check, kernel, 3, EVEN | {"pages": pages, "layers": 4, "head_size": 16})


@pytest.mark.parametrize("layers", [range(0), range(1), range(2, 5), range(4, 7), range(6, 9), range(20, 30)])
def test_layer_ranges(interpreted: Interpreted, kernel: str, layers: range) -> None:
    interpreted(kernel_cases.check, kernel, 4, EVEN | {"range": layers, "layers": 7, "scaled": True, "heads": 8})


@pytest.mark.parametrize(
    ("changes", "widths"),
    [
        ({}, (16, 16)),
        ({"slots": 8}, (8, 8)),
        ({"slots": 4}, (4, 4)),
        ({"slots": 2}, (2, 2)),
        ({"slots": 1}, (1, 1)),
        ({"misaligned": 8}, (8, 8)),
        ({"scaled": True, "heads": 8}, (16, 16)),
        ({"scaled": True, "heads": 4}, (16, 8)),
        ({"scaled": True, "heads": 2}, (16, 4)),
        ({"scaled": True, "heads": 1}, (16, 2)),
        ({"dtype": "uint8", "head_size": 13, "heads": 1}, (1, 1)),
        ({"gap": 16}, (16, 16)),
        ({"gap": 2, "dtype": "float16"}, (2, 2)),
        # Rows of 4 bytes, in pages of 16 that begin where pages do, or elsewhere.
        ({"page_tokens": 16, "shape": "mla", "head_size": 2}, (16, 16)),
        ({"page_tokens": 16, "shape": "mla", "head_size": 2, "pages": "unaligned"}, (4, 4)),
    ],
)
def test_accesses_are_as_wide_as_the_addresses_allow(
    interpreted: Interpreted, kernel: str, changes: dict[str, Any], widths: tuple[int, int]
) -> None:
    fixed = EVEN | {"page_tokens": 1, "layers": 2, "head_size": 64, "heads": 2, "dtype": "bfloat16"} | changes
    assert interpreted(kernel_cases.widths_of, kernel, 5, fixed) == widths


@pytest.mark.parametrize("programs", [1, 3, 64])
def test_the_number_of_programs_changes_nothing(interpreted: Interpreted, kernel: str, programs: int) -> None:
    fixed = EVEN | {"layers": 7, "page_tokens": 3, "heads": 3, "head_size": 65, "shape": "mha"}
    interpreted(kernel_cases.check, kernel, 6, fixed, programs)


def test_pieces_larger_than_a_tile(interpreted: Interpreted, kernel: str) -> None:
    fixed = EVEN | {"shape": "mla", "layers": 1, "page_tokens": 128, "head_size": 300, "dtype": "float16"}
    interpreted(kernel_cases.check, kernel, 7, fixed)


def test_offsets_beyond_4_gib(interpreted: Interpreted, kernel: str) -> None:
    interpreted(kernel_cases.check_far, kernel)
