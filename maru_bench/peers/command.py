"""The command line of ``maru-bench peers``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from maru_bench.progress import Progress


def peers(
    sizes: Annotated[str, typer.Option(help="Page sizes, comma-separated: K and M are KiB and MiB.")] = "64K,256K,1M,4M",
    batches: Annotated[str, typer.Option(help="Pages of one store and one load, comma-separated.")] = "1,16,128",
    chains: Annotated[str, typer.Option(help="Pages of one lookup, comma-separated; of the smallest size.")] = "1,16,128,1024,4096",
    clients: Annotated[str, typer.Option(help="Processes that ask and load at once, comma-separated; 0: not measured.")] = "1,4",
    repeats: Annotated[int, typer.Option(min=2, help="Rounds of each kind of call; large ones have fewer.")] = 30,
    seconds: Annotated[float, typer.Option(min=0.1, max=60.0, help="Of one phase of several clients.")] = 3.0,
    names: Annotated[str, typer.Option("--peers", metavar="NAMES", help="Who stands beside Maru: of mooncake, file, nixl, memcpy, echo.")] = "mooncake,file,nixl,memcpy,echo",
    sglang_python: Annotated[str | None, typer.Option(help="Interpreter with SGLang, for its file backend; default: .venv-sglang of the checkout.")] = None,
    peers_python: Annotated[str | None, typer.Option(help="Interpreter with Mooncake and NIXL; default: .venv-peers of the checkout (make peers-env).")] = None,
    threads: Annotated[int | None, typer.Option(min=1, max=64, help="Maru's copy threads; default: as engines.")] = None,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to FILE as JSON.")] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the table to FILE as Markdown.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 where Maru is behind a peer.")] = False,
) -> None:  # fmt: skip
    """Maru beside Mooncake Store, SGLang's file backend and NIXL's POSIX plugin, on the same pages in the same run.

    Each peer stores in one process, and is asked and loads in another one, by turns with all others. memcpy and a ZeroMQ echo
    stand beside them as limits. A peer that is not installed is left out, and why is told.
    """
    from maru_bench.copy import parse_bytes, parse_counts
    from maru_bench.machine import terminated_as_interrupt
    from maru_bench.peers.run import PeersOptions, run

    options = PeersOptions(
        page_bytes=[parse_bytes(text) for text in sizes.split(",")],
        batches=parse_counts("--batches", batches),
        chains=parse_counts("--chains", chains, 8192),
        clients=[] if clients.strip() == "0" else parse_counts("--clients", clients, 64),
        repeats=repeats,
        peers=tuple(name.strip() for name in names.split(",") if name.strip()),
        sglang_python=sglang_python,
        peers_python=peers_python,
        seconds=seconds,
        threads=threads,
    )
    with terminated_as_interrupt(), Progress() as progress:
        result = run(options, progress)
    console = Console()
    console = console if console.is_terminal else Console(width=160)
    console.print(result.table())
    for name, why in result.skipped.items():
        console.print(f"[yellow]left out[/yellow] {escape(name)}: {escape(why)}", highlight=False, soft_wrap=True)
    for line in result.behind():
        console.print(f"[red]behind[/red] {escape(line)}", highlight=False, soft_wrap=True)
    if json is not None:
        result.write_json(json)
    if markdown is not None:
        markdown.write_text(result.markdown())
    raise typer.Exit(1 if check and not result.targets_met else 0)
