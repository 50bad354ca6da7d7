"""The store over a real server process and real shared memory: what is True is stored, what is loaded is right."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from maru_core import finding, transfers
from maru_core.errors import ConfigError, PoolError, PoolTooSmallError
from maru_core.namespace import Namespace
from maru_core.pool import PoolMemory, parse_pool_uri
from maru_core.protocol import HASH_BYTES, ROOT, Committed, Hold, MissReason, Rule, Want
from maru_core.store import Store, StoreConfig
from support import Pages, ServerProcess, await_condition, hashes, impatient, namespace, running_server

SIZES = (12_000, 12_000)
#: No call to a server that is there takes as long on a slow machine.
PATIENCE_MS = 60_000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with running_server(tmp_path, "--quarantine", "1") as process:
        yield process


@pytest.fixture
def open_store(server: ServerProcess) -> Iterator[object]:
    opened: list[Store] = []

    def make(space: Namespace | None = None, **config: object) -> Store:
        named = {"server": server.endpoint, "timeout_ms": PATIENCE_MS, **config}
        opened.append(Store.open(StoreConfig(**named), space or namespace(), name=f"test {len(opened)}"))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


def put(store: Store, chain: bytes, pages: Pages, parent: bytes = ROOT) -> np.ndarray:
    return store.put("kv", 0, 1, parent, chain, pages.fragments)


def get(store: Store, chain: bytes, sizes: tuple[int, ...] = SIZES) -> tuple[np.ndarray, Pages]:
    pages = Pages(len(chain) // HASH_BYTES, sizes)
    return store.get("kv", 0, chain, pages.fragments), pages


def test_what_one_store_puts_another_gets(open_store) -> None:
    a, b = open_store(), open_store()
    chain, pages = hashes(40), Pages(40, SIZES, seed=1)
    assert b.prefix(["kv"], 0, chain) == 0
    assert put(a, chain, pages).all()
    assert b.prefix(["kv"], 0, chain + hashes(3, seed=9)) == 40
    loaded, copy = get(b, chain)
    assert loaded.all()
    assert copy.same(pages).all()
    assert b.metrics.loaded_bytes == 40 * sum(SIZES)
    assert a.metrics.stored_pages == 40


def test_a_prefix_says_how_far_and_why_not_further_and_remembers_no_more(
    open_store, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = open_store(), open_store()
    chain, pages = hashes(8), Pages(8, SIZES, seed=1)
    assert a.put("kv", 0, 1, ROOT, chain[: 5 * HASH_BYTES], pages.fragments.select(slice(0, 5))).all()
    assert b.prefix(["kv"], 0, chain) == 5
    assert b.prefix(["never"], 0, chain) == 0
    metrics = b.metrics
    assert (metrics.queried_pages, metrics.hit_pages) == (16, 5)
    assert metrics.lookup_not_stored + metrics.lookup_incomplete == 3 + 8
    found = b.find({"kv": Want()}, 0, chain)
    assert (found.pages, found.ends.tolist(), found.covered) == (5, [1, 2, 3, 4, 5], {"kv": 5})
    assert (found.why, found.held_s) == (MissReason.NOT_STORED, 0.0)
    assert b.find({"kv": Want()}, 0, chain[: 5 * HASH_BYTES]).why == MissReason.NONE
    # With a hold, or with another component, every detail is asked for; the answer is the same.
    assert b.find({"kv": Want()}, 0, chain, hold=Hold(b"request", 1, 5.0)).pages == 5
    assert b.find({"kv": Want(), "never": Want()}, 0, chain).covered == {"kv": 5, "never": 0}
    # The rest is stored meanwhile: what was found is loaded without asking, and what was not is asked for.
    assert put(a, chain, pages).all()
    asked = []
    match = b._session.match
    monkeypatch.setattr(b._session, "match", lambda *args, **named: asked.append(args) or match(*args, **named))
    loaded, copy = get(b, chain[: 5 * HASH_BYTES])
    assert loaded.all()
    assert copy.same(pages).all()
    assert not asked
    loaded, copy = get(b, chain[4 * HASH_BYTES :])
    assert loaded.all()
    assert [copy.page(at) for at in range(4)] == [pages.page(at) for at in range(4, 8)]
    assert len(asked) == 1


def test_putting_again_copies_nothing(open_store) -> None:
    a, b = open_store(), open_store()
    chain, pages = hashes(8), Pages(8, SIZES, seed=1)
    assert put(a, chain, pages).all()
    assert put(b, chain, pages).all()
    assert b.metrics.stored_pages == 0
    assert b.metrics.existing_pages == 8


@pytest.mark.parametrize("known", [1, 5, 7])
def test_a_chain_of_which_the_head_is_there_is_stored_from_there_on(open_store, known: int) -> None:
    a, b = open_store(), open_store()
    chain, pages = hashes(8), Pages(8, SIZES, seed=1)
    head = chain[: known * HASH_BYTES]
    assert a.put("kv", 0, 1, ROOT, head, pages.fragments.select(slice(0, known))).all()
    assert put(b, chain, pages).all()
    loaded, copy = get(a, chain)
    assert loaded.all()
    assert copy.same(pages).all()
    assert b.metrics.existing_pages == known
    assert b.metrics.stored_pages == 8 - known
    assert b.metrics.stored_bytes == (8 - known) * sum(SIZES)


@pytest.mark.parametrize("known", [0, 2])
def test_only_what_the_commit_acknowledges_is_stored(open_store, monkeypatch: pytest.MonkeyPatch, known: int) -> None:
    a, b = open_store(), open_store()
    chain, pages = hashes(6), Pages(6, SIZES, seed=1)
    if known:
        assert a.put("kv", 0, 1, ROOT, chain[: known * HASH_BYTES], pages.fragments.select(slice(0, known))).all()
    commit = b._session.commit

    def some(*arguments: object, **named: object) -> Committed:
        answer = commit(*arguments, **named)
        assert answer.status == bytes(6 - known)
        return msgspec.structs.replace(answer, status=bytes([1, 0, 0, 1, 0, 0])[: 6 - known])

    monkeypatch.setattr(b._session, "commit", some)
    assert put(b, chain, pages).tolist() == [True] * known + [False, True, True, False, True, True][: 6 - known]
    assert b.metrics.stored_pages == 4 - known
    assert b.metrics.refused_lost == 2


def test_another_layout_of_fragments_is_the_same_object(open_store) -> None:
    a, b = open_store(), open_store()
    chain, pages = hashes(5), Pages(5, SIZES, seed=3)
    assert put(a, chain, pages).all()
    loaded, copy = get(b, chain, sizes=(24_000,))
    assert loaded.all()
    assert [copy.page(i) for i in range(5)] == [pages.page(i) for i in range(5)]


def test_another_length_is_a_miss(open_store) -> None:
    a, b = open_store(), open_store()
    chain = hashes(4)
    assert put(a, chain, Pages(4, SIZES, seed=1)).all()
    for other in ((12_000, 11_999), (12_000, 12_001), (12_000,)):
        loaded, _ = get(b, chain, sizes=other)
        assert not loaded.any()
    assert b.metrics.miss_length == 12


def test_another_namespace_is_a_miss(open_store) -> None:
    a, b = open_store(), open_store(namespace(kv_dtype="fp8_e5m2"))
    chain = hashes(4)
    assert put(a, chain, Pages(4, SIZES, seed=1)).all()
    assert b.prefix(["kv"], 0, chain) == 0
    assert not get(b, chain)[0].any()
    assert b.metrics.miss_not_stored == 4


def test_pages_in_the_middle_may_be_missing(open_store) -> None:
    a, b = open_store(), open_store()
    chain, pages = hashes(6), Pages(6, SIZES, seed=1)
    assert put(a, chain, pages).all()
    gap = chain[:64] + hashes(1, seed=5) + chain[96:]
    loaded, copy = get(b, gap)
    assert loaded.tolist() == [True, True, False, True, True, True]
    assert copy.same(pages).tolist() == [True, True, False, True, True, True]
    assert b.present("kv", 0, gap).tolist() == [True, True, False, True, True, True]


def test_a_slot_given_to_other_pages_is_never_read_as_the_old_ones(open_store) -> None:
    a, b = open_store(), open_store()
    chain, pages = hashes(64), Pages(64, SIZES, seed=1)
    assert put(a, chain, pages).all()
    assert b.prefix(["kv"], 0, chain) == 64  # b remembers where they lie
    assert a.clear()
    assert put(a, hashes(64, seed=2), Pages(64, SIZES, seed=2)).all()  # into the same slots
    loaded, _ = get(b, chain)
    assert not loaded.any()


def test_a_slot_that_changes_hands_during_the_copy_is_a_miss(open_store, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = open_store(), open_store()
    chain, pages = hashes(16), Pages(16, SIZES, seed=1)
    assert put(a, chain, pages).all()
    assert b.prefix(["kv"], 0, chain) == 16
    life = b._lives.current()
    load = life.reach.mover.load

    def meanwhile(offsets, fragments):
        load(offsets, fragments)
        a.clear()
        put(a, hashes(16, seed=2), Pages(16, SIZES, seed=2))

    monkeypatch.setattr(life.reach.mover, "load", meanwhile)
    loaded, _ = get(b, chain)
    assert not loaded.any()


def test_two_shards_make_a_page(open_store) -> None:
    a = open_store()
    chain, left, right = hashes(3), Pages(3, SIZES, seed=1), Pages(3, SIZES, seed=2)
    assert a.put("kv", 0, 2, ROOT, chain, left.fragments).all()
    assert a.prefix(["kv"], 0, chain) == 0
    assert a.put("kv", 1, 2, ROOT, chain[:64], right.fragments.select(slice(0, 2))).all()
    assert a.prefix(["kv"], 1, chain) == 2
    copy = Pages(2, SIZES)
    assert a.get("kv", 1, chain[:64], copy.fragments).all()
    assert copy.page(1) == right.page(1)


def test_corrupt_bytes_are_a_miss_with_checksums(open_store, server: ServerProcess) -> None:
    a, trusting, careful = open_store(verify="checksum"), open_store(), open_store(verify="checksum")
    chain, pages = hashes(4), Pages(4, SIZES, seed=1)
    assert put(a, chain, pages).all()
    assert get(careful, chain)[0].all()
    memory = PoolMemory.attach(parse_pool_uri(server.pool))
    where = a._transfers.locate(a._lives.current(), "kv", 0, chain)
    address = memory.address_of(int(where.offsets[2])) + 777
    byte = (np.ctypeslib.ctypes.c_ubyte).from_address(address)
    byte.value ^= 0xFF
    loaded, copy = get(trusting, chain)
    assert loaded.all()
    assert copy.same(pages).tolist() == [True, True, False, True]
    assert get(careful, chain)[0].tolist() == [True, True, False, True]
    assert careful.metrics.miss_checksum == 1


def test_without_a_stored_checksum_a_careful_reader_misses(open_store) -> None:
    a, careful = open_store(), open_store(verify="checksum")
    chain = hashes(4)
    assert put(a, chain, Pages(4, SIZES, seed=1)).all()
    assert not get(careful, chain)[0].any()


def test_a_killed_server_is_a_miss_and_comes_back_with_everything(open_store, server: ServerProcess) -> None:
    a = open_store()
    chain, pages = hashes(10), Pages(10, SIZES, seed=1)
    assert put(a, chain, pages).all()
    with impatient(a._session):
        server.kill()
        assert a.prefix(["kv"], 0, chain) == 0
        assert not get(a, hashes(2, seed=8))[0].any()
        assert not put(a, hashes(2, seed=7), Pages(2, SIZES, seed=7)).any()
        assert a.metrics.miss_unavailable == 2
        assert a.metrics.refused_unavailable == 2
        server.start()
        await_condition(lambda: a.prefix(["kv"], 0, chain) == 10, "the store finds its pages in the restarted server")
    loaded, copy = get(a, chain)
    assert loaded.all()
    assert copy.same(pages).all()
    assert put(a, hashes(2, seed=7), Pages(2, SIZES, seed=7)).all()


def test_a_stopped_server_costs_bounded_time(open_store, server: ServerProcess) -> None:
    a = open_store()
    chain = hashes(3)
    assert put(a, chain, Pages(3, SIZES, seed=1)).all()
    a._session.timeout_s = 0.1
    server.signal(signal.SIGSTOP)
    answers: list[object] = []
    threads = [
        threading.Thread(target=lambda: answers.append(a.prefix(["kv"], 0, chain)), daemon=True),
        threading.Thread(target=lambda: answers.append(get(a, hashes(3, seed=4))[0].any()), daemon=True),
        threading.Thread(
            target=lambda: answers.append(put(a, hashes(3, seed=5), Pages(3, SIZES, seed=5)).any()), daemon=True
        ),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a call hangs on a server that does not answer"
    assert answers == [0, False, False] or not any(answers)
    server.signal(signal.SIGCONT)
    await_condition(lambda: a.prefix(["kv"], 0, chain) == 3, "the store speaks to the server again")


def test_a_server_that_is_away_at_the_start_is_found_later(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path)
    store = Store.open(StoreConfig(server=server.endpoint), namespace(), name="early")
    try:
        chain, pages = hashes(3), Pages(3, SIZES, seed=1)
        assert not put(store, chain, pages).any()
        server.start()
        await_condition(lambda: put(store, chain, pages).all(), "the store finds the server that came later")
    finally:
        store.close()
        server.remove()


def test_many_threads_share_one_store(open_store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "LATER_S", 120.0)  # others write the same pages, on a slow machine for long
    a, b = open_store(), open_store()
    wrong: list[str] = []

    def work(worker: int) -> None:
        for turn in range(6):
            seed = (worker % 3) * 100 + turn  # three workers each write the same pages
            chain, pages = hashes(12, seed), Pages(12, SIZES, seed=seed)
            store = a if worker % 2 else b
            if not put(store, chain, pages).all():
                wrong.append(f"put {worker} {turn}")
            loaded, copy = get(store, chain)
            if not loaded.all() or not copy.same(pages).all():
                wrong.append(f"get {worker} {turn}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert wrong == []


def test_a_full_pool_says_no_room_or_evicts_and_never_lies(open_store) -> None:
    a, b = open_store(), open_store()
    batches = [(hashes(64, seed), Pages(64, (1 << 16,), seed=seed)) for seed in range(20)]  # 80 MiB into 64
    for chain, pages in batches:
        put(a, chain, pages)
    found = 0
    for chain, pages in batches:
        loaded, copy = get(b, chain, sizes=(1 << 16,))
        assert copy.same(pages)[loaded].all()
        found += int(loaded.sum())
    assert 0 < found < 64 * 20
    assert get(b, batches[-1][0], sizes=(1 << 16,))[0].any(), "the newest pages are there"


def test_what_is_over_the_quota_is_counted_and_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "LATER_S", 120.0)  # room that is being made may be long in coming on a slow machine
    with running_server(tmp_path, "--quota", "=0.1") as server:  # of those who have no tenant
        store = Store.open(StoreConfig(server=server.endpoint, timeout_ms=PATIENCE_MS), namespace(), name="test")
        try:
            chain, pages = hashes(150, 1), Pages(150, (1 << 16,), seed=1)  # 9.4 MiB, and some 6 may be
            stored = put(store, chain, pages)
            metrics = store.metrics
            assert 50 < stored.sum() < 110
            assert metrics.refused_quota == 150 - stored.sum()
            assert metrics.refused_no_room == 0
            assert store.stats()["server_over_quota"] == metrics.refused_quota, "asked for again"
            # Another chain's pages take the place of the first one's.
            other, content = hashes(20, 2), Pages(20, (1 << 16,), seed=2)
            assert put(store, other, content).all()
            loaded, copy = get(store, other, sizes=(1 << 16,))
            assert loaded.all()
            assert copy.same(content).all()
        finally:
            store.close()


def test_an_object_larger_than_an_extent_is_refused_at_the_start(server: ServerProcess) -> None:
    with pytest.raises(PoolTooSmallError, match="extent"):
        Store.open(
            StoreConfig(server=server.endpoint, timeout_ms=PATIENCE_MS), namespace(), name="big", object_bytes=1 << 30
        )


def test_a_wrong_pool_is_refused_at_the_start(server: ServerProcess, tmp_path: Path) -> None:
    with running_server(tmp_path) as other, pytest.raises(PoolError, match="the server's is"):
        Store.open(
            StoreConfig(server=server.endpoint, pool=other.pool, timeout_ms=PATIENCE_MS), namespace(), name="astray"
        )


@pytest.mark.parametrize(
    "config",
    [{"timeout_ms": 0}, {"copy_threads": 0}, {"server": "localhost:1"}, {"pool": "nfs://x"}],
)
def test_settings_that_cannot_be_used_name_the_key(config: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        StoreConfig(**config)
    assert str(next(iter(config.values()))).strip("'") in str(caught.value)


def test_a_closed_store_maps_nothing(open_store, server: ServerProcess) -> None:
    """An engine may keep the object for long, and the pool's memory would stay with it."""

    def mapped() -> list[str]:
        gc.collect()
        return [
            line
            for line in Path("/proc/self/maps").read_text().splitlines()
            if server.pool.removeprefix("shm://") in line
        ]

    store = open_store()
    chain = hashes(4)
    assert put(store, chain, Pages(4, SIZES, seed=1)).all()
    assert get(store, chain)[0].all()
    assert mapped()
    store.close()
    assert not mapped()


def test_nothing_raises_after_close(open_store) -> None:
    a = open_store()
    chain, pages = hashes(2), Pages(2, SIZES, seed=1)
    a.close()
    assert a.prefix(["kv"], 0, chain) == 0
    assert not put(a, chain, pages).any()
    assert not get(a, chain)[0].any()
    assert a.delete(chain) == 0
    assert a.clear() is False
    a.touch(chain)
    a.close()


def test_a_shape_that_does_not_fit_is_refused(open_store) -> None:
    a = open_store()
    assert not a.put("kv", 0, 1, ROOT, hashes(3), Pages(2, SIZES, seed=1).fragments).any()
    assert not a.get("kv", 0, hashes(3)[:-1], Pages(2, SIZES).fragments).any()


def test_no_pages_at_all_are_no_fault(open_store, caplog: pytest.LogCaptureFixture) -> None:
    a = open_store()
    nothing = Pages(0, SIZES).fragments
    assert a.put("kv", 0, 1, ROOT, b"", nothing).shape == a.get("kv", 0, b"", nothing).shape == (0,)
    assert a.present("kv", 0, b"").shape == (0,)
    assert a.prefix(["kv"], 0, b"") == a.delete(b"") == 0
    assert not caplog.records


def test_a_forked_child_gets_misses_and_leaves_the_parent_alone(open_store) -> None:
    a = open_store()
    chain, pages = hashes(4), Pages(4, SIZES, seed=1)
    assert put(a, chain, pages).all()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            started = time.monotonic()
            code = 0 if not put(a, hashes(4, seed=2), pages).any() and time.monotonic() - started < 30 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert get(a, chain)[0].all()


def test_a_child_forked_while_a_thread_holds_a_lock_does_not_hang(open_store) -> None:
    store = open_store()
    chain, pages = hashes(2), Pages(2, SIZES, seed=1)
    assert put(store, chain, pages).all()
    with store._lives._lock, store._metrics_lock:  # what another thread may do at the instant of the fork
        child = os.fork()
        if child == 0:
            signal.alarm(120)
            clean = not get(store, chain)[0].any() and store.prefix(["kv"], 0, chain) == 0 and store.stats() == {}
            store.close()
            os._exit(0 if clean else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert get(store, chain)[0].all()


def test_the_pool_of_one_life_is_never_taken_for_that_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server of another pool takes over the endpoint between two lines of the store."""
    with running_server(tmp_path) as first:
        file = Path("/dev/shm", first.pool.removeprefix("shm://"))
        store = Store.open(StoreConfig(server=first.endpoint, timeout_ms=PATIENCE_MS), namespace(), name="test")
        life = store._lives.life
        assert life is not None
        store._lives.life = msgspec.structs.replace(life, epoch=0)  # as after a restart: the store looks anew
        connect = store._session.connect

        def change_pools() -> object:
            welcome = connect()
            monkeypatch.setattr(store._session, "connect", connect)
            with impatient(store._session):
                first.kill()
                file.rename(file.with_name(file.name + "-old"))
                first.start()
                await_condition(lambda: store._session.epoch == 2, "the session is in its next life")
            return welcome

        monkeypatch.setattr(store._session, "connect", change_pools)
        try:
            chain, pages = hashes(4), Pages(4, SIZES, seed=1)
            stored = put(store, chain, pages)
            stored |= put(store, chain, pages)
            assert stored.all()
            other = Store.open(StoreConfig(server=first.endpoint, timeout_ms=PATIENCE_MS), namespace(), name="other")
            loaded, copy = get(other, chain)
            assert loaded.all()
            assert copy.same(pages).all()
            other.close()
        finally:
            store.close()
            file.with_name(file.name + "-old").unlink(missing_ok=True)


def test_delete_takes_what_continues_a_page(open_store) -> None:
    a = open_store()
    chain = hashes(5)
    assert put(a, chain, Pages(5, SIZES, seed=1)).all()
    assert a.delete(chain[64:96]) == 3
    assert a.prefix(["kv"], 0, chain) == 2


def test_stats_have_both_sides(open_store) -> None:
    a = open_store()
    assert put(a, hashes(2), Pages(2, SIZES, seed=1)).all()
    stats = a.stats()
    assert stats["stored_pages"] == 2
    assert any(key.startswith("server_") for key in stats)


# ---------------------------------------------------------------- find, with rules and holds

STATE = {"kv": Want(), "mamba": Want(Rule.TRAILING_PAGES, 1)}


def put_state(store: Store, chain: bytes, page: int, pages: Pages) -> None:
    parent = chain[32 * page - 32 : 32 * page] if page else ROOT
    part = pages.fragments.select(slice(page, page + 1))
    assert store.put("mamba", 0, 1, parent, chain[32 * page : 32 * page + 32], part).all()


def test_find_says_where_all_components_may_stop(open_store) -> None:
    a, b = open_store(), open_store()
    chain, pages, states = hashes(6), Pages(6, SIZES, seed=1), Pages(6, (500,), seed=2)
    assert put(a, chain, pages).all()
    for page in (1, 3):
        put_state(a, chain, page, states)
    found = b.find(STATE, 0, chain + hashes(2, seed=9))
    assert (found.pages, found.ends.tolist(), found.covered) == (4, [2, 4], {"kv": 6, "mamba": 4})
    assert found.why is MissReason.INCOMPLETE
    assert b.find({"kv": Want()}, 0, chain).ends.tolist() == [1, 2, 3, 4, 5, 6]
    assert b.find(STATE, 0, hashes(3, seed=9)).why is MissReason.NOT_STORED
    assert (b.metrics.lookup_incomplete, b.metrics.lookup_not_stored) == (4, 3)


def test_what_find_located_is_loaded_without_asking_again(open_store, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = open_store(), open_store()
    chain, pages, states = hashes(6), Pages(6, SIZES, seed=1), Pages(6, (500,), seed=2)
    assert put(a, chain, pages).all()
    put_state(a, chain, 3, states)
    assert b.find(STATE, 0, chain).pages == 4
    asked = []
    match = b._session.match
    monkeypatch.setattr(b._session, "match", lambda *args, **named: asked.append(args[3]) or match(*args, **named))
    loaded, copy = get(b, chain[: 4 * 32])
    assert loaded.all()
    assert copy.same(pages)[:4].all()
    state = Pages(1, (500,))
    assert b.get("mamba", 0, chain[96:128], state.fragments).all()
    assert state.page(0) == states.page(3)
    assert not asked
    # Where a component had nothing, nothing is remembered as being there.
    assert not b.get("mamba", 0, chain[32:64], state.fragments).any()
    assert asked == [chain[32:64]]
    put_state(a, chain, 1, states)
    assert b.get("mamba", 0, chain[32:64], state.fragments).all()
    assert state.page(0) == states.page(1)


def test_a_draft_model_that_is_stored_less_far_is_seen(open_store) -> None:
    a = open_store()
    chain = hashes(5)
    assert put(a, chain, Pages(5, SIZES, seed=1)).all()
    assert a.put("draft", 0, 1, ROOT, chain[:96], Pages(3, (400,), seed=2).fragments).all()
    found = a.find({"kv": Want(), "draft": Want()}, 0, chain)
    assert (found.pages, found.covered, found.why) == (3, {"kv": 5, "draft": 3}, MissReason.INCOMPLETE)


def test_pages_of_other_settings_are_named_as_the_reason(open_store) -> None:
    a, b = open_store(), open_store(namespace(kv_dtype="fp8_e5m2"))
    chain = hashes(4)
    assert put(a, chain, Pages(4, SIZES, seed=1)).all()
    assert b.find({"kv": Want()}, 0, chain).why is MissReason.OTHER_NAMESPACE
    assert b.metrics.lookup_other_namespace == 4


def test_ranks_find_the_same_and_hold_it(open_store) -> None:
    first, second, writer = open_store(), open_store(), open_store()
    chain, pages = hashes(8), Pages(8, SIZES, seed=1)
    assert put(writer, chain[: 4 * 32], pages_of(pages, 0, 4)).all()
    hold = Hold(b"request", 2, 30.0)
    found = first.find({"kv": Want()}, 0, chain, hold=hold)
    assert (found.pages, found.why) == (4, MissReason.NOT_STORED)
    assert 0 < found.held_s <= 30
    assert put(writer, chain[4 * 32 :], pages_of(pages, 4, 8), chain[3 * 32 : 4 * 32]).all()
    assert second.find({"kv": Want()}, 0, chain).pages == 8
    assert second.find({"kv": Want()}, 0, chain, hold=hold).pages == 4
    for seed in range(10, 35):  # 100 MiB into 64
        writer.put("kv", 0, 1, ROOT, hashes(64, seed), Pages(64, (1 << 16,), seed=seed).fragments)
    loaded, copy = get(second, chain[: 4 * 32])
    assert loaded.all()
    assert copy.same(pages_of(pages, 0, 4)).all()
    assert first.stats()["server_holds"] == 1
    assert first.unhold(b"request")
    assert first.stats()["server_holds"] == 1
    assert second.unhold(b"request")
    assert first.stats()["server_holds"] == 0


def pages_of(pages: Pages, start: int, stop: int) -> Pages:
    """Some of the pages, with the same bytes."""
    some = Pages(stop - start, pages.sizes)
    for mine, theirs in zip(some.data, pages.data, strict=True):
        mine[:] = theirs[start:stop]
    return some


def test_a_chain_longer_than_a_message_is_found_and_held_whole(open_store, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = open_store(), open_store()
    monkeypatch.setattr(finding, "MAX_BATCH", 8)
    chain, states = hashes(30), Pages(30, (500,), seed=2)
    assert put(a, chain, Pages(30, (600,), seed=1)).all()
    for page in (4, 20, 27):
        put_state(a, chain, page, states)
    found = b.find(STATE, 0, chain, hold=Hold(b"long", 1, 30.0))
    assert (found.pages, found.ends.tolist(), found.covered) == (28, [5, 21, 28], {"kv": 30, "mamba": 28})
    assert found.why is MissReason.INCOMPLETE
    assert b.unhold(b"long")
    assert b.stats()["server_holds"] == 0


def test_find_without_a_server_is_a_miss_without_a_reason(open_store, server: ServerProcess) -> None:
    a = open_store()
    chain = hashes(3)
    assert put(a, chain, Pages(3, SIZES, seed=1)).all()
    server.kill()
    a._session.timeout_s = 0.2
    found = a.find(STATE, 0, chain, hold=Hold(b"r", 1, 1.0))
    assert (found.pages, found.why, found.held_s) == (0, None, 0.0)
    assert a.unhold(b"r") is False
    assert a.metrics.lookup_unavailable == 3


def test_a_rule_that_cannot_be_is_a_miss_and_is_logged(open_store, caplog: pytest.LogCaptureFixture) -> None:
    a = open_store()
    found = a.find({"kv": Want(Rule.TRAILING_PAGES, 0)}, 0, hashes(2))
    assert (found.pages, found.why) == (0, None)
    assert "has 0 pages: give 1 to" in caplog.text
