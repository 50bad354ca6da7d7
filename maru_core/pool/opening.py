"""What is decided before a pool is mapped or made: sizes that agree, a superblock that can be believed, an owner.

Reads, never writes.
"""

from __future__ import annotations

import os
import time
import uuid
from typing import Final

import numpy as np
import xxhash

from maru_core.errors import (
    ConfigError,
    NotAPoolError,
    PoolBusyError,
    PoolDamagedError,
    PoolError,
    PoolVersionError,
)
from maru_core.pool.backing import Backing, FileBacking, user_name
from maru_core.pool.coherence import coherence_for, drop_if_possible
from maru_core.pool.format import BLOCK_BYTES, COHERENCE_HARDWARE, COHERENCE_SOFTWARE, OWNER
from maru_core.pool.geometry import DEFAULT_ALIGN, Geometry
from maru_core.pool.uri import PoolURI, format_size, parse_pool_uri

#: Seconds since 1970 from which no pool has generations: half of what nanoseconds in a superblock can say.
_SECOND_MAX: Final = (1 << 63) // 1_000_000_000
OWNER_TEXT_MAX: Final = OWNER["text"].itemsize
#: As URIs say it.
_COHERENCE: Final = {COHERENCE_HARDWARE: "hardware", COHERENCE_SOFTWARE: "software"}


def supported(uri: PoolURI | str) -> PoolURI:
    """A URI that this installation can serve or attach.

    Raises:
        ConfigError: not a pool URI, or coherence=software where nothing can write cache lines back.
    """
    uri = parse_pool_uri(uri) if isinstance(uri, str) else uri
    if uri.coherence == "software":
        try:
            coherence_for(COHERENCE_SOFTWARE)
        except ConfigError as error:
            raise ConfigError(f"{uri}: {error}") from error
    return uri


def agreed_coherence(uri: PoolURI, geometry: Geometry) -> None:
    """What the URI says about the caches, if anything, must be what the pool was formatted for, and must be possible here.

    Raises:
        ConfigError: it is not.
    """
    formatted = _COHERENCE[geometry.coherence]
    if uri.coherence not in (None, formatted):
        raise ConfigError(
            f"{uri}: coherence={uri.coherence} was asked for, the pool was formatted with coherence={formatted}: leave coherence out "
            f"of the URI, or format the pool anew with coherence={uri.coherence} (--format; its contents are lost)"
        )
    try:
        coherence_for(geometry.coherence)
    except ConfigError as error:
        raise ConfigError(f"{uri}: the pool was formatted with coherence=software: {error}") from error


def agreed_size(uri: PoolURI, size: int | None) -> int | None:
    if size is not None and uri.size is not None and size != uri.size:
        raise ConfigError(
            f"{uri}: the URI says size={format_size(uri.size)}, the size given is {format_size(size)}: keep one of them"
        )
    return uri.size if size is None else size


def required_size(uri: PoolURI, wanted: int | None) -> int:
    if wanted is None:
        raise ConfigError(f"{uri}: a new pool needs a size: add ?size=8G to the URI or give --size 8G")
    return wanted


def plan_pool(uri: PoolURI, pool_bytes: int, grain: int, after_s: int) -> Geometry:
    """Cut a new pool; ``after_s`` is a second before which no generation of it may lie."""
    align = max(DEFAULT_ALIGN, grain) if uri.align is None else uri.align
    if align % grain:
        raise ConfigError(
            f"{uri}: align={format_size(align)} is not a multiple of the alignment {format_size(grain)} of {uri.path}: "
            f"leave it out or use {format_size(grain)}"
        )
    return Geometry.plan(
        pool_bytes,
        align=align,
        extent_bytes=uri.extent,
        min_slot_bytes=uri.min_slot,
        coherence=COHERENCE_SOFTWARE if uri.coherence == "software" else COHERENCE_HARDWARE,
        pool_uuid=uuid.uuid4().bytes,
        created_ns=max(time.time_ns(), after_s * 1_000_000_000),
    )


def provision_tables(uri: PoolURI, backing: Backing, geometry: Geometry) -> None:
    if not backing.provision(0, geometry.off_data):
        raise PoolError(
            f"{uri}: no space for the pool's tables ({geometry.off_data} bytes) on the file system of {uri.path}: "
            "free some, or make the pool smaller"
        )


def read_geometry(uri: PoolURI, backing: Backing) -> Geometry:
    """The geometry of what is there, checked against the memory behind it; errors name the pool and the cure."""
    drop_blocks(backing)
    try:
        geometry = Geometry.read(backing.read(0, BLOCK_BYTES))
    except NotAPoolError as error:
        raise NotAPoolError(
            f"{uri}: {uri.path} does not hold a Maru pool ({error}); it was not touched: "
            "name another, or let the server format it (--format; what it holds is lost)"
        ) from error
    except (PoolVersionError, PoolDamagedError) as error:
        raise type(error)(f"{uri}: {error}") from error
    if backing.capacity() < geometry.pool_bytes:
        raise PoolDamagedError(
            f"{uri}: the pool has {geometry.pool_bytes} bytes, {uri.path} only {backing.capacity()}: it was cut short; "
            "restore it, or format the pool anew (--format; its contents are lost)"
        )
    if geometry.off_data % backing.grain or geometry.data_bytes % backing.grain:
        raise PoolError(
            f"{uri}: the pool is aligned to {format_size(geometry.align)}, {uri.path} demands {format_size(backing.grain)}: "
            f"reconfigure the device (`daxctl reconfigure-device --align={geometry.align}`), or format the pool anew "
            "(--format; its contents are lost)"
        )
    return geometry


def drop_blocks(backing: Backing) -> None:
    """Have the superblock and the owner block read from memory, where a line of them may be left in a cache: before the
    superblock is read nobody knows whether this memory is coherent between hosts, and afterwards it may be too late."""
    try:
        blocks = backing.map(0, -(-2 * BLOCK_BYTES // backing.grain) * backing.grain, writable=False)
    except PoolError:
        return  # too short for a pool
    drop_if_possible(blocks[: 2 * BLOCK_BYTES])


def check_owner(uri: PoolURI, backing: FileBacking) -> None:
    # Whoever owns the file can change or cut it under the server, even where permissions let the server in.
    uid = os.fstat(backing.descriptor).st_uid
    if uid != os.geteuid():
        raise PoolError(
            f"{uri}: {uri.path} belongs to {user_name(uid)}, this server runs as {user_name(os.geteuid())}: "
            "choose another name, or run the server as that user"
        )


def last_generation_second(uri: PoolURI, backing: Backing) -> int:
    """The last second of which a pool that is about to be formatted holds a generation; 0 if it is no pool.

    Generations start at a second of the clock; a format within the same second, or after the clock was set back,
    must not repeat any, since clients of the old pool may still hold some."""
    try:
        geometry = read_geometry(uri, backing)
        meta = backing.map(0, geometry.off_data, writable=False)
    except PoolError:
        return 0
    drop_if_possible(meta)  # another host may have written them last
    end = geometry.off_generations + 8 * geometry.slot_count
    generations = meta[geometry.off_generations : end].view("<u8")
    incarnation = int(meta[BLOCK_BYTES : BLOCK_BYTES + 8].view("<u8")[0])
    seconds = (int(generations.max()) >> 32, incarnation // 1_000_000_000, geometry.created_ns // 1_000_000_000)
    # Damaged ones may say anything: none that was given lies beyond what a superblock can hold.
    return max(second for second in (*seconds, 0) if second < _SECOND_MAX)


def owner_text(block: bytes) -> str:
    if len(block) < BLOCK_BYTES:
        return ""
    fields = np.frombuffer(block, OWNER, 1)[0]
    data: bytes = fields["text"].tobytes()[: int(fields["length"])]
    if int(fields["length"]) > OWNER_TEXT_MAX or int(fields["check"]) != xxhash.xxh3_64_intdigest(data):
        return ""
    return data.decode(errors="replace")


def busy_error(uri: PoolURI, backing: Backing) -> PoolBusyError:
    drop_blocks(backing)  # another host may have written it
    try:
        owner = owner_text(backing.read(BLOCK_BYTES, BLOCK_BYTES))
    except PoolError:
        owner = ""
    return PoolBusyError(
        f"{uri}: it is served by {owner or 'another process, which has not said who it is'}: "
        "stop that server first, or use another pool"
    )
