"""The namespace of a vLLM engine: everything that changes the bytes of a KV cache block, or what its hash means.

:func:`collect` reads what the engine really runs with: vLLM's resolved configuration, the KV cache that it has planned, the layout that
the worker saw, and the content of the weights. The result, :class:`EngineFacts`, is plain data; its
:meth:`~EngineFacts.namespace` is the record that the server keeps. What cannot be established is a
:class:`~maru_core.errors.ConfigError` at start that names it and the cure.

What is left out is a list (:mod:`maru_vllm.settings`), and what goes in is the rest.

How vLLM 0.32 keeps requests apart, which decides what the record must add:

- The hash of a block covers its tokens and all before them, and for each block LoRA adapter (name and path), images (hash and position) and
  prompt embeddings, for the first one the cache salt. They are in the key and so not here. The path of an adapter says nothing about its
  content: that is added to the key by :mod:`maru_vllm.adapters`.
- The hash function, and the seed from which it derives the parent of the first block (``NONE_HASH``): a fixed text with sha256,
  ``PYTHONHASHSEED`` if that is set, random in every process with a function that is not cryptographic. The record has the hash of a
  fixed chain as this process computes it.
- What is done to an image before it is encoded is not part of its hash, so those settings are here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from maru_core.canonical import dtype_name, json_digest, meaningful, text_digest
from maru_core.errors import ConfigError
from maru_core.namespace import Namespace
from maru_core.protocol import HASH_BYTES
from maru_core.weights import file_digest, locate_model, weights_digest
from maru_vllm.config import ExtraConfig
from maru_vllm.groups import layer_specs, refuse_unsupported_shapes
from maru_vllm.settings import ALL, HARMLESS, HARMLESS_LORA, HARMLESS_MULTIMODAL

#: Files of each format that hold the weights; empty: safetensors, or all kinds where there are none.
_LOAD_FORMATS: Final[Mapping[str, tuple[str, ...]]] = {
    "auto": (),
    "hf": (),
    "safetensors": (".safetensors",),
    "fastsafetensors": (".safetensors",),
    "instanttensor": (".safetensors",),
    "mistral": (".safetensors",),
    "runai_streamer": (".safetensors",),
    "runai_streamer_sharded": (".safetensors",),
    "sharded_state": (".safetensors",),
    "pt": (".pt",),
    "npcache": (".bin",),
}
#: Speculation that has no KV of its own and leaves the target's as it is.
_DRAFTLESS: Final = frozenset({"ngram", "ngram_gpu", "suffix"})
#: Models that compute otherwise where --max-model-len is large.
_LENGTH_MATTERS: Final = frozenset({"llama4", "llama4_text", "minimax_m2"})
_LENGTH_ROPES: Final = frozenset({"longrope", "su", "dynamic"})
#: Longest layout that is kept as text, characters.
_LAYOUT_MAX: Final = 400
_MODEL: Final = "--model"


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What decides whether two engines' blocks are interchangeable. Every field is part of the namespace."""

    version: str  # of vLLM: a release may compute or arrange KV in another way under the same names
    hash_scheme: str  # "sha256", and the hash of a fixed chain as this process computes it
    architecture: str  # "LlamaForCausalLM"
    config: str  # digest of the resolved model configuration, overrides and all
    weights: str  # digest of the weights' content
    model_dtype: str  # "bfloat16"
    quantization: str  # "" or the method
    settings: str  # digest of the other settings that can reach the KV
    multimodal: str  # "" or the digest of what is done to images
    adapter: str  # "" or the digest of what is done to adapters
    kv_dtype: str  # logical: "bfloat16", "fp8_e4m3"
    page_tokens: int
    layers: str  # "0:32", or "0:16,16:32" of pipeline stages, and how many are cached
    heads: str  # of one shard: "kv8x128", "mla576"
    device: str  # what chooses how attention arranges a block: "cpu x86_64 AVX512", "cuda 9.0"
    layout: str  # order of the bytes in an object
    specs: str  # digest of vLLM's description of each group
    tensor_parallel: int
    pipeline_parallel: int

    def namespace(self, tag: str) -> Namespace:
        """The record that the server keeps."""
        return Namespace(
            engine=f"vllm {self.version}",
            hash_scheme=f"vllm-{self.hash_scheme}",
            model=self.architecture,
            weights=(
                f"weights={self.weights} config={self.config} dtype={self.model_dtype} "
                f"quantization={self.quantization or 'none'} multimodal={self.multimodal or 'none'} settings={self.settings}"
            ),
            adapter=f"in-hash {self.adapter}".strip(),
            kv_dtype=self.kv_dtype,
            page_tokens=self.page_tokens,
            layers=self.layers,
            heads=self.heads,
            layout=f"{self.layout} on={self.device} specs={self.specs}",
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            context_parallel=1,
            data_parallel=1,
            draft="",
            tag=tag,
        )


def collect(
    vllm_config: Any, kv_cache_config: Any, *, block_tokens: int, layout: str, config: ExtraConfig
) -> Namespace:
    """The namespace of a worker that has seen its KV cache.

    Args:
        vllm_config, kv_cache_config: vLLM's.
        block_tokens: tokens that one block hash stands for.
        layout: order of the bytes in an object, of all groups, as the worker sees it.
    Raises:
        ConfigError: something that changes the bytes cannot be established, or is not supported.
    """
    return facts_of(vllm_config, kv_cache_config, block_tokens=block_tokens, layout=layout).namespace(config.tag)


def facts_of(vllm_config: Any, kv_cache_config: Any, *, block_tokens: int, layout: str) -> EngineFacts:
    """See :func:`collect`."""
    from vllm.version import __version__ as version

    refuse_unsupported_shapes(vllm_config.parallel_config)
    _refuse_unsupported_settings(vllm_config)
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in layer_specs(group.kv_cache_spec)]
    return EngineFacts(
        version=str(version),
        hash_scheme=hash_scheme(str(vllm_config.cache_config.prefix_caching_hash_algo)),
        architecture=str((model.hf_config.architectures or ["?"])[0]),
        config=json_digest([meaningful(model.hf_config.to_dict()), _length(model)]),
        weights=_weights(vllm_config),
        model_dtype=dtype_name(model.dtype),
        quantization=str(model.quantization or ""),
        settings=_settings(vllm_config),
        multimodal=_multimodal(model.multimodal_config),
        adapter=_adapter(vllm_config.lora_config),
        kv_dtype=logical_kv_dtype(str(vllm_config.cache_config.cache_dtype), specs, dtype_name(model.dtype)),
        page_tokens=block_tokens,
        layers=_layers(model, parallel, kv_cache_config),
        heads=_heads(specs),
        device=device(),
        layout=_short_layout(layout, int(parallel.pipeline_parallel_size)),
        specs=_specs(kv_cache_config),
        tensor_parallel=int(parallel.tensor_parallel_size),
        pipeline_parallel=int(parallel.pipeline_parallel_size),
    )


# ---------------------------------------------------------------- hashes


def hash_scheme(algorithm: str) -> str:
    """How this process hashes blocks: the algorithm, and the hash of a fixed chain of two blocks, one of them with extra keys.

    Raises:
        ConfigError: hashes that are not 32 bytes, or that no other process has.
    """
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import hash_block_tokens

    function = get_hash_fn_by_name(algorithm)
    size = len(function(0))
    if size != HASH_BYTES:
        raise ConfigError(
            f"--prefix-caching-hash-algo is {algorithm}, whose hashes have {size} bytes, can be made to collide and are seeded at random in every "
            f"process: Maru serves every engine on the pool and needs {HASH_BYTES}. Use --prefix-caching-hash-algo sha256 (vLLM's default) or "
            "sha256_cbor; a PYTHONHASHSEED does not help"
        )
    first = none_hash(function)
    extra = (("lora", "name", "path"), ("cache_salt", "salt"))
    second = hash_block_tokens(function, first, [1, 2, 3, 2**31 - 1], extra)
    third = hash_block_tokens(function, second, [5, 7], None)
    return f"{algorithm} {bytes(third).hex()[:16]}"


def none_hash(function: Callable[[Any], bytes]) -> Any:
    """The parent of every first block, as ``init_none_hash`` computes it.

    Raises:
        ConfigError: it is random in every process.
    """
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    seed = resolve_none_hash_seed(function)
    if seed != resolve_none_hash_seed(function):
        raise ConfigError(
            "vLLM seeds its block hashes with random bytes in this process, so no other engine could find what this one stores: set "
            "PYTHONHASHSEED to the same number for every engine (PYTHONHASHSEED=0)"
        )
    return function(seed)


# ---------------------------------------------------------------- model and settings


def _refuse_unsupported_settings(vllm_config: Any) -> None:
    speculation = vllm_config.speculative_config
    if speculation is not None and str(speculation.method) not in _DRAFTLESS:
        raise ConfigError(
            f'--speculative-config has the method "{speculation.method}", which keeps KV of a draft model: it is written after the target\'s, '
            f"and Maru would store it incomplete. Use one of {', '.join(sorted(_DRAFTLESS))}, or leave --speculative-config out"
        )
    if not vllm_config.cache_config.enable_prefix_caching and not vllm_config.scheduler_config.enable_chunked_prefill:
        # So it is where attention cannot take KV that is there into account (MLA on a CPU without AMX): answers would be wrong, silently.
        raise ConfigError(
            "prefix caching and chunked prefill are both off, as vLLM turns them off where a model or its attention backend cannot go on from "
            "KV that is there already (its log says so): serve this model without MaruConnector. If you turned them off yourself, leave "
            "out --no-enable-prefix-caching or --no-enable-chunked-prefill"
        )
    if vllm_config.diffusion_config is not None:
        raise ConfigError(
            "this is a diffusion model, whose KV is rewritten until a block is final: Maru does not support that; serve it without "
            "MaruConnector"
        )
    if (transfer := vllm_config.weight_transfer_config) is not None:
        raise ConfigError(
            f"--weight-transfer-config ({transfer.backend}) replaces the weights while the engine runs, and Maru could not tell the KV of old "
            "ones from that of new ones: leave it out, or serve without MaruConnector"
        )


def _settings(vllm_config: Any) -> str:
    kept: dict[str, Any] = {}
    for part in dataclasses.fields(vllm_config):
        harmless = HARMLESS.get(part.name, frozenset())
        value = getattr(vllm_config, part.name)
        if harmless == ALL or value is None:
            continue
        if dataclasses.is_dataclass(value):
            kept[part.name] = _kept(value, harmless)
        elif hasattr(value, "compute_hash"):
            kept[part.name] = str(value.compute_hash())
        else:
            kept[part.name] = value
    return json_digest(kept)


def _kept(part: Any, harmless: frozenset[str]) -> dict[str, Any]:
    return {field.name: getattr(part, field.name) for field in dataclasses.fields(part) if field.name not in harmless}


def _weights(vllm_config: Any) -> str:
    model, load = vllm_config.model_config, vllm_config.load_config
    load_format = str(load.load_format)
    if load_format == "dummy":
        return _dummy_weights(model)
    if load_format not in _LOAD_FORMATS:
        raise ConfigError(
            f"--load-format is {load_format}: Maru cannot tell which weights run then: use one of {', '.join(_LOAD_FORMATS)}"
        )
    path = str(model.model_weights or model.model)
    where = locate_model(path, model.revision, load.download_dir, option=_MODEL)
    suffixes = _LOAD_FORMATS[load_format]
    return weights_digest(where, option=_MODEL, suffixes=suffixes, code=bool(model.trust_remote_code))[:32]


def _dummy_weights(model: Any) -> str:
    """Dummy weights are pseudo-random numbers of a fixed seed, on one kind of device and one torch; what the loader leaves alone may
    depend on ``--seed``."""
    import torch

    return f"dummy/{text_digest(f'{model.seed} {torch.__version__} {device()}')[:16]}"


def _length(model: Any) -> int:
    """``--max-model-len`` for the few models that compute otherwise where it is large, else 0."""
    config = model.hf_config.to_dict()
    text = model.hf_text_config.to_dict()
    ropes = {_rope(part) for part in (config, text)}
    kinds = {str(part.get("model_type")) for part in (config, text)}
    return int(model.max_model_len) if ropes & _LENGTH_ROPES or kinds & _LENGTH_MATTERS else 0


def _rope(config: Mapping[str, Any]) -> str:
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return str(parameters.get("rope_type") or parameters.get("type") or "") if isinstance(parameters, Mapping) else ""


def _multimodal(config: Any) -> str:
    if config is None:
        return ""
    kept = _kept(config, HARMLESS_MULTIMODAL)
    if scales := config.mm_encoder_fp8_scale_path:
        kept["scales"] = file_digest(str(scales))
    return json_digest(kept)


def _adapter(config: Any) -> str:
    if config is None:
        return ""
    kept = _kept(config, HARMLESS_LORA)
    kept["default"] = {
        str(kind): weights_digest(
            locate_model(str(path), None, None, option="--default-mm-loras"), option="--default-mm-loras"
        )
        for kind, path in (config.default_mm_loras or {}).items()
    }
    return f"lora={json_digest(kept)}"


# ---------------------------------------------------------------- the cache


def logical_kv_dtype(argument: str, specs: Iterable[Any], model_dtype: str) -> str:
    """What the elements of the cache mean. Every format of eight bits and less may be kept as ``uint8``.

    Args:
        argument: the resolved ``--kv-cache-dtype``.
        specs: of the layers.
        model_dtype: what the model runs in.
    Raises:
        ConfigError: the format cannot be told.
    """
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import KVQuantMode

    variant = "fnuz" if current_platform.is_fp8_fnuz() else ""
    if argument in ("fp8", "fp8_e4m3"):
        return f"fp8_e4m3{variant}"
    if argument == "fp8_e5m2":
        return f"fp8_e5m2{variant}"
    if argument != "auto":
        return argument
    found = set()
    for spec in specs:
        if not hasattr(spec, "kv_quant_mode"):
            continue
        name = dtype_name(spec.dtype)
        if spec.kv_quant_mode == KVQuantMode.FP8_PER_TENSOR:
            name = f"fp8_e4m3{variant}"  # the checkpoint asks for it, as "fp8"
        elif spec.dtype.itemsize == 1:
            raise ConfigError(
                f"the KV cache has elements of type {name} and --kv-cache-dtype is auto, so Maru cannot tell which format they are: name "
                "it, such as --kv-cache-dtype fp8_e4m3"
            )
        found.add(name)
    return "+".join(sorted(found)) or model_dtype


def device() -> str:
    """What vLLM chooses attention's arrangement of a block by."""
    from vllm.platforms import current_platform

    kind = str(current_platform.device_type)
    if current_platform.is_cpu():
        import torch

        amx = " amx" if torch.cpu._is_amx_tile_supported() else ""
        return f"cpu {current_platform.get_cpu_architecture().name} {torch.backends.cpu.get_cpu_capability()}{amx}"
    capability = current_platform.get_device_capability()
    return f"{kind} {capability.as_version_str() if capability is not None else current_platform.get_device_name()}"


def _layers(model: Any, parallel: Any, kv_cache_config: Any) -> str:
    from vllm.distributed.utils import get_pp_indices

    total, stages = int(model.get_total_num_hidden_layers()), int(parallel.pipeline_parallel_size)
    if stages > 1:
        return ",".join("{}:{}".format(*get_pp_indices(total, stage, stages)) for stage in range(stages))
    return f"0:{total}#{','.join(str(len(group.layer_names)) for group in kv_cache_config.kv_cache_groups)}"


def _heads(specs: Iterable[Any]) -> str:
    """Of the first layer that has any; :func:`_specs` has all."""
    for spec in specs:
        if not hasattr(spec, "num_kv_heads"):
            continue
        if not spec.head_size_v:
            return f"mla{spec.head_size}"
        width = str(spec.head_size) if spec.head_size == spec.head_size_v else f"{spec.head_size}/{spec.head_size_v}"
        return f"kv{spec.num_kv_heads}x{width}"
    return "states"


def _specs(kv_cache_config: Any) -> str:
    """Digest of the kinds of layers in each group: not of which layers, since pipeline stages have different ones."""
    described = []
    for group in kv_cache_config.kv_cache_groups:
        kinds = {json_digest([type(spec).__name__, _fields(spec)]) for spec in layer_specs(group.kv_cache_spec)}
        described.append(sorted(kinds))
    return json_digest(described)[:16]


def _fields(spec: Any) -> dict[str, Any]:
    return {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}


def _short_layout(layout: str, stages: int) -> str:
    """The layout without the numbers of layers where they differ from stage to stage; a digest where it is long."""
    if stages > 1:
        layout = ";".join(",".join(sorted(set(re.sub(r"\*\d+", "", part).split(",")))) for part in layout.split(";"))
    return layout if len(layout) <= _LAYOUT_MAX else json_digest(layout)
