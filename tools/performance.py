"""What ``tools/performance.sh`` runs: sections of commands whose results become the tables of docs/performance.md.

A section is some minutes up to forty, can be run alone, and is not run again where its results are there. Results of one directory are
of one machine and of one form, whole or short. ``performance_tables.py`` makes the tables.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from maru_bench.machine import terminated_as_interrupt  # noqa: E402

#: Which form the results of a directory are of.
FORM = "form"
#: Exit codes: a command failed; what was asked for cannot be done; it was interrupted.
FAILED, UNUSABLE, INTERRUPTED = 1, 2, 130
#: A command that is told to end stops its servers, seconds.
_END_S = 180.0


@dataclass(frozen=True)
class Command:
    """One ``maru-bench`` command. ``words`` end with what says where its results go, see :func:`words_of`."""

    name: str
    words: tuple[str, ...]
    """In whole."""
    short: tuple[str, ...]
    """The same with small sizes and one repeat."""
    minutes: float
    """About so long in whole, on two quiet cores."""

    @property
    def kind(self) -> str:
        return self.words[0]


@dataclass(frozen=True)
class Section:
    name: str
    says: str
    commands: tuple[Command, ...]
    needs: tuple[str, ...] = ()
    """Environments: ``peers``, ``sglang``."""
    group: str = field(default="")

    @property
    def minutes(self) -> float:
        return sum(command.minutes for command in self.commands)


_SIZES = ("--context", "1024,4096", "--groups", "2", "--requests", "3", "--repeats", "3")
_MIDDLE = ("--context", "2048", "--groups", "2", "--requests", "3", "--repeats", "3")
_SHORT = (
    "--model",
    "tiny",
    "--context",
    "512",
    "--groups",
    "2",
    "--requests",
    "3",
    "--new-tokens",
    "4",
    "--repeats",
    "1",
)
_SHORT += ("--pool-size", "256M")
#: What a server takes to start is most of a short run's time: one of each of two modes shows that a workload runs.
_ALONE = ("--servers", "1", "--modes", "none,maru")


def _experiment(name: str, workload: str, modes: str, sizes: tuple[str, ...], minutes: float, *short: str) -> Command:
    """``short`` come after the words that all short experiments have; the last of an option counts."""
    words = ("experiment", workload, "--modes", modes)
    return Command(name, (*words, *sizes), (*words, *_SHORT, *short), minutes)


def _resident(pages: int, short_pages: int, minutes: float) -> Command:
    return Command(
        f"metadata_{pages}",
        ("metadata", "--resident", str(pages), "--repeats", "400"),
        ("metadata", "--resident", str(short_pages), "--repeats", "10", "--pages", "1,128"),
        minutes,
    )


_FEW = ("--repeats", "2", "--seconds", "0.5")
_CLIENTS = ("peers", "--sizes", "16K", "--batches", "16", "--chains", "128", "--clients")
#: The longest prompt that the demo model takes (8192 with its question and its answer). Two groups, each asked for three times.
_LONGEST = ("--context", "8000", "--groups", "2", "--requests", "3", "--repeats", "3")

SECTIONS = (
    Section(
        "store",
        "the tables of benchmarks.md: copies, calls to the server, several clients",
        (
            Command("copy", ("copy",), ("copy", "--sizes", "64K", "--batches", "1,16", "--repeats", "2"), 4),
            Command(
                "metadata",
                ("metadata", "--repeats", "400"),
                ("metadata", "--repeats", "10", "--resident", "1000", "--pages", "1,128"),
                1,
            ),
            Command(
                "clients",
                ("metadata", "--clients", "4"),
                ("metadata", "--clients", "2", "--repeats", "1", "--seconds", "0.5", "--resident", "1000"),
                1,
            ),
        ),
    ),
    Section(
        "peers",
        "Maru beside other stores: lookups, stores and loads by page size and batch",
        (
            Command(
                "peers",
                ("peers", "--repeats", "50", "--clients", "0"),
                ("peers", "--sizes", "16K,64K", "--batches", "1,16", "--chains", "1,128", "--clients", "0", *_FEW),
                6,
            ),
        ),
        ("peers", "sglang"),
    ),
    Section(
        "peers-chains",
        "lookups of chains of up to 8,192 pages, beside other stores",
        (
            Command(
                "peers-chains",
                ("peers", "--sizes", "16K", "--batches", "128", "--chains", "1,16,128,1024,4096,8192", "--clients", "0", "--repeats", "50"),
                ("peers", "--sizes", "16K", "--batches", "16", "--chains", "1,8192", "--clients", "0", *_FEW),
                4,
            ),
        ),
        ("peers", "sglang"),
        group="peers",
    ),
    Section(
        "peers-clients",
        "up to 32 processes that ask and load at once, beside other stores",
        (
            Command(
                "peers-clients",
                (*_CLIENTS, "1,2,4,8,16,32", "--peers", "mooncake,nixl,echo", "--repeats", "20", "--seconds", "3"),
                (*_CLIENTS, "1,4", "--peers", "mooncake,nixl,echo", *_FEW),
                8,
            ),
            # Each of its processes has the whole of SGLang in memory: 0.3 GB.
            Command(
                "peers-clients-file",
                (*_CLIENTS, "1,2,4,8", "--peers", "file", "--repeats", "20", "--seconds", "3"),
                (*_CLIENTS, "1,2", "--peers", "file", *_FEW),
                3,
            ),
        ),
        ("peers", "sglang"),
        group="peers",
    ),
    Section(
        "growth",
        "calls to a server that holds up to two million pages",
        (
            _resident(10_000, 1_000, 1),
            _resident(100_000, 5_000, 1),
            _resident(1_000_000, 110_000, 3),
            _resident(2_000_000, 120_000, 6),
        ),
    ),
    Section(
        "page-size",
        "stores and loads of 16 pages of 16 KiB to 16 MiB, beside other stores",
        (
            Command(
                "page-size",
                ("peers", "--sizes", "16K,64K,256K,1M,4M,16M", "--batches", "16", "--chains", "1", "--clients", "0", "--repeats", "50"),
                ("peers", "--sizes", "16K,1M", "--batches", "16", "--chains", "1", "--clients", "0", *_FEW),
                5,
            ),
        ),
        ("peers", "sglang"),
        group="growth",
    ),
    *(
        Section(
            name,
            f"the workload `{name}` on two SGLang servers",
            (_experiment(name, name, "none,file,maru", sizes, minutes, *short),),
            ("sglang",),
            group="engines",
        )
        for name, sizes, minutes, short in (
            ("shared-prefix", _SIZES, 12, ()),
            ("multi-turn", _SIZES, 12, (*_ALONE, "--requests", "3")),
            ("rag", _MIDDLE, 10, (*_ALONE, "--documents", "2")),
            ("agents", _MIDDLE, 14, (*_ALONE, "--groups", "1")),
        )
    ),
    Section(
        "direct",
        "the direct path beside SGLang's hierarchical cache without a store",
        (_experiment("direct", "shared-prefix", "none,hicache,maru-direct", _SIZES, 15, "--servers", "1", "--modes", "hicache,maru-direct"),),
        ("sglang",),
        group="engines",
    ),
    Section(
        "concurrency",
        "one, two and four requests at a time",
        (
            _experiment(
                "concurrency",
                "shared-prefix",
                "none,file,maru",
                (*_MIDDLE, "--concurrency", "1,2,4"),
                12,
                *_ALONE,
                "--concurrency",
                "1,2",
            ),
        ),
        ("sglang",),
        group="engines",
    ),
    Section(
        "longest",
        "the longest prompt that the model takes, on a second server",
        (_experiment("longest", "shared-prefix", "none,file,maru", _LONGEST, 25, "--context", "1024", "--modes", "none,maru"),),
        ("sglang",),
        group="long",
    ),
    Section(
        "longest-direct",
        "the same by the direct path, and without a store",
        (_experiment("longest-direct", "shared-prefix", "none,hicache,maru-direct", _LONGEST, 30, "--context", "1024", "--modes", "none,maru-direct"),),
        ("sglang",),
        group="long",
    ),
)  # fmt: skip


class UnusableError(Exception):
    """What was asked for cannot be done; says what and why."""


def chosen(names: Sequence[str]) -> list[Section]:
    """Sections by name or by group, in their order; all if none is named.

    Raises:
        UnusableError: a name that there is not.
    """
    known = {name for section in SECTIONS for name in (section.name, section.group)} - {""}
    for name in names:
        if name not in known:
            raise UnusableError(f"no section {name!r}: give some of {', '.join(sorted(known))}")
    return [section for section in SECTIONS if not names or section.name in names or section.group in names]


def words_of(command: Command, out: Path, short: bool) -> list[str]:
    """The command's words with where its results go."""
    words = list(command.short if short else command.words)
    if command.kind == "experiment":
        return [*words, "--out", str(out / command.name)]
    words += ["--json", str(result_of(command, out))]
    return words


def result_of(command: Command, out: Path) -> Path:
    if command.kind == "experiment":
        return out / command.name / "experiment.json"
    return out / f"{command.name}.json"


def is_done(command: Command, out: Path, short: bool) -> bool:
    """Whether its results are there, of these very words."""
    try:
        done = json.loads((out / f"{command.name}.done").read_text())
    except (OSError, ValueError):
        return False
    return bool(done["words"] == list(command.short if short else command.words)) and result_of(command, out).exists()


def pace(out: Path, short: bool) -> float:
    """How long commands took that are done, in what they were expected to take; 1 where none is, or all is short."""
    if short:
        return 1.0
    expected = taken = 0.0
    for command in (command for section in SECTIONS for command in section.commands):
        if is_done(command, out, short):
            expected += command.minutes
            taken += json.loads((out / f"{command.name}.done").read_text())["seconds"] / 60
    return taken / expected if expected else 1.0


def minutes_of(commands: Iterable[Command], short: bool) -> float:
    # Most of a short run's time is what processes take to start.
    return sum((1.5 if command.kind == "experiment" else 0.5) if short else command.minutes for command in commands)


def run(out: Path, sections: Sequence[Section], *, short: bool, again: bool) -> list[str]:
    """Run what is not there yet; returns the names of commands that failed.

    Raises:
        UnusableError: the directory has results of the other form.
    """
    out.mkdir(parents=True, exist_ok=True)
    form = "short" if short else "whole"
    mark = out / FORM
    if mark.exists() and mark.read_text().strip() != form:
        raise UnusableError(f"{out} has results of the {mark.read_text().strip()} form: name another directory")
    mark.write_text(form + "\n")
    failed = []
    for index, section in enumerate(sections):
        left = [command for command in section.commands if again or not is_done(command, out, short)]
        if not left:
            tell(f"{section.name} is done (--again does it again)")
            continue
        rest = [*left, *(c for other in sections[index + 1 :] for c in other.commands if again or not is_done(c, out, short))]  # fmt: skip
        scale = pace(out, short)
        tell(
            f"{section.name}: {section.says}; about {math.ceil(minutes_of(left, short) * scale)} min, "
            f"{math.ceil(minutes_of(rest, short) * scale)} min with what comes after it"
        )
        failed += [command.name for command in left if not _run_one(command, out, short)]
    return failed


def _run_one(command: Command, out: Path, short: bool) -> bool:
    words = words_of(command, out, short)
    done = out / f"{command.name}.done"
    done.unlink(missing_ok=True)
    result_of(command, out).unlink(missing_ok=True)
    tell(f"  maru-bench {' '.join(words)}")
    began = time.monotonic()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with (out / f"{command.name}.txt").open("w") as text, (out / f"{command.name}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "maru_bench", *words],
            stdout=text,
            stderr=log,
            # On the CPU a hit pays for its whole prompt otherwise; see docs/experiments.md.
            env={"MARU_KIT_NEW_ROWS": "1", **os.environ, "PYTHONPATH": path},
        )
        try:
            code = process.wait()
        except BaseException:
            # It stops what it started, and leaves nothing behind.
            process.terminate()
            process.wait(_END_S)
            raise
    seconds = time.monotonic() - began
    if code or not result_of(command, out).exists():
        lines = (out / f"{command.name}.log").read_text().strip().splitlines()
        tell(f"  FAILED with {code} after {seconds:.0f} s: {lines[-1] if lines else 'it said nothing'}")
        return False
    shape = {
        "words": list(command.short if short else command.words),
        "seconds": round(seconds, 1),
        "ended_at": time.time(),
    }
    done.write_text(json.dumps(shape) + "\n")
    tell(f"  {seconds:.0f} s")
    return True


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def listing() -> str:
    """The sections as a table for a page."""
    rows = ["| section | of | what | about |", "|---|---|---|---:|"]
    for section in SECTIONS:
        rows.append(
            f"| `{section.name}` | {section.group or section.name} | {section.says} | {section.minutes:.0f} min |"
        )
    rows.append(f"| | | together | {sum(section.minutes for section in SECTIONS):.0f} min |")
    return "\n".join(rows) + "\n"


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="tools/performance.sh", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("directory", nargs="?", type=Path, default=Path("performance"), help="of the results")
    parser.add_argument("sections", nargs="*", help="sections or groups of them (--list); all if none is named")
    parser.add_argument(
        "--short", action="store_true", help="every section in minutes: that it runs; times mean nothing"
    )
    parser.add_argument("--again", action="store_true", help="also what is there already")
    parser.add_argument("--list", action="store_true", help="the sections")
    parser.add_argument("--needs", action="store_true", help="print which environments these sections need")
    parser.add_argument("--docs", action="store_true", help="write the directory's results into docs/performance.md")
    parser.add_argument("--into", type=Path, help="with --docs: a copy of the page is written here instead")
    options = parser.parse_args(words)
    try:
        if options.list:
            print(listing(), end="")
        elif options.docs:
            from performance_tables import write_page

            for line in write_page(options.directory, options.into):
                tell(line)
        elif options.needs:
            print(" ".join(sorted({need for section in chosen(options.sections) for need in section.needs})))
        else:
            with terminated_as_interrupt():
                failed = run(
                    options.directory.absolute(), chosen(options.sections), short=options.short, again=options.again
                )
            if failed:
                tell(f"failed: {' '.join(failed)} (the logs are in {options.directory})")
                return FAILED
            tell(
                f"all is in {options.directory}; tools/performance.sh --docs {options.directory} makes the tables of it"
            )
    except UnusableError as error:
        tell(f"tools/performance.sh: {error}")
        return UNUSABLE
    except KeyboardInterrupt:
        tell("interrupted; the same command goes on with what is not there yet")
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    # Under its own name, by which performance_tables.py knows it.
    import performance

    sys.exit(performance.main(sys.argv[1:]))
