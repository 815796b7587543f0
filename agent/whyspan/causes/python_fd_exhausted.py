"""``python.fd_exhausted``: no descriptor was left for the next connection or file."""

from __future__ import annotations

from typing import Final

import numpy as np
from whyspan_probes.schema import Events

from whyspan import syscalls
from whyspan.causes.context import MS, Context
from whyspan.causes.during import During, Stretches, tidy
from whyspan.causes.rule import Claim
from whyspan.causes.work import by_timer
from whyspan.critical_path import Path, PathSegment
from whyspan.model import Culprit
from whyspan.timeline import UNKNOWN_STATE

#: A server that could not accept tries again after a while: asyncio and tornado after a second.
#: Source: asyncio.constants.ACCEPT_RETRY_DELAY.
AGAIN_NS: Final = 1_500_000_000
MIN_NS: Final = 1_000_000
#: A nap that begins so soon after a refusal is one before the next try.
_SOON_NS: Final = 2_000_000
_ACCEPT: Final = (43, 288)
_NAP: Final = (35, 230)
_SERVER_ERROR: Final = 500
_ENFILE: Final = 23


class _FdExhausted:
    id = "python.fd_exhausted"
    title = "without a descriptor left for the connection or a file"
    neighbours = ("python.pool_exhausted", "net.accept_overflow", "net.connection_setup")
    fix = (
        "Try a higher limit (ulimit -n, LimitNOFILE=), and look for what is not closed: connections without a "
        "keep-alive time-out, a client made per request, files."
    )
    rank = 38

    def waits(self, ctx: Context) -> Stretches:
        """Return the intervals in which a refused descriptor held the request up."""
        return ctx.memo(self.id, lambda: tidy(_waits(ctx)))

    def applies(self, ctx: Context) -> bool:
        """Return whether a process of the service was refused a descriptor beside the request, and that mattered."""
        return len(ctx.timelines.select("descriptor_refused")) > 0 and bool(self.waits(ctx))

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim what the path has of such an interval: the server rests although there is something to do."""
        if segment.state == UNKNOWN_STATE:
            return None
        d = self.waits(ctx).first(segment.start_ns, segment.end_ns)
        if d is None:
            return None
        lo, hi = max(d.start_ns, segment.start_ns), min(d.end_ns, segment.end_ns)
        return Claim(self.id, d.detail, d.culprit, d.inferred, start_ns=lo, end_ns=hi)

    def ended(self, ctx: Context) -> Claim | None:
        """Claim a failure of the server's doing in which a thread of the service found no descriptor left."""
        r = ctx.request
        if r.outcome == "error" and r.status < _SERVER_ERROR:
            return None
        if r.ended_by not in ("server", "server_close", "server_reset"):
            return None
        rows = _refused(ctx)
        rows = rows[(rows["ts_ns"] >= np.uint64(r.start_ns)) & (rows["ts_ns"] <= np.uint64(r.end_ns))]
        if not len(rows):
            return None
        return Claim(self.id, _said(rows, ctx), _culprit(rows, ctx))

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return how often a descriptor was refused beside the request."""
        rows = _refused(ctx)
        if not len(rows):
            return "no call of the service failed for lack of a descriptor"
        return f"{_said(rows, ctx)}, but nothing of it held this request up"


def _refused(ctx: Context) -> Events:
    def find() -> Events:
        rows = ctx.timelines.select("descriptor_refused")
        return rows[np.isin(rows["tgid"], list(ctx.service_tgids))] if len(rows) else rows

    return ctx.memo("descriptors refused", find)


def _waits(ctx: Context) -> list[During]:
    rows = _refused(ctx)
    if not len(rows):
        return []
    found = []
    r = ctx.request
    accepts = rows[np.isin(rows["syscall_nr"], _ACCEPT) & (rows["tgid"] == r.tgid)]
    accepts = accepts[accepts["ts_ns"] <= np.uint64(r.recv_ns)]
    # Only the first request of a connection waits to be accepted.
    if len(accepts) and not r.seq and r.recv_ns - r.start_ns >= MIN_NS:
        last = int(accepts["ts_ns"][-1])
        if last >= r.start_ns or r.start_ns - last <= AGAIN_NS:
            during = r.start_ns, r.recv_ns
            text = f"was not accepted for {(during[1] - during[0]) / MS:.0f} ms: {_said(accepts, ctx)}"
            found.append(During(*during, text, _culprit(accepts, ctx), inferred=last < r.start_ns))
    for tid, ts, tgid in zip(*(rows[n].tolist() for n in ("tid", "ts_ns", "tgid")), strict=True):
        # A thread that waits before it tries again.
        if tgid != r.tgid or not r.start_ns <= ts < r.end_ns:
            continue
        thread = ctx.timelines.thread(tid)
        slept = thread.next_block(ts)
        if slept is None or slept - ts > _SOON_NS:
            continue
        wait = thread.wait(thread.before(slept + 1).at)
        if wait.syscall_nr in _NAP and by_timer(wait) and tid in {r.start_tid, r.end_tid}:
            found.append(
                During(slept, wait.end_ns, f"waited to try again: {_said(rows, ctx)}", _culprit(rows, ctx))
            )
    return found


def _said(rows: Events, ctx: Context) -> str:
    times = int(rows["times"].sum())
    calls = sorted({syscalls.name(nr) for nr in rows["syscall_nr"].tolist()})
    who = ctx.process_label(int(rows["tgid"][-1]))
    lacks = "the host has" if int(rows["aux"][-1]) == _ENFILE else f"{who} has"
    return (
        f"{', '.join(calls)} failed {times} time{'s' if times > 1 else ''}, since {lacks} no descriptor left"
    )


def _culprit(rows: Events, ctx: Context) -> Culprit:
    tgid = int(rows["tgid"][-1])
    limit = int(rows["limit"][-1])
    fact = ctx.facts.descriptors(tgid)
    if int(rows["aux"][-1]) == _ENFILE:
        text = "the host's limit (fs.file-max) is reached"
    else:
        text = f"limit of {limit} descriptors (RLIMIT_NOFILE)"
    if fact is not None:
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(fact.kinds.items(), key=lambda kv: -kv[1]))
        text += f", {fact.open} open: {kinds}"
    return Culprit(kind="process", name=ctx.process_label(tgid), tgid=tgid, detail=text)


RULE = _FdExhausted()
