"""Request heads: from the pieces that the kernel copied to what may be kept of them.

The raw text goes no further than this module: no query, no cookie, no authorisation, no header that is not on
the list.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import httptools

from whyspan import clock, senders, traceparent
from whyspan.model import HttpHead
from whyspan.text import clean

#: struct http_piece of sockets.bpf.c.
_PIECE = struct.Struct("<QQQQIIIHHHHI")
_MAX_OPEN = 4096  # heads begun and not ended
_MAX_HEAD = 16384  # the kernel stops there too
_MAX_BYTES = 8 << 20  # of all heads begun and not ended
#: How the feeds' requests begin to name themselves (``feeds/http.py``). Who copies it is not diagnosed, no more.
OWN_AGENT: Final = b"whyspan/"
_MAX_ROUTE, _MAX_VALUE = 200, 128
#: Who guesses a User-Agent cannot find out by its number.
_SECRET: Final = secrets.token_bytes(16)
_METHODS = frozenset(
    (b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"CONNECT", b"OPTIONS", b"TRACE", b"PATCH")
)


class _Piece(NamedTuple):
    ts_ns: int
    first_ns: int
    recv_ns: int
    cookie: int
    tid: int
    tgid: int
    seq: int
    size: int
    last: int
    lport: int
    rport: int
    offset: int


@dataclass
class _Open:
    first_ns: int
    recv_ns: int
    text: bytearray = field(default_factory=bytearray)
    given_up: bool = False  # too long: what is still to come of it is dropped
    gap: bool = False  # a piece was lost: what stands on both sides of it must not be read as one


class _Collected:
    """httptools' callbacks."""

    def __init__(self, allowed: Collection[str]) -> None:
        self.url = b""
        self.traceparents: list[str] = []
        self.length = 0
        self.headers: dict[str, str] = {}
        self.done = False
        self.ours = False
        self._allowed = allowed

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.decode("latin-1").lower()
        if key == "traceparent":
            self.traceparents.append(value.decode("latin-1"))
        elif key == "content-length":
            self.length = int(value) if value.isdigit() and len(value) < 16 else 0
        elif key == "user-agent":
            self.ours = value.startswith(OWN_AGENT)
        if key in self._allowed and key not in self.headers:
            text = _agent(value) if key == "user-agent" else value.decode("latin-1")
            self.headers[key] = clean(text, _MAX_VALUE)

    def on_headers_complete(self) -> None:
        self.done = True


def _agent(value: bytes) -> str:
    """Return a User-Agent's product where it is a known one, else a number that is the same for the same text."""
    known = senders.product_of(value.decode("latin-1"))
    return known or "client-" + hashlib.blake2b(value, key=_SECRET, digest_size=4).hexdigest()


def route_of(url: bytes) -> str:
    """Return the path of a request target, without its query, cleaned and bounded."""
    try:
        path = httptools.parse_url(url).path or b""
    except httptools.HttpParserInvalidURLError:
        path = b""
    return clean(path.decode("utf-8", "replace"), _MAX_ROUTE)


class HeadAssembler:
    """Joins pieces by connection and number, parses whole heads, and forgets the text."""

    def __init__(self, allowed: Collection[str], offset_ns: Callable[[], int] = clock.offset_ns) -> None:
        """*allowed* are the headers kept; *offset_ns* measures how far off the wall clock is."""
        self.allow(allowed)
        self._offset_ns = offset_ns
        self._open: OrderedDict[tuple[int, int], _Open] = OrderedDict()
        self._bytes = 0
        self.lost = 0  # heads given up: too long, crowded out, or begun anew

    def allow(self, headers: Collection[str]) -> None:
        """Keep these headers from now on."""
        self._allowed = frozenset(h.lower() for h in headers)

    def feed(self, blobs: Iterable[bytes]) -> list[HttpHead]:
        """Return the heads that these pieces complete, in order."""
        out = []
        for blob in blobs:
            if len(blob) < _PIECE.size:
                self.lost += 1
                continue
            piece = _Piece(*_PIECE.unpack_from(blob))
            key = (piece.cookie, piece.seq)
            head = self._open.get(key)
            if head is not None and head.first_ns != piece.first_ns:
                self._drop(key)
                head = None
            if head is None:
                head = self._open[key] = _Open(piece.first_ns, piece.recv_ns)
            if not head.given_up:
                text = blob[_PIECE.size : _PIECE.size + piece.size]
                head.gap = head.gap or piece.offset != len(head.text)
                head.text += text
                self._bytes += len(text)
            too_long = len(head.text) > _MAX_HEAD
            if not head.given_up and (piece.last or too_long):
                parsed = self._parse(head, piece)
                if parsed is not None:
                    out.append(parsed)
                self._bytes -= len(head.text)
                head.text.clear()
                head.given_up = too_long
                self.lost += too_long
            if piece.last:
                del self._open[key]
            while len(self._open) > _MAX_OPEN or self._bytes > _MAX_BYTES:
                self._drop(next(iter(self._open)))
        return out

    def _drop(self, key: tuple[int, int]) -> None:
        head = self._open.pop(key)
        self._bytes -= len(head.text)
        self.lost += not head.given_up

    def _parse(self, head: _Open, piece: _Piece) -> HttpHead | None:
        """Return the head; None for a request of the agent's own feeds, which is nobody's traffic."""
        got = _Collected(self._allowed)
        parser = httptools.HttpRequestParser(got)
        try:
            parser.feed_data(b"" if head.gap else bytes(head.text))
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserError:
            got.done = False
        if got.done and got.ours:
            return None
        method = parser.get_method() if got.done else bytes(head.text[:16]).split(b" ", 1)[0]
        if not got.done and method not in _METHODS:
            method = b""  # where the first piece was lost, the text may begin within a token or a cookie
        # A head ends with its last byte: one whose end has none was cut off. Its first line may be whole.
        cut = not got.done and not piece.size
        known = got.done or (cut and b"\n" in head.text)
        # Two traceparents are as good as none.
        parent = traceparent.parse(got.traceparents[0]) if len(got.traceparents) == 1 else None
        return HttpHead(
            ts_ns=piece.ts_ns,
            first_ns=head.first_ns,
            tid=piece.tid,
            tgid=piece.tgid,
            cookie=piece.cookie,
            seq=piece.seq,
            lport=piece.lport,
            rport=piece.rport,
            method=method.decode("latin-1"),
            route=route_of(got.url) if known else "",
            content_length=got.length,
            traceparent=got.traceparents[0].strip(" \t")[:128] if parent else "",
            headers=got.headers,
            malformed=not got.done,
            recv_ns=head.recv_ns,
            cut=cut,
            sent_ns=self._sent_ns(got.headers, head.first_ns),
        )

    def _sent_ns(self, headers: dict[str, str], first_ns: int) -> int:
        unix_ns = senders.unix_start_ns(headers)
        if not unix_ns:
            return 0
        sent_ns = unix_ns - self._offset_ns()
        return sent_ns if sent_ns > 0 and abs(first_ns - sent_ns) <= senders.MAX_AWAY_NS else 0
