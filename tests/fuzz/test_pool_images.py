"""Pools whose tables were damaged in any way: refused with a reason, or served without what is damaged.

Never a crash, and never a page that is not the one asked for. Only what lies before the extents is damaged here: bytes of
pages are covered by checksums, for those who ask for them.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from maru_core.errors import ConfigError, PoolError
from maru_core.pool import PoolMemory, PoolView, parse_pool_uri
from maru_core.pool.format import BLOCK_BYTES
from maru_server.directory import PoolDirectory
from tests.fuzz.images import CHAINS, SHAPES, TAGS, Scene, Server, damage, extreme, make_scene
from tests.fuzz.runs import case, cases


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def scene(folder: Path) -> Scene:
    return make_scene(folder / "pool")


def served(path: Path, chance: random.Random, damages: list[str], *, checksums: bool = False) -> int | None:
    """Open a damaged pool and use it in every way; the objects that could be read, or None if it was refused."""
    uri = parse_pool_uri(f"file://{path}")
    try:
        server = Server(path)
    except PoolError as refusal:
        refused = str(refusal)
    else:
        refused = ""
    if refused:
        assert str(path) in refused, "a refusal that does not name the pool"
        assert any(text.startswith("superblock") for text in damages), f"refused for what could be dropped: {refused}"
        with pytest.raises(PoolError):
            PoolMemory.attach(uri)
        return None
    try:
        found = server.read_everything(checksums=checksums, prefixes=True)
        # A client maps the same.
        client = PoolMemory.attach(uri, expected_uuid=server.memory.geometry.pool_uuid)
        assert (client.generations == server.memory.generations).all()
        del client
        # Stored again and anew, with whatever room there is; nothing old may come up in the new.
        for tag, chain, component in chance.sample([(t, c, k) for t in TAGS for c in CHAINS for k in SHAPES], 5):
            server.store(tag, component, chain)
        server.wait(8)
        server.state.check()
        before = server.read_everything(checksums=checksums)
        # What was mended stays mended.
        server.boot()
        assert server.state.stats()["discarded"] == 0, "damage was left in the pool"
        assert server.read_everything(checksums=checksums) == before
        return found
    finally:
        server.close()


def test_the_whole_pool_is_read_if_nothing_is_damaged(scene: Scene, folder: Path) -> None:
    path = folder / "whole"
    path.write_bytes(scene.present)
    found = served(path, random.Random(1), [])
    assert found is not None
    assert found > 60


@pytest.mark.parametrize(
    "region", ["superblock", "owner", "components", "namespaces", "extents", "generations", "directory"]
)
def test_one_region_damaged(region: str, scene: Scene, folder: Path) -> None:
    path = folder / region
    outcomes = set()
    for number in cases(250 if region == "directory" else 120):
        with case(number) as chance:
            image = bytearray(scene.present)
            done = damage(scene, chance, region, image)
            path.write_bytes(image)
            try:
                refused = served(path, chance, [done]) is None
                outcomes.add(refused)
                assert refused == (image[:BLOCK_BYTES] != scene.present[:BLOCK_BYTES]), "a superblock of other bytes"
            except BaseException as error:
                error.add_note(done)
                raise
    assert outcomes <= ({True, False} if region == "superblock" else {False})


def test_several_regions_damaged(scene: Scene, folder: Path) -> None:
    path = folder / "several"
    for number in cases(600):
        with case(number) as chance:
            image = bytearray(scene.present)
            regions = [region for region in scene.regions() if region != "superblock"]
            # The tables as a whole from another moment are another test's: that is no damage to them.
            done = [damage(scene, chance, region, image) for region in chance.sample(regions, chance.choice([2, 3]))]
            if sum(" as they were " in text for text in done) > 1:
                continue
            path.write_bytes(image)
            try:
                served(path, chance, done)
            except BaseException as error:
                error.add_note("; ".join(done))
                raise


def test_tables_of_another_moment_over_the_bytes_of_now(scene: Scene, folder: Path) -> None:
    """All tables restored from an older copy, so that they agree: only checksums can tell that pages are others."""
    path = folder / "rolled-back"
    for moment in scene.moments[:-1]:
        image = bytearray(scene.present)
        image[: scene.geometry.off_data] = moment[: scene.geometry.off_data]
        path.write_bytes(image)
        assert served(path, random.Random(2), [], checksums=True) is not None


def test_files_cut_short_or_made_longer(scene: Scene, folder: Path) -> None:
    path = folder / "cut"
    for number in cases(75):
        with case(number) as chance:
            size = chance.choice([1, 7, 8, 4095, 4096, 8192, scene.geometry.off_data, len(scene.present) - 1])
            size = chance.choice([size, chance.randrange(1, len(scene.present))])
            path.write_bytes(scene.present[:size])
            assert served(path, chance, ["superblock: cut short"]) is None
            path.write_bytes(scene.present + bytes(chance.randrange(1, 10_000)))
            assert served(path, chance, []) is not None


def test_a_damaged_pool_can_be_formatted(scene: Scene, folder: Path) -> None:
    """Whatever is there: formatting makes a pool of it, with generations that nobody was ever told."""
    path = folder / "format"
    uri = parse_pool_uri(f"file://{path}?extent=2M&align=4K&min_slot=4K&size=8M")
    for number in cases(60):
        with case(number) as chance:
            image = bytearray(scene.present)
            for region in chance.sample(list(scene.regions()), 2):
                damage(scene, chance, region, image)
            if chance.random() < 0.5:
                image[BLOCK_BYTES : BLOCK_BYTES + 8] = extreme(chance)
            path.write_bytes(image)
            with PoolMemory.create(uri, format=True) as memory:
                assert not memory.directory["state"].any()
                assert memory.bump_incarnation() > 0
                PoolView(memory)
                directory = PoolDirectory(memory.geometry, memory.meta)
                directory.set_extent(0, 4096)
                assert directory.claim(np.array([0], np.uint32))[0] > 0
            path.unlink()


def test_an_empty_file_says_what_it_needs(folder: Path) -> None:
    path = folder / "empty"
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="size"):
        PoolMemory.create(parse_pool_uri(f"file://{path}"))
