"""The command line ``maru-agent``.

Exit code 0 after a clean stop, 2 for what the operator must change, 1 where the server does not answer: whoever starts it tries again."""

from __future__ import annotations

import logging
import signal
import sys
from typing import Annotated

import typer

from maru_agent.agent import PoolAgent
from maru_core.errors import ConfigError, MaruError, ServerUnavailableError
from maru_core.keys import ClientKeys
from maru_core.rdma.endpoint import BACKENDS
from maru_core.session import Session
from maru_core.settings import Settings

log = logging.getLogger("maru.agent")

EXIT_AWAY = 1
EXIT_UNUSABLE = 2

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
def run(
    server: Annotated[
        str | None,
        typer.Option(
            metavar="ENDPOINT", help="The metadata server of the pool, tcp://HOST:PORT or ipc:///PATH (or MARU_SERVER)."
        ),
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option(
            metavar="URI",
            help="The pool as this host reaches it, where that is not as the server says, or where several can be (or MARU_POOL).",
        ),
    ] = None,
    backend: Annotated[str, typer.Option(metavar="NAME", help="Of NIXL: ucx.")] = "ucx",
    devices: Annotated[
        str,
        typer.Option(
            metavar="NAMES", help="Network devices as UCX names them, such as mlx5_0:1; left out, UCX chooses."
        ),
    ] = "",
    progress: Annotated[
        bool,
        typer.Option(
            help="A thread that polls for peers. UCX needs it where it emulates one-sided transfers (TCP), and for peers to connect."
        ),
    ] = True,
    client_key: Annotated[
        str | None, typer.Option(metavar="FILE", help="This agent's key file, of an operator (or MARU_CLIENT_KEY).")
    ] = None,
    server_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="The server's public key, or its file (or MARU_SERVER_KEY).")
    ] = None,
) -> None:
    """Let hosts without this memory read and write the pool over the network: map it, register it with the NIC, announce it."""
    try:
        settings = Settings.from_environment()
        logging.basicConfig(
            stream=sys.stderr,
            level=settings.log_level.upper(),
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
            force=True,
        )
        settings.warn_of_unknown(log)
        endpoint = server or settings.server
        if endpoint is None:
            raise ConfigError("no server is named: give --server tcp://HOST:PORT (or set MARU_SERVER)")
        if backend.upper() not in BACKENDS:
            raise ConfigError(f"--backend is {backend!r}: give {' or '.join(name.lower() for name in BACKENDS)}")
        keys = ClientKeys.find(settings, client_key, server_key)
        session = Session(endpoint, name="maru-agent", timeout_s=5.0, keys=keys)
        agent = PoolAgent(
            session, pool=pool or settings.pool, backend=backend.upper(), devices=devices, progress=progress
        )
    except MaruError as error:
        print(f"maru-agent: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_AWAY if isinstance(error, ServerUnavailableError) else EXIT_UNUSABLE) from None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stop())
    try:
        agent.run()
    except MaruError as error:
        print(f"maru-agent: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_UNUSABLE) from None
    finally:
        agent.close()


def main() -> None:
    """Entry point ``maru-agent``."""
    app()
