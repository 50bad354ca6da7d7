"""What engines ask for: open a namespace, find, hold, reserve, commit, release, touch and delete pages.

One method per message. Each checks what can be checked before anything is changed, has the books do it, and packs the
answer; a message that is refused changed nothing. A match, a reserve and a commit are what an engine waits for: nothing
here may take a step for each page.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from maru_core.protocol import (
    HASH_BYTES,
    Commit,
    Committed,
    Delete,
    Done,
    ErrorCode,
    Hold,
    Located,
    Match,
    MissReason,
    NamespaceOpened,
    OpenNamespace,
    Release,
    Reply,
    Reserve,
    Reserved,
    Store,
    Stored,
    StoreStatus,
    Touch,
    Unhold,
)
from maru_server.books import Books
from maru_server.events import Topic
from maru_server.growth import Growth
from maru_server.lookup import Location, Lookup, first_absent, reason, split
from maru_server.new_chains import Objects
from maru_server.plain_match import PlainMatches
from maru_server.plain_store import PlainStores
from maru_server.requests import (
    Handler,
    RefusedError,
    check_chain,
    check_match,
    check_request,
    check_reserve,
    check_slots,
    check_store,
    count_hashes,
    split_hashes,
)
from maru_server.sessions import Session
from maru_server.tree import PrefixTree

#: Most shards of one namespace, of all its components together.
COLUMNS_MAX: Final = 1024
#: What a match that fell short is counted under, by its reason; in pages.
MISSES: Final = {int(why): f"miss_{why.name.lower()}" for why in MissReason if why}


class EngineMessages:
    """Their handlers. ``time`` is the server's own, ``now`` the caller's, both in seconds."""

    def __init__(self, books: Books, growth: Growth) -> None:
        # Each at hand in one step: every message goes this way.
        self._incarnation = books.incarnation
        self._config = books.config
        self._geometry = books.geometry
        self._trees = books.trees
        self._of_tenant: defaultdict[str, list[int]] = defaultdict(list)  # namespaces, the latest last
        for number, tree in books.trees.items():
            self._of_tenant[tree.tenant].append(number)
        self._tree = books.tree
        self._wall_ns = books.wall_ns
        self._names = books.names
        self._components = books.names.components
        self._pages = books.pages
        self._holds = books.holds
        self._uses = books.uses
        self._diary = books.diary
        self._lookup = Lookup(books.directory)
        self._live_extents = growth.live_extents
        #: Shorter ways for nearly every match, and for stores of a few pages.
        self.plain_matches = PlainMatches(books, self._why_page, self._count_match)
        self.plain_stores = PlainStores(books, self._live_extents)
        self.handlers: dict[type, Handler] = {
            OpenNamespace: self._open_namespace,
            Match: self._match,
            Unhold: self._unhold,
            Reserve: self._reserve,
            Store: self._store,
            Commit: self._commit,
            Release: self._release,
            Touch: self._touch,
            Delete: self._delete,
        }

    def _open_namespace(self, message: OpenNamespace, session: Session, time: float, now: float) -> Reply:
        tenant = session.peer.tenant
        number = self._names.namespaces.get((tenant, message.record))
        if number is None:
            number = self._names.add_namespace(message.record, session.peer)
            self._trees[number] = PrefixTree(number, tenant=tenant)
            self._of_tenant[tenant].append(number)
            if self._pages.events is not None:
                self._pages.events.open(number, Topic.of(message.record, tenant))
            self._diary.opened(number, tenant, message.record)
        return NamespaceOpened(message.rid, self._incarnation, number)

    # ------------------------------------------------------------ find

    def _match(self, message: Match, session: Session, time: float, now: float) -> Reply:
        count = count_hashes(message.hashes)
        tree = self._tree(message.namespace, session)
        check_match(message, self._geometry.component_capacity, self._components)
        components = [self._components.get(name) for name in message.components]
        if message.hold is not None and count:
            return self._held_match(message, message.hold, session, tree, components, count, time)
        found = self._lookup.match(tree, components, message.shard, message.hashes, message.sparse, message.rules)
        why = MissReason.NONE if found.pages == count else self._why(tree, message, found)
        self._count_match(tree, count, found.pages, why)
        return Located(message.rid, self._incarnation, *found[:6], why, 0.0, found.ends, list(found.covered))

    def look(self, message: Match, namespace: int) -> int:
        """How many pages a match would find in this namespace; nothing of it is noted. The message has been checked."""
        components = [self._components.get(name) for name in message.components]
        tree = self._trees[namespace]
        return self._lookup.match(tree, components, message.shard, message.hashes, message.sparse, message.rules).pages

    def _held_match(
        self,
        message: Match,
        hold: Hold,
        session: Session,
        tree: PrefixTree,
        components: list[int | None],
        count: int,
        time: float,
    ) -> Reply:
        """The first rank of a request is answered as any match is, and the others as it was."""
        decision = self._holds.decided(tree, session.number, message, hold)
        if decision is None:
            found = self._lookup.match(tree, components, message.shard, message.hashes, rules=message.rules)
            why = MissReason.NONE if found.pages == count else self._why(tree, message, found)
            decision = self._holds.decide(
                tree,
                session.number,
                message,
                hold,
                pages=found.pages,
                ends=found.ends,
                covered=found.covered,
                why=why,
                time=time,
            )
        else:
            hashes = message.hashes[: decision.pages * HASH_BYTES]
            found = self._lookup.exactly(tree, components, message.shard, hashes)
        self._count_match(tree, count, decision.pages, decision.why)
        return Located(
            message.rid,
            self._incarnation,
            *found[:6],
            decision.why,
            decision.held_s(time),
            decision.ends,
            list(decision.covered),
        )

    def _why(self, tree: PrefixTree, message: Match, found: Location) -> MissReason:
        """The reason for the first page that is not in the answer."""
        first = first_absent(found, len(message.hashes) // HASH_BYTES) if message.sparse else found.pages
        return self._why_page(tree, message.hashes[first * HASH_BYTES : (first + 1) * HASH_BYTES])

    def _why_page(self, tree: PrefixTree, page: bytes) -> MissReason:
        others = (self._trees[number] for number in reversed(self._of_tenant[tree.tenant]))
        return reason(tree, page, self._pages.ghosts, others)

    def _count_match(self, tree: PrefixTree, asked: int, found: int, why: int) -> None:
        for counts in (self._pages.counts, tree.counts):
            counts["matches"] += 1
            counts["pages_asked"] += asked
            counts["pages_found"] += found
            if found < asked:
                counts[MISSES[why]] += asked - found

    def _unhold(self, message: Unhold, session: Session, time: float, now: float) -> Reply:
        check_request(message.request)
        tree = self._tree(message.namespace, session)
        return Done(message.rid, self._incarnation, self._holds.release(tree, session.number, message.request))

    # ------------------------------------------------------------ store

    def _reserve(self, message: Reserve, session: Session, time: float, now: float) -> Reply:
        count_hashes(message.hashes)
        tree = self._tree(message.namespace, session)
        check_reserve(message, self._geometry.extent_bytes, self._components)
        component = self._components.get(message.component)
        table = None if component is None else tree.tables.get(component)
        pages, now_ns = self._pages, self._wall_ns(now)
        if component is not None and table is not None and message.shard in table.slots:
            what = self._objects(message, session, tree, component, time, now_ns)
            granted = pages.new_chains.reserve(what, message.parent, message.hashes, message.spares)
            if granted is not None:
                return Reserved(message.rid, self._incarnation, *granted[:4], *granted.spare)
        self._live_extents(time)
        keys = split(message.hashes)
        check_chain(message, keys)
        if table is None or message.shard not in table.slots:
            self._check_columns(tree, message)
        if component is None:
            component = self._names.add_component(message.component, session.peer)
        grant = pages.reserve(
            session,
            tree,
            component,
            message.shard,
            message.world,
            message.parent,
            message.hashes,
            keys,
            message.nbytes,
            time=time,
            deadline=time + self._config.reservation_s,
            now_ns=now_ns,
        )
        return Reserved(message.rid, self._incarnation, *grant)

    def _objects(
        self, message: Reserve | Store, session: Session, tree: PrefixTree, component: int, time: float, now_ns: int
    ) -> Objects:
        if self._pages.tenants.quotas:
            self._live_extents(time)  # a quota is a share of them
        deadline = time + self._config.reservation_s
        return Objects(session, tree, component, message.shard, message.world, message.nbytes, time, deadline, now_ns)

    def _store(self, message: Store, session: Session, time: float, now: float) -> Reply:
        tree = self._tree(message.namespace, session)
        check_store(message)
        check_reserve(message, self._geometry.extent_bytes, self._components)
        component = self._components.get(message.component)
        table = None if component is None else tree.tables.get(component)
        if component is None or table is None or message.shard not in table.slots:
            return Stored(message.rid, self._incarnation, StoreStatus.GONE)
        what = self._objects(message, session, tree, component, time, self._wall_ns(now))
        status, spare = self._pages.new_chains.store(
            what, message.parent, message.hashes, message.slots, message.generations, message.checksums, message.spares
        )
        return Stored(message.rid, self._incarnation, status, *spare)

    @staticmethod
    def _check_columns(tree: PrefixTree, message: Reserve) -> None:
        """A column takes memory for every page of the namespace, not only for those that have an object in it."""
        columns = sum(len(table.slots) for table in tree.tables.values())
        if columns >= COLUMNS_MAX:
            raise RefusedError(
                ErrorCode.LIMIT,
                f"namespace {tree.number} has {columns} shards of components, and at most {COLUMNS_MAX} are kept: shard "
                f"{message.shard} of component {message.component!r} would be one more. Use those it has, or clear it",
            )

    def _commit(self, message: Commit, session: Session, time: float, now: float) -> Reply:
        now_ns = self._wall_ns(now)
        status = self._pages.commit_whole(session, message.slots, message.generations, message.checksums, now_ns)
        if status is None:
            check_slots(message, self._geometry.slot_count)
            status = self._pages.commit(session, message.slots, message.generations, message.checksums, now_ns)
        return Committed(message.rid, self._incarnation, status)

    def _release(self, message: Release, session: Session, time: float, now: float) -> Reply:
        check_slots(message, self._geometry.slot_count)
        count = self._pages.release(session, message.slots, message.generations)
        return Done(message.rid, self._incarnation, count)

    # ------------------------------------------------------------ use and remove

    def _touch(self, message: Touch, session: Session, time: float, now: float) -> None:
        count_hashes(message.hashes)
        tree = self._tree(message.namespace, session)
        rows = tree.find(message.hashes, -1)
        rows = rows[rows >= 0]
        if len(rows):
            tree.used(rows, self._wall_ns(now))
            self._uses.note(tree, rows)

    def _delete(self, message: Delete, session: Session, time: float, now: float) -> Reply:
        keys = split_hashes(message.hashes)
        tree = self._tree(message.namespace, session)
        count = self._pages.delete(tree, keys, time, time + self._config.quarantine_s)
        # What continues the named pages goes too, and costs as much; how many these are is known only now.
        session.account.pages_left -= max(0, count - len(keys))
        self._holds.removed(tree)
        return Done(message.rid, self._incarnation, count)
