"""The processes in which tests run vLLM itself: one that has imported it, and a fork of that for every engine.

Importing vLLM takes a quarter of a minute, an engine of a tiny model four seconds. So :func:`main`
imports once, listens, and forks for every connection; the fork makes one ``LLM`` in its own process (scheduler, worker
and connector in the same interpreter) and runs the functions of this module that the test names, one after another.
:mod:`vllm_harness` is the other end. A fork ends when its connection does.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Reply:
    """What one request gave."""

    ids: list[int]
    logprobs: list[float]
    cached: int
    """Tokens of the prompt that were not computed: from vLLM's own cache or from the connector."""
    ended: str | None


# ------------------------------------------------------------ what a test may ask for


def ask(
    llm: Any,
    prompts: Sequence[Sequence[int]],
    tokens: int = 8,
    salt: str | None = None,
    adapter: tuple[str, int, str] | None = None,
) -> list[Reply]:
    """Greedy continuations of all prompts, which are submitted at once; ``adapter`` is name, number and path."""
    from vllm.lora.request import LoRARequest

    given = [{"prompt_token_ids": list(prompt)} | ({"cache_salt": salt} if salt else {}) for prompt in prompts]
    lora = LoRARequest(*adapter) if adapter is not None else None
    return [_reply(output) for output in llm.generate(given, _sampling(tokens), use_tqdm=False, lora_request=lora)]


def drain(llm: Any) -> None:
    """Let the engine step until nothing is left to do, blocks whose release the connector delays included."""
    scheduler = _scheduler(llm)
    deadline = time.monotonic() + 60
    while scheduler.has_requests():
        llm.llm_engine.step()
        assert time.monotonic() < deadline, f"the engine holds {list(scheduler.requests)} for ever"


def forget(llm: Any) -> None:
    """Empty vLLM's own prefix cache (the connector's is left alone)."""
    drain(llm)
    assert llm.reset_prefix_cache(), "blocks are still in use"


def reset_connector(llm: Any) -> bool:
    """vLLM's way to empty all caches, the connector's included."""
    drain(llm)
    return bool(llm.reset_prefix_cache(reset_connector=True))


def begin(llm: Any, requests: dict[str, tuple[Sequence[int], int]]) -> None:
    """Submit requests (prompt and length of the answer by name) without a step."""
    for name, (prompt, tokens) in requests.items():
        llm.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, _sampling(tokens))


def step(llm: Any, count: int = 1) -> dict[str, Reply]:
    """Some steps of the engine; what finished in them."""
    done = {}
    for _ in range(count):
        for output in llm.llm_engine.step():
            if output.finished:
                done[output.request_id] = _reply(output)
    return done


def compute(llm: Any, name: str, tokens: int) -> None:
    """Steps until so many tokens of a request are computed: in the first ones it may wait for the answer to its lookup."""
    (known,) = _known(llm, [name])
    deadline = time.monotonic() + 60
    while _scheduler(llm).requests[known].num_computed_tokens < tokens:
        step(llm)
        assert time.monotonic() < deadline, f"{name} is not computed"


def finish(llm: Any) -> dict[str, Reply]:
    """Steps until no request is unfinished."""
    done: dict[str, Reply] = {}
    deadline = time.monotonic() + 60
    while llm.llm_engine.has_unfinished_requests():
        done |= step(llm)
        assert time.monotonic() < deadline, "requests do not finish"
    return done


def _known(llm: Any, names: Sequence[str]) -> list[str]:
    """vLLM adds to the names that it was given."""
    known = [name for name in _scheduler(llm).requests if name.rsplit("-", 1)[0] in names or name in names]
    assert len(known) == len(names), f"of {names} vLLM knows {known}"
    return known


def abort(llm: Any, names: Sequence[str]) -> None:
    _known(llm, names)
    llm.llm_engine.abort_request(list(names))


def figures(llm: Any) -> dict[str, float]:
    """vLLM's metrics, with the label ``source`` or ``reason`` where there is one: ``prompt_tokens_by_source/external_kv_transfer``."""
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if not hasattr(metric, "value"):
            continue
        name = metric.name.removeprefix("vllm:")
        part = metric.labels.get("source") or metric.labels.get("reason")
        found[f"{name}/{part}" if part else name] = metric.value
    return found


def load_times(llm: Any) -> tuple[int, bool]:
    """How many loads the histogram of Maru has, and whether their time is between nothing and a minute."""
    (metric,) = [metric for metric in llm.get_metrics() if metric.name == "vllm:maru_load_seconds"]
    return int(metric.count), 0 < metric.sum < 60


_LISTENING: list[Any] = []


def listen(llm: Any, endpoint: str) -> None:
    """Subscribe to the engine's KV events."""
    import zmq

    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.subscribe(b"")
    socket.connect(endpoint)
    _LISTENING[:] = [socket]


def heard(llm: Any) -> list[tuple[str, str, list[Any]]]:
    """KV events since the last call: kind, medium, block hashes."""
    import msgspec
    from vllm.distributed.kv_events import KVEventBatch

    (socket,) = _LISTENING
    told = []
    while socket.poll(200):
        batch = msgspec.msgpack.decode(socket.recv_multipart()[-1], type=KVEventBatch)
        told += [
            (type(each).__name__, str(each.medium), list(each.block_hashes))
            for each in batch.events
            if hasattr(each, "medium")
        ]
    return told


def limit_calls(llm: Any, timeout_s: float) -> None:
    """From here on each call to Maru's server may take so long."""
    from maru_core import conversation

    for session in list(conversation._open_conversations):
        session.timeout_s = timeout_s


def free_blocks(llm: Any) -> int:
    return int(_scheduler(llm).kv_cache_manager.block_pool.get_num_free_blocks())


def all_blocks(llm: Any) -> int:
    """How many could be free: all but the null block."""
    return int(_scheduler(llm).kv_cache_config.num_blocks) - 1


def groups(llm: Any) -> list[str]:
    """The kind of every KV cache group, to know what a model really exercises."""
    return [type(group.kv_cache_spec).__name__ for group in _scheduler(llm).kv_cache_config.kv_cache_groups]


def _scheduler(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def _sampling(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=1, ignore_eos=True, detokenize=False)


def _reply(output: Any) -> Reply:
    [sample] = output.outputs
    ids = list(sample.token_ids)
    logprobs = [entry[token].logprob for token, entry in zip(ids, sample.logprobs or [], strict=False)]
    return Reply(ids, logprobs, output.num_cached_tokens or 0, sample.finish_reason)


# ------------------------------------------------------------ the processes


def main(address: str) -> None:
    _die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children need not be waited for
    importlib.import_module("vllm.v1.worker.cpu_worker")
    importlib.import_module("vllm.entrypoints.llm")
    with Listener(address, "AF_UNIX") as listener:
        print("ready", flush=True)
        while True:
            connection = listener.accept()
            if os.fork() == 0:
                _serve(connection)
            connection.close()


def _serve(connection: Connection) -> None:
    """The life of one fork."""
    _die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    made: list[Any] = []
    try:
        log, environment, options = connection.recv()
        _redirect(log)
        os.environ.update(environment)
        from vllm import LLM

        _answer(connection, lambda: made.append(LLM(**options)))
        while True:
            name, arguments = connection.recv()
            _answer(connection, partial(globals()[name], *made, *arguments))
    except EOFError:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for llm in made:
            # As a server does that is told to stop: what a connector does then is part of what is tested.
            llm.llm_engine.engine_core.shutdown()
        os._exit(0)


def _answer(connection: Connection, run: Callable[[], object]) -> None:
    try:
        connection.send((True, run()))
    except BaseException:
        text = traceback.format_exc()
        print(text, file=sys.stderr, flush=True)
        connection.send((False, text))


def _redirect(log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
