"""The command line ``maru-server``: options, logging, signals, exit codes.

Exit code 0 after a clean stop, 2 for what the operator must change (one line on stderr says what).
"""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from maru_core import __version__
from maru_core.errors import ConfigError, MaruError
from maru_core.pool import PoolMemory, parse_pool_uri
from maru_core.pool.uri import parse_size
from maru_core.settings import LOG_LEVELS, Settings
from maru_server.directory import PoolDirectory
from maru_server.endpoint import check_endpoint
from maru_server.service import Service
from maru_server.state import ServerState, StateConfig

log = logging.getLogger("maru.server")

EXIT_UNUSABLE = 2

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
def run(
    pool: Annotated[
        str,
        typer.Option(
            metavar="URI",
            help="The memory to serve: shm://NAME, file:///PATH or dax:///dev/daxX.Y. A pool that is there already is taken "
            "up again with everything in it.",
        ),
    ],
    bind: Annotated[
        str,
        typer.Option(
            metavar="ENDPOINT",
            help="Where clients find this server: ipc:///PATH/TO/SOCKET (this machine, this user) or tcp://127.0.0.1:PORT.",
        ),
    ],
    size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Size of a new shm:// or file:// pool, as in 8G. It must fit an existing pool's."
        ),
    ] = None,
    format: Annotated[
        bool,
        typer.Option(
            "--format",
            help="Make the memory a new, empty Maru pool. WHATEVER IT HOLDS IS LOST. A dax device is never formatted without.",
        ),
    ] = False,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Bind to an address that other machines can reach. There are no keys: whoever connects can read and delete.",
        ),
    ] = False,
    high_watermark: Annotated[
        float, typer.Option(metavar="PART", help="Part of the pool in use at which eviction starts.")
    ] = StateConfig().high,
    low_watermark: Annotated[
        float, typer.Option(metavar="PART", help="Part of the pool in use at which eviction stops.")
    ] = StateConfig().low,
    lease: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="A client that is silent for longer loses its unfinished writes."),
    ] = StateConfig().lease_s,
    quarantine: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="How long slots of a client that fell silent, and may yet wake up and write, are given to nobody.",
        ),
    ] = StateConfig().quarantine_s,
    idle_exit: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="End when there was no client for this long.")
    ] = None,
    unlink_on_exit: Annotated[
        bool, typer.Option("--unlink-on-exit", help="Remove a shm:// or file:// pool at a clean end.")
    ] = False,
    ready_fd: Annotated[
        int | None,
        typer.Option(
            metavar="N", help='File descriptor to write one line of JSON to ({"endpoint", "pool"}) when serving.'
        ),
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(metavar="LEVEL", help=f"{', '.join(LOG_LEVELS)} (default: MARU_LOG_LEVEL, or info).")
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=lambda wanted: _show_version(wanted), help="Show it.")
    ] = False,
) -> None:
    """Serve a pool of shared memory as a KV cache for LLM servers.

    Keeps which page of KV lies where; clients copy the bytes themselves, straight into and out of the pool. Stop it with
    SIGTERM or Ctrl-C. Started again on the same pool, it finds everything that was stored. One server per pool.

    Example: maru-server --pool shm://kv --size 64G --bind ipc:///run/maru/server.sock
    """
    _set_up_log(log_level)
    config = _config(high_watermark, low_watermark, lease, quarantine)
    if idle_exit is not None and not idle_exit > 0:
        raise ConfigError(f"--idle-exit is {idle_exit:g}: give seconds above 0, or leave it out")
    _check_ready_fd(ready_fd)
    check_endpoint(bind, insecure=insecure)
    uri = parse_pool_uri(pool)
    _raise_file_limit()

    stop: list[Service] = []
    stopped = False

    def on_signal(number: int, _: object) -> None:
        nonlocal stopped
        stopped = True
        for service in stop:
            service.stop()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)

    started = time.monotonic()
    memory = PoolMemory.create(uri, None if size is None else parse_size(size, "--size"), format)
    try:
        me = f"pid {os.getpid()} on {socket.gethostname()}"
        memory.set_owner(f"maru-server on {bind}, {me}")
        incarnation = memory.bump_incarnation()
        now = time.monotonic()
        state = ServerState(
            PoolDirectory(memory.geometry, memory.meta),
            incarnation=incarnation,
            pool_uri=str(uri),
            config=config,
            now=now,
            wall_offset=time.time() - now,
        )
        service = Service(
            state,
            memory,
            bind,
            incarnation=incarnation,
            lease_s=config.lease_s,
            insecure=insecure,
            idle_exit_s=idle_exit,
        )
        try:
            memory.set_owner(f"maru-server on {service.endpoint}, {me}")
            # The directory in memory is large and lives as long as the process: no collection need look at it again.
            gc.collect()
            gc.freeze()
            log.info("serving %s on %s after %.2f s", uri, service.endpoint, time.monotonic() - started)
            stop.append(service)
            if stopped:
                service.stop()
            _say_ready(ready_fd, {"endpoint": service.endpoint, "pool": str(uri)})
            service.run()
        finally:
            service.close()
        if unlink_on_exit:
            memory.unlink()
        log.info("stopped")
    finally:
        memory.close()


def main() -> None:
    """Entry point. Every error that Maru raises on purpose is one line on stderr and exit code 2."""
    try:
        app()
    except MaruError as error:
        print(f"maru-server: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(EXIT_UNUSABLE)


def _config(high: float, low: float, lease_s: float, quarantine_s: float) -> StateConfig:
    if not 0 < low < high <= 1:
        raise ConfigError(
            f"--low-watermark is {low:g} and --high-watermark {high:g}: give 0 < low < high <= 1, as in 0.9 and 0.95"
        )
    if not 0 < lease_s <= 3600:
        raise ConfigError(f"--lease is {lease_s:g}: give seconds above 0 and up to 3600")
    if not 0.1 <= quarantine_s <= 86_400:
        raise ConfigError(
            f"--quarantine is {quarantine_s:g}: give seconds from 0.1 to 86400; without one, a restart would give out slots "
            "that living clients still write into"
        )
    return StateConfig(
        heartbeat_s=min(StateConfig().heartbeat_s, lease_s / 4),
        lease_s=lease_s,
        quarantine_s=quarantine_s,
        restart_quarantine_s=quarantine_s,
        high=high,
        low=low,
    )


def _set_up_log(level: str | None) -> None:
    settings = Settings.from_environment()
    chosen = settings.log_level if level is None else level.lower()
    if chosen not in LOG_LEVELS:
        raise ConfigError(f"--log-level is {level!r}: give one of {', '.join(LOG_LEVELS)}")
    logging.basicConfig(
        stream=sys.stderr, level=chosen.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    settings.warn_of_unknown(log)


def _check_ready_fd(descriptor: int | None) -> None:
    if descriptor is not None and not Path(f"/proc/self/fd/{descriptor}").exists():
        raise ConfigError(f"--ready-fd is {descriptor}: that file descriptor is not open, pass it to the process")


def _say_ready(descriptor: int | None, line: dict[str, str]) -> None:
    if descriptor is None:
        return
    try:
        os.write(descriptor, json.dumps(line).encode() + b"\n")
        os.close(descriptor)
    except OSError as error:
        log.warning("--ready-fd %d could not be written (%s)", descriptor, error.strerror)


def _raise_file_limit() -> None:
    """Every call that a client has under way at once is a connection: take as many descriptors as are allowed."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError) as error:
        log.debug("the limit of open files stays: %s", error)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"maru-server {__version__}")
        raise typer.Exit
