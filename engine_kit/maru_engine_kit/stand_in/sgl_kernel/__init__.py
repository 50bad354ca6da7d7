"""Stand-in for ``sgl_kernel`` on a machine without a GPU.

SGLang's CPU build of this package is not on PyPI. It imports many names when its modules load and, serving a plain
Llama, calls one: :func:`assign_req_to_token_pool_cpu`. Every other name is a function that says so when called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

MARU_STAND_IN = True

#: Imported at module level by SGLang 0.5.23 when ``SGLANG_USE_CPU_ENGINE=1``, never called when serving Llama.
_IMPORTED_ONLY = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)


def _missing(name: str) -> Callable[..., NoReturn]:
    def call(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} was called, but maru-engine-kit stands in for sgl_kernel here and serves plain models "
            "only: install the real sgl-kernel, or switch off the feature that needs this"
        )

    call.__name__ = name
    return call


globals().update({name: _missing(name) for name in _IMPORTED_ONLY})


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new cache locations into its row of the request-to-token table.

    Args:
        req_pool_indices: row of each request, shape ``(batch,)``.
        req_to_token: the table, shape ``(requests, pool_len)``, written in place.
        start_offset, end_offset: first and one-past-last column of each request, shape ``(batch,)``.
        out_cache_loc: locations of all requests one after the other.
        pool_len: columns of the table.
    """
    position = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        length = end - start
        req_to_token[row, start:end] = out_cache_loc[position : position + length].to(req_to_token.dtype)
        position += length
