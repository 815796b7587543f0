"""A server that writes a data file through to the disk before it answers, and a neighbour that fills the disk's queue.

``python -m tests.bpf.fsync_server serve FOLDER`` prints its port; ``... fill FILE`` writes until it is killed.
"""

from __future__ import annotations

import mmap
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

RECORD = 1 << 16
FILL_BYTES, FILL_BLOCKS = 8 << 20, 8


class Handler(BaseHTTPRequestHandler):
    """Answers when its record is on the disk."""

    protocol_version = "HTTP/1.1"
    data_fd = -1

    def do_GET(self) -> None:
        os.pwrite(self.data_fd, os.urandom(RECORD), 0)
        os.fsync(self.data_fd)
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a log line would be another cause."""


def serve(folder: Path) -> None:
    Handler.data_fd = os.open(folder / "data.bin", os.O_CREAT | os.O_RDWR)
    server = HTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


def fill(path: Path) -> None:
    block = mmap.mmap(-1, FILL_BYTES)  # aligned, as O_DIRECT wants it
    block.write(os.urandom(FILL_BYTES))
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT)
    at = 0
    while True:
        os.pwrite(fd, block, at * FILL_BYTES)
        at = (at + 1) % FILL_BLOCKS


if __name__ == "__main__":
    {"serve": serve, "fill": fill}[sys.argv[1]](Path(sys.argv[2]))
