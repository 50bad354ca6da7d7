"""Where a block's bytes lie, for the orders of memory that vLLM has and some that it might have."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import numpy as np
import pytest

from maru_core.errors import ConfigError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.vllm

BLOCKS, HEADS, TOKENS, WIDTH = 6, 2, 8, 12


def view(order: str, *, layers: int = 1, layer: int = 0, dtype: Any = torch.bfloat16) -> Any:
    """A layer's ``[blocks, heads, tokens, width]`` view of memory whose dimensions have the order of ``order`` (of B, H, N, C and L)."""
    sizes = {"B": BLOCKS, "H": HEADS, "N": TOKENS, "C": WIDTH, "L": layers}
    memory = torch.randint(-100, 100, [sizes[name] for name in order]).to(dtype)
    if "L" in order:
        memory = memory.select(order.index("L"), layer)
        order = order.replace("L", "")
    return memory.permute([order.index(name) for name in "BHNC"])


def copy_block(layout: Any, source: int, target: int) -> None:
    """By fragments, as a mover does."""
    fragments = layout.fragments([source, target])
    for start, end, size in zip(*fragments.addresses.tolist(), fragments.sizes.tolist(), strict=True):
        ctypes.memmove(end, start, size)


def check(caches: dict[str, Any]) -> Any:
    """Copying block 1 over block 4 changes all of block 4 and nothing else, in every layer."""
    from maru_vllm.layout import GroupLayout

    layout = GroupLayout(list(caches), caches, BLOCKS)
    before = {name: cache.clone() for name, cache in caches.items()}
    copy_block(layout, 1, 4)
    for name, cache in caches.items():
        by_block, old = (each.unflatten(0, (BLOCKS, -1)) for each in (cache, before[name]))
        assert torch.equal(by_block[4], old[1])
        others = [0, 1, 2, 3, 5]
        assert torch.equal(by_block[others], old[others])
    bytes_of_one = sum(
        cache[0].numel() * cache.element_size() * (cache.shape[0] // BLOCKS) for cache in caches.values()
    )
    assert layout.object_bytes == bytes_of_one == int(layout.fragments([0]).nbytes)
    return layout


@pytest.mark.parametrize("order", ["".join(order) for order in itertools.permutations("BHNC")])
def test_every_order_of_one_layer(order: str) -> None:
    check({"a": view(order), "b": view(order)})


@pytest.mark.parametrize("order", ["BHNC", "BNHC", "HBNC"])
def test_layers_apart(order: str) -> None:
    check({name: view(order) for name in "abc"})


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC", "BHLNC", "BNLHC", "BHNLC"])
def test_layers_together_in_one_tensor(order: str) -> None:
    memory = torch.arange(BLOCKS * HEADS * TOKENS * WIDTH * 3, dtype=torch.int32)
    sizes = {"B": BLOCKS, "H": HEADS, "N": TOKENS, "C": WIDTH, "L": 3}
    memory = memory.reshape([sizes[name] for name in order])
    rest = order.replace("L", "")
    caches = {
        str(layer): memory.select(order.index("L"), layer).permute([rest.index(name) for name in "BHNC"])
        for layer in range(3)
    }
    layout = check(caches)
    pieces = len(layout.fragments([0]).sizes)
    assert pieces == {"LBHNC": 3, "BLHNC": 1, "BHLNC": 6, "BNLHC": 24, "BHNLC": 48}[order], "neighbours are joined"


def test_blocks_of_several_kernel_blocks() -> None:
    memory = torch.randn(BLOCKS * 4, HEADS, TOKENS // 4, WIDTH)
    layout = check({"a": memory})
    assert len(layout.fragments([0]).sizes) == 1


def test_state_tensors_of_one_layer() -> None:
    from maru_vllm.layout import GroupLayout

    states = [torch.randn(BLOCKS, 3, 5), torch.randn(BLOCKS, 7)]
    layout = GroupLayout(["mamba"], {"mamba": states}, BLOCKS)
    old = [state.clone() for state in states]
    copy_block(layout, 2, 0)
    for state, before in zip(states, old, strict=True):
        assert torch.equal(state[0], before[2])
        assert torch.equal(state[1:], before[1:])


def test_layers_that_share_a_cache_are_moved_once() -> None:
    from maru_vllm.layout import GroupLayout

    cache = view("BHNC")
    shared = GroupLayout(["a", "b"], {"a": cache, "b": cache}, BLOCKS)
    assert shared.object_bytes == GroupLayout(["a"], {"a": cache}, BLOCKS).object_bytes


def test_orders_have_different_words() -> None:
    from maru_vllm.layout import GroupLayout

    words = {
        GroupLayout(["a"], {"a": view(order, dtype=dtype)}, BLOCKS).order
        for order in ("BHNC", "BNHC")
        for dtype in (torch.bfloat16, torch.float16)
    }
    assert len(words) == 4
    other = torch.zeros(BLOCKS, TOKENS, HEADS, WIDTH, dtype=torch.bfloat16)  # as many bytes, in another shape
    assert GroupLayout(["a"], {"a": other}, BLOCKS).order not in words


def test_where_the_layers_lie_does_not_change_the_words() -> None:
    """Engines that allocate each layer apart, or all together, have equal objects."""
    from maru_vllm.layout import GroupLayout

    apart = GroupLayout(["a", "b"], {"a": view("BHNC"), "b": view("BHNC")}, BLOCKS)
    memory = torch.zeros(BLOCKS, 2, HEADS, TOKENS, WIDTH, dtype=torch.bfloat16)
    together = GroupLayout(["a", "b"], {"a": memory[:, 0], "b": memory[:, 1]}, BLOCKS)
    assert apart.order == together.order
    assert apart.object_bytes == together.object_bytes


def test_refusals() -> None:
    from maru_vllm.layout import GroupLayout

    with pytest.raises(ConfigError, match=r"layer b has no KV cache"):
        GroupLayout(["a", "b"], {"a": view("BHNC")}, BLOCKS)
    with pytest.raises(ConfigError, match=r"layer a is on meta.*CUDA GPUs and CPUs only"):
        GroupLayout(["a"], {"a": torch.zeros(BLOCKS, 2, 2, 2, device="meta")}, BLOCKS)
    with pytest.raises(ConfigError, match="not cut into 6 blocks"):
        GroupLayout(["a"], {"a": torch.zeros(2, BLOCKS, 4)}, BLOCKS)  # K and V first, as vLLM once had it
    with pytest.raises(ConfigError, match="overlaps itself"):
        GroupLayout(["a"], {"a": torch.zeros(BLOCKS, 1, 4).expand(BLOCKS, 3, 4)}, BLOCKS)
    with pytest.raises(ConfigError, match="without layers"):
        GroupLayout([], {}, BLOCKS)


@pytest.mark.parametrize("blocks", [[-1], [BLOCKS], [0, BLOCKS + 3]])
def test_a_number_that_is_no_block(blocks: list[int]) -> None:
    from maru_vllm.layout import GroupLayout

    layout = GroupLayout(["a"], {"a": view("BHNC")}, BLOCKS)
    with pytest.raises(ValueError, match="of a KV cache of 6"):
        layout.fragments(blocks)
    assert layout.fragments([]).addresses.shape[0] == 0
    assert layout.fragments([3]).addresses.dtype == np.uint64
