"""SGLang's page keys as Maru's hashes, and the parent that ties a call's pages to what comes before them.

SGLang names a page by the SHA-256 of its tokens and of the page before it, written as 64 hex digits; Maru stores the
same 32 bytes. Where the chain before a call ends is in ``HiCacheStorageExtraInfo.prefix_keys``. What its values mean in
SGLang 0.5.23, for a *store* (``write_backup_storage``, the buffer pipeline, ``_page_backup``):

=============  =======================================================================================
``None``       chains are not passed (``hicache_storage_pass_prefix_keys`` is off, or the caller has none,
               as the decode offload manager): nobody knows where the pages hang, so they are not stored
``[]``         the call's first page is the first of its sequence
``[a, .., z]`` ``z`` is the page before the call's first one
=============  =======================================================================================

Queries are different: ``HybridCacheController._storage_hit_query`` and pipeline-parallel tickets turn an empty chain
into ``None``. A query needs no parent (a page's hash covers everything before it), so they only use :func:`pack_keys`.
"""

from __future__ import annotations

from collections.abc import Sequence

from maru_core.errors import MaruError
from maru_core.protocol import HASH_BYTES, ROOT

KEY_DIGITS = 2 * HASH_BYTES


class ChainError(MaruError):
    """Keys that are not page hashes, or that do not say where in a chain they belong: refused, never guessed.

    ``kind`` is one word for logs: "key", "unchained" or "restart"."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


def pack_keys(keys: Sequence[str]) -> bytes:
    """Packed 32-byte hashes of ``keys``, in order.

    Raises:
        ChainError: a key is not exactly 64 hex digits.
    """
    try:
        # bytes.fromhex skips white space, so a key of the right length may still be short: the total tells.
        packed = bytes.fromhex("".join(keys))
    except (ValueError, TypeError) as error:
        raise ChainError(_not_a_hash(keys), "key") from error
    if len(packed) != len(keys) * HASH_BYTES or any(len(key) != KEY_DIGITS for key in keys):
        raise ChainError(_not_a_hash(keys), "key")
    return packed


def parent_of(keys: Sequence[str], prefix_keys: Sequence[str] | None) -> bytes:
    """Hash of the page before ``keys[0]``, or ``ROOT`` if it is the first page of its sequence.

    Raises:
        ChainError: chains are not passed, or the keys restart or repeat one.
    """
    if prefix_keys is None:
        raise ChainError(
            "SGLang passed no chain (prefix_keys is None): pages are not stored. The maru plugin sets "
            "hicache_storage_pass_prefix_keys; SGLang's decode KV offload has no chains to pass",
            "unchained",
        )
    seen = set(keys)
    if len(seen) != len(keys):
        raise ChainError(f"a chain has the same page twice among its {len(keys)} keys: not stored", "restart")
    if not prefix_keys:
        return ROOT
    if not seen.isdisjoint(prefix_keys):
        raise ChainError(
            "a chain starts again in the middle (a page is among the pages before it): not stored", "restart"
        )
    return pack_keys(prefix_keys[-1:])


def _not_a_hash(keys: Sequence[str]) -> str:
    for key in keys:
        if not isinstance(key, str) or len(key) != KEY_DIGITS or not _is_hex(key):
            return f"{str(key)[:80]!r} is not a page hash of {KEY_DIGITS} hex digits"
    return "the keys are not page hashes"


def _is_hex(key: str) -> bool:
    return all(digit in "0123456789abcdefABCDEF" for digit in key)
