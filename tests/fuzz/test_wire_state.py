"""Messages that are nearly right, given to the state: what is refused changed nothing, what is not leaves all in order."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, get_args

import msgspec
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from maru_core import protocol as p
from maru_server.calls import Deferred
from maru_server.sessions import LOCAL, Peer
from tests.fuzz.messages import FLOATS, INTEGERS, TEXTS, mutate
from tests.fuzz.runs import CASE, case, cases, times
from tests.server.maru_harness import Client, Server, chain, geometry, record

PEERS = [LOCAL] * 6 + [Peer("other", operator=False)]
#: What is counted of refusals: all that a refused message may change.
TALLIES = ("over_rate", "over_share", "stalled_s")


class Scene:
    """A server with content, and messages that it would take."""

    def __init__(self) -> None:
        self.server = Server(geometry(6, 8), checked=False)
        self.client = Client(self.server)
        self.client.store(chain("a", 6))
        self.client.store(chain("b", 2), parent=chain("a", 1, start=2))
        for shard in range(2):
            self.client.store(chain("s", 3), component="tp", shard=shard, world=2)
        self.pending = self.client.reserve(chain("w", 4))
        self.server.state.check()

    def messages(self) -> list[p.Request]:
        client, hashes = self.client, chain("a", 6)
        session, number = client.session, client.namespace
        slots, generations = (part.tobytes() for part in self.pending.mine())
        hold = p.Hold(b"request", 2, 5.0)
        rules = [p.Want(p.Rule.TRAILING_PAGES, 2), p.Want(p.Rule.BLOCK_GROUPS, 4, 1)]
        return [
            p.Hello(p.PROTOCOL_VERSION, 1, bytes(16), "name", "host", 1, 2, "ns", "boot"),
            p.OpenNamespace(1, session, record()),
            p.OpenNamespace(1, session, record("more")),
            p.Match(1, session, number, ["kv"], 0, hashes),
            p.Match(1, session, number, ["kv", "tp"], 1, hashes, True),
            p.Match(1, session, number, ["kv", "tp"], 0, hashes, False, rules, hold),
            p.Unhold(1, session, number, b"request"),
            p.Reserve(1, session, number, "kv", 0, 1, hashes[-32:], chain("n", 3), 4000),
            p.Reserve(1, session, number, "tp", 1, 2, p.ROOT, chain("m", 2), 9000),
            p.Reserve(1, session, number, "kv", 0, 1, hashes[-32:], chain("n", 3), 4000, chain("spare", 2)),
            p.Store(
                1, session, number, "kv", 0, 1, p.ROOT, chain("o", 2), 4000, bytes(8), bytes(16), b"", chain("spare", 2)
            ),
            p.Commit(1, session, slots, generations),
            p.Commit(1, session, slots, generations, bytes(8 * (len(slots) // 4))),
            p.Release(1, session, slots, generations),
            p.Touch(session, number, hashes),
            p.Delete(1, session, number, hashes[-32:]),
            p.Clear(1, session, number),
            p.Heartbeat(1, session, number, {"loaded_pages": 3}),
            p.Stats(1, session),
            p.Pin(1, session, number, hashes[32:64]),
            p.Unpin(1, session, number, hashes[32:64]),
            p.Evict(1, session, 2, number),
            *(
                p.Inspect(1, session, what, number)
                for what in ("namespaces", "sessions", "tenants", "pins", "holds", "tree", "pools")
            ),
            p.Announce(1, session, self.agent()),
            p.Agents(1, session),
            p.Agents(1, session, self.server.geometry.pool_uuid),
            p.Reaches(1, session, [p.Way("rdma", "no such file")]),
            p.Validate(1, session, slots, generations),
            p.Goodbye(session),
        ]

    def agent(self) -> p.Agent:
        """One that serves this pool."""
        shape = self.server.geometry
        return p.Agent("node", "UCX", b"blob", struct.pack("<3Q", shape.off_data, shape.data_bytes, 4096), 0.5)

    def digest(self) -> tuple[Any, ...]:
        """All of the state that can be told apart from outside."""
        state = self.server.state
        stats = {name: figure for name, figure in state.stats().items() if name not in TALLIES}
        trees = tuple(
            (
                tree.number,
                tree.size,
                tree.parent[: tree.size].tobytes(),
                tree.pending[: tree.size].tobytes(),
                len(tree.guards),
            )
            for tree in state.books.trees.values()
        )
        return xxhash.xxh3_64_intdigest(self.server.meta), stats, trees

    def give(self, data: bytes, peer: Peer = LOCAL) -> p.Reply | str | None:
        """Hand bytes to the state as the service would; "no message" if they are none."""
        try:
            message = p.decode_request(data)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            return "no message"
        server = self.server
        before = self.digest()
        server.now += 0.01
        reply = server.state.handle(message, server.now, peer)
        if isinstance(reply, Deferred):
            reply = reply.work()
        after = self.digest()
        if isinstance(reply, p.Error):
            assert reply.code in set(p.ErrorCode)
            assert reply.code != p.ErrorCode.INTERNAL
            assert reply.message
            assert before == after, f"{message!r:.300} was refused ({reply.message}) and changed the state"
        elif reply is None:
            assert isinstance(message, p.Touch | p.Goodbye)
        else:
            assert isinstance(reply, p.Reply)
        if before != after:
            server.state.check()
        if reply is not None:
            assert reply.rid == message.rid
            again = p.decode_reply(p.encode(reply))
            assert type(again) is type(reply)
            assert len(p.encode(reply)) < p.MAX_MESSAGE_BYTES
        return reply


def test_every_request_has_a_sample() -> None:
    assert {type(message) for message in Scene().messages()} == set(get_args(p.Request))


def test_samples_are_taken_as_they_are() -> None:
    for index, message in enumerate(Scene().messages()):
        reply = Scene().give(p.encode(message)) if index else None
        assert not isinstance(reply, p.Error | str), (message, reply)


def test_messages_that_are_nearly_right() -> None:
    refused = taken = undecodable = 0
    for number in cases(200):
        with case(number) as chance:
            scene = Scene()
            samples = scene.messages()
            for _ in range(25):
                message = chance.choice(samples)
                # Tag, rid, session and namespace: without them nothing further is looked at.
                keep = chance.choice([1, 2, 3, 4])
                data = mutate(message, chance, keep=keep)
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
            scene.server.state.check()
    assert CASE is not None or min(refused, taken, undecodable) > 20, (refused, taken, undecodable)


# ---------------------------------------------------------------- built from the types

_KINDS: dict[Any, st.SearchStrategy[Any]] = {
    msgspec.inspect.IntType: st.sampled_from(INTEGERS) | st.integers(-3, 70),
    msgspec.inspect.FloatType: st.sampled_from(FLOATS) | st.floats(),
    msgspec.inspect.BoolType: st.booleans(),
    msgspec.inspect.StrType: st.sampled_from(TEXTS) | st.text(max_size=20),
    msgspec.inspect.NoneType: st.none(),
}


def values_of(kind: msgspec.inspect.Type, hashes: bytes) -> st.SearchStrategy[Any]:
    """Values that pass as the type."""
    if isinstance(kind, msgspec.inspect.BytesType):
        pieces = st.lists(st.integers(0, len(hashes) // 32 - 1).map(lambda i: hashes[32 * i : 32 * i + 32]), max_size=5)
        return st.binary(max_size=70) | pieces.map(b"".join) | st.just(record())
    if isinstance(kind, msgspec.inspect.ListType):
        return st.lists(values_of(kind.item_type, hashes), max_size=4)
    if isinstance(kind, msgspec.inspect.DictType):
        return st.dictionaries(
            values_of(kind.key_type, hashes) | st.sampled_from(p.REPORTED),
            values_of(kind.value_type, hashes),
            max_size=3,
        )
    if isinstance(kind, msgspec.inspect.UnionType):
        return st.one_of([values_of(one, hashes) for one in kind.types])
    if isinstance(kind, msgspec.inspect.StructType):
        return built(kind.cls, hashes)
    return _KINDS[type(kind)]


def built(cls: type, hashes: bytes, known: Mapping[str, Any] = MappingProxyType({})) -> st.SearchStrategy[Any]:
    info = msgspec.inspect.type_info(cls)
    assert isinstance(info, msgspec.inspect.StructType)
    fields = {
        field.name: st.just(known[field.name]) | values_of(field.type, hashes)
        if field.name in known
        else values_of(field.type, hashes)
        for field in info.fields
    }
    return st.builds(cls, **fields)


HASHES = chain("a", 6) + chain("s", 3) + chain("w", 4) + bytes(32)


@settings(max_examples=times(60), deadline=None, derandomize=True)
@given(data=st.data())
def test_messages_built_from_their_types(data: st.DataObject) -> None:
    scene = Scene()
    known = {
        "session": scene.client.session, "namespace": scene.client.namespace, "protocol": p.PROTOCOL_VERSION,
        "component": "kv", "components": ["kv"], "shard": 0, "world": 1, "nbytes": 4000, "parent": p.ROOT,
        "hashes": chain("a", 6), "page": chain("a", 1, start=1), "what": "tree",
        "slots": scene.pending.slots.tobytes(), "generations": scene.pending.generations.tobytes(),
    }  # fmt: skip
    for _ in range(8):
        cls = data.draw(st.sampled_from(get_args(p.Request)))
        message = data.draw(built(cls, HASHES, known))
        try:
            encoded = p.encode(message)
        except (OverflowError, UnicodeEncodeError):
            continue
        scene.give(encoded)
