"""Where the bytes of a KV cache block lie, in the terms of the mover that copies them: fragments on a CPU, pages on a GPU.

vLLM hands over one view a layer, ``[blocks, heads, tokens, width]`` (hybrid models: also state tensors), whatever order the
memory has: heads first or tokens first, each layer apart or the layers of a block together. Nothing of that is assumed here. A view's strides
say which stretches of memory one block covers; the address of each stretch is a straight line in the block's number.

An object is the concatenation of all layers of a group, in vLLM's layer order, each in the order of its memory; neighbours are
joined, so that layers that lie together are one fragment. How a layer's bytes are ordered is in :attr:`GroupLayout.order`,
which is part of the namespace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from maru_core.errors import ConfigError
from maru_core.mover import Buffers, Fragments
from maru_sglang.kernels.layout import Layout
from maru_vllm.device import KINDS

I64 = npt.NDArray[np.int64]


class GroupLayout:
    """The blocks of one KV cache group in this process's memory. Immutable; safe to use from several threads.

    Attributes:
        object_bytes: bytes of one block's object.
        order: words for how each layer's bytes are ordered; equal for equal orders.
        blocks: how many there are.
        device: where they are.
    """

    def __init__(
        self, layers: Sequence[str], kv_caches: Mapping[str, Any], blocks: int, *, paged: bool | None = None
    ) -> None:
        """Learn the layout.

        Args:
            paged: whether :meth:`buffers` are pages for ``maru_sglang.kernels``; None: where the CPU does not address them.
        Raises:
            ConfigError: a layer without a tensor, tensors on another kind of device or on several, or one that is not cut into
                ``blocks`` blocks.
        """
        bases: list[int] = []
        strides: list[int] = []
        sizes: list[int] = []
        orders: list[str] = []
        seen: set[int] = set()
        self._kept: list[torch.Tensor] = []  # the memory stays mapped under a copy that is under way
        for layer in layers:
            if layer not in kv_caches:
                raise ConfigError(
                    f"layer {layer} has no KV cache tensor in this worker: this release of Maru does not know the model's "
                    "cache; run it without MaruConnector"
                )
            value = kv_caches[layer]
            tensors = list(value) if isinstance(value, list | tuple) else [value]
            for tensor in tensors:
                view = by_block(layer, tensor, blocks)
                if view.data_ptr() in seen:
                    continue  # layers that share one cache
                seen.add(view.data_ptr())
                self._kept.append(view)
                offsets, size, order = _runs(view)
                orders.append(order)
                base, stride = view.data_ptr(), view.stride(0) * view.element_size()
                for offset in offsets:
                    if bases and bases[-1] + sizes[-1] == base + offset and strides[-1] == stride:
                        sizes[-1] += size
                        continue
                    bases.append(base + offset)
                    strides.append(stride)
                    sizes.append(size)
        if not bases:
            raise ConfigError("a KV cache group without layers: run this model without MaruConnector")
        devices = {view.device for view in self._kept}
        if len(devices) > 1:
            raise ConfigError(
                f"the layers of a KV cache group are on {', '.join(sorted(map(str, devices)))}, and Maru copies a block from one "
                "device: run this model without MaruConnector"
            )
        self.device = devices.pop()
        self.blocks = blocks
        self.object_bytes = sum(sizes)
        self.order = _summary(orders)
        self._bases: I64 = np.array(bases, np.int64)
        self._strides: I64 = np.array(strides, np.int64)
        self._sizes = np.array(sizes, np.uint64)
        if paged is None:
            paged = self.device.type != "cpu"
        # A run of bytes is a piece: a block of a layer that is not one stretch of memory has several.
        self._paged = (
            Layout.of_pieces(
                [(base, stride, size, 0) for base, stride, size in zip(bases, strides, sizes, strict=True)],
                rows=blocks,
                row_span=1,
                device=self.device,
                keep=tuple(self._kept),
            )
            if paged
            else None
        )

    def buffers(self, blocks: Sequence[int]) -> Buffers:
        """``blocks`` as the mover of this memory takes them, one object a block; errors as :meth:`fragments`."""
        if self._paged is None:
            return self.fragments(blocks)
        return self._paged.pages(self._numbers(blocks))

    def fragments(self, blocks: Sequence[int]) -> Fragments:
        """Fragments of ``blocks``, one object a block; only where the CPU addresses them.

        Raises:
            ValueError: a number that is no block.
        """
        addresses = self._bases + self._numbers(blocks)[:, None] * self._strides
        return Fragments(addresses=addresses.astype(np.uint64), sizes=self._sizes)

    def _numbers(self, blocks: Sequence[int]) -> I64:
        numbers = np.array(blocks, np.int64)
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < self.blocks):
            raise ValueError(f"blocks {numbers.min()} to {numbers.max()} of a KV cache of {self.blocks}")
        return numbers


def layouts_of(kv_caches: Any, groups: Sequence[int]) -> dict[int, GroupLayout]:
    """Where the blocks of each group lie in vLLM's ``CanonicalKVCaches``: all its tensors, without the padding of their pages."""
    layouts = {}
    for group, refs in zip(groups, kv_caches.group_data_refs, strict=True):
        pages = {}
        for number, ref in enumerate(refs):
            pages[f"{number} of KV cache group {group}"] = kv_caches.tensors[ref.tensor_idx].tensor[
                :, : ref.page_size_bytes
            ]
        layouts[group] = GroupLayout(list(pages), pages, len(kv_caches.tensors[0].tensor))
    return layouts


def by_block(layer: str, tensor: torch.Tensor, blocks: int) -> torch.Tensor:
    """A view whose first dimension is vLLM's manager blocks (kernels may use smaller ones: several a block)."""
    if tensor.device.type not in KINDS:
        raise ConfigError(
            f"the KV cache of layer {layer} is on {tensor.device}, and Maru copies from and to CUDA GPUs and CPUs only: run vLLM on one "
            "of these, or leave MaruConnector out"
        )
    if not tensor.dim() or tensor.shape[0] < blocks or tensor.shape[0] % blocks:
        raise ConfigError(
            f"the KV cache of layer {layer} has shape {tuple(tensor.shape)}, which is not cut into {blocks} blocks along its first "
            "dimension: this release of Maru does not know that layout"
        )
    return tensor if tensor.shape[0] == blocks else tensor.unflatten(0, (blocks, -1))


def _runs(view: torch.Tensor) -> tuple[list[int], int, str]:
    """Stretches of memory that one block covers, in the order of their addresses: byte offsets from the block's start, the size of
    each, and words for shape and order."""
    item = view.element_size()
    dims = sorted(
        (
            (stride, size, axis)
            for axis, (size, stride) in enumerate(zip(view.shape[1:], view.stride()[1:], strict=True))
            if size != 1
        ),
        reverse=True,
    )
    order = "".join(str(axis) for _, _, axis in dims)
    shape = "x".join(str(size) for size in view.shape[1:])
    run = 1
    while dims and dims[-1][0] == run:
        run *= dims.pop()[1]
    offsets = np.zeros(1, np.int64)
    for stride, size, _ in dims:
        offsets = (offsets[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    if len(offsets) * run != math.prod(view.shape[1:]) or (np.diff(offsets) < run).any():
        raise ConfigError(f"a KV cache block of shape {shape} and strides {view.stride()[1:]} overlaps itself")
    dtype = str(view.dtype).removeprefix("torch.")
    return [int(offset) * item for offset in offsets], run * item, f"{dtype}[{shape}]@{order}"


def _summary(orders: list[str]) -> str:
    """``order*layers`` for each stretch of layers that are alike."""
    parts: list[tuple[str, int]] = []
    for order in orders:
        if parts and parts[-1][0] == order:
            parts[-1] = (order, parts[-1][1] + 1)
        else:
            parts.append((order, 1))
    return ",".join(f"{order}*{count}" for order, count in parts)
