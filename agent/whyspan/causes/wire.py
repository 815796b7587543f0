"""Which connection a thread waited for, and what the rules about connections share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, Final, NamedTuple

import numpy as np
from whyspan_probes.schema import Events

from whyspan.causes.context import MS, Context
from whyspan.causes.during import During, Stretches, tidy
from whyspan.causes.rule import Claim
from whyspan.causes.work import by_timer
from whyspan.critical_path import NET_RX, Path, PathSegment
from whyspan.model import Culprit
from whyspan.syscalls import POLL
from whyspan.timeline import BLOCKED, SOFTIRQ, TASK, Wait

#: Positions in a stream are TCP's sequence numbers: they wrap.
SEQ_MASK: Final = 0xFFFFFFFF
_INET: Final = (2, 10)  # aux of sock_send and sock_recv
_MAX_ASKED: Final = 64


class Touch(NamedTuple):
    """What a thread did with a connection. ``recv``: it received, else it sent."""

    ts_ns: int
    cookie: int
    lport: int
    rport: int
    recv: bool


def by_network(wait: Wait, ctx: Context) -> bool:
    """Return whether something that came in over the network ended a wait, from this host or another."""
    if wait.context == SOFTIRQ:
        return wait.softirq_vec == NET_RX
    return wait.context == TASK and wait.waker_tgid not in ctx.service_tgids


def rests(segment: PathSegment, ctx: Context) -> bool:
    """Return whether an event loop was at rest: what ends that may be for another request, or a timer of its own."""
    wait = segment.wait
    if wait is None or wait.syscall_nr not in POLL or not (by_timer(wait) or by_network(wait, ctx)):
        return False
    return ctx.loops(segment.tid)


def awaited(segment: PathSegment, ctx: Context) -> Touch | None:
    """Return what a thread did with a connection when a wait was over and before the next one; None: nothing.

    That is what it had waited for: whoever waits for room sends then, whoever waits for an answer receives.
    """
    wait = segment.wait
    if wait is None:
        return None
    key = ("awaited", segment.tid, wait.end_ns)
    return ctx.memo(key, lambda: _next_touch(segment.tid, wait.end_ns, ctx))


def _next_touch(tid: int, after_ns: int, ctx: Context) -> Touch | None:
    until = ctx.timelines.thread(tid).next_block(after_ns) or 1 << 63
    found = [
        t for recv in (True, False) if (t := _touch_at(tid, max(after_ns, 0), recv, ctx)) and t.ts_ns <= until
    ]
    read = ctx.timelines.rows_of(tid, "edge_read")["ts_ns"]
    i = int(read.searchsorted(np.uint64(max(after_ns, 0)), "left"))
    first = min(found, default=None)
    return None if first is None or (i < len(read) and int(read[i]) < first.ts_ns) else first


def _touch_at(tid: int, after_ns: int, recv: bool, ctx: Context) -> Touch | None:
    rows = ctx.timelines.rows_of(tid, "sock_recv" if recv else "sock_send")
    i = int(rows["ts_ns"].searchsorted(np.uint64(after_ns), "left"))
    if i >= len(rows) or int(rows["aux"][i]) not in _INET:
        return None
    row = rows[i]
    return Touch(int(row["ts_ns"]), int(row["key"]), int(row["lport"]), int(row["rport"]), recv)


def asked(ctx: Context) -> list[tuple[int, int, int]]:
    """Return when an event loop waited for answers on this request's behalf, as (from, to, cookie of the connection).

    A loop that reads a request and asks somebody before it rests does so for that request; and so on from the answer.
    """
    r = ctx.request
    if not r.recv_ns or not ctx.loops(r.start_tid):
        return []

    def follow() -> list[tuple[int, int, int]]:
        found: list[tuple[int, int, int]] = []
        thread, at = ctx.timelines.thread(r.start_tid), r.recv_ns
        sent = ctx.timelines.rows_of(r.start_tid, "sock_send")
        sent = sent[(sent["lport"] != r.server_port) & np.isin(sent["aux"], _INET)] if len(sent) else sent
        while len(found) < _MAX_ASKED and at < r.end_ns:
            until = thread.next_block(at) or r.end_ns
            ts = sent["ts_ns"]
            i = int(ts.searchsorted(np.uint64(until), "right")) - 1
            if i < 0 or int(ts[i]) < at:
                break
            cookie = int(sent["key"][i])
            got = ctx.timelines.keyed("sock_recv", "key", cookie)["ts_ns"]
            k = int(got.searchsorted(ts[i], "right"))
            end = min(int(got[k]), r.end_ns) if k < len(got) else r.end_ns
            found.append((int(ts[i]), end, cookie))
            at = end
        return found

    return ctx.memo("asked", follow)


def others(touch: Touch, ctx: Context) -> bool:
    """Return whether it is another client's connection: what holds that up does not hold up this request."""
    return touch.lport == ctx.request.server_port and touch.cookie != ctx.request.cookie


def received_before(cookie: int, before_ns: int, ctx: Context) -> bool:
    """Return whether the last thing done with a connection before a moment was to receive: a message was under way."""
    last = {}
    for name in ("sock_recv", "sock_send"):
        rows = ctx.timelines.keyed(name, "key", cookie)
        i = int(rows["ts_ns"].searchsorted(np.uint64(max(before_ns, 0)), "right")) - 1
        last[name] = int(rows["ts_ns"][i]) if i >= 0 else -1
    return last["sock_recv"] > last["sock_send"]


def sent_ns(cookie: int, seq: int, before_ns: int, ctx: Context) -> int:
    """Return when the byte at a position in a connection's stream was given to TCP; 0 when that is not seen."""
    rows = ctx.timelines.keyed("sock_send", "key", cookie)
    for ts, offset, size in zip(
        rows["ts_ns"].tolist(), rows["offset"].tolist(), rows["bytes"].tolist(), strict=True
    ):
        if ts > before_ns:
            break
        if (seq - offset) & SEQ_MASK < size:
            return int(ts)
    return 0


def peer(cookie: int, rport: int, ctx: Context, detail: str = "", local: bool = False) -> Culprit:
    """Return the other end of a connection as the culprit: its port, never its address."""
    where = " on this host" if local else ""
    who = "client" if cookie and cookie == ctx.request.cookie else "peer"
    return Culprit(kind="peer", name=f"{who} at port {rport}{where}", detail=detail)


def overlap_ms(path: Path, found: Iterable[During]) -> float:
    """Return how much of a request intervals cover, in ms."""
    return sum(max(min(d.end_ns, path.end_ns) - max(d.start_ns, path.start_ns), 0) for d in found) / MS


class ConnectionRule:
    """Base of the rules that claim waits for a connection by stretches in which it was held up.

    A subclass has ``id``, ``title``, ``neighbours``, ``fix``, ``rank``, ``events``, ``nothing`` and ``find``.
    """

    id: ClassVar[str]
    title: ClassVar[str]
    neighbours: ClassVar[tuple[str, ...]]
    fix: ClassVar[str]
    rank: ClassVar[int]
    events: ClassVar[tuple[str, ...]]
    nothing: ClassVar[str]
    states: ClassVar[frozenset[str]] = frozenset({BLOCKED})

    def find(self, ctx: Context) -> Mapping[int, Iterable[During]]:
        """Return, by the connection's cookie, when it was held up."""
        raise NotImplementedError

    def found(self, ctx: Context) -> Mapping[int, Stretches]:
        """Return the same, in order and without overlap."""
        return ctx.memo(self.id, lambda: {cookie: tidy(d) for cookie, d in self.find(ctx).items()})

    def applies(self, ctx: Context) -> bool:
        """Return whether any of its events were seen beside the request."""
        return any(len(ctx.timelines.select(name)) for name in self.events) and bool(self.found(ctx))

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim the part of a wait for a connection that lies in one of its stretches."""
        wait = segment.wait
        if segment.state != BLOCKED or wait is None:
            return None
        touch = awaited(segment, ctx) if by_network(wait, ctx) else None
        direct = self.found(ctx).get(touch.cookie) if touch is not None and not others(touch, ctx) else None
        d = direct.first(segment.start_ns, segment.end_ns) if direct else None
        if d is None:
            d = self._asked(ctx).first(segment.start_ns, segment.end_ns)
        if d is None:
            return None
        lo, hi = max(d.start_ns, segment.start_ns), min(d.end_ns, segment.end_ns)
        return Claim(self.id, d.detail, d.culprit, d.inferred, start_ns=lo, end_ns=hi)

    def _asked(self, ctx: Context) -> Stretches:
        """Return the stretches in which a loop waited for this request's answers, wherever the path is meanwhile: what
        wakes a loop then is mostly for others.
        """

        def look() -> Stretches:
            return tidy(
                d._replace(start_ns=max(d.start_ns, since), end_ns=min(d.end_ns, until), inferred=True)
                for since, until, cookie in asked(ctx)
                for d in self.found(ctx).get(cookie, ())
                if d.end_ns > since and d.start_ns < until
            )

        return ctx.memo((self.id, "asked"), look)

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return what was looked for, and how much of it there was on connections that nobody waited for."""
        if not self.applies(ctx):
            return self.nothing
        total = sum(overlap_ms(path, found) for found in self.found(ctx).values())
        if not total:
            return self.nothing
        return f"{total:.1f} ms of it beside the request, on connections that it did not wait for"


def by_connection(rows: Events) -> dict[int, Events]:
    """Return rows by their cookie, each in order."""
    return {int(c): rows[rows["cookie"] == c] for c in np.unique(rows["cookie"])} if len(rows) else {}
