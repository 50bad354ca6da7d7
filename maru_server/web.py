"""What the server shows over HTTP: metrics, health, two documents of JSON, and the live page. Read only.

=====================  ================================================================================================
path                   what
=====================  ================================================================================================
``/metrics``           for Prometheus (:mod:`maru_server.exposition`)
``/healthz``           200 if the loop that serves clients answers within a second, otherwise 503
``/api/status.json``   figures now, namespaces, sessions by tenant, and the history of the last ten minutes
``/api/tree.json``     the prefix trees: ``?limit=`` runs of pages, ``?sort=heat|bytes`` (:func:`maru_server.views.tree_view`)
``/``                  the live page, one file without anything from elsewhere
=====================  ================================================================================================

Nothing here can hold up clients for long: what is shown is copied in the loop, a few of these copies a second at most, and
made into text by threads of its own; so many requests are served at once and no more, each for a limited time.

It shows names of models and how much of what is cached, to whoever can connect, and no KV. So the rule is that of
``--bind``: loopback, or ``--insecure-http``. A page from elsewhere in somebody's browser cannot read it: the ``Host`` must
be an address or a known name (a name that was made to point here is refused), and nothing allows other origins.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import hashlib
import ipaddress
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any, Final, TypeVar, get_args
from urllib.parse import parse_qs, urlsplit

from maru_core import __version__
from maru_core.errors import ClosedError, ConfigError, ServerUnavailableError
from maru_server.metrics import BUCKETS, Figures, quantile
from maru_server.service import Service
from maru_server.views import Sort, tree_view

log = logging.getLogger("maru.http")

T = TypeVar("T")

#: Requests that are served at once, and seconds that one may take from connection to reply.
CONCURRENT: Final = 16
REQUEST_S: Final = 10.0
#: How long the loop may take to answer a request for health, and one for anything else, seconds.
HEALTH_S: Final = 1.0
CALL_S: Final = 5.0
#: How old figures may be that several ask for at once, seconds; of the tree, which costs more.
FRESH_S: Final = 0.25
TREE_FRESH_S: Final = 1.0
#: Part of the time that may go into making one of them anew: a tree of a million pages takes some tenths of a second.
DUTY: Final = 0.05
#: One point of the history each so many seconds, for so long.
HISTORY_STEP_S: Final = 2.0
HISTORY_POINTS: Final = 300
TREE_LIMIT: Final = 400
TREE_LIMIT_MAX: Final = 2000


def parse_address(text: str, *, insecure: bool) -> tuple[str, int]:
    """Host and port of ``--http``.

    Raises:
        ConfigError: not an address, or one that other machines reach without ``insecure``.
    """
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--http is {text!r}: give an address and a port, as in 127.0.0.1:9750")
    if not insecure and not is_loopback(host):
        raise ConfigError(
            f"--http is {text!r}, which other machines can reach: whoever connects sees which models are served and how "
            "much of what is cached. Give 127.0.0.1 and put a proxy that knows its users before it, or give --insecure-http"
        )
    return host, int(port)


def is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class Pace:
    """What several dear values have in common: one of them is made at a time, and together they take at most the :data:`DUTY`
    part of the time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.free_at = -1e9


class Fresh:
    """A value that is made when asked for, and given again to all who ask within ``for_s`` seconds. One at a time makes it.

    One that is dear is kept for longer: making it takes at most the :data:`DUTY` part of the time, however many ask.

    Args:
        pace: shared with others of which there may be any number.
    """

    def __init__(self, make: Callable[[], T], for_s: float, pace: Pace | None = None) -> None:
        self._make: Callable[[], Any] = make
        self._for_s = for_s
        self._pace = pace or Pace()
        self._lock = self._pace.lock
        self._value: Any = None
        self._made = -1e9
        self._took = 0.0

    def get(self) -> Any:
        """Raises what making it raises, and ServerUnavailableError where another is at it for too long, or too much was made already."""
        if not self._lock.acquire(timeout=CALL_S):
            raise ServerUnavailableError(f"the server did not answer within {CALL_S:g} s: it is busy")
        try:
            began = time.monotonic()
            if began - self._made > max(self._for_s, self._took / DUTY):
                wait_s = self._pace.free_at - began
                if wait_s <= 0:
                    self._value = self._make()
                    self._made = time.monotonic()
                    self._took = self._made - began
                    self._pace.free_at = self._made + self._took / DUTY
                elif self._made < 0:
                    raise ServerUnavailableError(
                        f"the server looked as closely just now: ask again in {wait_s:.1f} s, or for what the live page shows"
                    )
            return self._value
        finally:
            self._lock.release()


class Web:
    """The HTTP server of one service, in daemon threads.

    Args:
        address: from :func:`parse_address`; port 0 for any.
        names: host names under which it is reached, besides addresses, localhost and this host's name.
    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(self, service: Service, address: tuple[str, int], names: Iterable[str] = ()) -> None:
        from maru_server.exposition import Exposition  # the client library takes a while to import

        self._service = service
        self._figures = Fresh(lambda: service.figures(CALL_S), FRESH_S)
        self._exposition = Exposition(self._figures.get)
        #: What the live page shows has its own share of the time; whatever else somebody asks for shares one.
        self._shown = {
            (TREE_LIMIT, sort): Fresh(partial(self._look_at_tree, TREE_LIMIT, sort), TREE_FRESH_S)
            for sort in get_args(Sort)
        }
        self._trees: dict[tuple[int, str], Fresh] = {}
        self._pace = Pace()
        self._trees_lock = threading.Lock()
        self._history: collections.deque[dict[str, float]] = collections.deque(maxlen=HISTORY_POINTS)
        self._last: Figures | None = None
        self._stop = threading.Event()
        self.page, self.policy = _load_page()
        self.names = {"localhost", socket.gethostname().lower(), *(name.lower() for name in names)}
        try:
            self._server = _Server(address, self)
        except OSError as error:
            raise ConfigError(
                f"--http is {address[0]}:{address[1]} and cannot be bound ({error.strerror}): give another port"
            ) from error
        host, port = self._server.server_address[:2]
        #: Where it is reached.
        self.url = f"http://{f'[{host!s}]' if ':' in str(host) else host!s}:{port}"
        self._threads = [
            threading.Thread(target=self._server.serve_forever, args=(0.2,), name="maru-http", daemon=True),
            threading.Thread(target=self._keep_history, name="maru-history", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop listening. After the service is closed, so that nobody waits for it."""
        self._stop.set()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join()

    # ------------------------------------------------------------ what there is

    def health(self) -> dict[str, Any]:
        """Raises what :meth:`Service.call` raises where the loop does not answer."""
        stats = self._service.call(lambda state: state.stats(), HEALTH_S)
        return {"status": "ok", "incarnation": stats["incarnation"], "version": __version__}

    def metrics(self) -> bytes:
        return self._exposition.render()

    def status(self) -> dict[str, Any]:
        """See :mod:`maru_server.web`: plain values only."""
        figures: Figures = self._figures.get()
        return {
            "version": __version__,
            "incarnation": str(figures.stats["incarnation"]),  # more digits than a browser's numbers have
            "stats": dict(figures.stats),
            "latency_s": {name: latency(row) for name, row in sorted(figures.requests.items())},
            "errors": [
                {"request": request, "code": code, "count": count}
                for (request, code), count in sorted(figures.errors.items())
            ],
            "slots": [
                {"slot_bytes": size.slot_bytes, "extents": size.extents, "used": size.used, "free": size.free}
                for size in figures.sizes
            ],
            "quarantined_bytes": figures.quarantined_bytes,
            "pools": figures.pools,
            "sessions": dict(figures.sessions),
            "namespaces": [
                {
                    "number": space.number,
                    "label": space.label,
                    "tenant": space.tenant,
                    "model": str(space.fields().get("model", "")),
                    "tag": str(space.fields().get("tag", "")),
                    "pages": space.pages,
                    "bytes": space.stored(),
                    "counts": space.counts,
                }
                for space in figures.spaces
            ],
            "history": list(self._history),
        }

    def tree(self, limit: int, sort: str) -> dict[str, Any]:
        """The rows of :func:`maru_server.views.tree_view`."""
        with self._trees_lock:
            fresh = self._shown.get((limit, sort)) or self._trees.get((limit, sort))
            if fresh is None:
                if len(self._trees) >= 8:
                    self._trees.clear()
                made = partial(self._look_at_tree, limit, sort)
                fresh = self._trees[limit, sort] = Fresh(made, TREE_FRESH_S, self._pace)
        rows: dict[str, Any] = fresh.get()
        return rows

    def _look_at_tree(self, limit: int, sort: Any) -> dict[str, Any]:
        taken = self._service.call(lambda state: state.snapshot(), CALL_S)
        return {"rows": tree_view(taken, limit, sort)}

    # ------------------------------------------------------------ history

    def _keep_history(self) -> None:
        while True:
            try:
                self._add_point(self._figures.get())
            except (ServerUnavailableError, ClosedError):
                pass  # a gap in the line
            except Exception:
                log.exception("no point could be added to the history")
            if self._stop.wait(HISTORY_STEP_S):
                return

    def _add_point(self, figures: Figures) -> None:
        before, self._last = self._last, figures
        if before is None:
            return
        row = [now - then for now, then in zip(figures.latencies(), before.latencies(), strict=True)]

        def more(key: str) -> int:
            return figures.counts.get(key, 0) - before.counts.get(key, 0)

        self._history.append(
            {
                "at": round(time.time(), 1),
                "bytes_used": float(figures.stats["bytes_used"]),
                "used_share": float(figures.stats["used_share"]),
                "requests": sum(row),
                "asked": more("pages_asked"),
                "found": more("pages_found"),
                "p50_s": quantile(row, 0.5),
                "p99_s": quantile(row, 0.99),
            }
        )


def latency(row: list[int]) -> dict[str, float]:
    """Count and quantiles (seconds) of one type of request."""
    return {"count": sum(row[:BUCKETS]), "p50": quantile(row, 0.5), "p99": quantile(row, 0.99)}


def _load_page() -> tuple[bytes, str]:
    """The live page and its content security policy: its own script and style by their hashes, data from here, no more."""
    page = resources.files("maru_server").joinpath("page.html").read_text("utf-8")

    def hashes(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'" for part in found
        )

    policy = (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page.encode(), policy


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], web: Web) -> None:
        self.web = web
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self._slots = threading.Semaphore(CONCURRENT)
        self._open: dict[Any, float] = {}  # when each connection came
        self._open_lock = threading.Lock()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False) and not self._make_room():
            # Not worth a thread: whoever comes too often is told so, if it listens.
            request.settimeout(0)
            with contextlib.suppress(OSError):
                request.send(b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n")
            self.shutdown_request(request)
            return
        with self._open_lock:
            self._open[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._let_go(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._let_go(request)

    def _let_go(self, request: Any) -> None:
        with self._open_lock:
            self._open.pop(request, None)
        self._slots.release()

    def _make_room(self) -> bool:
        """End connections that have had their time."""
        old = time.monotonic() - REQUEST_S
        with self._open_lock:
            late = [request for request, since in self._open.items() if since < old]
        for request in late:
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)
        return bool(late) and self._slots.acquire(timeout=0.5)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request could not be served", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = f"maru/{__version__}"
    sys_version = ""
    timeout = REQUEST_S / 2  # between two pieces of a request

    def do_GET(self) -> None:
        if not self._known_host():
            self._send(
                HTTPStatus.FORBIDDEN,
                _json({"error": "this Host is not known here: use an address, or give --http-name NAME"}),
            )
            return
        target = urlsplit(self.path)
        answer = _PAGES.get(target.path)
        if answer is None:
            self._send(HTTPStatus.NOT_FOUND, _json({"error": f"there is {', '.join(_PAGES)}"}))
            return
        try:
            content, kind = answer(self.server.web, parse_qs(target.query))
        except ValueError as error:
            self._send(HTTPStatus.BAD_REQUEST, _json({"error": str(error)}))
        except (ServerUnavailableError, ClosedError) as error:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, _json({"status": "unavailable", "error": str(error)}))
        except Exception:
            log.exception("%s failed", target.path)
            self._send(
                HTTPStatus.INTERNAL_SERVER_ERROR, _json({"error": "the server failed at this: its log says how"})
            )
        else:
            self._send(HTTPStatus.OK, content, kind)

    def _known_host(self) -> bool:
        """Whether the browser meant this server: a name made to point here by somebody else is none of ours."""
        host = self.headers.get("Host", "")
        name = urlsplit(f"//{host}").hostname if host else None
        return name is not None and (_is_address(name) or name in self.server.web.names)

    def _send(self, status: HTTPStatus, content: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Security-Policy", self.server.web.policy)
        self.end_headers()
        self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the library refuses by itself: requests that are none, and every method but GET."""
        self.close_connection = True
        self._send(HTTPStatus(code), _json({"error": message or HTTPStatus(code).phrase}))

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode()


def _metrics(web: Web, query: Mapping[str, list[str]]) -> tuple[bytes, str]:
    from maru_server.exposition import CONTENT_TYPE

    return web.metrics(), CONTENT_TYPE


def _healthz(web: Web, query: Mapping[str, list[str]]) -> tuple[bytes, str]:
    return _json(web.health()), "application/json"


def _status(web: Web, query: Mapping[str, list[str]]) -> tuple[bytes, str]:
    return _json(web.status()), "application/json"


def _tree(web: Web, query: Mapping[str, list[str]]) -> tuple[bytes, str]:
    limit = query.get("limit", [str(TREE_LIMIT)])[-1]
    sort = query.get("sort", ["heat"])[-1]
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit) <= TREE_LIMIT_MAX:
        raise ValueError(f"limit is {limit[:32]!r}: give 1 to {TREE_LIMIT_MAX}")
    if sort not in ("heat", "bytes"):
        raise ValueError(f"sort is {sort[:32]!r}: give heat or bytes")
    return _json(web.tree(int(limit), sort)), "application/json"


def _page(web: Web, query: Mapping[str, list[str]]) -> tuple[bytes, str]:
    return web.page, "text/html; charset=utf-8"


_PAGES: Final[dict[str, Callable[[Web, Mapping[str, list[str]]], tuple[bytes, str]]]] = {
    "/": _page,
    "/metrics": _metrics,
    "/healthz": _healthz,
    "/api/status.json": _status,
    "/api/tree.json": _tree,
}
