"""vLLM's KV cache groups as Maru's components: which are stored, under which name, and when a prefix of them counts.

A group is what shares one block table: layers that keep the same tokens. A model with one kind of attention has one group; a hybrid
model has several, each with a rule of its own. The first of which every page counts is the component ``kv``, by which the
server's events and figures go; the others are ``g0``, ``g1``, … by vLLM's number.

============================  =====================================================  ===========================================
group                         what vLLM needs to go on after a prefix                rule
============================  =====================================================  ===========================================
full attention, MLA           the KV of every token                                  every page
sliding window                that of the last ``window - 1`` tokens                 the trailing pages that hold them
chunked local attention       that of the chunk that the next token is in            the trailing pages of a whole chunk less one
state space (``align``)       the state after the last token                         the last page
============================  =====================================================  ===========================================

The rule for chunks asks for more than is needed: how much of a chunk there is depends on where the prefix ends, and Maru's rules do
not. A length that all rules allow is one at which vLLM can go on. What is not in the table is refused: a cache whose bytes depend on
more than the tokens before them, or that vLLM itself does not find again by its hashes, cannot be shared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from maru_core.errors import ConfigError
from maru_core.protocol import Rule, Want

#: The component of the first group of which every page counts, and of a model's only group.
KV: Final = "kv"
_INSTEAD: Final = "serve this model without MaruConnector"


class Group(msgspec.Struct, frozen=True):
    """One group that is stored."""

    group_id: int  # vLLM's
    component: str  # without the pipeline stage
    want: Want
    layers: tuple[str, ...]  # of this worker
    chunk_pages: int = 0  # of chunked local attention, else 0

    def first_needed(self, pages: int) -> int:
        """First of the pages that vLLM reads to go on after ``pages`` of them; the ones before need not be loaded."""
        if self.chunk_pages:
            return pages // self.chunk_pages * self.chunk_pages
        return max(0, pages - self.want.pages) if self.want.rule == Rule.TRAILING_PAGES else 0


class Placement(msgspec.Struct, frozen=True):
    """Which part of each page a worker holds.

    The ranks of a pipeline stage each have their own heads, and a page is whole with all of them; where they hold replicas, as with
    MLA, one of them writes for all. Stages have different layers, and the shards of a component are equally long, so each
    stage is a component of its own."""

    stage: int
    stages: int
    shard: int
    world: int
    writer: bool

    @staticmethod
    def of(kv_cache_config: Any, parallel_config: Any) -> Placement:
        """Placement of the worker that has these.

        Raises:
            ConfigError: a shape that is not supported.
        """
        refuse_unsupported_shapes(parallel_config)
        ranks, stages = int(parallel_config.tensor_parallel_size), int(parallel_config.pipeline_parallel_size)
        replicas = int(kv_cache_config.kv_tp_replicas)
        if ranks % replicas:
            raise ConfigError(
                f"{replicas} of {ranks} tensor-parallel ranks hold the same KV: Maru needs a divisor; {_INSTEAD}"
            )
        rank = int(parallel_config.rank) % (ranks * stages)
        stage, rank = divmod(rank, ranks)
        return Placement(
            stage=stage, stages=stages, shard=rank // replicas, world=ranks // replicas, writer=rank % replicas == 0
        )

    def component(self, group: Group) -> str:
        """What this worker stores of ``group``."""
        return stage_component(group.component, self.stage, self.stages)

    def wants(self, groups: Iterable[Group]) -> dict[str, Want]:
        """What a prefix needs, of all groups and stages."""
        return {
            stage_component(group.component, stage, self.stages): group.want
            for group in groups
            for stage in range(self.stages)
        }


def stage_component(component: str, stage: int, stages: int) -> str:
    """``kv``, or ``kv.2`` for pipeline stage 2."""
    return component if stages == 1 else f"{component}.{stage}"


def refuse_unsupported_shapes(parallel_config: Any) -> None:
    """
    Raises:
        ConfigError: ranks share tokens, not heads or layers.
    """
    for name, option in (
        ("decode_context_parallel_size", "--decode-context-parallel-size"),
        ("prefill_context_parallel_size", "--prefill-context-parallel-size"),
    ):
        if (value := int(getattr(parallel_config, name))) != 1:
            raise ConfigError(
                f"{option} is {value}: Maru does not support ranks that each hold other tokens: use {option} 1"
            )


def plan_groups(kv_cache_config: Any, block_tokens: int) -> tuple[Group, ...]:
    """The groups to store, in vLLM's order.

    Args:
        block_tokens: tokens that one block hash stands for.
    Raises:
        ConfigError: a group whose bytes Maru cannot share; the message says which, why and what to do.
    """
    groups: list[Group] = []
    several = len(kv_cache_config.kv_cache_groups) > 1
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        try:
            want, chunk = _rule(group, block_tokens)
        except ConfigError as error:
            raise ConfigError(f"KV cache group {group_id} (layers {_some(group.layer_names)}) {error}") from None
        first = want.rule == Rule.ALL_PAGES and all(each.component != KV for each in groups)
        name = KV if first or not several else f"g{group_id}"
        groups.append(Group(group_id, name, want, tuple(group.layer_names), chunk))
    if not groups:
        raise ConfigError(f"this model has no KV cache, so there is nothing for Maru to keep: {_INSTEAD}")
    return tuple(groups)


def layer_specs(spec: Any) -> list[Any]:
    """The spec of each layer of a group, or the one of all."""
    from vllm.v1.kv_cache_interface import iter_layer_specs

    return list(iter_layer_specs(spec))


def _rule(group: Any, block_tokens: int) -> tuple[Want, int]:
    """Rule, and pages of a chunk, of one group."""
    if group.host_resident or not group.enable_kv_transfer or group.role.value != "default":
        raise ConfigError(
            f"is kept in host memory by HiSparse, which Maru does not support: {_INSTEAD}, or turn HiSparse off"
        )
    if group.is_eagle_group:
        raise ConfigError(
            "has layers of a draft model. Their KV is written after the target's and would be stored incomplete: leave "
            '--speculative-config out, or use a method without a draft model ("ngram", "suffix")'
        )
    spec = group.kv_cache_spec
    if spec.block_size != block_tokens:
        raise ConfigError(
            f"has blocks of {spec.block_size} tokens, and vLLM hashes every {block_tokens}: Maru needs the two to be equal. Leave "
            f"--prefix-match-unit out; if this stays, the model's groups differ in their blocks: {_INSTEAD}"
        )
    if not spec.prefix_cacheable or spec.prefix_replay_tokens:
        raise ConfigError(f"({type(spec).__name__}) is not found again by its hashes in vLLM itself: {_INSTEAD}")
    rules = {_layer_rule(layer, block_tokens) for layer in layer_specs(spec)}
    if len(rules) != 1:
        raise ConfigError(f"mixes layers of different kinds, which Maru does not support: {_INSTEAD}")
    return rules.pop()


def _layer_rule(spec: Any, block_tokens: int) -> tuple[Want, int]:
    """By the exact type: a class derived from one of these may keep its bytes in another way."""
    rule = _rules().get(type(spec).__name__)
    if rule is None or not type(spec).__module__.startswith("vllm.v1.kv_cache_interface"):
        raise ConfigError(f"has a {type(spec).__name__}, which Maru does not support: {_INSTEAD}")
    if getattr(spec, "non_causal", False):
        raise ConfigError(f"attends to later tokens too, so the KV of a prefix depends on what follows it: {_INSTEAD}")
    return rule(spec, block_tokens)


def _rules() -> dict[str, Callable[[Any, int], tuple[Want, int]]]:
    return {
        "FullAttentionSpec": _every_page,
        "MLAAttentionSpec": _every_page,
        "SlidingWindowSpec": _window,
        "SlidingWindowMLASpec": _window,
        "ChunkedLocalAttentionSpec": _chunk,
        "MambaSpec": _state,
    }


def _every_page(spec: Any, block_tokens: int) -> tuple[Want, int]:
    return Want(), 0


def _window(spec: Any, block_tokens: int) -> tuple[Want, int]:
    """As ``SlidingWindowManager._contiguous_blocks_for_hit``; a window of one token needs nothing, which one page covers."""
    return Want(Rule.TRAILING_PAGES, max(1, math.ceil((spec.sliding_window - 1) / block_tokens))), 0


def _chunk(spec: Any, block_tokens: int) -> tuple[Want, int]:
    """At most a whole chunk less one page lies before the next token in its chunk."""
    tokens = spec.attention_chunk_size
    if tokens % block_tokens:
        raise ConfigError(
            f"has chunks of {tokens} tokens, which are not whole blocks of {block_tokens}: choose a --block-size that divides {tokens}"
        )
    pages = tokens // block_tokens
    return Want(Rule.TRAILING_PAGES, max(1, pages - 1)), pages


def _state(spec: Any, block_tokens: int) -> tuple[Want, int]:
    if spec.mamba_cache_mode != "align":
        raise ConfigError(
            f"keeps states with --mamba-cache-mode {spec.mamba_cache_mode}, not at the ends of blocks: use --mamba-cache-mode align, "
            "which needs prefix caching (--enable-prefix-caching)"
        )
    return Want(Rule.TRAILING_PAGES, 1), 0


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
