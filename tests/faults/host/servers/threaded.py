"""A server with a thread per connection, out of a bounded pool. Same interface as ``http``."""

from __future__ import annotations

import argparse
import json
import queue
import socket
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.demo.procs import set_name
from tests.demo.server import generate
from tests.faults.host.servers.control import PATH, Control
from tests.faults.host.servers.http import COMPLETIONS, listen, log, padded

CONTROL = Control()


class Handler(BaseHTTPRequestHandler):
    """One connection. Writes are not buffered: each chunk leaves when it is made."""

    protocol_version = "HTTP/1.1"
    timeout = 600

    def do_GET(self) -> None:
        """Answer a health check, or what a fault answers."""
        route = CONTROL.route(self.path)
        if route is not None:
            self._answer(200, route())
        else:
            self._answer(200 if self.path == "/healthz" else 404)

    def do_POST(self) -> None:
        """Complete, or switch a fault."""
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == PATH:
            self._answer(CONTROL.switch(body))
        elif self.path == COMPLETIONS:
            self._complete(json.loads(body))
        else:
            self._answer(404)

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _complete(self, asked: dict[str, Any]) -> None:
        tokens, least = int(asked.get("max_tokens", 8)), int(asked.get("chunk_bytes", 0))
        log(f"request max_tokens={tokens}")
        CONTROL.on_worker()
        for index in range(tokens):
            chunk = generate(index)
            if index == 0:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
            log(f"chunk index={index}")
            self._chunk(padded(chunk, least))
        self._chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: it has its own log lines."""


class Server:
    """What a handler wants of a server."""

    def __init__(self, address: Any) -> None:
        self.server_address = address


Accepted = tuple[socket.socket, Any]


def serve(accepted: queue.SimpleQueue[Accepted], number: int, server: Any) -> None:
    """Take connections one after the other, each until it ends."""
    set_name(f"host-conn-{number}")
    while True:
        connection, address = accepted.get()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            Handler(connection, address, server)
        except OSError:
            pass  # the client left
        finally:
            connection.close()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--workers", type=int, default=32, help="connections at the same time")
    parser.add_argument("--backlog", type=int, default=128)
    parser.add_argument("--send-buffer", type=int, default=0)
    args = parser.parse_args()
    set_name("host-server")
    listener = listen(args.host, args.port, args.backlog, args.send_buffer)
    accepted: queue.SimpleQueue[Accepted] = queue.SimpleQueue()
    server = Server(listener.getsockname())
    for number in range(args.workers):
        threading.Thread(target=serve, args=(accepted, number, server), daemon=True).start()
    while True:
        accepted.put(listener.accept())


if __name__ == "__main__":
    main()
