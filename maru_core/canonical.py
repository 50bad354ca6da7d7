"""Settings as canonical JSON, so that two processes can compare them by digest.

Engines keep their settings as objects of many kinds. Those that mean the same in every process have one form here; anything else is
refused, because text that happens to hold an address or an order would differ from process to process, or hide a difference.
"""

from __future__ import annotations

import dataclasses
import enum
import fractions
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from maru_core.errors import ConfigError

#: Parts of a model configuration that say where it came from, not what it computes.
_PROVENANCE: Final = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})


def meaningful(value: Any) -> Any:
    """A model configuration (as ``to_dict`` gives it) without what only says where it came from."""
    if isinstance(value, Mapping):
        kept = {str(key): meaningful(item) for key, item in value.items() if key not in _PROVENANCE}
        if isinstance(auto_map := kept.get("auto_map"), dict):
            kept["auto_map"] = {key: _without_repository(item) for key, item in auto_map.items()}
        return kept
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [meaningful(item) for item in value]
    return value


def json_digest(value: Any) -> str:
    """32 hex digits of the SHA-256 of ``value`` as canonical JSON.

    Raises:
        ConfigError: something in it has no form that is the same in every process.
    """
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the engine's configuration cannot be compared between processes ({error})") from error
    return text_digest(text)[:32]


def text_digest(text: str) -> str:
    """64 hex digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def dtype_name(dtype: Any) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def _without_repository(reference: Any) -> Any:
    """``org/name--module.Class`` is ``module.Class`` when the same files lie in a local directory."""
    return reference.rpartition("--")[2] if isinstance(reference, str) else reference


def _plain(value: Any) -> Any:
    if type(value).__name__ == "dtype":
        return dtype_name(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, set | frozenset):
        return sorted(str(item) for item in value)
    if isinstance(value, fractions.Fraction):
        return str(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if hasattr(value, "to_dict"):
        return meaningful(value.to_dict())
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.asdict(value)
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise ConfigError(
        f"the engine's configuration has a {type(value).__name__}, which Maru cannot compare between processes"
    )
