"""Request heads: joined from pieces cut anywhere, stripped of everything that must not be kept."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from whyspan import heads
from whyspan.heads import HeadAssembler, route_of
from whyspan.model import HttpHead

from tests.unit.wire import PIECE, piece

ALLOWED = ("X-Request-Id", "x-tenant-id")
PARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"
CANARY = b"s3cr3tcanary"
HEAD = (
    b"POST /v1/chat/completions?key=" + CANARY + b" HTTP/1.1\r\n"
    b"Host: example\r\nCookie: sid=" + CANARY + b"\r\nAuthorization: Bearer " + CANARY + b"\r\n"
    b"X-Api-Key: " + CANARY + b"\r\nProxy-Authorization: " + CANARY + b"\r\n"
    b"x-request-id: r-1\r\nX-Tenant-ID: acme\r\nTraceparent: " + PARENT.encode() + b"\r\n"
    b"Content-Length: 512\r\n\r\n"
)


def read(*texts: bytes, assembler: HeadAssembler | None = None) -> list[HttpHead]:
    """Feed one head in the given pieces, each in a drain of its own."""
    a = assembler or HeadAssembler(ALLOWED)
    out, at = [], 0
    for i, text in enumerate(texts):
        out += a.feed([piece(text, last=i == len(texts) - 1, ts_ns=200 + i, offset=at)])
        at += len(text)
    return out


def cut(text: bytes, at: list[int]) -> list[bytes]:
    return [text[a:b] for a, b in itertools.pairwise([0, *sorted(at), len(text)])]


def test_what_is_kept() -> None:
    assert read(HEAD) == [
        HttpHead(
            ts_ns=200,
            first_ns=100,
            recv_ns=150,
            tid=100,
            tgid=100,
            cookie=77,
            seq=0,
            lport=8000,
            rport=50000,
            method="POST",
            route="/v1/chat/completions",
            content_length=512,
            traceparent=PARENT,
            headers={"x-request-id": "r-1", "x-tenant-id": "acme"},
        )
    ]


@given(st.lists(st.integers(0, len(HEAD)), max_size=12))
def test_split_anywhere_it_is_the_same(at: list[int]) -> None:
    pieces = cut(HEAD, at)
    (whole,) = read(HEAD)
    (joined,) = read(*pieces)
    assert joined == msgspec.structs.replace(whole, ts_ns=200 + len(pieces) - 1)


def test_pieces_of_many_connections_interleave() -> None:
    a = HeadAssembler(ALLOWED)
    texts = {c: f"GET /{c} HTTP/1.1\r\nx-request-id: {c}\r\n\r\n".encode() for c in range(5)}
    blobs = [
        piece(text[k : k + 7], cookie=c, last=k + 7 >= len(text), offset=k)
        for k in range(0, 60, 7)
        for c, text in texts.items()
        if k < len(text)
    ]
    found = {h.cookie: (h.route, h.headers["x-request-id"]) for h in a.feed(blobs)}
    assert found == {c: (f"/{c}", str(c)) for c in range(5)}
    assert a.lost == 0


@given(st.lists(st.integers(0, len(HEAD)), max_size=6), st.integers(0, 6), st.integers(0, 6))
def test_no_secret_gets_out_even_of_a_torn_head(at: list[int], skip_first: int, skip_last: int) -> None:
    pieces = cut(HEAD, at)
    left = pieces[skip_first : max(len(pieces) - skip_last, skip_first + 1)]
    out = msgspec.json.encode(read(*left)) if left else b""
    # Not even the beginning of one: a text that begins within a secret must not pass for a method.
    for size in range(4, len(CANARY) + 1):
        assert CANARY[-size:] not in out
        assert CANARY[:size] not in out


def test_a_head_whose_beginning_was_lost_is_marked_and_empty() -> None:
    a = HeadAssembler(ALLOWED)
    (got,) = a.feed([piece(CANARY + b" x\r\nx-request-id: r-1\r\n\r\n")])
    assert got.malformed
    assert (got.method, got.route, got.headers, got.traceparent) == ("", "", {}, "")


def test_a_malformed_head_keeps_a_method_that_is_one() -> None:
    (got,) = read(b"POST /v1/" + CANARY + b"?q HTTP/1.1\r\nno colon here\r\n\r\n")
    assert (got.malformed, got.method, got.route) == (True, "POST", "")


def test_only_listed_headers_first_one_wins_and_is_bounded() -> None:
    text = (
        b"GET / HTTP/1.1\r\nx-request-id: " + b"a" * 500 + b"\r\nX-REQUEST-ID: second\r\nx-other: no\r\n\r\n"
    )
    (got,) = read(text)
    assert list(got.headers) == ["x-request-id"]
    assert got.headers["x-request-id"].startswith("aaaa")
    assert len(got.headers["x-request-id"]) == 128
    (none,) = read(text, assembler=HeadAssembler(()))
    assert none.headers == {}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (f"traceparent: {PARENT}", PARENT),
        (f"TraceParent: \t{PARENT} ", PARENT),
        (f"traceparent: {PARENT}\r\ntraceparent: {PARENT}", ""),
        (f"traceparent: {PARENT}\r\nTRACEPARENT: 00-bad", ""),
        (f"traceparent: {PARENT}, {PARENT}", ""),
        ("traceparent: 00-0-0-0", ""),
        ("traceparent:", ""),
        ("x-traceparent: " + PARENT, ""),
    ],
)
def test_traceparent(lines: str, expected: str) -> None:
    (got,) = read(f"GET / HTTP/1.1\r\n{lines}\r\n\r\n".encode())
    assert got.traceparent == expected
    assert not got.malformed


def test_a_later_traceparent_is_bounded() -> None:
    long = f"01-{'ab' * 16}-{'cd' * 8}-01-" + "x" * 1000
    (got,) = read(f"GET / HTTP/1.1\r\ntraceparent: {long}\r\n\r\n".encode())
    assert got.traceparent == long[:128]


@pytest.mark.parametrize(
    ("target", "route"),
    [
        (b"/v1/x?key=1&b=2", "/v1/x"),
        (b"/v1/x#frag?no", "/v1/x"),
        (b"http://user:pass@host:80/p/q?z", "/p/q"),
        (b"/a%1b%5b2J", "/a%1b%5b2J"),
        (b"/\xc2\x9b31m", ""),  # C1 control sequence introducer: not a request target
        (b"/\xe2\x80\xaegnp", ""),  # right-to-left override
        (b"/\xff\xfe", ""),
        (b"*", "*"),
        (b"", ""),
        (b"?q=1", ""),
        (b"/\x1b[31m", ""),
        (b"/" + b"a" * 5000, "/" + "a" * 198 + "…"),
    ],
)
def test_routes(target: bytes, route: str) -> None:
    assert route_of(target) == route


@pytest.mark.parametrize("byte", [b"\x1b", b"\x07", b"\x00", b"\x9b", b"\xc2\x9b"])
def test_nothing_a_terminal_would_obey_comes_through(byte: bytes) -> None:
    text = b"GET /" + byte + b"[2J HTTP/1.1\r\nx-request-id: a" + byte + b"[31m\r\n\r\n"
    for got in read(text):
        for shown in (got.method, got.route, *got.headers.values()):
            assert shown.isprintable()


def test_a_megabyte_of_head_is_one_malformed_head() -> None:
    a = HeadAssembler(ALLOWED)
    text = b"GET / HTTP/1.1\r\nx-pad: " + b"a" * (1 << 20) + b"\r\n\r\n"
    blobs = [
        piece(text[k : k + 512], last=k + 512 >= len(text), ts_ns=200 + k, offset=k)
        for k in range(0, len(text), 512)
    ]
    (got,) = a.feed(blobs)
    assert (got.malformed, got.method, a.lost) == (True, "GET", 1)
    # The next request on the connection is read again.
    (following,) = a.feed([piece(HEAD, seq=1)])
    assert (following.seq, following.malformed, a.lost) == (1, False, 1)


def test_a_head_at_the_limit_is_read() -> None:
    frame = b"GET /ok HTTP/1.1\r\nx-pad: " + b"\r\n\r\n"
    text = frame[:-4] + b"a" * (16384 - len(frame)) + frame[-4:]
    (got,) = read(*[text[k : k + 512] for k in range(0, len(text), 512)])
    assert (len(text), got.malformed, got.route) == (16384, False, "/ok")


def test_heads_that_never_end_crowd_out_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "_MAX_OPEN", 10)
    a = HeadAssembler(ALLOWED)
    half = len(HEAD) // 2
    assert a.feed(piece(HEAD[:half], last=False, cookie=c) for c in range(25)) == []
    assert a.lost == 15
    got = a.feed(piece(HEAD[half:], cookie=c, offset=half) for c in (0, 24))
    assert [(h.cookie, h.malformed) for h in got] == [(0, True), (24, False)]


def test_heads_that_never_end_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "_MAX_BYTES", 10_000)
    a = HeadAssembler(ALLOWED)
    for c in range(100):
        a.feed([piece(b"GET / HTTP/1.1\r\nx: " + b"a" * 980, last=False, cookie=c)])
    assert a.lost == 90  # ten of 999 bytes stay
    # What is complete gives its room back: nobody else is crowded out by a busy connection.
    for seq in range(100):
        assert len(a.feed([piece(b"GET / HTTP/1.1\r\n\r\n", cookie=1000, seq=seq)])) == 1
    assert a.lost == 90


def test_what_stands_on_both_sides_of_a_lost_piece_is_not_read_as_one() -> None:
    text = b"GET /a HTTP/1.1\r\nx-request-id: r-1\r\ncookie: session=" + CANARY + b"; x=1\r\n\r\n"
    first, last = text.index(b"r-1"), text.index(CANARY)
    a = HeadAssembler(ALLOWED)
    a.feed([piece(text[:first], last=False)])
    (got,) = a.feed([piece(text[last:], offset=last)])
    assert (got.malformed, got.route, got.headers, got.traceparent) == (True, "", {}, "")
    assert CANARY.decode() not in repr(got)


def test_a_head_begun_anew_counts_as_lost() -> None:
    a = HeadAssembler(ALLOWED)
    a.feed([piece(HEAD[:50], last=False, first_ns=100)])
    (got,) = a.feed([piece(HEAD, first_ns=300)])
    assert (got.malformed, got.first_ns, a.lost) == (False, 300, 1)


@pytest.mark.parametrize("value", ["-5", "5x", "9" * 40, "٣", ""])
def test_content_length_that_is_none(value: str) -> None:
    (got,) = read(f"POST / HTTP/1.1\r\ncontent-length: {value}\r\n\r\n".encode())
    assert got.content_length == 0


@given(st.lists(st.binary(max_size=80), max_size=6))
def test_garbage_on_the_ring_never_raises(blobs: list[bytes]) -> None:
    a = HeadAssembler(ALLOWED)
    a.feed(blobs)
    assert a.lost >= sum(len(b) < PIECE.size for b in blobs)


@settings(max_examples=200)
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=4))
def test_garbage_for_a_head_never_raises_and_is_printable(texts: list[bytes]) -> None:
    (got,) = read(*texts)
    for shown in (got.method, got.route, got.traceparent, *got.headers.values()):
        assert shown.isprintable()


@given(st.binary(max_size=60), st.integers(0, 5))
def test_garbage_within_a_head_never_raises(noise: bytes, line: int) -> None:
    lines = HEAD.split(b"\r\n")
    lines[line] += noise
    (got,) = read(b"\r\n".join(lines))
    assert len(got.route) <= 200
    assert set(got.headers) <= {"x-request-id", "x-tenant-id"}


def test_an_upgrade_is_read() -> None:
    (got,) = read(b"GET /ws HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
    assert (got.malformed, got.route) == (False, "/ws")


def test_a_head_that_was_cut_off_keeps_what_its_whole_lines_say() -> None:
    text = b"POST /v1/completions?key=" + CANARY + b" HTTP/1.1\r\nX-Request-Id: r-1\r\nCookie: " + CANARY
    end = piece(b"", offset=len(text))
    (got,) = HeadAssembler(ALLOWED).feed([piece(text, last=False), end])
    assert (got.cut, got.malformed, got.method, got.route) == (True, True, "POST", "/v1/completions")
    assert got.headers == {"x-request-id": "r-1"}
    assert CANARY not in msgspec.json.encode(got)
    # Within its first line there is no telling where the path would have ended.
    text = b"POST /v1/" + CANARY
    (got,) = HeadAssembler(ALLOWED).feed([piece(text, last=False), piece(b"", offset=len(text))])
    assert (got.cut, got.method, got.route) == (True, "POST", "")
    # Nor is there where a piece was lost.
    (got,) = HeadAssembler(ALLOWED).feed([piece(b"x\r\ny\r\n", last=False, offset=9), end])
    assert (got.cut, got.method, got.route, got.headers) == (True, "", "", {})


def test_the_agents_own_feeds_are_nobodys_traffic() -> None:
    ours = b"GET /metrics HTTP/1.1\r\nHost: x\r\nUser-Agent: whyspan/0.1\r\n\r\n"
    theirs = ours.replace(b"whyspan/", b"curl/")
    heads = HeadAssembler(["user-agent"])
    assert heads.feed([piece(ours)]) == []
    assert [h.route for h in heads.feed([piece(theirs)])] == ["/metrics"]
    assert heads.lost == 0


def test_of_a_user_agent_only_a_known_product_is_kept() -> None:
    def agent(text: bytes) -> str:
        request = b"GET /x HTTP/1.1\r\nHost: x\r\nUser-Agent: " + text + b"\r\n\r\n"
        (head,) = HeadAssembler(["user-agent"]).feed([piece(request, last=True)])
        return head.headers["user-agent"]

    assert agent(b"OpenAI/Python 1.40.0 (alice@example.org)") == "OpenAI/Python"
    assert agent(b"Prometheus/2.53.0") == "Prometheus/2.53.0"
    told = agent(b"alice/s3cret")
    assert told.startswith("client-")
    assert "alice" not in told
    assert told == agent(b"alice/s3cret") != agent(b"bob/s3cret")


def test_other_headers_from_now_on() -> None:
    a = HeadAssembler(["x-a"])
    text = b"GET / HTTP/1.1\r\nX-A: 1\r\nX-B: 2\r\n\r\n"
    assert [h.headers for h in read(text, assembler=a)] == [{"x-a": "1"}]
    a.allow(["X-B"])
    assert [h.headers for h in read(text, assembler=a)] == [{"x-b": "2"}]
