"""Groups of vLLM's KV cache as components: names, rules, shards, and what is refused and how."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_specs import BLOCK, cache, chunked, full, group, mamba, mla, window

from maru_core.errors import ConfigError
from maru_core.mover import Fragments
from maru_core.namespace import Namespace
from maru_core.protocol import ROOT, Rule, Want
from maru_core.store import Store, StoreConfig
from maru_vllm.groups import Group, Placement, plan_groups
from support import ServerProcess

pytestmark = pytest.mark.vllm
EVERY = Want()


def last(pages: int) -> Want:
    return Want(Rule.TRAILING_PAGES, pages)


def plan(*groups: Any, **changes: Any) -> list[tuple[str, Want]]:
    return [(g.component, g.want) for g in plan_groups(cache(*groups, **changes), BLOCK)]


# ---------------------------------------------------------------- rules


def test_one_group_is_kv_with_every_page() -> None:
    (only,) = plan_groups(cache(group(full(), layers=2)), BLOCK)
    layers = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
    assert only == Group(group_id=0, component="kv", want=EVERY, layers=layers)
    assert plan(group(mla())) == [("kv", EVERY)]
    assert plan(group(full(sliding_window=64))) == [("kv", EVERY)]  # a window without the hybrid allocator


@pytest.mark.parametrize(("tokens", "pages"), [(1, 1), (2, 1), (33, 1), (34, 2), (64, 2), (65, 2), (66, 3), (1024, 32)])
def test_a_window_needs_the_pages_of_the_tokens_before_the_next(tokens: int, pages: int) -> None:
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    assert plan(group(window(tokens))) == [("kv", last(pages))]
    assert pages == max(1, SlidingWindowManager._contiguous_blocks_for_hit(tokens, BLOCK, False))


def test_hybrid_models_have_a_component_for_each_group() -> None:
    groups = (group(full()), group(window(64)), group(chunked(128)), group(mamba()))
    assert plan(*groups) == [("kv", EVERY), ("g1", last(2)), ("g2", last(3)), ("g3", last(1))]
    assert plan(group(window(64)), group(full()), group(full())) == [("g0", last(2)), ("kv", EVERY), ("g2", EVERY)]
    assert plan(group(window(64)), group(mamba())) == [("g0", last(2)), ("g1", last(1))]


def test_layers_of_one_kind_that_differ_in_size_are_one_group() -> None:
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    uniform = UniformTypeKVCacheSpecs(BLOCK, {"a": full(), "b": full(num_kv_heads=4)})
    assert plan(group(uniform)) == [("kv", EVERY)]
    assert plan(group(UniformTypeKVCacheSpecs(BLOCK, {"a": window(64), "b": window(64, head_size=16)}))) == [
        ("kv", last(2))
    ]


@pytest.mark.parametrize("end", range(1, 40))
@pytest.mark.parametrize(
    "spec", [full, lambda: window(70), lambda: window(33), lambda: chunked(128), lambda: chunked(32), mamba]
)
def test_no_page_that_vllm_reads_after_a_prefix_is_left_out(spec: Callable[[], Any], end: int) -> None:
    """vLLM's own managers say how many tokens they skip; whatever they keep is loaded, and promised by the rule."""
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    made = spec()
    (only,) = plan_groups(cache(group(made)), BLOCK)
    manager = KVCacheSpecRegistry.get_manager_class(made, None)
    kept = object.__new__(manager)  # get_num_skipped_tokens reads these attributes and nothing else
    for name in ("sliding_window", "attention_chunk_size"):
        if hasattr(made, name):
            setattr(kept, name, getattr(made, name))
    kept.extra_retained_tokens = 0
    skipped = manager.get_num_skipped_tokens(kept, end * BLOCK) // BLOCK
    assert only.first_needed(end) == skipped
    promised = max(0, end - only.want.pages) if only.want.rule == Rule.TRAILING_PAGES else 0
    assert promised <= only.first_needed(end)


# ---------------------------------------------------------------- ranks


def parallel(**changes: Any) -> Any:
    from vllm.config import ParallelConfig

    rank = changes.pop("rank", 0)
    config = ParallelConfig(distributed_executor_backend="mp", **changes)
    config.rank = rank
    return config


def test_each_rank_has_its_heads_and_each_stage_its_layers() -> None:
    shape = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}
    placements = [Placement.of(cache(), parallel(rank=rank, **shape)) for rank in range(6)]
    assert placements == [Placement(stage, 3, shard, 2, True) for stage in range(3) for shard in range(2)]
    groups = plan_groups(cache(group(full()), group(window(64))), BLOCK)
    assert [placements[4].component(each) for each in groups] == ["kv.2", "g1.2"]
    assert placements[0].wants(groups) == {
        f"{name}.{stage}": want for name, want in (("kv", EVERY), ("g1", last(2))) for stage in range(3)
    }
    assert Placement.of(cache(), parallel()).wants(plan_groups(cache(), BLOCK)) == {"kv": EVERY}


def test_of_ranks_with_the_same_kv_one_writes() -> None:
    def ranks(replicas: int) -> list[Placement]:
        shape = {"tensor_parallel_size": 4}
        return [Placement.of(cache(kv_tp_replicas=replicas), parallel(rank=rank, **shape)) for rank in range(4)]

    assert ranks(4) == [Placement(0, 1, 0, 1, writer) for writer in (True, False, False, False)]
    assert ranks(2) == [
        Placement(0, 1, 0, 2, True),
        Placement(0, 1, 0, 2, False),
        Placement(0, 1, 1, 2, True),
        Placement(0, 1, 1, 2, False),
    ]
    with pytest.raises(ConfigError, match="3 of 4 tensor-parallel ranks"):
        ranks(3)


def test_ranks_that_hold_other_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--decode-context-parallel-size is 2.*use --decode-context-parallel-size 1"):
        Placement.of(cache(), parallel(tensor_parallel_size=2, decode_context_parallel_size=2))
    with pytest.raises(ConfigError, match="--prefill-context-parallel-size is 2"):
        Placement.of(cache(), parallel(prefill_context_parallel_size=2))


# ---------------------------------------------------------------- refusals


def refused() -> list[tuple[str, Any, str]]:
    import torch
    from vllm.v1 import kv_cache_interface as kinds

    heads = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class FullAttentionSpec(kinds.FullAttentionSpec):
        """Another package's, of the same name."""

    mixed = kinds.UniformTypeKVCacheSpecs(BLOCK, {"a": window(64), "b": window(128)})
    return [
        ("other blocks", group(full(block_size=64)), "blocks of 64 tokens, and vLLM hashes every 32.*prefix-match-unit"),
        ("draft layers", group(full(), is_eagle_group=True), "draft model.*ngram"),
        ("not causal", group(full(non_causal=True)), "depends on what follows it"),
        ("states anywhere", group(mamba(mamba_cache_mode="none")), "mamba-cache-mode align"),
        ("chunks of odd length", group(chunked(100)), "choose a --block-size that divides 100"),
        ("sinks", group(kinds.SinkFullAttentionSpec(**heads, sink_len=4)), "SinkFullAttentionSpec"),
        ("window of what was generated", group(kinds.RSWASpec(**heads, rswa_window=64)), "RSWASpec"),
        ("cross attention", group(kinds.CrossAttentionSpec(**heads)), "CrossAttentionSpec"),
        ("encoder", group(kinds.EncoderOnlyAttentionSpec(**heads)), "EncoderOnlyAttentionSpec"),
        ("ring", group(kinds.CircularBufferSpec(**heads)), "CircularBufferSpec.*not found again"),
        ("hidden states", group(kinds.HiddenStateCacheSpec(**heads | {"num_kv_heads": 1})), "HiddenStateCacheSpec"),
        ("replayed window", group(kinds.SlidingWindowMLASpec(**heads, sliding_window=64, bounded_replay=True)), "not found again"),
        ("hot cache", group(kinds.HiSparseHotSpec(block_size=BLOCK, page_size=64, blocks_per_request=1)), "not found again"),
        ("resident cache", group(kinds.HiSparseResidentSpec(block_size=BLOCK, page_size=64)), "not found again"),
        ("in host memory", group(full(), host_resident=True), "HiSparse"),
        ("a copy", group(full(), enable_kv_transfer=False), "HiSparse"),
        ("two windows", group(mixed), "mixes layers"),
        ("someone else's class", group(FullAttentionSpec(**heads)), "FullAttentionSpec, which Maru does not support"),
    ]  # fmt: skip


def test_what_cannot_be_shared_is_refused_with_the_layers_and_the_cure() -> None:
    for what, bad, message in refused():
        with pytest.raises(ConfigError, match=message) as caught:
            plan_groups(cache(group(full(), name="fine"), bad), BLOCK)
        assert "KV cache group 1 (layers model.layers.0.self_attn.attn, model.layers.1" in str(caught.value), what
        assert "and 1 more" in str(caught.value)


def test_every_kind_of_cache_that_vllm_has_is_decided() -> None:
    """A kind that a later vLLM adds fails here (and is refused until it is known)."""
    from vllm.v1 import kv_cache_interface as kinds

    known = {
        name for name, kind in vars(kinds).items()
        if isinstance(kind, type) and issubclass(kind, kinds.KVCacheSpec) and kind.__module__ == kinds.__name__
    }  # fmt: skip
    taken = {"FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "SlidingWindowMLASpec"}
    taken |= {"ChunkedLocalAttentionSpec", "MambaSpec", "UniformTypeKVCacheSpecs"}
    left_out = {type(bad.kv_cache_spec).__name__ for _, bad, _ in refused()} - taken
    abstract = {"KVCacheSpec", "AttentionSpec"}
    assert known == taken | left_out | abstract


def test_a_model_without_kv_is_refused() -> None:
    with pytest.raises(ConfigError, match="no KV cache"):
        plan_groups(cache(kv_cache_groups=[]), BLOCK)


# ---------------------------------------------------------------- where a hybrid prefix may end


def test_a_hybrid_prefix_ends_where_every_group_can_go_on(tmp_path: Path) -> None:
    """Full attention has nine pages; of the window (two pages) there are the pages up to 3 and 6 to 8."""
    groups = plan_groups(cache(group(full()), group(window(64))), BLOCK)
    wants = Placement.of(cache(), parallel()).wants(groups)
    chain = [hashlib.sha256(bytes([page])).digest() for page in range(9)]
    server = ServerProcess(tmp_path, size="64M").start()
    try:
        namespace = Namespace(
            engine="vllm", hash_scheme="s", model="m", weights="w", adapter="", kv_dtype="bf16", page_tokens=BLOCK, layers="0:3", heads="kv2x8",
            layout="l", tensor_parallel=1, pipeline_parallel=1, context_parallel=1, data_parallel=1, draft="",
        )  # fmt: skip
        store = Store.open(
            StoreConfig(server=server.endpoint, timeout_ms=60_000), namespace, name="test", object_bytes=64
        )
        data = np.zeros((9, 64), np.uint8)

        def put(component: str, start: int, stop: int) -> None:
            rows = data.ctypes.data + 64 * np.arange(start, stop, dtype=np.uint64)[:, None]
            where = Fragments(addresses=rows, sizes=np.array([64], np.uint64))
            parent = chain[start - 1] if start else ROOT
            assert store.put(component, 0, 1, parent, b"".join(chain[start:stop]), where).all()

        put("kv", 0, 9)
        put("g1", 0, 3)
        put("g1", 6, 8)
        found = store.find(wants, 0, b"".join(chain))
        assert list(found.ends) == [1, 2, 3, 8]
        assert [groups[1].first_needed(int(end)) for end in found.ends] == [0, 0, 1, 6]
        store.close()
    finally:
        server.remove()
