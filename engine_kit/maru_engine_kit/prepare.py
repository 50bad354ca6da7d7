"""Compile SGLang's page-hash extension now, so that no server compiles it at its first prefetch.

A server that has to compile it then waits some 15 s for ``g++`` inside its cache thread, and a flush in that time
kills its scheduler. The result is cached by torch for this user (``TORCH_EXTENSIONS_DIR``).
"""

from __future__ import annotations


def compile_page_hash() -> str:
    """Compile (or find compiled) the extension and prove it on one page.

    Returns:
        The hash that it gives for one page of 16 zeros, hex.
    Raises:
        RuntimeError: it cannot be compiled; names what has to be installed.
    """
    from sglang.srt.mem_cache.cpp_utils.native_hash import get_native_hash

    try:
        return str(get_native_hash([0] * 16, None))
    except RuntimeError as error:
        raise RuntimeError(
            f"SGLang's page-hash extension cannot be compiled ({error.__cause__ or error}): "
            "install g++, ninja and the OpenSSL headers (Debian: apt-get install g++ ninja-build libssl-dev)"
        ) from error
