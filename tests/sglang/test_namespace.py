"""Namespaces: everything that changes the bytes makes another one, equal content makes the same, and what cannot be told
is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_files import write_model, write_safetensors
from sglang_support import LAYERS, make_mha, make_mla, storage_config

from maru_core.errors import ConfigError
from maru_core.namespace import Namespace, differences
from maru_sglang.radix.namespace import EngineFacts, Placement, collect, logical_kv_dtype
from maru_sglang.radix.pool_facts import host_pool_facts

words = st.text(st.characters(codec="ascii", exclude_categories=("C", "Z"), exclude_characters=" "), max_size=20)
numbers = st.integers(0, 1 << 20)
stages = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=4).map(tuple)


def facts() -> st.SearchStrategy[EngineFacts]:
    kinds = {str: words, int: numbers, tuple[tuple[int, int], ...]: stages}
    fields = {field.name: kinds[field.type] for field in msgspec.structs.fields(EngineFacts)}
    return st.builds(EngineFacts, **fields)


# ---------------------------------------------------------------- the record


@given(facts(), facts(), st.sampled_from(EngineFacts.__struct_fields__), words)
def test_every_field_changed_alone_gives_another_digest(a: EngineFacts, b: EngineFacts, field: str, tag: str) -> None:
    changed = msgspec.structs.replace(a, **{field: getattr(b, field)})
    same = changed == a
    assert (changed.namespace(tag).digest() == a.namespace(tag).digest()) == same
    assert bool(differences(a.namespace(tag), changed.namespace(tag))) != same


@given(facts(), words, words)
def test_the_tag_keeps_deployments_apart(a: EngineFacts, one: str, other: str) -> None:
    assert (a.namespace(one).digest() == a.namespace(other).digest()) == (one == other)


@given(facts(), words)
def test_the_record_reads_back(a: EngineFacts, tag: str) -> None:
    namespace = a.namespace(tag)
    assert Namespace.parse(namespace.record()) == namespace


# ---------------------------------------------------------------- placement


@pytest.mark.sglang
def test_placement_of_ranks() -> None:
    assert Placement.of(storage_config()) == Placement(
        component="kv", components=("kv",), shard=0, world=1, writer=True
    )
    ranks = [(pp, tp) for pp in range(3) for tp in range(2)]
    whole = [Placement.of(storage_config(tp_rank=tp, tp_size=2, pp_rank=pp, pp_size=3)) for pp, tp in ranks]
    assert [(p.component, p.shard, p.world, p.writer) for p in whole] == [(f"kv.{pp}", tp, 2, True) for pp, tp in ranks]
    assert {p.components for p in whole} == {("kv.0", "kv.1", "kv.2")}
    replicas = [
        Placement.of(storage_config(tp_rank=tp, tp_size=2, pp_rank=pp, pp_size=3, is_mla_model=True))
        for pp, tp in ranks
    ]
    assert [(p.component, p.shard, p.world, p.writer) for p in replicas] == [
        (f"kv.{pp}", 0, 1, tp == 0) for pp, tp in ranks
    ]  # fmt: skip


# ---------------------------------------------------------------- what a process runs with


def digest_of(pool: Any, **config: Any) -> bytes:
    return collect(storage_config(**config), host_pool_facts(pool)).namespace("").digest()


@pytest.fixture
def digest(publish: Callable[..., Any]) -> Callable[..., bytes]:
    """Digest of this process with given server arguments, host pool and storage config."""

    def run(pool: Any = None, config: dict[str, Any] | None = None, **arguments: Any) -> bytes:
        publish(**arguments)
        return digest_of(pool if pool is not None else make_mha(), **(config or {}))

    return run


@pytest.mark.sglang
def test_equal_processes_share_whatever_they_are_called(
    digest: Callable[..., bytes], tmp_path: Path, model_dir: Path
) -> None:
    shutil.copytree(model_dir, tmp_path / "copy")
    base = digest()
    assert digest(model_path=str(tmp_path / "copy"), served_model_name="another-name") == base
    assert digest(config={"model_name": "another-name", "dp_rank": 3}, port=12345, random_seed=7) == base


@pytest.mark.sglang
@pytest.mark.parametrize(
    "arguments",
    [
        {"kv_cache_dtype": "bf16"}, {"dtype": "float16"}, {"quantization": "fp8"}, {"is_embedding": True},
        {"json_model_override_args": json.dumps({"rope_theta": 1e6})}, {"model_impl": "transformers"},
        {"load_format": "dummy"}, {"trust_remote_code": True}, {"mm_process_config": {"image": {"max_pixels": 1}}}, {"trust_mm_content_hashes": True},
        {"enable_precise_embedding_interpolation": True}, {"enable_quant_communications": True},
        {"enable_w4a4_mxfp4_megamoe": True}, {"forward_hooks": [{"name": "steer", "target_modules": ["model.layers.0"]}]},
    ],
    ids=lambda arguments: next(iter(arguments)),
)  # fmt: skip
def test_server_arguments_that_change_the_bytes(digest: Callable[..., bytes], arguments: dict[str, Any]) -> None:
    if arguments == {"kv_cache_dtype": "bf16"}:  # the same bytes by another name
        assert digest(**arguments) == digest()
    else:
        assert digest(**arguments) != digest()


@pytest.mark.sglang
def test_the_host_pool_counts(digest: Callable[..., bytes]) -> None:
    import torch

    pools = {
        "base": make_mha(), "layer_first": make_mha("layer_first"), "direct": make_mha("page_first_direct"),
        "head": make_mha("page_head"), "dtype": make_mha(dtype=torch.float16), "page": make_mha(page=8),
        "layers": make_mha(layers=2), "range": make_mha(start=1), "heads": make_mha(heads=1), "width": make_mha(dim=16),
        "v width": make_mha(v_dim=4), "mla": make_mla(), "mla rank": make_mla(rank=8, rope=16),
    }  # fmt: skip
    digests = {name: digest(pool) for name, pool in pools.items()}
    assert len(set(digests.values())) == len(pools)


@pytest.mark.sglang
def test_topology_counts(digest: Callable[..., bytes]) -> None:
    shapes: list[dict[str, Any]] = [{}, {"tp_size": 2}, {"tp_size": 4}]
    assert len({digest(config=shape) for shape in shapes}) == len(shapes)
    assert digest(config={"tp_size": 2, "tp_rank": 0}) == digest(config={"tp_size": 2, "tp_rank": 1})


@pytest.mark.sglang
def test_pipeline_stages_share_one_namespace(digest: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang gives 3 layers over 2 stages as 0:1 and 1:3."""
    first = digest(make_mha(layers=1), {"pp_size": 2, "pp_rank": 0})
    second = digest(make_mha(layers=2, start=1), {"pp_size": 2, "pp_rank": 1})
    assert first == second
    monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", "2,1")
    assert digest(make_mha(layers=2), {"pp_size": 2, "pp_rank": 0}) != first
    with pytest.raises(ConfigError, match="pipeline stage 1"):
        digest(make_mha(layers=2, start=1), {"pp_size": 2, "pp_rank": 1})


@pytest.mark.sglang
def test_another_model_under_the_same_name(digest: Callable[..., bytes], tmp_path: Path) -> None:
    seen = {digest()}
    for name, seed, config in (("tuned", 1, {}), ("rope", 0, {"rope_theta": 1e6}), ("scaled", 0, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}})):  # fmt: skip
        seen.add(digest(model_path=str(write_model(tmp_path / name, seed=seed, **config)), served_model_name="m"))
    assert len(seen) == 4


@pytest.mark.sglang
def test_adapters_count_by_content(digest: Callable[..., bytes], tmp_path: Path) -> None:
    """The id that SGLang puts into the hash is made of the adapter's name and path: a changed file keeps its id."""
    from sglang.srt.lora.lora_registry import LoRARef

    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")

    def with_weights(seed: int) -> bytes:
        write_safetensors(adapter / "adapter_model.safetensors", {"a": 64}, seed)
        ref = LoRARef(lora_id=LoRARef.deterministic_id("x", str(adapter)), lora_name="x", lora_path=str(adapter))
        return digest(enable_lora=True, lora_paths=[ref])

    one, other, again = with_weights(1), with_weights(2), with_weights(1)
    assert one == again != other
    assert digest(enable_lora=True) not in (one, other, digest())


@pytest.mark.sglang
def test_speculation_counts(digest: Callable[..., bytes], tmp_path: Path) -> None:
    def drafted(seed: int, **more: Any) -> bytes:
        path = str(write_model(tmp_path / str(seed), seed=seed))
        return digest(speculative_algorithm="EAGLE", speculative_draft_model_path=path, **more)

    seen = {digest(), drafted(1), drafted(2), drafted(1, speculative_draft_kv_cache_dtype="fp8_e4m3"), digest(speculative_algorithm="NGRAM")}  # fmt: skip
    assert len(seen) == 5
    assert drafted(1) == drafted(1)


@pytest.mark.sglang
def test_a_draft_is_looked_for_where_sglang_downloads_to(
    digest: Callable[..., bytes], model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches: list[str | None] = []

    def located(path: str, revision: str | None, cache: str | None, *, option: str) -> Path:
        caches.append(cache)
        return Path(path)

    monkeypatch.setattr("maru_sglang.radix.namespace.locate_model", located)
    digest(download_dir="/models", speculative_algorithm="EAGLE", speculative_draft_model_path=str(model_dir))
    assert caches == ["/models", "/models"]


@pytest.mark.sglang
def test_kv_scales_count_by_content(digest: Callable[..., bytes], tmp_path: Path) -> None:
    scales, seen = tmp_path / "scales.json", {digest()}
    for text in ("{}", '{"0": 2.0}'):
        scales.write_text(text)
        seen.add(digest(quantization_param_path=str(scales)))
    assert len(seen) == 3


@pytest.mark.sglang
def test_data_parallel_attention_counts_and_replicas_share(digest: Callable[..., bytes]) -> None:
    base = digest(tp_size=2)
    assert digest(tp_size=2, dp_size=2) == base
    assert digest(tp_size=2, attn_dp_size=2) != base


@pytest.mark.sglang
def test_logical_dtypes_of_stored_bytes() -> None:
    import torch

    assert logical_kv_dtype("auto", torch.bfloat16) == logical_kv_dtype("bf16", torch.bfloat16) == "bfloat16"
    assert logical_kv_dtype("auto", torch.float16) == "float16"
    assert logical_kv_dtype("fp8_e4m3", torch.uint8) == logical_kv_dtype("auto", torch.float8_e4m3fn) == "fp8_e4m3"
    assert logical_kv_dtype("fp8_e5m2", torch.uint8) == "fp8_e5m2"
    assert logical_kv_dtype("fp8_e4m3", torch.float8_e4m3fnuz) == "fp8_e4m3fnuz"


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("argument", "stored", "cure"),
    [
        ("auto", "uint8", "--kv-cache-dtype fp8_e4m3"), ("fp8_e4m3", "float8_e5m2", "use auto"), ("fp8_e4m3", "bfloat16", "use auto"),
        ("bf16", "float16", "use auto"), ("mxfp8", "uint8", "use auto"), ("nvfp4", "uint8", "use auto"),
    ],
)  # fmt: skip
def test_a_dtype_that_cannot_be_told_is_refused(argument: str, stored: str, cure: str) -> None:
    import torch

    with pytest.raises(ConfigError, match=cure) as refused:
        logical_kv_dtype(argument, getattr(torch, stored))
    assert argument in str(refused.value)
    assert stored in str(refused.value)


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("arguments", "words_"),
    [
        ({"load_format": "remote"}, "--load-format is remote"), ({"load_format": "flash_rl"}, "--load-format is flash_rl"),
        ({"modelopt_quant": "fp8"}, "--modelopt-quant"), ({"weight_cache_mode": "client"}, "--weight-cache-mode is client"),
        ({"checkpoint_engine_wait_weights_before_ready": True}, "wait-weights"), ({"kt_weight_path": "/w"}, "--kt-weight-path"),
    ],
    ids=str,
)  # fmt: skip
def test_weights_that_nobody_can_tell_are_refused(
    digest: Callable[..., bytes], arguments: dict[str, Any], words_: str
) -> None:
    with pytest.raises(ConfigError, match=words_):
        digest(**arguments)


@pytest.mark.sglang
@pytest.mark.parametrize(
    "config",
    [
        {"attn_cp_size": 2}, {"dcp_size": 2, "tp_size": 2, "is_mla_model": True, "logical_page_size": 8},
    ],
    ids=lambda config: next(iter(config)),
)  # fmt: skip
def test_shapes_that_are_not_supported_yet_are_refused(digest: Callable[..., bytes], config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(config))}.* not support that yet"):
        digest(config=config)


@pytest.mark.sglang
def test_servers_of_different_tensor_parallel_sizes_share_where_heads_can_be_divided(
    digest: Callable[..., bytes],
) -> None:
    def of(layout: str, heads: int, **config: Any) -> bytes:
        return digest(make_mha(layout, heads=heads), config=config)

    four = {"tp_lcm_size": 4}
    wide = of("page_head", 4, tp_size=2, should_split_heads=True, **four)
    assert wide == of("page_head", 2, tp_size=4, **four)
    assert wide == of("page_head", 8, tp_size=1, should_split_heads=True, **four)
    assert wide != of("page_head", 4, tp_size=2), "without tp_lcm_size nothing is divided"
    with pytest.raises(ConfigError, match=r"tp_lcm_size is 4 .*use --hicache-mem-layout page_head"):
        of("page_first", 4, tp_size=2, **four)
    with pytest.raises(ConfigError, match=r"this rank's 3 heads cannot be divided by 2"):
        of("page_head", 3, tp_size=2, should_split_heads=True, **four)
    mla = [digest(make_mla(), config={"is_mla_model": True, "tp_size": size, **four}) for size in (1, 2, 4)]
    assert len(set(mla)) == 1, "MLA pages are the same on all ranks"


@pytest.mark.sglang
def test_outside_a_server_nothing_is_guessed() -> None:
    with pytest.raises(ConfigError, match="server arguments are not known"):
        collect(storage_config(), host_pool_facts(make_mha()))


@pytest.mark.sglang
def test_a_sglang_that_hashes_without_salt_is_refused(
    publish: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.mem_cache import utils

    publish()
    monkeypatch.setattr(utils, "storage_namespace_seed", lambda extra_key, cache_salt: extra_key and "0" * 64)
    with pytest.raises(ConfigError, match="cache salt"):
        collect(storage_config(), host_pool_facts(make_mha()))


@pytest.mark.sglang
def test_another_hash_scheme_is_another_namespace(publish: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache import utils

    publish()
    before = digest_of(make_mha())
    real = utils.get_native_hash
    monkeypatch.setattr(
        utils, "get_native_hash", lambda tokens, prior, size: [h[::-1] for h in real(tokens, prior, size)]
    )
    assert digest_of(make_mha()) != before


@pytest.mark.sglang
def test_another_sglang_is_another_namespace(publish: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang.version

    publish()
    before = digest_of(make_mha())
    monkeypatch.setattr(sglang.version, "__version__", "0.6.0")
    assert digest_of(make_mha()) != before


@pytest.mark.sglang
def test_how_sglang_names_adapters_and_images() -> None:
    """What the module says of SGLang: an adapter's id is its name and path; every pad value of an image is 62 bits of a hash."""
    from sglang.srt.lora.lora_registry import LoRARef
    from sglang.srt.managers.schedule_batch import _compute_pad_values

    assert LoRARef.deterministic_id("a", "/p") == LoRARef.deterministic_id("a", "/p")
    assert LoRARef(lora_name="a", lora_path="/p").lora_id != LoRARef(lora_name="a", lora_path="/p").lora_id
    values = _compute_pad_values(b"image")
    assert len(set(values)) == 4
    assert max(values).bit_length() > 55


def test_layers_constant_matches_the_model(tmp_path: Path) -> None:
    assert json.loads((write_model(tmp_path) / "config.json").read_text())["num_hidden_layers"] == LAYERS
