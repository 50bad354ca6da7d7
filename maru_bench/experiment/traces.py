"""The workload ``replay``: recorded traces whose prompts are told by block hashes, made into token ids.

Read are the traces that Mooncake published with its paper (blocks of 512 tokens, times in whole milliseconds) and the
Qwen-Bailian ones (blocks of 16 tokens, times in seconds, the turns of a chat named by ``chat_id`` and ``parent_chat_id``). A
block becomes the same tokens wherever it comes with the same blocks before it. Answers are part of the recorded prompts that
follow them, so no request continues another one here.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Final

import msgspec

from maru_bench.experiment.workloads import Request, Workload
from maru_bench.replay import TraceLine, numbered_lines
from maru_core.errors import ConfigError

#: Block sizes that traces are known to have.
_BLOCKS: Final = (512, 16)


class ReplayedOptions(msgspec.Struct, frozen=True, kw_only=True):
    trace: Path
    limit: int = 64
    """Requests, from the beginning of the trace."""
    block_tokens: int | None = None
    """Tokens that a block becomes; None: as many as it had. Less makes prompts shorter in proportion, for small engines."""
    time_scale: float = 0.0
    """Recorded seconds between requests times this; 0: no arrival times, each client asks as soon as it is free."""
    max_tokens: int | None = None
    """Requests whose prompts would be longer are left out; None: none are."""
    max_new_tokens: int = 64
    vocabulary: int = 16_000
    seed: int = 0


def recorded_block_tokens(lines: list[TraceLine]) -> int | None:
    """Tokens of a block when the trace was recorded: the size with which lengths and numbers of blocks agree, or None.

    A trace may leave the last block out where it was not full.
    """
    told = [(line.input_length, len(line.hash_ids)) for line in lines if line.input_length is not None]
    for size in _BLOCKS:
        if told and all(length // size <= blocks <= -(-length // size) for length, blocks in told):
            return size
    return None


def replayed(options: ReplayedOptions) -> Workload:
    """Raises:
    ConfigError: naming the file, the line and what is wrong with it, or what is left of the trace.
    """
    taken = list(itertools.islice(numbered_lines(options.trace), options.limit))
    if not taken:
        raise ConfigError(f"{options.trace} has no requests: give a trace file")
    lines = [line for line, _, _ in taken]
    recorded = recorded_block_tokens(lines)
    block = options.block_tokens or recorded
    if block is None:
        raise ConfigError(
            f"{options.trace} does not say how long its blocks are (input_length does not fit its hash_ids with blocks of "
            "512 or 16 tokens): give --block-tokens"
        )
    low, high = min(16, options.vocabulary // 4), min(options.vocabulary, 30_000)
    made: dict[int, list[int]] = {}

    def tokens_of(number: int) -> list[int]:
        if number not in made:
            choose = random.Random(options.seed << 32 | number)
            made[number] = [choose.randrange(low, high) for _ in range(block)]
        return made[number]

    requests: list[Request] = []
    sessions: dict[object, int] = {}
    turns: dict[int, int] = {}
    first_s: float | None = None
    for line, blocks, time_s in taken:
        length = len(blocks) * block
        if recorded is not None and line.input_length is not None:
            length = max(1, line.input_length * block // recorded)
        if not blocks or (options.max_tokens is not None and length > options.max_tokens):
            continue
        tokens = [token for number in blocks for token in tokens_of(number)][:length]
        # A chat goes on under its parent's name; a trace without names has only strangers, told apart by their first own block.
        key: object = line.chat_id if line.chat_id is not None else ("request", len(requests))
        parent = line.parent_chat_id
        session = sessions[parent] if parent in sessions else len(turns)
        sessions[key] = session
        first_s = time_s if first_s is None else first_s
        requests.append(
            Request(
                number=len(requests),
                session=session,
                turn=turns.get(session, 0),
                tokens=tokens,
                new_tokens=max(1, min(line.output_length or 1, options.max_new_tokens)),
                at_s=(time_s - first_s) * options.time_scale if options.time_scale else None,
            )
        )
        turns[session] = turns.get(session, 0) + 1
    if not requests:
        raise ConfigError(
            f"every one of the first {options.limit} requests of {options.trace} is longer than {options.max_tokens} tokens: "
            "give a smaller --block-tokens or a larger --max-tokens"
        )
    return Workload(name="replay", requests=requests, context=max(len(request.tokens) for request in requests))
