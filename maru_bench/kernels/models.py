"""Whose KV ``maru-bench kernels`` moves."""

from __future__ import annotations

from typing import Final

import msgspec


class Model(msgspec.Struct, frozen=True):
    """KV of one rank: ``buffers`` (2 for K and V, 1 for a latent) of ``row_bytes`` for each token in each layer."""

    title: str
    layers: int
    buffers: int
    row_bytes: int

    @property
    def token_bytes(self) -> int:
        return self.layers * self.buffers * self.row_bytes


#: From the models' published configurations, KV in bfloat16.
MODELS: Final = {
    "llama-3.1-8b": Model("Llama-3.1-8B", 32, 2, 8 * 128 * 2),
    "llama-3.1-70b-tp8": Model("Llama-3.1-70B, TP 8", 80, 2, 1 * 128 * 2),
    "deepseek-v3": Model("DeepSeek-V3, MLA", 61, 1, (512 + 64) * 2),
}
