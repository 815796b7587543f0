"""The bounded GET, on real sockets with servers that answer well, badly, slowly and without end."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from whyspan.feeds import http
from whyspan.feeds.http import Answer, HttpError

Serve = Callable[..., int]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server that takes one connection, answers with these bytes, and ends it or keeps it open."""
    listeners: list[socket.socket] = []
    kept: list[socket.socket] = []

    def start(answer: bytes, *, keep: bool = False, endless: bytes = b"") -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def run() -> None:
            try:
                connection, _ = listener.accept()
                connection.recv(65536)
                connection.sendall(answer)
                while endless:
                    connection.sendall(endless)
            except OSError:
                return
            if keep:
                kept.append(connection)
            else:
                connection.close()

        threading.Thread(target=run, daemon=True).start()
        port: int = listener.getsockname()[1]
        return port

    yield start
    for s in listeners + kept:
        s.close()


def get(port: int, timeout_s: float = 20.0, max_bytes: int = 1000) -> Answer:
    url = http.parse_url(f"http://127.0.0.1:{port}/metrics")
    return asyncio.run(http.get(url, timeout_s=timeout_s, max_bytes=max_bytes))


@pytest.mark.parametrize(
    ("answer", "keep"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\n\r\nhello", False),
        (b"HTTP/1.0 200 OK\r\nConnection: close\r\n\r\nhello", False),
    ],
)
def test_an_answer(serve: Serve, answer: bytes, keep: bool) -> None:
    a = get(serve(answer, keep=keep))
    assert (a.status, a.body) == (200, b"hello")
    assert a.took_ns > 0


def test_a_status_without_a_body(serve: Serve) -> None:
    assert get(serve(b"HTTP/1.1 503 Unavailable\r\nContent-Length: 0\r\n\r\n", keep=True))[:2] == (503, b"")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello", "ended before"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel", "ended before"),
        (b"", "ended before"),
        (b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f", "not an answer of HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n" + b"x" * 1001, "more than 1000"),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n", "more than 1000"),
    ],
)
def test_what_is_no_answer(serve: Serve, answer: bytes, says: str) -> None:
    with pytest.raises(HttpError, match=says) as caught:
        get(serve(answer))
    assert caught.value.kind == "other"


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: "])
def test_an_answer_without_end(serve: Serve, head: bytes) -> None:
    with pytest.raises(HttpError, match="more than 1000"):
        get(serve(head, endless=b"x" * 4096))


def test_a_server_that_does_not_answer(serve: Serve) -> None:
    with pytest.raises(HttpError, match="no answer in") as caught:
        get(serve(b"HTTP/1.1 200 OK\r\n", keep=True), timeout_s=0.2)
    assert caught.value.kind == "timeout"


def test_nobody_listens() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        with pytest.raises(HttpError) as caught:
            get(s.getsockname()[1])
    assert caught.value.kind == "refused"


@pytest.mark.parametrize(
    "url", ["https://h/", "ftp://h/", "h:80", "http://", "http://h:x/", "http://h:99999/", "http://h/a b"]
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(HttpError):
        http.parse_url(url)


def test_an_address() -> None:
    assert http.parse_url("http://[::1]:8000/metrics") == ("::1", 8000, "/metrics")
    assert http.parse_url("http://h") == ("h", 80, "/")
