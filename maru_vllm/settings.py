"""Which of vLLM's settings cannot change the KV of a token.

Of each part of vLLM's configuration every setting is part of the namespace, except those listed here: they do not reach the KV, or what
they do is told in another field of the namespace (in brackets). A setting that a later vLLM adds counts until somebody has looked at it.
Numerics of kernels are left out: they round differently, as they do between two GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final


def _names(*lines: str) -> frozenset[str]:
    return frozenset(name for line in lines for name in line.split())


#: The whole part.
ALL: Final = frozenset({"*"})

HARMLESS: Final[Mapping[str, frozenset[str]]] = {
    "model_config": _names(
        # (weights)
        "model model_weights revision word_embeddings_untied_by_checkpoint",
        # (config, model_dtype, quantization)
        "hf_config hf_text_config hf_config_path config_format hf_overrides hf_token dtype max_model_len",
        # (the hashes: tokens, and embeddings in their place)
        "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init enable_prompt_embeds",
        # (multimodal)
        "multimodal_config allowed_local_media_path allowed_media_domains",
        # What comes after the KV, or when
        "seed max_logprobs logprobs_mode return_sampling_mask use_fp64_gumbel logits_processors generation_config",
        "override_generation_config pooler_config io_processor_plugin renderer_num_workers served_model_name",
        "enforce_eager disable_cascade_attn enable_trace_replay spec_target_max_model_len is_submodel_config",
        "allow_deprecated_quantization enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend",
        "sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator",
    ),
    "cache_config": _names(
        # (page_tokens, kv_dtype, layout, hash_scheme, specs)
        "block_size user_specified_block_size prefix_match_unit hash_block_size cache_dtype kv_cache_layout",
        "prefix_caching_hash_algo sliding_window mamba_block_size mamba_cache_mode mamba_page_size_padded",
        "skip_page_size_padded cache_hit_alignment_tokens",
        # How much is kept, and for how long
        "gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override num_gpu_blocks num_cpu_blocks",
        "kv_cache_size_tokens kv_cache_max_concurrency effective_attention_block_size is_attention_free",
        "enable_prefix_caching prefix_cache_retention_interval enable_mamba_shared_prefix_checkpoint",
        "kv_offloading_size kv_offloading_backend _block_size_resolved",
    ),
    "load_config": _names(
        # (weights)
        "load_format download_dir",
        "safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size device",
        "use_tqdm_on_load pt_load_map_location",
    ),
    "attention_config": _names(
        "flash_attn_version flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv",
        "tq_max_kv_splits_for_cuda_graph mla_prefill_backend minimax_m3_msa_decode_backend sparse_mla_force_mqa",
        "sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n flex_attn_q_block_size",
        "flex_attn_kv_block_size",
    ),
    "mamba_config": frozenset(),
    "additional_config": frozenset(),
    **dict.fromkeys(
        # Named in the record by what matters of them: ranks, adapter, speculation (refused or without KV), quantization. Replicas
        # of data-parallel engines have the same KV.
        _names("parallel_config lora_config speculative_config quant_config"),
        ALL,
    ),
    **dict.fromkeys(
        # Refused where they matter (diffusion, weight transfer), or about other things: when and where a token is computed, what is
        # sampled, what is logged
        _names(
            "scheduler_config device_config offload_config aux_output_config engram_config kernel_config watermark_config",
            "diffusion_config structured_outputs_config observability_config logging_config compilation_config",
            "profiler_config kv_transfer_config kv_events_config ec_transfer_config ec_manager_config reasoning_config",
            "instance_id optimization_level performance_mode weight_transfer_config shutdown_timeout",
        ),
        ALL,
    ),
}
#: Of ``MultiModalConfig``: what is cached and where, not what is done to an image.
HARMLESS_MULTIMODAL: Final = _names(
    "limit_per_prompt mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_encoder_tp_mode",
    "mm_encoder_attn_backend skip_mm_profiling mm_tensor_ipc mm_ipc_gpu_memory_gb",
    "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin",
    # (by content)
    "mm_encoder_fp8_scale_path",
)
#: Of ``LoRAConfig``: how many, not how they are applied.
HARMLESS_LORA: Final = _names(
    "max_loras max_cpu_loras specialize_active_lora max_lora_cls_labels",
    # (by content)
    "default_mm_loras",
)
