"""What became of pages that are gone: a bounded memory of fingerprints, so that a miss can be given its reason.

One table per server, indexed by the page hash itself (which is uniformly distributed), mixed with the namespace that it
went from: what is told of one namespace says nothing of another, which may be another tenant's. A newer page takes the
place of an older one with the same index. Nine bytes an entry, no object per page; adding and asking are one numpy
operation a batch. It is a hint for people and policies, never what makes an answer right.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from maru_core.protocol import HASH_BYTES

try:
    from maru_server import _store
except ImportError:  # built without a compiler
    _store = None  # type: ignore[assignment]

#: Bits of a note that hold the reason, a :class:`maru_core.protocol.MissReason`. Those above it: how often the page was used
#: again while it was there, as ``uses.bit_length()``.
REASON_BITS: Final = 3
REASON_MASK: Final = (1 << REASON_BITS) - 1
_MIN: Final = 1 << 10
_MAX: Final = 1 << 20
_WORD: Final = (1 << 64) - 1
#: Spreads namespace numbers over a word: 2**64 divided by the golden ratio, odd.
_SPREAD: Final = 0x9E3779B97F4A7C15

_U64 = npt.NDArray[np.uint64]


class Ghosts:
    """Args:
    pages: how many should be remembered, roughly; rounded up to a power of two.
    """

    def __init__(self, pages: int) -> None:
        self.capacity = 1 << (min(max(pages, _MIN), _MAX) - 1).bit_length()
        #: Nothing was ever added.
        self.empty = True
        self._mask = np.uint64(self.capacity - 1)
        self._prints = np.zeros(self.capacity, np.uint64)  # zeroed memory costs nothing until it is used
        self._notes = np.zeros(self.capacity, np.uint8)

    def memory_bytes(self) -> int:
        """Memory of the table, once anything was added."""
        return 0 if self.empty else self._prints.nbytes + self._notes.nbytes

    def _places(self, namespace: int, hashes: bytes) -> tuple[_U64, _U64]:
        """Index and fingerprint of each of the packed page hashes."""
        words = np.frombuffer(hashes, "<u8").reshape(-1, HASH_BYTES // 8)
        salt = np.uint64(_salt(namespace))
        return (words[:, 0] ^ salt) & self._mask, words[:, 1] ^ salt

    def add(self, namespace: int, hashes: bytes, note: int | npt.NDArray[np.uint8]) -> None:
        """Remember packed page hashes that went from a namespace, with a note from 1 to 255."""
        at, prints = self._places(namespace, hashes)
        self._prints[at] = prints
        self._notes[at] = note
        self.empty = False

    def notes(self, namespace: int, hashes: bytes) -> npt.NDArray[np.uint8]:
        """The note of each of the packed page hashes, 0 where none is remembered."""
        at, prints = self._places(namespace, hashes)
        return np.where(self._prints[at] == prints, self._notes[at], 0).astype(np.uint8)

    def remembers(self, namespace: int, hashes: bytes) -> bool:
        """Whether there is a note of any of the packed page hashes. Asked at every store: most pages are new."""
        if self.empty:
            return False
        if _store is None:
            return bool(self.notes(namespace, hashes).any())
        return _store.remembered(self._prints, self._notes, _salt(namespace), hashes) > 0

    def note(self, namespace: int, page: bytes) -> int:
        """The note of one page hash, 0 if none is remembered."""
        salt = _salt(namespace)
        at = (int.from_bytes(page[:8], "little") ^ salt) & (self.capacity - 1)
        return int(self._notes[at]) if int(self._prints[at]) == int.from_bytes(page[8:16], "little") ^ salt else 0

    def forget(self, namespace: int, hashes: bytes) -> None:
        """These pages are stored again."""
        at, prints = self._places(namespace, hashes)
        same = self._prints[at] == prints
        self._notes[at[same]] = 0


def _salt(namespace: int) -> int:
    return (namespace + 1) * _SPREAD & _WORD
