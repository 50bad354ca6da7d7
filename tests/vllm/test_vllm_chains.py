"""Chains from the positions that vLLM notes for its offload keys."""

from __future__ import annotations

import random

import pytest

from maru_core.protocol import ROOT

pytest.importorskip("torch")
pytestmark = pytest.mark.vllm

PAGE = 16


def page_hash(number: int) -> bytes:
    return number.to_bytes(32, "big")


def key(number: int, group: int = 0) -> bytes:
    from vllm.v1.kv_offload.base import make_offload_key

    return make_offload_key(page_hash(number), group)


def request(pages: int = 0, groups: int = 1):
    from vllm.v1.kv_offload.base import ReqContext

    context = ReqContext("request")
    for group in range(groups):
        name(context, 0, pages, group)
    return context


def name(context, start: int, stop: int, group: int = 0) -> None:
    """As vLLM's scheduler does for the chunks of one group."""
    for page in range(start, stop):
        context.set_offload_key_position(key(page, group), (page + 1) * PAGE)


def test_all_groups_share_the_chain() -> None:
    from maru_vllm.chains import chain_of

    chain = chain_of(request(5, groups=2), PAGE)
    assert chain.hashes == b"".join(map(page_hash, range(5)))
    assert [chain.page_of(key(3, group)) for group in (0, 1)] == [3, 3]
    assert chain.page_of(key(5)) is None
    assert [chain.parent(page) for page in (0, 1)] == [ROOT, page_hash(0)]


def test_a_chain_grows_with_its_request() -> None:
    from maru_vllm.chains import chain_of

    context = request()
    rng = random.Random(0)
    named = 0
    while named < 200:
        more = named + rng.randrange(4)
        for group in (0, 1):
            name(context, named, more, group)
        named = more
        chain = chain_of(context, PAGE)
        assert chain.hashes == b"".join(map(page_hash, range(named)))
        assert not chain.ahead


def test_what_ends_inside_a_page_is_no_page() -> None:
    from maru_vllm.chains import chain_of

    context = request(2)
    context.set_offload_key_position(key(77), 2 * PAGE + 8)
    chain = chain_of(context, PAGE)
    assert chain.page_of(key(77)) is None
    assert len(chain.pages) == 2


def test_beyond_a_gap_no_page_has_a_place() -> None:
    from maru_vllm.chains import chain_of

    context = request(2)
    name(context, 3, 5)
    assert chain_of(context, PAGE).hashes == page_hash(0) + page_hash(1)
    name(context, 2, 3)
    assert chain_of(context, PAGE).hashes == b"".join(map(page_hash, range(5)))


def test_hashes_of_another_size_are_no_pages() -> None:
    from vllm.v1.kv_offload.base import ReqContext, make_offload_key

    from maru_vllm.chains import chain_of

    context = ReqContext("request")
    context.set_offload_key_position(make_offload_key(bytes(16), 0), PAGE)
    assert not chain_of(context, PAGE).pages


def test_runs_are_consecutive_pages_of_one_group() -> None:
    from maru_vllm.chains import chain_of

    chain = chain_of(request(8, groups=2), PAGE)
    runs = chain.runs([key(0), key(1), key(4), key(5), key(6, 1), key(7, 1)])
    assert [(run.group, run.parent, run.hashes) for run in runs] == [
        (0, ROOT, page_hash(0) + page_hash(1)),
        (0, page_hash(3), page_hash(4) + page_hash(5)),
        (1, page_hash(5), page_hash(6) + page_hash(7)),
    ]
    with pytest.raises(ValueError, match="no page of its request"):
        chain.runs([key(9)])


def test_sets_of_keys_come_into_order() -> None:
    from maru_vllm.chains import chain_of, in_order

    chain = chain_of(request(6, groups=2), PAGE)
    wanted = [(key(page, group), 10 * page + group) for group in (0, 1) for page in range(6)]
    mixed = [*wanted, (key(99), 5)]
    random.Random(1).shuffle(mixed)
    assert in_order(chain, [pair[0] for pair in mixed], [pair[1] for pair in mixed]) == wanted
