"""The scheduler's side on a real server: what is offered, loaded and stored of a request, step by step as vLLM runs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from maru_core.protocol import HASH_BYTES, ROOT, Rule, Want
from maru_core.session import Session
from maru_core.store import Store
from maru_core.store_config import StoreConfig
from support import Pages, ServerProcess, await_condition, hashes, namespace, running_server

pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base")
pytestmark = pytest.mark.vllm

BLOCK = 4


def request(tokens: int, *, name: str = "r", seed: int = 0, prompt: int | None = None) -> Any:
    """What the scheduler's side reads of vLLM's ``Request``."""
    chain = hashes(64, seed)
    known = [chain[at * HASH_BYTES : (at + 1) * HASH_BYTES] for at in range(tokens // BLOCK)]
    return SimpleNamespace(
        request_id=name, block_hashes=known, num_tokens=tokens, num_prompt_tokens=prompt or tokens, num_computed_tokens=0,
        num_preemptions=0, skip_reading_prefix_cache=False, lora_request=None,
    )  # fmt: skip


def output(
    scheduled: dict[str, int] | None = None,
    tables: dict[str, tuple[list[int], ...]] | None = None,
    *,
    new: tuple[str, ...] = (),
    preempted: tuple[str, ...] = (),
    states: dict[str, list[tuple[int, int, int]]] | None = None,
) -> Any:
    """What it reads of vLLM's ``SchedulerOutput``."""
    scheduled, tables = scheduled or {}, tables or {}
    return SimpleNamespace(
        total_num_scheduled_tokens=sum(scheduled.values()),
        num_scheduled_tokens=scheduled,
        preempted_req_ids=set(preempted),
        scheduled_new_reqs=[SimpleNamespace(block_ids=tables[name]) for name in new],
        scheduled_cached_reqs=SimpleNamespace(new_block_ids=[None]),
        kv_connector_block_state=SimpleNamespace(get_block_ids=tables.get, boundary_state_offloads=states or {}),
    )


class Engine:
    """The scheduler's side, and a store that does what its workers would."""

    def __init__(self, endpoint: str, groups: Any = None, *, states: tuple[int, ...] = (), **options: Any) -> None:
        from maru_vllm.config import parse_extra_config
        from maru_vllm.groups import Group
        from maru_vllm.metadata import Handshake
        from maru_vllm.scheduler import SchedulerSide

        extra = {key: options.pop(key) for key in ("hold_s", "store_decode", "timeout_ms") if key in options}
        config = parse_extra_config({"server": endpoint, "timeout_ms": 60_000} | extra)
        self.groups = groups or (Group(0, "kv", Want(), ("a",)),)
        self.side = SchedulerSide(
            self.groups,
            block_tokens=BLOCK,
            config=config,
            name="test",
            states=states,
            **({"loads": True, "stores": True} | options),
        )
        components = [group.component for group in self.groups]
        self.side.open([Handshake(namespace().record(), components, 64)])
        self.workers = Store.open(StoreConfig(server=endpoint, timeout_ms=60_000), namespace(), name="test")

    def close(self) -> None:
        self.side.close()
        self.workers.close()

    def put(self, transfers: list[Any]) -> None:
        for transfer in transfers:
            for run in transfer.runs:
                stored = self.workers.put(
                    self.groups[run.group].component,
                    0,
                    1,
                    run.parent,
                    run.hashes,
                    Pages(len(run.blocks), (64,), seed=1).fragments,
                )
                assert stored.all()

    def matched(self, made: Any, computed: int = 0) -> tuple[int, bool]:
        """Asked again until it is known, as vLLM does."""
        answers: list[tuple[int | None, bool]] = []
        await_condition(
            lambda: answers.append(self.side.matched(made, computed)) or answers[-1][0] is not None, "no answer"
        )
        tokens, loads = answers[-1]
        assert tokens is not None
        return tokens, loads

    def store_all(self, made: Any) -> None:
        """Compute a prompt in one step."""
        ids = list(range(1, 1 + made.num_tokens // BLOCK + 1))
        self.side.arrived(made)
        self.matched(made)
        metadata = self.side.step(output({made.request_id: made.num_tokens}, {made.request_id: (ids,)}))
        self.put(metadata.stores)
        made.num_computed_tokens = made.num_tokens


Make = Callable[..., Engine]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with running_server(tmp_path, size="16M") as server:
        yield server


@pytest.fixture
def make(server: ServerProcess) -> Iterator[Make]:
    made: list[Engine] = []

    def run(*arguments: Any, **options: Any) -> Engine:
        made.append(Engine(server.endpoint, *arguments, **options))
        return made[-1]

    yield run
    for engine in made:
        engine.close()


def pages_of(transfers: list[Any], group: int = 0) -> dict[bytes, int]:
    """Block of each page, in order."""
    return {
        run.hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES]: block
        for transfer in transfers
        for run in transfer.runs
        if run.group == group
        for at, block in enumerate(run.blocks)
    }


# ---------------------------------------------------------------- what is offered


@pytest.mark.parametrize(("tokens", "offered"), [(41, 40), (40, 36), (39, 36), (5, 4), (4, 0), (3, 0)])
def test_whole_blocks_are_offered_and_a_token_is_left_to_compute(make: Make, tokens: int, offered: int) -> None:
    engine = make()
    engine.store_all(request(42, name="first"))
    again = request(tokens, name="second")
    engine.side.arrived(again)
    assert engine.matched(again) == (offered, offered > 0)


def test_only_what_goes_beyond_vllms_own_cache_is_offered(make: Make) -> None:
    engine = make()
    engine.store_all(request(42, name="first"))
    again = request(42, name="second")
    assert engine.matched(again, 12) == (28, True)
    assert engine.matched(again, 40) == (0, False)
    engine.matched(again, 12)
    engine.side.allocated(again, (list(range(20, 30)),), 28)
    [load] = engine.side.step(output()).loads
    [run] = load.runs
    assert run.hashes == b"".join(again.block_hashes[3:10])
    assert run.blocks == list(range(23, 30))


def test_less_is_loaded_where_vllm_takes_less(make: Make) -> None:
    engine = make()
    engine.store_all(request(42, name="first"))
    again = request(42, name="second")
    engine.matched(again)
    engine.side.allocated(again, (list(range(20, 31)),), 16)
    [load] = engine.side.step(output()).loads
    assert load.runs[0].blocks == [20, 21, 22, 23]


def test_without_a_server_nothing_is_offered_and_nobody_waits(make: Make, server: ServerProcess) -> None:
    engine = make(timeout_ms=200)
    server.kill()
    made = request(42)
    engine.side.arrived(made)
    began = time.monotonic()
    calls = 0
    while (answer := engine.side.matched(made, 0))[0] is None:
        calls += 1
        assert time.monotonic() - began < 20
    assert answer == (0, False)
    metadata = engine.side.step(output({"r": 42}, {"r": (list(range(1, 12)),)}))
    assert len(pages_of(metadata.stores)) == 10, "it is tried, for the case that the server is back"


def test_roles(make: Make) -> None:
    producer, consumer = make(loads=False), make(stores=False)
    producer.store_all(request(42, name="first"))
    assert producer.matched(request(42, name="second")) == (0, False)
    third = request(42, name="third")
    assert consumer.matched(third) == (40, True)
    metadata = consumer.side.step(output({"third": 42}, {"third": (list(range(1, 12)),)}))
    consumer.side.finished(third, (list(range(1, 12)),))
    assert metadata.stores == consumer.side.step(output()).last_stores == []


def test_a_request_that_must_not_read_the_cache(make: Make) -> None:
    engine = make()
    engine.store_all(request(42, name="first"))
    again = request(42, name="second")
    again.skip_reading_prefix_cache = True
    assert engine.matched(again) == (0, False)


def test_what_failed_to_load_is_computed_stored_and_not_promised_again(make: Make) -> None:
    engine = make()
    engine.store_all(request(42, name="first"))
    again = request(42, name="second")
    engine.matched(again)
    ids = list(range(20, 31))
    engine.side.allocated(again, (ids,), 40)
    engine.side.step(output())
    engine.side.transferred([], [], {22})
    engine.side.transferred(["second"], [], set())
    assert engine.matched(again) == (0, False)
    metadata = engine.side.step(output({"second": 42}, {"second": (ids,)}))
    assert list(pages_of(metadata.stores).values()) == ids[:10]


def test_what_was_loaded_is_not_stored(make: Make) -> None:
    engine = make()
    engine.store_all(request(42, name="first"))
    again = request(50, name="second")
    engine.matched(again)
    ids = list(range(20, 33))
    engine.side.allocated(again, (ids,), 40)
    engine.side.step(output())
    engine.side.transferred(["second"], [], set())
    again.num_computed_tokens = 40
    metadata = engine.side.step(output({"second": 10}, {"second": (ids,)}))
    assert list(pages_of(metadata.stores).values()) == ids[10:12]
    assert metadata.stores[0].runs[0].parent == again.block_hashes[9]


def test_a_preempted_request_may_load_again(make: Make) -> None:
    engine = make()
    engine.store_all(request(42, name="first"))
    again = request(42, name="second")
    engine.matched(again)
    engine.side.allocated(again, (list(range(20, 31)),), 40)
    engine.side.step(output())
    engine.side.transferred(["second"], [], set())
    again.num_preemptions = 1
    engine.side.step(output(preempted=("second",)))
    assert engine.matched(again) == (40, True)


def test_a_load_that_cannot_be_planned_ends_as_a_failed_one(make: Make) -> None:
    """vLLM waits for it by now: it must hear of an end."""
    engine = make()
    engine.store_all(request(42, name="first"))
    again = request(42, name="second")
    engine.matched(again, 4)
    engine.side.allocated(again, ([20, 21, 0, 23],), 36)  # block 0 is vLLM's null block
    [load] = engine.side.step(output()).loads
    assert load.failed
    assert load.runs[0].blocks == [21, 23]
    assert load.request_id == "second"


# ---------------------------------------------------------------- what is stored


@pytest.mark.parametrize("budget", [1, 3, 4, 5, 11, 100])
def test_every_full_block_is_stored_once_whatever_the_budget(make: Make, budget: int) -> None:
    engine = make()
    made = request(43)
    ids = list(range(1, 12))
    engine.matched(made)
    seen: list[int] = []
    while made.num_computed_tokens < 43:
        tokens = min(budget, 43 - made.num_computed_tokens)
        metadata = engine.side.step(output({"r": tokens}, {"r": (ids,)}))
        for transfer in metadata.stores:
            for run in transfer.runs:
                first = made.block_hashes.index(run.hashes[:HASH_BYTES])
                assert run.parent == (made.block_hashes[first - 1] if first else ROOT)
        made.num_computed_tokens += tokens
        seen += pages_of(metadata.stores).values()
        assert len(seen) == made.num_computed_tokens // BLOCK, "only blocks that are full"
    assert seen == ids[:10]


@pytest.mark.parametrize("store_decode", [True, False])
def test_blocks_of_generated_tokens(make: Make, store_decode: bool) -> None:
    engine = make(store_decode=store_decode)
    made = request(10)
    chain = [hashes(64)[at * HASH_BYTES : (at + 1) * HASH_BYTES] for at in range(64)]
    engine.matched(made)
    ids, stored = list(range(1, 12)), []
    scheduled = 10
    for tokens in range(10, 21):
        made.num_tokens, made.block_hashes = tokens, chain[: tokens // BLOCK]
        stored += pages_of(engine.side.step(output({"r": scheduled}, {"r": (ids,)})).stores).values()
        made.num_computed_tokens += scheduled
        scheduled = 1
    assert stored == (ids[:5] if store_decode else ids[:2])


def test_drafts_that_may_be_rejected_are_not_stored(make: Make) -> None:
    engine = make()
    made = request(7)  # one full block is known
    engine.matched(made)
    metadata = engine.side.step(output({"r": 7 + 5}, {"r": ([1, 2, 3, 4],)}))
    assert list(pages_of(metadata.stores).values()) == [1]


def test_the_last_block_that_became_known_after_its_step(make: Make) -> None:
    engine = make()
    made = request(7)
    engine.matched(made)
    engine.side.step(output({"r": 8}, {"r": ([1, 2, 3],)}))
    made.num_computed_tokens, made.num_tokens = 8, 9
    made.block_hashes = [hashes(64)[:32], hashes(64)[32:64]]
    engine.side.finished(made, ([1, 2, 3],))
    metadata = engine.side.step(output())
    assert list(pages_of(metadata.last_stores).values()) == [2]
    assert engine.side.step(output()).last_stores == []


def test_nothing_of_a_load_that_was_cut_short_is_stored(make: Make) -> None:
    engine = make()
    engine.store_all(request(42, name="first"))
    again = request(42, name="second")
    engine.matched(again)
    ids = list(range(20, 31))
    engine.side.allocated(again, (ids,), 40)
    engine.side.step(output())
    again.num_computed_tokens = 40  # vLLM says so while the load is under way
    engine.side.transferred([], [], {22})  # one worker has failed, another is still copying, and the request is aborted
    engine.side.finished(again, (ids,))
    assert engine.side.step(output()).last_stores == []


def test_after_a_preemption_all_is_stored_again(make: Make) -> None:
    """Stores of the blocks that were taken away may have been given up."""
    engine = make()
    made = request(42)
    ids = list(range(1, 12))
    engine.matched(made)
    assert len(pages_of(engine.side.step(output({"r": 42}, {"r": (ids,)})).stores)) == 10
    made.num_preemptions = 1
    engine.side.step(output(preempted=("r",)))
    engine.matched(made)
    metadata = engine.side.step(output({"r": 42}, {"r": (ids,)}))
    assert len(pages_of(metadata.stores)) == 10


def test_what_vllm_has_cached_and_maru_has_lost_is_stored_again(make: Make) -> None:
    engine = make()
    first = request(42, name="first")
    engine.store_all(first)
    assert engine.side.clear()
    again = request(42, name="second")
    assert engine.matched(again, 40) == (0, False)
    again.num_computed_tokens = 40
    metadata = engine.side.step(output({"second": 2}, {"second": (list(range(1, 12)),)}))
    assert len(pages_of(metadata.stores)) == 10


def test_blocks_that_a_step_gives_out_are_named(make: Make) -> None:
    engine = make()
    made = request(42)
    engine.store_all(request(42, name="first"))
    engine.matched(made)
    engine.side.allocated(made, (list(range(20, 31)),), 40)
    plan = output({"s": 1}, {"s": ([7, 8], [9])}, new=("s",))
    plan.scheduled_cached_reqs.new_block_ids = [None, ([11], [12, 13])]
    assert sorted(engine.side.step(plan).fresh) == sorted([7, 8, 9, 11, 12, 13, *range(20, 30)])


def test_steps_have_numbers_of_their_own(make: Make) -> None:
    engine = make()
    numbers = [engine.side.step(output()).step for _ in range(3)]
    assert len(set(numbers)) == 3
    assert 0 not in numbers


# ---------------------------------------------------------------- several groups


def window_groups() -> Any:
    from maru_vllm.groups import Group

    return (
        Group(0, "g0", Want(), ("a",)),
        Group(1, "g1", Want(Rule.TRAILING_PAGES, 2), ("b",)),
    )


def test_of_a_window_only_its_last_pages_are_loaded(make: Make) -> None:
    engine = make(window_groups())
    first = request(42, name="first")
    engine.matched(first)
    full, window = list(range(1, 12)), [0] * 6 + list(range(30, 35))
    plan = engine.side.step(output({"first": 42}, {"first": (full, window)}))
    assert list(pages_of(plan.stores, 0).values()) == full[:10]
    assert list(pages_of(plan.stores, 1).values()) == [30, 31, 32, 33], "what the window has left is not there any more"
    engine.put(plan.stores)
    again = request(42, name="second")
    assert engine.matched(again) == (40, True)
    engine.side.allocated(again, (list(range(50, 61)), [0] * 8 + [70, 71, 72]), 40)
    [load] = engine.side.step(output()).loads
    assert not load.failed
    assert list(pages_of([load], 0).values()) == list(range(50, 60))
    assert list(pages_of([load], 1).values()) == [70, 71]


def test_a_prefix_ends_where_the_window_is_there(make: Make) -> None:
    """A shorter prompt's end lies where the window's pages were not stored."""
    engine = make(window_groups())
    first = request(42, name="first")
    engine.matched(first)
    plan = engine.side.step(output({"first": 42}, {"first": (list(range(1, 12)), [0] * 6 + list(range(30, 35)))}))
    engine.put(plan.stores)
    for tokens, offered in ((42, 40), (40, 36), (36, 32), (32, 0), (24, 0)):
        assert engine.matched(request(tokens, name=f"r{tokens}"))[0] == offered, tokens


def test_states_are_stored_from_where_vllm_hands_them_over(make: Make) -> None:
    from maru_vllm.groups import Group

    groups = (Group(0, "g0", Want(), ("a",)), Group(1, "g1", Want(Rule.TRAILING_PAGES, 1), ("b",)))
    engine = make(groups, states=(1,))
    made = request(42)
    engine.matched(made)
    handed = {"r": [(1, 40, 16), (1, 41, 18), (1, 0, 20), (0, 42, 16)]}
    plan = engine.side.step(output({"r": 42}, {"r": (list(range(1, 12)), [0] * 10 + [77])}, states=handed))
    assert pages_of(plan.stores, 1) == {made.block_hashes[3]: 40}, (
        "no partial block, no null block, not the running state"
    )
    engine.put(plan.stores)
    again = request(42, name="second")
    assert engine.matched(again) == (16, True)
    engine.side.allocated(again, (list(range(50, 61)), [0] * 3 + [80, 81]), 16)
    [load] = engine.side.step(output()).loads
    assert list(pages_of([load], 1).values()) == [80]


# ---------------------------------------------------------------- holds, faults


def held_bytes(server: ServerProcess) -> int:
    session = Session(server.endpoint, name="test", timeout_s=60)
    try:
        return int(session.stats()["held_bytes"])
    finally:
        session.close()


@pytest.mark.parametrize("end", ["loaded", "aborted", "not needed"])
def test_what_was_found_is_held_until_it_is_not_needed(make: Make, server: ServerProcess, end: str) -> None:
    engine = make()
    engine.store_all(request(42, name="first"))
    engine.side.finished(request(42, name="first"), ([],))
    again = request(42, name="second")
    engine.matched(again)
    assert held_bytes(server) > 0
    if end == "loaded":
        engine.side.allocated(again, (list(range(20, 31)),), 40)
        engine.side.step(output())
        engine.side.transferred(["second"], [], set())
    elif end == "aborted":
        engine.side.finished(again, ([],))
    else:
        engine.side.allocated(again, ([],), 0)
    await_condition(
        lambda: held_bytes(server) == 0, "the hold is not let go", timeout_s=10
    )  # by itself it ends after 30


def test_no_hold_is_taken_where_none_is_wanted(make: Make, server: ServerProcess) -> None:
    engine = make(hold_s=0)
    engine.store_all(request(42, name="first"))
    engine.matched(request(42, name="second"))
    assert held_bytes(server) == 0


def test_a_fault_while_a_step_is_planned_costs_stores_and_nothing_else(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make()
    engine.store_all(request(42, name="first"))
    again = request(42, name="second")
    engine.matched(again)
    engine.side.allocated(again, (list(range(20, 31)),), 40)
    broken = output({"second": 2})
    broken.scheduled_new_reqs = None
    metadata = engine.side.step(broken)
    assert len(metadata.loads) == 1, "vLLM waits for it"
    assert set(metadata.fresh) >= set(range(20, 30))
    assert metadata.stores == []
    assert "nothing of this step is stored" in caplog.text


def test_workers_that_differ_are_refused(server: ServerProcess) -> None:
    from maru_core.errors import ConfigError
    from maru_vllm.metadata import Handshake

    engine = Engine(server.endpoint)
    try:
        told = [Handshake(namespace(layout=layout).record(), ["kv"], 64) for layout in ("NHD", "HND")]
        with pytest.raises(ConfigError, match="layout"):
            engine.side.open(told)
    finally:
        engine.close()


def test_a_lookup_is_one_message_however_often_vllm_asks(make: Make) -> None:
    engine = make()
    engine.store_all(request(42, name="first"))
    again = request(42, name="second")
    engine.side.arrived(again)
    engine.matched(again)
    asked = engine.side.meter.take()
    for _ in range(20):
        assert engine.matched(again) == (40, True)
    more = engine.side.meter.take()
    assert asked is not None
    assert more is None or not more.data.get("queried_pages")
