"""What the server shows to people: rows that agree with what was stored, whatever the shape of the trees."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from maru_harness import Client, Server, chain, geometry

from maru_core.errors import ServerError
from maru_core.protocol import Done, Error, ErrorCode, Hold, Inspect, Match, Pin, Report
from maru_server import views
from maru_server.calls import Deferred
from maru_server.inspection import SUBJECTS
from maru_server.sessions import Peer
from maru_server.tree import ROOT_ROW, PrefixTree
from maru_server.views import LIMIT_MAX, snapshot, tree_view
from tests.server.live import Running, store
from tests.support import namespace

NOW_NS = 10**18
SECOND = 10**9


def build(shape: dict[str, str | None], used: dict[str, int] | None = None, nbytes: int = 100) -> PrefixTree:
    """A tree of pages with names; ``shape`` has each page's parent, parents first. ``used``: seconds ago."""
    tree = PrefixTree(7)
    rows: dict[str, int] = {}
    for name, parent in shape.items():
        key = name.encode().ljust(32, b".")
        above = ROOT_ROW if parent is None else rows[parent]
        rows[name] = int(tree.add_chain([key], above, NOW_NS - SECOND * (used or {}).get(name, 5))[0])
    at = np.fromiter(rows.values(), np.int64)
    one = np.ones(len(at), np.uint64)
    tree.adopt_objects(0, 0, at, np.arange(len(at), dtype=np.uint32), one, one * nbytes)
    return tree


def name(digest: str | None) -> str | None:
    return None if digest is None else bytes.fromhex(digest).decode().rstrip(".")


def view(tree: PrefixTree, limit: int = 64, sort: Any = "heat") -> list[dict[str, Any]]:
    return tree_view(snapshot([tree], {"kv": 0}, NOW_NS), limit, sort)


def check_sums(rows: list[dict[str, Any]]) -> None:
    """Parents first, and every row's subtree is itself and the rows under it."""
    assert all((row["parent"] < 0) == (row["kind"] == "namespace") for row in rows)
    for at, row in enumerate(rows):
        below = [other for other in rows if other["parent"] == at]
        assert row["parent"] < at, "parents come first"
        assert row["subtree_bytes"] == sum(other["subtree_bytes"] for other in below) + row["bytes"]
        assert row["subtree_pages"] == sum(other["subtree_pages"] for other in below) + row["pages"]
        assert row["subtree_idle_s"] <= min([row["idle_s"], *(other["subtree_idle_s"] for other in below)])


def test_a_run_of_pages_is_one_node_and_ends_where_it_branches() -> None:
    tree = build({"a": None, "b": "a", "c": "b", "d": "c", "e": "c", "f": "e"})
    top, *runs = view(tree)
    assert (top["kind"], top["namespace"], top["parent"], top["nodes"]) == ("namespace", 7, -1, 3)
    assert (top["subtree_pages"], top["subtree_bytes"]) == (6, 600)
    found = {(name(row["first"]), name(row["last"])): row for row in runs}
    assert set(found) == {("a", "c"), ("d", "d"), ("e", "f")}
    assert [found[ends]["depth"] for ends in (("a", "c"), ("d", "d"), ("e", "f"))] == [0, 3, 3]
    assert [found[ends]["pages"] for ends in (("a", "c"), ("d", "d"), ("e", "f"))] == [3, 1, 2]
    assert found["a", "c"]["subtree_bytes"] == 600
    assert found["a", "c"]["components"] == ["kv"]
    assert all(row["kind"] == "run" for row in runs)
    check_sums([top, *runs])


def test_the_hottest_are_shown_with_all_above_them_and_the_rest_is_summed() -> None:
    shape = {"root": None} | {f"x{i}": "root" for i in range(10)} | {"deep": "x3", "side": "x3"}
    tree = build(shape, {"root": 90} | {f"x{i}": 50 + i for i in range(10)} | {"deep": 1, "side": 60})
    rows = view(tree, 3)
    assert [name(row["first"]) for row in rows] == [None, "root", "x3", "deep", None, None]
    assert [row["kind"] for row in rows[4:]] == ["other", "other"]
    under_root, under_x3 = rows[4:]
    assert (under_root["parent"], under_root["nodes"], under_root["bytes"]) == (1, 9, 900)
    assert (under_root["idle_s"], under_root["depth"]) == (50, 1)
    assert (under_x3["parent"], under_x3["nodes"], under_x3["pages"], under_x3["idle_s"]) == (2, 1, 1, 60)
    assert (rows[1]["idle_s"], rows[1]["subtree_idle_s"]) == (90, 1)
    check_sums(rows)


def test_by_size_the_largest_subtree_comes_first() -> None:
    shape = {"small": None, "large": None} | {f"l{i}": "large" for i in range(4)}
    tree = build(shape, {"small": 0, "large": 100})
    assert [name(row["first"]) for row in view(tree, 1, "bytes")[1:2]] == ["large"]
    assert [name(row["first"]) for row in view(tree, 1, "heat")[1:2]] == ["small"]


def test_guards_are_shown_where_they_are_and_where_they_keep_others() -> None:
    tree = build({"a": None, "b": "a", "c": "a"})
    tree.guard(tree.rows[b"b".ljust(32, b".")])
    found = {name(row["first"]): row for row in view(tree)}
    assert [found[key]["guarded"] for key in ("a", "b", "c")] == [0, 1, 0]
    assert [found[key]["kept"] for key in ("a", "b", "c")] == [True, True, False]
    assert view(tree, 1)[-1]["guarded"] == 1, "also in the rest"


def test_pages_that_are_gone_leave_no_branch_behind() -> None:
    tree = build({"a": None, "b": "a", "c": "b", "x": "a"})
    row = tree.rows[b"x".ljust(32, b".")]
    tree.strip(np.array([row]))
    tree.remove(row)
    assert [(name(r["first"]), name(r["last"])) for r in view(tree)[1:]] == [("a", "c")]


def test_what_is_only_being_written_is_no_branch_and_no_page() -> None:
    tree = build({"a": None, "b": "a", "c": "b"})
    row = int(tree.add_chain([b"w" * 32], 0, NOW_NS)[0])
    tree.hold(0, 0, np.array([row]), np.array([9], np.uint32), 1, 100)
    top, *runs = view(tree)
    assert [(name(r["first"]), name(r["last"]), r["pages"]) for r in runs] == [("a", "c", 3)]
    assert (top["subtree_pages"], top["subtree_bytes"]) == (3, 300)


def test_nothing_stored_is_no_rows() -> None:
    assert view(PrefixTree(0)) == []
    assert tree_view(snapshot([], {}, NOW_NS)) == []


def test_pages_that_go_after_the_snapshot_are_not_shown() -> None:
    tree = build({"a": None, "b": "a", "c": "a"})
    taken = snapshot([tree], {"kv": 0}, NOW_NS)
    row = tree.rows[b"c".ljust(32, b".")]
    tree.strip(np.array([row]))
    tree.remove(row)
    rows = tree_view(taken)
    check_sums(rows)
    assert [(name(row["first"]), name(row["last"])) for row in rows[1:]] == [("a", "b")]
    # One that goes while its hash is looked for has none.
    forest = views._Forest(taken)
    for gone in ("b", "a"):
        row = tree.rows[gone.encode().ljust(32, b".")]
        tree.strip(np.array([row]))
        tree.remove(row)
    assert [row["first"] for row in forest.rows(np.array([0]), np.array([0, -1]))] == [None]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sort", ["heat", "bytes"])
def test_any_tree_agrees_with_a_plain_walk(seed: int, sort: Any) -> None:
    random_ = random.Random(seed)
    shape: dict[str, str | None] = {}
    used = {}
    for i in range(400):
        parents = list(shape)
        # Mostly runs, some of them very deep.
        shape[f"n{i}"] = None if not parents or random_.random() < 0.03 else (
            parents[-1] if random_.random() < 0.8 else random_.choice(parents)
        )  # fmt: skip
        used[f"n{i}"] = random_.randrange(10_000)
    tree = build(shape, used)
    children: dict[str | None, list[str]] = {}
    for key, parent in shape.items():
        children.setdefault(parent, []).append(key)

    def subtree(key: str) -> Iterator[str]:
        yield key
        for child in children.get(key, []):
            yield from subtree(child)

    rows = view(tree, 400, sort)
    check_sums(rows)
    expected = {}
    for key, parent in shape.items():
        if parent is None or len(children[parent]) > 1:
            run = [key]
            while len(children.get(run[-1], [])) == 1:
                run.append(children[run[-1]][0])
            pages = list(subtree(key))
            expected[key] = (run[-1], len(run), len(pages), min(used[p] for p in run), min(used[p] for p in pages))
    assert {
        name(row["first"]): (
            name(row["last"]),
            row["pages"],
            row["subtree_pages"],
            row["idle_s"],
            row["subtree_idle_s"],
        )
        for row in rows[1:]
    } == expected
    for limit in (1, 7, 50):
        part = view(tree, limit, sort)
        check_sums(part)
        chosen = [row for row in part if row["kind"] == "run"]
        assert len(chosen) == min(limit, len(expected))
        measure = "subtree_idle_s" if sort == "heat" else "subtree_bytes"
        values = sorted((row[measure] for row in rows[1:]), reverse=sort == "bytes")
        assert sorted((row[measure] for row in chosen), reverse=sort == "bytes") == values[: len(chosen)]


def test_several_trees_stand_side_by_side() -> None:
    first, second = build({"a": None, "b": "a"}), build({"c": None}, nbytes=50)
    second.number = 9
    rows = tree_view(snapshot([first, PrefixTree(8), second], {"kv": 0}, NOW_NS))
    assert [(row["kind"], row["namespace"], row["subtree_bytes"]) for row in rows] == [
        ("namespace", 7, 200), ("namespace", 9, 50), ("run", 7, 200), ("run", 9, 50),
    ]  # fmt: skip
    assert [row["parent"] for row in rows] == [-1, -1, 0, 1]


def test_the_trees_may_change_once_the_snapshot_is_taken() -> None:
    tree = build({"a": None, "b": "a", "c": "b"})
    taken = snapshot([tree], {"kv": 0}, NOW_NS)
    before = tree_view(taken)
    # In place: columns that grow are other arrays afterwards.
    tree.parent[:3] = -1
    tree.child[:3] = -1
    assert tree_view(taken) == before
    tree.add_chain([bytes([i]) * 32 for i in range(200)], 1, NOW_NS)
    assert tree_view(taken) == before
    # Figures are of the time when they are added up, and still add up.
    tree = build({"a": None, "b": "a", "c": "a"})
    taken = snapshot([tree], {"kv": 0}, NOW_NS)
    tree.last_use[:] = NOW_NS
    tree.tables[0].have[1] = 0
    rows = tree_view(taken)
    check_sums(rows)
    assert (rows[0]["subtree_pages"], rows[0]["idle_s"]) == (2, 0)


# ---------------------------------------------------------------- asked for in a message


def inspect(client: Client, what: str, **options: Any) -> Any:
    reply = client.server.send(Inspect(1, client.session, what, **options), client.peer)
    if isinstance(reply, Deferred):
        reply = reply.work()
    return reply.rows if isinstance(reply, Report) else reply


def test_namespaces_have_their_record_and_what_they_hold(server: Server, client: Client) -> None:
    other = server.client("other", tag="b")
    client.store(chain("x", 3), nbytes=3000)
    client.store(chain("x", 2), component="draft", nbytes=500)
    server.now += 7
    server.client("third", tag="empty")
    other.store(chain("y", 1), nbytes=4096)
    server.now += 2
    rows = inspect(client, "namespaces")
    assert [row["namespace"] for row in rows][:2] == [other.namespace, client.namespace]
    last, mine, empty = rows
    assert (mine["pages"], mine["bytes"], mine["idle_s"]) == (3, 10_000, 9)
    assert mine["components"] == {
        "kv": {"pages": 3, "bytes": 9000, "object_bytes": 3000, "world": 1},
        "draft": {"pages": 2, "bytes": 1000, "object_bytes": 500, "world": 1},
    }
    assert mine["record"]["kv_dtype"] == "bfloat16"
    assert len(mine["digest"]) == 64
    assert (last["record"]["tag"], last["idle_s"]) == ("b", 2)
    assert (empty["pages"], empty["bytes"], empty["idle_s"]) == (0, 0, None)
    assert inspect(client, "namespaces", limit=1) == [last]
    assert inspect(client, "namespaces", namespace=client.namespace) == [mine]


def test_sessions_have_what_they_hold_and_who_needs_attention_leads(server: Server, client: Client) -> None:
    late = server.client("late")
    late.reserve(chain("x", 3))
    server.now += 3
    rows = inspect(client, "sessions")
    assert [row["name"] for row in rows] == ["late", "client"]
    assert (rows[0]["slots_reserved"], rows[0]["slots_quarantined"], rows[0]["silent"]) == (3, 0, False)
    assert (rows[0]["heard_s"], rows[0]["age_s"], rows[1]["heard_s"], rows[1]["age_s"]) == (3, 3, 0, 3)
    assert [row["you"] for row in rows] == [False, True]
    server.wait(server.config.lease_s + 1, alive=(client,))
    rows = inspect(client, "sessions")
    assert (rows[0]["slots_reserved"], rows[0]["slots_quarantined"], rows[0]["silent"]) == (0, 3, True)
    assert (rows[0]["host"], rows[0]["pid"]) == ("host", 1)


def test_the_tree_by_size(server: Server, client: Client) -> None:
    client.store(chain("large", 6))
    server.now += 5
    client.store(chain("late", 1))
    assert inspect(client, "tree", limit=1)[1]["pages"] == 1
    assert inspect(client, "tree", limit=1, sort="bytes")[1]["pages"] == 6


def test_the_tree_is_worked_out_later(server: Server, client: Client) -> None:
    client.store(chain("x", 4))
    client.store(chain("y", 2))
    reply = server.send(Inspect(1, client.session, "tree", limit=1))
    assert isinstance(reply, Deferred)
    client.store(chain("z", 3))
    rows = reply.work().rows
    assert [row["kind"] for row in rows] == ["namespace", "run", "other"]
    assert sum(row["pages"] for row in rows) == 6, "as it was when it was asked for"
    client.clear()
    assert reply.work().rows == []


@pytest.mark.parametrize("what", SUBJECTS)
def test_every_subject_is_answered_and_changes_nothing(server: Server, client: Client, what: str) -> None:
    client.store(chain("x", 4))
    before = server.stats
    assert isinstance(inspect(client, what), list)
    assert server.stats == before


@pytest.mark.parametrize(
    ("options", "code", "part"),
    [
        ({"what": "secrets"}, ErrorCode.INVALID, "what is 'secrets': ask for one of namespaces, sessions"),
        ({"what": "tree", "sort": "size"}, ErrorCode.INVALID, "sort is 'size': ask for one of heat, bytes"),
        ({"what": "tree", "limit": 0}, ErrorCode.INVALID, "limit is 0"),
        ({"what": "tree", "limit": LIMIT_MAX + 1}, ErrorCode.INVALID, str(LIMIT_MAX + 1)),
        ({"what": "tree", "namespace": 99}, ErrorCode.UNKNOWN_NAMESPACE, "namespace 99"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    server: Server, client: Client, options: dict[str, Any], code: ErrorCode, part: str
) -> None:
    reply = server.send(Inspect(1, client.session, **options))
    assert isinstance(reply, Error)
    assert reply.code == code
    assert part in reply.message


def test_rows_travel_over_the_wire(tmp_path: Path) -> None:
    running = Running(tmp_path)
    try:
        session = running.session()
        number = session.open_namespace(namespace().record())
        store(session, number, 20)
        store(session, number, 3, seed=2)
        rows = session.inspect("tree", number, limit=1)
        assert [(row["kind"], row["pages"]) for row in rows] == [("namespace", 0), ("run", 3), ("other", 20)]
        assert session.inspect("namespaces")[0]["pages"] == 23
        assert session.inspect("sessions")[0]["name"] == "test"
        with pytest.raises(ServerError, match="what is 'x'"):
            session.inspect("x")
        session.close()
    finally:
        running.stop()


def test_a_pool_of_many_sizes_adds_up() -> None:
    server = Server(geometry(8, 8))
    client = server.client()
    for number, nbytes in enumerate((100, 4096, 20_000)):
        client.store(chain(number, 2), nbytes=nbytes)
    rows = inspect(client, "tree")
    assert rows[0]["subtree_bytes"] == 2 * (100 + 4096 + 20_000) == inspect(client, "namespaces")[0]["bytes"]


def test_tenants_have_what_their_namespaces_hold(server: Server, client: Client) -> None:
    other = server.client("other", tag="b")
    client.store(chain("x", 3), nbytes=3000)
    server.now += 5
    other.store(chain("y", 1), nbytes=4096)
    assert inspect(client, "tenants") == [
        {
            "tenant": "",
            "sessions": 2,
            "namespaces": 2,
            "pages": 4,
            "bytes": 13096,
            "idle_s": 0.0,
            "used_bytes": 4 * 4096,
            "quota_bytes": None,
        }
    ]


def test_holds_are_shown_until_they_end(server: Server, client: Client) -> None:
    client.store(chain("x", 3))
    hold = Hold(b"request", ranks=2, seconds=20)
    server.send(Match(1, client.session, client.namespace, ["kv"], 0, chain("x", 3), hold=hold))
    server.now += 5
    (row,) = inspect(client, "holds")
    assert (row["request"], row["page"], row["pages"]) == (b"request".hex(), chain("x", 1, 2).hex(), 3)
    assert (row["bytes"], row["ranks"], row["ranks_left"], row["age_s"], row["left_s"]) == (3 * 4096, 2, 2, 5, 15)
    assert inspect(client, "tree")[1]["guarded"] == 1
    assert inspect(client, "holds", namespace=server.client("other", tag="b").namespace) == []
    server.wait(16, alive=(client,))
    assert inspect(client, "holds") == []


def test_a_quota_is_shown_before_its_tenant_has_come() -> None:
    server = Server(quotas={"a": 0.5})
    operator = server.client()
    assert {row["tenant"]: row["quota_bytes"] for row in inspect(operator, "tenants")} == {"": None, "a": 4 * 8 * 4096}
    other = server.client("b", tag="b", peer=Peer("b", False))
    assert [row["tenant"] for row in inspect(other, "tenants")] == ["b"]


def test_a_tenant_sees_its_own_and_operators_see_all() -> None:
    server = Server(quotas={"a": 0.5})
    operator = server.client()
    clients = {name: server.client(name, tag=name, peer=Peer(name, False)) for name in ("a", "b")}
    for name, client in clients.items():
        client.store(chain(name, 2))
        pinned = server.send(Pin(1, operator.session, client.namespace, chain(name, 1, 1)))
        assert isinstance(pinned, Done), pinned
        hold = Hold(b"request", ranks=2, seconds=20)
        server.send(Match(1, client.session, client.namespace, ["kv"], 0, chain(name, 2), hold=hold), client.peer)
    mine = clients["a"]
    assert [row["tenant"] for row in inspect(mine, "namespaces")] == ["a"]
    assert [row["tenant"] for row in inspect(mine, "sessions")] == ["a"]
    (tenant,) = inspect(mine, "tenants")
    assert (tenant["tenant"], tenant["used_bytes"], tenant["quota_bytes"]) == ("a", 2 * 4096, 4 * 8 * 4096)
    for what in ("pins", "holds", "tree"):
        rows = inspect(mine, what)
        assert rows
        assert {row["namespace"] for row in rows} == {mine.namespace}, what
        assert len({row["namespace"] for row in inspect(operator, what)}) >= 2, what
    assert {row["tenant"] for row in inspect(operator, "namespaces")} == {"", "a", "b"}
    assert {row["tenant"] for row in inspect(operator, "sessions")} == {"", "a", "b"}
    assert {row["tenant"] for row in inspect(operator, "tenants")} == {"", "a", "b"}
    for what in SUBJECTS:
        if what not in ("sessions",):
            reply = inspect(mine, what, namespace=clients["b"].namespace)
            assert isinstance(reply, Error), what
            assert reply.code == ErrorCode.UNKNOWN_NAMESPACE
