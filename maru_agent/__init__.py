"""The agent on a memory node: it has the pool registered with its NIC, so that hosts without the memory read and write it there.

It maps the pool, registers it with NIXL and tells the metadata server how it is reached. From then on the NIC moves the bytes, and no
process here touches them.
"""

from maru_agent.agent import PoolAgent

__all__ = ["PoolAgent"]
