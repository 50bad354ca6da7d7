"""The commands that a Markdown page tells its reader to run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def commands_of(page: str) -> list[list[str]]:
    """Words of every command in the page's ``sh`` and ``console`` blocks, and of every ``vllm serve`` or ``maru...`` with options in its
    text. A line that begins with an option, which continues a command that the reader has, is left out."""
    text = (ROOT / page).read_text()
    found = []
    for kind, block in re.findall(r"^```(sh|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            line = line.removeprefix("$ ") if kind == "console" else line
            if line.strip() and not line.lstrip().startswith(("-", "#", '"')):
                found.append(line)
    words = []
    for line in found:
        try:
            words.append(shlex.split(line, comments=True))
        except ValueError:
            # A quotation over several lines.
            continue
    return [each for each in words if each]
