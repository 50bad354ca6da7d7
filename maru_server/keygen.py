"""``maru-server keygen``: key files for the server and its clients, and the list of clients that may connect.

Without ``--name`` it makes the server's pair, ``server.key`` and ``server.pub``; with it a client's, ``NAME.key`` and
``NAME.pub``, and an entry in ``clients.toml`` (see :mod:`maru_server.trust`). What is there already stays unless
``--force`` is given.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from maru_core.errors import ConfigError
from maru_core.keys import KeyPair, check_name, read_bytes, write_file
from maru_server.trust import CLIENTS_NAME, Client, parse_clients

SERVER_NAME: Final = "server"
_HEADING: Final = "# Who may use the server, one [[client]] each. The server reads this again when it changes: remove an entry to revoke a key.\n"


def keygen(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory for the files; made if it is not there (mode 0700).")
    ],
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Make a client's key of this name, and list it in DIR/clients.toml."),
    ] = None,
    tenant: Annotated[
        str, typer.Option(metavar="TENANT", help="Whose cache the client shares: tenants never see each other's pages.")
    ] = "",
    operator: Annotated[
        bool, typer.Option("--operator", help="The client may also pin, evict, clear and look at all tenants.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the key that is there.")] = False,
) -> None:
    """Make a key pair: the server's, or with --name a client's.

    Example: maru-server keygen --out /etc/maru && maru-server keygen --out /etc/maru --name node-a --tenant search

    Then: maru-server --keys /etc/maru/server.key --clients /etc/maru/clients.toml --pool … --bind tcp://0.0.0.0:5757, and
    on the client MARU_CLIENT_KEY=node-a.key MARU_SERVER_KEY=server.pub.
    """
    try:
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out is {out}, which cannot be made ({error.strerror}): give a directory") from error
    if name is None:
        if tenant or operator:
            raise ConfigError("--tenant and --operator are for a client's key: give --name NAME with them")
        _make(out, SERVER_NAME, force=force)
        print(
            f"{out / SERVER_NAME}.key  for maru-server --keys; stays here\n{out / SERVER_NAME}.pub  for every client (MARU_SERVER_KEY)"
        )
        return
    check_name(name, "--name")
    if name == SERVER_NAME:
        raise ConfigError(f"--name is {name!r}, which is the server's own: give another, or none for the server's key")
    if tenant:
        check_name(tenant, "--tenant")
    _make_client(out, Client(name=name, public="", tenant=tenant, operator=operator), force=force)
    print(
        f"{out / name}.key  for that client alone (MARU_CLIENT_KEY)\n{out / CLIENTS_NAME}  lists it, for maru-server --clients"
    )


def _make(out: Path, name: str, *, force: bool) -> KeyPair:
    pair = KeyPair.generate(name)
    secret, public = out / f"{name}.key", out / f"{name}.pub"
    for path in (secret, public):
        # Before anything is written. A public key alone is that of a client which keeps its secret to itself.
        if path.exists() and not force:
            raise ConfigError(f"{path} is there already: give --force to replace it, or another name")
    pair.write(secret, force=force)
    pair.write_public(public, force=force)
    return pair


def _make_client(out: Path, client: Client, *, force: bool) -> None:
    path = out / CLIENTS_NAME
    text = read_bytes(path, "--out").decode() if path.exists() else _HEADING
    listed = {entry.name: entry for entry in parse_clients(text.encode(), f"{path}")}
    before = listed.get(client.name)
    if before is not None:
        if not force:
            raise ConfigError(
                f"{path} lists {client.name!r} already: give --force to replace its key, or another --name"
            )
        if (before.tenant, before.operator) != (client.tenant, client.operator):
            raise ConfigError(
                f"{path} lists {client.name!r} with tenant {before.tenant!r} and operator {str(before.operator).lower()}: give the "
                "same, or change the entry there first"
            )
    pair = _make(out, client.name, force=force)
    if before is not None:
        # In place: the file may have been written by hand, with comments.
        text = text.replace(before.public, pair.public)
    else:
        text += (
            f'\n[[client]]\nname = "{client.name}"\npublic = "{pair.public}"\ntenant = "{client.tenant}"\n'
            f"operator = {str(client.operator).lower()}\n"
        )
    write_file(path, text, 0o644, force=True)
