"""What must be true, known independently of the code under test.

Content: every word of an object's bytes says which put wrote it and where in the object it belongs, so that any mixture of
two writers, two objects or two lives shows. The model: which objects are stored, learned only from what the server was asked,
what it answered, and which slots its directory freed. From it follow what each match may say, what a restart must find again,
and what a reader may still get.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from sim_kernel import Kernel, Violation

from maru_core.pool.format import COMMITTED, FREE, RESERVED
from maru_core.protocol import (
    HASH_BYTES,
    NO_SLOT,
    Clear,
    Commit,
    CommitStatus,
    Committed,
    Delete,
    Done,
    Goodbye,
    Located,
    Match,
    NamespaceOpened,
    OpenNamespace,
    Pin,
    Reply,
    Request,
    Reserve,
    Reserved,
    ReserveStatus,
    Unhold,
    Unpin,
)
from maru_server.directory import PoolDirectory
from maru_server.state import ServerState

_INDEX_BITS = 16


class Key(NamedTuple):
    """Whose bytes these are."""

    namespace: bytes  # the record
    page: bytes
    component: str
    shard: int


@dataclass(eq=False)
class Written:
    """One put of one page. ``nonce`` is in each of its words."""

    nonce: int
    key: Key
    nbytes: int


@dataclass(eq=False)
class Stored:
    """One object in one slot, from its reservation on."""

    key: Key
    slot: int
    generation: int
    nbytes: int
    world: int
    parent: bytes
    session: int
    told: bool = False  # the reservation was answered
    freeing: bool = False
    committed: bool = False  # the server said so, or a restart found it
    gone_at: float | None = None
    nonce: int | None = None  # whose bytes lie there, looked at when it was committed


@dataclass(eq=False)
class Held:
    """What a match with a hold was told is kept: these pages, until then on the server's clock, and for these sessions."""

    namespace: bytes
    pages: set[bytes]
    until: float
    sessions: set[int]


def content(written: Written) -> np.ndarray:
    """The bytes of one object."""
    words = np.arange(-(-written.nbytes // 8), dtype=np.uint64) + np.uint64(written.nonce << _INDEX_BITS)
    return words.view(np.uint8)[: written.nbytes]


@dataclass
class Checker:
    kernel: Kernel
    written: dict[int, Written] = field(default_factory=dict)
    by_nonce: dict[int, list[Stored]] = field(default_factory=dict)
    slots: dict[int, Stored] = field(default_factory=dict)  # what each slot holds or is reserved for
    live: dict[Key, Stored] = field(default_factory=dict)  # committed and not gone
    ever: set[Key] = field(default_factory=set)
    namespaces: dict[int, bytes] = field(default_factory=dict)  # number -> record, of the present server
    checks: int = 0

    def __post_init__(self) -> None:
        self._nonces = 0
        self.pins: dict[tuple[bytes, bytes], set[bytes]] = {}  # (namespace, page) -> it and the pages before it
        self.doing = ""  # what the server is about: the message's type, or tick
        self.holds: dict[bytes, Held] = {}  # by request id
        self._went: set[tuple[bytes, bytes]] = set()  # pages that lost objects since the last look

    def fail(self, kind: str, message: str) -> None:
        self.kernel.fail(Violation(kind, message))

    # ------------------------------------------------------------ bytes

    def write(self, key: Key, nbytes: int) -> Written:
        """Someone is about to put this."""
        self._nonces += 1
        written = self.written[self._nonces] = Written(self._nonces, key, nbytes)
        return written

    def whose(self, data: np.ndarray) -> Written | None:
        """The one put that wrote all of these bytes, None if there is none."""
        nonce = int(data[:8].view("<u8")[0]) >> _INDEX_BITS
        written = self.written.get(nonce)
        if written is None or written.nbytes != len(data) or not np.array_equal(content(written), data):
            return None
        return written

    def describe(self, data: np.ndarray) -> str:
        """For people: which writers' words these are."""
        words = data[: len(data) // 8 * 8].view("<u8")
        found = []
        for word in words.tolist():
            nonce = word >> _INDEX_BITS
            if not found or found[-1] != nonce:
                found.append(nonce)
        return ", ".join(
            f"#{nonce} of {show(self.written[nonce].key)}" if nonce in self.written else "garbage"
            for nonce in found[:6]
        )

    def loaded(self, key: Key, data: np.ndarray, since: float, who: str) -> None:
        """A reader was told that this is the object; its call began at ``since``."""
        self.checks += 1
        written = self.whose(data)
        if written is None:
            self.fail(
                "wrong bytes", f"{who} got {len(data)} bytes for {show(key)} that nobody put: {self.describe(data)}"
            )
            return
        if written.key != key:
            self.fail("wrong bytes", f"{who} asked for {show(key)} and got the bytes of {show(written.key)}")
        stored = self.by_nonce.get(written.nonce, [])
        if not stored:
            self.fail("not committed", f"{who} got #{written.nonce} of {show(key)}, which was never committed")
        if all(one.gone_at is not None and one.gone_at < since for one in stored):
            self.fail("stale", f"{who} got #{written.nonce} of {show(key)}, which was gone before it asked")

    def acknowledged(self, key: Key, who: str) -> None:
        """A writer was told that the object is stored."""
        self.checks += 1
        if key not in self.ever:
            self.fail("not committed", f"{who} was told that {show(key)} is stored, and it never was")

    # ------------------------------------------------------------ what the server said

    def about_to(self, message: Request) -> None:
        """The server begins to handle a message."""
        self.doing = type(message).__name__
        if isinstance(message, Unhold):
            self.holds.pop(message.request, None)
        elif isinstance(message, Goodbye):
            self.session_over(message.session)
        elif isinstance(message, Unpin):
            self.pins.pop((self.namespaces[message.namespace], message.page), None)

    def session_over(self, session: int) -> None:
        for request in [request for request, held in self.holds.items() if session in held.sessions]:
            del self.holds[request]

    def answered(self, message: Request, reply: Reply | None, server: Server, now: float) -> None:
        """The server has handled a message, and has not yet sent the reply."""
        if isinstance(reply, NamespaceOpened) and isinstance(message, OpenNamespace):
            self.namespaces[reply.namespace] = message.record
        elif isinstance(reply, Reserved) and isinstance(message, Reserve):
            self._reserved(message, reply)
        elif isinstance(reply, Committed) and isinstance(message, Commit):
            self._committed(message, reply, server)
        elif isinstance(reply, Located) and isinstance(message, Match):
            self._located(message, reply)
            if message.hold is not None and reply.held_s:
                self._held(message, reply, now)
        elif isinstance(reply, Done) and isinstance(message, Delete | Clear):
            self._removed(message)
        elif isinstance(reply, Done) and isinstance(message, Pin):
            self._pinned(self.namespaces[message.namespace], message.page)

    def sent(self, reply: Reply) -> None:
        """The reply is on its way: what it says holds from now on, whatever becomes of the server."""
        if isinstance(reply, Reserved):
            for slot in np.frombuffer(reply.slots, "<u4").tolist():
                if slot in self.slots:
                    self.slots[slot].told = True

    def damage(self, server: Server) -> None:
        """A bit of some stored object's record flips while no server runs. Nobody may believe that record."""
        random = self.kernel.random
        if not self.live:
            return
        stored = random.choice(list(self.live.values()))
        words = server.directory.words[stored.slot]
        # Not what no check covers: the state, flags and the last use.
        word, bit = random.choice(
            [(0, 32), (0, 48), (1, 32), (2, 3), (3, 1), (4, 7), (7, 63), (8, 7), (11, 60), (12, 5), (14, 2), (15, 9)]
        )
        words[word] ^= np.uint64(1 << bit)
        del self.live[stored.key]
        self.pins.clear()  # the pin may have been in that record
        self.kernel.log(None, f"damaged word {word} of the record of slot {stored.slot}")

    def _reserved(self, message: Reserve, reply: Reserved) -> None:
        slots, generations = (
            np.frombuffer(reply.slots, "<u4").tolist(),
            np.frombuffer(reply.generations, "<u8").tolist(),
        )
        before = message.parent
        for index, status in enumerate(reply.status):
            page = message.hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]
            key = Key(self.namespaces[message.namespace], page, message.component, message.shard)
            if status == ReserveStatus.RESERVED:
                old = self.slots.get(slots[index])
                if old is not None:
                    self.fail(
                        "given twice", f"slot {slots[index]} is given for {show(key)} and still holds {show(old.key)}"
                    )
                self.slots[slots[index]] = Stored(
                    key, slots[index], generations[index], message.nbytes, message.world, before, message.session
                )
            elif (status == ReserveStatus.EXISTS) != (key in self.live) and status != ReserveStatus.CONFLICT:
                self.fail(
                    "lost", f"{show(key)} is {'stored' if key in self.live else 'not stored'}, a reserve says {status}"
                )
            before = page

    def _committed(self, message: Commit, reply: Committed, server: Server) -> None:
        slots, generations = (
            np.frombuffer(message.slots, "<u4").tolist(),
            np.frombuffer(message.generations, "<u8").tolist(),
        )
        for slot, generation, status in zip(slots, generations, reply.status, strict=True):
            if status != CommitStatus.COMMITTED:
                continue
            stored = self.slots.get(slot)
            if stored is None or stored.generation != generation or stored.session != message.session:
                self.fail("lost accepted", f"a commit of slot {slot} was accepted, which is not the sender's any more")
                return
            if not stored.committed:
                self._store(stored)
                self.audit_slot(stored, server)

    def _store(self, stored: Stored) -> None:
        if stored.key in self.live:
            self.fail(
                "stored twice", f"{show(stored.key)} lies in slots {self.live[stored.key].slot} and {stored.slot}"
            )
        stored.committed = True
        self.live[stored.key] = stored
        self.ever.add(stored.key)

    def _removed(self, message: Delete | Clear) -> None:
        record = None if message.namespace is None else self.namespaces[message.namespace]
        self.holds.clear()  # those on what was removed are over
        self.pins.clear()
        for key in self.live:
            if record not in (None, key.namespace):
                continue
            at = message.hashes.find(key.page) if isinstance(message, Delete) else 0
            if at >= 0 and at % HASH_BYTES == 0:
                self.fail("not removed", f"{show(key)} is still stored after {type(message).__name__}")

    def _located(self, message: Match, reply: Located) -> None:
        """Any page that is located must be whole, and each slot be what the model says; nothing whole may be left out."""
        count = len(message.hashes) // HASH_BYTES
        slots = np.frombuffer(reply.slots, "<u4")
        generations = np.frombuffer(reply.generations, "<u8")
        record = self.namespaces[message.namespace]
        pages = [message.hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES] for i in range(count)]
        here = [all(self._whole(record, page, name, message.shard) for name in message.components) for page in pages]
        if message.hold is not None:
            count = reply.pages  # as was decided, whatever has become of the pages since
        elif not message.sparse:
            expected = here.index(False) if False in here else count
            if reply.pages != expected:
                kind = "incomplete" if reply.pages > expected else "lost"
                self.fail(kind, f"a match says {reply.pages} of {count} pages where {expected} are stored whole")
            count = reply.pages
        for column, name in enumerate(message.components):
            for index in range(count):
                slot, generation = int(slots[column * count + index]), int(generations[column * count + index])
                if (slot != NO_SLOT) != here[index]:
                    kind = "incomplete" if slot != NO_SLOT else "lost"
                    self.fail(kind, f"page {index} of a match: whole is {here[index]}, and slot {slot} was located")
                if slot == NO_SLOT:
                    continue
                stored = self._of(record, pages[index], name, message.shard)
                if stored is None or (stored.slot, stored.generation) != (slot, generation):
                    self.fail(
                        "wrong place", f"page {index} of a match is said to lie in slot {slot}, generation {generation}"
                    )

    def _held(self, message: Match, reply: Located, now: float) -> None:
        held = self.holds.get(message.hold.request)
        if held is None:
            pages = {message.hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES] for i in range(reply.pages)}
            record = self.namespaces[message.namespace]
            held = self.holds[message.hold.request] = Held(record, pages, now + reply.held_s, set())
        held.sessions.add(message.session)

    def _pinned(self, record: bytes, page: bytes) -> None:
        parents = {one.key.page: one.parent for one in self.live.values() if one.key.namespace == record}
        pages, above = set(), page
        while above in parents:
            pages.add(above)
            above = parents[above]
        self.pins[record, page] = pages

    def _break_holds(self, slots: list[int], now: float) -> None:
        """Pages that are held are not evicted; who deletes them may."""
        if self.doing in ("Delete", "Clear"):
            return
        for slot in slots:
            stored = self.slots.get(slot)
            if stored is None or not stored.committed:
                continue
            for (record, page), pages in self.pins.items():
                if stored.key.page in pages and stored.key.namespace == record:
                    self.fail("pin broken", f"{show(stored.key)} is evicted, and {page.hex()[:8]} is pinned")
            for request, held in self.holds.items():
                if now < held.until and stored.key.page in held.pages and stored.key.namespace == held.namespace:
                    self.fail("hold broken", f"{show(stored.key)} is evicted, and is held by {request!r}")

    def _of(self, record: bytes, page: bytes, component: str, shard: int) -> Stored | None:
        stored = self.live.get(Key(record, page, component, shard))
        if stored is None and shard:
            single = self.live.get(Key(record, page, component, 0))
            return single if single is not None and single.world == 1 else None
        return stored

    def _whole(self, record: bytes, page: bytes, component: str, shard: int) -> bool:
        first = self.live.get(Key(record, page, component, 0))
        if first is None or self._of(record, page, component, shard) is None:
            return False
        return all(Key(record, page, component, number) in self.live for number in range(1, first.world))

    # ------------------------------------------------------------ what the directory did

    def freed(self, slots: list[int], now: float) -> None:
        """The directory has begun to free these. What was stored there need not be found again."""
        self._break_holds(slots, now)
        for slot in slots:
            stored = self.slots.get(slot)
            if stored is not None:
                stored.freeing = True
            if stored is not None and stored.committed and self.live.get(stored.key) is stored:
                del self.live[stored.key]

    def free(self, slots: list[int]) -> None:
        """The directory has freed these: from now on no reader may believe them."""
        for slot in slots:
            stored = self.slots.pop(slot, None)
            if stored is not None:
                stored.gone_at = self.kernel.now
                if stored.committed:
                    self._went.add((stored.key.namespace, stored.key.page))

    def orphans(self) -> None:
        """Between two messages: no page whose objects went has left something behind that continues it."""
        if not self._went:
            return
        self.checks += 1
        here = {(one.key.namespace, one.key.page) for one in self.slots.values()}
        gone, self._went = self._went - here, set()
        for one in self.live.values():
            if (one.key.namespace, one.parent) in gone:
                self.fail("orphan", f"{show(one.key)} is stored, and its parent was evicted")

    # ------------------------------------------------------------ looking at all of it

    def audit_slot(self, stored: Stored, server: Server) -> None:
        """The bytes of a committed object, as a reader who stops time would see them."""
        self.checks += 1
        offset = (
            int(server.directory.offsets(np.array([stored.slot], np.uint32))[0]) - server.directory.geometry.off_data
        )
        data = server.data[offset : offset + stored.nbytes]
        written = self.whose(data)
        if written is None or written.key != stored.key:
            self.fail("damaged", f"slot {stored.slot} is {show(stored.key)} and has the words of {self.describe(data)}")
            return
        if stored.nonce is None:
            stored.nonce = written.nonce
            self.by_nonce.setdefault(written.nonce, []).append(stored)
        elif stored.nonce != written.nonce:
            self.fail("damaged", f"slot {stored.slot} was overwritten by #{written.nonce} after its commit")

    def audit(self, server: Server) -> None:
        """Everything at once, between two messages."""
        try:
            server.state.check()
        except AssertionError as error:
            self.fail("inconsistent", f"state.check(): {error}")
        states = server.directory.states
        generations = server.directory.generations
        for stored in self.live.values():
            if states[stored.slot] != COMMITTED or int(generations[stored.slot]) != stored.generation:
                self.fail(
                    "lost", f"{show(stored.key)} was committed to slot {stored.slot}, which is not so in the pool"
                )
            self.audit_slot(stored, server)
        found = {int(slot) for slot in np.flatnonzero(states == COMMITTED)}
        if found != {stored.slot for stored in self.live.values()}:
            self.fail("lost", "the pool has other committed slots than were committed")
        for key in self.live:
            if not server.holds(key, self.live[key].slot):
                self.fail("lost", f"{show(key)} was committed and is not found")

    def restarted(self, server: Server) -> None:
        """After a rebuild: what was acknowledged is there; what else is there is taken over."""
        self._went.clear()
        self.holds.clear()
        self.namespaces = records(server.directory)
        for key, stored in self.live.items():
            if not server.holds(key, stored.slot):
                self.fail("lost", f"{show(key)}, whose commit was answered, was not found again after a restart")
        states = server.directory.states
        names = {number: name for name, number in server.directory.components().items()}
        here: dict[int, Stored] = {}
        for slot in np.flatnonzero(states).tolist():
            generation = int(server.directory.generations[slot])
            stored = self.slots.get(slot)
            if stored is not None and stored.generation != generation:
                stored = None
            if states[slot] == COMMITTED:
                record = server.directory.records[slot]
                key = Key(
                    self.namespaces[int(record["namespace"])],
                    record["page_hash"].tobytes(),
                    names[int(record["component"])],
                    int(record["shard"]),
                )
                if stored is None or stored.key != key or stored.nbytes != int(record["length"]):
                    self.fail(
                        "believed", f"a restart found {show(key)} in slot {slot}, for which it was never reserved"
                    )
                    continue
                if self.live.get(key) is not stored:  # the commit's answer was never sent, or freeing it had just begun
                    self._store(stored)
                self.audit_slot(stored, server)
            elif stored is None:
                # The claim was written and the answer never sent.
                stored = Stored(Key(b"", b"", "?", 0), slot, generation, 0, 0, b"", 0)
            here[slot] = stored
        for slot, stored in self.slots.items():
            if here.get(slot) is not stored:
                if stored.told and not stored.freeing and not stored.committed:
                    self.fail("forgotten", f"slot {slot} was given to a client, and a restart thinks that it is free")
                stored.gone_at = self.kernel.now
        self.slots = here
        self.audit(server)

    def at_end(self, server: Server) -> None:
        """Everybody has left and quarantine is over: each slot is free or holds an object that can be found."""
        self.audit(server)
        states = server.directory.states
        leaked = np.flatnonzero((states != FREE) & (states != COMMITTED))
        figures = server.state.stats()
        if len(leaked) or figures["slots_reserved"] or figures["slots_quarantined"] or figures["sessions"]:
            self.fail(
                "leak",
                f"all clients are gone and quarantine is over: slots {leaked.tolist()} are not free "
                f"({int((states == RESERVED).sum())} reserved), {figures['sessions']} sessions",
            )


def records(directory: PoolDirectory) -> dict[int, bytes]:
    """Namespace numbers and their records, of clients without keys."""
    return {number: key if isinstance(key, bytes) else key[1] for key, number in directory.namespaces().items()}


def show(key: Key) -> str:
    where = key.namespace.partition(b'"tag":"')[2].partition(b'"')[0].decode()
    return f"{where}/{key.page.hex()[:8]}/{key.component}/{key.shard}"


class Server:
    """What the checker sees of a server."""

    state: ServerState
    directory: PoolDirectory
    data: np.ndarray

    def holds(self, key: Key, slot: int) -> bool:
        raise NotImplementedError
