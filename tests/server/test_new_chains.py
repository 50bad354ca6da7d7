"""Stores of new chains by compiled steps leave the same pool, the same books and the same answers as those by numpy; and the pool is
written in the order that a kill asks for."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from maru_harness import Client, Grant, Server, chain, geometry

from maru_core.pool.format import RESERVED
from maru_core.protocol import ROOT, Evict, Reply
from maru_server import directory as directory_module
from maru_server.directory import PoolDirectory
from maru_server.tree import PrefixTree

pytestmark = pytest.mark.skipif(
    directory_module._store is None, reason="built without a compiler: there is one way only"
)

store: Any = directory_module._store


class PlainDirectory(PoolDirectory):
    """One that is written by numpy."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.compiled = False


#: Who, which chain, what chain it branches off, first page, pages, component, shard, world, bytes, what becomes of it.
STORES = st.tuples(
    st.just("store"),
    st.integers(0, 1),
    st.sampled_from("abc"),
    st.sampled_from("abc"),
    st.just(0) | st.integers(0, 6),
    st.integers(1, 6),
    st.sampled_from(["kv", "kv", "kv", "swa"]),
    st.integers(0, 1),
    st.sampled_from([1, 1, 2]),
    st.sampled_from([4000, 4000, 8192]),
    st.sampled_from(["commit", "commit", "commit", "checksums", "half", "again", "release", "wait"]),
)
STEPS = st.lists(
    st.one_of(
        STORES,
        STORES,
        STORES,
        st.tuples(st.sampled_from(["delete", "touch", "evict"]), st.sampled_from("abc"), st.integers(0, 6)),
        st.tuples(st.just("tick"), st.integers(1, 40)),
    ),
    max_size=20,
)


def do(clients: list[Client], step: tuple[Any, ...]) -> list[Reply | list[int] | None]:
    """One step, and all that was answered."""
    server = clients[0].server
    kind, *rest = step
    if kind == "delete":
        name, start = rest
        return [[clients[0].delete(chain(name, 1, start))]]
    if kind == "tick":
        server.wait(rest[0], 10.0, alive=tuple(clients))
        return []
    if kind == "touch":
        server.now += 2.0  # a use of its own
        clients[0].touch(chain(rest[0], rest[1] + 1))
        return []
    if kind == "evict":
        return [clients[0].send(Evict(9, clients[0].session, rest[1]))]
    who, name, trunk, start, count, component, shard, world, nbytes, then = rest
    client = clients[who]
    server.now += 0.25
    parent = chain(trunk, 1, start - 1) if start else ROOT
    reply = client.reserve_reply(
        chain(name, count, start), component=component, shard=shard % world, world=world, parent=parent, nbytes=nbytes
    )
    answers: list[Reply | list[int] | None] = [reply]
    grant = Grant(reply)  # type: ignore[arg-type]
    mine = len(grant.mine()[0])
    server.now += 0.25
    if then in ("commit", "again"):
        answers.append(client.commit(grant))
    if then == "again":
        answers.append(client.commit(grant))
    if then == "checksums":
        answers.append(client.commit(grant, checksums=np.arange(1, mine + 1, dtype="<u8").tobytes()))
    if then == "half":
        answers.append(client.commit(grant, slice(0, mine // 2)))
    if then == "release":
        answers.append([client.release(grant)])
    return answers


def columns(tree: PrefixTree) -> dict[str, Any]:
    """All that a tree says of the rows that it ever used."""
    found: dict[str, Any] = {
        name: getattr(tree, name)[: tree.size].tolist()
        for name in ("parent", "child", "_next", "_previous", "last_use", "objects", "pending", "queued", "uses")
    }
    # Of rows that are not in use only this counts; both ways leave there what the last page had.
    found["rows"], found["free"] = tree.rows, tree._free
    for number, table in tree.tables.items():
        for name in ("world", "length", "held", "have"):
            found[f"{number}.{name}"] = getattr(table, name)[: tree.size].tolist()
        for shard, column in table.slots.items():
            found[f"{number}.{shard}"] = column[: tree.size].tolist()
    return found


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, extents=st.integers(3, 12), quota=st.sampled_from([{}, {"": 0.6}]))
def test_both_ways_leave_the_same(steps: list[tuple[Any, ...]], extents: int, quota: dict[str, float]) -> None:
    servers = [
        Server(geometry(extents, 4), directory=kind, quotas=quota, reservation_s=30.0)
        for kind in (PoolDirectory, PlainDirectory)
    ]
    clients = [[server.client("one"), server.client("two")] for server in servers]
    for step in steps:
        first, second = (do(theirs, step) for theirs in clients)
        assert first == second, step
        assert servers[0].meta.tobytes() == servers[1].meta.tobytes(), step
        assert servers[0].stats == servers[1].stats
        ghosts = [server.state.books.pages.ghosts for server in servers]
        assert ghosts[0]._notes.tobytes() == ghosts[1]._notes.tobytes()
        trees = [server.state.books.trees for server in servers]
        assert trees[0].keys() == trees[1].keys()
        for number in trees[0]:
            assert columns(trees[0][number]) == columns(trees[1][number]), step


@pytest.mark.parametrize("kind", [PoolDirectory, PlainDirectory])
def test_a_page_that_comes_back_is_known_again_and_a_new_one_is_not(kind: type[PoolDirectory]) -> None:
    """In a row that another page has left: what was noted of a page when it was evicted counts, and what stood in the row does not."""
    server = Server(geometry(4, 4), directory=kind)
    client = server.client()
    (tree,) = server.state.books.trees.values()
    client.store(chain("a", 1))
    for _ in range(3):
        server.now += 2.0
        client.touch(chain("a", 1))
    assert tree.uses[tree.row(chain("a", 1))] == 3
    client.send(Evict(9, client.session, 1))
    client.store(chain("b", 1))
    assert tree.uses[tree.row(chain("b", 1))] == 0
    client.store(chain("a", 1))
    assert tree.uses[tree.row(chain("a", 1))] == 3


def test_most_stores_go_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the comparison above would compare numpy with numpy."""
    server = Server(geometry(16, 64))
    client = server.client()
    client.store(chain("a", 1))  # the first makes the component known
    booked: list[int] = []
    book = store.book

    class Counted:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        @staticmethod
        def book(*args: Any) -> None:
            booked.append(len(args[5]))
            book(*args)

    monkeypatch.setattr("maru_server.new_chains._store", Counted())
    client.store(chain("a", 40, 1), parent=chain("a", 1))
    client.store(chain("b", 100))
    client.reserve(chain("b", 3, 99), parent=chain("b", 1, 98))  # one of them is known
    assert booked == [40, 100]


def test_nothing_is_taken_where_the_short_way_ends() -> None:
    """A chain that repeats itself, or is too long for the room that there is, is refused or cut as ever."""
    server = Server(geometry(2, 4))
    client = server.client()
    client.store(chain("a", 1))
    before = server.meta.tobytes()
    twice = client.reserve_reply(chain("b", 1) * 2)
    assert "repeated" in str(getattr(twice, "message", ""))
    assert "repeated" in str(getattr(client.reserve_reply(chain("b", 1), parent=chain("b", 1)), "message", ""))
    assert "repeated" in str(getattr(client.reserve_reply(ROOT), "message", ""))
    assert server.meta.tobytes() == before
    room = 4 * server.geometry.extent_count
    assert client.reserve(chain("c", room + 1)).status.count(0) == room  # the one page made room
    server.state.check()


def _shared(path: Path, slots: int) -> tuple[PoolDirectory, Any]:
    """A pool's tables in a file that two processes map, and after them one word: which round of claims is under way."""
    shape = geometry(2, slots)
    memory = np.memmap(path, np.uint8, "r+", shape=(shape.off_data + 8,))
    return PoolDirectory(shape, memory[: shape.off_data]), memory[shape.off_data :].view(np.uint64)


def _claim_and_free(path: Path, slots: int, told: Connection) -> None:
    """Take all slots of an extent and give them back, over and over."""
    directory, around = _shared(path, slots)
    everything = np.arange(slots, dtype=np.uint32)
    told.send(True)
    while not told.poll():
        around[0] += 1
        directory.claim_packed(everything)
        directory.states[:slots] = 0  # the generations stand


def test_no_slot_is_ever_seen_taken_before_its_generation(tmp_path: Path) -> None:
    """Another process looks while slots are claimed, states first and generations after them: whatever is taken has the generation of
    this round."""
    slots = 1 << 14
    path = tmp_path / "tables"
    with path.open("wb") as file:
        file.truncate(geometry(2, slots).off_data + 8)
    here, there = multiprocessing.Pipe()
    writer = multiprocessing.get_context("spawn").Process(target=_claim_and_free, args=(path, slots, there))
    try:
        directory, around = _shared(path, slots)
        base = int(np.maximum(directory.generations[0], directory._generation_floor))
        writer.start()
        assert here.poll(60)
        here.recv()
        caught = 0
        end = time.monotonic() + 30
        while caught < 100 and time.monotonic() < end:
            before = int(around[0])
            taken = directory.states[:slots] == RESERVED
            generations = directory.generations[:slots].copy()
            if int(around[0]) == before and taken[0] and not taken[-1]:
                # A claim that has come to its states: clearing begins at the other end.
                caught += 1
                assert (generations[taken] == base + before).all()
        here.send(True)
        writer.join(30)
        assert caught, "no claim was seen under way: nothing was tested"
    finally:
        if writer.is_alive():
            writer.kill()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda t, d: store.probe(t.table[:100], t.hashes, t.key, ROOT, ROOT), "power of two"),
        (lambda t, d: store.probe(t.table, t.hashes, t.key, ROOT[:-1], ROOT), "32 bytes"),
        (lambda t, d: store.claim(d.generations, d.words, d.slot_offsets, slots(999), 0), "outside"),
        (lambda t, d: store.claim(d.generations, d.words, d.slot_offsets[:1], slots(1), 0), "outside"),
        (lambda t, d: store.commit(d.words, d.generations, slots(0)), "one word"),
        (lambda t, d: store.commit(d.words, d.generations[:1], slots(999)), "outside"),
        (lambda t, d: store.remembered(d.generations[:3], np.zeros(3, np.uint8), 0, ROOT), "power of two"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, said: str) -> None:
    server = Server(geometry(2, 4))
    server.client().store(chain("a", 1))
    (tree,) = server.state.books.trees.values()
    before = server.meta.tobytes()
    with pytest.raises(ValueError, match=said):
        call(tree.index, server.directory)
    assert server.meta.tobytes() == before


def slots(*numbers: int) -> Any:
    return np.array(numbers, np.uint32)


def test_books_that_do_not_fit_change_nothing() -> None:
    server = Server(geometry(2, 4))
    server.client().store(chain("a", 1))
    (tree,) = server.state.books.trees.values()
    directory, table = server.directory, tree.tables[0]
    component = (table.slots[0], table.held, table.world, table.length)
    before = server.meta.tobytes(), columns(tree)

    def book(
        rows: Any = (1,), taken: Any = (1,), generations: bytes = bytes(8), pages: int = 1, above: int = -1
    ) -> None:
        store.book(
            0, tree.columns_of_a_chain(), component, directory.words, directory.slot_offsets, np.array(rows, np.int64), slots(*taken),
            generations, ROOT + chain("b", pages), above, 1, 0, 0, 0, 1, 4000, 1, 0,
        )  # fmt: skip

    for wrong, said in [
        ({"rows": (1 << 20,)}, "outside"),
        ({"rows": (-1,)}, "outside"),
        ({"taken": (999,)}, "outside"),
        ({"generations": b""}, "go together"),
        ({"pages": 2}, "go together"),
        ({"rows": (1, 2)}, "go together"),
        ({"above": 1 << 20}, "out of range"),
    ]:
        with pytest.raises(ValueError, match=said):
            book(**wrong)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="state 0"):
        book()  # a slot that nobody has claimed
    assert (server.meta.tobytes(), columns(tree)) == before
