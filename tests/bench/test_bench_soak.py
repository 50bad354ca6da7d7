"""The soak: what it calls a failure, and some seconds of it with everything that can befall a server and its clients."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from maru_bench.soak import Soak, SoakOptions
from maru_bench.soak_client import (
    CHAIN_PAGES,
    CHAINS,
    COUNTS,
    GROUP,
    PAGE_BYTES,
    TRUNK_PAGES,
    ClientOptions,
    Counts,
    Engine,
    chain_hashes,
    content,
    page_hash,
)
from maru_core.pool import PoolMemory, parse_pool_uri
from maru_core.protocol import HASH_BYTES
from tests.support import running_server


def test_pages_are_shared_within_a_group_and_no_further() -> None:
    hashes = {chain: chain_hashes(chain) for chain in range(CHAINS)}
    trunk = TRUNK_PAGES * HASH_BYTES
    assert hashes[0][:trunk] == hashes[GROUP - 1][:trunk] != hashes[GROUP][:trunk]
    distinct = {page_hash(chain, index) for chain in range(CHAINS) for index in range(CHAIN_PAGES)}
    assert len(distinct) == CHAINS * (CHAIN_PAGES - TRUNK_PAGES) + CHAINS // GROUP * TRUNK_PAGES


def test_no_two_pages_have_the_same_bytes() -> None:
    pages = [content(kind, page_hash(0, index)) for kind in PAGE_BYTES for index in range(3)]
    assert len({page.tobytes() for page in pages}) == len(pages)


def soak(tmp_path: Path) -> Soak:
    return Soak(SoakOptions(seconds=1.0, clients=1), tmp_path, lambda text: None)


def counts(**changes: int) -> dict[str, int]:
    return {**dict.fromkeys(COUNTS, 1), "wrong_pages": 0, "false_hits": 0, **changes}


@pytest.mark.parametrize(
    ("changes", "late", "word"),
    [
        ({}, 40 << 20, None),
        ({"wrong_pages": 1}, 40 << 20, "wrong bytes"),
        ({"false_hits": 1}, 40 << 20, "nobody had stored"),
        ({"loaded_pages": 0}, 40 << 20, "says nothing"),
        ({}, 60 << 20, "memory grew"),
    ],
)
def test_what_is_a_failure(changes: dict[str, int], late: int, word: str | None, tmp_path: Path) -> None:
    run = soak(tmp_path)
    run._judge(counts(**changes), 40 << 20, late)
    assert len(run.failures) == (word is not None)
    assert word is None or word in run.failures[0]


def test_memory_that_grows_is_seen_in_slope_and_quarters(tmp_path: Path) -> None:
    run = soak(tmp_path)
    run.samples = [(second / 2, (40 << 20) + second * 1024) for second in range(200)]
    early, late, slope = run._memory()
    assert early < late
    assert abs(slope - 2 * 60 * 1024) < 1
    run.samples = [(second / 2, 40 << 20) for second in range(200)]
    assert run._memory()[:2] == (40 << 20, 40 << 20)


def test_a_client_counts_wrong_bytes(tmp_path: Path) -> None:
    """The negative control: bytes that change in the pool are seen by the next reader."""
    (tmp_path / "counts").write_bytes(bytes(8 * len(COUNTS)))
    with running_server(tmp_path, size="32M") as server:
        options = ClientOptions(number=0, seed=1, server=server.endpoint, counts=str(tmp_path / "counts"))
        tally = Counts(options.counts, 0)
        engine = Engine("small", options, tally)
        hashes = chain_hashes(0)[: 4 * HASH_BYTES]
        engine.put(hashes, 0)
        assert engine.load(hashes) == 4
        seen = np.fromfile(tmp_path / "counts", np.int64)
        assert seen[COUNTS.index("wrong_pages")] == 0
        assert seen[COUNTS.index("loaded_pages")] == 4
        memory = PoolMemory.attach(parse_pool_uri(server.pool))
        whole = memory.data.tobytes()
        at = whole.index(content("small", hashes[:HASH_BYTES]).tobytes())
        memory.data[at + 12_345] ^= 1
        engine.load(hashes)
        engine.store.close()
        assert np.fromfile(tmp_path / "counts", np.int64)[COUNTS.index("wrong_pages")] == 1


def test_some_seconds(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "maru_bench",
            "soak",
            "--seconds",
            "16",  # in which as much befalls the server as in 30
            "--clients",
            "3",
            "--pool",
            "16M",
            "--json",
            str(file),
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    shown, errors = process.communicate()
    assert process.returncode == 0, shown + errors
    data = json.loads(file.read_text())
    assert data["ok"]
    assert data["counts"]["wrong_pages"] == 0
    assert data["counts"]["loaded_pages"] > 0
    assert data["counts"]["stored_pages"] > 0
    assert data["events"]["clients_killed"] + data["events"]["clients_stopped"] > 0
    assert data["audited_pages"] > 0
    assert data["stats"]["slots_reserved"] == data["stats"]["slots_quarantined"] == 0
    assert not list(Path("/dev/shm").glob(f"maru-bench-{process.pid}-*"))
