"""Ranks and stages of one engine: vLLM's own connector objects for each worker and for the scheduler, its aggregation of what
workers report, and a real Maru server; only the model is left out, which vLLM's CPU engine does not run in pipeline stages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_specs import BLOCK, cache, full, group, mla

from support import ServerProcess, await_condition, running_server

torch = pytest.importorskip("torch")
pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base")
pytestmark = pytest.mark.vllm

PAGES = 4


class Ranks:
    """All of an engine that knows of Maru. ``bytes_of(rank, blocks)`` are the bytes that a rank has in some blocks."""

    def __init__(self, config: Any, kv_cache_config: Callable[[int], Any], width: int, seed: int) -> None:
        """
        Args:
            kv_cache_config: of a pipeline stage.
            width: elements of one token of one layer in one rank.
        """
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        from maru_vllm.connector import MaruConnector

        parallel = config.parallel_config
        tensor, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        self.workers: list[Any] = []
        self.caches: list[dict[str, Any]] = []
        handshakes = {}
        for rank in range(tensor * stages):
            mine = copy.copy(config)
            mine.parallel_config = copy.copy(parallel)
            mine.parallel_config.rank = rank
            planned = kv_cache_config(rank // tensor)
            worker = MaruConnector(mine, KVConnectorRole.WORKER, planned)
            generator = torch.Generator().manual_seed(1000 * seed + rank)
            shape = (planned.num_blocks, 1, BLOCK, width)
            layers = [name for each in planned.kv_cache_groups for name in each.layer_names]
            self.caches.append(
                {name: torch.randint(-9999, 9999, shape, dtype=torch.int16, generator=generator) for name in layers}
            )
            worker.register_kv_caches(self.caches[-1])
            handshakes[rank // tensor, rank % tensor] = worker.get_handshake_metadata()
            self.workers.append(worker)
        self.scheduler = MaruConnector(config, KVConnectorRole.SCHEDULER, kv_cache_config(0))
        self.scheduler.bind_gpu_block_pool(SimpleNamespace(null_block=SimpleNamespace(block_id=0)))
        self.scheduler.set_xfer_handshake_metadata_pp_aware(handshakes)
        self._aggregator = KVOutputAggregator.from_connector(self.scheduler, len(self.workers))

    def close(self) -> None:
        for each in (*self.workers, self.scheduler):
            each.shutdown()

    def bytes_of(self, rank: int, blocks: list[int]) -> bytes:
        return b"".join(cache[blocks].numpy().tobytes() for cache in self.caches[rank].values())

    def matched(self, request: Any) -> int:
        """Tokens that can be loaded."""
        self.scheduler.on_new_request(request)
        told: list[Any] = []
        await_condition(
            lambda: told.append(self.scheduler.get_num_new_matched_tokens(request, 0)) or told[-1][0] is not None,
            "no answer",
        )
        return int(told[-1][0])

    def plan(self, request: Any, blocks: list[int], *, scheduled: int = 0, load: int = 0) -> Any:
        """Allocate ``blocks`` and schedule so many tokens: what the workers are told."""
        table = SimpleNamespace(get_block_ids=lambda: (blocks,))
        self.scheduler.update_state_after_alloc(request, table, load)
        name = request.request_id
        return self.scheduler.build_connector_meta(
            SimpleNamespace(
                total_num_scheduled_tokens=scheduled,
                num_scheduled_tokens={name: scheduled} if scheduled else {},
                preempted_req_ids=set(),
                scheduled_new_reqs=[SimpleNamespace(block_ids=(blocks,))],
                scheduled_cached_reqs=SimpleNamespace(new_block_ids=[]),
                kv_connector_block_state=SimpleNamespace(
                    get_block_ids={name: (blocks,)}.get, boundary_state_offloads={}
                ),
            )
        )

    def run(self, metadata: Any, ranks: list[int]) -> None:
        """The step on some ranks."""
        for rank in ranks:
            worker = self.workers[rank]
            worker.bind_connector_metadata(metadata)
            worker.handle_preemptions(metadata)
            worker.start_load_kv(None)
            worker.wait_for_save()

    def report(self) -> Any:
        """What all ranks report now, as vLLM puts it together and tells the scheduler."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        outputs = []
        for worker in self.workers:
            results = worker.get_transfer_results(set())
            told = KVConnectorOutput(
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving or set(),
                invalid_block_ids=worker.get_block_ids_with_load_errors(),
                kv_connector_worker_meta=worker.build_connector_worker_meta(),
            )
            outputs.append(ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=told))
        together = self._aggregator.aggregate(outputs).kv_connector_output
        self.scheduler.update_connector_output(together)
        return together


Make = Callable[..., Ranks]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with running_server(tmp_path, size="64M") as server:
        yield server


@pytest.fixture
def make(engine: Callable[..., Any], server: ServerProcess) -> Iterator[Make]:
    """``make(tensor, stages)``: an engine of so many ranks; with ``replicas`` its ranks hold the same latent KV."""
    made: list[Ranks] = []

    def run(tensor: int, stages: int, *, replicas: int = 1) -> Ranks:
        from vllm.config import KVTransferConfig

        transfer = KVTransferConfig(
            kv_connector="MaruConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"server": server.endpoint, "timeout_ms": 30_000},
        )
        config = engine(
            tensor_parallel_size=tensor, pipeline_parallel_size=stages, kv_transfer_config=transfer,
            distributed_executor_backend="mp",
        )  # fmt: skip
        spec = mla() if replicas > 1 else full(num_kv_heads=1)

        def planned(stage: int) -> Any:
            # Stages have other layers, and not equally many.
            return cache(group(spec, 2 + stage, f"stage{stage}"), kv_tp_replicas=replicas)

        made.append(Ranks(config, planned, 16, len(made) + 1))
        return made[-1]

    yield run
    for each in made:
        each.close()


def request(name: str = "r") -> Any:
    """A real one of vLLM, with the hashes that it computes; one token more than whole blocks."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    tokens = list(range(PAGES * BLOCK + 1))
    return Request(
        name, tokens, SamplingParams(max_tokens=1), None, block_hasher=get_request_block_hasher(BLOCK, sha256)
    )


def store(engine: Ranks, ranks: list[int]) -> None:
    """A prompt is computed, and only some of the ranks get to store their part."""
    asked = request()
    assert engine.matched(asked) == 0
    engine.run(engine.plan(asked, [1, 2, 3, 4, 5], scheduled=PAGES * BLOCK + 1), ranks)


def await_found(engine: Ranks) -> Any:
    """A request of which all blocks can be loaded; each question is a request of its own."""
    asked: list[Any] = []

    def found() -> bool:
        asked.append(request(f"q{len(asked)}"))
        return engine.matched(asked[-1]) == PAGES * BLOCK

    await_condition(found, "what all ranks have stored is found")
    return asked[-1]


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2), (2, 3)])
def test_each_rank_loads_what_its_like_stored(make: Make, tensor: int, stages: int) -> None:
    one, two = make(tensor, stages), make(tensor, stages)
    ranks = list(range(tensor * stages))
    assert {worker._handshake.namespace for worker in one.workers + two.workers} == {
        one.workers[0]._handshake.namespace
    }
    store(one, ranks)
    asked = await_found(two)
    metadata = two.plan(asked, [9, 8, 7, 6, 5], load=PAGES * BLOCK)
    # A request runs when the last rank has its part, and not before.
    two.run(metadata, ranks[:-1])
    done = two.report()
    for _ in range(20):
        assert asked.request_id not in (done.finished_recving or ())
        done = two.report()
    two.run(metadata, ranks[-1:])
    await_condition(lambda: asked.request_id in (two.report().finished_recving or ()), "the load ends")
    for rank in ranks:
        assert two.bytes_of(rank, [9, 8, 7, 6]) == one.bytes_of(rank, [1, 2, 3, 4])
    assert len({one.bytes_of(rank, [1]) for rank in ranks}) == len(ranks), "ranks differ, so that a mix-up would show"


def test_a_page_is_there_when_every_rank_has_stored_it(make: Make) -> None:
    one, two = make(2, 2), make(2, 2)
    ranks = [0, 1, 2, 3]
    asked = request()
    assert one.matched(asked) == 0
    metadata = one.plan(asked, [1, 2, 3, 4, 5], scheduled=PAGES * BLOCK + 1)
    one.run(metadata, ranks[1:])
    store_of = one.workers[-1]._worker._store
    await_condition(lambda: store_of.metrics.stored_pages == PAGES, "the last rank has stored")
    assert two.matched(request("early")) == 0
    one.run(metadata, ranks[:1])
    await_found(two)


def test_of_replicas_one_stores_and_all_load(make: Make) -> None:
    """MLA: the ranks of a stage hold the same."""
    one, two = make(2, 2, replicas=2), make(2, 2, replicas=2)
    for stage in (0, 2):
        for writer, replica in zip(one.caches[stage].values(), one.caches[stage + 1].values(), strict=True):
            replica.copy_(writer)
    store(one, [0, 1, 2, 3])
    asked = await_found(two)
    two.run(two.plan(asked, [9, 8, 7, 6, 5], load=PAGES * BLOCK), [0, 1, 2, 3])
    await_condition(lambda: asked.request_id in (two.report().finished_recving or ()), "the load ends")
    for rank in range(4):
        assert two.bytes_of(rank, [9, 8, 7, 6]) == one.bytes_of(rank // 2 * 2, [1, 2, 3, 4])
    figures = [worker._worker._store.metrics for worker in one.workers]
    assert [each.stored_pages for each in figures] == [PAGES, 0, PAGES, 0]
    assert all(each.existing_pages == each.refused_busy == 0 for each in figures), "the others do not even try"


def test_what_one_rank_could_not_load_is_reported_for_all(make: Make) -> None:
    one, two = make(1, 2), make(1, 2)
    store(one, [0, 1])
    asked = await_found(two)
    two.workers[1]._worker._store.close()  # as one whose connection is gone
    two.run(two.plan(asked, [9, 8, 7, 6, 5], load=PAGES * BLOCK), [0, 1])
    bad: set[int] = set()

    def ended() -> bool:
        done = two.report()
        bad.update(done.invalid_block_ids)
        return asked.request_id in (done.finished_recving or ())

    await_condition(ended, "the load ends")
    assert bad == {9, 8, 7, 6}
