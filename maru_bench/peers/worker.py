"""One process of a peer: does what it is told, and says how long each call took.

``python -m maru_bench.peers.worker FD CONFIG``: orders come and answers go over the socket FD; CONFIG is JSON. It imports what
its peer needs, and of Maru's own only what that is.
"""

from __future__ import annotations

import itertools
import socket
import sys
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from maru_bench.pages import EngineBuffer, U8Array
from maru_bench.peers.adapters import ADAPTERS, Adapter, PeerConfig
from maru_bench.peers.orders import Do, Done, Line, Loop, Order, keys_of

_STAMP = 32


def stamp(keys: Sequence[str], pages: U8Array) -> None:
    """Write each page's key at the head of each of its fragments, so that no other page can be taken for it."""
    pages[:, :, :_STAMP] = np.frombuffer(bytes.fromhex("".join(keys)), np.uint8).reshape(1, -1, _STAMP)


def spoil(pages: U8Array) -> tuple[slice, U8Array]:
    """Change bytes all over the pages; returns where and what was there."""
    where = slice(_STAMP, None, 4096)
    before = pages[:, :, where].copy()
    pages[:, :, where] = ~before
    pages[:, :, :_STAMP] = 0
    return where, before


class Worker:
    def __init__(self, config: PeerConfig) -> None:
        self.buffer = EngineBuffer(config.buffer_bytes)
        self.adapter: Adapter = ADAPTERS[config.peer](config, self.buffer.data)

    def do(self, order: Do) -> float:
        """Seconds of the call.

        Raises:
            Exception: what went wrong, the peer's own errors too.
        """
        keys = keys_of(order.chain, order.first, order.pages)
        total = len(self.buffer.data) // order.page_bytes
        pages = self.buffer.pages(order.at, order.pages, order.page_bytes, total)
        adapter, clock = self.adapter, time.perf_counter
        if order.operation == "store":
            stamp(keys, pages)
            before = keys_of(order.chain, order.first - 1, 1)[0] if order.first else None
            began = clock()
            adapter.store(keys, before, pages)
            return clock() - began
        if order.operation == "load":
            where, right = spoil(pages)
            began = clock()
            adapter.load(keys, pages)
            seconds = clock() - began
            stamps = np.frombuffer(bytes.fromhex("".join(keys)), np.uint8).reshape(1, -1, _STAMP)
            if not (np.array_equal(pages[:, :, where], right) and (pages[:, :, :_STAMP] == stamps).all()):
                raise ValueError("other bytes were loaded than were stored")
            return seconds
        began = clock()
        if order.operation == "exists":
            adapter.exists(keys, order.page_bytes)
        elif order.operation == "remove":
            adapter.remove(keys)
        else:
            raise ValueError(f"no operation {order.operation!r}")
        return clock() - began

    def loop(self, order: Loop) -> list[float]:
        """Seconds of each call that ended in time, at least one."""
        chains = [keys_of(chain, 0, order.pages) for chain in order.chains]
        total = len(self.buffer.data) // order.page_bytes
        pages = self.buffer.pages(0, order.pages, order.page_bytes, total)
        clock = time.perf_counter
        end = clock() + order.seconds
        times = []
        for keys in itertools.cycle(chains):
            began = clock()
            if order.operation == "exists":
                self.adapter.exists(keys, order.page_bytes)
            else:
                self.adapter.load(keys, pages)
            ended = clock()
            times.append(ended - began)
            if ended > end:
                return times
        return times

    def answer(self, order: Order) -> Done:
        try:
            return Done(seconds=[self.do(order)] if isinstance(order, Do) else self.loop(order))
        except Exception as error:
            return Done(seconds=[], error=f"{type(error).__name__}: {error}")


def main(words: Sequence[str]) -> None:
    line = Line(socket.socket(fileno=int(words[0])))
    try:
        worker = Worker(msgspec.json.decode(words[1].encode(), type=PeerConfig))
    except Exception as error:
        line.send(Done(seconds=[], error=f"{type(error).__name__}: {error}"))
        return
    line.send(Done(seconds=[]))
    while (order := line.receive_order()) is not None:
        line.send(worker.answer(order))
    worker.adapter.close()


if __name__ == "__main__":
    main(sys.argv[1:])
