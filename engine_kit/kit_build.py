"""Build backend: setuptools, plus one ``.pth`` file at the root of the wheel (also of an editable one).

SGLang imports ``sgl_kernel`` and ``torchvision`` long before it loads plugins, and each of its worker processes is
a fresh interpreter, so the two import hooks of :mod:`maru_engine_kit.imports` have to be in place when the interpreter
starts. A ``.pth`` file is the one supported way, and setuptools has no option for it.
"""

from __future__ import annotations

import base64
import hashlib
import os
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401  the hooks of PEP 517 and PEP 660 that need no change
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

PTH_NAME = "maru_engine_kit_hooks.pth"
# `try`: an interpreter whose kit is half removed must still start.
PTH_TEXT = (
    "import sys; "
    "exec('try:\\n import maru_engine_kit.imports as _kit\\n _kit.install()\\nexcept ImportError:\\n pass')\n"
)


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    name = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    return _add_pth(Path(wheel_directory), name)


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    return _add_pth(Path(wheel_directory), name)


def _add_pth(folder: Path, name: str) -> str:
    """Rewrite the wheel with the ``.pth`` file and its line in RECORD."""
    wheel, scratch = folder / name, folder / (name + ".new")
    digest = base64.urlsafe_b64encode(hashlib.sha256(PTH_TEXT.encode()).digest()).rstrip(b"=").decode()
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(scratch, "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.infolist():
            data = old.read(item)
            if item.filename.endswith(".dist-info/RECORD"):
                data += f"{PTH_NAME},sha256={digest},{len(PTH_TEXT)}\n".encode()
            new.writestr(item, data)
        new.writestr(PTH_NAME, PTH_TEXT)
    os.replace(scratch, wheel)
    return name
