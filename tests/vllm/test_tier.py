"""Maru under vLLM's CPU tier: vLLM's own tiering manager, CPU tier and shared region, a real server, and no engine.

vLLM refuses to copy between a CPU engine's blocks and its CPU tier, so the tests write and read the tier's chunks themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maru_core.errors import ConfigError
from maru_core.session import Session
from support import ServerProcess, await_condition, running_server

pytest.importorskip("vllm.v1.kv_offload.base")
pytestmark = pytest.mark.vllm

CHUNK = 16384  # bytes: two layers of 32 tokens, 2 heads, 32 wide, K and V, bfloat16
Make = Callable[..., "Tiered"]


class Tiered:
    """The scheduler's half of one engine with a CPU tier of ``chunks`` chunks and Maru below it."""

    def __init__(self, engine: Callable[..., Any], name: str, chunks: int, tier: dict[str, Any], **extra: Any) -> None:
        from offloading_parts import cache, configured, full
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

        keys = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": chunks * CHUNK * extra.get("blocks_per_chunk", 1),
            "secondary_tiers": [{"type": "maru", **tier}],
        }
        vllm_config = configured(engine, keys | extra)
        vllm_config.kv_transfer_config.engine_id = f"{name}-{np.random.default_rng().integers(1 << 32)}"
        self.connector = OffloadingConnector(vllm_config, KVConnectorRole.SCHEDULER, cache(full()))
        self.manager = self.connector.connector_scheduler.manager
        [self.tier] = self.manager.secondary_tiers

    @property
    def rows(self) -> np.ndarray:
        return np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)

    def step(self) -> None:
        from vllm.v1.kv_offload.base import ScheduleEndContext

        self.manager.on_schedule_end(ScheduleEndContext([], []))

    def settle(self) -> None:
        def settled() -> bool:
            self.step()
            return not self.manager.has_pending_work()

        await_condition(settled, "the tiers do not come to rest")

    def store(self, context: Any, keys: Sequence[Any], seed: int) -> None:
        """As a GPU does whose blocks hold what :func:`content` says."""
        self.manager.on_new_request(context)
        output = self.manager.prepare_store(keys, context)
        assert output is not None
        for key, chunk in zip(output.keys_to_store, output.store_spec.chunk_ids.tolist(), strict=True):
            self.rows[chunk] = content(key, seed, self.rows.shape[1])
        self.manager.complete_store(set(output.keys_to_store), context)
        self.settle()
        self.manager.on_request_finished(context)

    def find(self, context: Any, keys: Sequence[Any]) -> list[bool]:
        """Looks up as vLLM's scheduler does, step after step, until no key is on its way."""
        from vllm.v1.kv_offload.base import LookupResult

        self.manager.on_new_request(context)
        found: list[LookupResult] = []

        def resolved() -> bool:
            found[:] = [self.manager.lookup(key, context) for key in keys]
            self.step()
            return not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(found)

        await_condition(resolved, "lookups never come to an end")
        return [result is LookupResult.HIT for result in found]

    def load(self, context: Any, keys: Sequence[Any]) -> list[np.ndarray]:
        spec = self.manager.prepare_load(keys, context)
        loaded = [self.rows[chunk].copy() for chunk in spec.chunk_ids.tolist()]
        self.manager.complete_load(keys, context)
        return loaded


def content(key: Any, seed: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng([seed, *key]).integers(0, 256, nbytes, np.uint8)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with running_server(tmp_path, size="16M") as server:
        yield server


@pytest.fixture
def tiered(engine: Callable[..., Any], server: ServerProcess) -> Iterator[Make]:
    made: list[Tiered] = []

    def make(name: str, chunks: int = 32, tier: dict[str, Any] | None = None, **extra: Any) -> Tiered:
        made.append(
            Tiered(engine, name, chunks, {"server": server.endpoint, "timeout_ms": 60_000} | (tier or {}), **extra)
        )
        return made[-1]

    yield make
    for one in made:
        one.connector.shutdown()


def pages(server: ServerProcess) -> int:
    session = Session(server.endpoint, name="test", timeout_s=60)
    try:
        return int(session.stats()["pages"])
    finally:
        session.close()


def test_chunks_go_from_one_engine_to_another(tiered: Make, server: ServerProcess) -> None:
    from offloading_parts import keys, request
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    one, two = tiered("one"), tiered("two")
    assert one.rows.shape[1] == CHUNK
    one.store(request(6, "a"), keys(range(6)), seed=1)
    assert pages(server) == 6
    context = request(8, "b")
    wanted = keys(range(8))
    assert two.find(context, wanted) == [True] * 6 + [False] * 2
    assert two.manager.get_load_source(wanted[0], context) is CacheHitSource.HOST
    for key, row in zip(wanted, two.load(context, wanted[:6]), strict=False):
        assert (row == content(key, 1, CHUNK)).all()
    two.manager.on_request_finished(context)


def test_what_the_cpu_tier_evicts_is_found_again(tiered: Make, server: ServerProcess) -> None:
    from offloading_parts import keys, request

    one = tiered("one", chunks=4)
    for start in range(0, 12, 4):
        one.store(request(12, f"r{start}"), keys(range(start, start + 4)), seed=1)
    assert pages(server) == 12
    context = request(12, "later")
    wanted = keys(range(4))
    assert one.find(context, wanted) == [True] * 4
    for key, row in zip(wanted, one.load(context, wanted), strict=True):
        assert (row == content(key, 1, CHUNK)).all()


def test_chunks_of_several_blocks(tiered: Make, server: ServerProcess) -> None:
    from offloading_parts import BLOCK, key, keys
    from vllm.v1.kv_offload.base import ReqContext

    def request(name: str) -> Any:
        context = ReqContext(name)
        for chunk in range(4):
            context.set_offload_key_position(key(chunk), (chunk + 1) * 2 * BLOCK)
        return context

    one, two = (tiered(name, blocks_per_chunk=2) for name in ("one", "two"))
    assert one.rows.shape[1] == 2 * CHUNK
    one.store(request("a"), keys(range(4)), seed=1)
    assert pages(server) == 4
    context = request("b")
    assert two.find(context, keys(range(4))) == [True] * 4
    assert (two.load(context, keys([3]))[0] == content(key(3), 1, 2 * CHUNK)).all()


def test_a_load_that_fails_in_part_keeps_the_rest(tiered: Make, server: ServerProcess) -> None:
    from offloading_parts import key, keys, page_hash, request
    from vllm.v1.kv_offload.base import LookupResult

    one, two = tiered("one"), tiered("two")
    one.store(request(5, "a"), keys(range(5)), seed=1)
    context = request(5, "b")
    wanted = keys(range(5))
    two.manager.on_new_request(context)
    lookups = two.tier._lookups

    def known() -> bool:
        for each in wanted:
            two.tier.lookup(each, context)
        lookups.flush()
        return all(two.tier.lookup(each, context) is LookupResult.HIT for each in wanted)

    await_condition(known, "the tier never answers")
    # What was found goes before it is loaded.
    assert one.tier._store.delete(page_hash(3)) > 0
    assert two.find(context, wanted) == [True, True, True, False, False]
    assert (two.load(context, [key(2)])[0] == content(key(2), 1, CHUNK)).all()
    two.manager.on_request_finished(context)


def test_without_a_server_there_are_only_misses(tiered: Make, server: ServerProcess) -> None:
    from offloading_parts import keys, request

    one, two = (tiered(name, tier={"timeout_ms": 200}) for name in ("one", "two"))
    server.kill()
    one.store(request(3, "a"), keys(range(3)), seed=1)
    assert one.find(request(3, "b"), keys(range(3))) == [True] * 3  # in the CPU tier
    assert two.find(request(3, "b"), keys(range(3))) == [False] * 3


def test_a_reset_waits_for_copies_and_leaves_maru_alone(tiered: Make, server: ServerProcess) -> None:
    from offloading_parts import keys, request

    one = tiered("one")
    context = request(4, "a")
    one.manager.on_new_request(context)
    output = one.manager.prepare_store(keys(range(4)), context)
    for key, chunk in zip(output.keys_to_store, output.store_spec.chunk_ids.tolist(), strict=True):
        one.rows[chunk] = content(key, 1, CHUNK)
    one.manager.complete_store(set(output.keys_to_store), context)
    one.manager.reset_cache()
    assert pages(server) == 4
    later = request(4, "later")
    assert one.find(later, keys(range(4))) == [True] * 4
    assert (one.load(later, keys([2]))[0] == content(keys([2])[0], 1, CHUNK)).all()


def test_the_tier_has_a_namespace_of_its_own(engine: Callable[..., Any], tiered: Make, server: ServerProcess) -> None:
    """Its objects are rows of host memory, padding and all."""
    from offloading_parts import Side, cache, configured, full

    one = tiered("one")
    side = Side(
        configured(engine, {"spec_name": "MaruOffloadingSpec", "server": server.endpoint}), cache(full()), seed=1
    )
    try:
        records = {one.tier._store.namespace.record(), side.manager._store.namespace.record()}
        assert len(records) == 2
        assert side.manager._store.namespace == side.worker._store.namespace
    finally:
        side.close()


def test_a_key_that_is_misspelt_is_refused(tiered: Make) -> None:
    with pytest.raises(ConfigError, match="did you mean 'timeout_ms'"):
        tiered("one", tier={"timeout": 5})
