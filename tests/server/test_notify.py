"""systemd is told when the server serves, and not before."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from maru_core.session import Session
from maru_server.notify import notify_ready
from support import ServerProcess


@pytest.mark.parametrize("abstract", [False, True])
def test_a_server_says_when_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool) -> None:
    address = f"@maru-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("\0" + address[1:] if abstract else address)
        systemd.settimeout(180)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        server = ServerProcess(tmp_path, forked=False)
        try:
            server.start()
            assert systemd.recv(100) == b"READY=1"
            session = Session(server.endpoint, name="test", timeout_s=60)
            session.stats()
            session.close()
        finally:
            server.remove()
        # A server that cannot serve never says that it does.
        assert server.process is None
        monkeypatch.setenv("MARU_LOG_LEVEL", "error")
        server = ServerProcess(tmp_path, bind="tcp://203.0.113.1:7878")
        with pytest.raises(AssertionError, match="ended at its start"):
            server.start()
        server.remove()
        systemd.setblocking(False)
        with pytest.raises(BlockingIOError):
            systemd.recv(100)


@pytest.mark.parametrize("address", ["", "relative", "/nowhere/at/all"])
def test_nobody_to_be_told_is_no_error(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    notify_ready()
