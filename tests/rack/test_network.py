"""Pages between a host that has the memory and one that has none of it, over RDMA verbs; and what happens when something goes away."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from support import await_condition
from tests.rack.calls import PAGE_BYTES, contents, digests
from tests.rack.machine import Guest, Process
from tests.rack.rack import Client, Rack

COUNT = 64
BYTES = COUNT * PAGE_BYTES
MANY = 256
PATIENT_S = 60.0
IMPATIENT_S = 3.0


@dataclass
class Serving:
    """The server on alpha, the agent on beta, a client beside the server and one without the memory."""

    rack: Rack
    server: Process
    agent: Process
    near: Client
    far: Client


@pytest.fixture
def serving(rack: Rack) -> Iterator[Serving]:
    server = rack.server(rack.alpha, "--format")
    yield serve(rack, server, rack.endpoint(rack.alpha))
    for guest in rack.guests.values():
        rack.switch.connect(guest.name, True)


def serve(rack: Rack, server: Process, endpoints: str) -> Serving:
    agent = rack.agent(rack.beta, endpoints)
    near, far = rack.client(rack.alpha), rack.client(rack.gpu)
    assert rack.open(near, endpoints) == "cxl"
    agent.await_output("announced to the server")
    far.ask("set_environ", UCX_PROTO_INFO="y")
    assert rack.open(far, endpoints) == "rdma"
    return Serving(rack, server, agent, near, far)


def right(client: Client, seed: int, count: int = COUNT) -> int:
    """Load pages; how many came, each of which must be right."""
    return right_of(client.ask("get", seed=seed, count=count), seed)


def right_of(got: list[str | None], seed: int) -> int:
    expected = digests(contents(seed, len(got)))
    wrong = [index for index, digest in enumerate(got) if digest is not None and digest != expected[index]]
    assert not wrong, f"wrong bytes in pages {wrong}"
    return len(got) - got.count(None)


def await_loaded(client: Client, seed: int, count: int = COUNT) -> None:
    await_condition(lambda: right(client, seed, count) == count, f"{client.guest.name} loads all pages", 300)


def await_stored(client: Client, seed: int) -> None:
    """A store may be refused for as long as the server still knows of an agent that is dead."""
    await_condition(
        lambda: client.ask("put", seed=seed, count=COUNT) + client.ask("prefix", seed=seed, count=COUNT) >= COUNT,
        f"{client.guest.name} stores all pages",
        300,
    )


def test_pages_cross_the_network_by_verbs_alone(serving: Serving) -> None:
    rack, near, far = serving.rack, serving.near, serving.far
    for writer, reader, seed, sender in ((near, far, 1, rack.beta), (far, near, 2, rack.gpu)):
        carried, packets = rack.switch.carried[sender.name], rack.packets(sender)
        assert writer.ask("put", seed=seed, count=MANY) == MANY
        assert reader.ask("prefix", seed=seed, count=MANY) == MANY
        assert right(reader, seed, MANY) == MANY
        moved = rack.packets(sender)["sent_pkts"] - packets["sent_pkts"]
        assert moved * 4096 >= MANY * PAGE_BYTES, "soft-RoCE sent every byte"
        assert rack.switch.carried[sender.name] - carried >= MANY * PAGE_BYTES, "and the network carried it"
    said = far.process.output
    for operation in ("read by ucp_get", "write by ucp_put"):
        table = rf"inter-node[^\n]*\n[^\n]*remote memory {operation}[^\n]*\n(?:[^\n]*\n){{3}}[^\n]*rc_verbs/rxe0:1"
        assert re.search(table, said), (
            f"UCX does not say that remote memory is {operation} over rc_verbs:\n{said[:9000]}"
        )
    assert "tcp/" not in said


def half_way(rack: Rack, far: Client, what: str, seed: int, sender: Guest) -> int:
    """Begin a transfer whose bytes come from ``sender``, and pull that one's cable in the middle of them; the question's number."""
    rack.switch.cut_after(sender.name, BYTES // 3)
    number = far.begin(what, seed=seed, count=COUNT)
    await_condition(
        lambda: not rack.switch.is_connected(sender.name), "a third of the bytes has crossed the network", 120
    )
    return number


def test_an_agent_killed_half_way_is_a_miss_and_another_one_serves(serving: Serving) -> None:
    rack, near, far = serving.rack, serving.near, serving.far
    assert near.ask("put", seed=3, count=COUNT) == COUNT
    assert right(far, 3, 8) == 8  # connected
    number = half_way(rack, far, "get", 3, rack.beta)
    serving.agent.kill("KILL")
    assert serving.agent.wait() == 137
    rack.switch.connect("beta", True)
    assert right_of(far.answer(number), 3) == 0
    assert far.ask("put", seed=4, count=8) == 0
    assert near.ask("prefix", seed=4, count=8) == 0, "what is not known to be written is not published"
    far.ask("limit", seconds=PATIENT_S)
    rack.agent(rack.beta, rack.endpoint(rack.alpha)).await_output("announced to the server")
    await_loaded(far, 3)
    await_stored(far, 5)
    assert right(near, 5) == COUNT


def test_a_store_cut_off_half_way_is_refused(serving: Serving) -> None:
    rack, near, far = serving.rack, serving.near, serving.far
    assert far.ask("put", seed=6, count=8) == 8
    number = half_way(rack, far, "put", 7, rack.gpu)
    serving.agent.kill("KILL")
    assert serving.agent.wait() == 137
    rack.switch.connect("gpu", True)
    assert far.answer(number) == 0
    assert near.ask("prefix", seed=7, count=COUNT) == 0
    stats = near.ask("stats")
    taken = stats["server_slots_reserved"] + stats["server_slots_quarantined"]
    assert taken >= COUNT, "nobody knows what may still land in these slots"


@pytest.mark.parametrize("how", ["its cable is pulled", "it stands still"])
def test_a_memory_node_that_goes_away_comes_back(serving: Serving, how: str) -> None:
    rack, near, far = serving.rack, serving.near, serving.far
    assert near.ask("put", seed=8, count=COUNT) == COUNT
    assert right(far, 8, 8) == 8
    number = half_way(rack, far, "get", 8, rack.beta)
    if how == "it stands still":
        rack.beta.monitor("stop")
        rack.switch.connect("beta", True)
    assert right_of(far.answer(number), 8) == 0
    assert right(near, 8) == COUNT, "hosts that map the pool notice nothing"
    if how == "it stands still":
        rack.beta.monitor("cont")
    rack.switch.connect("beta", True)
    far.ask("limit", seconds=PATIENT_S)
    await_loaded(far, 8)
    await_stored(far, 9)
    assert right(near, 9) == COUNT


def test_the_server_moves_to_the_other_host(rack: Rack) -> None:
    """The pool is all that is left of the first: the second finds in it every page that was committed."""
    endpoints = f"{rack.endpoint(rack.alpha)},{rack.endpoint(rack.beta)}"
    serving = serve(rack, rack.server(rack.alpha, "--format"), endpoints)
    near, far = serving.near, serving.far
    for seed in (10, 11):
        assert near.ask("put", seed=seed, count=COUNT) == COUNT
    assert far.ask("put", seed=12, count=COUNT) == COUNT
    serving.server.kill("KILL")
    serving.server.wait()
    far.ask("limit", seconds=IMPATIENT_S)
    assert right(far, 12, 8) == 0, "nobody vouches for them now"
    far.ask("limit", seconds=PATIENT_S)
    rack.server(rack.beta)
    for client in (near, far):
        for seed in (10, 11, 12):
            await_loaded(client, seed)
    assert near.ask("stats")["server_pages"] >= 3 * COUNT
    assert far.ask("put", seed=13, count=COUNT) == COUNT
    assert right(near, 13) == COUNT
