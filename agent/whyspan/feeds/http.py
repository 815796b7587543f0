"""One bounded GET: no redirect, no proxy, no kept connection."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import httptools

from whyspan import __version__

_READ: Final = 64 << 10
_MAX_HEADERS: Final = 128


class HttpError(Exception):
    """No answer. ``kind``: refused (nobody listens), timeout, other; the message quotes nothing of the server."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Answer(NamedTuple):
    """A whole answer, and how long it took in ns."""

    status: int
    body: bytes
    took_ns: int


class Url(NamedTuple):
    """Where to connect and what to ask for."""

    host: str
    port: int
    path: str


def parse_url(url: str) -> Url:
    """Return the parts of ``http://HOST:PORT/PATH``.

    Raises:
        HttpError: it is none; https is not spoken.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 80
    except ValueError as e:
        raise HttpError("other", "not an address of the form http://HOST:PORT/PATH") from e
    if parts.scheme != "http" or not host or not (parts.path or "/").isprintable() or " " in url:
        raise HttpError("other", "not an address of the form http://HOST:PORT/PATH")
    return Url(host, port, parts.path or "/")


class _Parsed:
    """Collects an answer; raises out of the parser when it is too long."""

    def __init__(self, max_bytes: int) -> None:
        self.body = bytearray()
        self.done = self.sized = False
        self._max, self._headers = max_bytes, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers += 1
        if self._headers > _MAX_HEADERS:
            raise ValueError
        self.sized = self.sized or name.lower() in (b"content-length", b"transfer-encoding")

    def on_body(self, data: bytes) -> None:
        if len(self.body) + len(data) > self._max:
            raise ValueError
        self.body += data

    def on_message_complete(self) -> None:
        self.done = True


async def get(url: Url, *, timeout_s: float, max_bytes: int) -> Answer:
    """Ask and read the answer to its end.

    Args:
        url: What to get.
        timeout_s: For all of it.
        max_bytes: Of the body; of the head twice as much may be read.

    Raises:
        HttpError: there is no whole answer within these bounds.
    """
    began = time.monotonic_ns()
    try:
        async with asyncio.timeout(timeout_s):
            status, body = await _get(url, max_bytes)
    except TimeoutError as e:
        raise HttpError("timeout", f"no answer in {timeout_s:g} s") from e
    except ConnectionRefusedError as e:
        raise HttpError("refused", "connection refused") from e
    except OSError as e:
        raise HttpError("other", e.strerror or type(e).__name__) from e
    return Answer(status, body, time.monotonic_ns() - began)


async def _get(url: Url, max_bytes: int) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection(url.host, url.port, limit=_READ)
    try:
        name = f"[{url.host}]" if ":" in url.host else url.host
        writer.write(
            f"GET {url.path} HTTP/1.1\r\nHost: {name}:{url.port}\r\nUser-Agent: whyspan/{__version__}\r\n"
            "Accept: text/plain\r\nConnection: close\r\n\r\n".encode("ascii", "replace")
        )
        parsed, read = _Parsed(max_bytes), 0
        parser = httptools.HttpResponseParser(parsed)
        while not parsed.done:
            data = await reader.read(_READ)
            if not data:
                break
            read += len(data)
            try:
                if read > 3 * max_bytes:
                    raise ValueError
                parser.feed_data(data)
            except httptools.HttpParserError as e:
                raise HttpError("other", _why(e, max_bytes)) from None
            except ValueError:
                raise HttpError("other", f"an answer of more than {max_bytes} bytes") from None
        status = int(parser.get_status_code())
        # An answer without a length ends with its connection.
        if not status or (parsed.sized and not parsed.done):
            raise HttpError("other", "the connection ended before the answer")
        return status, bytes(parsed.body)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _why(error: Exception, max_bytes: int) -> str:
    too_long = isinstance(error, httptools.HttpParserCallbackError)
    return f"an answer of more than {max_bytes} bytes" if too_long else "not an answer of HTTP"
