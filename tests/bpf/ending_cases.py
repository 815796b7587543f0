"""Connections that end in every way, and the requests that each makes: what client and server do, step by step."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.bpf.http import reading, writing

GET = b"GET /a HTTP/1.1\r\nHost: h\r\nX-Request-Id: 7\r\n\r\n"
POST = b"POST /a HTTP/1.1\r\nContent-Length: 100000\r\n\r\n"
EXPECTING = b"POST /a HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
LONG = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\n\r\n"
TCP_USER_TIMEOUT, SO_ATTACH_FILTER = 18, 26

Action = Callable[[socket.socket], None]


def send(data: bytes) -> Action:
    """Send bytes."""
    return lambda s: s.sendall(data)


def read(n: int) -> Action:
    """Read exactly n bytes."""

    def action(s: socket.socket) -> None:
        left = n
        while left:
            got = len(s.recv(left))
            assert got, "the server closed early"
            left -= got

    return action


def read_all(s: socket.socket) -> None:
    """Read until the server closes or resets."""
    with contextlib.suppress(ConnectionError):
        while s.recv(65536):
            pass


def half_close(s: socket.socket) -> None:
    """Send no more."""
    s.shutdown(socket.SHUT_WR)


def pause(s: socket.socket) -> None:
    """Let time pass."""
    time.sleep(0.05)


def by_reset(s: socket.socket) -> None:
    """Have the next close send a reset."""
    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def go_deaf(s: socket.socket) -> None:
    """Drop every packet that comes: the host of the client is gone."""
    code = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF_RET | BPF_K, 0 bytes
    program = struct.pack("HxxxxxxQ", 1, ctypes.addressof(code))
    s.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def list_sockets(_: socket.socket) -> None:
    """Ask the kernel for all TCP sockets of the host, as `ss` does: it gives each a cookie."""
    sock_diag, request_dump, done = 20, 0x301, 3  # linux/sock_diag.h, linux/netlink.h
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as s:  # NETLINK_SOCK_DIAG
        wanted = struct.pack("BBBxI48x", socket.AF_INET, socket.IPPROTO_TCP, 0, 0xFFFFFFFF)
        s.send(struct.pack("IHHII", 16 + len(wanted), sock_diag, request_dump, 1, 0) + wanted)
        kind = 0
        while kind != done:
            kind = struct.unpack_from("H", s.recv(1 << 16), 4)[0]


class Case(NamedTuple):
    """What the client does before it closes, what the server does before it does, and the requests that makes."""

    name: str
    client: list[Action]
    server: list[list[Any]]
    requests: list[tuple[Any, ...]]  # seq, status, outcome, ended_by, head, chunks


def whole(seq: int, status: int = 200, chunks: int = 1, head: str = "whole") -> tuple[Any, ...]:
    """Return a request that was answered."""
    return seq, status, "error" if status >= 400 else "ok", "server", head, chunks


def cut(seq: int, by: str, status: int = 0, chunks: int = 0, head: str = "whole") -> tuple[Any, ...]:
    """Return one that was not."""
    return seq, status, "reset", by, head, chunks


N = len(GET)
WAIT = ["drain"]
CASES = [
    # The client's doing.
    Case("half close, then an answer", [send(GET), half_close, read_all], [reading(N), WAIT, writing(OK)], [whole(0)]),
    Case(
        "half close, then an answer without length",
        [send(GET), half_close, read_all],
        [reading(N), WAIT, writing(UNTIL_CLOSE), writing(b"abc")],
        [whole(0)],
    ),
    Case("close while it waits", [send(GET), pause], [reading(N), WAIT], [cut(0, "client_close")]),
    Case(
        "close while it waits, after somebody has listed all sockets",
        [send(GET), pause, list_sockets],
        [reading(N), WAIT],
        [cut(0, "client_close")],
    ),
    Case(
        "a second request after somebody has listed all sockets",
        [send(GET), read(len(OK)), list_sockets, send(GET), read(len(OK))],
        [reading(N), writing(OK), reading(N), writing(OK), WAIT],
        [whole(0), whole(1)],
    ),
    Case("reset while it waits", [send(GET), pause, by_reset], [reading(N), WAIT], [cut(0, "client_reset")]),
    Case(
        "close in mid-stream",
        [send(GET), read(len(CHUNKED) + 12)],
        [reading(N), writing(CHUNKED), writing(b"1\r\na\r\n"), writing(b"1\r\nb\r\n"), WAIT],
        [cut(0, "client_close", 200, 2)],
    ),
    Case(
        "close in mid-stream, the server goes on",
        [send(GET), read(len(CHUNKED) + 6)],
        [
            reading(N),
            writing(CHUNKED),
            writing(b"1\r\na\r\n"),
            WAIT,
            writing(b"1\r\nb\r\n"),
            ["pause", 0.05],
            writing(b"1\r\nc\r\n"),
        ],
        [cut(0, "client_close", 200, 1)],
    ),
    Case(
        "reset in a response that would have ended with the connection",
        [send(GET), read(len(UNTIL_CLOSE) + 3), by_reset],
        [reading(N), writing(UNTIL_CLOSE), writing(b"abc"), WAIT],
        [cut(0, "client_reset", 200, 1)],
    ),
    Case(
        "reset with bytes that the client has not read",
        [send(GET), read(len(LONG)), pause],
        [reading(N), writing(LONG), writing(b"abc"), WAIT],
        [cut(0, "client_reset", 200, 1)],
    ),
    Case(
        "pipelined requests are pending at the reset",
        [send(GET * 3), read(len(OK)), by_reset],
        [reading(3 * N), writing(OK), WAIT],
        [whole(0), cut(1, "client_reset"), cut(2, "client_reset")],
    ),
    Case(
        "a pipelined request is not read at the reset",
        [send(GET * 2), pause, by_reset],
        [reading(N), ["pause", 0.2]],
        [cut(0, "client_reset"), cut(1, "client_reset", head="unread")],
    ),
    Case(
        "the client is not there any more",
        [send(GET), read(len(CHUNKED)), go_deaf, send(b"x"), lambda s: time.sleep(1.5)],
        [
            reading(N),
            writing(CHUNKED),
            reading(1),
            ["option", socket.IPPROTO_TCP, TCP_USER_TIMEOUT, 300],
            writing(b"1\r\na\r\n"),
            WAIT,
        ],
        [cut(0, "timeout", 200, 1)],
    ),
    # The server's doing.
    Case("close without an answer", [send(GET), read_all], [reading(N)], [cut(0, "server_close")]),
    Case(
        "close in mid-response",
        [send(GET), read_all],
        [reading(N), writing(LONG + b"abc")],
        [cut(0, "server_close", 200, 1)],
    ),
    Case(
        "close in mid-response, pipelined requests pending",
        [send(GET * 2), read_all],
        [reading(2 * N), writing(LONG)],
        [cut(0, "server_close", 200), cut(1, "server_close")],
    ),
    Case("reset without an answer", [send(GET), read_all], [reading(N), ["abort"]], [cut(0, "server_reset")]),
    Case(
        "reset of a response that would have ended with the connection",
        [send(GET), read_all],
        [reading(N), writing(UNTIL_CLOSE), writing(b"abc"), ["abort"]],
        [cut(0, "server_reset", 200, 1)],
    ),
    Case("closed without reading", [send(GET), read_all], [["pause", 0.05]], [cut(0, "server_reset", head="unread")]),
    Case(
        "closed with the next request unread",
        [send(GET), read(len(OK)), send(GET), read_all],
        [reading(N), writing(OK), ["pause", 0.1]],
        [whole(0), cut(1, "server_reset", head="unread")],
    ),
    Case(
        "a response that ends with the connection",
        [send(GET), read_all],
        [reading(N), writing(UNTIL_CLOSE), writing(b"abc")],
        [whole(0)],
    ),
    # Heads that do not come to their end.
    Case(
        "half a head, then a close",
        [send(GET[:30]), pause],
        [reading(30), WAIT],
        [cut(0, "client_close", head="cut")],
    ),
    Case(
        "half a head, then a reset",
        [send(GET[:30]), pause, by_reset],
        [reading(30), WAIT],
        [cut(0, "client_reset", head="cut")],
    ),
    Case(
        "half a head, and the server closes",
        [send(GET[:30]), read_all],
        [reading(30)],
        [cut(0, "server_close", head="cut")],
    ),
    Case(
        "half a head after a whole request",
        [send(GET + GET[:30]), pause],
        [reading(N + 30), writing(OK), WAIT],
        [whole(0), cut(1, "client_reset", head="cut")],
    ),
    Case(
        "half a head that is answered",
        [send(GET[:30]), read_all],
        [reading(30), writing(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")],
        [whole(0, 408, 0, "cut")],
    ),
    Case("less than a method", [send(b"GET"), pause], [reading(3), WAIT], []),
    # Failing in good order.
    *[
        Case(
            f"status {status}",
            [send(GET), read_all],
            [reading(N), writing(b"HTTP/1.1 %d X\r\nContent-Length: 2\r\n\r\nno" % status)],
            [whole(0, status)],
        )
        for status in (400, 404, 429, 500, 503)
    ],
    Case(
        "refused before its body came",
        [send(POST + b"x" * 100), read_all],
        [reading(len(POST) + 9), writing(b"HTTP/1.1 413 X\r\nContent-Length: 0\r\n\r\n")],
        [whole(0, 413, 0)],
    ),
    Case(
        "an expectation that is not met",
        [send(EXPECTING), read_all],
        [reading(len(EXPECTING)), writing(b"HTTP/1.1 417 X\r\nContent-Length: 0\r\n\r\n")],
        [whole(0, 417, 0)],
    ),
    Case(
        "told to go on, and gone",
        [send(EXPECTING), read(25), pause],
        [reading(len(EXPECTING)), writing(b"HTTP/1.1 100 Continue\r\n\r\n"), WAIT],
        [cut(0, "client_close")],
    ),
    Case(
        "hints, then no answer",
        [send(GET), read(len(b"HTTP/1.1 103 Early Hints\r\n\r\n")), pause],
        [reading(N), writing(b"HTTP/1.1 103 Early Hints\r\n\r\n"), WAIT],
        [cut(0, "client_close")],
    ),
    *[
        Case(
            f"{status} to a {method.decode()} ends with its head",
            [send(method + GET[3:]), read_all],
            [reading(len(method) + N - 3), writing(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, size))],
            [whole(0, status, 0)],
        )
        for method, status, size in ((b"GET", 204, 0), (b"GET", 304, 99), (b"HEAD", 200, 99), (b"HEAD", 404, 99))
    ],
    Case(
        "a longer response than announced",
        [send(GET), read_all],
        [reading(N), writing(OK + b" and more")],
        [whole(0)],
    ),
    Case(
        "a longer response than announced, in another write, and a request after it",
        [send(GET), read(len(OK) + 9), send(GET), read_all],
        [reading(N), writing(OK), writing(b" and more"), reading(N), writing(OK)],
        [whole(0), whole(2)],
    ),
]  # fmt: skip
