"""One HTTP request and its answer, as bytes: what the endpoint does, without a socket."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from http import HTTPStatus
from typing import Final, NamedTuple

import httptools
from prometheus_client.exposition import gzip_accepted

#: Of a request's line and headers together, bytes.
MAX_HEAD: Final = 8192
_GZIP_LEVEL: Final = 1
_PLAIN: Final = "text/plain; charset=utf-8"

#: Makes the page: (Accept, packed) -> (body, packed by `pack` if asked for, and content type).
Page = Callable[[str, bool], tuple[bytes, str]]


class Request(NamedTuple):
    """What of a request decides on its answer."""

    method: str
    path: str
    accept: str
    gzip: bool


class _Reader:
    """Callbacks of the parser."""

    def __init__(self) -> None:
        self.url = b""
        self.headers: dict[bytes, bytes] = {}
        self.has_body = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_body(self, _: bytes) -> None:
        self.has_body = True


def pack(body: bytes) -> bytes:
    """Return *body* as a response with ``Content-Encoding: gzip`` has it."""
    return gzip.compress(body, _GZIP_LEVEL)


def answer(head: bytes, page: Page) -> bytes:
    """Return the whole response to a request's head; the connection is to be closed after it.

    Args:
        head: Up to and including the empty line; anything a client may send.
        page: Called for a request of the metrics only.
    """
    request = _read(head)
    if isinstance(request, HTTPStatus):
        return _response(request)
    if request.path != "/metrics":
        return _response(
            HTTPStatus.NOT_FOUND, b"metrics are at /metrics\n", head_only=request.method == "HEAD"
        )
    body, content_type = page(request.accept, request.gzip)
    headers = {"Vary": "Accept, Accept-Encoding"} | ({"Content-Encoding": "gzip"} if request.gzip else {})
    return _response(HTTPStatus.OK, body, content_type, headers, head_only=request.method == "HEAD")


def refusal(status: HTTPStatus) -> bytes:
    """Return the response to a request that cannot be read."""
    return _response(status)


def _read(head: bytes) -> Request | HTTPStatus:
    if len(head) > MAX_HEAD:
        return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
    reader = _Reader()
    parser = httptools.HttpRequestParser(reader)
    try:
        parser.feed_data(head)
        method = parser.get_method()
        path = httptools.parse_url(reader.url).path
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return HTTPStatus.BAD_REQUEST
    if method not in (b"GET", b"HEAD"):
        return HTTPStatus.METHOD_NOT_ALLOWED
    if (
        reader.has_body
        or reader.headers.get(b"content-length", b"0") != b"0"
        or b"transfer-encoding" in reader.headers
    ):
        return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    encodings = reader.headers.get(b"accept-encoding", b"").decode("latin-1")
    return Request(
        method.decode("ascii"),
        (path or b"").decode("latin-1"),
        reader.headers.get(b"accept", b"").decode("latin-1"),
        gzip_accepted(encodings) and "gzip;q=0," not in f"{encodings.replace(' ', '')},",
    )


def _response(
    status: HTTPStatus,
    body: bytes = b"",
    content_type: str = _PLAIN,
    headers: dict[str, str] | None = None,
    *,
    head_only: bool = False,
) -> bytes:
    text = body or f"{status.phrase}\n".encode()
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(text)}",
        "Connection: close",
        "X-Content-Type-Options: nosniff",
    ]
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        lines.append("Allow: GET, HEAD")
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    head = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
    return head if head_only else head + text
