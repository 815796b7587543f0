"""A slow service that a server asks: one line per request, the milliseconds until it is answered by one line."""

from __future__ import annotations

import socketserver
import sys
import time


class Handler(socketserver.StreamRequestHandler):
    """One connection."""

    disable_nagle_algorithm = True

    def handle(self) -> None:
        """Answer every line after its time."""
        for line in self.rfile:
            time.sleep(float(line) / 1000)
            self.wfile.write(b"done\n")


def main() -> None:
    """Say the port, and serve until killed."""
    socketserver.ThreadingTCPServer.daemon_threads = True
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        print(server.server_address[1], flush=True)
        sys.stdout.close()
        server.serve_forever()


if __name__ == "__main__":
    main()
