"""The index of page hashes: the compiled table and the one over a dict answer alike, whatever is added and removed."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maru_core.protocol import HASH_BYTES
from maru_server import index as module
from maru_server.index import DictIndex, TableIndex, page_index

pytestmark = pytest.mark.skipif(module._index is None, reason="built without a compiler: there is only one index")


def page(number: int) -> bytes:
    return number.to_bytes(8, "little") * 4 if number else b"\1" + bytes(31)


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 300), st.integers(1, 40)), max_size=60), st.randoms())
@settings(max_examples=150, deadline=None)
def test_both_answer_alike(steps: list[tuple[bool, int, int]], random: random.Random) -> None:
    table, plain = TableIndex(64), DictIndex(64)
    known: dict[bytes, int] = {}
    free = list(range(64))
    asked = b"".join(page(number) for number in range(1, 340))
    for add, first, count in steps:
        if add:
            keys = [page(n) for n in range(first, first + count) if page(n) not in known][: len(free)]
            given_rows = [free.pop(random.randrange(len(free))) for _ in keys]
            for either in (table, plain):
                either.add(b"".join(keys), np.array(given_rows, np.int64))
            known.update(zip(keys, given_rows, strict=True))
        else:
            keys = random.sample(sorted(known), min(count, len(known)))
            gone = np.array([known.pop(key) for key in keys], np.int64)
            for either in (table, plain):
                either.remove(gone)
            free += gone.tolist()
        expected = [known.get(asked[at : at + HASH_BYTES], -7) for at in range(0, len(asked), HASH_BYTES)]
        assert table.find(asked, -7).tolist() == plain.find(asked, -7).tolist() == expected
        assert len(table) == len(plain) == len(known)
        assert (table.hashes == plain.hashes).all()
        for key, row in known.items():
            assert table.hashes[row].tobytes() == key


def test_a_table_that_grows_and_shrinks_loses_nothing() -> None:
    table = TableIndex(20_000)
    keys = np.random.default_rng(1).bytes(20_000 * HASH_BYTES)
    everything = np.arange(20_000)
    for start in range(0, 20_000, 777):
        some = everything[start : start + 777]
        table.add(keys[some[0] * HASH_BYTES : (some[-1] + 1) * HASH_BYTES], some)
    assert (table.find(keys, -1) == everything).all()
    assert len(table.table) & (len(table.table) - 1) == 0
    assert len(table) * 4 <= len(table.table) * 3
    odd = everything[1::2]
    table.remove(odd)
    expected = np.where(everything % 2, -1, everything)
    assert (table.find(keys, -1) == expected).all()
    table.remove(everything[::2])
    assert not table.table.any()
    assert not table.hashes.any()


@given(st.lists(st.lists(st.integers(1, 80), max_size=50), max_size=6))
@settings(max_examples=100, deadline=None)
def test_unknown_hashes_take_the_next_rows(batches: list[list[int]]) -> None:
    table, plain = TableIndex(1), DictIndex(1)
    known: dict[int, int] = {}
    for batch in batches:
        blob = b"".join(map(page, batch))
        expected = [known.setdefault(number, len(known)) for number in batch]
        assert table.intern(blob).tolist() == plain.intern(blob).tolist() == expected
        assert len(table) == len(plain) == len(known)
    for number, row in known.items():
        assert table.hashes[row].tobytes() == plain.hashes[row].tobytes() == page(number)
        table.remove_row(row)
        plain.remove_row(row)
        assert table.find(page(number), -1) == plain.find(page(number), -1) == [-1]


def test_hashes_that_share_a_home_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    # With a key of zeros, the first two words of a hash of zeros mix to nothing: all of these have the tag 0.
    monkeypatch.setattr(module, "_KEY", bytes(32))
    table = TableIndex(64)
    keys = [bytes(8) + n.to_bytes(8, "little") + bytes(16) for n in range(1, 61)]
    table.add(b"".join(keys), np.arange(60))
    assert len(set((table.table[table.table > 0] >> np.uint64(32)).tolist())) == 1
    assert (table.find(b"".join(keys), -1) == np.arange(60)).all()
    table.remove(rows(0, 30, 59))
    expected = [-1 if n in (0, 30, 59) else n for n in range(60)]
    assert table.find(b"".join(keys), -1).tolist() == expected
    assert table.find(bytes(8) + b"\xff" * 8 + bytes(16), -1).tolist() == [-1]


def test_the_key_is_of_the_process() -> None:
    assert any(module._KEY)
    first = TableIndex(4)
    first.add(page(1), rows(0))
    first.key = bytes(32)  # another key looks elsewhere, or finds another tag
    assert first.find(page(1), -1).tolist() == [-1]


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (lambda t: module._index.insert(t.table, t.hashes, t.key, rows(0)), "there already"),
        (lambda t: module._index.insert(t.table, t.hashes, t.key, rows(4)), "outside"),
        (lambda t: module._index.insert(t.table, t.hashes, t.key, rows(-1)), "outside"),
        (lambda t: module._index.erase(t.table, t.hashes, t.key, rows(1)), "not there"),
        (lambda t: module._index.erase(t.table[:100], t.hashes, t.key, rows(0)), "power of two"),
        (
            lambda t: module._index.find(t.table, t.hashes, t.key, page(1)[:-1], np.empty(1, np.int64), -1),
            "go together",
        ),
        (lambda t: module._index.find(t.table, t.hashes, t.key, page(1), np.empty(2, np.int64), -1), "go together"),
        (lambda t: module._index.find(t.table, t.hashes, b"short", page(1), np.empty(1, np.int64), -1), "key"),
        (lambda t: module._index.find(t.table, t.hashes[:0], t.key, page(1), np.empty(1, np.int64), -1), "outside"),
        (lambda t: module._index.move(t.table, np.zeros(64, np.uint64)), "smaller"),
    ],
)
def test_what_does_not_fit_is_refused(bad: object, what: str) -> None:
    table = TableIndex(4)
    table.add(page(1), rows(0))
    with pytest.raises(ValueError, match=what):
        bad(table)  # type: ignore[operator]
    assert table.find(page(1), -1).tolist() == [0]


def test_the_compiled_one_is_taken_where_it_was_built() -> None:
    assert isinstance(page_index(1), TableIndex)
