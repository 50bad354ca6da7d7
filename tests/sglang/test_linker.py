"""The direct linker inside SGLang's real radix cache, on its real device pools: what is stored, found and loaded, to the last byte.

Two engines' memories and trees ("one" and "two") share one real server; tests are the scheduler.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from linker_support import PAGE, WINDOW, Make, Side, begin, make_tokens, run_loads

from maru_core.protocol import HASH_BYTES, ROOT
from support import ServerProcess, await_condition

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("plugins")]

KINDS = ("full", "mla", "swa", "mamba")
PAGES = 10
PROMPT = make_tokens(1, PAGES * PAGE)


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_of_every_pool_comes_back(linked: Make, kind: str) -> None:
    one, two = linked(kind), linked(kind)
    source = one.insert(PROMPT)
    stored = one.settle()
    assert stored
    assert all(stored)
    before = two.snapshot()
    request = two.request([*PROMPT, 7, 8, 9])
    result = two.match(request)
    assert result.host_hit_length == len(PROMPT)
    request.last_node = result.last_device_node
    count, _ = two.cache.linker.load_back(request)
    assert count == len(PROMPT)
    target = two.cache.linker.private_load_indices[request.rid]
    assert run_loads(two) == []

    written = two.rows_of(request, target)
    given = one.rows_of(None, source)
    window = -(-WINDOW // PAGE)
    expected = {"kv": PAGES, "swa": window, "mamba": 1}
    assert set(written) == set(map(str, two.linker.pools))
    for pool, rows in written.items():
        assert len(rows) == expected[pool]
        for mine, theirs in zip(rows, given[pool][-len(rows) :], strict=True):
            assert two.page(pool, mine) == one.page(pool, theirs)
        assert two.changed(before, pool, rows) == [], "and no other byte was written"


def test_only_the_last_window_of_a_sliding_pool_is_loaded(linked: Make) -> None:
    one, two = linked("swa"), linked("swa")
    one.insert(PROMPT)
    one.settle()
    request = two.request([*PROMPT, 7])
    assert two.match(request).swa_host_hit_length == -(-WINDOW // PAGE) * PAGE


def lookup(side: Side, tokens: list[int], rid: str = "probe") -> list[int]:
    """The linker's own answer for a prompt of which the engine has nothing itself."""
    from array import array

    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.components import LinkerTransferPhase
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    keys = get_storage_hash_str(RadixKey(array("q", tokens)), None, page_size=PAGE)
    transfers = [
        component.build_external_linker_transfer(LinkerTransferPhase.LOOKUP, None, keys)
        for component in side.cache.linker._components
    ]
    return list(side.linker.lookup(rid, transfers))


class TestLookups:
    def test_states_are_there_only_where_a_node_ended(self, linked: Make) -> None:
        """All lengths at which it may stop, not the longest alone: ranks intersect them."""
        one, two = linked("mamba"), linked("mamba")
        one.insert(PROMPT[: 4 * PAGE])
        one.insert(PROMPT)
        one.settle()
        assert lookup(two, PROMPT) == [4, 10]
        assert lookup(two, PROMPT[: 7 * PAGE]) == [4]
        assert lookup(two, make_tokens(2, 40)) == []

    def test_plain_pages_are_there_at_every_length(self, linked: Make) -> None:
        one, two = linked(), linked()
        one.insert(PROMPT[: 6 * PAGE])
        one.settle()
        assert lookup(two, PROMPT) == [1, 2, 3, 4, 5, 6]

    def test_answers_begin_where_the_engines_own_cache_ends(self, linked: Make) -> None:
        one, two = linked(), linked()
        one.insert(PROMPT)
        one.settle()
        two.insert(PROMPT[: 3 * PAGE])
        request = two.request([*PROMPT, 5])
        result = two.match(request)
        assert result.device_prefix_len == 3 * PAGE
        assert result.host_hit_length == 7 * PAGE

    def test_a_thousand_repetitions_send_no_message(self, linked: Make) -> None:
        one, two = linked(), linked()
        one.insert(PROMPT)
        one.settle()
        request = two.request([*PROMPT, 5])
        first = two.match(request)
        asked = two.linker.counters()["server_matches"]
        for _ in range(1000):
            assert two.match(request).host_hit_length == first.host_hit_length
        assert two.linker.counters()["server_matches"] == asked

    def test_what_becomes_findable_is_found(self, linked: Make) -> None:
        one, two = linked(), linked()
        one.insert(PROMPT[: 4 * PAGE])
        one.settle()
        assert lookup(two, PROMPT) == [1, 2, 3, 4]
        one.insert(PROMPT)
        one.settle()
        await_condition(lambda: lookup(two, PROMPT)[-1:] == [10], "the longer prompt is found")

    def test_what_is_removed_is_no_longer_found(self, linked: Make) -> None:
        one, two = linked(), linked()
        one.insert(PROMPT)
        one.settle()
        assert len(lookup(two, PROMPT)) == PAGES
        assert one.linker._store.clear()
        await_condition(lambda: lookup(two, PROMPT) == [], "removed pages are not found")


class TestLoads:
    def test_layers_are_waited_for_one_by_one(self, linked: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        """The first layer may be used while the later ones are still to come."""
        one, two = linked(), linked()
        one.insert(PROMPT)
        one.settle()
        from maru_sglang.radix.linker import PagedMover

        first_used, launched = threading.Event(), []
        begin_load = PagedMover.begin_load

        def gated(mover: Any, *arguments: Any) -> Any:
            load = begin_load(mover, *arguments)
            launch = load.launch

            def hold_back(layers: range) -> None:
                if layers.start == 1:
                    assert first_used.wait(60)
                launch(layers)
                launched.append(layers.start)

            monkeypatch.setattr(load, "launch", hold_back)
            return load

        monkeypatch.setattr(PagedMover, "begin_load", gated)
        request = two.request([*PROMPT, 5])
        assert begin(two, request) == len(PROMPT)
        counter = two.linker.layer_done_counter
        counter.set_consumer(two.cache.linker.start_layer_wise_loading())
        counter.wait_until(0)
        assert launched == [0], "the forward pass is past its first layer, and the load is not"
        first_used.set()
        counter.wait_until(counter.num_layers - 1)
        assert launched == list(range(counter.num_layers))
        assert two.cache.linker.finish_loads() == []

    def test_requests_of_one_batch_share_its_copies(self, linked: Make) -> None:
        one, two = linked(), linked()
        prompts = [make_tokens(seed, 5 * PAGE) for seed in (1, 2, 3)]
        sources = [one.insert(prompt) for prompt in prompts]
        one.settle()
        requests = [two.request([*prompt, 5]) for prompt in prompts]
        assert [begin(two, request) for request in requests] == [5 * PAGE] * 3
        targets = [two.cache.linker.private_load_indices[request.rid] for request in requests]
        assert run_loads(two) == []
        for request, source, target in zip(requests, sources, targets, strict=True):
            for mine, theirs in zip(two.rows_of(request, target)["kv"], one.rows_of(None, source)["kv"], strict=True):
                assert two.page("kv", mine) == one.page("kv", theirs)

    def test_a_load_that_cannot_be_complete_is_refused(self, linked: Make) -> None:
        """False means recompute; only what was accepted can fail a request."""
        one, two = linked(), linked()
        one.insert(PROMPT)
        one.settle()
        request = two.request([*PROMPT, 5])
        result = two.match(request)
        request.last_node = result.last_device_node
        free = two.params.token_to_kv_pool_allocator.available_size()
        assert one.linker._store.clear()
        assert two.cache.linker.load_back(request) == (0, request.last_node)
        assert two.params.token_to_kv_pool_allocator.available_size() == free, "its slots came back"
        assert run_loads(two) == []

    def test_a_request_is_loaded_once(self, linked: Make) -> None:
        one, two = linked(), linked()
        one.insert(PROMPT)
        one.settle()
        request = two.request([*PROMPT, 5])
        assert begin(two, request) == len(PROMPT)
        assert begin(two, request) == 0
        assert run_loads(two) == []

    @pytest.fixture
    def long_holds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """So that none ends by itself while a test waits for its end."""
        monkeypatch.setattr("maru_sglang.radix.linker.HOLD_S", 3600.0)

    @pytest.mark.usefixtures("long_holds")
    def test_a_cancelled_load_writes_nothing_and_is_held_no_more(self, linked: Make, tmp_path: Path) -> None:
        server = ServerProcess(tmp_path, "--max-hold", "3600").start()
        try:
            self.check_cancelled(*(linked(config={"server": server.endpoint}) for _ in range(2)))
        finally:
            server.remove()

    def check_cancelled(self, one: Side, two: Side) -> None:
        one.insert(PROMPT)
        one.settle()
        request = two.request([*PROMPT, 5])
        assert begin(two, request) == len(PROMPT)
        assert two.linker.counters()["server_holds"] == 1
        before = two.snapshot()
        two.cache.linker.release_request(request.rid)
        assert not two.linker.cancel_queued_load(request.rid)
        assert run_loads(two) == []
        assert two.changed(before, "kv", []) == []
        await_condition(lambda: two.linker.counters()["server_holds"] == 0, "the hold is let go")

    @pytest.mark.usefixtures("long_holds")
    def test_a_landed_load_is_held_no_more(self, linked: Make, tmp_path: Path) -> None:
        server = ServerProcess(tmp_path, "--max-hold", "3600").start()
        try:
            self.check_landed(*(linked(config={"server": server.endpoint}) for _ in range(2)))
        finally:
            server.remove()

    def check_landed(self, one: Side, two: Side) -> None:
        one.insert(PROMPT)
        one.settle()
        assert begin(two, two.request([*PROMPT, 5])) == len(PROMPT)
        assert run_loads(two) == []
        await_condition(lambda: two.linker.counters()["server_holds"] == 0, "the hold is let go")

    def test_eviction_cannot_make_an_accepted_load_fail(self, linked: Make, server: ServerProcess) -> None:
        import numpy as np

        from support import Pages

        one, two = linked(), linked()
        one.insert(PROMPT)
        one.settle()
        request = two.request([*PROMPT, 5])
        assert begin(two, request) == len(PROMPT)
        # Far more than the pool takes, all of it used later than the prompt.
        page, many = Pages(1, (one.linker._pools["kv"].nbytes,), seed=1), 512
        fragments = page.fragments.select(np.zeros(many, np.int64))
        for index in range(16):
            hashes = np.random.default_rng(index).bytes(many * HASH_BYTES)
            one.linker._store.put("kv", 0, 1, ROOT, hashes, fragments)
        counters = two.linker.counters()
        assert counters["server_evicted_pages"] > 1000
        assert run_loads(two) == []

    def test_a_page_that_went_costs_its_own_request_only(self, linked: Make) -> None:
        one, two = linked(), linked()
        prompts = [make_tokens(seed, 5 * PAGE) for seed in (1, 2, 3)]
        for prompt in prompts:
            one.insert(prompt)
        one.settle()
        requests = [two.request([*prompt, 5]) for prompt in prompts]
        assert [begin(two, request) for request in requests] == [5 * PAGE] * 3
        accepted = two.linker._loads._accepted[requests[1].rid]
        lost = accepted.parts[0].reading.hashes
        assert one.linker._store.delete(lost[:HASH_BYTES]) == 5  # on demand: no hold keeps that away
        assert run_loads(two) == [requests[1].rid]
        assert two.linker.counters()["loaded_pages"] == 10

    def test_a_reset_drops_what_waits(self, linked: Make) -> None:
        one, two = linked(), linked()
        one.insert(PROMPT)
        one.settle()
        request = two.request([*PROMPT, 5])
        assert begin(two, request) == len(PROMPT)
        before = two.snapshot()
        two.cache.reset()
        assert two.linker.start_layer_wise_loading() == -1
        assert two.changed(before, "kv", []) == []
        assert lookup(two, PROMPT)[-1] == PAGES, "what is stored stays"


class TestOffloads:
    @pytest.mark.parametrize("core", ["python", "rust"])
    def test_nodes_hang_where_they_belong(self, linked: Make, core: str) -> None:
        """Also after a node was split: what is stored below a parent is found with all that comes before it."""
        one, two = linked(tree_core_backend=core), linked(tree_core_backend=core)
        other = PROMPT[: 5 * PAGE] + make_tokens(9, 6 * PAGE)
        longer = other + make_tokens(10, 3 * PAGE)
        sources = {tuple(tokens): one.insert(tokens) for tokens in (PROMPT, other, longer)}
        one.settle()
        for tokens, source in sources.items():
            request = two.request([*tokens, 5])
            assert begin(two, request) == len(tokens)
            target = two.cache.linker.private_load_indices[request.rid]
            assert run_loads(two) == []
            for mine, theirs in zip(two.rows_of(None, target)["kv"], one.rows_of(None, source)["kv"], strict=True):
                assert two.page("kv", mine) == one.page("kv", theirs)
            two.cache.reset()
            two.params.token_to_kv_pool_allocator.clear()
        # Nothing hangs from a page that is not there: removing the first page removes everything.
        first = one.linker._store
        assert first.delete(_hashes(PROMPT)[:HASH_BYTES]) == 10 + 6 + 3

    def test_a_node_split_while_it_is_stored(self, linked: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        one, two = linked(), linked()
        gate, put = threading.Event(), one.linker._store.put
        monkeypatch.setattr(one.linker._store, "put", lambda *arguments: gate.wait(60) and put(*arguments))
        one.insert(PROMPT)
        one.insert(PROMPT[: 5 * PAGE] + make_tokens(9, 6 * PAGE))
        gate.set()
        assert one.settle() == [True, True]
        assert lookup(two, PROMPT)[-1] == PAGES
        assert lookup(two, PROMPT[: 5 * PAGE] + make_tokens(9, 6 * PAGE))[-1] == 11

    def test_a_node_whose_parent_is_not_known_is_not_stored(self, linked: Make) -> None:
        """A chain that seems to begin in the middle would be found as a prefix that it is not."""
        one = linked(tree_core_backend="python")
        one.insert(PROMPT[: 4 * PAGE])
        one.settle()
        (node,) = one.cache.tree_core.root_node.children.values()
        node.hash_value = None
        one.insert(PROMPT)
        assert one.settle() == []
        assert one.linker.counters()["server_pages"] == 4

    def test_without_the_plugins_hook_nothing_is_stored(self, linked: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        one = linked()
        monkeypatch.setattr(type(one.linker), "parent", property(lambda _: None, lambda *_: None), raising=False)
        one.insert(PROMPT)
        assert one.settle() == []
        assert one.linker.counters()["server_pages"] == 0

    def test_what_is_stored_is_not_stored_again(self, linked: Make) -> None:
        one = linked()
        one.insert(PROMPT)
        assert one.settle() == [True]
        one.insert(PROMPT)
        assert one.settle() == []
        two = linked()
        two.insert(PROMPT)
        assert two.settle() == [True]
        assert two.linker.counters()["existing_pages"] == PAGES

    def test_a_reset_lets_what_was_computed_be_stored(self, linked: Make) -> None:
        one, two = linked(), linked()
        one.insert(PROMPT)
        one.cache.reset()
        assert one.linker.num_completed_offloads() == 0
        assert lookup(two, PROMPT)[-1] == PAGES

    def test_a_job_that_outlasts_a_reset_has_no_result(self, linked: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its node is gone: SGLang would take the result for that of another one."""
        one = linked()
        gate, put = threading.Event(), one.linker._store.put
        monkeypatch.setattr(one.linker._store, "put", lambda *arguments: gate.wait(60) and put(*arguments))
        one.insert(PROMPT)
        with monkeypatch.context() as hurry:
            hurry.setattr("maru_sglang.radix.linker_offloads.QUIESCE_S", 0.05)
            one.cache.reset()
        gate.set()
        assert one.settle() == []
        assert one.linker.num_completed_offloads() == 0


def _hashes(tokens: list[int]) -> bytes:
    from array import array

    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    return bytes.fromhex("".join(get_storage_hash_str(RadixKey(array("q", tokens)), None, page_size=PAGE)))
