"""The pool's tables: every step leaves only what may be believed."""

from __future__ import annotations

import numpy as np
import pytest
from maru_harness import chain, geometry, record
from stepping import SteppingDirectory

from maru_core.pool.format import COMMITTED, FREE, RECORD, RESERVED, checksum_shares, record_checks
from maru_server.directory import CHECK_WORD, PoolDirectory
from maru_server.pages import words


@pytest.fixture
def directory() -> PoolDirectory:
    shape = geometry()
    directory = PoolDirectory(shape, np.zeros(shape.off_data, np.uint8))
    directory.set_extent(0, 4096)
    return directory


def give(directory: PoolDirectory, slots: list[int]) -> np.ndarray:
    numbers = np.array(slots, np.uint32)
    generations = directory.claim(numbers)
    directory.describe(
        numbers,
        generations,
        namespace=3,
        component=2,
        shard=1,
        world=4,
        length=4000,
        hashes=words(chain("page", len(slots))),
        parents=words(chain("parent", len(slots))),
        owner=77,
        now_ns=123,
    )
    return generations


def test_a_record_says_all_about_its_object(directory: PoolDirectory) -> None:
    slots = np.array([2, 5], np.uint32)
    generations = give(directory, [2, 5])
    assert (directory.states[slots] == RESERVED).all()
    directory.commit(slots, np.array([11, 12], np.uint64))
    records = directory.records[slots]
    assert records["state"].tolist() == [COMMITTED] * 2
    assert records["namespace"].tolist() == [3, 3]
    assert records["component"].tolist() == [2, 2]
    assert records["shard"].tolist() == [1, 1]
    assert records["world"].tolist() == [4, 4]
    assert records["flags"].tolist() == [0, 0]
    assert records["length"].tolist() == [4000, 4000]
    assert records["generation"].tolist() == generations.tolist() == directory.generations[slots].tolist()
    assert b"".join(records["page_hash"].tolist()) == chain("page", 2)
    assert b"".join(records["parent_hash"].tolist()) == chain("parent", 2)
    assert records["checksum"].tolist() == [11, 12]
    assert records["last_use_ns"].tolist() == [123, 123]
    assert records["owner"].tolist() == [77, 77]
    assert directory.believed(slots).all()


def test_generations_rise_at_every_change_of_hands(directory: PoolDirectory) -> None:
    slots = np.array([0], np.uint32)
    seen = []
    for _ in range(3):
        (told,) = give(directory, [0]).tolist()
        directory.commit(slots, None)
        directory.free(slots)
        seen += [told, int(directory.generations[0])]
    assert seen == sorted(set(seen))
    assert seen[0] > directory.geometry.created_ns // 10**9 << 32


def test_a_reserved_or_freed_record_is_not_believed(directory: PoolDirectory) -> None:
    slots = np.array([0, 1], np.uint32)
    give(directory, [0, 1])
    assert not directory.believed(slots).any()
    directory.commit(slots[:1], None)
    assert directory.believed(slots).tolist() == [True, False]
    directory.free(slots)
    assert not directory.believed(slots).any()
    assert (directory.states[slots] == FREE).all()


@pytest.mark.parametrize("offset", [*range(4, 10), *range(12, 104), *range(112, 128)])
def test_a_record_with_any_wrong_byte_is_not_believed(directory: PoolDirectory, offset: int) -> None:
    give(directory, [0])
    directory.commit(np.array([0], np.uint32), np.array([5], np.uint64))
    directory.meta[directory.geometry.off_directory + offset] ^= 0x40
    assert not directory.believed(np.array([0], np.uint32))[0]


def test_a_record_of_another_generation_is_not_believed(directory: PoolDirectory) -> None:
    give(directory, [0])
    directory.commit(np.array([0], np.uint32), None)
    directory.generations[0] += np.uint64(1)
    assert not directory.believed(np.array([0], np.uint32))[0]


def test_zeroed_memory_is_no_record() -> None:
    assert record_checks(np.zeros(3, RECORD)).all()


def test_the_check_of_a_record_can_be_brought_up_to_date() -> None:
    records = np.random.default_rng(0).integers(0, 2**63, (50, 16)).astype(np.uint64)
    without = records.copy()
    without[:, 12] = 0
    assert (record_checks(without) + checksum_shares(records[:, 12]) == record_checks(records)).all()
    swapped = records.copy()
    swapped[:, [4, 5]] = records[:, [5, 4]]
    assert (record_checks(swapped) != record_checks(records)).all()


def test_offsets_of_slots_are_those_of_the_geometry(directory: PoolDirectory) -> None:
    shape = directory.geometry
    directory.set_extent(1, 8192)
    directory.set_extent(7, shape.extent_bytes)
    slots = {0: 4096, 7: 4096, 8: 8192, 11: 8192, 56: shape.extent_bytes}
    expected = [shape.slot_offset(slot, size) for slot, size in slots.items()]
    assert directory.offsets(np.array(list(slots), np.uint32)).tolist() == expected
    again = PoolDirectory(shape, directory.meta)
    assert again.offsets(np.array(list(slots), np.uint32)).tolist() == expected


def test_nothing_is_given_away_or_freed_twice(directory: PoolDirectory) -> None:
    give(directory, [0])
    with pytest.raises(AssertionError):
        give(directory, [0])
    directory.free(np.array([0], np.uint32))
    with pytest.raises(AssertionError):
        directory.free(np.array([0], np.uint32))


def test_names_are_found_again_and_the_tables_have_an_end(directory: PoolDirectory) -> None:
    components = [directory.add_component(f"c{number}") for number in range(5)]
    assert components == [0, 1, 2, 3, None]
    records = [record(str(number)) for number in range(5)]
    assert [directory.add_namespace(content) for content in records] == [0, 1, 2, 3, None]
    again = PoolDirectory(directory.geometry, directory.meta)
    assert again.components() == {"c0": 0, "c1": 1, "c2": 2, "c3": 3}
    assert again.namespaces() == {("", content): number for number, content in enumerate(records[:4])}
    again.drop_namespace(2)
    assert again.add_namespace(records[4]) == 2


def test_a_damaged_name_is_unused_again(directory: PoolDirectory) -> None:
    directory.add_component("kv")
    directory.add_namespace(record())
    directory.meta[directory.geometry.off_components + 17] ^= 1
    directory.meta[directory.geometry.off_namespaces + 60] ^= 1
    assert directory.components() == {}
    assert directory.namespaces() == {}
    directory.drop_damaged_names()
    assert directory.add_component("swa") == 0
    assert directory.add_namespace(record("b")) == 0
    assert directory.components() == {"swa": 0}


def test_names_are_whole_or_absent_at_every_store() -> None:
    shape = geometry()
    directory = SteppingDirectory(shape, np.zeros(shape.off_data, np.uint8))
    seen = set()
    directory.after_store = lambda: seen.add((tuple(directory.components()), tuple(directory.namespaces())))
    directory.add_component("kv")
    directory.add_namespace(record())
    assert seen == {((), ()), (("kv",), ()), (("kv",), (("", record()),))}


def test_a_record_is_believed_only_after_its_last_store() -> None:
    shape = geometry()
    directory = SteppingDirectory(shape, np.zeros(shape.off_data, np.uint8))
    slots = np.array([0, 1, 2], np.uint32)
    believed = []
    directory.after_store = lambda: believed.append(directory.believed(slots).tolist())
    generations = give(directory, [0, 1, 2])
    assert not any(map(any, believed))
    directory.commit(slots, np.array([1, 2, 3], np.uint64))
    states = [row for index, row in enumerate(believed) if index == 0 or row != believed[index - 1]]
    assert states == [[False] * 3, [True, False, False], [True, True, False], [True] * 3]
    believed.clear()
    directory.free(slots)
    assert [sum(row) for row in believed] == [
        2,
        1,
        0,
        0,
        0,
        0,
        0,
    ]  # three generations, three states, the count of changes
    assert (directory.generations[slots] == generations + np.uint64(1)).all()


def test_the_generation_is_in_memory_before_the_state() -> None:
    shape = geometry()
    directory = SteppingDirectory(shape, np.zeros(shape.off_data, np.uint8))
    seen = []
    directory.after_store = lambda: seen.append((int(directory.states[0]), int(directory.generations[0])))
    (told,) = give(directory, [0]).tolist()
    assert {generation for state, generation in seen if state != FREE} == {told}
    assert all(generation == told for _, generation in seen)


def test_a_committed_records_body_is_whole() -> None:
    shape = geometry()
    directory = SteppingDirectory(shape, np.zeros(shape.off_data, np.uint8))
    slots = np.array([0, 1], np.uint32)

    def look() -> None:
        stored = slots[directory.states[slots] == COMMITTED]
        assert (directory.words[stored, CHECK_WORD] == directory.checks(stored)).all()

    directory.after_store = look
    give(directory, [0, 1])
    directory.commit(slots, None)
    directory.free(slots)


def test_cutting_an_extent_frees_what_damage_left_in_it(directory: PoolDirectory) -> None:
    """A large pool is not searched for records in extents that are not cut: they are found here."""
    directory.started(directory.geometry.created_ns + 10**12)
    give(directory, [0, 1])
    directory.commit(np.array([0], np.uint32), None)
    directory.generations[1:3] = np.uint64(2**64 - 1)  # of a slot that is reserved, and of a free one
    told = int(directory.generations[0])
    directory.extents[0] = 0  # what a record of the table lost, and no server did
    directory.set_extent(0, 8192)
    assert not directory.states[:8].any()
    assert int(directory.generations[0]) > told
    for again in give(directory, [1, 2]).tolist():
        assert told < again < 2**64 - 2**32, "a generation went round"


def test_generations_that_were_damaged_never_repeat_one_that_was_told(directory: PoolDirectory) -> None:
    slots = np.array([0, 1, 2], np.uint32)
    told = give(directory, [0, 1, 2])
    directory.commit(slots, None)
    directory.started(directory.geometry.created_ns + 10**12)
    directory.generations[:3] = [0, int(told[1]) - 1, 2**64 - 1]
    directory.discard(slots)
    assert (directory.generations[slots] > told).all()
    assert (give(directory, [0, 1, 2]) > told).all()


def test_meta_must_be_the_pools() -> None:
    shape = geometry()
    with pytest.raises(ValueError, match="meta must be"):
        PoolDirectory(shape, np.zeros(shape.off_data - 1, np.uint8))
