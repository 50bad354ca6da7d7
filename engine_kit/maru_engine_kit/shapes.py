"""Tiny models of other shapes than a plain Llama: sliding windows, states, compressed KV. Random weights from a seed.

Each is the smallest of an architecture that SGLang serves on a CPU, with weights spread as :mod:`maru_engine_kit.models` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY = 512
LAYERS = 4
#: Tokens that a sliding layer sees.
WINDOW = 64


def _sliding() -> Any:
    """Two layers of four see a window of 64 tokens: their KV is in a pool of its own."""
    from transformers import MellumConfig, MellumForCausalLM

    config = MellumConfig(
        **_common(),
        intermediate_size=192,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        mlp_layer_types=["dense"] * LAYERS,
        num_experts=4,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
    )
    return MellumForCausalLM(config)


def _states() -> Any:
    """Two layers of four are convolutions: they keep a state of three tokens instead of KV."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        **_common(),
        intermediate_size=192,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"] * 2,
        conv_L_cache=3,
        block_auto_adjust_ff_dim=False,
        block_ff_dim=192,
    )
    return Lfm2ForCausalLM(config)


def _compressed() -> Any:
    """Multi-head latent attention: one row a token, the same for all heads and on all ranks."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **_common(),
        intermediate_size=192,
        moe_intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=LAYERS,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    )
    config.moe_layer_freq = 1
    return DeepseekV3ForCausalLM(config)


def _common() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


#: By name: what makes a model of that shape.
SHAPES: dict[str, Callable[[], Any]] = {"sliding": _sliding, "states": _states, "compressed": _compressed}


def write_shape(folder: Path, shape: str, seed: int) -> None:
    """Write configuration and weights of a model of that shape."""
    import torch

    model = SHAPES[shape]().to(torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.dim() < 2:
                weight.fill_(1.0)  # norms
                continue
            spread = 1.0 if "embed" in name else 1.0 / math.sqrt(weight[0].numel())
            if "q_proj" in name or "k_proj" in name:
                spread *= 1.5
            if "lm_head" in name:
                spread *= 3.0
            weight.copy_(torch.randn(weight.shape, generator=generator) * spread)
    model.save_pretrained(folder)
