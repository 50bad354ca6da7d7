"""A transfer as fast as NIXL alone can do it: the limit that ``maru-bench copy --transport rdma`` is held against.

Written straight on NIXL's interface, and nothing of Maru's mover is in it. What can be done before it is known which pages go is done:
the memory is registered, and every page's descriptors stand in one prepared list for each side. What is timed is making a batch's
transfers of these, posting them and waiting until they are done.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

#: A transfer that takes longer has failed, seconds.
_LIMIT_S: Final = 60.0


class Way(msgspec.Struct, frozen=True):
    """How a batch is moved: what is best differs by network and machine, so several are tried."""

    transfer_bytes: int
    """About so many bytes in one transfer; 0: a whole batch."""
    depth: int
    """Transfers under way at a time."""
    pause_s: float
    """Between two looks at what is under way; 0: none."""

    def __str__(self) -> str:
        size = f"{self.transfer_bytes >> 20} MiB" if self.transfer_bytes else "all"
        return f"{self.depth} x {size}, {self.pause_s * 1e6:.0f} µs"


WAYS: Final = tuple(
    Way(size, depth, pause)
    for size in (1 << 20, 4 << 20, 16 << 20, 0)
    for depth in (1, 4)
    for pause in (0.0, 0.0001)
    if size or depth == 1
)


class BareNixl:
    """Moves batches of pages between registered memory here and an agent's.

    Args:
        metadata: of the peer's agent.
        address, nbytes: of the memory here.
    """

    def __init__(self, metadata: bytes, address: int, nbytes: int) -> None:
        import nixl._api as api

        self._agent: Any = api.nixl_agent("bare", api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self._memory = self._agent.register_memory([(address, nbytes, 0, "")], "DRAM", backends=["UCX"])
        self._peer = self._agent.add_remote_agent(metadata)
        self._lists: list[Any] = []
        self._made: dict[tuple[str, int, Way], list[Any]] = {}
        self._per_page = 1
        self._batch = 0
        self._fragment_bytes = 0

    def prepare(self, local: U64, remote: U64, fragment_bytes: int, batch: int) -> None:
        """The pages that are moved from now on, ``batch`` of them in each call.

        Args:
            local, remote: addresses of each page's fragments, shape ``(pages, fragments)``.
        """
        self.clear()
        self._per_page, self._batch, self._fragment_bytes = local.shape[1], batch, fragment_bytes
        for name, addresses in (("NIXL_INIT_AGENT", local), (self._peer, remote)):
            table = np.zeros((local.size, 3), np.uint64)
            table[:, 0] = addresses.reshape(-1)
            table[:, 1] = fragment_bytes
            self._lists.append(self._agent.prep_xfer_dlist(name, table, "DRAM"))

    def make(self, operation: str, index: int, way: Way) -> None:
        """Make the transfers of batch ``index``, if they are not made yet."""
        if (operation, index, way) in self._made:
            return
        here, there = self._lists
        first = index * self._batch * self._per_page
        stop = first + self._batch * self._per_page
        step = max(1, way.transfer_bytes // self._fragment_bytes) if way.transfer_bytes else stop - first
        self._made[operation, index, way] = [
            self._agent.make_prepped_xfer(operation, here, which, there, which, b"", ["UCX"])
            for which in (
                np.arange(start, min(stop, start + step), dtype=np.int32) for start in range(first, stop, step)
            )
        ]

    def move(self, operation: str, index: int, way: Way) -> None:
        """``READ`` or ``WRITE`` batch ``index``; what :meth:`make` made."""
        transfer, look = self._agent.transfer, self._agent.check_xfer_state
        waiting = self._made[operation, index, way][::-1]
        under_way: list[Any] = []
        limit = time.monotonic() + _LIMIT_S
        while waiting or under_way:
            while waiting and len(under_way) < way.depth:
                handle = waiting.pop()
                if self._open(transfer(handle)):
                    under_way.append(handle)
            under_way = [handle for handle in under_way if self._open(look(handle))]
            if under_way:
                if way.pause_s:
                    time.sleep(way.pause_s)
                if time.monotonic() > limit:
                    raise RuntimeError(f"a bare NIXL transfer took longer than {_LIMIT_S:g} s")

    @staticmethod
    def _open(state: str) -> bool:
        if state not in ("DONE", "PROC"):
            raise RuntimeError(f"a bare NIXL transfer ended in the state {state}")
        return state == "PROC"

    def forget(self) -> None:
        """Give back all transfers."""
        for handles in self._made.values():
            for handle in handles:
                handle.release()
        self._made.clear()

    def clear(self) -> None:
        """Give back all transfers and lists."""
        self.forget()
        for prepared in self._lists:
            with contextlib.suppress(Exception):
                prepared.release()
        self._lists.clear()

    def close(self) -> None:
        self.clear()
        self._agent.remove_remote_agent(self._peer)
        self._agent.deregister_memory(self._memory, backends=["UCX"])
        del self._agent
