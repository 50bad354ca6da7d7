"""Pages that an operator keeps from eviction: system prompts, few-shot examples, what must be there when it is asked for.

A pin is on one page and keeps all pages before it too (a guard on its row of the tree: eviction takes leaves only). Its
bytes are those of the whole path from the first page on, and pages that several pins share are counted once. They are
counted anew whenever a pin comes or goes; what is stored later on pinned pages (another component, say) shows then.

A pin is in the pool itself, as a flag in the records of the page, and so survives restarts. Deleting or clearing a page
ends its pin. At a start with a smaller budget than before, the pins of the longest paths end.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from maru_core.protocol import ErrorCode
from maru_server.directory import PoolDirectory, Slots
from maru_server.requests import RefusedError
from maru_server.tenants import Tenants
from maru_server.tree import PrefixTree, Rows


@dataclass(slots=True, eq=False)
class Pin:
    tree: PrefixTree
    row: int
    page: bytes


class Pins:
    """All pins of one server.

    Args:
        trees: by namespace number; looked at anew each time.
        offer: told of a row that may have become one to evict.
        budget: most bytes of the pool that may be pinned.
    """

    def __init__(
        self,
        directory: PoolDirectory,
        trees: Mapping[int, PrefixTree],
        tenants: Tenants,
        offer: Callable[[PrefixTree, int], None],
        budget: int,
    ) -> None:
        self._directory = directory
        self._trees = trees
        self._tenants = tenants
        self._offer = offer
        self.budget = budget
        #: Bytes of the pool that are pinned.
        self.nbytes = 0
        self._pins: dict[tuple[int, bytes], Pin] = {}  # by namespace and page

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, key: tuple[int, bytes]) -> bool:
        """Whether a page, by namespace and hash, is pinned."""
        return key in self._pins

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def pin(self, tree: PrefixTree, page: bytes) -> int:
        """Pin a page; returns how many bytes are pinned now. Repeating it changes nothing.

        Raises:
            RefusedError: the page is not stored, or the budget does not allow it.
        """
        key = (tree.number, page)
        if key in self._pins:
            return self.nbytes
        row = tree.row(page)
        if row is None or not tree.objects[row]:
            raise RefusedError(
                ErrorCode.INVALID, f"page {page.hex()} is not stored in namespace {tree.number}: pin one that is"
            )
        added = Pin(tree, row, page)
        nbytes = self._measure([*self._pins.values(), added])
        if nbytes > self.budget:
            raise RefusedError(
                ErrorCode.LIMIT,
                f"with page {page.hex()} and those before it, {nbytes} bytes would be pinned, and {self.budget} may be: unpin "
                "others, or have the server started with a higher --pin-share",
            )
        self._pins[key] = added
        tree.guard(row)
        self._directory.set_pinned(self._slots(added), True)
        self.nbytes = nbytes
        return nbytes

    def unpin(self, tree: PrefixTree, page: bytes) -> int:
        """End a pin; returns how many bytes are pinned now. One that is not there is no error."""
        pin = self._pins.pop((tree.number, page), None)
        if pin is not None:
            self._directory.set_pinned(self._slots(pin), False)
            tree.unguard(pin.row)
            self._offer(tree, pin.row)
            self.nbytes = self._measure(self._pins.values())
        return self.nbytes

    def removed(self, tree: PrefixTree) -> None:
        """Pages of this namespace were removed on demand: pins may have gone with them. To be called before any other
        page can take over their rows."""
        mine = [pin for (number, _), pin in self._pins.items() if number == tree.number]
        if not mine:
            return
        current = self._trees.get(tree.number)
        if current is tree:
            still = tree.find(b"".join([pin.page for pin in mine]), -1)
            mine = [mine[at] for at in np.flatnonzero(still != [pin.row for pin in mine]).tolist()]
        for pin in mine:
            del self._pins[pin.tree.number, pin.page]
        if mine:
            # Not otherwise: a page goes with all that continue it, so that the paths of pins that stay are whole.
            self.nbytes = self._measure(self._pins.values())

    def adopt(self, flagged: Mapping[int, Rows]) -> int:
        """Take over the pins of a former server: rows with a flag, by namespace. Returns how many had to end."""
        found = []
        for number, rows in flagged.items():
            tree = self._trees[number]
            found += [Pin(tree, row, tree.key(row)) for row in rows.tolist()]
        if self._measure(found) > self.budget:
            sizes = {pin: self._measure([pin]) for pin in found}
            found.sort(key=lambda pin: (sizes[pin], pin.tree.number, pin.page))
        paths = _Paths(self._tenants)
        ended = 0
        for pin in found:
            if paths.with_path(pin) > self.budget:
                self._directory.set_pinned(self._slots(pin), False)
                ended += 1
                continue
            paths.add(pin)
            self._pins[pin.tree.number, pin.page] = pin
            pin.tree.guard(pin.row)
        self.nbytes = paths.nbytes
        return ended

    def rows(self, namespaces: Container[int]) -> list[dict[str, Any]]:
        """One row a pin of these namespaces, for people: largest path first. ``pages`` and ``bytes`` are of the whole path, also where another pin
        shares it."""
        rows: list[dict[str, Any]] = []
        for pin in self._pins.values():
            if pin.tree.number not in namespaces:
                continue
            paths = _Paths(self._tenants)
            pages = paths.add(pin)
            rows.append(
                {
                    "namespace": pin.tree.number,
                    "tenant": pin.tree.tenant,
                    "page": pin.page.hex(),
                    "pages": pages,
                    "bytes": paths.nbytes,
                }
            )
        rows.sort(key=lambda row: (-row["bytes"], row["namespace"], row["page"]))
        return rows

    def _measure(self, pins: Iterable[Pin]) -> int:
        paths = _Paths(self._tenants)
        for pin in pins:
            paths.add(pin)
        return paths.nbytes

    @staticmethod
    def _slots(pin: Pin) -> Slots:
        """Committed slots and those being written: what is committed later has the flag too."""
        return pin.tree.slots_of(np.array([pin.row], np.int64))

    def check(self) -> dict[tuple[int, int], int]:
        """How many guards each (namespace, row) has from here, after comparing the pins with trees and pool."""
        for (number, page), pin in self._pins.items():
            assert pin.tree is self._trees[number], "a pin in a tree that is gone"
            assert pin.tree.row(page) == pin.row, "a pin on a page that is gone"
            assert self._directory.flags[self._slots(pin)].any(), "a pin that would not survive a restart"
        mine = {(number, pin.row) for (number, _), pin in self._pins.items()}
        for number, tree in self._trees.items():
            others = np.array([row for row in tree.used_rows().tolist() if (number, row) not in mine], np.int64)
            assert not self._directory.flags[tree.slots_of(others)].any(), "a flag without a pin"
        return dict.fromkeys(mine, 1)


class _Paths:
    """A union of paths from the first page of a chain, and the bytes that it takes of the pool."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._seen: dict[int, set[int]] = {}
        self.nbytes = 0

    def _new(self, pin: Pin) -> list[int]:
        seen = self._seen.setdefault(pin.tree.number, set())
        rows, row = [], pin.row
        while row >= 0 and row not in seen:
            rows.append(row)
            row = int(pin.tree.parent[row])
        return rows

    def _bytes(self, pin: Pin, rows: list[int]) -> int:
        return self._tenants.bytes_of(pin.tree.slots_of(np.array(rows, np.int64)))

    def with_path(self, pin: Pin) -> int:
        """What ``nbytes`` would be."""
        return self.nbytes + self._bytes(pin, self._new(pin))

    def add(self, pin: Pin) -> int:
        """Returns how many pages are new."""
        rows = self._new(pin)
        self.nbytes += self._bytes(pin, rows)
        self._seen[pin.tree.number].update(rows)
        return len(rows)
