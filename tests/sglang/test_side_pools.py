"""Pools beside the KV pool: the right bytes, one component each, SGLang's rules for hits, and refusals.

Real host pools over a real maru-server; the calls are those of SGLang's hybrid controller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sglang_support import chain, indices_of, keys_of, make_mha, make_mla, page_bytes, storage_config
from side_pool_support import (
    PAGE,
    flat_bytes,
    make_indexer,
    make_k_only,
    make_logical,
    make_mamba,
    make_qsa,
    make_ring,
    make_rows,
)

from maru_core.errors import ConfigError

pytestmark = pytest.mark.sglang

Attach = Callable[..., Any]
ROW_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
POOLS = [
    *[pytest.param(make_mamba, {"layout": layout}, id=f"mamba-{layout}") for layout in ROW_LAYOUTS[1:]],
    pytest.param(make_mamba, {"slot_states": True}, id="mamba-slot-states"),
    *[pytest.param(make, {"layout": layout}, id=f"{make.__name__[5:]}-{layout}")
      for make in (make_indexer, make_k_only, make_qsa, make_rows, make_ring) for layout in ROW_LAYOUTS],
    *[pytest.param(make, {"layout": layout, "page": PAGE}, id=f"{make.__name__[5:]}-{layout}")
      for make in (make_mha, make_mla) for layout in ROW_LAYOUTS],
]  # fmt: skip


def transfer(
    name: str, keys: list[str], pool: Any = None, pages: list[int] | None = None, policy: str = "all_pages"
) -> Any:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    indices = None if pool is None else indices_of(pool, pages or [])
    return PoolTransfer(name=PoolName(name), keys=keys, host_indices=indices, hit_policy=PoolHitPolicy(policy))


@pytest.mark.parametrize(("make", "options"), POOLS)
def test_an_object_is_the_page_as_sglang_gathers_it(make: Any, options: dict[str, Any]) -> None:
    import ctypes

    from maru_sglang.storage.pages import HostPages

    pool = make(**options, fill=3)
    pages = HostPages(pool, "side")
    wanted = [5, 0, 12, pool.size // pool.page_size - 1, 7]
    fragments = pages.fragments(indices_of(pool, wanted), len(wanted))
    assert fragments is not None
    for row, page in enumerate(wanted):
        mine = b"".join(
            ctypes.string_at(int(address), int(size))
            for address, size in zip(fragments.addresses[row], fragments.sizes, strict=True)
        )
        assert mine == flat_bytes(pool, page)
        assert len(mine) == pages.object_bytes
    assert len({flat_bytes(pool, page) for page in wanted}) == len(wanted)


@pytest.mark.parametrize(
    ("make", "options"),
    [pool for pool in POOLS if "page_first" in str(pool.id) or pool.id == "mamba-slot-states"],
)
def test_side_pages_come_back_byte_for_byte_in_another_process(
    attach: Attach, make: Any, options: dict[str, Any]
) -> None:
    layout = options.get("layout", "page_first")
    kv, sides = make_mha(layout, page=PAGE, fill=1), make(**options, fill=2)
    other_kv, other = make_mha(layout, page=PAGE), make(**options)
    writer, reader = attach(kv, sides={"indexer": sides}), attach(other_kv, sides={"indexer": other})
    assert writer.namespace == reader.namespace
    keys = keys_of(4)
    # As SGLang does it: first the pools beside, then the KV pool.
    assert writer.batch_set_v2([transfer("indexer", keys, sides, [9, 2, 11, 4])], chain([])) == {"indexer": [True] * 4}
    ask = [transfer("indexer", keys)]
    assert reader.batch_exists_v2(keys, ask, chain(None)).kv_hit_pages == 0
    assert writer.batch_set_v1(keys, indices_of(kv, [3, 1, 0, 8]), chain([])) == [True] * 4
    result = reader.batch_exists_v2(keys, ask, chain(None))
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (4, [1, 2, 3, 4])
    assert result.extra_pool_hit_pages == {"kv": 4, "indexer": 4}
    before = [flat_bytes(other, page) for page in range(16)]
    assert reader.batch_get_v2([transfer("indexer", keys, other, [0, 7, 3, 10])], chain([])) == {"indexer": [True] * 4}
    for source, target in zip([9, 2, 11, 4], [0, 7, 3, 10], strict=True):
        assert flat_bytes(other, target) == flat_bytes(sides, source)
    for page in set(range(16)) - {0, 7, 3, 10}:
        assert flat_bytes(other, page) == before[page]
    assert reader.batch_get_v1(keys, indices_of(other_kv, [5, 6, 7, 9]), chain([])) == [True] * 4
    assert page_bytes(other_kv, 9) == page_bytes(kv, 8)


def window_of(name: str, window: int) -> Any:
    return transfer(name, ["__placeholder__"] * window, policy="trailing_pages")


def test_a_window_counts_only_where_all_of_it_is_there(attach: Attach) -> None:
    """Six pages, of whose window pages 1 and 2 and page 5 are stored: 3 is an end, 4 and 5 are none."""
    kv, swa, keys = make_mha(page=PAGE, fill=1), make_mha(page=PAGE, layers=2, fill=2), keys_of(6)
    engine = attach(kv, sides={"swa": swa})
    assert all(engine.batch_set_v1(keys, indices_of(kv, list(range(6))), chain([])))
    assert engine.batch_exists_v2(keys, [window_of("swa", 2)]).kv_hit_pages == 0
    stored = engine.batch_set_v2(
        [transfer("swa", keys[1:3], swa, [0, 1], "trailing_pages")], chain(keys[:1])
    )  # what SGLang passes for a window: the chain up to it
    assert stored == {"swa": [True, True]}
    assert engine.batch_set_v2([transfer("swa", keys[5:], swa, [2], "trailing_pages")], chain(keys[:5])) == {
        "swa": [True]
    }
    found = engine.batch_exists_v2(keys, [window_of("swa", 2)])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, [3])
    assert found.extra_pool_hit_pages == {"kv": 6, "swa": 3}
    one = engine.batch_exists_v2(keys, [window_of("swa", 1)])  # a state rather than a window
    assert (one.kv_hit_pages, one.restorable_prefix_pages) == (6, [2, 3, 6])
    assert one.extra_pool_hit_pages == {"kv": 6, "swa": 6}
    later = engine.batch_exists_v2(keys[2:], [window_of("swa", 4)])  # the two pages before are on the device
    assert later.restorable_prefix_pages == [1]
    target = attach(make_mha(page=PAGE), sides={"swa": (loaded := make_mha(page=PAGE, layers=2))})
    assert target.batch_get_v2([transfer("swa", keys[1:3], loaded, [7, 8], "trailing_pages")]) == {"swa": [True, True]}
    assert [page_bytes(loaded, page) for page in (7, 8)] == [page_bytes(swa, page) for page in (0, 1)]


def test_ends_of_several_pools_are_those_that_all_have(attach: Attach) -> None:
    kv, swa, mamba, keys = make_mha(page=PAGE, fill=1), make_mha(page=PAGE, fill=2), make_mamba(fill=3), keys_of(8)
    engine = attach(kv, sides={"swa": swa, "mamba": mamba})
    assert all(engine.batch_set_v1(keys, indices_of(kv, list(range(8))), chain([])))
    engine.batch_set_v2([transfer("swa", keys[:6], swa, list(range(6)))], chain([]))
    for end in (2, 5, 8):
        engine.batch_set_v2([transfer("mamba", keys[end - 1 : end], mamba, [end])], chain(keys[: end - 1]))
    found = engine.batch_exists_v2(keys, [window_of("swa", 3), window_of("mamba", 1)])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (5, [2, 5])
    assert found.extra_pool_hit_pages == {"kv": 8, "swa": 6, "mamba": 8}
    state = attach(make_mha(page=PAGE), sides={"swa": make_mha(page=PAGE), "mamba": (other := make_mamba())})
    assert state.batch_get_v2([transfer("mamba", keys[4:5], other, [11])]) == {"mamba": [True]}
    assert flat_bytes(other, 11) == flat_bytes(mamba, 5)


def test_block_groups_report_for_themselves(attach: Attach) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy

    kv, side, keys = make_mha(page=PAGE, fill=1), make_rows(fill=2), keys_of(8)
    engine = attach(kv, sides={"deepseek_v4_c128": side})
    assert all(engine.batch_set_v1(keys[:5], indices_of(kv, list(range(5))), chain([])))
    engine.batch_set_v2([transfer("deepseek_v4_c128", keys[2:4], side, [0, 1])], chain(keys[:2]))
    ask = transfer("deepseek_v4_c128", keys)
    ask.hit_policy, ask.block_pages, ask.group_pages = PoolHitPolicy.BLOCK_GROUPS, 4, 2
    found = engine.batch_exists_v2(keys, [ask])
    assert found.kv_hit_pages == 5
    assert found.extra_pool_hit_pages == {"kv": 5, "deepseek_v4_c128": 4}


def test_a_page_lives_and_dies_with_all_its_objects(attach: Attach) -> None:
    kv, swa, keys = make_mha(page=PAGE, fill=1), make_mha(page=PAGE, fill=2), keys_of(3)
    engine = attach(kv, sides={"swa": swa})
    engine.batch_set_v2([transfer("swa", keys, swa, [0, 1, 2])], chain([]))
    engine.batch_set_v1(keys, indices_of(kv, [0, 1, 2]), chain([]))
    assert engine._store.delete(bytes.fromhex(keys[1])) == 4  # two pages of two objects
    assert engine.batch_get_v2([transfer("swa", keys, swa, [4, 5, 6])]) == {"swa": [True, False, False]}
    assert engine.batch_get_v1(keys, indices_of(kv, [4, 5, 6]), chain([])) == [True, False, False]


def test_a_hit_without_the_drafts_kv_is_told(attach: Attach, caplog: Any) -> None:
    kv, draft, keys = make_mha(page=PAGE, fill=1), make_mha(page=PAGE, layers=1, fill=2), keys_of(4)
    engine = attach(kv)
    alone = engine.namespace
    engine.register_mem_host_pool_v2(draft, "draft")  # as SGLang does: after the burst, when the draft model is there
    assert engine.namespace != alone
    assert engine.namespace == attach(make_mha(page=PAGE), sides={"draft": make_mha(page=PAGE, layers=1)}).namespace
    assert all(engine.batch_set_v1(keys, indices_of(kv, [0, 1, 2, 3]), chain([])))
    engine.batch_set_v2([transfer("draft", keys[:1], draft, [0])], chain([]))
    ask = [transfer("draft", keys)]
    for _ in range(2):
        found = engine.batch_exists_v2(keys, ask)
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (1, [1])
        assert found.extra_pool_hit_pages == {"kv": 4, "draft": 1}
    assert engine.counters()["short_draft_pages"] == 6
    told = [record.message for record in caplog.records if "draft KV 'draft'" in record.message]
    assert len(told) == 1
    assert "3 pages are stored without" in told[0]


def test_a_kv_pool_without_memory_follows_the_pools_beside_it(attach: Attach) -> None:
    """DeepSeek-V4: all bytes are in compressed regions, with the KV pool's indices or the window's."""
    arguments = {"kv_cache_dtype": "fp8_e4m3"}

    def engine(seed: int | None) -> tuple[Any, dict[str, Any]]:
        sides = {
            "deepseek_v4_c4": make_rows(fill=seed), "deepseek_v4_c128": make_rows(item=11, fill=seed),
            "swa": make_rows(item=29, fill=seed), "deepseek_v4_c4_state": make_ring(fill=seed),
        }  # fmt: skip
        return attach(make_logical(), sides=sides, arguments=arguments, is_mla_model=True), sides

    (writer, mine), (reader, theirs), keys = engine(1), engine(None), keys_of(5)
    assert writer.namespace == reader.namespace
    ask = [
        transfer("deepseek_v4_c4", keys), transfer("deepseek_v4_c128", keys), window_of("swa", 2),
        window_of("deepseek_v4_c4_state", 2),
    ]  # fmt: skip
    kv = indices_of(make_logical(), list(range(5)))
    assert reader.batch_exists_v2(keys, ask).kv_hit_pages == 0
    assert reader.batch_exists(keys) == 0
    for name in ("deepseek_v4_c4", "deepseek_v4_c128"):
        assert writer.batch_set_v2([transfer(name, keys, mine[name], [3, 1, 4, 0, 5])], chain([])) == {name: [True] * 5}
    for name in ("swa", "deepseek_v4_c4_state"):
        assert writer.batch_set_v2([transfer(name, keys[3:], mine[name], [6, 2])], chain(keys[:3])) == {
            name: [True] * 2
        }
    assert writer.batch_set_v1(keys, kv, chain([])) == [True] * 5
    found = reader.batch_exists_v2(keys, ask)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (5, [5])
    assert found.extra_pool_hit_pages["kv"] == 5
    assert reader.batch_get_v1(keys, kv, chain([])) == [True] * 5
    for name in ("deepseek_v4_c4", "deepseek_v4_c128"):
        assert reader.batch_get_v2([transfer(name, keys, theirs[name], [0, 1, 2, 3, 4])]) == {name: [True] * 5}
        assert flat_bytes(theirs[name], 2) == flat_bytes(mine[name], 4)
    assert reader.batch_get_v2(
        [transfer("deepseek_v4_c4_state", keys[3:], theirs["deepseek_v4_c4_state"], [8, 9])]
    ) == {"deepseek_v4_c4_state": [True] * 2}
    assert flat_bytes(theirs["deepseek_v4_c4_state"], 9) == flat_bytes(mine["deepseek_v4_c4_state"], 2)
    without = reader.batch_exists_v2(keys, [window_of("swa", 2)])
    assert without.kv_hit_pages == 0, "no pool has a page for every page"


def test_ranks_of_a_model_with_mla_have_one_kv_and_states_of_their_own(attach: Attach) -> None:
    keys = keys_of(3)
    pools = [make_mla(page=PAGE, fill=7) for _ in range(2)]  # the same on both ranks
    states = [make_mamba(fill=rank) for rank in range(2)]
    ranks = [
        attach(pools[rank], sides={"mamba": states[rank]}, is_mla_model=True, tp_rank=rank, tp_size=2)
        for rank in range(2)
    ]
    assert ranks[0].namespace == ranks[1].namespace
    assert all(ranks[0].batch_set_v1(keys, indices_of(pools[0], [0, 1, 2]), chain([])))
    assert not any(ranks[1].batch_set_v1(keys, indices_of(pools[1], [0, 1, 2]), chain([]))), "one rank writes the KV"
    for rank in range(2):
        found = ranks[0].batch_exists_v2(keys, [window_of("mamba", 1)])
        assert found.kv_hit_pages == 0, "a state counts only with those of all ranks"
        ranks[rank].batch_set_v2([transfer("mamba", keys[2:], states[rank], [4])], chain(keys[:2]))
    for rank in range(2):
        found = ranks[rank].batch_exists_v2(keys, [window_of("mamba", 1)])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, [3])
        target = states[rank]
        assert ranks[rank].batch_get_v2([transfer("mamba", keys[2:], target, [9])]) == {"mamba": [True]}
        assert flat_bytes(target, 9) == flat_bytes(target, 4)


def test_geometry_of_every_side_pool_is_in_the_namespace(attach: Attach) -> None:
    import torch

    def of(**sides: Any) -> Any:
        return attach(make_mha(page=PAGE), sides=sides).namespace

    seen = [
        of(), of(swa=make_mha(page=PAGE)), of(swa=make_mha(page=PAGE, layers=2)), of(swa=make_mha(page=PAGE, heads=4, dim=4)),
        of(swa=make_mha(page=PAGE, dtype=torch.float16)), of(swa=make_mha("page_first_direct", page=PAGE)),
        of(draft=make_mha(page=PAGE)), of(swa=make_mla(page=PAGE)), of(mamba=make_mamba()),
        of(mamba=make_mamba("page_first_direct")), of(mamba=make_mamba(slot_states=True)), of(indexer=make_rows()),
        of(indexer=make_rows(item=38)), of(indexer=make_ring()), of(indexer=make_indexer()), of(indexer=make_k_only()),
        of(swa=make_mha(page=PAGE), mamba=make_mamba()),
    ]  # fmt: skip
    assert len({namespace.digest() for namespace in seen}) == len(seen)
    first, second = (of(**dict(order)) for order in (
        [("swa", make_mha(page=PAGE)), ("mamba", make_mamba())], [("mamba", make_mamba()), ("swa", make_mha(page=PAGE))],
    ))  # fmt: skip
    assert first == second == seen[-1], "the order of registration says nothing"


def test_pools_that_nobody_has_read_are_refused_by_name(attach: Attach) -> None:
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    from maru_sglang.storage.sides import check_entries

    class PackedStates(MambaPoolHost):
        pass

    packed = make_mamba()
    packed.__class__ = PackedStates
    with pytest.raises(ConfigError, match=r"PackedStates of 'mamba'"):
        attach(make_mha(page=PAGE), sides={"mamba": packed})
    with pytest.raises(ConfigError, match="MambaPoolHost of 'kv'"):
        attach(make_mamba())
    with pytest.raises(ConfigError, match="registered a MHATokenToKVPoolHost as 'kv'"):
        attach(make_mha(page=PAGE), sides={"kv": make_mha(page=PAGE)})
    with pytest.raises(ConfigError, match=r"pool 'swa' beside its KV pool.*--pp-size 1"):
        check_entries(storage_config(pp_size=2), {"kv": make_mha(page=PAGE), "swa": make_mha(page=PAGE)})
    with pytest.raises(ConfigError, match=r"pool 'draft' .*other heads on every rank"):
        attach(make_mla(page=PAGE), sides={"draft": make_mha(page=PAGE)}, is_mla_model=True, tp_size=2)
    attach(make_mla(page=PAGE), sides={"draft": make_mla(page=PAGE, layers=1)}, is_mla_model=True, tp_size=2)


def test_a_chain_that_restarts_is_refused_in_every_pool(attach: Attach) -> None:
    kv, swa, keys = make_mha(page=PAGE, fill=1), make_mha(page=PAGE, fill=2), keys_of(3)
    engine = attach(kv, sides={"swa": swa})
    for prefix in (None, keys[2:]):
        assert engine.batch_set_v2([transfer("swa", keys, swa, [0, 1, 2])], chain(prefix)) == {"swa": [False] * 3}
    assert engine.batch_set_v2([transfer("swa", keys, swa, [0, 1])], chain([])) == {
        "swa": [False] * 3
    }  # too few indices
    assert engine.batch_get_v2([transfer("swa", keys, swa, [0, 1, 2])]) == {"swa": [False] * 3}
