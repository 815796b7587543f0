"""sockets: HTTP/1.1 framing on real connections, by each alternative of its hook; and stream offsets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from whyspan import heads
from whyspan_probes.loader import program_sections
from whyspan_probes.registry import Found
from whyspan_probes.schema import Events

from tests.bpf.child import Child
from tests.bpf.http import End, Http, preferring, reading, writing
from tests.bpf.watcher import Watcher

pytestmark = pytest.mark.bpf

CANARY = b"CANARY-9b1d7f"
CUT = 2  # flag of an end: the connection ended before the response did
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
ALTERNATIVES = {
    "tracepoints": "tp_btf/",
    "raw tracepoints": "raw_tp/",
    "syscall exits": "tracepoint/syscalls/",
}


def get(path: str = "/", extra: bytes = b"") -> bytes:
    return b"GET " + path.encode() + b" HTTP/1.1\r\nHost: test\r\n" + extra + b"\r\n"


def post(path: str, body: bytes, extra: bytes = b"") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\ncontent-LENGTH:  {len(body)}\r\n".encode()
    return head + extra + b"\r\n" + body


def chunked(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(c), c) for c in (*chunks, b""))


def alternative(found: Found, kind: str) -> int:
    """The number of the alternative of `data` whose programs' sections begin so."""
    sections = program_sections(found.object_path)
    hook = next(h for h in found.probe.hooks if h.name == "data")
    return next(i for i, a in enumerate(hook.alternatives) if sections[a[0]].startswith(kind))


@pytest.fixture(scope="module", params=list(ALTERNATIVES))
def watcher(request: pytest.FixtureRequest, probes: dict[str, Found]) -> Iterator[Watcher]:
    number = alternative(probes["sockets"], ALTERNATIVES[request.param])
    w = Watcher([preferring(probes["sockets"], "data", number)])
    used = w.states["sockets"].hooks["data"].used
    assert all(s.startswith(ALTERNATIVES[request.param]) for s in used)
    yield w
    w.close()


@pytest.fixture(scope="module")
def http(watcher: Watcher) -> Iterator[Http]:
    server = Child("scripted_server")
    yield Http(watcher, server)
    server.kill()


def stream_bytes(rows: Events) -> int:
    """Total of a direction; its records must follow each other without gap or overlap."""
    ends = (rows["offset"] + rows["bytes"]) & 0xFFFFFFFF
    assert ends[:-1].tolist() == rows["offset"][1:].tolist()
    return int(rows["bytes"].sum())


def test_keep_alive(http: Http) -> None:
    requests = [get("/a?secret=1"), get("/b"), get("/c")]
    script = [step for r in requests for step in (reading(len(r)), writing(OK))]
    seen = http.talk(b"".join(requests), script)
    assert seen.requests == [(0, "GET", "/a"), (1, "GET", "/b"), (2, "GET", "/c")]
    assert seen.response_heads == [(0, 200), (1, 200), (2, 200)]
    assert seen.ends == [End(n, 200, 1, 5, 0) for n in range(3)]
    assert stream_bytes(seen.received) == sum(map(len, requests))
    assert stream_bytes(seen.sent) == 3 * len(OK)
    assert len(seen.lost) == 0


def test_pipelined_requests_with_bodies(http: Http) -> None:
    requests = [
        get("/1"),
        post("/2", CANARY * 100),
        b"POST /3 HTTP/1.1\r\nTransfer-Encoding: gzip, Chunked\r\n\r\n"
        + b"5;ext=1\r\nhello\r\n"
        + chunked(CANARY * 50, b"x")[:-2]
        + b"Trailer: 1\r\n\r\n",
        get("/4", b"X-Content-Length: 7\r\n"),
        post("/5", b""),
        get("/6"),
    ]
    text = b"".join(requests)
    seen = http.talk(text, [reading(len(text), step=311), *[writing(OK)] * 6])
    assert seen.requests == [
        (0, "GET", "/1"),
        (1, "POST", "/2"),
        (2, "POST", "/3"),
        (3, "GET", "/4"),
        (4, "POST", "/5"),
        (5, "GET", "/6"),
    ]
    assert [h.content_length for h in seen.heads] == [0, 1300, 0, 0, 0, 0]
    assert seen.ends == [End(n, 200, 1, 5, 0) for n in range(6)]
    assert not any(h.malformed for h in seen.heads)
    assert not any(CANARY in blob for blob in seen.blobs)


@pytest.mark.parametrize("how", ["read", "readv", "recv", "recvmsg"])
@pytest.mark.parametrize("step", [1, 7, 97, 4096])
def test_heads_split_over_many_reads(http: Http, how: str, step: int) -> None:
    long = get("/long", b"X-Filler: " + b"f" * 1500 + b"\r\nX-Request-Id: 17\r\n")
    requests = [get("/split"), post("/body", CANARY * 9), long, get("/last")]
    text = b"".join(requests)
    seen = http.talk(text, [reading(len(text), how, step), *[writing(OK)] * 4])
    assert seen.requests == [
        (0, "GET", "/split"),
        (1, "POST", "/body"),
        (2, "GET", "/long"),
        (3, "GET", "/last"),
    ]
    assert seen.heads[2].headers == {"x-request-id": "17"}
    assert not any(h.malformed for h in seen.heads)
    assert all(h.first_ns <= h.ts_ns for h in seen.heads)
    if step == 1:
        assert seen.heads[0].first_ns < seen.heads[0].ts_ns
    assert seen.ends == [End(n, 200, 1, 5, 0) for n in range(4)]
    # What was copied out is the heads' text and nothing else.
    assert sum(len(b) - heads._PIECE.size for b in seen.blobs) == len(text) - len(CANARY * 9)
    assert not any(CANARY in blob for blob in seen.blobs)


def test_a_response_without_length_ends_with_the_connection(http: Http) -> None:
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
    request = get("/until-close")
    seen = http.talk(request, [reading(len(request)), writing(head), writing(b"a" * 10), writing(b"b" * 20)])
    assert seen.response_heads == [(0, 200)]
    assert seen.ends == [End(0, 200, 2, 30, 1)]
    assert len(seen.reply) == len(head) + 30


def test_responses_without_a_body(http: Http) -> None:
    requests = [get("/204"), get("/304"), b"HEAD /h HTTP/1.1\r\n\r\n", get("/after")]
    replies = [
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\nContent-Length: 1234\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n",
        OK,
    ]
    script = [s for r, a in zip(requests, replies, strict=True) for s in (reading(len(r)), writing(a))]
    seen = http.talk(b"".join(requests), script)
    assert [m for _, m, _ in seen.requests] == ["GET", "GET", "HEAD", "GET"]
    assert seen.ends == [
        End(0, 204, 0, 0, 0),
        End(1, 304, 0, 0, 0),
        End(2, 200, 0, 0, 0),
        End(3, 200, 1, 5, 0),
    ]


def test_interim_response(http: Http) -> None:
    request = post("/expect", CANARY, b"Expect: 100-continue\r\n")
    head = len(request) - len(CANARY)
    seen = http.talk(
        request,
        [
            reading(head),
            writing(b"HTTP/1.1 100 Continue\r\n\r\n"),
            reading(len(CANARY)),
            writing(b"HTTP/1.1 201 Created\r\nContent-Length: 5\r\n\r\n", b"hello", how="writev"),
        ],
    )
    assert seen.requests == [(0, "POST", "/expect")]
    assert seen.response_heads == [(0, 201)]
    assert seen.ends == [End(0, 201, 1, 5, 0)]


@pytest.mark.parametrize("how", ["write", "writev", "send", "sendmsg"])
@pytest.mark.parametrize("step", [1, 3, 7, 41, 4096])
def test_chunked_responses_cut_anywhere(http: Http, how: str, step: int) -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding:chunked\r\n\r\n"
    body = [b"a", b"b" * 16, CANARY * 3, b"d" * 255]
    reply = head + chunked(*body)
    pieces = [reply[i : i + step] for i in range(0, len(reply), step)]
    parts = [[p[: len(p) // 2], p[len(p) // 2 :]] for p in pieces]
    requests = [get("/chunks"), get("/next")]
    script = [
        reading(len(requests[0])),
        *(writing(*p, how=how) for p in parts),
        reading(len(requests[1])),
        writing(OK),
    ]
    seen = http.talk(b"".join(requests), script)
    size = sum(map(len, body))
    carrying = carrying_body(reply, len(head), step)
    assert seen.ends == [End(0, 200, carrying, size, 0), End(1, 200, 1, 5, 0)]
    assert seen.response_heads == [(0, 200), (1, 200)]
    assert not any(CANARY in blob for blob in seen.blobs)


def carrying_body(reply: bytes, at: int, step: int) -> int:
    """How many writes of *step* bytes carry a byte of a chunk's data, by a plain reading of the framing."""
    data: set[int] = set()
    while at < len(reply):
        line_end = reply.index(b"\r\n", at)
        size = int(reply[at:line_end], 16)
        data |= set(range(line_end + 2, line_end + 2 + size))
        at = line_end + 2 + size + 2
    return len({i // step for i in data})


def test_head_and_body_in_several_parts_of_one_call(http: Http) -> None:
    requests = [get("/v"), get("/m")]
    body = CANARY * 11
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    script = [
        reading(len(requests[0])),
        writing(head[:9], b"", head[9:20], head[20:], body[:50], body[50:], how="writev"),
        reading(len(requests[1])),
        writing(head, body[:1], how="sendmsg"),
        writing(body[1:], how="sendmsg"),
    ]
    seen = http.talk(b"".join(requests), script)
    assert seen.ends == [End(0, 200, 1, 143, 0), End(1, 200, 2, 143, 0)]


def test_sendfile(http: Http, tmp_path: Path) -> None:
    path = tmp_path / "body"
    path.write_bytes(CANARY * 1000)
    requests = [get("/file"), get("/next")]
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 13000\r\n\r\n"
    script = [
        reading(len(requests[0])),
        writing(head),
        ["sendfile", str(path)],
        reading(len(requests[1])),
        writing(OK),
    ]
    seen = http.talk(b"".join(requests), script)
    assert [(e.seq, e.status, e.body_bytes) for e in seen.ends] == [(0, 200, 13000), (1, 200, 5)]


def test_reset_by_the_client_in_mid_response(http: Http) -> None:
    request = get("/reset")
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"
    script = [reading(len(request)), writing(head), writing(b"x" * 100), ["drain"]]
    seen = http.talk(request, script, replies=len(head) + 100, reset=True)
    assert seen.error == "ConnectionResetError"
    assert seen.requests == [(0, "GET", "/reset")]
    assert seen.response_heads == [(0, 200)]
    assert seen.ends == [End(0, 200, 1, 100, CUT)]
    assert (seen.states["aux"] == 1).sum() == 1
    assert seen.states["new_state"].tolist()[-1] == 7  # TCP_CLOSE


def test_closed_by_the_server_in_mid_response(http: Http) -> None:
    request = get("/cut")
    script = [reading(len(request)), writing(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nabc")]
    seen = http.talk(request, script)
    assert seen.response_heads == [(0, 200)]
    assert seen.ends == [End(0, 200, 1, 3, CUT)]
    assert len(seen.states) > 0


def test_garbage_is_no_request(http: Http) -> None:
    garbage = bytes(range(256)) * 3
    seen = http.talk(garbage, [reading(len(garbage)), writing(garbage)])
    assert (seen.requests, seen.ends, seen.blobs) == ([], [], [])
    assert stream_bytes(seen.received) == len(garbage)
    request = get("/valid")
    seen = http.talk(request, [reading(len(request)), writing(OK)])
    assert seen.requests == [(0, "GET", "/valid")]
    assert seen.ends == [End(0, 200, 1, 5, 0)]


def test_garbage_after_a_request_does_not_confuse_the_next(http: Http) -> None:
    requests = [get("/before"), b"\x16\x03\x01" * 10, get("/again")]
    script = [
        reading(len(requests[0])),
        writing(OK),
        reading(len(requests[1])),
        reading(len(requests[2])),
        writing(OK),
    ]
    seen = http.talk(b"".join(requests), script)
    assert [(m, r) for _, m, r in seen.requests] == [("GET", "/before"), ("GET", "/again")]
    assert len({s for s, _, _ in seen.requests}) == 2
    assert [(e.status, e.body_bytes) for e in seen.ends] == [(200, 5), (200, 5)]
    assert [e.seq for e in seen.ends] == [s for s, _, _ in seen.requests]
    assert seen.lost["aux"].tolist() == [1]


def test_a_head_of_a_mebibyte_is_lost_and_harms_nobody(http: Http) -> None:
    request = get("/huge", b"X-Filler: " + b"f" * (1 << 20) + b"\r\n")
    refusal = b"HTTP/1.1 431 Too Large\r\nContent-Length: 0\r\n\r\n"
    seen = http.talk(request, [reading(len(request)), writing(refusal)])
    assert (seen.read, seen.error, seen.reply) == (len(request), "", refusal)
    assert seen.requests == [(0, "GET", "")]
    assert seen.heads[0].malformed
    assert seen.ends == [End(0, 431, 0, 0, 0)]
    assert seen.lost["aux"].tolist() == [1]
    assert sum(map(len, seen.blobs)) < 20_000  # the kernel gave up early
    request = get("/after")
    seen = http.talk(request, [reading(len(request)), writing(OK)])
    assert seen.ends == [End(0, 200, 1, 5, 0)]


def test_upgrade_leaves_http(http: Http) -> None:
    request = get("/ws", b"Connection: Upgrade\r\nUpgrade: websocket\r\n")
    reply = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n"
    frames = b"\x81\x05hello" * 100
    seen = http.talk(
        request + frames,
        [
            reading(len(request)),
            writing(reply, frames),
            reading(len(frames)),
            writing(frames),
            writing(frames),
        ],
    )
    assert seen.requests == [(0, "GET", "/ws")]
    assert seen.response_heads == [(0, 101)]
    assert seen.ends == [End(0, 101, 0, 0, 0)]
    assert len(seen.lost) == 0
    assert not any(b"hello" in blob for blob in seen.blobs)


def test_peeking_is_not_reading(http: Http) -> None:
    request = get("/peeked")
    seen = http.talk(request, [["peek", 10], ["peek", 4096], reading(len(request)), writing(OK)])
    assert seen.requests == [(0, "GET", "/peeked")]
    assert not seen.heads[0].malformed
    assert seen.ends == [End(0, 200, 1, 5, 0)]
    assert seen.received["bytes"].tolist() == [len(request)]


def test_a_request_begins_when_it_arrives_not_when_it_is_read(http: Http) -> None:
    request = get("/waits")
    http.talk(request, [reading(len(request)), writing(OK)])  # now the port is known to serve HTTP
    seen = http.talk(request, [["pause", 0.1], reading(len(request)), writing(OK)])
    (head,) = seen.heads
    assert 80_000_000 < head.recv_ns - head.first_ns < 2_000_000_000
    assert head.recv_ns <= head.ts_ns


def test_what_a_read_leaves_in_the_socket_has_arrived_all_the_same(http: Http) -> None:
    request = get("/first")
    http.talk(request, [reading(len(request)), writing(OK)])  # now the port is known to serve HTTP
    second = get("/second")
    script = [reading(len(request)), ["pause", 0.1], writing(OK), reading(len(second)), writing(OK)]
    seen = http.talk(request + second, script)
    assert seen.requests == [(0, "GET", "/first"), (1, "GET", "/second")]
    first, later = seen.heads
    assert later.recv_ns - later.first_ns > 80_000_000
    assert later.first_ns - first.first_ns < 80_000_000


def test_large_body_by_many_sends(http: Http) -> None:
    request = get("/large")
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 3000017\r\n\r\n"
    seen = http.talk(request, [reading(len(request)), writing(head), ["flood", 3_000_017]])
    assert len(seen.reply) == len(head) + 3_000_017
    (end,) = seen.ends
    assert (end.seq, end.body_bytes) == (0, 3_000_017)
    assert end.chunks == len(seen.sent) - 1


def test_offsets_of_unix_sockets_match(watcher: Watcher) -> None:
    child = Child("unix_stream", 13, 29)
    try:
        watcher.watch(child.tgid)
        child.run()
        sends = watcher.rows("sock_send", tgid=child.tgid, aux=1)
        receives = watcher.rows("sock_recv", tgid=child.tgid, aux=1)
    finally:
        child.kill()
    assert len(sends) == 2 * 13 * 29
    assert len(receives) == 3 * 13 * 29
    assert {*sends["key"].tolist()} == {*receives["peer"].tolist()}
    at = 0
    for pair in range(29):  # each pair of sockets is new: its offsets begin at 0, whatever memory it got
        expected = {"left": 0, "right": 0}
        for i in range(13):
            there, back = sends[2 * (13 * pair + i)], sends[2 * (13 * pair + i) + 1]
            got, first, second = receives[at : at + 3]
            at += 3
            assert (there["offset"], there["bytes"]) == (expected["left"], i + 1)
            assert (got["offset"], got["bytes"], got["peer"]) == (there["offset"], i + 1, there["key"])
            assert (back["offset"], back["bytes"]) == (expected["right"], 7)
            assert (first["offset"], first["bytes"], first["peer"]) == (back["offset"], 3, back["key"])
            assert (second["offset"], second["bytes"]) == (back["offset"] + 3, 4)
            expected["left"] += i + 1
            expected["right"] += 7


def test_both_ends_of_loopback_tcp_agree(watcher: Watcher) -> None:
    child = Child("tcp_stream", 31)
    try:
        watcher.watch(child.tgid)
        child.run()
        near, far = child.facts["near"], child.facts["far"]
        sends = {p: watcher.rows("sock_send", tgid=child.tgid, lport=p) for p in (near, far)}
        receives = {p: watcher.rows("sock_recv", tgid=child.tgid, lport=p) for p in (near, far)}
    finally:
        child.kill()
    for sender, receiver, size in ((near, far, 31 * 32 // 2), (far, near, 31 * 11)):
        assert stream_bytes(sends[sender]) == stream_bytes(receives[receiver]) == size
        assert sends[sender]["offset"][0] == receives[receiver]["offset"][0]
        assert set(sends[sender]["rport"].tolist()) == {receiver}
    assert len(sends[near]) == 31
