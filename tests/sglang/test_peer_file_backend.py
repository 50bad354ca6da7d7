"""SGLang's file backend as a peer of ``maru-bench peers``: the adapter over the real ``HiCacheFile``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from maru_bench.pages import EngineBuffer
from maru_bench.peers.adapters import FileAdapter, PeerConfig, PeerError
from maru_bench.peers.orders import keys_of

pytestmark = pytest.mark.sglang

PAGE = 64 << 10


def test_pages_go_to_files_and_come_back(tmp_path: Path) -> None:
    buffer = EngineBuffer(8 * PAGE)
    adapter = FileAdapter(
        PeerConfig(peer="file", buffer_bytes=8 * PAGE, page_bytes=PAGE, directory=str(tmp_path)), buffer.data
    )
    keys, pages = keys_of(1, 0, 8), buffer.pages(0, 8, PAGE, 8)
    right = pages.copy()
    adapter.store(keys, None, pages)
    assert sum(path.stat().st_size for path in tmp_path.glob("*.bin")) == 8 * PAGE
    adapter.exists(keys, PAGE)
    pages[:] = 0
    adapter.load(keys, pages)
    assert np.array_equal(pages, right)
    adapter.remove(keys[4:])
    with pytest.raises(PeerError, match="found 4 of 8"):
        adapter.exists(keys, PAGE)
