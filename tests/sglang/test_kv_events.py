"""Maru's KV events are read by SGLang's own classes, and are those that SGLang publishes for the same pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from maru_core.protocol import ROOT
from maru_core.session import Session
from support import ServerProcess, await_condition, hashes, namespace

pytestmark = pytest.mark.sglang


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(
        tmp_path,
        "--events",
        f"ipc://{tmp_path}/events.sock",
        "--events-replay",
        f"ipc://{tmp_path}/replay.sock",
        size="16M",
    )
    try:
        yield process.start()
    finally:
        process.remove()


class Subscriber:
    """Written as SGLang's: its decoder, its frames, its end of a replay."""

    def __init__(self, directory: Path) -> None:
        from msgspec.msgpack import Decoder
        from sglang.srt.disaggregation.kv_events import KVEventBatch

        self.decode = Decoder(type=KVEventBatch).decode
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.live = self.context.socket(zmq.SUB)
        self.live.linger, self.live.rcvtimeo = 0, 60_000
        self.live.subscribe(b"")
        self.live.connect(f"ipc://{directory}/events.sock")
        self.past = self.context.socket(zmq.DEALER)
        self.past.linger, self.past.rcvtimeo = 0, 60_000
        self.past.connect(f"ipc://{directory}/replay.sock")
        self.blocks: set[int] = set()
        self.batches: list[Any] = []
        self.last = -1

    def close(self) -> None:
        self.live.close(0)
        self.past.close(0)
        self.context.term()

    def replay(self) -> None:
        from sglang.srt.disaggregation.kv_events import ZmqEventPublisher

        self.past.send_multipart((b"", (self.last + 1).to_bytes(8, "big")))
        while True:
            _, _topic, number, payload = self.past.recv_multipart()
            if number == ZmqEventPublisher.END_SEQ:
                return
            self.take(number, payload)

    def listen(self) -> bool:
        """Take one live message, if there is one within a moment."""
        if not self.live.poll(100):
            return False
        _topic, number, payload = self.live.recv_multipart()
        if int.from_bytes(number, "big") > self.last + 1:
            self.replay()
        self.take(number, payload)
        return True

    def take(self, number: bytes, payload: bytes) -> None:
        from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, StorageMedium

        sequence = int.from_bytes(number, "big")
        if sequence <= self.last:
            return
        assert sequence == self.last + 1
        self.last = sequence
        batch = self.decode(payload)
        self.batches.append(batch)
        for event in batch.events:
            if isinstance(event, BlockStored):
                assert event.medium == StorageMedium.EXTERNAL
                assert event.parent_block_hash is None or event.parent_block_hash in self.blocks
                assert not self.blocks.intersection(event.block_hashes)
                self.blocks.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                assert self.blocks.issuperset(event.block_hashes)
                self.blocks.difference_update(event.block_hashes)
            else:
                assert isinstance(event, AllBlocksCleared)
                self.blocks.clear()


def as_sglang(chain: bytes) -> list[int]:
    """The numbers that SGLang publishes for these pages."""
    from sglang.srt.mem_cache.utils import hash_str_to_int64

    return [hash_str_to_int64(chain[at : at + 32].hex()) for at in range(0, len(chain), 32)]


def test_sglang_s_own_decoder_reads_what_a_match_finds(site: ServerProcess, tmp_path: Path) -> None:
    subscriber = Subscriber(tmp_path)
    session = Session(site.endpoint, name="writer", timeout_s=60)
    space = namespace(engine="sglang", page_tokens=64)
    number = session.open_namespace(space.record())
    chains: list[bytes] = []
    for seed in range(30):  # more than the pool holds: some are evicted
        parent = chains[-1] if seed % 3 else b""
        chain = hashes(4, seed=seed)
        reserved = session.reserve(number, "kv", 0, 1, parent[-32:] or ROOT, chain, 200_000)
        session.commit(reserved.slots, reserved.generations)
        chains.append(parent + chain)
        if seed % 5 == 4:
            session.delete(number, chains[seed - 2][-32:])
    found = {
        block for chain in chains for block in as_sglang(chain[: 32 * session.match(number, ["kv"], 0, chain).pages])
    }
    assert session.stats()["evicted_pages"]
    await_condition(lambda: not subscriber.listen() and subscriber.last >= 0, "the events have come")
    subscriber.replay()
    assert subscriber.blocks == found
    assert len(found) > 8
    stored = [event for batch in subscriber.batches for event in batch.events if hasattr(event, "token_ids")]
    assert {event.block_size for event in stored} == {64}
    session.clear(number)
    await_condition(lambda: subscriber.listen() and not subscriber.blocks, "the clear")
    subscriber.close()
    session.close()


def test_a_late_subscriber_is_right_after_one_replay(site: ServerProcess, tmp_path: Path) -> None:
    session = Session(site.endpoint, name="writer", timeout_s=60)
    number = session.open_namespace(namespace(engine="sglang").record())
    chain = hashes(6)
    reserved = session.reserve(number, "kv", 0, 1, ROOT, chain, 1000)
    session.commit(reserved.slots, reserved.generations)
    session.stats()
    subscriber = Subscriber(tmp_path)

    def caught_up() -> bool:
        subscriber.replay()
        return subscriber.blocks == set(as_sglang(chain))

    await_condition(caught_up, "the replay has everything")
    assert site.stop() == 0
    site.start()  # another life: its stream begins anew, with what the pool holds
    subscriber.last, subscriber.blocks = -1, set()
    await_condition(caught_up, "the new life's replay has everything")
    subscriber.close()
    session.close()


def test_the_numbers_are_those_of_sglang_s_own_publisher() -> None:
    from sglang.srt.mem_cache.utils import get_hash_str

    from maru_server.publisher import block_hashes

    first = get_hash_str(list(range(16)))
    second = get_hash_str(list(range(16, 32)), first)
    packed = bytes.fromhex(first + second)
    assert block_hashes("sglang", packed) == as_sglang(packed)
