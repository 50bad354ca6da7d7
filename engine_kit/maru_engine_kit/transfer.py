"""SGLang's ``transfer_kv_*`` operations (host KV pool <-> device KV pool) in plain torch, for CPU tensors.

The real ones are CUDA kernels of ``sgl_kernel.kvcacheio``. Names, arguments and meaning are theirs: ``lf`` is a pool
with one tensor a layer, ``pf`` one whose rows hold all layers of a token, ``ph`` one whose pages are cut by head.
Indices are token rows. Pointer tables are u64 tensors with the address of each layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor


def _rows(pool: Tensor, item_size: int) -> Tensor:
    """View of a contiguous pool as rows of ``item_size`` bytes."""
    return pool.view(torch.uint8).view(-1, item_size)


def _rows_at(address: int, rows: int, item_size: int) -> Tensor:
    """``rows`` rows of ``item_size`` bytes at an address; the caller's pool owns the memory."""
    return torch.frombuffer((ctypes.c_uint8 * (rows * item_size)).from_address(address), dtype=torch.uint8).view(
        rows, item_size
    )


def _extent(indices: Tensor) -> int:
    return int(indices.max()) + 1 if indices.numel() else 0


def _layer_tables(
    src_layers: Tensor, dst_layers: Tensor, src_indices: Tensor, dst_indices: Tensor, item_size: int, num_layers: int
) -> None:
    if not src_indices.numel():
        return
    for layer in range(num_layers):
        src = _rows_at(int(src_layers[layer]), _extent(src_indices), item_size)
        dst = _rows_at(int(dst_layers[layer]), _extent(dst_indices), item_size)
        dst[dst_indices] = src[src_indices]


def transfer_kv_per_layer_mla(
    src: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor, item_size: int, **_: object
) -> None:
    """One layer, both sides one tensor a layer."""
    _rows(dst, item_size)[dst_indices] = _rows(src, item_size)[src_indices]


def transfer_kv_per_layer(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    **_: object,
) -> None:
    transfer_kv_per_layer_mla(src_k, dst_k, src_indices, dst_indices, item_size)
    transfer_kv_per_layer_mla(src_v, dst_v, src_indices, dst_indices, item_size)


def transfer_kv_all_layer_mla(
    src_layers: Tensor,
    dst_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    **_: object,
) -> None:
    """All layers, both sides pointer tables."""
    _layer_tables(src_layers, dst_layers, src_indices, dst_indices, item_size, num_layers)


def transfer_kv_all_layer(
    src_k_layers: Tensor,
    dst_k_layers: Tensor,
    src_v_layers: Tensor,
    dst_v_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    **_: object,
) -> None:
    _layer_tables(src_k_layers, dst_k_layers, src_indices, dst_indices, item_size, num_layers)
    _layer_tables(src_v_layers, dst_v_layers, src_indices, dst_indices, item_size, num_layers)


def transfer_kv_per_layer_mla_pf_lf(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    **_: object,
) -> None:
    """One layer out of rows that hold all layers (``src_layout_dim`` bytes a row)."""
    layers = _rows(src, src_layout_dim).view(-1, src_layout_dim // item_size, item_size)
    _rows(dst, item_size)[dst_indices] = layers[src_indices, layer_id]


def transfer_kv_per_layer_pf_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    **_: object,
) -> None:
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        transfer_kv_per_layer_mla_pf_lf(src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim)


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    **_: object,
) -> None:
    """All layers from a pointer table into rows that hold all layers."""
    if not src_indices.numel():
        return
    rows = _rows(dst, dst_layout_dim).view(-1, dst_layout_dim // item_size, item_size)
    for layer in range(num_layers):
        rows[dst_indices, layer] = _rows_at(int(src_layers[layer]), _extent(src_indices), item_size)[src_indices]


def transfer_kv_all_layer_lf_pf(
    src_k_layers: Tensor,
    dst_k: Tensor,
    src_v_layers: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    **_: object,
) -> None:
    for layers, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        transfer_kv_all_layer_mla_lf_pf(layers, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers)


def transfer_kv_mamba_pf_lf(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    **_: object,
) -> None:
    """One layer of states."""
    transfer_kv_per_layer_mla_pf_lf(src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim)


def transfer_kv_mamba_lf_pf(
    src_ptrs: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    **_: object,
) -> None:
    """All layers of states."""
    transfer_kv_all_layer_mla_lf_pf(src_ptrs, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers)


def _heads(pool: Tensor, page_size: int, head_num: int, item_size: int, layout_dim: int) -> Tensor:
    """A ``page_head`` pool as ``(pages, heads, page_size, layers, bytes of one head)``."""
    return pool.view(torch.uint8).view(-1, head_num, page_size, layout_dim // item_size, item_size // head_num)


def transfer_kv_per_layer_ph_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    page_size: int,
    head_num: int,
    **_: object,
) -> None:
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        pages = _heads(src, page_size, head_num, item_size, src_layout_dim)
        found = pages[src_indices // page_size, :, src_indices % page_size, layer_id]
        _rows(dst, item_size)[dst_indices] = found.reshape(len(src_indices), item_size)


def transfer_kv_all_layer_lf_ph(
    src_k_layers: Tensor,
    dst_k: Tensor,
    src_v_layers: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    page_size: int,
    head_num: int,
    **_: object,
) -> None:
    if not src_indices.numel():
        return
    for layers, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        pages = _heads(dst, page_size, head_num, item_size, dst_layout_dim)
        for layer in range(num_layers):
            rows = _rows_at(int(layers[layer]), _extent(src_indices), item_size)[src_indices]
            pages[dst_indices // page_size, :, dst_indices % page_size, layer] = rows.view(
                len(src_indices), head_num, -1
            )


def transfer_kv_direct(
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Layer by layer between lists of tensors (rows may be strided views)."""
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer out of ``page_first_direct`` pools, shape ``(pages, layers, page_size, …)``."""
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        dst[dst_indices] = src[src_indices // page_size, layer_id, src_indices % page_size]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """All layers into ``page_first_direct`` pools; ``src_ptrs`` are the K layers, then (if any) the V layers."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for pool, dst in enumerate(dst_ptrs):
        for layer in range(layers):
            rows = src_ptrs[pool * layers + layer][src_indices]
            dst[dst_indices // page_size, layer, dst_indices % page_size] = rows


#: Every operation by name.
OPERATIONS = {name: value for name, value in globals().items() if name.startswith("transfer_kv_")}
