"""Maru's keys of ``kv_connector_extra_config`` (in ``--kv-transfer-config``), checked.

Whatever is not Maru's is refused, with the nearest known key: a setting that is misspelt must not be silently without effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from maru_core import extra_config

OPTION: Final = "kv_connector_extra_config"
#: A hold ends by itself after this, whatever is asked for: the server's default bound, seconds.
HOLD_MAX_S: Final = 60.0


class ExtraConfig(extra_config.ExtraConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The store's keys, and those of the connector."""

    #: Also store the full blocks of what was generated, not of prompts only.
    store_decode: bool = True
    #: For how long what a lookup found is kept from eviction until it is loaded, seconds; 0: not at all.
    hold_s: float = 30.0


#: What to write instead, for each key.
_CURES: Final = {
    **extra_config.CURES,
    "store_decode": "give true or false",
    "hold_s": f"give seconds from 0 (no hold) to {HOLD_MAX_S:g}",
}


def parse_extra_config(extra: Mapping[str, Any] | None) -> ExtraConfig:
    """The checked extra config.

    Raises:
        ConfigError: an unknown key or an unusable value; the message has key, value and cure.
    """
    config = extra_config.parse(ExtraConfig, dict(extra or {}), OPTION, _CURES)
    if not 0 <= config.hold_s <= HOLD_MAX_S:
        raise extra_config.wrong("hold_s", config.hold_s, OPTION, _CURES)
    return config
