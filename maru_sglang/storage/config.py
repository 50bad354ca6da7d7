"""The extra config of the storage backend, checked: ``--hicache-storage-backend-extra-config '{…}'``.

SGLang takes out the keys that it understands before a backend sees the rest (:data:`SGLANG_KEYS`). Three kinds of its
keys stay in and are tolerated, each only where SGLang itself leaves it:

- ``backend_name``, ``module_path``, ``class_name`` and ``interface_v1``, when the backend runs as ``dynamic``;
- ``file_storage_path``, which SGLang adds for every backend when ``--file-storage-path`` has a value.

Everything else that is not Maru's is refused, with the nearest known key.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from maru_core.errors import ConfigError
from maru_core.store_config import StoreConfig

OPTION: Final = "--hicache-storage-backend-extra-config"

#: Keys that SGLang pops: ``parse_storage_backend_extra_config`` and ``_generate_storage_config`` (tp_lcm_size).
SGLANG_KEYS: Final = (
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
    "tp_lcm_size",
)
_DYNAMIC_KEYS: Final = ("backend_name", "module_path", "class_name")
#: Longest tag, characters: the namespace record has a fixed size in the pool.
TAG_MAX: Final = 200


class ExtraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Maru's keys of the extra config; their meaning is that of :class:`maru_core.store.StoreConfig`."""

    server: str | None = None
    pool: str | None = None
    pool_size: str | None = None
    timeout_ms: int = 500
    verify: Literal["generation", "checksum"] = "generation"
    copy_threads: int | None = None
    #: Keeps deployments apart that would otherwise share: it is part of the namespace.
    tag: str = ""

    def store_config(self) -> StoreConfig:
        """What the store needs of it.

        Raises:
            ConfigError: a value that the store cannot use.
        """
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "tag"}
        return StoreConfig(**fields)


#: What to write instead, for each key.
_CURES: Final = {
    "server": 'give "ipc:///path/to/socket" or "tcp://host:port", or leave it out for the embedded server',
    "pool": 'give the pool\'s URI on this host, such as "shm://name", "file:///path" or "dax:///dev/dax0.0"',
    "pool_size": 'give a size as text, such as "8G" or "512M"',
    "timeout_ms": "give whole milliseconds from 1 to 60000",
    "verify": 'give "generation" (default) or "checksum"',
    "copy_threads": "give a whole number from 1 to 64, or leave it out",
    "tag": f"give text of at most {TAG_MAX} printable characters",
}


def parse_extra_config(extra: Mapping[str, Any] | None) -> ExtraConfig:
    """The checked extra config, as SGLang hands it to a backend.

    Raises:
        ConfigError: an unknown key or an unusable value; the message has key, value and cure.
    """
    given = dict(extra or {})
    given.pop("file_storage_path", None)
    if all(key in given for key in _DYNAMIC_KEYS):
        for key in (*_DYNAMIC_KEYS, "interface_v1"):
            given.pop(key, None)
    values = {key: _checked(key, value) for key, value in given.items()}
    config = ExtraConfig(**values)
    if len(config.tag) > TAG_MAX or not config.tag.isprintable():
        raise _wrong("tag", config.tag)
    if config.server is not None and config.pool_size is not None:
        raise ConfigError(
            f"{OPTION}: pool_size is {config.pool_size!r} and server is {config.server!r}, but a pool's size is decided by "
            "the server that owns it: leave pool_size out (maru-server --size), or leave server out"
        )
    try:
        config.store_config()
    except ConfigError as error:
        raise ConfigError(f"{OPTION}: {error}") from error
    return config


def _checked(key: str, value: Any) -> Any:
    for field in msgspec.structs.fields(ExtraConfig):
        if field.name == key:
            try:
                return msgspec.convert(value, field.type, strict=True)
            except msgspec.ValidationError as error:
                raise _wrong(key, value) from error
    known = (*ExtraConfig.__struct_fields__, *SGLANG_KEYS)
    near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(
        f"{OPTION}: unknown key {key!r} (value {value!r}): {hint}Maru knows {', '.join(ExtraConfig.__struct_fields__)}; "
        f"SGLang knows {', '.join(SGLANG_KEYS)}"
    )


def _wrong(key: str, value: Any) -> ConfigError:
    return ConfigError(f"{OPTION}: {key} is {value!r}: {_CURES[key]}")
