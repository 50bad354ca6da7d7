"""Runs an experiment: every cell, in every mode, repeat by repeat, and writes down what was seen."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal, TypeVar

import msgspec

from maru_bench.copy import describe_machine
from maru_bench.experiment.driver import PlayOptions, Routing, Sample, play
from maru_bench.experiment.energy import EnergyMeter
from maru_bench.experiment.eta import Estimate, Step
from maru_bench.experiment.fleet import Fleet, FleetOptions, GivenFleet, StartedFleet
from maru_bench.experiment.modes import Engine, Mode, choose_modes
from maru_bench.experiment.summary import Cell, Record, Run, judge, summarise
from maru_bench.experiment.traces import ReplayedOptions, replayed
from maru_bench.experiment.workloads import Workload, WorkloadOptions, make_workload
from maru_bench.machine import (
    choose_device,
    commit,
    demo_model,
    find_python,
    gpu_names,
    versions_of,
    vocabulary_of,
)
from maru_bench.processes import scratch_directory
from maru_bench.stores import Moved
from maru_core.errors import ConfigError

_T = TypeVar("_T")

#: Told what is being done, what share of all is done, and seconds left, where that is known.
Show = Callable[[str, float, float | None], None]

#: Clients tell their server what they moved with their heartbeats: nothing new for so long is all of it.
_REPORTS_S: Final = 4.0
_REPORTS_LIMIT_S: Final = 15.0
_POLL_S: Final = 0.2
_WARM_TOKENS: Final = 512
#: Sizes of the engine kit's models, which it makes where they are named.
KIT_MODELS: Final = ("tiny", "wide", "demo")
#: Memory of one engine on a CPU beside its model and caches, and what is left to the rest of the machine.
_ENGINE_BYTES: Final = 2_500_000_000
_SPARE_BYTES: Final = 2_000_000_000


class ExperimentOptions(msgspec.Struct, frozen=True, kw_only=True):
    workload: str
    out: Path
    engine: Engine = "sglang"
    modes: list[str] = []
    urls: dict[str, list[str]] = {}
    """Servers that run already, by the name of their mode; none are started then."""
    python: str | None = None
    model: str | None = None
    """None: the engine kit's demo model; or one of :data:`KIT_MODELS`. With ``urls`` only its vocabulary matters."""
    device: str = "auto"
    servers: int = 2
    contexts: tuple[int, ...] = (1024,)
    concurrencies: tuple[int, ...] = (1,)
    routing: Routing = "round-robin"
    repeats: int = 3
    seed: int = 0
    sizes: WorkloadOptions = WorkloadOptions()
    replayed: ReplayedOptions | None = None
    settle: bool = True
    """Before the next wave of a workload wait until everything is stored that the last one computed."""
    start: Literal["auto", "once", "each"] = "auto"
    """Start all modes' servers once and keep them, or each mode's anew for each repeat."""
    page_tokens: int = 16
    chunk_tokens: int | None = None
    host_ratio: float = 2.0
    max_total_tokens: int | None = None
    dtype: str = "bfloat16"
    pool_size: str = "2G"
    server: str | None = None
    arguments: tuple[str, ...] = ()
    timeout_s: float = 600.0


class _Experiment:
    def __init__(self, options: ExperimentOptions, show: Show) -> None:
        self._options = options
        self._show = show
        self._workloads: dict[tuple[int, int], Workload] = {}
        self._estimate: Estimate | None = None
        self._told: dict[str, Moved] = {}

    # -------------------------------------------------------------- what is run

    def run(self) -> Record:
        options = self._options
        options.out.mkdir(parents=True, exist_ok=True)
        modes: list[Mode] = []
        skipped: dict[str, str] = {}
        python = ""
        if not options.urls:
            python = find_python(options.python, options.engine)
            modes, skipped = choose_modes(options.modes, options.engine, python)
        device = choose_device(options.device) if not options.urls else "given"
        model = self._model(python)
        vocabulary = vocabulary_of(model) if model else options.sizes.vocabulary
        cells = self._cells()
        for repeat in range(options.repeats):
            for context in sorted({cell.context for cell in cells}):
                self._workloads[repeat, context] = self._workload(context, repeat, vocabulary)
        self._check_length(model)
        fleet_options = FleetOptions(
            engine=options.engine,
            python=python,
            model=model,
            device=device,
            servers=options.servers,
            gpus=len(gpu_names()) if device == "cuda" else 0,
            longest=max(workload.longest for workload in self._workloads.values()),
            concurrency=max(options.concurrencies),
            page_tokens=options.page_tokens,
            chunk_tokens=options.chunk_tokens,
            host_ratio=options.host_ratio,
            max_total_tokens=options.max_total_tokens,
            dtype=options.dtype,
            pool_size=options.pool_size,
            endpoint=options.server,
            arguments=options.arguments,
        )
        meter = EnergyMeter()
        settings: dict[str, object] = {
            **{
                name: value
                for name, value in json.loads(msgspec.json.encode(options, enc_hook=str)).items()
                if name not in ("out", "urls", "modes", "seed") and not (name == "replayed" and value is None)
            },
            "device": device,
            # Of the engines on a CPU; see docs/experiments.md.
            "new_rows_only": os.environ.get("MARU_KIT_NEW_ROWS", ""),
            "model": model,
            "device_cache_tokens": fleet_options.cache_tokens,
            "longest_prompt_and_answer": fleet_options.longest,
        }
        record = Record(
            workload=options.workload,
            engine=options.engine,
            machine={**describe_machine(), "memory_gb": round(_memory()[0] / 1e9), "gpus": gpu_names()},
            versions=versions_of(python) if python else {},
            settings=settings,
            seed=options.seed,
            started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            modes={},
            skipped=skipped,
            storage_is_host=[mode.name for mode in modes if mode.storage_is_host],
            energy_missing=meter.why,
        )
        if (known := commit()) is not None:
            record.versions["maru commit"] = known
        with contextlib.ExitStack() as stack:
            # Sockets' paths are limited to 107 bytes, so not below --out.
            scratch = stack.enter_context(scratch_directory())
            if options.urls:
                fleets: list[Fleet] = [GivenFleet(name, options.engine, urls) for name, urls in options.urls.items()]
            else:
                fleets = [
                    StartedFleet(mode, fleet_options, scratch / str(index), options.out / "logs")
                    for index, mode in enumerate(modes)
                ]
            record.modes = {fleet.name: fleet.says for fleet in fleets}
            once = bool(options.urls) or self._start_once(len(fleets), device, model)
            settings["start"] = "once" if once else "each"
            self._estimate = Estimate(self._steps([fleet.name for fleet in fleets], cells, once))
            if once:
                self._run_all_up(stack, fleets, cells, meter, record)
            else:
                self._run_in_turn(modes, fleet_options, scratch, cells, meter, record)
        record.rows = summarise(record)
        record.failures = judge(record)
        return record

    def _model(self, python: str) -> str:
        """A directory or a name of the model hub; "" where only running servers know."""
        named = self._options.model
        if named in KIT_MODELS and not self._options.urls:
            return demo_model(python, self._say, named)
        return named or ("" if self._options.urls else demo_model(python, self._say))

    def _cells(self) -> list[Cell]:
        contexts = self._options.contexts if self._options.replayed is None else (0,)
        return [Cell(context=c, concurrency=n) for c in contexts for n in self._options.concurrencies]

    def _workload(self, context: int, repeat: int, vocabulary: int) -> Workload:
        # Other tokens in every repeat, the same in every mode: nothing that an earlier repeat left behind is of use.
        options, seed = self._options, self._options.seed * 1000 + repeat
        if options.replayed is not None:
            return replayed(msgspec.structs.replace(options.replayed, vocabulary=vocabulary, seed=seed))
        sizes = msgspec.structs.replace(options.sizes, context=context, vocabulary=vocabulary, seed=seed)
        return make_workload(options.workload, sizes)

    def _check_length(self, model: str) -> None:
        path = Path(model) / "config.json"
        if not model or not path.exists():
            return
        most = json.loads(path.read_text()).get("max_position_embeddings")
        longest = max(workload.longest for workload in self._workloads.values())
        if isinstance(most, int) and longest > most:
            raise ConfigError(
                f"a prompt with its answer has {longest} tokens, and {model} takes {most}: give a smaller --context"
                + (", --block-tokens or --max-tokens" if self._options.replayed else "")
            )

    def _start_once(self, modes: int, device: str, model: str) -> bool:
        if self._options.start != "auto":
            return self._options.start == "once"
        if device != "cpu":
            return False
        weights = sum(path.stat().st_size for path in Path(model).glob("*.safetensors")) if model else 0
        needed = modes * self._options.servers * (_ENGINE_BYTES + 2 * weights) + _SPARE_BYTES
        return _memory()[1] >= needed

    def _steps(self, modes: Sequence[str], cells: Sequence[Cell], once: bool) -> list[Step]:
        options = self._options

        def amount(repeat: int, cell: Cell) -> float:
            return float(sum(self._workloads[repeat, cell.context].prompt_lengths()))

        starts = [] if options.urls else [Step(kind="start", mode=mode, amount=1.0) for mode in modes]
        steps = list(starts) if once else []
        for repeat in range(options.repeats):
            order = _rotated(modes, repeat)
            if once:
                steps += [Step(kind="play", mode=mode, amount=amount(repeat, cell)) for cell in cells for mode in order]
            else:
                for mode in order:
                    steps.append(Step(kind="start", mode=mode, amount=1.0))
                    steps += [Step(kind="play", mode=mode, amount=amount(repeat, cell)) for cell in cells]
        return steps

    # -------------------------------------------------------------- the runs

    def _run_all_up(
        self,
        stack: contextlib.ExitStack,
        fleets: Sequence[Fleet],
        cells: Sequence[Cell],
        meter: EnergyMeter,
        record: Record,
    ) -> None:
        started = [fleet for fleet in fleets if isinstance(fleet, StartedFleet)]
        for fleet in started:
            stack.callback(fleet.stop)
            self._say(f"{fleet.name}: starting {self._options.servers} servers")
            fleet.begin()
        for fleet in started:
            self._await(fleet)
        for repeat in range(self._options.repeats):
            record.runs += [
                self._play(each, cell, repeat, meter) for cell in cells for each in _rotated(fleets, repeat)
            ]

    def _run_in_turn(
        self,
        modes: Sequence[Mode],
        fleet_options: FleetOptions,
        scratch: Path,
        cells: Sequence[Cell],
        meter: EnergyMeter,
        record: Record,
    ) -> None:
        for repeat in range(self._options.repeats):
            for mode in _rotated(modes, repeat):
                directory = scratch / f"{repeat}{mode.name[:6]}"
                fleet = StartedFleet(mode, fleet_options, directory, self._options.out / "logs")
                self._told.clear()
                try:
                    self._say(f"{fleet.name}: starting {self._options.servers} servers")
                    fleet.begin()
                    self._await(fleet)
                    record.runs += [self._play(fleet, cell, repeat, meter) for cell in cells]
                finally:
                    fleet.stop()

    def _await(self, fleet: StartedFleet) -> None:
        fleet.await_ready(self._say)
        # One-off costs of a fresh process count in no run.
        choose = random.Random(repr((self._options.seed, "warm")))
        for client in fleet.clients:
            self._say(f"{fleet.name}: warming up {client.name}")
            client.generate(
                [choose.randrange(16, 256) for _ in range(_WARM_TOKENS)], 4, timeout_s=self._options.timeout_s
            )
        self._done()

    def _play(self, fleet: Fleet, cell: Cell, repeat: int, meter: EnergyMeter) -> Run:
        workload = self._workloads[repeat, cell.context]
        what = f"{fleet.name}: {cell.context or workload.context} tokens, {cell.concurrency} at a time"
        what += f", repeat {repeat + 1} of {self._options.repeats}"
        self._say(f"{what}: emptying caches")
        fleet.reset()
        told = self._told.get(fleet.name) or self._moved(fleet)
        sources = fleet.sources()
        joules = meter.read()
        options = PlayOptions(
            concurrency=cell.concurrency,
            routing=self._options.routing,
            seed=self._options.seed,
            timeout_s=self._options.timeout_s,
        )
        answered = 0

        def count(sample: Sample) -> None:
            nonlocal answered
            answered += 1
            self._say(f"{what}: {answered} of {len(workload.requests)} answered")

        settling = 0.0

        def settle() -> None:
            nonlocal settling
            if self._options.settle:
                began = time.monotonic()
                fleet.settle()
                settling += time.monotonic() - began

        began = time.monotonic()
        samples = play(workload, fleet.clients, options, answered=count, between_waves=settle)
        # What is waited for on purpose is no throughput.
        seconds = time.monotonic() - began - settling
        used = {name: value - joules.get(name, 0.0) for name, value in meter.read().items()}
        after = fleet.sources()
        moved = self._moved(fleet)
        if moved is not None:
            self._told[fleet.name] = moved
        self._done()
        return Run(
            mode=fleet.name,
            cell=cell if cell.context else Cell(context=workload.context, concurrency=cell.concurrency),
            repeat=repeat,
            seconds=seconds,
            samples=samples,
            moved=None
            if moved is None or told is None
            else Moved(
                stored_bytes=moved.stored_bytes - told.stored_bytes, loaded_bytes=moved.loaded_bytes - told.loaded_bytes
            ),
            sources=None if sources is None or after is None else {tier: after[tier] - sources[tier] for tier in after},
            joules=used,
        )

    def _moved(self, fleet: Fleet) -> Moved | None:
        """What was moved so far, when everybody has told it."""
        deadline = time.monotonic() + _REPORTS_LIMIT_S
        told, since = fleet.moved(), time.monotonic()
        while told is not None and time.monotonic() < deadline and time.monotonic() - since < _REPORTS_S:
            time.sleep(_POLL_S)
            now = fleet.moved()
            if now != told:
                told, since = now, time.monotonic()
        return told

    # -------------------------------------------------------------- telling

    def _say(self, text: str) -> None:
        estimate = self._estimate
        self._show(text, estimate.share() if estimate else 0.0, estimate.left_s() if estimate else None)

    def _done(self) -> None:
        assert self._estimate is not None
        self._estimate.done()


def _rotated(items: Sequence[_T], by: int) -> list[_T]:
    """Another one begins each time, so that none always finds the machine as the same other one left it."""
    return [items[(index + by) % len(items)] for index in range(len(items))]


def _memory() -> tuple[int, int]:
    """Bytes of memory that there are, and that are free for more processes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemTotal"].split()[0]) << 10, int(lines["MemAvailable"].split()[0]) << 10


def run(options: ExperimentOptions, show: Show) -> Record:
    """Run it all. Whatever was started is stopped on every way out.

    Raises:
        ConfigError: something that the user named cannot be used.
        ServerFailedError: a server did not start or would not be flushed. Requests that fail are in the record.
    """
    return _Experiment(options, show).run()
