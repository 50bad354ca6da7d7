"""A proxy for prefill here and decode there: each completion goes to one server for its prompt, then to another for its answer.

    python examples/pd_proxy.py --port 8000 --prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002

Takes vLLM's OpenAI requests with `max_tokens` (`/v1/completions`, `/v1/chat/completions`); everything else goes to the server that
decodes. The first server's answer is one token, which is thrown away: what matters is the KV that it has stored by then. Several
servers may be given on either side; they are used in turn. The standard library alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
CHUNK = 1 << 16


def prefill_body(body: bytes) -> bytes:
    """The same request for one token, which is all that the first server computes beside the prompt."""
    request = json.loads(body)
    request |= {"max_tokens": 1, "stream": False}
    for name in ("stream_options", "max_completion_tokens", "min_tokens"):
        request.pop(name, None)
    return json.dumps(request).encode()


def handler(prefill: list[str], decode: list[str]) -> type[BaseHTTPRequestHandler]:
    turns = threading.Lock()
    first, second = itertools.cycle(prefill), itertools.cycle(decode)

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"  # a streamed answer ends with its connection

        def do_GET(self) -> None:
            self._pass(self._next(second), None)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.path in COMPLETIONS:
                try:
                    with self._open(self._next(first), prefill_body(body)) as answer:
                        answer.read()
                except (OSError, ValueError) as error:
                    # The second one computes what the first one did not.
                    self.log_message("prefill failed: %s", error)
            self._pass(self._next(second), body)

        def _next(self, servers: itertools.cycle[str]) -> str:
            with turns:
                return next(servers)

        def _open(self, server: str, body: bytes | None):  # type: ignore[no-untyped-def]
            headers = {"Content-Type": self.headers.get("Content-Type", "application/json")}
            if "Authorization" in self.headers:
                headers["Authorization"] = self.headers["Authorization"]
            return urllib.request.urlopen(urllib.request.Request(server + self.path, body, headers), timeout=600)

        def _pass(self, server: str, body: bytes | None) -> None:
            try:
                answer = self._open(server, body)
            except urllib.error.HTTPError as error:
                answer = error
            except OSError as error:
                self.send_error(502, f"{server} does not answer: {error}")
                return
            with answer:
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.headers.get("Content-Type", "application/json"))
                self.end_headers()
                while chunk := answer.read1(CHUNK) if hasattr(answer, "read1") else answer.read(CHUNK):
                    self.wfile.write(chunk)
                    self.wfile.flush()

        def log_message(self, format: str, *args: object) -> None:
            print(format % args, flush=True)

    return Proxy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--prefill", action="append", required=True, metavar="URL", help="server that computes prompts; may be repeated"
    )
    parser.add_argument(
        "--decode", action="append", required=True, metavar="URL", help="server that answers; may be repeated"
    )
    options = parser.parse_args()
    ThreadingHTTPServer(("127.0.0.1", options.port), handler(options.prefill, options.decode)).serve_forever()


if __name__ == "__main__":
    main()
