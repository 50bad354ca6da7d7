"""The outline of a reply says what the whole reply says, whether it is read in compiled steps or not."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maru_core import locations
from maru_core.locations import Outline, RecentMatches, answers, read_outline
from maru_core.protocol import (
    HASH_BYTES,
    POOL_SHIFT,
    Done,
    Error,
    ErrorCode,
    Located,
    Match,
    MissReason,
    decode_reply,
    encode,
)
from support import damaged

ASKED = 40
CHANCE = np.random.default_rng(3)
HASHES = CHANCE.bytes(ASKED * HASH_BYTES)
NUMBERS = st.sampled_from([0, 1, 127, 128, 255, 256, 65_535, 65_536, (1 << 32) - 1, 1 << 32, (1 << 64) - 1])


@pytest.fixture(params=["compiled", "unpacked"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "unpacked":
        monkeypatch.setattr(locations, "_reply", None)
    elif locations._reply is None:
        pytest.skip("built without a compiler: replies are unpacked")
    return str(request.param)


def asking(pages: int = ASKED) -> Match:
    return Match(1, 1, 1, ["kv"], 0, HASHES[: pages * HASH_BYTES])


def located(pages: int, /, rid: int = 1, incarnation: int = 1, why: int = 0, **changed: Any) -> Located:
    columns = [CHANCE.bytes(pages * width) for width in (4, 8, 8, 8, 8)]
    return msgspec.structs.replace(Located(rid, incarnation, pages, *columns, why=why, covered=[pages]), **changed)


@settings(max_examples=300)
@given(
    pages=st.integers(0, ASKED + 2),
    asked=st.integers(1, ASKED),
    rid=NUMBERS,
    incarnation=NUMBERS,
    why=st.integers(0, len(MissReason) + 2),
    compiled=st.booleans(),
)
def test_an_outline_is_of_what_can_be_an_answer(
    pages: int, asked: int, rid: int, incarnation: int, why: int, compiled: bool
) -> None:
    reply, request = located(pages, rid, incarnation, why), asking(asked)
    data = encode(reply)
    kept, locations._reply = locations._reply, locations._reply if compiled else None  # type: ignore[misc]
    try:
        read = read_outline(request, data)
    finally:
        locations._reply = kept  # type: ignore[misc]
    if answers(request, reply):
        assert read == Outline(rid, incarnation, pages, why, data)
    else:
        assert read == reply


@pytest.mark.parametrize(
    "changed",
    [
        {"slots": b""},
        {"offsets": bytes(8 * 4)},
        {"generations": bytes(8 * 6)},
        {"lengths": bytes(1)},
        {"checksums": bytes(8 * 5 + 1)},
        {"why": 99},
        {"held_s": 1.0},
        {"held_s": -0.0},
        {"ends": bytes(4)},
        {"covered": []},
        {"covered": [5, 5]},
        {"covered": [4]},
        {"covered": [ASKED + 1]},
        {"pages": -1},
        {"pages": 4},
    ],
    ids=str,
)
def test_what_does_not_fit_is_not_believed(way: str, changed: dict[str, Any]) -> None:
    reply = located(5, **changed)
    read = read_outline(asking(), encode(reply))
    if answers(asking(), reply):  # unusual, and possible: [4] and -0.0
        assert isinstance(read, Outline)
        assert read.pages == 5
    else:
        assert read == reply


def test_other_replies_are_themselves(way: str) -> None:
    for reply in (Done(1, 2, 3), Error(1, 2, ErrorCode.RATE, "too fast")):
        assert read_outline(asking(), encode(reply)) == reply
    with pytest.raises(msgspec.MsgspecError):
        read_outline(asking(), b"\xc1")


def test_slots_of_several_pools_are_looked_at(way: str) -> None:
    reply = located(2, slots=np.array([1, 1 << POOL_SHIFT], "<u4").tobytes())
    assert isinstance(read_outline(asking(), encode(reply), 1), Outline)
    assert read_outline(asking(), encode(reply), 2) == reply


def test_damaged_bytes_are_read_as_the_whole_reply_is() -> None:
    if locations._reply is None:
        pytest.skip("built without a compiler: replies are unpacked")
    chance, taken = random.Random(1), 0
    good = encode(located(3, rid=1 << 20, incarnation=1 << 40))
    for _ in range(20_000):
        data = damaged(chance, good)
        seen = locations._reply.outline(data, ASKED)
        if seen is None:
            continue
        taken += 1
        reply = decode_reply(data)
        assert isinstance(reply, Located)
        assert (reply.rid, reply.incarnation, reply.pages, reply.why) == seen
        assert seen[3] not in locations._REASONS or answers(asking(), reply)
    assert taken > 1000


def test_what_was_remembered_packed_is_recalled_unpacked() -> None:
    reply, recent = located(5), RecentMatches()
    recent.remember(1, ["kv"], 0, HASHES, 5, encode(reply))
    for first, count in ((0, 5), (2, 3), (4, 1)):
        where = recent.recall(1, "kv", 0, HASHES[first * HASH_BYTES : (first + count) * HASH_BYTES])
        assert where is not None
        assert where.slots.tobytes() == reply.slots[4 * first : 4 * (first + count)]
        assert where.checksums.tobytes() == reply.checksums[8 * first : 8 * (first + count)]
    assert recent.recall(1, "kv", 0, HASHES[: 6 * HASH_BYTES]) is None
