"""Ranks: fewer that share with more, replicas of data-parallel attention, hand-over from prefill to decode; and refusals.

In one process, with SGLang's real host pools, over one real maru-server: each rank is a backend of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sglang_support import chain, indices_of, keys_of, make_mha, make_mla, page_bytes, storage_config

from maru_core.errors import ConfigError

pytestmark = pytest.mark.sglang

Attach = Callable[..., Any]
PAGE, HEADS = 4, 4


def head_bytes(pool: Any, page: int, first: int, count: int) -> bytes:
    """K and V of some heads of one page, as SGLang's own call for split heads tells where they are."""
    import ctypes

    parts = pool.head_num // count
    addresses, sizes = pool.get_split_heads_page_buffer_meta(indices_of(pool, [page]), parts)
    here = slice(first // count * 2, first // count * 2 + 2)
    return b"".join(ctypes.string_at(address, size) for address, size in zip(addresses[here], sizes[here], strict=True))


def split(attach: Attach, tp_size: int, seed: int | None, **extra: Any) -> list[tuple[Any, Any]]:
    """All ranks of a server of ``tp_size``, of a fleet whose largest has four."""
    made = []
    for rank in range(tp_size):
        pool = make_mha("page_head", heads=HEADS // tp_size, page=PAGE, fill=None if seed is None else seed + rank)
        backend = attach(pool, tp_rank=rank, tp_size=tp_size, tp_lcm_size=4, should_split_heads=tp_size < 4, **extra)
        made.append((backend, pool))
    return made


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (2, 4), (4, 1), (2, 2)])
def test_servers_of_different_tensor_parallel_sizes_read_each_others_heads(
    attach: Attach, writers: int, readers: int
) -> None:
    sources, targets, keys = split(attach, writers, 1), split(attach, readers, None), keys_of(3)
    for number, (backend, pool) in enumerate(sources):
        assert all(reader.batch_exists(keys) == 0 for reader, _ in targets), f"{number} of {writers} ranks have stored"
        assert backend.batch_set_v1(keys, indices_of(pool, [5, 2, 9]), chain([])) == [True] * 3
    for backend, pool in targets:
        assert backend.batch_exists(keys) == 3
        assert backend.batch_get_v1(keys, indices_of(pool, [1, 7, 4]), chain([])) == [True] * 3
    every = [(pool, head) for _, pool in sources for head in range(pool.head_num)]
    mine = [(pool, head) for _, pool in targets for head in range(pool.head_num)]
    for (source, there), (target, here) in zip(every, mine, strict=True):
        for a, b in zip([5, 2, 9], [1, 7, 4], strict=True):
            assert head_bytes(target, b, here, 1) == head_bytes(source, a, there, 1)


def test_heads_that_belong_to_one_page_are_stored_and_removed_together(attach: Attach) -> None:
    ((backend, pool),) = split(attach, 1, 1)
    keys = keys_of(2)
    assert all(backend.batch_set_v1(keys, indices_of(pool, [0, 1]), chain([])))
    figures = backend.counters()
    assert figures["stored_pages"] == 8  # objects: two pages of four shards
    assert backend._store.delete(bytes.fromhex(keys[0])) == 8
    assert backend.batch_exists(keys) == 0
    assert backend.batch_set([keys[0]], [pool.get_data_page(0)]) is True  # the flat calls divide the same way
    assert backend.batch_get_v1(keys[:1], indices_of(pool, [3]), chain([])) == [True]
    assert page_bytes(pool, 3) == page_bytes(pool, 0)


def test_pools_that_cannot_be_divided_are_refused(attach: Attach) -> None:
    with pytest.raises(
        ConfigError, match=r"pool 'swa' \(MHATokenToKVPoolHost, layout page_first\) cannot be divided into 2"
    ):
        split(attach, 2, 1, sides={"swa": make_mha("page_first", page=PAGE)})
    assert split(attach, 2, 1, sides={"swa": make_mha("page_head", page=PAGE, heads=2)})


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_replicas_of_data_parallel_attention_share(attach: Attach, kind: str) -> None:
    """Each replica has all heads of its requests: SGLang tells them apart by ``dp_rank`` alone, which no page depends on."""
    pools = [(make_mha if kind == "mha" else make_mla)(page=PAGE, fill=seed) for seed in (1, None)]
    one, two = (attach(pool, dp_rank=rank, is_mla_model=kind == "mla") for rank, pool in enumerate(pools))
    keys = keys_of(2)
    assert all(one.batch_set_v1(keys, indices_of(pools[0], [3, 4]), chain([])))
    assert all(two.batch_get_v1(keys, indices_of(pools[1], [6, 1]), chain([])))
    assert page_bytes(pools[1], 1) == page_bytes(pools[0], 4)


def test_context_parallel_ranks_are_refused(attach: Attach) -> None:
    with pytest.raises(
        ConfigError, match=r"attn_cp_size\) is 2: Maru does not support that yet: run with --attn-cp-size 1"
    ):
        attach(make_mha(page=PAGE), attn_cp_size=2)
    with pytest.raises(ConfigError, match=r"dcp_size\) is 2: Maru does not support that yet: run with --dcp-size 1"):
        attach(make_mla(page=PAGE), dcp_size=2, tp_size=2, is_mla_model=True, logical_page_size=8)


def test_sglang_itself_refuses_decode_context_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any backend is made."""
    from types import SimpleNamespace

    from sglang.srt.managers import cache_controller

    monkeypatch.setattr(cache_controller, "get_parallel", lambda: SimpleNamespace(attn_dcp_size=2))
    controller = cache_controller.HiCacheController.__new__(cache_controller.HiCacheController)
    controller.enable_storage, controller.host_memory_mode = False, "cache"
    with pytest.raises(NotImplementedError, match="HiCache L3 with DCP requires file or Mooncake storage"):
        controller.attach_storage_backend("maru")


def test_prefill_servers_store_what_decode_servers_load(attach: Attach) -> None:
    pools, keys = [make_mha(page=PAGE, fill=seed) for seed in (1, None)], keys_of(3)
    prefill, decode = (
        attach(pool, arguments={"disaggregation_mode": mode})
        for pool, mode in zip(pools, ("prefill", "decode"), strict=True)
    )
    assert prefill.namespace == decode.namespace
    assert all(prefill.batch_set_v1(keys, indices_of(pools[0], [2, 8, 5]), chain([])))
    assert decode.batch_exists(keys) == 3
    assert all(decode.batch_get_v1(keys, indices_of(pools[1], [1, 3, 0]), chain([])))
    assert page_bytes(pools[1], 0) == page_bytes(pools[0], 5)


def test_what_a_decode_server_offloads_has_no_chain_and_is_not_stored(attach: Attach, caplog: Any) -> None:
    """SGLang's decode offload passes no chain: nobody can say where such pages hang."""
    pool, keys = make_mha(page=PAGE, fill=1), keys_of(2)
    backend = attach(pool, arguments={"disaggregation_mode": "decode"})
    assert backend.batch_set_v1(keys, indices_of(pool, [0, 1]), chain(None)) == [False, False]
    assert sum("passed no chain" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_fp8_pages_come_back_and_share_with_no_other_format(attach: Attach, layout: str) -> None:
    import torch

    def engine(fmt: str, seed: int | None, dtype: Any = torch.uint8) -> tuple[Any, Any]:
        pool = make_mha(layout, page=PAGE, dtype=dtype, fill=seed)
        return attach(pool, arguments={"kv_cache_dtype": fmt}), pool

    (writer, source), (reader, target), (other, _) = (
        engine("fp8_e4m3", 1),
        engine("fp8_e4m3", None),
        engine("fp8_e5m2", 2),
    )
    keys = keys_of(2)
    assert all(writer.batch_set_v1(keys, indices_of(source, [2, 5]), chain([])))
    assert other.batch_exists(keys) == 0
    assert all(reader.batch_get_v1(keys, indices_of(target, [1, 4]), chain([])))
    assert page_bytes(target, 4) == page_bytes(source, 5)


def test_runtime_attach_is_refused_before_anything_is_made_where_a_pool_is_unknown(publish: Any) -> None:
    from maru_sglang.storage.sides import check_entries

    publish()
    with pytest.raises(ConfigError, match="does not know the host pool"):
        check_entries(storage_config(), {"kv": make_mha(page=PAGE), "mamba": object()})
