"""Tiny Llama models with random weights, made on the spot from a seed.

The weights are spread so that attention really depends on the whole prompt and the logits differ from token to
token: with the usual small initial spread such a model answers the same token to every prompt, and a test that
compares answers could not tell right KV from wrong KV.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from maru_engine_kit.shapes import SHAPES, write_shape

_DONE_MARK = "maru_engine_kit.json"


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """Shape of a Llama. ``head_dim`` is ``hidden / heads``."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int = 512
    positions: int = 8192


#: ``tiny`` has some 0.3 M parameters and is for tests; ``demo`` has some 78 M, so that a prefill takes long enough
#: on a CPU for a time to first token to mean something. ``wide`` is ``tiny`` with heads of 32, the least that vLLM's CPU
#: attention takes.
SIZES = {
    "tiny": ModelSize(layers=4, hidden=64, intermediate=192, heads=4, kv_heads=2),
    "wide": ModelSize(layers=4, hidden=128, intermediate=256, heads=4, kv_heads=2),
    "demo": ModelSize(layers=12, hidden=704, intermediate=2112, heads=11, kv_heads=11),
}


def make_llama(folder: Path, *, size: str = "tiny", seed: int = 0) -> Path:
    """Write a Llama with its byte-level tokenizer to ``folder`` (nothing is done if it is already there).

    Args:
        folder: where; its parents are made.
        size: a name in :data:`SIZES`.
        seed: of the weights: the same seed gives the same bytes.
    Returns:
        ``folder``.
    Raises:
        ValueError: an unknown size.
        FileExistsError: the folder holds something else.
    """
    if size not in SIZES:
        raise ValueError(f"no model size {size!r}: choose one of {sorted(SIZES)}")
    mark = {"size": size, "seed": seed, "shape": dataclasses.asdict(SIZES[size]), "recipe": 1}
    return _make(folder, mark, lambda scratch: _write_model(scratch, SIZES[size], seed), SIZES[size])


def make_shape(folder: Path, shape: str, *, seed: int = 0) -> Path:
    """Write a tiny model of another shape (:data:`maru_engine_kit.shapes.SHAPES`), as :func:`make_llama` does.

    Raises:
        ValueError: an unknown shape.
        FileExistsError: the folder holds something else.
    """
    if shape not in SHAPES:
        raise ValueError(f"no model shape {shape!r}: choose one of {sorted(SHAPES)}")
    mark = {"shape": shape, "seed": seed, "recipe": 1}
    return _make(folder, mark, lambda scratch: write_shape(scratch, shape, seed), SIZES["tiny"])


def _make(folder: Path, mark: dict[str, object], write: Callable[[Path], None], size: ModelSize) -> Path:
    done = folder / _DONE_MARK
    if done.exists() and json.loads(done.read_text()) == mark:
        return folder
    if folder.exists() and any(folder.iterdir()) and not done.exists():
        raise FileExistsError(f"{folder} is not empty and was not made by this tool: name another folder")
    # Built beside the target and renamed, so that a second process never sees half a model.
    scratch = folder.with_name(f"{folder.name}.new.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    write(scratch)
    _write_tokenizer(scratch, size)
    (scratch / _DONE_MARK).write_text(json.dumps(mark, indent=1))
    shutil.rmtree(folder, ignore_errors=True)
    scratch.rename(folder)
    return folder


def _write_model(folder: Path, shape: ModelSize, seed: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.positions,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.dim() < 2:
                weight.fill_(1.0)  # norms
                continue
            # Unit variance through each layer; queries and keys wider, so that attention is sharp and picks
            # different tokens of the prompt for different heads; logits of spread 3.
            spread = 1.0 if "embed" in name else 1.0 / math.sqrt(weight.shape[1])
            if "q_proj" in name or "k_proj" in name:
                spread *= 1.5
            if "lm_head" in name:
                spread *= 3.0
            weight.copy_(torch.randn(weight.shape, generator=generator) * spread)
    model.save_pretrained(folder)


def _write_tokenizer(folder: Path, shape: ModelSize) -> None:
    """A byte-level tokenizer: one token a byte, after three special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(special + alphabet)}
    if len(vocabulary) > shape.vocabulary:
        raise ValueError(f"a vocabulary of {shape.vocabulary} is too small for {len(vocabulary)} byte tokens")
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=shape.positions,
    ).save_pretrained(folder)


if __name__ == "__main__":
    from maru_engine_kit.cli import main

    main()
