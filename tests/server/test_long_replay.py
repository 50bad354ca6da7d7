"""A replay of many messages reaches a subscriber whole, with its end, also where it reads slowly."""

from __future__ import annotations

import time
from pathlib import Path

import zmq

from maru_server.events import Stored, Topic
from maru_server.publisher import BUFFER_MESSAGES, END, HIGH_WATER, Publisher
from support import await_condition, hashes

MESSAGES = 6000


def test_a_long_replay_reaches_its_end(tmp_path: Path) -> None:
    publisher = Publisher(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", lambda fn, timeout_s: None)
    # Two topics in turn: each note is a message of its own.
    topics = [Topic(name, "sglang", 16, ("kv",)) for name in ("one", "two")]
    page = hashes(64)
    with publisher.events._lock:
        publisher.events._notes += [Stored(topics[number % 2], page[:32], page) for number in range(MESSAGES)]
    publisher._ring()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.rcvhwm, dealer.rcvtimeo = 0, 1, 60_000
        dealer.connect(publisher.replay_endpoint)
        await_condition(lambda: len(publisher._past) == MESSAGES + 2, "all is published")
        dealer.send_multipart((b"", bytes(8)))
        time.sleep(0.3)  # meanwhile it is sent as far as it will be
        got = []
        while (frames := dealer.recv_multipart())[2] != END:
            got.append((frames[1], int.from_bytes(frames[2], "big")))
    context.term()
    publisher.close()
    expected = list(range(MESSAGES // 2 + 1))
    assert [number for topic, number in got if topic == b"one"] == expected
    assert [number for topic, number in got if topic == b"two"] == expected


def test_two_replays_may_wait_for_one_subscriber() -> None:
    assert 2 * (BUFFER_MESSAGES + 1) <= HIGH_WATER
