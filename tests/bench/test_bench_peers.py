"""Maru beside its peers: what each is told, what counts, who is left out; with Maru, memcpy and the echo for real."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from maru_bench.pages import EngineBuffer
from maru_bench.peers.adapters import MaruAdapter, PeerConfig, PeerError
from maru_bench.peers.orders import Do, Loop, keys_of
from maru_bench.peers.report import PeersResult, make_row
from maru_bench.peers.run import PeersOptions, run
from maru_bench.peers.start import Peer, PeerFailedError, PeersPlace, choose_peers, start_peer
from maru_bench.processes import ServerFailedError
from maru_bench.servers import MaruServer
from maru_bench.stores import MooncakeMaster
from maru_core.errors import ConfigError
from maru_core.store import Store

KIB = 1 << 10
ALL = ("maru", "mooncake", "file", "nixl", "memcpy", "echo")


def test_keys_of_a_chain_are_the_same_from_any_page_on() -> None:
    keys = keys_of(7, 0, 20)
    assert keys == keys_of(7, 0, 5) + keys_of(7, 5, 15)
    assert len(set(keys)) == 20
    assert all(len(key) == 64 for key in keys)
    assert set(keys).isdisjoint(keys_of(8, 0, 20))


@pytest.fixture
def place(tmp_path: Path) -> PeersPlace:
    shared = tmp_path / "shared"
    shared.mkdir()
    return PeersPlace(
        scratch=tmp_path, shared=shared, buffer_bytes=512 * KIB, client_bytes=512 * KIB, page_bytes=64 * KIB, pool_bytes=64 << 20, chains=(1, 16, 40)
    )  # fmt: skip


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as made:
        yield made


def do(operation: str, chain: int = 1, pages: int = 4) -> Do:
    return Do(operation=operation, chain=chain, first=0, pages=pages, page_bytes=64 * KIB)


@pytest.mark.parametrize("name", ["maru", "memcpy"])
def test_one_process_stores_what_the_other_loads(name: str, place: PeersPlace, stack: contextlib.ExitStack) -> None:
    storing, loading = start_peer(stack, name, place).workers
    for chain in (1, 2):
        for worker, operation in ((storing, "store"), (loading, "load"), (storing, "remove")):
            [seconds] = worker.ask(do(operation, chain))
            assert seconds > 0
    if name == "maru":
        with pytest.raises(PeerFailedError, match="Maru found 0 of 4"):
            loading.ask(do("exists"))


def test_wrong_bytes_are_noticed(place: PeersPlace, stack: contextlib.ExitStack) -> None:
    storing, loading = start_peer(stack, "memcpy", place).workers
    storing.ask(do("store"))
    path = place.shared / "memcpy" / "memory"
    for at in (0, 64 * KIB + 32 + 4096, 3 * 64 * KIB):
        with path.open("r+b") as file:
            file.seek(at)
            [byte] = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1]))
        with pytest.raises(PeerFailedError, match="other bytes were loaded"):
            loading.ask(do("load"))
        storing.ask(do("store"))
    loading.ask(do("load"))
    with pytest.raises(PeerFailedError, match="other bytes were loaded"):
        loading.ask(do("load", chain=2))  # pages of another chain


def test_the_echo_moves_as_many_bytes_as_a_lookup(place: PeersPlace, stack: contextlib.ExitStack) -> None:
    from maru_bench.peers.start import _echo_bytes

    sizes = _echo_bytes(place)
    assert sizes["40"][0] - sizes["16"][0] == pytest.approx(32 * 24, rel=0.1), "32 bytes a hash"
    assert sizes["1"][0] < sizes["16"][0]
    worker = start_peer(stack, "echo", place).workers[0]
    assert len(worker.ask(Loop(operation="exists", chains=[1], pages=16, page_bytes=64 * KIB, seconds=0.01))) >= 1
    with pytest.raises(PeerFailedError, match="stores nothing"):
        worker.ask(do("store"))


def test_maru_asks_as_its_engines_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What an engine does not ask for is not to be measured.
    monkeypatch.setattr(Store, "stats", lambda store: pytest.fail("asked for figures in a measured call"))
    with MaruServer(tmp_path, size="64M") as server:
        buffer = EngineBuffer(512 * KIB)
        config = PeerConfig(peer="maru", buffer_bytes=512 * KIB, page_bytes=64 * KIB, endpoint=server.endpoint)
        adapter = MaruAdapter(config, buffer.data)
        keys = keys_of(1, 0, 8)
        pages = buffer.pages(0, 8, 64 * KIB, 8)
        adapter.store(keys[:4], None, pages[:, :4])
        adapter.store(keys[4:], keys[3], pages[:, 4:])
        adapter.exists(keys, 64 * KIB)
        right = pages.copy()
        pages[:] = 0
        adapter.load(keys, pages)
        assert np.array_equal(pages, right)
        adapter.remove(keys[4:])
        adapter.exists(keys[:4], 64 * KIB)
        with pytest.raises(PeerError, match="4 of 8"):
            adapter.exists(keys, 64 * KIB)
        adapter.store(keys[4:], keys[3], pages[:, 4:])
        adapter.remove(keys)
        # The second batch hung under the first: nothing of it is left.
        assert not adapter._store.present("kv", 0, bytes.fromhex("".join(keys))).any()
        adapter.close()


def test_a_process_that_is_gone_is_told(place: PeersPlace, stack: contextlib.ExitStack) -> None:
    worker = start_peer(stack, "memcpy", place).workers[0]
    os.kill(worker._process.pid, signal.SIGKILL)
    with pytest.raises(PeerFailedError, match="is gone"):
        worker.ask(do("store"))


def test_peers_that_are_not_there_are_left_out_with_the_reason(place: PeersPlace, tmp_path: Path) -> None:
    import msgspec

    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    bare.chmod(0o755)
    place = msgspec.structs.replace(place, sglang_python=str(bare), peers_python=str(bare))
    chosen, skipped = choose_peers(ALL, place)
    assert chosen == ["maru", "memcpy", "echo"]
    for name, module in (("mooncake", "mooncake.store"), ("nixl", "nixl._api"), ("file", "sglang.srt")):
        assert f"cannot import {module}" in skipped[name]
        assert "make " in skipped[name]


def test_the_whole_bench(tmp_path: Path) -> None:
    options = PeersOptions(
        page_bytes=[16 * KIB, 64 * KIB], batches=[1, 4], chains=[1, 200], clients=[2], repeats=3, seconds=0.3,
        peers=("memcpy", "echo"),
    )  # fmt: skip
    result = run(options, lambda text: None)
    assert result.skipped == {}
    found = {(row.operation, row.peer, row.page_bytes, row.pages, row.clients, row.in_a_loop) for row in result.rows}
    expected = {("exists", peer, 16 * KIB, pages, 1, False) for peer in ("maru", "echo") for pages in (1, 200)}
    expected |= {
        (operation, peer, size, batch, 1, False)
        for operation in ("store", "load")
        for peer in ("maru", "memcpy")
        for size in options.page_bytes
        for batch in options.batches
    }
    expected |= {("exists", peer, 16 * KIB, 128, 2, True) for peer in ("maru", "echo")}
    expected |= {("load", "maru", 16 * KIB, 16, 2, True)}
    assert found == expected
    for row in result.rows:
        assert 0 < row.p50_us <= row.p99_us
        assert row.calls >= 3
        assert (row.gbps is None) == (row.operation == "exists")
        if row.peer == "maru":
            assert row.to_maru == 1.0
    result.write_json(tmp_path / "peers.json")
    assert json.loads((tmp_path / "peers.json").read_text())["repeats"] == 3
    assert not list(Path("/dev/shm").glob(f"maru-bench-{os.getpid()}-*"))


def test_a_peer_that_fails_is_out_and_the_others_go_on(place: PeersPlace, stack: contextlib.ExitStack) -> None:
    from maru_bench.peers.run import _Bench

    options = PeersOptions(page_bytes=[64 * KIB], batches=[2], chains=[], clients=[], repeats=2, peers=("memcpy",))
    bench = _Bench(options, lambda text: None)
    bench.peers = [start_peer(stack, name, place) for name in ("maru", "memcpy")]
    (place.shared / "memcpy" / "memory").write_bytes(b"")  # what it has mapped is gone
    bench.batches(64 * KIB, 2)
    assert list(bench.failed) == ["memcpy"]
    assert {row.peer for row in bench.rows} == {"maru"}
    assert isinstance(bench.peers[0], Peer)


def test_what_needs_too_much_memory_or_is_no_peer_is_refused() -> None:
    def options(**changes: object) -> PeersOptions:
        fields: dict[str, object] = {"page_bytes": [4 << 20], "batches": [1], "chains": [1], "clients": []}
        return PeersOptions(**(fields | changes))  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="'redis'"):
        run(options(peers=("redis",)), lambda text: None)
    with pytest.raises(ConfigError, match=r"the limit is 12288 MiB: give smaller"):
        run(options(batches=[1000]), lambda text: None)


def result(*rows: tuple[str, str, int, float], loop_s: float | None = None) -> PeersResult:
    made = [
        make_row(operation, peer, 64 * KIB, pages, 1, [seconds] * 10, [1e-3] * 10, loop_s)
        for operation, peer, pages, seconds in rows
    ]
    return PeersResult(machine={}, versions={}, commit=None, repeats=10, skipped={}, rows=made)


def test_where_maru_is_behind_is_told() -> None:
    ahead = result(
        ("exists", "maru", 128, 1e-3), ("exists", "mooncake", 128, 1.1e-3), ("exists", "file", 128, 0.5e-3),
        ("exists", "mooncake", 16, 0.5e-3), ("exists", "echo", 128, 0.5e-3), ("store", "memcpy", 4, 1e-4), ("load", "nixl", 4, 2e-3),
    )  # fmt: skip
    assert ahead.targets_met, "of lookups only those of 128 pages count, beside Mooncake's; limits never"
    assert result(("load", "nixl", 4, 0.9e-3), loop_s=2.0).targets_met, "nor does what many do at once"
    behind = result(("exists", "mooncake", 128, 0.5e-3), ("store", "nixl", 4, 0.9e-3), ("load", "file", 1, 0.25e-3))
    assert [line.split(":")[0] for line in behind.behind()] == [
        "exists of 128 pages of 64 KiB", "store of 4 pages of 64 KiB", "load of 1 pages of 64 KiB",
    ]  # fmt: skip
    assert "file takes 250 µs, 0.25 of Maru's" in behind.behind()[2]
    console = Console(file=io.StringIO(), width=160)
    console.print(behind.table())
    assert "500 (500) 0.50" in console.file.getvalue()  # type: ignore[attr-defined]
    lines = behind.markdown().splitlines()
    assert lines[0] == "| call | page | pages |  | mooncake µs | nixl µs | file µs |"
    assert lines[2] == "| exists | 64 KiB | 128 | by turns | 500 (500) **0.50** | - | - |"


_MASTER = """#!{python}
import http.server, pathlib, socket, sys
ports = [int(word.partition("=")[2]) for word in sys.argv[1:]]
seen = pathlib.Path(__file__).with_name("ports")
before = seen.read_text().split() if seen.exists() else []
seen.write_text(" ".join([*before, *map(str, ports)]))
if len(before) < 2 * {taken}:
    print("Failed to start: Address already in use")
    sys.exit(1)

class Figures(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"master_key_count 3\\n")

http.server.HTTPServer(("127.0.0.1", ports[1]), Figures).serve_forever()
"""


@pytest.mark.parametrize("taken", [0, 2, 4])
def test_mooncakes_master_whose_ports_were_taken_meanwhile_is_given_others(taken: int, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "mooncake_master"
    program.parent.mkdir()
    program.write_text(_MASTER.format(python=sys.executable, taken=taken))
    program.chmod(0o755)
    master = MooncakeMaster(str(tmp_path / "bin" / "python"), tmp_path / "log")
    try:
        if taken == 4:
            with pytest.raises(ServerFailedError, match="already in use"):
                master.await_ready()
            return
        master.await_ready()
        assert master.figures() == {"master_key_count": 3.0}
        ports = (tmp_path / "bin" / "ports").read_text().split()
        assert len(ports) == len(set(ports)) == 2 * (taken + 1)
        assert master.address == f"127.0.0.1:{ports[-2]}"
    finally:
        master.stop()
