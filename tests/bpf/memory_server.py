"""A server that works beside its memory limit: ``python -m tests.bpf.memory_server``, which prints its port.

``/v1/keep/MIB`` fills so much fresh memory and keeps the last RING_MIB of it, whose older part must be swapped out;
``/v1/child`` asks a child process that takes more than the limit; ``/v1/die`` takes it itself.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from collections import deque
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

RING_MIB = 160
BEYOND_MIB = 512
#: What the child does: the OOM killer is to choose it, not its parent.
CHILD = f"""\
import mmap
open("/proc/self/oom_score_adj", "w").write("1000")
memory = mmap.mmap(-1, {BEYOND_MIB} << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, len(memory), mmap.PAGESIZE):
    memory[at] = 1
print("done")
"""


def fill(mib: int, block: bytes) -> mmap.mmap:
    """Return fresh private memory, filled without holding the GIL."""
    memory = mmap.mmap(-1, mib << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.c_char.from_buffer(memory)
    for at in range(mib):
        ctypes.memmove(ctypes.addressof(start) + (at << 20), block, 1 << 20)
    return memory


class Handler(BaseHTTPRequestHandler):
    """Answers when the memory is there."""

    protocol_version = "HTTP/1.1"
    ring: ClassVar[deque[mmap.mmap]] = deque()
    block = os.urandom(1 << 20)

    def do_GET(self) -> None:
        status, parts = 200, self.path.split("/")
        if parts[2] == "keep":
            mib = int(parts[3])
            self.ring.append(fill(mib, self.block))
            while len(self.ring) * mib > RING_MIB:
                self.ring.popleft().close()
        elif parts[2] == "child":
            done = subprocess.run(
                [sys.executable, "-S", "-E", "-c", CHILD], stdout=subprocess.PIPE, check=False
            )
            status = 200 if done.stdout else 500
        elif parts[2] == "die":
            self.ring.append(fill(BEYOND_MIB, self.block))
        self.send_response(status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a log line would be another cause."""


if __name__ == "__main__":
    server = HTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
