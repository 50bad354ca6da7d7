"""What a store remembers of the last answers, and answers that cannot be answers."""

from __future__ import annotations

import numpy as np
import pytest

from maru_core.errors import MaruError
from maru_core.locations import RECENT_MATCHES, Locations, RecentMatches, answers
from maru_core.protocol import HASH_BYTES, NO_SLOT, Located, Match

PAGES = 8
COMPONENTS = ["kv", "index"]
HASHES = np.random.default_rng(1).bytes(PAGES * HASH_BYTES)
MATCH = Match(1, 1, 1, COMPONENTS, 0, HASHES)


def located(pages: int = PAGES) -> Located:
    """Component ``c`` of page ``p`` lies in slot ``10 * c + p``."""
    slots = np.array([10 * c + p for c in range(len(COMPONENTS)) for p in range(pages)])
    packed = [(slots * factor).astype("<u8").tobytes() for factor in (4096, 3, 100, 7)]
    return Located(1, 1, pages, slots.astype("<u4").tobytes(), *packed, covered=[pages] * len(COMPONENTS))


def page(first: int, count: int = 1) -> bytes:
    return HASHES[first * HASH_BYTES : (first + count) * HASH_BYTES]


def remembered(pages: int = PAGES) -> RecentMatches:
    recent = RecentMatches()
    recent.remember(3, COMPONENTS, 0, HASHES, pages, located(pages))
    return recent


@pytest.mark.parametrize(("component", "base"), [("kv", 0), ("index", 10)])
@pytest.mark.parametrize(("first", "count"), [(0, PAGES), (0, 1), (PAGES - 1, 1), (2, 3)])
def test_any_run_of_pages_is_recalled_for_each_component(component: str, base: int, first: int, count: int) -> None:
    where = remembered().recall(3, component, 0, page(first, count))
    assert where is not None
    slots = base + first + np.arange(count)
    assert where.slots.tolist() == slots.tolist()
    assert where.offsets.tolist() == (4096 * slots).tolist()
    assert where.generations.tolist() == (3 * slots).tolist()
    assert where.lengths.tolist() == (100 * slots).tolist()
    assert where.checksums.tolist() == (7 * slots).tolist()


def test_pages_that_were_not_found_are_not_recalled() -> None:
    recent = remembered(pages=5)
    assert recent.recall(3, "kv", 0, page(0, 5)) is not None
    assert recent.recall(3, "kv", 0, page(4, 2)) is None
    assert recent.recall(3, "kv", 0, page(5)) is None


@pytest.mark.parametrize(("epoch", "component", "shard"), [(2, "kv", 0), (3, "other", 0), (3, "kv", 1)])
def test_another_question_is_not_answered(epoch: int, component: str, shard: int) -> None:
    assert remembered().recall(epoch, component, shard, HASHES) is None


def test_bytes_across_two_hashes_are_no_page() -> None:
    assert remembered().recall(3, "kv", 0, HASHES[16 : 16 + HASH_BYTES]) is None


def test_the_latest_answer_counts_and_the_oldest_goes() -> None:
    recent = remembered()
    recent.remember(3, ["kv"], 0, page(0), 1, Located(1, 1, 1, b"\x63\0\0\0", *[bytes(8)] * 4, covered=[1]))
    where = recent.recall(3, "kv", 0, page(0))
    assert where is not None
    assert where.slots.tolist() == [99]
    for _ in range(RECENT_MATCHES):
        recent.remember(4, COMPONENTS, 0, HASHES, PAGES, located())
    assert recent.recall(3, "kv", 0, page(0)) is None


def test_an_answer_with_too_few_elements_is_an_error() -> None:
    with pytest.raises(MaruError, match="located 8 objects where 8 a component"):
        Locations.of(Located(1, 1, PAGES, bytes(4 * PAGES), *[bytes(8 * PAGES)] * 4), PAGES, 1)


def test_what_can_be_an_answer() -> None:
    assert answers(MATCH, located())
    assert answers(MATCH, located(3))
    sparse = Match(1, 1, 1, ["kv"], 0, page(0), sparse=True)
    nothing = np.array([NO_SLOT], "<u4").tobytes()
    assert answers(sparse, Located(1, 1, 0, nothing, *[bytes(8)] * 4))


@pytest.mark.parametrize(
    "covered",
    [[], [PAGES], [PAGES] * 3, [PAGES, PAGES + 1], [-1, PAGES]],
    ids=["none", "one", "three", "beyond", "below"],
)
def test_what_components_reach_must_fit(covered: list[int]) -> None:
    reply = located()
    assert not answers(MATCH, Located(*[getattr(reply, name) for name in reply.__struct_fields__[:-1]], covered))
    assert not answers(Match(1, 1, 1, [], 0, HASHES), Located(1, 1, 0, *[b""] * 5))
