"""Replaying a trace: what the real server finds is what a few lines of brute force find."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from maru_bench import replay as bench
from maru_bench.cli import app
from maru_core.errors import ConfigError

# Two conversations that begin alike, a scan, and the first one again. Whole timestamps are milliseconds.
TRACE = """\
{"timestamp": 0, "input_length": 6, "output_length": 1, "hash_ids": [0, 1, 2]}
{"timestamp": 2000, "input_length": 6, "hash_ids": [0, 1, 3, 4]}
{"timestamp": 4000, "hash_ids": [0, 1, 2, 5]}

{"timestamp": 6000, "chat_id": 7, "parent_chat_id": -1, "type": "text", "turn": 1, "hash_ids": [6, 7, 8, 9]}
{"timestamp": 8000, "hash_ids": []}
{"timestamp": 10000, "hash_ids": [0, 1, 2, 5, 10]}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    return path


def trace_of(requests: list[list[int]]) -> bench.Trace:
    blocks = sorted({block for request in requests for block in request})
    numbers = {block: number for number, block in enumerate(blocks)}
    dense = [np.array([numbers[block] for block in request], np.int64) for request in requests]
    # At odd times, so that no two scores are equal by chance.
    rng = random.Random(9)
    times = np.cumsum([rng.uniform(0.2, 3.0) for _ in requests]).tolist()
    return bench.Trace("made", dense, times, len(blocks))


def brute_force(trace: bench.Trace, pages: int, frequency: bool) -> int:
    """Leaf-first eviction by the letter: looks at everything, every time."""
    last: dict[int, float] = {}
    uses: dict[int, int] = {}
    parents: dict[int, int] = {}
    gone: dict[int, int] = {}
    found = 0
    for request, now in zip(trace.requests, trace.times_s, strict=True):
        blocks = request.tolist()
        prefix = 0
        while prefix < len(blocks) and blocks[prefix] in last:
            prefix += 1
        found += prefix
        for block in blocks[:prefix]:
            uses[block] += last[block] <= now - 1
            last[block] = now
        wanted = blocks[prefix:]
        while len(last) + len(wanted) > pages:
            inner = {parents[block] for block in last}
            leaves = [block for block in last if block not in inner and block not in blocks[:prefix]]
            if not leaves:
                break
            weight = {block: 1.5 ** min(uses[block].bit_length(), 6) if frequency else 1.0 for block in leaves}
            victim = max(leaves, key=lambda block: (now - last[block]) / weight[block])
            gone[victim] = uses[victim]
            del last[victim], uses[victim], parents[victim]
        for at, block in enumerate(wanted[: pages - len(last)], prefix):
            parents[block] = blocks[at - 1] if at else -1
            last[block], uses[block] = now, 0
            if block in gone:
                before = gone.pop(block)
                uses[block] = (1 << before.bit_length() >> 1) + 1
    return found


def load(seed: int, count: int, fan: int = 3, depth: int = 6) -> list[list[int]]:
    """Requests over a small forest; a block's id says all that comes before it."""
    rng = random.Random(seed)
    requests = []
    for _ in range(count):
        path, block = [], 0
        for _ in range(rng.randint(1, depth)):
            block = block * fan + 1 + min(rng.randrange(fan), rng.randrange(fan))
            path.append(block)
        requests.append(path)
    return requests


def test_a_trace_is_read(tmp_path: Path) -> None:
    trace = bench.Trace.read(write(tmp_path, TRACE))
    assert [blocks.tolist() for blocks in trace.requests] == [
        [0, 1, 2], [0, 1, 3, 4], [0, 1, 2, 5], [6, 7, 8, 9], [], [0, 1, 2, 5, 10],
    ]  # fmt: skip
    assert trace.times_s == [0, 2, 4, 6, 8, 10]
    assert (trace.unique, trace.asked) == (11, 20)


def test_ids_that_say_nothing_of_what_comes_before_are_told_apart_by_it(tmp_path: Path) -> None:
    trace = bench.Trace.read(write(tmp_path, '{"hash_ids": [7, 7, 8]}\n{"timestamp": 1.5, "hash_ids": [8, 7]}\n'))
    assert [blocks.tolist() for blocks in trace.requests] == [[0, 1, 2], [3, 4]]
    assert trace.times_s == [1.0, 1.5]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "truncated"),
        ("[1]", "Expected `object`"),
        ('{"timestamp": 3}', "missing required field `hash_ids`"),
        ('{"hash_ids": 3}', "Expected `array`"),
        ('{"hash_ids": [1, "2"]}', "Expected `int`"),
        ('{"hash_ids": [1], "timestamp": "noon"}', "Expected `int \\| float"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, why: str) -> None:
    path = write(tmp_path, '{"hash_ids": [1]}\n\n' + line + "\n")
    with pytest.raises(ConfigError, match=rf"trace\.jsonl:3: .*{why}"):
        bench.Trace.read(path)


def test_no_file_and_no_requests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        bench.Trace.read(tmp_path / "none.jsonl")
    for text in ("", '\n{"hash_ids": []}\n'):
        with pytest.raises(ConfigError, match="no request"):
            bench.Trace.read(write(tmp_path, text))


@pytest.mark.parametrize("wrong", ["", "0", "101", "five", "5,,10", "-1", "nan"])
def test_capacities_are_percents(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(ConfigError, match="--capacity"):
        bench.ReplayOptions.parse(tmp_path, wrong, [])


@pytest.mark.parametrize("pages", [1, 2, 3, 7, 100, 511, 9139])
def test_a_pool_has_exactly_so_many_slots(pages: int) -> None:
    assert bench.one_extent(pages).slot_count == pages


@pytest.mark.parametrize("pages", [1, 3, 5, 8, 13, 21, 40])
@pytest.mark.parametrize("seed", [1, 2])
def test_lru_finds_what_brute_force_finds(pages: int, seed: int) -> None:
    trace = trace_of(load(seed, 120))
    assert bench.replay(trace, pages, "lru") == brute_force(trace, pages, False)


@pytest.mark.parametrize("pages", [1, 3, 5, 8, 13, 21, 40])
@pytest.mark.parametrize("seed", [3, 4])
def test_lfu_age_finds_what_brute_force_finds(pages: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # A table so large that no page's memory takes another's place.
    monkeypatch.setattr("maru_server.ghosts._MIN", 1 << 20)
    trace = trace_of(load(seed, 120, fan=2, depth=5))
    assert bench.replay(trace, pages, "lfu-age") == brute_force(trace, pages, True)


def best_possible(requests: list[tuple[int, ...]], pages: int) -> int:
    """All that any eviction could find: every choice is tried."""
    states = {frozenset[int](): 0}
    for request in requests:
        following: dict[frozenset[int], int] = {}
        for kept, count in states.items():
            prefix = 0
            while prefix < len(request) and request[prefix] in kept:
                prefix += 1
            everything = sorted(kept | set(request))
            for mask in range(1 << len(everything)):
                chosen = frozenset(block for at, block in enumerate(everything) if mask >> at & 1)
                if len(chosen) <= pages:
                    following[chosen] = max(following.get(chosen, -1), count + prefix)
        states = following
    return max(states.values())


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    picks=st.lists(st.sampled_from([(0, 1, 2), (0, 1, 3), (0, 4), (5, 6), (5, 7)]), max_size=7), pages=st.integers(1, 4)
)
def test_no_eviction_finds_more_than_belady_and_some_finds_as_much(picks: list[tuple[int, ...]], pages: int) -> None:
    if picks:
        trace = trace_of([list(pick) for pick in picks])
        renamed = [tuple(blocks.tolist()) for blocks in trace.requests]
        assert bench.belady(trace, pages) == best_possible(renamed, pages)


def test_lru_per_key_counts_only_prefixes() -> None:
    # Room for two: the first request's [0, 1, 2] leaves 1 and 2, which are of no use without 0.
    trace = trace_of([[0, 1, 2], [0, 1, 2]])
    assert bench.lru_per_key(trace, 2) == 0
    assert bench.replay(trace, 2, "lru") == 2
    assert bench.lru_per_key(trace, 3) == 3


def test_long_requests_go_in_several_messages() -> None:
    length = 5000
    trace = trace_of([list(range(length)), list(range(length)), [*range(4096), 9999]])
    assert bench.replay(trace, length + 1, "lru") == length + 4096
    assert bench.replay(trace, 4500, "lru") == 4500 + 4096


def test_the_command_prints_and_writes_what_it_found(tmp_path: Path) -> None:
    path, out = write(tmp_path, TRACE), tmp_path / "out.json"
    result = CliRunner().invoke(app, ["replay", str(path), "--capacity", "50,100", "--json", str(out), "--check"])
    assert result.exit_code == 0, result.output
    assert "11 of them different" in " ".join(result.output.split())
    written = json.loads(out.read_text())
    assert written["requests"] == 6
    assert written["blocks"] == 20
    assert written["unbounded"] == pytest.approx(9 / 20)
    small, whole = written["capacities"]
    assert (small["pages"], whole["pages"]) == (5, 11)
    assert set(whole["hit_rates"]) == {"lru", "lfu-age", "LRU per key", "Belady"}
    assert set(whole["hit_rates"].values()) == {9 / 20}
    assert small["hit_rates"]["lru"] == brute_force(bench.Trace.read(path), 5, False) / 20
    assert small["hit_rates"]["Belady"] >= small["hit_rates"]["lru"] > 0


def test_check_fails_where_a_policy_is_worse_than_lru() -> None:
    rates = {"lru": 0.30, "lfu-age": 0.296, "Belady": 0.2}
    result = bench.ReplayResult(
        trace="t", requests=1, blocks=1, unique_blocks=1, unbounded=0.0,
        capacities=[bench.Capacity(percent=5, pages=1, hit_rates=rates)],
    )  # fmt: skip
    assert result.targets_met
    rates["lfu-age"] = 0.29
    assert not result.targets_met
