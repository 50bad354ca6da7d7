"""The server's log: text for people, or one JSON object a line for machines (``--log-format json``).

A line of JSON has ``time`` (UTC, ISO 8601), ``level``, ``logger``, ``message``, and whatever the call gave besides as
``extra={"fields": {...}}``; an exception's traceback is ``error``. In text, such fields are not shown: the message says it all.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Any, Final

from maru_core.errors import ConfigError

LOG_FORMATS: Final = ("text", "json")


class JsonFormatter(logging.Formatter):
    """One line, whatever the message is."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict):
            line.update((name, value) for name, value in fields.items() if name not in line)
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_log(level: str, format: str) -> None:
    """Log to stderr.

    Args:
        level: one of :data:`maru_core.settings.LOG_LEVELS`.
        format: one of :data:`LOG_FORMATS`.
    Raises:
        ConfigError: there is no such format.
    """
    if format not in LOG_FORMATS:
        raise ConfigError(f"--log-format is {format!r}: give one of {', '.join(LOG_FORMATS)}")
    logging.basicConfig(
        stream=sys.stderr, level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    if format == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter())
