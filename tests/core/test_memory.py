"""Mapping pools: nothing is formatted by accident, one server at a time, clients cannot write metadata, no SIGBUS."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import mmap
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from maru_core.errors import (
    ClosedError,
    ConfigError,
    NotAPoolError,
    PoolBusyError,
    PoolDamagedError,
    PoolError,
    PoolTooSmallError,
    PoolVersionError,
)
from maru_core.pool import PoolMemory, backing
from maru_core.pool.backing import DaxBacking, FileBacking
from maru_core.pool.format import BLOCK_BYTES, COMPONENT_BYTES, NAMESPACE_BYTES, RECORD_BYTES
from maru_core.pool.uri import parse_pool_uri

SMALL = "size=8M&extent=256K&align=4K&min_slot=4K"
Keep = Callable[[PoolMemory], PoolMemory]
spawn = multiprocessing.get_context("spawn")


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)


def forked(work: Callable[[], None]) -> int:
    """Run ``work`` in a forked child; the wait status (0: it returned)."""
    pid = os.fork()
    if pid == 0:
        try:
            faulthandler.disable()  # the child may be meant to die
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            work()
            os._exit(0)
        except BaseException:
            os._exit(99)
    return os.waitpid(pid, 0)[1]


# ---------------------------------------------------------------- making and finding


def test_a_missing_file_is_made_whole(shm_uri: str, pools: Keep) -> None:
    server = pools(PoolMemory.create(shm_uri))
    geometry = server.geometry
    path = server.uri.path
    assert path.stat().st_size == 8 << 20
    assert path.stat().st_mode & 0o777 == 0o600
    assert server.meta.shape == (geometry.off_data,)
    assert server.data.shape == (geometry.data_bytes,)
    assert server.generations.shape == server.directory.shape == (geometry.slot_count,)
    assert server.extents.shape == (geometry.extent_count,)
    assert server.components.nbytes == 64 * COMPONENT_BYTES
    assert server.namespaces.nbytes == 512 * NAMESPACE_BYTES
    assert server.directory.nbytes == geometry.slot_count * RECORD_BYTES
    assert set(server.generations.tolist()) == {geometry.created_ns // 10**9 << 32}
    assert not server.meta[8192 : geometry.off_generations].any()
    assert not server.directory.view(np.uint8).any()
    assert server.owner() == ""


def test_a_pool_keeps_everything_over_a_restart(shm_uri: str, pools: Keep) -> None:
    server = PoolMemory.create(shm_uri)
    first, before = server.geometry, server.incarnation
    assert server.bump_incarnation() == before + 1
    server.generations[5] = 77
    server.directory["page_hash"][3] = np.void(b"h" * 32)
    server.extents[1] = 4096
    server.data[1000] = 42
    server.set_owner("first server")
    server.close()
    again = pools(PoolMemory.create(shm_uri.split("?")[0]))
    assert again.geometry == first
    assert again.incarnation == before + 1
    assert again.bump_incarnation() == before + 2
    assert again.owner() == "first server"
    assert again.generations[5] == 77
    assert again.directory["page_hash"][3].tobytes() == b"h" * 32
    assert again.extents[1] == 4096
    assert again.data[1000] == 42


def test_an_empty_file_is_formatted(tmp_path: Path, pools: Keep) -> None:
    path = tmp_path / "pool"
    path.touch()
    inode = path.stat().st_ino
    server = pools(PoolMemory.create(f"file://{path}?{SMALL}"))
    assert path.stat().st_ino == inode
    assert pools(PoolMemory.attach(f"file://{path}", server.geometry.pool_uuid)).geometry == server.geometry


def test_an_empty_file_stays_empty_if_it_cannot_be_formatted(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    path.touch()
    with pytest.raises(PoolTooSmallError, match="at least"):
        PoolMemory.create(f"file://{path}?size=1M")
    with pytest.raises(ConfigError, match="needs a size"):
        PoolMemory.create(f"file://{path}")
    assert path.stat().st_size == 0


def test_a_pool_too_small_for_one_page_leaves_nothing(shm_name: str) -> None:
    with pytest.raises(PoolTooSmallError, match=r"extent of 2M.*at least \d+ bytes"):
        PoolMemory.create(f"shm://{shm_name}?size=3M")
    with pytest.raises(ConfigError, match="--size"):
        PoolMemory.create(f"shm://{shm_name}")
    assert not list(Path("/dev/shm").glob(f"*{shm_name}*"))


@pytest.mark.parametrize("content", [b"x", b"precious" * 1000, bytes(1 << 20), b"MARUPOOL"], ids=lambda c: str(len(c)))
def test_foreign_files_are_never_written(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "precious"
    path.write_bytes(content)
    status = path.stat()
    uri = f"file://{path}?{SMALL}"
    for attempt in (PoolMemory.create, PoolMemory.attach):
        with pytest.raises(NotAPoolError, match=r"precious.*--format") as error:
            attempt(uri)
        assert "not touched" in str(error.value)
    assert path.read_bytes() == content
    assert path.stat().st_mtime_ns == status.st_mtime_ns


def test_format_replaces_what_is_foreign_and_only_then(tmp_path: Path, pools: Keep) -> None:
    path = tmp_path / "pool"
    path.write_bytes(b"precious" * 1000)
    os.link(path, tmp_path / "other name")
    server = pools(PoolMemory.create(f"file://{path}?{SMALL}", format=True))
    assert path.stat().st_size == 8 << 20
    assert pools(PoolMemory.attach(f"file://{path}")).geometry == server.geometry
    assert (tmp_path / "other name").read_bytes() == b"precious" * 1000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other name", "pool"]


def corrupt(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize(
    ("offset", "data", "error"),
    [(0, b"X", NotAPoolError), (8, b"\x07", PoolVersionError), (60, b"\xff", PoolDamagedError)],
)
def test_a_bad_superblock_is_refused_untouched(
    shm_uri: str, offset: int, data: bytes, error: type[PoolError], pools: Keep
) -> None:
    server = PoolMemory.create(shm_uri)
    path = server.uri.path
    server.close()
    corrupt(path, offset, data)
    content = path.read_bytes()
    for attempt in (PoolMemory.create, PoolMemory.attach):
        with pytest.raises(error, match="--format") as raised:
            attempt(shm_uri)
        assert shm_uri.split("?")[0] in str(raised.value)
    assert path.read_bytes() == content
    pools(PoolMemory.create(shm_uri, format=True))
    pools(PoolMemory.attach(shm_uri))


@pytest.mark.parametrize("length", [BLOCK_BYTES, 1 << 20, (8 << 20) - 1])
def test_a_file_cut_short_is_refused(shm_uri: str, length: int) -> None:
    server = PoolMemory.create(shm_uri)
    server.close()
    os.truncate(server.uri.path, length)
    for attempt in (PoolMemory.create, PoolMemory.attach):
        with pytest.raises(PoolDamagedError, match=f"{8 << 20} bytes.*only {length}"):
            attempt(shm_uri)


@pytest.mark.parametrize(
    ("options", "key", "asked", "is_"),
    [("size=16M", "size", "16M", "8M"), ("extent=512K", "extent", "512K", "256K"),
     ("min_slot=8K", "min_slot", "8K", "4K"), ("align=2M", "align", "2M", "4K")],
)  # fmt: skip
def test_an_existing_pool_must_be_what_was_asked_for(
    shm_uri: str, shm_name: str, options: str, key: str, asked: str, is_: str, pools: Keep
) -> None:
    PoolMemory.create(shm_uri).close()
    with pytest.raises(ConfigError, match=rf"{key}={asked}.*{key}={is_}"):
        PoolMemory.create(f"shm://{shm_name}?{options}")
    pools(PoolMemory.create(f"shm://{shm_name}"))  # the refusal left no lock behind


def test_two_sizes_that_differ_are_refused(shm_uri: str) -> None:
    with pytest.raises(ConfigError, match=r"size=8M.*9M"):
        PoolMemory.create(shm_uri, size=9 << 20)


@pytest.mark.parametrize("kind", ["fifo", "directory", "link", "dangling", "loop"])
def test_what_is_not_a_plain_file_is_refused_without_hanging(shm_name: str, kind: str, tmp_path: Path) -> None:
    path = Path("/dev/shm", shm_name)
    victim = tmp_path / "victim"
    try:
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "directory":
            path.mkdir()
        elif kind == "link":
            victim.touch()
            path.symlink_to(victim)
        elif kind == "dangling":
            path.symlink_to(victim)
        else:
            path.symlink_to(path)
        for attempt in (PoolMemory.create, PoolMemory.attach):
            with pytest.raises(PoolError, match=shm_name):
                attempt(f"shm://{shm_name}?{SMALL}")
        assert not victim.exists() or victim.stat().st_size == 0
    finally:
        if kind == "directory":
            path.rmdir()


def test_a_missing_folder_and_a_missing_pool_are_named(tmp_path: Path, shm_name: str) -> None:
    with pytest.raises(PoolError, match="create the folder"):
        PoolMemory.create(f"file://{tmp_path}/none/pool?{SMALL}")
    with pytest.raises(PoolError, match="is its server running"):
        PoolMemory.attach(f"shm://{shm_name}")


def test_a_file_through_a_symbolic_link_is_the_file(tmp_path: Path, pools: Keep) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    server = pools(PoolMemory.create(f"file://{tmp_path}/link?{SMALL}"))
    server.close()
    pools(PoolMemory.create(f"file://{tmp_path}/link", size=8 << 20, format=True))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").stat().st_size == 8 << 20


def test_where_files_cannot_be_made_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pools: Keep
) -> None:
    """Some file systems have no O_TMPFILE; the kernel then says EISDIR or EOPNOTSUPP."""
    really_open = os.open

    def open_(path: str | Path, flags: int, *rest: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise IsADirectoryError(21, "Is a directory")
        return really_open(path, flags, *rest)

    monkeypatch.setattr(os, "open", open_)
    path = tmp_path / "pool"
    pools(PoolMemory.create(f"file://{path}?{SMALL}")).close()
    assert [p.name for p in tmp_path.iterdir()] == ["pool"]
    pools(PoolMemory.create(f"file://{path}?{SMALL}", format=True))
    assert [p.name for p in tmp_path.iterdir()] == ["pool"]
    pools(PoolMemory.attach(f"file://{path}"))


@pytest.mark.parametrize("format_", [False, True])
def test_a_server_killed_while_it_makes_a_pool_leaves_nothing_half_made(tmp_path: Path, format_: bool) -> None:
    uri = f"file://{tmp_path}/pool?{SMALL}"
    if format_:
        PoolMemory.create(uri).close()
    code = """
        import os, signal, sys
        from maru_core.pool import PoolMemory, backing
        os.link = os.rename = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
        PoolMemory.create(sys.argv[1], format=sys.argv[2] == "True")
    """
    assert python(code, uri, format_).returncode == -signal.SIGKILL
    assert [p.name for p in tmp_path.iterdir()] == (["pool"] if format_ else [])
    PoolMemory.create(uri).close()


def test_modes_are_as_given_whatever_the_umask(tmp_path: Path, pools: Keep) -> None:
    for umask, option, mode in ((0o000, "600", 0o600), (0o077, "640", 0o640), (0o077, "660", 0o660)):
        old = os.umask(umask)
        try:
            pools(PoolMemory.create(f"file://{tmp_path}/pool{option}?{SMALL}&mode={option}")).close()
        finally:
            os.umask(old)
        assert (tmp_path / f"pool{option}").stat().st_mode & 0o777 == mode
    pools(PoolMemory.create(f"file://{tmp_path}/pool600?mode=640"))
    assert (tmp_path / "pool600").stat().st_mode & 0o777 == 0o640


# ---------------------------------------------------------------- formatting again


def test_a_new_format_repeats_no_generation_and_no_incarnation(shm_uri: str, pools: Keep) -> None:
    server = PoolMemory.create(shm_uri)
    incarnation = server.bump_incarnation()
    future = (server.geometry.created_ns // 10**9 + 5000) << 32  # a pool from before the clock was set back
    server.generations[9] = future | 17
    first = server.geometry
    server.close()
    second = pools(PoolMemory.create(shm_uri, format=True))
    assert second.geometry.pool_uuid != first.pool_uuid
    assert int(second.generations.min()) > future | 0xFFFFFFFF
    assert second.incarnation > incarnation
    second.close()
    third = pools(PoolMemory.create(shm_uri, format=True))
    assert int(third.generations.min()) > int(second.geometry.created_ns // 10**9) << 32 | 0xFFFFFFFF


def test_pools_made_in_one_second_have_no_incarnation_in_common(shm_uri: str, pools: Keep) -> None:
    """A client that maps the first, whose file was removed, would believe what the server of the second says."""
    incarnations = set()
    for _ in range(4):
        server = pools(PoolMemory.create(shm_uri))
        incarnations |= {server.bump_incarnation() for _ in range(3)}
        server.unlink()
        server.close()
    assert len(incarnations) == 12


def test_a_format_leaves_the_memory_of_old_clients_alone(shm_uri: str, pools: Keep) -> None:
    server = PoolMemory.create(shm_uri)
    server.data[:4096] = 1
    old = pools(PoolMemory.attach(shm_uri))
    uuid = server.geometry.pool_uuid
    server.close()
    server = pools(PoolMemory.create(shm_uri, format=True))
    old.data[:4096] = 2  # a late writer
    assert not server.data[:4096].any()
    with pytest.raises(PoolError, match="the server's is"):
        PoolMemory.attach(shm_uri, uuid)


# ---------------------------------------------------------------- one server


def hold(uri: str, ready: object) -> None:
    memory = PoolMemory.create(uri)
    memory.set_owner(f"maru-server on ipc:///x, pid {os.getpid()}")
    ready.set()  # type: ignore[attr-defined]
    signal.pause()


@pytest.fixture
def holder(shm_uri: str) -> Iterator[multiprocessing.process.BaseProcess]:
    ready = spawn.Event()
    process = spawn.Process(target=hold, args=(shm_uri, ready))
    process.start()
    assert ready.wait(30)
    yield process
    process.kill()
    process.join()


def test_a_second_server_is_refused_and_told_the_first(
    shm_uri: str, holder: multiprocessing.process.BaseProcess, pools: Keep
) -> None:
    for format_ in (False, True):
        with pytest.raises(PoolBusyError, match=f"maru-server on ipc:///x, pid {holder.pid}: stop"):
            PoolMemory.create(shm_uri, format=format_)
    client = pools(PoolMemory.attach(shm_uri))
    assert str(holder.pid) in client.owner()
    os.kill(holder.pid or 0, signal.SIGKILL)
    holder.join()
    pools(PoolMemory.create(shm_uri))


def test_a_second_server_in_the_same_process_is_refused_too(shm_uri: str, pools: Keep) -> None:
    server = pools(PoolMemory.create(shm_uri))
    with pytest.raises(PoolBusyError, match="has not said who"):
        PoolMemory.create(shm_uri)
    arrays = server.generations, server.data
    server.close()
    server.close()
    pools(PoolMemory.create(shm_uri))  # the lock is gone although arrays still hold the mapping
    assert len(arrays[0]) == server.geometry.slot_count
    assert arrays[0][0] > 0


def test_a_damaged_owner_block_names_nobody(shm_uri: str, pools: Keep) -> None:
    server = pools(PoolMemory.create(shm_uri))
    server.set_owner("ü" * 5000)
    assert server.owner().startswith("üü")
    server.meta[BLOCK_BYTES + 100] ^= 1
    assert server.owner() == ""
    server.meta[BLOCK_BYTES + 16 : BLOCK_BYTES + 20] = 0xFF
    assert server.owner() == ""


def test_a_forked_child_cannot_release_the_lock(shm_uri: str, pools: Keep) -> None:
    server = pools(PoolMemory.create(shm_uri))
    assert forked(server.close) == 0
    with pytest.raises(PoolBusyError):
        PoolMemory.create(shm_uri)


def make_one(uri: str, start: object, answers: object) -> None:
    start.wait()  # type: ignore[attr-defined]
    try:
        memory = PoolMemory.create(uri)
        answers.put("made")  # type: ignore[attr-defined]
        start.wait()  # type: ignore[attr-defined]
        memory.close()
    except PoolBusyError:
        answers.put("busy")  # type: ignore[attr-defined]
        start.wait()  # type: ignore[attr-defined]


def test_of_servers_that_start_at_once_one_wins(shm_uri: str) -> None:
    start, answers = spawn.Barrier(3), spawn.Queue()
    processes = [spawn.Process(target=make_one, args=(shm_uri, start, answers)) for _ in range(3)]
    for process in processes:
        process.start()
    assert sorted(answers.get(timeout=180) for _ in processes) == ["busy", "busy", "made"]
    for process in processes:
        process.join()


def test_a_pool_removed_between_open_and_lock_is_made_anew(
    shm_uri: str, monkeypatch: pytest.MonkeyPatch, pools: Keep
) -> None:
    first = PoolMemory.create(shm_uri)
    first.close()
    really_lock = FileBacking.lock
    removed = []

    def lock(self: FileBacking) -> bool:
        if not removed:
            removed.append(self.uri.path.unlink())
        return really_lock(self)

    monkeypatch.setattr(FileBacking, "lock", lock)
    second = pools(PoolMemory.create(shm_uri))
    assert second.geometry.pool_uuid != first.geometry.pool_uuid
    assert pools(PoolMemory.attach(shm_uri)).geometry == second.geometry


def test_unlink_removes_only_its_own_file(shm_uri: str, pools: Keep) -> None:
    server = pools(PoolMemory.create(shm_uri))
    path = server.uri.path
    path.unlink()
    path.write_text("somebody else's")
    server.unlink()
    assert path.read_text() == "somebody else's"
    path.unlink()
    server.unlink()
    other = pools(PoolMemory.create(shm_uri))
    pools(PoolMemory.attach(shm_uri)).unlink()  # a client removes nothing
    assert path.exists()
    other.unlink()
    assert not path.exists()


# ---------------------------------------------------------------- permission

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of other owners")
OTHER = 12345

DEMOTED = """
    import os, sys
    from pathlib import Path
    from maru_core.errors import PoolError
    from maru_core.pool import PoolMemory, backing
    os.setgid(12345); os.setuid(12345)
    try:
        how, uri, sysfs = sys.argv[1:]
        getattr(PoolMemory, how)(uri, sysfs=Path(sysfs))
        print("opened")
    except PoolError as error:
        print(error)
"""


@needs_root
def test_a_file_of_another_owner_is_refused(shm_uri: str) -> None:
    server = PoolMemory.create(shm_uri)
    server.close()
    os.chown(server.uri.path, OTHER, OTHER)
    content = server.uri.path.read_bytes()
    for format_ in (False, True):
        with pytest.raises(PoolError, match=rf"belongs to uid {OTHER}.*choose another name"):
            PoolMemory.create(shm_uri, format=format_)
    assert server.uri.path.read_bytes() == content


@needs_root
def test_without_permission_the_error_names_owner_and_mode(shm_uri: str, pools: Keep) -> None:
    pools(PoolMemory.create(shm_uri))
    for how in ("create", "attach"):
        said = python(DEMOTED, how, shm_uri, "/sys").stdout
        assert f"uid {OTHER} may not open it" in said
        assert "root (uid 0) with mode 600" in said
        assert "mode=660" in said


@needs_root
def test_a_group_takes_part_where_the_mode_says_so(shm_uri: str, pools: Keep) -> None:
    server = pools(PoolMemory.create(f"{shm_uri}&mode=660"))
    os.chown(server.uri.path, 0, OTHER)
    assert python(DEMOTED, "attach", shm_uri, "/sys").stdout == "opened\n"


@needs_root
def test_a_device_without_permission_is_refused(dax: Callable[..., object]) -> None:
    device = dax()
    os.chmod(device.device, 0o600)
    for folder in (device.device.parent, *device.device.parent.parents[:3]):
        if folder != Path("/tmp") and folder != Path("/"):
            folder.chmod(0o755)
    for how in ("create", "attach"):
        said = python(DEMOTED, how, device.uri, device.sysfs).stdout
        assert f"uid {OTHER} may not open it" in said
        assert "udev" in said


# ---------------------------------------------------------------- clients


def test_a_client_sees_what_the_server_writes_and_writes_data(shm_uri: str, pools: Keep) -> None:
    server = pools(PoolMemory.create(shm_uri))
    client = pools(PoolMemory.attach(shm_uri, server.geometry.pool_uuid))
    server.generations[3] = 12
    assert client.generations[3] == 12
    offset = server.geometry.slot_offset(70, 4096)
    ctypes.memset(client.address_of(offset), 0x5A, 4096)
    start = offset - server.geometry.off_data
    assert (server.data[start : start + 4096] == 0x5A).all()
    assert not server.data[:start].any()
    assert client.data_address == client.address_of(server.geometry.off_data)


def test_metadata_cannot_be_written_by_a_client(shm_uri: str, pools: Keep) -> None:
    server = pools(PoolMemory.create(shm_uri))
    client = pools(PoolMemory.attach(shm_uri))
    for array in (
        client.meta,
        client.generations,
        client.directory,
        client.extents,
        client.components,
        client.namespaces,
    ):
        assert not array.flags.writeable
        with pytest.raises(ValueError, match=r"cannot set WRITEABLE|not writeable"):
            array.flags.writeable = True
    with pytest.raises(ValueError, match="read-only"):
        client.set_owner("me")
    address = int(client.generations.ctypes.data)
    before = int(server.generations[0])
    status = forked(lambda: ctypes.memset(address, 0, 8) and None)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGSEGV
    # Not even by asking: the descriptor under the mapping is open for reading only.
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(int(client.meta.ctypes.data)), 4096, mmap.PROT_READ | mmap.PROT_WRITE) == -1
    assert int(server.generations[0]) == before


def test_another_pool_than_the_servers_is_refused(shm_uri: str, pools: Keep) -> None:
    pools(PoolMemory.create(shm_uri))
    with pytest.raises(PoolError, match=r"00000000-0000-0000-0000-000000000001.*name the path"):
        PoolMemory.attach(shm_uri, bytes(15) + b"\1")


def test_addresses_outside_the_extents_are_refused(shm_uri: str, pools: Keep) -> None:
    server = pools(PoolMemory.create(shm_uri))
    end = server.geometry.off_data + server.geometry.data_bytes
    for offset in (-1, 0, server.geometry.off_data - 1, end, 1 << 63):
        with pytest.raises(PoolError, match="not in the pool's extents"):
            server.address_of(offset)
    for extent in (-1, server.geometry.extent_count):
        for call in (server.provision, server.populate):
            with pytest.raises(ValueError, match="extent"):
                call(extent)


def test_a_closed_pool_says_so(shm_uri: str, pools: Keep) -> None:
    pools(PoolMemory.create(shm_uri))
    with PoolMemory.attach(shm_uri) as client:
        assert not client.closed
    assert client.closed
    for look in (
        lambda: client.meta, lambda: client.data, lambda: client.data_address, lambda: client.generations,
        lambda: client.incarnation, lambda: client.populate(0), lambda: client.address_of(client.geometry.off_data),
    ):  # fmt: skip
        with pytest.raises(ClosedError, match="attach again"):
            look()


def test_nothing_stays_open_after_a_client_is_gone(shm_uri: str, pools: Keep) -> None:
    pools(PoolMemory.create(shm_uri))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PoolError):
        PoolMemory.attach(shm_uri, bytes(16))
    PoolMemory.attach(shm_uri).close()
    assert len(os.listdir("/proc/self/fd")) == before


# ---------------------------------------------------------------- no SIGBUS


@pytest.fixture
def full_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 12 MiB of its own."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12M", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small tmpfs here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_provisioned_memory_can_be_written_and_other_memory_cannot(full_tmpfs: Path, pools: Keep) -> None:
    server = pools(PoolMemory.create(f"file://{full_tmpfs}/pool?size=64M&extent=1M&align=4K"))
    ready = 0
    while server.provision(ready):
        ready += 1
    assert 4 <= ready <= 9
    assert not server.provision(ready + 1)
    assert server.provision(0)  # what is there stays there, and saying so again costs nothing
    client = pools(PoolMemory.attach(f"file://{full_tmpfs}/pool"))

    def write(extent: int) -> Callable[[], None]:
        start = extent << 20
        return lambda: client.data[start : start + (1 << 20)].fill(1)

    for extent in range(ready):
        assert forked(write(extent)) == 0
    # What would happen without: this is the signal that provisioning is there to prevent.
    status = forked(write(ready + 2))
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGBUS


def test_no_space_for_the_tables_is_an_error_that_leaves_nothing(full_tmpfs: Path) -> None:
    empty = full_tmpfs / "empty"
    empty.touch()
    for name in ("pool", "empty"):
        with pytest.raises(PoolError, match=r"no space for the pool's tables \(\d+ bytes\).*free some"):
            PoolMemory.create(f"file://{full_tmpfs}/{name}?size=4G&align=4K")
    assert [p.name for p in full_tmpfs.iterdir()] == ["empty"]
    assert empty.stat().st_size == 0
    free = os.statvfs(full_tmpfs)
    assert free.f_bavail * free.f_frsize >= 11 << 20


def test_holes_in_the_tables_are_filled_before_anyone_maps_them(full_tmpfs: Path, pools: Keep) -> None:
    uri = f"file://{full_tmpfs}/pool?size=64M&extent=1M&align=4K"
    PoolMemory.create(uri).close()
    path = full_tmpfs / "pool"
    with path.open("r+b") as file:  # as a copy by `cp --sparse` makes them
        punch = ctypes.CDLL(None).fallocate
        punch.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        assert punch(file.fileno(), 3, 1 << 20, 64 << 10) == 0
    (full_tmpfs / "filler").write_bytes(bytes(1 << 20))
    with (full_tmpfs / "filler").open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    with pytest.raises(PoolError, match="no space for the pool's tables"):
        PoolMemory.create(uri)
    (full_tmpfs / "filler").unlink()
    server = pools(PoolMemory.create(uri))
    assert server.meta.sum(dtype=np.uint64) > 0


def test_a_file_system_without_reservation_is_refused(shm_uri: str, pools: Keep) -> None:
    server = pools(PoolMemory.create(shm_uri))
    read_only = FileBacking(server.uri, os.open(server.uri.path, os.O_RDONLY))
    with pytest.raises(PoolError, match="cannot reserve space"):
        read_only.provision(0, 4096)
    read_only.close()
    with pytest.raises(PoolError, match="only the pool's server"):
        pools(PoolMemory.attach(shm_uri)).provision(0)


def test_populate_maps_pages_and_changes_none(shm_uri: str, pools: Keep) -> None:
    server = pools(PoolMemory.create(shm_uri))
    assert server.provision(1)
    server.data[server.geometry.extent_bytes] = 9
    client = pools(PoolMemory.attach(shm_uri))
    if not client.populate(1):
        pytest.skip("this kernel has no MADV_POPULATE_WRITE (Linux 5.14)")
    assert _smaps(client.data_address)["Rss"] >= client.geometry.extent_bytes >> 10
    assert client.data[client.geometry.extent_bytes] == 9


def _smaps(address: int) -> dict[str, int]:
    """The kB figures of the mapping that holds an address."""
    found: dict[str, int] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if head:
            inside = int(head[1], 16) <= address < int(head[2], 16)
        elif inside and (figure := re.match(r"(\w+):\s+(\d+) kB", line)):
            found[figure[1]] = int(figure[2])
    return found


# ---------------------------------------------------------------- device-dax


def mappings(path: Path) -> list[tuple[int, int, str, int]]:
    """This process's mappings of a file: start, length, permissions, offset."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] == str(path):
            start, end = (int(part, 16) for part in fields[0].split("-"))
            found.append((start, end - start, fields[1], int(fields[2], 16)))
    return found


@pytest.mark.parametrize("align", [4 << 10, 2 << 20, 8 << 20])
def test_a_device_is_mapped_by_its_rules(dax: Callable[..., object], align: int, pools: Keep) -> None:
    device = dax(size=96 << 20, align=align)
    server = pools(PoolMemory.create(device.uri, format=True, sysfs=device.sysfs))
    geometry = server.geometry
    assert geometry.pool_bytes == 96 << 20  # sysfs says so; the file that stands for the device is larger
    assert geometry.align == max(align, 2 << 20)
    client = pools(PoolMemory.attach(device.uri, geometry.pool_uuid, sysfs=device.sysfs))
    found = mappings(device.device)
    assert {(length, offset) for _, length, _, offset in found} == {
        (geometry.off_data, 0),
        (geometry.data_bytes, geometry.off_data),
    }
    assert sorted(permissions for _, _, permissions, _ in found) == ["r--s", "rw-s", "rw-s", "rw-s"]
    assert all(length % align == 0 and offset % align == 0 for _, length, _, offset in found)
    server.generations[1] = 5
    client.data[7] = 3
    assert client.generations[1] == 5
    assert server.data[7] == 3
    assert server.provision(0)
    server.unlink()
    assert device.device.exists()


def test_a_device_is_never_formatted_without_being_told(dax: Callable[..., object], pools: Keep) -> None:
    device = dax()
    for attempt in (PoolMemory.create, PoolMemory.attach):
        with pytest.raises(NotAPoolError, match="--format"):
            attempt(device.uri, sysfs=device.sysfs)
    with device.device.open("rb") as file:
        assert not any(file.read(1 << 20))
    corrupt(device.device, 0, b"a file system" * 1000)
    with pytest.raises(NotAPoolError, match="a file"):
        PoolMemory.create(device.uri, sysfs=device.sysfs)
    server = PoolMemory.create(device.uri, format=True, sysfs=device.sysfs)
    first = server.geometry
    assert not server.meta[BLOCK_BYTES + 8 : first.off_generations].any()
    server.directory["state"][:] = 2
    server.generations[4] += 1 << 40
    highest = int(server.generations.max())
    server.close()
    again = pools(PoolMemory.create(device.uri, sysfs=device.sysfs))
    assert again.geometry == first
    assert again.directory["state"].all()
    with pytest.raises(PoolBusyError):
        PoolMemory.create(device.uri, format=True, sysfs=device.sysfs)
    again.close()
    formatted = pools(PoolMemory.create(device.uri, format=True, sysfs=device.sysfs))
    assert not formatted.directory["state"].any()
    assert int(formatted.generations.min()) > highest


def test_sizes_come_from_sysfs_and_are_checked(dax: Callable[..., object], pools: Keep) -> None:
    device = dax(size=64 << 20)
    with pytest.raises(ConfigError, match=rf"size=65M is more than the {64 << 20} bytes"):
        PoolMemory.create(device.uri, size=65 << 20, format=True, sysfs=device.sysfs)
    PoolMemory.create(device.uri, format=True, sysfs=device.sysfs).close()
    device.set(size=32 << 20)  # reconfigured smaller: the rest would be SIGBUS
    for attempt in (PoolMemory.create, PoolMemory.attach):
        with pytest.raises(PoolDamagedError, match=rf"{64 << 20} bytes.*only {32 << 20}"):
            attempt(device.uri, sysfs=device.sysfs)
    device.set(size=128 << 20)
    with pytest.raises(ConfigError, match=r"size=128M.*size=64M"):
        PoolMemory.create(device.uri, size=128 << 20, sysfs=device.sysfs)
    pools(PoolMemory.create(device.uri, sysfs=device.sysfs))


def test_a_coarser_alignment_than_the_pools_is_refused(dax: Callable[..., object]) -> None:
    device = dax(size=64 << 20, align=4 << 10)
    device.set(align=2 << 20)
    with pytest.raises(ConfigError, match=r"align=4K is not a multiple of the alignment 2M"):
        PoolMemory.create(f"{device.uri}?align=4K", format=True, sysfs=device.sysfs)
    device.set(align=4 << 10)
    PoolMemory.create(f"{device.uri}?align=4K&extent=256K", format=True, sysfs=device.sysfs).close()
    device.set(align=16 << 20)
    for attempt in (PoolMemory.create, PoolMemory.attach):
        with pytest.raises(PoolError, match=r"aligned to 4K.*demands 16M.*reconfigure-device --align=4096"):
            attempt(device.uri, sysfs=device.sysfs)


def test_offsets_and_lengths_are_checked_before_the_kernel_sees_them(dax: Callable[..., object]) -> None:
    device = dax(size=64 << 20)
    opened = DaxBacking.open(parse_pool_uri(device.uri), writable=True, sysfs=device.sysfs)
    for offset, length in ((4096, 2 << 20), (0, 4096), (0, 0), (-(2 << 20), 2 << 20)):
        with pytest.raises(PoolError, match="not multiples of the alignment 2M"):
            opened.map(offset, length, writable=True)
    with pytest.raises(PoolError, match=f"has {64 << 20} bytes"):
        opened.map(62 << 20, 4 << 20, writable=True)  # inside the file, past the device
    corrupt(device.device, (3 << 20) - 2, b"over the edge")
    assert opened.read((3 << 20) - 2, 13) == b"over the edge"
    assert opened.read((64 << 20) - 1, 100) == b"\0"
    opened.close()


def test_older_kernels_keep_the_alignment_elsewhere(dax: Callable[..., object], pools: Keep) -> None:
    device = dax()
    (device.node / "align").unlink()
    with pytest.raises(PoolError, match="has no align"):
        PoolMemory.create(device.uri, format=True, sysfs=device.sysfs)
    (device.node / "dax_region").mkdir()
    (device.node / "dax_region" / "align").write_text("2097152\n")
    pools(PoolMemory.create(device.uri, format=True, sysfs=device.sysfs))


@pytest.mark.parametrize(("name", "value"), [("size", 0), ("align", 3 << 20), ("align", 512), ("size", 4096)])
def test_a_device_that_cannot_be_mapped_is_named(dax: Callable[..., object], name: str, value: int) -> None:
    device = dax()
    device.set(**{name: value})
    with pytest.raises(PoolError, match="daxctl reconfigure-device"):
        PoolMemory.create(device.uri, format=True, sysfs=device.sysfs)


def test_what_is_no_dax_device_is_refused(tmp_path: Path, dax: Callable[..., object]) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(bytes(1 << 20))
    for path in (plain, Path("/dev/null")):
        with pytest.raises(PoolError, match=rf"{path} is not a device-dax node.*daxctl list"):
            PoolMemory.create(f"dax://{path}", format=True)
    with pytest.raises(PoolError, match="there is no"):
        PoolMemory.create(f"dax://{tmp_path}/dax9.9", format=True)
    device = dax()
    (device.node / "size").write_text("many")
    with pytest.raises(PoolError, match="cannot read"):
        PoolMemory.create(device.uri, format=True, sysfs=device.sysfs)


def test_a_plain_file_never_stands_for_a_device_on_the_real_sysfs(
    dax: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a file is what `dd of=/dev/dax0.0` leaves in a container that lacks the node."""
    device = dax()
    monkeypatch.setattr(backing, "SYSFS", device.sysfs)
    with pytest.raises(PoolError, match="is not a device-dax node"):
        PoolMemory.create(device.uri, format=True, sysfs=device.sysfs)


def test_a_character_device_is_found_by_its_number(tmp_path: Path) -> None:
    """/dev/null stands for the node: its number leads to a dax device in this sysfs, under another name."""
    node = tmp_path / "sys" / "devices" / "dax0.3"
    node.mkdir(parents=True)
    (tmp_path / "sys" / "bus" / "dax").mkdir(parents=True)
    (node / "subsystem").symlink_to(tmp_path / "sys" / "bus" / "dax")
    (node / "size").write_text("67108864\n")
    (node / "align").write_text("2097152\n")
    number = os.stat("/dev/null").st_rdev
    (tmp_path / "sys" / "dev" / "char").mkdir(parents=True)
    link = tmp_path / "sys" / "dev" / "char" / f"{os.major(number)}:{os.minor(number)}"
    link.symlink_to(node)
    opened = DaxBacking.open(parse_pool_uri("dax:///dev/null"), writable=True, sysfs=tmp_path / "sys")
    assert (opened.capacity(), opened.grain) == (64 << 20, 2 << 20)
    with pytest.raises(PoolError, match="was refused"):
        opened.map(0, 2 << 20, writable=True)
    opened.close()


def test_the_lock_is_a_plain_flock(shm_uri: str) -> None:
    """Tools and other implementations may rely on it."""
    PoolMemory.create(shm_uri).close()
    path = parse_pool_uri(shm_uri).path
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(PoolBusyError):
            PoolMemory.create(shm_uri)
