"""Latent attention (MLA) on ``torch_native`` attention.

SGLang 0.5.23 chooses for it as for ``triton``: a prompt without a prefix by plain attention over expanded keys and values. But
``torch_native`` reads keys and values from the cache, which holds the latent rows, so what it computes then is not attention. In the
absorbed form, which the rows are made for, it is right with a prefix and without. The choice is put right when SGLang imports the
module that has it, which it does for such models only.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_MODULE = "sglang.srt.models.deepseek_common.attention_backend_handler"


class _Loader(importlib.abc.Loader):
    """Another module's loader, and what is to be done when it has run."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.AttentionBackendRegistry.register("torch_native", lambda attn, batch: module.AttnForwardMethod.MLA)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def absorb_on_import() -> None:
    """See the module. Repeatable."""
    if _MODULE not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
