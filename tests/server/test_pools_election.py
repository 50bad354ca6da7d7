"""Several pools under a lock in etcd: a key for each, all or none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from maru_core.errors import ConfigError, PoolBusyError
from maru_core.protocol import Way
from maru_core.session import Session
from maru_server.election import Election, FileLock, LostError, Stop
from maru_server.opening import check_fits, make_elections, take_up_all, wanted_pools
from tests.forked import run_forked
from tests.server.etcd_server import EtcdServer, find_etcd
from tests.server.live import store
from tests.server.test_election import folder_in_memory
from tests.support import ServerProcess, await_condition, hashes, namespace

TTL_S = 6


@pytest.fixture
def etcd() -> Iterator[EtcdServer]:
    etcd = EtcdServer(find_etcd(), folder_in_memory())
    try:
        yield etcd.start()
    finally:
        etcd.remove()


def test_each_pool_has_a_key_and_a_standby_takes_all(etcd: EtcdServer, tmp_path: Path) -> None:
    pools = [f"file://{tmp_path}/a", f"file://{tmp_path}/b"]
    keys = [etcd.key, f"{etcd.key}/file{tmp_path}/b"]
    options = ("--lock", etcd.url(), "--lock-ttl", str(TTL_S), "--lease", "1")
    first = ServerProcess(tmp_path, "--pool", pools[1], *options, pool=pools[0])
    another = ServerProcess(tmp_path, "--pool", pools[0], "--standby", *options, pool=pools[1])
    client = etcd.client()
    try:
        first.start()
        holders = [client.get(key) for key in keys]
        assert all(holder is not None and first.endpoint in holder.value for holder in holders)
        session = Session(first.endpoint, name="writer", timeout_s=60)
        number = session.open_namespace(namespace().record())
        session.reaches([Way("none", ""), Way("cxl", "")])
        stored = store(session, number, 5)
        session.close()
        another.begin()
        await_condition(lambda: "standby" in another.log.read_text(), "the standby waits")
        # Whoever takes away one of the pools ends the server of both.
        held = client.get(keys[1])
        assert held is not None
        client.revoke(held.lease)
        assert first.process is not None
        assert first.process.wait(180) == 3
        first.process = None
        assert pools[1] in first.log.read_text()
        another.await_ready()
        session = Session(another.endpoint, name="reader", timeout_s=60)
        number = session.open_namespace(namespace().record())
        session.reaches([Way("cxl", ""), Way("cxl", "")])
        assert session.match(number, ["kv"], 0, stored + hashes(1, 9)).pages == 5
        session.close()
        assert another.stop() == 0
        assert [client.get(key) for key in keys] == [None, None]
    finally:
        client.close()
        first.remove()
        another.remove()


@pytest.mark.parametrize("others", [["a"], ["a", "c"], ["x", "y"]])
def test_servers_with_one_lock_exclude_each_other_whatever_they_call_their_pools(
    etcd: EtcdServer, others: list[str]
) -> None:
    """Hosts name devices differently, and a server that is to have a pool more may be started beside the one that serves."""

    def elections(names: list[str]) -> list[Election]:
        wanted = wanted_pools([f"shm://{name}" for name in names], [])
        made = make_elections(etcd.url(), wanted, ttl_s=TTL_S, me="test", standby=False)
        return [election for _, election in sorted(zip([one.name for one in wanted], made, strict=True))]

    mine, theirs = elections(["b", "a"]), elections(others)
    try:
        assert all(election.acquire(Stop()) for election in mine)
        with pytest.raises(PoolBusyError, match="held by test"):
            theirs[0].acquire(Stop())
    finally:
        for election in mine + theirs:
            election.close()


class Lapses(FileLock):
    """A right that is lost while another is waited for."""

    lost = False

    def holds(self) -> bool:
        return not self.lost

    def why(self) -> str:
        return "it has lapsed"


def test_a_pool_that_was_lost_while_the_next_was_waited_for_is_not_touched(tmp_path: Path) -> None:
    wanted = wanted_pools([f"file://{tmp_path}/{name}?size=64M" for name in "ab"], [])
    first = Lapses()

    class Waits(FileLock):
        def acquire(self, stop: Stop) -> bool:
            first.lost = True
            return True

    with pytest.raises(LostError, match="it has lapsed"):
        take_up_all(wanted, [first, Waits()], format=False, standby=True, stop=Stop())
    again = take_up_all(wanted, [FileLock(), FileLock()], format=False, standby=False, stop=Stop())
    assert again is not None, "its locks are free"
    for memory in again:
        memory.close()


@pytest.mark.parametrize(
    ("pools", "sizes", "word"),
    [
        (["shm://a", "shm://b", "shm://c"], ["1G", "2G"], "--size is given 2 times for 3 pools"),
        (["shm://a", "shm://a?size=1G"], [], "is given twice"),
        ([f"shm://p{number}" for number in range(17)], [], "at most 16 pools"),
    ],
)
def test_pools_that_cannot_be_served_together(pools: list[str], sizes: list[str], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        wanted_pools(pools, sizes)


def test_several_pools_are_not_formatted(tmp_path: Path) -> None:
    pools = [f"file://{tmp_path}/{name}?size=64M" for name in "ab"]
    made = take_up_all(wanted_pools(pools, []), [FileLock(), FileLock()], format=False, standby=False, stop=Stop())
    assert made is not None
    uuids = [memory.geometry.pool_uuid for memory in made]
    for memory in made:
        memory.close()
    line = [option for pool in pools for option in ("--pool", pool)]
    ended = run_forked(("-m", "maru_server"), [*line, "--format", "--bind", f"ipc://{tmp_path}/s"])
    assert ended.returncode == 2
    assert "--format is for one pool at a time" in ended.stderr
    again = take_up_all(wanted_pools(pools, []), [FileLock(), FileLock()], format=False, standby=False, stop=Stop())
    assert again is not None
    assert [memory.geometry.pool_uuid for memory in again] == uuids
    for memory in again:
        memory.close()


def test_sizes_are_for_all_or_for_each() -> None:
    pools = ["shm://a", "shm://b"]
    assert [one.size for one in wanted_pools(pools, ["1G"])] == [1 << 30, 1 << 30]
    assert [one.size for one in wanted_pools(pools, ["1G", "2G"])] == [1 << 30, 2 << 30]
    assert [one.size for one in wanted_pools(pools, [])] == [None, None]


class Asked:
    """A right to serve that is had at once, and notes when it was asked for."""

    def __init__(self, name: str, asked: list[str]) -> None:
        self.name, self.asked = name, asked

    def acquire(self, stop: Stop) -> bool:
        self.asked.append(self.name)
        return True

    def holds(self) -> bool:
        return True

    def why(self) -> str:
        return ""

    def close(self) -> None:
        pass


def test_pools_are_taken_in_one_order_and_served_in_that_of_the_command_line(tmp_path: Path) -> None:
    orders = []
    for names in ("ab", "ba"):
        wanted = wanted_pools([f"file://{tmp_path}/{name}" for name in names], ["16M"])
        asked: list[str] = []
        elections = [Asked(one.name, asked) for one in wanted]
        memories = take_up_all(wanted, elections, format=False, standby=True, stop=Stop())
        assert memories is not None
        assert [str(memory.uri.path) for memory in memories] == [f"{tmp_path}/{name}" for name in names]
        orders.append(asked)
        for memory in memories:
            memory.close()
    assert orders[0] == orders[1]


def test_a_pool_with_too_many_slots_is_refused_with_the_cure() -> None:
    one = wanted_pools(["dax:///dev/dax0.0"], [])[0]
    check_fits(one, (1 << 28) - 1)
    with pytest.raises(ConfigError, match=r"serve it alone, or format it with a larger \?min_slot="):
        check_fits(one, 1 << 28)
