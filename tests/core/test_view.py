"""Validation of generations: what changed, and slots that do not exist, are never valid; both implementations agree."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maru_core.pool import PoolMemory, PoolView
from maru_core.protocol import NO_SLOT

Keep = Callable[[PoolMemory], PoolMemory]


@pytest.fixture(params=[True, False], ids=["native", "numpy"])
def native(request: pytest.FixtureRequest) -> bool:
    if request.param:
        pytest.importorskip("maru_core._native", reason="the extension was not built")
    return bool(request.param)


def u32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def test_a_changed_generation_is_seen_through_the_clients_mapping(shm_uri: str, native: bool, pools: Keep) -> None:
    server = pools(PoolMemory.create(shm_uri))
    client = pools(PoolMemory.attach(shm_uri))
    view = PoolView(client, native=native)
    slots = np.arange(128, dtype=np.uint32)
    generations = client.generations[slots].copy()
    assert view.valid(slots, generations)
    assert view.valid_each(slots, generations).all()
    server.generations[77] += 1
    assert not view.valid(slots, generations)
    assert np.flatnonzero(~view.valid_each(slots, generations)).tolist() == [77]
    client.close()
    assert not view.valid(slots, generations)  # still mapped: a view keeps its memory


def test_slots_that_do_not_exist_are_not_valid(shm_uri: str, native: bool, pools: Keep) -> None:
    server = pools(PoolMemory.create(shm_uri))
    view = PoolView(server, native=native)
    count = server.geometry.slot_count
    generation = int(server.generations[0])
    slots = u32(0, count - 1, count, NO_SLOT)
    assert view.valid_each(slots, np.full(4, generation, np.uint64)).tolist() == [True, True, False, False]
    assert not view.valid(slots, np.full(4, generation, np.uint64))
    assert view.valid(u32(), np.empty(0, np.uint64))
    # Not even if what lies behind the generations happens to be what is asked for.
    beyond = server.meta[server.geometry.off_generations + 8 * count :][:64].view(np.uint64)
    assert not view.valid_each(np.arange(count, count + 8, dtype=np.uint32), beyond).any()


def test_only_the_right_types_are_compared(shm_uri: str, native: bool, pools: Keep) -> None:
    view = PoolView(pools(PoolMemory.create(shm_uri)), native=native)
    one = np.zeros(1, np.uint64)
    for slots, generations in (
        (u32(0, 1), one),
        (u32(0).reshape(1, 1), one.reshape(1, 1)),
        (u32(0).astype(np.int64), one),
        (u32(0), one.astype(np.int64)),
    ):
        for ask in (view.valid, view.valid_each):
            with pytest.raises(ValueError, match="give"):
                ask(slots, generations)


@pytest.fixture
def server(shm_uri: str, pools: Keep) -> PoolMemory:
    return pools(PoolMemory.create(shm_uri))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(seed=st.integers(0, 1 << 32), count=st.integers(0, 300), step=st.sampled_from([1, 2, -1]))
def test_both_implementations_say_what_numpy_says(server: PoolMemory, seed: int, count: int, step: int) -> None:
    random = np.random.default_rng(seed)
    server.generations[:] = random.integers(0, 3, server.geometry.slot_count, dtype=np.uint64)
    slots = random.integers(0, server.geometry.slot_count, count, dtype=np.uint32)[::step]
    wanted = random.integers(0, 3, count, dtype=np.uint64)[::step]
    truth = server.generations[slots] == wanted
    for native in (True, False):
        view = PoolView(server, native=native)
        assert view.valid_each(slots, wanted).tolist() == truth.tolist()
        assert view.valid(slots, wanted) == truth.all()
