"""Command line ``maru-bench``: parses, runs one experiment or benchmark, prints it, and sets the exit code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from maru_bench.experiment.command import experiment
from maru_bench.kernels.command import kernels
from maru_bench.machine import terminated_as_interrupt
from maru_bench.peers.command import peers
from maru_bench.progress import Progress as Progress  # also for commands that other modules have
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
#: Defaults of ``metadata``; with --clients others take their place.
_PAGES = "1,16,128,512"
_REPEATS = 200

_RepeatsOption = Annotated[int, typer.Option(min=1, help="Interleaved repeats; medians are shown.")]


@app.command()
def copy(
    sizes: Annotated[
        str | None,
        typer.Option(
            help="Page sizes, comma-separated: K and M are KiB and MiB. Default: 64K,256K,1M,4M; of rdma 64K,1M."
        ),
    ] = None,
    batches: Annotated[
        str | None, typer.Option(help="Pages per call, comma-separated. Default: 1,16,128; of rdma 1,16,64.")
    ] = None,
    repeats: _RepeatsOption = 7,
    pool: Annotated[
        str | None, typer.Option(help="Size of the pool; default: as much as the largest batch needs.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=64, help="Maru's copy threads; default: as engines.")
    ] = None,
    transport: Annotated[
        str, typer.Option(help="cxl: a mapped pool. rdma: through an agent of this machine, beside NIXL alone.")
    ] = "cxl",
    ucx_tls: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="With rdma: transports that UCX may use (its UCX_TLS), such as tcp; left out, it chooses.",
        ),
    ] = None,
    json: _JsonOption = None,
    check: _CheckOption = False,
) -> None:
    """GB/s of store and load through Maru, beside plain memcpy and one file per page, or beside a bare NIXL transfer."""
    from maru_bench import copy as bench
    from maru_bench import copy_rdma

    if transport not in ("cxl", "rdma"):
        raise ConfigError(f"--transport is {transport!r}: give cxl or rdma")
    rdma = transport == "rdma"
    for option, given, wanted in (
        ("--pool", pool, "cxl"),
        ("--threads", threads, "cxl"),
        ("--ucx-tls", ucx_tls, "rdma"),
    ):
        if given is not None and transport != wanted:
            raise ConfigError(f"{option} is of --transport {wanted}: leave it out")
    page_bytes = [bench.parse_bytes(text) for text in (sizes or ("64K,1M" if rdma else "64K,256K,1M,4M")).split(",")]
    counts = bench.parse_counts("--batches", batches or ("1,16,64" if rdma else "1,16,128"))
    result: bench.CopyResult | copy_rdma.RdmaCopyResult
    if rdma and (why := copy_rdma.unavailable()):
        print(f"maru-bench copy --transport rdma: skipped: {why}")
        raise typer.Exit(1 if check else 0)
    with Progress() as progress:
        if rdma:
            result = copy_rdma.run(
                copy_rdma.RdmaCopyOptions(page_bytes=page_bytes, batches=counts, repeats=repeats, ucx_tls=ucx_tls),
                progress,
            )
        else:
            options = bench.CopyOptions(
                page_bytes=page_bytes, batches=counts, repeats=repeats, pool=pool, threads=threads
            )
            result = bench.run(options, progress)
    Console().print(result.table())
    if json is not None:
        result.write_json(json)
    raise typer.Exit(1 if check and not result.targets_met else 0)


@app.command()
def metadata(
    pages: Annotated[
        str, typer.Option(help="Pages per call, comma-separated; with --clients one number, 128 if not given.")
    ] = _PAGES,
    repeats: _RepeatsOption = _REPEATS,
    resident: Annotated[int, typer.Option(min=0, help="Pages that the server holds besides.")] = 8192,
    clients: Annotated[
        int, typer.Option(min=0, max=64, help="Load the server with this many client processes instead.")
    ] = 0,
    seconds: Annotated[float, typer.Option(min=0.1, max=60.0, help="With --clients: length of one phase.")] = 2.0,
    json: _JsonOption = None,
    check: _CheckOption = False,
) -> None:
    """Match, reserve and commit, beside a bare ZeroMQ echo of the same bytes; validation and server start.

    With --clients: what the server's process spends on a match when several clients ask at once, and how long they wait.
    """
    from maru_bench import clients as load
    from maru_bench import metadata as bench
    from maru_bench.copy import parse_counts

    result: bench.MetadataResult | load.ClientsResult
    with Progress() as progress:
        if clients:
            each = bench.TARGET_PAGES if pages == _PAGES else parse_counts("--pages", pages)[0]
            times = 5 if repeats == _REPEATS else repeats
            result = load.run(
                load.ClientsOptions(clients=clients, pages=each, repeats=times, seconds=seconds, resident=resident),
                progress,
            )
        else:
            options = bench.MetadataOptions(pages=parse_counts("--pages", pages), repeats=repeats, resident=resident)
            result = bench.run(options, progress)
    console = Console()
    for table in result.tables():
        console.print(table)
    if json is not None:
        result.write_json(json)
    raise typer.Exit(1 if check and not result.targets_met else 0)


@app.command()
def restart(
    pages: Annotated[int, typer.Option(min=1, max=100_000_000, help="Pages that the pool holds.")] = 1_000_000,
    repeats: _RepeatsOption = 5,
    json: _JsonOption = None,
    check: _CheckOption = False,
) -> None:
    """How long a server with many pages takes to be back after a crash, and its memory for each page."""
    from maru_bench import restart as bench

    with Progress() as progress:
        result = bench.run(bench.RestartOptions(pages=pages, repeats=repeats), progress)
    Console().print(result.table())
    if json is not None:
        result.write_json(json)
    raise typer.Exit(1 if check and not result.targets_met else 0)


@app.command()
def replay(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="One JSON object a line with hash_ids, as Mooncake's traces.")
    ],
    capacity: Annotated[
        str, typer.Option(metavar="PERCENTS", help="Pool sizes, in percent of the trace's different blocks.")
    ] = "2,5,10,20,40",
    policy: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A policy of eviction; may be repeated. Default: all.")
    ] = None,
    json: _JsonOption = None,
    check: _CheckOption = False,
) -> None:
    """Hit rates of a recorded load by policy and pool size, from the real server's state; beside LRU per key and Belady's bound."""
    from maru_bench import replay as bench

    options = bench.ReplayOptions.parse(trace, capacity, policy or [])
    with Progress() as progress:
        result = bench.run(options, progress)
    Console().print(result.table())
    if json is not None:
        result.write_json(json)
    raise typer.Exit(1 if check and not result.targets_met else 0)


@app.command()
def soak(
    seconds: Annotated[float, typer.Option(min=1.0, help="How long the clients are at work.")] = 600.0,
    clients: Annotated[int, typer.Option(min=1, max=64, help="Client processes.")] = 4,
    seed: Annotated[int, typer.Option(help="Of everything that is left to chance.")] = 1,
    pool: Annotated[str, typer.Option(help="Size of the pool; small, so that pages are evicted all the time.")] = "16M",
    json: _JsonOption = None,
) -> None:
    """Clients and server at work, killed, stopped and woken at random: no wrong byte, no slot lost, no memory lost.

    Exits with 1 if anything of that does not hold.
    """
    from maru_bench import soak as bench

    with Progress() as progress:
        result = bench.run(bench.SoakOptions(seconds=seconds, clients=clients, seed=seed, pool=pool), progress)
    Console().print(result.table())
    if json is not None:
        result.write_json(json)
    for failure in result.failures:
        print(failure, file=sys.stderr)
    raise typer.Exit(0 if result.ok else 1)


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
    from maru_bench import machine
    from maru_bench import prefix_sharing as bench

    if backend not in ("maru", "file"):
        raise ConfigError(f"--backend is {backend!r}: give maru or file")
    options = bench.ExperimentOptions(
        python=machine.find_python(python),
        out=out,
        model=model,
        device=machine.choose_device(device),
        backend="maru" if backend == "maru" else "file",
        server=server,
        prompts=prompts,
        new_tokens=new_tokens,
        engine_arguments=tuple(engine_arg or ()),
    )
    with machine.terminated_as_interrupt(), Progress() as progress:
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


app.command()(experiment)
app.command()(peers)
app.command()(kernels)


def main() -> None:
    """Entry point. An error that Maru raises on purpose is one message, not a traceback."""
    try:
        with terminated_as_interrupt():
            app()
    except MaruError as error:
        Console(stderr=True).print(
            f"[bold red]maru-bench:[/bold red] {escape(str(error))}", highlight=False, soft_wrap=True
        )
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
