"""The backend with real host pools and a real maru-server: round trips, misses, failures, ranks."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from model_files import write_model
from sglang_support import (
    chain,
    filled,
    indices_of,
    keys_of,
    make_mha,
    make_mla,
    page_bytes,
    storage_config,
)

from maru_core.errors import ConfigError, PoolTooSmallError
from support import ServerProcess, await_condition, impatient

pytestmark = pytest.mark.sglang

Attach = Callable[..., Any]
#: A call takes at most its messages' time limits and the wait for another writer; this only says "it did not hang".
BOUND_S = 10.0

LAYOUTS = [
    *[(make_mha, layout) for layout in ("layer_first", "page_first", "page_first_direct", "page_head")],
    *[(make_mla, layout) for layout in ("layer_first", "page_first", "page_first_direct")],
]
layouts = pytest.mark.parametrize(
    ("make", "layout"), [pytest.param(make, layout, id=f"{make.__name__[5:]}-{layout}") for make, layout in LAYOUTS]
)
#: Pages in no order, apart from one another.
SOURCE, TARGET = [7, 2, 19, 4, 11], [3, 20, 8, 1, 16]


def mla_of(make: Any) -> bool:
    return make is make_mla


def store(backend: Any, keys: list[str], pool: Any, pages: list[int], before: list[str] | None = None) -> list[bool]:
    answer: list[bool] = backend.batch_set_v1(keys, indices_of(pool, pages), chain([] if before is None else before))
    return answer


def load(backend: Any, keys: list[str], pool: Any, pages: list[int]) -> list[bool]:
    answer: list[bool] = backend.batch_get_v1(keys, indices_of(pool, pages), chain([]))
    return answer


# ---------------------------------------------------------------- round trips


@layouts
def test_pages_come_back_byte_for_byte_in_another_process(attach: Attach, make: Any, layout: str) -> None:
    writer_pool, reader_pool, keys = make(layout, fill=1), make(layout, fill=2), keys_of(5)
    writer = attach(writer_pool, is_mla_model=mla_of(make))
    reader = attach(reader_pool, is_mla_model=mla_of(make))
    assert reader.batch_exists(keys) == 0
    untouched = [page_bytes(reader_pool, page) for page in range(reader_pool.page_num)]
    assert store(writer, keys, writer_pool, SOURCE) == [True] * 5
    assert reader.batch_exists(keys) == 5
    assert load(reader, keys, reader_pool, TARGET) == [True] * 5
    for source, target in zip(SOURCE, TARGET, strict=True):
        assert page_bytes(reader_pool, target) == page_bytes(writer_pool, source)
    for page in set(range(reader_pool.page_num)) - set(TARGET):
        assert page_bytes(reader_pool, page) == untouched[page]


@layouts
def test_flat_pages_and_zero_copy_are_the_same_objects(attach: Attach, make: Any, layout: str) -> None:
    """SGLang's generic page functions, literally: get_data_page, batch_set; batch_get, set_from_flat_data_page."""
    pool, other, keys = make(layout, fill=1), make(layout), keys_of(4)
    backend = attach(pool, is_mla_model=mla_of(make))
    size = pool.page_size
    assert backend.batch_set(keys[:2], [pool.get_data_page(page * size) for page in SOURCE[:2]])
    assert store(backend, keys[2:], pool, SOURCE[2:4], keys[:2]) == [True, True]
    reader = attach(other, is_mla_model=mla_of(make))
    assert load(reader, keys, other, TARGET[:4]) == [True] * 4
    pages = reader.batch_get(keys, [other.get_dummy_flat_data_page() for _ in keys])
    for key, source, target, page in zip(keys, SOURCE, TARGET, pages, strict=False):
        want = page_bytes(pool, source)
        assert page_bytes(other, target) == want
        other.set_from_flat_data_page(0, page)
        assert page_bytes(other, 0) == want
        other.set_from_flat_data_page(0, reader.get(key))
        assert page_bytes(other, 0) == want
    assert backend.set(keys[0], pool.get_data_page(0))  # already there: kept as it is
    assert backend.set(keys[3], pool.get_data_page(0))  # and so is a page whose parent these calls cannot say
    assert load(reader, keys[:1], other, [0]) == [True]
    assert page_bytes(other, 0) == page_bytes(pool, SOURCE[0])


def test_pages_whose_k_and_v_differ_in_width(attach: Attach) -> None:
    pool, other, keys = make_mha(v_dim=4, fill=1), make_mha(v_dim=4), keys_of(3)
    assert store(attach(pool), keys, pool, [5, 1, 9]) == [True] * 3
    reader = attach(other)
    assert load(reader, keys, other, [2, 3, 8]) == [True] * 3
    assert [page_bytes(other, page) for page in (2, 3, 8)] == [page_bytes(pool, page) for page in (5, 1, 9)]
    assert reader.get(keys[0], other.k_buffer) is None  # SGLang has no flat page here


def test_a_chain_longer_than_a_batch(attach: Attach) -> None:
    pool, other, keys = make_mha(page=1, tokens=512, fill=1), make_mha(page=1, tokens=512), keys_of(300)
    writer, reader = attach(pool), attach(other)
    for start in range(0, 300, 128):
        batch = keys[start : start + 128]
        assert all(store(writer, batch, pool, list(range(start, start + len(batch))), keys[:start]))
    assert reader.batch_exists(keys) == 300
    assert all(load(reader, keys, other, list(range(300))))
    assert all(page_bytes(other, page) == page_bytes(pool, page) for page in range(300))


def test_exists_counts_from_the_start_only(attach: Attach) -> None:
    pool, keys = make_mha(fill=1), keys_of(6)
    backend = attach(pool)
    store(backend, keys[:2], pool, [0, 1])
    store(backend, keys[3:], pool, [3, 4, 5], keys[:3])
    assert backend.batch_exists(keys) == 2
    assert backend.exists(keys[0])
    assert not backend.exists(keys[2])
    assert backend.batch_exists([]) == 0
    assert load(backend, keys, pool, [6, 7, 8, 9, 10, 11]) == [True, True, False, True, True, True]


def test_what_is_there_is_not_stored_again(attach: Attach) -> None:
    pool, keys = make_mha(fill=1), keys_of(4)
    backend = attach(pool)
    assert store(backend, keys, pool, [0, 1, 2, 3]) == [True] * 4
    assert store(backend, keys, pool, [4, 5, 6, 7]) == [True] * 4
    figures = backend.counters()
    assert (figures["stored_pages"], figures["existing_pages"]) == (4, 4)
    assert load(backend, keys[:1], pool, [9]) == [True]
    assert page_bytes(pool, 9) == page_bytes(pool, 0)


def test_several_threads_at_once(attach: Attach) -> None:
    """SGLang queries, loads and stores from threads of its own at the same time."""
    pool, other = make_mha(tokens=256, fill=1), make_mha(tokens=256)
    writer, reader = attach(pool), attach(other)

    def run(thread: int) -> bool:
        keys, pages = keys_of(8, seed=thread), list(range(thread * 8, thread * 8 + 8))
        good = reader.batch_exists(keys) == 0
        good &= all(store(writer, keys, pool, pages))
        good &= reader.batch_exists(keys) == 8
        good &= all(load(reader, keys, other, pages))
        return good and all(page_bytes(other, page) == page_bytes(pool, page) for page in pages)

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(run, range(12)))


# ---------------------------------------------------------------- namespaces


def test_whatever_changes_the_bytes_is_a_miss(attach: Attach, tmp_path: Path) -> None:
    import torch

    pool, keys = make_mha(fill=1), keys_of(2)
    assert all(store(attach(pool), keys, pool, [0, 1]))
    apart: list[tuple[Any, dict[str, Any]]] = [
        (make_mha(dtype=torch.float16), {}),
        (make_mha(page=8), {}),
        (make_mha(page=2), {}),
        (make_mha("layer_first"), {}),
        (make_mha("page_first_direct"), {}),
        (make_mha(heads=1), {}),
        (make_mha(), {"extra": {"tag": "other"}}),
        (make_mha(), {"tp_size": 2}),
        (make_mha(), {"arguments": {"model_path": str(write_model(tmp_path / "tuned", seed=9))}}),
        (make_mha(), {"arguments": {"json_model_override_args": json.dumps({"rope_theta": 5.0})}}),
    ]
    for other, options in apart:
        backend = attach(other, **options)
        assert backend.batch_exists(keys) == 0, options
        assert load(backend, keys, other, [0, 1]) == [False, False], options
    again = make_mha()
    assert load(attach(again, model_name="another name"), keys, again, [0, 1]) == [True, True]


def test_an_object_of_another_length_is_a_miss(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if two processes agree on the namespace by mistake, a shorter page is never read as far as it goes."""
    from maru_sglang.storage import backend as module

    pool, longer, keys = make_mha(page=4, fill=1), make_mha(page=8, fill=2), keys_of(2)
    writer = attach(pool)
    assert all(store(writer, keys, pool, [0, 1]))
    facts = module.collect(storage_config(), module.host_pool_facts(pool))
    monkeypatch.setattr(module, "collect", lambda config, pool: facts)
    reader = attach(longer)
    assert reader.namespace == writer.namespace
    assert load(reader, keys, longer, [0, 1]) == [False, False]
    assert reader.counters()["miss_length"] == 2
    assert store(reader, keys, longer, [0, 1]) == [False, False]
    assert load(writer, keys, pool, [4, 5]) == [True, True]


def test_a_flat_page_of_another_length_is_neither_stored_nor_loaded(attach: Attach) -> None:
    import torch

    pool, keys = make_mha(fill=1), keys_of(2)
    backend = attach(pool)
    page = pool.get_data_page(0)
    for wrong in (page[:-1], torch.cat([page, page]), page.reshape(2, -1).T):
        stored = backend.set(keys[0], wrong)
        assert stored == (wrong.numel() == page.numel())  # a transposed page is made contiguous, and is a page
        if stored:
            assert backend.clear()
    assert backend.set(keys[0], page)
    assert backend.get(keys[0], page[:-1]) is None
    assert backend.get(keys[0], torch.zeros_like(page).reshape(2, -1).T) is None
    assert backend.batch_get(keys, [torch.zeros_like(page)]) == [None, None]
    assert not backend.batch_set(keys, [page])
    assert not backend.batch_set(keys, None)


# ---------------------------------------------------------------- chains


def test_without_chains_nothing_is_stored_and_the_log_says_so_once(attach: Attach, caplog: Any) -> None:
    pool, keys = make_mha(fill=1), keys_of(3)
    backend = attach(pool)
    with caplog.at_level(logging.WARNING, "maru.sglang"):
        for extra in (None, chain(None), chain(None)):
            assert backend.batch_set_v1(keys, indices_of(pool, [0, 1, 2]), extra) == [False] * 3
    assert backend.batch_exists(keys) == 0
    assert sum("prefix_keys is None" in record.message for record in caplog.records) == 1


def test_a_restarted_chain_is_refused(attach: Attach) -> None:
    """A page that is known in the middle of a sequence cannot become the start of one, nor hang elsewhere."""
    pool, keys = make_mha(fill=1), keys_of(6)
    backend = attach(pool)
    assert store(backend, keys, pool, [0, 1, 2, 3, 4, 5]) == [True] * 6
    assert store(backend, keys[2:4], pool, [6, 7])[0] is False
    assert store(backend, keys[2:4], pool, [6, 7], keys_of(2, seed=7))[0] is False
    assert store(backend, keys[2:4], pool, [6, 7], keys[:4]) == [False, False]
    assert store(backend, [keys[1], keys[1]], pool, [6, 7], keys[:1]) == [False, False]
    assert store(backend, keys[2:4], pool, [6, 7], keys[:2]) == [True, True]
    assert backend.batch_exists(keys) == 6


def test_keys_that_are_no_hashes_are_misses(attach: Attach) -> None:
    pool, keys = make_mha(fill=1), keys_of(2)
    backend = attach(pool)
    assert all(store(backend, keys, pool, [0, 1]))
    for bad in ("", "x" * 64, keys[0][:-1], keys[0] + "00", keys[0] + ".draft"):
        assert store(backend, [bad], pool, [2]) == [False]
        assert load(backend, [bad, keys[0]], pool, [2, 3]) == [False, False]
        assert backend.batch_exists([bad]) == 0
        assert not backend.exists(bad)
        assert backend.get(bad) is None
        assert not backend.set(bad, pool.get_data_page(0))


def test_host_indices_that_are_no_pages_are_misses(attach: Attach) -> None:
    pool, keys = make_mha(fill=1), keys_of(2)
    backend = attach(pool)
    good = indices_of(pool, [0, 1])
    for bad in (good[:-1], good + 1, good + pool.size, good.flip(0), good[:0], None):
        assert backend.batch_set_v1(keys, bad, chain([])) == [False, False]
        assert backend.batch_get_v1(keys, bad, chain([])) == [False, False]
    assert backend.batch_exists(keys) == 0


# ---------------------------------------------------------------- ranks


def test_a_page_is_found_only_when_every_rank_has_stored_its_shard(attach: Attach) -> None:
    pools, keys = [make_mha(heads=1, fill=rank) for rank in range(2)], keys_of(3)
    ranks = [attach(pool, tp_rank=rank, tp_size=2) for rank, pool in enumerate(pools)]
    assert ranks[0].namespace == ranks[1].namespace
    assert store(ranks[0], keys, pools[0], [0, 1, 2]) == [True] * 3
    assert [rank.batch_exists(keys) for rank in ranks] == [0, 0]
    assert load(ranks[0], keys, pools[0], [4, 5, 6]) == [False] * 3
    assert store(ranks[1], keys[:2], pools[1], [0, 1]) == [True] * 2
    assert [rank.batch_exists(keys) for rank in ranks] == [2, 2]
    for rank, pool in zip(ranks, pools, strict=True):
        assert load(rank, keys, pool, [4, 5, 6])[:2] == [True, True]
        assert page_bytes(pool, 4) == page_bytes(pool, 0)
    assert page_bytes(pools[0], 4) != page_bytes(pools[1], 4)


def test_pipeline_stages_of_different_depth_make_a_page_together(attach: Attach) -> None:
    pools, keys = [make_mha(layers=1, fill=1), make_mha(layers=2, start=1, fill=2)], keys_of(2)
    ranks = [attach(pool, pp_rank=rank, pp_size=2) for rank, pool in enumerate(pools)]
    assert store(ranks[0], keys, pools[0], [0, 1]) == [True, True]
    assert ranks[0].batch_exists(keys) == 0
    assert store(ranks[1], keys, pools[1], [0, 1]) == [True, True]
    for rank, pool in zip(ranks, pools, strict=True):
        assert rank.batch_exists(keys) == 2
        assert load(rank, keys, pool, [3, 4]) == [True, True]
        assert page_bytes(pool, 4) == page_bytes(pool, 1)


def test_mla_ranks_hold_replicas_and_one_writes(attach: Attach) -> None:
    pools, keys = [make_mla(fill=rank) for rank in range(2)], keys_of(2)
    ranks = [attach(pool, tp_rank=rank, tp_size=2, is_mla_model=True) for rank, pool in enumerate(pools)]
    assert store(ranks[1], keys, pools[1], [0, 1]) == [False, False]
    assert store(ranks[0], keys, pools[0], [0, 1]) == [True, True]
    assert [rank.batch_exists(keys) for rank in ranks] == [2, 2]
    assert load(ranks[1], keys, pools[1], [5, 6]) == [True, True]
    assert page_bytes(pools[1], 5) == page_bytes(pools[0], 0)


# ---------------------------------------------------------------- further pools


def test_v2_calls_move_the_kv_pool_and_nothing_else(attach: Attach, caplog: Any) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    pool, keys = make_mha(fill=1), keys_of(2)
    backend = attach(pool)

    def both(pages: list[int]) -> list[Any]:
        return [
            PoolTransfer(name=name, keys=keys, host_indices=indices_of(pool, pages))
            for name in (PoolName.KV, PoolName.MAMBA)
        ]

    assert backend.batch_set_v2(both([0, 1]), chain([])) == {PoolName.KV: [True, True], PoolName.MAMBA: [False, False]}
    assert backend.batch_get_v2(both([2, 3]), chain([])) == {PoolName.KV: [True, True], PoolName.MAMBA: [False, False]}
    assert page_bytes(pool, 3) == page_bytes(pool, 1)
    alone = backend.batch_exists_v2(keys, None, chain([]))
    assert (alone.kv_hit_pages, alone.restorable_prefix_pages) == (2, [1, 2])
    for policy in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
        found = backend.batch_exists_v2(
            keys, [PoolTransfer(name=PoolName.SWA, keys=keys, hit_policy=policy)], chain([])
        )
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (0, [])
    blocks = PoolTransfer(name=PoolName.INDEXER, hit_policy=PoolHitPolicy.BLOCK_GROUPS)
    assert backend.batch_exists_v2(keys, [blocks], chain([])).kv_hit_pages == 2
    assert sum("pool 'mamba'" in record.message for record in caplog.records) == 1


def test_a_pool_that_comes_later_begins_a_session_anew(attach: Attach) -> None:
    """What was stored without the draft model's pool is not shared with what is stored with it."""
    from sglang.srt.mem_cache.hicache_storage import PoolName

    pool, keys = make_mha(fill=1), keys_of(2)
    backend = attach(pool)
    backend.register_mem_host_pool_v2(pool, PoolName.KV)
    assert all(store(backend, keys, pool, [0, 1]))
    backend.register_mem_host_pool_v2(make_mha(layers=1), PoolName.DRAFT)
    assert backend.batch_exists(keys) == 0
    assert load(backend, keys, pool, [2, 3]) == [False, False]
    assert store(backend, keys, pool, [0, 1]) == [True, True]
    with pytest.raises(ConfigError, match=r"Maru does not know the host pool builtins.object of 'swa'"):
        backend.register_mem_host_pool_v2(object(), PoolName.SWA)


# ---------------------------------------------------------------- failures


def test_a_killed_server_is_a_miss_in_time_and_a_new_one_knows_everything(
    attach: Attach, server: ServerProcess
) -> None:
    pool, keys = make_mha(fill=1), keys_of(4)
    backend = attach(pool)
    assert all(store(backend, keys, pool, [0, 1, 2, 3]))
    with impatient(backend._store._session):
        server.kill()
        for call, want in (
            (lambda: backend.batch_exists(keys), 0),
            (lambda: load(backend, keys, pool, [4, 5, 6, 7]), [False] * 4),
            (lambda: store(backend, keys_of(2, seed=1), pool, [0, 1]), [False] * 2),
            (lambda: backend.exists(keys[0]), False),
            (lambda: backend.get(keys[0]), None),
            (lambda: backend.set(keys_of(1, seed=2)[0], pool.get_data_page(0)), False),
            (lambda: backend.clear(), False),
        ):
            began = time.monotonic()
            answer = call()
            assert answer == want
            assert time.monotonic() - began < BOUND_S
    server.start()
    await_condition(lambda: backend.batch_exists(keys) == 4, "the backend finds its pages again")
    await_condition(lambda: load(backend, keys, pool, [4, 5, 6, 7]) == [True] * 4, "and loads them")
    assert [page_bytes(pool, page) for page in (4, 5, 6, 7)] == [page_bytes(pool, page) for page in range(4)]
    assert store(backend, keys_of(2, seed=1), pool, [0, 1]) == [True, True]


def test_attaching_while_the_server_is_away_works_and_begins_when_it_comes(
    attach: Attach, server: ServerProcess
) -> None:
    pool, keys = make_mha(fill=1), keys_of(2)
    server.kill()
    backend = attach(pool, extra={"timeout_ms": 200})
    assert backend.batch_exists(keys) == 0
    assert store(backend, keys, pool, [0, 1]) == [False, False]
    backend._store._session.timeout_s = 60
    server.start()
    await_condition(lambda: store(backend, keys, pool, [0, 1]) == [True, True], "pages are stored")


def test_nothing_but_the_constructor_raises(attach: Attach, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Whatever breaks below: as many answers as questions, all of them "no"."""
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    from maru_core.store import Store

    pool, keys = make_mha(fill=1), keys_of(3)
    backend = attach(pool, enable_storage_metrics=True)

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("broken below")

    for name in ("prefix", "present", "put", "get", "clear", "stats"):
        monkeypatch.setattr(Store, name, broken)
    indices = indices_of(pool, [0, 1, 2])
    transfer = PoolTransfer(name=PoolName.KV, keys=keys, host_indices=indices)
    page = pool.get_data_page(0)
    assert backend.batch_exists(keys, chain([])) == 0
    assert backend.batch_exists_v2(keys, None, chain([])).kv_hit_pages == 0
    assert backend.batch_get_v1(keys, indices, chain([])) == [False] * 3
    assert backend.batch_set_v1(keys, indices, chain([])) == [False] * 3
    assert backend.batch_get_v2([transfer], chain([])) == {PoolName.KV: [False] * 3}
    assert backend.batch_set_v2([transfer], chain([])) == {PoolName.KV: [False] * 3}
    assert backend.batch_get(keys, [page] * 3) == [None] * 3
    assert backend.batch_set(keys, [page] * 3) is False
    assert backend.get(keys[0]) is None
    assert backend.set(keys[0], page) is False
    assert backend.set(keys[0], None) is False
    assert backend.exists(keys[0]) is False
    assert backend.clear() is False
    assert backend.counters() == {}
    assert backend.get_stats().prefetch_pgs == []
    assert any("fault in" in record.message for record in caplog.records)


def test_after_new_weights_everything_is_a_miss(attach: Attach, caplog: Any) -> None:
    pool, keys = make_mha(fill=1), keys_of(2)
    backend = attach(pool)
    assert all(store(backend, keys, pool, [0, 1]))
    backend.weights_changed()
    backend.weights_changed()
    assert backend.batch_exists(keys) == 0
    assert load(backend, keys, pool, [2, 3]) == [False, False]
    assert store(backend, keys_of(2, seed=1), pool, [0, 1]) == [False, False]
    assert backend.get(keys[0]) is None
    assert sum("weights were replaced" in record.message for record in caplog.records) == 1
    assert load(attach(pool), keys, pool, [2, 3]) == [True, True]  # what was stored before is still right


def test_clear_leaves_nothing_readable(attach: Attach) -> None:
    pool, keys = make_mha(fill=1), keys_of(3)
    writer, reader = attach(pool), attach(pool)
    assert all(store(writer, keys, pool, [0, 1, 2]))
    assert reader.batch_exists(keys) == 3  # located: the reader may remember where
    assert writer.clear() is True
    assert load(reader, keys, pool, [4, 5, 6]) == [False] * 3
    assert reader.batch_exists(keys) == 0


def test_closed_is_closed(attach: Attach) -> None:
    pool, keys = make_mha(fill=1), keys_of(2)
    backend = attach(pool)
    assert all(store(backend, keys, pool, [0, 1]))
    backend.close()
    backend.close()
    assert backend.batch_exists(keys) == 0
    assert load(backend, keys, pool, [2, 3]) == [False, False]
    assert store(backend, keys, pool, [2, 3]) == [False, False]
    again = attach(pool)
    assert load(again, keys, pool, [2, 3]) == [True, True]


# ---------------------------------------------------------------- attaching


def test_a_dynamic_backend_gets_its_pool_later(publish: Callable[..., Any], server: ServerProcess) -> None:
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    publish()
    pool, keys = make_mha(fill=1), keys_of(2)
    extra = {
        "backend_name": "maru", "module_path": "maru_sglang.storage.backend", "class_name": "MaruHiCacheStorage",
        "interface_v1": 1, "server": server.endpoint, "timeout_ms": 60_000,
    }  # fmt: skip
    backend = StorageBackendFactory.create_backend("dynamic", storage_config(extra_config=extra), pool)
    assert backend.batch_exists(keys) == 0
    assert backend.batch_get_v1(keys, indices_of(pool, [0, 1])) == [False, False]
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    assert all(store(backend, keys, pool, [0, 1]))
    backend.close()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"extra": {"servr": "ipc:///x"}}, ConfigError, "did you mean 'server'"),
        ({"extra": {"timeout_ms": "soon"}}, ConfigError, "timeout_ms is 'soon'"),
        ({"attn_cp_size": 2}, ConfigError, "attn_cp_size"),
        ({"arguments": {"load_format": "remote"}}, ConfigError, "--load-format"),
    ],
    ids=["unknown key", "bad value", "context parallel", "remote weights"],
)
def test_what_cannot_work_is_refused_at_attach(
    attach: Attach, options: dict[str, Any], error: type, words: str
) -> None:
    with pytest.raises(error, match=words):
        attach(make_mha(), **options)


def test_a_page_larger_than_an_extent_is_refused_at_attach(attach: Attach) -> None:
    with pytest.raises(PoolTooSmallError, match="larger"):
        attach(make_mha(layers=4, heads=8, dim=128, page=512, tokens=1024))


def test_another_pool_while_attached_is_refused(attach: Attach) -> None:
    backend = attach(make_mha())
    with pytest.raises(ConfigError, match="heads"):
        backend.register_mem_pool_host(make_mha(heads=1))
    same = make_mha(fill=3)
    backend.register_mem_pool_host(same)
    assert store(backend, keys_of(1), same, [0]) == [True]


def test_figures_for_sglangs_metrics(attach: Attach) -> None:
    from sglang.srt.observability.metrics_collector import StorageMetrics

    pool, keys = filled(make_mha(), 1), keys_of(3)
    assert attach(pool).get_stats() is None
    backend = attach(pool, enable_storage_metrics=True)
    store(backend, keys, pool, [0, 1, 2])
    load(backend, keys[:2], pool, [3, 4])
    figures = backend.get_stats()
    assert isinstance(figures, StorageMetrics)
    assert (figures.backup_pgs, figures.prefetch_pgs) == ([3], [2])
    assert all(rate > 0 for rate in (*figures.backup_bandwidth, *figures.prefetch_bandwidth))
    assert backend.get_stats() == StorageMetrics()
