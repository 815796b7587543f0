"""A server whose own threads outnumber its one CPU: a pool of hashing threads beside the one that answers."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

RIVALS = 3
BLOCK = b"x" * (4 << 20)  # hashed without the interpreter lock


class Handler(BaseHTTPRequestHandler):
    """Answers after some 10 ms of hashing."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        for _ in range(4):
            hashlib.sha256(BLOCK).digest()
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a log line would be another cause."""


def burn() -> None:
    while True:
        hashlib.sha256(BLOCK).digest()


def main() -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    server = HTTPServer(("127.0.0.1", 0), Handler)
    for _ in range(RIVALS):
        threading.Thread(target=burn, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()
