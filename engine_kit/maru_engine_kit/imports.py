"""Import hooks: a stand-in ``sgl_kernel`` and the operator schemas that a CPU torchvision lacks.

Installed at interpreter start, so this module imports nothing heavy: torch is only looked at when somebody imports
one of the two packages.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_STAND_IN_FOLDER = str(Path(__file__).parent / "stand_in")
#: torchvision's compiled operators exist only beside a torch of the same build; its Python side registers
#: shape functions for these two whether they exist or not.
_TORCHVISION_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_kept_libraries: list[Any] = []


def has_accelerator() -> bool:
    """Whether torch sees any accelerator here: then the kit stays out of the way."""
    import torch

    if torch.cuda.is_available():
        return True
    xpu = getattr(torch, "xpu", None)
    return bool(xpu is not None and xpu.is_available())


class _StandInFinder(importlib.abc.MetaPathFinder):
    """Finds ``sgl_kernel`` in the kit. Last in line, so that an installed one always wins."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "sgl_kernel" or has_accelerator():
            return None
        return importlib.machinery.PathFinder.find_spec(fullname, [_STAND_IN_FOLDER])


class _TorchvisionFinder(importlib.abc.MetaPathFinder):
    """Defines the missing schemas just before torchvision is imported; never finds anything itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            if not has_accelerator() and not _torchvision_has_operators():
                define_torchvision_schemas()
        return None


def _torchvision_has_operators() -> bool:
    """Whether torchvision's compiled library would load beside this torch.

    A torchvision built for another torch has the file but cannot load it, so the only proof is to load it.
    """
    import torch

    spec = importlib.machinery.PathFinder.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return True
    for folder in spec.submodule_search_locations:
        for library in Path(folder).glob("_C*.so"):
            try:
                torch.ops.load_library(str(library))
            except OSError:
                continue
            return True
    return False


def define_torchvision_schemas() -> None:
    """Give torch the two operator schemas; calling them still fails, which is right: nobody may."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in _TORCHVISION_SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)
    _kept_libraries.append(library)  # a schema lives as long as its Library


def install() -> None:
    """Put both hooks in place. Repeatable."""
    if any(isinstance(finder, _StandInFinder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _TorchvisionFinder())
    sys.meta_path.append(_StandInFinder())
