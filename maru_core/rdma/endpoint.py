"""One NIXL agent of this process: memory registered with it, peers it is connected to, transfers under way.

A thin layer that says what went wrong. Not safe for several threads at once: its owner has a lock. What NIXL 1.5 does, as seen: a
peer that dies makes the state of a transfer raise; part of a READ may have landed by then; a transfer that is given up may still
land until the endpoint is closed, so whoever gives one up closes the endpoint.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
import uuid
import weakref
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from maru_core.errors import ConfigError, MaruError
from maru_core.rdma.descriptors import HOST, I64, NOWHERE

log = logging.getLogger("maru.rdma")

U64 = npt.NDArray[np.uint64]
Descriptors = npt.NDArray[np.uint64]  # shape (n, 3): address, bytes, device

BACKENDS: Final = ("UCX",)
#: Making and destroying agents is not safe from several threads in NIXL.
_making: Final = threading.Lock()


class TransferError(MaruError):
    """A transfer did not finish. Nothing of a read lands any more; of a write (unless ``wrote`` is False), nobody knows."""

    def __init__(self, message: str, *, wrote: bool = True) -> None:
        super().__init__(message)
        self.wrote = wrote


def nixl() -> Any:
    """NIXL's Python interface.

    Raises:
        ConfigError: it is not installed, or does not load.
    """
    try:
        module = importlib.import_module("nixl._api")
    except ImportError as error:
        raise ConfigError(
            f"RDMA needs NIXL, which cannot be imported here ({error}): pip install 'maru-sglang[rdma]', or map the pool "
            "(transport=cxl)"
        ) from error
    # It tells every agent's birth; ours is told in our own words.
    logging.getLogger("nixl").setLevel(max(logging.WARNING, logging.getLogger("nixl").level))
    return module


class Endpoint:
    """Args:
    name: the beginning of the agent's name, for people.
    backend: of NIXL.
    devices: network devices of UCX, such as ``mlx5_0:1``, joined by commas; empty: UCX chooses.
    progress: a thread that answers peers. Needed where UCX has to emulate one-sided transfers (TCP), at the side that is
        read and written; it polls.
    """

    def __init__(self, name: str, *, backend: str = "UCX", devices: str = "", progress: bool = False) -> None:
        if backend not in BACKENDS:
            raise ConfigError(f"backend is {backend!r}: use {' or '.join(BACKENDS)}")
        api = nixl()
        self.name = f"{name}-{uuid.uuid4().hex}"
        self.backend = backend
        try:
            with _making:
                config = api.nixl_agent_config(enable_prog_thread=progress, backends=[])
                self._agent: Any = api.nixl_agent(self.name, config)
                self._agent.create_backend(backend, {"ucx_devices": devices} if devices else {})
        except Exception as error:
            raise ConfigError(
                f"NIXL's backend {backend} does not start (devices {devices or 'chosen by UCX'}): {error or type(error).__name__}; "
                "see ibv_devices and ucx_info -d"
            ) from error
        self._registered: dict[int, tuple[int, int, Any]] = {}  # by address: bytes, device, NIXL's handle
        #: Where registrations begin, in order; where they end, and where their memory is.
        self.starts = np.empty(0, np.uint64)
        self._ends = np.empty(0, np.uint64)
        self._devices = np.empty(0, np.int64)
        self._peers: dict[bytes, str] = {}
        self._under_way: weakref.WeakSet[Transfer] = weakref.WeakSet()

    @property
    def metadata(self) -> bytes:
        """What a peer needs to reach the memory registered here."""
        return bytes(self._agent.get_agent_metadata())

    # ------------------------------------------------------------ memory

    def register(self, address: int, nbytes: int, device: int = HOST) -> None:
        """Let the NIC reach a range of this process's memory. Ranges may not overlap.

        Args:
            device: number of the GPU whose memory it is. A backend without GPUs says that it can, and then refuses.
        Raises:
            TransferError: it cannot be registered.
        """
        if address in self._registered and self._registered[address][:2] == (nbytes, device):
            return
        kind = "DRAM" if device == HOST else "VRAM"
        try:
            handle = self._agent.register_memory([(address, nbytes, max(device, 0), "")], kind, backends=[self.backend])
        except Exception as error:
            if device != HOST:
                raise TransferError(
                    f"{nbytes} bytes at {address:#x} of GPU {device} cannot be registered with {self.backend} "
                    f"({error or type(error).__name__}): it needs a UCX built for the GPU, and nvidia-peermem or DMA-BUF on the host"
                ) from error
            raise TransferError(
                f"{nbytes} bytes at {address:#x} cannot be registered with {self.backend} ({error or type(error).__name__}): memory must "
                "be mapped read-write and not be a file of a DAX file system; see ulimit -l"
            ) from error
        self._registered[address] = nbytes, device, handle
        starts = sorted(self._registered)
        self.starts = np.array(starts, np.uint64)
        self._ends = np.array([start + self._registered[start][0] for start in starts], np.uint64)
        self._devices = np.array([self._registered[start][1] for start in starts], np.int64)

    def devices(self, addresses: U64, sizes: U64) -> I64:
        """Where each range lies: a GPU's number, HOST, or NOWHERE if not inside of one registration."""
        if not len(self.starts):
            return np.full(len(addresses), NOWHERE, np.int64)
        at = self.starts.searchsorted(addresses, side="right")
        before = np.maximum(at, 1) - 1
        inside = (at > 0) & (addresses + sizes <= self._ends[before])
        return np.where(inside, self._devices[before], NOWHERE)

    # ------------------------------------------------------------ peers and transfers

    def connect(self, metadata: bytes) -> str:
        """The name under which a peer is known here.

        Raises:
            TransferError: what it announced is not NIXL's, or it cannot be reached.
        """
        known = self._peers.get(metadata)
        if known is None:
            try:
                known = self._agent.add_remote_agent(metadata)
            except Exception as error:
                raise TransferError(f"an agent cannot be reached: {error or type(error).__name__}") from error
            known = known.decode() if isinstance(known, bytes) else str(known)
            self._peers[metadata] = known
        return known

    def forget(self, metadata: bytes) -> None:
        """Disconnect a peer; what is under way with it fails."""
        peer = self._peers.pop(metadata, None)
        if peer is not None:
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(peer)

    def post(self, operation: str, peer: str, local: Descriptors, remote: Descriptors, kind: str = "DRAM") -> Transfer:
        """Begin a transfer: ``READ`` from the peer or ``WRITE`` to it. ``kind``: of all memory here; the peer's is its host's.

        Raises:
            TransferError: it cannot be begun; nothing was moved.
        """
        agent = self._agent
        try:
            handle = agent.initialize_xfer(
                operation, agent.get_xfer_descs(local, kind), agent.get_xfer_descs(remote, "DRAM"), peer
            )
        except Exception as error:
            raise TransferError(f"a transfer was refused: {error or type(error).__name__}") from error
        transfer = Transfer(agent, handle)
        self._under_way.add(transfer)
        transfer.begin()
        return transfer

    def close(self) -> None:
        """Give everything back. Nothing that was under way lands any more."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        # Whoever still holds one of them, as the traceback of a failure does, must not be the one to destroy the agent at some other time.
        for transfer in list(self._under_way):
            transfer.give_up()
        for peer in self._peers.values():
            with contextlib.suppress(Exception):
                agent.remove_remote_agent(peer)
        for _, _, handle in self._registered.values():
            with contextlib.suppress(Exception):
                agent.deregister_memory(handle, backends=[self.backend])
        self._peers.clear()
        self._registered.clear()
        with _making:
            del agent


class Transfer:
    """One transfer under way."""

    def __init__(self, agent: Any, handle: Any) -> None:
        self._agent = agent
        self._handle = handle
        self._poll: Callable[[], str] = lambda: str(agent.check_xfer_state(handle))

    def begin(self) -> None:
        self._seen(lambda: str(self._agent.transfer(self._handle)))

    @property
    def finished(self) -> bool:
        """Whether it was seen to have finished."""
        return self._handle is None

    def done(self) -> bool:
        """Look whether it has finished.

        Raises:
            TransferError: it failed.
        """
        return self._handle is None or self._seen(self._poll)

    def _seen(self, state: Callable[[], str]) -> bool:
        try:
            said = state()
        except Exception as error:
            self.give_up()
            raise TransferError(f"a transfer failed: {error or type(error).__name__}") from error
        if said == "PROC":
            return False
        if said != "DONE":
            self.give_up()
            raise TransferError(f"a transfer ended in the state {said}")
        self.give_up()
        return True

    def give_up(self) -> None:
        """Let go of it and of its agent, finished or not; NIXL cancels what it can."""
        handle, self._handle = self._handle, None
        self._agent, self._poll = None, str
        if handle is not None:
            with contextlib.suppress(Exception):
                handle.release()
