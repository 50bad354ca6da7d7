"""A store's keys among the options that an engine hands through to Maru, checked.

Whatever is neither Maru's nor the engine's own is refused, with the nearest known key: a setting that is misspelt must not
be silently without effect. Each engine says which option it is, adds keys of its own, and takes out what it means by others.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from maru_core.errors import ConfigError
from maru_core.store_config import StoreConfig

#: Longest tag, characters: the namespace record has a fixed size in the pool.
TAG_MAX: Final = 200


class ExtraConfig(StoreConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The store's keys, and the one that all engines have beside them."""

    #: Keeps deployments apart that would otherwise share: it is part of the namespace.
    tag: str = ""

    def store_config(self) -> StoreConfig:
        """What the store needs of it."""
        return StoreConfig(**{name: getattr(self, name) for name in StoreConfig.__struct_fields__})


C = TypeVar("C", bound=ExtraConfig)

#: What to write instead, for each key.
CURES: Final[Mapping[str, str]] = {
    "server": 'give "ipc:///path/to/socket" or "tcp://host:port" (several joined by commas where standbys may take over), or '
    "leave it out for the embedded server",
    "client_key": "give the path of this client's key file, which maru-server keygen makes",
    "server_key": "give the server's public key as text, or the path of its server.pub",
    "pool": 'give the pool\'s URI on this host, such as "shm://name", "file:///path" or "dax:///dev/dax0.0"',
    "pool_size": 'give a size as text, such as "8G" or "512M"',
    "timeout_ms": "give whole milliseconds from 1 to 60000",
    "verify": 'give "generation" (default) or "checksum"',
    "copy_threads": "give a whole number from 1 to 64, or leave it out",
    "transport": 'give "auto" (default), "cxl" to map the pool or "rdma" to reach it through agents',
    "rdma_devices": 'give network devices as UCX names them, such as "mlx5_0:1", or leave it out',
    "tag": f"give text of at most {TAG_MAX} printable characters",
}


def parse(
    kind: type[C],
    given: Mapping[str, Any],
    option: str,
    cures: Mapping[str, str] = CURES,
    *,
    others: Sequence[str] = (),
    engine: str = "",
) -> C:
    """The checked options.

    Args:
        kind: the class that has them.
        option: as the operator knows them, for messages.
        cures: what to write instead, for each key of ``kind``.
        others: keys that ``engine`` would have taken out, had they been written right.
    Raises:
        ConfigError: an unknown key or an unusable value; the message has key, value and cure.
    """
    values = {key: _checked(kind, key, value, option, cures, others, engine) for key, value in given.items()}
    try:
        config = kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error
    if len(config.tag) > TAG_MAX or not config.tag.isprintable():
        raise wrong("tag", config.tag, option, cures)
    if config.server is not None and config.pool_size is not None:
        raise ConfigError(
            f"{option}: pool_size is {config.pool_size!r} and server is {config.server!r}, but a pool's size is decided by "
            "the server that owns it: leave pool_size out (maru-server --size), or leave server out"
        )
    return config


def wrong(key: str, value: Any, option: str, cures: Mapping[str, str] = CURES) -> ConfigError:
    """The error for a key's unusable value."""
    return ConfigError(f"{option}: {key} is {value!r}: {cures[key]}")


def _checked(
    kind: type[ExtraConfig],
    key: str,
    value: Any,
    option: str,
    cures: Mapping[str, str],
    others: Sequence[str],
    engine: str,
) -> Any:
    for field in msgspec.structs.fields(kind):
        if field.name == key:
            try:
                return msgspec.convert(value, field.type, strict=True)
            except msgspec.ValidationError as error:
                raise wrong(key, value, option, cures) from error
    near = difflib.get_close_matches(str(key), (*kind.__struct_fields__, *others), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    known = f"Maru knows {', '.join(kind.__struct_fields__)}"
    if others:
        known += f"; {engine} knows {', '.join(others)}"
    raise ConfigError(f"{option}: unknown key {key!r} (value {value!r}): {hint}{known}")
