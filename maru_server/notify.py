"""Telling systemd that the server serves: its ``sd_notify`` protocol, which is one datagram.

https://www.freedesktop.org/software/systemd/man/latest/sd_notify.html
"""

from __future__ import annotations

import logging
import socket

from maru_core.settings import NOTIFY_SOCKET, notify_socket

log = logging.getLogger("maru.server")


def notify_ready() -> None:
    """Say so to whoever started this process with ``Type=notify``; nothing where nobody asked. Never raises."""
    address = notify_socket()
    if not address.startswith(("/", "@")):
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.connect("\0" + address[1:] if address.startswith("@") else address)
            out.send(b"READY=1")
    except OSError as error:
        log.warning("%s %s could not be told that the server serves (%s)", NOTIFY_SOCKET, address, error.strerror)
