"""One server with several pools, as stores see it: real processes, real memory."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from maru_core import lives
from maru_core import protocol as p
from maru_core.errors import PoolError, ServerUnavailableError
from maru_core.locations import answers, in_one_pool
from maru_core.mover import CxlMover
from maru_core.protocol import HASH_BYTES, NO_SLOT, POOL_SHIFT, ROOT, Hold, Want
from maru_core.session import Session
from maru_core.store import Store, StoreConfig
from support import Pages, ServerProcess, await_condition, hashes, namespace, running_server

SIZES = (12_000, 12_000)
#: No call to a server that is there takes as long on a slow machine.
PATIENCE_MS = 60_000
Open = Callable[..., Store]


@pytest.fixture
def pools(tmp_path: Path) -> list[str]:
    return [f"file://{tmp_path}/a", f"file://{tmp_path}/b"]


@pytest.fixture
def server(tmp_path: Path, pools: list[str]) -> Iterator[ServerProcess]:
    with running_server(tmp_path, "--pool", pools[1], "--quarantine", "1", pool=pools[0]) as process:
        yield process


@pytest.fixture
def open_store(server: ServerProcess) -> Iterator[Open]:
    opened: list[Store] = []

    def make(pool: str | None = None, mover: Any = None, **config: Any) -> Store:
        settings = StoreConfig(server=server.endpoint, timeout_ms=PATIENCE_MS, pool=pool, **config)
        opened.append(Store.open(settings, namespace(), name=f"test {len(opened)}", mover=mover))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


#: A client that reaches the second pool, has slots of it reserved, and stays.
WRITER = f"""
import sys, signal
from maru_core.protocol import ROOT, Way
from maru_core.session import Session
session = Session(sys.argv[1], name="dies", timeout_s=60)
number = session.open_namespace({namespace().record()!r})
session.reaches([Way("none", ""), Way("cxl", "")])
session.reserve(number, "kv", 0, 1, ROOT, {hashes(9)!r}, 24_000)
print("reserved", flush=True)
signal.pause()
"""


def put(store: Store, chain: bytes, pages: Pages, parent: bytes = ROOT) -> np.ndarray:
    return store.put("kv", 0, 1, parent, chain, pages.fragments)


def get(store: Store, chain: bytes) -> tuple[np.ndarray, Pages]:
    pages = Pages(len(chain) // HASH_BYTES, SIZES)
    return store.get("kv", 0, chain, pages.fragments), pages


def pools_of(store: Store, chain: bytes) -> set[int]:
    """Where the pages of a chain that are there lie."""
    slots = store._transfers.locate(store._lives.current(), "kv", 0, chain).slots
    return {int(slot) >> POOL_SHIFT for slot in slots if slot != NO_SLOT}


@contextlib.contextmanager
def looking(server: ServerProcess) -> Iterator[Session]:
    session = Session(server.endpoint, name="looks", timeout_s=PATIENCE_MS / 1000)
    try:
        yield session
    finally:
        session.close()


def test_pages_go_to_both_pools_and_come_back(server: ServerProcess, open_store: Open) -> None:
    a, b = open_store(), open_store()
    used: set[int] = set()
    for seed in range(8):
        chain, pages = hashes(40, seed), Pages(40, SIZES, seed=seed)
        assert put(a, chain, pages).all()
        where = pools_of(b, chain)
        assert len(where) == 1, "a chain is in one pool"
        used |= where
        assert b.prefix(["kv"], 0, chain + hashes(3, seed=99)) == 40
        loaded, copy = get(b, chain)
        assert loaded.all()
        assert copy.same(pages).all()
    assert used == {0, 1}
    with looking(server) as session:
        assert [row["pages"] > 0 for row in session.inspect("pools")] == [True, True]


def test_each_store_says_what_it_reaches(
    server: ServerProcess, open_store: Open, pools: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "maru.store")
    both, first = open_store(), open_store(pool=pools[0])
    assert [reach is not None for reach in both._lives.current().pools.pools] == [True, True]
    assert [reach is not None for reach in first._lives.current().pools.pools] == [True, False]
    with looking(server) as session:
        rows = {row["name"]: row["reaches"] for row in session.inspect("sessions")}
    assert [told["way"] for told in rows["test 0"]] == ["cxl", "cxl"]
    assert [told["way"] for told in rows["test 1"]] == ["cxl", "none"]
    assert "the server's is" in rows["test 1"][1]["why"]
    lines = [record.getMessage() for record in caplog.records]
    assert sum(" is reached by cxl: mapped as " in line for line in lines) == 3
    assert sum(" is not reached, and nothing of it is used: " in line for line in lines) == 1


def test_clients_of_different_reach_meet_where_both_do(open_store: Open, pools: list[str]) -> None:
    both, first, second = open_store(), open_store(pool=pools[0]), open_store(pool=pools[1])
    for seed in range(4):
        chain, pages = hashes(10, seed), Pages(10, SIZES, seed=seed)
        assert put(both, chain, pages).all()
        (where,) = pools_of(both, chain)
        near, far = (first, second) if where == 0 else (second, first)
        loaded, copy = get(near, chain)
        assert loaded.all()
        assert copy.same(pages).all()
        assert far.prefix(["kv"], 0, chain) == 0
        assert not get(far, chain)[0].any()
        # What it computes itself it stores where it can, and the others still read theirs.
        assert put(far, chain, pages).all()
        assert pools_of(far, chain) == {1 - where}
        assert get(near, chain)[0].all()


def test_a_chain_goes_on_where_it_began(open_store: Open, pools: list[str]) -> None:
    both, second = open_store(), open_store(pool=pools[1])
    for seed in range(3):  # the second pool is the fuller one
        assert put(second, hashes(40, 50 + seed), Pages(40, SIZES, seed=seed)).all()
    chain, pages = hashes(20), Pages(20, SIZES, seed=1)
    assert put(second, chain[: 10 * HASH_BYTES], Pages(10, SIZES, seed=2)).all()
    assert put(both, chain[10 * HASH_BYTES :], Pages(10, SIZES, seed=3), chain[9 * HASH_BYTES : 10 * HASH_BYTES]).all()
    assert pools_of(both, chain) == {1}
    assert both.prefix(["kv"], 0, chain) == 20
    assert put(both, chain, pages).all()


def test_ranks_of_a_request_are_told_the_same(open_store: Open, pools: list[str]) -> None:
    first, second = open_store(pool=pools[0]), open_store(pool=pools[1])
    ranks = [open_store(), open_store()]
    chain = hashes(12)
    assert put(first, chain[: 8 * HASH_BYTES], Pages(8, SIZES, seed=1)).all()
    assert put(second, chain[: 6 * HASH_BYTES], Pages(6, SIZES, seed=1)).all()
    hold = Hold(b"request", 2, 30.0)
    assert ranks[0].find({"kv": Want()}, 0, chain, hold=hold).pages == 8
    assert put(second, chain[6 * HASH_BYTES :], Pages(6, SIZES, seed=1), chain[5 * HASH_BYTES : 6 * HASH_BYTES]).all()
    assert ranks[1].find({"kv": Want()}, 0, chain, hold=hold).pages == 8
    for rank in ranks:
        assert get(rank, chain[: 8 * HASH_BYTES])[0].all()
        assert rank.unhold(b"request")


def test_everything_is_found_after_the_server_was_killed(server: ServerProcess, open_store: Open) -> None:
    a = open_store()
    stored = {}
    for seed in range(6):
        chain, pages = hashes(20, seed), Pages(20, SIZES, seed=seed)
        assert put(a, chain, pages).all()
        stored[chain] = pages
    before = a._session.epoch
    server.kill()
    server.start()
    await_condition(lambda: a.prefix(["kv"], 0, next(iter(stored))) == 20, "the store finds the server")
    assert a._session.epoch > before
    for chain, pages in stored.items():
        loaded, copy = get(a, chain)
        assert loaded.all()
        assert copy.same(pages).all()
    assert {one for chain in stored for one in pools_of(a, chain)} == {0, 1}


def test_a_pool_that_was_not_reached_is_tried_in_the_next_life(
    server: ServerProcess, open_store: Open, tmp_path: Path
) -> None:
    (tmp_path / "b").rename(tmp_path / "away")
    store = open_store()
    assert [reach is None for reach in store._lives.current().pools.pools] == [False, True]
    (tmp_path / "away").rename(tmp_path / "b")
    server.kill()
    server.start()
    await_condition(lambda: store.present("kv", 0, hashes(1)) is not None and store._session.connected, "it is back")
    await_condition(lambda: all(store._lives.current().pools.pools), "both are reached")


def test_a_pool_that_comes_later_is_used_from_then_on(
    open_store: Open, server: ServerProcess, tmp_path: Path, pools: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lives, "REACH_AGAIN_S", 0.1)
    later = tmp_path / "later"
    one, both = open_store(pool=f"{pools[0]},file://{later}"), open_store()
    chains = [hashes(40, seed) for seed in range(8)]
    for seed, chain in enumerate(chains):
        assert put(both, chain, Pages(40, SIZES, seed=seed)).all()
    there = {pool: [chain for chain in chains if pools_of(both, chain) == {pool}] for pool in (0, 1)}
    assert there[0]
    assert there[1]
    life = one._lives.current()
    assert [reach is not None for reach in life.pools.pools] == [True, False]
    assert {one.prefix(["kv"], 0, chain) for chain in there[1]} == {0}
    mover = life.pools.first.mover
    later.hardlink_to(tmp_path / "b")
    await_condition(lambda: all(one._lives.current().pools.pools), "the second pool is reached")
    assert one._lives.current().epoch == life.epoch, "the life goes on"
    assert one._lives.current().pools.first.mover is mover, "what was reached is not made anew"
    await_condition(lambda: one.prefix(["kv"], 0, there[1][0]) == 40, "the server knows of it")
    for chain in chains:
        loaded, pages = get(one, chain)
        assert loaded.all()
        assert pages.same(Pages(40, SIZES, seed=chains.index(chain))).all()
    with looking(server) as session:
        [told] = [row["reaches"] for row in session.inspect("sessions") if row["name"] == "test 0"]
    assert [way["way"] for way in told] == ["cxl", "cxl"]


def test_a_pool_of_which_the_server_was_not_told_is_not_used_and_tried_again(
    open_store: Open, tmp_path: Path, pools: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lives, "REACH_AGAIN_S", 0.1)
    later = tmp_path / "later"
    one = open_store(pool=f"{pools[0]},file://{later}")
    life, tell, failed = one._lives.current(), one._lives._tell, []

    def not_yet(*arguments: Any) -> None:
        if not failed:
            failed.append(one._lives.life)
            raise ServerUnavailableError("no answer")
        tell(*arguments)

    monkeypatch.setattr(one._lives, "_tell", not_yet)
    later.hardlink_to(tmp_path / "b")
    await_condition(lambda: bool(failed) and one._lives.life is life, "it is as before")
    assert all(failed[0].pools.pools)
    assert one._lives._retired == [failed[0].pools.pools[1].mover], "to be closed when nobody can be using it"
    await_condition(lambda: all(one._lives.current().pools.pools), "and then it is used")


def test_pools_that_stay_away_are_tried_again_without_a_word(
    open_store: Open, pools: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lives, "REACH_AGAIN_S", 0.1)
    one = open_store(pool=pools[0])
    tried: list[int] = []
    reach = one._reaching.reach

    def counted(*arguments: Any) -> Any:
        tried.append(1)
        return reach(*arguments)

    monkeypatch.setattr(one._reaching, "reach", counted)
    life = one._lives.current()
    caplog.clear()
    await_condition(lambda: len(tried) >= 2, "it is tried twice")
    assert one._lives.current() is life
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_standby_takes_both(server: ServerProcess, open_store: Open, tmp_path: Path, pools: list[str]) -> None:
    store = open_store()
    for seed in range(4):
        assert put(store, hashes(20, seed), Pages(20, SIZES, seed=seed)).all()
    # Named the other way round: they do not wait for each other.
    standby = ServerProcess(
        tmp_path, "--pool", pools[0], "--standby", "--quarantine", "1", pool=pools[1], bind=server.endpoint
    )
    standby.begin()
    try:
        await_condition(lambda: "standby: " in standby.log.read_text(), "the standby waits")
        server.kill()
        standby.await_ready()
        await_condition(lambda: store.prefix(["kv"], 0, hashes(20, 0)) == 20, "the store finds the standby")
        for seed in range(4):
            loaded, copy = get(store, hashes(20, seed))
            assert loaded.all()
            assert copy.same(Pages(20, SIZES, seed=seed)).all()
    finally:
        standby.remove()


def test_a_pool_that_is_served_is_not_served_twice(server: ServerProcess, tmp_path: Path, pools: list[str]) -> None:
    second = ServerProcess(tmp_path, "--pool", pools[1], pool=f"file://{tmp_path}/another")
    second.begin()
    try:
        assert second.process is not None
        assert second.process.wait(180) == 2
        text = second.log.read_text()
        assert f"{tmp_path}/b" in text
        assert "Traceback" not in text
        second.process = None
    finally:
        second.remove()


def test_a_copy_of_a_pool_is_not_served_beside_it(server: ServerProcess, tmp_path: Path, pools: list[str]) -> None:
    server.stop()
    (tmp_path / "copy").write_bytes((tmp_path / "a").read_bytes())
    second = ServerProcess(tmp_path, "--pool", f"file://{tmp_path}/copy", pool=pools[0])
    second.begin()
    try:
        assert second.process is not None
        assert second.process.wait(180) == 2
        assert "have the same UUID" in second.log.read_text()
        second.process = None
    finally:
        second.remove()


def test_a_server_that_names_a_pool_twice_is_not_believed(open_store: Open) -> None:
    store = open_store()
    welcome = store._session.connect()
    twice = msgspec.structs.replace(welcome, pools=[welcome.pools[0], welcome.pools[0]])
    with pytest.raises(PoolError, match="two pools by one UUID"):
        store._reaching.reach(twice, store._session.epoch, None)


def test_a_pool_that_is_taken_away_ends_the_server(server: ServerProcess, open_store: Open, tmp_path: Path) -> None:
    from maru_core.pool.format import BLOCK_BYTES

    open_store()
    with (tmp_path / "b").open("r+b") as file:  # as another server would that takes it up
        file.seek(BLOCK_BYTES)
        word = int.from_bytes(file.read(8), "little")
        file.seek(BLOCK_BYTES)
        file.write((word + 1).to_bytes(8, "little"))
    assert server.process is not None
    assert server.process.wait(180) == 3
    server.process = None
    assert f"{tmp_path}/b" in server.log.read_text()
    assert "another server has taken the pool up" in server.log.read_text()


def test_changes_are_of_all_pools(open_store: Open, pools: list[str]) -> None:
    both, first, second = open_store(), open_store(pool=pools[0]), open_store(pool=pools[1])
    seen = {both.changes()}
    for store in (first, second):
        assert put(store, hashes(2), Pages(2, SIZES, seed=1)).all()
        now = both.changes()
        assert now is not None
        assert now not in seen
        seen.add(now)
    assert len(first.changes() or ()) == 2
    assert len(both.changes() or ()) == 4


def test_a_reader_that_copies_itself_has_the_mover_of_the_pool(open_store: Open, pools: list[str]) -> None:
    made: list[CxlMover] = []

    def mover(memory: Any) -> CxlMover:
        made.append(CxlMover(memory, 1))
        return made[-1]

    first, second, reader = open_store(pool=pools[0]), open_store(pool=pools[1]), open_store(mover=mover)
    assert len(made) == 2
    for number, store in enumerate((first, second)):
        chain, pages = hashes(5, number), Pages(5, SIZES, seed=number)
        assert put(store, chain, pages).all()
        reading = reader.read("kv", 0, chain, sum(SIZES))
        assert reading is not None
        assert reading.mover is made[number]
        assert reading.memory is made[number].memory
        copy = Pages(5, SIZES)
        reading.mover.load(reading.offsets, copy.fragments)
        assert reading.finish()
        assert copy.same(pages).all()
    # Parts of a question that are answered from two pools have no one mover.
    assert reader.read("kv", 0, hashes(5, 0) + hashes(5, 1), sum(SIZES)) is None


def test_checksums_are_of_the_right_pool(open_store: Open, pools: list[str]) -> None:
    stores = [open_store(pool=pool, verify="checksum") for pool in pools]
    reader = open_store(verify="checksum")
    for number, store in enumerate(stores):
        chain, pages = hashes(6, number), Pages(6, SIZES, seed=number)
        assert put(store, chain, pages).all()
        loaded, copy = get(reader, chain)
        assert loaded.all()
        assert copy.same(pages).all()
    assert reader.metrics.miss_checksum == 0


def test_no_pool_that_can_be_reached_is_an_error(server: ServerProcess, tmp_path: Path) -> None:
    with pytest.raises(PoolError):
        Store.open(
            StoreConfig(server=server.endpoint, timeout_ms=PATIENCE_MS, pool=f"file://{tmp_path}/nothing"), namespace(),
            name="nothing",
        )  # fmt: skip


def test_a_writer_killed_in_one_pool_leaves_nothing(server: ServerProcess, open_store: Open, pools: list[str]) -> None:
    store = open_store()
    child = subprocess.Popen([sys.executable, "-c", WRITER, server.endpoint], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"reserved\n"
    assert store._session.stats()["slots_reserved"] == 9
    child.kill()
    child.wait()
    child.stdout.close()
    await_condition(lambda: store._session.stats()["sessions"] == 1, "the server sees that it is gone")
    stats = store._session.stats()
    assert (stats["slots_reserved"], stats["slots_quarantined"]) == (0, 0)


# ---------------------------------------------------------------- answers that cannot be


def wire(*slots: int) -> bytes:
    return np.array(slots, "<u4").tobytes()


@pytest.mark.parametrize(
    ("slots", "good"),
    [
        (wire(), True),
        (wire(NO_SLOT, NO_SLOT), True),
        (wire(1, NO_SLOT, 2), True),
        (wire(1 << POOL_SHIFT, (1 << POOL_SHIFT) + 5), True),
        (wire(1, 1 << POOL_SHIFT), False),
        (wire(2 << POOL_SHIFT), False),
        (wire(0xFFFFFFFE), False),
    ],
)
def test_an_answer_is_of_one_pool_of_the_servers(slots: bytes, good: bool) -> None:
    count = len(slots) // 4
    column = bytes(8 * count)
    request = p.Match(1, 1, 1, ["kv"], 0, hashes(count))
    reply = p.Located(1, 1, count, slots, column, column, column, column, covered=[count])
    assert in_one_pool(slots, 2) is good
    assert answers(request, reply, 2) is good
    assert answers(request, reply), "with one pool all bits are the slot's"


def test_slots_of_a_pool_that_is_not_reached_are_not_written_to(
    open_store: Open, pools: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_store(pool=pools[0])
    reserve = Session.reserve

    def elsewhere(self: Session, *args: Any, **named: Any) -> p.Reserved:
        reply = reserve(self, *args, **named)
        slots = (np.frombuffer(reply.slots, "<u4") | np.uint32(1 << POOL_SHIFT)).astype("<u4")
        return p.Reserved(reply.rid, reply.incarnation, reply.status, slots.tobytes(), reply.offsets, reply.generations)

    monkeypatch.setattr(Session, "reserve", elsewhere)
    moved: list[Any] = []
    monkeypatch.setattr(CxlMover, "store", lambda self, *args: moved.append(args))
    assert not put(first, hashes(3), Pages(3, SIZES, seed=1)).any()
    assert moved == []
