"""The loads that experiments put on engines: who asks what, after what. All from a seed, and nothing from a clock.

A request continues another one's prompt *and its answer* (``after``), as a conversation does, or begins anew. Prompts are token
ids drawn at random: what they mean does not matter to a cache, only where they are equal.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

import msgspec

from maru_core.errors import ConfigError

#: Tokens that every prompt of a workload begins with where the workload has a system prompt beside its context.
_SYSTEM_TOKENS: Final = 64


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request. ``tokens`` come after the prompt and the answer of request ``after``, if there is one."""

    number: int
    """Its place in the workload, from 0; nothing comes ``after`` a later one."""
    session: int
    """Whose it is: what sticky routing goes by."""
    turn: int
    """How many requests of its conversation came before it."""
    tokens: list[int]
    new_tokens: int
    after: int | None = None
    wave: int = 0
    """All of one wave are answered before the next begins."""
    at_s: float | None = None
    """When it arrives, seconds after the start; None: as soon as a client is free."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    requests: list[Request]
    context: int
    """Tokens of the longest prompt's shared part, as was asked for."""

    def prompt_lengths(self) -> list[int]:
        """Tokens of each prompt; answers are as long as they were asked to be."""
        lengths: list[int] = []
        for request in self.requests:
            before = 0
            if request.after is not None:
                before = lengths[request.after] + self.requests[request.after].new_tokens
            lengths.append(before + len(request.tokens))
        return lengths

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(
            length + request.new_tokens for length, request in zip(self.prompt_lengths(), self.requests, strict=True)
        )


class WorkloadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes; each workload reads those that it has a use for, as its docstring says."""

    context: int = 1024
    """Tokens that are shared, in the longest prompt."""
    groups: int = 4
    """Different system prompts, conversations, sets of documents, or tasks."""
    requests: int = 4
    """Requests of each group; turns of a conversation; levels of a tree."""
    question: int = 24
    """Tokens that only one request has."""
    new_tokens: int = 8
    documents: int = 4
    """``rag``: documents in one prompt."""
    branches: int = 2
    """``agents``: requests that continue one."""
    vocabulary: int = 16_000
    seed: int = 0


class _Maker:
    """Token ids from a seed, and requests in order."""

    def __init__(self, options: WorkloadOptions) -> None:
        self.choose = random.Random(options.seed)
        # The lowest ids are special tokens in most vocabularies.
        self._low, self._high = min(16, options.vocabulary // 4), min(options.vocabulary, 30_000)
        self.requests: list[Request] = []

    def tokens(self, count: int) -> list[int]:
        return [self.choose.randrange(self._low, self._high) for _ in range(count)]

    def add(
        self,
        tokens: list[int],
        new_tokens: int,
        *,
        session: int,
        turn: int = 0,
        after: int | None = None,
        wave: int = 0,
    ) -> int:
        number = len(self.requests)
        self.requests.append(
            Request(
                number=number, session=session, turn=turn, tokens=tokens, new_tokens=new_tokens, after=after, wave=wave
            )
        )
        return number


def shared_prefix(options: WorkloadOptions) -> Workload:
    """``groups`` system prompts of ``context`` tokens, each with ``requests`` questions of different people.

    The first question of each comes before all others, which come in any order.
    """
    make = _Maker(options)
    prefixes = [make.tokens(options.context) for _ in range(options.groups)]
    asked = [(group, number) for group in range(options.groups) for number in range(1, options.requests)]
    make.choose.shuffle(asked)
    for session, (group, number) in enumerate([*((group, 0) for group in range(options.groups)), *asked]):
        tokens = prefixes[group] + make.tokens(options.question)
        make.add(tokens, options.new_tokens, session=session, turn=number, wave=min(number, 1))
    return Workload(name="shared-prefix", requests=make.requests, context=options.context)


def multi_turn(options: WorkloadOptions) -> Workload:
    """``groups`` conversations of ``requests`` turns, which grow to ``context`` tokens and begin with one system prompt.

    Turn by turn, each time in another order.
    """
    make = _Maker(options)
    system = make.tokens(min(_SYSTEM_TOKENS, options.context // 2))
    answers = options.new_tokens * (options.requests - 1)
    each = max(1, (options.context - len(system) - answers) // options.requests)
    last: dict[int, int] = {}
    for turn in range(options.requests):
        for group in make.choose.sample(range(options.groups), options.groups):
            tokens = make.tokens(each) if turn else system + make.tokens(each)
            last[group] = make.add(
                tokens, options.new_tokens, session=group, turn=turn, after=last.get(group), wave=turn
            )
    return Workload(name="multi-turn", requests=make.requests, context=options.context)


def rag(options: WorkloadOptions) -> Workload:
    """``groups x requests`` questions, each behind ``documents`` documents that have ``context`` tokens together.

    The documents are chosen from twice as many, some more often than others, and come in any order: only a prompt
    that begins with the same documents in the same order has a prefix to share.
    """
    make = _Maker(options)
    system = make.tokens(_SYSTEM_TOKENS)
    each = max(1, options.context // options.documents)
    library = [make.tokens(each) for _ in range(2 * options.documents)]
    weights = [1 / (rank + 1) for rank in range(len(library))]
    for session in range(options.groups * options.requests):
        left, chosen = list(range(len(library))), []
        for _ in range(options.documents):
            [document] = make.choose.choices(left, [weights[rank] for rank in left])
            left.remove(document)
            chosen.append(document)
        tokens = system + [token for document in chosen for token in library[document]] + make.tokens(options.question)
        make.add(tokens, options.new_tokens, session=session)
    return Workload(name="rag", requests=make.requests, context=options.context)


def agents(options: WorkloadOptions) -> Workload:
    """``groups`` tasks under one list of tools (half of ``context``), each a tree of ``requests`` levels.

    Every request is continued by ``branches`` others: the first by the same agent, each further one by an agent of its own.
    """
    make = _Maker(options)
    tools = make.tokens(max(1, options.context // 2))
    levels = options.requests
    each = max(1, (options.context - len(tools) - options.new_tokens * (levels - 1)) // levels)
    open_: list[tuple[int, int]] = []  # (request, agent) of the level before
    sessions = 0
    for level in range(levels):
        grown = []
        parents: list[tuple[int | None, int | None]]
        parents = [*open_] if level else [(None, None)] * options.groups
        for after, agent in make.choose.sample(parents, len(parents)):
            for branch in range(options.branches if level else 1):
                if branch or agent is None:
                    session, sessions = sessions, sessions + 1
                else:
                    session = agent
                tokens = make.tokens(each) if level else tools + make.tokens(each)
                grown.append(
                    (
                        make.add(tokens, options.new_tokens, session=session, turn=level, after=after, wave=level),
                        session,
                    )
                )
        open_ = grown
    return Workload(name="agents", requests=make.requests, context=options.context)


#: By name; ``replay`` is made from a file, in :mod:`maru_bench.experiment.traces`.
WORKLOADS: Final[dict[str, Callable[[WorkloadOptions], Workload]]] = {
    "shared-prefix": shared_prefix,
    "multi-turn": multi_turn,
    "rag": rag,
    "agents": agents,
}


def make_workload(name: str, options: WorkloadOptions) -> Workload:
    """Raises:
    ConfigError: no such workload, or sizes that make none.
    """
    if name not in WORKLOADS:
        raise ConfigError(f"no workload {name!r}: give one of {', '.join([*WORKLOADS, 'replay'])}")
    if options.context < 2 * _SYSTEM_TOKENS:
        raise ConfigError(f"--context has {options.context}: give at least {2 * _SYSTEM_TOKENS} tokens")
    return WORKLOADS[name](options)
