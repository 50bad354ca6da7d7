"""The direct linker when something fails: a miss, or one request that is recomputed or aborted; never more, never an error."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from linker_support import PAGE, TOKENS, Make, Side, begin, make_tokens, run_loads

from maru_core.errors import ConfigError
from support import ServerProcess, await_condition, impatient

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("plugins")]

PAGES = 10
PROMPT = make_tokens(1, PAGES * PAGE)
Stored = tuple[Side, Side, list[int]]


@pytest.fixture
def stored(linked: Make) -> Stored:
    """Two engines, the first of which has stored the prompt; the rows that it stored."""
    one, two = linked(), linked()
    source = one.insert(PROMPT)
    assert one.settle() == [True]
    return one, two, one.rows_of(None, source)["kv"]


def free_slots(side: Side) -> int:
    return int(side.params.token_to_kv_pool_allocator.available_size())


class TestServerGone:
    """Killed, or there and silent, at each step; and back."""

    @pytest.fixture(autouse=True)
    def soon(self, stored: Stored) -> Iterator[None]:
        """Nobody answers on purpose: calls end soon."""
        with contextlib.ExitStack() as stack:
            self.patience = stack
            yield

    @pytest.fixture(params=["killed", "silent"])
    def lose(self, request: pytest.FixtureRequest, stored: Stored, server: ServerProcess) -> Callable[[], None]:
        def away() -> None:
            for side in stored[:2]:
                self.patience.enter_context(impatient(side.linker._store._session))
            if request.param == "killed":
                server.kill()
            else:
                server.signal(signal.SIGSTOP)

        return away

    def test_before_the_lookup(self, stored: Stored, lose: Callable[[], None]) -> None:
        _, two, _ = stored
        lose()
        request = two.request([*PROMPT, 5])
        for _ in range(20):
            assert two.match(request).host_hit_length == 0

    def test_between_lookup_and_load(self, stored: Stored, lose: Callable[[], None]) -> None:
        _, two, _ = stored
        request = two.request([*PROMPT, 5])
        result = two.match(request)
        assert result.host_hit_length == len(PROMPT)
        request.last_node = result.last_device_node
        lose()
        assert two.cache.linker.load_back(request) == (0, request.last_node)
        assert free_slots(two) == TOKENS
        assert run_loads(two) == []

    def test_after_the_load_was_accepted(self, stored: Stored, lose: Callable[[], None]) -> None:
        """What was located is read from memory: nobody needs the server for it."""
        one, two, rows = stored
        request = two.request([*PROMPT, 5])
        assert begin(two, request) == len(PROMPT)
        target = two.cache.linker.private_load_indices[request.rid]
        lose()
        assert run_loads(two) == []
        for mine, theirs in zip(two.rows_of(request, target)["kv"], rows, strict=True):
            assert two.page("kv", mine) == one.page("kv", theirs)

    def test_while_nodes_are_stored(self, stored: Stored, lose: Callable[[], None], server: ServerProcess) -> None:
        _, two, _ = stored
        lose()
        prompts = [make_tokens(seed, 4 * PAGE) for seed in range(10, 16)]
        for prompt in prompts:
            two.insert(prompt)
        assert two.settle() == [False] * len(prompts)
        assert not two.cache.linker.pending_offloads, "their pages may be evicted"
        self.patience.close()
        if server.process is not None:
            server.kill()
        server.start()

        def stored_again() -> bool:
            for prompt in prompts:
                two.insert(prompt)  # used again
            two.settle()
            return int(two.linker.counters().get("server_pages", 0)) == PAGES + 4 * len(prompts)

        await_condition(stored_again, "what could not be stored is stored when it is used again")

    def test_it_comes_back(self, stored: Stored, server: ServerProcess) -> None:
        _, two, _ = stored
        server.kill()
        request = two.request([*PROMPT, 5])
        with impatient(two.linker._store._session):
            assert two.match(request).host_hit_length == 0
        server.start()
        await_condition(lambda: two.match(request).host_hit_length == len(PROMPT), "all is found again")
        assert begin(two, request) == len(PROMPT)
        assert run_loads(two) == []


class TestFaults:
    """What goes wrong inside must not reach the scheduler, which has no handler for it."""

    def break_store(self, side: Side, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: Any, **__: Any) -> Any:
            raise RuntimeError("broken on purpose")

        monkeypatch.setattr(side.linker._store, call, broken)

    def test_in_a_lookup(self, stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
        _, two, _ = stored
        self.break_store(two, "find", monkeypatch)
        assert two.match(two.request([*PROMPT, 5])).host_hit_length == 0

    @pytest.mark.parametrize("call", ["find", "read"])
    def test_in_a_load(self, stored: Stored, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
        _, two, _ = stored
        request = two.request([*PROMPT, 5])
        result = two.match(request)
        request.last_node = result.last_device_node
        self.break_store(two, call, monkeypatch)
        assert two.cache.linker.load_back(request) == (0, request.last_node)
        assert free_slots(two) == TOKENS

    def test_in_an_offload(self, linked: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        one = linked()
        self.break_store(one, "put", monkeypatch)
        one.insert(PROMPT)
        assert one.settle() == [False]

    def test_without_an_event_an_offload_has_its_turn(self, linked: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ranks count results: one that fails alone must not be one short."""
        one = linked()

        def broken() -> Any:
            raise RuntimeError("broken on purpose")

        monkeypatch.setattr(one.linker, "record_offload_ready", broken)
        one.insert(PROMPT)
        assert one.settle() == [False]

    def test_in_the_copy(self, stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
        """The forward pass does not hang; the requests are aborted; the next load is a load again."""
        from maru_sglang.radix.linker import PagedMover

        _, two, _ = stored
        begin_load = PagedMover.begin_load

        def fails_at_two(mover: Any, *arguments: Any) -> Any:
            load = begin_load(mover, *arguments)
            launch = load.launch

            def fails(layers: range) -> None:
                if layers.start == 2:
                    raise RuntimeError("broken on purpose")
                launch(layers)

            monkeypatch.setattr(load, "launch", fails)
            return load

        with monkeypatch.context() as patch:
            patch.setattr(PagedMover, "begin_load", fails_at_two)
            request = two.request([*PROMPT, 5])
            assert begin(two, request) == len(PROMPT)
            assert run_loads(two) == [request.rid]
        await_condition(lambda: two.linker.counters()["server_holds"] == 0, "the hold is let go")
        again = two.request([*PROMPT, 5])
        assert begin(two, again) == len(PROMPT)
        assert run_loads(two) == []

    def test_a_batch_that_cannot_start_fails_its_requests(
        self, stored: Stored, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, two, _ = stored
        request = two.request([*PROMPT, 5])
        assert begin(two, request) == len(PROMPT)

        def broken(*_: Any) -> Any:
            raise RuntimeError("broken on purpose")

        monkeypatch.setattr(two.linker.layer_done_counter, "add", broken)
        assert run_loads(two) == [request.rid]


class TestOff:
    def test_replaced_weights_end_it(self, stored: Stored) -> None:
        _, two, _ = stored
        two.linker.weights_changed()
        assert two.match(two.request([*PROMPT, 5])).host_hit_length == 0
        two.insert(make_tokens(3, 4 * PAGE))
        assert two.settle() == []
        assert two.linker.counters()["server_pages"] == PAGES

    def test_weights_replaced_between_lookup_and_load(self, stored: Stored) -> None:
        _, two, _ = stored
        request = two.request([*PROMPT, 5])
        result = two.match(request)
        request.last_node = result.last_device_node
        two.linker.weights_changed()
        assert two.cache.linker.load_back(request) == (0, request.last_node)

    def test_a_closed_linker_answers(self, stored: Stored) -> None:
        _, two, _ = stored
        two.linker.close()
        assert two.match(two.request([*PROMPT, 5])).host_hit_length == 0
        two.insert(PROMPT)
        assert two.cache.linker.num_completed_offloads() == 0


class TestChecksums:
    def test_wrong_bytes_in_memory_are_not_landed(self, linked: Make, server: ServerProcess) -> None:
        checked = {"verify": "checksum"}
        one, two = linked(config=checked), linked(config=checked)
        one.insert(PROMPT)
        one.settle()
        good = two.request([*PROMPT, 5])
        assert begin(two, good) == len(PROMPT)
        assert run_loads(two) == []
        bad = two.request([*PROMPT, 6])
        assert begin(two, bad) == len(PROMPT)
        offset = int(two.linker._loads._accepted[bad.rid].parts[0].reading.offsets[3])
        with Path("/dev/shm", server.pool.removeprefix("shm://")).open("r+b") as pool:
            pool.seek(offset)
            byte = pool.read(1)
            pool.seek(offset)
            pool.write(bytes([byte[0] ^ 1]))
        assert run_loads(two) == [bad.rid]
        assert two.linker.counters()["miss_checksum"] == 1


class TestRefusals:
    def test_pools_of_other_shapes_are_other_namespaces(self, linked: Make) -> None:
        digests = {
            kind: linked(kind).linker.namespace.digest() for kind in ("full", "mla", "swa", "swa-otherwise", "mamba")
        }
        assert len(set(digests.values())) == 5
        assert linked("swa").linker.namespace.digest() == digests["swa"]
        assert linked(config={"tag": "other"}).linker.namespace.digest() != digests["full"]

    def test_pipeline_stages_are_refused(self, linked: Make) -> None:
        with pytest.raises(ConfigError, match="--pp-size 2: SGLang does not reconcile"):
            linked(pp_size=2)

    def test_context_parallel_ranks_are_refused(self, linked: Make) -> None:
        with pytest.raises(ConfigError, match=r"attn_cp_size\) is 2"):
            linked(attn_cp_size=2)

    def test_draft_pools_are_refused(self, linked: Make) -> None:
        with pytest.raises(ConfigError, match="does not store the KV of a draft model"):
            linked(sidecar_draft_device_pools=(object(),))

    def test_a_wrong_config_is_refused(self, linked: Make) -> None:
        with pytest.raises(
            ConfigError, match=r"--unified-cache-external-linker-config: unknown key 'sever' .* 'server'"
        ):
            linked(config={"sever": "x"})

    def test_other_layouts_of_rows_are_refused(self, linked: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
        with pytest.raises(ConfigError, match="layout hnd"):
            linked()


class TestHolds:
    def test_what_the_server_will_not_hold_is_computed(self, linked: Make, tmp_path: Path) -> None:
        """It could be evicted before it is read, and that would cost the request."""
        server = ServerProcess(tmp_path, "--hold-share", "0").start()
        try:
            one, two = linked(config={"server": server.endpoint}), linked(config={"server": server.endpoint})
            one.insert(PROMPT)
            assert one.settle() == [True]
            request = two.request([*PROMPT, 5])
            assert two.match(request).host_hit_length == len(PROMPT)
            assert begin(two, request) == 0
            assert free_slots(two) == TOKENS
        finally:
            server.remove()
