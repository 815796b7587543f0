"""``net.delivery``: finished output waited because the client's side did not take it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

import numpy as np

from whyspan.causes.context import MS, Context
from whyspan.causes.during import During, tidy
from whyspan.causes.rule import Claim
from whyspan.critical_path import NET_RX, Path, PathSegment
from whyspan.model import Culprit
from whyspan.timeline import BLOCKED, SOFTIRQ, TASK, Wait

#: Shorter waits for room in the socket are ordinary.
MIN_NS: Final = 1_000_000
_TOUCHES: Final = ("sock_recv", "sock_send", "edge_read")


class _Delivery:
    id = "net.delivery"
    title = "with output ready that the client did not take"
    neighbours = ("python.frontend_saturated", "net.transport", "client.artifact")
    fix = (
        "Try turning off response buffering in proxies, a larger socket buffer, and a time-out for slow readers; "
        "look at the client: it reads slower than the engine writes."
    )
    rank = 45

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim a wait of a serving thread that the network ended and after which it wrote on, having read nothing.

        Where the engine's marks tell since when the output had been there, all that time, whatever the thread did for
        others meanwhile.
        """
        r, wait = ctx.request, segment.wait
        if not r.head_ns or segment.end_ns <= r.head_ns:
            return None
        stretches = ctx.memo(self.id, lambda: tidy(self._held(ctx)))
        if not stretches and segment.state != BLOCKED:
            return None
        who = Culprit(kind="peer", name=f"client at port {r.client_port}" if r.client_port else "client")
        held = stretches.first(segment.start_ns, segment.end_ns)
        if held is not None:
            text = f"waited {(held.end_ns - held.start_ns) / MS:.0f} ms for room in the socket"
            lo, hi = max(held.start_ns, segment.start_ns), min(held.end_ns, segment.end_ns)
            return Claim(self.id, text, who, start_ns=lo, end_ns=hi)
        if (
            segment.state != BLOCKED
            or wait is None
            or segment.whole_ns < MIN_NS
            or not ctx.serves(segment.tid)
        ):
            return None
        if not self._for_room(wait, segment.tid, ctx):
            return None
        return Claim(self.id, f"waited {segment.whole_ns / MS:.0f} ms for room in the socket", who)

    def _held(self, ctx: Context) -> Iterable[During]:
        """Yield from when output was in the front end, or from the write before, to the write that waited for room."""
        job, r = ctx.engine.job if ctx.engine is not None else None, ctx.request
        if job is None or not job.outputs or not r.cookie:
            return
        ready = [end for _, end in job.outputs]
        rows = ctx.timelines.keyed("sock_send", "key", r.cookie)
        before = 0
        for at, tid, tgid in zip(*(rows[n].tolist() for n in ("ts_ns", "tid", "tgid")), strict=True):
            if tgid != r.tgid or not r.head_ns < at <= r.end_ns:
                continue
            k = bisect_left(ready, at) - 1
            since = max(before, ready[k] if k >= 0 else at)
            before = at
            if at - since < MIN_NS:
                continue
            thread = ctx.timelines.thread(tid)
            interval = thread.before(thread.awake_since(at))
            if interval.state == BLOCKED and self._for_room(thread.wait(interval.at), tid, ctx):
                yield During(since, at)

    def _for_room(self, wait: Wait, tid: int, ctx: Context) -> bool:
        outside = wait.context == TASK and wait.waker_tgid not in ctx.service_tgids
        if not (wait.context == SOFTIRQ and wait.softirq_vec == NET_RX) and not outside:
            return False
        return self._wrote_next(tid, wait.end_ns, ctx)

    @staticmethod
    def _wrote_next(tid: int, after_ns: int, ctx: Context) -> bool:
        """Whether the next thing the thread did with any channel was to write on the request's connection."""
        rows = ctx.timelines.rows(tid)
        kinds = np.array([ctx.timelines.schema.kind(n) for n in _TOUCHES])
        i = int(rows["ts_ns"].searchsorted(np.uint64(max(after_ns, 0)), "right"))
        for row in rows[i : i + 64]:
            if int(row["kind"]) in kinds:
                if int(row["kind"]) != int(kinds[1]):
                    return False
                sent = ctx.timelines.rows_of(tid, "sock_send")
                k = int(sent["ts_ns"].searchsorted(row["ts_ns"], "left"))
                return k < len(sent) and int(sent["key"][k]) == ctx.request.cookie
        return False

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return how long the response waited for room in its socket."""
        claims = [(s, c) for s in path.segments if (c := self.match(s, ctx)) is not None]
        total = sum((c.end_ns or s.end_ns) - (c.start_ns or s.start_ns) for s, c in claims) / MS
        return (
            f"the response waited {total:.1f} ms for room in its socket"
            if total
            else ("no write of the response waited for room in its socket")
        )


RULE = _Delivery()
