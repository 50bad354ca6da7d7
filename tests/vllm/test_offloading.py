"""Maru under vLLM's own OffloadingConnector: both halves as vLLM makes them, a real server, and no engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from maru_core.errors import ConfigError, MaruError
from maru_core.session import Session
from support import ServerProcess, await_condition, impatient, running_server

pytest.importorskip("vllm.v1.kv_offload.base")
pytestmark = pytest.mark.vllm

Make = Callable[..., Any]
POOL_BYTES = 16 << 20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with running_server(tmp_path, size=str(POOL_BYTES)) as server:
        yield server


@pytest.fixture
def side(engine: Callable[..., Any], server: ServerProcess) -> Iterator[Make]:
    """``side(seed)``: one engine on the server."""
    from offloading_parts import Side, cache, configured, full

    made = []

    def make(seed: int, *specs: Any, role: str = "kv_both", **extra: Any) -> Side:
        keys = {"spec_name": "MaruOffloadingSpec", "server": server.endpoint, "timeout_ms": 60_000} | extra
        made.append(Side(configured(engine, keys, role), cache(*(specs or (full(),))), seed))
        return made[-1]

    yield make
    for one in made:
        one.close()


def figures(server: ServerProcess) -> dict[str, Any]:
    session = Session(server.endpoint, name="test", timeout_s=60)
    try:
        return dict(session.stats())
    finally:
        session.close()


def await_nothing_held(server: ServerProcess) -> None:
    # Sooner than the hold would end by itself.
    await_condition(lambda: figures(server)["held_bytes"] == 0, "pages are held although nobody needs them", 20)


# ---------------------------------------------------------------- the way of a block


def test_a_block_goes_from_one_engine_to_another(side: Make, server: ServerProcess) -> None:
    from offloading_parts import keys, request

    one, two = side(1), side(2)
    stored = one.store(request(6, "a"), keys(range(6)), [7, 3, 9, 4, 5, 2])
    assert stored == sum(len(one.block(block)) for block in range(6)) > 0
    context = request(8, "b")
    assert two.hits(context, range(8)) == [True] * 6 + [False] * 2
    assert figures(server)["held_bytes"] > 0
    # vLLM has the first two in its own cache, so they are not loaded.
    before = two.block(11)
    two.load(context, keys(range(2, 6)), [15, 0, 10, 12])
    assert [two.block(block) for block in (15, 0, 10, 12)] == [one.block(block) for block in (9, 4, 5, 2)]
    assert two.block(11) == before
    await_nothing_held(server)


def test_stores_come_step_by_step_and_the_chain_is_one(side: Make) -> None:
    from offloading_parts import key, keys, request

    one, two = side(1), side(2)
    context = request(5)
    one.store(context, keys([0, 1]), [0, 1])
    one.store(context, keys([2]), [2])
    context.set_offload_key_position(key(5), 6 * 32)
    one.store(context, keys([3, 4, 5]), [3, 4, 5])
    assert two.hits(request(6), range(6)) == [True] * 6


def test_a_hole_ends_what_is_found(side: Make) -> None:
    from offloading_parts import keys, request

    one, two = side(1), side(2)
    one.store(request(6), keys([0, 1, 3, 4]), [0, 1, 3, 4])
    context = request(6)
    assert two.hits(context, range(6)) == [True, True, False, False, False, False]
    one.store(request(6), keys([2]), [2])
    assert two.hits(request(6, "later"), range(6)) == [True] * 5 + [False]


def test_groups_are_apart(side: Make) -> None:
    from offloading_parts import full, keys, request, window

    specs = (full(), window())
    one, two = side(1, *specs), side(2, *specs)
    one.store(request(4, groups=2), [*keys(range(4)), *keys([2, 3], 1)], [1, 2, 3, 4, 8, 9])
    context = request(4, groups=2)
    assert two.hits(context, range(4)) == [True] * 4
    assert two.hits(context, range(4), 1) == [False, False, True, True]
    two.load(context, [*keys([1, 2, 3]), *keys([2, 3], 1)], [5, 6, 7, 10, 11])
    assert [two.block(block) for block in (5, 6, 7)] == [one.block(block) for block in (2, 3, 4)]
    assert [two.block(block, 1) for block in (10, 11)] == [one.block(block, 1) for block in (8, 9)]


@pytest.mark.parametrize(("role", "finds", "stores"), [("kv_both", 1, 2), ("kv_consumer", 1, 1), ("kv_producer", 0, 2)])
def test_roles(side: Make, role: str, finds: int, stores: int) -> None:
    from offloading_parts import keys, request

    plain, other = side(1), side(2, role=role)
    plain.store(request(2), keys([0]), [0])
    assert sum(other.hits(request(2), range(2))) == finds
    other.store(request(2), keys([0, 1]), [0, 1])
    assert sum(plain.hits(request(2, "later"), range(2))) == stores


def test_ranks_have_their_shards_and_one_writer(side: Make) -> None:
    """A page of two ranks is found when both have stored theirs; of ranks that hold replicas one stores."""
    from offloading_parts import keys, request

    from maru_vllm.groups import Placement

    one, two = side(1), side(2)

    def place(rank: int, replicas: int) -> Placement:
        return Placement(stage=0, stages=1, shard=rank // replicas, world=2 // replicas, writer=rank % replicas == 0)

    one.worker._placement, two.worker._placement = place(0, 1), place(1, 1)
    one.store(request(2), keys([0]), [1])
    assert one.hits(request(2, "a"), [0]) == [False]
    two.store(request(2), keys([0]), [2])
    context = request(2, "b")
    assert one.hits(context, [0]) == [True]
    two.load(context, keys([0]), [5])
    assert two.block(5) == two.block(2) != one.block(1)
    one.worker._placement, two.worker._placement = place(0, 2), place(1, 2)
    assert two.store(request(2), keys([1]), [3]) == 0
    assert one.store(request(2), keys([1]), [3]) > 0
    context = request(2, "c")
    assert two.hits(context, [1]) == [True]
    two.load(context, keys([1]), [6])
    assert two.block(6) == one.block(3)


# ---------------------------------------------------------------- what is found is held until it is loaded


def fill(one: Any) -> None:
    """Store other pages until nothing that may be evicted is left of what was there."""
    from offloading_parts import BLOCK
    from vllm.v1.kv_offload.base import ReqContext, make_offload_key

    blocks = POOL_BYTES // len(one.block(0)) + 16
    for start in range(0, blocks, 16):
        context = ReqContext(f"fill-{start}")
        others = [make_offload_key((1 << 200 | start + page).to_bytes(32, "little"), 0) for page in range(16)]
        for page, other in enumerate(others):
            context.set_offload_key_position(other, (page + 1) * BLOCK)
        one.store(context, others, list(range(16)))


@pytest.mark.parametrize("held", [True, False])
def test_what_was_found_stays_until_it_is_loaded(side: Make, server: ServerProcess, held: bool) -> None:
    from offloading_parts import keys, request

    one, two = side(1), side(2)
    one.store(request(4), keys(range(4)), range(4))
    context = request(4)
    assert two.hits(context, range(4)) == [True] * 4
    if not held:  # the control: without the hold they go
        two.manager.on_request_finished(context)
        await_nothing_held(server)
    fill(one)
    assert one.hits(request(4, "later"), range(4)) == [held] * 4
    if held:
        two.load(context, keys(range(4)), [8, 9, 10, 11])
        assert two.block(11) == one.block(3)
        two.manager.on_request_finished(context)
        one.manager.on_request_finished(request(4, "later"))
        await_nothing_held(server)


def test_what_cannot_be_held_is_not_found(engine: Callable[..., Any], tmp_path: Path) -> None:
    from offloading_parts import Side, cache, configured, full, keys, request

    with running_server(tmp_path, "--hold-share", "0", size=str(POOL_BYTES)) as server:
        extra = {"spec_name": "MaruOffloadingSpec", "server": server.endpoint, "timeout_ms": 60_000}
        side = Side(configured(engine, extra), cache(full()), seed=1)
        side.store(request(3), keys(range(3)), range(3))
        assert figures(server)["pages"] == 3
        assert side.hits(request(3, "later"), range(3)) == [False] * 3
        side.close()


def test_a_hold_ends_with_its_request_or_when_that_runs(side: Make, server: ServerProcess) -> None:
    from offloading_parts import keys, request
    from vllm.v1.kv_offload.base import ScheduleEndContext

    one = side(1, hold_s=60.0)
    one.store(request(2), keys([0, 1]), [0, 1])
    runs, ends = request(2, "runs"), request(2, "ends")
    assert one.hits(runs, [0, 1]) == one.hits(ends, [0, 1]) == [True, True]
    one.manager.on_schedule_end(ScheduleEndContext(["ends"], []))
    assert figures(server)["held_bytes"] > 0
    one.manager.on_request_finished(runs)
    await_nothing_held(server)


def test_the_hold_of_a_load_outlives_an_aborted_request(side: Make, server: ServerProcess) -> None:
    from offloading_parts import keys, request

    one = side(1)
    one.store(request(2), keys([0, 1]), [0, 1])
    context = request(2, "later")
    assert one.hits(context, [0, 1]) == [True, True]
    job = one.begin_load(context, keys([0, 1]), [5, 6])
    one.manager.on_request_finished(context)
    one.finish(job)
    assert figures(server)["held_bytes"] > 0
    one.manager.complete_load(set(keys([0, 1])), context)
    await_nothing_held(server)


def test_a_hold_is_renewed_before_it_ends(side: Make, server: ServerProcess) -> None:
    from offloading_parts import keys, request

    one = side(1, hold_s=10.0)
    one.store(request(2), keys([0, 1]), [0, 1])
    context = request(2, "waits")
    assert one.hits(context, [0, 1]) == [True, True]
    [asked] = one.manager._open.values()
    first = asked.answers[0]
    assert one.hits(context, [0, 1]) == [True, True]
    assert asked.answers[0] is first
    # As if more than half of it had passed.
    first.asked -= 5.1
    first.until -= 5.1
    assert one.hits(context, [0, 1]) == [True, True]
    assert asked.answers[0].hold != first.hold
    assert asked.answers[0].until > first.until + 5
    one.manager.on_request_finished(context)
    await_nothing_held(server)


# ---------------------------------------------------------------- failures


def test_a_load_that_fails_is_never_silent(side: Make, server: ServerProcess) -> None:
    from offloading_parts import keys, request

    from maru_vllm.offloading import LoadFailedError

    one, two = side(1), side(2, hold_s=0.3)
    one.store(request(3), keys(range(3)), range(3))
    context = request(3, "later")
    assert two.hits(context, range(3)) == [True] * 3
    spec = two.manager.prepare_load(keys(range(3)), context)
    assert one.manager._store.clear()
    two.worker.submit_load(1, spec, two._blocks(keys(range(3)), [5, 6, 7]))
    two.worker.wait({1})
    for _ in range(2):  # and not only once
        with pytest.raises(LoadFailedError, match=r"3 KV blocks .*miss_not_stored .*MaruConnector"):
            two.worker.get_finished()


def test_a_load_waits_for_a_server_that_is_restarted(side: Make, server: ServerProcess) -> None:
    from offloading_parts import keys, request

    one, two = side(1), side(2)
    one.store(request(3), keys(range(3)), range(3))
    context = request(3, "later")
    assert two.hits(context, range(3)) == [True] * 3
    with impatient(two.worker._store._session):
        server.kill()
        job = two.begin_load(context, keys(range(3)), [5, 6, 7])
        server.start()
    assert two.finish(job).success
    assert [two.block(block) for block in (5, 6, 7)] == [one.block(block) for block in range(3)]


def test_without_a_server_nothing_is_found_and_stores_are_done(side: Make, server: ServerProcess) -> None:
    from offloading_parts import keys, request

    one = side(1)
    one.store(request(3), keys(range(3)), range(3))
    with impatient(one.manager._store._session, one.worker._store._session):
        server.kill()
        assert one.hits(request(3, "later"), range(3)) == [False] * 3
        assert one.store(request(5), keys([3, 4]), [3, 4]) == 0
    server.start()
    await_condition(lambda: one.manager._store.stats().get("server_pages"), "the server is not found again")
    assert one.hits(request(5, "after"), range(5)) == [True] * 3 + [False] * 2


def test_blocks_that_do_not_go_with_the_pages_are_refused(side: Make) -> None:
    from offloading_parts import keys, request

    one = side(1)
    spec = one.manager.prepare_store(keys([0, 1]), request(2)).store_spec
    with pytest.raises(MaruError, match="blocks of the KV cache groups"):
        one.worker.submit_store(1, one._blocks(keys([0]), [3]), spec)


# ---------------------------------------------------------------- reset


def test_a_reset_removes_the_pages(side: Make, server: ServerProcess) -> None:
    from offloading_parts import keys, request

    one = side(1)
    one.store(request(2), keys([0, 1]), [0, 1])
    context = request(2, "waits")
    assert one.hits(context, [0, 1]) == [True, True]
    one.manager.reset_cache()
    assert figures(server)["pages"] == 0
    assert one.hits(context, [0, 1]) == [False, False]
    assert one.store(request(2, "again"), keys([0, 1]), [0, 1]) > 0


def test_a_reset_does_not_take_pages_from_under_a_load(side: Make, server: ServerProcess) -> None:
    from offloading_parts import keys, request

    one = side(1, hold_s=2.0)
    one.store(request(2), keys([0, 1]), [0, 1])
    context = request(2, "later")
    assert one.hits(context, [0, 1]) == [True, True]
    spec = one.manager.prepare_load(keys([0, 1]), context)
    one.manager.reset_cache()
    assert one.hits(request(2, "other"), [0, 1]) == [False, False]
    assert one.store(request(3, "more"), keys([2]), [2]) == 0
    one.worker.submit_load(7, spec, one._blocks(keys([0, 1]), [5, 6]))
    assert one.finish(7).success
    assert [one.block(5), one.block(6)] == [one.block(0), one.block(1)]

    def is_reset() -> bool:
        one.manager._ready()
        return bool(figures(server)["pages"] == 0)

    await_condition(is_reset, "the reset is never done")


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"hold_s": 0}, "hold_s is 0"),
        ({"servr": "x"}, "did you mean 'server'"),
        ({"blocks_per_chunk": 2}, "blocks_per_chunk"),
    ],
)
def test_settings_that_cannot_work_are_refused(engine: Callable[..., Any], extra: dict[str, Any], says: str) -> None:
    from offloading_parts import Side, cache, configured, full

    with pytest.raises(ConfigError, match=says):
        Side(configured(engine, {"spec_name": "MaruOffloadingSpec"} | extra), cache(full()), seed=1)


def test_adapters_are_refused(engine: Callable[..., Any]) -> None:
    from offloading_parts import Side, cache, configured, full

    with pytest.raises(ConfigError, match="--enable-lora"):
        Side(configured(engine, {"spec_name": "MaruOffloadingSpec"}, enable_lora=True), cache(full()), seed=1)


def test_a_spec_that_is_made_elsewhere_is_refused(engine: Callable[..., Any]) -> None:
    from offloading_parts import cache, configured, full
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config

    from maru_vllm.offloading import MaruOffloadingSpec

    config = build_offloading_config(configured(engine, {"spec_name": "MaruOffloadingSpec"}), cache(full()))
    with pytest.raises(ConfigError, match="does not make its offloading parts inside a connector"):
        MaruOffloadingSpec(config)


def test_decoded_blocks_are_stored_unless_said_otherwise(side: Make) -> None:
    for extra, prompt_only in ({}, False), ({"store_decode": False}, True), ({"offload_prompt_only": True}, True):
        assert side(1, **extra)._scheduler.connector_scheduler.config.offload_prompt_only is prompt_only
