"""A namespace: everything that must be equal for the bytes of two processes to be interchangeable.

Engines build one from what they really run with; the server only ever sees the canonical record. Two
namespaces are the same exactly if their records are the same bytes. There are no defaults for what changes the
bytes: an engine that cannot establish a field must refuse to start, not guess.
"""

from __future__ import annotations

import hashlib

import msgspec

from maru_core.errors import ConfigError
from maru_core.pool.format import NAMESPACE_RECORD_MAX


class Namespace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The readable record. All strings are exact, none is normalised."""

    engine: str  # "sglang"
    hash_scheme: str  # how the engine chains page hashes: "sglang-sha256"
    model: str  # model id as people know it
    weights: str  # digest of the model's configuration and weights revision
    adapter: str  # how adapters and salts enter the page hash; "" where the engine has none
    kv_dtype: str  # logical: "bfloat16", "fp8_e4m3"
    page_tokens: int  # tokens per page
    layers: str  # "0:32"
    heads: str  # "kv8x128" / "mla512+64": heads of one shard and their width
    layout: str  # order of the bytes in an object: "page_first"
    tensor_parallel: int
    pipeline_parallel: int
    context_parallel: int
    data_parallel: int
    draft: str  # draft model and its digest; "" without speculation
    tag: str = ""  # free: the operator keeps deployments apart with it

    def record(self) -> bytes:
        """Canonical JSON: keys sorted, no spaces.

        Raises:
            ConfigError: the record does not fit a pool's namespace entry.
        """
        data = msgspec.json.encode(self, order="sorted")
        if len(data) > NAMESPACE_RECORD_MAX:
            raise ConfigError(
                f"the namespace record has {len(data)} bytes, a pool holds {NAMESPACE_RECORD_MAX}: shorten the tag or model name"
            )
        return data

    def digest(self) -> bytes:
        """32 bytes that stand for the record."""
        return record_digest(self.record())

    @staticmethod
    def parse(record: bytes) -> Namespace:
        """The namespace of a record.

        Raises:
            ConfigError: not a record of this version.
        """
        try:
            return msgspec.json.decode(record, type=Namespace)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"not a namespace record: {error}") from error


def record_digest(record: bytes) -> bytes:
    """SHA-256 of a namespace record, 32 bytes."""
    return hashlib.sha256(record).digest()


def differences(a: Namespace, b: Namespace) -> dict[str, tuple[object, object]]:
    """Fields in which two namespaces differ, with both values: why one does not read what the other stored."""
    return {
        field: (getattr(a, field), getattr(b, field))
        for field in Namespace.__struct_fields__
        if getattr(a, field) != getattr(b, field)
    }
