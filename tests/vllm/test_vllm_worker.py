"""The worker's side on a real server and pool: what is loaded, what is reported, and what is never stored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maru_core.protocol import ROOT
from maru_core.store import Store
from maru_core.store_config import StoreConfig
from support import ServerProcess, await_condition, hashes, impatient, namespace, running_server

torch = pytest.importorskip("torch")
pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base")
pytestmark = pytest.mark.vllm

BLOCKS = 16


class Side:
    """A worker with one layer of its own."""

    def __init__(self, endpoint: str, *, verify: Any = "generation", writer: bool = True, moments: Any = None) -> None:
        from maru_vllm.device import already
        from maru_vllm.groups import Placement
        from maru_vllm.layout import GroupLayout
        from maru_vllm.worker import WorkerSide

        self.cache = torch.randint(0, 255, (BLOCKS, 2, 4, 64), dtype=torch.uint8)
        config = StoreConfig(server=endpoint, timeout_ms=60_000, verify=verify)
        self.store = Store.open(config, namespace(), name="test")
        placement = Placement(stage=0, stages=1, shard=0, world=1, writer=writer)
        layouts = [GroupLayout(["a"], {"a": self.cache}, BLOCKS)]
        self.worker = WorkerSide(self.store, layouts, ["kv"], placement, moments or already)
        self._step = 0

    def run(self, **parts: Any) -> Any:
        """One step."""
        metadata = self.plan(**parts)
        self.worker.begin(metadata)
        self.worker.save(metadata)
        return metadata

    def plan(self, **parts: Any) -> Any:
        from maru_vllm.metadata import MaruMetadata

        self._step += 1
        return MaruMetadata(step=self._step, **parts)

    def received(self, request: str) -> Any:
        """All that is reported until a request has been received, which it is once."""
        from maru_vllm.worker import Done

        total = Done()

        def is_there() -> bool:
            done = self.worker.take_done(idle=True)
            assert not total.received & done.received
            total.received |= done.received
            total.failed |= done.failed
            total.bad_blocks |= done.bad_blocks
            return request in total.received

        await_condition(is_there, f"{request} is not received")
        return total

    def present(self, pages: bytes) -> list[bool]:
        return list(map(bool, self.store.present("kv", 0, pages)))


Make = Callable[..., Side]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with running_server(tmp_path, size="16M") as server:
        yield server


@pytest.fixture
def make(server: ServerProcess) -> Iterator[Make]:
    made: list[Side] = []

    def run(**options: Any) -> Side:
        made.append(Side(server.endpoint, **options))
        return made[-1]

    yield run
    for side in made:
        side.worker.close()


def transfer(request: str, pages: bytes, blocks: list[int], parent: bytes = ROOT, *, failed: bool = False) -> Any:
    from maru_vllm.metadata import PageRun, Transfer

    return Transfer(request, [PageRun(0, parent, pages, blocks)], failed)


class Gate:
    """Real puts of a store, each of which waits at the gate first."""

    def __init__(self, store: Store) -> None:
        self.open = threading.Event()
        self.arrived = threading.Semaphore(0)
        put = store.put

        def gated(*arguments: Any) -> Any:
            self.arrived.release()
            assert self.open.wait(30)
            return put(*arguments)

        store.put = gated  # type: ignore[method-assign]


def test_a_load_of_several_parts_waits_once_for_a_server_that_stays_away(
    make: Make, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its groups share what it may wait: a request is not held up by as many times that."""
    from maru_vllm import worker
    from maru_vllm.metadata import PageRun, Transfer

    side = make()
    monkeypatch.setattr(worker, "SERVER_WAIT_S", 0.2)
    wait, waited = worker.Patience.wait, []

    def counted(patience: Any) -> bool:
        waited.append(wait(patience))
        return waited[-1]

    monkeypatch.setattr(worker.Patience, "wait", counted)
    parts = [PageRun(0, ROOT, hashes(2, start), [start, start + 1]) for start in (0, 2, 4)]
    with impatient(side.store._session):
        server.kill()
        side.run(loads=[Transfer("q", parts, False)])
        done = side.received("q")
    assert done.failed == {"q"}
    assert done.bad_blocks == set(range(6))
    assert waited.count(False) == 3, "each part has asked"
    assert 1 <= waited.count(True) <= 0.2 / worker._LOOK_S


def test_one_stores_and_another_loads_into_other_blocks(make: Make) -> None:
    one, two = make(), make()
    pages = hashes(3)
    one.run(stores=[transfer("r", pages, [5, 6, 9])])
    await_condition(lambda: all(one.present(pages)), "nothing is stored")
    untouched = two.cache.clone()
    two.run(loads=[transfer("q", pages, [1, 0, 12])])
    done = two.received("q")
    assert not done.failed
    assert not done.bad_blocks
    assert torch.equal(two.cache[[1, 0, 12]], one.cache[[5, 6, 9]])
    others = [block for block in range(BLOCKS) if block not in (1, 0, 12)]
    assert torch.equal(two.cache[others], untouched[others])


def test_exactly_the_blocks_that_are_missing_are_reported(make: Make) -> None:
    one, two = make(), make()
    pages = hashes(4)
    one.run(stores=[transfer("r", pages[:64], [0, 1])])
    await_condition(lambda: one.present(pages)[:2] == [True, True], "nothing is stored")
    two.run(loads=[transfer("q", pages, [4, 5, 6, 7])])
    done = two.received("q")
    assert done.failed == {"q"}
    assert done.bad_blocks == {6, 7}


def test_a_load_that_was_not_planned_is_reported_with_its_blocks(make: Make) -> None:
    side = make()
    side.run(loads=[transfer("q", b"", [3, 4], failed=True)])
    assert side.received("q").bad_blocks == {3, 4}


def test_a_load_while_the_server_is_away_fails_and_ends(make: Make, server: ServerProcess) -> None:
    side = make()
    with impatient(side.store._session):
        server.kill()
        side.run(loads=[transfer("q", hashes(2), [3, 4])])
        assert side.received("q").bad_blocks == {3, 4}


@pytest.mark.parametrize("noticed", [False, True], ids=["not_noticed", "noticed"])
def test_a_load_goes_on_with_a_server_that_is_there_again(make: Make, server: ServerProcess, noticed: bool) -> None:
    """The scheduler, whose session is its own, has found it before this process did."""
    side, pages = make(), hashes(2)
    side.run(stores=[transfer("r", pages, [1, 2])])
    await_condition(lambda: all(side.present(pages)), "nothing is stored")
    server.kill()
    if noticed:
        with impatient(side.store._session):
            assert not any(side.present(pages))
        assert not side.store.connected
    server.start()
    side.run(loads=[transfer("q", pages, [3, 4])])
    done = side.received("q")
    assert done.failed == set()
    assert done.bad_blocks == set()


def test_hooks_of_one_step_begin_its_work_once(make: Make) -> None:
    side = make()
    pages = hashes(1)
    side.run(stores=[transfer("r", pages, [5])])
    await_condition(lambda: all(side.present(pages)), "nothing is stored")
    metadata = side.plan(loads=[transfer("q", pages, [1])])
    for _ in range(3):
        side.worker.begin(metadata)
    side.received("q")
    assert not side.worker.take_done(idle=True).received


def test_a_rank_that_holds_a_replica_stores_nothing(make: Make) -> None:
    replica, writer = make(writer=False), make()
    first, second = hashes(1, 1), hashes(1, 2)
    replica.run(stores=[transfer("r", first, [0])])
    writer.run(stores=[transfer("r", second, [0])])
    replica.worker.close()  # waits for stores under way
    await_condition(lambda: all(writer.present(second)), "nothing is stored")
    assert writer.present(first) == [False]


def test_a_block_that_is_being_copied_is_not_given_out_before(make: Make) -> None:
    """The step that overwrites it waits; what is stored are the bytes of before."""
    side, other = make(), make()
    pages = hashes(1)
    gate = Gate(side.store)
    side.run(stores=[transfer("r", pages, [5])])
    assert gate.arrived.acquire(timeout=180)
    before = side.cache[5].clone()
    begun = threading.Event()

    def step() -> None:
        side.worker.begin(side.plan(fresh=[9, 5]))
        side.cache[5] = 0
        begun.set()

    thread = threading.Thread(target=step)
    thread.start()
    assert not begun.wait(0.2), "the step did not wait"
    gate.open.set()
    thread.join(30)
    assert begun.is_set()
    await_condition(lambda: all(side.present(pages)), "nothing is stored")
    other.run(loads=[transfer("q", pages, [0])])
    assert not other.received("q").failed
    assert torch.equal(other.cache[0], before)


def test_a_store_that_has_not_begun_gives_way(make: Make) -> None:
    """Its block is overwritten, so it must not be stored at all; others are not touched."""
    side = make()
    first, second, third = hashes(1, 1), hashes(1, 2), hashes(1, 3)
    gate = Gate(side.store)
    side.run(stores=[transfer("r", first, [5]), transfer("r", second, [6]), transfer("r", third, [7])])
    assert gate.arrived.acquire(timeout=180)
    side.worker.begin(side.plan(fresh=[6]))
    assert side.worker.dropped_stores == 1
    side.cache[6] = 0
    gate.open.set()
    await_condition(lambda: side.present(first + third) == [True, True], "the others are not stored")
    assert side.present(second) == [False]


def test_a_step_that_gives_out_other_blocks_does_not_wait(make: Make) -> None:
    side = make()
    gate = Gate(side.store)
    side.run(stores=[transfer("r", hashes(1), [5])])
    assert gate.arrived.acquire(timeout=180)
    side.run(fresh=[4, 6])  # returns, although the gate is closed
    assert side.worker.dropped_stores == 0
    gate.open.set()


def test_last_blocks_of_a_request_are_read_before_the_step_that_gives_them_out(make: Make) -> None:
    side, other = make(), make()
    pages = hashes(1)
    before = side.cache[5].clone()
    side.worker.begin(side.plan(last_stores=[transfer("r", pages, [5])], fresh=[5]))
    side.cache[5] = 0
    if side.worker.dropped_stores:
        return  # given up, which is allowed
    await_condition(lambda: all(side.present(pages)), "nothing is stored")
    other.run(loads=[transfer("q", pages, [0])])
    assert not other.received("q").failed
    assert torch.equal(other.cache[0], before)


def test_a_load_waits_for_what_is_still_read_from_its_blocks(make: Make) -> None:
    side = make()
    pages, others = hashes(1, 1), hashes(1, 2)
    side.run(stores=[transfer("r", others, [1])])
    await_condition(lambda: all(side.present(others)), "nothing is stored")
    gate = Gate(side.store)
    side.run(stores=[transfer("r", pages, [5])])
    assert gate.arrived.acquire(timeout=180)
    before = side.cache[5].clone()
    thread = threading.Thread(target=lambda: side.run(loads=[transfer("q", others, [5])], fresh=[5]))
    thread.start()
    assert not side.worker.take_done(idle=True).received
    assert torch.equal(side.cache[5], before)
    gate.open.set()
    thread.join(30)
    assert not side.received("q").failed
    assert torch.equal(side.cache[5], side.cache[1])


def test_damaged_pages_are_removed_where_checksums_are_on(make: Make, server: ServerProcess) -> None:
    """Otherwise each request with them in its chain would fail again."""
    side = make(verify="checksum")
    pages = hashes(2)
    side.run(stores=[transfer("r", pages, [5, 6])])
    await_condition(lambda: all(side.present(pages)), "nothing is stored")
    stored = side.cache[6].clone().numpy().tobytes()
    pool = np.memmap("/dev/shm/" + server.pool.removeprefix("shm://"), np.uint8, "r+")
    at = bytes(pool).find(stored)
    assert at > 0
    pool[at] ^= 1
    side.run(loads=[transfer("q", pages, [1, 2])])
    assert side.received("q").bad_blocks == {2}
    assert side.present(pages) == [True, False]


class Queue:
    """What a GPU has been given and has not run yet, as far as a worker sees it: moments that pass when they are told to."""

    def __init__(self) -> None:
        self.taken: list[threading.Event] = []
        self.broken = False

    def moment(self) -> Callable[[], None]:
        passed = threading.Event()
        self.taken.append(passed)

        def wait() -> None:
            assert passed.wait(30)
            if self.broken:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

        return wait


def test_a_store_waits_until_its_step_has_run(make: Make) -> None:
    queue = Queue()
    side, other = make(moments=queue.moment), make()
    pages, others = hashes(1, 1), hashes(1, 2)
    gate = Gate(side.store)
    gate.open.set()
    side.run(stores=[transfer("r", pages, [5]), transfer("r", others, [6])])
    (step,) = queue.taken
    assert not gate.arrived.acquire(timeout=0.2), "a store has begun"
    side.cache[5] = 7  # the device runs the step that fills the blocks
    side.cache[6] = 8
    step.set()
    await_condition(lambda: all(side.present(pages + others)), "nothing is stored")
    other.run(loads=[transfer("q", pages + others, [0, 1])])
    assert not other.received("q").failed
    assert torch.equal(other.cache[:2], side.cache[5:7])


def test_the_last_blocks_of_a_request_wait_for_the_step_before(make: Make) -> None:
    """And the step that gives them out waits for their copy."""
    queue = Queue()
    side, other = make(moments=queue.moment), make()
    pages = hashes(1)
    begun = threading.Event()

    def step() -> None:
        side.worker.begin(side.plan(last_stores=[transfer("r", pages, [5])], fresh=[5]))
        begun.set()

    thread = threading.Thread(target=step)
    thread.start()
    await_condition(lambda: len(queue.taken) == 1, "no moment is taken")
    side.cache[5] = 7
    assert not begun.wait(0.2), "the step did not wait"
    queue.taken[0].set()
    thread.join(30)
    assert begun.is_set()
    if side.worker.dropped_stores:
        return  # given up before it began, which is allowed
    await_condition(lambda: all(side.present(pages)), "nothing is stored")
    other.run(loads=[transfer("q", pages, [0])])
    assert not other.received("q").failed
    assert torch.equal(other.cache[0], side.cache[5])


def test_a_load_waits_for_what_was_queued_before_it(make: Make) -> None:
    """What still runs may write into a block that its request no longer has."""
    queue = Queue()
    side, other = make(moments=queue.moment), make()
    pages = hashes(1)
    other.run(stores=[transfer("r", pages, [3])])
    await_condition(lambda: all(other.present(pages)), "nothing is stored")
    side.run(loads=[transfer("q", pages, [5])])
    (before,) = queue.taken
    side.cache[5] = 7
    assert not side.worker.take_done(idle=True).received
    assert bool((side.cache[5] == 7).all())
    before.set()
    assert not side.received("q").failed
    assert torch.equal(side.cache[5], other.cache[3])


def test_a_device_that_fails_stores_nothing_and_loads_nothing(make: Make) -> None:
    queue = Queue()
    queue.broken = True
    side, other = make(moments=queue.moment), make()
    pages, stored = hashes(1, 1), hashes(1, 2)
    other.run(stores=[transfer("r", stored, [3])])
    await_condition(lambda: all(other.present(stored)), "nothing is stored")
    side.run(stores=[transfer("r", pages, [5])])
    side.run(loads=[transfer("q", stored, [6])])
    for moment in queue.taken:
        moment.set()
    done = side.received("q")
    assert (done.failed, done.bad_blocks) == ({"q"}, {6})
    side.worker.close()  # waits for stores under way
    assert other.present(pages) == [False]


def test_a_step_without_work_takes_no_moment(make: Make) -> None:
    queue = Queue()
    side = make(moments=queue.moment)
    side.run()
    assert not queue.taken
