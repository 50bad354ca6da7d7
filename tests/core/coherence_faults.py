"""Faults that are planted in the real code of software coherence, each of which the model of the caches must catch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from maru_core.mover import CxlMover
from maru_core.pool import PoolMemory, opening
from maru_core.pool.coherence import SoftwareCoherence, _FreshWord
from maru_core.pool.format import BLOCK_BYTES
from maru_core.pool.view import PoolView
from maru_core.transfers import Transfers
from maru_server.directory import PoolDirectory

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]
#: By name; True: what the fault replaces is what the recorder has put there.
FAULTS: dict[str, tuple[Fault, bool]] = {}


def fault(plant: Fault) -> Fault:
    FAULTS[plant.__name__] = plant, False
    return plant


def fault_outside(plant: Fault) -> Fault:
    FAULTS[plant.__name__] = plant, True
    return plant


def _in_tables(memory: PoolMemory, address: int) -> bool:
    start = int(memory.meta.ctypes.data)
    return start <= address < start + memory.geometry.off_data


def _skipping(patch: Patch, owner: type, name: str, skips: Callable[..., bool] = lambda *_: True) -> None:
    """A method of ``owner`` that does nothing where ``skips`` says so of its arguments."""
    real = getattr(owner, name)
    patch.setattr(owner, name, lambda self, *args: None if skips(self, *args) else real(self, *args))


class _Moves:
    """Within the mover's own calls, so that a fault of the mover is one of the mover alone."""

    inside = threading.local()

    @classmethod
    def mark(cls, patch: Patch) -> None:
        real = CxlMover._move

        def move(mover: CxlMover, *args: Any, **named: Any) -> None:
            cls.inside.now = True
            try:
                real(mover, *args, **named)
            finally:
                cls.inside.now = False

        patch.setattr(CxlMover, "_move", move)

    @classmethod
    def now(cls, *_: Any) -> bool:
        return getattr(cls.inside, "now", False)


@fault
def slots_not_written_back(patch: Patch) -> None:
    _Moves.mark(patch)
    _skipping(patch, SoftwareCoherence, "write_back_many", _Moves.now)


@fault
def slots_written_back_without_a_fence(patch: Patch) -> None:
    _Moves.mark(patch)
    real = SoftwareCoherence.write_back_many

    def write_back_many(self: SoftwareCoherence, addresses: Any, nbytes: int) -> None:
        if _Moves.now():
            self._cpu.lines_many(self.clean, addresses, nbytes)
        else:
            real(self, addresses, nbytes)

    patch.setattr(SoftwareCoherence, "write_back_many", write_back_many)


@fault
def only_first_line_of_an_object_written_back(patch: Patch) -> None:
    real = SoftwareCoherence.write_back_many
    patch.setattr(
        SoftwareCoherence, "write_back_many", lambda self, addresses, nbytes: real(self, addresses, min(nbytes, 64))
    )


@fault
def last_line_of_an_object_not_written_back(patch: Patch) -> None:
    real = SoftwareCoherence.write_back_many
    patch.setattr(
        SoftwareCoherence,
        "write_back_many",
        lambda self, addresses, nbytes: real(self, addresses, nbytes // 64 * 64 if nbytes > 128 else nbytes),
    )


@fault
def only_first_object_written_back(patch: Patch) -> None:
    real = SoftwareCoherence.write_back_many
    patch.setattr(SoftwareCoherence, "write_back_many", lambda self, addresses, n: real(self, addresses[:1], n))


@fault_outside
def written_back_before_the_copy(patch: Patch) -> None:
    real = CxlMover._copy
    _Moves.mark(patch)
    _skipping(patch, SoftwareCoherence, "write_back_many", _Moves.now)

    def copy(mover: CxlMover, pool: int, offsets: Any, fragments: Any, to_pool: bool) -> None:
        if to_pool:
            _Moves.inside.now = False
            slots = offsets + np.uint64(pool - mover.memory.geometry.off_data)
            mover.memory.coherence.write_back_many(slots, fragments.nbytes)
            _Moves.inside.now = True
        real(mover, pool, offsets, fragments, to_pool)

    patch.setattr(CxlMover, "_copy", copy)


@fault
def published_before_the_copy_is_done(patch: Patch) -> None:
    real = Transfers._commit
    late: list[Any] = []

    def commit(transfers: Transfers, *args: Any) -> Any:
        done = real(transfers, *args)
        while late:
            mover, offsets, buffers = late.pop()
            CxlMover._move(mover, offsets, buffers, to_pool=True)
        return done

    def store(mover: CxlMover, offsets: Any, buffers: Any) -> None:
        late.append((mover, offsets, buffers))

    patch.setattr(CxlMover, "store", store)
    patch.setattr(Transfers, "_commit", commit)


@fault
def slots_not_dropped(patch: Patch) -> None:
    _Moves.mark(patch)
    _skipping(patch, SoftwareCoherence, "invalidate_many", _Moves.now)


@fault_outside
def slots_dropped_after_the_copy(patch: Patch) -> None:
    real, dropping = CxlMover._copy, SoftwareCoherence.invalidate_many
    _Moves.mark(patch)
    _skipping(patch, SoftwareCoherence, "invalidate_many", _Moves.now)

    def copy(mover: CxlMover, pool: int, offsets: Any, fragments: Any, to_pool: bool) -> None:
        real(mover, pool, offsets, fragments, to_pool)
        if not to_pool:
            dropping(
                mover.memory.coherence, offsets + np.uint64(pool - mover.memory.geometry.off_data), fragments.nbytes
            )  # type: ignore[arg-type]

    patch.setattr(CxlMover, "_copy", copy)


@fault
def dropped_without_a_fence_after(patch: Patch) -> None:
    def invalidate_many(self: SoftwareCoherence, addresses: Any, nbytes: int) -> None:
        self._cpu.full_fence()
        self._cpu.lines_many(self.drop, np.ascontiguousarray(addresses), nbytes)

    patch.setattr(SoftwareCoherence, "invalidate_many", invalidate_many)


@fault
def dropped_without_a_fence_before(patch: Patch) -> None:
    def invalidate_many(self: SoftwareCoherence, addresses: Any, nbytes: int) -> None:
        self._cpu.lines_many(self.drop, np.ascontiguousarray(addresses), nbytes)
        self._cpu.full_fence()

    patch.setattr(SoftwareCoherence, "invalidate_many", invalidate_many)


@fault
def dropped_with_a_store_fence_before(patch: Patch) -> None:
    def invalidate_many(self: SoftwareCoherence, addresses: Any, nbytes: int) -> None:
        self._cpu.store_fence()
        self._cpu.lines_many(self.drop, np.ascontiguousarray(addresses), nbytes)
        self._cpu.full_fence()

    patch.setattr(SoftwareCoherence, "invalidate_many", invalidate_many)


@fault
def invalidated_with_clwb(patch: Patch) -> None:
    real = SoftwareCoherence.__init__

    def init(self: SoftwareCoherence, *args: Any) -> None:
        real(self, *args)
        self.drop = "clwb"

    patch.setattr(SoftwareCoherence, "__init__", init)


@fault
def generations_not_dropped(patch: Patch) -> None:
    _skipping(patch, PoolView, "_drop")


@fault
def generations_dropped_before_the_copy(patch: Patch) -> None:
    real_drop, real_load = PoolView._drop, CxlMover.load
    views: list[PoolView] = []
    slots: list[Any] = []

    def drop(view: PoolView, wanted: Any) -> None:
        if not any(view is known for known in views):
            views.append(view)
        slots.append(wanted)

    def load(mover: CxlMover, offsets: Any, buffers: Any) -> None:
        for view in views:
            if _in_tables(mover.memory, int(view._generations.ctypes.data)):
                real_drop(view, np.arange(len(view._generations), dtype=np.uint32))
        real_load(mover, offsets, buffers)

    patch.setattr(PoolView, "_drop", drop)
    patch.setattr(CxlMover, "load", load)


@fault
def looked_at_before_the_copy(patch: Patch) -> None:
    real_load, real_each = CxlMover.load, PoolView.valid_each
    late: list[Any] = []

    def load(mover: CxlMover, offsets: Any, buffers: Any) -> None:
        late.append((mover, offsets, buffers))

    def valid_each(view: PoolView, slots: Any, generations: Any) -> Any:
        good = real_each(view, slots, generations)
        if late:
            real_load(*late.pop())
        return good

    patch.setattr(CxlMover, "load", load)
    patch.setattr(PoolView, "valid_each", valid_each)


def _storing(patch: Patch, what: Callable[[PoolDirectory, Any], bool], **changed: bool) -> None:
    """The server's stores, where ``what`` says so: not written back, or without a fence, or too early."""

    def write_back(directory: PoolDirectory, target: Any, index: Any) -> None:
        if not what(directory, target):
            real(directory, target, index)
        elif changed.get("fence"):
            addresses = np.atleast_1d(np.asarray(index)).astype(np.uint64) * np.uint64(target.strides[0])
            addresses += np.uint64(target.ctypes.data)
            cpu: Any = directory._coherence
            cpu._cpu.lines_many(cpu.clean, addresses, target[:1].nbytes)

    real = PoolDirectory._write_back
    patch.setattr(PoolDirectory, "_write_back", write_back)


@fault
def tables_written_back_without_a_fence(patch: Patch) -> None:
    _storing(patch, lambda directory, target: True, fence=True)


@fault
def tables_written_back_before_the_store(patch: Patch) -> None:
    def store(directory: PoolDirectory, target: Any, index: Any, values: Any) -> None:
        directory._write_back(target, index)
        target[index] = values

    patch.setattr(PoolDirectory, "_store", store)


@fault
def bodies_of_records_not_written_back(patch: Patch) -> None:
    _storing(patch, lambda directory, target: target is directory.words)


@fault
def states_not_written_back(patch: Patch) -> None:
    _storing(patch, lambda directory, target: target is directory.states)


@fault
def generations_not_written_back(patch: Patch) -> None:
    _storing(patch, lambda directory, target: target is directory.generations)


@fault
def checks_of_records_not_written_back(patch: Patch) -> None:
    _storing(patch, lambda directory, target: target.ndim == 1 and target.strides == (128,) and target.itemsize == 8)


@fault
def extents_not_written_back(patch: Patch) -> None:
    _storing(patch, lambda directory, target: target is directory.extents)


@fault
def names_not_written_back(patch: Patch) -> None:
    _storing(patch, lambda directory, target: target.strides[0] in (64, 4096))


@fault
def count_of_changes_not_written_back(patch: Patch) -> None:
    _storing(patch, lambda directory, target: target is directory.changes)


@fault
def count_of_changes_not_dropped(patch: Patch) -> None:
    _skipping(patch, PoolMemory, "_fresh", lambda memory, offset, nbytes: offset == 2 * BLOCK_BYTES - 8)


@fault
def incarnation_not_dropped(patch: Patch) -> None:
    real = _FreshWord.__getitem__
    patch.setattr(_FreshWord, "__getitem__", lambda word, index: word._items[index] if real else 0)


@fault
def incarnation_not_written_back(patch: Patch) -> None:
    _skipping(patch, PoolMemory, "_written", lambda memory, offset, nbytes: (offset, nbytes) == (BLOCK_BYTES, 8))


@fault
def owner_not_written_back(patch: Patch) -> None:
    _skipping(patch, PoolMemory, "_written", lambda memory, offset, n: (offset, n) == (BLOCK_BYTES, BLOCK_BYTES))


@fault
def tables_of_a_new_pool_not_written_back(patch: Patch) -> None:
    _skipping(patch, PoolMemory, "_written", lambda memory, offset, nbytes: nbytes == memory.geometry.off_data)


@fault
def magic_of_a_new_pool_not_written_back(patch: Patch) -> None:
    _skipping(patch, PoolMemory, "_written", lambda memory, offset, nbytes: (offset, nbytes) == (0, 8))


@fault
def tables_not_dropped_when_a_server_starts(patch: Patch) -> None:
    _skipping(patch, PoolMemory, "_drop_tables", lambda memory: memory._backing is not None)


@fault
def superblock_not_dropped(patch: Patch) -> None:
    patch.setattr(opening, "drop_blocks", lambda backing: None)
