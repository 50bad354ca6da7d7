"""The prefix-sharing experiment: two real SGLang servers, one store, the same prompts in four phases.

=============  ==================================================================================================
phase          what happens
=============  ==================================================================================================
cold           server A answers every prompt for the first time: all is computed, and stored behind the answer
second server  server B, which has seen nothing, answers them: the prefixes must come from the store
after a flush  A's own caches are emptied and it answers again: the prefixes must come from the store
store stopped  the store is killed, A's caches are emptied, and it answers again: all must be computed
=============  ==================================================================================================

Every phase must give the very tokens and the very log probabilities of the cold run. To make that a fair demand
of floating point, a prompt is some whole prefill chunks and a few tokens more: then the cold run computes the last
chunk in the same shapes as a run that loaded everything before it, and the two may not differ in one bit.

Before the phases each server answers one prompt of its own of the same length as the others, so that one-off costs
of a fresh process count in no phase.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from maru_bench.machine import Narrate, demo_model, gpu_count, vocabulary_of
from maru_bench.processes import scratch_directory
from maru_bench.report import Phase, Report
from maru_bench.servers import (
    ServerFailedError,
    SGLangOptions,
    SGLangServer,
    wait_all_ready,
)
from maru_bench.stores import EngineStore, FileStore, MaruStore

PAGE_TOKENS: Final = 16
CHUNK_TOKENS: Final = 256
#: Tokens of each prompt beyond whole chunks: what is computed even where everything else was loaded.
TAIL_TOKENS: Final = 9
#: Whole chunks of the prompts, one after the other and around again: prompts of about 1000 to 1800 tokens.
PROMPT_CHUNKS: Final = (4, 6, 7, 5)
_START_S: Final = 600.0
_POLL_S: Final = 0.2


class ExperimentOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to run the experiment with."""

    python: str
    """Interpreter of the environment that has SGLang (and Maru) installed."""
    out: Path
    """Directory for the report, and for the logs if something fails."""
    model: str | None = None
    """None: the engine kit's demo model, made from a seed."""
    device: Literal["cpu", "cuda"] = "cpu"
    backend: Literal["maru", "file"] = "maru"
    server: str | None = None
    """A Maru server that runs already; None starts one. Its phase "store stopped" is then left out."""
    prompts: int = 3
    new_tokens: int = 16
    pool_size: str = "1G"
    seed: int = 0
    engine_arguments: tuple[str, ...] = ()


# ------------------------------------------------------------------ the experiment


def run_experiment(options: ExperimentOptions, narrate: Narrate) -> Report:
    """Run all phases and judge them. Whatever was started is stopped on every way out.

    Raises:
        ConfigError: something that the user named cannot be used.
        ServerFailedError: a server did not start. What goes wrong later is in the report.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    model = options.model or demo_model(options.python, narrate)
    vocabulary = vocabulary_of(model)
    prompts = make_prompts(options.prompts + 2, vocabulary, options.seed)
    asked, warm_up = prompts[: options.prompts], prompts[options.prompts :]
    logs = options.out / "logs"
    report = Report(
        backend=options.backend,
        device=options.device,
        model=model,
        prompt_tokens=[len(prompt) for prompt in asked],
        new_tokens=options.new_tokens,
        page_tokens=PAGE_TOKENS,
    )
    with contextlib.ExitStack() as stack:
        # A Unix socket's path is limited to 107 bytes, so not below --out.
        scratch = stack.enter_context(scratch_directory())
        store: EngineStore = (
            MaruStore(scratch, size=options.pool_size, log=logs / "maru-server.log", endpoint=options.server)
            if options.backend == "maru"
            else FileStore(scratch)
        )
        stack.callback(store.close)
        narrate("starting the store")
        store.start()
        before = store.objects() or 0
        servers = _start_engines(stack, options, model, store, logs, narrate)
        for server, prompt in zip(servers, warm_up, strict=True):
            narrate(f"warming up {server.name}")
            server.generate(prompt, options.new_tokens)
        pages = before + sum(len(prompt) // PAGE_TOKENS for prompt in prompts)
        _run_phases(report, servers, store, asked, pages, options, narrate)
    report.judge()
    return report


def _start_engines(
    stack: contextlib.ExitStack,
    options: ExperimentOptions,
    model: str,
    store: EngineStore,
    logs: Path,
    narrate: Narrate,
) -> list[SGLangServer]:
    """Two servers, started at once, ready."""
    gpus = gpu_count() if options.device == "cuda" else 0
    servers = []
    for index, name in enumerate(("server A", "server B")):
        arguments: tuple[str, ...] = ()
        if options.device == "cuda":
            # Each its own GPU where there are two, else a part of the one; --mem-fraction-static counts the whole GPU.
            arguments = ("--base-gpu-id", "1") if index and gpus > 1 else ()
            arguments += ("--mem-fraction-static", "0.8" if gpus > 1 else "0.4")
        sglang = SGLangOptions(
            python=options.python,
            model=model,
            device=options.device,
            backend=options.backend,
            extra_config=store.extra_config,
            page_size=PAGE_TOKENS,
            max_total_tokens=max(8192, 2 * sum(prompt_length(i) for i in range(options.prompts + 1))),
            chunk_tokens=CHUNK_TOKENS,
            dtype="bfloat16",
            arguments=(*arguments, *options.engine_arguments),
            env=store.env,
        )
        server = SGLangServer(name, sglang, logs / f"{name.replace(' ', '-')}.log")
        stack.callback(server.stop)
        server.start()
        servers.append(server)

    def waiting(names: Sequence[str], elapsed: float) -> None:
        state = f"waiting for {' and '.join(names)}" if names else "both are up"
        narrate(f"starting two SGLang servers: {state} ({elapsed:.0f} s; about 90 s on two cores)")

    wait_all_ready(servers, timeout_s=_START_S, progress=waiting)
    return servers


def _run_phases(
    report: Report,
    servers: Sequence[SGLangServer],
    store: EngineStore,
    prompts: Sequence[Sequence[int]],
    pages: int,
    options: ExperimentOptions,
    narrate: Narrate,
) -> None:
    """Fill in ``report.phases``. A phase that fails is the last: the ones after it would compare nothing."""
    first, second = servers
    name = "Maru" if options.backend == "maru" else "store"
    phases: list[tuple[Phase, SGLangServer, Callable[[], None]]] = [
        (Phase(key="cold", title="cold", server="A", from_store=False), first, lambda: None),
        (
            Phase(key="second_server", title="second server", server="B", from_store=True),
            second,
            lambda: _await_stored(store, pages, narrate),
        ),
        (Phase(key="after_flush", title="after a flush", server="A", from_store=True), first, first.flush),
    ]
    if store.can_stop:

        def stop() -> None:
            first.flush()
            store.stop()

        phases.append((Phase(key="store_stopped", title=f"{name} stopped", server="A", from_store=False), first, stop))
    for phase, server, prepare in phases:
        report.phases.append(phase)
        try:
            narrate(f"{phase.title}: preparing")
            prepare()
            for number, prompt in enumerate(prompts):
                narrate(
                    f"{phase.title}: {server.name} answers prompt {number + 1} of {len(prompts)} ({len(prompt)} tokens)"
                )
                phase.answers.append(server.generate(prompt, options.new_tokens))
        except ServerFailedError as error:
            phase.error = str(error)
            return


def _await_stored(store: EngineStore, pages: int, narrate: Narrate) -> None:
    """Wait until the store holds ``pages`` pages: SGLang stores behind the answer.

    Gives up when nothing more has come for 10 seconds: what is missing shows in the phase that needs it.
    """
    seen, changed = -1, time.monotonic()
    while (now := store.objects() or 0) < pages and time.monotonic() - changed < 10.0:
        if now != seen:
            seen, changed = now, time.monotonic()
        narrate(f"waiting for the pages to be stored: {now} of {pages}")
        time.sleep(_POLL_S)


# ------------------------------------------------------------------ what it runs with


def prompt_length(index: int) -> int:
    """Tokens of prompt ``index``."""
    return PROMPT_CHUNKS[index % len(PROMPT_CHUNKS)] * CHUNK_TOKENS + TAIL_TOKENS


def make_prompts(count: int, vocabulary: int, seed: int) -> list[list[int]]:
    """``count`` prompts of token ids, no two with a common prefix, from a seed."""
    choose = random.Random(seed)
    # The lowest ids are special tokens in most vocabularies.
    low, high = min(16, vocabulary // 4), min(vocabulary, 30_000)
    return [
        [low + index] + [choose.randrange(low, high) for _ in range(prompt_length(index) - 1)] for index in range(count)
    ]
