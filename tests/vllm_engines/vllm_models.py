"""Tiny models of kinds that the engine kit has none of, and LoRA adapters: random weights from a seed, made beside the interpreter.

As in the kit, weights are spread so that answers depend on the whole prompt.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

#: In common: the vocabulary of the kit's models, and a small width with heads that vLLM's CPU attention takes.
_COMMON: dict[str, Any] = {
    "vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 8192, "hidden_size": 128,
    "intermediate_size": 256, "num_attention_heads": 4,
}  # fmt: skip
#: By name: the type of the configuration, and its fields.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    # Layers that keep a state (of a short convolution) between layers of attention.
    "states": ("lfm2", {
        "num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2, "num_key_value_heads": 2, "conv_L_cache": 3,
        "conv_dim": 128, "conv_bias": False, "block_dim": 128, "block_ff_dim": 256, "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True,
    }),
}  # fmt: skip
#: Matrices of the kit's ``wide`` model that an adapter changes: name, outputs, inputs. Keys and values, so that KV changes too.
_ADAPTED = (("q_proj", 128, 128), ("k_proj", 64, 128), ("v_proj", 64, 128))
_LAYERS = 4
_RANK = 8


def make(kind: str) -> Path:
    """A model by its name in :data:`KINDS`."""
    target = Path(sys.prefix) / "maru-models" / f"vllm-{kind}"
    if not target.exists():
        # In a process of its own: who tests needs no torch.
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        line = [sys.executable, __file__, kind, str(target)]
        subprocess.run(line, check=True, capture_output=True, text=True, env=environment)
    return target


def make_adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter for the kit's ``wide`` model."""
    import numpy as np
    from safetensors.numpy import save_file

    folder.mkdir(exist_ok=True)
    choose = np.random.default_rng(seed)
    weights = {}
    for layer in range(_LAYERS):
        for name, outputs, inputs in _ADAPTED:
            start = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{start}.lora_A.weight"] = choose.standard_normal((_RANK, inputs), np.float32) / math.sqrt(inputs)
            weights[f"{start}.lora_B.weight"] = choose.standard_normal((outputs, _RANK), np.float32) / math.sqrt(_RANK)
    save_file(weights, str(folder / "adapter_model.safetensors"))
    config = {
        "peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": [name for name, *_ in _ADAPTED], "bias": "none",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _write(kind: str, target: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    name, fields = KINDS[kind]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **_COMMON | fields)).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter, weight in sorted(model.named_parameters()):
            if weight.dim() < 2:
                continue  # norms
            spread = 1 / math.sqrt(math.prod(weight.shape[1:]))
            if "embed" in parameter:
                # Logits are made with it too: a wide one would answer every token with itself.
                spread = 0.1
            elif "q_proj" in parameter or "k_proj" in parameter:
                spread *= 1.3
            weight.copy_(torch.randn(weight.shape, generator=generator) * spread)
    target.parent.mkdir(exist_ok=True)
    scratch = target.with_name(f"{target.name}.new.{os.getpid()}")
    model.save_pretrained(scratch)
    scratch.rename(target)


if __name__ == "__main__":
    _write(sys.argv[1], Path(sys.argv[2]))
