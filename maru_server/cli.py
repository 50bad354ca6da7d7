"""The command line ``maru-server``: options, logging, signals, exit codes.

``maru-server --pool … --bind …`` serves; a word after it is a command of another kind, and takes options of its own.

Exit code 0 after a clean stop, 2 for what the operator must change (one line on stderr says what), 3 when the pool is, or may
be, another server's: it was left alone from that moment on, and whoever starts this server again makes it a standby.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from maru_core.settings import LOG_LEVELS, Settings
from maru_server.config import StateConfig
from maru_server.election import LostError, Stop, check_held
from maru_server.endpoint import check_endpoint
from maru_server.footprint import give_back
from maru_server.holds import hold_config
from maru_server.keygen import keygen
from maru_server.limits import SESSION_SHARE, session_limits
from maru_server.logs import set_up_log
from maru_server.notify import notify_ready
from maru_server.opening import all_held, make_elections, make_state, take_up_all, wanted_pools
from maru_server.publisher import Publisher
from maru_server.service import Service
from maru_server.tenants import eviction_config
from maru_server.trust import Trust
from maru_server.web import Web, parse_address

log = logging.getLogger("maru.server")

EXIT_UNUSABLE = 2
EXIT_LOST = 3

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
def run(
    context: typer.Context,
    pool: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URI",
            help="The memory to serve: shm://NAME, file:///PATH or dax:///dev/daxX.Y. A pool that is there already is taken "
            "up again with everything in it. May be repeated, for up to 16 pools.",
        ),
    ] = None,
    bind: Annotated[
        str | None,
        typer.Option(
            metavar="ENDPOINT",
            help="Where clients find this server: ipc:///PATH/TO/SOCKET (this machine, this user) or tcp://127.0.0.1:PORT.",
        ),
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE",
            help="Size of a new shm:// or file:// pool, as in 8G. It must fit an existing pool's. Of several pools one for all, or "
            "one for each in their order.",
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
            help="Bind to an address that other machines can reach, without keys: whoever connects can read and delete.",
        ),
    ] = False,
    keys: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The server's key file (maru-server keygen). Only clients that --clients lists can connect, and nobody else can "
            "read along.",
        ),
    ] = None,
    clients: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The list of clients, clients.toml: public key, tenant and rights of each. Read again when it changes, so that a "
            "key can be revoked at any time (at once with SIGHUP).",
        ),
    ] = None,
    high_watermark: Annotated[
        float, typer.Option(metavar="PART", help="Part of the pool in use at which eviction starts.")
    ] = StateConfig().high,
    low_watermark: Annotated[
        float, typer.Option(metavar="PART", help="Part of the pool in use at which eviction stops.")
    ] = StateConfig().low,
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Which pages go first: lru, or lfu-age, which keeps what is used again over what is used once (a scan).",
        ),
    ] = StateConfig().policy,
    quota: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TENANT=SHARE",
            help="Part of the pool that a tenant may have, as in search=0.3; may be repeated. Whoever has none may fill it.",
        ),
    ] = None,
    pin_share: Annotated[
        float, typer.Option(metavar="PART", help="Part of the pool that operators may pin.")
    ] = StateConfig().pin_share,
    hold_share: Annotated[
        float,
        typer.Option(metavar="PART", help="Part of the pool that requests under way may keep from eviction; 0: none."),
    ] = StateConfig().hold_share,
    max_hold: Annotated[
        float, typer.Option(metavar="SECONDS", help="Longest time for which a request may keep what it was told of.")
    ] = StateConfig().max_hold_s,
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
    max_sessions: Annotated[
        int, typer.Option(metavar="N", help="Most clients at a time.")
    ] = StateConfig().max_sessions,
    max_tenant_sessions: Annotated[
        int | None,
        typer.Option(metavar="N", help="Most clients of one tenant, where there are keys (default: half of all)."),
    ] = None,
    session_rate: Annotated[
        float, typer.Option(metavar="N", help="Messages a second that one client (with keys: one key) may send.")
    ] = StateConfig().session_rate,
    session_page_rate: Annotated[
        float, typer.Option(metavar="N", help="Pages a second that one client (or key) may ask about.")
    ] = StateConfig().session_page_rate,
    session_reservations: Annotated[
        int, typer.Option(metavar="N", help="Batches that one client (or key) may be writing at a time.")
    ] = StateConfig().session_reservations,
    session_share: Annotated[
        float, typer.Option(metavar="PART", help="Part of the pool that one client (or key) may be writing at a time.")
    ] = SESSION_SHARE,
    idle_exit: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="End when there was no client for this long.")
    ] = None,
    unlink_on_exit: Annotated[
        bool, typer.Option("--unlink-on-exit", help="Remove a shm:// or file:// pool at a clean end.")
    ] = False,
    standby: Annotated[
        bool,
        typer.Option(
            "--standby",
            help="Wait while another server has the pool, and take it up with everything in it when that one is gone.",
        ),
    ] = False,
    lock: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where several hosts map the memory: the key in etcd that says which one's server may serve it, "
            "etcd://HOST:2379[,HOST2:2379]/path/name. All servers of the pool must name the same.",
        ),
    ] = None,
    lock_ttl: Annotated[
        int,
        typer.Option(
            metavar="SECONDS", help="A server that cannot reach etcd stops within this time; then a standby takes over."
        ),
    ] = 10,
    unlink_log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", hidden=True, help="With --unlink-on-exit: remove this file too, where stderr goes to it."
        ),
    ] = None,
    ready_fd: Annotated[
        int | None,
        typer.Option(
            metavar="N", help='File descriptor to write one line of JSON to ({"endpoint", "pool"}) when serving.'
        ),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS:PORT",
            help="Show metrics (/metrics), health (/healthz) and a live page (/) there, as in 127.0.0.1:9750.",
        ),
    ] = None,
    insecure_http: Annotated[
        bool,
        typer.Option(
            "--insecure-http",
            help="Let --http be an address that other machines can reach: whoever connects sees which models are served.",
        ),
    ] = False,
    http_name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Host name under which --http is reached, for a proxy's. May be repeated."),
    ] = None,
    events: Annotated[
        str | None,
        typer.Option(
            metavar="ENDPOINT",
            help="Publish which pages come and go there, as SGLang and vLLM publish their KV events: tcp://127.0.0.1:5557.",
        ),
    ] = None,
    events_replay: Annotated[
        str | None,
        typer.Option(metavar="ENDPOINT", help="Where subscribers of --events ask for what they have missed."),
    ] = None,
    insecure_events: Annotated[
        bool,
        typer.Option("--insecure-events", help="Let the endpoints of events be such that other machines can reach."),
    ] = False,
    log_format: Annotated[str, typer.Option(metavar="FORMAT", help="text, or json: one JSON object a line.")] = "text",
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
    if context.invoked_subcommand is not None:
        if pool or bind is not None:
            raise ConfigError(
                f"--pool and --bind are for serving, and {context.invoked_subcommand} serves nothing: leave them out"
            )
        return
    if not pool:
        raise ConfigError(
            "--pool is missing: give the memory to serve, such as shm://kv, file:///PATH or dax:///dev/dax0.0"
        )
    if bind is None:
        raise ConfigError(
            "--bind is missing: give where clients find the server, such as ipc:///PATH/TO/SOCKET or tcp://127.0.0.1:5757"
        )
    _set_up_log(log_level, log_format)
    config = dataclasses.replace(
        _config(high_watermark, low_watermark, lease, quarantine),
        **eviction_config(policy, quota or [], pin_share),
        **hold_config(hold_share, max_hold),
        **session_limits(
            max_sessions=max_sessions,
            max_tenant_sessions=max_tenant_sessions,
            session_rate=session_rate,
            session_page_rate=session_page_rate,
            session_reservations=session_reservations,
            session_share=session_share,
        ),
    )
    if idle_exit is not None and not idle_exit > 0:
        raise ConfigError(f"--idle-exit is {idle_exit:g}: give seconds above 0, or leave it out")
    _check_ready_fd(ready_fd)
    address = None if http is None else parse_address(http, insecure=insecure_http)
    if events is None and events_replay is not None:
        raise ConfigError("--events-replay is given without --events: give both, or neither")
    trust = Trust.load(keys, clients)
    check_endpoint(bind, insecure=insecure, keys=trust is not None)
    wanted = wanted_pools(pool, size or [], format=format)
    uris = ", ".join(str(one.uri) for one in wanted)
    if standby and format:
        raise ConfigError(
            "--standby and --format do not go together: the standby would destroy what it is to take over"
        )
    _raise_file_limit()

    stop = Stop()
    serving: list[Service] = []

    def on_signal(number: int, _: object) -> None:
        stop.set()
        for service in serving:
            service.stop()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)

    if trust is not None:
        signal.signal(signal.SIGHUP, lambda *_: trust.reread_soon())

    me = f"pid {os.getpid()} on {socket.gethostname()}"
    with contextlib.ExitStack() as last:
        elections = make_elections(lock, wanted, ttl_s=lock_ttl, me=f"maru-server on {bind}, {me}", standby=standby)
        for one in elections:
            last.callback(one.close)
        started = time.monotonic()
        if standby:
            notify_ready()  # it may have to wait for longer than whoever starts it does
        memories = take_up_all(wanted, elections, format=format, standby=standby, stop=stop)
        if memories is None:
            log.info("stopped before it was this server's turn")
            return
        for memory in memories:
            last.callback(memory.close)
        if standby:
            started = time.monotonic()  # waiting does not count
        # First of all: a server that had the pool before, and wakes up only now, sees it in the memory.
        lives = [memory.bump_incarnation() for memory in memories]
        for memory in memories:
            memory.set_owner(f"maru-server on {bind}, {me}")
        now = time.monotonic()
        state = make_state(wanted, elections, memories, lives, config, now=now, wall_offset=time.time() - now)
        election = all_held(wanted, elections, memories, lives)
        service = Service(
            state,
            memories,
            bind,
            incarnation=lives[0],
            lease_s=config.lease_s,
            insecure=insecure,
            idle_exit_s=idle_exit,
            trust=trust,
            election=election,
        )
        watching = contextlib.ExitStack()
        try:
            check_held(election, memories[0], lives[0])
            publisher = None
            if events is not None:
                publisher = Publisher(events, events_replay, service.call, insecure=insecure_events)
                watching.callback(publisher.close)
                state.tell(publisher.events)
            for memory in memories:
                memory.set_owner(f"maru-server on {service.endpoint}, {me}")
            # The directory in memory is large and lives as long as the process: no collection need look at it again.
            gc.collect()
            gc.freeze()
            give_back()
            log.info("serving %s on %s after %.2f s", uris, service.endpoint, time.monotonic() - started)
            serving.append(service)
            if stop:
                service.stop()
            ready = {"endpoint": service.endpoint, "pool": uris}
            if publisher is not None:
                ready["events"] = publisher.endpoint
                log.info("KV events are published on %s", publisher.endpoint)
            if address is not None:
                web = Web(service, address, http_name or ())
                watching.callback(web.close)
                ready["http"] = web.url
                log.info("metrics and the live page are on %s", web.url)
            _say_ready(ready_fd, ready)
            notify_ready()
            service.run()
        finally:
            service.close()
            watching.close()
        if service.deposed is not None:
            raise LostError(service.deposed)
        if unlink_on_exit:
            if unlink_log is not None and memories[0].still_there():
                # Before the pool: as long as that is there and locked, nobody starts another server that would use the log.
                _unlink_log(unlink_log)
            for memory in memories:
                memory.unlink()
        log.info("stopped")


app.command()(keygen)


def main() -> None:
    """Entry point. Every error that Maru raises on purpose is one line on stderr and exit code 2 or 3."""
    try:
        app()
    except LostError as error:
        print(f"maru-server: no longer this server's pool: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(EXIT_LOST)
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


def _set_up_log(level: str | None, format: str) -> None:
    settings = Settings.from_environment()
    chosen = settings.log_level if level is None else level.lower()
    if chosen not in LOG_LEVELS:
        raise ConfigError(f"--log-level is {level!r}: give one of {', '.join(LOG_LEVELS)}")
    set_up_log(chosen, format)
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


def _unlink_log(path: Path) -> None:
    """Remove the file to which this process's stderr goes, if that is it."""
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(2), path.stat(follow_symlinks=False)):
            path.unlink()


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
