"""The hit rules against the same thing said slowly, page by page."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from maru_core.protocol import Rule, Want
from maru_server.rules import reach

ALL, TRAILING, GROUPS = Rule.ALL_PAGES, Rule.TRAILING_PAGES, Rule.BLOCK_GROUPS


def meets(want: Want, pages: list[bool], length: int) -> bool:
    """Whether a prefix of ``length`` pages is usable as far as this component goes."""
    if want.rule == ALL:
        return all(pages[:length])
    if want.rule == TRAILING:
        return all(pages[max(0, length - want.pages) : length])
    return True


def reaches(want: Want, pages: list[bool]) -> int:
    if want.rule != GROUPS:
        return max(length for length in range(len(pages) + 1) if length == 0 or meets(want, pages, length))
    covered = 0
    while covered + want.pages <= len(pages):
        block = pages[covered : covered + want.pages]
        if not all(block[want.pages - want.group :]):
            break
        covered += want.pages
    return covered


def slowly(whole: list[list[bool]], rules: list[Want]) -> tuple[int, list[int], list[int]]:
    ends = [
        length
        for length in range(1, len(whole[0]) + 1)
        if all(meets(want, pages, length) for want, pages in zip(rules, whole, strict=True))
    ]
    return max(ends, default=0), ends, [reaches(want, pages) for want, pages in zip(rules, whole, strict=True)]


def wants() -> st.SearchStrategy[Want]:
    sizes = st.integers(1, 20)
    return st.one_of(
        st.just(Want()),
        sizes.map(lambda pages: Want(TRAILING, pages)),
        sizes.flatmap(lambda pages: st.integers(1, pages).map(lambda group: Want(GROUPS, pages, group))),
    )


@st.composite
def questions(draw: st.DrawFn) -> tuple[list[list[bool]], list[Want]]:
    rules = draw(st.lists(wants(), min_size=1, max_size=4))
    count = draw(st.integers(0, 40))
    whole = []
    for _ in rules:
        gaps = draw(st.lists(st.integers(0, max(0, count - 1)), max_size=6))
        some = draw(st.booleans())
        whole.append([(page not in gaps) == some for page in range(count)])
    return whole, rules


@settings(max_examples=400)
@given(questions())
@example(([[True] * 5, [False, False, False, False, True]], [Want(), Want(TRAILING, 1)]))
def test_as_the_rules_say_page_by_page(question: tuple[list[list[bool]], list[Want]]) -> None:
    whole, rules = question
    pages, ends, covered = reach([np.array(column, bool) for column in whole], rules)
    assert (pages, ends.tolist(), covered) == slowly(whole, rules)


def columns(*texts: str) -> list[np.ndarray]:
    return [np.array([letter == "x" for letter in text], bool) for text in texts]


@pytest.mark.parametrize(
    ("whole", "rules", "ends", "covered"),
    [
        # As a draft model that was stored less far than its target.
        (("xxxxx", "xx..."), [Want(), Want()], [1, 2], [5, 2]),
        # States of a recurrent model, kept at a few places only.
        (("xxxxxx", "..x..x"), [Want(), Want(TRAILING, 1)], [3, 6], [6, 6]),
        (("xxxx..", "..x..x"), [Want(), Want(TRAILING, 1)], [3], [4, 6]),
        # A sliding window of three pages; the first prefixes are shorter than it.
        (("xxxxxxxx", "xx.xxx.x"), [Want(), Want(TRAILING, 3)], [1, 2, 6], [8, 6]),
        # Blocks of three, of which the last two count; they say how far they reach and shorten nothing.
        (("xxxxxxxx", ".xx.xx.x"), [Want(), Want(GROUPS, 3, 2)], [1, 2, 3, 4, 5, 6, 7, 8], [8, 6]),
        (("xxxx", "...."), [Want(), Want(GROUPS, 2, 1)], [1, 2, 3, 4], [4, 0]),
        ((".xxx",), [Want()], [], [0]),
        (("",), [Want(TRAILING, 2)], [], [0]),
    ],
)
def test_what_models_ask(whole: tuple[str, ...], rules: list[Want], ends: list[int], covered: list[int]) -> None:
    answer = reach(columns(*whole), rules)
    assert (answer.ends.tolist(), answer.covered) == (ends, covered)
    assert answer.pages == max(ends, default=0)
