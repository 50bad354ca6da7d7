"""KV that lies on a GPU: what copies it, and when the work that was queued there has run. On a CPU nothing of this is needed.

On a GPU vLLM queues a step and goes on. So whatever reads what a step writes, or writes what an earlier one may still use, first
waits for a *moment*: everything that was on the worker's stream when it was taken. Movers have streams of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from maru_core.mover import Mover
from maru_core.pool import PoolMemory

#: Waits until everything has run that was queued when it was made.
Moment = Callable[[], None]

#: Kinds of devices whose memory can be moved; torch calls AMD's ``cuda`` too.
KINDS: Final = ("cpu", "cuda")


def already() -> Moment:
    """The moment on a CPU: what was called has been done."""
    return _nothing


def moments_of(device: torch.device) -> Callable[[], Moment]:
    """What takes moments of the current stream of ``device``."""
    if device.type == "cpu":
        return already

    def now() -> Moment:
        # Blocking: a thread that waits leaves its core to the engine.
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        wait: Moment = event.synchronize
        return wait

    return now


def mover_of(device: torch.device, threads: int | None) -> Callable[[PoolMemory], Mover] | None:
    """What makes the mover of a pool for KV on ``device``; None: the store's own, which the CPU's memory needs.

    Args:
        threads: as :attr:`maru_core.store_config.StoreConfig.copy_threads`.
    """
    if device.type == "cpu":
        return None

    def make(memory: PoolMemory) -> Mover:
        from maru_sglang.kernels.mover import PagedMover

        return PagedMover(memory, device, threads=threads)

    return make


def _nothing() -> None:
    pass
