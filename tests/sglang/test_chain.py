"""Keys and chains: what SGLang passes, what Maru makes of it, and what it refuses."""

from __future__ import annotations

import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_support import keys_of

from maru_core.protocol import ROOT
from maru_sglang.radix.chain import ChainError, pack_keys, parent_of


@given(st.lists(st.binary(min_size=32, max_size=32), max_size=130))
def test_keys_pack_to_the_same_hashes(hashes: list[bytes]) -> None:
    assert pack_keys([h.hex() for h in hashes]) == b"".join(hashes)


@pytest.mark.parametrize(
    "bad",
    [
        "", "ab", "a" * 63, "a" * 65, "g" * 64, "a" * 62 + " b", " " * 64, "a" * 32 + " " * 32, "a" * 128, "é" * 64, None, 7,
        b"a" * 64, "a" * 64 + ".draft",
    ],
)  # fmt: skip
def test_what_is_not_a_hash_is_refused_and_never_cut(bad: Any) -> None:
    for keys in ([bad], [*keys_of(2), bad], [bad, *keys_of(2)]):
        with pytest.raises(ChainError) as refused:
            pack_keys(keys)
        assert refused.value.kind == "key"


def test_lengths_that_add_up_do_not_hide_wrong_keys() -> None:
    with pytest.raises(ChainError):
        pack_keys(["a" * 62, "b" * 66])


def test_root_and_not_passed_are_different() -> None:
    assert parent_of(keys_of(3), []) == ROOT
    with pytest.raises(ChainError) as refused:
        parent_of(keys_of(3), None)
    assert refused.value.kind == "unchained"


def test_parent_is_the_page_before_the_first() -> None:
    keys = keys_of(6)
    assert parent_of(keys[4:], keys[:4]).hex() == keys[3]


@pytest.mark.parametrize("prefix", [["x"], ["a" * 63], ["a" * 64 + ".swa"]])
def test_a_parent_that_is_no_hash_is_refused(prefix: list[str]) -> None:
    with pytest.raises(ChainError):
        parent_of(keys_of(2), prefix)


def test_a_chain_that_starts_again_is_refused() -> None:
    keys = keys_of(6)
    for again in (keys[2:], keys[:2], [keys[5], keys[0]]):
        with pytest.raises(ChainError) as refused:
            parent_of(again, keys[:5])
        assert refused.value.kind == "restart"
    with pytest.raises(ChainError):
        parent_of([*keys, keys[3]], [])


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("prefix", "expected"), [(None, [None, None, None]), ([], [[], 128, 256]), (["p"], [["p"], 129, 257])]
)
def test_sglang_stores_in_batches_with_the_whole_chain_before_each(prefix: Any, expected: list[Any]) -> None:
    """What the module's table says of SGLang's own backup loop: an empty chain stays an empty chain."""
    from sglang.srt.managers.cache_controller import HiCacheController, StorageOperation

    keys, seen = keys_of(300), []

    def record(hashes: list[str], indices: Any, extra_info: Any) -> bool:
        seen.append((hashes, extra_info.prefix_keys))
        return True

    import torch

    controller = types.SimpleNamespace(page_size=2, page_set_func=record)
    operation = StorageOperation(torch.arange(600), list(range(600)), hash_value=keys, prefix_keys=prefix)
    HiCacheController._page_backup(controller, operation)
    assert [len(hashes) for hashes, _ in seen] == [128, 128, 44]
    for (hashes, passed), want in zip(seen, expected, strict=True):
        if isinstance(want, int):
            assert len(passed) == want
            assert parent_of(hashes, passed).hex() == keys[keys.index(hashes[0]) - 1]
        else:
            assert passed == want
