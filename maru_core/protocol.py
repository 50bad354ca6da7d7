"""The wire protocol between clients and the metadata server: msgpack, schema-checked by msgspec.

One request is one message and has one reply, except :class:`Touch` and :class:`Goodbye`, which have none.
Batches travel as packed little-endian arrays in ``bytes`` fields, so that neither side loops over pages to
encode or decode them:

=============  ==========  =====================================================================
field          element     meaning
=============  ==========  =====================================================================
``hashes``     32 bytes    page hashes, in chain order
``slots``      u32         global slot ids
``offsets``    u64         byte offset of the slot in the pool
``generations`` u64        the slot's generation
``lengths``    u64         exact bytes of the object
``checksums``  u64         xxh3-64 of the object's bytes, 0 where the writer computed none
``status``     u8          one of :class:`ReserveStatus` / :class:`CommitStatus`
=============  ==========  =====================================================================

Every request carries ``rid``, which its reply repeats, and every reply carries the server's ``incarnation``:
a client drops a reply whose ``rid`` it is not waiting for, and a session ends when the incarnation changes.
``Hello`` is the handshake: its first two fields never change, so that any two versions can tell each other apart.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

PROTOCOL_VERSION: Final = 1
HASH_BYTES: Final = 32
#: Parent of a chain's first page.
ROOT: Final = bytes(HASH_BYTES)
#: Most pages in one message; a client splits larger batches.
MAX_BATCH: Final = 4096
#: Largest message a server accepts, bytes.
MAX_MESSAGE_BYTES: Final = 4 << 20


class ErrorCode(enum.StrEnum):
    """Why a request was refused. No state changed."""

    VERSION = "version"  # protocol versions differ
    INVALID = "invalid"  # not a valid message, or a field out of range
    UNKNOWN_SESSION = "unknown-session"  # say Hello again
    UNKNOWN_NAMESPACE = "unknown-namespace"  # open the namespace again
    TOO_LARGE = "too-large"  # an object is larger than an extent
    LIMIT = "limit"  # a table of the pool is full (namespaces, components, sessions)
    INTERNAL = "internal"  # a fault of the server; its log has the traceback


class ReserveStatus(enum.IntEnum):
    RESERVED = 0  # a slot is yours: copy, then commit
    EXISTS = 1  # already committed; nothing to do
    BUSY = 2  # another session is writing it
    NO_ROOM = 3  # no slot, and eviction could not help now
    CONFLICT = 4  # the page is known with another parent, length or world: refused


class CommitStatus(enum.IntEnum):
    COMMITTED = 0  # anyone can find it now (also for a repeated commit)
    LOST = 1  # the reservation was no longer yours: not stored


class _Message(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    pass


# ---------------------------------------------------------------- requests


class Hello(_Message, frozen=True):
    """Register a client process. ``pid``, ``pid_start``, ``pid_ns`` and ``boot_id`` let a server on the same
    machine tell a dead process from a silent one; on another machine they are only shown."""

    protocol: int
    rid: int
    client_id: bytes  # 16 random bytes, one per client object
    name: str  # for people: "sglang tp0/2"
    host: str
    pid: int
    pid_start: int  # /proc/PID/stat field 22, clock ticks
    pid_ns: str  # readlink /proc/self/ns/pid
    boot_id: str  # /proc/sys/kernel/random/boot_id


class OpenNamespace(_Message, frozen=True):
    """Make a namespace known and get the number that stands for it in this pool.

    ``record`` is the canonical JSON of :class:`maru_core.namespace.Namespace`."""

    rid: int
    session: int
    record: bytes


class Match(_Message, frozen=True):
    """How long a prefix of ``hashes`` is present, whole, and where ``shard`` of ``component`` lies.

    ``components`` must all be whole (every shard) for a page to count. With ``sparse`` the answer has one
    element for each hash (slot ``NO_SLOT`` where it is not present) instead of stopping at the first gap."""

    rid: int
    session: int
    namespace: int
    components: list[str]
    shard: int
    hashes: bytes
    sparse: bool = False


class Reserve(_Message, frozen=True):
    """Reserve a slot for one object per hash. ``parent`` is the page before ``hashes[0]`` (``ROOT`` at the start);
    ``hashes[i]`` is the parent of ``hashes[i+1]``. ``nbytes`` is the exact length of each object."""

    rid: int
    session: int
    namespace: int
    component: str
    shard: int
    world: int
    parent: bytes
    hashes: bytes
    nbytes: int


class Commit(_Message, frozen=True):
    """Publish reserved slots. ``checksums`` is empty where the writer computed none."""

    rid: int
    session: int
    slots: bytes
    generations: bytes
    checksums: bytes = b""


class Release(_Message, frozen=True):
    """Give reserved slots back without publishing them. Unknown ones are ignored."""

    rid: int
    session: int
    slots: bytes
    generations: bytes


class Touch(_Message, frozen=True):
    """Pages that were used. One way: no reply."""

    session: int
    namespace: int
    hashes: bytes


class Delete(_Message, frozen=True):
    """Remove pages, all their objects, and every page that continues them (no page outlives its parent)."""

    rid: int
    session: int
    namespace: int
    hashes: bytes


class Clear(_Message, frozen=True):
    """Remove every page of one namespace, or of all with ``namespace`` None."""

    rid: int
    session: int
    namespace: int | None = None


class Heartbeat(_Message, frozen=True):
    rid: int
    session: int


class Stats(_Message, frozen=True):
    """Figures about the server; needs no session (``session`` 0)."""

    rid: int
    session: int = 0


class Goodbye(_Message, frozen=True):
    """The client leaves and writes no more: its reservations return at once. One way: no reply."""

    session: int


Request = (
    Hello | OpenNamespace | Match | Reserve | Commit | Release | Touch | Delete | Clear | Heartbeat | Stats | Goodbye
)

# ---------------------------------------------------------------- replies

#: Slot id that means "not present" in a sparse match or where nothing was reserved.
NO_SLOT: Final = 0xFFFFFFFF


class Welcome(_Message, frozen=True):
    protocol: int
    rid: int
    incarnation: int
    session: int
    pool_uri: str
    pool_uuid: bytes
    heartbeat_s: float  # send one at least this often
    lease_s: float  # silent for longer: reservations go to quarantine


class NamespaceOpened(_Message, frozen=True):
    rid: int
    incarnation: int
    namespace: int


class Located(_Message, frozen=True):
    """``pages`` is the length of the present prefix; the arrays have ``pages`` elements per requested component,
    component after component (``len(hashes)`` elements each if the match was sparse)."""

    rid: int
    incarnation: int
    pages: int
    slots: bytes
    offsets: bytes
    generations: bytes
    lengths: bytes
    checksums: bytes


class Reserved(_Message, frozen=True):
    """One element per hash; ``slots`` is ``NO_SLOT`` where the status is not RESERVED."""

    rid: int
    incarnation: int
    status: bytes
    slots: bytes
    offsets: bytes
    generations: bytes


class Committed(_Message, frozen=True):
    rid: int
    incarnation: int
    status: bytes


class Done(_Message, frozen=True):
    """Release, Delete, Clear, Heartbeat: ``count`` objects were affected."""

    rid: int
    incarnation: int
    count: int = 0


class StatsReply(_Message, frozen=True):
    rid: int
    incarnation: int
    stats: dict[str, float | int | str]


class Error(_Message, frozen=True):
    rid: int
    incarnation: int
    code: str
    message: str


Reply = Welcome | NamespaceOpened | Located | Reserved | Committed | Done | StatsReply | Error

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)

encode = _encoder.encode
#: Both raise :class:`msgspec.ValidationError` / :class:`msgspec.DecodeError` on bytes that are not a valid message.
decode_request = _request_decoder.decode
decode_reply = _reply_decoder.decode
