"""Command line ``maru-bench``: parses, runs one experiment or benchmark, prints it, and sets the exit code."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from maru_core.errors import ConfigError, MaruError

app = typer.Typer(
    name="maru-bench",
    help="Experiments and benchmarks of Maru, a shared-memory KV-cache tier for LLM servers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to FILE as JSON.")]
_CheckOption = Annotated[bool, typer.Option("--check", help="Exit with 1 if a target is not met.")]
_RepeatsOption = Annotated[int, typer.Option(min=1, help="Interleaved repeats; medians are shown.")]


class Progress:
    """One line that says what is going on: redrawn on a terminal, elsewhere printed when it changes."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._status = self._console.status("") if self._console.is_terminal else None
        self._began = time.monotonic()
        self._last = ""
        self._printed_at = 0.0

    def __call__(self, text: str) -> None:
        elapsed = time.monotonic() - self._began
        if self._status is not None:
            self._status.update(f"{text} [dim]{elapsed:.0f} s[/dim]")
        # A log file needs every new step once, and a sign of life of a long one now and then.
        elif text.split("(")[0] != self._last.split("(")[0] or elapsed - self._printed_at > 15:
            self._printed_at = elapsed
            print(f"[{elapsed:5.0f} s] {text}", file=sys.stderr, flush=True)
        self._last = text

    def __enter__(self) -> Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()


@app.command()
def copy(
    sizes: Annotated[
        str, typer.Option(help="Page sizes, comma-separated: K and M are KiB and MiB.")
    ] = "64K,256K,1M,4M",
    batches: Annotated[str, typer.Option(help="Pages per call, comma-separated.")] = "1,16,128",
    repeats: _RepeatsOption = 7,
    pool: Annotated[
        str | None, typer.Option(help="Size of the pool; default: as much as the largest batch needs.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=64, help="Maru's copy threads; default: as engines.")
    ] = None,
    json: _JsonOption = None,
    check: _CheckOption = False,
) -> None:
    """GB/s of store and load through Maru, beside plain memcpy and beside one file per page."""
    from maru_bench import copy as bench

    options = bench.CopyOptions(
        page_bytes=[bench.parse_bytes(text) for text in sizes.split(",")],
        batches=bench.parse_counts("--batches", batches),
        repeats=repeats,
        pool=pool,
        threads=threads,
    )
    with Progress() as progress:
        result = bench.run(options, progress)
    Console().print(result.table())
    if json is not None:
        result.write_json(json)
    raise typer.Exit(1 if check and not result.targets_met else 0)


@app.command()
def metadata(
    pages: Annotated[str, typer.Option(help="Pages per call, comma-separated.")] = "1,16,128,512",
    repeats: _RepeatsOption = 200,
    resident: Annotated[int, typer.Option(min=0, help="Pages that the server holds besides.")] = 8192,
    json: _JsonOption = None,
    check: _CheckOption = False,
) -> None:
    """Match, reserve and commit, beside a bare ZeroMQ echo of the same bytes; validation and server start."""
    from maru_bench import metadata as bench
    from maru_bench.copy import parse_counts

    options = bench.MetadataOptions(pages=parse_counts("--pages", pages), repeats=repeats, resident=resident)
    with Progress() as progress:
        result = bench.run(options, progress)
    console = Console()
    for table in result.tables():
        console.print(table)
    if json is not None:
        result.write_json(json)
    raise typer.Exit(1 if check and not result.targets_met else 0)


@app.command()
def prefix_sharing(
    python: Annotated[
        str | None,
        typer.Option(
            envvar="MARU_SGLANG_PYTHON",
            help="Interpreter of the environment with SGLang; default: .venv-sglang of the checkout.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model directory or name; default: a demo model made from a seed.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda; auto is the GPU where there is one.")] = "auto",
    backend: Annotated[str, typer.Option(help="maru, or SGLang's own file backend for comparison.")] = "maru",
    server: Annotated[
        str | None, typer.Option(help="A Maru server that runs already: ipc:///path or tcp://host:port.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory for demo.json, demo.png and logs.")] = Path(),
    prompts: Annotated[int, typer.Option(min=1, max=16)] = 3,
    new_tokens: Annotated[int, typer.Option(min=1, max=512, help="Tokens to generate for each prompt.")] = 16,
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(help="Passed to SGLang as it is; repeat for each word: --engine-arg=--tp --engine-arg=2"),
    ] = None,
) -> None:
    """Two real SGLang servers share prefixes: cold, second server, after a flush, with Maru stopped.

    Exits with 0 only if tokens came from the store and every phase gave the cold run's outputs and logprobs.
    """
    from maru_bench import prefix_sharing as bench

    if backend not in ("maru", "file"):
        raise ConfigError(f"--backend is {backend!r}: give maru or file")
    options = bench.ExperimentOptions(
        python=bench.find_python(python),
        out=out,
        model=model,
        device=bench.choose_device(device),
        backend="maru" if backend == "maru" else "file",
        server=server,
        prompts=prompts,
        new_tokens=new_tokens,
        engine_arguments=tuple(engine_arg or ()),
    )
    with bench.terminated_as_interrupt(), Progress() as progress:
        report = bench.run_experiment(options, progress)
    console = Console()
    console.print(report.table())
    report.write_json(out / "demo.json")
    try:
        report.write_plot(out / "demo.png")
        written = f"{out / 'demo.json'} and {out / 'demo.png'}"
    except ImportError:
        written = f"{out / 'demo.json'} (no plot: matplotlib is not installed; pip install 'maru-sglang[bench]')"
    console.print(f"written: {written}", highlight=False, soft_wrap=True)
    for failure in report.failures:
        console.print(f"[bold red]FAILED[/bold red] {escape(failure)}", highlight=False, soft_wrap=True)
    if report.failures:
        console.print(f"the servers' logs are in {out / 'logs'}", highlight=False, soft_wrap=True)
    raise typer.Exit(0 if report.ok else 1)


def main() -> None:
    """Entry point. An error that Maru raises on purpose is one message, not a traceback."""
    try:
        app()
    except MaruError as error:
        Console(stderr=True).print(
            f"[bold red]maru-bench:[/bold red] {escape(str(error))}", highlight=False, soft_wrap=True
        )
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
