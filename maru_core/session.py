"""The client's side of the conversation with the metadata server.

A :class:`Session` registers this process with the server, keeps it registered with heartbeats, and carries requests.
What it promises:

- **Every call is bounded in time**, whatever the server does. After the time limit the outcome is unknown, and the call
  raises :class:`ServerUnavailableError`. From then on calls fail at once, while a background thread (the keeper) asks
  for the server; when it answers, calls go through again.
- **A reply is only ever taken for its own request.** A socket carries one request at a time, replies repeat the
  request's ``rid``, and a socket whose reply did not come in time is never used again.
- **Lives do not mix.** The server's restart (or its forgetting this client) starts a new life with a higher
  :attr:`Session.epoch`. Namespace numbers and slots belong to a life: callers hand in the ``epoch`` that theirs came from, and
  get :class:`SessionLostError` instead of an answer about something else.
- **What timed out is settled later.** Slots of a reserve whose reply came too late are given back, and a commit or release
  that found no answer is repeated by the keeper as long as the life lasts, so that no slot stays reserved for nobody.

Calls may come from any number of threads: each takes a socket out of a free list and talks on it directly, with no other
thread between it and the server. It does not know what the bytes in a slot mean, and repeats no call for its caller.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

from maru_core.conversation import Conversation
from maru_core.locations import Outline, answers, in_one_pool, read_outline
from maru_core.protocol import (
    HASH_BYTES,
    Agent,
    Agents,
    AgentsReply,
    Announce,
    Clear,
    Commit,
    Committed,
    Delete,
    Done,
    Evict,
    Hold,
    Inspect,
    Located,
    Match,
    NamespaceOpened,
    OpenNamespace,
    Pin,
    Reaches,
    Release,
    Report,
    Reserve,
    Reserved,
    ReserveStatus,
    Stats,
    StatsReply,
    Store,
    Stored,
    StoreStatus,
    Unhold,
    Unpin,
    Validate,
    Validated,
    Want,
    Way,
)

_STORE_STATUS: Final = frozenset(int(status) for status in StoreStatus)


def _spares_fit(reply: Reserved | Stored, wanted: bytes) -> bool:
    """Whether the spares of an answer are none, or those that were wanted."""
    count = len(reply.spare_slots) // 4
    return (
        len(reply.spare_slots) == 4 * count
        and len(reply.spare_offsets) == len(reply.spare_generations) == 8 * count
        and (not count or count * HASH_BYTES == len(wanted))
    )


class Session(Conversation):
    """See the module. Connects at the first call; :meth:`close` ends it (also done at interpreter exit).

    Every call raises :class:`ServerUnavailableError` (no answer in time, or the server is known to be away),
    :class:`SessionLostError`, :class:`ServerError` (the server refused), :class:`VersionMismatchError`, or
    :class:`ClosedError` (closed, or in a forked child).
    """

    def open_namespace(self, record: bytes, *, epoch: int | None = None) -> int:
        """The number that stands for a namespace record in this life."""
        life = self._current(epoch)
        rid = next(self._rids)
        return self._ask(life, rid, OpenNamespace(rid, life.session, record), NamespaceOpened).namespace

    def match(
        self,
        namespace: int,
        components: list[str],
        shard: int,
        hashes: bytes,
        sparse: bool = False,
        *,
        rules: Sequence[Want] = (),
        hold: Hold | None = None,
        epoch: int | None = None,
    ) -> Located:
        """Where the present prefix of ``hashes`` lies; see :class:`maru_core.protocol.Match`.

        A match with a hold may be repeated: the rank is counted once, and the answer is the same."""
        life = self._current(epoch)
        rid = next(self._rids)
        request = Match(rid, life.session, namespace, components, shard, hashes, sparse, list(rules), hold)
        reply = self._ask(life, rid, request, Located)
        if not answers(request, reply, len(life.welcome.pools)):
            raise self._contradiction("match")
        return reply

    def prefix(self, namespace: int, component: str, shard: int, hashes: bytes, *, epoch: int) -> Outline:
        """How long a prefix of ``hashes``, at least one, is there in one component; where it lies is in the answer's ``data``, still packed."""
        life = self._current(epoch)
        rid, pools = next(self._rids), len(life.welcome.pools)
        request = Match(rid, life.session, namespace, [component], shard, hashes)
        return self._ask(life, rid, request, Outline, lambda data: read_outline(request, data, pools))

    def unhold(self, namespace: int, request: bytes, *, epoch: int | None = None) -> int:
        """This rank needs what it holds by this request id no more; how many held answers it had a share in. May be
        repeated."""
        life = self._current(epoch)
        rid = next(self._rids)
        return self._ask(life, rid, Unhold(rid, life.session, namespace, request), Done).count

    def reserve(
        self,
        namespace: int,
        component: str,
        shard: int,
        world: int,
        parent: bytes,
        hashes: bytes,
        nbytes: int,
        *,
        spares: bytes = b"",
        epoch: int | None = None,
    ) -> Reserved:
        """Reserve a slot for each hash, and perhaps some ahead; see :class:`maru_core.protocol.Reserve`."""
        life = self._current(epoch)
        rid = next(self._rids)
        request = Reserve(rid, life.session, namespace, component, shard, world, parent, hashes, nbytes, spares)
        reply = self._ask(life, rid, request, Reserved)
        count = len(hashes) // HASH_BYTES
        if (
            len(reply.status) != count
            or len(reply.slots) != 4 * count
            or not len(reply.offsets) == len(reply.generations) == 8 * count
            or not in_one_pool(reply.slots, len(life.welcome.pools))
            or not _spares_fit(reply, spares)
        ):
            raise self._contradiction("reserve")
        self._hold(life, reply.status.count(ReserveStatus.RESERVED))
        if self._closed:
            # The Goodbye may be on its way already, and the slots with it: they must not be written.
            raise self._closed_error()
        return reply

    def begin_writing(self, count: int, *, epoch: int) -> None:
        """So many slots that were granted ahead are about to be written: the session's end does not give them back meanwhile. Ends with
        :meth:`store` or :meth:`end_writing`.

        Raises:
            MaruError: they must not be written: the life is over, or the session is closed or about to be.
        """
        life = self._current(epoch)
        self._hold(life, count)
        if self._closed:
            self._hold(life, -count)
            raise self._closed_error()

    def end_writing(self, count: int, *, epoch: int) -> None:
        """What :meth:`begin_writing` said is over, without a :meth:`store`."""
        life = self._life
        if life is not None and life.epoch == epoch:
            self._hold(life, -count)

    def give_back(self, slots: bytes, generations: bytes, *, epoch: int) -> None:
        """Have slots that nobody writes to any more returned by the keeper: never blocks, never raises. Of slots that were published
        nothing comes."""
        life = self._life
        if life is not None and life.epoch == epoch and not self._closed and self._pid == os.getpid():
            self._errands.give_back(life, slots, generations)
            self._wake.set()

    def store(
        self,
        namespace: int,
        component: str,
        shard: int,
        world: int,
        parent: bytes,
        hashes: bytes,
        nbytes: int,
        slots: bytes,
        generations: bytes,
        checksums: bytes = b"",
        *,
        spares: bytes = b"",
        epoch: int,
    ) -> Stored:
        """Publish slots that were granted ahead and have been written; see :class:`maru_core.protocol.Store`. Not to be repeated with the
        same slots, whatever comes of it, unless the answer says that they stand."""
        # Whatever comes of it, the caller has ended writing.
        self.end_writing(len(slots) // 4, epoch=epoch)
        life = self._current(epoch)
        rid = next(self._rids)
        request = Store(
            rid,
            life.session,
            namespace,
            component,
            shard,
            world,
            parent,
            hashes,
            nbytes,
            slots,
            generations,
            checksums,
            spares,
        )
        reply = self._ask(life, rid, request, Stored)
        if reply.status not in _STORE_STATUS or not _spares_fit(reply, spares):
            raise self._contradiction("store")
        return reply

    def commit(
        self, slots: bytes, generations: bytes, checksums: bytes = b"", *, epoch: int | None = None
    ) -> Committed:
        """Publish reserved slots; see :class:`maru_core.protocol.Commit`. May be repeated."""
        life = self._current(epoch)
        rid = next(self._rids)
        # Whatever comes of it, the caller has ended writing.
        self._hold(life, -(len(slots) // 4))
        reply = self._ask(life, rid, Commit(rid, life.session, slots, generations, checksums), Committed)
        if len(reply.status) * 4 != len(slots):
            raise self._contradiction("commit")
        return reply

    def release(self, slots: bytes, generations: bytes, *, epoch: int | None = None) -> int:
        """Give reserved slots back; how many there were."""
        life = self._current(epoch)
        rid = next(self._rids)
        self._hold(life, -(len(slots) // 4))
        return self._ask(life, rid, Release(rid, life.session, slots, generations), Done).count

    def delete(self, namespace: int, hashes: bytes, *, epoch: int | None = None) -> int:
        """Remove pages and what continues them; how many objects went."""
        life = self._current(epoch)
        rid = next(self._rids)
        return self._ask(life, rid, Delete(rid, life.session, namespace, hashes), Done).count

    def clear(self, namespace: int | None = None, *, epoch: int | None = None) -> int:
        """Remove every page of one namespace, or of all; how many objects went."""
        life = self._current(epoch)
        rid = next(self._rids)
        return self._ask(life, rid, Clear(rid, life.session, namespace), Done).count

    def pin(self, namespace: int, page: bytes, *, epoch: int | None = None) -> int:
        """Keep a page and all before it from eviction, until :meth:`unpin`; bytes that are pinned now. Operators only."""
        life = self._current(epoch)
        rid = next(self._rids)
        return self._ask(life, rid, Pin(rid, life.session, namespace, page), Done).count

    def unpin(self, namespace: int, page: bytes, *, epoch: int | None = None) -> int:
        """End a pin; bytes that are pinned now. Operators only."""
        life = self._current(epoch)
        rid = next(self._rids)
        return self._ask(life, rid, Unpin(rid, life.session, namespace, page), Done).count

    def evict(self, pages: int, namespace: int | None = None, *, epoch: int | None = None) -> int:
        """Evict up to so many pages, in the policy's order; how many went. Operators only."""
        life = self._current(epoch)
        rid = next(self._rids)
        return self._ask(life, rid, Evict(rid, life.session, pages, namespace), Done).count

    def inspect(
        self,
        what: str,
        namespace: int | None = None,
        limit: int = 64,
        sort: str = "heat",
        *,
        epoch: int | None = None,
    ) -> list[dict[str, Any]]:
        """Rows for people; see :class:`maru_core.protocol.Inspect` and :mod:`maru_server.views`."""
        life = self._current(epoch)
        rid = next(self._rids)
        return self._ask(life, rid, Inspect(rid, life.session, what, namespace, limit, sort), Report).rows

    def stats(self) -> dict[str, float | int | str]:
        """The server's figures."""
        life = self._current(None)
        rid = next(self._rids)
        return self._ask(life, rid, Stats(rid, life.session), StatsReply).stats

    def announce(self, agent: Agent, pool: bytes = b"", *, epoch: int | None = None) -> int:
        """Say how this process serves a pool (its UUID, where the server has several), for as long as this life lasts; how many
        agents there are. May be repeated."""
        life = self._current(epoch)
        rid = next(self._rids)
        return self._ask(life, rid, Announce(rid, life.session, agent, pool), Done).count

    def reaches(self, ways: Sequence[Way], *, epoch: int | None = None) -> int:
        """Say how this process reaches each pool of the server; how many it does. May be repeated; the last one counts."""
        life = self._current(epoch)
        rid = next(self._rids)
        return self._ask(life, rid, Reaches(rid, life.session, list(ways)), Done).count

    def agents(self, pool: bytes = b"", *, epoch: int | None = None) -> AgentsReply:
        """Who reaches a pool (its UUID, where the server has several) for those that cannot map it."""
        life = self._current(epoch)
        rid = next(self._rids)
        return self._ask(life, rid, Agents(rid, life.session, pool), AgentsReply)

    def validate(self, slots: bytes, generations: bytes, *, epoch: int | None = None) -> bytes:
        """One byte per slot: 1 where it still has the generation."""
        life = self._current(epoch)
        rid = next(self._rids)
        reply = self._ask(life, rid, Validate(rid, life.session, slots, generations), Validated)
        if len(reply.valid) * 4 != len(slots):
            raise self._contradiction("validate")
        return reply.valid

    def touch(self, namespace: int, hashes: bytes, *, epoch: int | None = None) -> None:
        """Note that pages were used. Queued and sent in batches by the keeper: never blocks, never raises, may be lost."""
        life = self._life
        if life is None or self._closed or self._pid != os.getpid() or (epoch is not None and epoch != life.epoch):
            return
        if self._errands.touch(life.epoch, namespace, hashes):
            self._wake.set()
