"""Whatever goes wrong in a call of SGLang's becomes an answer: nothing may reach its threads."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from sglang.srt.mem_cache.hicache_storage import PoolTransfer

from maru_sglang.radix import ChainError

P = ParamSpec("P")
T = TypeVar("T")


def answers(fallback: Callable[..., Any]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Turn whatever goes wrong in a call into ``fallback(*arguments)``: nothing may reach SGLang's threads. Keys that are no
    chain are a refusal, everything else a fault."""

    def wrap(call: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(call)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
            backend: Any = args[0]
            try:
                return call(*args, **kwargs)
            except ChainError as error:
                backend._refused(error)
            except Exception:
                backend._log_once(
                    f"fault in {call.__name__}", logging.ERROR, "fault in %s: a miss", call.__name__, exc_info=True
                )
            answer: T = fallback(*args[1:], **kwargs)
            return answer

        return guarded

    return wrap


def none(keys: Sequence[str], *_: Any, **__: Any) -> list[bool]:
    return [False] * len(keys)


def none_by_pool(transfers: Sequence[PoolTransfer], *_: Any, **__: Any) -> dict[str, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}
