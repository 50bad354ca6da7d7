"""The command line of ``maru-bench experiment``."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from maru_core.errors import ConfigError

if TYPE_CHECKING:
    from maru_bench.experiment.driver import Routing
    from maru_bench.experiment.summary import Record


#: Of the table, which is worth more than neat lines in a narrow terminal.
_WIDTH = 140


class Bar:
    """A progress bar with the time left: drawn on a terminal, elsewhere a line now and then."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self._console = Console(stderr=True)
        self._began = time.monotonic()
        self._printed_at = -1e9
        self._last = ""
        self._progress = Progress(
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f} % [dim]{task.fields[left]}[/dim] {task.description}"),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task("", total=1.0, left="")

    def __call__(self, text: str, share: float, left_s: float | None) -> None:
        left = "" if left_s is None else f"{_minutes(left_s)} left"
        if self._console.is_terminal:
            self._progress.update(self._task, description=escape(text), completed=share, left=left)
            return
        now = time.monotonic()
        # A log file needs every new step once, and a sign of life of a long one now and then.
        if text.rpartition(":")[0] != self._last.rpartition(":")[0] or now - self._printed_at > 15:
            self._printed_at = now
            print(
                f"[{now - self._began:5.0f} s, {share:4.0%}] {text}{', ' if left else ''}{left}",
                file=sys.stderr,
                flush=True,
            )
        self._last = text

    def __enter__(self) -> Bar:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._progress.stop()


def _minutes(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def parse_urls(given: list[str]) -> dict[str, list[str]]:
    """``NAME=URL`` and bare URLs, which are called "given", by name.

    Raises:
        ConfigError: not a URL of a server.
    """
    from maru_bench.engines import parse_url

    urls: dict[str, list[str]] = {}
    for text in given:
        name, found, url = text.partition("=")
        if not found or "/" in name:
            name, url = "given", text
        parse_url(url)
        urls.setdefault(name, []).append(url)
    return urls


def experiment(
    workload: Annotated[
        str, typer.Argument(metavar="NAME", help="shared-prefix, multi-turn, rag, agents, or replay (with --trace).")
    ],
    modes: Annotated[
        str,
        typer.Option(metavar="NAMES", help="Of none, hicache, file, maru, maru-direct, mooncake, nixl; the first is what the others are compared with."),
    ] = "none,hicache,file,maru",
    engine: Annotated[str, typer.Option(help="sglang or vllm.")] = "sglang",
    url: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]URL", help="A server that runs already, http://host:port; repeat for more. None is started then. Those of one NAME are one mode."),
    ] = None,
    servers: Annotated[int, typer.Option(min=1, max=16, help="Engines of each mode.")] = 2,
    context: Annotated[str, typer.Option(metavar="TOKENS", help="Shared tokens of the longest prompts; several, comma-separated, are run one after the other.")] = "1024",
    concurrency: Annotated[str, typer.Option(metavar="N", help="Requests at a time; several, comma-separated.")] = "1",
    routing: Annotated[str, typer.Option(help="Which server gets a request: random, round-robin, or sticky (by conversation).")] = "round-robin",
    repeats: Annotated[int, typer.Option(min=1, max=100, help="Interleaved repeats; medians are shown.")] = 3,
    groups: Annotated[int, typer.Option(min=1, help="System prompts, conversations, or tasks.")] = 4,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each; turns of a conversation; levels of a tree.")] = 4,
    question: Annotated[int, typer.Option(min=1, help="Tokens of a prompt that no other has.")] = 24,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 8,
    documents: Annotated[int, typer.Option(min=1, help="rag: documents in one prompt.")] = 4,
    branches: Annotated[int, typer.Option(min=1, help="agents: requests that continue one.")] = 2,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="replay: a trace as Mooncake's or Qwen-Bailian's, one JSON object a line.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="replay: requests, from the beginning of the trace.")] = 64,
    block_tokens: Annotated[int | None, typer.Option(min=1, help="replay: tokens that a recorded block becomes; less makes all prompts shorter. Default: as recorded.")] = None,
    time_scale: Annotated[float, typer.Option(min=0.0, help="replay: recorded time between requests times this; 0: one after the other.")] = 0.0,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="replay: leave out requests with longer prompts.")] = None,
    model: Annotated[str | None, typer.Option(help="Model directory or name; tiny, wide or demo (the default): one of random weights, made from a seed.")] = None,
    python: Annotated[str | None, typer.Option(help="Interpreter of the environment with the engine; default: .venv-sglang or .venv-vllm of the checkout.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda; auto is the GPU where there is one.")] = "auto",
    start: Annotated[str, typer.Option(help="once: all modes' servers together; each: one mode's at a time, anew for each repeat; auto: once on a CPU with the memory for it.")] = "auto",
    settle: Annotated[bool, typer.Option(help="Between the waves of a workload wait until all is stored.")] = True,
    page_tokens: Annotated[int, typer.Option(min=1, help="--page-size, or vLLM's --block-size.")] = 16,
    max_total_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of each SGLang's device cache. Default: twice what runs at a time.")] = None,
    host_ratio: Annotated[float, typer.Option(min=1.0, help="SGLang's host tier, in device caches.")] = 2.0,
    chunk_tokens: Annotated[int | None, typer.Option(min=1, help="SGLang's --chunked-prefill-size.")] = None,
    dtype: Annotated[str, typer.Option(help="The engines' --dtype.")] = "bfloat16",
    pool_size: Annotated[str, typer.Option(help="Of Maru's pool, and of what other stores are given.")] = "2G",
    server: Annotated[str | None, typer.Option(help="A Maru server that runs already: ipc:///path or tcp://host:port. It is not emptied.")] = None,
    engine_arg: Annotated[list[str] | None, typer.Option(help="Passed to the engines as it is; repeat for each word.")] = None,
    seed: Annotated[int, typer.Option(help="Of all prompts.")] = 0,
    out: Annotated[Path, typer.Option(help="Directory for experiment.json, report.html, the plots and the servers' logs.")] = Path("experiment"),
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if a request failed, nothing came from a store, or, one at a time, answers differ. Never for a time.")] = False,
) -> None:  # fmt: skip
    """What a shared cache is worth under a load like yours: time to first token, tokens by tier, throughput, GB moved, energy.

    Starts servers of each mode (or takes yours), plays the workload on them, repeat by repeat and mode after mode, and
    writes a table, a JSON file, plots and a report in one HTML file.
    """
    from maru_bench.copy import parse_counts
    from maru_bench.experiment.run import ExperimentOptions, run
    from maru_bench.experiment.traces import ReplayedOptions
    from maru_bench.experiment.workloads import WORKLOADS, WorkloadOptions
    from maru_bench.machine import terminated_as_interrupt

    if workload not in WORKLOADS and workload != "replay":
        raise ConfigError(f"no workload {workload!r}: give one of {', '.join([*WORKLOADS, 'replay'])}")
    if (workload == "replay") != (trace is not None):
        raise ConfigError("replay needs --trace FILE, and no other workload takes one")
    if engine not in ("sglang", "vllm"):
        raise ConfigError(f"--engine is {engine!r}: give sglang or vllm")
    if start not in ("auto", "once", "each"):
        raise ConfigError(f"--start is {start!r}: give auto, once or each")
    options = ExperimentOptions(
        workload=workload,
        out=out,
        engine="vllm" if engine == "vllm" else "sglang",
        modes=[name.strip() for name in modes.split(",")],
        urls=parse_urls(url or []),
        python=python,
        model=model,
        device=device,
        servers=servers,
        contexts=tuple(_tokens(context)),
        concurrencies=tuple(parse_counts("--concurrency", concurrency)),
        routing=_routing(routing),
        repeats=repeats,
        seed=seed,
        sizes=WorkloadOptions(
            groups=groups,
            requests=requests,
            question=question,
            new_tokens=new_tokens,
            documents=documents,
            branches=branches,
        ),
        replayed=None
        if trace is None
        else ReplayedOptions(
            trace=trace,
            limit=limit,
            block_tokens=block_tokens,
            time_scale=time_scale,
            max_tokens=max_tokens,
            max_new_tokens=new_tokens,
        ),
        settle=settle,
        start="once" if start == "once" else "each" if start == "each" else "auto",
        page_tokens=page_tokens,
        chunk_tokens=chunk_tokens,
        host_ratio=host_ratio,
        max_total_tokens=max_total_tokens,
        dtype=dtype,
        pool_size=pool_size,
        server=server,
        arguments=tuple(engine_arg or ()),
    )
    with terminated_as_interrupt(), Bar() as bar:
        record = run(options, bar)
    show(record, out)
    raise typer.Exit(1 if check and record.failures else 0)


def _tokens(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if not all(count > 0 for count in counts):
        raise ConfigError(f"--context is {text!r}: give whole numbers of tokens, comma-separated")
    return counts


def _routing(text: str) -> Routing:
    from maru_bench.experiment.driver import ROUTINGS

    for known in ROUTINGS:
        if text == known:
            return known
    raise ConfigError(f"--routing is {text!r}: give one of {', '.join(ROUTINGS)}")


def show(record: Record, out: Path) -> None:
    """Print the table and write every file."""
    from maru_bench.experiment.page import page
    from maru_bench.experiment.plots import plots
    from maru_bench.experiment.report import markdown, table, write_json

    console = Console()
    console = console if console.width >= _WIDTH else Console(width=_WIDTH)
    console.print(table(record))
    write_json(record, out / "experiment.json")
    (out / "table.md").write_text(markdown(record))
    images: list[tuple[str, bytes]] = []
    try:
        images = list(plots(record))
    except ImportError:
        console.print("no plots: matplotlib is not installed; pip install 'maru-sglang[bench]'")
    for name, image in images:
        (out / f"{name}.png").write_bytes(image)
    (out / "report.html").write_text(page(record, images))
    for name, why in record.skipped.items():
        console.print(f"[yellow]left out[/yellow] {escape(name)}: {escape(why)}", highlight=False, soft_wrap=True)
    for failure in record.failures:
        console.print(f"[bold red]FAILED[/bold red] {escape(failure)}", highlight=False, soft_wrap=True)
    console.print(f"written: {out / 'experiment.json'} and {out / 'report.html'}", highlight=False, soft_wrap=True)
