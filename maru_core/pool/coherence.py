"""Memory whose hosts' caches do not agree by themselves: what a process writes back, what it drops, and when.

One host, and CXL 3 with back-invalidation, need none of it: there :data:`HARDWARE` stands, whose methods do nothing, and who
is in a hurry asks :attr:`Coherence.software` once a call. Memory that hosts share through a CXL 2 switch is a pool with
``coherence=software``. Of such memory each host may hold a line for as long as it likes, and may take it in or let go of it
at any moment by itself. So

- a **writer** writes its lines back before anyone is told (commit, a reply, the next store that rests on this one);
- a **reader** drops its lines after it was told and before it reads, slots and tables alike.

Only lines are shared, never bytes: two writers on two hosts must not write into one line. Slots are multiples of 4096 bytes,
and the tables have one writer.

What this cannot do: a host that dies, or a writer that is killed, between its store and the write-back leaves lines that its
cache writes back whenever it likes, perhaps over what another host has written there since. Checksums (``verify=checksum``) find
that, and nothing else does.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from maru_core.errors import ConfigError
from maru_core.pool.format import COHERENCE_SOFTWARE

try:
    from maru_core import _coherence
except ImportError:  # installed without a compiler, or for a CPU that is not known
    _coherence = None  # type: ignore[assignment]

U64 = npt.NDArray[np.uint64]


class Word(Protocol):
    """One number in the pool: element 0."""

    def __getitem__(self, index: int, /) -> int: ...


class Coherence:
    """What hosts with caches that agree need: nothing. Also the interface.

    Addresses are of this process, ranges may begin and end anywhere; all lines that hold a byte of them are meant. Whoever
    writes back a range must be the only one who writes to its lines. The GIL is not held meanwhile."""

    #: Whether any of the methods does anything.
    software: bool = False

    def write_back(self, address: int, nbytes: int) -> None:
        """When it returns, what was stored in the range is in memory, before any store that follows."""

    def write_back_many(self, addresses: U64, nbytes: int) -> None:
        """The same for many ranges of ``nbytes`` each; shape ``(n,)``. One fence for all: among them there is no order."""

    def invalidate(self, address: int, nbytes: int) -> None:
        """When it returns, a load from the range is a load from memory, made after every load before the call.

        Lines that this host has written and not written back go to memory first."""

    def invalidate_many(self, addresses: U64, nbytes: int) -> None:
        """The same for many ranges of ``nbytes`` each; shape ``(n,)``."""

    def word(self, items: memoryview) -> Word:
        """Element 0 of ``items`` (u64) as it is in memory at each look."""
        return items


class SoftwareCoherence(Coherence):
    """By the CPU's instructions.

    Args:
        clean: that writes back; None: the best this CPU has.
        drop: that invalidates, None likewise. Never CLWB, which may keep the line that another host has changed.
    Raises:
        ConfigError: this installation or this CPU cannot.
    """

    software = True

    def __init__(self, clean: str | None = None, drop: str | None = None) -> None:
        if _coherence is None:
            raise ConfigError(
                "coherence=software needs the compiled helper maru_core._coherence, which this installation does not have: "
                "install Maru where a C compiler is (apt install gcc), on x86-64 or aarch64"
            )
        self.clean = _chosen("write back", clean, _coherence.CLEANING)
        self.drop = _chosen("invalidate", drop, _coherence.DROPPING)
        # In an attribute, so that a test can put itself between and see every line and every fence.
        self._cpu = _coherence

    @staticmethod
    def possible() -> bool:
        """Whether this installation and this CPU can."""
        return _coherence is not None and bool(_coherence.CLEANING) and bool(_coherence.DROPPING)

    def write_back(self, address: int, nbytes: int) -> None:
        # A line is written back after the stores to it before, without a fence: the CPU orders those two. (Stores around
        # the cache, which a mover makes, are followed by a fence of the thread that made them.)
        self._cpu.lines(self.clean, address, nbytes)
        # CLWB and CLFLUSHOPT are not ordered with stores to other lines. Without this fence a store that says "it is there"
        # may reach memory before what it speaks of.
        self._cpu.store_fence()

    def write_back_many(self, addresses: U64, nbytes: int) -> None:
        self._cpu.lines_many(self.clean, np.ascontiguousarray(addresses), nbytes)
        self._cpu.store_fence()  # as in write_back

    def invalidate(self, address: int, nbytes: int) -> None:
        # CLFLUSHOPT is not ordered with loads. Without this fence the line may be dropped, and taken in again by a guess of
        # the CPU, before loads that stand above: a generation would be older than the copy that it is to prove.
        self._cpu.full_fence()
        self._cpu.lines(self.drop, address, nbytes)
        # Without this one the loads that follow may be served by the lines that are being dropped.
        self._cpu.full_fence()

    def invalidate_many(self, addresses: U64, nbytes: int) -> None:
        self._cpu.full_fence()  # as in invalidate
        self._cpu.lines_many(self.drop, np.ascontiguousarray(addresses), nbytes)
        self._cpu.full_fence()

    def word(self, items: memoryview) -> Word:
        return _FreshWord(self, items)

    def __str__(self) -> str:
        return f"write back with {self.clean}, invalidate with {self.drop}, lines of {_coherence.LINE_BYTES} bytes"


class _FreshWord:
    """A number that another host may change."""

    def __init__(self, coherence: Coherence, items: memoryview) -> None:
        self._coherence = coherence
        self._items = items
        self._address = int(np.frombuffer(items, np.uint64).ctypes.data)

    def __getitem__(self, index: int, /) -> int:
        self._coherence.invalidate(self._address, 8)
        value: int = self._items[index]
        return value


#: For pools of which the hosts' caches take care themselves.
HARDWARE: Final = Coherence()


def coherence_for(kind: int) -> Coherence:
    """What a pool of this kind (``COHERENCE_…`` of its superblock) needs.

    Raises:
        ConfigError: it needs what this installation or this CPU does not have.
    """
    return SoftwareCoherence() if kind == COHERENCE_SOFTWARE else HARDWARE


def drop_if_possible(memory: npt.NDArray[np.uint8]) -> None:
    """Drop the lines of bytes of which nobody can say yet whether caches agree on them: those that say so."""
    if SoftwareCoherence.possible():
        SoftwareCoherence().invalidate(int(memory.ctypes.data), memory.nbytes)


def _chosen(what: str, name: str | None, here: tuple[str, ...]) -> str:
    if not here or (name is not None and name not in here):
        raise ConfigError(
            f"coherence=software: this CPU (or its kernel or hypervisor) lets no program {what} cache lines"
            f"{f' with {name}' if name is not None and here else ''}; it has {', '.join(here) or 'no instruction for that'}: "
            "use a pool that is coherent in hardware here"
        )
    return here[0] if name is None else name
