"""``maru doctor``: why does my engine not read from Maru?

Looks at everything that can be wrong between an engine's settings and a page in the pool, in that order: the environment,
the endpoint, the server, the pool, the engines, their namespaces, what they asked and found, room, and this host. Each check
is a small function that returns findings; one that cannot be made because an earlier one failed is left out.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rich.text import Text

from maru_core.errors import MaruError, ServerError, ServerUnavailableError
from maru_core.pool import PoolMemory, parse_pool_uri
from maru_core.pool.numa import bound_node
from maru_core.protocol import ErrorCode, PoolName
from maru_core.session import Session
from maru_core.store_config import StoreConfig, split_pools
from maru_server.operator import checks_host, checks_pool, checks_room, checks_server, checks_sglang, checks_sharing
from maru_server.operator.asking import Target, quiet
from maru_server.operator.findings import FAIL, OK, WARN, Finding
from maru_server.operator.output import clean, console, print_json
from maru_server.views import LIMIT_MAX

CLIENT_TIMEOUT_MS: Final = StoreConfig().timeout_ms

_STYLES: Final = {OK: "green", WARN: "yellow", FAIL: "bold red"}


def examine(
    server: str | None, client_key: str | None, server_key: str | None, timeout_s: float, client_timeout_ms: int
) -> list[Finding]:
    """All findings, in the order in which they are worth reading."""
    try:
        target = Target.find(server, client_key, server_key, timeout_s)
    except MaruError as error:
        return [
            Finding("endpoint", FAIL, str(error), "start an engine or maru-server first, or name one"),
            *_host([], None, None),
        ]
    with quiet():
        return _examine(target, client_timeout_ms)


def _examine(target: Target, client_timeout_ms: int) -> list[Finding]:
    findings = [checks_server.check_settings(target.settings)]
    endpoints = checks_server.check_endpoints(target.endpoint)
    findings += endpoints
    if all(finding.level == FAIL for finding in endpoints):
        return [*findings, *_host([], None, target.endpoint)]
    session = target.session("doctor")
    try:
        hello = checks_server.check_hello(session)
        findings.append(hello)
        if hello.level == FAIL:
            return [*findings, *_host([], None, target.endpoint)]
        try:
            findings += _examine_server(session, target, client_timeout_ms / 1000)
        except ServerUnavailableError as error:
            findings.append(Finding("server", FAIL, str(error), "it went away meanwhile: see its log"))
        except ServerError as error:
            cure = (
                "give an operator's key (--client-key)" if error.code == ErrorCode.FORBIDDEN else "see the server's log"
            )
            findings.append(Finding("server", FAIL, str(error), cure))
    finally:
        session.close()
    return findings


def _examine_server(session: Session, target: Target, limit_s: float) -> Iterator[Finding]:
    welcome = session.connect()
    yield checks_server.check_round_trip(session, limit_s)
    stats = session.stats()
    if "pages" not in stats:
        yield Finding(
            "operator",
            WARN,
            "this key is not an operator's: figures of the whole server are not shown to it",
            "give an operator's key (--client-key or MARU_CLIENT_KEY) to have everything looked at",
        )
    sessions = session.inspect("sessions", limit=LIMIT_MAX)
    namespaces = session.inspect("namespaces", limit=LIMIT_MAX)
    names = welcome.pools or [PoolName(welcome.pool_uri, welcome.pool_uuid)]
    rows = session.inspect("pools") if len(names) > 1 else [{}]
    given = split_pools(target.settings.pool) if target.settings.pool else []
    bound = None
    for name, row in zip(names, rows, strict=True):
        memory, finding = checks_pool.attach(given or [name.uri], name.uuid)
        # Of several pools one may be for other hosts; agents may serve it.
        yield finding if memory is not None or len(names) == 1 else dataclasses.replace(finding, level=WARN)
        uri = (given or [name.uri])[0] if memory is None else str(memory.uri)
        if memory is not None:
            node = bound_node(memory.data_address)
            if {node, parse_pool_uri(uri).numa} != {None}:
                bound = checks_host.check_binding(parse_pool_uri(uri), node)
                yield bound
        try:
            yield from _examine_pool(memory, uri, stats | row, sessions, namespaces)
        finally:
            if memory is not None:
                memory.close()
    uri = given[0] if given else names[0].uri
    yield from checks_sharing.check_sessions(sessions)
    yield from checks_sharing.check_namespaces(namespaces)
    yield from checks_sharing.check_asks(namespaces)
    if "pages" in stats:
        yield checks_room.check_room(stats)
        yield checks_room.check_quota(session.inspect("tenants", limit=LIMIT_MAX), stats)
        yield checks_room.check_quarantine(stats)
    yield from _host(sessions, None if bound else parse_pool_uri(uri).path, target.endpoint)


def _examine_pool(
    memory: PoolMemory | None,
    uri_text: str,
    stats: dict[str, Any],
    sessions: list[dict[str, Any]],
    namespaces: list[dict[str, Any]],
) -> Iterator[Finding]:
    uri = parse_pool_uri(uri_text)
    created = None
    if memory is not None:
        geometry = memory.geometry
        created = geometry.created_ns
        yield checks_pool.check_huge_pages(uri, geometry.pool_bytes)
        yield checks_pool.check_coherence(memory.coherence, {row["host"] for row in sessions}, uri)
        yield checks_pool.check_objects(namespaces, geometry.extent_bytes, geometry.min_slot_bytes, stats)
        if "extents_ready" in stats:
            yield checks_pool.check_memory(uri, stats)
    if "stalled_s" in stats:
        yield checks_server.check_clock(stats, created, time.time_ns())


def _host(sessions: list[dict[str, Any]], path: Path | None, endpoint: str | None) -> Iterator[Finding]:
    yield from checks_sglang.check_sglang(checks_sglang.sglang_processes(), endpoint)
    if path is not None:
        yield from checks_host.check_numa(sessions, path, socket.gethostname())
    yield checks_host.check_pinning()


def report(findings: list[Finding], as_json: bool) -> bool:
    """Print them; False if something is wrong."""
    wrong = sum(finding.level == FAIL for finding in findings)
    doubtful = sum(finding.level == WARN for finding in findings)
    if as_json:
        print_json({"ok": not wrong, "fail": wrong, "warn": doubtful, "findings": findings})
        return not wrong
    out = console()
    for finding in findings:
        line = Text(f"{finding.level:4} ", style=_STYLES[finding.level])
        line.append(f"{finding.name}: ", style="bold")
        line.append(clean(finding.text), style="default")
        out.print(line)
        if finding.cure:
            out.print(
                Text(
                    f"     {'note' if finding.level == OK else 'do'}: {clean(finding.cure)}",
                    style="dim" if finding.level == OK else "",
                )
            )
    out.print(Text(f"{wrong} wrong, {doubtful} doubtful, {len(findings) - wrong - doubtful} in order", style="bold"))
    return not wrong
