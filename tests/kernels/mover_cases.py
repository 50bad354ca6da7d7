"""What is asked of a PagedMover, however it copies. Also run where Triton interprets, with ``how="kernel"``."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maru_core.errors import PoolError
from maru_core.mover import Fragments
from maru_core.pool import PoolMemory
from maru_core.protocol import ROOT
from maru_core.store import Store, StoreConfig
from maru_sglang.kernels.layout import Layout, Pages
from maru_sglang.kernels.mover import PagedMover
from support import ServerProcess, hashes, namespace

GUARD = 0xA5
LAYERS, TOKENS, PAGES = 5, 4, 12


@contextmanager
def pool(query: str = "") -> Iterator[PoolMemory]:
    """A real shared-memory pool, mapped as a client maps it."""
    uri = f"shm://maru-test-{os.getpid()}-{uuid.uuid4().hex[:8]}?size=16M&extent=64K&min_slot=4K&align=4K{query}"
    with PoolMemory.create(uri) as server:
        try:
            with PoolMemory.attach(uri) as memory:
                yield memory
        finally:
            server.unlink()


def engine(shape: str = "mha", seed: int | None = None) -> Layout:
    """Device pools of an engine: K, V and odd scales, or one latent buffer."""
    random = None if seed is None else torch.Generator().manual_seed(seed)

    def buffers(width: int, dtype: torch.dtype) -> list[torch.Tensor]:
        made = []
        for _ in range(LAYERS):
            raw = torch.full((TOKENS * PAGES, width * dtype.itemsize), GUARD, dtype=torch.uint8)
            if random is not None:
                raw.random_(0, 256, generator=random)
            made.append(raw.view(dtype))
        return made

    if shape == "mla":
        return Layout.mla(buffers(72, torch.bfloat16), TOKENS)
    scales = [buffers(3, torch.uint8), buffers(3, torch.uint8)]
    return Layout.mha(buffers(24, torch.float8_e4m3fn), buffers(24, torch.float8_e4m3fn), TOKENS, scales)


def bytes_of(layout: Layout) -> np.ndarray:
    """Layers x bytes of everything the engine has, buffer by buffer; shape ``(buffers, rows, bytes)`` flattened per row."""
    return np.concatenate([buffer.view(torch.uint8).numpy() for buffer in layout.keep], axis=1)


def columns(layout: Layout, layers: range) -> np.ndarray:
    """Which columns of :func:`bytes_of` belong to some layers, bool."""
    return np.concatenate(
        [
            np.full(buffer.shape[1] * buffer.element_size(), index % LAYERS in layers)
            for index, buffer in enumerate(layout.keep)
        ]
    )


def offsets_in(memory: PoolMemory, count: int, nbytes: int, seed: int = 0) -> np.ndarray:
    """Slots in no order, each on its own 4 KiB, some in other extents."""
    each = -(-nbytes // 4096) * 4096
    per_extent = memory.geometry.extent_bytes // each
    places = np.random.default_rng(seed).permutation(min(200, per_extent * memory.geometry.extent_count))[:count]
    extents, inside = places // per_extent, places % per_extent
    offsets = memory.geometry.off_data + extents * memory.geometry.extent_bytes + inside * each
    return offsets.astype(np.uint64)


def make(memory: PoolMemory, how: str | None, **more: Any) -> PagedMover:
    return PagedMover(memory, "cpu", how=how, **more)  # type: ignore[arg-type]


def moves_both_ways(how: str | None, shape: str, **more: Any) -> None:
    """What is stored from one engine's pages is loaded into another's, at other rows; nothing else changes."""
    with pool() as memory:
        mover = make(memory, how, **more)
        one, other = engine(shape, seed=1), engine(shape)
        random = np.random.default_rng(2)
        sources, targets = (random.permutation(PAGES)[:7] * TOKENS for _ in range(2))
        offsets = offsets_in(memory, 7, one.nbytes)
        memory.data[:] = GUARD
        mover.store(offsets, Pages(one, sources))
        starts = offsets - np.uint64(memory.geometry.off_data)
        untouched = np.ones(len(memory.data), bool)
        for start, row in zip(starts.tolist(), sources.tolist(), strict=True):
            thing = np.concatenate(
                [buffer.view(torch.uint8).numpy()[row : row + TOKENS].reshape(-1) for buffer in one.keep]
            )
            assert (memory.data[start : start + one.nbytes] == thing).all(), f"the object of row {row}"
            untouched[start : start + one.nbytes] = False
        assert (memory.data[untouched] == GUARD).all(), "bytes outside the slots were written"

        mover.load(offsets, Pages(other, targets))
        expected = np.full_like(bytes_of(other), GUARD)
        for source, target in zip(sources, targets, strict=True):
            expected[target : target + TOKENS] = bytes_of(one)[source : source + TOKENS]
        assert (bytes_of(other) == expected).all()
        assert (mover.checksums(offsets, Pages(one, sources)) == mover.checksums(offsets, Pages(other, targets))).all()
        mover.close()


def loads_layer_by_layer(how: str | None, shape: str, **more: Any) -> None:
    """Each launch brings its layers, whole, and nothing of others."""
    with pool() as memory:
        mover = make(memory, how, **more)
        one, other = engine(shape, seed=3), engine(shape)
        rows = np.array([8, 0, 20, 40])
        offsets = offsets_in(memory, 4, one.nbytes, seed=3)
        mover.store(offsets, Pages(one, rows))
        load = mover.begin_load(offsets, Pages(other, rows))
        expected = np.full_like(bytes_of(other), GUARD)
        where = np.isin(np.arange(TOKENS * PAGES) // TOKENS * TOKENS, rows)
        for layers in (range(1), range(1, 1), range(1, 3), range(3, 4), range(4, LAYERS + 2)):
            load.launch(layers)
            for layer in layers:
                load.wait(layer)
            load.synchronize()
            mine = columns(other, layers)
            expected[np.ix_(where, mine)] = bytes_of(one)[np.ix_(where, mine)]
            assert (bytes_of(other) == expected).all(), f"after {layers}"
        assert (expected[where] == bytes_of(one)[where]).all()
        mover.close()


def refuses_what_is_outside(how: str | None, **more: Any) -> None:
    """Nothing moves where any of it would lie outside."""
    with pool() as memory:
        mover = make(memory, how, **more)
        layout = engine("mha", seed=4)
        pages = Pages(layout, np.array([0, 4]))
        good = offsets_in(memory, 2, layout.nbytes)
        memory.data[:] = GUARD
        geometry = memory.geometry
        for bad in (
            0,
            geometry.off_data - 4096,
            geometry.off_data + geometry.data_bytes,
            geometry.off_data + geometry.extent_bytes - 64,
            (1 << 64) - 4096,
        ):
            offsets = good.copy()
            offsets[1] = bad
            for call in (mover.store, mover.load, mover.begin_load):
                with pytest.raises(PoolError, match=str(bad)):
                    call(offsets, pages)
        for offsets in (good[:1], good.astype(np.int64)):
            with pytest.raises(ValueError, match="give one uint64 each"):
                mover.store(offsets, pages)
        assert (memory.data == GUARD).all()
        mover.close()


def takes_fragments_and_nothing(how: str | None, **more: Any) -> None:
    """Memory of the CPU goes by the CPU, whatever pages do; an empty batch is one."""
    with pool() as memory:
        mover = make(memory, how, **more)
        layout = engine("mla", seed=5)
        none, empty = np.zeros(0, np.uint64), Pages(layout, np.zeros(0, np.int64))
        mover.store(none, empty)
        mover.load(none, empty)
        load = mover.begin_load(none, empty)
        load.launch(range(LAYERS))
        load.wait(LAYERS - 1)
        load.synchronize()
        buffer = np.random.default_rng(5).integers(0, 256, 100, np.uint8)
        back = np.zeros_like(buffer)
        offset = offsets_in(memory, 1, 100)

        def fragments(array: np.ndarray) -> Fragments:
            return Fragments(np.array([[array.ctypes.data]], np.uint64), np.array([100], np.uint64))

        mover.store(offset, fragments(buffer))
        mover.load(offset, fragments(back))
        assert (buffer == back).all()
        assert mover.checksums(offset, fragments(buffer)) == mover.checksums(offset, fragments(back))
        mover.close()


def goes_through_a_store(how: str | None, verify: str) -> None:
    """Stored by one process's store, read layer by layer by another's, with a real server between them."""
    directory = tempfile.TemporaryDirectory()
    server = ServerProcess(Path(directory.name), size="16M")
    stores: list[Store] = []
    try:
        server.start()
        one, other = engine("mha", seed=6), engine("mha")
        config = StoreConfig(server=server.endpoint, verify=verify, timeout_ms=60_000)
        for index in range(2):
            stores.append(
                Store.open(
                    config,
                    namespace(),
                    name=f"test {index}",
                    object_bytes=one.nbytes,
                    mover=lambda memory: make(memory, how),
                )
            )
        writer, reader = stores
        names, count = hashes(6, seed=6), 6
        sources, targets = np.arange(6) * TOKENS, (np.arange(6)[::-1] + 3) * TOKENS
        stored = writer.put("kv", 0, 1, ROOT, names, Pages(one, sources))
        assert stored.all(), stored
        assert reader.read("kv", 0, names, one.nbytes + 1) is None, "read with another length"
        reading = reader.read("kv", 0, names, one.nbytes)
        assert reading is not None
        assert isinstance(reading.mover, PagedMover)
        assert len(reading) == count
        load = reading.mover.begin_load(reading.offsets, Pages(other, targets))
        for layer in range(LAYERS):
            load.launch(range(layer, layer + 1))
        load.wait(LAYERS - 1)
        load.synchronize()
        assert reading.finish()
        for source, target in zip(sources, targets, strict=True):
            assert (bytes_of(other)[target : target + TOKENS] == bytes_of(one)[source : source + TOKENS]).all()

        again = engine("mha")
        assert reader.get("kv", 0, names, Pages(again, targets)).all()
        assert (bytes_of(again) == bytes_of(other)).all()

        # What goes away during a load does not count as landed, whatever was copied.
        reading = reader.read("kv", 0, names, one.nbytes)
        assert reading is not None
        load = reading.mover.begin_load(reading.offsets, Pages(other, targets))
        load.launch(range(2))
        assert writer.clear()
        load.launch(range(2, LAYERS))
        load.synchronize()
        assert not reading.finish()
        assert reader.read("kv", 0, names, one.nbytes) is None
    finally:
        for store in stores:
            store.close()
        server.remove()
        directory.cleanup()
