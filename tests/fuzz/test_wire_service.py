"""A real server over a real socket: whatever is sent to it, it stays up, serves others, and keeps its memory bounded."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import zmq

from maru_bench.restart import own_memory
from maru_core import protocol as p
from maru_core.session import Session
from tests.fuzz.messages import mutate
from tests.fuzz.runs import case, cases, times
from tests.server.live import raw, store
from tests.support import ServerProcess, await_condition, hashes, namespace, running_server

GROWTH = 24 << 20


def samples(session: int, number: int) -> list[p.Request]:
    """Requests that a server would take from this session."""
    keys = hashes(5, seed=3)
    return [
        p.Hello(p.PROTOCOL_VERSION, 1, bytes(16), "name", "host", 1, 2, "ns", "boot"),
        p.OpenNamespace(1, session, namespace().record()),
        p.Match(1, session, number, ["kv"], 0, keys),
        p.Reserve(1, session, number, "kv", 0, 1, p.ROOT, keys, 4000),
        p.Commit(1, session, bytes(8), bytes(16)),
        p.Release(1, session, bytes(8), bytes(16)),
        p.Touch(session, number, keys),
        p.Delete(1, session, number, keys),
        p.Heartbeat(1, session),
        p.Stats(1, session),
        p.Pin(1, session, number, keys[:32]),
        p.Inspect(1, session, "tree", number),
        p.Inspect(1, session, "sessions"),
        p.Agents(1, session),
        p.Validate(1, session, bytes(8), bytes(16)),
        p.Reaches(1, session, [p.Way("cxl", "mapped")]),
    ]


def odd_frames(chance: random.Random, message: bytes) -> list[bytes]:
    """A message in frames as no client of ours sends it."""
    return chance.choice(
        [
            [message],
            [b"", message],
            [message, b""],
            [message, message],
            [b""],
            [b"", b"", b""],
            [chance.randbytes(5)] * chance.choice([2, 50, 400]),
            [message[: len(message) // 2], message[len(message) // 2 :]],
            [chance.randbytes(chance.choice([100, 100_000, 3 << 20]))],
            [b"\x91" * chance.choice([10, 100_000, 2 << 20])],
        ]
    )


def one_storm(endpoint: str, chance: random.Random, session: int, number: int, count: int) -> None:
    """``count`` odd messages on one connection; the last is answered, so all were looked at."""
    messages = samples(session, number)
    with raw(endpoint, sndhwm=10_000, rcvhwm=10) as dealer:
        for _ in range(count):
            message = mutate(chance.choice(messages), chance, keep=chance.choice([1, 2, 4]))
            dealer.send_multipart(odd_frames(chance, message))
            while dealer.poll(0):
                dealer.recv_multipart()
        dealer.send(p.encode(p.Stats(424_242)))
        while True:
            if not dealer.poll(5000):  # whoever reads too late loses replies: it is asked again
                dealer.send(p.encode(p.Stats(424_242)))
            (data, *more) = dealer.recv_multipart()
            reply = p.decode_reply(data)
            assert not more
            assert not (isinstance(reply, p.Error) and reply.code == p.ErrorCode.INTERNAL), reply
            if isinstance(reply, p.StatsReply) and reply.rid == 424_242:
                return


def no_zeromq(server: ServerProcess, chance: random.Random) -> None:
    """Bytes on the bare socket: a handshake broken off, a greeting of another protocol, noise."""
    path = server.endpoint.removeprefix("ipc://")
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00NULL".ljust(54, b"\0")
    for data in (b"", b"GET / HTTP/1.0\r\n\r\n", chance.randbytes(1000), greeting[:9], greeting + chance.randbytes(64)):
        with socket.socket(socket.AF_UNIX) as bare:
            bare.connect(path)
            bare.sendall(data)


def test_a_server_under_a_storm_of_odd_messages(tmp_path: Path) -> None:
    with running_server(tmp_path, "--lease", "30") as server:
        assert server.process is not None
        pid = server.process.pid
        good = Session(server.endpoint, name="good", timeout_s=60)
        number = good.open_namespace(namespace().record())
        keys = store(good, number, 30)
        sizes = []
        for storm in cases(6):
            with case(storm) as chance:
                bad = Session(server.endpoint, name="bad", timeout_s=60)
                session = bad.connect().session
                theirs = bad.open_namespace(namespace(tag="bad").record())
                one_storm(server.endpoint, chance, session, theirs, times(120))
                no_zeromq(server, chance)
                bad.close()
                sizes.append(own_memory(pid))
                assert good.match(number, ["kv"], 0, keys).pages == 30
        # The first storm brings what any use brings: buffers, code, arenas.
        assert sizes[-1] - sizes[0] < GROWTH, [size >> 20 for size in sizes]
        store(good, number, 20, seed=9)
        good.close()
        assert server.process.poll() is None
        assert "Traceback" not in server.log.read_text()
        assert server.stop() == 0


def test_peers_that_come_and_go_leave_nothing(tmp_path: Path) -> None:
    """Connections without a word, with half a one, and with replies that nobody fetches."""
    with running_server(tmp_path) as server:
        assert server.process is not None
        pid = server.process.pid
        with raw(server.endpoint) as dealer:
            dealer.send(p.encode(p.Stats(1)))
            dealer.recv()

            def descriptors() -> int:
                return len(list(Path(f"/proc/{pid}/fd").iterdir()))

            before, memory = descriptors(), own_memory(pid)
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            for number in range(times(150)):
                peer = context.socket(zmq.DEALER)
                peer.linger = 0
                peer.connect(server.endpoint)
                if number % 3:
                    peer.send(p.encode(p.Stats(number)))
                if number % 3 == 1:
                    peer.poll(1000)
                peer.close(0)
            context.term()
            dealer.send(p.encode(p.Stats(2)))
            dealer.recv()
            await_condition(lambda: descriptors() <= before + 2, "the server closes what its peers have closed")
            assert own_memory(pid) - memory < GROWTH
