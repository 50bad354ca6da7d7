"""Namespaces of vLLM: every setting that changes the bytes makes another one, those that cannot do not, and what cannot be told
is refused. The configurations are the ones that vLLM itself resolves."""

from __future__ import annotations

import copy
import dataclasses
import enum
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_files import write_model, write_safetensors
from vllm_specs import BLOCK, cache, full, group, mamba, mla, window

from maru_core.errors import ConfigError
from maru_core.namespace import Namespace, differences
from maru_vllm.config import parse_extra_config
from maru_vllm.namespace import EngineFacts, collect, facts_of, hash_scheme, logical_kv_dtype, none_hash
from maru_vllm.settings import ALL, HARMLESS, HARMLESS_LORA, HARMLESS_MULTIMODAL

words = st.text(st.characters(codec="ascii", exclude_categories=("C", "Z"), exclude_characters=" "), max_size=20)
LAYOUT = "bfloat16[2x32x16]@012*3"


def space(config: Any, kv: Any = None, *, layout: str = LAYOUT, **extra: Any) -> Namespace:
    block = (kv or cache()).hash_block_size
    return collect(config, kv or cache(), block_tokens=block, layout=layout, config=parse_extra_config(extra))


@pytest.fixture
def record(engine: Callable[..., Any]) -> Callable[..., Namespace]:
    """``record(kv, **arguments)``: the namespace of an engine with these arguments."""
    return lambda kv=None, **arguments: space(engine(**arguments), kv)


# ---------------------------------------------------------------- the record


@given(st.sampled_from(EngineFacts.__struct_fields__), words, words)
def test_every_field_changed_alone_gives_another_digest(field: str, one: str, other: str) -> None:
    plain = {name: 1 if kind == "int" else "x" for name, kind in EngineFacts.__annotations__.items()}
    values = (len(one), len(other)) if plain[field] == 1 else (one, other)
    a, b = (EngineFacts(**plain | {field: value}).namespace("") for value in values)
    assert (a.digest() == b.digest()) == (values[0] == values[1])
    assert bool(differences(a, b)) == (values[0] != values[1])


@pytest.mark.vllm
def test_the_record_reads_back_and_fits(record: Callable[..., Namespace]) -> None:
    namespace = record()
    assert Namespace.parse(namespace.record()) == namespace
    assert namespace.engine.startswith("vllm 0.")
    assert namespace.model == "LlamaForCausalLM"
    assert (namespace.kv_dtype, namespace.page_tokens, namespace.layers, namespace.heads) == (
        "bfloat16",
        32,
        "0:3#3",
        "kv2x8",
    )


# ---------------------------------------------------------------- settings, as an operator gives them


CHANGES: dict[str, dict[str, Any]] = {
    "dtype": {"dtype": "float16"},
    "kv_cache_dtype": {"kv_cache_dtype": "fp8_e5m2"},
    "quantization": {"quantization": "fp8"},
    "hash algorithm": {"prefix_caching_hash_algo": "sha256_cbor"},
    "hf_overrides": {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}},
    "model_impl": {"model_impl": "transformers"},
    "tensor_parallel": {"tensor_parallel_size": 2},
    "pipeline_parallel": {"pipeline_parallel_size": 2},
    "dummy weights": {"load_format": "dummy"},
    "trust_remote_code": {"trust_remote_code": True},
    "lora": {"enable_lora": True},
    "lora rank": {"enable_lora": True, "max_lora_rank": 32},
    "lora dtype": {"enable_lora": True, "lora_dtype": "float16"},
    "skipped layers": {"kv_cache_dtype_skip_layers": ["0"]},
    "loader": {"model_loader_extra_config": {"enable_multithread_load": True}},
    "disable_sliding_window": {"disable_sliding_window": True},
    "attention backend": {"attention_backend": "TORCH_SDPA"},
    "additional_config": {"additional_config": {"a": 1}},
}
SAME: dict[str, dict[str, Any]] = {
    "max_num_seqs": {"max_num_seqs": 3},
    "max_num_batched_tokens": {"max_num_batched_tokens": 384},
    "gpu_memory_utilization": {"gpu_memory_utilization": 0.5},
    "kv_cache_memory_bytes": {"kv_cache_memory_bytes": 32 << 20},
    "served_model_name": {"served_model_name": "another"},
    "seed": {"seed": 7},
    "max_model_len": {"max_model_len": 512},
    "chunked prefill": {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048},
    "prefix caching": {"enable_prefix_caching": False},
    "eager": {"enforce_eager": False},
    "log stats": {"disable_log_stats": False},
    "async scheduling": {"async_scheduling": False},
    "the same dtype by another name": {"kv_cache_dtype": "bfloat16"},
    "the same hash by name": {"prefix_caching_hash_algo": "sha256"},
    "the same format by name": {"load_format": "safetensors"},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
    "replicas": {"data_parallel_size": 2},
}


@pytest.mark.vllm
def test_every_argument_that_changes_the_bytes_is_another_namespace(record: Callable[..., Namespace]) -> None:
    """All differ from the base, and from one another."""
    seen = {record().digest(): "base"}
    for what, arguments in CHANGES.items():
        digest = record(**arguments).digest()
        assert digest not in seen, f"{what} is {seen[digest]}"
        seen[digest] = what


@pytest.mark.vllm
def test_arguments_that_cannot_change_the_bytes_share(record: Callable[..., Namespace]) -> None:
    base = record()
    for what, arguments in SAME.items():
        assert not differences(base, record(**arguments)), what
    assert not differences(record(enable_lora=True), record(enable_lora=True, max_loras=3))


# ---------------------------------------------------------------- settings, every one of them


def changed(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, enum.Enum):
        return next(item for item in type(value) if item != value)
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list | tuple):
        return [*value, "x"]
    if isinstance(value, dict):
        return {**value, "x": 1}
    if type(value).__name__ == "dtype":
        import torch

        return torch.float64
    return "x"


def parts(config: Any) -> list[str]:
    return [name for name in (field.name for field in dataclasses.fields(config)) if HARMLESS.get(name) != ALL]


def settings_of(config: Any, part: str) -> list[str]:
    value = getattr(config, part)
    return [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []


@pytest.mark.vllm
def test_every_setting_of_vllm_counts_unless_it_is_listed(engine: Callable[..., Any]) -> None:
    """Each field of each part of vLLM's configuration in turn. What is listed as harmless and is not told in another field must
    not count; what is not listed must."""
    config = engine()
    base = space(config).digest()
    elsewhere = {
        # told in another field of the record, or needed to find the weights
        "model", "model_weights", "hf_config", "hf_text_config", "dtype", "multimodal_config", "load_format",
        "cache_dtype", "prefix_caching_hash_algo", "revision", "download_dir", "max_model_len",
    }  # fmt: skip
    wrong, counted = [], 0
    for part in parts(config):
        for name in settings_of(config, part):
            if name in elsewhere:
                continue
            section = copy.copy(getattr(config, part))
            object.__setattr__(section, name, changed(getattr(section, name)))
            other = copy.copy(config)
            object.__setattr__(other, part, section)
            counts = space(other).digest() != base
            counted += counts
            if counts == (name in HARMLESS.get(part, ())):
                wrong.append((part, name, counts))
    assert not wrong
    assert counted > 25


#: The settings of vLLM 0.32 that count, by hand: whoever declares another one harmless, or finds one in a later vLLM, looks at it twice.
COUNTS: dict[str, str] = {
    "model_config": "runner convert trust_remote_code code_revision quantization quantization_config disable_sliding_window "
    "model_class_overrides model_impl",
    "cache_config": "kv_cache_dtype_skip_layers mamba_cache_dtype mamba_ssm_cache_dtype replayssm_buffer_len use_replayssm "
    "use_kda_recoverssm kv_sharing_fast_prefill swa_bounded_replay",
    "load_config": "model_loader_extra_config ignore_patterns",
    "attention_config": "backend backend_per_kind use_trtllm_attention disable_flashinfer_q_quantization "
    "use_prefill_query_quantization indexer_kv_dtype indexer_sparse_logits hisparse_config use_non_causal",
    "mamba_config": "backend enable_stochastic_rounding stochastic_rounding_philox_rounds ssu_algorithm",
    "additional_config": "",
    "multimodal": "language_model_only enable_mm_embeds media_io_kwargs mm_processor_kwargs mm_device_do_normalize mm_hasher_algorithm "
    "mm_encoder_only mm_encoder_attn_dtype interleave_mm_strings video_pruning_rate video_pruning_method allow_missing_mm_embeddings",
    "lora": "max_lora_rank fully_sharded_loras lora_dtype target_modules enable_tower_connector_lora enable_mixed_moe_lora_format "
    "enable_moe_shared_loras",
}


@pytest.mark.vllm
def test_the_settings_that_count_are_these(engine: Callable[..., Any]) -> None:
    from vllm.config import LoRAConfig, MultiModalConfig

    config = engine()
    found = {part: " ".join(n for n in settings_of(config, part) if n not in HARMLESS[part]) for part in parts(config)}
    for name, kind, harmless in (
        ("multimodal", MultiModalConfig, HARMLESS_MULTIMODAL),
        ("lora", LoRAConfig, HARMLESS_LORA),
    ):
        found[name] = " ".join(field.name for field in dataclasses.fields(kind) if field.name not in harmless)
    assert found == COUNTS


@pytest.mark.vllm
def test_the_list_names_what_this_vllm_has(engine: Callable[..., Any]) -> None:
    from vllm.config import LoRAConfig, MultiModalConfig

    config = engine()
    fields = {field.name for field in dataclasses.fields(config)}
    assert set(HARMLESS) <= fields
    for part, names in HARMLESS.items():
        if names != ALL:
            assert names <= set(settings_of(config, part)), part
    for names, kind in ((HARMLESS_LORA, LoRAConfig), (HARMLESS_MULTIMODAL, MultiModalConfig)):
        assert names <= {field.name for field in dataclasses.fields(kind)}


@pytest.mark.vllm
def test_a_part_that_a_later_vllm_adds_counts(engine: Callable[..., Any]) -> None:
    @dataclasses.dataclass
    class Part:
        strength: int = 1

    config = engine()

    def with_part(value: Any) -> bytes:
        extended = dataclasses.make_dataclass("Extended", [("new_config", Any, None)], bases=(type(config),))
        other = copy.copy(config)
        object.__setattr__(other, "__class__", extended)
        object.__setattr__(other, "new_config", value)
        return space(other).digest()

    assert len({space(config).digest(), with_part(Part()), with_part(Part(2)), with_part("text")}) == 4
    with pytest.raises(ConfigError, match="cannot compare between processes"):
        with_part(object())


@pytest.mark.vllm
def test_what_is_done_to_images_counts(engine: Callable[..., Any]) -> None:
    from vllm.config import MultiModalConfig

    def digest(**settings: Any) -> bytes:
        config = engine()
        config.model_config.multimodal_config = MultiModalConfig(**settings)
        return space(config).digest()

    base = digest()
    assert base != space(engine()).digest()
    assert digest(mm_processor_cache_gb=1, mm_encoder_tp_mode="data") == base
    others = [
        {"mm_processor_kwargs": {"max_pixels": 1}},
        {"video_pruning_rate": 0.5},
        {"mm_hasher_algorithm": "sha256"},
    ]
    assert len({base, *(digest(**other) for other in others)}) == 4


# ---------------------------------------------------------------- the model


@pytest.mark.vllm
def test_the_same_model_elsewhere_is_the_same(
    record: Callable[..., Namespace], model_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(model_dir, tmp_path / "copy")
    assert not differences(record(), record(model=str(tmp_path / "copy"), served_model_name="x"))


@pytest.mark.vllm
def test_weights_count_by_content(record: Callable[..., Namespace], tmp_path: Path) -> None:
    spaces = [record(model=str(write_model(tmp_path / str(i), seed=seed))) for i, seed in enumerate((0, 1, 0))]
    assert spaces[0] == spaces[2]
    assert list(differences(spaces[0], spaces[1])) == ["weights"]


@pytest.mark.vllm
@pytest.mark.parametrize(
    "setting", [{"rope_theta": 5e5}, {"num_key_value_heads": 4}, {"sliding_window": 64}, {"rms_norm_eps": 1e-4}]
)
def test_the_models_configuration_counts(
    record: Callable[..., Namespace], tmp_path: Path, setting: dict[str, Any]
) -> None:
    """With the same weights: their digest has config.json in it as well, so that is made equal first."""
    base = write_model(tmp_path / "a")
    assert record(model=str(base)) != record(hf_overrides=setting, model=str(base))


@pytest.mark.vllm
def test_two_revisions_of_one_name_are_two_namespaces(
    record: Callable[..., Namespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Hugging Face cache with two snapshots, as ``snapshot_download`` leaves them."""
    repository = tmp_path / "models--org--name"
    for commit, seed in (("a" * 40, 0), ("b" * 40, 1), ("c" * 40, 0)):
        write_model(repository / "snapshots" / commit, seed=seed)
    (repository / "refs").mkdir()
    for branch, commit in (("main", "a" * 40), ("tuned", "b" * 40), ("again", "c" * 40)):
        (repository / "refs" / branch).write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    from maru_core.weights import locate_model, weights_digest

    def digest(revision: str) -> str:
        return weights_digest(locate_model("org/name", revision, str(tmp_path), option="--model"), option="--model")

    assert digest("main") == digest("again") != digest("tuned")


@pytest.mark.vllm
@pytest.mark.parametrize("rope", ["longrope", "dynamic"])
def test_the_length_counts_where_the_model_looks_at_it(
    record: Callable[..., Namespace], tmp_path: Path, rope: str
) -> None:
    scaling = {"rope_type": rope, "factor": 2.0, "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model = str(write_model(tmp_path / "m", rope_parameters=scaling, original_max_position_embeddings=128))
    assert record(model=model, max_model_len=256) != record(model=model, max_model_len=128)
    assert record(max_model_len=256) == record(max_model_len=128)


@pytest.mark.vllm
def test_dummy_weights_count_by_seed(record: Callable[..., Namespace]) -> None:
    assert record(load_format="dummy") == record(load_format="dummy")
    assert record(load_format="dummy") != record(load_format="dummy", seed=7)


@pytest.mark.vllm
def test_adapters_of_images_count_by_content(engine: Callable[..., Any], tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()

    def digest(seed: int) -> bytes:
        write_safetensors(adapter / "adapter_model.safetensors", {"a": 64}, seed)
        config = engine(enable_lora=True)
        config.lora_config.default_mm_loras = {"image": str(adapter)}
        return space(config).digest()

    assert digest(1) == digest(1) != digest(2)


# ---------------------------------------------------------------- hashes


@pytest.mark.vllm
def test_the_probe_is_the_chain_that_vllm_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    for seed in (None, "0", "1"):
        if seed is None:
            monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        else:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
        for name in ("sha256", "sha256_cbor"):
            function = get_hash_fn_by_name(name)
            kv_cache_utils.init_none_hash(function)
            assert none_hash(function) == kv_cache_utils.NONE_HASH


@pytest.mark.vllm
def test_the_seed_of_the_hashes_counts_and_its_absence_is_a_seed(
    record: Callable[..., Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    spaces = []
    for seed in (None, "0", "1", "0"):
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        if seed is not None:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
        spaces.append(record())
    assert spaces[1] == spaces[3]
    assert len({each.digest() for each in spaces}) == 3
    assert list(differences(spaces[0], spaces[1])) == ["hash_scheme"]


@pytest.mark.vllm
def test_another_process_says_the_same(
    model_dir: Path, record: Callable[..., Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    code = "from maru_vllm.namespace import hash_scheme, device\nprint(hash_scheme('sha256'))\nprint(hash_scheme('sha256_cbor'))\nprint(device())"
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    ).stdout
    from maru_vllm.namespace import device

    assert told.splitlines()[-3:] == [hash_scheme("sha256"), hash_scheme("sha256_cbor"), device()]


@pytest.mark.vllm
@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_hashes_that_are_not_cryptographic_are_refused(
    algorithm: str, monkeypatch: pytest.MonkeyPatch, engine: Callable[..., Any]
) -> None:
    pytest.importorskip("xxhash")
    config = engine(prefix_caching_hash_algo=algorithm)
    for seed in (None, "0"):
        if seed is None:
            monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        else:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
        with pytest.raises(
            ConfigError, match="is " + algorithm + ", whose hashes have 16 bytes.*PYTHONHASHSEED"
        ) as refused:
            space(config)
        # The cure is one that vLLM takes, as it is written.
        (cure,) = re.findall(r"Use --prefix-caching-hash-algo (\w+)", str(refused.value))
        assert space(engine(prefix_caching_hash_algo=cure)) == space(engine())


@pytest.mark.vllm
def test_the_algorithms_are_those_of_this_vllm() -> None:
    """Another one needs a decision: whether its hashes can be shared."""
    from typing import get_args

    from vllm.config.cache import PrefixCachingHashAlgo

    assert set(get_args(PrefixCachingHashAlgo)) == {"sha256", "sha256_cbor", "xxhash", "xxhash_cbor"}


# ---------------------------------------------------------------- the cache


@pytest.mark.vllm
def test_the_planned_cache_counts(engine: Callable[..., Any]) -> None:
    import torch
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    config = engine()
    mixed = UniformTypeKVCacheSpecs(BLOCK, {"a": full(), "b": full(num_kv_heads=4)})
    caches = {
        "base": cache(),
        "fewer layers": cache(group(full(), layers=2)),
        "heads": cache(group(full(num_kv_heads=4))),
        "width": cache(group(full(head_size=16))),
        "another width of values": cache(group(full(head_size_v=16))),
        "dtype": cache(group(full(dtype=torch.float32))),
        "window": cache(group(window(64))),
        "wider window": cache(group(window(128))),
        "latent": cache(group(mla())),
        "states": cache(group(mamba())),
        "states of other shapes": cache(group(mamba(shapes=((4, 8), (2, 4))))),
        "two groups": cache(group(full()), group(window(64))),
        "two groups, otherwise": cache(group(window(64)), group(full())),
        "layers of two kinds": cache(group(mixed)),
    }
    seen = {what: space(config, kv).digest() for what, kv in caches.items()}
    assert len(set(seen.values())) == len(seen)
    assert space(config, cache(num_blocks=99)) == space(config, caches["base"])
    larger = cache(group(full(block_size=64)), hash_block_size=64)
    assert space(config, larger).digest() not in seen.values()
    assert space(config, layout="bfloat16[32x2x16]@012*3").digest() not in seen.values()
    assert space(config, tag="blue") != space(config, tag="green")


@pytest.mark.vllm
def test_stages_agree_though_their_layers_differ(engine: Callable[..., Any]) -> None:
    config = engine(pipeline_parallel_size=2)
    stages = [(cache(group(full(), layers=2)), "a[1]@0*2"), (cache(group(full(), layers=1)), "a[1]@0*1")]
    one, two = (space(config, kv, layout=layout) for kv, layout in stages)
    assert one == two
    assert one.layers == "0:2,2:3"
    assert space(config, stages[1][0], layout="a[2]@0*1") != one


@pytest.mark.vllm
def test_a_long_layout_is_kept_as_a_digest(engine: Callable[..., Any]) -> None:
    config = engine()
    one, two = (space(config, layout=",".join(f"a[{i}]@0*1" for i in range(n))) for n in (300, 301))
    assert one != two
    assert len(one.record()) < 2000


@pytest.mark.vllm
def test_the_logical_type_is_told_or_refused() -> None:
    import torch
    from vllm.v1.kv_cache_interface import KVQuantMode

    def told(argument: str, *specs: Any) -> str:
        return logical_kv_dtype(argument, specs, "bfloat16")

    assert told("auto", full()) == told("bfloat16", full()) == "bfloat16"
    assert told("fp8", full(dtype=torch.uint8)) == told("fp8_e4m3", full(dtype=torch.uint8)) == "fp8_e4m3"
    assert told("fp8_e5m2", full(dtype=torch.uint8)) == "fp8_e5m2"
    assert told("int8_per_token_head", full(dtype=torch.uint8)) == "int8_per_token_head"
    asked_by_checkpoint = full(dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
    assert told("auto", asked_by_checkpoint) == "fp8_e4m3"
    assert told("auto", asked_by_checkpoint, full()) == "bfloat16+fp8_e4m3"
    assert told("auto", mamba()) == "bfloat16"
    with pytest.raises(
        ConfigError, match=r"elements of type uint8 and --kv-cache-dtype is auto.*--kv-cache-dtype fp8_e4m3"
    ):
        told("auto", full(dtype=torch.uint8))


# ---------------------------------------------------------------- refusals


@pytest.mark.vllm
@pytest.mark.parametrize("load_format", ["tensorizer", "ipc_cache", "modelexpress", "my_own"])
def test_weights_that_cannot_be_told_are_refused(engine: Callable[..., Any], load_format: str) -> None:
    config = engine()
    config.load_config.load_format = load_format
    with pytest.raises(ConfigError, match=f"--load-format is {load_format}: .*use one of auto, "):
        space(config)


@pytest.mark.vllm
def test_a_model_that_is_not_here_is_refused(engine: Callable[..., Any], tmp_path: Path) -> None:
    config = engine()
    config.model_config.model_weights = "s3://bucket/model"
    with pytest.raises(ConfigError, match="give --model a local directory"):
        space(config)
    config.model_config.model_weights = str(tmp_path)
    with pytest.raises(ConfigError, match=r"holds no weights.*give --model a directory that does"):
        space(config)


@pytest.mark.vllm
def test_shapes_and_settings_that_are_not_supported_are_refused(engine: Callable[..., Any], model_dir: Path) -> None:
    from vllm.config import DiffusionConfig
    from vllm.config.weight_transfer import WeightTransferConfig

    config = engine()
    config.weight_transfer_config = WeightTransferConfig()
    with pytest.raises(ConfigError, match=r"--weight-transfer-config \(nccl\) replaces the weights"):
        space(config)
    config = engine()
    config.diffusion_config = DiffusionConfig(canvas_length=32)
    with pytest.raises(ConfigError, match="diffusion model"):
        space(config)
    config = engine(speculative_config={"method": "draft_model", "model": str(model_dir), "num_speculative_tokens": 2})
    with pytest.raises(ConfigError, match=r'method "draft_model".*Use one of ngram'):
        space(config)
    config = engine(tensor_parallel_size=2)
    config.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(ConfigError, match="--decode-context-parallel-size is 2"):
        space(config)


@pytest.mark.vllm
def test_attention_that_cannot_go_on_from_kv_is_refused(engine: Callable[..., Any], tmp_path: Path) -> None:
    """vLLM's latent attention for CPUs without AMX computes a prompt as if nothing came before it, and would do so after a load."""
    import torch

    model = write_model(
        tmp_path / "latent", model_type="deepseek_v2", architectures=["DeepseekV2ForCausalLM"], kv_lora_rank=512, q_lora_rank=None,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, num_key_value_heads=4,
    )  # fmt: skip
    made = engine(model=str(model))
    assert made.model_config.use_mla
    if torch.cpu._is_amx_tile_supported():
        assert made.cache_config.enable_prefix_caching
        made.cache_config.enable_prefix_caching = made.scheduler_config.enable_chunked_prefill = False
    with pytest.raises(ConfigError, match=r"prefix caching and chunked prefill are both off.*without MaruConnector"):
        space(made, cache(group(mla())))


@pytest.mark.vllm
def test_facts_are_readable(engine: Callable[..., Any]) -> None:
    """An operator who compares two records sees names, not only digests."""
    text = json.loads(space(engine(), tag="blue").record())
    assert text["tag"] == "blue"
    assert "dtype=bfloat16" in text["weights"]
    assert facts_of(engine(), cache(), block_tokens=32, layout=LAYOUT).device in text["layout"]
