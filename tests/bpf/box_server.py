"""An HTTP server of nothing but the standard library, for any Python from 3.9 on: what runs in a box, see ``box``.

``GET /`` answers at once, after a log line that is flushed to the disk; ``/sleep/S`` and ``/spin/S`` take so long.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SIOCSIFFLAGS, IFF_UP = 0x8914, 1


def loopback_up() -> None:
    """A new network namespace has its loopback down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        fcntl.ioctl(s, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))


def name_thread(name: str) -> None:
    """Name this thread as a debugger sees it; /proc must be that of our PID namespace."""
    with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as f:
        f.write(name)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    log = -1

    def do_GET(self) -> None:
        name_thread("box-worker")
        what, _, seconds = self.path.strip("/").partition("/")
        os.write(self.log, f"{self.path}\n".encode())
        os.fsync(self.log)
        if what == "sleep":
            time.sleep(float(seconds))
        elif what == "spin":
            end = time.thread_time() + float(seconds)
            while time.thread_time() < end:
                pass
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: object) -> None:
        """The log of its own is enough."""


def main() -> None:
    loopback_up()
    name_thread("box-main")
    Handler.log = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    said = {
        "port": server.server_port,
        "pid": os.getpid(),
        "python": list(sys.version_info[:2]),
        "libc": os.confstr("CS_GNU_LIBC_VERSION"),
    }
    print(json.dumps(said), flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
