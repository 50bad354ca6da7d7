"""Does everything that the server knows fit together? Tests ask after every step; too slow for anything else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from maru_core.pool.format import COMMITTED, FREE, RECORD_BYTES, RESERVED
from maru_server.directory import PoolDirectory
from maru_server.eviction import Evictor
from maru_server.sessions import Reservations, Sessions
from maru_server.slabs import Slabs
from maru_server.tenants import Tenants
from maru_server.tree import ROOT_ROW, UNKNOWN_ROW, PrefixTree


def check(
    directory: PoolDirectory,
    slabs: Slabs,
    trees: Mapping[int, PrefixTree],
    reservations: Reservations,
    sessions: Sessions,
    leaves: Evictor,
    tenants: Tenants,
) -> None:
    """Compare all of them with each other.

    Raises:
        AssertionError: naming what does not fit.
    """
    free_slots, all_slots = slabs.check()
    reserved = reservations.check()
    sessions.check()
    leaves.check()
    for reservation in reservations:
        assert reservation.session is None or sessions.get(reservation.session.number) is reservation.session

    # Every slot of a cut extent is in exactly one place.
    on_pages = {}
    for number, tree in trees.items():
        assert tree.number == number
        for slot, (component, shard, row) in tree.check().items():
            assert slot not in on_pages, "one slot in two trees"
            on_pages[slot] = (tree, component, shard, row)
    slots_of: dict[int, list[int]] = {}
    for slot, (tree, *_) in on_pages.items():
        slots_of.setdefault(tree.number, []).append(slot)
    away: dict[str, list[int]] = {}
    for slot, reservation in reserved.items():
        if reservation.tenant is not None:
            assert reservation.page is None
            away.setdefault(reservation.tenant, []).append(slot)
    tenants.check(trees, slots_of, away.items())
    free = set(free_slots.tolist())
    assert len(free) == len(free_slots), "a slot is free twice"
    live = {slot for slot, reservation in reserved.items() if reservation.page is not None}
    quarantined = set(reserved) - live
    committed = set(on_pages) - live
    parts = (free, live, quarantined, committed)
    assert sum(map(len, parts)) == len(all_slots), "slots = free + reserved + quarantined + committed"
    assert set().union(*parts) == set(all_slots.tolist()), "a slot was lost"
    assert live <= set(on_pages), "a live reservation that is on no page"

    # The pool says the same.
    states = directory.states
    for part, state in ((free, FREE), (live, RESERVED), (quarantined, RESERVED), (committed, COMMITTED)):
        assert (states[sorted(part)] == state).all(), f"state {state} in the pool"
    assert np.count_nonzero(states) == len(reserved) + len(committed), "a slot in use outside the cut extents"
    for slot, reservation in reserved.items():
        at = int(np.flatnonzero(reservation.slots == slot)[0])
        assert reservation.generations[at] == directory.generations[slot], "generation of a reservation"
        if reservation.page is not None:
            tree, component, shard, row = on_pages[slot]
            page = reservation.page
            assert (page.tree, page.component, page.shard, int(page.rows[at])) == (tree, component, shard, row)
    assert directory.believed(np.array(sorted(committed), np.uint32)).all(), "a record that would not be believed"
    for slot, (tree, component, shard, row) in on_pages.items():
        record = directory.records[slot]
        table = tree.tables[component]
        above = int(tree.parent[row])
        assert above != UNKNOWN_ROW, "a page of unknown parent"
        parent = bytes(RECORD_BYTES // 4) if above == ROOT_ROW else tree.key(above)
        assert (
            record["namespace"],
            record["component"],
            record["shard"],
            record["world"],
            record["length"],
            record["page_hash"].tobytes(),
            record["parent_hash"].tobytes(),
        ) == (
            tree.number,
            component,
            shard,
            table.world[row],
            table.length[row],
            tree.key(row),
            parent,
        ), f"the record of slot {slot}"


def check_guards(trees: Mapping[int, PrefixTree], *owners: Mapping[tuple[int, int], int]) -> None:
    """Every guard belongs to a pin or a hold. ``owners`` say how many each has on a (namespace, row)."""
    owned: Counter[tuple[int, int]] = Counter()
    for guards in owners:
        owned.update(guards)
    assert owned == {(n, row): count for n, tree in trees.items() for row, count in tree.guards.items()}, "guards"
