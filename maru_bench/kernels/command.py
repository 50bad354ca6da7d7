"""The command ``maru-bench kernels``: parses, runs it, prints it, and sets the exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from maru_bench.kernels.models import MODELS
from maru_bench.kernels.result import PAGE_TOKENS, KernelsOptions
from maru_core.errors import ConfigError
from maru_core.pool.uri import parse_size


def kernels(
    models: Annotated[
        str | None, typer.Option(help="llama-3.1-8b, llama-3.1-70b-tp8, deepseek-v3; comma-separated. Default: all.")
    ] = None,
    pages: Annotated[str, typer.Option(help="Page sizes in tokens, comma-separated.")] = ",".join(
        map(str, PAGE_TOKENS)
    ),
    size: Annotated[str, typer.Option("--bytes", help="Moved by one sample: K, M and G are KiB, MiB, GiB.")] = "256M",
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved repeats; medians are shown.")] = 7,
    device: Annotated[int, typer.Option(min=0, help="Ordinal of the GPU.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the pages' contents and places.")] = 1,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures as JSON.")] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Measure nothing: move small cases on the CPU and compare every byte."),
    ] = False,
) -> None:
    """GB/s between a GPU's paged KV and pinned pool memory, beside the link, copies by DMA and SGLang's kernels.

    For the environment with SGLang (or vLLM), which has torch and Triton. Without a GPU it says so and exits with 2; a byte
    in the wrong place is exit code 1.
    """
    # Here and not above: other commands need not wait for these.
    from maru_bench.cli import Progress
    from maru_bench.copy import parse_counts

    try:
        from maru_bench.kernels import measure
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"maru-bench kernels needs {error.name}, which is not installed here: run it with the Python of the "
            "environment with SGLang (.venv-sglang/bin/python -m maru_bench kernels)"
        ) from error
    names = list(MODELS) if models is None else [name.strip() for name in models.split(",")]
    for name in names:
        if name not in MODELS:
            raise ConfigError(f"--models has {name!r}: give some of {', '.join(MODELS)}")
    options = KernelsOptions(
        models=names,
        page_tokens=parse_counts("--pages", pages),
        sample_bytes=parse_size(size, "--bytes"),
        repeats=repeats,
        device=device,
        seed=seed,
        check=check,
    )
    with Progress() as progress:
        result = measure.run(options, progress)
    console = Console()
    for table in result.tables():
        console.print(table)
    for name, why in result.absent.items():
        _say(console, f"without {name}: {why}")
    for checked in result.checked:
        if checked.problem and result.rows:
            _say(console, f"WRONG {checked.model}, pages of {checked.page_tokens}, {checked.peer}: {checked.problem}")
    if result.chosen:
        _say(console, f"maru copies by: {result.chosen}")
        _say(console, result.pinning)
    if json is not None:
        result.write_json(json)
    raise typer.Exit(0 if result.ok else 1)


def _say(console: Console, text: Any) -> None:
    console.print(escape(str(text)), highlight=False, soft_wrap=True)
