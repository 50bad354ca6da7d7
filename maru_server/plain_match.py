"""The match that is asked most often, from the bytes of the request to those of the reply in compiled steps.

It asks for a prefix, in one component, without rules or a hold. What is done and answered is what
:class:`maru_server.engine_messages.EngineMessages` does and answers, to the byte; whatever is not as usual is left to it: what is
not stored, a session that is not known, a client that is too fast.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from maru_core.protocol import MAX_BATCH
from maru_server.books import Books
from maru_server.directory import CHECKSUM_WORD
from maru_server.index import TableIndex
from maru_server.requests import MAX_WORLD
from maru_server.sessions import LOCAL, Peer
from maru_server.tree import PrefixTree

try:
    from maru_server import _native
except ImportError:  # built without a compiler: every match goes the ordinary way
    _native = None  # type: ignore[assignment]


class PlainMatches:
    """Args:
    why: the reason why a page is missing.
    count: takes note of a match: of which tree, pages asked, pages found, the reason.
    """

    def __init__(
        self,
        books: Books,
        why: Callable[[PrefixTree, bytes], int],
        count: Callable[[PrefixTree, int, int, int], None],
    ) -> None:
        self._incarnation = books.incarnation
        self._sessions = books.sessions
        self._trees = books.trees
        self._components = books.names.components
        self._admits = books.limits.admits_pages
        self._later = books.pages.later
        directory = books.directory
        self._pool = _native and _native.pool(
            directory.slot_offsets, directory.generations, directory.words, CHECKSUM_WORD, directory.words.shape[1]
        )
        self._why = why
        self._count = count

    def answer(self, data: bytes, time: float, peer: Peer = LOCAL) -> bytes | None:
        """The packed reply to a packed request; None where :meth:`ServerState.handle` must be asked, and then nothing was changed."""
        if _native is None or (asked := _native.plain(data)) is None:
            return None
        number, namespace, name, shard, count = asked
        session, tree = self._sessions.get(number), self._trees.get(namespace)
        if session is None or tree is None or (session.peer is not peer and session.peer != peer):
            return None
        if not (peer.operator or tree.tenant == peer.tenant) or count > MAX_BATCH or shard >= MAX_WORLD:
            return None
        index, table = tree.index, tree.tables.get(self._components.get(name, -1))
        if table is None or (replicas := table.slots.get(0)) is None or type(index) is not TableIndex:
            return None
        if not self._admits(session.account, count, time):
            return None
        session.heard = time
        session.silent = False
        found, why, reply = _native.answer(
            data,
            self._incarnation,
            self._pool,
            index.table,
            index.hashes,
            index.key,
            (table.slots.get(shard), replicas, table.have, table.world, table.length),
            self._why,
            tree,
        )
        self._later(partial(self._count, tree, count, found, why))
        return reply
