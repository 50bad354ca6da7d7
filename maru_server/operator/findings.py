"""What ``maru doctor`` finds."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

Level = Literal["ok", "warn", "fail"]

OK: Final[Level] = "ok"
WARN: Final[Level] = "warn"
FAIL: Final[Level] = "fail"


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at.

    ``name`` stays the same between releases; ``text`` says what was found, with its values; ``cure`` what to do about it,
    or, where ``level`` is ok, what is worth knowing."""

    name: str
    level: Level
    text: str
    cure: str = ""
