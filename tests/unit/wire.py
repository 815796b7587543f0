"""HTTP on the timelines' language: request heads and response marks, cut into batches."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from whyspan.model import Batch, Fact, Finding, HttpHead, ProcessFact, ThreadFact
from whyspan_probes.schema import EVENT, EventType, Schema

from tests.unit import timeline
from tests.unit.timeline import COOKIE, EPOLL_WAIT, HOG, LOOP, SERVER, WORKER, EventBuilder, ns

_HEAD = timeline._HEAD
_MARKS: dict[str, list[tuple[str, str]]] = {
    "http_response_head": [
        ("cookie", "<u8"),
        ("offset", "<u8"),
        ("seq", "<u4"),
        ("bytes", "<u4"),
        ("_pad", "<u8"),
    ],
    "http_response_end": [
        ("cookie", "<u8"),
        ("first_body_ns", "<u8"),
        ("chunks", "<u4"),
        ("response_bytes", "<u4"),
        ("seq", "<u4"),
        ("flags", "<u4"),
    ],
    "sock_state": [
        ("cookie", "<u8"),
        ("old_state", "<u4"),
        ("new_state", "<u4"),
        ("lport", "<u2"),
        ("rport", "<u2"),
        ("error", "<u4"),
        ("_pad", "<u8"),
    ],
    "http_head_lost": [
        ("cookie", "<u8"),
        ("seq", "<u4"),
        ("bytes", "<u4"),
        ("lport", "<u2"),
        ("rport", "<u2"),
        ("_pad", "<u4"),
        ("first_ns", "<u8"),
    ],
}

#: The timelines' events under their own kinds, and what requests are made of.
SCHEMA = Schema(
    [
        *timeline.SCHEMA.types.values(),
        *(
            EventType(name, kind, np.dtype([*_HEAD, *fields]))
            for kind, (name, fields) in enumerate(_MARKS.items(), start=100)
        ),
    ]
)

TCP_ESTABLISHED, TCP_FIN_WAIT1, TCP_FIN_WAIT2, TCP_CLOSE, TCP_CLOSE_WAIT, TCP_LAST_ACK = 1, 4, 5, 7, 8, 9
FACTS: list[Fact] = [
    ProcessFact(SERVER, "server", service="svc", cgroup="/svc/web", cpus_allowed=2),
    ThreadFact(LOOP, SERVER, "loop"),
    ThreadFact(WORKER, SERVER, "worker"),
    ProcessFact(HOG, "hog"),
]

#: struct http_piece: ts, first, recv, cookie, tid, tgid, seq, bytes, last, lport, rport, offset.
PIECE = struct.Struct("<QQQQIIIHHHHI")


def piece(
    text: bytes,
    *,
    last: bool = True,
    cookie: int = COOKIE,
    seq: int = 0,
    first_ns: int = 100,
    ts_ns: int = 200,
    offset: int = 0,
) -> bytes:
    """Return a piece of a request head as the blob ring delivers it."""
    head = PIECE.pack(ts_ns, first_ns, 150, cookie, LOOP, SERVER, seq, len(text), last, 8000, 50000, offset)
    return head + text


def head(ms: float, cookie: int = COOKIE, seq: int = 0, **fields: Any) -> HttpHead:
    """Return a request head that arrives whole at a moment."""
    values: dict[str, Any] = {
        "ts_ns": ns(ms),
        "first_ns": ns(ms),
        "recv_ns": ns(ms),
        "tid": LOOP,
        "tgid": SERVER,
        "cookie": cookie,
        "seq": seq,
        "lport": 8000,
        "rport": 50000,
        "method": "POST",
        "route": "/v1/completions",
        "content_length": 0,
        "traceparent": "",
        "headers": {},
    }
    return HttpHead(**{**values, **fields})


class Wire(EventBuilder):
    """Events and heads of HTTP connections."""

    schema = SCHEMA

    def __init__(self) -> None:
        super().__init__()
        self.heads: list[HttpHead] = []

    def ask(self, ms: float, cookie: int = COOKIE, seq: int = 0, **fields: Any) -> Wire:
        """A request head has arrived."""
        self.heads.append(head(ms, cookie, seq, **fields))
        return self

    def status(
        self, ms: float, status: int = 200, cookie: int = COOKIE, seq: int = 0, tid: int = LOOP
    ) -> Wire:
        """The status line is written."""
        return self.add("http_response_head", ms, tid, aux=status, cookie=cookie, seq=seq, bytes=90)

    def done(
        self,
        ms: float,
        status: int = 200,
        cookie: int = COOKIE,
        seq: int = 0,
        *,
        first_ms: float | None = None,
        tid: int = LOOP,
        chunks: int = 1,
        size: int = 10,
        flags: int = 0,
    ) -> Wire:
        """The last byte of the response is written."""
        return self.add(
            "http_response_end",
            ms,
            tid,
            aux=status,
            cookie=cookie,
            seq=seq,
            first_body_ns=ns(ms if first_ms is None else first_ms),
            chunks=chunks,
            response_bytes=size,
            flags=flags,
        )

    def state(
        self,
        ms: float,
        new_state: int = TCP_CLOSE,
        cookie: int = COOKIE,
        aux: int = 0,
        *,
        old_state: int = TCP_ESTABLISHED,
        error: int = 0,
    ) -> Wire:
        """The connection changes state; ``aux=1`` a reset is received."""
        return self.add(
            "sock_state",
            ms,
            0,
            aux=aux,
            cookie=cookie,
            old_state=old_state,
            new_state=0 if aux else new_state,
            error=error,
        )

    def unread(self, ms: float, first_ms: float, cookie: int = COOKIE, seq: int = 0, tid: int = 0) -> Wire:
        """A connection ends with a request that nobody read; its end must follow."""
        return self.add(
            "http_head_lost",
            ms,
            tid,
            aux=3,
            cookie=cookie,
            seq=seq,
            bytes=99,
            lport=8000,
            first_ns=ns(first_ms),
        )

    def exit(self, ms: float, tid: int = LOOP, exit_code: int = 9) -> Wire:
        """The thread's process ends."""
        return self.add("sched_exit", ms, tid, aux=1, exit_code=exit_code)

    def woken(self, ms: float) -> Wire:
        """The loop has just got a CPU because data came."""
        self.wake(ms - 0.02, LOOP, context=2, vec=3).into(ms - 0.01, LOOP)
        return self

    def served(self, ms: float, took_ms: float, cookie: int = COOKIE, seq: int = 0, **end: Any) -> Wire:
        """The loop wakes for a request, works on it all the time, answers and rests."""
        self.woken(ms).ask(ms, cookie, seq)
        last = ms + took_ms
        self.send(last, LOOP, key=cookie)
        self.done(last, cookie=cookie, seq=seq, **end)
        self.out(last + 0.5, LOOP, nr=EPOLL_WAIT)
        return self

    def hindered(self, ms: float, took_ms: float, cookie: int = COOKIE, seq: int = 0, **end: Any) -> Wire:
        """The same, but the hog has the CPU for all but 2 ms of it while the loop is ready to run."""
        self.woken(ms).ask(ms, cookie, seq)
        last = ms + took_ms
        self.out(ms + 1, LOOP, 0, next_tid=HOG, flags=5, nr=-2).into(last - 1, LOOP, HOG)
        self.send(last, LOOP, key=cookie)
        self.done(last, cookie=cookie, seq=seq, **end)
        self.out(last + 0.5, LOOP, nr=EPOLL_WAIT)
        return self

    def batches(self, *nows_ms: float, facts: bool = True) -> list[Batch]:
        """Return batches that were drained at these moments; the first brings the facts."""
        out: list[Batch] = []
        events = self.chunk() if self.rows else np.empty(0, EVENT)
        heads = sorted(self.heads, key=lambda h: h.ts_ns)
        at = 0
        for now_ms in nows_ms:
            end = int(np.searchsorted(events["ts_ns"], ns(now_ms), "right"))
            now_heads = [h for h in heads if h.ts_ns <= ns(now_ms)]
            heads = heads[len(now_heads) :]
            out.append(Batch(ns(now_ms), events[at:end], now_heads))
            at = end
        if out and facts:
            out[0].facts = [*FACTS, *self.facts]
        return out


def assert_tiles(finding: Finding) -> None:
    """Fail unless the finding's segments tile its request to the nanosecond."""
    at = finding.request.start_ns
    for s in finding.segments:
        assert s.start_ns == at < s.end_ns
        at = s.end_ns
    assert at == max(finding.request.end_ns, finding.request.start_ns)
    assert finding.wall_ns == at - finding.request.start_ns
    assert 0 <= finding.accounted_ns <= finding.wall_ns
    assert sum(finding.causes.values()) * 1e6 == pytest.approx(finding.wall_ns, rel=1e-9, abs=1)
