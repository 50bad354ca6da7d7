"""The wire protocol between clients and the metadata server: msgpack, schema-checked by msgspec.

One request is one message and has one reply, except :class:`Touch` and :class:`Goodbye`, which have none.
Batches travel as packed little-endian arrays in ``bytes`` fields, so that neither side loops over pages to
encode or decode them:

=============  ==========  =====================================================================
field          element     meaning
=============  ==========  =====================================================================
``hashes``     32 bytes    page hashes, in chain order
``slots``      u32         slot ids; where the server has several pools, the pool in the top 4 bits
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
from typing import Any, Final

import msgspec

PROTOCOL_VERSION: Final = 1
HASH_BYTES: Final = 32
#: Parent of a chain's first page.
ROOT: Final = bytes(HASH_BYTES)
#: Most pages in one message; a client splits larger batches.
MAX_BATCH: Final = 4096
#: Most slots that one message is granted ahead, and most pages that one :class:`Store` publishes.
SPARES_MAX: Final = 64
#: Largest message that travels, bytes: a longer one closes the connection on which it comes.
MAX_MESSAGE_BYTES: Final = 4 << 20
#: Largest request that a server reads: the longest that a client has reason to send is a quarter of it.
MAX_REQUEST_BYTES: Final = 1 << 19
#: Most objects that one match may locate, pages times components: its answer is a message too.
MAX_LOCATED: Final = 100_000
#: Longest NIXL metadata of an agent, bytes, and most pieces in which it may have registered the pool.
AGENT_METADATA_MAX: Final = 1 << 14
AGENT_PIECES_MAX: Final = 1024
#: Most pools of one server: slot numbers carry the pool's in their top bits, see :data:`POOL_SHIFT`.
POOLS_MAX: Final = 16
#: Where a server has several pools, a slot number is the pool's place in :attr:`Welcome.pools` shifted by this, and the slot's own
#: below it.
POOL_SHIFT: Final = 28
#: How a client may reach a pool: it maps the memory, agents move for it, or not at all.
WAYS: Final = ("cxl", "rdma", "none")
#: Longest reason that a client may give for it, characters.
WHY_MAX: Final = 200
#: Counters that clients report with their heartbeats: how reads and writes of pages ended.
REPORTED: Final = (
    "loaded_pages",
    "loaded_bytes",
    "stored_pages",
    "stored_bytes",
    "existing_pages",
    "miss_not_stored",
    "miss_length",
    "miss_evicted",
    "miss_checksum",
    "miss_unavailable",
    "miss_error",
    "refused_no_room",
    "refused_quota",
    "refused_busy",
    "refused_conflict",
    "refused_lost",
    "refused_unavailable",
    "refused_error",
)


class ErrorCode(enum.StrEnum):
    """Why a request was refused. No state changed."""

    VERSION = "version"  # protocol versions differ
    INVALID = "invalid"  # not a valid message, or a field out of range
    UNKNOWN_SESSION = "unknown-session"  # say Hello again
    UNKNOWN_NAMESPACE = "unknown-namespace"  # open the namespace again
    TOO_LARGE = "too-large"  # an object is larger than an extent
    LIMIT = "limit"  # a table of the pool is full (namespaces, components, sessions), or a budget is spent
    FORBIDDEN = "forbidden"  # only an operator, or only the tenant that it belongs to, may ask for that
    RATE = "rate"  # more messages than a session may send: wait
    INTERNAL = "internal"  # a fault of the server; its log has the traceback


class ReserveStatus(enum.IntEnum):
    RESERVED = 0  # a slot is yours: copy, then commit
    EXISTS = 1  # already committed; nothing to do
    BUSY = 2  # another session is writing it
    NO_ROOM = 3  # no slot, and eviction could not help now
    CONFLICT = 4  # the page is known with another parent, length or world: refused
    QUOTA = 5  # the tenant has as much of the pool as it may have, and its own pages could not make room


class StoreStatus(enum.IntEnum):
    STORED = 0  # anyone can find all of the pages now
    KNOWN = 1  # nothing was changed, since not all pages are new, or what they continue is not known: reserve them; the spares stand
    GONE = 2  # nothing was changed, since the spares are not, or no longer, this session's to use for that: reserve, and give them back


class CommitStatus(enum.IntEnum):
    COMMITTED = 0  # anyone can find it now (also for a repeated commit)
    LOST = 1  # the reservation was no longer yours: not stored


class MissReason(enum.IntEnum):
    """Why a match ended where it did: what is known of the first page that is not in the answer."""

    NONE = 0  # every page asked for is there
    NOT_STORED = 1  # nobody has stored it, as far as this server knows
    EVICTED = 2  # it was there, and made room for others
    REMOVED = 3  # it was there, and was deleted or cleared
    INCOMPLETE = 4  # some shard or component is missing, or still being written
    OTHER_NAMESPACE = 5  # the same tokens are there, stored under other settings: what is cached cannot be shared


class Rule(enum.IntEnum):
    """What of a component must be there for a prefix to count."""

    ALL_PAGES = 0  # every page of the prefix
    #: The last ``pages`` pages of the prefix, or all where it is shorter (sliding windows; states, with 1).
    TRAILING_PAGES = 1
    #: In each block of ``pages`` pages from the start, the last ``group`` ones. Says only how far it reaches
    #: (:attr:`Located.covered`), and never shortens the prefix.
    BLOCK_GROUPS = 2


class Want(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The rule of one component; ``pages`` and ``group`` as :class:`Rule` says."""

    rule: int = 0
    pages: int = 0
    group: int = 0


class Hold(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Keep what a match finds away from eviction. The first rank of a ``request`` to ask decides, for all, how many pages
    were found. Ends when ``ranks`` ranks have said Unhold, or after ``seconds``."""

    request: bytes  # 1 to 64 bytes, chosen by the engine, the same on all ranks
    ranks: int
    seconds: float


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

    ``components`` must all be whole (every shard) for a page to count, each by its rule in ``rules`` (none given: all
    pages). With ``sparse`` the answer has one element for each hash (slot ``NO_SLOT`` where it is not present) instead
    of stopping at the first gap; it then knows no rules and no hold."""

    rid: int
    session: int
    namespace: int
    components: list[str]
    shard: int
    hashes: bytes
    sparse: bool = False
    rules: list[Want] = []
    hold: Hold | None = None


class Unhold(_Message, frozen=True):
    """This session's rank needs the hold of ``request`` no more. Unknown ones are ignored."""

    rid: int
    session: int
    namespace: int
    request: bytes


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
    #: Random hashes: a slot of the same kind is wanted ahead for each, for a :class:`Store` that may come. All are granted or none.
    spares: bytes = b""


class Store(_Message, frozen=True):
    """Publish slots that were granted ahead, and that have been written, as pages of a chain: all of them, or none, in one message.
    Fields as of :class:`Reserve` and :class:`Commit`; ``slots`` are a run of what one message was granted, and were granted for the same
    component, shard, world and length."""

    rid: int
    session: int
    namespace: int
    component: str
    shard: int
    world: int
    parent: bytes
    hashes: bytes
    nbytes: int
    slots: bytes
    generations: bytes
    checksums: bytes = b""
    spares: bytes = b""


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
    """A sign of life. ``counts`` are the client's own counters of ``namespace`` since its session began (names of
    :data:`REPORTED`): what only readers and writers can know."""

    rid: int
    session: int
    namespace: int | None = None
    counts: dict[str, int] = {}


class Stats(_Message, frozen=True):
    """Figures about the server; needs no session (``session`` 0)."""

    rid: int
    session: int = 0


class Pin(_Message, frozen=True):
    """Keep a page and all pages before it from being evicted, until Unpin; survives restarts. Operators only."""

    rid: int
    session: int
    namespace: int
    page: bytes  # its hash


class Unpin(_Message, frozen=True):
    rid: int
    session: int
    namespace: int
    page: bytes


class Evict(_Message, frozen=True):
    """Evict up to ``pages`` pages, of one namespace or of all, in the policy's order. Operators only."""

    rid: int
    session: int
    pages: int
    namespace: int | None = None


class Inspect(_Message, frozen=True):
    """Rows for people. ``what``: ``namespaces``, ``sessions``, ``tenants``, ``pins``, ``holds``, ``tree`` or ``pools``.

    Operators see everything, others what belongs to their tenant."""

    rid: int
    session: int
    what: str
    namespace: int | None = None
    limit: int = 64
    sort: str = (
        "heat"  # of ``tree``, when not all of it is shown: the nodes used last, or those with the most ``bytes``
    )


class Agent(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How a pool is reached without mapping it: one agent on a memory node, as it says itself."""

    name: str  # for people: the host
    backend: str  # of NIXL: "UCX"
    metadata: bytes  # what NIXL needs to reach it, :data:`AGENT_METADATA_MAX` bytes at most
    pieces: bytes  # u64 triples: offset in the pool, bytes, address at the agent; ascending, together all extents
    load: float = 0.0  # how busy its host is, 0 idle to 1 and above


class Announce(_Message, frozen=True):
    """An agent serves a pool for as long as this session lasts. May be repeated; the last one counts. Operators only."""

    rid: int
    session: int
    agent: Agent
    pool: bytes = b""  # its UUID; may be empty where the server has only one


class Agents(_Message, frozen=True):
    """How a pool is reached by those who cannot map it."""

    rid: int
    session: int
    pool: bytes = b""  # its UUID; may be empty where the server has only one


class Way(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How a client reaches one pool, as it says itself."""

    way: str  # one of :data:`WAYS`
    why: str  # for people: printable, :data:`WHY_MAX` characters at most


class Reaches(_Message, frozen=True):
    """How this client reaches each pool, in the order of :attr:`Welcome.pools` (one way where the server has one pool). May be
    repeated; the last one counts. Of a server with several pools a client has nothing until it has said this."""

    rid: int
    session: int
    ways: list[Way]


class Validate(_Message, frozen=True):
    """Whether slots still have these generations: what a reader that cannot look into the pool asks after its copy."""

    rid: int
    session: int
    slots: bytes
    generations: bytes


class Goodbye(_Message, frozen=True):
    """The client leaves and writes no more: its reservations return at once. One way: no reply."""

    session: int


Request = (
    Hello
    | OpenNamespace
    | Match
    | Unhold
    | Reserve
    | Store
    | Commit
    | Release
    | Touch
    | Delete
    | Clear
    | Heartbeat
    | Stats
    | Pin
    | Unpin
    | Evict
    | Inspect
    | Announce
    | Agents
    | Validate
    | Reaches
    | Goodbye
)

# ---------------------------------------------------------------- replies

#: Slot id that means "not present" in a sparse match or where nothing was reserved.
NO_SLOT: Final = 0xFFFFFFFF


class PoolName(msgspec.Struct, array_like=True, frozen=True, gc=False):
    uri: str
    uuid: bytes


class Welcome(_Message, frozen=True):
    """``pool_uri`` and ``pool_uuid`` are of the first pool; ``pools`` has all where there are several, and is empty where not."""

    protocol: int
    rid: int
    incarnation: int
    session: int
    pool_uri: str
    pool_uuid: bytes
    heartbeat_s: float  # send one at least this often
    lease_s: float  # silent for longer: reservations go to quarantine
    pools: list[PoolName] = []


class NamespaceOpened(_Message, frozen=True):
    rid: int
    incarnation: int
    namespace: int


class Located(_Message, frozen=True):
    """``pages`` is the length of the present prefix; the arrays have ``pages`` elements per requested component,
    component after component (``len(hashes)`` elements each if the match was sparse), with slot ``NO_SLOT`` where a
    component has nothing and its rule needs nothing.

    Where some rule is not ALL_PAGES, ``ends`` are the lengths (u32, ascending) at which all rules are met, and ``pages``
    is the last of them; otherwise every length up to ``pages`` is one. ``covered`` has the pages that each component reaches by
    its own rule alone. ``held_s`` is for how long the pages are held, 0 if they are not."""

    rid: int
    incarnation: int
    pages: int
    slots: bytes
    offsets: bytes
    generations: bytes
    lengths: bytes
    checksums: bytes
    why: int = 0  # MissReason
    held_s: float = 0.0
    ends: bytes = b""
    covered: list[int] = []


class Reserved(_Message, frozen=True):
    """One element per hash; ``slots`` is ``NO_SLOT`` where the status is not RESERVED."""

    rid: int
    incarnation: int
    status: bytes
    slots: bytes
    offsets: bytes
    generations: bytes
    # Of spares that were granted; empty where none were.
    spare_slots: bytes = b""
    spare_offsets: bytes = b""
    spare_generations: bytes = b""


class Stored(_Message, frozen=True):
    """``status`` is a :class:`StoreStatus`; spares as of :class:`Reserved`."""

    rid: int
    incarnation: int
    status: int
    spare_slots: bytes = b""
    spare_offsets: bytes = b""
    spare_generations: bytes = b""


class Committed(_Message, frozen=True):
    rid: int
    incarnation: int
    status: bytes


class Done(_Message, frozen=True):
    """``count`` objects were affected (Evict: pages; Pin, Unpin: bytes that are pinned now; Announce: agents; Reaches: pools that
    are reached)."""

    rid: int
    incarnation: int
    count: int = 0


class StatsReply(_Message, frozen=True):
    rid: int
    incarnation: int
    stats: dict[str, float | int | str]


class Report(_Message, frozen=True):
    """The answer to Inspect: one dict of plain values a row."""

    rid: int
    incarnation: int
    rows: list[dict[str, Any]]


class AgentsReply(_Message, frozen=True):
    """``superblock`` is the pool's, checked bytes: its geometry."""

    rid: int
    incarnation: int
    superblock: bytes
    agents: list[Agent]


class Validated(_Message, frozen=True):
    """``valid`` has one byte per slot, 1 where the generation stood when the server answered."""

    rid: int
    incarnation: int
    valid: bytes


class Error(_Message, frozen=True):
    rid: int
    incarnation: int
    code: str
    message: str


Reply = (
    Welcome
    | NamespaceOpened
    | Located
    | Reserved
    | Stored
    | Committed
    | Done
    | StatsReply
    | Report
    | AgentsReply
    | Validated
    | Error
)

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)

encode = _encoder.encode
#: Both raise :class:`msgspec.ValidationError` / :class:`msgspec.DecodeError` on bytes that are not a valid message.
decode_request = _request_decoder.decode
decode_reply = _reply_decoder.decode
