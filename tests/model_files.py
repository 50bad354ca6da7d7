"""Model directories for tests that read a model's files and never run it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

LAYERS = 3


def write_model(directory: Path, *, seed: int = 0, **config: Any) -> Path:
    """A Llama directory: configuration and one safetensors file. Big enough to be told apart, too small to serve."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": LAYERS, "vocab_size": 256,
        "max_position_embeddings": 512, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
    } | config  # fmt: skip
    (directory / "config.json").write_text(json.dumps(settings))
    write_safetensors(directory / "model.safetensors", {"embed": 4096, "norm": 64}, seed)
    return directory


def write_safetensors(path: Path, tensors: dict[str, int], seed: int) -> None:
    """A safetensors file of float32 tensors with the given numbers of elements."""
    random, header, data = np.random.default_rng(seed), {}, b""
    for name, elements in tensors.items():
        body = random.random(elements, np.float32).tobytes()
        header[name] = {"dtype": "F32", "shape": [elements], "data_offsets": [len(data), len(data) + len(body)]}
        data += body
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
