"""A server that does, in a request, what Python servers do when they should not: collect, or run a compiler."""

from __future__ import annotations

import gc
import subprocess
import tempfile
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

HEAP = 800_000
FUNCTION = "double f%d(double *x) { double s = 0; for (int i = 0; i < 999; i++) s += x[i] * %d; return s; }\n"


class Handler(BaseHTTPRequestHandler):
    """Answers after a collection, or a compilation, of some 50 ms."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/v1/collect":
            gc.collect()
        else:
            with tempfile.TemporaryDirectory() as folder:
                source = Path(folder, "kernel.c")
                source.write_text("".join(FUNCTION % (n, n) for n in range(20)))
                subprocess.run(["cc", "-O3", "-c", "-o", f"{folder}/kernel.o", source], check=True)
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a log line would be another cause."""


def main() -> None:
    heap = [[number] for number in range(HEAP)]
    server = HTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
    assert heap


if __name__ == "__main__":
    main()
