"""SGLang's page hash: compiled ahead of a server where it can be, in Python where it cannot.

SGLang compiles a small extension at its first prefetch. A server that has to do so then waits some 15 s for ``g++``
inside its cache thread, and a flush in that time kills its scheduler; so :func:`prepare_page_hash` does it before. The
result is cached by torch for this user (``TORCH_EXTENSIONS_DIR``). The extension needs ninja, and the headers of Python
and OpenSSL; on a machine without them :class:`PageHash` gives the same hashes.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

_U32_MAX = 0xFFFFFFFF


class PageHash:
    """SGLang's hash extension (``hash_binding.cpp``) in Python: the same names, arguments and hashes."""

    def get_hash(
        self,
        raw_tokens: array[int],
        logical_len: int,
        unit_width: int,
        is_bigram: bool,
        prior_digest: bytes | None,
        page_size: int | None = None,
    ) -> str | list[str]:
        """Hex SHA-256 of the tokens chained to ``prior_digest``; with ``page_size``, one for each page."""
        digest = prior_digest or b""
        if page_size is None:
            return self._page(raw_tokens, 0, logical_len, unit_width, is_bigram, digest).hex()
        pages = []
        for start in range(0, logical_len, page_size):
            count = min(page_size, logical_len - start)
            digest = self._page(raw_tokens, start, count, unit_width, is_bigram, digest)
            pages.append(digest.hex())
        return pages

    @staticmethod
    def _page(raw: array[int], start: int, count: int, unit_width: int, is_bigram: bool, prior: bytes) -> bytes:
        if is_bigram:
            tokens = [token for i in range(start, start + count) for token in (raw[i], raw[i + 1])]
        else:
            tokens = list(raw[start * unit_width : (start + count) * unit_width])
        if any(token > _U32_MAX for token in tokens):
            # An odd byte tells pages of 64-bit tokens from those of 32-bit ones.
            return hashlib.sha256(prior + b"\xff" + array("Q", tokens).tobytes()).digest()
        return hashlib.sha256(prior + array("I", tokens).tobytes()).digest()


def add_environment_to_path() -> None:
    """Let tools that pip installed beside this Python (ninja) be found by programs that are started from here."""
    folder = str(Path(sys.executable).parent)
    if folder not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])


@functools.cache
def lacking_for_extension() -> str:
    """What this machine lacks to compile the extension, in words; empty if nothing."""
    add_environment_to_path()
    for tool in ("g++", "ninja"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    headers = "#include <Python.h>\n#include <openssl/sha.h>\nint main() { return 0; }\n"
    include = sysconfig.get_paths()["include"]
    line = ["g++", "-x", "c++", "-I", include, "-", "-lcrypto", "-o", "/dev/null"]
    done = subprocess.run(line, input=headers, text=True, capture_output=True)
    if done.returncode:
        reason = next((text for text in done.stderr.splitlines() if "error" in text or "cannot find" in text), "")
        return f"the headers of Python or OpenSSL are missing ({reason.strip()})"
    return ""


def page_hash_module(original: Callable[[], Any]) -> Any:
    """SGLang's compiled module, or :class:`PageHash` where it cannot be compiled.

    Args:
        original: SGLang's own ``_load_native_hash_module``.
    """
    return _fallback if lacking_for_extension() else original()


def prepare_page_hash() -> str:
    """Compile (or find compiled) the extension and compare it with :class:`PageHash` on a chain.

    Returns:
        What servers will use, in words.
    Raises:
        RuntimeError: it cannot be compiled although everything for it is there, or the two differ.
    """
    lacking = lacking_for_extension()
    if lacking:
        return f"page hashes will be computed in Python: {lacking}"
    from sglang.srt.mem_cache.cpp_utils.native_hash import _load_native_hash_module

    compiled = _load_native_hash_module()
    tokens = array("q", range(1000, 1040))
    if compiled.get_hash(tokens, 40, 1, False, bytes(32), 16) != _fallback.get_hash(
        tokens, 40, 1, False, bytes(32), 16
    ):
        raise RuntimeError("SGLang's compiled page hash and the kit's differ: this SGLang hashes pages in another way")
    return "the page-hash extension is compiled"


_fallback = PageHash()
