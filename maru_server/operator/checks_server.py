"""Is there a server, of the same release, that answers in time?"""

from __future__ import annotations

import errno
import os
import socket
import stat
import statistics
import time
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from maru_core.errors import MaruError, ServerUnavailableError, VersionMismatchError
from maru_core.protocol import PROTOCOL_VERSION
from maru_core.session import Session
from maru_core.settings import Settings
from maru_server.operator.findings import FAIL, OK, WARN, Finding

#: Questions asked to see how long answers take.
_ROUNDS: Final = 15
#: Longest wait for a connection, seconds.
_CONNECT_S: Final = 2.0


def check_settings(settings: Settings) -> Finding:
    """Variables that mean nothing are most likely misspelt."""
    if settings.unknown:
        return Finding(
            "settings",
            WARN,
            f"the environment has {', '.join(settings.unknown)}, which mean nothing to Maru",
            "correct their names, or unset them",
        )
    server = (
        f"MARU_SERVER={settings.server}"
        if settings.server
        else "MARU_SERVER is not set: engines use the embedded server"
    )
    return Finding("settings", OK, server)


def check_endpoints(endpoints: str) -> list[Finding]:
    """One finding for each of several, separated by commas. Where one listens, the others may be those of standbys, which
    listen only once they serve."""
    found = [check_endpoint(endpoint.strip()) for endpoint in endpoints.split(",")]
    if not any(finding.level == OK for finding in found):
        return found
    return [
        finding
        if finding.level == OK
        else Finding(finding.name, OK, finding.text, "that is as it should be where its server is a standby that waits")
        for finding in found
    ]


def check_endpoint(endpoint: str) -> Finding:
    """Whether somebody listens there: what the operating system says, which knows more than a time limit."""
    if endpoint.startswith("ipc://"):
        return _check_socket_file(Path(endpoint.removeprefix("ipc://")))
    parts = urlsplit(endpoint)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=_CONNECT_S):
            return Finding("endpoint", OK, f"something listens on {endpoint}")
    except socket.gaierror as error:
        return Finding(
            "endpoint", FAIL, f"the host of {endpoint} has no address ({error.strerror})", "correct the name"
        )
    except OSError as error:
        cure = (
            "start maru-server, or see that it is bound to that address and not to loopback only"
            if error.errno == errno.ECONNREFUSED
            else "see that the host is up, and that no firewall is between"
        )
        return Finding("endpoint", FAIL, f"no connection to {endpoint}: {error.strerror or error}", cure)


def _check_socket_file(path: Path) -> Finding:
    try:
        found = path.stat()
    except FileNotFoundError:
        return Finding(
            "endpoint",
            FAIL,
            f"there is no socket {path}",
            "start maru-server with this --bind, correct MARU_SERVER, or, in a container, mount the socket's directory",
        )
    except OSError as error:
        return Finding("endpoint", FAIL, f"{path} cannot be looked at: {error.strerror}", "run as the server's user")
    if not stat.S_ISSOCK(found.st_mode):
        return Finding("endpoint", FAIL, f"{path} is not a socket", "correct MARU_SERVER")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_CONNECT_S)
        try:
            probe.connect(str(path))
        except PermissionError:
            return Finding(
                "endpoint",
                FAIL,
                f"{path} belongs to uid {found.st_uid}, and uid {os.geteuid()} may not connect",
                "run the engine as the server's user, or have the server bind to tcp:// with keys",
            )
        except OSError as error:
            return Finding(
                "endpoint",
                FAIL,
                f"nobody listens on the socket {path} ({error.strerror}): its server has ended",
                "start maru-server again with this --bind; it takes the socket over",
            )
    return Finding("endpoint", OK, f"something listens on {path}")


def check_hello(session: Session) -> Finding:
    """Whether it is a Maru server that takes us in."""
    try:
        welcome = session.connect()
    except VersionMismatchError as error:
        return Finding("server", FAIL, str(error), "install the same release of Maru on both sides")
    except ServerUnavailableError as error:
        return Finding(
            "server",
            FAIL,
            str(error),
            "see the server's log and its CPU; a server that has keys answers only clients that give theirs "
            "(MARU_CLIENT_KEY and MARU_SERVER_KEY)",
        )
    except MaruError as error:
        return Finding("server", FAIL, str(error), "do what the message says")
    return Finding(
        "server",
        OK,
        f"{session.endpoint} answers: protocol {PROTOCOL_VERSION}, incarnation {welcome.incarnation}, "
        f"heartbeats every {welcome.heartbeat_s:g} s, lease {welcome.lease_s:g} s",
    )


def check_round_trip(session: Session, limit_s: float) -> Finding:
    """How long an answer takes, against the time limit after which an engine counts it as a miss."""
    took = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        session.stats()
        took.append(time.perf_counter() - start)
    median, most = statistics.median(took), max(took)
    text = f"answers take {median * 1e3:.2f} ms (the slowest of {_ROUNDS}: {most * 1e3:.2f} ms); engines wait {limit_s * 1e3:g} ms"
    if median >= limit_s:
        return Finding(
            "answer-time", FAIL, text, "raise timeout_ms in the extra config, or give the server a core of its own"
        )
    if most >= limit_s / 2:
        return Finding(
            "answer-time", WARN, text, "give the server a core of its own (taskset, CPUAffinity), or raise timeout_ms"
        )
    return Finding("answer-time", OK, text)


def check_clock(stats: dict[str, Any], created_ns: int | None, now_ns: int) -> Finding:
    """Gaps in the server's time, and clocks that were set back."""
    if created_ns is not None and created_ns > now_ns + 1_000_000_000:
        return Finding(
            "clock",
            WARN,
            f"the pool was made {(created_ns - now_ns) / 1e9:.0f} s in the future of this host's clock",
            "set the clocks of the hosts alike (NTP); ages that maru shows are wrong until then",
        )
    if stats["stalled_s"] > 0:
        return Finding(
            "clock",
            WARN,
            f"the server stood still for {stats['stalled_s']:.1f} s in all since its start: it was stopped, or had no CPU",
            "give it a core of its own, and no CPU limit in its container; what it missed meanwhile was a miss for engines",
        )
    return Finding("clock", OK, "the server was never stalled, and clocks agree")
