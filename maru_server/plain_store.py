"""The store of a few pages in slots that were granted ahead, from the bytes of the request to those of the reply in compiled steps.

What is done and answered is what :meth:`maru_server.new_chains.NewChains.store` does and answers; whatever is not as usual is left to
it: spares that are gone, pages that are known, a session that is not known, a client that is too fast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from maru_core.protocol import HASH_BYTES, SPARES_MAX, encode
from maru_server.books import Books
from maru_server.index import TableIndex
from maru_server.new_chains import Objects, Spare
from maru_server.sessions import LOCAL, Peer

try:
    from maru_server import _plain_store
except ImportError:  # built without a compiler: every store goes the ordinary way
    _plain_store = None  # type: ignore[assignment]

#: How such a message begins.
STORE: Final = b"\x9e\xa5Store"
#: Three fields without spares, as they are packed.
_NOTHING: Final = b"".join(map(encode, Spare()))


class PlainStores:
    """Args:
    live_extents: brings up to date what quotas are shares of.
    """

    def __init__(self, books: Books, live_extents: Callable[[float], object]) -> None:
        self._incarnation = books.incarnation
        self._sessions = books.sessions
        self._trees = books.trees
        self._components = books.names.components
        self._reservations = books.reservations
        self._limits = books.limits
        self._later = books.pages.later
        self._new_chains = books.pages.new_chains
        self._quotas = books.pages.tenants.quotas
        self._live_extents = live_extents
        self._wall_ns = books.wall_ns
        self._reservation_s = books.config.reservation_s
        self._pool = None
        directory = books.directory
        if _plain_store is not None and directory.compiled:
            self._pool = _plain_store.pool(
                directory.words,
                directory.changes,
                directory.slot_offsets,
                directory.generations,
                books.reservations.holders,
                *directory.shares,
            )

    def answer(self, data: bytes, time: float, now: float, peer: Peer = LOCAL) -> bytes | None:
        """The packed reply to a packed request; None where :meth:`ServerState.handle` must be asked, and then nothing was changed. Whatever
        is raised may come after the pages were published."""
        if self._pool is None or (asked := _plain_store.plain(data, self._pool, SPARES_MAX)) is None:
            return None
        number, namespace, name, shard, world, nbytes, count, wanted, holder = asked
        session, tree = self._sessions.get(number), self._trees.get(namespace)
        if session is None or tree is None or (session.peer is not peer and session.peer != peer):
            return None
        reservation, component = self._reservations.get(holder), self._components.get(name)
        page, index = reservation.page, tree.index
        if not reservation.spare or reservation.session is not session or page is None or type(index) is not TableIndex:
            return None
        if page.tree is not tree or page.component != component or page.shard != shard:
            return None
        if not (peer.operator or tree.tenant == peer.tenant) or not self._limits.admits_pages(
            session.account, count + wanted, time
        ):
            return None
        table, now_ns = tree.tables[component], self._wall_ns(now)
        stored = _plain_store.store(
            data,
            self._incarnation,
            self._pool,
            (index.table, index.hashes, index.key),
            (tree.parent, tree.child, tree.objects, tree.pending),
            page.rows,
            reservation.slots,
            reservation.generations_blob,
            holder,
            table.world,
            table.length,
            component,
            now_ns,
            session.owner,
        )
        if stored is None:
            # It will be asked again, and pays then.
            self._limits.refund(session.account, count + wanted)
            return None
        session.heard = time
        session.silent = False
        at, above, chain, generations, reply = stored

        def what() -> Objects:
            return Objects(session, tree, component, shard, world, nbytes, time, time + self._reservation_s, now_ns)

        # Before anything else is tried: what the pool says is what the books must say.
        self._later(lambda: self._new_chains.stored(what(), reservation, at, count, generations, chain, above))
        if self._quotas:
            self._live_extents(time)
        if not wanted:
            return reply
        spare = self._new_chains.grant(what(), reservation.slot_bytes, data[-wanted * HASH_BYTES :])
        # What was wanted comes last in the request, and what was granted in the reply.
        return reply[: -len(_NOTHING)] + b"".join(map(encode, spare))
