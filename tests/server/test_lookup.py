"""The compiled lookup and the numpy one say what the pool's records say, whatever is stored, partly stored or gone; and a
match that falls short says why."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from maru_harness import Client, Server, chain, geometry

from maru_core.pool.format import COMMITTED
from maru_core.protocol import NO_SLOT, ROOT, MissReason, Rule, Want
from maru_server import lookup
from maru_server.index import TableIndex
from maru_server.lookup import Location, Lookup
from maru_server.rules import reach
from maru_server.sessions import Peer

native = pytest.mark.skipif(lookup._native is None, reason="the compiled lookup was not built here (no C compiler)")

PAGES = 12
COMPONENTS = ["kv", "swa", "draft"]


def step() -> st.SearchStrategy[tuple[Any, ...]]:
    """Store pages [start, end) of a chain as one shard of a world, committing the first few only; or delete one."""
    pages = st.integers(0, PAGES)
    # Mostly what makes pages whole: or rules would rarely have anything to say.
    stored = st.tuples(
        st.just("store"),
        st.sampled_from("ab"),
        st.just(0) | pages,
        pages,
        st.sampled_from([0, 0, 0, 1, 2]),
        st.sampled_from([1, 1, 1, 2, 3]),
        st.just(PAGES) | pages,
        st.sampled_from(COMPONENTS),
    )
    return st.one_of(stored, stored, st.tuples(st.just("delete"), st.sampled_from("ab"), st.integers(0, PAGES - 1)))


def want() -> st.SearchStrategy[Want]:
    sizes = st.integers(1, 5)
    return st.one_of(
        st.just(Want()),
        sizes.map(lambda pages: Want(Rule.TRAILING_PAGES, pages)),
        sizes.flatmap(lambda pages: st.integers(1, pages).map(lambda group: Want(Rule.BLOCK_GROUPS, pages, group))),
    )


def run(client: Client, steps: list[tuple[Any, ...]]) -> None:
    for kind, name, *rest in steps:
        if kind == "delete":
            client.delete(chain(name, 1, rest[0]))
            continue
        start, end, part, world, commits, component = rest
        if start < end and part < world:
            parent = chain(name, 1, start - 1) if start else ROOT
            grant = client.reserve(
                chain(name, end - start, start), shard=part, world=world, parent=parent, component=component
            )
            some = slice(0, commits)
            client.commit(grant, some, np.arange(1, 99, dtype="<u8")[: len(grant.mine(some)[0])].tobytes())


def objects(client: Client, component: str, shard: int, hashes: bytes) -> list[tuple[int, ...] | None]:
    """What a reader of ``shard`` can have of each page, from the pool's records alone: no tree is asked. None where the page is
    not whole in the component."""
    server = client.server
    number = server.state.books.names.components.get(component)
    records = server.directory.records
    stored = [
        slot
        for slot in np.flatnonzero(records["state"] == COMMITTED).tolist()
        if number is not None and records["component"][slot] == number
    ]
    found: list[tuple[int, ...] | None] = []
    for index in range(len(hashes) // 32):
        page = hashes[index * 32 : index * 32 + 32]
        mine = [slot for slot in stored if records["page_hash"][slot].tobytes() == page]
        shards = {int(records["shard"][slot]): slot for slot in mine}
        world = int(records["world"][mine[0]]) if mine else 1
        slot = shards.get(0 if world == 1 else shard) if len(shards) == world else None
        found.append(
            None
            if slot is None
            else (
                slot,
                int(server.directory.offsets(np.array([slot], np.uint32))[0]),
                int(server.directory.generations[slot]),
                int(records["length"][slot]),
                int(records["checksum"][slot]),
            )
        )
    return found


ABSENT = (NO_SLOT, 0, 0, 0, 0)


def unpacked(located: Location) -> list[tuple[int, ...]]:
    columns = [np.frombuffer(located.slots, "<u4"), *(np.frombuffer(part, "<u8") for part in located[2:6])]
    return list(zip(*(column.tolist() for column in columns), strict=True))


@settings(max_examples=150)
@given(
    steps=st.lists(step(), max_size=10),
    shard=st.integers(0, 3),
    sparse=st.booleans(),
    asked=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, PAGES - 1)), max_size=20),
    wants=st.lists(st.tuples(st.sampled_from([*COMPONENTS, "never"]), want()), min_size=1, max_size=4),
    by_rules=st.booleans(),
)
def test_both_lookups_say_what_the_pool_says(
    steps: list[tuple[Any, ...]],
    shard: int,
    sparse: bool,
    asked: list[tuple[str, int]],
    wants: list[tuple[str, Want]],
    by_rules: bool,
) -> None:
    server = Server(geometry(extents=16), checked=False)
    client = server.client()
    run(client, steps)
    server.state.finish()
    tree = server.state.books.trees[client.namespace]
    names = [name for name, _ in wants]
    numbers = [server.state.books.names.components.get(name) for name in names]
    rules = [want for _, want in wants] if by_rules and not sparse else []
    for hashes in (chain("a", PAGES), b"".join(chain(name, 1, page) for name, page in asked), b""):
        held = [objects(client, name, shard, hashes) for name in names]
        lookups = [Lookup(server.directory, native=compiled) for compiled in (True, False)]
        for lookup_ in lookups:
            located = lookup_.match(tree, numbers, shard, hashes, sparse, rules)
            if sparse:
                whole = [all(column[page] for column in held) for page in range(len(hashes) // 32)]
                expected = [
                    at if everywhere else None for column in held for at, everywhere in zip(column, whole, strict=True)
                ]
                assert (located.pages, located.ends, located.covered) == (sum(whole), b"", ())
            else:
                known = next(
                    (page for page in range(len(hashes) // 32) if tree.row(hashes[page * 32 : page * 32 + 32]) is None),
                    len(hashes) // 32,
                )
                reached = reach(
                    [np.array([at is not None for at in column[:known]], bool) for column in held],
                    rules or [Want()] * len(names),
                )
                assert located.pages == reached.pages
                assert located.covered == tuple(reached.covered)
                ends = np.frombuffer(located.ends, "<u4").tolist()
                assert ends == (reached.ends.tolist() if any(want.rule for want in rules) else [])
                expected = [at for column in held for at in column[: reached.pages]]
            assert unpacked(located) == [at or ABSENT for at in expected]
            exactly = lookup_.exactly(tree, numbers, shard, hashes)
            assert exactly.pages == len(hashes) // 32
            assert unpacked(exactly) == [at or ABSENT for column in held for at in column]


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=native), False])
@pytest.mark.parametrize(
    ("kv", "other", "want", "ends", "covered"),
    [
        ("xxxxxx", "..x..x", Want(Rule.TRAILING_PAGES, 1), [3, 6], 6),
        ("xxxxxxxx", "xx.xxx.x", Want(Rule.TRAILING_PAGES, 3), [1, 2, 6], 6),
        ("xxxx....", "xx.xxx.x", Want(Rule.TRAILING_PAGES, 3), [1, 2], 6),
        ("xxxxxxxx", ".xx.xx.x", Want(Rule.BLOCK_GROUPS, 3, 2), [1, 2, 3, 4, 5, 6, 7, 8], 6),
        ("xxxxxxxx", "xx.xx.xx", Want(Rule.BLOCK_GROUPS, 3, 2), [1, 2, 3, 4, 5, 6, 7, 8], 0),
        ("xxxxxxxx", "...x...x", Want(Rule.BLOCK_GROUPS, 4, 1), [1, 2, 3, 4, 5, 6, 7, 8], 8),
        ("xxxxx", "xx...", Want(), [], 2),
        ("xxxxx", "xx...", Want(Rule.TRAILING_PAGES, 1 << 31), [1, 2], 2),
        ("xxxxx", "xxxxx", Want(Rule.BLOCK_GROUPS, 1 << 31, 1 << 31), [1, 2, 3, 4, 5], 0),
    ],
)
def test_what_models_ask(kv: str, other: str, want: Want, ends: list[int], covered: int, compiled: bool) -> None:
    server = Server(geometry(extents=16))
    client = server.client()
    for component, text in (("kv", kv), ("other", other)):
        for page in (page for page, letter in enumerate(text) if letter == "x"):
            parent = chain("a", 1, page - 1) if page else ROOT
            client.store(chain("a", 1, page), component=component, parent=parent)
    tree = server.state.books.trees[client.namespace]
    numbers = [server.state.books.names.components[name] for name in ("kv", "other")]
    located = Lookup(server.directory, native=compiled).match(tree, numbers, 0, chain("a", 9), rules=[Want(), want])
    assert np.frombuffer(located.ends, "<u4").tolist() == ends
    assert located.pages == (ends[-1] if ends else 2)
    assert located.covered == (kv.count("x"), covered)


@native
def test_a_row_or_slot_out_of_range_is_an_error_and_not_a_read() -> None:
    server = Server()
    client = server.client()
    client.store(chain("a", 3))
    tree = server.state.books.trees[client.namespace]
    table = tree.tables[server.state.books.names.components["kv"]]
    lookup_ = Lookup(server.directory)
    row = tree.rows[chain("a", 1, 1)]
    table.slots[0][row] = server.geometry.slot_count + 1
    with pytest.raises(ValueError, match="outside the pool"):
        lookup_.match(tree, [server.state.books.names.components["kv"]], 0, chain("a", 3))
    table.slots[0][row] = 1
    for name in ("have", "length"):
        column = getattr(table, name)
        setattr(table, name, column[:row])
        with pytest.raises(ValueError, match=f"row {row} is outside its columns"):
            lookup_.match(tree, [server.state.books.names.components["kv"]], 0, chain("a", 3))
        setattr(table, name, column)
    index = tree.index
    assert isinstance(index, TableIndex)
    entry = np.flatnonzero((index.table & np.uint64(0xFFFFFFFF)) == row + 1)
    index.table[entry] += np.uint64(1 << 20)
    with pytest.raises(ValueError, match="outside the column of hashes"):
        lookup_.match(tree, [server.state.books.names.components["kv"]], 0, chain("a", 3))
    with pytest.raises(ValueError, match="hashes"):
        lookup_.match(tree, [server.state.books.names.components["kv"]], 0, b"x" * 33)
    with pytest.raises(ValueError, match="rule 7 of 1"):
        lookup_.match(tree, [None], 0, chain("a", 1), rules=[Want(7, 1)])
    with pytest.raises(ValueError, match="rule 2 of 2 and 3 pages"):
        lookup_.match(tree, [None], 0, chain("a", 1), rules=[Want(Rule.BLOCK_GROUPS, 2, 3)])
    with pytest.raises(ValueError, match="rules do not fit"):
        lookup_.match(tree, [None, None], 0, chain("a", 1), rules=[Want()])


@native
@pytest.mark.parametrize("sparse", [False, True])
def test_readers_of_any_shard_get_the_replica_where_there_is_one(sparse: bool) -> None:
    server = Server()
    client = server.client()
    client.store(chain("a", 2))  # world 1: a replica
    for shard in (0, 1):
        client.store(chain("a", 2, 2), shard=shard, world=2, parent=chain("a", 1, 1))
    tree = server.state.books.trees[client.namespace]
    component = server.state.books.names.components["kv"]
    answers = [
        Lookup(server.directory, native=compiled).match(tree, [component], 1, chain("a", 4), sparse)
        for compiled in (True, False)
    ]
    assert answers[0] == answers[1]
    assert answers[0].pages == 4


# ---------------------------------------------------------------- why a match ends where it does


def test_what_nobody_stored(client: Client) -> None:
    client.store(chain("a", 2))
    assert client.match(chain("a", 2)).why is MissReason.NONE
    assert client.match(chain("a", 3)).why is MissReason.NOT_STORED
    assert client.match(chain("b", 3)).why is MissReason.NOT_STORED
    assert client.match(b"").why is MissReason.NONE


def test_what_lacks_a_shard_or_component_or_is_on_its_way(client: Client) -> None:
    client.store(chain("a", 4), shard=0, world=2)
    client.store(chain("a", 2), shard=1, world=2)
    assert client.match(chain("a", 4)).why is MissReason.INCOMPLETE
    assert client.match(chain("a", 4), ["kv", "draft"]).why is MissReason.INCOMPLETE
    client.reserve(chain("b", 2))
    assert client.match(chain("b", 2)).why is MissReason.INCOMPLETE
    # A page of which only what continues it is known was not stored.
    client.store(chain("c", 2, 1), parent=chain("c", 1))
    assert client.match(chain("c", 3)).why is MissReason.NOT_STORED


def test_what_another_namespace_of_the_tenant_has(server: Server) -> None:
    mine, other = server.client("mine"), server.client("other", tag="other")
    other.store(chain("a", 4))
    assert mine.match(chain("a", 4)).why is MissReason.OTHER_NAMESPACE
    mine.store(chain("a", 2))
    answer = mine.match(chain("a", 4))
    assert (answer.pages, answer.why) == (2, MissReason.OTHER_NAMESPACE)
    assert mine.match(chain("a", 5, 4)).why is MissReason.NOT_STORED


def test_a_sparse_match_names_its_first_gap(server: Server, client: Client) -> None:
    other = server.client("other", tag="other")
    other.store(chain("b", 1))
    client.store(chain("a", 3))
    assert client.match(chain("a", 3), sparse=True).why is MissReason.NONE
    assert client.match(chain("a", 2) + chain("b", 1) + chain("c", 1), sparse=True).why is MissReason.OTHER_NAMESPACE
    assert client.match(chain("c", 1) + chain("b", 1) + chain("a", 1), sparse=True).why is MissReason.NOT_STORED


def test_misses_are_counted_by_reason_and_namespace(server: Server, client: Client) -> None:
    other = server.client("other", tag="other")
    other.store(chain("a", 2))
    client.match(chain("a", 2))
    client.match(chain("b", 5))
    other.match(chain("a", 3))
    figures = server.stats
    assert figures["pages_asked"] == 10
    assert figures["pages_found"] == 2
    assert (figures["miss_other_namespace"], figures["miss_not_stored"]) == (2, 6)
    tree = server.state.books.trees[client.namespace]
    assert (tree.counts["miss_other_namespace"], tree.counts["miss_not_stored"]) == (2, 5)


def test_of_other_tenants_nothing_is_said(server: Server) -> None:
    mine = server.client("mine", peer=Peer("me", operator=False))
    other = server.client("other", peer=Peer("other", operator=False))
    other.store(chain("a", 3))
    other.store(chain("b", 3))
    other.delete(chain("b", 1))
    assert mine.match(chain("a", 3)).why is MissReason.NOT_STORED
    assert mine.match(chain("b", 3)).why is MissReason.NOT_STORED
    assert other.match(chain("b", 3)).why is MissReason.REMOVED


def test_the_namespace_it_went_from_is_told_and_no_other(server: Server) -> None:
    mine, other = server.client("mine"), server.client("other", tag="other")
    mine.store(chain("a", 3))
    mine.delete(chain("a", 1, 1))
    answer = mine.match(chain("a", 3))
    assert (answer.pages, answer.why) == (1, MissReason.REMOVED)
    assert other.match(chain("a", 3, 1)).why is MissReason.NOT_STORED
    other.store(chain("a", 3))
    assert mine.match(chain("a", 3)).why is MissReason.REMOVED, "what is known of this namespace comes first"
    mine.store(chain("a", 2, 1), parent=chain("a", 1))
    assert mine.match(chain("a", 4)).why is MissReason.NOT_STORED
