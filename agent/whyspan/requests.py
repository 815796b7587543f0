"""Requests: from heads and response marks to windows with an identity, a status and an end."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection
from operator import itemgetter
from typing import Any

from whyspan_probes.schema import Schema

from whyspan import connection, senders, traceparent
from whyspan.facts import Facts
from whyspan.lru import Lru
from whyspan.model import Batch, HttpHead, Request

_MAX_OPEN = 20_000
_MAX_KNOWN = 4096
_MARKS = ("http_response_head", "http_response_end", "sock_state", "sched_exit", "http_head_lost")
_BEGIN, _HEAD, _END, _STATE, _EXIT = range(-1, 4)
_RESPONSE_LOST, _UNREAD = 2, 3  # aux of http_head_lost
_BY_CLOSE, _CUT = 1, 2  # flags of http_response_end
_FAILED_STATUS = 400
#: A request of a process that ended is kept so long for the last that its connection has to tell.
_GRACE_NS = 1_000_000_000


class RequestTable:
    """The requests in progress. Deterministic: the same batches give the same requests and ids.

    ``began`` holds the requests that the last batch brought, ``forgotten`` counts those whose end was never seen and
    that were crowded out.
    """

    def __init__(self, schema: Schema, instance: str) -> None:
        """*instance* names this run; generated ids derive from it."""
        self._schema, self._instance = schema, instance
        self._open: OrderedDict[tuple[int, int], Request] = OrderedDict()
        self._by_connection: dict[int, set[int]] = {}
        self._later: list[tuple[int, int, Any]] = []
        self._left: Lru[int, int] = Lru(_MAX_OPEN)  # by connection, when its client closed its side
        self._exits: Lru[int, tuple[int, int]] = Lru(_MAX_KNOWN)  # by process: when, and its wait status
        self._readers: Lru[int, tuple[int, int]] = Lru(_MAX_KNOWN)  # by port: who read the last head
        self._clocks = senders.SenderClocks()
        self._dying: dict[tuple[int, int], Request] = {}
        self._ended: list[Request] = []  # during one batch
        self.began: list[Request] = []  # with the last batch
        self.forgotten = 0

    def feed(self, batch: Batch, facts: Facts) -> list[Request]:
        """Take in a batch and return the requests that ended before its drain began, in order of their end.

        The rings are drained one after the other: what is newer waits for the next batch, since something older
        may come with it.
        """
        self.began = []
        timeline = self._later + [(h.ts_ns, _BEGIN, h) for h in batch.heads]
        for order, name in enumerate(_MARKS):
            rows = self._schema.select(batch.events, name)
            names = rows.dtype.names or ()
            for row in rows.tolist():
                mark = dict(zip(names, row, strict=True))
                unread = order == len(_MARKS) - 1 and mark["aux"] == _UNREAD
                timeline.append((row[0], _BEGIN if unread else order, mark))
        timeline.sort(key=itemgetter(0, 1))
        due = bisect_right(timeline, batch.now_ns, key=itemgetter(0))
        timeline, self._later = timeline[:due], timeline[due:]
        return self._run(timeline, facts, batch.now_ns)

    def flush(self, facts: Facts) -> list[Request]:
        """Return the requests that ended in what still waits for another batch, as at the end of a recording."""
        self.began = []
        timeline, self._later = self._later, []
        return self._run(timeline, facts, 1 << 63)

    def open_requests(self) -> list[Request]:
        """Return the requests in progress, oldest first."""
        return [r for key, r in self._open.items() if key not in self._dying]

    def drop(self, tgids: Collection[int]) -> None:
        """Forget the requests in progress of processes that are no longer watched: their end will not be seen."""
        for key in [key for key, r in self._open.items() if r.tgid in tgids and key not in self._dying]:
            self._take(*key)
            self.forgotten += 1

    def _run(self, timeline: list[tuple[int, int, Any]], facts: Facts, now_ns: int) -> list[Request]:
        for ts_ns, order, what in timeline:
            if order == _BEGIN:
                self._begin(what if isinstance(what, HttpHead) else self._unread(what, facts), facts)
            elif order == _HEAD:
                self._head(ts_ns, what)
            elif order == _END:
                self._end(ts_ns, what)
            elif order == _STATE:
                self._state(ts_ns, what)
            elif order == _EXIT:
                self._exit(ts_ns, what)
            elif what["aux"] == _RESPONSE_LOST:  # its framing: its end will not be seen
                self._close_all(ts_ns, what["cookie"], "lost", "")
        self._bury(now_ns)
        ended, self._ended = self._ended, []
        return sorted(ended, key=lambda r: r.end_ns)

    def _unread(self, mark: dict[str, Any], facts: Facts) -> HttpHead:
        tgid, tid = mark["tgid"], mark["tid"]
        reader = self._readers.get(mark["lport"])
        # Whoever is current when a packet ends a connection may have nothing to do with it.
        if reader is not None and facts.service(tgid) != facts.service(reader[0]):
            tgid, tid = reader
        first_ns = mark["first_ns"]
        return HttpHead(
            mark["ts_ns"],
            first_ns,
            tid,
            tgid,
            mark["cookie"],
            mark["seq"],
            mark["lport"],
            mark["rport"],
            "",
            "",
            0,
            "",
            {},
        )

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
            head="cut" if head.cut else "malformed" if head.malformed else "whole",
            start_ns=head.first_ns,
            recv_ns=head.recv_ns or head.first_ns,
            request_bytes=head.content_length,
            cookie=head.cookie,
            seq=head.seq,
            client_port=head.rport,
            server_port=head.lport,
            agent=senders.agent_of(head.headers),
            attempt=senders.attempt_of(head.headers),
        )
        if head.sent_ns:
            sender = request.service, request.tenant, request.agent
            request.client_wait_ns = self._clocks.waited_ns(sender, head.sent_ns, head.first_ns)
        self.began.append(request)
        if not head.recv_ns:
            request.head = "unread"
        elif not head.cut:
            self._readers.put(head.lport, (head.tgid, head.tid))
        key = head.cookie, head.seq
        if key in self._open:
            self._crowd_out(key)
        self._open[key] = request
        self._by_connection.setdefault(head.cookie, set()).add(head.seq)
        gone = self._exits.get(head.tgid)
        if gone is not None and head.ts_ns - gone[0] < _GRACE_NS:  # else the number has another owner by now
            self._kill(request, *gone)
        if len(self._open) > _MAX_OPEN:
            self._crowd_out(next(iter(self._open)))

    def _crowd_out(self, key: tuple[int, int]) -> None:
        dying = key in self._dying
        request = self._take(*key)
        if dying and request is not None:
            self._ended.append(request)
        else:
            self.forgotten += 1

    def _unlink(self, cookie: int, seq: int) -> None:
        left = self._by_connection.get(cookie)
        if left is not None:
            left.discard(seq)
            if not left:
                del self._by_connection[cookie]

    def _take(self, cookie: int, seq: int) -> Request | None:
        request = self._open.pop((cookie, seq), None)
        self._dying.pop((cookie, seq), None)
        self._unlink(cookie, seq)
        return request

    def _head(self, ts_ns: int, mark: dict[str, Any]) -> None:
        request = self._open.get((mark["cookie"], mark["seq"]))
        if request is not None:
            request.head_ns, request.status = ts_ns, mark["aux"]
            request.end_tid = mark["tid"]

    def _end(self, ts_ns: int, mark: dict[str, Any]) -> None:
        key = mark["cookie"], mark["seq"]
        request = self._open.get(key)
        if request is None:
            return
        request.status = mark["aux"]
        request.first_ns = mark["first_body_ns"]
        request.chunks, request.response_bytes = mark["chunks"], mark["response_bytes"]
        if mark["flags"] & _CUT:
            return  # the connection's end follows
        dying = key in self._dying
        self._take(*key)
        self._ended.append(request)
        request.left_ns = self._left.get(mark["cookie"]) or 0
        if dying and mark["flags"] & _BY_CLOSE:
            return  # closed by its death
        request.end_ns, request.end_tid = ts_ns, mark["tid"]
        request.outcome = "error" if request.status >= _FAILED_STATUS else "ok"
        request.ended_by, request.exit_code = "server", 0

    def _state(self, ts_ns: int, mark: dict[str, Any]) -> None:
        cookie = mark["cookie"]
        left_ns = self._left.get(cookie)
        if connection.client_left(mark):
            self._left.put(cookie, ts_ns)
        by = connection.ended_by(mark, left_ns is not None)
        if by:
            # Before the last byte of the response: by whichever side, the client did not get it.
            self._close_all(ts_ns, cookie, "reset", by)

    def _close_all(self, ts_ns: int, cookie: int, outcome: str, by: str) -> None:
        for seq in sorted(self._by_connection.get(cookie, ())):
            dying = (cookie, seq) in self._dying
            request = self._take(cookie, seq)
            if request is None:
                continue
            if not dying:
                request.end_ns, request.outcome, request.ended_by = max(ts_ns, request.start_ns), outcome, by
            request.left_ns = self._left.get(cookie) or 0
            request.end_tid = request.end_tid or request.start_tid
            self._ended.append(request)

    def _exit(self, ts_ns: int, mark: dict[str, Any]) -> None:
        if mark["aux"] != 1:
            return
        self._exits.put(mark["tgid"], (ts_ns, mark["exit_code"]))
        for request in [r for r in self._open.values() if r.tgid == mark["tgid"]]:
            self._kill(request, ts_ns, mark["exit_code"])

    def _kill(self, request: Request, ts_ns: int, exit_code: int) -> None:
        request.end_ns, request.outcome = max(ts_ns, request.start_ns), "killed"
        request.ended_by, request.exit_code = "process_exit", exit_code
        request.end_tid = request.end_tid or request.start_tid
        self._dying[request.cookie, request.seq] = request

    def _bury(self, now_ns: int) -> None:
        # Another process may hold the connection open: its end is not to be waited for.
        for key, request in list(self._dying.items()):
            if now_ns - request.end_ns >= _GRACE_NS:
                self._take(*key)
                self._ended.append(request)
