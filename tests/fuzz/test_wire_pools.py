"""As :mod:`tests.fuzz.test_wire_state`, given to a server with several pools: the layer forwards no message that one of them refuses
after another has done its part."""

from __future__ import annotations

import struct
from typing import Any, get_args

import numpy as np
import xxhash

from maru_core import protocol as p
from tests.fuzz.messages import mutate
from tests.fuzz.runs import CASE, case, cases
from tests.fuzz.test_wire_state import PEERS, TALLIES, Scene
from tests.server.maru_harness import chain
from tests.server.pools_harness import PoolsServer


class PoolsScene(Scene):
    """Content in both of two pools, and slots of both in one message."""

    def __init__(self) -> None:
        self.server = PoolsServer(6, 6, checked=False)
        self.client = self.server.client()
        self.client.reach("cn")
        self.client.store(chain("a", 6))
        self.client.store(chain("b", 2), parent=chain("a", 1, start=2))
        first = self.client.reserve(chain("w", 4))
        self.client.reach("nc")
        for shard in range(2):
            self.client.store(chain("s", 3), component="tp", shard=shard, world=2)
        self.pending = self.client.reserve(chain("v", 4))
        self.client.reach("cr")
        self.pending.status += first.status
        for name in ("slots", "offsets", "generations"):
            setattr(self.pending, name, np.stack([getattr(self.pending, name), getattr(first, name)], 1).ravel())
        self.server.pools.check()

    def messages(self) -> list[p.Request]:
        shape, session = self.server.shapes[1], self.client.session
        agent = p.Agent("node", "UCX", b"blob", struct.pack("<3Q", shape.off_data, shape.data_bytes, 4096), 0.5)
        ways = [p.Way("cxl", "mapped"), p.Way("none", "no such file")]
        kept = [m for m in super().messages() if not isinstance(m, p.Announce | p.Agents | p.Reaches)]
        return [
            *kept,
            p.Announce(1, session, agent, shape.pool_uuid),
            p.Agents(1, session, self.server.shapes[0].pool_uuid),
            p.Reaches(1, session, ways),
        ]

    def digest(self) -> tuple[Any, ...]:
        stats = {name: figure for name, figure in self.server.stats.items() if name not in TALLIES}
        trees = tuple(
            (tree.number, tree.size, tree.pending[: tree.size].tobytes(), len(tree.guards))
            for state in self.server.pools.states
            for tree in state.books.trees.values()
        )
        return tuple(xxhash.xxh3_64_intdigest(meta) for meta in self.server.metas), stats, trees


def test_every_request_has_a_sample() -> None:
    assert {type(message) for message in PoolsScene().messages()} == set(get_args(p.Request))


def test_samples_are_taken_as_they_are() -> None:
    for index, message in enumerate(PoolsScene().messages()):
        reply = PoolsScene().give(p.encode(message)) if index else None
        assert not isinstance(reply, p.Error | str), (message, reply)


def test_messages_that_are_nearly_right() -> None:
    refused = taken = undecodable = 0
    for number in cases(60):
        with case(number) as chance:
            scene = PoolsScene()
            samples = scene.messages()
            for _ in range(25):
                message = chance.choice(samples)
                data = mutate(message, chance, keep=chance.choice([1, 2, 3, 4]))
                try:
                    reply = scene.give(data, chance.choice(PEERS))
                except BaseException as error:
                    error.add_note(f"{data[:200]!r} from {message!r:.200}")
                    raise
                if reply == "no message":
                    undecodable += 1
                elif isinstance(reply, p.Error):
                    refused += 1
                else:
                    taken += 1
            scene.server.state.tick(scene.server.now + 1)
            scene.server.pools.check()
    assert CASE is not None or min(refused, taken, undecodable) > 20, (refused, taken, undecodable)


def test_any_bits_of_slots_are_of_a_pool_or_refused() -> None:
    for number in cases(20):
        with case(number) as chance:
            scene = PoolsScene()
            slots, generations = scene.pending.mine()
            mixed = bytearray(slots.tobytes())
            for _ in range(chance.choice([1, 1, 2, 5])):
                mixed[chance.randrange(len(mixed))] ^= 1 << chance.randrange(8)
            scene.server.pools.check()
            for kind in (p.Validate, p.Release, p.Commit):
                message = kind(1, scene.client.session, bytes(mixed), generations.tobytes())
                reply = scene.give(p.encode(message))
                assert not isinstance(reply, p.Error) or reply.code == p.ErrorCode.INVALID
