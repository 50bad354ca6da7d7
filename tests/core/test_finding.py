"""Long chains in pieces: the answers for the pieces, put together, are the answer for the whole."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maru_core import finding
from maru_core.finding import Finding, Found, pieces
from maru_core.locations import answers
from maru_core.protocol import Hold, Located, Match, MissReason, Rule, Want
from maru_server.rules import reach

PIECE = 16


def wants() -> st.SearchStrategy[Want]:
    sizes = st.integers(1, PIECE // 2)
    return st.one_of(
        st.just(Want()),
        sizes.map(lambda pages: Want(Rule.TRAILING_PAGES, pages)),
        st.sampled_from([1, 2, 4, 8]).flatmap(
            lambda pages: st.integers(1, pages).map(lambda group: Want(Rule.BLOCK_GROUPS, pages, group))
        ),
    )


def answer(whole: list[np.ndarray], rules: list[Want], start: int, stop: int) -> Located:
    """As the server would answer for a part of a chain of which all pages are known."""
    reached = reach([column[start:stop] for column in whole], rules)
    n = reached.pages * len(rules)
    ends = reached.ends.astype("<u4").tobytes() if any(want.rule for want in rules) else b""
    why = MissReason.NONE if reached.pages == stop - start else MissReason.INCOMPLETE
    arrays = [bytes(4 * n), *[bytes(8 * n)] * 4]
    return Located(1, 1, reached.pages, *arrays, why, 0.0, ends, reached.covered)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_pieces_are_found_as_the_whole(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finding, "MAX_BATCH", PIECE)
        rules = [Want(), *data.draw(st.lists(wants(), max_size=3))]
        count = data.draw(st.integers(1, 4 * PIECE))
        missing = [data.draw(st.sets(st.integers(0, count - 1), max_size=4)) for _ in rules]
        whole = [np.array([page not in gaps for page in range(count)]) for gaps in missing]
        named = {f"c{index}": want for index, want in enumerate(rules)}
        taken = Finding(named)
        for start, stop in pieces(count, named):
            assert 0 < stop - start <= PIECE
            assert all(start % want.pages == 0 for want in rules if want.rule == Rule.BLOCK_GROUPS)
            located = answer(whole, rules, start, stop)
            assert answers(Match(1, 1, 1, list(named), 0, bytes(32 * (stop - start)), rules=rules), located)
            if not taken.take(start, stop, located):
                break
        found, all_at_once = taken.found(), reach(whole, rules)
        assert found.pages == all_at_once.pages
        assert found.ends.tolist() == all_at_once.ends.tolist()
        assert (found.why is MissReason.NONE) == (found.pages == count)
        # Pieces after the end of a component that every page needs are not asked for, whatever lies there.
        for (name, want), covered in zip(named.items(), all_at_once.covered, strict=True):
            if taken.seen == count or want.rule == Rule.ALL_PAGES:
                assert found.covered[name] == min(covered, taken.seen)
            else:
                assert found.covered[name] <= covered


def test_windows_and_blocks_too_long_for_pieces_are_looked_for_in_the_first() -> None:
    long = finding.MAX_BATCH + 1
    for want in (Want(Rule.TRAILING_PAGES, long), Want(Rule.BLOCK_GROUPS, long, 1)):
        assert list(pieces(3 * long, {"kv": Want(), "x": want})) == [(0, finding.MAX_BATCH)]
    assert list(pieces(5, {"kv": Want(Rule.TRAILING_PAGES, long)})) == [(0, 5)]


def test_no_answer_is_no_page_and_no_reason() -> None:
    nothing = Found.nothing({"kv": Want(), "swa": Want(Rule.TRAILING_PAGES, 2)})
    assert (nothing.pages, nothing.ends.tolist(), nothing.covered) == (0, [], {"kv": 0, "swa": 0})
    assert nothing.why is None


TRAILING = [Want(), Want(Rule.TRAILING_PAGES, 2)]


def whole_answer() -> tuple[Match, Located]:
    request = Match(1, 1, 1, ["kv", "swa"], 0, bytes(32 * 5), rules=TRAILING, hold=Hold(b"r", 1, 5.0))
    ends = np.array([2, 4], "<u4").tobytes()
    return request, Located(1, 1, 4, bytes(4 * 8), *[bytes(8 * 8)] * 4, 4, 1.0, ends, [5, 4])


@pytest.mark.parametrize(
    "change",
    [
        {"pages": 6},
        {"why": 6},
        {"why": -1},
        {"held_s": -1.0},
        {"held_s": float("nan")},
        {"held_s": float("inf")},
        {"covered": [5]},
        {"covered": [6, 4]},
        {"covered": [-1, 4]},
        {"ends": bytes(3)},
        {"ends": b""},
        {"ends": np.array([2, 3], "<u4").tobytes()},
        {"ends": np.array([4, 4], "<u4").tobytes()},
        {"ends": np.array([0, 4], "<u4").tobytes()},
        {"ends": np.array([3, 2, 4], "<u4").tobytes()},
        {"slots": bytes(4 * 7)},
        {"lengths": bytes(8 * 7)},
    ],
)
def test_an_answer_that_cannot_be_is_seen(change: dict[str, object]) -> None:
    request, reply = whole_answer()
    assert answers(request, reply)
    assert not answers(request, msgspec.structs.replace(reply, **change))


def test_a_hold_that_nobody_asked_for_is_no_answer() -> None:
    request, reply = whole_answer()
    asked = msgspec.structs.replace(request, hold=None)
    assert not answers(asked, reply)
    assert answers(asked, msgspec.structs.replace(reply, held_s=0.0))


def test_ends_where_no_rule_was_given_are_no_answer() -> None:
    request, reply = whole_answer()
    assert not answers(msgspec.structs.replace(request, rules=[]), reply)
    assert answers(msgspec.structs.replace(request, rules=[]), msgspec.structs.replace(reply, ends=b""))


@pytest.mark.parametrize("missing", [None, 0, 3])
def test_one_message_that_asks_for_every_page_is_found_as_a_piece_is(missing: int | None) -> None:
    named = {"kv": Want(), "index": Want()}
    whole = [np.ones(5, bool), np.array([page != missing for page in range(5)])]
    located = msgspec.structs.replace(answer(whole, list(named.values()), 0, 5), held_s=2.0)
    taken = Finding(named)
    taken.take(0, 5, located)
    one, other = Found.of(list(named), located), taken.found()
    assert one.ends.tolist() == other.ends.tolist() == list(range(1, one.pages + 1))
    assert (one.pages, one.covered, one.why, one.held_s) == (other.pages, other.covered, other.why, other.held_s)
    assert one.why is (MissReason.NONE if missing is None else MissReason.INCOMPLETE)
