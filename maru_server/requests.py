"""Is a request possible? What can be said of a message by itself, before anything is looked up or changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from typing import Any, Final, TypeAlias

import numpy as np

from maru_core.protocol import (
    HASH_BYTES,
    MAX_BATCH,
    MAX_LOCATED,
    PROTOCOL_VERSION,
    ROOT,
    SPARES_MAX,
    Commit,
    ErrorCode,
    Hello,
    Match,
    Release,
    Reply,
    Reserve,
    Rule,
    Store,
    Validate,
)
from maru_server.calls import Deferred
from maru_server.directory import COMPONENT_NAME_MAX
from maru_server.lookup import split
from maru_server.sessions import Session

#: What does one kind of request: the message, its session, the server's own time and the caller's, both in seconds. It
#: checks first, and raises :class:`RefusedError` before it has changed anything.
Handler: TypeAlias = Callable[[Any, Session, float, float], Reply | Deferred | None]

#: Most shards that a page may have.
MAX_WORLD: Final = 4096
_NAME_MAX: Final = 256  # characters of a client's name, host, boot id, ...
_REQUEST_MAX: Final = 64  # bytes of the request id of a hold
_WINDOW_MAX: Final = 1 << 31  # pages of a rule
_RULES: Final = frozenset(int(rule) for rule in Rule)


class RefusedError(Exception):
    """The request is answered with an error; nothing was changed."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def _invalid(message: str) -> RefusedError:
    return RefusedError(ErrorCode.INVALID, message)


def count_hashes(hashes: bytes) -> int:
    """How many page hashes a message has."""
    if len(hashes) % HASH_BYTES:
        raise _invalid(f"hashes has {len(hashes)} bytes: send {HASH_BYTES} for each page")
    if len(hashes) > MAX_BATCH * HASH_BYTES:
        raise _invalid(f"{len(hashes) // HASH_BYTES} pages in one message: send at most {MAX_BATCH}")
    return len(hashes) // HASH_BYTES


def split_hashes(hashes: bytes) -> list[bytes]:
    """The page hashes of a message, one by one."""
    count_hashes(hashes)
    return split(hashes)


def check_component(name: str) -> None:
    if not 0 < len(name) <= COMPONENT_NAME_MAX or not name.isascii() or not name.isprintable():
        raise _invalid(f"component name {name[:64]!r}: give 1 to {COMPONENT_NAME_MAX} printable ASCII characters")


def check_hello(message: Hello) -> None:
    if message.protocol != PROTOCOL_VERSION:
        raise RefusedError(
            ErrorCode.VERSION,
            f"the client speaks protocol {message.protocol}, this server {PROTOCOL_VERSION}: "
            "install the same Maru release on both",
        )
    if len(message.client_id) != 16:
        raise _invalid(f"client_id has {len(message.client_id)} bytes: send 16 random ones")
    for field in ("name", "host", "pid_ns", "boot_id"):
        if len(getattr(message, field)) > _NAME_MAX:
            raise _invalid(f"{field} is longer than {_NAME_MAX} characters: shorten it")


def check_match(message: Match, most_components: int, known: Container[str] = ()) -> None:
    """``known`` are components that there are: their names have been looked at."""
    if not 0 <= message.shard < MAX_WORLD:
        raise _invalid(f"shard is {message.shard}: give 0 to {MAX_WORLD - 1}")
    if not 0 < len(message.components) <= most_components:
        raise _invalid(f"{len(message.components)} components: give 1 to {most_components}")
    if (located := len(message.hashes) // HASH_BYTES * len(message.components)) > MAX_LOCATED:
        raise _invalid(f"{located} objects (pages times components) in one match: ask for at most {MAX_LOCATED}")
    for name in message.components:
        if name not in known:
            check_component(name)
    if message.rules:
        _check_rules(message)
    if message.hold is not None:
        hold = message.hold
        check_request(hold.request)
        if message.sparse:
            raise _invalid("sparse with a hold: a hold keeps a prefix, ask without sparse")
        if not 1 <= hold.ranks <= MAX_WORLD:
            raise _invalid(f"a hold for {hold.ranks} ranks: give 1 to {MAX_WORLD}")
        if not (hold.seconds > 0 and math.isfinite(hold.seconds)):
            raise _invalid(f"a hold for {hold.seconds} s: give more than 0")


def _check_rules(message: Match) -> None:
    if message.sparse:
        raise _invalid("sparse with rules: rules are for a prefix, ask without sparse")
    if len(message.rules) != len(message.components):
        raise _invalid(f"{len(message.rules)} rules for {len(message.components)} components: give one each or none")
    for want, name in zip(message.rules, message.components, strict=True):
        if want.rule not in _RULES:
            raise _invalid(f"rule {want.rule} of component {name!r} is not known: give one of {sorted(_RULES)}")
        if want.rule != Rule.ALL_PAGES and not 1 <= want.pages <= _WINDOW_MAX:
            raise _invalid(f"rule {want.rule} of component {name!r} has {want.pages} pages: give 1 to {_WINDOW_MAX}")
        if want.rule == Rule.BLOCK_GROUPS and not 1 <= want.group <= want.pages:
            raise _invalid(
                f"the groups of component {name!r} have {want.group} of {want.pages} pages: give 1 to {want.pages}"
            )


def check_request(request: bytes) -> None:
    if not 1 <= len(request) <= _REQUEST_MAX:
        raise _invalid(f"the request id of a hold has {len(request)} bytes: give 1 to {_REQUEST_MAX}")


def check_reserve(message: Reserve | Store, extent_bytes: int, known: Container[str] = ()) -> None:
    """All but its chain, for which see :func:`check_chain`. ``known`` as of :func:`check_match`."""
    world, shard, nbytes = message.world, message.shard, message.nbytes
    if not 1 <= world <= MAX_WORLD:
        raise _invalid(f"world is {world}: give 1 to {MAX_WORLD}")
    if not 0 <= shard < world:
        raise _invalid(f"shard is {shard} of world {world}: give 0 to {world - 1}")
    if len(message.parent) != HASH_BYTES:
        raise _invalid(f"parent has {len(message.parent)} bytes: send {HASH_BYTES}")
    if nbytes <= 0:
        raise _invalid(f"nbytes is {nbytes}: an object has at least one byte")
    if nbytes > extent_bytes:
        raise RefusedError(
            ErrorCode.TOO_LARGE,
            f"an object of {nbytes} bytes does not fit into an extent of {extent_bytes}: "
            "format the pool with a larger extent",
        )
    if message.component not in known:
        check_component(message.component)
    if len(message.spares) % HASH_BYTES or len(message.spares) > SPARES_MAX * HASH_BYTES:
        raise _invalid(
            f"spares has {len(message.spares)} bytes: send {HASH_BYTES} for each slot that is wanted ahead, for at most {SPARES_MAX}"
        )


def check_store(message: Store) -> None:
    """What it has besides a Reserve."""
    count = count_hashes(message.hashes)
    if not 1 <= count <= SPARES_MAX:
        raise _invalid(f"{count} pages to be stored in slots granted ahead: send 1 to {SPARES_MAX}")
    if (
        len(message.slots) != 4 * count
        or len(message.generations) != 8 * count
        or len(message.checksums) not in (0, 8 * count)
    ):
        raise _invalid(
            f"{len(message.slots)} bytes of slots, {len(message.generations)} of generations and {len(message.checksums)} of checksums "
            f"for {count} pages: send 4, 8 and 8 for each, or no checksums"
        )


def check_chain(message: Reserve, keys: list[bytes]) -> None:
    """``keys`` are the message's hashes."""
    distinct = set(keys)
    if len(distinct) != len(keys) or message.parent in distinct or ROOT in distinct:
        raise _invalid("a hash is repeated, is its own ancestor, or is the root's: send a chain of pages")


def check_slots(message: Commit | Release | Validate, slot_count: int) -> None:
    slots, generations = message.slots, message.generations
    count = len(slots) // 4
    if len(slots) % 4 or len(generations) != 8 * count or count > MAX_BATCH:
        raise _invalid(
            f"{len(slots)} bytes of slots and {len(generations)} of generations: send 4 and 8 for each, "
            f"and at most {MAX_BATCH}"
        )
    if count and int(np.frombuffer(slots, "<u4").max()) >= slot_count:
        raise _invalid(f"a slot is not below {slot_count}: send what was reserved")
    if isinstance(message, Commit) and message.checksums and len(message.checksums) != 8 * count:
        raise _invalid(f"{len(message.checksums)} bytes of checksums for {count} slots: send 8 each or none")
