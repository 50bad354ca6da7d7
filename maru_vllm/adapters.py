"""LoRA adapters by content: what vLLM's block hashes leave out.

vLLM puts an adapter's name and path into the hash of every block. On another machine, or after a training run, the same path has another
adapter, so the key of a page under an adapter is the block's hash together with a digest of the adapter's files. Reading them takes time that
the scheduler does not have: a thread does it once for each adapter, and until it is done its requests are served as without Maru.
An adapter that cannot be read, or that is replaced while it is in use (``load_inplace``), is never shared.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import logging
from collections.abc import Sequence
from typing import Any, Final

from maru_core.errors import ConfigError
from maru_core.weights import locate_model, weights_digest

log = logging.getLogger("maru.vllm")

#: Adapters that are remembered; a server with more of them in use reads some again.
ADAPTERS_MAX: Final = 4096


class Adapters:
    """The digests of the adapters that were asked for. Used by one thread."""

    def __init__(self) -> None:
        self._digests: dict[tuple[int, str, str], concurrent.futures.Future[bytes]] = {}
        self._reader: concurrent.futures.ThreadPoolExecutor | None = None

    def digest(self, lora_request: Any) -> bytes | None:
        """What stands for the adapter's content: nothing without one; None while that is not known, or for ever."""
        if lora_request is None:
            return b""
        if lora_request.load_inplace:
            return None
        key = (int(lora_request.lora_int_id), str(lora_request.lora_name), str(lora_request.lora_path))
        future = self._digests.get(key)
        if future is None:
            if self._reader is None:
                self._reader = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="maru-adapter")
            if len(self._digests) >= ADAPTERS_MAX:
                self._digests.pop(next(iter(self._digests)))
            future = self._digests[key] = self._reader.submit(_read, key[2], bool(lora_request.is_3d_lora_weight))
            future.add_done_callback(_say_why_not)
        if not future.done() or future.cancelled() or future.exception() is not None:
            return None
        return future.result()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.shutdown(wait=False, cancel_futures=True)


class Keys:
    """The page keys of one request: its block hashes, as they are or joined with the adapter's digest."""

    __slots__ = ("_adapters", "_digest", "_last", "_made")

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters
        self._digest: bytes | None = None
        self._made: list[bytes] = []
        self._last = b""  # the block hash of the last key

    def of(self, request: Any) -> Sequence[bytes]:
        """One key for each block hash, 32 bytes; none while the adapter is not known."""
        hashes: Sequence[bytes] = request.block_hashes
        if request.lora_request is None:
            return hashes
        if self._digest is None:
            self._digest = self._adapters.digest(request.lora_request)
            if self._digest is None:
                return ()
        made = len(self._made)
        if made and (made > len(hashes) or hashes[made - 1] != self._last):
            self._made.clear()  # vLLM has changed what the request says
        for block_hash in hashes[len(self._made) :]:
            self._made.append(hashlib.sha256(self._digest + block_hash).digest())
            self._last = block_hash
        return self._made


def _read(path: str, stacked: bool) -> bytes:
    where = locate_model(path, None, None, option="--lora-modules")
    digest = weights_digest(where, option="--lora-modules")
    return hashlib.sha256(f"{digest} stacked={stacked}".encode()).digest()


def _say_why_not(future: concurrent.futures.Future[bytes]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        known = isinstance(error, ConfigError)
        log.warning("requests of a LoRA adapter are served without Maru: %s", error, exc_info=None if known else error)
