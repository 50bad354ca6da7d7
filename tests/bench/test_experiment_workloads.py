"""Workloads and traces of experiments: the same from a seed, shared where they say so, and read as they were recorded."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from maru_bench.experiment.traces import ReplayedOptions, recorded_block_tokens, replayed
from maru_bench.experiment.workloads import WORKLOADS, Workload, WorkloadOptions, make_workload
from maru_bench.replay import numbered_lines
from maru_core.errors import ConfigError

SIZES = WorkloadOptions(context=512, groups=3, requests=4, question=10, new_tokens=6, vocabulary=512)


def prompts(workload: Workload) -> list[list[int]]:
    """With zeros for answers, which are not there before somebody gives them."""
    full: list[list[int]] = []
    for request in workload.requests:
        before = []
        if request.after is not None:
            before = full[request.after] + [0] * workload.requests[request.after].new_tokens
        full.append(before + request.tokens)
    return full


def common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_a_seed_gives_the_same_workload_and_another_one_another(name: str) -> None:
    workload = make_workload(name, SIZES)
    assert workload == make_workload(name, SIZES)
    changed = make_workload(name, msgspec.structs.replace(SIZES, seed=1))
    assert changed != workload
    assert sorted(map(len, prompts(changed))) == sorted(map(len, prompts(workload)))


@pytest.mark.parametrize("name", list(WORKLOADS))
@pytest.mark.parametrize("context", [128, 512, 2000])
def test_what_every_workload_keeps_to(name: str, context: int) -> None:
    workload = make_workload(name, msgspec.structs.replace(SIZES, context=context))
    assert [request.number for request in workload.requests] == list(range(len(workload.requests)))
    for request in workload.requests:
        assert request.tokens
        assert all(16 <= token < 512 for token in request.tokens)
        if request.after is not None:
            before = workload.requests[request.after]
            assert before.number < request.number
            assert before.wave < request.wave
            assert before.turn + 1 == request.turn
    lengths = workload.prompt_lengths()
    assert lengths == [len(prompt) for prompt in prompts(workload)]
    assert workload.longest == max(lengths) + 6
    # As long as was asked for, give or take what is not shared.
    assert context * 0.9 <= max(lengths) <= context + 64 + 10


def test_shared_prefixes_are_asked_once_before_all_others() -> None:
    workload = make_workload("shared-prefix", SIZES)
    asked = prompts(workload)
    assert len(asked) == 12
    first, rest = asked[:3], asked[3:]
    assert [request.wave for request in workload.requests] == [0] * 3 + [1] * 9
    for one in rest:
        assert sorted(common(one, prompt) for prompt in first)[-1] == 512
        assert sorted(common(one, prompt) for prompt in first)[-2] < 4
    assert len({request.session for request in workload.requests}) == 12
    # In no order that would send each prompt to one server alone, where servers take turns.
    groups = [max(range(3), key=lambda group: common(one, first[group])) for one in rest]
    assert groups not in ([0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 2] * 3)


def test_turns_continue_their_own_conversation() -> None:
    workload = make_workload("multi-turn", SIZES)
    for request in workload.requests:
        if request.after is not None:
            assert workload.requests[request.after].session == request.session
    assert [request.wave for request in workload.requests] == sorted(request.wave for request in workload.requests)
    firsts = [prompt for prompt, request in zip(prompts(workload), workload.requests, strict=True) if not request.turn]
    assert {common(firsts[0], other) >= 64 for other in firsts} == {True}, "one system prompt"


def test_documents_come_in_any_order() -> None:
    workload = make_workload("rag", msgspec.structs.replace(SIZES, groups=8))
    asked = prompts(workload)
    shared = {common(one, other) for i, one in enumerate(asked) for other in asked[:i]}
    # The system prompt always; behind it whole documents of 128 tokens, or none.
    assert min(shared) >= 64
    assert {count // 128 * 128 + 64 for count in (value - 64 for value in shared)} >= {64, 192}
    assert len({tuple(prompt) for prompt in asked}) == len(asked)


def test_agents_are_trees_under_one_list_of_tools() -> None:
    workload = make_workload("agents", SIZES)
    assert len(workload.requests) == 3 * (1 + 2 + 4 + 8)
    children: dict[int, list[int]] = {}
    for request in workload.requests:
        if request.after is not None:
            children.setdefault(request.after, []).append(request.session)
    for after, sessions in children.items():
        assert len(set(sessions)) == 2
        assert sessions.count(workload.requests[after].session) == 1, "one branch is the same agent's"
    asked = prompts(workload)
    assert min(common(asked[0], other) for other in asked) >= 256


def test_an_unknown_workload_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'chat'.*shared-prefix"):
        make_workload("chat", SIZES)


# ---------------------------------------------------------------- traces

MOONCAKE = [
    {"timestamp": 0, "input_length": 1300, "output_length": 500, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 1024, "output_length": 1, "hash_ids": [0, 1]},
    {"timestamp": 4500, "input_length": 1030, "output_length": 7, "hash_ids": [9, 1, 4]},
]
QWEN = [
    {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 40, "output_length": 9, "type": "text", "turn": 1, "hash_ids": [11, 12, 13]},
    {"chat_id": 2, "parent_chat_id": -1, "timestamp": 0.75, "input_length": 20, "output_length": 9, "type": "text", "turn": 1, "hash_ids": [21, 22]},
    {"chat_id": 3, "parent_chat_id": 1, "timestamp": 2.5, "input_length": 64, "output_length": 9, "type": "text", "turn": 2, "hash_ids": [11, 12, 14, 15]},
]  # fmt: skip


def written(folder: Path, lines: list[dict[str, object]]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_mooncake_trace_becomes_prompts_that_share_what_it_shared(tmp_path: Path) -> None:
    workload = replayed(ReplayedOptions(trace=written(tmp_path, MOONCAKE), time_scale=2.0, max_new_tokens=50))
    first, second, third = (request.tokens for request in workload.requests)
    assert [len(first), len(second), len(third)] == [1300, 1024, 1030]
    assert first[:1024] == second
    assert common(first, third) < 4, "a block behind another block is another block"
    assert [request.new_tokens for request in workload.requests] == [50, 1, 7]
    assert [request.at_s for request in workload.requests] == [0.0, 6.0, 9.0]
    assert len({request.session for request in workload.requests}) == 3


def test_blocks_may_be_made_smaller_for_a_small_engine(tmp_path: Path) -> None:
    workload = replayed(ReplayedOptions(trace=written(tmp_path, MOONCAKE), block_tokens=32))
    assert [len(request.tokens) for request in workload.requests] == [1300 // 16, 64, 64]
    assert {request.at_s for request in workload.requests} == {None}
    with_limit = replayed(ReplayedOptions(trace=written(tmp_path, MOONCAKE), block_tokens=32, max_tokens=64))
    assert len(with_limit.requests) == 2


def test_a_qwen_trace_keeps_its_chats_together(tmp_path: Path) -> None:
    workload = replayed(ReplayedOptions(trace=written(tmp_path, QWEN), time_scale=1.0))
    one, other, continued = workload.requests
    assert [len(request.tokens) for request in workload.requests] == [40, 20, 64]
    assert one.tokens[:32] == continued.tokens[:32]
    assert (one.session, other.session, continued.session) == (0, 1, 0)
    assert (one.turn, continued.turn) == (0, 1)
    assert [request.at_s for request in workload.requests] == [0.0, 0.25, 2.0]


def test_another_seed_gives_other_tokens_for_the_same_blocks(tmp_path: Path) -> None:
    path = written(tmp_path, MOONCAKE)
    one, other = (replayed(ReplayedOptions(trace=path, seed=seed)).requests[0].tokens for seed in (1, 2))
    assert len(one) == len(other)
    assert one != other


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"hash_ids": "x"}', r"trace.jsonl:1: .*hash_ids"),
        ('{"hash_ids": [1, 2]}\n{"timestamp": 3}', r"trace.jsonl:2: "),
        ("", "has no requests"),
        ('{"hash_ids": [1, 2], "input_length": 5000}', "--block-tokens"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=what):
        replayed(ReplayedOptions(trace=path))
    with pytest.raises(ConfigError, match="cannot be read"):
        replayed(ReplayedOptions(trace=tmp_path / "none"))


def test_a_last_block_that_was_not_full_may_be_left_out(tmp_path: Path) -> None:
    lines = [line for line, _, _ in numbered_lines(written(tmp_path, [{"input_length": 40, "hash_ids": [1, 2]}]))]
    assert recorded_block_tokens(lines) == 16
