"""The compiled lookup and the numpy one give the same answers, whatever is stored, partly stored or gone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from maru_harness import Server, chain, geometry

from maru_core.protocol import ROOT
from maru_server import lookup
from maru_server.lookup import Lookup

native = pytest.mark.skipif(lookup._native is None, reason="the compiled lookup was not built here (no C compiler)")

PAGES = 12


def step() -> st.SearchStrategy[tuple[Any, ...]]:
    """Store pages [start, end) of a chain as one shard of a world, committing the first few only; or delete one."""
    pages = st.integers(0, PAGES)
    return st.one_of(
        st.tuples(st.just("store"), st.sampled_from("ab"), pages, pages, st.integers(0, 2), st.integers(1, 3), pages),
        st.tuples(st.just("delete"), st.sampled_from("ab"), st.integers(0, PAGES - 1)),
    )


@native
@settings(max_examples=120)
@given(
    steps=st.lists(step(), max_size=8),
    shard=st.integers(0, 3),
    sparse=st.booleans(),
    asked=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, PAGES - 1)), max_size=20),
)
def test_both_lookups_agree(
    steps: list[tuple[Any, ...]], shard: int, sparse: bool, asked: list[tuple[str, int]]
) -> None:
    server = Server(geometry(extents=16))
    client = server.client()
    for kind, name, *rest in steps:
        if kind == "delete":
            client.delete(chain(name, 1, rest[0]))
            continue
        start, end, part, world, commits = rest
        if start < end and part < world:
            parent = chain(name, 1, start - 1) if start else ROOT
            grant = client.reserve(chain(name, end - start, start), shard=part, world=world, parent=parent)
            client.commit(
                grant,
                slice(0, commits),
                np.arange(1, 99, dtype="<u8")[: len(grant.mine(slice(0, commits))[0])].tobytes(),
            )
    tree = server.state._trees[client.namespace]
    component = server.state._components.get("kv")
    for hashes in (chain("a", PAGES), b"".join(chain(name, 1, page) for name, page in asked), b""):
        answers = [
            Lookup(server.directory, native=compiled).match(tree, [component], shard, hashes, sparse)
            for compiled in (True, False)
        ]
        assert answers[0] == answers[1]


@native
def test_a_row_or_slot_out_of_range_is_an_error_and_not_a_read() -> None:
    server = Server()
    client = server.client()
    client.store(chain("a", 3))
    tree = server.state._trees[client.namespace]
    table = tree.tables[server.state._components["kv"]]
    lookup_ = Lookup(server.directory)
    row = tree.rows[chain("a", 1, 1)]
    table.slots[0][row] = server.geometry.slot_count + 1
    with pytest.raises(ValueError, match="outside the pool"):
        lookup_.match(tree, [server.state._components["kv"]], 0, chain("a", 3))
    tree.rows[chain("a", 1, 1)] = 1 << 40
    with pytest.raises(ValueError, match="outside its columns"):
        lookup_.match(tree, [server.state._components["kv"]], 0, chain("a", 3))
    with pytest.raises(ValueError, match="hashes"):
        lookup_.match(tree, [server.state._components["kv"]], 0, b"x" * 33)


@native
@pytest.mark.parametrize("sparse", [False, True])
def test_readers_of_any_shard_get_the_replica_where_there_is_one(sparse: bool) -> None:
    server = Server()
    client = server.client()
    client.store(chain("a", 2))  # world 1: a replica
    for shard in (0, 1):
        client.store(chain("a", 2, 2), shard=shard, world=2, parent=chain("a", 1, 1))
    tree = server.state._trees[client.namespace]
    component = server.state._components["kv"]
    answers = [
        Lookup(server.directory, native=compiled).match(tree, [component], 1, chain("a", 4), sparse)
        for compiled in (True, False)
    ]
    assert answers[0] == answers[1]
    assert answers[0].pages == 4
