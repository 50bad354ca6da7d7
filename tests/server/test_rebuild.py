"""A server that starts finds what was acknowledged, and believes nothing half-written or contradictory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from maru_harness import Client, Server, chain, geometry
from stepping import SteppingDirectory

from maru_core.pool.format import RESERVED
from maru_core.protocol import HASH_BYTES, NO_SLOT, ROOT
from maru_server.directory import CHECK_WORD, GENERATION_WORD


def stored(server: Server, client: Client) -> dict[str, list[int]]:
    """Some chains with all that a pool can hold."""
    where = {}
    where["a"] = client.store(chain("a", 4)).slots.tolist()
    where["b"] = client.store(chain("b", 2), parent=chain("a", 1, start=1)).slots.tolist()
    where["orphan"] = client.store(chain("o", 2), parent=chain("unknown", 1)).slots.tolist()
    for shard in range(2):
        where[f"shard{shard}"] = client.store(chain("s", 2), component="tp", shard=shard, world=2).slots.tolist()
    where["large"] = client.store(chain("a", 1), component="mamba", nbytes=9000).slots.tolist()
    return where


def rewrite(server: Server, slot: int, **fields: object) -> None:
    """Change a record in the pool, with a fitting check."""
    for field, value in fields.items():
        server.directory.records[field][slot] = np.void(value) if isinstance(value, bytes) else value
    words = server.directory.words
    words[slot, CHECK_WORD] = server.directory.checks(np.array([slot]))[0]


def test_everything_committed_is_found_again(server: Server, client: Client) -> None:
    where = stored(server, client)
    before = client.match(chain("a", 4)).__dict__
    for _ in range(2):
        server.restart()
        client.connect()
        assert client.match(chain("a", 4)).__dict__ == before
        assert client.match(chain("a", 2) + chain("b", 2)).slots == where["a"][:2] + where["b"]
        assert client.match(chain("o", 2)).slots == where["orphan"]
        for shard in range(2):
            assert client.match(chain("s", 2), ["tp"], shard=shard).slots == where[f"shard{shard}"]
        assert client.match(chain("a", 4), ["kv", "mamba"]).slots == [where["a"][0], where["large"][0]]
        assert server.stats["discarded"] == 0


def test_the_tree_is_the_same_again(server: Server, client: Client) -> None:
    stored(server, client)
    server.restart()
    client.connect()
    assert client.reserve(chain("a", 1, start=2)).status == [4]
    assert client.delete(chain("a", 1, start=1)) == 5
    assert client.match(chain("a", 4)).pages == 1
    client.store(chain("unknown", 1))
    assert client.delete(chain("unknown", 1)) == 3


def test_reserved_slots_are_nobodys_after_a_restart(server: Server, client: Client) -> None:
    grant = client.reserve(chain("a", 3))
    client.commit(grant, [0])
    server.restart()
    assert server.stats["slots_quarantined"] == 2
    client.connect()
    assert client.commit(grant, [0]) == [0], "it is stored, and is told so again"
    fresh = client.store(chain("a", 3, start=1), parent=chain("a", 1))
    assert not set(fresh.slots.tolist()) & set(grant.slots.tolist())
    server.wait(590, step=4, alive=(client,))
    assert server.stats["slots_quarantined"] == 2
    server.wait(20, step=4, alive=(client,))
    assert server.stats["slots_quarantined"] == 0
    assert client.match(chain("a", 4)).pages == 4


def test_killed_right_after_its_answers_before_the_books_are_kept(server: Server, client: Client) -> None:
    old = client.store(chain("old", 3))
    client.delete(chain("old", 1))
    server.checked = False  # the check would bring the books up to date
    grant = client.reserve(chain("a", 3))
    assert set(grant.slots.tolist()) == set(old.slots.tolist()), "records of former objects lie there"
    server.restart()
    server.checked = True
    assert server.stats["slots_quarantined"] == 3
    client.connect()
    assert client.match(chain("old", 3)).pages == 0
    server.checked = False
    stored = client.store(chain("b", 3))
    assert not set(stored.slots.tolist()) & set(grant.slots.tolist())
    server.restart()
    server.checked = True
    client.connect()
    assert client.match(chain("b", 3)).pages == 3
    assert client.match(chain("b", 3), sparse=True).slots == stored.slots.tolist()


def test_an_old_session_is_unknown_to_a_new_server(server: Server, client: Client) -> None:
    old = client.session
    server.restart()
    assert server.stats["sessions"] == 0
    client.connect()
    assert client.session != old


@pytest.mark.parametrize("offset", [4, 6, 8, 12, 16, 24, 32, 64, 96, 112, 120])
def test_a_damaged_record_is_freed_and_its_page_missed(server: Server, client: Client, offset: int) -> None:
    grant = client.store(chain("a", 3))
    slot = int(grant.slots[1])
    server.meta[server.geometry.off_directory + slot * 128 + offset] ^= 1
    server.restart()
    client.connect()
    assert server.stats["discarded"] == 1
    assert client.match(chain("a", 3)).pages == 1
    assert client.match(chain("a", 3), sparse=True).slots == [grant.slots[0], NO_SLOT, grant.slots[2]]
    assert server.directory.generations[slot] > grant.generations[1]
    client.store(chain("a", 1, start=1), parent=chain("a", 1))
    assert client.match(chain("a", 3)).pages == 3


def test_a_record_of_another_generation_is_freed(server: Server, client: Client) -> None:
    grant = client.store(chain("a", 2))
    server.directory.generations[grant.slots[0]] += np.uint64(1)
    server.restart()
    client.connect()
    assert client.match(chain("a", 2)).pages == 0
    assert server.stats["discarded"] == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"namespace": 3},
        {"namespace": 4_000_000_000},
        {"component": 3},
        {"component": 60_000},
        {"shard": 1},
        {"world": 0},
        {"length": 0},
        {"length": 4097},
        {"page_hash": ROOT},
        {"parent_hash": chain("a", 1, start=1)},
        {"state": 7},
    ],
)
def test_an_impossible_record_is_freed_though_its_check_fits(
    server: Server, client: Client, fields: dict[str, object]
) -> None:
    grant = client.store(chain("a", 2))
    rewrite(server, int(grant.slots[1]), **fields)
    server.restart()
    client.connect()
    assert server.stats["discarded"] == 1
    assert client.match(chain("a", 2)).pages == 1


def test_of_two_records_of_one_object_one_stays(server: Server, client: Client) -> None:
    first, second = client.store(chain("a", 2)), client.store(chain("b", 2))
    server.directory.generations[second.slots] += np.uint64(5)
    for index, slot in enumerate(second.slots.tolist()):
        words = server.directory.words
        words[slot] = words[int(first.slots[index])]
        words[slot, GENERATION_WORD] = server.directory.generations[slot]
        rewrite(server, slot)
    server.restart()
    client.connect()
    assert server.stats["discarded"] == 2
    assert client.match(chain("a", 2)).slots == second.slots.tolist()
    assert client.match(chain("b", 2)).pages == 0


def test_records_that_contradict_each_other_are_freed(server: Server, client: Client) -> None:
    one = client.store(chain("a", 2), shard=0, world=2)
    two = client.store(chain("a", 2), shard=1, world=2)
    rewrite(server, int(two.slots[0]), parent_hash=chain("elsewhere", 1))
    rewrite(server, int(two.slots[1]), length=3999)
    server.restart()
    client.connect()
    assert server.stats["discarded"] == 2
    assert client.match(chain("a", 2), sparse=True).pages == 0
    assert client.reserve(chain("a", 2), shard=0, world=2).status == [1, 1]
    assert client.store(chain("a", 2), shard=1, world=2).status == [0, 0]
    assert client.match(chain("a", 2)).slots == one.slots.tolist()


def test_a_cycle_of_parents_is_freed_with_what_hangs_below(server: Server, client: Client) -> None:
    grant = client.store(chain("a", 4))
    client.store(chain("b", 2))
    rewrite(server, int(grant.slots[0]), parent_hash=chain("a", 1, start=2))
    server.restart()
    client.connect()
    assert server.stats["discarded"] == 4
    assert server.stats["pages"] == 2
    assert client.match(chain("b", 2)).pages == 2


@pytest.mark.parametrize("size", [1, 4097, 1 << 40, 2048])
def test_a_damaged_extent_is_uncut_and_its_slots_freed(server: Server, client: Client, size: int) -> None:
    grant = client.store(chain("a", 10))
    server.directory.extents[0] = size
    server.restart()
    client.connect()
    assert client.match(chain("a", 10), sparse=True).slots == [NO_SLOT] * 8 + grant.slots[8:].tolist()
    assert (server.directory.generations[grant.slots[:8]] > grant.generations[:8]).all()


def test_records_of_a_namespace_that_is_damaged_are_freed(server: Server, client: Client) -> None:
    client.store(chain("a", 2))
    server.meta[server.geometry.off_namespaces + 100] ^= 1
    server.restart()
    assert server.stats["discarded"] == 2
    assert server.stats["namespaces"] == 0
    client.connect()
    assert client.match(chain("a", 2)).pages == 0


def test_extents_without_objects_return_at_the_start(server: Server, client: Client) -> None:
    client.store(chain("a", 2), nbytes=9000)
    server.directory.set_extent(3, 8192)  # killed between cutting it and the first reserve
    server.restart()
    assert server.stats["extents_cut"] == 1
    assert server.directory.extents[3] == 0


def test_clocks_that_went_back_do_not_make_pages_eternal(server: Server, client: Client) -> None:
    client.store(chain("a", 2))
    server.now -= 500
    server.restart()
    assert (server.state.books.trees[0].last_use[:2] <= (server.now + 1_800_000_000.0) * 1e9).all()


# ---------------------------------------------------------------- killed at any store


@dataclass
class Known:
    """What a client may rely on at some moment: object -> (slot, generation); None where it does not know."""

    acknowledged: dict[tuple[str, bytes, int], tuple[int, int]]
    possible: set[tuple[str, bytes, int, int, int]]
    told: dict[int, int]


class Script:
    """A client that keeps a record of what it was told."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.known = Known({}, set(), {})

    def reserve(self, pages: bytes, component: str = "kv", shard: int = 0, **options: object):
        grant = self.client.reserve(pages, component=component, shard=shard, **options)
        self.known.told.update(zip(grant.slots.tolist(), grant.generations.tolist(), strict=True))
        keys = [pages[i : i + HASH_BYTES] for i in range(0, len(pages), HASH_BYTES)]
        return grant, [(component, key, shard) for key, state in zip(keys, grant.status, strict=True) if state == 0]

    def commit(self, taken) -> None:
        grant, objects = taken
        slots, generations = grant.mine()
        places = list(zip(slots.tolist(), generations.tolist(), strict=True))
        self.known.possible.update((*thing, *place) for thing, place in zip(objects, places, strict=True))
        status = self.client.commit(grant, checksums=np.arange(1, 1 + len(slots), dtype="<u8").tobytes())
        for thing, place, state in zip(objects, places, status, strict=True):
            if state == 0:
                self.known.acknowledged[thing] = place

    def forget(self, pages: bytes) -> None:
        """From now on nothing is promised about these pages."""
        for index in range(0, len(pages), HASH_BYTES):
            key = pages[index : index + HASH_BYTES]
            self.known.acknowledged = {
                thing: place for thing, place in self.known.acknowledged.items() if thing[1] != key
            }


def life(script: Script) -> None:
    """A bit of everything, in a pool so small that it evicts."""
    client = script.client
    script.commit(script.reserve(chain("a", 3)))
    script.commit(script.reserve(chain("a", 2), component="tp", shard=0, world=2, nbytes=8000))
    script.commit(script.reserve(chain("a", 2), component="tp", shard=1, world=2, nbytes=8000))
    late = script.reserve(chain("l", 2))
    client.server.now += 1
    client.touch(chain("a", 3))
    client.server.state.tick(client.server.now)
    client.release(script.reserve(chain("r", 2))[0])
    script.commit(script.reserve(chain("b", 2), parent=chain("a", 1, start=2)))
    script.forget(chain("b", 2))
    client.delete(chain("b", 1))
    script.commit(script.reserve(chain("c", 2)))
    # From here on the pool is full: anything may be evicted.
    script.known.acknowledged.clear()
    taken = script.reserve(chain("d", 20))
    script.commit(taken)
    script.commit(late)
    script.forget(chain("d", 20) + chain("l", 2))
    script.known.acknowledged.clear()
    client.clear()
    script.commit(script.reserve(chain("e", 2)))


def snapshots() -> list[tuple[np.ndarray, Known]]:
    taken: list[tuple[np.ndarray, Known]] = []
    server = Server(geometry(3, 4), directory=SteppingDirectory, checked=False, high=1.0)
    script: list[Script] = []

    def look() -> None:
        known = script[0].known if script else Known({}, set(), {})
        taken.append((server.meta.copy(), Known(dict(known.acknowledged), set(known.possible), dict(known.told))))

    server.directory.after_store = look
    script.append(Script(server.client()))
    life(script[0])
    assert server.stats["evicted_pages"] > 0
    assert script[0].known.acknowledged.keys() == {("kv", key, 0) for key in (chain("e", 1), chain("e", 1, start=1))}
    return taken


def committed(server: Server) -> dict[tuple[str, bytes, int], tuple[int, int]]:
    names = {number: name for name, number in server.directory.components().items()}
    found = {}
    for slot in np.flatnonzero(server.directory.states == 2).tolist():
        record = server.directory.records[slot]
        thing = (names[int(record["component"])], record["page_hash"].tobytes(), int(record["shard"]))
        assert thing not in found
        found[thing] = (slot, int(record["generation"]))
    return found


def inspect(meta: np.ndarray, known: Known) -> None:
    """What must hold of a server that starts over this memory."""
    server = Server(geometry(3, 4), meta=meta.copy())
    found = committed(server)
    for thing, place in known.acknowledged.items():
        assert found.get(thing) == place, "an acknowledged commit was lost"
    for thing, place in found.items():
        assert (*thing, *place) in known.possible, "something that nobody committed is found"
    directory = server.directory
    client = server.client("after")
    writing = set(np.flatnonzero(directory.states == RESERVED).tolist())
    grant = client.reserve(chain("fresh", 12))
    for slot, generation in zip(*(part.tolist() for part in grant.mine()), strict=True):
        assert slot not in writing, "a slot was given away under a writer"
        assert generation > known.told.get(slot, 0), "a generation was given twice"
    assert not set(client.commit(grant)) - {0}


def test_killed_at_any_store_nothing_acknowledged_is_lost_and_nothing_else_believed() -> None:
    taken = snapshots()
    assert len(taken) > 500
    for meta, known in taken:
        inspect(meta, known)


def test_killed_while_freeing_no_old_location_is_good_where_an_extent_was_cut_anew() -> None:
    """A reader validates what it remembers by the generation alone, also when a next server has the slot's bytes."""
    server = Server(geometry(extents=1), directory=SteppingDirectory, checked=False)
    client = server.client()
    client.store(chain("a", 8))
    old = client.match(chain("a", 8))
    moments: list[np.ndarray] = []
    server.directory.after_store = lambda: moments.append(server.meta.copy())
    assert client.delete(chain("a", 1)) == 8
    server.directory.after_store = None
    assert len(moments) >= 16
    cut_anew = 0
    for moment in moments:
        server.restart(moment)
        client.connect()
        grant = client.reserve(chain("b", 4), nbytes=8192)
        offsets = grant.offsets[np.array(grant.status) == 0].tolist()
        taken = {offset + half for offset in offsets for half in (0, 4096)}
        cut_anew += bool(taken)
        for slot, offset, generation in zip(old.slots, old.offsets, old.generations, strict=True):
            assert offset not in taken or server.directory.generations[slot] != generation
    assert cut_anew


def test_killed_while_rebuilding_it_rebuilds_the_same() -> None:
    server = Server()
    client = server.client()
    stored(server, client)
    client.reserve(chain("w", 2))
    for offset in (32, 160):
        server.meta[server.geometry.off_directory + offset] ^= 1
    server.directory.set_extent(6, 8192)
    seen: list[np.ndarray] = []
    meta = server.meta.copy()

    class Directory(SteppingDirectory):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            self.after_store: Callable[[], None] = lambda: seen.append(self.meta.copy())

    whole = committed(Server(meta=meta, directory=Directory))
    assert len(seen) >= 4
    for snapshot in seen:
        assert committed(Server(meta=snapshot)) == whole
