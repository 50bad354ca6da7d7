"""Slots that a store has ahead: a put of a few pages is one message, and nothing is ever written to a slot that may be another's."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from maru_core import spares as spares_module
from maru_core.errors import ClosedError
from maru_core.mover import Fragments
from maru_core.protocol import ROOT, Stored, StoreStatus
from maru_core.protocol import Store as StoreMessage
from maru_core.spares import BYTES_MAX, GRANTS_MAX, PAGES_MAX, PAUSE_PUTS, PUTS_AHEAD, Kind, Spare, Spares
from maru_core.store import Store
from maru_core.store_config import StoreConfig
from support import ServerProcess, await_condition, hashes, impatient, namespace, running_server

store_c = pytest.importorskip("maru_server._store", reason="built without a compiler: nothing is granted ahead")

NBYTES = 8192


class Side:
    """A store, with what it asked the server."""

    def __init__(self, server: ServerProcess, **config: Any) -> None:
        self.store = Store.open(StoreConfig(server=server.endpoint, **config), namespace(), name="test")
        self.asked: list[str] = []
        self.session = self.store._session
        ask = self.session._ask

        def noted(life: Any, rid: int, request: Any, *how: Any) -> Any:
            self.asked.append(type(request).__name__)
            return ask(life, rid, request, *how)

        self.session._ask = noted  # type: ignore[method-assign]

    def put(self, pages: bytes, parent: bytes = ROOT) -> Any:
        """Store pages that can be told apart; which were, and what was asked for it."""
        self.asked.clear()
        data = contents(pages)
        return self.store.put("kv", 0, 1, parent, pages, fragments(data)).tolist()

    def get(self, pages: bytes) -> list[bool]:
        """Which pages are there, with all their bytes right."""
        back = np.zeros((len(pages) // 32, NBYTES), np.uint8)
        loaded = self.store.get("kv", 0, pages, fragments(back))
        assert (back[loaded] == contents(pages)[loaded]).all(), "wrong bytes"
        return [bool(one) for one in loaded]

    @property
    def reserved(self) -> int:
        """Slots that are somebody's to write to, or might be."""
        stats = self.store.stats()
        return int(stats["server_slots_reserved"]) + int(stats["server_slots_quarantined"])


def contents(pages: bytes) -> Any:
    """The bytes of each page, made from its hash."""
    rows = np.frombuffer(pages, np.uint8).reshape(-1, 32)
    return np.ascontiguousarray(np.tile(rows, NBYTES // 32))


def fragments(data: Any) -> Fragments:
    addresses = np.array([[row.__array_interface__["data"][0]] for row in data], np.uint64)
    return Fragments(addresses=addresses, sizes=np.array([NBYTES], np.uint64))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with running_server(tmp_path, "--lease", "300", size="64M") as server:
        yield server


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing grows old by itself where the machine is busy."""
    monkeypatch.setattr(spares_module, "AGE_MAX_S", 120.0)


@pytest.fixture
def side(server: ServerProcess) -> Iterator[Callable[..., Side]]:
    made: list[Side] = []

    def run(**config: Any) -> Side:
        made.append(Side(server, **config))
        return made[-1]

    yield run
    for one in made:
        one.store.close()


def warm(one: Side) -> None:
    """Two puts: the first makes the component known, the second is granted spares."""
    for seed in (900, 901):
        assert one.put(hashes(4, seed)) == [True] * 4
        assert one.asked == ["Reserve", "Commit"]


@pytest.mark.parametrize("verify", ["generation", "checksum"])
def test_a_put_of_a_few_pages_is_one_message(side: Callable[..., Side], verify: str) -> None:
    one, two = side(verify=verify), side(verify=verify)
    warm(one)
    for seed in range(5):
        chain = hashes(4, seed)
        assert one.put(chain) == [True] * 4
        assert one.asked == ["Store"]
        assert two.get(chain) == [True] * 4
    # Less than was granted; then what is left, and what was granted with it, further down the same chain.
    chain = hashes(30, 50)
    assert one.put(chain[: 32 * 3]) == [True] * 3
    assert one.put(chain[32 * 3 : 32 * 4], parent=chain[32 * 2 : 32 * 3]) == [True]
    assert one.asked == ["Store"]
    assert one.put(chain[32 * 4 :], parent=chain[32 * 3 : 32 * 4]) == [True] * 26  # more than there are
    assert one.asked == ["Reserve", "Commit"]
    assert two.store.prefix(["kv"], 0, chain) == 30
    assert two.get(chain) == [True] * 30


def test_long_puts_reserve(side: Callable[..., Side]) -> None:
    one = side()
    warm(one)
    for seed in range(2):
        assert all(one.put(hashes(PAGES_MAX + 1, seed)))
        assert one.asked == ["Reserve", "Commit"]


def test_pages_that_are_there_already_are_not_stored_twice(side: Callable[..., Side]) -> None:
    """The put that finds out has copied in vain; the ones after it ask first, for a while."""
    one, two = side(), side()
    warm(one)
    chain = hashes(4, 1)
    assert two.put(chain) == [True] * 4
    assert one.put(chain) == [True] * 4
    assert one.asked == ["Store", "Reserve"]
    assert one.store.metrics.existing_pages == 4
    assert two.get(chain) == [True] * 4
    for seed in range(PAUSE_PUTS - 1):
        assert one.put(hashes(4, 100 + seed)) == [True] * 4
        assert one.asked == ["Reserve", "Commit"], seed
    assert one.put(hashes(4, 200)) == [True] * 4
    assert one.asked == ["Store"], "the spares that it had stood all the while"


def test_half_of_them_there_already(side: Callable[..., Side]) -> None:
    one, two = side(), side()
    warm(one)
    chain = hashes(4, 1)
    assert two.put(chain[:64]) == [True] * 2
    assert one.put(chain) == [True] * 4
    assert one.asked == ["Store", "Reserve", "Commit"]
    assert two.get(chain) == [True] * 4


@pytest.mark.parametrize("lease_s", [2.0, 3600.0])
def test_what_was_granted_long_ago_is_not_written_to(side: Callable[..., Side], lease_s: float) -> None:
    """Not after half a lease, and not after a while either: a server does not wait for ever for what it has reserved."""
    one = side()
    warm(one)
    (kept,) = one.store._transfers._spares._grants
    grant = kept.spare
    life = one.store._lives.life = msgspec.structs.replace(one.store._lives.current(), lease_s=lease_s)
    memory = life.reach.memory
    assert memory is not None
    old = Spare(
        grant.kind,
        grant.asked - min(spares_module.AGE_MAX_S, lease_s / 2),
        grant.slots,
        grant.offsets,
        grant.generations,
    )
    kept.spare = old
    before = [memory.data[int(at) - memory.geometry.off_data] for at in np.frombuffer(old.offsets, "<u8")]
    assert one.put(hashes(4, 1)) == [True] * 4
    assert one.asked == ["Reserve", "Commit"]
    after = [memory.data[int(at) - memory.geometry.off_data] for at in np.frombuffer(old.offsets, "<u8")]
    assert before == after


def test_what_nobody_needs_goes_back(side: Callable[..., Side], monkeypatch: pytest.MonkeyPatch) -> None:
    one = side()
    warm(one)
    assert one.reserved == 4 * PUTS_AHEAD
    stale = one.store._transfers._spares.stale
    # As if half a lease had passed.
    monkeypatch.setattr(one.store._transfers._spares, "stale", lambda epoch, oldest: stale(epoch, time.monotonic() + 1))
    await_condition(lambda: one.reserved == 0, "spares are not given back")
    assert one.put(hashes(4, 1)) == [True] * 4
    assert one.asked == ["Reserve", "Commit"]


def test_a_new_life_begins_without(side: Callable[..., Side], server: ServerProcess) -> None:
    one, two = side(), side()
    warm(one)
    server.kill()
    server.start()
    await_condition(lambda: one.put(hashes(4, 1)) == [True] * 4, "nothing is stored after a restart")
    assert one.asked[-2:] == ["Reserve", "Commit"]
    assert two.store._lives.current()
    await_condition(lambda: two.get(hashes(4, 1)) == [True] * 4, "what was stored is not found")
    # What was granted before the restart was kept for its writer, who has given it back.
    await_condition(
        lambda: one.store.stats()["server_slots_quarantined"] == 0, "spares of the life before are not given back"
    )


def test_a_store_without_an_answer_is_not_stored_and_leaves_nothing(
    side: Callable[..., Side], server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it arrived or not: the caller hears no, and what was not published comes back."""
    one = side()
    warm(one)
    with impatient(one.session):
        server.signal(signal.SIGSTOP)
        assert one.put(hashes(4, 1)) == [False] * 4
        assert one.asked == ["Store"]
    server.signal(signal.SIGCONT)
    await_condition(lambda: one.store.connected, "the server is not found again")
    monkeypatch.setattr(spares_module, "AGE_MAX_S", 0.5)
    await_condition(lambda: one.reserved == 0, "spares stay reserved for nobody")
    # The message was on its way and may have been served: then the pages are whole.
    assert one.get(hashes(4, 1)) in ([True] * 4, [False] * 4)
    for seed in (2, 3, 4):
        assert one.put(hashes(4, seed)) == [True] * 4


def test_a_copy_that_fails_gives_its_slots_back(side: Callable[..., Side], monkeypatch: pytest.MonkeyPatch) -> None:
    one = side()
    warm(one)
    mover = one.store._lives.current().reach.mover

    def broken(*arguments: Any) -> None:
        raise RuntimeError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(mover, "store", broken)
        assert one.put(hashes(4, 1)) == [False] * 4
    assert one.asked == []
    monkeypatch.setattr(spares_module, "AGE_MAX_S", 0.5)
    await_condition(lambda: one.reserved == 0, "spares of a failed copy stay reserved")
    assert one.session._holding == 0
    assert one.put(hashes(4, 1)) == [True] * 4


def test_a_session_that_ends_while_spares_are_written_gives_none_back(
    side: Callable[..., Side], server: ServerProcess
) -> None:
    """Its Goodbye would say that nobody writes any more."""
    one, two = side(), side()
    warm(one)
    mover = one.store._lives.current().reach.mover
    arrived, go = threading.Event(), threading.Event()
    copy = mover.store

    def slow(*arguments: Any) -> None:
        arrived.set()
        assert go.wait(30)
        copy(*arguments)

    mover.store = slow  # type: ignore[method-assign]
    results: list[Any] = []
    putting = threading.Thread(target=lambda: results.append(one.put(hashes(4, 1))))
    putting.start()
    assert arrived.wait(30)
    one.store.close(timeout_s=0.1)
    assert two.reserved == 4 * PUTS_AHEAD, "slots that are being written were given back"
    go.set()
    putting.join(30)
    assert results == [[False] * 4]
    assert two.get(hashes(4, 1)) == [False] * 4


def test_a_closed_session_writes_to_none(side: Callable[..., Side]) -> None:
    one = side()
    warm(one)
    epoch = one.session.epoch
    one.store.close()
    with pytest.raises(ClosedError):
        one.session.begin_writing(4, epoch=epoch)
    assert one.session._holding == 0


def test_a_session_that_is_closed_at_that_moment_writes_to_none(
    side: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever closes it has seen that nothing was being written, or will see that something is."""
    one = side()
    warm(one)
    hold = one.session._hold

    def closed_meanwhile(life: Any, change: int) -> None:
        hold(life, change)
        one.session._closed = True

    with monkeypatch.context() as patch:
        patch.setattr(one.session, "_hold", closed_meanwhile)
        with pytest.raises(ClosedError):
            one.session.begin_writing(4, epoch=one.session.epoch)
    assert one.session._holding == 0
    one.session._closed = False


def test_a_session_says_goodbye_while_it_has_spares(side: Callable[..., Side]) -> None:
    """They are not being written: they return at once, and not when the process is found dead."""
    one, two = side(), side()
    warm(one)
    assert one.put(hashes(4, 1)) == [True] * 4
    assert one.asked == ["Store"]
    assert two.reserved == 4 * (PUTS_AHEAD - 1)
    one.store.close()
    await_condition(lambda: two.reserved == 0, "spares outlive their session")


def test_several_threads_never_write_into_the_same_slots(side: Callable[..., Side]) -> None:
    one, two = side(), side()
    warm(one)

    def work(number: int) -> None:
        for turn in range(20):
            assert all(one.put(hashes(4, 1000 + number * 100 + turn)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number in range(4):
        for turn in range(20):
            assert two.get(hashes(4, 1000 + number * 100 + turn)) == [True] * 4


@pytest.mark.parametrize(
    "wrong", [{"status": 9}, {"spare_slots": b"12345678"}, {"spare_slots": b"1234", "spare_offsets": bytes(8)}], ids=str
)
def test_an_answer_that_cannot_be_is_no_answer(side: Callable[..., Side], wrong: dict[str, Any]) -> None:
    one = side()
    warm(one)
    ask = one.session._ask

    def lied(life: Any, rid: int, request: Any, expected: Any) -> Any:
        reply = ask(life, rid, request, expected)
        if isinstance(request, StoreMessage):
            return Stored(**{"rid": rid, "incarnation": reply.incarnation, "status": StoreStatus.STORED, **wrong})
        return reply

    one.session._ask = lied  # type: ignore[method-assign]
    assert one.put(hashes(4, 1)) == [False] * 4


# ---------------------------------------------------------------- the list itself

KIND = Kind(1, 2, "kv", 0, 1, 4096)


def grant(pages: int, asked: float = 100.0, kind: Kind = KIND, first: int = 0) -> Spare:
    slots = np.arange(first, first + pages, dtype="<u4")
    return Spare(
        kind, asked, slots.tobytes(), (slots * 4096).astype("<u8").tobytes(), (slots + 7).astype("<u8").tobytes()
    )


def numbers(taken: tuple[Spare, bool] | None, more: bool = False) -> list[int]:
    """Which slots were taken; ``more`` is whether others should be asked for."""
    assert taken is not None
    spare, wanted = taken
    assert wanted == more
    slots = np.frombuffer(spare.slots, "<u4")
    assert np.frombuffer(spare.offsets, "<u8").tolist() == (slots * 4096).tolist()
    assert np.frombuffer(spare.generations, "<u8").tolist() == (slots + 7).tolist()
    return [int(slot) for slot in slots]


def test_a_grant_is_taken_piece_by_piece_and_each_piece_once() -> None:
    spares = Spares()
    spares.add(grant(5))
    assert numbers(spares.take(KIND, 2, 0)) == [0, 1]
    assert numbers(spares.take(KIND, 2, 0), more=True) == [2, 3]
    assert spares.take(KIND, 2, 0) is None
    assert numbers(spares.take(KIND, 1, 0), more=True) == [4]
    assert spares.take(KIND, 1, 0) is None


@pytest.mark.parametrize(
    "other",
    [{"epoch": 2}, {"namespace": 3}, {"component": "swa"}, {"shard": 1}, {"world": 2}, {"nbytes": 4095}],
    ids=str,
)
def test_another_kind_is_not_taken(other: dict[str, Any]) -> None:
    spares = Spares()
    spares.add(grant(5))
    assert spares.take(KIND._replace(**other), 1, 0) is None


def test_age_and_stock() -> None:
    spares = Spares()
    spares.add(grant(5, asked=100.0))
    assert spares.take(KIND, 1, 100.1) is None
    assert spares.names(KIND, 5) == b"", "there are as many already"
    assert len(spares.names(KIND, 6)) == 6 * 32 * PUTS_AHEAD
    assert len(spares.names(KIND, PAGES_MAX - 1)) == PAGES_MAX * 32
    assert len(spares.names(KIND._replace(nbytes=BYTES_MAX // 3), 2)) == 3 * 32
    assert spares.stale(1, 100.0) == []
    assert [len(one.slots) // 4 for one in spares.stale(1, 100.1)] == [5]
    assert spares.take(KIND, 1, 0) is None
    spares.add(grant(5))
    assert [len(one.slots) // 4 for one in spares.stale(2, 0)] == [5], "another life's go, however old"
    assert spares.take(KIND, 1, 0) is None
    for _ in range(GRANTS_MAX):
        spares.add(grant(1))
    assert spares.names(KIND, 5) == b""


def test_only_what_is_left_of_a_grant_grows_stale() -> None:
    spares = Spares()
    spares.add(grant(5, asked=100.0))
    assert numbers(spares.take(KIND, 2, 0)) == [0, 1]
    (rest,) = spares.stale(1, 100.1)
    assert numbers((rest, False)) == [2, 3, 4]


def test_names_never_repeat() -> None:
    spares = Spares()
    drawn = b"".join(spares.names(KIND, count) for count in range(1, PAGES_MAX + 1))
    names = [drawn[at : at + 32] for at in range(0, len(drawn), 32)]
    assert len(set(names)) == len(names) > 500


def test_after_a_pause_they_are_used_again() -> None:
    spares = Spares()
    spares.add(grant(5))
    spares.pause(KIND)
    for _ in range(PAUSE_PUTS):
        assert spares.take(KIND, 1, 0) is None
        assert spares.names(KIND, 6) == b""
    assert numbers(spares.take(KIND, 1, 0)) == [0]
