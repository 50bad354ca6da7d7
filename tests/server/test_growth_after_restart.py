"""A pool that has room keeps its pages when its server starts again, though the memory beyond them is yet to be given."""

from __future__ import annotations

from maru_harness import Server, chain, geometry


def test_a_server_that_starts_evicts_nothing_while_memory_comes() -> None:
    server = Server(geometry(8, 8), growth_s=1.0)
    client = server.client()
    client.store(chain("a", 24))  # three of eight extents, all slots of them in use
    meta, hour = server.meta, 3600.0
    # As the service starts: the state first, which takes its time, then extents one after another from the first on.
    server.now += hour
    server.meta = meta.copy()
    server.boot_without_memory()
    for extent in range(1, 5):
        server.now += 0.9
        server.state.extents_ready(extent, server.now)
        server.state.tick(server.now)
    client.connect()
    assert client.match(chain("a", 24)).pages == 24
    assert server.stats["evicted_pages"] == 0


def test_where_no_more_memory_comes_it_evicts() -> None:
    server = Server(geometry(8, 8), growth_s=1.0)
    client = server.client()
    client.store(chain("a", 24))
    server.meta = server.meta.copy()
    server.boot_without_memory()
    for _ in range(4):
        server.now += 0.9
        server.state.tick(server.now)
    assert server.stats["evicted_pages"] > 0
