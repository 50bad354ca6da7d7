"""Stand-in for ``sgl_kernel.mamba``: names that SGLang imports with every model that keeps states, none of which the kit's
models call (:mod:`maru_engine_kit.convolution` is what they use)."""

import torch
from sgl_kernel import _missing

causal_conv1d_fn_cpu = _missing("mamba.causal_conv1d_fn_cpu")
causal_conv1d_update_cpu = _missing("mamba.causal_conv1d_update_cpu")
chunk_gated_delta_rule_cpu = _missing("mamba.chunk_gated_delta_rule_cpu")

#: Looked up as operators right after this module is imported; a schema lives as long as its library, and calling it fails.
_library = torch.library.Library("sgl_kernel", "FRAGMENT")
for _name in ("fused_gdn_gating_cpu", "fused_sigmoid_gating_delta_rule_update_cpu"):
    if not hasattr(torch.ops.sgl_kernel, _name):
        _library.define(f"{_name}(Tensor x) -> Tensor")
