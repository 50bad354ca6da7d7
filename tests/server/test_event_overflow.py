"""The queue of events overflows at any note: what takes its place has nothing that goes with that note."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from maru_harness import Client, Server, chain

from maru_core.protocol import HASH_BYTES, Evict
from maru_server.events import Events, Everything, Note, Removed, Stored


def apply(notes: list[Note]) -> set[bytes]:
    """The pages that whoever hears only these knows of."""
    pages: set[bytes] = set()
    for note in notes:
        if isinstance(note, Stored):
            assert not pages & split(note.hashes), "a page was stored twice"
            pages |= split(note.hashes)
        elif isinstance(note, Removed):
            pages -= split(note.hashes)
        else:
            pages = set().union(*(split(run) for _, run in note.runs())) if isinstance(note, Everything) else set()
    return pages


def split(hashes: bytes) -> set[bytes]:
    return {hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)}


def delete(server: Server, client: Client) -> None:
    client.delete(chain("a", 10, 5))


def evict(server: Server, client: Client) -> None:
    server.send(Evict(1, client.session, 10))


def clear(server: Server, client: Client) -> None:
    client.store(chain("b", 5))
    client.clear()


def store(server: Server, client: Client) -> None:
    client.store(chain("b", 8))


@pytest.mark.parametrize("happens", [delete, evict, clear, store])
def test_a_queue_that_overflows_tells_of_nothing_that_is_gone(
    server: Server, client: Client, happens: Callable[[Server, Client], None]
) -> None:
    events = Events(queue_pages=20)
    server.state.tell(events)
    client.store(chain("a", 15))
    happens(server, client)
    server.state.finish()
    assert events.overflows == 1
    client.store(chain("z", 3))  # in rows that became free
    server.state.finish()
    expected: set[bytes] = set()
    for name, pages in (("a", 15), ("b", 8), ("z", 3)):
        hashes = chain(name, pages)
        expected |= split(hashes[: client.match(hashes).pages * HASH_BYTES])
    assert apply(events.take()) == expected
    client.delete(chain("z", 1))
    assert apply(events.take()) == set(), "only what went"


def test_pages_that_close_a_gap_while_the_queue_overflows_are_told_once(server: Server, client: Client) -> None:
    events = Events(queue_pages=6)
    server.state.tell(events)
    grant = client.reserve(chain("a", 1))
    client.store(chain("a", 8, 1), parent=chain("a", 1))
    client.commit(grant)
    server.state.finish()
    assert events.overflows == 1
    assert apply(events.take()) == split(chain("a", 9))
