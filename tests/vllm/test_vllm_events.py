"""KV events of what this engine has in Maru: told when all workers have it, taken back when it is known to be gone, never otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from vllm_specs import cache, full, group, window

from maru_core.finding import Found
from maru_core.protocol import ROOT, MissReason
from maru_vllm.groups import Placement, plan_groups

pytestmark = pytest.mark.vllm

BLOCK = 32
ALONE = Placement(0, 1, 0, 1, True)


def request(tokens: int = 100, salt: str | None = None, seed: int = 0) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    return Request(
        request_id="r", prompt_token_ids=list(range(seed, seed + tokens)), sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None, cache_salt=salt, block_hasher=get_request_block_hasher(BLOCK, sha256),
    )  # fmt: skip


def events(placement: Placement = ALONE, *groups: Any) -> Any:
    from maru_vllm.events import SchedulerEvents

    kv = cache(*groups)
    plan = plan_groups(kv, BLOCK)
    return SchedulerEvents(plan, kv.kv_cache_groups, block_tokens=BLOCK, placement=placement)


def run(keys: Sequence[bytes], start: int, stop: int, index: int = 0) -> Any:
    from maru_vllm.metadata import PageRun

    parent = keys[start - 1] if start else ROOT
    return PageRun(index, parent, b"".join(keys[start:stop]), list(range(1, 1 + stop - start)))


def found(pages: int, why: MissReason | None, *components: str) -> Found:
    return Found(pages, np.arange(1, pages + 1, dtype=np.uint32), dict.fromkeys(components or ("kv",), pages), why, 0.0)


def named(hashes: Sequence[bytes]) -> list[Any]:
    """Block hashes as vLLM writes them into events."""
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    return [maybe_convert_block_hash(each) for each in hashes]


def tell(made: Any, asked: Any, stop: int, now: float = 1.0) -> None:
    """Blocks up to ``stop`` are planned, and stored by the one worker."""
    keys = asked.block_hashes
    made.planned(asked, keys, [run(keys, 0, stop)])
    made.stored({(0, bytes(key)): 1 for key in keys[:stop]}, now)


def test_a_stored_block_is_told_as_vllm_tells_its_own() -> None:
    """Every field is what vLLM's block pool says of the same block, but for where it is."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    asked = request(salt="pepper")
    made = events()
    tell(made, asked, 3)
    told = made.take()
    assert made.take() == []
    pool = BlockPool(8, enable_caching=True, hash_block_size=BLOCK, enable_kv_cache_events=True)
    pool.cache_full_blocks(asked, pool.get_new_blocks(3), 0, 3, BLOCK, 0)
    (own,) = pool.take_events()
    assert [hash_ for event in told for hash_ in event.block_hashes] == own.block_hashes
    assert [event.parent_block_hash for event in told] == [own.parent_block_hash, *own.block_hashes[:2]]
    assert [token for event in told for token in event.token_ids] == own.token_ids
    assert [key for event in told for key in event.extra_keys or [None]] == own.extra_keys
    assert generate_block_hash_extra_keys(asked, 0, BLOCK, 0)[0] == (("cache_salt", "pepper"),)
    for event in told:
        assert (event.block_size, event.group_idx, event.lora_id, event.session_id) == (
            BLOCK,
            0,
            own.lora_id,
            own.session_id,
        )
        assert (event.medium, event.ownership, event.kv_cache_spec_kind) == ("STORAGE", "maru", "full_attention")


def test_nothing_is_told_before_every_worker_has_its_part() -> None:
    from maru_vllm.events import StoredPages

    asked = request()
    made = events(Placement(0, 2, 0, 2, True))  # two stages of two ranks
    keys = asked.block_hashes
    made.planned(asked, keys, [run(keys, 0, 2)])
    one = StoredPages([(0, bytes(keys[0])), (0, bytes(keys[1]))])
    total = one.aggregate(StoredPages([(0, bytes(keys[0]))])).aggregate(StoredPages([(0, bytes(keys[0]))]))
    made.stored(total.pages, 1.0)
    assert made.take() == []
    made.stored({(0, bytes(keys[0])): 1}, 2.0)
    assert [event.block_hashes for event in made.take()] == [named(keys[:1])]


def test_what_was_refused_is_never_told() -> None:
    from maru_vllm.events import WorkerNotes

    asked, notes, made = request(), WorkerNotes(), events()
    keys = asked.block_hashes
    made.planned(asked, keys, [run(keys, 0, 3)])
    assert notes.take() is None
    notes.stored(run(keys, 0, 3), np.array([True, False, True]))
    made.stored(notes.take().pages, 1.0)
    assert notes.take() is None
    assert [event.block_hashes[0] for event in made.take()] == named([keys[0], keys[2]])


def test_parents_are_told_before_their_children() -> None:
    from maru_vllm.events import WorkerNotes

    asked, notes, made = request(tokens=32 * 40), WorkerNotes(), events()
    keys = asked.block_hashes
    made.planned(asked, keys, [run(keys, 0, 40)])
    for start in range(0, 40, 8):
        notes.stored(run(keys, start, start + 8), np.ones(8, bool))
    made.stored(notes.take().pages, 1.0)
    assert [event.block_hashes[0] for event in made.take()] == named(keys)


def test_a_block_is_told_once() -> None:
    asked, made = request(), events()
    tell(made, asked, 3)
    assert len(made.take()) == 3
    tell(made, asked, 3)
    assert made.take() == []


def test_what_a_lookup_misses_is_taken_back() -> None:
    asked, made = request(), events()
    tell(made, asked, 3, now=1.0)
    made.take()
    keys = asked.block_hashes
    for why in (None, MissReason.NONE, MissReason.INCOMPLETE):
        made.looked_up(keys, found(0, why), asked=2.0)
    made.looked_up(request(seed=500).block_hashes, found(0, MissReason.NOT_STORED), asked=2.0)
    made.looked_up(keys, found(1, MissReason.EVICTED), asked=0.5)  # asked before they were there
    assert made.take() == []
    made.looked_up(keys, found(1, MissReason.EVICTED), asked=2.0)
    (gone,) = made.take()
    assert (gone.block_hashes, gone.medium, gone.group_idx, gone.ownership) == (named(keys[1:3]), "STORAGE", 0, "maru")
    made.looked_up(keys, found(1, MissReason.EVICTED), asked=3.0)
    assert made.take() == []
    tell(made, asked, 3, now=4.0)
    assert [event.block_hashes[0] for event in made.take()] == named(keys[1:3])


def test_a_stage_that_has_lost_a_block_has_lost_it_for_all() -> None:
    asked = request()
    made = events(Placement(0, 2, 0, 1, True))
    keys = asked.block_hashes
    made.planned(asked, keys, [run(keys, 0, 3)])
    made.stored({(0, bytes(key)): 2 for key in keys}, 1.0)
    assert len(made.take()) == 3
    answer = found(0, MissReason.EVICTED, "kv.0", "kv.1")
    answer.covered.update({"kv.0": 3, "kv.1": 2})
    made.looked_up(keys, answer, asked=2.0)
    assert [event.block_hashes for event in made.take()] == [named(keys[2:3])]


def test_clearing_takes_everything_back() -> None:
    asked, made = request(), events()
    tell(made, asked, 2)
    made.take()
    made.planned(asked, asked.block_hashes, [run(asked.block_hashes, 2, 3)])
    made.cleared()
    assert [event.block_hashes for event in made.take()] == [named(asked.block_hashes[:2])]
    made.stored({(0, bytes(asked.block_hashes[2])): 1}, 2.0)
    assert made.take() == []


def test_groups_of_which_not_every_block_counts_are_silent() -> None:
    asked = request()
    made = events(ALONE, group(full()), group(window(64)))
    keys = asked.block_hashes
    made.planned(asked, keys, [run(keys, 0, 3, index=1), run(keys, 0, 1, index=0)])
    made.stored({(index, bytes(key)): 1 for key in keys for index in (0, 1)}, 1.0)
    assert [(event.group_idx, event.block_hashes) for event in made.take()] == [(0, named(keys[:1]))]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maru_vllm.events.PLANNED_MAX", 2)
    monkeypatch.setattr("maru_vllm.events.TOLD_MAX", 1)
    asked, made = request(), events()
    tell(made, asked, 3)
    assert [event.block_hashes[0] for event in made.take()] == named(asked.block_hashes[1:3])
    made.cleared()
    assert [event.block_hashes for event in made.take()] == [named(asked.block_hashes[2:3])]
