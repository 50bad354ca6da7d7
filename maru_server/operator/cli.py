"""The command line ``maru``: its commands, global options, errors and exit codes.

Exit code 0: done. 1: ``doctor`` found something wrong, or a question was answered with no. 2: what was asked for cannot be
done; one line on stderr says why. ``--json`` and ``--server`` may stand before or after the command's name.
"""

from __future__ import annotations

import enum
import os
import sys
from dataclasses import dataclass
from typing import Annotated, Final

import typer

from maru_core import __version__
from maru_core.errors import MaruError, ServerUnavailableError
from maru_server.operator import change, doctor, show, tree
from maru_server.operator import top as live
from maru_server.operator.asking import DEFAULT_TIMEOUT_S, Target, asking, unavailable_is_unusable
from maru_server.operator.output import clean

EXIT_WRONG: Final = 1
EXIT_UNUSABLE: Final = 2

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Server = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="ENDPOINT",
        help="ipc:///PATH or tcp://HOST:PORT; default: MARU_SERVER, or the embedded server.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
NamespaceOption = Annotated[
    int | None, typer.Option("--namespace", "-n", metavar="N", help="Number of a namespace, see `maru namespaces`.")
]
Limit = Annotated[int, typer.Option("--limit", metavar="N", min=1, max=4096, help="Most rows that are shown.")]


class Sort(enum.StrEnum):
    HEAT = "heat"
    BYTES = "bytes"


@dataclass(slots=True)
class _Global:
    server: str | None
    as_json: bool
    client_key: str | None
    server_key: str | None
    timeout_s: float

    def target(self, server: str | None) -> Target:
        return Target.find(server or self.server, self.client_key, self.server_key, self.timeout_s)


def _given(context: typer.Context) -> _Global:
    given = context.obj
    assert isinstance(given, _Global)
    return given


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"maru {__version__}")
        raise typer.Exit


@app.callback()
def everything(
    context: typer.Context,
    server: Server = None,
    as_json: Json = False,
    client_key: Annotated[
        str | None, typer.Option(metavar="PATH", help="This operator's key file; default: MARU_CLIENT_KEY.")
    ] = None,
    server_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="The server's public key, or its file; default: MARU_SERVER_KEY.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.01, max=60, help="Time limit of one question to the server.")
    ] = DEFAULT_TIMEOUT_S,
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show it.")] = False,
) -> None:
    """Look at a Maru server, change what it keeps, and find out why an engine does not read from it."""
    context.obj = _Global(server, as_json, client_key, server_key, timeout)


# ---------------------------------------------------------------- to look


@app.command()
def status(context: typer.Context, server: Server = None, as_json: Json = False) -> None:
    """One screen: server, pool, occupancy, sessions, hit rate, refusals."""
    given = _given(context)
    with asking(given.target(server), "status") as session:
        show.status(session, as_json or given.as_json)


@app.command()
def top(
    context: typer.Context,
    server: Server = None,
    as_json: Json = False,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, max=3600, help="Time between two looks.")
    ] = 1.0,
    limit: Limit = 20,
) -> None:
    """Rates per second, live; q or Ctrl-C ends it. Where stdout is no terminal, one look."""
    given = _given(context)
    with asking(given.target(server), "top") as session:
        live.top(session, interval, limit, as_json or given.as_json)


@app.command(name="tree")
def tree_command(
    context: typer.Context,
    server: Server = None,
    as_json: Json = False,
    namespace: NamespaceOption = None,
    limit: Limit = 32,
    sort: Annotated[Sort, typer.Option(help="Which are shown: those used last, or the largest.")] = Sort.HEAT,
) -> None:
    """The hottest prefixes and what they hold."""
    given = _given(context)
    with asking(given.target(server), "tree") as session:
        tree.tree(session, namespace, limit, sort.value, as_json or given.as_json)


@app.command()
def namespaces(
    context: typer.Context,
    number: Annotated[int | None, typer.Argument(metavar="[N]", help="Show all of one namespace.")] = None,
    server: Server = None,
    as_json: Json = False,
    diff: Annotated[
        tuple[int, int] | None, typer.Option(metavar="A B", help="Show in which fields two namespaces differ.")
    ] = None,
    limit: Limit = 64,
) -> None:
    """What engines run with, field by field: only equal namespaces share pages."""
    given = _given(context)
    with asking(given.target(server), "namespaces") as session:
        if diff is not None:
            show.difference(session, *diff, as_json or given.as_json)
        else:
            show.namespaces(session, number, limit, as_json or given.as_json)


@app.command()
def sessions(context: typer.Context, server: Server = None, as_json: Json = False, limit: Limit = 64) -> None:
    """Who is connected, and what each may be writing into."""
    given = _given(context)
    with asking(given.target(server), "sessions") as session:
        show.sessions(session, limit, as_json or given.as_json)


@app.command()
def tenants(context: typer.Context, server: Server = None, as_json: Json = False, limit: Limit = 64) -> None:
    """What each tenant uses, and may use."""
    given = _given(context)
    with asking(given.target(server), "tenants") as session:
        show.tenants(session, limit, as_json or given.as_json)


@app.command()
def pins(
    context: typer.Context,
    server: Server = None,
    as_json: Json = False,
    namespace: NamespaceOption = None,
    limit: Limit = 64,
) -> None:
    """Pages that are pinned."""
    given = _given(context)
    with asking(given.target(server), "pins") as session:
        show.pins(session, namespace, limit, as_json or given.as_json)


@app.command()
def holds(
    context: typer.Context,
    server: Server = None,
    as_json: Json = False,
    namespace: NamespaceOption = None,
    limit: Limit = 64,
) -> None:
    """Pages that running requests keep from eviction for a while."""
    given = _given(context)
    with asking(given.target(server), "holds") as session:
        show.holds(session, namespace, limit, as_json or given.as_json)


@app.command(name="doctor")
def doctor_command(
    context: typer.Context,
    server: Server = None,
    as_json: Json = False,
    client_timeout_ms: Annotated[
        int, typer.Option(metavar="MS", min=1, max=60_000, help="The engines' timeout_ms, to compare answers with.")
    ] = doctor.CLIENT_TIMEOUT_MS,
) -> None:
    """Why does my engine not read from Maru? To be run where the engine runs, as its user. Exit code 1 if something is wrong."""
    given = _given(context)
    findings = doctor.examine(
        server or given.server, given.client_key, given.server_key, given.timeout_s, client_timeout_ms
    )
    if not doctor.report(findings, as_json or given.as_json):
        raise typer.Exit(EXIT_WRONG)


# ---------------------------------------------------------------- to change


Page = Annotated[
    str, typer.Argument(metavar="HASH", help="64 hex digits, or the first 6 or more of a hash that tree or pins show.")
]


@app.command()
def pin(
    context: typer.Context, page: Page, server: Server = None, as_json: Json = False, namespace: NamespaceOption = None
) -> None:
    """Keep a page and all before it (a system prompt) from eviction."""
    given = _given(context)
    with asking(given.target(server), "pin") as session:
        change.pin(session, page, namespace, as_json or given.as_json)


@app.command()
def unpin(
    context: typer.Context, page: Page, server: Server = None, as_json: Json = False, namespace: NamespaceOption = None
) -> None:
    """End a pin."""
    given = _given(context)
    with asking(given.target(server), "unpin") as session:
        change.unpin(session, page, namespace, as_json or given.as_json)


@app.command()
def evict(
    context: typer.Context,
    pages: Annotated[int, typer.Argument(metavar="PAGES", min=1)],
    server: Server = None,
    as_json: Json = False,
    namespace: NamespaceOption = None,
) -> None:
    """Evict pages now, in the order in which they would go anyway."""
    given = _given(context)
    with asking(given.target(server), "evict") as session:
        change.evict(session, pages, namespace, as_json or given.as_json)


@app.command()
def delete(
    context: typer.Context, page: Page, server: Server = None, as_json: Json = False, namespace: NamespaceOption = None
) -> None:
    """Remove a page and all that continue it."""
    given = _given(context)
    with asking(given.target(server), "delete") as session:
        change.delete(session, page, namespace, as_json or given.as_json)


@app.command()
def clear(
    context: typer.Context,
    server: Server = None,
    as_json: Json = False,
    namespace: NamespaceOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove every page, of one namespace or of all."""
    given = _given(context)
    with asking(given.target(server), "clear") as session:
        if not change.clear(session, namespace, yes, as_json or given.as_json):
            raise typer.Exit(EXIT_WRONG)


# ---------------------------------------------------------------- the process


def main() -> None:
    """Entry point. Every error that Maru raises on purpose is one line on stderr and exit code 2."""
    try:
        app()
    except ServerUnavailableError as error:
        _fail(unavailable_is_unusable(error))
    except MaruError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader had enough (`maru tree | head`); nothing more may be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def _fail(text: str) -> None:
    print(f"maru: error: {clean(' '.join(text.split()))}", file=sys.stderr)
    sys.exit(EXIT_UNUSABLE)
