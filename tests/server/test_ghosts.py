"""The memory of pages that are gone, against a plain dictionary."""

from __future__ import annotations

import hashlib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from maru_core.protocol import MissReason
from maru_server.ghosts import REASON_MASK, Ghosts

# Few pages, some of which share a place of the table: its index is taken from a hash's first bytes.
PAGES = [
    bytes([place]) + bytes(7) + hashlib.sha256(b"%d" % page).digest()[:24] for place in range(4) for page in range(3)
]
NAMESPACES = range(3)


def step() -> st.SearchStrategy[tuple[Any, ...]]:
    some = st.lists(st.integers(0, len(PAGES) - 1), min_size=1, max_size=3, unique_by=lambda page: page // 3)
    return st.tuples(st.sampled_from(["add", "forget"]), st.sampled_from(NAMESPACES), some, st.integers(1, 255))


@settings(max_examples=200)
@given(st.lists(step(), max_size=20))
def test_the_newest_of_a_place_is_remembered_and_only_of_its_namespace(steps: list[tuple[Any, ...]]) -> None:
    ghosts = Ghosts(1)
    known: dict[tuple[int, bytes], int] = {}
    for kind, namespace, pages, note in steps:
        hashes = b"".join(PAGES[page] for page in pages)
        if kind == "add":
            ghosts.add(namespace, hashes, note)
            for page in pages:
                known[namespace, PAGES[page]] = note
        else:
            ghosts.forget(namespace, hashes)
            for page in pages:
                known[namespace, PAGES[page]] = 0
    for namespace in NAMESPACES:
        notes = ghosts.notes(namespace, b"".join(PAGES)).tolist()
        assert notes == [ghosts.note(namespace, page) for page in PAGES]
        # A newer page takes an older one's place: what is said is right, or nothing is said.
        assert all(note in (0, known.get((namespace, page), 0)) for note, page in zip(notes, PAGES, strict=True))
    if steps and steps[-1][0] == "add":
        _, namespace, pages, note = steps[-1]
        assert [ghosts.note(namespace, PAGES[page]) for page in pages] == [note] * len(pages)
    assert ghosts.empty == all(kind == "forget" for kind, *_ in steps)


def test_it_is_as_large_as_was_asked_for_within_bounds() -> None:
    assert [Ghosts(pages).capacity for pages in (1, 1024, 1025, 1 << 30)] == [1024, 1024, 2048, 1 << 20]


def test_every_reason_fits_into_a_note() -> None:
    assert max(MissReason) <= REASON_MASK


def test_forgetting_a_page_that_is_not_there_forgets_no_other() -> None:
    ghosts = Ghosts(1)
    ghosts.add(1, PAGES[0], 2)
    ghosts.forget(1, PAGES[1])  # in the same place
    assert ghosts.note(1, PAGES[0]) == 2
    ghosts.forget(1, PAGES[0])
    assert ghosts.note(1, PAGES[0]) == 0
