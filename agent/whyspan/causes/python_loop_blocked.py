"""``python.loop_blocked``: synchronous work kept the event loop from serving anybody."""

from __future__ import annotations

from whyspan import syscalls
from whyspan.causes.context import MS, Context
from whyspan.causes.goes import LONG_GO_NS
from whyspan.causes.rule import Claim
from whyspan.critical_path import Path, PathSegment
from whyspan.model import Culprit
from whyspan.timeline import BLOCKED, RUNNING


class _LoopBlocked:
    id = "python.loop_blocked"
    title = "behind synchronous work on the event loop"
    neighbours = ("python.frontend_saturated", "python.gil", "python.gc", "python.pool_exhausted")
    fix = (
        "Try moving that work off the loop (asyncio.to_thread, an executor, a process pool), "
        "or making it shorter (orjson, smaller inputs)."
    )
    rank = 50
    states = frozenset({RUNNING, BLOCKED})

    def match(self, segment: PathSegment, ctx: Context) -> Claim | None:
        """Claim the part of a loop thread's time that lies in a go of 50 ms or more."""
        if segment.state not in (RUNNING, BLOCKED):
            return None
        for go in ctx.goes(segment.tid):
            lo, hi = max(go.start_ns, segment.start_ns), min(go.end_ns, segment.end_ns)
            if lo < hi:
                break
        else:
            return None
        thread = ctx.thread_label(segment.tid, segment.tgid)
        nr = segment.wait.syscall_nr if segment.wait is not None else syscalls.NOT_APPLICABLE
        how = f"blocked in {syscalls.name(nr) or 'the kernel'}" if segment.state == BLOCKED else "on-CPU"
        return Claim(
            self.id,
            f"loop thread {how}, {go.busy_ns / MS:.0f} ms in one go",
            Culprit(kind="thread", name=thread, tgid=segment.tgid, tid=segment.tid),
            start_ns=lo,
            end_ns=hi,
        )

    def rule_out(self, path: Path, ctx: Context) -> str:
        """Return how long the loop's goes were, and how much of them lies on the path."""
        limit = LONG_GO_NS // MS
        goes = [g for tid in sorted({s.tid for s in path.segments}) for g in ctx.goes(tid)]
        if not goes:
            return f"no go of {limit} ms or more on an event-loop thread of the path"
        longest = max(g.busy_ns for g in goes) / MS
        share = 0
        for s in path.segments:
            claim = self.match(s, ctx)
            share += claim.end_ns - claim.start_ns if claim is not None else 0
        return f"longest go of the loop {longest:.0f} ms, of which {share / MS:.1f} ms on the path"


RULE = _LoopBlocked()
