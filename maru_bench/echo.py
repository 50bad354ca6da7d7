"""A bare ZeroMQ echo, the yardstick of ``maru-bench metadata``: ROUTER and DEALER, both in Python, nothing decoded.

``python -m maru_bench.echo ENDPOINT`` answers each message with as many bytes as the message's first 8 bytes say.
"""

from __future__ import annotations

import sys
from pathlib import Path

import zmq

from maru_bench.processes import ManagedProcess, python_path
from maru_core.errors import MaruError

_SIZE_BYTES = 8


def serve(endpoint: str) -> None:
    """Answer until the process is ended."""
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(endpoint)
    replies: dict[bytes, bytes] = {}
    while True:
        identity, data = socket.recv_multipart()
        size = data[:_SIZE_BYTES]
        reply = replies.get(size)
        if reply is None:
            reply = replies[size] = bytes(int.from_bytes(size, "little"))
        socket.send_multipart((identity, reply))


class EchoServer:
    """An echo process. A context manager."""

    def __init__(self, directory: Path) -> None:
        self.endpoint = f"ipc://{directory}/echo.sock"
        self._process = ManagedProcess(
            "echo",
            [sys.executable, "-m", "maru_bench.echo", self.endpoint],
            directory / "echo.log",
            env={"PYTHONPATH": python_path()},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> EchoServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stop()


class EchoClient:
    """Talks to an echo. A context manager."""

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        # An echo that does not answer must end the benchmark and not hang it.
        self._socket.rcvtimeo = 30_000
        self._socket.connect(endpoint)
        self._endpoint = endpoint

    @staticmethod
    def request(nbytes: int, reply_bytes: int) -> bytes:
        """A request of ``nbytes`` bytes (at least 8) that is answered with ``reply_bytes``."""
        return reply_bytes.to_bytes(_SIZE_BYTES, "little") + bytes(max(0, nbytes - _SIZE_BYTES))

    def exchange(self, request: bytes) -> bytes:
        """One round trip.

        Raises:
            MaruError: no answer came for long.
        """
        self._socket.send(request)
        try:
            return self._socket.recv()
        except zmq.Again as error:
            raise MaruError(f"the echo at {self._endpoint} does not answer: its log is beside its socket") from error

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def __enter__(self) -> EchoClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


if __name__ == "__main__":
    serve(sys.argv[1])
