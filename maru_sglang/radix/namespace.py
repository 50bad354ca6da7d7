"""The namespace of a running SGLang process: everything that changes the bytes of a KV page, or what its key means.

Two steps. :func:`collect` reads what the process really runs with: the storage config, the host pool, the resolved
server arguments (``sglang.srt.runtime_context``), the resolved model configuration and the content of the weights. The
result, :class:`EngineFacts`, is plain data; its :meth:`~EngineFacts.namespace` is the record that the server keeps.
What cannot be established is a :class:`~maru_core.errors.ConfigError` at start that names it and the cure.

How SGLang 0.5.23 keeps requests apart, which decides what the record must add:

- LoRA adapter and cache salt enter the page hash: ``storage_namespace_seed(extra_key, cache_salt)`` seeds the first page
  of every chain, and ``Req.__init__`` appends the adapter's id to ``extra_key``. But the id of a ``--lora-paths`` adapter
  is made of its *name and path*, not of its content, so the digest of every such adapter is part of the namespace.
  Adapters that are loaded later get a random id: their pages are never shared between processes.
- Images, audio and video enter as pad values in place of token ids: four 62-bit numbers cut from the SHA-256 of the
  item's 64-bit hash (or 256-bit identity), so they are part of every page hash that covers them. How an item is
  preprocessed is not part of its hash, so those settings are part of the namespace.
- The bytes of KV under speculative decoding are those of the target model, but SGLang may pack draft layers into the
  same pool, and hashes pairs of tokens for EAGLE: the draft model is part of the namespace.
- The namespace holds the hash of a fixed chain as this process computes it (:func:`_hash_probe`): another hash scheme
  is another namespace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from maru_core.canonical import dtype_name, json_digest, meaningful, text_digest
from maru_core.errors import ConfigError
from maru_core.namespace import Namespace
from maru_core.weights import file_digest, locate_model, weights_digest
from maru_sglang.radix.pool_facts import PoolFacts

if TYPE_CHECKING:
    import torch

#: The component under which SGLang's KV pool is stored.
KV: Final = "kv"
_MODEL_PATH: Final = "--model-path"

#: Server arguments (by runtime_context namespace) that change the KV a model computes and are not in its configuration
#: or its weights. Only numerics of kernels (attention backends, MoE runners) are left out: they round differently,
#: as they do between two GPUs.
_ARGUMENTS: Final[Mapping[str, tuple[str, ...]]] = {
    "model": ("json_model_override_args", "model_impl", "is_embedding", "trust_remote_code"),
    "disagg": ("encoder_only", "language_only", "language_model_only"),
    "mm": (
        "enable_multimodal",
        "mm_process_config",
        "image_processor_backend",
        "disable_fast_image_processor",
        "trust_mm_content_hashes",  # then a client may claim any image's hash
    ),
    "exec": (
        "dllm_algorithm",
        "dllm_algorithm_config",
        "enable_mis",
        "rl_on_policy_target",
        "enable_precise_embedding_interpolation",  # other position embeddings of images
        "enable_quant_communications",
        "enable_w4a4_mxfp4_megamoe",
    ),
    "observability": ("forward_hooks",),  # they may change activations
}
#: Arguments under which nobody can tell from disk which weights run, and what to do instead.
_UNTOLD_WEIGHTS: Final[Mapping[str, str]] = {
    "modelopt_checkpoint_restore_path": "export the checkpoint and give it as --model-path",
    "modelopt_quant": "export the quantised checkpoint and give it as --model-path",
    "quantize_and_serve": "export the quantised checkpoint and give it as --model-path",
    "checkpoint_engine_wait_weights_before_ready": "load the weights from --model-path",
    "rl_quant_profile": "serve a checkpoint from --model-path",
}
_LOAD_FORMATS: Final[Mapping[str, tuple[str, ...]]] = {
    "auto": (),
    "safetensors": (".safetensors",),
    "pt": (".bin", ".pt", ".pth"),
    "npcache": (".bin", ".pt", ".pth"),
    "gguf": (".gguf",),
    "bitsandbytes": (),
    "mistral": (".safetensors",),
    "layered": (),
    "fastsafetensors": (".safetensors",),
    "instanttensor": (".safetensors",),
    "runai_streamer": (".safetensors",),
    "sharded_state": (".safetensors",),
}


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What decides whether two processes' pages are interchangeable. Every field is part of the namespace."""

    version: str  # of SGLang: a release may compute or arrange KV in another way under the same names
    hash_probe: str  # hash of a fixed chain, as this process computes it
    architecture: str  # "LlamaForCausalLM"
    config: str  # digest of the resolved model configuration, overrides and all
    weights: str  # digest of the weights' content
    model_dtype: str  # "bfloat16"
    quantization: str  # "" or the method
    kv_scales: str  # digest of --quantization-param-path, "" without
    arguments: str  # digest of the other arguments that change KV (_ARGUMENTS)
    adapters: str  # "" or the digest of the adapters known at start
    kv_dtype: str  # logical: "bfloat16", "fp8_e4m3", "fp8_e4m3fnuz", "fp8_e5m2"
    pool: str  # class of the host pool
    page_tokens: int
    layout: str  # order of the bytes in a page
    device_layout: str  # how SGLang arranges heads within a token: "nhd"
    side_pools: str  # what the pages of further pools depend on, "" where there are none
    stages: tuple[tuple[int, int], ...]  # layers [start, end) of every pipeline stage
    cached_layers: int  # layers in this pool, of all stages' pools alike if there is one stage
    packed_draft_layers: int  # draft layers in the same pool
    heads: str  # heads of one shard: "kv8x128", "mla512+64=576"
    tensor_parallel: int
    pipeline_parallel: int
    context_parallel: int
    data_parallel: int  # width of data-parallel attention; plain replicas are 1
    draft: str  # "" without speculation

    def namespace(self, tag: str) -> Namespace:
        """The record that the server keeps."""
        layers = ",".join(f"{start}:{end}" for start, end in self.stages)
        if self.cached_layers != self.stages[0][1] - self.stages[0][0] or self.packed_draft_layers:
            layers += f"#{self.cached_layers}+{self.packed_draft_layers}"
        return Namespace(
            engine=f"sglang {self.version}",
            hash_scheme=f"sglang-sha256 {self.hash_probe}",
            model=self.architecture,
            weights=(
                f"weights={self.weights} config={self.config} dtype={self.model_dtype} "
                f"quantization={self.quantization or 'none'} kv_scales={self.kv_scales or 'none'} args={self.arguments}"
            ),
            adapter=f"seed-of-chain {self.adapters}".strip(),
            kv_dtype=self.kv_dtype,
            page_tokens=self.page_tokens,
            layers=layers,
            heads=self.heads,
            layout=f"{self.layout}/{self.device_layout}/{self.pool} {self.side_pools}".rstrip(),
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            context_parallel=self.context_parallel,
            data_parallel=self.data_parallel,
            draft=self.draft,
            tag=tag,
        )


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of each page this rank holds.

    MHA: every rank of a stage has its own heads, a page is whole with all of them. MLA: the ranks of a stage hold the
    same bytes, one of them writes. Pipeline stages may have different numbers of layers, while the shards of one
    component are equally long, so each stage is a component of its own; a page counts when all of them have it."""

    component: str  # what this rank stores: "kv", or "kv.2" for pipeline stage 2
    components: tuple[str, ...]  # what a page needs to be whole
    shard: int  # the first one of this rank
    world: int
    writer: bool
    parts: int = 1  # shards of this rank, one after the other: more than one where fewer ranks share with more

    @staticmethod
    def of(config: Any) -> Placement:
        """Placement by a ``HiCacheStorageConfig``."""
        stages = config.pp_size
        components = (KV,) if stages == 1 else tuple(f"{KV}.{stage}" for stage in range(stages))
        parts = config.tp_lcm_size // config.tp_size if config.should_split_heads else 1
        return Placement(
            component=components[config.pp_rank],
            components=components,
            shard=0 if config.is_mla_model else config.tp_rank * parts,
            world=1 if config.is_mla_model else config.tp_size * parts,
            writer=bool(config.is_storage_writer),
            parts=parts,
        )

    @staticmethod
    def side(name: str, shard: int, world: int, writer: bool, parts: int) -> Placement:
        """Of a pool beside the KV pool, which is a component of its own."""
        return Placement(component=name, components=(name,), shard=shard, world=world, writer=writer, parts=parts)


def collect(storage_config: Any, pool: PoolFacts) -> EngineFacts:
    """What this process runs with.

    Args:
        storage_config: SGLang's ``HiCacheStorageConfig``.
        pool: the pool of the KV component, and all that belongs to its pages.
    Raises:
        ConfigError: something that changes the bytes cannot be established, or is not supported yet.
    """
    _refuse_unsupported_shapes(storage_config)
    from sglang.srt.runtime_context import get_parallel
    from sglang.version import __version__ as version

    arguments = _Arguments()
    model = _model_config(arguments)
    return EngineFacts(
        version=str(version),
        hash_probe=_hash_probe(),
        architecture=str((model.hf_config.architectures or ["?"])[0]),
        config=json_digest(meaningful(model.hf_config.to_dict())),
        weights=_weights(arguments),
        model_dtype=_model_dtype(str(arguments.get("model", "dtype")), dtype_name(model.dtype)),
        quantization=_quantization(arguments, model),
        kv_scales=_kv_scales(arguments),
        arguments=json_digest(
            {f"{part}.{name}": arguments.get(part, name) for part, names in _ARGUMENTS.items() for name in names}
        ),
        adapters=_adapters(arguments),
        kv_dtype=logical_kv_dtype(str(arguments.get("model", "kv_cache_dtype")), pool.stored),
        pool=pool.pool,
        page_tokens=pool.page_tokens,
        layout=pool.layout,
        device_layout=pool.device_layout,
        side_pools=pool.sides,
        stages=_stages(storage_config, pool, int(model.num_hidden_layers)),
        cached_layers=pool.target_layers if storage_config.pp_size == 1 else 0,
        packed_draft_layers=pool.draft_layers,
        heads=_shared_heads(storage_config, pool),
        tensor_parallel=int(storage_config.tp_lcm_size or storage_config.tp_size),
        pipeline_parallel=int(storage_config.pp_size),
        context_parallel=int(storage_config.attn_cp_size),
        data_parallel=int(get_parallel().attn_dp_size),
        draft=_draft(arguments),
    )


def logical_kv_dtype(argument: str, stored: torch.dtype) -> str:
    """What the elements of the pool mean. SGLang stores every FP8 format as ``uint8``.

    Args:
        argument: the resolved ``--kv-cache-dtype``.
        stored: element type of the host pool.
    Raises:
        ConfigError: the two contradict each other, or the format cannot be told.
    """
    name = dtype_name(stored)
    plain = {"bf16": "bfloat16", "bfloat16": "bfloat16"}
    if argument == "auto" and stored.is_floating_point:
        return _FLOAT8.get(name, name)
    if argument in plain and name == plain[argument]:
        return name
    if argument in ("fp8_e4m3", "fp8_e5m2") and stored.itemsize == 1:
        told = _FLOAT8.get(name, argument)
        if told.removesuffix("fnuz") == argument:
            return told if told != argument else argument + _fp8_variant()
    if argument == "auto":
        raise ConfigError(
            f"the KV pool has elements of type {name} and --kv-cache-dtype is auto, so Maru cannot tell which FP8 format they "
            "are: name it, such as --kv-cache-dtype fp8_e4m3"
        )
    raise ConfigError(
        f"--kv-cache-dtype {argument} with a pool of {name} elements is not supported: use auto, bfloat16, fp8_e4m3 or fp8_e5m2"
    )


_FLOAT8: Final[Mapping[str, str]] = {
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "float8_e4m3fnuz": "fp8_e4m3fnuz",
    "float8_e5m2fnuz": "fp8_e5m2fnuz",
}


def _fp8_variant() -> str:
    """ "fnuz" on AMD GPUs whose FP8 has another exponent bias and no negative zero, else nothing."""
    from sglang.kernels.ops.quantization.fp8_kernel import fp8_dtype

    return "fnuz" if dtype_name(fp8_dtype).endswith("fnuz") else ""


def _refuse_unsupported_shapes(config: Any) -> None:
    refused = {
        "context-parallel attention (attn_cp_size)": (config.attn_cp_size, 1, "run with --attn-cp-size 1"),
        "decode context parallelism (dcp_size)": (config.dcp_size, 1, "run with --dcp-size 1"),
    }
    for what, (value, supported, cure) in refused.items():
        if value != supported:
            raise ConfigError(f"{what} is {value}: Maru does not support that yet: {cure}")


def _shared_heads(config: Any, pool: PoolFacts) -> str:
    """Heads of one shard as it is stored. With ``tp_lcm_size`` the shards are those of that many ranks, so that servers of
    different tensor-parallel sizes have the same; where the KV is the same on all ranks there is nothing to divide.

    Raises:
        ConfigError: the heads of this rank cannot be divided so.
    """
    if config.tp_lcm_size is None or config.is_mla_model or config.tp_lcm_size == config.tp_size:
        return pool.heads
    cure = "or leave tp_lcm_size out of --hicache-storage-backend-extra-config"
    if not config.should_split_heads:
        raise ConfigError(
            f"tp_lcm_size is {config.tp_lcm_size} with tensor parallel {config.tp_size} and layout {pool.layout}: only pages with the "
            f"heads outermost can be divided: use --hicache-mem-layout page_head, {cure}"
        )
    parts = config.tp_lcm_size // config.tp_size
    count, _, rest = pool.heads.removeprefix("kv").partition("x")
    if int(count) % parts:
        raise ConfigError(
            f"tp_lcm_size is {config.tp_lcm_size} with tensor parallel {config.tp_size}, but this rank's {count} heads cannot be "
            f"divided by {parts}: give a tp_lcm_size that does not exceed the model's KV heads, {cure}"
        )
    return f"kv{int(count) // parts}x{rest}"


class _Arguments:
    """Resolved server arguments. A name that this SGLang does not have is an error, not a default."""

    def __init__(self) -> None:
        from sglang.srt import runtime_context

        try:
            self.record = runtime_context.get_server_args()
        except ValueError as error:
            raise ConfigError(
                "SGLang's server arguments are not known in this process, so Maru cannot tell what it runs: use the backend "
                "inside a SGLang server"
            ) from error
        self._bag = runtime_context.get_context().config_bag

    def get(self, part: str, name: str) -> Any:
        """Argument ``name`` of runtime_context namespace ``part``."""
        found, value = _leaf(self._bag(part), name)
        if not found:
            raise ConfigError(f"this SGLang has no argument {name!r} under {part!r}: Maru supports SGLang 0.5.23")
        return value


def _leaf(bag: Any, name: str) -> tuple[bool, Any]:
    """Value of a leaf of a config bag or of the bags within it."""
    if name in bag:
        return True, getattr(bag, name)
    for inner in object.__getattribute__(bag, "_subs").values():
        found, value = _leaf(inner, name)
        if found:
            return True, value
    return False, None


def _model_config(arguments: _Arguments) -> Any:
    from sglang.srt.configs.model_config import ModelConfig

    try:
        return ModelConfig.from_server_args(arguments.record)
    except Exception as error:
        raise ConfigError(
            f"the model's configuration cannot be read ({error}): give --model-path a local directory"
        ) from error


def _hash_probe() -> str:
    """How this process hashes pages, as the hash of a fixed chain of two pages with an adapter and a salt.

    Raises:
        ConfigError: adapter or salt do not change the hash, so requests that must be apart would share.
    """
    from array import array

    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    def last(extra_key: str | None, cache_salt: str | None, is_bigram: bool = False) -> str:
        tokens = array("q", [1, 2, 3, 2**40 + 7, 5])
        key = RadixKey(tokens, extra_key=extra_key, is_bigram=is_bigram, cache_salt=cache_salt)
        return str(get_storage_hash_str(key.page_aligned(2), None, page_size=2)[-1])

    plain, adapter, salted, both = last(None, None), last("a", None), last(None, "a"), last("a", "a")
    if len({plain, adapter, salted, both}) != 4:
        raise ConfigError(
            "this SGLang does not put LoRA adapter and cache salt into its page hashes, so Maru cannot keep requests apart: "
            "use SGLang 0.5.23"
        )
    return text_digest("".join((plain, adapter, salted, both, last("a", "a", is_bigram=True))))[:16]


def _weights(arguments: _Arguments) -> str:
    for name, cure in _UNTOLD_WEIGHTS.items():
        if (value := arguments.get("model", name)) not in (None, False, ""):
            raise ConfigError(
                f"--{name.replace('_', '-')} is {value!r}: Maru cannot tell which weights run then, and other weights would share "
                f"their KV: {cure}"
            )
    if (mode := arguments.get("model", "weight_cache_mode")) != "off":
        raise ConfigError(f"--weight-cache-mode is {mode}: Maru cannot tell which weights the cache holds: use off")
    if experts := arguments.get("exec", "kt_weight_path"):
        raise ConfigError(f"--kt-weight-path is {experts}: Maru cannot tell those weights apart: leave it out")
    load_format = str(arguments.get("model", "load_format"))
    if load_format == "dummy":
        return _dummy_weights(arguments)
    return _weights_at(
        str(arguments.get("model", "model_path")),
        arguments.get("model", "revision"),
        arguments.get("model", "download_dir"),
        load_format,
        bool(arguments.get("model", "trust_remote_code")),
    )


def _weights_at(path: str, revision: str | None, cache: str | None, load_format: str, code: bool) -> str:
    if load_format not in _LOAD_FORMATS:
        raise ConfigError(
            f"--load-format is {load_format}: Maru cannot tell which weights run then: use one of {', '.join(_LOAD_FORMATS)}"
        )
    where = locate_model(path, revision, cache, option=_MODEL_PATH)
    return weights_digest(where, option=_MODEL_PATH, suffixes=_LOAD_FORMATS[load_format], code=code)[:32]


def _dummy_weights(arguments: _Arguments) -> str:
    """Dummy weights are pseudo-random numbers of a fixed seed (``initialize_dummy_weights``) on one kind of device and
    one torch; weights that the loader leaves alone may depend on ``--random-seed``. With all of it equal they are equal."""
    import torch

    seed = arguments.record.random_seed
    return f"dummy/{text_digest(f'{seed} {torch.__version__} {_device_name(arguments)}')[:16]}"


def _device_name(arguments: _Arguments) -> str:
    import torch

    device = str(arguments.get("device", "device"))
    return torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else device


def _model_dtype(argument: str, configured: str) -> str:
    """What the model runs in: SGLang changes the argument where a GPU lacks bfloat16."""
    spelled = {"auto": configured, "half": "float16", "float": "float32"}
    return spelled.get(argument, argument)


def _quantization(arguments: _Arguments, model: Any) -> str:
    told = arguments.get("model", "quantization"), getattr(model, "quantization", None)
    return "+".join(dict.fromkeys(str(method) for method in told if method))


def _kv_scales(arguments: _Arguments) -> str:
    path = arguments.get("model", "quantization_param_path")
    return file_digest(str(path))[:32] if path else ""


def _adapters(arguments: _Arguments) -> str:
    """Adapters that are known at start: their ids say name and path, this says content."""
    if not arguments.get("lora", "enable_lora"):
        return ""
    known = []
    for ref in arguments.get("lora", "lora_paths") or []:
        name, path = getattr(ref, "lora_name", None), getattr(ref, "lora_path", None)
        if not name or not path:
            raise ConfigError(f"--lora-paths has an entry {ref!r} without name or path: give name=path")
        where = locate_model(str(path), None, None, option="--lora-paths")
        known.append((str(name), weights_digest(where, option="--lora-paths")))
    settings = {
        name: arguments.get("lora", name) for name in ("max_lora_rank", "lora_target_modules", "lora_strict_loading")
    }
    return f"lora={json_digest({'adapters': sorted(known), 'settings': settings})}"


def _draft(arguments: _Arguments) -> str:
    algorithm = arguments.get("spec", "speculative_algorithm")
    if not algorithm:
        return ""
    path = arguments.get("spec", "speculative_draft_model_path")
    names = (
        "speculative_draft_model_quantization",
        "speculative_draft_kv_cache_dtype",
        "speculative_draft_window_size",
        "speculative_draft_sink_size",
        "enable_multi_layer_eagle",
    )
    facts = {name: arguments.get("spec", name) for name in names}
    cache = arguments.get("model", "download_dir")
    for name in ("speculative_draft_model_path", "uno_lora_path"):
        if value := arguments.get("spec", name):
            load_format = arguments.get("spec", "speculative_draft_load_format") or arguments.get(
                "model", "load_format"
            )
            revision = arguments.get("spec", "speculative_draft_model_revision") if value == path else None
            if load_format == "dummy":
                facts[name] = _dummy_weights(arguments)
            else:
                facts[name] = _weights_at(str(value), revision, cache, str(load_format), code=False)
    return f"{algorithm} {json_digest(facts)}"


def _stages(config: Any, pool: PoolFacts, model_layers: int) -> tuple[tuple[int, int], ...]:
    """Layers of every pipeline stage, the same on all ranks; this rank's own come from its pool."""
    own = pool.start_layer, pool.end_layer
    if config.pp_size == 1:
        return (own,)
    from sglang.srt.distributed.utils import get_pp_indices

    stages = tuple(get_pp_indices(model_layers, rank, config.pp_size) for rank in range(config.pp_size))
    if stages[config.pp_rank] != own or pool.target_layers != own[1] - own[0]:
        raise ConfigError(
            f"pipeline stage {config.pp_rank} caches layers {own[0]}:{own[1]} ({pool.target_layers} of them), where SGLang's own "
            f"division of {model_layers} layers over {config.pp_size} stages gives {stages[config.pp_rank]}: this model's stages are "
            "not supported, use --pp-size 1"
        )
    return stages
