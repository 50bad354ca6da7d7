"""``torch_native`` attention for the rows of a prompt that are new.

SGLang 0.5.23 has it compute the attention of every row of the prompt, and then drops those of the prefix that was in a cache: on a long
prompt most of what a cache saves is lost again. Here only new rows are computed. A row may differ in its last bit from what it is
where the whole prompt is one batch, so this is off unless ``MARU_KIT_NEW_ROWS=1`` asks for it: measurements do, tests that compare
outputs to the bit do not.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

ENVIRONMENT: Final = "MARU_KIT_NEW_ROWS"
#: Rows that one call computes: their mask is as wide as the prompt.
BLOCK: Final = 1024


def is_wanted() -> bool:
    """Whether the environment asks for it."""
    return os.environ.get(ENVIRONMENT, "0") not in ("", "0")


def extend_new_rows(
    original: Callable[..., Any],
    self: Any,
    query: Any,
    output: Any,
    k_cache: Any,
    v_cache: Any,
    req_to_token: Any,
    req_pool_indices: Any,
    seq_lens: Any,
    extend_prefix_lens: Any,
    extend_seq_lens: Any,
    encoder_lens: Any = None,
    **options: Any,
) -> Any:
    """Around ``TorchNativeAttnBackend._run_sdpa_forward_extend``. Shapes: ``query`` and ``output`` (new tokens, heads, head size),
    caches (tokens, heads, head size). What is not plain causal self-attention over a prefix is left to ``original``."""
    import torch

    arguments = (
        query,
        output,
        k_cache,
        v_cache,
        req_to_token,
        req_pool_indices,
        seq_lens,
        extend_prefix_lens,
        extend_seq_lens,
    )
    plain = options.get("causal") and not options.get("is_cross_attn") and encoder_lens is None
    window = options.get("sliding_window_size")
    if not plain or (window is not None and window > -1) or not bool((extend_prefix_lens > 0).any()):
        return original(self, *arguments, encoder_lens, **options)
    attend = torch.nn.functional.scaled_dot_product_attention
    shape = {"scale": options.get("scaling"), "enable_gqa": options.get("enable_gqa", False)}
    first = 0
    for row, prefix, new in zip(
        req_pool_indices.tolist(), extend_prefix_lens.tolist(), extend_seq_lens.tolist(), strict=True
    ):
        tokens = req_to_token[row, : prefix + new]
        # (heads, tokens, head size)
        keys = k_cache[tokens].movedim(0, 1).to(query.dtype)
        values = v_cache[tokens].movedim(0, 1).to(query.dtype)
        for start in range(0, new, BLOCK):
            stop = min(start + BLOCK, new)
            end = prefix + stop
            mask = torch.ones(stop - start, end, dtype=torch.bool, device=query.device).tril(prefix + start)
            rows = query[first + start : first + stop].movedim(0, 1)
            found = attend(rows[None], keys[None, :, :end], values[None, :, :end], attn_mask=mask, **shape)
            output[first + start : first + stop] = found[0].movedim(1, 0)
        first += new
    return output
