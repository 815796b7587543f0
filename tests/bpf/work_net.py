"""Workloads of the network, in a namespace of their own; what they do is counted. See ``workloads``."""

from __future__ import annotations

import ctypes
import select
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.bpf.work_sched import Work
from tests.faults.host.netdrop import counters

CLONE_NEWNET = 0x40000000
HOSTS = {"4": (socket.AF_INET, "127.0.0.1"), "6": (socket.AF_INET6, "::1")}


def alone() -> None:
    """Move this process to a network namespace of its own, with nothing but a loopback device."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["/usr/sbin/ip", "link", "set", "lo", "up"], check=True)


def _listener(version: str, backlog: int = 64) -> socket.socket:
    family, host = HOSTS[version]
    listener = socket.socket(family)
    listener.bind((host, 0))
    listener.listen(backlog)
    return listener


def connects(version: str, count: str) -> Work:
    """Connect *count* times, and once to a port where nobody listens."""
    alone()
    listener, closed = _listener(version), _listener(version)
    refused = closed.getsockname()[1]
    closed.close()
    yield {"port": listener.getsockname()[1], "refused": refused}
    ports = []
    for _ in range(int(count)):
        with socket.create_connection(listener.getsockname()[:2]) as end:
            ports.append(end.getsockname()[1])
            listener.accept()[0].close()
    try:
        socket.create_connection((HOSTS[version][1], refused))
    except ConnectionRefusedError:
        pass
    yield {"ports": ports}


@contextmanager
def _pair(listener: socket.socket) -> Iterator[tuple[socket.socket, socket.socket]]:
    near = socket.create_connection(listener.getsockname()[:2])
    far, _ = listener.accept()
    with near, far:
        yield near, far


def transfer(size: str) -> Work:
    """Send so many bytes to itself, and tell what the namespace counted."""
    alone()
    listener = _listener("4")
    with _pair(listener) as (near, far):
        yield {"port": listener.getsockname()[1], "near": near.getsockname()[1]}
        before = counters()["RetransSegs"]
        thread = threading.Thread(target=near.sendall, args=(bytes(int(size)),))
        thread.start()
        left = int(size)
        while left:
            left -= len(far.recv(65536))
        thread.join()
        yield {"retransmits": counters()["RetransSegs"] - before}


def one_syn(_: str = "") -> Work:
    """Connect once; the SYN may be lost."""
    alone()
    listener = _listener("4")
    yield {"port": listener.getsockname()[1]}
    with _pair(listener):
        yield {}


def nagle(count: str, nodelay: str) -> Work:
    """Make *count* requests of two small writes each; the server's kernel delays its ACKs."""
    alone()
    listener = _listener("4")
    with _pair(listener) as (near, far):
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, int(nodelay))

        def serve() -> None:
            for _ in range(int(count) + 1):
                got = b""
                while len(got) < 2:
                    got += far.recv(2 - len(got))
                far.send(b"r")

        thread = threading.Thread(target=serve)
        thread.start()
        near.send(b"ab")  # from here on the server's side takes it for a conversation, and delays its ACKs
        near.recv(1)
        yield {"port": listener.getsockname()[1]}
        before = counters()["DelayedACKs"]
        for _ in range(int(count)):
            near.send(b"a")
            near.send(b"b")
            near.recv(1)
        thread.join()
        yield {"delayed": counters()["DelayedACKs"] - before}


def crowd(clients: str, backlog: str) -> Work:
    """Have *clients* connect to a listener that accepts none of them, until its queue overflows."""
    alone()
    listener = _listener("4", int(backlog))
    yield {"port": listener.getsockname()[1]}
    ends = []
    for _ in range(int(clients)):
        end = socket.socket()
        end.setblocking(False)
        end.connect_ex(listener.getsockname())
        ends.append(end)
    connected = sum(bool(select.select([], [end], [], 0)[1]) for end in ends)
    yield {"connected": connected, "drops": counters()["ListenDrops"]}


def dns(count: str) -> Work:
    """Ask a resolver on port 53 *count* times; it answers all but the last."""
    alone()
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 53))

    def serve() -> None:
        for _ in range(int(count) - 1):
            _, peer = server.recvfrom(512)
            server.sendto(b"answer", peer)

    threading.Thread(target=serve, daemon=True).start()
    end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    end.connect(("127.0.0.1", 53))
    end.settimeout(5)
    other = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    other.connect(("127.0.0.1", 54))
    yield {"lport": end.getsockname()[1]}
    for i in range(int(count)):
        end.send(b"question")
        if i < int(count) - 1:
            end.recv(512)
    other.send(b"no question")
    yield {}
