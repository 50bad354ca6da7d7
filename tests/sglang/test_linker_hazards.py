"""What the direct linker owes to device memory that others use before and after it: who waits for whom, and what happens when somebody
can wait no longer.

Events of a GPU are played by the test, which decides when they have happened; everything else is real.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from linker_support import PAGE, Make, Side, begin, make_tokens, run_loads

from maru_core.protocol import Want
from support import await_condition

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("plugins")]

PAGES = 10
PROMPT = make_tokens(1, PAGES * PAGE)


class Gate:
    """Where a thread of the linker stands still for as long as the test likes."""

    def __init__(self) -> None:
        self.reached, self._open = threading.Event(), threading.Event()

    def open(self) -> None:
        self._open.set()

    def __call__(self) -> None:
        self.reached.set()
        assert self._open.wait(300)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()


@pytest.fixture
def loading(linked: Make) -> tuple[Side, Any]:
    """An engine that has accepted a load of the prompt, and its request."""
    one, two = linked(), linked()
    one.insert(PROMPT)
    assert one.settle() == [True]
    request = two.request([*PROMPT, 5])
    assert begin(two, request) == len(PROMPT)
    return two, request


def close_before_copies(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    from maru_sglang.radix.linker import PagedMover

    begin_load = PagedMover.begin_load

    def gated(*arguments: Any) -> Any:
        load = begin_load(*arguments)
        gate()
        return load

    monkeypatch.setattr(PagedMover, "begin_load", gated)


def ended(side: Side) -> None:
    """The load thread has nothing to do any more."""
    await_condition(side.linker._loads.settle, "loads have ended")


class TestLoads:
    def test_pages_are_not_written_before_the_forward_pass_that_had_them_is_over(
        self, loading: tuple[Side, Any], monkeypatch: pytest.MonkeyPatch, gate: Gate
    ) -> None:
        """SGLang gives a finished request's pages to the next one while a forward pass that still writes to them runs."""
        from sglang.srt.mem_cache.unified_cache import unified_cache_linker

        two, _ = loading
        forward = object()

        class Event:
            stream: Any = None

            def record(self, stream: Any = None) -> None:
                self.stream = stream

            def synchronize(self) -> None:
                if self.stream is forward:
                    gate()

        monkeypatch.setattr(unified_cache_linker.device_module, "Event", Event)
        two.linker.forward_stream = forward
        before = two.snapshot()
        assert two.cache.linker.start_layer_wise_loading() >= 0
        assert gate.reached.wait(60), "the forward pass is waited for"
        assert two.changed(before, "kv", []) == []
        gate.open()
        assert two.cache.linker.finish_loads() == []
        assert two.changed(before, "kv", []) != []

    def test_what_was_used_before_it_came_has_not_landed(
        self, loading: tuple[Side, Any], monkeypatch: pytest.MonkeyPatch, gate: Gate, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A forward pass that waited in vain has computed something of whatever lay in the pages: that all of it came later does not
        help. Nor are the pages written to afterwards, which are another request's by then."""
        two, request = loading
        close_before_copies(gate, monkeypatch)
        before, counter = two.snapshot(), two.linker.layer_done_counter
        with monkeypatch.context() as hurry, caplog.at_level(logging.ERROR, "maru.sglang"):
            hurry.setattr("maru_sglang.radix.linker_counter.WAIT_S", 0.02)
            counter.set_consumer(two.cache.linker.start_layer_wise_loading())
            for layer in [*range(counter.num_layers)] * 3:
                counter.wait_until(layer)
        assert caplog.text.count("in vain") == 1, "one wait was enough"
        gate.open()
        ended(two)
        assert two.cache.linker.finish_loads() == [request.rid]
        assert two.changed(before, "kv", []) == []

    def test_the_end_that_was_not_awaited_is_the_end(
        self, loading: tuple[Side, Any], monkeypatch: pytest.MonkeyPatch, gate: Gate
    ) -> None:
        two, request = loading
        close_before_copies(gate, monkeypatch)
        before = two.snapshot()
        with monkeypatch.context() as hurry:
            hurry.setattr("maru_sglang.radix.linker_counter.WAIT_S", 0.02)
            two.cache.linker.start_layer_wise_loading()
            assert two.cache.linker.finish_loads() == [request.rid]
        gate.open()
        ended(two)
        assert two.changed(before, "kv", []) == []

    def test_a_load_that_outlasts_a_reset_writes_nothing(
        self, loading: tuple[Side, Any], monkeypatch: pytest.MonkeyPatch, gate: Gate
    ) -> None:
        two, _ = loading
        close_before_copies(gate, monkeypatch)
        before = two.snapshot()
        two.cache.linker.start_layer_wise_loading()
        assert gate.reached.wait(60)
        with monkeypatch.context() as hurry:
            hurry.setattr("maru_sglang.radix.linker_loads.QUIESCE_S", 0.02)
            two.cache.reset()
        gate.open()
        ended(two)
        assert two.changed(before, "kv", []) == []
        assert run_loads(two) == []


class TestOffloads:
    def test_pages_that_were_given_up_are_not_stored(
        self, linked: Make, monkeypatch: pytest.MonkeyPatch, gate: Gate
    ) -> None:
        """What is copied after a reset that could wait no longer is another request's, under this one's hash."""
        one, two = linked(), linked()
        put = one.linker._store.put
        monkeypatch.setattr(one.linker._store, "put", lambda *arguments: (gate(), put(*arguments))[1])
        one.insert(PROMPT)
        assert gate.reached.wait(60)
        with monkeypatch.context() as hurry:
            hurry.setattr("maru_sglang.radix.linker_offloads.QUIESCE_S", 0.02)
            one.cache.reset()
        one.fill(99)
        gate.open()
        await_condition(one.linker._offloads.settle, "the job has ended")
        assert two.match(two.request([*PROMPT, 5])).host_hit_length == 0
        assert one.linker.counters()["server_pages"] == one.linker.counters()["server_slots_reserved"] == 0


class TestLookups:
    def keys(self) -> list[str]:
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        return list(get_storage_hash_str(RadixKey(array("q", PROMPT)), None, page_size=PAGE))

    def test_answers_are_short(self, loading: tuple[Side, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """With pages of one token a prompt has as many lengths as tokens, and SGLang goes through them for every request that waits,
        on every pass. What ranks that found more and less have in common must stay among them."""
        monkeypatch.setattr("maru_sglang.radix.linker_lookup.LENGTHS", 3)
        two, _ = loading
        for _ in range(2):
            assert two.linker._lookups.ends("a", self.keys(), {"kv": Want()}) == [4, 8, 10]
        from maru_sglang.radix.linker_lookup import _some

        more, fewer = (_some(np.arange(1, count + 1, dtype=np.uint32), 10).tolist() for count in (10, 9))
        assert max(set(more) & set(fewer)) == 8
        assert all(answer.ends.dtype == np.uint32 for answer in two.linker._lookups._answers.values())

    def test_asking_again_takes_a_share_of_the_time(self, loading: tuple[Side, Any]) -> None:
        """Where other servers store all the time every answer is old at once, and hundreds of requests wait."""
        from maru_sglang.radix.linker_lookup import SHARE, Lookups

        store, time, keys, costs = loading[0].linker._store, [0.0], self.keys(), 0.001

        class Busy:
            """The real store, in a pool that changes with every look, and a clock on which each question takes a millisecond."""

            asked = changed = 0

            def changes(self) -> tuple[int, int]:
                self.changed += 1
                return 0, self.changed

            def find(self, *arguments: Any) -> Any:
                self.asked += 1
                time[0] += costs
                return store.find(*arguments)

        busy = Busy()
        lookups = Lookups(busy, 0, clock=lambda: time[0])
        for number in range(100):
            assert lookups.ends(str(number), keys, {"kv": Want()})[-1] == PAGES
        assert busy.asked == 100, "what was not asked yet is asked at once"
        began = time[0]
        while time[0] < began + 4:
            for number in range(100):
                assert lookups.ends(str(number), keys, {"kv": Want()})[-1] == PAGES
            time[0] += 0.002  # the rest of a pass
        again = busy.asked - 100
        assert 0 < again * costs <= 1.1 * SHARE * (time[0] - began) + costs
        assert all(answer.asked > began for answer in lookups._answers.values()), "each has had its turn"


class TestStart:
    def test_copies_are_measured_while_the_engine_starts(
        self, linked: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And not in the scheduler's thread, when a server that was away is there for the first time."""
        prepared: list[Any] = []
        monkeypatch.setattr("maru_sglang.radix.linker.prepare", prepared.append)
        linked(config={"server": f"ipc://{tmp_path}/nobody", "timeout_ms": 50})
        assert [device.type for device in prepared] == ["cpu"]

    def test_a_gpu_is_measured_as_its_movers_will_ask(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from maru_sglang.kernels import choose, mover

        runtime, measured = object(), []

        def measure(device: Any, found: Any) -> Any:
            assert found is runtime
            measured.append(str(device))
            return {direction: {1: {"dma": 1.0}} for direction in choose.DIRECTIONS}

        monkeypatch.setattr(mover.Runtime, "find", lambda index: runtime)
        monkeypatch.setattr(mover, "choices", lambda device, found: mover.Choices.of_rates(measure(device, found)))
        mover.prepare("cuda:3")
        mover.prepare("cpu")
        assert measured == ["cuda:3"]
