"""KV events over real sockets: what a subscriber gets, what it can ask for again, and what it costs the server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from live import Running

from maru_core import protocol as p
from maru_core.errors import ConfigError
from maru_core.session import Session
from maru_server import publisher as published
from maru_server.metrics import LABEL_DIGITS
from maru_server.publisher import END, MEDIUM, Publisher, block_hashes
from support import ServerProcess, await_condition, hashes, namespace

SPACE = namespace(engine="sglang")
TOPIC = SPACE.digest().hex()[:LABEL_DIGITS].encode()


class Subscriber:
    """Applies messages to a set, and notes gaps in their numbers."""

    def __init__(self, endpoint: str, replay: str | None = None, topic: bytes = b"") -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.linger = 0
        self.socket.rcvtimeo = 60_000
        self.socket.subscribe(topic)
        self.socket.connect(endpoint)
        self.router = self.context.socket(zmq.DEALER)
        self.router.linger = 0
        self.router.rcvtimeo = 60_000
        if replay is not None:
            self.router.connect(replay)
        self.numbers: list[int] = []
        self.seen: set[tuple[bytes, bytes]] = set()
        self.events: list[dict[str, object]] = []
        self.blocks: set[int] = set()

    def close(self) -> None:
        self.socket.close(0)
        self.router.close(0)
        self.context.term()

    def receive(self) -> list[dict[str, object]]:
        """The next message that is news."""
        while True:
            topic, number, payload = self.socket.recv_multipart()
            if (topic, number) not in self.seen:
                return self.apply(topic, number, payload)

    def apply(self, topic: bytes, number: bytes, payload: bytes) -> list[dict[str, object]]:
        self.seen.add((topic, number))
        self.numbers.append(int.from_bytes(number, "big"))
        batch = msgspec.msgpack.decode(payload)
        events = batch["events"] if isinstance(batch, dict) else batch[1]
        self.events += events
        for event in events:
            if event["type"] == "BlockStored":
                assert event["parent_block_hash"] is None or event["parent_block_hash"] in self.blocks
                self.blocks.update(event["block_hashes"])
            elif event["type"] == "BlockRemoved":
                self.blocks.difference_update(event["block_hashes"])
            else:
                self.blocks.clear()
        return events

    def replay(self, start: int) -> None:
        """A REQ socket's request; its many replies need a DEALER."""
        self.router.send_multipart((b"", start.to_bytes(8, "big")))
        while True:
            _, topic, number, payload = self.router.recv_multipart()
            if number == END:
                return
            self.apply(topic, number, payload)


class Site:
    """A server with a publisher, and a session with a namespace open."""

    def __init__(self, tmp_path: Path, **options: int) -> None:
        self.running = Running(tmp_path)
        self.publisher = Publisher(
            f"ipc://{tmp_path}/events.sock", f"ipc://{tmp_path}/replay.sock", self.running.service.call, **options
        )
        self.running.service.call(lambda state: state.tell(self.publisher.events))
        self.session = Session(self.running.endpoint, name="writer", timeout_s=60)
        self.number = self.session.open_namespace(SPACE.record())

    def store(self, chain: bytes, parent: bytes = p.ROOT, number: int | None = None, nbytes: int = 1000) -> bytes:
        reserved = self.session.reserve(self.number if number is None else number, "kv", 0, 1, parent, chain, nbytes)
        self.session.commit(reserved.slots, reserved.generations)
        return chain

    def subscriber(self, topic: bytes = b"") -> Subscriber:
        return Subscriber(self.publisher.endpoint, self.publisher.replay_endpoint, topic)

    def close(self) -> None:
        self.session.close()
        self.running.stop()
        self.publisher.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.close()


@contextlib.contextmanager
def subscribed(site: Site, topic: bytes = b"") -> Iterator[Subscriber]:
    """A subscriber that is connected for certain: it has heard something."""
    subscriber = site.subscriber(topic)
    tried: set[int] = set()

    def heard() -> bool:
        tried.update(blocks(site.store(hashes(1, seed=1000 + len(tried)))))
        return bool(subscriber.socket.poll(100))

    def told() -> bool:
        subscriber.replay(0)
        return tried <= subscriber.blocks

    try:
        await_condition(heard, "the subscriber is connected")
        # Of what was stored for that nothing comes later, as news.
        await_condition(told, "all of it is published")
        subscriber.numbers.clear()
        yield subscriber
    finally:
        subscriber.close()


def blocks(chain: bytes) -> set[int]:
    return set(block_hashes("sglang", chain))


def test_what_is_stored_and_removed_is_published_in_order(site: Site) -> None:
    with subscribed(site, TOPIC) as subscriber:
        chain = site.store(hashes(5))
        while not blocks(chain) <= subscriber.blocks:
            events = subscriber.receive()
        assert events[-1] == {
            "type": "BlockStored",
            "block_hashes": block_hashes("sglang", chain),
            "parent_block_hash": None,
            "token_ids": [],
            "block_size": SPACE.page_tokens,
            "lora_id": None,
            "medium": MEDIUM,
            "lora_name": None,
        }
        more = site.store(hashes(2, seed=7), parent=chain[-32:])
        [event] = subscriber.receive()
        assert event["parent_block_hash"] == block_hashes("sglang", chain)[-1]
        site.session.delete(site.number, more[32:])
        assert subscriber.receive() == [
            {"type": "BlockRemoved", "block_hashes": block_hashes("sglang", more[32:]), "medium": MEDIUM}
        ]
        site.session.clear(site.number)
        assert subscriber.receive() == [{"type": "AllBlocksCleared"}]
        assert subscriber.numbers == list(range(subscriber.numbers[0], subscriber.numbers[0] + len(subscriber.numbers)))


def test_block_hashes_are_those_of_the_engines() -> None:
    page = bytes(range(0x80, 0xA0))
    assert block_hashes("sglang", page) == [0x8081828384858687 - (1 << 64)]
    assert block_hashes("vllm", page) == [0x98999A9B9C9D9E9F]


def test_a_namespace_of_vllm_is_published_as_vllm_does(site: Site) -> None:
    space = namespace(engine="vllm")
    number = site.session.open_namespace(space.record())
    chain = site.store(hashes(2), number=number)
    topic = space.digest().hex()[:LABEL_DIGITS].encode()
    router = zmq.Context.instance().socket(zmq.DEALER)
    router.rcvtimeo, router.linger = 60_000, 0
    router.connect(str(site.publisher.replay_endpoint))
    site.running.service.call(lambda state: state.finish())
    received = []
    await_condition(lambda: topic.decode() in site.publisher._streams, "the stream of the namespace")
    router.send_multipart((b"", topic, (0).to_bytes(8, "big")))
    while True:
        _, number_frame, payload = router.recv_multipart()
        if number_frame == END:
            break
        received.append(msgspec.msgpack.decode(payload))
    router.close(0)
    assert received[0]["events"][0] == {"type": "AllBlocksCleared"}
    assert all(set(batch) == {"ts", "events"} for batch in received)
    events = [event for batch in received for event in batch["events"]]
    for event in events[1:]:
        # What vLLM's own classes ask for; they have no defaults for the last two.
        assert event.keys() >= {
            "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"
        }  # fmt: skip
    assert events[1]["block_hashes"] == block_hashes("vllm", chain)


def test_a_gap_is_closed_by_a_replay(site: Site) -> None:
    with subscribed(site) as subscriber:
        site.store(hashes(3))
        subscriber.receive()
        last = subscriber.numbers[-1]
        lost = site.store(hashes(3, seed=1))
        _, number, _ = subscriber.socket.recv_multipart()  # lost
        site.store(hashes(3, seed=2))
        subscriber.receive()
        assert subscriber.numbers[-1] == last + 2
        assert not blocks(lost) <= subscriber.blocks
        subscriber.replay(last + 1)
        assert blocks(lost) <= subscriber.blocks
        assert int.from_bytes(number, "big") in subscriber.numbers


def test_a_subscriber_that_comes_late_has_everything_after_one_replay(site: Site) -> None:
    kept = site.store(hashes(4))
    gone = site.store(hashes(4, seed=1))
    site.session.delete(site.number, gone[:32])
    site.running.service.call(lambda state: state.finish())
    subscriber = site.subscriber()
    await_condition(lambda: site.publisher._streams and not site.publisher.events._notes, "the publisher")
    subscriber.replay(0)
    assert subscriber.blocks == blocks(kept)
    subscriber.close()


def test_where_the_buffer_is_too_short_everything_is_published_anew(tmp_path: Path) -> None:
    site = Site(tmp_path, buffer_bytes=400)
    chains = [site.store(hashes(4, seed=seed)) for seed in range(12)]
    site.running.service.call(lambda state: state.finish())
    await_condition(lambda: sum(stream.following for stream in site.publisher._streams.values()) > 10, "the messages")
    assert site.publisher._past_bytes <= 400 + 200
    subscriber = site.subscriber()
    # The whole content is larger than this buffer: it comes as one message, which is kept however long it is.
    subscriber.replay(0)
    assert subscriber.blocks == set().union(*map(blocks, chains))
    subscriber.close()
    site.close()


def test_what_is_no_replay_request_is_ignored(site: Site) -> None:
    site.store(hashes(2))
    subscriber = site.subscriber()
    for frames in ([b"x"], [b"", b"short"], [b"", b"a", b"b", b"c", bytes(8)], [b""]):
        bare = subscriber.context.socket(zmq.DEALER)
        bare.linger = 0
        bare.connect(str(site.publisher.replay_endpoint))
        bare.send_multipart(frames)
        bare.close(1000)
    await_condition(lambda: site.publisher._streams, "the stream")
    subscriber.replay(0)
    assert subscriber.blocks == blocks(hashes(2))
    subscriber.close()


def test_a_subscriber_that_does_not_read_stops_nobody(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = site.subscriber()
    deaf.socket.rcvhwm = 1
    for seed in range(60):
        site.store(hashes(2, seed=seed))
    chains = [hashes(2, seed=seed) for seed in range(60)]
    site.running.service.call(lambda state: state.finish())
    await_condition(lambda: not site.publisher.events._notes, "the queue is empty")
    subscriber = site.subscriber()
    subscriber.replay(0)
    assert subscriber.blocks == set().union(*map(blocks, chains))
    subscriber.close()
    deaf.close()


def test_long_chains_are_cut_and_linked(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "MAX_BATCH", 3)
    chain = block_hashes("sglang", site.store(hashes(8)))
    site.running.service.call(lambda state: state.finish())
    subscriber = site.subscriber()
    await_condition(lambda: site.publisher._streams and not site.publisher.events._notes, "the publisher")
    subscriber.replay(0)
    stored = [event for event in subscriber.events if event["type"] == "BlockStored"]
    assert [event["block_hashes"] for event in stored] == [chain[:3], chain[3:6], chain[6:]]
    assert [event["parent_block_hash"] for event in stored] == [None, chain[2], chain[5]]
    subscriber.close()


@pytest.mark.parametrize(
    ("endpoint", "replay"),
    [("tcp://0.0.0.0:0", None), ("tcp://*:5557", None), ("tcp://127.0.0.1", None), ("5557", None), ("ipc://here", None),
     ("tcp://127.0.0.1:*", "tcp://[::]:1")],
)  # fmt: skip
def test_endpoints_that_others_reach_or_that_are_none_are_refused(endpoint: str, replay: str | None) -> None:
    with pytest.raises(ConfigError, match=r"--events(-replay)? is"):
        Publisher(endpoint, replay, lambda fn, timeout_s: None)


@pytest.mark.parametrize(
    ("options", "says"),
    [(["--events", "tcp://0.0.0.0:5557"], "--insecure-events"), (["--events-replay", "tcp://127.0.0.1:1"], "--events")],
)
def test_the_server_refuses_what_cannot_be(tmp_path: Path, options: list[str], says: str) -> None:
    server = ServerProcess(tmp_path, *options, size="16M")
    try:
        with pytest.raises(AssertionError, match="ended at its start"):
            server.start()
        assert server.process is not None
        assert server.process.wait(120) == 2
        assert says in server.log.read_text()
    finally:
        server.remove()


def test_an_endpoint_in_use_is_refused_by_its_option(site: Site) -> None:
    with pytest.raises(ConfigError, match="--events is"):
        Publisher(site.publisher.endpoint, None, site.running.service.call)
