"""GPU memory that this machine's NIXL does not take: misses and refusals for the engine, and nothing of it is touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from maru_core.protocol import ROOT
from maru_core.store import Store
from support import Pages, hashes

SIZES = (12_000, 8_000)


def test_pages_in_gpu_memory_are_misses_and_pages_in_host_memory_go(
    agents: Callable[..., Any], open_store: Callable[..., Store]
) -> None:
    agents().wait_announced()
    near, far = open_store("cxl"), open_store()
    chain, pages = hashes(6), Pages(6, SIZES, seed=1)
    assert near.put("kv", 0, 1, ROOT, chain, pages.fragments).all()
    on_gpu = Pages(6, SIZES, seed=2)
    before = [part.copy() for part in on_gpu.data]
    for part in on_gpu.data:
        far.register(part.ctypes.data, part.nbytes, device=0)  # host memory stands in for it: NIXL must not believe it
    assert not far.get("kv", 0, chain, on_gpu.fragments).any()
    assert all((part == was).all() for part, was in zip(on_gpu.data, before, strict=True))
    assert not far.put("kv", 0, 1, ROOT, hashes(6, seed=2), on_gpu.fragments).any()
    assert near.prefix(["kv"], 0, hashes(6, seed=2)) == 0
    assert far._lives.current().reach.mover.gpu_direct is False
    copy = Pages(6, SIZES)
    assert far.get("kv", 0, chain, copy.fragments).all()
    assert copy.same(pages).all()
