"""What the scheduler's side tells the workers' sides in each step, and what they tell it at start.

Plain data: vLLM pickles it between its own processes (never between machines that do not trust each other).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata


@dataclass(slots=True)
class PageRun:
    """Consecutive pages of one chain in one KV cache group: their hashes, and the blocks that hold (or shall hold) them."""

    group: int  # index into the plan of groups, not vLLM's group id
    parent: bytes  # hash of the page before the first, or ROOT
    hashes: bytes  # packed, 32 bytes a page
    blocks: list[int]  # one a page


@dataclass(slots=True)
class Transfer:
    """Pages of one request to load, or to store."""

    request_id: str
    runs: list[PageRun]
    #: It cannot be done, and only shall be reported so (a load that vLLM waits for).
    failed: bool = False


@dataclass
class MaruMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step."""

    #: Counts up, so that a worker begins each step's work once, whichever of vLLM's hooks comes first.
    step: int = 0
    #: Loads whose blocks are allocated.
    loads: list[Transfer] = field(default_factory=list)
    #: Blocks that are full once this step has run.
    stores: list[Transfer] = field(default_factory=list)
    #: Blocks of requests that have ended, full since the step before: they may be given to others in this very step, so their
    #: copy begins before it.
    last_stores: list[Transfer] = field(default_factory=list)
    #: Blocks that were given to a request in this step: what is still being read from them must be read before it runs.
    fresh: list[int] = field(default_factory=list)
    #: Nothing is computed in this step.
    idle: bool = False


@dataclass
class Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a worker found when it saw its KV cache: the scheduler's side cannot see it, and needs it to ask for pages."""

    namespace: bytes  # the record
    components: list[str]  # of this worker's pipeline stage, in the plan's order
    object_bytes: int  # the largest
