"""Host pages as fragments: the same places and the same order as SGLang's own, for every layout; refusals."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from sglang_support import LAYERS, filled, indices_of, make_mha, make_mla, page_bytes

from maru_core.errors import ConfigError

pytestmark = pytest.mark.sglang

MHA_LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]
MLA_LAYOUTS = ["layer_first", "page_first", "page_first_direct"]


def pools() -> list[Any]:
    return [
        *[pytest.param(make_mha, {"layout": layout}, id=f"mha-{layout}") for layout in MHA_LAYOUTS],
        *[pytest.param(make_mla, {"layout": layout}, id=f"mla-{layout}") for layout in MLA_LAYOUTS],
        pytest.param(make_mha, {"layout": "page_first", "v_dim": 4}, id="asymmetric-page_first"),
        pytest.param(make_mha, {"layout": "page_first_direct", "v_dim": 4}, id="asymmetric-page_first_direct"),
        pytest.param(make_mha, {"layout": "layer_first", "page": 1}, id="mha-page-of-1"),
        pytest.param(make_mha, {"layout": "page_first", "layers": 1, "heads": 1}, id="mha-one-layer-one-head"),
    ]


def gathered(fragments: Any, row: int) -> bytes:
    """The bytes of one object, read through its fragments."""
    return b"".join(
        ctypes.string_at(int(address), int(size))
        for address, size in zip(fragments.addresses[row], fragments.sizes, strict=True)
    )


@pytest.mark.parametrize(("make", "options"), pools())
def test_an_object_is_the_page_as_sglang_reads_it(make: Any, options: dict[str, Any]) -> None:
    from maru_sglang.storage.pages import HostPages

    pool = make(**options, fill=1)
    pages = HostPages(pool)
    wanted = [5, 0, pool.page_num - 1, 3, 9]
    fragments = pages.fragments(indices_of(pool, wanted), len(wanted))
    assert fragments is not None
    assert fragments.nbytes == pages.object_bytes == pool.size_per_token * pool.page_size
    assert pages.flat == (options.get("v_dim") is None)
    for row, page in enumerate(wanted):
        assert gathered(fragments, row) == page_bytes(pool, page)


@pytest.mark.parametrize(("make", "options"), pools())
def test_addresses_are_those_of_get_page_buffer_meta(make: Any, options: dict[str, Any]) -> None:
    from maru_sglang.storage.pages import HostPages

    pool = make(**options)
    wanted = list(range(pool.page_num))[::-1]
    indices = indices_of(pool, wanted)
    told, sizes = pool.get_page_buffer_meta(indices)
    fragments = HostPages(pool).fragments(indices, len(wanted))
    assert fragments is not None
    per_page = len(told) // len(wanted)
    for row in range(len(wanted)):
        here = slice(row * per_page, (row + 1) * per_page)
        mine = zip(fragments.addresses[row].tolist(), fragments.sizes.tolist(), strict=True)
        assert sorted(mine) == sorted(zip(told[here], sizes[here], strict=True))


def test_layer_first_keeps_k_of_all_layers_before_v() -> None:
    """get_page_buffer_meta tells K and V of a layer in turn, a flat page has all of K first: one order for both ways."""
    from maru_sglang.storage.pages import HostPages

    pool = make_mha("layer_first")
    addresses = HostPages(pool).fragments(indices_of(pool, [2]), 1).addresses[0].tolist()
    assert len(addresses) == 2 * LAYERS
    assert addresses == sorted(addresses)
    assert addresses != pool.get_page_buffer_meta(indices_of(pool, [2]))[0]


def test_indices_that_are_not_whole_pages_give_nothing() -> None:
    import torch

    from maru_sglang.storage.pages import HostPages

    pool = make_mha("page_first")
    pages = HostPages(pool)
    good = indices_of(pool, [1, 2])
    assert pages.fragments(good, 2) is not None
    assert pages.fragments(good, 1) is None  # too many
    assert pages.fragments(good[:-1], 2) is None  # too few
    assert pages.fragments(good + 1, 2) is None  # between pages
    assert pages.fragments(good.flip(0), 2) is None  # backwards
    scattered = good.clone()
    scattered[1] = 40
    assert pages.fragments(scattered, 2) is None
    assert pages.fragments(good + pool.size, 2) is None  # past the end
    assert pages.fragments(good - 8, 2) is None  # before the start
    assert pages.fragments(torch.zeros(0, dtype=torch.int64), 0) is not None


def test_a_destroyed_pool_gives_nothing() -> None:
    from maru_sglang.storage.pages import HostPages

    pool = make_mha("page_first")
    pages = HostPages(pool)
    pool.destroy()
    assert pages.fragments(indices_of(pool, [1]), 1) is None


def test_unknown_pools_and_layouts_are_refused_by_name() -> None:
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    from maru_sglang.storage.pages import HostPages

    class RotatedHost(MHATokenToKVPoolHost):
        pass

    pool = make_mha("page_first")
    pool.__class__ = RotatedHost
    with pytest.raises(ConfigError, match="RotatedHost"):
        HostPages(pool)
    pool.__class__ = MHATokenToKVPoolHost
    pool.layout = "page_unified"
    with pytest.raises(ConfigError, match="page_unified"):
        HostPages(pool)
    with pytest.raises(ConfigError, match="object"):
        HostPages(object())


def test_special_mla_pools_are_refused() -> None:
    from maru_sglang.storage.pages import HostPages

    for attribute, value, words in (
        ("_layer_shard_enabled", True, "layer"), ("_is_dummy", True, "no memory"), ("_native_buffers", object(), "split"),
        ("dcp_size", 2, "dcp"), ("storage_format_tag", "own", "own"),
    ):  # fmt: skip
        pool = make_mla("page_first")
        setattr(pool, attribute, value)
        with pytest.raises(ConfigError, match=words):
            HostPages(pool)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("moved", "straight line"),
        ("shrunk", "size per token"),
        ("grown", "outside its buffer"),
        ("outside", "outside its buffer"),
    ],
)
def test_a_pool_that_lays_pages_out_otherwise_is_refused(
    change: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a later SGLang might change: addresses that are no straight line, or other sizes."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    from maru_sglang.storage.pages import HostPages

    real = MHATokenToKVPoolHost.get_page_buffer_meta

    def other(self: Any, indices: Any) -> tuple[list[int], list[int]]:
        addresses, sizes = real(self, indices)
        if change == "moved" and self.size // 4 < int(indices[0]) < self.size * 3 // 4:
            addresses = [address + 64 for address in addresses]
        if change == "grown":
            sizes = [size + 16 for size in sizes]
        if change == "shrunk":
            sizes = [size - 16 for size in sizes]
        if change == "outside":
            addresses = [address + self.kv_buffer.numel() * 2 for address in addresses]
        return addresses, sizes

    monkeypatch.setattr(MHATokenToKVPoolHost, "get_page_buffer_meta", other)
    with pytest.raises(ConfigError, match=words):
        HostPages(make_mha("page_first"))


def test_a_flat_page_of_another_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    from maru_sglang.storage.pages import HostPages

    real = MHATokenToKVPoolHost.get_data_page
    monkeypatch.setattr(
        MHATokenToKVPoolHost,
        "get_data_page",
        lambda self, index, flat=True: real(self, index, flat=False).transpose(0, 1),
    )
    with pytest.raises(ConfigError, match="flat page"):
        HostPages(make_mha("layer_first"))


def test_filled_is_not_all_zero() -> None:
    """The comparisons above are of bytes that differ from page to page."""
    pool = filled(make_mha(), 1)
    assert len({page_bytes(pool, page) for page in range(pool.page_num)}) == pool.page_num
