"""What an operator can set about a store, and what it counts."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from maru_core.endpoints import split_endpoints
from maru_core.errors import ConfigError
from maru_core.pool import parse_pool_uri
from maru_core.pool.uri import parse_size


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the server is and how careful to be."""

    #: ``ipc:///path`` or ``tcp://host:port``, or several, joined by commas, of which one serves at a time (a server and its
    #: standbys); None: the embedded server of this user and machine.
    server: str | None = None
    #: Path of this client's key file, for a server that has keys; None: MARU_CLIENT_KEY.
    client_key: str | None = None
    #: Public key of that server, or path of the file that has it; None: MARU_SERVER_KEY.
    server_key: str | None = None
    #: URI under which this host reaches the pool, where it is not the one the server names; of several pools all, joined by commas.
    pool: str | None = None
    #: Size of the embedded server's pool (``"8G"``); only the process that starts it decides.
    pool_size: str | None = None
    #: Time limit of one call to the server, milliseconds.
    timeout_ms: int = 500
    #: ``checksum`` also compares a checksum of every object that is read, and computes one for each that is written.
    verify: Literal["generation", "checksum"] = "generation"
    #: Threads that copy one large batch; None: one per CPU this process may use, at most 4.
    copy_threads: int | None = None
    #: ``cxl`` maps the pool, ``rdma`` reaches it through agents, ``auto`` maps it where that can be done.
    transport: Literal["auto", "cxl", "rdma"] = "auto"
    #: Network devices for ``rdma``, as UCX names them (``mlx5_0:1``), joined by commas; empty: UCX chooses.
    rdma_devices: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.timeout_ms <= 60_000:
            raise ConfigError(f"timeout_ms is {self.timeout_ms}: give milliseconds from 1 to 60000 (default 500)")
        if self.copy_threads is not None and not 1 <= self.copy_threads <= 64:
            raise ConfigError(f"copy_threads is {self.copy_threads}: give 1 to 64, or leave it out")
        if self.server is not None:
            split_endpoints(self.server, "server")
        if self.pool is not None:
            for uri in split_pools(self.pool):
                parse_pool_uri(uri)
        if self.pool_size is not None:
            parse_size(self.pool_size, "pool_size")


def split_pools(pools: str) -> list[str]:
    """The URIs of a list; a comma within a path does not end one."""
    return re.split(r",\s*(?=[a-z]+://)", pools)


class StoreMetrics(msgspec.Struct, kw_only=True):
    """Counters since the store was opened. Pages and bytes are of one shard of one component."""

    stored_pages: int = 0
    stored_bytes: int = 0
    existing_pages: int = 0  # put of what was already there: nothing copied
    loaded_pages: int = 0
    loaded_bytes: int = 0
    queried_pages: int = 0
    hit_pages: int = 0
    #: Pages that a lookup did not find, by the reason for the first of them.
    lookup_not_stored: int = 0
    lookup_evicted: int = 0
    lookup_removed: int = 0
    lookup_incomplete: int = 0
    lookup_other_namespace: int = 0
    lookup_unavailable: int = 0
    lookup_error: int = 0
    #: Pages that get could not deliver, by reason.
    miss_not_stored: int = 0
    miss_length: int = 0  # stored with another length than the reader's page
    miss_evicted: int = 0  # generation changed while it was read
    miss_checksum: int = 0  # wrong bytes in memory, or none to compare with
    miss_unavailable: int = 0  # no answer in time
    miss_error: int = 0
    #: Pages that put could not store, by reason.
    refused_no_room: int = 0
    refused_quota: int = 0  # the tenant has as much of the pool as it may
    refused_busy: int = 0
    refused_conflict: int = 0
    refused_lost: int = 0  # reservation gone before the commit
    refused_unavailable: int = 0
    refused_error: int = 0
