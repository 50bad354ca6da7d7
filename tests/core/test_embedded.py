"""The embedded server with real processes: one for all, found by all, gone after all, swept if killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from maru_core import embedded
from maru_core.embedded import Starter
from maru_core.errors import ConfigError, ServerUnavailableError
from maru_core.pool.numa import bound_node
from maru_core.protocol import ROOT
from maru_core.settings import Settings
from maru_core.store import Store, StoreConfig
from support import Pages, ServerProcess, await_condition, hashes, impatient, namespace

SIZES = (20_000,)


@pytest.fixture
def starter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Starter]:
    monkeypatch.setenv("MARU_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("MARU_POOL_SIZE", "64M")
    monkeypatch.setenv("MARU_IDLE_EXIT_S", "5")  # a slow client of a new server would find it gone
    monkeypatch.delenv("MARU_SERVER", raising=False)
    monkeypatch.setattr(Starter.ensure, "__defaults__", (180.0,))  # Python starts slowly on a busy machine
    made = Starter()
    yield made
    for pid in server_pids(made):
        os.kill(pid, signal.SIGKILL)
    made._pool_path.unlink(missing_ok=True)


def server_pids(starter: Starter) -> list[int]:
    """Processes of a maru-server whose command line has this test's own socket."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"maru_server" in words and starter.endpoint.encode() in words:
                found.append(int(entry.name))
    return found


def open_store(timeout_ms: int = 60_000) -> Store:
    return Store.open(StoreConfig(timeout_ms=timeout_ms), namespace(), name="test")


def missing(store: Store) -> contextlib.AbstractContextManager[None]:
    """Meanwhile its server is gone, and it must find that out."""
    return impatient(store._session, timeout_s=3)


def test_first_starts_it_later_ones_find_it_and_it_goes_away(starter: Starter) -> None:
    first = open_store()
    pids = server_pids(starter)
    assert len(pids) == 1
    second = open_store()
    assert server_pids(starter) == pids
    chain, pages = hashes(6), Pages(6, SIZES, seed=1)
    assert first.put("kv", 0, 1, ROOT, chain, pages.fragments).all()
    copy = Pages(6, SIZES)
    assert second.get("kv", 0, chain, copy.fragments).all()
    assert copy.same(pages).all()
    first.close()
    assert second.prefix(["kv"], 0, chain) == 6
    second.close()
    await_condition(lambda: not server_pids(starter), "the server ends after its last client")
    await_condition(lambda: not starter._pool_path.exists(), "its pool is gone")
    await_condition(lambda: not starter.socket.exists(), "its socket is gone")
    assert list(starter.directory.iterdir()) == [], "it leaves nothing behind"


def test_a_log_in_which_something_went_wrong_stays(starter: Starter) -> None:
    starter.directory.mkdir(mode=0o700)
    (starter.directory / "server.log").write_text("the last words of another\n")
    open_store().close()
    (pid,) = server_pids(starter)
    os.kill(pid, signal.SIGKILL)
    await_condition(lambda: not server_pids(starter), "it is gone")
    assert "serving" in (starter.directory / "server.log").read_text()


def test_one_holds_the_start_lock_although_each_removes_it(starter: Starter) -> None:
    starter.directory.mkdir(mode=0o700)
    inside = 0
    entered: list[int] = []

    def take_turns() -> None:
        nonlocal inside
        for _ in range(40):
            with starter._start_lock(time.monotonic() + 60):
                inside += 1
                entered.append(inside)
                time.sleep(0.0005)
                inside -= 1

    threads = [threading.Thread(target=take_turns) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(entered) == 240
    assert max(entered) == 1, "two held it at once"
    assert not (starter.directory / "start.lock").exists()


def test_many_processes_at_once_start_one(starter: Starter) -> None:
    code = (
        "import sys; from maru_core.embedded import Starter; print(Starter().ensure(180), flush=True); sys.stdin.read()"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(5)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline().strip() == starter.endpoint
        assert len(server_pids(starter)) == 1
    finally:
        for child in children:
            child.communicate()


def test_it_is_not_a_child_of_the_engine(starter: Starter) -> None:
    store = open_store()
    (pid,) = server_pids(starter)
    parents = set()
    walk = pid
    while walk > 1:
        walk = int(Path(f"/proc/{walk}/stat").read_text().rpartition(")")[2].split()[1])
        parents.add(walk)
    assert os.getpid() not in parents
    store.close()


def test_a_killed_one_comes_back_with_what_was_stored(starter: Starter) -> None:
    store = open_store()
    chain, pages = hashes(6), Pages(6, SIZES, seed=1)
    assert store.put("kv", 0, 1, ROOT, chain, pages.fragments).all()
    (pid,) = server_pids(starter)
    with missing(store):
        os.kill(pid, signal.SIGKILL)
        await_condition(lambda: server_pids(starter) not in ([], [pid]), "another server is started")
        await_condition(lambda: store.prefix(["kv"], 0, chain) == 6, "what was stored is found again")
    copy = Pages(6, SIZES)
    assert store.get("kv", 0, chain, copy.fragments).all()
    assert copy.same(pages).all()
    store.close()


def test_what_killed_servers_left_is_swept(starter: Starter, tmp_path: Path) -> None:
    other = Starter(
        settings=Settings.from_environment({"MARU_RUNTIME_DIR": str(tmp_path / "other"), "MARU_POOL_SIZE": "64M"})
    )
    other.ensure()
    (pid,) = server_pids(other)
    os.kill(pid, signal.SIGKILL)
    await_condition(lambda: not embedded._is_served(other._pool_path), "the lock of the killed server is gone")
    assert other._pool_path.exists()
    starter.socket.parent.mkdir(mode=0o700)
    starter.socket.touch()
    open_store().close()
    assert not other._pool_path.exists()
    assert starter.socket.is_socket()


def test_a_pool_that_is_served_is_not_swept(starter: Starter, tmp_path: Path) -> None:
    other = Starter(
        settings=Settings.from_environment({"MARU_RUNTIME_DIR": str(tmp_path / "other"), "MARU_POOL_SIZE": "64M"})
    )
    other.ensure()
    try:
        open_store().close()
        assert other._pool_path.exists()
    finally:
        for pid in server_pids(other):
            os.kill(pid, signal.SIGKILL)
        other._pool_path.unlink(missing_ok=True)


def test_a_damaged_pool_does_not_stand_in_the_way(starter: Starter) -> None:
    starter._pool_path.write_bytes(os.urandom(64 << 20))
    store = open_store()
    assert store.put("kv", 0, 1, ROOT, hashes(2), Pages(2, SIZES, seed=1).fragments).all()
    store.close()


def test_another_size_asked_for_replaces_a_pool_nobody_serves(
    starter: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store().close()
    (pid,) = server_pids(starter)
    os.kill(pid, signal.SIGKILL)
    await_condition(lambda: not embedded._is_served(starter._pool_path), "the lock of the killed server is gone")
    monkeypatch.setenv("MARU_POOL_SIZE", "128M")
    open_store().close()
    assert starter._pool_path.stat().st_size == 128 << 20


def test_another_size_asked_for_takes_nothing_from_those_who_still_use_the_pool(
    starter: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    chain = hashes(6)
    assert store.put("kv", 0, 1, ROOT, chain, Pages(6, SIZES, seed=1).fragments).all()
    # Another process, which wants another size, is the first to start the next server.
    store._lives._ensure_server = None
    (pid,) = server_pids(starter)
    with missing(store):
        os.kill(pid, signal.SIGKILL)
        await_condition(lambda: not embedded._is_served(starter._pool_path), "the lock of the killed server is gone")
        monkeypatch.setenv("MARU_POOL_SIZE", "128M")
        Starter().ensure()
        await_condition(lambda: store.prefix(["kv"], 0, chain) == 6, "what was stored is found again")
    store.close()


@pytest.mark.skipif(not Path("/sys/devices/system/node/node0").is_dir(), reason="this machine has no NUMA nodes")
def test_the_pool_lies_on_the_node_that_the_environment_names(
    starter: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARU_POOL_NUMA", "0")
    store = open_store()
    memory = store._lives.current().reach.memory
    assert memory is not None
    assert bound_node(memory.data_address) == 0
    store.close()


def test_a_node_that_is_not_there_stops_the_embedded_server(starter: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARU_POOL_NUMA", "1000")
    with pytest.raises(ServerUnavailableError, match="numa=1000"):
        Starter().ensure()
    assert not starter._pool_path.exists()


def test_a_runtime_directory_of_somebody_else_is_refused(starter: Starter) -> None:
    starter.directory.mkdir(mode=0o700)
    starter.directory.chmod(0o777)
    with pytest.raises(ConfigError, match="MARU_RUNTIME_DIR"):
        starter.ensure()


def test_a_socket_path_that_is_too_long_names_the_cure() -> None:
    settings = Settings.from_environment({"MARU_RUNTIME_DIR": "/tmp/" + "x" * 120})
    with pytest.raises(ConfigError, match="MARU_RUNTIME_DIR"):
        Starter(settings=settings)


def test_a_size_that_cannot_be_is_refused_with_the_servers_words(
    starter: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARU_POOL_SIZE", "1M")
    with pytest.raises((ConfigError, ServerUnavailableError), match=r"too small|smallest|at least|1 MiB|1048576"):
        Starter().ensure()


def test_a_child_that_is_forked_meanwhile_does_not_keep_the_locks(starter: Starter) -> None:
    starter._make_directory()
    with starter._start_lock(time.monotonic() + 5):
        # What another thread of an engine may do at any instant.
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
    try:
        with starter._start_lock(time.monotonic() + 1):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_server_that_is_killed_at_its_start_loses_nothing(starter: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store()
    chain, pages = hashes(6), Pages(6, SIZES, seed=1)
    assert store.put("kv", 0, 1, ROOT, chain, pages.fragments).all()
    monkeypatch.setattr(store._lives, "_ensure_server", None)  # this test starts the next server itself
    (pid,) = server_pids(starter)
    os.kill(pid, signal.SIGKILL)
    await_condition(lambda: not embedded._is_served(starter._pool_path), "the lock of the killed server is gone")
    await_ready, killed = Starter._await_ready, []

    def kill_the_first(self: Starter, read_end: int, deadline: float) -> None:
        if not killed:
            await_condition(lambda: len(server_pids(starter)) == 1, "a server is on its way")
            killed.extend(server_pids(starter))
            os.kill(killed[0], signal.SIGSTOP)  # before it can say that it is ready
            os.kill(killed[0], signal.SIGKILL)
        await_ready(self, read_end, deadline)

    monkeypatch.setattr(Starter, "_await_ready", kill_the_first)
    with missing(store):
        starter.ensure()
        assert killed
        await_condition(lambda: store.prefix(["kv"], 0, chain) == 6, "what was stored is found again")
    store.close()


def test_the_server_of_a_killed_starter_is_good_enough(
    starter: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was on its way when its starter was killed: not seen by the next one, which starts another in vain."""
    pool = f"shm://{starter.pool_name}"
    late = ServerProcess(tmp_path, pool=pool, bind=starter.endpoint, forked=False)  # found by its command line
    sweep = Starter._sweep

    def sweep_too_early(self: Starter) -> None:
        sweep(self)
        late.start()

    monkeypatch.setattr(Starter, "_sweep", sweep_too_early)
    try:
        store = open_store()
        assert store.put("kv", 0, 1, ROOT, hashes(2), Pages(2, SIZES, seed=1).fragments).all()
        store.close()
        assert late.process is not None
        assert server_pids(starter) == [late.process.pid]
    finally:
        late.remove()


def test_a_server_that_cannot_be_started_now_is_started_later(starter: Starter) -> None:
    store = open_store()
    log = starter.directory / "server.log"
    log.unlink()
    log.mkdir()
    (pid,) = server_pids(starter)
    with missing(store):
        os.kill(pid, signal.SIGKILL)
        await_condition(lambda: "revive" in store._logged, "an attempt has failed")
        log.rmdir()
        await_condition(lambda: server_pids(starter), "another attempt is made")
    store.close()


def test_a_pool_that_clients_still_map_is_not_swept(starter: Starter, tmp_path: Path) -> None:
    store = open_store()
    store._lives._ensure_server = None  # nobody starts another server meanwhile
    (pid,) = server_pids(starter)
    os.kill(pid, signal.SIGKILL)
    await_condition(lambda: not embedded._is_served(starter._pool_path), "the lock of the killed server is gone")
    other = Starter(
        settings=Settings.from_environment({"MARU_RUNTIME_DIR": str(tmp_path / "other"), "MARU_POOL_SIZE": "64M"})
    )
    other._sweep()
    assert starter._pool_path.exists()
    store.close()
    del store
    await_condition(lambda: other._sweep() or not starter._pool_path.exists(), "nobody maps it any more: it is swept")


def test_another_server_takes_over_where_somebody_removed_the_pool(starter: Starter) -> None:
    store = open_store()
    chain, pages = hashes(6), Pages(6, SIZES, seed=1)
    assert store.put("kv", 0, 1, ROOT, chain, pages.fragments).all()
    (old,) = server_pids(starter)
    starter._pool_path.unlink()
    starter._sweep()  # as the next to start one does
    time.sleep(1.5)  # long enough for the old server to see that its socket is gone
    assert not starter.socket.exists()
    other = open_store()
    # The old one may have ended by itself meanwhile: it hears of its client no more.
    assert set(server_pids(starter)) - {old}, "another server is there"
    assert other.put("kv", 0, 1, ROOT, chain, pages.fragments).all()
    for one in (store, other):
        with missing(one):
            await_condition(lambda one=one: one.prefix(["kv"], 0, chain) == 6, "both are served")
        copy = Pages(6, SIZES)
        assert one.get("kv", 0, chain, copy.fragments).all()
        assert copy.same(pages).all()
        one.close()


def test_what_is_no_file_under_the_pools_name_is_replaced_and_not_waited_for(starter: Starter) -> None:
    os.mkfifo(starter._pool_path)
    done = threading.Thread(target=starter.ensure, daemon=True)
    done.start()
    done.join(120)
    assert not done.is_alive()
    assert starter._pool_path.is_file()


def test_a_starter_that_is_stopped_costs_others_a_while_and_no_error(
    starter: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure = Starter.ensure
    monkeypatch.setattr(Starter, "ensure", lambda self, timeout_s=0.5: ensure(self, timeout_s))
    starter._make_directory()
    with starter._start_lock(time.monotonic() + 5):
        store = open_store(timeout_ms=1000)
        assert store.prefix(["kv"], 0, hashes(2)) == 0
    store._session.timeout_s = 60
    chain, pages = hashes(2), Pages(2, SIZES, seed=1)
    await_condition(lambda: ensure(starter) and store._session.connected, "the server is there")
    assert store.put("kv", 0, 1, ROOT, chain, pages.fragments).all()
    store.close()


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False
    ).returncode,
    reason="no mount namespace can be made here",
)
def test_containers_with_the_same_path_and_shared_memory_do_not_share_a_pool(starter: Starter, tmp_path: Path) -> None:
    code = "from maru_core.embedded import Starter; print(Starter().pool_name)"
    command = f'mount -t tmpfs none {tmp_path} && exec {sys.executable} -c "{code}"'
    inside = subprocess.run(["unshare", "-rm", "sh", "-c", command], capture_output=True, text=True, check=True)
    assert inside.stdout.startswith(embedded.POOL_PREFIX)
    # Of a user namespace: the same user, another directory.
    assert inside.stdout.strip().rpartition("-")[2] != starter.pool_name.rpartition("-")[2]
