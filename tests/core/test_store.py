"""The store over a real server process and real shared memory: what is True is stored, what is loaded is right."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from maru_core.errors import ConfigError, PoolError, PoolTooSmallError
from maru_core.namespace import Namespace
from maru_core.pool import PoolMemory, parse_pool_uri
from maru_core.protocol import HASH_BYTES, ROOT
from maru_core.store import Store, StoreConfig
from support import Pages, ServerProcess, await_condition, hashes, namespace, running_server

SIZES = (12_000, 12_000)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with running_server(tmp_path, "--quarantine", "1") as process:
        yield process


@pytest.fixture
def open_store(server: ServerProcess) -> Iterator[object]:
    opened: list[Store] = []

    def make(space: Namespace | None = None, **config: object) -> Store:
        named = {"server": server.endpoint, **config}
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


def test_putting_again_copies_nothing(open_store) -> None:
    a, b = open_store(), open_store()
    chain, pages = hashes(8), Pages(8, SIZES, seed=1)
    assert put(a, chain, pages).all()
    assert put(b, chain, pages).all()
    assert b.metrics.stored_pages == 0
    assert b.metrics.existing_pages == 8


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
    life = b._current()
    load = life.mover.load

    def meanwhile(offsets, fragments):
        load(offsets, fragments)
        a.clear()
        put(a, hashes(16, seed=2), Pages(16, SIZES, seed=2))

    monkeypatch.setattr(life.mover, "load", meanwhile)
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
    where = a._locate(a._current(), "kv", 0, chain)
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
    a = open_store(timeout_ms=100)
    chain = hashes(3)
    assert put(a, chain, Pages(3, SIZES, seed=1)).all()
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
        thread.join(10)
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


def test_many_threads_share_one_store(open_store) -> None:
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
        thread.join(60)
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


def test_an_object_larger_than_an_extent_is_refused_at_the_start(server: ServerProcess) -> None:
    with pytest.raises(PoolTooSmallError, match="extent"):
        Store.open(StoreConfig(server=server.endpoint), namespace(), name="big", object_bytes=1 << 30)


def test_a_wrong_pool_is_refused_at_the_start(server: ServerProcess, tmp_path: Path) -> None:
    with running_server(tmp_path) as other, pytest.raises(PoolError, match="the server's is"):
        Store.open(StoreConfig(server=server.endpoint, pool=other.pool), namespace(), name="astray")


@pytest.mark.parametrize(
    "config",
    [{"timeout_ms": 0}, {"copy_threads": 0}, {"server": "localhost:1"}, {"pool": "nfs://x"}],
)
def test_settings_that_cannot_be_used_name_the_key(config: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        StoreConfig(**config)
    assert str(next(iter(config.values()))).strip("'") in str(caught.value)


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
    with store._lock, store._metrics_lock:  # what another thread may do at the instant of the fork
        child = os.fork()
        if child == 0:
            signal.alarm(10)
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
        store = Store.open(StoreConfig(server=first.endpoint), namespace(), name="test")
        assert store._life is not None
        store._life = msgspec.structs.replace(store._life, epoch=0)  # as after a restart: the store looks anew
        connect = store._session.connect

        def change_pools() -> object:
            welcome = connect()
            monkeypatch.setattr(store._session, "connect", connect)
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
            other = Store.open(StoreConfig(server=first.endpoint), namespace(), name="other")
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
