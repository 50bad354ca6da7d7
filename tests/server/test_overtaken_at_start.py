"""A server that is overtaken while it takes a pool up writes nothing into it any more, wherever it stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from maru_harness import WALL_OFFSET, Server, chain, geometry

from maru_core.protocol import Pin
from maru_server import books
from maru_server.directory import PoolDirectory
from maru_server.election import LostError
from maru_server.state import ServerState, StateConfig

Bytes: TypeAlias = npt.NDArray[np.uint8]


def pool_with_everything_to_mend() -> Bytes:
    """An extent of a size that cannot be, one with nothing in it, pins beyond the budget, namespaces that nobody uses."""
    server = Server(geometry(extents=8, slots=8, namespace_capacity=4), pin_share=1.0)
    client = server.client()
    for tag in ("x", "y", "z"):
        server.client(tag, tag=tag)
    client.store(chain("a", 16))
    server.send(Pin(1, client.session, client.namespace, chain("a", 16)[-32:]))
    directory = PoolDirectory(server.geometry, server.meta.copy())
    directory.extents[5] = 4097
    directory.extents[6] = 4096
    return directory.meta


def start(meta: Bytes, before_writing: Callable[[], None]) -> None:
    ServerState(
        PoolDirectory(geometry(extents=8, slots=8, namespace_capacity=4), meta),
        incarnation=2,
        pool_uri="shm://test",
        config=StateConfig(pin_share=0.1),
        now=1000.0,
        wall_offset=WALL_OFFSET,
        before_writing=before_writing,
    )


@pytest.mark.parametrize("after", ["", "rebuild", "Pages", "Names"])
def test_nothing_is_written_after_another_has_the_pool(after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    meta = pool_with_everything_to_mend()
    before = meta.tobytes()
    seen: list[bytes] = []  # the pool when another took it over

    def overtaken() -> None:
        seen.append(meta.tobytes())

    if after:
        step = getattr(books, after)

        def watched(*args: Any, **options: Any) -> Any:
            done = step(*args, **options)
            overtaken()
            return done

        monkeypatch.setattr(books, after, watched)
    else:
        overtaken()

    def look() -> None:
        if seen:
            raise LostError("another server has the pool")

    with pytest.raises(LostError):
        start(meta, look)
    assert meta.tobytes() == seen[0]
    seen.clear()
    start(meta, lambda: None)
    assert meta.tobytes() != (seen[0] if seen else before), "there was nothing left to write"
