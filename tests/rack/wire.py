"""The rack's network: one process's switch between guests, over QEMU's socket framing. Cables can be pulled, bytes are counted."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading

#: QEMU's framing of a stream: a frame's length, big-endian, before each.
_LENGTH = struct.Struct(">I")
#: What waits for a guest that does not read; frames beyond are lost, as in any switch.
_QUEUE_BYTES = 1 << 20


class _Port:
    def __init__(self, name: str, end: socket.socket) -> None:
        self.name = name
        self.end = end
        self.received = bytearray()
        self.queue = bytearray()
        self.connected = True
        #: Bytes after which its cable comes loose.
        self.until: float = float("inf")


class Switch:
    """Learns which address is behind which port; floods what it does not know."""

    def __init__(self) -> None:
        self._ports: dict[str, _Port] = {}
        self._behind: dict[bytes, _Port] = {}
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._closed = False
        #: Bytes of frames that came from each guest and were passed on.
        self.carried: dict[str, int] = {}
        self._thread = threading.Thread(target=self._run, name="rack switch", daemon=True)
        self._thread.start()

    def plug(self, name: str) -> socket.socket:
        """A new port; the other end is for QEMU's ``-netdev socket,fd=``, and the caller's to close."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        port = _Port(name, ours)
        with self._lock:
            self._ports[name] = port
            self.carried.setdefault(name, 0)
            self._selector.register(ours, selectors.EVENT_READ, port)
        self._wake.send(b"x")
        return theirs

    def connect(self, name: str, connected: bool) -> None:
        """Pull a guest's cable, or put it back. The guest does not notice its carrier."""
        with self._lock:
            self._ports[name].connected = connected

    def cut_after(self, name: str, nbytes: int) -> None:
        """Pull a guest's cable once it has sent so many bytes more."""
        with self._lock:
            self._ports[name].until = self.carried[name] + nbytes

    def is_connected(self, name: str) -> bool:
        return self._ports[name].connected

    def close(self) -> None:
        self._closed = True
        self._wake.send(b"x")
        self._thread.join(10)
        with self._lock:
            for port in self._ports.values():
                port.end.close()
        self._wake.close()
        self._woken.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._closed:
            for key, events in self._selector.select():
                if key.data is None:
                    self._woken.recv(4096)
                    continue
                with self._lock:
                    if events & selectors.EVENT_WRITE:
                        self._send(key.data)
                    if events & selectors.EVENT_READ:
                        self._receive(key.data)

    def _receive(self, port: _Port) -> None:
        try:
            data = port.end.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:  # that guest is gone
            self._selector.unregister(port.end)
            port.connected = False
            return
        port.received += data
        start = 0
        while len(port.received) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(port.received, start)
            end = start + _LENGTH.size + length
            if len(port.received) < end:
                break
            self._pass_on(port, bytes(port.received[start:end]))
            start = end
        del port.received[:start]

    def _pass_on(self, port: _Port, framed: bytes) -> None:
        if not port.connected:
            return
        to, source = framed[4:10], framed[10:16]
        self._behind[source] = port
        self.carried[port.name] += len(framed)
        if self.carried[port.name] > port.until:
            port.connected, port.until = False, float("inf")
        known = self._behind.get(to)
        for other in [known] if known is not None else list(self._ports.values()):
            if other is not port and other.connected and len(other.queue) < _QUEUE_BYTES:
                other.queue += framed
                self._send(other)

    def _send(self, port: _Port) -> None:
        with contextlib.suppress(BlockingIOError):
            while port.queue:
                try:
                    sent = port.end.send(port.queue)
                except (BrokenPipeError, ConnectionResetError):
                    port.queue.clear()
                    port.connected = False
                    return
                del port.queue[:sent]
        if port.connected:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if port.queue else 0)
            self._selector.modify(port.end, wanted, port)
