"""Software coherence for real: the CPU's instructions, pools that say what they are, refusals, and processes on one pool."""

from __future__ import annotations

import contextlib
import itertools
import json
import platform
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maru_agent.agent import PoolAgent
from maru_core.errors import ConfigError
from maru_core.mover import THREADED_BATCH_BYTES, CxlMover, native_available
from maru_core.pool import PoolMemory, PoolView, coherence
from maru_core.pool.coherence import HARDWARE, Coherence, SoftwareCoherence
from maru_core.protocol import ROOT
from maru_core.session import Session
from maru_core.store import Store, StoreConfig
from maru_server.config import StateConfig
from maru_server.directory import PoolDirectory
from maru_server.service import Service
from maru_server.state import ServerState
from support import Pages, await_condition, hashes, namespace, running_server

needs_helper = pytest.mark.skipif(
    not SoftwareCoherence.possible(), reason="the compiled helper is not built, or this CPU cannot flush lines"
)
CPU: Any = coherence._coherence
CLEANING: tuple[str, ...] = CPU.CLEANING if CPU is not None else ()
DROPPING: tuple[str, ...] = CPU.DROPPING if CPU is not None else ()
SOFTWARE = "size=8M&extent=256K&align=4K&min_slot=4K&coherence=software"
#: What stands before a program that is to run as if the helper had not been built.
WITHOUT_HELPER = "import sys; sys.modules['maru_core._coherence'] = None\n"


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=180, check=False
    )


# ------------------------------------------------------------ the instructions


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no instructions are known for this CPU")
def test_the_helper_is_built_and_chooses_the_best() -> None:
    chosen = SoftwareCoherence()
    assert chosen.clean == CLEANING[0]
    assert chosen.drop == DROPPING[0]
    assert chosen.clean in str(chosen)
    flags = Path("/proc/cpuinfo").read_text()
    if platform.machine() == "x86_64":
        best = [name for name in ("clwb", "clflushopt", "clflush") if f" {name}" in flags]
        assert list(CLEANING) == best
        assert list(DROPPING) == [name for name in best if name != "clwb"]


#: Runs each case in a child of its own, since what must fault ends it. Three pages, of which only the middle may be touched.
_FAULTS = textwrap.dedent(
    """
    import ctypes, mmap, os, signal, sys
    import numpy as np
    from maru_core import _coherence as cpu

    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 3 * page)
    start = np.frombuffer(memory, np.uint8).ctypes.data + page
    libc = ctypes.CDLL(None, use_errno=True)
    for outer in (start - page, start + page):
        assert libc.mprotect(ctypes.c_void_p(outer), page, 0) == 0
    line = cpu.LINE_BYTES
    many = lambda *places: (cpu.lines_many, np.array([start + place for place in places], np.uint64))
    cases = {
        "the whole page": (cpu.lines, start, page, True),
        "one byte": (cpu.lines, start + page - 1, 1, True),
        "nothing at the end": (cpu.lines, start + page, 0, True),
        "one byte beyond": (cpu.lines, start, page + 1, False),
        "the byte beyond": (cpu.lines, start + page, 1, False),
        "one byte before": (cpu.lines, start - 1, 1, False),
        "the line before, by its last byte": (cpu.lines, start - 1, page, False),
        "the last line by its middle": (cpu.lines, start + page - line // 2, line // 2, True),
        "across the end by its middle": (cpu.lines, start + page - line // 2, line // 2 + 1, False),
        "words of every line": (*many(*range(0, page, 8)), 8, True),
        "words that end with one beyond": (*many(*range(0, page + 8, 8)), 8, False),
        "a word beyond after one before it": (*many(page - 8, page), 8, False),
        "the same line again, then another": (*many(8, 16, 24, page), 8, False),
        "a range that shares the line of the last": (*many(0, line - 8), 16, True),
        "and goes on beyond": (*many(page - line, page - 8), 16, False),
        "no ranges": (*many(), 8, True),
    }
    for name in {*cpu.CLEANING, *cpu.DROPPING}:
        for case, (call, where, nbytes, survives) in cases.items():
            child = os.fork()
            if child == 0:
                call(name, where, nbytes)
                os._exit(0)
            status = os.waitpid(child, 0)[1]
            good = status == 0 if survives else os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV
            print(name, "|", case, "|", good)
    """
)


@needs_helper
def test_exactly_the_lines_of_a_range_are_touched() -> None:
    """The instructions fault where nothing may be loaded: that they run, and on which lines, shows at forbidden pages."""
    done = run(_FAULTS)
    assert done.returncode == 0, done.stderr
    results = [line.split(" | ") for line in done.stdout.splitlines()]
    assert len(results) == 16 * len({*CLEANING, *DROPPING})
    assert [result for result in results if result[2] != "True"] == []


@needs_helper
@pytest.mark.parametrize("name", sorted({*CLEANING, *DROPPING}))
def test_bytes_survive(name: str) -> None:
    random = np.random.default_rng(5)
    expected = random.integers(0, 256, 5 << 20, np.uint8)
    memory = np.zeros_like(expected)
    for start, nbytes in [(0, len(memory)), (1, 1), (63, 2), (64, 64), (65, 4095), (12345, 3 << 20)]:
        memory[:] = expected
        CPU.lines(name, memory.ctypes.data + start, nbytes)
        CPU.store_fence()
        CPU.full_fence()
        assert np.array_equal(memory, expected)
    where = random.integers(0, len(memory) - 200, 5000).astype(np.uint64)
    CPU.lines_many(name, where + np.uint64(memory.ctypes.data), 128)
    assert np.array_equal(memory, expected)


@needs_helper
def test_what_is_no_memory_is_refused() -> None:
    words = np.zeros(4, np.uint64)
    good = words.ctypes.data
    for call in (
        lambda: CPU.lines("clzero", good, 8),
        lambda: CPU.lines(CLEANING[0], 0, 8),
        lambda: CPU.lines(CLEANING[0], 1 << 63, (1 << 64) - 1),
        lambda: CPU.lines_many(CLEANING[0], np.array([good, 0], np.uint64), 8),
        lambda: CPU.lines_many(CLEANING[0], np.zeros(9, np.uint8), 8),
    ):
        with pytest.raises(ValueError, match=r"instruction|memory|items"):
            call()


def test_an_instruction_that_does_not_do_it_is_refused() -> None:
    for cpu, named in ((CPU, "clwb"), (None, "compiled helper")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(coherence, "_coherence", cpu)
            with pytest.raises(ConfigError, match=named):
                SoftwareCoherence(drop="clwb")  # it may keep the line


def test_a_cpu_without_any_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cpu:
        LINE_BYTES, CLEANING, DROPPING = 64, (), ()

    monkeypatch.setattr(coherence, "_coherence", Cpu)
    assert not SoftwareCoherence.possible()
    with pytest.raises(ConfigError, match="coherent in hardware"):
        SoftwareCoherence()


# ------------------------------------------------------------ pools


@needs_helper
@pytest.mark.parametrize(("clean", "drop"), list(itertools.product(CLEANING, DROPPING)))
def test_objects_survive_with_every_choice_of_instructions(
    clean: str, drop: str, shm_name: str, pools: Callable[..., PoolMemory]
) -> None:
    server = pools(PoolMemory.create(f"shm://{shm_name}?size=64M&coherence=software"))
    memory = pools(PoolMemory.attach(f"shm://{shm_name}"))
    memory.coherence = SoftwareCoherence(clean, drop)
    sizes = (300_001, 77_777)
    count = THREADED_BATCH_BYTES // sum(sizes) + 1  # with several threads, and around the cache
    slots = np.arange(count, dtype=np.uint64) * np.uint64(512 << 10) + np.uint64(server.geometry.off_data)
    for native in {native_available, False}:
        mover = CxlMover(memory, threads=3, native=native)
        pages, copy = Pages(count, sizes, seed=int(native)), Pages(count, sizes)
        mover.store(slots, pages.fragments)
        mover.load(slots, copy.fragments)
        assert copy.same(pages).all()
    for native in {native_available, False}:
        view = PoolView(memory, native=native)
        some = np.array([0, 9, 2**32 - 1, 3], np.uint32)
        generations = np.append(server.generations[some[[0, 1]]], [1, 2]).astype(np.uint64)
        assert view.valid_each(some, generations).tolist() == [True, True, False, False]
        assert not view.valid(some, generations)
        server.generations[9] += np.uint64(1)
        assert view.valid_each(some, generations).tolist() == [True, False, False, False]
        server.generations[9] -= np.uint64(1)


@needs_helper
def test_locations_outside_the_pool_are_refused_before_a_line_is_touched(shm_name: str, pools: Any) -> None:
    server = pools(PoolMemory.create(f"shm://{shm_name}?{SOFTWARE}"))
    pages = Pages(1, (4096,), seed=1)
    for native in {native_available, False}:
        mover = CxlMover(server, native=native)
        for offset in (0, server.geometry.pool_bytes, 1 << 63):
            for move in (mover.store, mover.load):
                with pytest.raises(Exception, match="do not lie in an extent"):
                    move(np.array([offset], np.uint64), pages.fragments)


@needs_helper
def test_a_pool_says_what_it_is(shm_name: str) -> None:
    with PoolMemory.create(f"shm://{shm_name}?{SOFTWARE}") as server:
        assert server.coherence.software
        with PoolMemory.attach(f"shm://{shm_name}") as memory:
            assert memory.coherence.software
            server.set_owner("somebody")
            assert memory.owner() == "somebody"
            assert memory.incarnation_word()[0] == memory.incarnation == server.incarnation
            assert server.bump_incarnation() == memory.incarnation_word()[0] == memory.changes()[0]
        with pytest.raises(ConfigError, match=r"coherence=hardware was asked for.*leave coherence out.*--format"):
            PoolMemory.attach(f"shm://{shm_name}?coherence=hardware")
    with pytest.raises(ConfigError, match=r"formatted with coherence=software"):
        PoolMemory.create(f"shm://{shm_name}?coherence=hardware")
    PoolMemory.create(f"shm://{shm_name}").close()  # says nothing, so it stays what it is
    with PoolMemory.create(f"shm://{shm_name}?coherence=hardware", size=8 << 20, format=True) as server:
        assert server.coherence is HARDWARE
    for attempt in (PoolMemory.create, PoolMemory.attach):
        with pytest.raises(ConfigError, match=r"coherence=software was asked for"):
            attempt(f"shm://{shm_name}?coherence=software")


@needs_helper
def test_which_extents_are_cut_is_read_from_memory(shm_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks again and again for what the server has cut since must not look at what its own cache has kept."""
    with PoolMemory.create(f"shm://{shm_name}?{SOFTWARE}") as server, PoolMemory.attach(server.uri) as memory:
        dropped: list[tuple[int, int]] = []
        monkeypatch.setattr(
            memory.coherence, "invalidate", lambda address, nbytes: dropped.append((address, address + nbytes))
        )
        table = memory.extents
        start = int(table.ctypes.data)
        assert dropped == [(start, start + table.nbytes)]


@needs_helper
def test_generations_go_on_over_a_format(shm_name: str) -> None:
    with PoolMemory.create(f"shm://{shm_name}?{SOFTWARE}") as server:
        server.generations[3] += np.uint64(77 << 32)
        last = int(server.generations.max())
    with PoolMemory.create(f"shm://{shm_name}?{SOFTWARE}", format=True) as server:
        assert int(server.generations.min()) > last


def test_a_coherent_pool_pays_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one call: what asks :attr:`Coherence.software` goes no further."""

    def never(*_: object) -> None:
        raise AssertionError("called for a pool that is coherent in hardware")

    for name in ("write_back", "write_back_many", "invalidate", "invalidate_many"):
        monkeypatch.setattr(Coherence, name, never)
    with running_server(tmp_path) as server:
        store = Store.open(StoreConfig(server=server.endpoint, timeout_ms=60_000), namespace(), name="test")
        chain, pages, copy = hashes(4), Pages(4, (5000,), seed=1), Pages(4, (5000,))
        assert store.put("kv", 0, 1, ROOT, chain, pages.fragments).all()
        assert store.prefix(["kv"], 0, chain) == 4
        assert store.get("kv", 0, chain, copy.fragments).all()
        assert copy.same(pages).all()
        assert store.changes() is not None
        store.close()


# ------------------------------------------------------------ without the helper


def test_without_the_helper_such_pools_are_refused(shm_name: str, tmp_path: Path) -> None:
    create = "from maru_core.pool import PoolMemory\nPoolMemory.create(sys.argv[1]).close()\nprint('made')"
    attach = "from maru_core.pool import PoolMemory\nPoolMemory.attach(sys.argv[1]).close()\nprint('attached')"
    uri = f"shm://{shm_name}?{SOFTWARE}"
    refused = run(WITHOUT_HELPER + create, uri)
    assert "ConfigError" in refused.stderr
    assert "maru_core._coherence" in refused.stderr
    assert "C compiler" in refused.stderr
    assert not Path("/dev/shm", shm_name).exists()
    served = run(
        WITHOUT_HELPER + "from maru_server.cli import main\nsys.argv[0] = 'maru-server'\nsys.exit(main())",
        *("--pool", uri, "--bind", f"ipc://{tmp_path}/s"),
    )
    assert served.returncode != 0
    assert "maru_core._coherence" in served.stderr
    assert not Path("/dev/shm", shm_name).exists()
    if SoftwareCoherence.possible():
        # Its superblock says so, even where the URI does not.
        PoolMemory.create(uri).close()
        for program in (create, attach):
            refused = run(WITHOUT_HELPER + program, f"shm://{shm_name}")
            assert "ConfigError" in refused.stderr
            assert "formatted with coherence=software" in refused.stderr
            assert "maru_core._coherence" in refused.stderr
        PoolMemory.create(f"shm://{shm_name}").unlink()
    # All other pools do without.
    plain = run(WITHOUT_HELPER + create, f"shm://{shm_name}?size=8M")
    assert plain.stdout == "made\n", plain.stderr
    assert run(WITHOUT_HELPER + attach, f"shm://{shm_name}").stdout == "attached\n"


# ------------------------------------------------------------ processes

_CLIENT = textwrap.dedent(
    """
    import sys
    sys.path.insert(0, sys.argv[3])
    from support import Pages, hashes, namespace
    from maru_core.protocol import ROOT
    from maru_core.store import Store, StoreConfig
    config = StoreConfig(server=sys.argv[1], verify="checksum", timeout_ms=60_000)
    store = Store.open(config, namespace(), name="child")
    chain, pages, copy = hashes(40, 3), Pages(40, (30_001, 7), seed=3), Pages(40, (30_001, 7))
    if sys.argv[2] == "put":
        assert store.put("kv", 0, 1, ROOT, chain, pages.fragments).all()
    else:
        assert store.prefix(["kv"], 0, chain) == 40
        assert store.get("kv", 0, chain, copy.fragments).all()
        assert copy.same(pages).all()
    assert store.stats()["server_committed"] == int(sys.argv[4])
    store.close()
    print("done")
    """
)


@needs_helper
def test_processes_share_such_a_pool(shm_name: str, tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[1])
    with running_server(tmp_path, pool=f"shm://{shm_name}?coherence=software") as server:
        session = Session(server.endpoint, name="agent", timeout_s=60)
        with contextlib.closing(session), pytest.raises(ConfigError, match="run no agents"):
            PoolAgent(session)
        for what in ("put", "get"):
            child = run(_CLIENT, server.endpoint, what, tests, "40")
            assert child.stdout == "done\n", child.stderr
        server.kill()
        server.start()
        child = run(_CLIENT, server.endpoint, "get", tests, "0")
        assert child.stdout == "done\n", child.stderr
        refused = run(
            WITHOUT_HELPER
            + "from maru_core.store import Store, StoreConfig\nsys.path.insert(0, sys.argv[2])\nfrom support import namespace\n"
            "Store.open(StoreConfig(server=sys.argv[1], timeout_ms=60000), namespace(), name='bare')",
            *(server.endpoint, tests),
        )
        assert "ConfigError" in refused.stderr
        assert "maru_core._coherence" in refused.stderr


_WRITER = textwrap.dedent(
    """
    import json, sys, time
    sys.path.insert(0, sys.argv[2])
    import numpy as np
    from support import hashes, namespace
    from maru_core.pool import PoolMemory
    from maru_core.protocol import ROOT
    from maru_core.session import Session
    session = Session(sys.argv[1], name="writer", timeout_s=60)
    number = session.open_namespace(namespace().record())
    reserved = session.reserve(number, "kv", 0, 1, ROOT, hashes(3), 20_000)
    memory = PoolMemory.attach(session.welcome.pool_uri)
    offsets = np.frombuffer(reserved.offsets, "<u8").tolist()
    for offset in offsets:
        memory.data[offset - memory.geometry.off_data :][:20_000] = 7  # and is killed before it has written them back
    print(json.dumps([offsets, np.frombuffer(reserved.slots, "<u4").tolist()]), flush=True)
    time.sleep(60)
    """
)


@needs_helper
def test_lines_that_a_dead_writer_left_are_written_back_before_its_slots_return(
    shm_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = PoolMemory.create(f"shm://{shm_name}?size=64M&coherence=software")
    incarnation, now = memory.bump_incarnation(), time.monotonic()
    config = StateConfig(heartbeat_s=0.2, lease_s=2)
    directory = PoolDirectory(memory.geometry, memory.meta, memory.coherence)
    state = ServerState(
        directory, incarnation=incarnation, pool_uri=str(memory.uri), config=config, now=now, wall_offset=0
    )
    endpoint = f"ipc://{tmp_path}/server.sock"
    service = Service(state, memory, endpoint, incarnation=incarnation, lease_s=config.lease_s)
    dropped: list[
        tuple[int, int, bool]
    ] = []  # offset in the pool, bytes, whether all slots of the writer were taken still
    writers: list[int] = []
    real = SoftwareCoherence.invalidate_many

    def invalidate_many(self: SoftwareCoherence, addresses: Any, nbytes: int) -> None:
        taken = bool(directory.states[writers].all())
        for address in addresses.tolist():
            dropped.append((address - memory.data_address + memory.geometry.off_data, nbytes, taken))
        real(self, addresses, nbytes)

    monkeypatch.setattr(SoftwareCoherence, "invalidate_many", invalidate_many)
    thread = threading.Thread(target=service.run, daemon=True)
    thread.start()
    try:
        command = [sys.executable, "-c", _WRITER, endpoint, str(Path(__file__).parents[1])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            try:
                assert writer.stdout is not None
                offsets, slots = json.loads(writer.stdout.readline())
                writers += slots
                assert directory.states[slots].all()
            finally:
                writer.kill()
        await_condition(lambda: not directory.states[slots].any(), "the slots of the dead writer return")
        assert sorted(offset for offset, _, _ in dropped) == sorted(offsets)
        assert all(nbytes >= 20_000 and taken for _, nbytes, taken in dropped)
    finally:
        service.stop()
        thread.join(120)
        service.close()
        memory.unlink()
        memory.close()
