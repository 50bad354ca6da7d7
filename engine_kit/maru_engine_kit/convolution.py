"""The short causal convolution of state-space layers in plain torch: SGLang has it as GPU kernels only.

Names, arguments and results are those of ``sglang/srt/layers/attention/mamba/causal_conv1d.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

_PAD_SLOT = -1


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    conv_states: Tensor | None = None,
    activation: str | None = "silu",
    pad_slot_id: int = _PAD_SLOT,
    **_: object,
) -> Tensor:
    """Several sequences one after the other in ``x`` (channels, tokens); each one's last inputs become its state."""
    kept = weight.shape[1] - 1
    bounds = [0, x.shape[1]] if query_start_loc is None else query_start_loc.tolist()
    slots = [0] * (len(bounds) - 1) if cache_indices is None else cache_indices.tolist()
    out = torch.zeros_like(x)
    for number, (start, stop, slot) in enumerate(zip(bounds[:-1], bounds[1:], slots, strict=False)):
        if slot == pad_slot_id or stop == start:
            continue
        before = x.new_zeros(x.shape[0], kept)
        if conv_states is not None and has_initial_state is not None and bool(has_initial_state[number]):
            before = conv_states[slot][:, -kept:].to(x.dtype)
        inputs = torch.cat([before, x[:, start:stop]], dim=1)
        out[:, start:stop] = _convolve(inputs, weight, bias, activation)
        if conv_states is not None:
            conv_states[slot][:, -kept:] = inputs[:, -kept:].to(conv_states.dtype)
    return out


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | bool | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    pad_slot_id: int = _PAD_SLOT,
    **_: object,
) -> Tensor:
    """One more token for each row of ``x`` (rows, channels)."""
    if x.dim() != 2 or cache_seqlens is not None:
        raise NotImplementedError("maru-engine-kit convolves one token a request: decode without speculation")
    kept = weight.shape[1] - 1
    out = torch.zeros_like(x)
    slots = range(x.shape[0]) if conv_state_indices is None else conv_state_indices.tolist()
    for row, slot in enumerate(slots):
        if slot == pad_slot_id:
            continue
        inputs = torch.cat([conv_state[slot][:, -kept:].to(x.dtype), x[row, :, None]], dim=1)
        out[row] = _convolve(inputs, weight, bias, "silu" if activation in (True, "silu", "swish") else None)[:, -1]
        conv_state[slot][:, -kept:] = inputs[:, -kept:].to(conv_state.dtype)
    return out


def _convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """``inputs`` (channels, width - 1 + tokens) against one kernel a channel."""
    windows = inputs.float().unfold(1, weight.shape[1], 1)
    summed = (windows * weight.float()[:, None, :]).sum(-1)
    if bias is not None:
        summed = summed + bias.float()[:, None]
    return (silu(summed) if activation in ("silu", "swish") else summed).to(inputs.dtype)
