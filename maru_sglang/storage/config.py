"""The extra config of the storage backend, checked: ``--hicache-storage-backend-extra-config '{…}'``; and the direct linker's,
which is the same with a key of its own: ``--unified-cache-external-linker-config '{…}'``.

SGLang takes out the keys that it understands before a backend sees the rest (:data:`SGLANG_KEYS`). Three kinds of its
keys stay in and are tolerated, each only where SGLang itself leaves it:

- ``backend_name``, ``module_path``, ``class_name`` and ``interface_v1``, when the backend runs as ``dynamic``;
- ``file_storage_path``, which SGLang adds for every backend when ``--file-storage-path`` has a value.

Everything else that is not Maru's is refused, with the nearest known key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from maru_core.extra_config import CURES, ExtraConfig, parse

OPTION: Final = "--hicache-storage-backend-extra-config"
LINKER_OPTION: Final = "--unified-cache-external-linker-config"

#: Keys that SGLang pops: ``parse_storage_backend_extra_config`` and ``_generate_storage_config`` (tp_lcm_size).
SGLANG_KEYS: Final = (
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
    "tp_lcm_size",
)
_DYNAMIC_KEYS: Final = ("backend_name", "module_path", "class_name")


class LinkerConfig(ExtraConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The direct linker's keys."""

    #: Two log lines for each layer of each load: when it was launched, and when the forward pass went on.
    log_layers: bool = False


#: What to write instead, for each key.
_CURES: Final = {**CURES, "log_layers": "give true or false"}


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
    return parse(ExtraConfig, given, OPTION, others=SGLANG_KEYS, engine="SGLang")


def parse_linker_config(config: Mapping[str, Any] | None) -> LinkerConfig:
    """The checked config of the direct linker, of which SGLang takes nothing for itself.

    Raises:
        ConfigError: an unknown key or an unusable value; the message has key, value and cure.
    """
    return parse(LinkerConfig, dict(config or {}), LINKER_OPTION, _CURES)
