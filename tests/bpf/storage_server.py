"""A server that touches a page, or saves a record, before it answers: ``python -m tests.bpf.storage_server KIND PATH``.

Kinds: ``map`` (a file that is mapped), ``memory`` (private memory), ``log`` (append a line to a file, and fsync it).
Prints its port.
"""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

from tests.faults.host.fault import Inside
from tests.faults.host.saves import Saves
from tests.faults.host.touches import Touches

INSIDES: dict[str, type[Inside]] = {"map": Touches, "memory": Touches, "log": Saves}
INSIDE: Inside


class Handler(BaseHTTPRequestHandler):
    """Answers when it has done so."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        INSIDE.on_worker()
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a log line would be another cause."""


def main() -> None:
    """Serve until killed."""
    global INSIDE
    kind, path = sys.argv[1:]
    INSIDE = INSIDES[kind]()
    size = 1 << 16 if kind == "log" else 8 << 20
    settings = {
        "path": "" if kind == "memory" else path,
        "bytes": size,
        "count": 3,
        "append": True,
        "loop": False,
    }
    INSIDE.start(settings)
    server = HTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
