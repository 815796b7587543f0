"""Peers of a server in its own network namespace: a service on TCP, or a resolver that takes its time."""

from __future__ import annotations

import argparse
import socket
import socketserver
import struct
import subprocess
import threading
import time

from tests.demo.procs import DemoError, python, spawn

_PORT_53 = 53
_A, _IN = 1, 1


class Service(socketserver.StreamRequestHandler):
    """Answers every line with one byte, at once. Its kernel delays its acknowledgements: it does not ask otherwise."""

    def handle(self) -> None:
        """Answer until the client leaves."""
        for _ in self.rfile:
            self.wfile.write(b"r")


def answer(query: bytes) -> bytes:
    """Return the answer to a DNS query: every name has the address 127.0.0.1 and no other."""
    end = query.index(b"\0", 12) + 5
    question = query[12:end]
    kind = struct.unpack(">H", question[-4:-2])[0]
    found = b"\xc0\x0c" + struct.pack(">HHIH", _A, _IN, 0, 4) + bytes([127, 0, 0, 1]) if kind == _A else b""
    return query[:2] + b"\x81\x80" + struct.pack(">HHHH", 1, 1 if found else 0, 0, 0) + question + found


def resolve(slow_ms: float) -> None:
    """Answer every query after its time."""
    end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    end.bind(("127.0.0.1", _PORT_53))
    print(_PORT_53, flush=True)

    def later(query: bytes, peer: tuple[str, int]) -> None:
        time.sleep(slow_ms / 1000)
        end.sendto(answer(query), peer)

    while True:
        query, peer = end.recvfrom(512)
        threading.Thread(target=later, args=(query, peer), daemon=True).start()


def serve() -> None:
    """Say the port, and serve until killed."""
    socketserver.ThreadingTCPServer.daemon_threads = True
    socketserver.ThreadingTCPServer.request_queue_size = 64
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Service) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()


def start(pid: int, cpu: int, *arguments: object) -> tuple[subprocess.Popen[bytes], int]:
    """Start a peer in the network namespace of *pid*; return it and its port.

    Raises:
        DemoError: it does not start.
    """
    enter = ["nsenter", f"--net=/proc/{pid}/ns/net"]
    process = spawn([*enter, *python("tests.faults.host.netpeer", *arguments)], cpu, stdout=subprocess.PIPE)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise DemoError(f"the peer ended with {process.wait()}")
    return process, int(line)


def main() -> None:
    """Be a service, or with ``--resolver MS`` a resolver."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--resolver", type=float, default=0.0)
    args = parser.parse_args()
    if args.resolver:
        resolve(args.resolver)
    serve()


if __name__ == "__main__":
    main()
