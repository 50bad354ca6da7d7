"""Models with pools beside their KV pool, through SGLang's own hybrid cache controller, over its ``file`` backend and over Maru alike.

Pages move as in a server: SGLang resolves the transfers of a node, queries, picks the length that all pools allow, and loads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from sglang_support import indices_of, make_mha, page_bytes, storage_config
from side_pool_support import PAGE, filled_all, flat_bytes, make_mamba, make_rows

pytestmark = pytest.mark.sglang

WINDOW = 2  # pages


def tokens_of(pages: int, seed: int = 0) -> list[int]:
    return [(7919 * seed + 31 * index) % 50_000 for index in range(pages * PAGE)]


def keys_of(pages: int, seed: int = 0) -> list[str]:
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    return list(get_storage_hash_str(tokens_of(pages, seed), None, page_size=PAGE))


class Engine:
    """One engine's host pools and SGLang's hybrid controller over a storage backend."""

    def __init__(self, backend: Callable[..., Any], seed: int | None, zero_copy: bool) -> None:
        from sglang.srt.mem_cache.hicache_storage import PoolName
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
        from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry

        self.kv = make_mha(page=PAGE)
        self.sides = {"swa": make_mha(page=PAGE, layers=2), "mamba": make_mamba(), "indexer": make_rows()}
        for number, pool in enumerate((self.kv, *self.sides.values())):
            filled_all(pool, None if seed is None else 10 * seed + number)
        entries = [PoolEntry(PoolName.KV, self.kv, None, lambda layer: layer, is_primary_index_anchor=True)]
        entries += [PoolEntry(PoolName(name), pool, None, lambda layer: layer) for name, pool in self.sides.items()]
        controller = HybridCacheController.__new__(HybridCacheController)
        controller.mem_pool_host, controller.storage_host_pool = HostPoolGroup(entries), self.kv
        controller.page_size, controller.storage_config = PAGE, storage_config()
        controller.prefetch_sync_queue = Queue()
        controller.host_mem_release_queue = Queue()
        controller.prefetch_hits_sync_groups = []
        controller._init_extra_host_mem_release_queues()
        controller.page_get_func = controller._page_get_zero_copy if zero_copy else controller._generic_page_get
        controller.page_set_func = controller._page_set_zero_copy if zero_copy else controller._generic_page_set
        controller.storage_backend_type = "maru" if zero_copy else "file"
        controller.storage_backend = backend(self.kv, self.sides)
        for entry in entries:
            controller.storage_backend.register_mem_host_pool_v2(entry.host_pool, entry.name)
        self.controller = controller

    def transfers(self, pages: int, swa: Any = None, mamba: Any = None) -> list[Any]:
        """What SGLang asks for a span of ``pages``: a window, a state, and an index that follows the KV pool."""
        from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

        trailing = PoolHitPolicy.TRAILING_PAGES
        window = min(WINDOW, pages)
        return [
            PoolTransfer(PoolName.SWA, host_indices=swa, keys=["__placeholder__"] * window, hit_policy=trailing),
            PoolTransfer(PoolName.MAMBA, host_indices=mamba, keys=["__placeholder__"], hit_policy=trailing),
            PoolTransfer(PoolName.INDEXER, indices_from_pool=PoolName.KV),
        ]

    def backup(self, keys: list[str], pages: list[int], prefix: list[str], state: int) -> Any:
        """One node of the tree: all its pages, a window at its end, a state at its end."""
        from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import StorageOperation

        trailing = PoolHitPolicy.TRAILING_PAGES
        window = min(WINDOW, len(keys))
        operation = StorageOperation(
            indices_of(self.kv, pages), tokens_of(len(keys)), hash_value=keys, prefix_keys=prefix,
            pool_transfers=[
                PoolTransfer(
                    PoolName.SWA, host_indices=indices_of(self.sides["swa"], pages[-window:]), keys=keys[-window:], hit_policy=trailing
                ),
                PoolTransfer(
                    PoolName.MAMBA, host_indices=indices_of(self.sides["mamba"], [state]), keys=keys[-1:], hit_policy=trailing
                ),
                PoolTransfer(PoolName.INDEXER, indices_from_pool=PoolName.KV),
            ],
        )  # fmt: skip
        self.controller._page_backup_or_log(operation)
        return operation

    def load(self, pages: int, into: list[int], state: int, seed: int = 0) -> tuple[int, dict[str, int]]:
        """Query and prefetch a prompt as the controller does: pages that are used, and what each pool delivered."""
        from types import SimpleNamespace

        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import PrefetchOperation

        swa, mamba = indices_of(self.sides["swa"], into[-WINDOW:]), indices_of(self.sides["mamba"], [state])
        operation = PrefetchOperation(
            SimpleNamespace(rid="request"),
            tokens_of(pages, seed),
            prefix_keys=[],
            pool_transfers=self.transfers(pages, swa, mamba),
        )
        hashes, hit = self.controller._storage_hit_query(operation)
        hit = self.controller._sync_prefetch_hit_query(operation, hit)
        if not hit:
            return 0, {}
        operation.hash_value = hashes[: hit // PAGE]
        operation.storage_hit_count = hit
        operation.host_indices = indices_of(self.kv, into[: hit // PAGE])
        self.controller._page_transfer(operation)
        acks = []
        while not self.controller.prefetch_sync_queue.empty():
            acks.append(self.controller.prefetch_sync_queue.get())
        return hit // PAGE, acks[-1].pool_hits


@pytest.fixture(params=["file", "maru"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int | None], Engine]:
    """``engine(seed)``: one more engine process on the same store, its pools filled from the seed."""
    if request.param == "maru":
        attach = request.getfixturevalue("attach")
        return lambda seed: Engine(lambda kv, sides: attach(kv, sides=sides), seed, zero_copy=True)
    request.getfixturevalue("publish")()

    def file(kv: Any, sides: dict[str, Any]) -> Any:
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile

        backend = HiCacheFile(storage_config(), str(tmp_path / "store"))
        backend.register_mem_pool_host(kv)
        return backend

    return lambda seed: Engine(file, seed, zero_copy=False)


def test_a_prompt_is_loaded_with_its_window_its_state_and_its_index(engine: Callable[..., Engine]) -> None:
    writer, reader, keys = engine(1), engine(None), keys_of(5)
    done = writer.backup(keys, [3, 9, 1, 7, 4], [], state=2)
    assert done.completed_tokens == 5 * PAGE
    assert done.pool_storage_result.extra_pool_hit_pages == {"swa": WINDOW, "mamba": 1, "indexer": 5}
    assert reader.load(5, [0, 2, 5, 6, 8], state=6) == (5, {"swa": WINDOW, "mamba": 1})
    for source, target in zip([3, 9, 1, 7, 4], [0, 2, 5, 6, 8], strict=True):
        assert page_bytes(reader.kv, target) == page_bytes(writer.kv, source)
        assert flat_bytes(reader.sides["indexer"], target) == flat_bytes(writer.sides["indexer"], source)
    for source, target in ((7, 6), (4, 8)):
        assert page_bytes(reader.sides["swa"], target) == page_bytes(writer.sides["swa"], source)
    assert flat_bytes(reader.sides["mamba"], 6) == flat_bytes(writer.sides["mamba"], 2)


def test_a_prompt_goes_on_only_where_a_state_was_kept(engine: Callable[..., Engine]) -> None:
    """Two nodes of three and two pages: a prompt that parts after four of them uses three."""
    writer, reader, keys = engine(1), engine(None), keys_of(5)
    writer.backup(keys[:3], [0, 1, 2], [], state=3)
    writer.backup(keys[3:], [3, 4], keys[:3], state=4)
    assert reader.load(5, [9, 8, 7, 6, 5], state=1)[0] == 5
    assert reader.load(4, [9, 8, 7, 6], state=1)[0] == 3
    assert reader.load(2, [9, 8], state=1) == (0, {})
    assert reader.load(5, [9, 8, 7, 6, 5], state=1, seed=3) == (0, {})


def test_without_its_window_or_its_index_nothing_is_used(engine: Callable[..., Engine]) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName

    for left_out in (PoolName.SWA, PoolName.MAMBA, PoolName.INDEXER):
        writer, reader = engine(1), engine(None)
        seed = list(PoolName).index(left_out)
        keys = keys_of(3, seed)
        keep = writer.controller.should_backup
        writer.controller.should_backup = lambda transfer, keep=keep, name=left_out: (
            transfer.name != name and keep(transfer)
        )
        writer.backup(keys, [0, 1, 2], [], state=0)
        assert reader.load(3, [4, 5, 6], state=1, seed=seed) == (0, {}), left_out
