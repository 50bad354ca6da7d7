"""What the server says of its own memory, against what its process really takes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from maru_harness import Server, chain, geometry

#: Fills a pool with pages in a process of its own, and says how much memory that took and what the state says of it.
#: The pool is shared memory, which does not count as the process's own.
SCRIPT = """
import contextlib, gc, json, os, sys, time
from maru_bench.restart import chains, own_memory
from maru_bench.copy import BENCH_NAMESPACE
from maru_core.pool import PoolMemory, parse_pool_uri
from maru_core.protocol import *
from maru_server.directory import PoolDirectory
from maru_server.footprint import give_back
from maru_server.config import StateConfig
from maru_server.state import ServerState

pages, name = int(sys.argv[1]), f"maru-test-{os.getpid()}"
size = pages * 4096 * 5 // 4 + (64 << 20)
memory = PoolMemory.create(parse_pool_uri(f"shm://{name}?size={size}&min_slot=4K&extent=4M"))
os.unlink(f"/dev/shm/{name}")

def measured():
    gc.collect()
    give_back()
    return own_memory(os.getpid())

def state_of(now):
    directory = PoolDirectory(memory.geometry, memory.meta)
    made = ServerState(directory, incarnation=1, pool_uri="shm://x", config=StateConfig(), now=now, wall_offset=1e9)
    made.extents_ready(memory.geometry.extent_count, now)
    return made

now = 1000.0
state = state_of(now)
session = state.handle(Hello(PROTOCOL_VERSION, 1, bytes(range(16)), "c", "", 0, 0, "", ""), now).session
number = state.handle(OpenNamespace(2, session, BENCH_NAMESPACE.record()), now).namespace

def fill(count, seed):
    global now
    for parent, hashes in chains(count, seed):
        now += 0.001
        grant = state.handle(Reserve(3, session, number, "kv", 0, 1, parent, hashes, 4096), now)
        assert not any(grant.status)
        state.handle(Commit(4, session, grant.slots, grant.generations), now)
    state.finish()

fill(1000, 1)
before, said_before = measured(), state.memory_bytes()
fill(pages, 2)
after, said_after = measured(), state.memory_bytes()
figures = {"real": after - before, "said": said_after - said_before, "stats": state.stats()}
# Twice: the first rebuild also leaves behind what any would, once.
state = state_of(now)
del state
empty = measured()
state = state_of(now)
figures["rebuilt_real"] = measured() - empty
figures["rebuilt_said"] = state.memory_bytes()
assert state.stats()["pages"] == pages + 1000
print(json.dumps(figures))
"""


def figures(pages: int) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(pages)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_estimate_is_near_what_the_process_takes() -> None:
    # Near a power of two, which columns are as long as: the rest of them is not counted, and may have been touched.
    found = figures(250_000)
    assert 0.75 * found["real"] < found["said"] < 1.25 * found["real"], found
    assert 0.75 * found["rebuilt_real"] < found["rebuilt_said"] < 1.25 * found["rebuilt_real"], found
    assert found["stats"]["memory_bytes"] > found["said"]


@pytest.mark.slow
def test_a_page_takes_less_than_250_bytes_at_a_million() -> None:
    found = figures(1_000_000)
    print(found)
    assert found["real"] / 1_000_000 < 250, found
    assert found["rebuilt_real"] / 1_001_000 < 250, found


def test_memory_follows_the_pages() -> None:
    server = Server()
    client = server.client()
    empty = server.stats
    assert empty["memory_per_page"] == 0
    client.store(chain("a", 40))
    full = server.stats
    assert full["memory_bytes"] > empty["memory_bytes"]
    assert full["memory_per_page"] == full["memory_bytes"] / 40
    client.reserve(chain("b", 4), parent=chain("a", 1, start=39))
    assert server.stats["memory_bytes"] > full["memory_bytes"]


def test_the_figures_cost_nothing_for_each_page() -> None:
    """Counted in calls, not in time: as many with 8 pages as with 56."""
    calls = []

    def count(pages: int) -> int:
        server = Server(geometry(2, 64), checked=False)
        server.client().store(chain("a", pages))
        server.state.finish()
        calls.clear()
        sys.setprofile(lambda frame, event, argument: calls.append(event))
        try:
            server.state.memory_bytes()
        finally:
            sys.setprofile(None)
        return len(calls)

    assert count(8) == count(56)
