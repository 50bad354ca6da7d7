"""Key files and the list of clients: how they are made, and what is refused of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from maru_core.errors import ConfigError
from maru_core.keys import ClientKeys, KeyPair
from maru_server.keygen import keygen
from maru_server.trust import Trust, parse_clients
from tests.server.test_cli import assert_one_line, run


def test_keygen_makes_files_that_only_their_owner_reads(tmp_path: Path) -> None:
    out = tmp_path / "keys"
    keygen(out)
    keygen(out, name="node-a", tenant="search")
    keygen(out, name="root", operator=True)
    modes = {path.name: path.stat().st_mode & 0o777 for path in out.iterdir()}
    assert modes == {
        "server.key": 0o600, "server.pub": 0o644, "node-a.key": 0o600, "node-a.pub": 0o644, "root.key": 0o600,
        "root.pub": 0o644, "clients.toml": 0o644,
    }  # fmt: skip
    assert out.stat().st_mode & 0o777 == 0o700
    for path in out.glob("*.pub"):
        assert "secret" not in path.read_text()
    listed = {client.name: client for client in parse_clients((out / "clients.toml").read_bytes(), "x")}
    assert (listed["node-a"].tenant, listed["node-a"].operator) == ("search", False)
    assert (listed["root"].tenant, listed["root"].operator) == ("", True)
    assert listed["node-a"].public == KeyPair.read(out / "node-a.key", "x").public


def test_keygen_replaces_nothing_unless_told(tmp_path: Path) -> None:
    keygen(tmp_path)
    keygen(tmp_path, name="a", tenant="red")
    clients = tmp_path / "clients.toml"
    clients.write_text("# by hand\n" + clients.read_text())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for again in (lambda: keygen(tmp_path), lambda: keygen(tmp_path, name="a", tenant="red")):
        with pytest.raises(ConfigError, match="--force"):
            again()
    with pytest.raises(ConfigError, match="lists 'a' with tenant 'red'"):
        keygen(tmp_path, name="a", tenant="blue", force=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    keygen(tmp_path, name="a", tenant="red", force=True)
    entries = parse_clients(clients.read_bytes(), "x")
    assert [entry.name for entry in entries] == ["a"]
    assert entries[0].public == KeyPair.read(tmp_path / "a.key", "x").public
    assert entries[0].public.encode() not in before["a.key"]
    assert clients.read_text().startswith("# by hand\n")


def test_keygen_leaves_a_public_key_alone_that_came_from_elsewhere(tmp_path: Path) -> None:
    KeyPair.generate("a").write_public(tmp_path / "a.pub", force=False)
    before = (tmp_path / "a.pub").read_bytes()
    with pytest.raises(ConfigError, match=r"a\.pub is there already.*--force"):
        keygen(tmp_path, name="a")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a.pub": before}


@pytest.mark.parametrize("name", ["", "../a", "a/b", "a b", "-a", "a\n", "ä", "x" * 65, "server"])
def test_keygen_refuses_names_that_are_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--name is"):
        keygen(tmp_path, name=name)
    if name != "server":
        with pytest.raises(ConfigError, match="--tenant is" if name else "--name is"):
            keygen(tmp_path, name="a" if name else "", tenant=name)


def test_keygen_on_the_command_line(tmp_path: Path) -> None:
    done = run("keygen", "--out", str(tmp_path / "keys"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "server.pub" in done.stdout
    assert_one_line(run("keygen", "--out", str(tmp_path / "keys")), "server.key is there already", "--force")
    assert_one_line(run("keygen", "--out", str(tmp_path), "--operator"), "--name")
    assert_one_line(run("--pool", "shm://x", "keygen", "--out", str(tmp_path)), "leave them out")
    secret = KeyPair.read(tmp_path / "keys" / "server.key", "x").secret
    assert secret not in done.stdout


def test_a_key_that_others_can_read_is_refused_with_the_cure(tmp_path: Path) -> None:
    keygen(tmp_path)
    keygen(tmp_path, name="a")
    path = tmp_path / "a.key"
    for mode in (0o644, 0o604, 0o620, 0o602):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=rf"MARU_CLIENT_KEY is {path}.*mode {mode:04o}\): chmod 600 {path}"):
            ClientKeys.load(str(path), str(tmp_path / "server.pub"), names=("MARU_CLIENT_KEY", "MARU_SERVER_KEY"))
    path.chmod(0o400)
    ClientKeys.load(str(path), str(tmp_path / "server.pub"))
    # A group may read it only if it is root's, as secrets are that are mounted into containers.
    path.chmod(0o440)
    if os.getuid() == 0:
        ClientKeys.load(str(path), str(tmp_path / "server.pub"))
        os.chown(path, 65534, 65534)
    with pytest.raises(ConfigError, match="chmod 600"):
        ClientKeys.load(str(path), str(tmp_path / "server.pub"))


def test_files_that_are_no_keys_are_refused_by_name(tmp_path: Path) -> None:
    keygen(tmp_path)
    keygen(tmp_path, name="a")
    good, server = tmp_path / "a.key", str(tmp_path / "server.pub")
    other = KeyPair.generate("b")
    bad = tmp_path / "bad.key"
    for text, part in (
        ("nonsense", "is not TOML"),
        ('name = "a"\n', "public"),
        (good.read_text() + "colour = 1\n", "colour"),
        (good.read_text().replace(KeyPair.read(good, "x").secret, other.secret), "do not belong together"),
        (good.read_text().replace(KeyPair.read(good, "x").secret, "short"), "do not belong together"),
    ):
        bad.write_text(text)
        bad.chmod(0o600)
        with pytest.raises(ConfigError) as refused:
            ClientKeys.load(str(bad), server)
        assert str(bad) in str(refused.value)
        assert part in str(refused.value)
    with pytest.raises(ConfigError, match=r"no/such.*cannot be read"):
        ClientKeys.load("/no/such", server)
    with pytest.raises(ConfigError, match=r"has a secret key in it.*server\.pub"):
        ClientKeys.load(str(good), str(tmp_path / "server.key"))
    with pytest.raises(ConfigError, match="server_key is 'nonsense'"):
        ClientKeys.load(str(good), "nonsense")
    assert ClientKeys.load(str(good), KeyPair.read(tmp_path / "server.key", "x").public) == ClientKeys.load(
        str(good), server
    )
    assert KeyPair.read(good, "x").secret not in repr(ClientKeys.load(str(good), server))


def test_a_list_of_clients_that_is_wrong_names_the_entry(tmp_path: Path) -> None:
    keygen(tmp_path)
    keygen(tmp_path, name="a", tenant="red")
    keygen(tmp_path, name="b", tenant="blue")
    clients = tmp_path / "clients.toml"
    good = clients.read_text()
    a, b = (KeyPair.read(tmp_path / f"{name}.key", "x") for name in "ab")
    for text, *parts in (
        (good + "x", "not TOML"),
        (good.replace('name = "b"', 'name = "a"'), "client 2 ('a')", "another entry has that name"),
        (good.replace(b.public, a.public), "client 2 ('b')", "the key of 'a'"),
        (good.replace(b.public, "short"), "client 2 ('b')", "no key", ".pub"),
        (good.replace("operator = false", 'operator = "yes"'), "client 1 ('a')", "bool"),
        (good.replace('tenant = "blue"', 'tenent = "blue"'), "client 2 ('b')", "tenent"),
        (good.replace('tenant = "blue"', 'tenant = "b\\nlue"'), "client 2 ('b')", "tenant is"),
        ("client = 1\n", "array"),
        ("[[clients]]\n", "clients"),
    ):
        clients.write_text(text)
        with pytest.raises(ConfigError) as refused:
            Trust.load(str(tmp_path / "server.key"), str(clients))
        for part in (f"--clients is {clients}", *parts):
            assert part in str(refused.value)
    clients.write_text(good)
    clients.chmod(0o646)
    with pytest.raises(ConfigError, match="anybody may write"):
        Trust.load(str(tmp_path / "server.key"), str(clients))
    clients.chmod(0o644)
    assert Trust.load(str(tmp_path / "server.key"), str(clients)) is not None
    clients.write_text("[[clients]]\n")
    options = ("--keys", str(tmp_path / "server.key"), "--clients", str(clients))
    assert_one_line(run("--pool", "shm://x", "--bind", "ipc:///tmp/x", *options), f"--clients is {clients}", "clients")
    assert not Path("/dev/shm/x").exists()


def test_keys_come_from_the_environment_and_the_configuration_goes_before() -> None:
    from maru_core.settings import Settings

    assert ClientKeys.find(Settings.from_environment({})) is None
    only = Settings.from_environment({"MARU_CLIENT_KEY": "/x"})
    assert only.unknown == ()
    with pytest.raises(ConfigError, match="MARU_CLIENT_KEY is set and MARU_SERVER_KEY"):
        ClientKeys.find(only)
    with pytest.raises(ConfigError, match="server_key is set and MARU_CLIENT_KEY"):
        ClientKeys.find(Settings.from_environment({}), server_key="/x")
    both = Settings.from_environment({"MARU_CLIENT_KEY": "/from/environment", "MARU_SERVER_KEY": "/x"})
    with pytest.raises(ConfigError, match="MARU_CLIENT_KEY is /from/environment"):
        ClientKeys.find(both)
    with pytest.raises(ConfigError, match="client_key is /from/config"):
        ClientKeys.find(both, client_key="/from/config")
