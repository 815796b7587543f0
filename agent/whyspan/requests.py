"""Requests: from heads and response marks to windows with an identity, a status and an end."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any

from whyspan_probes.schema import Schema

from whyspan import traceparent
from whyspan.facts import Facts
from whyspan.model import Batch, HttpHead, Request

_MAX_OPEN = 20_000
_TCP_CLOSE = 7  # include/net/tcp_states.h
_MARKS = ("http_response_head", "http_response_end", "sock_state", "sched_exit", "http_head_lost")
_SERVER_ERROR, _TOO_MANY = 500, 429


class RequestTable:
    """The requests in progress. Deterministic: the same batches give the same requests and ids.

    ``forgotten`` counts requests whose end was never seen and that were crowded out.
    """

    def __init__(self, schema: Schema, instance: str) -> None:
        """*instance* names this run; generated ids derive from it."""
        self._schema, self._instance = schema, instance
        self._open: OrderedDict[tuple[int, int], Request] = OrderedDict()
        self._by_connection: dict[int, set[int]] = {}
        self.forgotten = 0

    def feed(self, batch: Batch, facts: Facts) -> list[Request]:
        """Take in a batch and return the requests that ended in it, in order of their end."""
        timeline: list[tuple[int, int, Any]] = [(h.ts_ns, -1, h) for h in batch.heads]
        for order, name in enumerate(_MARKS):
            rows = self._schema.select(batch.events, name)
            names = rows.dtype.names or ()
            timeline += [(r[0], order, dict(zip(names, r, strict=True))) for r in rows.tolist()]
        timeline.sort(key=lambda item: item[:2])
        ended: list[Request] = []
        for ts_ns, order, what in timeline:
            if order < 0:
                self._begin(what, facts)
            elif order == 0:
                self._head(ts_ns, what)
            elif order == 1:
                ended += self._end(ts_ns, what)
            elif order == 2:
                ended += self._state(ts_ns, what)
            elif order == 3:
                ended += self._exit(ts_ns, what)
            elif what["aux"] == 2:  # a response whose framing was lost: its end will not be seen
                ended += self._close_all(ts_ns, what["cookie"], "lost")
        ended.sort(key=lambda r: r.end_ns)
        return ended

    def open_requests(self) -> list[Request]:
        """Return the requests in progress, oldest first."""
        return list(self._open.values())

    def _begin(self, head: HttpHead, facts: Facts) -> None:
        parent = traceparent.parse(head.traceparent)
        trace_id = (
            parent.trace_id
            if parent
            else hashlib.sha256(
                f"{self._instance}:{head.cookie}:{head.seq}:{head.first_ns}".encode()
            ).hexdigest()[:32]
        )
        request = Request(
            trace_id=trace_id,
            trace_id_source="traceparent" if parent else "generated",
            parent_span_id=parent.span_id if parent else "",
            sampled=parent.sampled if parent else True,
            request_id=head.headers.get("x-request-id", ""),
            tenant=head.headers.get("x-tenant-id", ""),
            service=facts.service(head.tgid) or facts.comm(head.tgid, head.tid),
            tgid=head.tgid,
            start_tid=head.tid,
            method=head.method,
            route=head.route,
            outcome="open",
            start_ns=head.first_ns,
            recv_ns=head.recv_ns or head.first_ns,
            request_bytes=head.content_length,
            cookie=head.cookie,
            seq=head.seq,
        )
        if (head.cookie, head.seq) in self._open:
            self._take(head.cookie, head.seq)
            self.forgotten += 1
        self._open[head.cookie, head.seq] = request
        self._by_connection.setdefault(head.cookie, set()).add(head.seq)
        if len(self._open) > _MAX_OPEN:
            (cookie, seq), _ = self._open.popitem(last=False)
            self._unlink(cookie, seq)
            self.forgotten += 1

    def _unlink(self, cookie: int, seq: int) -> None:
        left = self._by_connection.get(cookie)
        if left is not None:
            left.discard(seq)
            if not left:
                del self._by_connection[cookie]

    def _take(self, cookie: int, seq: int) -> Request | None:
        request = self._open.pop((cookie, seq), None)
        self._unlink(cookie, seq)
        return request

    def _head(self, ts_ns: int, mark: dict[str, Any]) -> None:
        request = self._open.get((mark["cookie"], mark["seq"]))
        if request is not None:
            request.head_ns, request.status = ts_ns, mark["aux"]
            request.end_tid = mark["tid"]

    def _end(self, ts_ns: int, mark: dict[str, Any]) -> list[Request]:
        request = self._take(mark["cookie"], mark["seq"])
        if request is None:
            return []
        request.status = mark["aux"]
        request.first_ns = mark["first_body_ns"]
        request.chunks, request.response_bytes = mark["chunks"], mark["response_bytes"]
        request.end_ns, request.end_tid = ts_ns, mark["tid"]
        failed = request.status >= _SERVER_ERROR or request.status == _TOO_MANY
        request.outcome = "error" if failed else "ok"
        return [request]

    def _state(self, ts_ns: int, mark: dict[str, Any]) -> list[Request]:
        if mark["aux"] == 1:
            return self._close_all(ts_ns, mark["cookie"], "reset")
        if mark["new_state"] == _TCP_CLOSE:
            # Closed before the last byte of the response: by whichever side, the client did not get it.
            return self._close_all(ts_ns, mark["cookie"], "reset")
        return []

    def _close_all(self, ts_ns: int, cookie: int, outcome: str) -> list[Request]:
        out = []
        for seq in sorted(self._by_connection.get(cookie, ())):
            request = self._take(cookie, seq)
            if request is not None:
                request.end_ns, request.outcome = max(ts_ns, request.start_ns), outcome
                request.end_tid = request.end_tid or request.start_tid
                out.append(request)
        return out

    def _exit(self, ts_ns: int, mark: dict[str, Any]) -> list[Request]:
        if mark["aux"] != 1:
            return []
        gone = {r.cookie for r in self._open.values() if r.tgid == mark["tgid"]}
        return [r for cookie in sorted(gone) for r in self._close_all(ts_ns, cookie, "killed")]
