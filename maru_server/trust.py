"""Who may speak to a server with keys, and as whom: the server's key, the list of clients, and the answer to ZeroMQ's ZAP.

The list is a TOML file, ``clients.toml``, with one entry for each client that may connect::

    [[client]]
    name = "node-a"
    public = "ZfR3oj=%N6Ho.:xsbkJ<MV:1IOYXCA^xNi3MR-@:"
    tenant = "search"      # left out: the tenant without a name
    operator = false       # true: may also pin, evict, and see and clear what belongs to others

Two checks stand one behind the other. At the handshake, libzmq asks ZAP (https://rfc.zeromq.org/spec/27/) whether the
client's public key is listed; one that is not never gets a connection. Then every message carries the key that its connection
proved (libzmq's ``User-Id``), and :meth:`Trust.peer` says what that key is *now*: a key that was taken off the list is
refused on the connections that it has. Nothing is ever concluded from a ROUTER's routing id: the peer chooses it, and may
choose one that another peer had.
"""

from __future__ import annotations

import logging
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from maru_core.errors import ConfigError
from maru_core.keys import KeyPair, check_name, is_key, parse, read_bytes
from maru_server.repeats import Repeats
from maru_server.sessions import Peer

log = logging.getLogger("maru.server")

CLIENTS_NAME: Final = "clients.toml"
_ZAP: Final = "inproc://zeromq.zap.01"
#: With a domain and its enforcement, libzmq turns everybody away if nobody answers ZAP; without, it would let everybody in.
_DOMAIN: Final = "maru"
_FAILED: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Client(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the list."""

    name: str
    public: str
    tenant: str = ""
    operator: bool = False


class _Clients(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    client: list[dict[str, Any]] = []


def parse_clients(raw: bytes, where: str) -> list[Client]:
    """The entries of a list of clients.

    Args:
        where: what named the file, and the file, for errors.
    Raises:
        ConfigError: naming the entry and what is wrong with it.
    """
    found: list[Client] = []
    names: set[str] = set()
    keys: dict[str, str] = {}
    for number, fields in enumerate(parse(raw, _Clients, where).client, 1):
        at = f"{where}: client {number} ({str(fields.get('name', 'without a name'))!r})"
        try:
            entry = msgspec.convert(fields, Client)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{at}: {error}: an entry has name, public, tenant and operator") from error
        found.append(entry)
        check_name(entry.name, f"{at}: name")
        if entry.tenant:
            check_name(entry.tenant, f"{at}: tenant")
        if not is_key(entry.public):
            raise ConfigError(f"{at}: public is no key: copy the line of that name from the client's .pub file")
        if entry.name in names:
            raise ConfigError(f"{at}: another entry has that name: give each client its own")
        if entry.public in keys:
            raise ConfigError(f"{at}: it has the key of {keys[entry.public]!r}: make a key for each client")
        names.add(entry.name)
        keys[entry.public] = entry.name
    return found


class Trust:
    """The keys of one server. Made before the sockets; :meth:`guard` puts it in front of one."""

    def __init__(self, keys: KeyPair, clients: Path) -> None:
        """
        Raises:
            ConfigError: the list of clients cannot be used.
        """
        self._keys = keys
        self._path = clients
        self._version = self._look()
        self._peers = self._read("--clients")
        self._checked = self._version
        #: Connections that were turned away since the start: keys that are not listed, and handshakes that came to nothing
        #: (no keys, another server's key, no ZeroMQ at all).
        self.unlisted = 0
        self.failed_handshakes = 0
        self._unlisted_log = Repeats()
        self._failed_log = Repeats()
        if not self._peers:
            log.warning("--clients is %s, which lists nobody: no client can connect", clients)

    @classmethod
    def load(cls, keys: str | None, clients: str | None) -> Trust | None:
        """What the options say; None where there are no keys.

        Raises:
            ConfigError: only one of the two was given, or one cannot be used.
        """
        if keys is None and clients is None:
            return None
        if keys is None:
            raise ConfigError("--clients needs --keys: make the server's key with maru-server keygen --out DIR")
        if clients is None:
            raise ConfigError(
                "--keys needs --clients: make a client's key with maru-server keygen --out DIR --name NAME, and give DIR/clients.toml"
            )
        return cls(KeyPair.read(Path(keys), "--keys"), Path(clients))

    # ------------------------------------------------------------ the list

    def peer(self, user_id: str | None) -> Peer | None:
        """Who has this public key, as of now; None if nobody may."""
        return self._peers.get(user_id) if user_id is not None else None

    def peers(self) -> frozenset[Peer]:
        """Everybody who is listed."""
        return frozenset(self._peers.values())

    def reread(self) -> bool:
        """Read the list again if the file has changed; True if anything in it has. A list that cannot be used changes nothing."""
        version = self._look()
        if version == self._checked:
            return False
        self._checked = version
        try:
            peers = self._read("--clients")
        except ConfigError as error:
            log.error("the list of clients stays as it was until it can be read: %s", error)
            return False
        gone = self._peers.keys() - peers.keys()
        changed = peers != self._peers
        self._peers = peers  # at one stroke: the thread that answers ZAP reads it too
        if changed:
            log.info("%s was read again: %d clients, %d keys revoked", self._path, len(peers), len(gone))
        return changed

    def reread_soon(self) -> None:
        """Have the next :meth:`reread` read the file in any case."""
        self._checked = None

    def _look(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self, what: str) -> Mapping[str, Peer]:
        raw = read_bytes(self._path, what)
        try:
            mode = self._path.stat().st_mode
        except OSError:
            mode = 0  # gone since then: the next look sees it
        if mode & stat.S_IWOTH:
            raise ConfigError(
                f"{what} is {self._path}, which anybody may write, and so let themselves in: chmod o-w {self._path}"
            )
        entries = parse_clients(raw, f"{what} is {self._path}")
        return {entry.public: Peer(entry.tenant, entry.operator, entry.name) for entry in entries}

    # ------------------------------------------------------------ the sockets

    def guard(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> None:
        """Have ``socket`` take only connections from listed clients. Before it is bound to where they are.

        Starts the thread that answers ZAP, which ends with the context.
        """
        self.reread()  # a standby may have waited for days
        socket.curve_server = True
        socket.curve_publickey = self._keys.public.encode()
        socket.curve_secretkey = self._keys.secret.encode()
        socket.zap_domain = _DOMAIN.encode()
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        answers = context.socket(zmq.REP)
        try:
            answers.linger = 0
            answers.bind(_ZAP)
            events = socket.get_monitor_socket(_FAILED)
        except BaseException:
            answers.close()
            raise
        threading.Thread(target=self._answer, args=(answers, events), name="maru-trust", daemon=True).start()

    def _answer(self, answers: zmq.Socket[bytes], events: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(answers, zmq.POLLIN)
        poller.register(events, zmq.POLLIN)
        try:
            while True:
                for socket, _ in poller.poll():
                    try:
                        if socket is answers:
                            answers.send_multipart(self._decide(answers.recv_multipart()))
                        else:
                            self._note(events.recv_multipart())
                    except zmq.ZMQError:
                        raise
                    except Exception:
                        # The next client must be answered all the same. Whoever was not is turned away.
                        log.exception("a handshake could not be looked at")
        except zmq.ZMQError as error:
            if error.errno != zmq.ETERM:
                log.error("new clients are turned away from now on (%s): restart the server", error)
        finally:
            answers.close(0)
            events.close(0)

    def _decide(self, request: list[bytes]) -> list[bytes]:
        """The answer to one request of ZAP (version, id, domain, address, identity, mechanism, credentials ...)."""
        version, number, domain, address, _, mechanism, *credentials = request
        key = ""
        if version == b"1.0" and domain == _DOMAIN.encode() and mechanism == b"CURVE" and len(credentials) == 1:
            key = z85.encode(credentials[0]).decode()
            if key in self._peers:
                return [b"1.0", number, b"200", b"OK", key.encode(), b""]
        self.unlisted += 1
        self._unlisted_log.warn(
            "turned away a client at %s: its public key %s is not in %s",
            address.decode(errors="replace"),
            key,
            self._path,
        )
        return [b"1.0", number, b"400", b"this key is not listed", b"", b""]

    def _note(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)
        if event["event"] != zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # which _decide has said
            self.failed_handshakes += 1
            self._failed_log.warn(
                "a connection came to nothing: the client has no keys, or not this server's public key, or is none of Maru's"
            )
