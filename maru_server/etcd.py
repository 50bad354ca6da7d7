"""The few requests that an election needs of etcd (3.4 or later), over its JSON gateway with the standard library alone.

Each request is one small POST with a time limit; several endpoints are tried in turn, the one that answered last first.
A request whose answer was lost may be repeated at the next endpoint, so callers use only what may be repeated: a key is put
under the condition that it is absent, and whoever is refused looks whether the key is its own.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import ssl
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from maru_core.errors import ConfigError, MaruError

#: Codes of gRPC, as the gateway repeats them, after which another member may do better: the member is not served by a
#: quorum, is starting or stopping, or the request took too long there.
_TRY_ANOTHER: Final = (1, 4, 8, 10, 13, 14)
_UNAUTHENTICATED: Final = 16
#: Longest answer that is read, bytes: an election's are a few hundred.
_ANSWER_MAX: Final = 1 << 20
_DEFAULT_PORT: Final = 2379
_EXAMPLE: Final = "give etcd://HOST:2379[,HOST2:2379]/path/name"


class EtcdError(MaruError):
    """No endpoint answered, or etcd refused. What became of the request is not known."""


@dataclass(frozen=True, slots=True)
class EtcdURL:
    """``etcd://HOST:PORT[,HOST:PORT]/key``, or ``etcds://`` for TLS.

    After ``?`` may follow, as ``name=value`` joined by ``&``: ``ca``, ``cert``, ``key`` (PEM files, etcds only), ``user`` and
    ``password_file``.
    """

    text: str
    endpoints: tuple[tuple[str, int], ...]
    key: str
    tls: bool = False
    ca: str | None = None
    cert: str | None = None
    cert_key: str | None = None
    user: str | None = None
    password_file: str | None = None

    @classmethod
    def parse(cls, text: str) -> EtcdURL:
        """
        Raises:
            ConfigError: with the value and the cure.
        """
        scheme, _, rest = text.partition("://")
        if scheme not in ("etcd", "etcds"):
            raise ConfigError(f"--lock is {text!r}: {_EXAMPLE}")
        rest, _, query = rest.partition("?")
        hosts, slash, key = rest.partition("/")
        if not key.strip("/"):
            raise ConfigError(f"--lock is {text!r}, which names no key: {_EXAMPLE}")
        options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        unknown = sorted(set(options) - {"ca", "cert", "key", "user", "password_file"})
        if unknown:
            raise ConfigError(
                f"--lock is {text!r}: {unknown[0]!r} is none of its options ca, cert, key, user and password_file"
            )
        tls = scheme == "etcds"
        if not tls and options.keys() & {"ca", "cert", "key"}:
            raise ConfigError(f"--lock is {text!r}: ca, cert and key are for TLS: write etcds:// or leave them out")
        if ("cert" in options) != ("key" in options) or ("user" in options) != ("password_file" in options):
            raise ConfigError(f"--lock is {text!r}: give cert and key, and user and password_file, together")
        return cls(
            text=text,
            endpoints=tuple(_endpoint(text, host) for host in hosts.split(",")),
            key=slash + key,
            tls=tls,
            ca=options.get("ca"),
            cert=options.get("cert"),
            cert_key=options.get("key"),
            user=options.get("user"),
            password_file=options.get("password_file"),
        )

    def context(self) -> ssl.SSLContext | None:
        """
        Raises:
            ConfigError: a file that cannot be used.
        """
        if not self.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.cert_key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--lock is {self.text!r}: its certificates cannot be used ({error})") from error
        return context

    def password(self) -> str | None:
        """
        Raises:
            ConfigError: the file cannot be read.
        """
        if self.password_file is None:
            return None
        try:
            return Path(self.password_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--lock is {self.text!r}: {self.password_file} cannot be read ({error})") from error


def _endpoint(text: str, host: str) -> tuple[str, int]:
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        name, port = host, str(_DEFAULT_PORT)
    name = name.removeprefix("[").removesuffix("]")
    if not name or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"--lock is {text!r}, where {host!r} is no host and port: {_EXAMPLE}")
    return name, int(port)


@dataclass(frozen=True, slots=True)
class Held:
    """A key that is there: what it says, and the lease that it hangs on."""

    value: str
    lease: int


class Etcd:
    """Requests to one cluster. For one thread at a time; connects at the first request."""

    def __init__(self, url: EtcdURL, *, timeout_s: float) -> None:
        """
        Args:
            timeout_s: for each step of one attempt at one endpoint (connect, answer), seconds.
        Raises:
            ConfigError: files that the URL names cannot be used.
        """
        self.url = url
        self._timeout_s = timeout_s
        self._context = url.context()
        self._password = url.password()
        self._token: str | None = None
        self._at = 0  # of the endpoint that is asked first
        self._connection: http.client.HTTPConnection | None = None

    # ------------------------------------------------------------ requests

    def grant(self, ttl_s: int) -> tuple[int, int]:
        """A new lease: its number, and the seconds that it has (etcd may give more than the ``ttl_s`` asked for)."""
        answer = self._call("lease/grant", {"TTL": ttl_s})
        return _number(answer, "ID"), _number(answer, "TTL")

    def renew(self, lease: int) -> int:
        """Begin the lease's time anew; the seconds that it has, 0 if it is over."""
        answer = self._call("lease/keepalive", {"ID": str(lease)})
        result = answer.get("result")
        return _number(result, "TTL", 0) if isinstance(result, dict) else 0

    def revoke(self, lease: int) -> None:
        """End a lease, and every key that hangs on it."""
        self._call("lease/revoke", {"ID": str(lease)})

    def get(self, key: str) -> Held | None:
        """What a key says, as a quorum knows it; None if it is absent."""
        return _first(self._call("kv/range", {"key": _base64(key)}))

    def put_if_absent(self, key: str, value: str, lease: int) -> bool:
        """Put a key on a lease, unless it is there. True also if it is there on this lease."""
        encoded = _base64(key)
        answer = self._call(
            "kv/txn",
            {
                "compare": [{"key": encoded, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}],
                "success": [{"request_put": {"key": encoded, "value": _base64(value), "lease": str(lease)}}],
                "failure": [{"request_range": {"key": encoded}}],
            },
        )
        if answer.get("succeeded") is True:
            return True
        responses = answer.get("responses")
        found = responses[0].get("response_range") if isinstance(responses, list) and responses else None
        held = _first(found) if isinstance(found, dict) else None
        return held is not None and held.lease == lease

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # ------------------------------------------------------------ inside

    def _call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """
        Raises:
            EtcdError: no endpoint gave a good answer; the message has what each said.
        """
        said = []
        for _ in self.url.endpoints:
            host, port = self.url.endpoints[self._at]
            try:
                return self._ask(path, body)
            except _RefusedError as refusal:
                if refusal.code not in _TRY_ANOTHER:
                    raise EtcdError(f"etcd at {host}:{port} refused {path}: {refusal}") from refusal
                said.append(f"{host}:{port}: {refusal}")
            except (OSError, http.client.HTTPException, ValueError) as error:
                said.append(f"{host}:{port}: {error or type(error).__name__}")
            self.close()
            self._at = (self._at + 1) % len(self.url.endpoints)
        raise EtcdError(f"no good answer from etcd ({'; '.join(said)})")

    def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._password is None:
            return self._post(path, body)
        fresh = self._token is None
        if fresh:
            self._log_in()
        try:
            return self._post(path, body)
        except _RefusedError as refusal:
            # Tokens end a few minutes after their last use, and with the member that gave them.
            if fresh or (refusal.code != _UNAUTHENTICATED and "token" not in str(refusal)):
                raise
        self._log_in()
        return self._post(path, body)

    def _log_in(self) -> None:
        self._token = None
        answer = self._post("auth/authenticate", {"name": self.url.user, "password": self._password})
        token = answer.get("token")
        if not isinstance(token, str):
            raise ValueError("it gave no token")
        self._token = token

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        kept = self._connection is not None
        try:
            return self._exchange(path, body)
        except (ConnectionError, http.client.RemoteDisconnected, http.client.CannotSendRequest):
            # A connection that was kept may have been closed by the other side long ago.
            self.close()
            if not kept:
                raise
        return self._exchange(path, body)

    def _exchange(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._connection is None:
            host, port = self.url.endpoints[self._at]
            if self._context is not None:
                self._connection = http.client.HTTPSConnection(
                    host, port, timeout=self._timeout_s, context=self._context
                )
            else:
                self._connection = http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        headers = {"Content-Type": "application/json"}
        if self._token is not None:
            headers["Authorization"] = self._token
        try:
            self._connection.request("POST", f"/v3/{path}", json.dumps(body), headers)
            response = self._connection.getresponse()
            data = response.read(_ANSWER_MAX)
            status = response.status
        except BaseException:
            self.close()  # an answer that is still on its way must not be taken for the next one
            raise
        if response.will_close or len(data) == _ANSWER_MAX:
            self.close()
        answer: Any = None
        with contextlib.suppress(ValueError):
            answer = json.loads(data)
        if not isinstance(answer, dict):
            raise ValueError(f"HTTP {status} with what is no answer of etcd 3.4 or later")
        error = answer.get("error")
        if status != 200 or error is not None:
            raise _RefusedError.of(answer, status)
        return answer


class _RefusedError(Exception):
    """etcd's own error; ``code`` is gRPC's."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

    @classmethod
    def of(cls, answer: dict[str, Any], status: int) -> _RefusedError:
        # In a stream's answer the error is an object of its own.
        inner = answer["error"] if isinstance(answer.get("error"), dict) else answer
        message = inner.get("message") or inner.get("error") or f"HTTP {status}"
        code = inner.get("grpc_code", inner.get("code"))
        return cls(str(message), code if isinstance(code, int) else -1)


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _number(answer: dict[str, Any], name: str, default: int | None = None) -> int:
    """64-bit numbers are text in the gateway's JSON, and zeros are left out."""
    try:
        return int(answer.get(name, default))  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise EtcdError(f"etcd's answer has no {name}") from error


def _first(answer: dict[str, Any]) -> Held | None:
    pairs = answer.get("kvs")
    if not isinstance(pairs, list) or not pairs:
        return None
    try:
        value = base64.b64decode(pairs[0].get("value", "")).decode(errors="replace")
    except (AttributeError, TypeError, ValueError) as error:
        raise EtcdError("etcd's answer has a key that cannot be read") from error
    return Held(value, _number(pairs[0], "lease", 0))
