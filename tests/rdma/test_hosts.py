"""Hosts that reach the pool only over a network, and what becomes of that: cables pulled, hosts away, packets lost, agents killed in
the middle. What is loaded is byte for byte what was stored; what is not is computed; what can be served is.

A server and two agents on three memory nodes with one ``/dev/shm``, each with keys, and workers that have none of it (:mod:`hosts`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from agent_process import AgentProcess
from far import FarStore
from hosts import Cable, Network, network, why_not

from maru_core.store import StoreConfig
from maru_server.keygen import keygen
from support import ServerProcess, await_condition

WHY_NOT, NO_NETEM = why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

UCX = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0"}
#: A chain that is there in every test, and one that takes the slow network seconds: pages, and bytes of each.
BASE, BIG = (4, (500_000,)), (24, (500_000,))
BIG_BYTES = 12_000_000
#: MB/s at which that is in the middle for long enough to do something to it.
SLOW = 1
#: Bytes after which it has begun.
BEGUN = 300_000


@dataclass
class Rig:
    directory: Path
    network: Network
    server_host: Cable
    nodes: list[Cable]
    worker: Cable
    server: ServerProcess
    agents: list[AgentProcess] = field(default_factory=list)
    opened: list[FarStore] = field(default_factory=list)
    seeds: int = 1

    @property
    def cables(self) -> list[Cable]:
        return [self.server_host, *self.nodes, self.worker]

    def keys(self, name: str) -> dict[str, str]:
        return {"client_key": str(self.directory / f"{name}.key"), "server_key": str(self.directory / "server.pub")}

    def agent(self, number: int) -> AgentProcess:
        keys = ("--client-key", str(self.directory / "op.key"), "--server-key", str(self.directory / "server.pub"))
        return AgentProcess(self.server, self.directory, *keys, host=self.nodes[number].host.pid, environ=UCX).start()

    def open(self, name: str, cable: Cable, transport: str = "auto", key: str = "engine") -> FarStore:
        config = StoreConfig(server=self.server.endpoint, transport=transport, timeout_ms=3000, **self.keys(key))
        log = self.directory / f"{name}-{len(self.opened)}.log"
        self.opened.append(FarStore(name, cable.host.pid, config, log, UCX))
        return self.opened[-1]

    def seed(self) -> int:
        """Of a chain that nobody has stored."""
        self.seeds += 1
        return self.seeds

    def settle(self) -> None:
        """Every cable plugged, every agent there."""
        for cable in self.cables:
            cable.plug()
            cable.free()
        self.supervise()
        for agent in self.agents:
            agent.wait_announced()

    def supervise(self) -> None:
        """Start agents again that have ended. UCX may end one whose client is gone in the middle, also some seconds later."""
        for number, agent in enumerate(self.agents):
            if agent.process is None or agent.process.poll() is not None:
                self.agents[number] = self.agent(number)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    directory = tmp_path_factory.mktemp("hosts")
    keygen(directory)
    keygen(directory, name="op", operator=True)
    keygen(directory, name="engine", tenant="red")
    keygen(directory, name="watch", tenant="red", operator=True)
    with network() as made, contextlib.ExitStack() as stack:
        home = made.host("home", memory=True)
        nodes = [made.host(f"node-{letter}", memory=True) for letter in "ab"]
        worker = made.host("worker")
        keys = ("--keys", str(directory / "server.key"), "--clients", str(directory / "clients.toml"))
        bind = f"tcp://{home.host.address}:5757"
        server = ServerProcess(directory, *keys, "--quarantine", "600", bind=bind, size="128M", host=home.host.pid)
        stack.callback(server.remove)
        server.start()
        rig = Rig(directory, made, home, nodes, worker, server)
        stack.callback(lambda: [agent.kill() for agent in rig.agents])
        rig.agents += [rig.agent(number) for number in range(len(nodes))]
        yield rig


@pytest.fixture
def near(rig: Rig) -> Iterator[FarStore]:
    """A store on the server's own host, with the memory mapped; chain 1 is there."""
    rig.settle()
    store = rig.open("near", rig.server_host, "cxl", key="watch")
    store.ask("clear")
    assert store.put(1, *BASE).all()
    yield store
    store.close()


@pytest.fixture
def far(rig: Rig, near: FarStore) -> Iterator[FarStore]:
    """A store on a worker. It loads from both agents."""
    store = rig.open("far", rig.worker)
    before = [node.sent() for node in rig.nodes]

    def both() -> bool:
        store.get(1, *BASE)
        return all(node.sent() > was + 100_000 for node, was in zip(rig.nodes, before, strict=True))

    await_condition(both, "both agents serve", 90)
    yield store
    store.close()


def await_served(store: FarStore, what: str, rig: Rig | None = None) -> None:
    """Until chain 1 is loaded, with nothing wrong at any time; with ``rig`` as its agents' supervisor."""

    def served() -> bool:
        if rig is not None:
            rig.supervise()
        return store.prefix(1, BASE[0]) == BASE[0] and bool(store.get(1, *BASE).all())

    await_condition(served, what, 120)


# ---------------------------------------------------------------- nothing goes wrong


def test_bytes_cross_the_network_in_both_directions(rig: Rig, near: FarStore, far: FarStore) -> None:
    assert near.ask("mapped")
    assert not far.ask("mapped"), "there is no way to the memory from this host"
    assert sorted(far.ask("agents")) == ["node-a", "node-b"], "each agent names its host"
    seed, other = rig.seed(), rig.seed()
    assert near.put(seed, *BIG).all()
    counted = [rig.worker.received(), *(node.sent() for node in rig.nodes), rig.server_host.sent()]
    assert far.get(seed, *BIG).all()
    loaded = [rig.worker.received(), *(node.sent() for node in rig.nodes), rig.server_host.sent()]
    here, a, b, control = (now - was for now, was in zip(loaded, counted, strict=True))
    assert here >= BIG_BYTES
    assert a + b >= BIG_BYTES
    assert min(a, b) > BIG_BYTES / 5, "both agents have their part"
    assert control < BIG_BYTES / 100, "the server sees control messages only"
    before = rig.worker.sent(), sum(node.received() for node in rig.nodes)
    assert far.put(other, *BIG).all()
    after = rig.worker.sent(), sum(node.received() for node in rig.nodes)
    assert all(now - was >= BIG_BYTES for now, was in zip(after, before, strict=True))
    assert near.get(other, *BIG).all()


def test_the_agent_on_the_busier_host_moves_less(rig: Rig, near: FarStore, far: FarStore) -> None:
    rig.nodes[0].host.say_load(1000.0, rig.directory)
    rig.nodes[1].host.say_load(0.0, rig.directory)

    def parts() -> list[int]:
        before = [node.sent() for node in rig.nodes]
        for _ in range(12):
            far.get(1, *BASE)
        return [node.sent() - was for node, was in zip(rig.nodes, before, strict=True)]

    def unequal() -> bool:
        busy, idle = parts()
        return 0 < 2 * busy < idle

    await_condition(unequal, "the busy one has less and not nothing", 60)
    rig.nodes[0].host.say_load(0.0, rig.directory)

    def equal() -> bool:
        a, b = parts()
        return min(a, b) > 0 and max(a, b) < 1.5 * min(a, b)

    await_condition(equal, "both have their part again", 60)


@pytest.mark.parametrize(
    "how", ["short queue", pytest.param("netem", marks=pytest.mark.skipif(bool(NO_NETEM), reason=NO_NETEM))]
)
def test_packets_are_lost_and_no_page_is(rig: Rig, near: FarStore, far: FarStore, how: str) -> None:
    lossy = [*rig.nodes, rig.worker]
    for cable in lossy:
        if how == "netem":
            cable.netem("delay", "5ms", "2ms", "loss", "1%")
        else:
            cable.throttle(40, queue="150kb")
    before = [cable.lost() for cable in lossy]

    def each_has_lost() -> bool:
        seed, other = rig.seed(), rig.seed()
        near.put(seed, *BASE)
        far.get(seed, *BASE)
        far.put(other, *BASE)
        near.get(other, *BASE)
        return all(cable.lost() > was for cable, was in zip(lossy, before, strict=True))

    await_condition(each_has_lost, "packets are lost on every host's way", 90)
    await_served(far, "pages are loaded all the same")


# ---------------------------------------------------------------- in the middle of a load


def begin_load(rig: Rig, near: FarStore, far: FarStore, slow: list[Cable]) -> int:
    """A load of a long chain that is in the middle on these nodes."""
    seed = rig.seed()
    assert near.put(seed, *BIG).all()
    for node in slow:
        node.throttle(SLOW, queue="256kb")
    before = [node.sent() for node in slow]
    far.begin("get", seed, *BIG)
    for node, was in zip(slow, before, strict=True):
        await_condition(lambda node=node, was=was: node.sent() > was + BEGUN, "the load has begun", 60)
    return seed


def kill(rig: Rig) -> None:
    rig.agents[0].signal(signal.SIGKILL)


def pull(rig: Rig) -> None:
    rig.nodes[0].pull()


@pytest.mark.parametrize("lose", [kill, pull])
def test_one_agent_of_two_is_lost_in_a_load(
    rig: Rig, near: FarStore, far: FarStore, lose: Callable[[Rig], None]
) -> None:
    seed = begin_load(rig, near, far, rig.nodes[:1])
    lose(rig)
    far.loaded(far.result())
    await_condition(lambda: far.get(seed, *BIG).all(), "the other agent serves all of it", 60)
    rig.settle()
    before = rig.nodes[0].sent()

    def back() -> bool:
        far.get(seed, *BIG)
        return rig.nodes[0].sent() > before + BIG_BYTES // 10

    await_condition(back, "the agent that was lost serves again", 120)


def test_a_worker_is_cut_off_in_a_load(rig: Rig, near: FarStore, far: FarStore) -> None:
    begin_load(rig, near, far, rig.nodes)
    rig.worker.pull()
    assert not far.loaded(far.result()).all(), "that cannot have come"
    rig.settle()
    await_served_unchanged(far)


def await_served_unchanged(far: FarStore) -> None:
    """Nothing lands any more in what was given up, also when the network is back."""

    def there() -> bool:
        assert not far.ask("changed"), "bytes landed after the call"
        return far.prefix(1, BASE[0]) == BASE[0]

    await_condition(there, "the server is reached again", 120)
    await_served(far, "pages are loaded again")


# ---------------------------------------------------------------- in the middle of a store


def begin_store(rig: Rig, far: FarStore, first: Callable[[], None] = lambda: None) -> int:
    """A store of a long chain that is in the middle on the first node. One that fails at once, as where it still knew an agent that was
    killed, is followed by another; ``first`` is called before each."""
    rig.worker.throttle(SLOW, queue="256kb")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        first()
        seed, before = rig.seed(), rig.nodes[0].received()
        far.begin("put", seed, *BIG)

        def begun(before: int = before) -> bool:
            return rig.nodes[0].received() > before + BEGUN

        await_condition(lambda begun=begun: begun() or far.ended(), "the store has begun, or has ended", 60)
        if not far.ended():
            return seed
        far.result()
    raise AssertionError(f"no store has begun: {far.log.read_text()}")


def test_what_was_given_up_lands_in_no_other_page(rig: Rig, near: FarStore, far: FarStore) -> None:
    """The kernel goes on sending what a closed connection has left, and does when the cable is back: into slots that are nobody's."""
    seed = begin_store(rig, far)
    rig.nodes[0].pull()
    rig.worker.free()
    stored = far.result()
    assert near.prefix(seed, BIG[0]) == sum(stored), "what is not known to be written is not published"
    on_its_way = "FIN-WAIT-1"
    assert on_its_way in rig.worker.host.run("ss", "-tn"), "nothing is left to come: this test shows nothing"
    # Nearly all slots that can be had are other pages' now.
    near.ask("clear")
    others = [rig.seed() for _ in range(9)]
    await_condition(lambda: sum(near.put(other, *BIG).sum() for other in others) >= 7 * BIG[0], "they are taken", 60)
    rig.settle()
    await_condition(lambda: on_its_way not in rig.worker.host.run("ss", "-tn"), "the rest arrives", 120)
    assert sum(near.get(other, *BIG).sum() for other in others) >= 4 * BIG[0], "and no byte is wrong"


def test_an_agent_is_killed_in_a_store(rig: Rig, near: FarStore, far: FarStore) -> None:
    seed = begin_store(rig, far)
    kill(rig)
    stored = far.result()
    assert near.prefix(seed, BIG[0]) == sum(stored)
    rig.worker.free()
    other = rig.seed()
    await_condition(lambda: far.put(other, *BASE).all(), "stores go on through the other agent", 90)
    assert near.get(other, *BASE).all()
    await_served(far, "loads too")


def test_a_worker_loses_its_interface_in_a_store(rig: Rig, near: FarStore, far: FarStore) -> None:
    """Then UCX has no device left, and no slot is given back all the same."""
    counts: list[int] = []
    seed = begin_store(rig, far, lambda: counts.append(taken(near)))
    before = counts[-1]
    rig.worker.host.run("ip", "link", "set", "eth0", "down")
    try:
        assert not any(far.result())
        assert near.prefix(seed, BIG[0]) == 0
        assert taken(near) == before + BIG[0]
    finally:
        rig.worker.host.run("ip", "link", "set", "eth0", "up")
    rig.settle()
    await_served(far, "the worker is back")
    assert taken(near) == before + BIG[0]


def taken(store: FarStore) -> int:
    """Slots that nobody gets."""
    stats = store.ask("stats")
    return int(stats["server_slots_reserved"]) + int(stats["server_slots_quarantined"])


# ---------------------------------------------------------------- away and back


def test_hosts_go_away_and_come_back(rig: Rig, near: FarStore, far: FarStore) -> None:
    """First one memory node, then both, then the server. (UCX may end an agent whose client is gone in the middle, at once or when it gives
    up waiting: then it is started again, as its supervisor does.)"""
    rig.nodes[1].pull()
    await_served(far, "the other node serves")
    rig.nodes[0].pull()
    await_condition(lambda: not far.get(1, *BASE).any(), "nothing can be loaded", 60)
    rig.settle()
    await_served(far, "the nodes are back", rig)
    rig.server_host.pull()
    assert not far.get(1, *BASE).any(), "nobody can say that it is still there"
    assert not far.put(rig.seed(), *BASE).any()
    rig.settle()
    await_served(far, "the server is back", rig)
    other = rig.seed()
    await_condition(lambda: far.put(other, *BASE).all(), "stores too", 60)
    assert near.get(other, *BASE).all()


def test_no_namespace_outlives_its_network() -> None:
    with network() as made:
        cable = made.host("short-lived")
        holder = cable.host.pid
        space = os.readlink(f"/proc/{holder}/ns/net")
    assert not Path("/proc", str(holder)).exists()
    spaces = {_link(path) for path in Path("/proc").glob("[0-9]*/ns/net")}
    assert space not in spaces


def _link(path: Path) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(path)
    return ""
