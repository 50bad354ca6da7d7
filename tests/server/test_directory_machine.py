"""The pool's tables against a plain list of what was acknowledged, killed after any single store."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from maru_harness import CREATED_NS, geometry, record
from stepping import SteppingDirectory

from maru_core.pool.format import COMMITTED, FREE, RESERVED
from maru_core.protocol import ROOT
from maru_server.directory import PoolDirectory
from maru_server.pages import words
from maru_server.rebuild import rebuild

PER_EXTENT = 4
SIZES = [4096, 8192, 16_384]
#: After which of a deed's stores the server is killed, if it is.
KILL = st.integers(-600, 300).map(lambda at: at if at >= 0 else None)
#: What is believed of an object: hash, parent, namespace, component, length, checksum, generation.
Object = tuple[bytes, bytes, int, int, int, int, int]


class DirectoryMachine(RuleBasedStateMachine):
    """Three dictionaries by slot: what is written (claimed, perhaps described), what is acknowledged, which generation
    was told last."""

    @initialize()
    def start(self) -> None:
        self.shape = geometry(4, PER_EXTENT)
        self.directory = SteppingDirectory(self.shape, np.zeros(self.shape.off_data, np.uint8))
        self.cut: dict[int, int] = {}
        self.writing: dict[int, Object | None] = {}
        self.stored: dict[int, Object] = {}
        self.told: dict[int, int] = {}
        self.names: dict[str, int] = {}
        self.spaces: dict[Any, int] = {}
        self.births = 0
        self.kill_at: int | None = None
        self.add_name("kv")
        self.add_space("first")
        self.cut_extent(0, 4096)
        self.cut_extent(1, 8192)

    def do(self, deed: Callable[[], Any]) -> Any:
        """Do it. With ``kill_at``, the memory is afterwards that of right after one of its stores, and a server starts on
        it; returns whether that happened."""
        snapshots = []
        if self.kill_at is not None:
            self.directory.after_store = lambda: snapshots.append(self.directory.meta.copy())
        deed()
        self.directory.after_store = None
        if self.kill_at is None or not snapshots:
            return False
        self.directory = SteppingDirectory(self.shape, snapshots[self.kill_at % len(snapshots)])
        self.kill_at = None
        return True

    # ------------------------------------------------------------ deeds

    @rule(extent=st.integers(0, 3), size=st.sampled_from(SIZES), name=st.text("ab", min_size=1, max_size=40), kill=KILL,
          what=st.sampled_from(["extent", "extent", "extent", "name", "space"]))  # fmt: skip
    def change_tables(self, what: str, extent: int, size: int, name: str, kill: int | None) -> None:
        self.kill_at = kill
        if what == "extent":
            self.cut_extent(extent, size)
        elif what == "name":
            self.add_name(name)
        else:
            self.add_space(name)

    def add_name(self, name: str) -> None:
        if name in self.names or len(self.names) == self.shape.component_capacity:
            return
        number = []
        if self.do(lambda: number.append(self.directory.add_component(name))):
            self.rebuilt({}, set())
            found = self.directory.components()
            assert found in (self.names, {**self.names, name: number[0]}), "a name in part"
            self.names = found
        else:
            self.names[name] = number[0]

    def add_space(self, tag: str) -> None:
        content = record(tag)
        number: list[Any] = []
        before = self.directory.namespaces()
        if ("", content) in before or len(before) == self.shape.namespace_capacity:
            return
        if self.do(lambda: number.append(self.directory.add_namespace(content))):
            self.rebuilt({}, set())
            found = self.directory.namespaces()
            assert found in (before, {**before, ("", content): number[0]}), "a namespace in part"
        self.spaces = self.directory.namespaces()

    def cut_extent(self, extent: int, size: int) -> None:
        if extent in self.cut:
            if any(slot // PER_EXTENT == extent for slot in (*self.writing, *self.stored)):
                return
            size = 0
        if self.do(lambda: self.directory.set_extent(extent, size)):
            self.rebuilt({}, set())
        self.cut = {e: int(s) for e, s in enumerate(self.directory.extents.tolist()) if s}

    def free_slots(self) -> list[int]:
        every = [e * PER_EXTENT + i for e, size in self.cut.items() for i in range(self.shape.extent_bytes // size)]
        return [slot for slot in every if slot not in self.writing and slot not in self.stored]

    @precondition(lambda self: self.free_slots())
    @rule(data=st.data(), describe=st.sampled_from([True, True, True, False]), kill=KILL, commit=st.integers(0, 3))
    def reserve(self, data: st.DataObject, describe: bool, kill: int | None, commit: int) -> None:
        """Claim slots, of one extent size and up to a chain long, and mostly say for what; perhaps publish some at once."""
        self.kill_at = None if commit and describe else kill
        first = data.draw(st.sampled_from(self.free_slots()))
        size = self.cut[first // PER_EXTENT]
        mine = [slot for slot in self.free_slots() if self.cut[slot // PER_EXTENT] == size]
        slots = data.draw(st.lists(st.sampled_from(mine), unique=True, min_size=1, max_size=4))
        array = np.array(slots, np.uint32)
        component = data.draw(st.sampled_from(sorted(self.names.values())))
        space = data.draw(st.sampled_from(sorted(self.spaces.values())))
        above = data.draw(st.sampled_from([ROOT, *sorted({o[0] for o in self.stored.values() if o[2] == space})]))
        length = data.draw(st.integers(1, size))
        keys = []
        for _ in slots:
            self.births += 1
            keys.append(hashlib.sha256(str(self.births).encode()).digest())
        parents = [above, *keys[:-1]]
        generations: list[np.ndarray] = []

        def deed() -> None:
            generations.append(self.directory.claim(array))
            if describe:
                self.directory.describe(
                    array, generations[0], namespace=space, component=component, shard=0, world=1, length=length,
                    hashes=words(b"".join(keys)), parents=words(b"".join(parents)), owner=1, now_ns=CREATED_NS,
                )  # fmt: skip

        killed = self.do(deed)
        for index, slot in enumerate(slots):
            generation = int(generations[0][index])
            assert generation > self.told.get(slot, 0), "a generation was given twice"
            about = (keys[index], parents[index], space, component, length, 0, generation)
            self.writing[slot] = about if describe else None
            if not killed:
                self.told[slot] = generation
        if killed:
            for slot in slots:
                del self.writing[slot]
            self.rebuilt({}, set(slots))
        elif commit and describe:
            self.commit(data, True, kill)

    @precondition(lambda self: any(self.writing.values()))
    @rule(data=st.data(), checksums=st.booleans(), kill=KILL)
    def commit(self, data: st.DataObject, checksums: bool, kill: int | None) -> None:
        self.kill_at = kill
        described = sorted(slot for slot, about in self.writing.items() if about is not None)
        slots = data.draw(st.lists(st.sampled_from(described), unique=True, min_size=1, max_size=6))
        # A page is never stored without the page before it, in this order: so an earlier slot of the batch comes first.
        sums = [self.births * 1000 + index + 1 for index in range(len(slots))] if checksums else [0] * len(slots)
        after: dict[int, Object] = {}
        for slot, checksum in zip(slots, sums, strict=True):
            about = self.writing[slot]
            assert about is not None
            after[slot] = (*about[:5], checksum, about[6])
        array = np.array(slots, np.uint32)
        if self.do(lambda: self.directory.commit(array, np.array(sums, np.uint64) if checksums else None)):
            for slot in slots:
                del self.writing[slot]
            found = self.rebuilt(after, set(slots))
            believed = [slot in found for slot in slots]
            assert believed == sorted(believed, reverse=True), "published in another order"
        else:
            for slot in slots:
                del self.writing[slot]
            self.stored.update(after)

    @precondition(lambda self: self.stored or self.writing)
    @rule(data=st.data(), count=st.integers(1, 4), kill=KILL)
    def free(self, data: st.DataObject, count: int, kill: int | None) -> None:
        """Objects without children, as eviction takes them, and slots that were being written."""
        self.kill_at = kill
        parents = {(o[2], o[1]) for o in self.stored.values()}
        leaves = [slot for slot, o in self.stored.items() if (o[2], o[0]) not in parents]
        slots = data.draw(
            st.lists(st.sampled_from(sorted([*leaves, *self.writing])), unique=True, min_size=1, max_size=count)
        )
        array = np.array(slots, np.uint32)
        was = {slot: self.stored.pop(slot) for slot in slots if slot in self.stored}
        wrote = {slot: self.writing.pop(slot) for slot in slots if slot in self.writing}
        if self.do(lambda: self.directory.free(array)):
            found = self.rebuilt(was, set(wrote))
            kept = [slot in found for slot in slots if slot in was]
            assert kept == sorted(kept), "freed in another order"

    @precondition(lambda self: self.stored)
    @rule(data=st.data(), at=st.integers(1, 10**18), kill=KILL)
    def touch(self, data: st.DataObject, at: int, kill: int | None) -> None:
        self.kill_at = kill
        slots = data.draw(st.lists(st.sampled_from(sorted(self.stored)), unique=True, min_size=1))
        times = np.full(len(slots), at, np.int64)
        if self.do(lambda: self.directory.touch(np.array(slots, np.uint32), times)):
            self.rebuilt({}, set())

    @rule()
    def restart(self) -> None:
        self.directory = SteppingDirectory(self.shape, self.directory.meta.copy())
        self.rebuilt({}, set())

    # ------------------------------------------------------------ after a kill

    def rebuilt(self, maybe: dict[int, Object], maybe_writing: set[int]) -> set[int]:
        """A server starts: it finds all that was acknowledged, of ``maybe`` each whole or not at all, and nothing else.
        Slots that somebody may be writing into stay away from everybody. Returns what it found of ``maybe``."""
        self.kill_at = None
        now_ns = CREATED_NS + 10**18
        torn = [
            slot
            for slot in maybe
            if self.directory.states[slot] == COMMITTED and not self.directory.believed(np.array([slot]))[0]
        ]
        found = rebuild(self.directory, now_ns)
        assert found.discarded == len(torn), "of a slot whose freeing was begun, and of nothing else, there is doubt"
        stored = self.on_the_media()
        assert {slot: o for slot, o in stored.items() if slot not in maybe} == self.stored
        for slot, about in stored.items():
            assert about == maybe.get(slot, about), "an object changed"
        reserved = set(found.reserved.tolist())
        assert set(self.writing) <= reserved, "a slot that is written into is free"
        assert reserved <= set(self.writing) | maybe_writing
        assert set(found.occupied.tolist()) == reserved | set(stored)
        objects = sum(int(tree.objects[: tree.size].sum()) for tree in found.trees.values())
        assert objects == len(stored), "the trees hold all of it"
        self.stored = stored
        # The writers' server is gone: what they reserved is never published, and comes back when they cannot write.
        self.writing = dict.fromkeys(reserved, None)
        return set(maybe) & set(stored)

    def on_the_media(self) -> dict[int, Object]:
        """What is believed, read word by word, without the code that rebuilds."""
        slots = np.array([e * PER_EXTENT + i for e in self.cut for i in range(self.shape.extent_bytes // self.cut[e])])
        slots = slots.astype(np.uint32)
        found = {}
        for slot in slots[self.directory.believed(slots)].tolist():
            r = self.directory.records[slot]
            found[slot] = (
                r["page_hash"].tobytes(), r["parent_hash"].tobytes(), int(r["namespace"]), int(r["component"]),
                int(r["length"]), int(r["checksum"]), int(r["generation"]),
            )  # fmt: skip
        return found

    # ------------------------------------------------------------ what always holds

    @invariant()
    def believed_is_what_was_acknowledged(self) -> None:
        if not hasattr(self, "stored"):
            return
        assert self.on_the_media() == self.stored
        again = PoolDirectory(self.shape, self.directory.meta)
        slots = np.array(sorted(self.stored), np.uint32)
        assert again.believed(slots).all()
        assert (again.offsets(slots) == self.directory.offsets(slots)).all()
        assert again.components() == self.names

    @invariant()
    def generations_never_go_back_and_free_slots_have_none_that_was_told(self) -> None:
        for slot, told in getattr(self, "told", {}).items():
            generation, state = int(self.directory.generations[slot]), int(self.directory.states[slot])
            assert generation >= told
            assert state in (FREE, RESERVED, COMMITTED)
            assert (generation == told) == (state != FREE) or (state != FREE and slot in self.writing)


DirectoryMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("MARU_TEST_EXAMPLES", "100")), stateful_step_count=40, deadline=None
)
test_any_deeds_and_kills = DirectoryMachine.TestCase
