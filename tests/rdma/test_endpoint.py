"""One NIXL agent of a process: what is left of it when it is closed."""

from __future__ import annotations

import mmap
import weakref

import numpy as np

from maru_core.rdma import Endpoint
from maru_core.rdma.descriptors import described

NBYTES = 1 << 20


def buffer() -> tuple[mmap.mmap, int]:
    memory = mmap.mmap(-1, NBYTES)
    return memory, int(np.frombuffer(memory, np.uint8).ctypes.data)


def test_a_closed_endpoint_is_gone_whoever_still_holds_its_transfers() -> None:
    """NIXL's agents must not be destroyed while another thread makes one: so not when a traceback happens to be dropped."""
    (here, to), (there, origin) = buffer(), buffer()
    there[:] = bytes([7]) * NBYTES
    far = Endpoint("far")  # answers nobody: what is read from it stays under way
    near = Endpoint("near")
    far.register(origin, NBYTES)
    near.register(to, NBYTES)
    sizes = np.array([NBYTES], np.uint64)
    local, remote = (described(np.array([address], np.uint64), sizes) for address in (to, origin))
    transfer = near.post("READ", near.connect(far.metadata), local, remote)
    assert not transfer.finished
    agent = weakref.ref(near._agent)
    near.close()
    assert agent() is None
    assert transfer.finished
    far.close()
    assert not any(here[:]), "nothing of it has landed"
