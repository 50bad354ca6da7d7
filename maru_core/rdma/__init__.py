"""Pools that this process cannot map: their memory is on another machine, and NIXL reads and writes it there.

An agent (:mod:`maru_agent`) has the pool registered with its NIC. :class:`RdmaMover` moves objects between this process's memory and
their slots, one-sidedly; :class:`MessageView` asks the server for the generations, since nobody here can look at them. NIXL is
imported when the first connection is made, not before.
"""

from maru_core.rdma.endpoint import Endpoint, TransferError
from maru_core.rdma.mover import RdmaMover
from maru_core.rdma.validation import MessageView

__all__ = ["Endpoint", "MessageView", "RdmaMover", "TransferError"]
