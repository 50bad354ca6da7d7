"""The mapping of one pool: :meth:`PoolMemory.create` for its server, :meth:`PoolMemory.attach` for clients.

Opening a pool never destroys anything: what is not empty and not a Maru pool of this version is refused unless the
caller says ``format``. A new file is made complete and locked under no name, then gets its name in one step, so a
server that is killed meanwhile leaves nothing; formatting an existing file puts a new one in its place the same way,
so that processes that still map the old one keep their memory and harm nobody.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from maru_core.errors import (
    ClosedError,
    ConfigError,
    PoolBusyError,
    PoolError,
)
from maru_core.pool import numa
from maru_core.pool.backing import (
    PAGE,
    SYSFS,
    Backing,
    Bytes,
    DaxBacking,
    FileBacking,
    populate,
)
from maru_core.pool.coherence import Word, coherence_for
from maru_core.pool.format import (
    BLOCK_BYTES,
    COMPONENT,
    COMPONENT_BYTES,
    MAGIC,
    NAMESPACE,
    NAMESPACE_BYTES,
    OWNER,
    RECORD,
    RECORD_BYTES,
)
from maru_core.pool.geometry import Geometry
from maru_core.pool.newfile import NewFile
from maru_core.pool.opening import (
    OWNER_TEXT_MAX,
    agreed_coherence,
    agreed_size,
    busy_error,
    check_owner,
    last_generation_second,
    owner_text,
    plan_pool,
    provision_tables,
    read_geometry,
    required_size,
    supported,
)
from maru_core.pool.uri import PoolURI, format_size

#: A pool's path can change under us while we open it (another server makes, replaces or removes it): look again.
_ATTEMPTS: Final = 16
#: No incarnation is ever this high (nanoseconds since 1970, counted on): one that is was damaged.
_INCARNATION_MAX: Final = 1 << 63


class PoolMemory:
    """One mapped pool. Arrays taken from it stay valid after :meth:`close`; the memory goes with the last of them."""

    def __init__(self, uri: PoolURI, geometry: Geometry, meta: Bytes, data: Bytes, backing: Backing | None) -> None:
        self.uri = uri
        self.geometry = geometry
        #: What this process owes other hosts when it has written to the pool, and before it reads from it.
        self.coherence = coherence_for(geometry.coherence)
        self._meta: Bytes | None = meta
        self._data: Bytes | None = data
        self._data_address = int(data.ctypes.data)
        self._backing = backing  # the server's, with its lock; None on a client
        self._pid = os.getpid()

    # ------------------------------------------------------------ opening

    @classmethod
    def create(
        cls,
        uri: PoolURI | str,
        size: int | None = None,
        format: bool = False,
        *,
        turn: Callable[[], None] | None = None,
        sysfs: Path = SYSFS,
    ) -> PoolMemory:
        """Open a pool as its one server, or make it: metadata mapped read-write, the pool locked.

        A missing or empty file is made a pool. Anything else is opened if it is a Maru pool, and formatted only with
        ``format``. A dax device is formatted only with ``format``.

        Args:
            size: bytes; of a new pool, or what an existing one must have. None: as the URI says.
            turn: called when the pool's own lock is held and before anything of it is touched: returns when this server may
                (however long that takes), raises to give up. Called again where the file was replaced meanwhile.
            sysfs: where sysfs is mounted.
        Raises:
            ConfigError: sizes contradict each other, or a new pool has none.
            PoolBusyError: another server has it.
            NotAPoolError, PoolVersionError, PoolDamagedError: what is there was not touched.
            PoolTooSmallError, PoolError: cannot be made or mapped.
        """
        uri = supported(uri)
        numa.check_node(uri, sysfs)
        wanted = agreed_size(uri, size)
        for _ in range(_ATTEMPTS):
            backing: Backing
            try:
                if uri.scheme == "dax":
                    backing = DaxBacking.open(uri, writable=True, sysfs=sysfs)
                else:
                    backing = FileBacking.open(uri, writable=True)
            except FileNotFoundError:
                try:
                    if turn is not None:
                        turn()
                    return cls._new_file(uri, wanted, replace=False)
                except FileExistsError:
                    continue
            try:
                if not backing.lock():
                    raise busy_error(uri, backing)
                if turn is not None:
                    turn()
                if backing.still_there():
                    return cls._open_locked(uri, backing, wanted, format)
            except BaseException:
                backing.close()
                raise
            backing.close()
        raise PoolBusyError(f"{uri}: other servers keep making and removing it: give each server a pool of its own")

    @classmethod
    def attach(cls, uri: PoolURI | str, expected_uuid: bytes | None = None, *, sysfs: Path = SYSFS) -> PoolMemory:
        """Map a pool as a client: metadata read-only (by the kernel, not by courtesy), data read-write.

        Only the superblock says what the pool is like; ``size`` in the URI is for making one and is not looked at.

        Args:
            uri: how this host reaches the pool; names differ from host to host.
            expected_uuid: the pool's identity as its server told it.
        Raises:
            PoolError: missing, not permitted, another pool, not a pool, or shorter than its superblock says.
        """
        uri = supported(uri)
        with contextlib.ExitStack() as stack:
            sides: list[Backing] = []
            # Two descriptors: a mapping of one that is open for reading only cannot be made writable later.
            for writable in (False, True):
                side: Backing
                try:
                    if uri.scheme == "dax":
                        side = DaxBacking.open(uri, writable=writable, sysfs=sysfs)
                    else:
                        side = FileBacking.open(uri, writable=writable)
                except FileNotFoundError as error:
                    raise PoolError(
                        f"{uri}: there is no {uri.path}: is its server running, on this machine, with this pool?"
                    ) from error
                stack.callback(side.close)
                sides.append(side)
            read_only, read_write = sides
            geometry = read_geometry(uri, read_only)
            agreed_coherence(uri, geometry)
            if expected_uuid is not None and geometry.pool_uuid != expected_uuid:
                raise PoolError(
                    f"{uri}: this is pool {uuid.UUID(bytes=geometry.pool_uuid)}, the server's is "
                    f"{uuid.UUID(bytes=expected_uuid)}: name the path by which this host reaches the server's pool"
                )
            read_only.note_use()
            meta = read_only.map(0, geometry.off_data, writable=False)
            # The file may have been replaced between the two opens: both must show the same pool.
            if Geometry.read(read_write.read(0, BLOCK_BYTES)) != geometry:
                raise PoolError(f"{uri}: it was formatted at this moment: attach again")
            data = read_write.map(geometry.off_data, geometry.data_bytes, writable=True)
            memory = cls(uri, geometry, meta, data, None)
            memory._drop_tables()
            return memory

    @classmethod
    def _open_locked(cls, uri: PoolURI, backing: Backing, wanted: int | None, format: bool) -> PoolMemory:
        if isinstance(backing, FileBacking):
            check_owner(uri, backing)
            if backing.capacity() == 0:
                return cls._format_empty_file(uri, backing, wanted)
        if not format:
            geometry = read_geometry(uri, backing)
            agreed_coherence(uri, geometry)
            if isinstance(backing, FileBacking):
                os.fchmod(backing.descriptor, uri.mode)  # the server's URI says who may take part, at each start
            numa.bind(uri, backing, geometry.pool_bytes)
            # Holes of the tables would raise SIGBUS on a full tmpfs, in clients too, which only read them.
            provision_tables(uri, backing, geometry)
            meta = backing.map(0, geometry.off_data, writable=True)
            data = backing.map(geometry.off_data, geometry.data_bytes, writable=True)
            memory = cls(uri, geometry, meta, data, backing)
            memory._check_wanted(wanted)
            # Another host may have served the pool before: what this one's caches hold of the tables may be older. The lock is
            # held, so nobody writes to them any more.
            memory._drop_tables()
            return memory
        after = last_generation_second(uri, backing) + 1
        if isinstance(backing, FileBacking):
            memory = cls._new_file(uri, wanted or backing.capacity(), replace=True, after=after)
            backing.close()
            return memory
        geometry = plan_pool(uri, wanted or backing.capacity(), backing.grain, after)
        if geometry.pool_bytes > backing.capacity():
            raise ConfigError(
                f"{uri}: size={format_size(geometry.pool_bytes)} is more than the {backing.capacity()} bytes "
                f"of {uri.path}: leave the size out to use all of it"
            )
        return cls._formatted(uri, geometry, backing, zeroed=False)

    @classmethod
    def _new_file(cls, uri: PoolURI, wanted: int | None, *, replace: bool, after: int = 0) -> PoolMemory:
        """Make a whole pool under no name, then give it the pool's.

        Raises:
            FileExistsError: the name was taken meanwhile (not with ``replace``).
        """
        geometry = plan_pool(uri, required_size(uri, wanted), PAGE, after)
        with NewFile(uri) as file:
            memory = cls._grown(uri, geometry, file.backing)
            file.publish(replace=replace)
            return memory

    @classmethod
    def _format_empty_file(cls, uri: PoolURI, backing: FileBacking, wanted: int | None) -> PoolMemory:
        geometry = plan_pool(uri, required_size(uri, wanted), PAGE, 0)
        os.fchmod(backing.descriptor, uri.mode)
        try:
            return cls._grown(uri, geometry, backing)
        except BaseException:
            os.ftruncate(backing.descriptor, 0)  # it was empty: leave it so, or the next start finds it foreign
            raise

    @classmethod
    def _grown(cls, uri: PoolURI, geometry: Geometry, backing: FileBacking) -> PoolMemory:
        """A pool in a file that is empty so far."""
        try:
            os.ftruncate(backing.descriptor, geometry.pool_bytes)
        except OSError as error:
            raise PoolError(
                f"{uri}: the file system refuses a file of {format_size(geometry.pool_bytes)} "
                f"({error.strerror}): make the pool smaller"
            ) from error
        numa.bind(uri, backing, geometry.pool_bytes)  # before its first page
        provision_tables(uri, backing, geometry)
        return cls._formatted(uri, geometry, backing, zeroed=True)

    @classmethod
    def _formatted(cls, uri: PoolURI, geometry: Geometry, backing: Backing, *, zeroed: bool) -> PoolMemory:
        """Write all tables, then the superblock, its magic last: until then it is no pool, to nobody."""
        meta = backing.map(0, geometry.off_data, writable=True)
        data = backing.map(geometry.off_data, geometry.data_bytes, writable=True)
        memory = cls(uri, geometry, meta, data, backing)
        if not zeroed:
            meta[:BLOCK_BYTES] = 0
            memory._written(0, BLOCK_BYTES)  # no pool any more, before its tables go
            meta[BLOCK_BYTES:] = 0
        memory.generations[:] = geometry.created_ns // 1_000_000_000 << 32
        # From the time, as generations, but to the nanosecond: where one endpoint serves one new pool after another, a
        # client of the first, who still maps it, must not take the server of the second for its own.
        memory._owner_block["incarnation"] = geometry.created_ns
        block = np.frombuffer(geometry.superblock(), np.uint8)
        meta[len(MAGIC) : BLOCK_BYTES] = block[len(MAGIC) :]
        memory._written(0, geometry.off_data)  # all of it is in memory before the magic may be
        meta[: len(MAGIC)].view("<u8")[0] = block[: len(MAGIC)].view("<u8")[0]
        memory._written(0, len(MAGIC))
        return memory

    def _check_wanted(self, wanted: int | None) -> None:
        """An existing pool must be what was asked for; nothing is resized or cut anew in silence."""
        geometry = self.geometry
        for key, value, actual in (
            ("size", wanted, geometry.pool_bytes),
            ("extent", self.uri.extent, geometry.extent_bytes),
            ("min_slot", self.uri.min_slot, geometry.min_slot_bytes),
            ("align", self.uri.align, geometry.align),
        ):
            if value is not None and value != actual:
                raise ConfigError(
                    f"{self.uri}: {key}={format_size(value)} was asked for, the existing pool has "
                    f"{key}={format_size(actual)}: leave {key} out, or format the pool anew (--format; its contents are lost)"
                )

    # ------------------------------------------------------------ memory

    @property
    def meta(self) -> Bytes:
        """Everything before the extents, ``[0, off_data)``; not writeable on a client."""
        if self._meta is None:
            raise ClosedError(f"the mapping of {self.uri} was closed: attach again")
        return self._meta

    @property
    def data(self) -> Bytes:
        """All extents: byte 0 is ``off_data``."""
        if self._data is None:
            raise ClosedError(f"the mapping of {self.uri} was closed: attach again")
        return self._data

    @property
    def closed(self) -> bool:
        return self._data is None

    @property
    def data_address(self) -> int:
        """Address of byte ``off_data`` in this process."""
        if self._data is None:
            raise ClosedError(f"the mapping of {self.uri} was closed: attach again")
        return self._data_address

    def address_of(self, offset_in_pool: int) -> int:
        """Address of a byte of the data region.

        Raises:
            PoolError: the offset is not in an extent.
        """
        relative = offset_in_pool - self.geometry.off_data
        if not 0 <= relative < self.geometry.data_bytes:
            raise PoolError(f"{self.uri}: offset {offset_in_pool} is not in the pool's extents")
        return self.data_address + relative

    @property
    def generations(self) -> npt.NDArray[np.uint64]:
        """u64 per slot, shape ``(slot_count,)``."""
        return self._table(self.geometry.off_generations, 8, self.geometry.slot_count, np.dtype("<u8"))

    @property
    def directory(self) -> npt.NDArray[np.void]:
        """:data:`~maru_core.pool.format.RECORD` per slot, shape ``(slot_count,)``."""
        return self._table(self.geometry.off_directory, RECORD_BYTES, self.geometry.slot_count, RECORD)

    @property
    def extents(self) -> npt.NDArray[np.uint64]:
        """u64 per extent, its slot size, as the server has cut them by now; shape ``(extent_count,)``."""
        self._fresh(self.geometry.off_extents, 8 * self.geometry.extent_count)
        return self._table(self.geometry.off_extents, 8, self.geometry.extent_count, np.dtype("<u8"))

    @property
    def components(self) -> npt.NDArray[np.void]:
        """:data:`~maru_core.pool.format.COMPONENT` entries, shape ``(component_capacity,)``."""
        geometry = self.geometry
        return self._table(geometry.off_components, COMPONENT_BYTES, geometry.component_capacity, COMPONENT)

    @property
    def namespaces(self) -> npt.NDArray[np.void]:
        """:data:`~maru_core.pool.format.NAMESPACE` entries, shape ``(namespace_capacity,)``."""
        geometry = self.geometry
        return self._table(geometry.off_namespaces, NAMESPACE_BYTES, geometry.namespace_capacity, NAMESPACE)

    def _table(self, offset: int, item_bytes: int, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        return self.meta[offset : offset + item_bytes * count].view(dtype)

    def _written(self, offset: int, nbytes: int) -> None:
        """Server: what was stored in these bytes before the extents is in memory when this returns, before any store after."""
        if self.coherence.software:
            self.coherence.write_back(int(self.meta.ctypes.data) + offset, nbytes)

    def _fresh(self, offset: int, nbytes: int) -> None:
        """What is read of these bytes before the extents after this is what was in memory then, or later."""
        if self.coherence.software:
            self.coherence.invalidate(int(self.meta.ctypes.data) + offset, nbytes)

    def _drop_tables(self) -> None:
        self._fresh(0, self.geometry.off_data)

    def provision(self, extent: int) -> bool:
        """Server: put memory behind an extent before any slot of it is given out. False: none is left.

        Blocks for about a millisecond per 4 MiB the first time, without the GIL; quick when it was done before.
        """
        if self._backing is None:
            raise PoolError(f"{self.uri}: only the pool's server provisions extents")
        offset, length = self._extent(extent)
        return self._backing.provision(self.geometry.off_data + offset, length)

    def populate(self, extent: int) -> bool:
        """Client: fill this process's page tables for an extent that was provisioned, so that the first copy does
        not pay for it. From a background thread; the GIL is released. False where the kernel cannot."""
        offset, length = self._extent(extent)
        keep = self.data  # the mapping outlives the call even if another thread closes this object
        return populate(int(keep.ctypes.data) + offset, length)

    def _extent(self, extent: int) -> tuple[int, int]:
        if not 0 <= extent < self.geometry.extent_count:
            raise ValueError(f"extent {extent} is not in a pool of {self.geometry.extent_count} extents")
        return extent * self.geometry.extent_bytes, self.geometry.extent_bytes

    # ------------------------------------------------------------ owner block

    @property
    def _owner_block(self) -> npt.NDArray[np.void]:
        return self._table(BLOCK_BYTES, BLOCK_BYTES, 1, OWNER)

    @property
    def incarnation(self) -> int:
        """How often the pool has been served; never goes back, also over a format."""
        self._fresh(BLOCK_BYTES, 8)
        return int(self._owner_block["incarnation"][0])

    def bump_incarnation(self) -> int:
        """Server: begin a new life of the pool; the number that stands for it."""
        value = self.incarnation + 1
        if not self.geometry.created_ns < value < _INCARNATION_MAX:
            # Damaged: it has no check of its own. Later than any that was ever told, as with a format.
            value = max(self.geometry.created_ns, time.time_ns()) + 1
        self._owner_block["incarnation"] = value
        self._written(BLOCK_BYTES, 8)
        return value

    def changes(self) -> tuple[int, int]:
        """Incarnation, and the count that its server raises with all that becomes findable or is removed."""
        block = self._owner_block
        self._fresh(BLOCK_BYTES, 8)
        self._fresh(2 * BLOCK_BYTES - 8, 8)
        return int(block["incarnation"][0]), int(block["changes"][0])

    def incarnation_word(self) -> Word:
        """The incarnation in the memory itself: element 0, as cheap to read as anything, whoever changes it."""
        return self.coherence.word(self.meta[BLOCK_BYTES : BLOCK_BYTES + 8].view("<u8").data)

    def set_owner(self, text: str) -> None:
        """Server: say who serves the pool, for people (and for the error of a second server)."""
        data = text.encode()[:OWNER_TEXT_MAX]
        block = self._owner_block
        block["check"] = 0  # nobody believes it meanwhile
        self._written(BLOCK_BYTES, BLOCK_BYTES)
        block["text"] = np.void(data.ljust(OWNER_TEXT_MAX, b"\0"))
        block["length"] = len(data)
        self._written(BLOCK_BYTES, BLOCK_BYTES)
        block["check"] = xxhash.xxh3_64_intdigest(data)
        self._written(BLOCK_BYTES, BLOCK_BYTES)

    def owner(self) -> str:
        """What :meth:`set_owner` said last; empty if nothing."""
        self._fresh(BLOCK_BYTES, BLOCK_BYTES)
        return owner_text(self.meta[BLOCK_BYTES : 2 * BLOCK_BYTES].tobytes())

    # ------------------------------------------------------------ leaving

    def still_there(self) -> bool:
        """Server: whether the pool's path still names it, so that others can find it."""
        return self._backing is not None and self._backing.still_there()

    def unlink(self) -> None:
        """Server: remove the pool's file if the path still names it. A device is left as it is."""
        if isinstance(self._backing, FileBacking) and self.still_there():
            os.unlink(self.uri.path if self.uri.scheme == "shm" else os.path.realpath(self.uri.path))

    def close(self) -> None:
        """Let go of the mapping and, on the server, of the lock. Safe to repeat, and while others still copy:
        whoever holds an array keeps the memory mapped."""
        self._meta = self._data = None
        backing, self._backing = self._backing, None
        if backing is not None:
            # A forked child shares the lock with its parent and must not release it.
            if os.getpid() == self._pid:
                backing.unlock()
            backing.close()

    def __enter__(self) -> PoolMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
