"""Key pairs that prove who speaks, and what a client needs of them: CURVE, as ZeroMQ implements it.

A server with keys turns everybody away whose public key is not in its list. A client has a *key file* of its own and the
*public key of the server*; :meth:`ClientKeys.find` takes both from an engine's configuration or else from the environment
(``MARU_CLIENT_KEY``, ``MARU_SERVER_KEY``), and ``Session(endpoint, keys=...)`` uses them.

Files are TOML. ``maru-server keygen`` writes them::

    name = "node-a"
    public = "ZfR3oj=%N6Ho.:xsbkJ<MV:1IOYXCA^xNi3MR-@:"    # 32 bytes in Z85: https://rfc.zeromq.org/spec/32/
    secret = "D&(7JZLzXB:^Bf(h=A>r3/)p4-(6G3-(g7X<Cm%N"    # not in NAME.pub

What a key may do is the server's to say, see :mod:`maru_server.trust`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import re
import secrets
import stat
import tomllib
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import zmq
from zmq.utils import z85

from maru_core.errors import ConfigError
from maru_core.settings import Settings

T = TypeVar("T")

#: What a name or a tenant may be: it becomes part of file names, log lines and labels of metrics.
NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEYGEN: Final = "make one with: maru-server keygen --out DIR"
_FILES: Final = "give a file that this user can read; maru-server keygen makes it"
#: Z85 of a 32 byte key.
_KEY_CHARACTERS: Final = 40


class KeyPair(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of a key file."""

    name: str
    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair(name={self.name!r}, public={self.public!r})"  # never the secret: this ends up in logs

    @classmethod
    def generate(cls, name: str) -> KeyPair:
        """A new pair.

        Raises:
            ConfigError: the name cannot be used, or libzmq was built without CURVE.
        """
        check_name(name, "name")
        check_curve()
        public, secret = zmq.curve_keypair()
        return cls(name=name, public=public.decode(), secret=secret.decode())

    @classmethod
    def read(cls, path: Path, what: str) -> KeyPair:
        """Read a key file that only its owner can read.

        Args:
            what: the option or variable that named the file, for errors.
        Raises:
            ConfigError: it cannot be read, others can read it, or it is not a key file.
        """
        check_curve()
        raw = read_private(path, what)
        pair = parse(raw, cls, f"{what} is {path}")
        if (
            not is_key(pair.public)
            or not is_key(pair.secret)
            or zmq.curve_public(pair.secret.encode()) != pair.public.encode()
        ):
            raise ConfigError(f"{what} is {path}, whose public and secret do not belong together: {_KEYGEN}")
        return pair

    def write(self, path: Path, *, force: bool) -> None:
        """Write the key file, readable by its owner alone.

        Raises:
            ConfigError: there is one already and ``force`` is not set, or it cannot be written.
        """
        heading = "# A Maru key. Keep it secret: whoever has it can pose as its owner. Hand out the .pub file instead."
        text = f'{heading}\nname = "{self.name}"\npublic = "{self.public}"\nsecret = "{self.secret}"\n'
        write_file(path, text, 0o600, force=force)

    def write_public(self, path: Path, *, force: bool) -> None:
        """Write what others may know of it. Raises as :meth:`write` does."""
        text = f'# The public half of a Maru key.\nname = "{self.name}"\npublic = "{self.public}"\n'
        write_file(path, text, 0o644, force=force)


class _PublicKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    public: str
    secret: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ClientKeys:
    """What a client proves itself with, and recognises its server by."""

    pair: KeyPair
    server: str  # public key, Z85

    @classmethod
    def load(
        cls, client_key: str, server_key: str, *, names: tuple[str, str] = ("client_key", "server_key")
    ) -> ClientKeys:
        """Read the files.

        Args:
            client_key: path of this client's key file.
            server_key: the server's public key, or path of the file that has it.
            names: what these two are called where they were set, for errors.
        Raises:
            ConfigError: one of them cannot be used; the message says which, and what to do.
        """
        return cls(KeyPair.read(Path(client_key).expanduser(), names[0]), read_public(server_key, names[1]))

    @classmethod
    def find(
        cls, settings: Settings, client_key: str | None = None, server_key: str | None = None
    ) -> ClientKeys | None:
        """The keys that are configured, or None. What is handed in comes before the environment.

        Raises:
            ConfigError: only one of the two is there, or one cannot be used.
        """
        ours = "client_key" if client_key is not None else "MARU_CLIENT_KEY"
        theirs = "server_key" if server_key is not None else "MARU_SERVER_KEY"
        client_key = settings.client_key if client_key is None else client_key
        server_key = settings.server_key if server_key is None else server_key
        if client_key is None and server_key is None:
            return None
        if client_key is None:
            raise ConfigError(
                f"{theirs} is set and MARU_CLIENT_KEY (client_key) is not: set it to the path of this client's key file; {_KEYGEN} "
                "--name NAME"
            )
        if server_key is None:
            raise ConfigError(
                f"{ours} is set and MARU_SERVER_KEY (server_key) is not: set it to the server's public key, or to the path of its "
                "server.pub"
            )
        return cls.load(client_key, server_key, names=(ours, theirs))

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Set the keys of a client's socket, before it connects."""
        socket.curve_serverkey = self.server.encode()
        socket.curve_publickey = self.pair.public.encode()
        socket.curve_secretkey = self.pair.secret.encode()


def hint(endpoints: str, keys: ClientKeys | None) -> str:
    """What to look at where no server answers: a handshake that fails over keys is silent on this side.

    Args:
        endpoints: of the server, separated by commas.
    """
    if keys is not None:
        return (
            f"; this client uses keys, and a server that has none, has others, or does not list {keys.pair.name!r} in its clients.toml "
            "does not answer: its log says which"
        )
    hosts = [
        endpoint.strip().removeprefix("tcp://").rpartition(":")[0]
        for endpoint in endpoints.split(",")
        if "tcp://" in endpoint
    ]
    if not all(map(is_loopback, hosts)):
        return (
            "; this client has no keys (MARU_CLIENT_KEY and MARU_SERVER_KEY), and a server that other machines reach answers none "
            "without, unless it runs with --insecure"
        )
    return ""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        # A wildcard, an interface, or a name that may resolve to anything.
        return False


# ---------------------------------------------------------------- single keys


def is_key(text: str) -> bool:
    """Whether this is a key in Z85."""
    if len(text) != _KEY_CHARACTERS:
        return False
    try:
        return len(z85.decode(text.encode("ascii"))) == 32
    except Exception:
        # It raises whatever comes up: KeyError, struct.error, UnicodeEncodeError, ...
        return False


def read_public(given: str, what: str) -> str:
    """A public key that is given as itself, or as the path of a file that has it.

    Raises:
        ConfigError: it is neither, or the file has a secret in it.
    """
    check_curve()
    path = Path(given).expanduser()
    # Z85 has slashes and dots: what is a file is taken for one first.
    try:
        there = path.is_file()
    except (OSError, ValueError):
        there = False
    if not there:
        if is_key(given):
            return given
        raise ConfigError(
            f"{what} is {given!r}: give a public key of {_KEY_CHARACTERS} characters, or the path of a file that has it (server.pub, "
            "which maru-server keygen writes)"
        )
    found = parse(read_bytes(path, what), _PublicKey, f"{what} is {path}")
    if found.secret is not None:
        raise ConfigError(
            f"{what} is {path}, which has a secret key in it: give the public file beside it ({path.with_suffix('.pub').name}), and "
            "keep the secret one where it was made"
        )
    if not is_key(found.public):
        raise ConfigError(f"{what} is {path}, whose public is no key: copy the file from the server again")
    return found.public


def check_name(name: str, what: str) -> None:
    """Refuse names that cannot be part of file names and log lines.

    Raises:
        ConfigError: with the name and what names may be.
    """
    if not NAME_PATTERN.fullmatch(name):
        raise ConfigError(f"{what} is {name!r}: give 1 to 64 letters, digits, dots, hyphens or underscores")


def check_curve() -> None:
    """
    Raises:
        ConfigError: libzmq was built without CURVE, so that there is no way to use keys.
    """
    if not zmq.has("curve"):
        raise ConfigError(
            "this build of pyzmq has no CURVE: install pyzmq's own wheel (pip install --force-reinstall pyzmq)"
        )


# ---------------------------------------------------------------- files


def read_bytes(path: Path, what: str) -> bytes:
    """
    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{what} is {path}, which cannot be read ({error.strerror}): {_FILES}") from error


def read_private(path: Path, what: str) -> bytes:
    """Read a file that holds a secret, unless others can read it too.

    The rule is libpq's for its key files: 0600 or less; root's may be readable by a group (0640), as secrets are that
    Kubernetes mounts.

    Raises:
        ConfigError: it cannot be read, or others can read it.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            open_to = 0o037 if status.st_uid == 0 else 0o077
            if stat.S_ISREG(status.st_mode) and status.st_mode & open_to:
                raise ConfigError(
                    f"{what} is {path}, which others can read or write (mode {stat.S_IMODE(status.st_mode):04o}): chmod 600 {path}, "
                    "and make a new key if someone may have read it"
                )
            return file.read(1 << 16)
    except OSError as error:
        raise ConfigError(f"{what} is {path}, which cannot be read ({error.strerror}): {_FILES}") from error


def parse(raw: bytes, kind: type[T], where: str) -> T:
    """TOML of a known shape.

    Args:
        where: begins the error: "--keys is /etc/maru/server.key".
    Raises:
        ConfigError: what is wrong, with the entry that it is in.
    """
    try:
        return msgspec.convert(tomllib.loads(raw.decode()), kind)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{where}, which does not fit: {error}; see docs/security.md for what belongs there"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{where}, which is not TOML ({error}): see docs/security.md for what belongs there"
        ) from error


def write_file(path: Path, text: str, mode: int, *, force: bool) -> None:
    """Write a file as a whole: it is there with its final mode and contents, or not at all.

    Raises:
        ConfigError: it is there already and ``force`` is not set, or it cannot be written.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            with os.fdopen(descriptor, "w") as file:
                os.fchmod(file.fileno(), mode)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if force:
                draft.replace(path)
            else:
                os.link(draft, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                draft.unlink()
    except FileExistsError as error:
        raise ConfigError(f"{path} is there already: give --force to replace it, or another name") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): give a directory that you own") from error
